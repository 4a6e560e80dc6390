/* Activations quantized with AVX-512, sixteen groups at a time, and split into digits for the layouts that want these. */
#pragma once
#include "integer.h"

#if defined(__AVX512VNNI__)

/* Lane 4b + i of the result is the largest of the four lanes of block b of v[i]. */
INLINE __m512i largest_of_blocks(const __m512i v[4]) {
    const __m512i a = _mm512_max_epi32(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
    const __m512i b = _mm512_max_epi32(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
    return _mm512_max_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
}

/* The largest |x| of each of sixteen groups by its bits, which order NaN above infinity above all numbers. */
INLINE __m512 largest_magnitudes(const float *x) {
    const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
    __m512i v[16], quarter[4];
    for (int g = 0; g < 16; g++) {
        v[g] = _mm512_and_si512(_mm512_loadu_si512(x + g * GROUP), magnitude);
        for (int i = 16; i < GROUP; i += 16)
            v[g] = _mm512_max_epi32(v[g], _mm512_and_si512(_mm512_loadu_si512(x + g * GROUP + i), magnitude));
    }
    for (int i = 0; i < 4; i++) { /* block b of quarter[i] is v[4b + i] folded to four lanes */
        const __m512i a = _mm512_max_epi32(_mm512_shuffle_i64x2(v[i], v[i + 4], 0x44),
                                           _mm512_shuffle_i64x2(v[i], v[i + 4], 0xEE));
        const __m512i b = _mm512_max_epi32(_mm512_shuffle_i64x2(v[i + 8], v[i + 12], 0x44),
                                           _mm512_shuffle_i64x2(v[i + 8], v[i + 12], 0xEE));
        quarter[i] = _mm512_max_epi32(_mm512_shuffle_i64x2(a, b, 0x88), _mm512_shuffle_i64x2(a, b, 0xDD));
    }
    return _mm512_castsi512_ps(largest_of_blocks(quarter));
}

/* Sixteen whole groups of one token in order of the fields of int8 or int4; see quantize_group in activations.h. */
INLINE void quantize_groups16(const float *x, float limit, int per_byte, int16_t *integers, float *scales,
                              int32_t *sums) {
    /* 16-bit lanes of one register that _mm512_packs_epi32 filled, in order; of two of them all even columns, then odd */
    _Alignas(64) static const int16_t in_order[32] = {0, 1, 2,  3,  8,  9,  10, 11, 16, 17, 18, 19, 24, 25, 26, 27,
                                                      4, 5, 6,  7,  12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31};
    _Alignas(64) static const int16_t by_field[2][32] = {
        {0,  2,  8,  10, 16, 18, 24, 26, 4,  6,  12, 14, 20, 22, 28, 30,
         32, 34, 40, 42, 48, 50, 56, 58, 36, 38, 44, 46, 52, 54, 60, 62},
        {1,  3,  9,  11, 17, 19, 25, 27, 5,  7,  13, 15, 21, 23, 29, 31,
         33, 35, 41, 43, 49, 51, 57, 59, 37, 39, 45, 47, 53, 55, 61, 63},
    };
    const __m512 amax = largest_magnitudes(x);
    const __mmask16 usable = _mm512_cmp_ps_mask(amax, _mm512_set1_ps(1e-30f), _CMP_GE_OQ) &
                             _mm512_cmp_ps_mask(amax, _mm512_set1_ps(__builtin_inff()), _CMP_LT_OQ);
    _Alignas(64) float factors[16];
    __m512i lanes[16];
    _mm512_storeu_ps(scales, _mm512_div_ps(amax, _mm512_set1_ps(limit)));
    _mm512_store_ps(factors, _mm512_maskz_div_ps(usable, _mm512_set1_ps(limit), amax));
#pragma GCC unroll 2
    for (int g = 0; g < 16; g++) {
        const __m512 factor = _mm512_set1_ps(factors[g]);
        const __mmask16 mask = (__mmask16)-(usable >> g & 1); /* an unusable group is zeros, whatever it holds */
        __m512i whole[4];
        for (int i = 0; i < 4; i++)
            whole[i] = _mm512_maskz_cvtps_epi32(mask, _mm512_mul_ps(_mm512_loadu_ps(x + g * GROUP + 16 * i), factor));
        const __m512i a = _mm512_packs_epi32(whole[0], whole[1]), b = _mm512_packs_epi32(whole[2], whole[3]);
        __m512i fields[2];
        if (per_byte == 2) {
            for (int i = 0; i < 2; i++)
                fields[i] = _mm512_permutex2var_epi16(a, _mm512_load_si512(by_field[i]), b);
        } else {
            fields[0] = _mm512_permutexvar_epi16(_mm512_load_si512(in_order), a);
            fields[1] = _mm512_permutexvar_epi16(_mm512_load_si512(in_order), b);
        }
        const __m512i ones = _mm512_set1_epi16(1);
        lanes[g] = _mm512_dpwssd_epi32(_mm512_dpwssd_epi32(_mm512_setzero_si512(), fields[0], ones), fields[1], ones);
        _mm512_storeu_si512(integers + g * GROUP, fields[0]);
        _mm512_storeu_si512(integers + g * GROUP + 32, fields[1]);
    }
    _mm512_storeu_si512(sums, (__m512i)sum_lanes16(lanes).part[0]);
}

/* Row i of t becomes column i: four steps. */
INLINE void transpose16(__m512 t[16]) {
    __m512 u[16];
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) { /* four rows: lane 4b + r of u[i + c] is column 4b + c of row i + r */
        const __m512 a = _mm512_unpacklo_ps(t[i], t[i + 1]), b = _mm512_unpacklo_ps(t[i + 2], t[i + 3]);
        const __m512 c = _mm512_unpackhi_ps(t[i], t[i + 1]), d = _mm512_unpackhi_ps(t[i + 2], t[i + 3]);
        u[i] = _mm512_shuffle_ps(a, b, 0x44), u[i + 1] = _mm512_shuffle_ps(a, b, 0xEE);
        u[i + 2] = _mm512_shuffle_ps(c, d, 0x44), u[i + 3] = _mm512_shuffle_ps(c, d, 0xEE);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) { /* block i of column b comes from block b of u[4i + c] */
        const __m512 a = _mm512_shuffle_f32x4(u[c], u[4 + c], 0x44), b = _mm512_shuffle_f32x4(u[c], u[4 + c], 0xEE);
        const __m512 d = _mm512_shuffle_f32x4(u[8 + c], u[12 + c], 0x44);
        const __m512 e = _mm512_shuffle_f32x4(u[8 + c], u[12 + c], 0xEE);
        t[c] = _mm512_shuffle_f32x4(a, d, 0x88), t[4 + c] = _mm512_shuffle_f32x4(a, d, 0xDD);
        t[8 + c] = _mm512_shuffle_f32x4(b, e, 0x88), t[12 + c] = _mm512_shuffle_f32x4(b, e, 0xDD);
    }
}

/* The digits of 32 integers: x = 256 * high + low, with high rounded to the nearest where `bias` is 128, which leaves a
 * signed low, and down where it is 0. */
INLINE __m256i high_digits(const int16_t *x, int bias) {
    return _mm512_cvtepi16_epi8(_mm512_srai_epi16(_mm512_add_epi16(_mm512_loadu_si512(x), _mm512_set1_epi16(bias)), 8));
}
INLINE __m256i low_digits(const int16_t *x) { return _mm512_cvtepi16_epi8(_mm512_loadu_si512(x)); }
#endif
