/* Packed weights times more than eight tokens with AMX tiles of int8.
 *
 * An int16 activation is two digits, x = 256 * high + low, high signed and low unsigned. A group's weights are unpacked
 * once to signed bytes and lie as AMX reads them, four columns of sixteen rows in a line; the digits of a block of
 * tokens are two more tiles. So one product of tiles sums a group exactly for sixteen rows and all tokens of the block,
 * with the rows side by side: scales and sums need no shuffle, and no correction, since the weights are signed.
 * Bounds: 64 * 128 * 255 < 2^21 (low), 64 * 128 * 128 = 2^20 (high), their sum as in integer.h.
 *
 * On a Xeon (Sapphire Rapids) sixteen rows, sixteen tokens and one group take 66 cycles of tiles, 32 of them products
 * and the rest stores, and 41 of f32 sums, six instructions for 16 results; unpacking sixteen rows takes 60. */
#pragma once
#include "product.h"
#include "rows_avx512.h"

#if defined(__AMX_INT8__)

#define TILE_GROUPS 8       /* groups that are unpacked before they are multiplied: 8 KiB */
#define TILE_STRIPS 3       /* strips of sixteen rows that share a block of activations while it is cached */
#define TILE_BLOCKS 8       /* blocks of sixteen tokens that share unpacked weights; their sums are 16 KiB */
#define TILE_AHEAD (1 << 14) /* bytes ahead of the weights in use that are asked for, at least */

/* Sixteen rows, up to TILE_GROUPS groups of each. */
struct strip {
    _Alignas(64) uint8_t weights[TILE_GROUPS][16][64]; /* [group][four columns][row][column], in order of the fields */
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

/* Tiles 0 to 5 have a line for each token of a block, 6 and 7 sixteen lines of weights. */
INLINE void configure_tiles(int tokens) {
    struct tile_sizes sizes = {0};
    for (int i = 0; i < 8; i++) sizes.bytes[i] = 64, sizes.lines[i] = i < 6 ? tokens : 16;
    load_tile_sizes(&sizes);
}

INLINE void release_tiles(void) { __asm__ volatile("tilerelease"); }

/* Field `field` of every byte as a signed number: one product of bit matrices moves the bits, inverts the highest and
 * copies it upwards, which is the same as subtracting offset_of. */
INLINE __m512i signed_field(enum kind kind, __m512i bytes, int field) {
    if (kind == KIND_INT8) return bytes;
    const int bits = bits_of(kind);
    uint64_t matrix = 0; /* byte 7 - i chooses the bits whose sum is bit i */
    for (int i = 0; i < 8; i++)
        matrix |= (uint64_t)1 << (8 * (7 - i) + field * bits + (i < bits ? i : bits - 1));
    const __m512i matrices = _mm512_set1_epi64((long long)matrix);
    return kind == KIND_INT4 ? _mm512_gf2p8affine_epi64_epi8(bytes, matrices, 0xF8)
                             : _mm512_gf2p8affine_epi64_epi8(bytes, matrices, 0xFE);
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

/* Bytes `at` .. `at` + 31 of each of sixteen rows to the places of group at / group_bytes and those after. */
INLINE void unpack_words(enum kind kind, const uint8_t *const rows[16], size_t at, int word, uint8_t (*out)[16][64]) {
    const int fields = columns_per_byte(kind), each = 16 / fields; /* words of a group */
    __m512 words[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        const int r = i < 4 ? i : i + 4;
        words[i] = _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps((const void *)(rows[r] + at))),
                                      _mm256_loadu_ps((const void *)(rows[r + 4] + at)), 1);
    }
    transpose_words(words);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
#pragma GCC unroll 4
        for (int field = 0; field < fields; field++)
            _mm512_store_si512(out[(word + i) / each][field * each + (word + i) % each],
                               signed_field(kind, _mm512_castps_si512(words[i]), field));
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
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        const int r = row + (i < 4 ? i : i + 4), lower = r + 4;
        scales[i] = _mm512_insertf32x8(_mm512_castps256_ps512(row_scales8(w, r < last_row ? r : last_row, first, n)),
                                       row_scales8(w, lower < last_row ? lower : last_row, first, n), 1);
    }
    transpose_words(scales);
