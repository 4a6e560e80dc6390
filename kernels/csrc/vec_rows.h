/* Dot products of one vector with sixteen rows at once, in the order of glm_gpu.kernels.lanes.
 *
 * Folding sixteen rows together costs 30 shuffles and 15 additions of full registers for every 64 columns; folding
 * each row on its own would cost more than its products. */
#pragma once
#include "vec.h"

#define ROWS 16             /* rows of one tile */
#define TILE_COLUMNS 512    /* 16 * 512 f32 are 32 KiB: a tile stays in the first-level cache */
#define ROUND_UP(n, step) (((n) + (step) - 1) / (step) * (step))

#define PART_LANES (VEC_BYTES / 4)

/* In every block of four lanes: (a0 + a2, a1 + a3, b0 + b2, b1 + b3). */
INLINE f32part fold_fours(f32part a, f32part b) {
#if VEC_BYTES == 64
    return __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
#elif VEC_BYTES == 32
    return __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13) +
           __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
#else
    return __builtin_shufflevector(a, b, 0, 1, 4, 5) + __builtin_shufflevector(a, b, 2, 3, 6, 7);
#endif
}

/* In every block of four lanes: (a0 + a1, a2 + a3, b0 + b1, b2 + b3). */
INLINE f32part fold_twos(f32part a, f32part b) {
#if VEC_BYTES == 64
    return __builtin_shufflevector(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
           __builtin_shufflevector(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
#elif VEC_BYTES == 32
    return __builtin_shufflevector(a, b, 0, 2, 8, 10, 4, 6, 12, 14) +
           __builtin_shufflevector(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
#else
    return __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
#endif
}

/* Products of 64 columns of one row: as many partial sums as a register has lanes. */
INLINE f32part row_products(const f32x16 x[4], const float *row) {
    f32x16 sum = add16(mul16(x[0], load16(row)), mul16(x[1], load16(row + 16)));
    sum = add16(add16(sum, mul16(x[2], load16(row + 32))), mul16(x[3], load16(row + 48)));
#if VEC_BYTES == 64
    return sum.part[0];
#elif VEC_BYTES == 32
    return sum.part[0] + sum.part[1];
#else
    return (sum.part[0] + sum.part[2]) + (sum.part[1] + sum.part[3]);
#endif
}

/* The sums of four rows, each in one block of four lanes: lane 4b of the result's blocks holds row order[b]. */
#if VEC_BYTES == 64
INLINE f32part four_rows(const f32x16 x[4], const float *const *rows, int column) {
    f32part a = row_products(x, rows[0] + column), b = row_products(x, rows[4] + column);
    f32part c = row_products(x, rows[8] + column), d = row_products(x, rows[12] + column);
    f32part ab = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                 __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    f32part cd = __builtin_shufflevector(c, d, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                 __builtin_shufflevector(c, d, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    return __builtin_shufflevector(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           __builtin_shufflevector(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}
#elif VEC_BYTES == 32
INLINE f32part two_rows(const f32x16 x[4], const float *const *rows, int column) {
    f32part a = row_products(x, rows[0] + column), b = row_products(x, rows[4] + column);
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
           __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
}
#endif

/* acc[i] + the dot of x and rows[i], a group of 64 after the other; num_columns is a multiple of 64. */
static __attribute__((noinline, unused)) f32x16 dot_rows16(f32x16 acc, const float *x, const float *const rows[ROWS],
                                                            int num_columns) {
    for (int column = 0; column < num_columns; column += 64) {
        f32x16 v[4];
        for (int i = 0; i < 4; i++) v[i] = load16(x + column + 16 * i);
#if VEC_BYTES == 64
        f32part low = fold_fours(four_rows(v, rows, column), four_rows(v, rows + 1, column));
        f32part high = fold_fours(four_rows(v, rows + 2, column), four_rows(v, rows + 3, column));
        acc.part[0] += fold_twos(low, high);
#else
        for (int part = 0; part < VEC_PARTS; part++) {
            const float *const *mine = rows + part * PART_LANES;
#if VEC_BYTES == 32
            f32part low = fold_fours(two_rows(v, mine, column), two_rows(v, mine + 1, column));
            f32part high = fold_fours(two_rows(v, mine + 2, column), two_rows(v, mine + 3, column));
#else
            f32part low = fold_fours(row_products(v, mine[0] + column), row_products(v, mine[1] + column));
            f32part high = fold_fours(row_products(v, mine[2] + column), row_products(v, mine[3] + column));
#endif
            acc.part[part] += fold_twos(low, high);
        }
#endif
    }
    return acc;
}
