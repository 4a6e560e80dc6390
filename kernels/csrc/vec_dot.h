/* The f32 dot of glm_gpu.kernels.lanes: groups of 64, in each 16 lanes of 4 products, folded by halves. */
#pragma once
#include "vec.h"

/* One group of 64 products. Columns beyond the end are +0 in both, which changes no bit of a sum that begins with +0. */
INLINE float dot_group(const f32x16 a[4], const f32x16 b[4]) {
    f32x16 sum = add16(mul16(a[0], b[0]), mul16(a[1], b[1]));
    return fold16(add16(add16(sum, mul16(a[2], b[2])), mul16(a[3], b[3])));
}

/* Columns k .. k+63 of a row of n f32, zeros beyond n; reads no byte beyond the row. */
INLINE void load_group(f32x16 group[4], const float *row, int k, int n) {
    for (int i = 0; i < 4; i++, k += 16)
        group[i] = n - k >= 16 ? load16(row + k) : load16_head(row + k, n > k ? n - k : 0);
}

INLINE void load_group_bf16(f32x16 group[4], const uint16_t *row, int k, int n) {
    for (int i = 0; i < 4; i++, k += 16)
        group[i] = n - k >= 16 ? load16_bf16(row + k) : load16_bf16_head(row + k, n > k ? n - k : 0);
}