#pragma GCC unroll 8
    for (int g = 0; g < 8; g++) _mm512_store_ps(out[g], scales[g]);
}

/* Groups first .. first + n - 1 of rows `row` .. row + 15; beyond `last_row` that row again. */
INLINE void unpack_strip(enum kind kind, const struct matrix *w, int row, int last_row, int first, int n,
                         struct strip *out) {
    const size_t row_size = row_bytes(w), begin = (size_t)first * group_bytes(kind);
    const size_t distance = 16 * row_size > TILE_AHEAD ? 16 * row_size : TILE_AHEAD;
    const uint8_t *rows[16];
    const uint8_t *ahead = row_data(w, row) + 16 * begin + distance;
    for (int r = 0; r < 16; r++) rows[r] = row_data(w, row + r < last_row ? row + r : last_row) + begin;
    const int bytes = n * group_bytes(kind);
    for (int at = 0; at < bytes; at += 32) {
        for (int i = 0; i < 512; i += 64) __builtin_prefetch(ahead + 16 * at + i, 0, 2);
        const size_t left = begin + at < row_size ? row_size - begin - at : 0; /* a row may end before its group */
        if (left >= 32) {
            unpack_words(kind, rows, at, at / 4, out->weights);
        } else {
            uint8_t tails[16][32] = {{0}};
            const uint8_t *lines[16];
            for (int r = 0; r < 16; r++) memcpy(tails[r], rows[r] + at, left), lines[r] = tails[r];
            unpack_words(kind, lines, 0, at / 4, out->weights);
        }
    }
    if (w->scale_group) {
        const size_t scale_bytes = w->half_scales ? 2 : 4, row_scales = scales_per_row(w) * scale_bytes;
        const uint8_t *scales = w->scales + (row + 16) * row_scales + first * scale_bytes * 16;
        for (size_t i = 0; i < n * scale_bytes * 16; i += 64) __builtin_prefetch(scales + i, 0, 2);
    }
    strip_scales(w, row, last_row, first, n, out->scales);
}

/* The sums of one group for all tokens of a block, in tiles HIGH and LOW by digit. What these held before is first
 * stored to `sums`, in the shade of the loads: alone in a loop 42 cycles a group, 58 with a store right behind. */
#define START_PRODUCT(HIGH, LOW, WEIGHTS, weights, digits, lines) \
    __asm__ volatile("tileloadd (%0,%3), %%tmm" #WEIGHTS "\n\t" \
                     "tileloadd (%1,%3), %%tmm4\n\t" \
                     "tilezero %%tmm" #HIGH "\n\t" \
                     "tdpbssd %%tmm" #WEIGHTS ", %%tmm4, %%tmm" #HIGH "\n\t" \
                     "tileloadd (%2,%3), %%tmm5\n\t" \
                     "tilezero %%tmm" #LOW "\n\t" \
                     "tdpbusd %%tmm" #WEIGHTS ", %%tmm5, %%tmm" #LOW \
                     : \
                     : "r"(weights), "r"(digits), "r"((digits) + 64 * (lines)), "r"((size_t)64) \
                     : "memory")
