// Exponentials, a vector at a time.
#pragma once

#include "simd.h"

// e^r, with x = r + n ln 2, |r| <= ln 2 / 2 and an integer n.
MP_INLINE vf exp_fraction(vf x, vi* n) {
    const vf shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer kept in the low bits
    const vf shifted = x * 1.44269504f + shift;
    const vf whole = shifted - shift;
    *n = (vi)shifted - (vi)shift;
    const vf r = (x - whole * 0.693359375f) - whole * -2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return p * r * r + r + 1.0f;
}

// e^x for x <= 0, within 2 units in the last place; 0 below -87.3, NaN stays NaN.
MP_INLINE vf exp_falling(vf x) {
    vi n;
    const vf zero = splat(0.0f), fraction = exp_fraction(x < -87.3f ? zero : x, &n);
    return x < -87.3f ? zero : fraction * (vf)((n + 127) << 23);
}

#if defined(MP_AVX512)
// 2^x for x <= 0, to within 3e-6 of it; 0 below -150, NaN stays NaN. For weights that are rounded to bf16.
MP_INLINE vf exp2_falling(vf x) {
    const __m512 near = _mm512_max_ps(_mm512_set1_ps(-160.0f), (__m512)x);  // x where it is NaN
    const __m512 whole = _mm512_roundscale_ps(near, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const vf r = (vf)near - (vf)whole;
    vf p = fused(splat(9.582852994e-3f), r, splat(5.590642474e-2f));
    p = fused(p, r, splat(2.402409861e-1f));
    p = fused(p, r, splat(6.931241934e-1f));
    p = fused(p, r, splat(1.0f));
    return (vf)_mm512_scalef_ps((__m512)p, whole);
}
#endif

// e^x for any x; infinity above 88.7.
MP_INLINE vf exp(vf x) {
    vi n;
    const vf zero = splat(0.0f), near = x < -87.3f ? zero : x;
    const vf fraction = exp_fraction(x > 88.7f ? zero : near, &n);
    // Two factors, because 2^128 is out of range for x near 88.7.
    const vi half = n >> 1;
    const vf result = fraction * (vf)((half + 127) << 23) * (vf)((n - half + 127) << 23);
    const vf risen = x > 88.7f ? splat(INF) : result;
    return x < -87.3f ? zero : risen;
}

MP_INLINE vf tanh(vf x) { return 1.0f - 2.0f / (exp(2.0f * x) + 1.0f); }
