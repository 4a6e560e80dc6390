/* Weights into packed rows, for the converter; the bytes of glm_gpu.quant.quantize. */
#pragma once
#include <stdlib.h>

#include "dispatch.h"
#include "pool.h"
#include "scales.h"

/* Nearest f16, ties to even; a value beyond the range becomes infinity. value is positive. */
INLINE uint16_t float_to_half(float value) {
#if defined(__F16C__)
    return (uint16_t)_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
#else
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value >= 65520.0f) return 0x7C00;
    if (value < 0x1p-14f) { /* subnormal: multiples of 2^-24; adding 0.5 leaves them in the last bits */
        value += 0.5f;      /* one unit in the last place of 0.5 .. 1 is 2^-24 */
        memcpy(&bits, &value, 4);
        return (uint16_t)(bits - 0x3F000000);
    }
    bits += 0xFFF + (bits >> 13 & 1); /* round at the 13 bits that f16 lacks */
    return (uint16_t)((bits >> 13) - ((127 - 15) << 10));
#endif
}

/* One row of the source as f32. */
static void source_row(const struct quantize *a, int row, float *out) {
    const size_t at = (size_t)row * a->columns;
    if (a->source == SOURCE_F32) {
        memcpy(out, (const float *)a->data + at, (size_t)a->columns * 4);
    } else if (a->source == SOURCE_BF16) {
        const uint16_t *bits = (const uint16_t *)a->data + at;
        for (int i = 0; i < a->columns; i++) {
            const uint32_t wide = (uint32_t)bits[i] << 16;
            memcpy(out + i, &wide, 4);
        }
    } else {
        const uint8_t *codes = (const uint8_t *)a->data + at;
        const float *scales = a->block_scales + (size_t)a->scale_rows[row] * a->scale_columns;
        for (int i = 0; i < a->columns;) {
            const float scale = scales[i / a->columns_per_scale];
            int end = (i / a->columns_per_scale + 1) * a->columns_per_scale;
            if (end > a->columns) end = a->columns;
            for (; i < end; i++) out[i] = a->code_values[codes[i]] * scale;
        }
    }
}

/* The scale of n values, stored at `index`; 0 when they are not finite or f16 cannot hold it. */
static float make_scale(const struct quantize *a, const float *values, int n, float limit, size_t index) {
    uint32_t largest = 0;
    for (int i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, values + i, 4);
        bits &= 0x7FFFFFFF;
        largest = bits > largest ? bits : largest;
    }
    if (largest >= 0x7F800000) return 0;
    float scale;
    memcpy(&scale, &largest, 4);
    scale /= limit;
    if (scale < 1e-8f) scale = 1e-8f;
    if (!a->half_scales) {
        memcpy((char *)a->scales + 4 * index, &scale, 4);
        return scale;
    }
    uint16_t half = float_to_half(scale);
    if (half == 0) half = 1; /* 2^-24 */
    if (half >= 0x7C00) return 0;
    memcpy((char *)a->scales + 2 * index, &half, 2);
    return half_to_float(half);
}

static void quantize_values(const float *values, int n, float scale, float limit, int8_t *out) {
    for (int i = 0; i < n; i += 16) {
        const int count = n - i < 16 ? n - i : 16;
        f32x16 v = count == 16 ? load16(values + i) : load16_head(values + i, count);
        v = rint16(min16(max16(div16(v, set16(scale)), set16(-limit - 1)), set16(limit)));
        int32_t whole[16];
        EACH_PART {
            const i32part w = __builtin_convertvector(v.part[part], i32part);
            memcpy((char *)whole + part * sizeof w, &w, sizeof w);
        }
        int8_t narrow[16];
        for (int j = 0; j < 16; j++) narrow[j] = (int8_t)whole[j];
        memcpy(out + i, narrow, count);
    }
}

INLINE void pack(const int8_t *integers, int bytes, int bits, int offset, uint8_t *out) {
    const int per_byte = 8 / bits;
    for (int i = 0; i < bytes; i++) {
        unsigned byte = 0;
        for (int field = 0; field < per_byte; field++)
            byte |= (unsigned)((integers[i * per_byte + field] + offset) & ((1 << bits) - 1)) << (field * bits);
        out[i] = (uint8_t)byte;
    }
}

#define QUANTIZE_ROWS 8

static void quantize_task(void *arg, int chunk) {
    struct quantize *a = arg;
    const int per_byte = columns_per_byte(a->kind), bits = bits_of(a->kind);
    const int group = a->scale_group ? a->scale_group : a->columns;
    const int groups = (a->columns + group - 1) / group, bytes = (a->columns + per_byte - 1) / per_byte;
    const float limit = (float)((1 << (bits - 1)) - 1);
    float *values = malloc((size_t)a->columns * sizeof *values);
    int8_t *integers = calloc((size_t)bytes * per_byte, 1); /* unused fields of the last byte stand for 0 */
    bool good = values && integers;
    for (int row = chunk * QUANTIZE_ROWS; good && row < (chunk + 1) * QUANTIZE_ROWS && row < a->rows; row++) {
        source_row(a, row, values);
        for (int g = 0; good && g < groups; g++) {
            const int begin = g * group, n = a->columns - begin < group ? a->columns - begin : group;
            const float scale = make_scale(a, values + begin, n, limit, (size_t)row * groups + g);
            good = scale != 0;
            if (good) quantize_values(values + begin, n, scale, limit, integers + begin);
        }
        uint8_t *out = a->packed + (size_t)row * bytes;
        if (bits == 8)
            memcpy(out, integers, bytes);
        else if (bits == 4)
            pack(integers, bytes, 4, 8, out);
        else
            pack(integers, bytes, 2, 2, out);
    }
    free(values);
    free(integers);
    if (!good) __atomic_store_n(&a->failed, true, __ATOMIC_RELAXED);
}

/* Returns 0, or -1: something is not finite, too large for f16, or memory is short. */
static int quantize_rows(struct quantize *a) {
    pool_run(quantize_task, a, (a->rows + QUANTIZE_ROWS - 1) / QUANTIZE_ROWS);
    return a->failed ? -1 : 0;
}