#define NEXT_PRODUCT(HIGH, LOW, WEIGHTS, weights, digits, lines, sums) \
    __asm__ volatile("tileloadd (%0,%3), %%tmm" #WEIGHTS "\n\t" \
                     "tileloadd (%1,%3), %%tmm4\n\t" \
                     "tilestored %%tmm" #HIGH ", (%4,%3)\n\t" \
                     "tilezero %%tmm" #HIGH "\n\t" \
                     "tdpbssd %%tmm" #WEIGHTS ", %%tmm4, %%tmm" #HIGH "\n\t" \
                     "tileloadd (%2,%3), %%tmm5\n\t" \
                     "tilestored %%tmm" #LOW ", (%5,%3)\n\t" \
                     "tilezero %%tmm" #LOW "\n\t" \
                     "tdpbusd %%tmm" #WEIGHTS ", %%tmm5, %%tmm" #LOW \
                     : \
                     : "r"(weights), "r"(digits), "r"((digits) + 64 * (lines)), "r"((size_t)64), "r"((sums)[0]), \
                       "r"((sums)[1]) \
                     : "memory")
#define STORE_PRODUCT(HIGH, LOW, sums) \
    __asm__ volatile("tilestored %%tmm" #HIGH ", (%0,%2)\n\t" \
                     "tilestored %%tmm" #LOW ", (%1,%2)" \
                     : \
                     : "r"((sums)[0]), "r"((sums)[1]), "r"((size_t)64) \
                     : "memory")

/* acc[t] += term of one group, rows side by side. */
INLINE void add_terms(const int tokens, __m512 *acc, int32_t (*sums)[16][16], const float *scales,
                      const float *x_scales) {
    const __m512 row_scales = _mm512_load_ps(scales);
#pragma GCC unroll 16
    for (int t = 0; t < tokens; t++) {
        const __m512i high = _mm512_slli_epi32(_mm512_load_si512(sums[0][t]), 8);
        const __m512 sum = _mm512_cvtepi32_ps(_mm512_add_epi32(high, _mm512_load_si512(sums[1][t])));
        const __m512 scale = _mm512_mul_ps(row_scales, _mm512_set1_ps(x_scales[t]));
        acc[t] = _mm512_add_ps(acc[t], _mm512_mul_ps(sum, scale));
    }
}

/* n groups of a strip times a block whose tiles have `lines` tokens, of which `tokens` are wanted. */
INLINE void strip_product(const int tokens, int lines, const struct strip *strip, int n, const char *digits,
                          const float *x_scales, float (*sums)[16]) {
    _Alignas(64) int32_t products[2][2][16][16];
    __m512 acc[16];
#pragma GCC unroll 16
    for (int t = 0; t < tokens; t++) acc[t] = _mm512_load_ps(sums[t]);
    START_PRODUCT(0, 1, 6, strip->weights[0], digits, lines);
    if (n > 1) START_PRODUCT(2, 3, 7, strip->weights[1], digits + lines * 128, lines);
    for (int g = 0; g < n; g += 2) { /* while two groups multiply, the sums of the two before are added up */
        const char *x = digits + (size_t)(g + 2) * lines * 128;
        if (g + 2 < n)
            NEXT_PRODUCT(0, 1, 6, strip->weights[g + 2], x, lines, products[0]);
        else
            STORE_PRODUCT(0, 1, products[0]);
        if (g > 0) add_terms(tokens, acc, products[1], strip->scales[g - 1], x_scales + (g - 1) * lines);
        if (g + 3 < n)
            NEXT_PRODUCT(2, 3, 7, strip->weights[g + 3], x + lines * 128, lines, products[1]);
        else if (g + 1 < n)
            STORE_PRODUCT(2, 3, products[1]);
        add_terms(tokens, acc, products[0], strip->scales[g], x_scales + g * lines);
    }
    if (n % 2 == 0) add_terms(tokens, acc, products[1], strip->scales[n - 1], x_scales + (n - 1) * lines);
#pragma GCC unroll 16
    for (int t = 0; t < tokens; t++) _mm512_store_ps(sums[t], acc[t]);
}

/* A function for each number of tokens: its sums are registers. */
#define DEFINE_STRIP_PRODUCT(tokens) \
    static __attribute__((noinline)) void strip_product##tokens(int lines, const struct strip *strip, int n, \
                                                                const char *digits, const float *x_scales, \
                                                                float (*sums)[16]) { \
        strip_product(tokens, lines, strip, n, digits, x_scales, sums); \
    }
