/* The operations of integer.h on NEON, with dot product instructions or without.
 *
 * The dot product instructions multiply bytes. There an activation is 256 * high + low, high signed and low unsigned,
 * and weights stay the bytes they are: SDOT for the high parts, UDOT for the low ones, which wants unsigned weights.
 * Those of four and two bits are; eight-bit ones are raised by 128, and 128 * (sum of the low parts) is corrected.
 * Bound: 64 * 255 * 255 < 2^22 for the low parts, 256 * 64 * 128 * 128 = 2^28 for the high ones. */
#pragma once

typedef int32_t i32lanes __attribute__((vector_size(16)));

#if defined(__ARM_FEATURE_DOTPROD)
#define HAS_BYTE_PLANES
typedef struct {
    int8x16_t v[4];       /* for SDOT: as stored */
    uint8x16_t raised[4]; /* for UDOT */
} i16x64;
#else
typedef struct { int16x8_t v[8]; } i16x64;
#endif

/* The stored integers of one group as bytes, fields in order: 64 columns in four registers. */
INLINE void unpack_bytes(enum kind kind, const uint8_t *p, int8x16_t out[4]) {
    for (int i = 0; i < 4; i++) {
        if (kind == KIND_INT8) {
            out[i] = vld1q_s8((const int8_t *)p + 16 * i);
        } else if (kind == KIND_INT4) {
            const uint8x16_t bytes = vld1q_u8(p + 16 * (i % 2));
            out[i] = vreinterpretq_s8_u8(i < 2 ? vandq_u8(bytes, vdupq_n_u8(15)) : vshrq_n_u8(bytes, 4));
        } else {
            const uint8x16_t bytes = vld1q_u8(p), field = vshlq_u8(bytes, vdupq_n_s8((int8_t)(-2 * i)));
            out[i] = vreinterpretq_s8_u8(vandq_u8(field, vdupq_n_u8(3)));
        }
    }
}

INLINE i16x64 unpack64(enum kind kind, const uint8_t *p) {
    i16x64 r;
#if defined(HAS_BYTE_PLANES)
    unpack_bytes(kind, p, r.v);
    for (int i = 0; i < 4; i++) {
        const uint8x16_t bytes = vreinterpretq_u8_s8(r.v[i]);
        r.raised[i] = kind == KIND_INT8 ? veorq_u8(bytes, vdupq_n_u8(0x80)) : bytes;
    }
#else
    int8x16_t bytes[4];
    unpack_bytes(kind, p, bytes);
    for (int i = 0; i < 4; i++) {
        r.v[2 * i] = vmovl_s8(vget_low_s8(bytes[i]));
        r.v[2 * i + 1] = vmovl_high_s8(bytes[i]);
    }
#endif
    return r;
}

/* Partial sums of one group: with byte planes, x is 64 low parts and then 64 high parts. */
INLINE i32lanes dot64(i16x64 w, const int16_t *x) {
#if defined(HAS_BYTE_PLANES)
    const uint8_t *low_parts = (const uint8_t *)x;
    uint32x4_t low = vdupq_n_u32(0);
    int32x4_t high = vdupq_n_s32(0);
    for (int i = 0; i < 4; i++) {
        low = vdotq_u32(low, w.raised[i], vld1q_u8(low_parts + 16 * i));
        high = vdotq_s32(high, w.v[i], vld1q_s8((const int8_t *)low_parts + GROUP + 16 * i));
    }
    return (i32lanes)vaddq_s32(vreinterpretq_s32_u32(low), vshlq_n_s32(high, 8));
#else
    int32x4_t even = vdupq_n_s32(0), odd = even;
    for (int i = 0; i < 8; i++) {
        const int16x8_t values = vld1q_s16(x + 8 * i);
        even = vmlal_s16(even, vget_low_s16(w.v[i]), vget_low_s16(values));
        odd = vmlal_high_s16(odd, w.v[i], values);
    }
    return (i32lanes)vaddq_s32(even, odd);
#endif
}

#if defined(HAS_BYTE_PLANES)
/* Splits a group of activations into byte planes, in place. Returns what dot64 gives too much. */
INLINE int32_t arrange64(enum kind kind, int16_t x[GROUP], int32_t sum) {
    uint8_t planes[2 * GROUP];
    int32_t low_sum = 0;
    for (int i = 0; i < GROUP; i++) {
        planes[i] = (uint8_t)x[i];
        planes[GROUP + i] = (uint8_t)(x[i] >> 8);
        low_sum += planes[i];
    }
    memcpy(x, planes, sizeof planes);
    return kind == KIND_INT8 ? 128 * low_sum : offset_of(kind) * sum;
}
#endif

/* Lane i of the result is the sum of the lanes of v[i]. */
INLINE i32x16 sum_lanes16(const i32lanes v[16]) {
    i32x16 r;
    for (int i = 0; i < 4; i++) {
        const i32lanes *four = v + 4 * i;
        r.part[i] = (i32part)vpaddq_s32(vpaddq_s32((int32x4_t)four[0], (int32x4_t)four[1]),
                                        vpaddq_s32((int32x4_t)four[2], (int32x4_t)four[3]));
    }
    return r;
}

/* The values of one group as f32, fields in order. */
INLINE void values64(enum kind kind, const uint8_t *p, f32x16 out[4]) {
    int8x16_t bytes[4];
    unpack_bytes(kind, p, bytes);
    for (int i = 0; i < 4; i++) {
        const int8x16_t values = vsubq_s8(bytes[i], vdupq_n_s8((int8_t)offset_of(kind)));
        const int16x8_t halves[2] = {vmovl_s8(vget_low_s8(values)), vmovl_high_s8(values)};
        for (int j = 0; j < 2; j++) {
            out[i].part[2 * j] = (f32part)vcvtq_f32_s32(vmovl_s16(vget_low_s16(halves[j])));
            out[i].part[2 * j + 1] = (f32part)vcvtq_f32_s32(vmovl_high_s16(halves[j]));
        }
    }
}
