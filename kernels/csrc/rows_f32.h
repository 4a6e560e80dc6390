/* Rows of any weights times f32 tokens: the dot of vec_dot.h, groups added in order. */
#pragma once
#include "product.h"
#include "vec_dot.h"

#define F32_TOKENS 16 /* tokens that share one unpacking of a group */

/* Group g of a row in order of the columns, as f32 without scale. */
INLINE void group_as_f32(enum kind kind, const struct matrix *w, const uint8_t *row, int g, f32x16 out[4]) {
    if (kind == KIND_F32) {
        load_group(out, (const float *)(const void *)row, g * GROUP, w->columns);
    } else if (kind == KIND_BF16) {
        load_group_bf16(out, (const uint16_t *)(const void *)row, g * GROUP, w->columns);
    } else {
        uint8_t tail[GROUP];
        const uint8_t *data = group_data(w, row, g, tail);
        const int per_byte = columns_per_byte(kind), bits = bits_of(kind), offset = offset_of(kind);
        float values[GROUP];
        for (int i = 0; i < GROUP / per_byte; i++)
            for (int field = 0; field < per_byte; field++)
                values[i * per_byte + field] =
                    (float)(kind == KIND_INT8 ? (int8_t)data[i] : (data[i] >> (field * bits) & ((1 << bits) - 1)) - offset);
        for (int i = 0; i < 4; i++) out[i] = load16(values + 16 * i);
    }
}

INLINE void rows_as_floats(enum kind kind, const struct product *p, int begin, int end) {
    const struct matrix *w = &p->w;
    const int groups = p->x->groups;
    for (int token = 0; token < p->x->tokens; token += F32_TOKENS) {
        const int tokens = p->x->tokens - token < F32_TOKENS ? p->x->tokens - token : F32_TOKENS;
        for (int row = begin; row < end; row++) {
            const uint8_t *data = row_data(w, row);
            float acc[F32_TOKENS] = {0};
            for (int g = 0; g < groups; g++) {
                const float scale = group_scale(w, row, g);
                f32x16 weights[4];
                group_as_f32(kind, w, data, g, weights);
                for (int t = 0; t < tokens; t++) {
                    const float *x = p->x->floats + ((size_t)(token + t) * groups + g) * GROUP;
                    const f32x16 values[4] = {load16(x), load16(x + 16), load16(x + 32), load16(x + 48)};
                    const float sum = dot_group(values, weights);
                    acc[t] += is_packed(kind) ? sum * scale : sum;
                }
            }
            const float scale = row_scale(w, row);
            for (int t = 0; t < tokens; t++) product_row(p, token + t)[row] = is_packed(kind) ? acc[t] * scale : acc[t];
        }
    }
}
