/* The peak rate of the products behind int16 activations, to hold the tile kernels against. */
#pragma once
#include "pool.h"
#include "rows_amx.h"
#include "rows_avx512.h"

#define INTEGER_CHAINS 12 /* independent sums: more than latency times rate of any multiply unit we know */

#if defined(__AMX_INT8__)
/* Tile products of int8 digits; an int16 activation has two. */
#define MULTIPLY_ADDS (16 * 16 * 64 / 2 * 4)
#define STEPS (INTEGER_STEPS * INTEGER_CHAINS / 64)

static void integer_task(void *arg, int chunk) {
    int32_t *sums = arg;
    _Alignas(64) int32_t tile[16][16] = {{chunk}};
    configure_tiles();
    __asm__ volatile("tileloadd (%0,%1), %%tmm4\n\ttileloadd (%0,%1), %%tmm6"
                     :
                     : "r"(tile), "r"((size_t)64)
                     : "memory");
    __asm__ volatile("tilezero %tmm0\n\ttilezero %tmm1\n\ttilezero %tmm2\n\ttilezero %tmm3");
    for (int i = 0; i < STEPS; i++)
        __asm__ volatile("tdpbssd %tmm6, %tmm4, %tmm0\n\ttdpbusd %tmm6, %tmm4, %tmm1\n\t"
                         "tdpbssd %tmm6, %tmm4, %tmm2\n\ttdpbusd %tmm6, %tmm4, %tmm3");
    __asm__ volatile("tilestored %%tmm0, (%0,%1)" : : "r"(tile), "r"((size_t)64) : "memory");
    release_tiles();
    sums[chunk] = tile[0][0];
}
#elif defined(__AVX512VNNI__)
#define MULTIPLY_ADDS (32 * INTEGER_CHAINS)
#define STEPS INTEGER_STEPS

static void integer_task(void *arg, int chunk) {
    int32_t *sums = arg;
    __m512i acc[INTEGER_CHAINS], factor = _mm512_set1_epi16((short)(chunk + 1));
#pragma GCC unroll 12
    for (int k = 0; k < INTEGER_CHAINS; k++) acc[k] = _mm512_set1_epi32(k);
    for (int i = 0; i < STEPS; i++) {
#pragma GCC unroll 12
        for (int k = 0; k < INTEGER_CHAINS; k++) add_products(&acc[k], factor, factor);
    }
#pragma GCC unroll 12
    for (int k = 1; k < INTEGER_CHAINS; k++) acc[0] = _mm512_add_epi32(acc[0], acc[k]);
    sums[chunk] = _mm512_reduce_add_epi32(acc[0]);
}
#elif defined(__AVX2__)
#define MULTIPLY_ADDS (16 * INTEGER_CHAINS)
#define STEPS INTEGER_STEPS

static void integer_task(void *arg, int chunk) {
    int32_t *sums = arg;
    __m256i acc[INTEGER_CHAINS], factor = _mm256_set1_epi16((short)(chunk + 1));
#pragma GCC unroll 12
    for (int k = 0; k < INTEGER_CHAINS; k++) acc[k] = _mm256_set1_epi32(k);
    for (int i = 0; i < STEPS; i++) {
#pragma GCC unroll 12
        for (int k = 0; k < INTEGER_CHAINS; k++) {
            __m256i product;
            /* volatile, or one product would serve all */
            __asm__ volatile("vpmaddwd %1, %1, %0" : "=x"(product) : "x"(factor));
            __asm__("vpaddd %1, %0, %0" : "+x"(acc[k]) : "x"(product));
        }
    }
    int32_t lanes[8];
#pragma GCC unroll 12
    for (int k = 1; k < INTEGER_CHAINS; k++) acc[0] = _mm256_add_epi32(acc[0], acc[k]);
    memcpy(lanes, &acc[0], sizeof lanes);
    sums[chunk] = lanes[0];
}
#else
#define MULTIPLY_ADDS (32 * INTEGER_CHAINS)
#define STEPS INTEGER_STEPS

static void integer_task(void *arg, int chunk) {
    int32_t *sums = arg;
    int16_t values[GROUP] = {(int16_t)chunk};
    i32lanes acc = no_lanes();
    for (int i = 0; i < STEPS * INTEGER_CHAINS / 2; i++) {
        const i16x64 factor = load64(values);
        __asm__("" : "+m"(values));
        acc += dot64(factor, values);
    }
    memcpy(&sums[chunk], &acc, 4);
}
#endif

/* Returns the multiply-adds done. */
static double integer_multiply_add(int32_t *sums, int num_tasks) {
    pool_run(integer_task, sums, num_tasks);
    return (double)MULTIPLY_ADDS * STEPS * num_tasks;
}