DEFINE_STRIP_PRODUCT(1)
DEFINE_STRIP_PRODUCT(2)
DEFINE_STRIP_PRODUCT(4)
DEFINE_STRIP_PRODUCT(8)
DEFINE_STRIP_PRODUCT(16)

static void tile_product(const struct batch *x, int block, int tokens, const struct strip *strip, int first, int n,
                         float (*sums)[16]) {
    const int lines = x->lines;
    const char *digits = (const char *)x->integers + ((size_t)block * x->stride + first) * lines * 128;
    const float *x_scales = x->scales + ((size_t)block * x->stride + first) * lines;
    if (tokens == 1)
        strip_product1(lines, strip, n, digits, x_scales, sums);
    else if (tokens == 2)
        strip_product2(lines, strip, n, digits, x_scales, sums);
    else if (tokens <= 4)
        strip_product4(lines, strip, n, digits, x_scales, sums);
    else if (tokens <= 8)
        strip_product8(lines, strip, n, digits, x_scales, sums);
    else
        strip_product16(lines, strip, n, digits, x_scales, sums);
}

/* Rows begin .. end - 1 times blocks block .. last_block - 1; at most TILE_STRIPS strips and TILE_BLOCKS blocks. */
INLINE void tile_rows(enum kind kind, const struct product *p, int begin, int end, int block, int last_block) {
    const struct batch *x = p->x;
    const int strips = (end - begin + 15) / 16, lines = x->lines;
    struct strip unpacked[TILE_STRIPS];
    _Alignas(64) float sums[TILE_BLOCKS][TILE_STRIPS][16][16];
    for (int b = 0; b < last_block - block; b++) memset(sums[b], 0, strips * sizeof sums[b][0]);
    for (int first = 0; first < x->groups; first += TILE_GROUPS) {
        const int n = x->groups - first < TILE_GROUPS ? x->groups - first : TILE_GROUPS;
        for (int s = 0; s < strips; s++) unpack_strip(kind, &p->w, begin + 16 * s, end - 1, first, n, &unpacked[s]);
        for (int b = block; b < last_block; b++) {
            const int tokens = x->tokens - b * lines < lines ? x->tokens - b * lines : lines;
            for (int s = 0; s < strips; s++)
                tile_product(x, b, tokens, &unpacked[s], first, n, sums[b - block][s]);
        }
    }
    for (int s = 0; s < strips; s++) {
        const int row = begin + 16 * s, rows = end - row < 16 ? end - row : 16;
        const __mmask16 mask = (__mmask16)((1u << rows) - 1);
        float row_scales[16];
        for (int r = 0; r < 16; r++) row_scales[r] = row_scale(&p->w, row + (r < rows ? r : 0));
        for (int token = block * lines; token < last_block * lines && token < x->tokens; token++) {
            const __m512 sum = _mm512_load_ps(sums[token / lines - block][s][token % lines]);
            _mm512_mask_storeu_ps(product_row(p, token) + row, mask, _mm512_mul_ps(sum, _mm512_loadu_ps(row_scales)));
        }
    }
}

INLINE void rows_by_tile(enum kind kind, const struct product *p, int begin, int end) {
    const int blocks = (p->x->tokens + p->x->lines - 1) / p->x->lines;
    const int rows = 16 * TILE_STRIPS;
    configure_tiles(p->x->lines);
    for (int block = 0; block < blocks; block += TILE_BLOCKS) {
        const int last_block = block + TILE_BLOCKS < blocks ? block + TILE_BLOCKS : blocks;
        for (int row = begin; row < end; row += rows)
            tile_rows(kind, p, row, row + rows < end ? row + rows : end, block, last_block);
    }
    release_tiles();
}
#endif
