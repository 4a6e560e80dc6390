/* Scales as f32, from f32 or f16 storage at any address. */
#pragma once
#include "matrix.h"
#include "vec.h"

INLINE float half_to_float(uint16_t half) {
#if defined(__F16C__)
    return _cvtsh_ss(half);
#elif defined(HAS_NEON)
    return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(half))), 0);
#else
    /* Shifted into f32's fields the exponent is 112 too small; a product with 2^112 mends it, for subnormals too. */
    uint32_t bits = (uint32_t)(half & 0x7FFF) << 13, sign = (uint32_t)(half & 0x8000) << 16;
    float value;
    if ((half & 0x7C00) == 0x7C00) bits |= 0x7F800000; /* infinity and NaN */
    memcpy(&value, &bits, 4);
    if ((half & 0x7C00) != 0x7C00) value *= 0x1p112f;
    memcpy(&bits, &value, 4);
    bits |= sign;
    memcpy(&value, &bits, 4);
    return value;
#endif
}

INLINE float scale_at(const struct matrix *w, int row, int index) {
    size_t i = (size_t)row * scales_per_row(w) + index;
    if (w->half_scales) {
        uint16_t half;
        memcpy(&half, w->scales + 2 * i, 2);
        return half_to_float(half);
    }
    float scale;
    memcpy(&scale, w->scales + 4 * i, 4);
    return scale;
}

/* The scale of 64 columns, 1 for row formats: their scale comes last. */
INLINE float group_scale(const struct matrix *w, int row, int group) {
    if (!w->scale_group) return 1.0f;
    return scale_at(w, row, w->scale_group == GROUP ? group : group / 2);
}

INLINE float row_scale(const struct matrix *w, int row) {
    return w->scales && !w->scale_group ? scale_at(w, row, 0) : 1.0f;
}

/* group_scale of groups first .. first+15, of which n > 0 exist; the others are 0. first is a multiple of 16. */
INLINE f32x16 group_scales16(const struct matrix *w, int row, int first, int n) {
    if (w->scale_group == GROUP && n >= 16) {
        size_t i = (size_t)row * scales_per_row(w) + first;
        if (!w->half_scales) return load16((const float *)(const void *)(w->scales + 4 * i));
#if defined(__AVX512F__)
        f32x16 r = {{(f32part)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)(w->scales + 2 * i)))}};
        return r;
#elif defined(__AVX2__)
        f32x16 r;
        EACH_PART r.part[part] =
            (f32part)_mm256_cvtph_ps(_mm_loadu_si128((const void *)(w->scales + 2 * i + 16 * part)));
        return r;
#elif defined(HAS_NEON)
        f32x16 r;
        EACH_PART r.part[part] = (f32part)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(w->scales + 2 * i + 8 * part)));
        return r;
#endif
    }
#if defined(__AVX512F__) && defined(__AVX512BW__)
    if (w->scale_group == GROUP) { /* lanes that are masked out are not read */
        const size_t i = (size_t)row * scales_per_row(w) + first;
        const __mmask16 mask = (__mmask16)((1u << n) - 1);
        f32x16 r;
        if (w->half_scales)
            r.part[0] = (f32part)_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, w->scales + 2 * i));
        else
            r.part[0] = (f32part)_mm512_maskz_loadu_ps(mask, w->scales + 4 * i);
        return r;
    }
#endif
    float scales[16] = {0};
    for (int i = 0; i < n && i < 16; i++) scales[i] = group_scale(w, row, first + i);
    return load16(scales);
}
