// The bf16 dot product: lanes of float32 plus the products of two pairs of bf16.
#pragma once

#include "lanes.h"

#if defined(MP_BF16_DOT)

MP_INLINE vf dot(vf sum, vu a, vu b) { return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }
MP_INLINE vu pairs(const void* p) {
    vu v;
    memcpy(&v, p, sizeof v);
    return v;
}
MP_INLINE vu broadcast(const void* p) {
    int32_t pair;
    memcpy(&pair, p, 4);
    return (vu)_mm512_set1_epi32(pair);
}

// Both as bf16, a before b.
MP_INLINE vu rounded(vf a, vf b) { return (vu)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a); }
// Both as bf16 in pairs: a in the lower halves.
MP_INLINE vu pairs_of(vf a, vf b) {
    const vu at = {0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006, 0x170007,
                   0x180008, 0x190009, 0x1a000a, 0x1b000b, 0x1c000c, 0x1d000d, 0x1e000e, 0x1f000f};
    return (vu)_mm512_permutexvar_epi16((__m512i)at, (__m512i)rounded(a, b));
}

// Pairs of two rows of 32 values. The order within both vectors is undone by `store_ordered`.
MP_INLINE vu low_pairs(vu a, vu b) { return (vu)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b); }
MP_INLINE vu high_pairs(vu a, vu b) { return (vu)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b); }
MP_INLINE void store_ordered(bf16* to, vf low, vf high) {
    const vi first = {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23};
    const vi second = {8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31};
    const vu both = rounded(shuffle(low, high, first), shuffle(low, high, second));
    memcpy(to, &both, sizeof both);
}

#endif
