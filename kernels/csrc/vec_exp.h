/* e to the power of sixteen lanes; same bits as glm_gpu.kernels.activation.exp. Source: Cephes expf. */
#pragma once
#include "vec.h"

INLINE f32x16 exp16(f32x16 x) {
    const float lowest = -87.33654f, highest = 88.37626f; /* below: subnormal, given as 0; above: 2^n would overflow */
    f32x16 bounded = min16(max16(x, set16(lowest)), set16(highest));
    f32x16 n = rint16(mul16(bounded, set16(1.44269504f)));
    f32x16 r = sub16(bounded, mul16(n, set16(0.693359375f))); /* exact: n has few bits, this part of ln 2 too */
    r = sub16(r, mul16(n, set16(-2.12194440e-4f)));
    f32x16 p = set16(1.9875691500e-4f);
    p = add16(mul16(p, r), set16(1.3981999507e-3f));
    p = add16(mul16(p, r), set16(8.3334519073e-3f));
    p = add16(mul16(p, r), set16(4.1665795894e-2f));
    p = add16(mul16(p, r), set16(1.6666665459e-1f));
    p = add16(mul16(p, r), set16(5.0000001201e-1f));
    f32x16 y = add16(add16(mul16(p, mul16(r, r)), r), set16(1.0f));
    EACH_PART {
        i32part exponent = (__builtin_convertvector(n.part[part], i32part) + 127) << 23;
        y.part[part] *= (f32part)exponent;
    }
    return zero_below16(y, x, lowest);
}

/* (gate / (1 + e^-gate)) * up */
INLINE f32x16 silu_mul16(f32x16 gate, f32x16 up) {
    f32x16 negative = gate;
    EACH_PART negative.part[part] = -gate.part[part];
    return mul16(div16(gate, add16(set16(1.0f), exp16(negative))), up);
}
