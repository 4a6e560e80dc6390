/* Packed weights times one to eight tokens with AMX tiles of int8: what the tokens share is read and unpacked once.
 *
 * Weights are the first operand, as in rows_amx.h. The second has two columns a token, both digits of its activations,
 * x = 256 * high + low; both are signed, which LIMIT_INT16 allows. So
 * one product of tiles sums a group exactly for sixteen rows and all tokens, in 16 cycles for any number of these.
 * Bounds: 64 * 128 * 128 = 2^20 a digit, their sum as in integer.h. */
#pragma once
#include "rows_amx.h"

#if defined(__AMX_INT8__)

#define COLUMN_AHEAD 12  /* groups ahead of those in use that are asked for */
#define COLUMN_GROUPS 4 /* groups that are unpacked while the four before are multiplied: 8 KiB */

/* Products of one group: [strip][row][high digit of each token, low digit of each], with no gaps. */
typedef int32_t column_products[2][16][2 * MAX_COLUMN_TOKENS];

/* Tiles 0 to 3 are sums of two strips, of groups even and odd; 4 activations; 6 and 7 weights. */
INLINE void configure_columns(int tokens) {
    struct tile_sizes sizes = {0};
    for (int i = 0; i < 8; i++) sizes.bytes[i] = i < 6 ? 8 * tokens : 64, sizes.lines[i] = 16;
    load_tile_sizes(&sizes);
}

#define COLUMN_PRODUCT(UPPER, LOWER, upper, lower, stride, digits, tokens) \
    __asm__ volatile("tilezero %%tmm" #UPPER "\n\t" \
                     "tilezero %%tmm" #LOWER "\n\t" \
                     "tileloadd (%2,%4), %%tmm4\n\t" \
                     "tileloadd (%0,%3), %%tmm6\n\t" \
                     "tdpbssd %%tmm4, %%tmm6, %%tmm" #UPPER "\n\t" \
                     "tileloadd (%1,%3), %%tmm7\n\t" \
                     "tdpbssd %%tmm4, %%tmm7, %%tmm" #LOWER \
                     : \
                     : "r"(upper), "r"(lower), "r"(digits), "r"((size_t)(stride)), "r"((size_t)8 * (tokens)) \
                     : "memory")
#define STORE_COLUMNS(UPPER, LOWER, upper, lower, tokens) \
    __asm__ volatile("tilestored %%tmm" #UPPER ", (%0,%2)\n\t" \
                     "tilestored %%tmm" #LOWER ", (%1,%2)" \
                     : \
                     : "r"(upper), "r"(lower), "r"((size_t)8 * (tokens)) \
                     : "memory")

/* [strip][group][row][column], in order of the fields */
typedef uint8_t column_weights[2][COLUMN_GROUPS][16][64];

/* Groups first .. first + COLUMN_GROUPS - 1, all whole, of the eight rows from 8 * part on. */
INLINE void unpack_part(enum kind kind, const uint8_t *data, size_t row_size, int first, int part, column_weights out) {
    data += 8 * part * row_size + (size_t)first * group_bytes(kind);
#pragma GCC unroll 8
    for (int r = 0; r < 8; r++, data += row_size)
#pragma GCC unroll 4
        for (int i = 0; i < COLUMN_GROUPS; i++)
            _mm512_store_si512(out[part / 2][i][part % 2 * 8 + r], signed_fields(kind, data + i * group_bytes(kind)));
}

/* The same for all rows, where rows or columns end; beyond the last row that row again. */
INLINE void unpack_edge(enum kind kind, const struct matrix *w, int row, int first, int groups, column_weights out) {
    for (int r = 0; r < COLUMN_ROWS; r++) {
        const uint8_t *data = row_data(w, row + r < w->rows ? row + r : w->rows - 1);
        for (int g = first; g < first + COLUMN_GROUPS && g < groups; g++) {
            uint8_t tail[GROUP];
            _mm512_store_si512(out[r / 16][g - first][r % 16], signed_fields(kind, group_data(w, data, g, tail)));
        }
    }
}

/* Where the first token of a row stands among a strip's sums, in lanes; the other tokens follow. */
INLINE int column_place(int tokens, int row) {
    if (tokens == 1) return row % 8 / 2 * 4 + row % 2 + row / 8 * 2;
    if (tokens == 2) return row / 8 * 16 + row % 4 * 4 + row / 4 % 2 * 2;
    return row * tokens;
}

