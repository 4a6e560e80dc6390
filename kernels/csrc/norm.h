/* RMSNorm, LayerNorm, and SiLU; same bits as glm_gpu.kernels.norm and .activation. */
#pragma once
#include <math.h>

#include "dispatch.h"
#include "pool.h"
#include "vec_exp.h"

#define SILU_VALUES 4096 /* values of a task: 10 us of work */

typedef double f64part __attribute__((vector_size(VEC_BYTES)));
typedef float f32half __attribute__((vector_size(VEC_BYTES / 2)));
#define F64_LANES (VEC_BYTES / 8)
#define F64_PARTS (16 / F64_LANES)

typedef struct { f64part part[F64_PARTS]; } f64x16;

/* n values of a row, 1 <= n <= 16, zeros beyond them. */
INLINE f64x16 widen16(const float *p, int n) {
    float padded[16] = {0};
    if (n < 16) memcpy(padded, p, (size_t)n * 4), p = padded;
    f64x16 r;
    for (int i = 0; i < F64_PARTS; i++) {
        f32half half;
        memcpy(&half, p + i * F64_LANES, sizeof half);
        r.part[i] = __builtin_convertvector(half, f64part);
    }
    return r;
}

INLINE void narrow16(float *p, f64x16 v) {
    for (int i = 0; i < F64_PARTS; i++) {
        f32half half = __builtin_convertvector(v.part[i], f32half);
        memcpy(p + i * F64_LANES, &half, sizeof half);
    }
}

INLINE double fold_f64(f64x16 v) {
    double lanes[16];
    memcpy(lanes, &v, sizeof lanes);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

/* Values of a row less its mean; beyond the row 0, so that they add nothing to the variance. */
INLINE f64x16 centred16(const float *p, int n, double mean) {
    f64x16 v = widen16(p, n);
    for (int i = 0; i < F64_PARTS; i++) v.part[i] -= mean;
    if (n < 16) {
        double lanes[16];
        memcpy(lanes, &v, sizeof lanes);
        for (int i = n; i < 16; i++) lanes[i] = 0.0;
        memcpy(&v, lanes, sizeof lanes);
    }
    return v;
}

static void norm_task(void *job, int token) {
    const struct norm *a = job;
    const float *x = a->x + (ptrdiff_t)token * a->width;
    float *out = a->out + (ptrdiff_t)token * a->width;
    double mean = 0.0;
    if (a->bias) {
        f64x16 sum = {{{0}}};
        for (int k = 0; k < a->width; k += 16) {
            f64x16 v = widen16(x + k, a->width - k < 16 ? a->width - k : 16);
            for (int i = 0; i < F64_PARTS; i++) sum.part[i] += v.part[i];
        }
        mean = fold_f64(sum) / a->width;
    }
    f64x16 squares = {{{0}}};
    for (int k = 0; k < a->width; k += 16) {
        f64x16 v = centred16(x + k, a->width - k < 16 ? a->width - k : 16, mean);
        for (int i = 0; i < F64_PARTS; i++) squares.part[i] += v.part[i] * v.part[i];
    }
    double r = 1.0 / sqrt(fold_f64(squares) / a->width + a->eps);
    for (int k = 0; k < a->width; k += 16) {
        int n = a->width - k < 16 ? a->width - k : 16;
        f64x16 v = centred16(x + k, n, mean);
        for (int i = 0; i < F64_PARTS; i++) v.part[i] *= r;
        float normed[16];
        narrow16(normed, v);
        f32x16 y = mul16(load16(normed), load16_head(a->weight + k, n));
        if (a->bias) y = add16(y, load16_head(a->bias + k, n));
        store16_head(out + k, y, n);
    }
}

static void norm(const struct norm *a) { pool_run(norm_task, (void *)a, a->num_tokens); }

struct silu_pass {
    const float *gate, *up;
    float *out;
    ptrdiff_t size;
};

static void silu_task(void *job, int chunk) {
    const struct silu_pass *a = job;
    ptrdiff_t first = (ptrdiff_t)chunk * SILU_VALUES;
    ptrdiff_t end = a->size - first < SILU_VALUES ? a->size : first + SILU_VALUES;
    for (ptrdiff_t k = first; k < end; k += 16) {
        int n = end - k < 16 ? (int)(end - k) : 16;
        store16_head(a->out + k, silu_mul16(load16_head(a->gate + k, n), load16_head(a->up + k, n)), n);
    }
}

static void silu_mul(const float *gate, const float *up, float *out, ptrdiff_t size) {
    struct silu_pass a = {gate, up, out, size};
    pool_run(silu_task, &a, (int)((size + SILU_VALUES - 1) / SILU_VALUES));
}
