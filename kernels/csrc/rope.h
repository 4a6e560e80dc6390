/* Rotations of pairs; same bits as glm_gpu.kernels.rope. */
#pragma once
#include "dispatch.h"
#include "pool.h"
#include "vec.h"

/* Members of pair j stand at j * step and j * step + distance. */
INLINE void rotate(const float *x, const float *cos, const float *sin, float *out, int half, int step, int distance) {
    for (int j = 0; j < half; j++) {
        float first = x[j * step], second = x[j * step + distance];
        out[j * step] = first * cos[j] - second * sin[j];
        out[j * step + distance] = second * cos[j] + first * sin[j];
    }
}

static void rope_task(void *job, int token) {
    const struct rope *a = job;
    int half = a->width / 2;
    const float *cos = a->cos + (ptrdiff_t)token * half, *sin = a->sin + (ptrdiff_t)token * half;
    for (int vector = 0; vector < a->num_vectors; vector++) {
        ptrdiff_t start = ((ptrdiff_t)token * a->num_vectors + vector) * a->width;
        if (a->is_interleaved) rotate(a->x + start, cos, sin, a->out + start, half, 2, 1);
        else rotate(a->x + start, cos, sin, a->out + start, half, 1, half);
    }
}

static void rope(const struct rope *a) { pool_run(rope_task, (void *)a, a->num_tokens); }