/* Both digits of all lanes of vector v. */
INLINE __m512i column_sums(const int tokens, int v, const int32_t *products) {
    const int32_t *p = products + 32 * v;
    const __m512i a = _mm512_load_si512(p), b = _mm512_load_si512(p + 16);
    __m512i high, low;
    if (tokens == 1) {
        high = (__m512i)_mm512_shuffle_ps((__m512)a, (__m512)b, 0x88);
        low = (__m512i)_mm512_shuffle_ps((__m512)a, (__m512)b, 0xDD);
    } else if (tokens == 2) {
        high = _mm512_unpacklo_epi64(a, b);
        low = _mm512_unpackhi_epi64(a, b);
    } else if (tokens == 4) {
        high = _mm512_shuffle_i64x2(a, b, 0x88);
        low = _mm512_shuffle_i64x2(a, b, 0xDD);
    } else {
        high = _mm512_shuffle_i64x2(a, b, 0x44);
        low = _mm512_shuffle_i64x2(a, b, 0xEE);
    }
    return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
}

/* acc += terms of one group of a strip. */
INLINE void add_column_terms(const int tokens, __m512 *acc, const int32_t *products, const float *scales,
                             const float *x_scales) {
    const __m512 row_scales = _mm512_load_ps(scales);
    __m512 factors;
    if (tokens == 1)
        factors = _mm512_set1_ps(*x_scales);
    else if (tokens == 2)
        factors = (__m512)_mm512_broadcast_f32x2(_mm_castsi128_ps(_mm_loadl_epi64((const void *)x_scales)));
    else if (tokens == 4)
        factors = _mm512_broadcast_f32x4(_mm_loadu_ps(x_scales));
    else
        factors = _mm512_broadcast_f32x8(_mm256_loadu_ps(x_scales));
    int32_t rows[MAX_COLUMN_TOKENS * 16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++)
#pragma GCC unroll 8
        for (int t = 0; t < tokens; t++) rows[column_place(tokens, r) + t] = r;
#pragma GCC unroll 8
    for (int v = 0; v < tokens; v++) {
        const __m512i lanes = _mm512_loadu_si512(rows + 16 * v);
        const __m512 scale = _mm512_mul_ps(_mm512_permutexvar_ps(lanes, row_scales), factors);
        const __m512 sum = _mm512_cvtepi32_ps(column_sums(tokens, v, products));
        acc[v] = _mm512_add_ps(acc[v], _mm512_mul_ps(sum, scale));
    }
}

/* Asks for a part of the weights that are unpacked soon: eight rows of four groups, of the next 32 rows where these end.
 * Whole lines of int8 are read as they lie, and the hardware foresees that: what is asked for only takes its place. Two
 * cores of a Xeon (Sapphire Rapids) that read 30 GB/s, [2048, 6144]: int8 102 % of that without and 92 with, one token;
 * int4 42 and 55 %, four tokens. */
INLINE void prefetch_part(enum kind kind, const struct matrix *w, int row, int first, int part) {
    if (kind == KIND_INT8) return;
    const int groups = w->columns / GROUP, soon = first + COLUMN_AHEAD, after = soon < groups ? 0 : COLUMN_ROWS;
    const size_t row_size = row_bytes(w);
    const uint8_t *data = row_data(w, row + after + 8 * part) + (size_t)(after ? soon - groups : soon) * group_bytes(kind);
    for (int r = 0; r < 8; r++, data += row_size)
        for (int i = 0; i < COLUMN_GROUPS * group_bytes(kind); i += 64) __builtin_prefetch(data + i, 0, 2);
    if (!w->scale_group) return;
    const size_t scale_bytes = w->half_scales ? 2 : 4, row_scales = scales_per_row(w);
    const size_t at = (size_t)(first + part) * COLUMN_ROWS >> (w->scale_group > GROUP);
    const uint8_t *scales = w->scales + ((row + COLUMN_ROWS) * row_scales + at) * scale_bytes;
    for (size_t i = 0; i < COLUMN_ROWS * scale_bytes; i += 64) __builtin_prefetch(scales + i, 0, 2);
}

/* Rows `row` .. `row` + 31, of which those before `end` are stored; `tokens` is what a tile has columns for. While one
 * group is multiplied, a part of the groups to come is unpacked, and terms of the group before the last are added. */
