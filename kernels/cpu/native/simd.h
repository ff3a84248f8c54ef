// Vectors of the width of the target processor, and the four storage types of the pool.
//
// The code uses the compiler's vector extension, so that one source serves AVX-512, AVX2, SSE and NEON;
// intrinsics appear only where the extension lacks an instruction. Arithmetic is float32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#define MP_INLINE inline __attribute__((always_inline))
#define MP_EXPORT extern "C" __attribute__((visibility("default")))
// Instantiates DEFINE(type, suffix of the symbol) for every dtype of activations.
#define MP_FOR_DTYPES(DEFINE) DEFINE(float, f32) DEFINE(bf16, bf16) DEFINE(fp16, f16)

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define MP_AVX512 1
constexpr int W = 16;  // floats in a vector
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define MP_AVX2 1
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

#if defined(MP_AVX512) && defined(__AVX512BF16__)
#define MP_BF16_DOT 1  // one instruction multiplies pairs of bf16 and adds both products to a float32
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef uint16_t vh __attribute__((vector_size(W * 2)));
typedef uint8_t vb __attribute__((vector_size(W)));
typedef int8_t vc __attribute__((vector_size(W)));

struct bf16 {
    uint16_t bits;
};
struct fp16 {
    uint16_t bits;
};
struct fp8 {  // e4m3fn: no infinity, NaN is 0x7f and 0xff, the largest number 448
    uint8_t bits;
};

struct code8 {  // times the scale of its token and head
    int8_t code;
};

constexpr float INF = std::numeric_limits<float>::infinity();

MP_INLINE vf splat(float value) {
    vf v;
    for (int i = 0; i < W; i++) v[i] = value;
    return v;
}

// a b + c, rounded in the same way wherever it is inlined: the compiler splits some of the fused operations that it
// forms by itself.
MP_INLINE vf fused(vf a, vf b, vf c) {
#if defined(MP_AVX512)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(MP_AVX2)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

MP_INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }  // b where one is NaN

// ---------------------------------------------------------------- one value

MP_INLINE float to_float(float x) { return x; }

MP_INLINE float to_float(bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

MP_INLINE float to_float(fp16 x) {
#if defined(MP_AVX512) || defined(MP_AVX2)
    return _cvtsh_ss(x.bits);
#else
    const uint32_t sign = (uint32_t)(x.bits & 0x8000) << 16;
    uint32_t exponent = (x.bits >> 10) & 31, mantissa = x.bits & 1023, bits;
    if (exponent == 31) {
        bits = sign | 0x7f800000 | mantissa << 13;
    } else if (exponent != 0) {
        bits = sign | (exponent + 112) << 23 | mantissa << 13;
    } else {
        const float value = (float)mantissa * 0x1p-24f;  // subnormal: exact in float32
        memcpy(&bits, &value, 4);
        bits |= sign;
    }
    float value;
    memcpy(&value, &bits, 4);
    return value;
#endif
}

MP_INLINE float to_float(fp8 x) {
    if ((x.bits & 0x7f) == 0x7f) return std::numeric_limits<float>::quiet_NaN();
    const fp16 half{(uint16_t)((x.bits & 0x80) << 8 | (x.bits & 0x7f) << 7)};  // exponent bias 15, not 7
    return to_float(half) * 256.0f;
}

MP_INLINE void from_float(float* to, float x) { *to = x; }

MP_INLINE void from_float(fp8* to, float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint8_t sign = (uint8_t)(bits >> 24 & 0x80);
    const float magnitude = x < 0 ? -x : x;
    memcpy(&bits, &magnitude, 4);
    if (x != x) {
        to->bits = sign | 0x7f;
    } else if (magnitude >= 448.0f) {
        to->bits = sign | 0x7e;
    } else if (magnitude >= 0x1p-6f) {
        bits += 0x7ffff + (bits >> 20 & 1);  // to nearest, ties to even
        to->bits = sign | (uint8_t)((bits >> 20) - (120 << 3));
    } else {
        const float shifted = magnitude + 0x1p14f;  // aligns the last bit of subnormals
        memcpy(&bits, &shifted, 4);
        to->bits = sign | (uint8_t)bits;
    }
}

MP_INLINE void from_float(bf16* to, float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) {
        to->bits = 0x7fc0;
    } else {
        to->bits = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // to nearest, ties to even
    }
}

