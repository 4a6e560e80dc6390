/* Putting weights into packed formats, and decoding FP8; the bits of kernels/quantize.py. Each call runs on the thread
 * that makes it: the converter splits its work over threads of its own. Written for the compiler to vectorise. */
#pragma once
#include "dispatch.h"

#include <stdlib.h>
#include <string.h>

/* Groups are whole multiples of this, or the whole row, so every chunk of a row lies in one group. */
#define CHUNK 64

/* A weight's integer as a float: clipped, then to nearest, half to even. Adding 1.5 * 2^23 leaves no bits below 1. */
static inline float quantized(float weight, float scale, float low, float high) {
    float x = weight / scale;
    x = x < low ? low : x;
    x = x > high ? high : x;
    return (x + 12582912.0f) - 12582912.0f;
}

static bool group_absmax(const struct group_rows *a, float *out) {
    int32_t largest_of_all = 0;
    for (int row = 0; row < a->num_rows; row++) {
        const float *w = a->w + (ptrdiff_t)row * a->num_columns;
        for (int begin = 0; begin < a->num_columns; begin += a->group) {
            int count = a->num_columns - begin < a->group ? a->num_columns - begin : a->group;
            int32_t largest = 0; /* magnitudes are ordered like their bits */
            for (int i = 0; i < count; i++) {
                int32_t bits;
                memcpy(&bits, &w[begin + i], sizeof bits);
                bits &= INT32_MAX;
                largest = bits > largest ? bits : largest;
            }
            memcpy(out++, &largest, sizeof largest);
            largest_of_all = largest > largest_of_all ? largest : largest_of_all;
        }
    }
    return largest_of_all < 0x7f800000; /* infinity and NaN lie above */
}

/* Halves of e are added until one number is left; what is over at an odd size is added to the first. */
static inline double folded(double *e, int size) {
    while (size > 1) {
        int half = size / 2;
        for (int i = 0; i < half; i++) e[i] += e[half + i];
        if (size % 2) e[0] += e[size - 1];
        size = half;
    }
    return e[0];
}

static inline double group_error(const float *w, int count, float scale, float low, float high, double *e, int group) {
    for (int i = 0; i < count; i++) {
        float value = quantized(w[i], scale, low, high) * scale;
        double difference = value - w[i];
        e[i] = difference * difference;
    }
    for (int i = count; i < group; i++) e[i] = 0.0;
    return folded(e, group);
}

static int group_errors(const struct group_rows *a, const float *scales, int qmax, double *out) {
    double small[2 * CHUNK];
    double *e = a->group <= 2 * CHUNK ? small : malloc((size_t)a->group * sizeof *e);
    if (!e) return -1;
    float low = (float)(-qmax - 1), high = (float)qmax;
    for (int row = 0; row < a->num_rows; row++) {
        const float *w = a->w + (ptrdiff_t)row * a->num_columns;
        for (int begin = 0; begin < a->num_columns; begin += a->group) {
            int count = a->num_columns - begin < a->group ? a->num_columns - begin : a->group;
            float scale = *scales++;
            if (count == CHUNK && a->group == CHUNK) /* sizes the compiler knows: all of it in registers */
                *out++ = group_error(w + begin, CHUNK, scale, low, high, e, CHUNK);
            else
                *out++ = group_error(w + begin, count, scale, low, high, e, a->group);
        }
    }
    if (e != small) free(e);
    return 0;
}

static void pack_rows(const struct group_rows *a, const float *scales, int bits, uint8_t *out) {
    int qmax = (1 << (bits - 1)) - 1, offset = bits == 8 ? 0 : qmax + 1;
    int groups = (a->num_columns + a->group - 1) / a->group;
    float low = (float)(-qmax - 1), high = (float)qmax;
    ptrdiff_t row_bytes = ((ptrdiff_t)a->num_columns * bits + 7) / 8;
    for (int row = 0; row < a->num_rows; row++, out += row_bytes, scales += groups) {
        const float *w = a->w + (ptrdiff_t)row * a->num_columns;
        for (int begin = 0; begin < a->num_columns; begin += CHUNK) {
            int count = a->num_columns - begin < CHUNK ? a->num_columns - begin : CHUNK;
            float scale = scales[begin / a->group];
            uint8_t fields[CHUNK];
            for (int i = 0; i < count; i++)
                fields[i] = (uint8_t)((int)quantized(w[begin + i], scale, low, high) + offset);
            for (int i = count; i < CHUNK; i++) fields[i] = (uint8_t)offset;
            uint8_t *bytes = out + (ptrdiff_t)begin * bits / 8;
            int num_bytes = (count * bits + 7) / 8;
            if (bits == 8)
                memcpy(bytes, fields, (size_t)num_bytes);
            else if (bits == 4)
                for (int j = 0; j < num_bytes; j++) bytes[j] = (uint8_t)(fields[2 * j] | fields[2 * j + 1] << 4);
            else
                for (int j = 0; j < num_bytes; j++)
                    bytes[j] = (uint8_t)(fields[4 * j] | fields[4 * j + 1] << 2 | fields[4 * j + 2] << 4 |
                                         fields[4 * j + 3] << 6);
        }
    }
}

static void decode_fp8(const struct fp8_rows *a, float *out) {
    for (int row = 0; row < a->num_rows; row++) {
        const uint8_t *codes = a->codes + (ptrdiff_t)row * a->num_columns;
        const float *scales = a->scales + (ptrdiff_t)((a->first_row + row) / a->block_rows) * a->grid_columns;
        for (int begin = 0; begin < a->num_columns; begin += a->block_columns) {
            int end = a->num_columns - begin < a->block_columns ? a->num_columns : begin + a->block_columns;
            float scale = scales[begin / a->block_columns];
            for (int i = begin; i < end; i++) out[i] = a->table[codes[i]] * scale;
        }
        out += a->num_columns;
    }
}
