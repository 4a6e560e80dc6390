/* Packed weights times many tokens, sixteen of these side by side: weights are unpacked once for sixty-four tokens, and a
 * pair of them times a pair of columns of each token is one lane of a product, so that sums need no shuffle. */
#pragma once
#include "product.h"

#if defined(__AVX2__)

#if defined(__AVX512VNNI__)
#define PANEL_SUMS 24 /* registers for sums; the rest hold activations and a broadcast */
#define PANEL_WIDE 4  /* blocks of sixteen tokens whose sums stay in registers beside each other */

typedef __m512i panel_vector;

/* sum += w * x in place. As an intrinsic, GCC 12 copies the sums around and spills them: half the speed. */
INLINE void add_products(__m512i *sum, __m512i w, __m512i x) {
    __asm__("vpdpwssd %2, %1, %0" : "+v"(*sum) : "v"(w), "vm"(x));
}
#else
#define PANEL_SUMS 4 /* of two registers each */
#define PANEL_WIDE 1
typedef __m256i panel_vector;

/* sum += w * x in place; as above. */
INLINE void add_products(__m256i *sum, __m256i w, __m256i x) {
    __m256i products;
    __asm__("vpmaddwd %2, %1, %0" : "=x"(products) : "x"(w), "xm"(x));
    __asm__("vpaddd %1, %0, %0" : "+x"(*sum) : "x"(products));
}
#endif

/* The stored integers of one group, in order of the fields. */
INLINE void unpack_to(enum kind kind, const uint8_t *data, int16_t out[GROUP]) {
    const i16x64 w = unpack64(kind, data);
    memcpy(out, &w, sizeof w);
}

/* `rows` rows times 16 * `wide` tokens of one group, added to acc [rows][first .. first + wide - 1]. The sums, PANEL_SUMS,
 * stay in registers. Sums start at minus the correction. */
INLINE void panel_tile(const int rows, const int wide, const int16_t (*weights)[GROUP], const float *scales,
                       const int16_t *const *integers, const float *const *x_scales, const int32_t *const *corrections,
                       float (*acc)[4][16], int first) {
    panel_vector sums[PANEL_SUMS][VEC_PARTS];
#pragma GCC unroll 4
    for (int v = 0; v < wide; v++) {
        const i32x16 correction = load16_i32(corrections[v]);
#pragma GCC unroll 24
        for (int r = 0; r < rows; r++) EACH_PART sums[r * wide + v][part] = (panel_vector)-correction.part[part];
    }
#pragma GCC unroll 1
    for (int k = 0; k < GROUP / 2; k++) {
        panel_vector x[4][VEC_PARTS];
        for (int v = 0; v < wide; v++)
            EACH_PART memcpy(&x[v][part], (const char *)(integers[v] + k * 32) + part * VEC_BYTES, VEC_BYTES);
#pragma GCC unroll 24
        for (int r = 0; r < rows; r++) {
            int32_t pair;
            memcpy(&pair, weights[r] + 2 * k, 4);
            const panel_vector w = (panel_vector)(pair - (i32part){0});
#pragma GCC unroll 4
            for (int v = 0; v < wide; v++) EACH_PART add_products(&sums[r * wide + v][part], w, x[v][part]);
        }
    }
#pragma GCC unroll 4
    for (int v = 0; v < wide; v++) {
        const f32x16 x_scale = load16(x_scales[v]);
#pragma GCC unroll 24
        for (int r = 0; r < rows; r++) {
            const f32x16 scale = mul16(set16(scales[r]), x_scale);
            f32x16 sum;
            EACH_PART sum.part[part] = __builtin_convertvector((i32part)sums[r * wide + v][part], f32part);
            float *total = acc[r][first + v];
            store16(total, add16(load16(total), mul16(sum, scale)));
        }
    }
}

/* CHUNK_ROWS rows at most times tokens 16 * block .. 16 * (block + wide) - 1. */
INLINE void panel(enum kind kind, const int wide, const struct product *p, int begin, int end, int block) {
    const struct batch *x = p->x;
    const int together = wide < PANEL_WIDE ? wide : PANEL_WIDE, rows = PANEL_SUMS / together;
    _Alignas(64) float acc[CHUNK_ROWS][4][16];
    memset(acc, 0, sizeof acc);
    for (int g = 0; g < x->groups; g++) {
        const int16_t *integers[4];
        const float *x_scales[4];
        const int32_t *corrections[4];
        for (int v = 0; v < wide; v++) {
            integers[v] = x->integers + ((size_t)(block + v) * x->groups + g) * GROUP * 16;
            x_scales[v] = x->scales + ((size_t)(block + v) * x->stride + g) * 16;
            corrections[v] = x->corrections + ((size_t)(block + v) * x->stride + g) * 16;
        }
        for (int row = begin; row < end; row += rows) {
            _Alignas(64) int16_t weights[PANEL_SUMS][GROUP];
            float scales[PANEL_SUMS];
            for (int r = 0; r < rows; r++) {
                const int actual = row + r < end ? row + r : end - 1; /* beyond the end: computed, never stored */
                uint8_t tail[GROUP];
                unpack_to(kind, group_data(&p->w, row_data(&p->w, actual), g, tail), weights[r]);
                scales[r] = group_scale(&p->w, actual, g);
            }
            for (int v = 0; v < wide; v += together)
                panel_tile(rows, together, weights, scales, integers + v, x_scales + v, corrections + v,
                           acc + (row - begin), v);
        }
    }
    for (int row = begin; row < end; row++) {
        const float scale = row_scale(&p->w, row);
        for (int t = 0; t < 16 * wide && 16 * block + t < x->tokens; t++)
            product_row(p, 16 * block + t)[row] = acc[row - begin][t / 16][t % 16] * scale;
    }
}

INLINE void rows_by_sixteen(enum kind kind, const struct product *p, int begin, int end) {
    const int blocks = (p->x->tokens + 15) / 16;
    for (int block = 0; block < blocks; block += 4) switch (blocks - block) {
        case 1: panel(kind, 1, p, begin, end, block); break;
        case 2: panel(kind, 2, p, begin, end, block); break;
        case 3: panel(kind, 3, p, begin, end, block); break;
        default: panel(kind, 4, p, begin, end, block);
        }
}
#endif
