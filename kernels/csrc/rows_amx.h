/* Packed weights times more than eight tokens with AMX tiles of int8.
 *
 * An int16 activation is two digits, x = 256 * high + low, high signed and low unsigned. Weights are the first operand:
 * a line of a tile is a row's 64 columns of one group, in order of the fields, so bytes of memory (int8) or one
 * instruction away from them (int4, int2) serve as they are. The second operand has one digit of sixteen tokens, side by
 * side. So one product of tiles sums a group exactly for sixteen rows and sixteen tokens, and neither scales nor sums
 * need a shuffle, nor a correction, since the weights are signed.
 *
 * On a Xeon (Sapphire Rapids) sixteen rows, sixteen tokens and one group take 32 cycles of products and 48 of f32 terms, six
 * instructions for 16 results; beside each other, with the tiles' loads and stores, 80 at best in a loop of their own, 100
 * here, and 140 where four blocks share what is unpacked. Tiles of bfloat16, whose sums need no conversion, take 64 for
 * products and were slower in all.
 * Bounds: 64 * 128 * 255 < 2^21 (low), 64 * 128 * 128 = 2^20 (high), their sum as in integer.h. */
#pragma once
#include "product.h"
#include "rows_avx512.h"

#if defined(__AMX_INT8__)

#define TILE_GROUPS 8 /* groups that are unpacked before they are multiplied: 8 KiB a strip */
#define TILE_STRIPS 3 /* strips of sixteen rows that share a block of activations while it is cached */
#define TILE_BLOCKS 8 /* blocks of sixteen tokens that share unpacked weights; their sums are 24 KiB */

/* Sixteen rows, up to TILE_GROUPS groups of each. */
struct strip {
    _Alignas(64) uint8_t weights[TILE_GROUPS][16][64]; /* [group][row][column], in order of the fields */
    float scales[TILE_GROUPS][16];                     /* [group][row] */
};

/* How large each tile is, as AMX reads it. */
struct tile_sizes {
    _Alignas(64) uint8_t palette;
    uint8_t start_row, reserved[14];
    uint16_t bytes[16]; /* of a line */
    uint8_t lines[16];
};

INLINE void load_tile_sizes(struct tile_sizes *sizes) {
    sizes->palette = 1;
    __asm__ volatile("ldtilecfg %0" : : "m"(*sizes));
}

/* Sixteen lines of 64 bytes each. */
INLINE void configure_tiles(void) {
    struct tile_sizes sizes = {0};
    for (int i = 0; i < 8; i++) sizes.bytes[i] = 64, sizes.lines[i] = 16;
    load_tile_sizes(&sizes);
}

INLINE void release_tiles(void) { __asm__ volatile("tilerelease"); }

/* The fields of a group as signed numbers, the lowest ones first: bytes that are loaded once for each field, and in each
 * lane a product of bit matrices, which moves the field's bits, inverts the highest and copies it upwards. That is the
 * same as subtracting offset_of. */
INLINE __m512i signed_fields(enum kind kind, const uint8_t *data) {
    if (kind == KIND_INT8) return _mm512_loadu_si512(data);
    if (kind == KIND_INT4) {
        const int64_t low = 0x0102040808080808, high = 0x1020408080808080;
        const __m512i bytes = _mm512_broadcast_i64x4(_mm256_loadu_si256((const void *)data));
        return _mm512_gf2p8affine_epi64_epi8(bytes, _mm512_setr_epi64(low, low, low, low, high, high, high, high), 0xF8);
    }
    const int64_t first = 0x0102020202020202;
    const __m512i fields = _mm512_setr_epi64(first, first, first << 2, first << 2, first << 4, first << 4,
                                             0x4080808080808080, 0x4080808080808080);
    return _mm512_gf2p8affine_epi64_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const void *)data)), fields, 0xFE);
}

/* v[i], i < 4: eight words of row i and of row i + 4; of rows i + 4 and i + 8 from there on. Word k of all rows, in
 * order, becomes v[k]. */
