/* Exact integer products of 64 weights with 64 activations, both int16.
 *
 * Inside a group of 64 the columns are ordered by their field in a byte: those in the lowest bits first. So a field is
 * unpacked with one mask or shift, and activations are stored in the same order (activations.h). Weights here are as
 * stored, `offset_of` too large; offset * (sum of activations) is subtracted once per group. integer_neon.h has the same
 * operations for NEON.
 * Bound of a sum: 64 * 128 * 32639 < 2^28 (int8), 64 * 15 * 32639 < 2^25 (int4); int32 never overflows. */
#pragma once
#include "matrix.h"
#include "vec.h"

typedef struct { i32part part[VEC_PARTS]; } i32x16;

#if defined(__AVX512VNNI__)
typedef struct { __m512i v[2]; } i16x64;
typedef __m512i i32lanes; /* partial sums of one group */
#elif defined(__AVX2__)
typedef struct { __m256i v[4]; } i16x64;
typedef __m256i i32lanes;
#elif defined(HAS_NEON)
#include "integer_neon.h"
#else
typedef int16_t i16x8 __attribute__((vector_size(16)));
typedef struct { i16x8 v[8]; } i16x64;
typedef int32_t i32lanes __attribute__((vector_size(16)));
#endif

INLINE i16x64 load64(const int16_t *p) {
    i16x64 r;
    memcpy(&r, p, sizeof r);
    return r;
}

#if !defined(HAS_NEON)
/* The stored integers of one group, from 64, 32 or 16 bytes. */
INLINE i16x64 unpack64(enum kind kind, const uint8_t *p) {
    i16x64 r;
#if defined(__AVX512VNNI__)
    if (kind == KIND_INT8) {
        r.v[0] = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)p));
        r.v[1] = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)(p + 32)));
    } else if (kind == KIND_INT4) {
        __m512i bytes = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)p));
        r.v[0] = _mm512_and_si512(bytes, _mm512_set1_epi16(15));
        r.v[1] = _mm512_srli_epi16(bytes, 4);
    } else {
        __m512i bytes = _mm512_broadcast_i64x4(_mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)p)));
        __m512i fields = _mm512_inserti64x4(bytes, _mm256_srli_epi16(_mm512_castsi512_si256(bytes), 2), 1);
        r.v[0] = _mm512_and_si512(fields, _mm512_set1_epi16(3));
        r.v[1] = _mm512_and_si512(_mm512_srli_epi16(fields, 4), _mm512_set1_epi16(3));
    }
#elif defined(__AVX2__)
    if (kind == KIND_INT8) {
        for (int i = 0; i < 4; i++) r.v[i] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)(p + 16 * i)));
    } else if (kind == KIND_INT4) {
        for (int i = 0; i < 2; i++) {
            __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)(p + 16 * i)));
            r.v[i] = _mm256_and_si256(bytes, _mm256_set1_epi16(15));
            r.v[i + 2] = _mm256_srli_epi16(bytes, 4);
        }
    } else {
        __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)p));
        for (int i = 0; i < 4; i++)
            r.v[i] = _mm256_and_si256(_mm256_srli_epi16(bytes, 2 * i), _mm256_set1_epi16(3));
    }
#else
    int16_t fields[64];
    if (kind == KIND_INT8) {
        for (int i = 0; i < 64; i++) fields[i] = (int8_t)p[i];
    } else if (kind == KIND_INT4) {
        for (int i = 0; i < 32; i++) fields[i] = p[i] & 15, fields[32 + i] = p[i] >> 4;
    } else {
        for (int field = 0; field < 4; field++)
            for (int i = 0; i < 16; i++) fields[16 * field + i] = p[i] >> (2 * field) & 3;
    }
    r = load64(fields);
#endif
    return r;
}

