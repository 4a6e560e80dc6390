/* Packed int4 weights times up to four tokens by their digits, and packed weights times four tokens, with AVX-512 VNNI. */
#pragma once
#include "product.h"
#include "rows_integer.h"
#include "rows_panel.h"

#if defined(__AVX512VNNI__)

#define DIGIT_BLOCKS 16 /* of sixteen groups: terms of 16 rows that wait to be added, 16 KiB a token */

/* terms + t * token_terms: terms of sixteen groups of one row of int4 times each token in digits; digits, corrections and
 * x_scales of a token lie `stride` groups after those of the one before. Nibbles are unsigned, so both digits multiply without
 * unpacking to 16 bits: high (signed) as the second operand of vpdpbusd, low (unsigned) as its first.
 * A lane sums 4 * 2 * 15 * 128 * 256 < 2^22 at most before and after the shift. */
INLINE void terms_of_digits(const uint8_t *data, const int tokens, const char *digits,
                            const int32_t *corrections, const float *x_scales, size_t stride, __m512 scales,
                            float *terms, size_t token_terms) {
    const __m512i low_nibbles = _mm512_set1_epi8(15);
    __m512i quarter[MAX_DIGIT_TOKENS][4]; /* block b of quarter[t][i] is group 4i + b */
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512i pair[MAX_DIGIT_TOKENS][2]; /* eight lanes each of two groups */
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            const __m512i bytes = _mm512_loadu_si512(data + 64 * (2 * i + j));
            const __m512i even = _mm512_and_si512(bytes, low_nibbles);
#if defined(__GFNI__) /* high nibbles in one instruction: a product of bit matrices moves them down */
            const __m512i odd = _mm512_gf2p8affine_epi64_epi8(bytes, _mm512_set1_epi64(0x1020408000000000), 0);
#else
            const __m512i odd = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low_nibbles);
#endif
#pragma GCC unroll 4
            for (int t = 0; t < tokens; t++) {
                const char *x = digits + t * stride * (GROUP * 2) + 256 * (2 * i + j);
                __m512i sum = _mm512_dpbusd_epi32(_mm512_setzero_si512(), even, _mm512_load_si512(x));
                sum = _mm512_slli_epi32(_mm512_dpbusd_epi32(sum, odd, _mm512_load_si512(x + 128)), 8);
                sum = _mm512_dpbusd_epi32(sum, _mm512_load_si512(x + 64), even);
                pair[t][j] = _mm512_dpbusd_epi32(sum, _mm512_load_si512(x + 192), odd);
            }
        }
#pragma GCC unroll 4
        for (int t = 0; t < tokens; t++)
            quarter[t][i] = _mm512_add_epi32(_mm512_shuffle_i64x2(pair[t][0], pair[t][1], 0x88),
                                             _mm512_shuffle_i64x2(pair[t][0], pair[t][1], 0xDD));
    }
    const __m512i in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
#pragma GCC unroll 4
    for (int t = 0; t < tokens; t++) {
        const __m512i sum = _mm512_permutexvar_epi32(in_order, sum_blocks(quarter[t]));
        const __m512i product = _mm512_sub_epi32(sum, _mm512_load_si512(corrections + t * stride));
        const __m512 scale = _mm512_mul_ps(scales, _mm512_load_ps(x_scales + t * stride));
        _mm512_store_ps(terms + t * token_terms, _mm512_mul_ps(_mm512_cvtepi32_ps(product), scale));
    }
}

/* columns[i] = rows[0][i], rows[1][i], ... rows[15][i] */
INLINE void load_columns(float rows[16][16], __m512 columns[16]) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) columns[i] = _mm512_load_ps(rows[i]);
    transpose16(columns);
}

/* acc lane r += rows[r][0], rows[r][1], ... rows[r][15] */
INLINE __m512 add_columns(__m512 acc, float rows[16][16]) {
    __m512 t[16];
    load_columns(rows, t);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) acc = _mm512_add_ps(acc, t[i]);
    return acc;
}

/* Rows of eight groups, which latents have, two by two: they lie behind each other, as do their scales, and are one row
 * of sixteen groups but for the sum. Of the tokens the second eight groups repeat the first (set_digit_token). */
