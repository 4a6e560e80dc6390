/* Packed weights times several tokens with AVX-512 VNNI: weights are unpacked once for four or sixty-four tokens. */
#pragma once
#include "product.h"

#if defined(__AVX512VNNI__)

#define FOUR_ROWS 4
#define FOUR_GROUPS 256 /* 4 rows * 256 groups * 4 tokens of f32 terms are 16 KiB */

/* Unpacked group as bytes that broadcasts read back: 128 columns bits of four tokens, or 32 bits of sixteen. */
INLINE void unpack_to(enum kind kind, const uint8_t *data, int16_t out[GROUP]) {
    const i16x64 w = unpack64(kind, data);
    _mm512_store_si512(out, w.v[0]);
    _mm512_store_si512(out + 32, w.v[1]);
}

/* Lane 4t + i is token t's term of group `first` + i. */
INLINE __m512 terms_of_four(enum kind kind, const struct product *p, int row, const uint8_t *data, int block,
                            int first) {
    const struct batch *x = p->x;
    const size_t at = (size_t)block * x->stride + first;
    const int16_t *integers = x->integers + at * 4 * GROUP;
    __m512i sums[4];
    float scales[4] = {0};
    for (int i = 0; i < 4; i++) {
        sums[i] = _mm512_setzero_si512();
        if (first + i >= x->groups) continue;
        _Alignas(64) int16_t weights[GROUP];
        uint8_t tail[GROUP];
        unpack_to(kind, group_data(&p->w, data, first + i, tail), weights);
        for (int j = 0; j < 8; j++) {
            __m512i w = _mm512_broadcast_i32x4(_mm_load_si128((const void *)(weights + 8 * j)));
            sums[i] = _mm512_dpwssd_epi32(sums[i], w, _mm512_load_si512(integers + (i * 8 + j) * 32));
        }
        scales[i] = group_scale(&p->w, row, first + i);
    }
    const __m512i sum = _mm512_sub_epi32(sum_blocks(sums), _mm512_load_si512(x->corrections + at * 4));
    const __m512 scale = _mm512_mul_ps(_mm512_broadcast_f32x4(_mm_loadu_ps(scales)), _mm512_load_ps(x->scales + at * 4));
    return _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale);
}

INLINE void rows_by_four(enum kind kind, const struct product *p, int begin, int end) {
    _Alignas(64) float terms[FOUR_ROWS][FOUR_GROUPS / 4][16];
    const int groups = p->x->groups;
    for (int token = 0; token < p->x->tokens; token += 4)
        for (int row = begin; row < end; row += FOUR_ROWS) {
            const int rows = end - row < FOUR_ROWS ? end - row : FOUR_ROWS;
            __m512 acc = _mm512_setzero_ps(); /* lane 4t + r */
            for (int first = 0; first < groups; first += FOUR_GROUPS) {
                const int last = groups - first < FOUR_GROUPS ? groups : first + FOUR_GROUPS;
                for (int r = 0; r < rows; r++) {
                    const uint8_t *data = row_data(&p->w, row + r);
                    for (int g = first; g < last; g += 4)
                        _mm512_store_ps(terms[r][(g - first) / 4],
                                        terms_of_four(kind, p, row + r, data, token / 4, g));
                }
                for (int g = 0; g < (last - first + 3) / 4; g++) {
                    __m512 v[4];
                    for (int r = 0; r < 4; r++) v[r] = _mm512_load_ps(terms[r < rows ? r : 0][g]);
                    const __m512 a = _mm512_unpacklo_ps(v[0], v[1]), b = _mm512_unpacklo_ps(v[2], v[3]);
                    const __m512 c = _mm512_unpackhi_ps(v[0], v[1]), d = _mm512_unpackhi_ps(v[2], v[3]);
                    acc = _mm512_add_ps(acc, _mm512_shuffle_ps(a, b, 0x44));
                    acc = _mm512_add_ps(acc, _mm512_shuffle_ps(a, b, 0xEE));
                    acc = _mm512_add_ps(acc, _mm512_shuffle_ps(c, d, 0x44));
                    acc = _mm512_add_ps(acc, _mm512_shuffle_ps(c, d, 0xEE));
                }
            }
            float sums[16];
            _mm512_storeu_ps(sums, acc);
            for (int t = 0; t < 4 && token + t < p->x->tokens; t++)
                for (int r = 0; r < rows; r++)
                    product_row(p, token + t)[row + r] = sums[4 * t + r] * row_scale(&p->w, row + r);
        }
}

/* `rows` rows times 16 * `wide` tokens of one group, added to acc [rows][wide]. rows * wide = 24 sums stay in registers,
 * which leaves 8 for the activations and a broadcast. Sums start at minus the correction. */
INLINE void tile(const int rows, const int wide, const int16_t (*weights)[GROUP], const float *scales,
                 const int16_t *const integers[4], const float *const x_scales[4], const int32_t *const corrections[4],
                 float (*acc)[4][16]) {
    __m512i sums[24];
    for (int v = 0; v < wide; v++) {
        const __m512i start = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_load_si512(corrections[v]));
        for (int r = 0; r < rows; r++) sums[r * wide + v] = start;
    }
    for (int k = 0; k < GROUP / 2; k++) {
        __m512i x[4];
        for (int v = 0; v < wide; v++) x[v] = _mm512_load_si512(integers[v] + k * 32);
        for (int r = 0; r < rows; r++) {
            int32_t pair;
            memcpy(&pair, weights[r] + 2 * k, 4);
            const __m512i w = _mm512_set1_epi32(pair);
            for (int v = 0; v < wide; v++) sums[r * wide + v] = _mm512_dpwssd_epi32(sums[r * wide + v], w, x[v]);
        }
    }
    for (int v = 0; v < wide; v++) {
        const __m512 x_scale = _mm512_load_ps(x_scales[v]);
        for (int r = 0; r < rows; r++) {
            const __m512 scale = _mm512_mul_ps(_mm512_set1_ps(scales[r]), x_scale);
            const __m512 term = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[r * wide + v]), scale);
            _mm512_store_ps(acc[r][v], _mm512_add_ps(_mm512_load_ps(acc[r][v]), term));
        }
    }
}

/* CHUNK_ROWS rows at most times tokens 16 * block .. 16 * (block + wide) - 1. */
INLINE void panel(enum kind kind, const int wide, const struct product *p, int begin, int end, int block) {
    const struct batch *x = p->x;
    const int rows = 24 / wide;
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
            _Alignas(64) int16_t weights[24][GROUP];
            float scales[24];
            for (int r = 0; r < rows; r++) {
                const int actual = row + r < end ? row + r : end - 1; /* beyond the end: computed, never stored */
                uint8_t tail[GROUP];
                unpack_to(kind, group_data(&p->w, row_data(&p->w, actual), g, tail), weights[r]);
                scales[r] = group_scale(&p->w, actual, g);
            }
            tile(rows, wide, weights, scales, integers, x_scales, corrections, acc + (row - begin));
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
