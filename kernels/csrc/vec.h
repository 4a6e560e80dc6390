/* Sixteen f32 lanes on every instruction set: one AVX-512 register, two of AVX2, four of SSE or NEON.
 *
 * Written once with GCC's vector extension, compiled once per instruction set. Included only by the files behind
 * isa.c; everything is static, so no instruction set's code can be linked into another's. Every operation rounds on
 * its own (the build says -ffp-contract=off). */
#pragma once
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#define HAS_NEON
#endif

#if defined(__AVX512F__)
#define VEC_BYTES 64
#elif defined(__AVX2__)
#define VEC_BYTES 32
#else
#define VEC_BYTES 16
#endif
#define VEC_PARTS (64 / VEC_BYTES)
#define INLINE static inline __attribute__((always_inline, unused))
#define EACH_PART for (int part = 0; part < VEC_PARTS; part++)

typedef float f32part __attribute__((vector_size(VEC_BYTES)));
typedef int32_t i32part __attribute__((vector_size(VEC_BYTES)));
typedef uint16_t u16part __attribute__((vector_size(VEC_BYTES / 2)));
typedef struct { f32part part[VEC_PARTS]; } f32x16;

/* Part by part: gcc copies the whole struct through the stack, in pieces too small to be forwarded. */
INLINE f32x16 load16(const float *p) {
    f32x16 r;
    EACH_PART memcpy(&r.part[part], p + part * (VEC_BYTES / 4), VEC_BYTES);
    return r;
}

/* n lanes of p, 0 <= n < 16, the others 0; reads no byte beyond them. */
INLINE f32x16 load16_head(const float *p, int n) {
#if defined(__AVX512F__)
    f32x16 r = {{(f32part)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p)}};
#else
    f32x16 r = {0};
    memcpy(&r, p, (size_t)n * 4);
#endif
    return r;
}

INLINE void store16(float *p, f32x16 v) { EACH_PART memcpy(p + part * (VEC_BYTES / 4), &v.part[part], VEC_BYTES); }

INLINE void store16_head(float *p, f32x16 v, int n) {
#if defined(__AVX512F__)
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)v.part[0]);
#else
    memcpy(p, &v, (size_t)n * 4);
#endif
}

INLINE f32x16 set16(float x) {
    f32x16 r;
    EACH_PART r.part[part] = x - (f32part){0};
    return r;
}

INLINE f32x16 add16(f32x16 a, f32x16 b) {
    EACH_PART a.part[part] += b.part[part];
    return a;
}

INLINE f32x16 sub16(f32x16 a, f32x16 b) {
    EACH_PART a.part[part] -= b.part[part];
    return a;
}

INLINE f32x16 mul16(f32x16 a, f32x16 b) {
    EACH_PART a.part[part] *= b.part[part];
    return a;
}

INLINE f32x16 div16(f32x16 a, f32x16 b) {
    EACH_PART a.part[part] /= b.part[part];
    return a;
}

/* b where a < b, else a: NaN in a stays, as in np.maximum with a number. */
INLINE f32x16 max16(f32x16 a, f32x16 b) {
    EACH_PART {
        i32part less = a.part[part] < b.part[part];
        a.part[part] = (f32part)((less & (i32part)b.part[part]) | (~less & (i32part)a.part[part]));
    }
    return a;
}

INLINE f32x16 min16(f32x16 a, f32x16 b) {
    EACH_PART {
        i32part more = a.part[part] > b.part[part];
        a.part[part] = (f32part)((more & (i32part)b.part[part]) | (~more & (i32part)a.part[part]));
    }
    return a;
}

/* 0 where x < limit, else v. */
INLINE f32x16 zero_below16(f32x16 v, f32x16 x, float limit) {
    EACH_PART v.part[part] = (f32part)((i32part)v.part[part] & ~(x.part[part] < limit));
    return v;
}

/* Nearest integer, ties to even, for |v| < 2^22: adding 1.5 * 2^23 leaves no fraction bits. -0 becomes +0. */
INLINE f32x16 rint16(f32x16 v) {
    EACH_PART v.part[part] = (v.part[part] + 12582912.0f) - 12582912.0f;
    return v;
}

/* bfloat16 bit patterns as f32; exact. */
INLINE f32x16 load16_bf16(const uint16_t *p) {
    f32x16 r;
    EACH_PART {
        u16part bits;
        memcpy(&bits, (const char *)p + part * sizeof bits, sizeof bits);
        r.part[part] = (f32part)(__builtin_convertvector(bits, i32part) << 16);
    }
    return r;
}

INLINE f32x16 load16_bf16_head(const uint16_t *p, int n) {
    uint16_t padded[16] = {0};
    memcpy(padded, p, (size_t)n * 2);
    return load16_bf16(padded);
}

/* Sum of the lanes by halves: l + 8, then l + 4, l + 2, l + 1. */
INLINE float fold16(f32x16 v) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
    __m256 a = _mm512_castps512_ps256((__m512)v.part[0]);
    a = _mm256_add_ps(a, _mm512_extractf32x8_ps((__m512)v.part[0], 1));
#else
    __m256 a = _mm256_add_ps((__m256)v.part[0], (__m256)v.part[1]);
#endif
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
#else
    f32part a = (v.part[0] + v.part[2]) + (v.part[1] + v.part[3]); /* (l, l+8) of both halves, then l + 4 */
    return (a[0] + a[2]) + (a[1] + a[3]);
#endif
}