INLINE void pairs_of_digits(const struct product *p, const int tokens, int begin, int end) {
    const struct matrix *w = &p->w;
    const struct batch *x = p->x;
    _Alignas(64) float terms[MAX_DIGIT_TOKENS][16][16];
    for (int row = begin; row < end; row += 32) {
        const int rows = end - row < 32 ? end - row : 32;
        for (int r = 0; r < rows; r += 2) {
            const uint8_t *bytes = row_data(w, row + r);
            const __m512 scales = (__m512)group_scales16(w, row + r, 0, 16).part[0];
            for (int i = 0; i < 512; i += 64) prefetch_ahead(bytes + i);
            terms_of_digits(bytes, tokens, (const char *)x->integers, x->corrections, x->scales, x->stride, scales,
                            terms[0][r / 2], 16 * 16);
        }
        for (int t = 0; t < tokens; t++) {
            __m512 columns[16], acc[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
            float sums[2][16], *y = product_row(p, t);
            load_columns(terms[t], columns); /* beyond the end: what was there before, never stored */
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) acc[i / 8] = _mm512_add_ps(acc[i / 8], columns[i]);
            _mm512_storeu_ps(sums[0], acc[0]);
            _mm512_storeu_ps(sums[1], acc[1]);
            for (int r = 0; r < rows; r++) y[row + r] = sums[r % 2][r / 2] * row_scale(w, row + r);
        }
    }
}

/* Sixteen rows at a time, each read from end to end, so that memory is read in one stream. */
INLINE void rows_of_digits(const struct product *p, const int tokens, int begin, int end) {
    const struct matrix *w = &p->w;
    const struct batch *x = p->x;
    const int blocks = (x->groups + 15) / 16;
    if (w->columns == 8 * GROUP && end - begin >= 2) {
        const int pairs = (end - begin) & -2;
        pairs_of_digits(p, tokens, begin, begin + pairs);
        begin += pairs;
    }
    _Alignas(64) float terms[MAX_DIGIT_TOKENS][DIGIT_BLOCKS][16][16];
    for (int row = begin; row < end; row += 16) {
        const int rows = end - row < 16 ? end - row : 16;
        __m512 acc[MAX_DIGIT_TOKENS];
        for (int t = 0; t < tokens; t++) acc[t] = _mm512_setzero_ps();
        for (int first = 0; first < blocks; first += DIGIT_BLOCKS) {
            const int num = blocks - first < DIGIT_BLOCKS ? blocks - first : DIGIT_BLOCKS;
            for (int r = 0; r < rows; r++) {
                const uint8_t *data = row_data(w, row + r);
                for (int b = 0; b < num; b++) {
                    const int block = first + b, groups = x->groups - 16 * block;
                    const uint8_t *bytes = data + (size_t)block * 512;
                    const char *digits = (const char *)x->integers + (size_t)block * 2048;
                    const int32_t *corrections = x->corrections + 16 * block;
                    const float *x_scales = x->scales + 16 * block;
                    const __m512 scales = (__m512)group_scales16(w, row + r, 16 * block, groups).part[0];
                    for (int i = 0; i < 512 && i < groups * 32; i += 64) prefetch_ahead(bytes + i);
                    uint8_t tail[512];
                    if ((16 * block + 16) * GROUP > w->columns) {
                        memset(tail, 0, sizeof tail);
                        memcpy(tail, bytes, row_bytes(w) - (size_t)block * 512);
                        bytes = tail;
                    }
                    terms_of_digits(bytes, tokens, digits, corrections, x_scales, x->stride, scales, terms[0][b][r],
                                    DIGIT_BLOCKS * 16 * 16);
                }
            }
            /* rows beyond the end hold what was there before; their sums are never stored */
            for (int t = 0; t < tokens; t++)
                for (int b = 0; b < num; b++) acc[t] = add_columns(acc[t], terms[t][b]);
        }
        for (int t = 0; t < tokens; t++) {
            float sums[16], *y = product_row(p, t);
            _mm512_storeu_ps(sums, acc[t]);
            for (int r = 0; r < rows; r++) y[row + r] = sums[r] * row_scale(w, row + r);
        }
    }
}

INLINE void rows_by_digit(const struct product *p, int begin, int end) {
    switch (p->x->tokens) {
    case 1: rows_of_digits(p, 1, begin, end); break;
    case 2: rows_of_digits(p, 2, begin, end); break;
    case 3: rows_of_digits(p, 3, begin, end); break;
    default: rows_of_digits(p, 4, begin, end);
    }
}

/* Four rows, sixteen groups of each. */
struct unpacked {
    _Alignas(64) int16_t weights[4][16][GROUP];
    float scales[4][16]; /* of group 4 * b + i at [i][4 * b + row] */
};

