/* Dot products of one vector with sixteen rows at once, in the order of glm_gpu.kernels.lanes.
 *
 * Folding sixteen rows together costs 30 shuffles and 15 additions of full registers for every 64 columns; folding
 * each row on its own would cost more than its products. */
#pragma once
#include "vec.h"

#define ROWS 16             /* rows of one tile */
#define TILE_COLUMNS 512    /* 16 * 512 f32 are 32 KiB: a tile stays in the first-level cache */
#define ROUND_UP(n, step) (((n) + (step) - 1) / (step) * (step))

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

#if VEC_BYTES == 64

/* Products of 64 columns with four rows. Row by row each sum would wait for the one before; four at a time fill the
 * pipeline (a tenth faster). With 16 registers the other instruction sets lose more to spills. */
INLINE void four_products(f32part sums[4], const f32x16 x[4], const float *a, const float *b, const float *c,
                          const float *d) {
    const float *rows[4] = {a, b, c, d};
    for (int r = 0; r < 4; r++) sums[r] = x[0].part[0] * load16(rows[r]).part[0];
    for (int i = 1; i < 4; i++)
        for (int r = 0; r < 4; r++) sums[r] += x[i].part[0] * load16(rows[r] + 16 * i).part[0];
}

/* One block of four lanes a row. */
INLINE f32part fold_blocks(const f32part s[4]) {
    f32part ab = __builtin_shufflevector(s[0], s[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                 __builtin_shufflevector(s[0], s[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    f32part cd = __builtin_shufflevector(s[2], s[3], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                 __builtin_shufflevector(s[2], s[3], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    return __builtin_shufflevector(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           __builtin_shufflevector(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}

/* Dots of 64 columns. Folding lags one block behind the products, which need not wait for it. */
INLINE f32x16 dot_group16(const f32x16 x[4], const float *const rows[ROWS], int k) {
    f32part sums[4][4], blocks[4];
    for (int i = 0; i < 4; i++) {
        four_products(sums[i], x, rows[i] + k, rows[4 + i] + k, rows[8 + i] + k, rows[12 + i] + k);
        if (i > 0) blocks[i - 1] = fold_blocks(sums[i - 1]);
    }
    blocks[3] = fold_blocks(sums[3]);
    return (f32x16){{fold_twos(fold_fours(blocks[0], blocks[1]), fold_fours(blocks[2], blocks[3]))}};
}

#else

/* Products of 64 columns of one row, folded to one register. */
INLINE f32part row_products(const f32x16 x[4], const float *row) {
    f32x16 sum = add16(mul16(x[0], load16(row)), mul16(x[1], load16(row + 16)));
    sum = add16(add16(sum, mul16(x[2], load16(row + 32))), mul16(x[3], load16(row + 48)));
#if VEC_BYTES == 32
    return sum.part[0] + sum.part[1];
#else
    return (sum.part[0] + sum.part[2]) + (sum.part[1] + sum.part[3]);
#endif
}

#if VEC_BYTES == 32
/* Two rows, a block of four lanes each. */
INLINE f32part fold_blocks(f32part a, f32part b) {
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
           __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
}
#endif

/* Dots of 64 columns. */
INLINE f32x16 dot_group16(const f32x16 x[4], const float *const rows[ROWS], int k) {
    f32x16 dots;
    EACH_PART {
        const float *const *mine = rows + part * (VEC_BYTES / 4);
        f32part fours[2];
        for (int i = 0; i < 2; i++) {
#if VEC_BYTES == 32
            const float *const *four = mine + 2 * i;
            fours[i] = fold_fours(fold_blocks(row_products(x, four[0] + k), row_products(x, four[4] + k)),
                                  fold_blocks(row_products(x, four[1] + k), row_products(x, four[5] + k)));
#else
            fours[i] = fold_fours(row_products(x, mine[2 * i] + k), row_products(x, mine[2 * i + 1] + k));
#endif
        }
        dots.part[part] = fold_twos(fours[0], fours[1]);
    }
    return dots;
}

#endif

/* acc[i] + the dot of x and rows[i], a group of 64 after the other; num_columns is a multiple of 64. */
static __attribute__((noinline, unused)) f32x16 dot_rows16(f32x16 acc, const float *x, const float *const rows[ROWS],
                                                           int num_columns) {
    for (int k = 0; k < num_columns; k += 64) {
        f32x16 group[4];
        for (int i = 0; i < 4; i++) group[i] = load16(x + k + 16 * i);
        acc = add16(acc, dot_group16(group, rows, k));
    }
    return acc;
}
