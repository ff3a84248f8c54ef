// Operations across the lanes of vectors.
#pragma once

#include "simd.h"

MP_INLINE float sum(vf v) {
#if defined(MP_AVX512)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float halves[W];
    store(halves, v);
    for (int n = W / 2; n > 0; n /= 2)
        for (int i = 0; i < n; i++) halves[i] += halves[i + n];
    return halves[0];
#endif
}

MP_INLINE int32_t sum(vi v) {
#if defined(MP_AVX512)
    return _mm512_reduce_add_epi32((__m512i)v);
#else
    int32_t total = 0;
    for (int i = 0; i < W; i++) total += v[i];
    return total;
#endif
}

MP_INLINE float largest(vf v) {
#if defined(MP_AVX512)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float best = v[0];
    for (int i = 1; i < W; i++) best = v[i] > best ? v[i] : best;
    return best;
#endif
}

// Lane i of the result is lane at[i] of a, or lane at[i] - W of b.
MP_INLINE vf shuffle(vf a, vf b, vi at) {
#if defined(__clang__)
    vf v;
    for (int i = 0; i < W; i++) v[i] = at[i] < W ? a[at[i]] : b[at[i] - W];
    return v;
#else
    return __builtin_shuffle(a, b, at);
#endif
}

// Lanes of a where bit STEP of the lane number is clear, lanes of b where it is set.
template <int STEP>
MP_INLINE vf blend(vf a, vf b) {
    vi at;
    for (int i = 0; i < W; i++) at[i] = i & STEP ? W + i : i;
    return shuffle(a, b, at);
}

// Swaps each two lanes that differ in bit STEP.
template <int STEP>
MP_INLINE vf swap(vf v) {
    vi at;
    for (int i = 0; i < W; i++) at[i] = i ^ STEP;
    return shuffle(v, v, at);
}

// Lanes of swap<STEP>(a) where bit STEP of the lane number is clear, of swap<STEP>(b) where it is set.
template <int STEP>
MP_INLINE vf blend_swapped(vf a, vf b) {
    vi at;
    for (int i = 0; i < W; i++) at[i] = i & STEP ? W + (i ^ STEP) : i ^ STEP;
    return shuffle(a, b, at);
}

// Lane i of the result is the sum over the lanes of v[i]. Destroys v.
template <int STEP = 1>
MP_INLINE vf sum_each(vf* v) {
    if constexpr (STEP < W) {
        for (int i = 0; i < W / STEP / 2; i++)
            v[i] = blend<STEP>(v[2 * i], v[2 * i + 1]) + blend_swapped<STEP>(v[2 * i], v[2 * i + 1]);
        return sum_each<2 * STEP>(v);
    } else {
        return v[0];
    }
}

// Lane j of v[i] becomes lane i of v[j].
template <int STEP = 1>
MP_INLINE void transpose(vf* v) {
    if constexpr (STEP < W) {
        for (int i = 0; i < W; i++)
            if (!(i & STEP)) {
                const vf a = v[i], b = v[i | STEP];
                v[i] = blend<STEP>(a, swap<STEP>(b));
                v[i | STEP] = blend<STEP>(swap<STEP>(a), b);
            }
        transpose<2 * STEP>(v);
    }
}