INLINE void rows_of_columns(enum kind kind, const int tokens, const struct product *p, int row, int end) {
    const struct matrix *w = &p->w;
    const struct batch *x = p->x;
    const int groups = x->groups, whole = row + COLUMN_ROWS <= w->rows ? w->columns / GROUP : 0;
    const size_t row_size = row_bytes(w);
    const uint8_t *data = row_data(w, row);
    _Alignas(64) column_weights unpacked[2];
    _Alignas(64) column_products products[2];
    _Alignas(64) float scales[2][TILE_GROUPS][16];
    __m512 acc[2][MAX_COLUMN_TOKENS];
    for (int v = 0; v < tokens; v++) acc[0][v] = acc[1][v] = _mm512_setzero_ps();
    if (COLUMN_GROUPS > whole)
        unpack_edge(kind, w, row, 0, groups, unpacked[0]);
    else if (kind != KIND_INT8)
        for (int part = 0; part < 4; part++) unpack_part(kind, data, row_size, 0, part, unpacked[0]);
    for (int first = 0; first < groups + 2; first += COLUMN_GROUPS) {
        const int next = first + COLUMN_GROUPS, this = first / COLUMN_GROUPS % 2;
        const bool direct = kind == KIND_INT8 && next <= whole, more = next + COLUMN_GROUPS <= whole;
        const size_t stride = direct ? row_size : 64;
        if (next < groups && !more) unpack_edge(kind, w, row, next, groups, unpacked[!this]);
#pragma GCC unroll 4
        for (int i = 0; i < COLUMN_GROUPS; i++) {
            const int g = first + i;
            if (g < groups) {
                const uint8_t *upper = direct ? data + (size_t)g * GROUP : unpacked[this][0][i][0];
                const uint8_t *lower = direct ? upper + 16 * row_size : unpacked[this][1][i][0];
                const char *digits = (const char *)x->integers + (size_t)g * 128 * tokens;
                if (i % 2 == 0)
                    COLUMN_PRODUCT(0, 1, upper, lower, stride, digits, tokens);
                else
                    COLUMN_PRODUCT(2, 3, upper, lower, stride, digits, tokens);
            }
            if (g >= 1 && g <= groups) {
                if (i % 2 == 1)
                    STORE_COLUMNS(0, 1, products[0][0], products[0][1], tokens);
                else
                    STORE_COLUMNS(2, 3, products[1][0], products[1][1], tokens);
            }
            if (next <= whole) prefetch_part(kind, w, row, first, i);
            if (kind != KIND_INT8 && more) unpack_part(kind, data, row_size, next, i, unpacked[!this]);
            const int done = g - 2;
            if (done < 0 || done >= groups) continue;
            if (done % TILE_GROUPS == 0)
                for (int s = 0; s < 2; s++)
                    strip_scales(w, row + 16 * s, w->rows - 1, done,
                                 groups - done < TILE_GROUPS ? groups - done : TILE_GROUPS, scales[s]);
            for (int s = 0; s < 2; s++)
                add_column_terms(tokens, acc[s], products[i % 2][s][0], scales[s][done % TILE_GROUPS],
                                 x->scales + (size_t)done * tokens);
        }
    }
    for (int s = 0; s < 2 && row + 16 * s < end; s++) {
        const int strip = row + 16 * s, rows = end - strip < 16 ? end - strip : 16;
        float sums[MAX_COLUMN_TOKENS * 16], row_scales[16];
        for (int v = 0; v < tokens; v++) _mm512_storeu_ps(sums + 16 * v, acc[s][v]);
        for (int r = 0; r < 16; r++) row_scales[r] = row_scale(w, strip + (r < rows ? r : 0));
        for (int t = 0; t < tokens && t < x->tokens; t++) {
            float y[16];
#pragma GCC unroll 16
            for (int r = 0; r < 16; r++) y[r] = sums[column_place(tokens, r) + t];
            const __m512 result = _mm512_mul_ps(_mm512_loadu_ps(y), _mm512_loadu_ps(row_scales));
            _mm512_mask_storeu_ps(product_row(p, t) + strip, (__mmask16)((1u << rows) - 1), result);
        }
    }
}

#define DEFINE_ROWS_OF_COLUMNS(kind, tokens) \
    static __attribute__((noinline)) void rows_of_##kind##_##tokens(const struct product *p, int row, int end) { \
        rows_of_columns(KIND_##kind, tokens, p, row, end); \
    }
#define DEFINE_COLUMNS(kind) \
    DEFINE_ROWS_OF_COLUMNS(kind, 1) \
    DEFINE_ROWS_OF_COLUMNS(kind, 2) \
    DEFINE_ROWS_OF_COLUMNS(kind, 4) \
    DEFINE_ROWS_OF_COLUMNS(kind, 8)
DEFINE_COLUMNS(INT8)
DEFINE_COLUMNS(INT4)
DEFINE_COLUMNS(INT2)

static void rows_by_column(enum kind kind, const struct product *p, int begin, int end) {
    typedef void (*rows_function)(const struct product *, int, int);
#define COLUMNS_OF(kind) {rows_of_##kind##_1, rows_of_##kind##_2, rows_of_##kind##_4, rows_of_##kind##_8}
    static const rows_function functions[3][4] = {COLUMNS_OF(INT8), COLUMNS_OF(INT4), COLUMNS_OF(INT2)};
    const int lines = p->x->lines;
    const rows_function rows = functions[kind - KIND_INT8][lines == 1 ? 0 : lines == 2 ? 1 : lines == 4 ? 2 : 3];
    configure_columns(lines);
    for (int row = begin; row < end; row += COLUMN_ROWS) rows(p, row, end);
    release_tiles();
}
#endif