MP_INLINE void from_float(fp16* to, float x) {
#if defined(MP_AVX512) || defined(MP_AVX2)
    to->bits = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#else
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) {
        to->bits = sign | 0x7e00;
    } else if (bits >= 0x477ff000) {  // rounds to 65520 or more
        to->bits = sign | 0x7c00;
    } else if (bits >= 0x38800000) {
        const uint32_t rounded = bits + 0xfff + (bits >> 13 & 1);
        to->bits = sign | (uint16_t)((rounded - 0x38000000) >> 13);
    } else {
        float magnitude;
        memcpy(&magnitude, &bits, 4);
        const float shifted = magnitude + 0.5f;  // aligns the subnormal's last bit with float32's, rounding once
        uint32_t aligned;
        memcpy(&aligned, &shifted, 4);
        to->bits = sign | (uint16_t)(aligned - 0x3f000000);
    }
#endif
}

// ---------------------------------------------------------------- W values

MP_INLINE vf load(const float* p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

MP_INLINE vf load(const bf16* p) {
    vh half;
    memcpy(&half, p, sizeof half);
    return (vf)(__builtin_convertvector(half, vu) << 16);
}

MP_INLINE vf load(const fp16* p) {
#if defined(MP_AVX512)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(MP_AVX2)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    vf v;
    for (int i = 0; i < W; i++) v[i] = to_float(p[i]);
    return v;
#endif
}

MP_INLINE vf load(const fp8* p) {
    vb bytes;
    memcpy(&bytes, p, sizeof bytes);
    const vh wide = __builtin_convertvector(bytes, vh);
    const vh half = (wide & 0x80) << 8 | (wide & 0x7f) << 7;
    const vi nan = (__builtin_convertvector(wide, vi) & 0x7f) == 0x7f;
    fp16 halves[W];
    memcpy(halves, &half, sizeof half);
    const vf v = load(halves) * 256.0f;
    return nan ? splat(std::numeric_limits<float>::quiet_NaN()) : v;
}

MP_INLINE vf load(const code8* p) {
#if defined(MP_AVX512)
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(MP_AVX2)
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    vc codes;
    memcpy(&codes, p, sizeof codes);
    return __builtin_convertvector(__builtin_convertvector(codes, vi), vf);
#endif
}

MP_INLINE void store(float* p, vf v) { memcpy(p, &v, sizeof v); }

MP_INLINE void store(fp8* p, vf v) {
    for (int i = 0; i < W; i++) from_float(p + i, v[i]);
}

// Rounds to nearest, ties to even. |v| at most 127; NaN becomes 0.
MP_INLINE void store(code8* p, vf v) {
    const vf shift = splat(12582912.0f);  // 1.5 * 2^23
    const vi whole = (vi)(v + shift) - (vi)shift;
    const vc codes = __builtin_convertvector(v == v ? whole : vi{}, vc);
    memcpy(p, &codes, sizeof codes);
}

MP_INLINE void store(bf16* p, vf v) {
#if defined(MP_BF16_DOT)
    const __m256i half = (__m256i)_mm512_cvtneps_pbh((__m512)v);  // values below 2^-126 become zero
    memcpy(p, &half, sizeof half);
#else
    const vu bits = (vu)v;
    const vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const vu nan = (vu)(v != v);
    const vh half = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), vh);
    memcpy(p, &half, sizeof half);
#endif
}

MP_INLINE void store(fp16* p, vf v) {
#if defined(MP_AVX512)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(MP_AVX2)
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < W; i++) from_float(p + i, v[i]);
#endif
}

// Prefetches n values.
template <class T>
MP_INLINE void prefetch_row(const T* row, int64_t n) {
    for (int64_t i = 0; i < n; i += 64 / (int64_t)sizeof(T)) __builtin_prefetch(row + i);
}

// ---------------------------------------------------------------- the last n < W values of a row

template <class T>
MP_INLINE vf load_n(const T* p, int n) {
    T whole[W] = {};
    for (int i = 0; i < n; i++) whole[i] = p[i];
    return load(whole);
}

template <class T>
MP_INLINE void store_n(T* p, vf v, int n) {
    T whole[W];
    store(whole, v);
    for (int i = 0; i < n; i++) p[i] = whole[i];
}

#if defined(MP_AVX512)
template <>
MP_INLINE vf load_n(const float* p, int n) {
    return (vf)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
}
template <>
MP_INLINE void store_n(float* p, vf v, int n) {
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)v);
}
#endif

// A row of n values, W at a time: f(offset, count) with count == W except for the last.
template <class F>
MP_INLINE void for_vectors(int64_t n, F f) {
    int64_t i = 0;
    for (; i + W <= n; i += W) f(i, W);
    if (i < n) f(i, (int)(n - i));
}

template <class T>
MP_INLINE vf load_some(const T* p, int count) {
    return count == W ? load(p) : load_n(p, count);
}
template <class T>
MP_INLINE void store_some(T* p, vf v, int count) {
    if (count == W) {
        store(p, v);
    } else {
        store_n(p, v, count);
    }
}