INLINE i32lanes dot64(i16x64 w, const int16_t *x) {
#if defined(__AVX512VNNI__)
    __m512i sum = _mm512_dpwssd_epi32(_mm512_setzero_si512(), w.v[0], _mm512_loadu_si512(x));
    return _mm512_dpwssd_epi32(sum, w.v[1], _mm512_loadu_si512(x + 32));
#elif defined(__AVX2__)
    __m256i sum[2];
    for (int i = 0; i < 2; i++)
        sum[i] = _mm256_add_epi32(_mm256_madd_epi16(w.v[i], _mm256_loadu_si256((const void *)(x + 16 * i))),
                                  _mm256_madd_epi16(w.v[i + 2], _mm256_loadu_si256((const void *)(x + 16 * i + 32))));
    return _mm256_add_epi32(sum[0], sum[1]);
#elif defined(__SSE2__)
    __m128i sum = _mm_setzero_si128();
    for (int i = 0; i < 8; i++)
        sum = _mm_add_epi32(sum, _mm_madd_epi16((__m128i)w.v[i], _mm_loadu_si128((const void *)(x + 8 * i))));
    return (i32lanes)sum;
#else
    i32lanes sum = {0};
    for (int i = 0; i < 64; i++) sum[i % 4] += (int32_t)w.v[i / 8][i % 8] * x[i];
    return sum;
#endif
}
#endif

#if !defined(HAS_BYTE_PLANES)
/* Puts a group of activations in the order that dot64 reads. Returns what its sum will exceed the product by. */
INLINE int32_t arrange64(enum kind kind, int16_t x[GROUP], int32_t sum) {
    (void)x;
    return offset_of(kind) * sum;
}
#endif

INLINE i32lanes no_lanes(void) {
    i32lanes zero;
    memset(&zero, 0, sizeof zero);
    return zero;
}

#if defined(__AVX512VNNI__)
/* Lane 4b + i of the result is the sum of block b (four lanes) of v[i]. */
INLINE __m512i sum_blocks(const __m512i v[4]) {
    __m512i a = _mm512_add_epi32(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
    __m512i b = _mm512_add_epi32(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
    return _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
}
#endif

#if !defined(HAS_NEON)
/* Lane i of the result is the sum of the lanes of v[i]. */
INLINE i32x16 sum_lanes16(const i32lanes v[16]) {
    i32x16 r;
#if defined(__AVX512VNNI__)
    __m512i quarter[4]; /* block b of quarter[i] is v[4b + i] folded to four lanes */
    for (int i = 0; i < 4; i++) {
        __m512i a = _mm512_add_epi32(_mm512_shuffle_i64x2(v[i], v[i + 4], 0x44),
                                     _mm512_shuffle_i64x2(v[i], v[i + 4], 0xEE));
        __m512i b = _mm512_add_epi32(_mm512_shuffle_i64x2(v[i + 8], v[i + 12], 0x44),
                                     _mm512_shuffle_i64x2(v[i + 8], v[i + 12], 0xEE));
        quarter[i] = _mm512_add_epi32(_mm512_shuffle_i64x2(a, b, 0x88), _mm512_shuffle_i64x2(a, b, 0xDD));
    }
    r.part[0] = (i32part)sum_blocks(quarter);
#elif defined(__AVX2__)
    for (int i = 0; i < 2; i++) {
        const __m256i *u = v + 8 * i;
        __m256i a = _mm256_hadd_epi32(_mm256_hadd_epi32(u[0], u[1]), _mm256_hadd_epi32(u[2], u[3]));
        __m256i b = _mm256_hadd_epi32(_mm256_hadd_epi32(u[4], u[5]), _mm256_hadd_epi32(u[6], u[7]));
        r.part[i] =
            (i32part)_mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
    }
#else
    for (int i = 0; i < 4; i++) {
        int32_t sums[4];
        for (int j = 0; j < 4; j++) {
            const i32lanes u = v[4 * i + j];
            sums[j] = (u[0] + u[1]) + (u[2] + u[3]);
        }
        r.part[i] = (i32part){sums[0], sums[1], sums[2], sums[3]};
    }
#endif
    return r;
}
#endif

INLINE i32x16 load16_i32(const int32_t *p) {
    i32x16 r;
    memcpy(&r, p, sizeof r);
    return r;
}

/* a - b as f32, rounded once. */
INLINE f32x16 difference_as_f32(i32x16 a, i32x16 b) {
    f32x16 r;
    EACH_PART r.part[part] = __builtin_convertvector(a.part[part] - b.part[part], f32part);
    return r;
}