/* Groups block .. block+15 of rows row .. row+3; beyond `last_row` that row again, beyond the last group zeros. */
INLINE void unpack_four(enum kind kind, const struct matrix *w, int row, int last_row, int block, int groups,
                        struct unpacked *out) {
    const int n = groups - block < 16 ? groups - block : 16;
    const bool whole = (block + 16) * GROUP <= w->columns;
    __m512 s[4];
    if (!whole) memset(out, 0, sizeof *out);
    for (int r = 0; r < 4; r++) {
        const int actual = row + r < last_row ? row + r : last_row;
        const uint8_t *data = row_data(w, actual);
        uint8_t tail[GROUP];
        if (whole)
            for (int i = 0; i < 16; i++)
                unpack_to(kind, data + (size_t)(block + i) * group_bytes(kind), out->weights[r][i]);
        else
            for (int i = 0; i < n; i++) unpack_to(kind, group_data(w, data, block + i, tail), out->weights[r][i]);
        s[r] = (__m512)group_scales16(w, actual, block, n).part[0];
    }
    const __m512 a = _mm512_unpacklo_ps(s[0], s[1]), b = _mm512_unpacklo_ps(s[2], s[3]);
    const __m512 c = _mm512_unpackhi_ps(s[0], s[1]), d = _mm512_unpackhi_ps(s[2], s[3]);
    _mm512_store_ps(out->scales[0], _mm512_shuffle_ps(a, b, 0x44));
    _mm512_store_ps(out->scales[1], _mm512_shuffle_ps(a, b, 0xEE));
    _mm512_store_ps(out->scales[2], _mm512_shuffle_ps(c, d, 0x44));
    _mm512_store_ps(out->scales[3], _mm512_shuffle_ps(c, d, 0xEE));
    /* Without this barrier GCC makes shuffles of the broadcasts that follow; only one port does those, loads are free. */
    __asm__("" : "+m"(*out));
}

/* The bytes that unpack_four will read for the next sixteen groups. */
INLINE void prefetch_four(enum kind kind, const struct matrix *w, int row, int last_row, int block) {
    for (int r = row; r < row + 4 && r <= last_row; r++) {
        const uint8_t *data = row_data(w, r) + (size_t)block * group_bytes(kind);
        for (int i = 0; i < 16 * group_bytes(kind); i += 64) _mm_prefetch((const void *)(data + i), _MM_HINT_T0);
        if (w->scale_group)
            _mm_prefetch((const void *)(w->scales + ((size_t)r * scales_per_row(w) + block) * 4), _MM_HINT_T0);
    }
}

/* Four rows times four tokens; lane 4t + r of acc. */
INLINE __m512 add_four(const struct unpacked *unpacked, const struct batch *x, int token, int block, __m512 acc) {
    for (int i = 0; i < 16 && block + i < x->groups; i++) {
        const size_t at = (size_t)(token / 4) * x->stride + block + i;
        const int16_t *integers = x->integers + at * 4 * GROUP;
        __m512i sums[4];
        for (int r = 0; r < 4; r++) sums[r] = _mm512_setzero_si512();
#pragma GCC unroll 8
        for (int k = 0; k < 8; k++) {
            const __m512i values = _mm512_load_si512(integers + 32 * k);
#pragma GCC unroll 4
            for (int r = 0; r < 4; r++) {
                const void *eight = unpacked->weights[r][i] + 8 * k;
                add_products(&sums[r], _mm512_broadcast_i32x4(_mm_load_si128(eight)), values);
            }
        }
        const __m512i sum = _mm512_sub_epi32(sum_blocks(sums), _mm512_load_si512(x->corrections + 16 * at));
        const __m512 scales = _mm512_broadcast_f32x4(_mm_load_ps(unpacked->scales[i % 4] + i / 4 * 4));
        const __m512 scale = _mm512_mul_ps(scales, _mm512_load_ps(x->scales + 16 * at));
        acc = _mm512_add_ps(acc, _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale));
    }
    return acc;
}

/* All groups of a block are unpacked before the first is read back, since a 16-byte load from a 64-byte store in flight
 * would stall. All rows of the chunk pass over one block of activations, 8 KiB that stay in the first-level cache. */
INLINE void rows_by_four(enum kind kind, const struct product *p, int begin, int end) {
    const struct batch *x = p->x;
    struct unpacked unpacked;
    for (int token = 0; token < x->tokens; token += 4) {
        __m512 acc[CHUNK_ROWS / 4];
        for (int i = 0; i < CHUNK_ROWS / 4; i++) acc[i] = _mm512_setzero_ps();
        for (int block = 0; block < x->groups; block += 16)
            for (int row = begin; row < end; row += 4) {
                if (block + 16 < x->groups) prefetch_four(kind, &p->w, row, end - 1, block + 16);
                unpack_four(kind, &p->w, row, end - 1, block, x->groups, &unpacked);
                acc[(row - begin) / 4] = add_four(&unpacked, x, token, block, acc[(row - begin) / 4]);
            }
        for (int row = begin; row < end; row += 4) {
            float sums[16];
            _mm512_storeu_ps(sums, acc[(row - begin) / 4]);
            for (int t = 0; t < 4 && token + t < x->tokens; t++)
                for (int r = 0; r < 4 && row + r < end; r++)
                    product_row(p, token + t)[row + r] = sums[4 * t + r] * row_scale(&p->w, row + r);
        }
    }
}
#endif
