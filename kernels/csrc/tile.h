/* Sixteen rows of an f32 or bfloat16 matrix, ready for dot_rows16. */
#pragma once
#include <stdbool.h>
#include <stddef.h>

#include "vec_rows.h"

struct tile {
    const float *rows[ROWS];
    float values[ROWS][TILE_COLUMNS] __attribute__((aligned(64)));
};

/* Columns column .. column+num_columns-1 of the row that begins `offset` elements into data, zeros up to a multiple
 * of 64; out has room for them. */
INLINE void widen_row(float *out, const void *data, bool is_bf16, ptrdiff_t offset, int num_columns) {
    int k = 0;
    if (is_bf16) {
        const uint16_t *row = (const uint16_t *)data + offset;
        for (; k + 16 <= num_columns; k += 16) store16(out + k, load16_bf16(row + k));
        if (k < num_columns) store16(out + k, load16_bf16_head(row + k, num_columns - k)), k += 16;
    } else {
        const float *row = (const float *)data + offset;
        for (; k + 16 <= num_columns; k += 16) store16(out + k, load16(row + k));
        if (k < num_columns) store16(out + k, load16_head(row + k, num_columns - k)), k += 16;
    }
    for (; k < ROUND_UP(num_columns, 64); k += 16) store16(out + k, set16(0.0f));
}

/* Asks for the cache lines of a row that is needed soon: chosen rows lie anywhere, no hardware foresees them. */
INLINE void prefetch_row(const void *data, bool is_bf16, ptrdiff_t offset, int num_columns) {
    const char *row = (const char *)data + offset * (is_bf16 ? 2 : 4);
    for (int byte = 0; byte < num_columns * (is_bf16 ? 2 : 4); byte += 64) __builtin_prefetch(row + byte);
}

/* Fills a tile from rows that begin at offsets[i]; f32 rows of whole groups are pointed to, not copied. */
INLINE void load_tile(struct tile *tile, const void *data, bool is_bf16, const ptrdiff_t offsets[ROWS],
                      int num_columns) {
    bool in_place = !is_bf16 && num_columns % 64 == 0;
    for (int i = 0; i < ROWS; i++) {
        tile->rows[i] = in_place ? (const float *)data + offsets[i] : tile->values[i];
        if (!in_place) widen_row(tile->values[i], data, is_bf16, offsets[i], num_columns);
    }
}

/* x itself, or a copy in `room` with zeros up to a multiple of 64. */
INLINE const float *whole_groups(const float *x, int num_columns, float room[TILE_COLUMNS]) {
    if (num_columns % 64 == 0) return x;
    widen_row(room, x, false, 0, num_columns);
    return room;
}
