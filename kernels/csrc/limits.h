/* What this machine can do at best, to hold the kernels against: reading memory, and rounding f32 products and sums. */
#pragma once
#include "dispatch.h"
#include "pool.h"
#include "vec.h"

#define READ_BYTES (1 << 20) /* of a task */

typedef uint32_t u32part __attribute__((vector_size(VEC_BYTES)));

struct read_pass {
    const char *data;
    uint32_t *sums; /* one a task: work that nobody uses would be left out by the compiler */
};

static void read_task(void *job, int chunk) {
    const struct read_pass *a = job;
    const char *p = a->data + (ptrdiff_t)chunk * READ_BYTES;
    u32part sum[4] = {{0}};
    for (int i = 0; i < READ_BYTES; i += 4 * VEC_BYTES)
        for (int k = 0; k < 4; k++) {
            u32part v;
            memcpy(&v, p + i + k * VEC_BYTES, VEC_BYTES);
            sum[k] ^= v;
        }
    sum[0] ^= sum[1] ^ sum[2] ^ sum[3];
    a->sums[chunk] = sum[0][0];
}

static void read_all(const void *data, uint32_t *sums, int num_tasks) {
    struct read_pass a = {data, sums};
    pool_run(read_task, &a, num_tasks);
}

/* 12 registers, so that neither the multiplier nor the adder waits for a result. */
#define CHAINS 12

static void multiply_add_task(void *job, int chunk) {
    float *sums = job;
    f32part factor = (f32part){0} + 0.999f, term = (f32part){0} + (float)(chunk + 1), acc[CHAINS];
    for (int k = 0; k < CHAINS; k++) acc[k] = (f32part){0} + (float)k;
    for (int i = 0; i < MULTIPLY_ADD_STEPS; i++)
        for (int k = 0; k < CHAINS; k++) acc[k] = acc[k] * factor + term;
    for (int k = 1; k < CHAINS; k++) acc[0] += acc[k];
    sums[chunk] = acc[0][0];
}

/* Returns the f32 operations done: a multiplication and an addition of every lane are two. */
static double multiply_add(float *sums, int num_tasks) {
    pool_run(multiply_add_task, sums, num_tasks);
    return 2.0 * num_tasks * MULTIPLY_ADD_STEPS * CHAINS * (VEC_BYTES / 4);
}
