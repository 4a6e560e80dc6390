/* A weight in its stored form; the bytes are described in glm_gpu/quant.py. Plain C, shared by all instruction sets. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define GROUP 64 /* columns whose products are summed before f32 takes over; glm_gpu.kernels.lanes.GROUP */

enum kind { KIND_F32, KIND_BF16, KIND_INT8, KIND_INT4, KIND_INT2 };

enum mode { MODE_INT16, MODE_INT8, MODE_F32 }; /* what packed weights are multiplied with */

struct matrix {
    const uint8_t *data; /* any address */
    const uint8_t *scales; /* any address; NULL for plain numbers */
    int rows, columns;
    enum kind kind;
    int scale_group; /* 64 or 128 columns; 0 when a row has one scale */
    bool half_scales;
};

struct expert {
    struct matrix gate, up, down; /* [F, D], [F, D], [D, F]; one kind */
};

static inline bool is_packed(enum kind kind) { return kind >= KIND_INT8; }

static inline int bits_of(enum kind kind) {
    static const int bits[] = {32, 16, 8, 4, 2};
    return bits[kind];
}

static inline int columns_per_byte(enum kind kind) { return is_packed(kind) ? 8 / bits_of(kind) : 1; }

/* What a stored integer exceeds its value by. */
static inline int offset_of(enum kind kind) { return kind == KIND_INT4 ? 8 : kind == KIND_INT2 ? 2 : 0; }

static inline size_t row_bytes(const struct matrix *w) { return ((size_t)w->columns * bits_of(w->kind) + 7) / 8; }

static inline const uint8_t *row_data(const struct matrix *w, int row) { return w->data + row * row_bytes(w); }

static inline int scales_per_row(const struct matrix *w) {
    if (!w->scale_group) return 1;
    const int groups = (w->columns + GROUP - 1) / GROUP; /* no division by a variable: this runs once a group */
    return w->scale_group == GROUP ? groups : (groups + 1) / 2;
}

/* Rows begin .. end-1 as a matrix of their own. */
static inline struct matrix matrix_rows(const struct matrix *w, int begin, int end) {
    struct matrix part = *w;
    part.rows = end - begin;
    part.data = row_data(w, begin);
    if (w->scales) part.scales += (size_t)begin * scales_per_row(w) * (w->half_scales ? 2 : 4);
    return part;
}
