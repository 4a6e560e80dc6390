/* Rows of packed weights times quantized tokens, any instruction set: groups across lanes, then added in order. */
#pragma once
#include "product.h"

#define PAIRS 16        /* (row, token) pairs whose sums run side by side, hiding the latency of adds in order */
#define PANEL_GROUPS 256 /* groups whose terms wait to be added: 16 * 256 f32 are 16 KiB */

/* Asks for the line of a row that lies 2 KiB ahead, and for the second-level cache to fetch what is further: it has
 * more requests in flight than the first. Two cores of a Xeon (Sapphire Rapids) that read 29 GB/s, [2048, 6144] int4 in
 * turn: 57 % of that without, 74 to 79 % with one request 4 to 12 KiB ahead, 82 to 89 % with both. */
INLINE void prefetch_ahead(const uint8_t *data) {
    __builtin_prefetch(data + 2048);
    __builtin_prefetch(data + 6144, 0, 2);
}

/* terms[i] of 16 groups from `first`, of which `n` exist: p * (s * sx). x[i] are the groups' activations. */
INLINE f32x16 terms16(const i32lanes sums[16], const int32_t *corrections, f32x16 scales, const float *x_scales) {
    f32x16 p = difference_as_f32(sum_lanes16(sums), load16_i32(corrections));
    return mul16(p, mul16(scales, load16(x_scales)));
}

/* acc[i] += terms[i][0], terms[i][1], ... */
INLINE void add_in_order(float acc[PAIRS], int pairs, float terms[PAIRS][PANEL_GROUPS], int groups) {
    if (pairs == PAIRS)
        for (int g = 0; g < groups; g++)
            for (int i = 0; i < PAIRS; i++) acc[i] += terms[i][g];
    else
        for (int g = 0; g < groups; g++)
            for (int i = 0; i < pairs; i++) acc[i] += terms[i][g];
}

INLINE void row_terms(enum kind kind, const struct product *p, int row, int token, int tokens, int first, int last,
                      float (*terms)[PANEL_GROUPS]) {
    const struct matrix *w = &p->w;
    const struct batch *x = p->x;
    const uint8_t *data = row_data(w, row);
    const int whole = w->columns / GROUP;
    for (int block = first; block < last; block += 16) {
        const int n = last - block < 16 ? last - block : 16;
        const bool inside = block + 16 <= whole;
        const f32x16 scales = group_scales16(w, row, block, n);
        i16x64 weights[16];
        uint8_t tail[GROUP];
        for (int i = 0; i < n; i++)
            weights[i] = unpack64(kind, inside ? data + (size_t)(block + i) * group_bytes(kind)
                                               : group_data(w, data, block + i, tail));
        for (int t = 0; t < tokens; t++) {
            const int16_t *integers = x->integers + ((size_t)(token + t) * x->groups + block) * GROUP;
            const size_t at = (size_t)(token + t) * x->stride + block;
            i32lanes sums[16];
            for (int i = 0; i < 16; i++) sums[i] = i < n ? dot64(weights[i], integers + i * GROUP) : no_lanes();
            store16(terms[t] + (block - first), terms16(sums, x->corrections + at, scales, x->scales + at));
        }
    }
}

/* The same for one token: whole blocks of groups straight from memory, the weights never stored. */
INLINE void row_terms_one(enum kind kind, const struct product *p, int row, int token, int first, int last,
                          float *terms) {
    const struct matrix *w = &p->w;
    const struct batch *x = p->x;
    const uint8_t *data = row_data(w, row) + (size_t)first * group_bytes(kind);
    const int16_t *integers = x->integers + ((size_t)token * x->groups + first) * GROUP;
    const size_t at = (size_t)token * x->stride;
    int block = first;
    for (; block + 16 <= last && (block + 16) * GROUP <= w->columns; block += 16) {
        i32lanes sums[16];
        for (int i = 0; i < 16; i++) {
            if (i * group_bytes(kind) % 64 == 0) prefetch_ahead(data);
            sums[i] = dot64(unpack64(kind, data), integers);
            data += group_bytes(kind);
            integers += GROUP;
        }
        store16(terms + (block - first), terms16(sums, x->corrections + at + block, group_scales16(w, row, block, 16),
                                                 x->scales + at + block));
    }
    if (block < last) row_terms(kind, p, row, token, 1, block, last, (float (*)[PANEL_GROUPS])(terms + (block - first)));
}

INLINE void rows_by_token(enum kind kind, const struct product *p, int begin, int end) {
    float terms[PAIRS][PANEL_GROUPS];
    const int groups = p->x->groups;
    for (int token = 0; token < p->x->tokens; token += PAIRS) {
        const int tokens = p->x->tokens - token < PAIRS ? p->x->tokens - token : PAIRS;
        const int rows_together = PAIRS / tokens;
        for (int row = begin; row < end; row += rows_together) {
            const int rows = end - row < rows_together ? end - row : rows_together;
            float acc[PAIRS] = {0};
            for (int first = 0; first < groups; first += PANEL_GROUPS) {
                const int last = groups - first < PANEL_GROUPS ? groups : first + PANEL_GROUPS;
                for (int r = 0; r < rows; r++)
                    if (tokens == 1)
                        row_terms_one(kind, p, row + r, token, first, last, terms[r]);
                    else
                        row_terms(kind, p, row + r, token, tokens, first, last, terms + r * tokens);
                add_in_order(acc, rows * tokens, terms, last - first);
            }
            for (int r = 0; r < rows; r++) {
                const float scale = row_scale(&p->w, row + r);
                for (int t = 0; t < tokens; t++) product_row(p, token + t)[row + r] = acc[r * tokens + t] * scale;
            }
        }
    }
}
