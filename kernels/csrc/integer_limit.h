/* The peak rate of the products behind int16 activations, to hold the tile kernels against. */
#pragma once
#include "pool.h"
#include "rows_avx512.h"

#define INTEGER_CHAINS 12 /* independent sums: more than latency times rate of any multiply unit we know */

static void integer_task(void *arg, int chunk) {
    int32_t *sums = arg;
#if defined(__AVX512VNNI__)
    __m512i acc[INTEGER_CHAINS], factor = _mm512_set1_epi16((short)(chunk + 1));
    for (int k = 0; k < INTEGER_CHAINS; k++) acc[k] = _mm512_set1_epi32(k);
    for (int i = 0; i < INTEGER_STEPS; i++)
        for (int k = 0; k < INTEGER_CHAINS; k++) add_products(&acc[k], factor, factor);
    for (int k = 1; k < INTEGER_CHAINS; k++) acc[0] = _mm512_add_epi32(acc[0], acc[k]);
    sums[chunk] = _mm512_reduce_add_epi32(acc[0]);
#else
    int16_t values[GROUP] = {(int16_t)chunk};
    i32lanes acc = no_lanes();
    for (int i = 0; i < INTEGER_STEPS * INTEGER_CHAINS / 2; i++) {
        const i16x64 factor = load64(values);
        __asm__("" : "+m"(values));
        acc += dot64(factor, values);
    }
    memcpy(&sums[chunk], &acc, 4);
#endif
}

/* Returns the multiply-adds done; 32 a step and chain, as in one vpdpwssd. */
static double integer_multiply_add(int32_t *sums, int num_tasks) {
    pool_run(integer_task, sums, num_tasks);
    return 32.0 * num_tasks * INTEGER_STEPS * INTEGER_CHAINS;
}