INLINE void transpose_words(__m512 v[8]) {
    __m512 u[8];
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) { /* quarter q of u[i + k] is word 4 * (q % 2) + k of four rows */
        const __m512 a = _mm512_unpacklo_ps(v[i], v[i + 1]), b = _mm512_unpacklo_ps(v[i + 2], v[i + 3]);
        const __m512 c = _mm512_unpackhi_ps(v[i], v[i + 1]), d = _mm512_unpackhi_ps(v[i + 2], v[i + 3]);
        u[i] = _mm512_shuffle_ps(a, b, 0x44), u[i + 1] = _mm512_shuffle_ps(a, b, 0xEE);
        u[i + 2] = _mm512_shuffle_ps(c, d, 0x44), u[i + 3] = _mm512_shuffle_ps(c, d, 0xEE);
    }
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        v[k] = _mm512_shuffle_f32x4(u[k], u[4 + k], 0x88);
        v[4 + k] = _mm512_shuffle_f32x4(u[k], u[4 + k], 0xDD);
    }
}

/* n scales from group `first` of a row; n <= TILE_GROUPS. */
INLINE __m256 row_scales8(const struct matrix *w, int row, int first, int n) {
    const size_t i = (size_t)row * scales_per_row(w);
    if (w->scale_group == GROUP) { /* lanes that are masked out are not read */
        const __mmask8 mask = (__mmask8)((1u << n) - 1);
        if (w->half_scales) return _mm256_cvtph_ps(_mm_maskz_loadu_epi16(mask, w->scales + 2 * (i + first)));
        return _mm256_maskz_loadu_ps(mask, w->scales + 4 * (i + first));
    }
    const __mmask8 mask = (__mmask8)((1u << (n + 1) / 2) - 1); /* a scale for two groups; first is even */
    const __m128 s = w->half_scales ? _mm_cvtph_ps(_mm_maskz_loadu_epi16(mask, w->scales + 2 * (i + first / 2)))
                                    : _mm_maskz_loadu_ps(mask, w->scales + 4 * (i + first / 2));
    return _mm256_permutevar8x32_ps(_mm256_castps128_ps256(s), _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3));
}

/* out[g][r] = scale of group first + g of row `row` + r; no row beyond `last_row` is read. */
INLINE void strip_scales(const struct matrix *w, int row, int last_row, int first, int n, float (*out)[16]) {
    if (!w->scale_group) {
        for (int g = 0; g < n; g++) _mm512_store_ps(out[g], _mm512_set1_ps(1.0f));
        return;
    }
    __m512 scales[8];
    if (n == 8 && w->scale_group == GROUP && !w->half_scales && row + 15 <= last_row) { /* the most common, at half the time */
        const size_t pitch = 4 * (size_t)scales_per_row(w);
        const uint8_t *lines = w->scales + row * pitch + 4 * first;
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            const uint8_t *line = lines + (i < 4 ? i : i + 4) * pitch;
            scales[i] = _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps((const void *)line)),
                                           _mm256_loadu_ps((const void *)(line + 4 * pitch)), 1);
        }
    } else {
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            const int r = row + (i < 4 ? i : i + 4), lower = r + 4;
            scales[i] = _mm512_insertf32x8(_mm512_castps256_ps512(row_scales8(w, r < last_row ? r : last_row, first, n)),
                                           row_scales8(w, lower < last_row ? lower : last_row, first, n), 1);
        }
    }
    transpose_words(scales);
#pragma GCC unroll 8
    for (int g = 0; g < 8; g++) _mm512_store_ps(out[g], scales[g]);
}

/* Groups first .. first + n - 1 of rows `row` .. row + 15; beyond `last_row` that row again. The bytes after them are asked
 * for. */
INLINE void unpack_strip(enum kind kind, const struct matrix *w, int row, int last_row, int first, int n,
                         struct strip *out) {
    const bool whole = (first + TILE_GROUPS) * GROUP <= w->columns;
    const int bytes = TILE_GROUPS * group_bytes(kind);
    for (int r = 0; r < 16; r++) {
        const uint8_t *begin = row_data(w, row + r < last_row ? row + r : last_row);
        const uint8_t *data = begin + (size_t)first * group_bytes(kind);
        if (whole) {
#pragma GCC unroll 8
            for (int g = 0; g < TILE_GROUPS; g++)
                _mm512_store_si512(out->weights[g][r], signed_fields(kind, data + g * group_bytes(kind)));
        } else {
            uint8_t tail[GROUP];
            for (int g = 0; g < n; g++)
                _mm512_store_si512(out->weights[g][r], signed_fields(kind, group_data(w, begin, first + g, tail)));
        }
        for (int i = 0; i < bytes; i += 64) __builtin_prefetch(data + bytes + i, 0, 2);
    }
    strip_scales(w, row, last_row, first, n, out->scales);
}

