// 64 bytes: loads, stores, stores that bypass the caches, and the steps of XXH3. `pin` prevents the compiler from
// loading the bytes again: they may belong to another process, and change.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

constexpr uint32_t PRIME32_1 = 0x9E3779B1u;

#if defined(__AVX512F__)

struct Lanes {
    __m512i v;

    static INLINE Lanes load(const uint8_t* from) { return {_mm512_loadu_si512(from)}; }
    INLINE void pin() { asm("" : "+v"(v)); }
    INLINE void store(uint8_t* to) const { _mm512_storeu_si512(to, v); }
    INLINE void stream(uint8_t* to) const { _mm512_stream_si512((__m512i*)to, v); }

    INLINE void accumulate(Lanes data, Lanes secret) {
        const __m512i keyed = _mm512_xor_si512(data.v, secret.v);
        const __m512i product = _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32));
        const __m512i swapped = _mm512_shuffle_epi32(data.v, (_MM_PERM_ENUM)0x4E);
        v = _mm512_add_epi64(v, _mm512_add_epi64(product, swapped));
    }

    INLINE void scramble(Lanes secret) {
        const __m512i prime = _mm512_set1_epi32(PRIME32_1);
        v = _mm512_xor_si512(_mm512_xor_si512(v, _mm512_srli_epi64(v, 47)), secret.v);
        const __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(v, 32), prime);
        v = _mm512_add_epi64(_mm512_mul_epu32(v, prime), _mm512_slli_epi64(high, 32));
    }
};

#elif defined(__AVX2__)

struct Lanes {
    __m256i v[2];

    static INLINE Lanes load(const uint8_t* from) {
        return {{_mm256_loadu_si256((const __m256i*)from), _mm256_loadu_si256((const __m256i*)from + 1)}};
    }
    INLINE void pin() { asm("" : "+x"(v[0]), "+x"(v[1])); }
    INLINE void store(uint8_t* to) const {
        for (int i = 0; i < 2; i++) _mm256_storeu_si256((__m256i*)to + i, v[i]);
    }
    INLINE void stream(uint8_t* to) const {
        for (int i = 0; i < 2; i++) _mm256_stream_si256((__m256i*)to + i, v[i]);
    }

    INLINE void accumulate(Lanes data, Lanes secret) {
        for (int i = 0; i < 2; i++) {
            const __m256i keyed = _mm256_xor_si256(data.v[i], secret.v[i]);
            const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
            const __m256i swapped = _mm256_shuffle_epi32(data.v[i], 0x4E);
            v[i] = _mm256_add_epi64(v[i], _mm256_add_epi64(product, swapped));
        }
    }

    INLINE void scramble(Lanes secret) {
        const __m256i prime = _mm256_set1_epi32(PRIME32_1);
        for (int i = 0; i < 2; i++) {
            v[i] = _mm256_xor_si256(_mm256_xor_si256(v[i], _mm256_srli_epi64(v[i], 47)), secret.v[i]);
            const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(v[i], 32), prime);
            v[i] = _mm256_add_epi64(_mm256_mul_epu32(v[i], prime), _mm256_slli_epi64(high, 32));
        }
    }
};

#else

struct Lanes {
    uint64_t v[8];

    static INLINE Lanes load(const uint8_t* from) {
        Lanes lanes;
        memcpy(lanes.v, from, sizeof lanes.v);
        return lanes;
    }
    INLINE void pin() { asm("" ::: "memory"); }
    INLINE void store(uint8_t* to) const { memcpy(to, v, sizeof v); }
    INLINE void stream(uint8_t* to) const { store(to); }

    INLINE void accumulate(Lanes data, Lanes secret) {
        for (int i = 0; i < 8; i++) {
            const uint64_t keyed = data.v[i] ^ secret.v[i];
            v[i] += data.v[i ^ 1] + (keyed & 0xFFFFFFFFu) * (keyed >> 32);
        }
    }

    INLINE void scramble(Lanes secret) {
        for (int i = 0; i < 8; i++) v[i] = (v[i] ^ (v[i] >> 47) ^ secret.v[i]) * PRIME32_1;
    }
};

#endif
