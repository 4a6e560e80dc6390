/* One product y = x w^T with its operands; the rows kernels below compute some rows of w for all tokens. */
#pragma once
#include "activations.h"
#include "scales.h"

struct product {
    struct matrix w;
    const struct batch *x;
    float *y;
    size_t y_stride;
    const int *places; /* row of y for each token; NULL: the token itself */
};

INLINE float *product_row(const struct product *p, int token) {
    return p->y + (p->places ? p->places[token] : token) * p->y_stride;
}

/* Bytes of one group of packed weights. */
INLINE int group_bytes(enum kind kind) { return GROUP / columns_per_byte(kind); }

/* The bytes of group g: in place, or copied to `tail` when the row ends inside it (its activations are zero there). */
INLINE const uint8_t *group_data(const struct matrix *w, const uint8_t *row, int g, uint8_t tail[GROUP]) {
    const uint8_t *data = row + (size_t)g * group_bytes(w->kind);
    if ((g + 1) * GROUP <= w->columns) return data;
    memset(tail, 0, GROUP);
    memcpy(tail, data, row_bytes(w) - (size_t)g * group_bytes(w->kind));
    return tail;
}

/* Rows of a chunk: a multiple of every register tile's rows; 48 rows of [., 6144] int4 are 147 KiB, 10 us of memory. */
#define CHUNK_ROWS 48

/* Rows of a chunk where memory is the limit and there are chunks enough for all threads. [2048, 6144] int4, two cores whose
 * chunks lie behind each other: 81 % of the read bandwidth with 16, 82 % with 48, 83 % with 96. */
#define LONG_CHUNK_ROWS 96

#define COLUMN_ROWS 32 /* rows that BY_COLUMN computes together */