/* A group's product, one digit: tile SUM = tile WEIGHTS times tile DIGITS. */
#define HIGH_PRODUCT(SUM, WEIGHTS, DIGITS, weights, digits) \
    __asm__ volatile("tileloadd (%0,%2), %%tmm" #WEIGHTS "\n\t" \
                     "tileloadd (%1,%2), %%tmm" #DIGITS "\n\t" \
                     "tilezero %%tmm" #SUM "\n\t" \
                     "tdpbssd %%tmm" #DIGITS ", %%tmm" #WEIGHTS ", %%tmm" #SUM \
                     : \
                     : "r"(weights), "r"(digits), "r"((size_t)64) \
                     : "memory")
#define LOW_PRODUCT(SUM, WEIGHTS, DIGITS, digits) \
    __asm__ volatile("tileloadd (%0,%1), %%tmm" #DIGITS "\n\t" \
                     "tilezero %%tmm" #SUM "\n\t" \
                     "tdpbsud %%tmm" #DIGITS ", %%tmm" #WEIGHTS ", %%tmm" #SUM \
                     : \
                     : "r"(digits), "r"((size_t)64) \
                     : "memory")
#define STORE_SUMS(SUM, sums) \
    __asm__ volatile("tilestored %%tmm" #SUM ", (%0,%1)" : : "r"(sums), "r"((size_t)64) : "memory")

/* acc[row] += terms of one group for rows begin .. begin + 7, tokens side by side. */
INLINE void add_terms(__m512 acc[16], int begin, int32_t (*sums)[16][16], const float *scales, const float *x_scales) {
    const __m512 x_scale = _mm512_load_ps(x_scales);
#pragma GCC unroll 8
    for (int r = begin; r < begin + 8; r++) {
        const __m512i high = _mm512_slli_epi32(_mm512_load_si512(sums[0][r]), 8);
        const __m512 sum = _mm512_cvtepi32_ps(_mm512_add_epi32(high, _mm512_load_si512(sums[1][r])));
        const __m512 scale = _mm512_mul_ps(_mm512_set1_ps(scales[r]), x_scale);
        acc[r] = _mm512_add_ps(acc[r], _mm512_mul_ps(sum, scale));
        __asm__("" : "+v"(acc[r]) : : "memory"); /* one after the other: GCC would load all factors first, and spill sums */
    }
}

/* n groups of a strip times a block of sixteen tokens, added to sums [row][token]. While a group multiplies, the tiles of
 * the one before are stored, and the terms of the one before that are added: in pieces, since a tile's sixteen lines wait
 * for nothing else where much else is between them. */
INLINE void strip_product(const struct strip *strip, const int n, const char *digits, const float *x_scales,
                          float (*sums)[16]) {
    _Alignas(64) int32_t products[2][2][16][16]; /* [group][digit][row][token] */
    __m512 acc[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++) acc[r] = _mm512_load_ps(sums[r]);
#pragma GCC unroll 8
    for (int g = 0; g < n + 2; g += 2) {
        const char *x = digits + (size_t)g * 2048;
        if (g < n) HIGH_PRODUCT(0, 6, 4, strip->weights[g], x);
        if (g >= 2) add_terms(acc, 0, products[0], strip->scales[g - 2], x_scales + (g - 2) * 16);
        if (g >= 1 && g <= n) STORE_SUMS(2, products[1][0]);
        if (g < n) LOW_PRODUCT(1, 6, 5, x + 1024);
        if (g >= 2) add_terms(acc, 8, products[0], strip->scales[g - 2], x_scales + (g - 2) * 16);
        if (g >= 1 && g <= n) STORE_SUMS(3, products[1][1]);

        if (g + 1 < n) HIGH_PRODUCT(2, 7, 4, strip->weights[g + 1], x + 2048);
        if (g >= 1 && g <= n) add_terms(acc, 0, products[1], strip->scales[g - 1], x_scales + (g - 1) * 16);
        if (g < n) STORE_SUMS(0, products[0][0]);
        if (g + 1 < n) LOW_PRODUCT(3, 7, 5, x + 2048 + 1024);
        if (g >= 1 && g <= n) add_terms(acc, 8, products[1], strip->scales[g - 1], x_scales + (g - 1) * 16);
        if (g < n) STORE_SUMS(1, products[0][1]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++) _mm512_store_ps(sums[r], acc[r]);
}
static __attribute__((noinline)) void whole_strip_product(const struct strip *strip, const char *digits,
                                                          const float *x_scales, float (*sums)[16]) {
    strip_product(strip, TILE_GROUPS, digits, x_scales, sums);
}
static __attribute__((noinline)) void part_strip_product(const struct strip *strip, int n, const char *digits,
                                                         const float *x_scales, float (*sums)[16]) {
    strip_product(strip, n, digits, x_scales, sums);
}

/* Rows begin .. end - 1 times blocks block .. last_block - 1; at most TILE_STRIPS strips and TILE_BLOCKS blocks. */
INLINE void tile_rows(enum kind kind, const struct product *p, int begin, int end, int block, int last_block) {
    const struct batch *x = p->x;
    const int strips = (end - begin + 15) / 16;
    struct strip unpacked[TILE_STRIPS];
    _Alignas(64) float sums[TILE_BLOCKS * TILE_STRIPS][16][16]; /* [block, strip][row][token] */
    memset(sums, 0, strips * (last_block - block) * sizeof sums[0]);
    for (int first = 0; first < x->groups; first += TILE_GROUPS) {
        const int n = x->groups - first < TILE_GROUPS ? x->groups - first : TILE_GROUPS;
        for (int s = 0; s < strips; s++) unpack_strip(kind, &p->w, begin + 16 * s, end - 1, first, n, &unpacked[s]);
        for (int b = block; b < last_block; b++) {
            const size_t at = (size_t)b * x->stride + first;
            const char *digits = (const char *)x->integers + at * 2048;
            for (int s = 0; s < strips; s++)
                if (n == TILE_GROUPS)
                    whole_strip_product(&unpacked[s], digits, x->scales + at * 16, sums[(b - block) * strips + s]);
                else
                    part_strip_product(&unpacked[s], n, digits, x->scales + at * 16, sums[(b - block) * strips + s]);
        }
    }
    for (int s = 0; s < strips; s++) {
        const int row = begin + 16 * s, rows = end - row < 16 ? end - row : 16;
        const __mmask16 mask = (__mmask16)((1u << rows) - 1);
        float row_scales[16];
        for (int r = 0; r < 16; r++) row_scales[r] = row_scale(&p->w, row + (r < rows ? r : 0));
        for (int b = block; b < last_block; b++) {
            const int tokens = x->tokens - 16 * b < 16 ? x->tokens - 16 * b : 16;
            __m512 columns[16];
            load_columns(sums[(b - block) * strips + s], columns);
            for (int t = 0; t < tokens; t++)
                _mm512_mask_storeu_ps(product_row(p, 16 * b + t) + row, mask,
                                      _mm512_mul_ps(columns[t], _mm512_loadu_ps(row_scales)));
        }
    }
}

INLINE void rows_by_tile(enum kind kind, const struct product *p, int begin, int end) {
    const int blocks = (p->x->tokens + 15) / 16;
    const int rows = 16 * TILE_STRIPS;
    configure_tiles();
    for (int block = 0; block < blocks; block += TILE_BLOCKS) {
        const int last_block = block + TILE_BLOCKS < blocks ? block + TILE_BLOCKS : blocks;
        for (int row = begin; row < end; row += rows)
            tile_rows(kind, p, row, row + rows < end ? row + rows : end, block, last_block);
    }
    release_tiles();
}
#endif
