// Scores of a run of keys for the query heads that prefetch_size a kv head.
#pragma once

#include <algorithm>

#include "lanes.h"
#include "run.h"

// Lanes with the sum q · k, for N vectors of dimensions; N = 0: any number of dimensions.
template <int N, class Q, class T>
MP_INLINE vf products_of(const Q* q, const T* k, int64_t dim) {
    vf products = {};
    if constexpr (N == 0) {
        for_vectors(dim, [&](int64_t i, int n) { products += load_some(q + i, n) * load_some(k + i, n); });
    } else {
#pragma GCC unroll 16
        for (int i = 0; i < N; i++) products += load(q + i * W) * load(k + i * W);
    }
    return products;
}

#if defined(MP_BF16_DOT)
template <int N>
MP_INLINE vf products_of(const bf16* q, const bf16* k, int64_t dim) {
    if constexpr (N % 2 != 0 || N == 0) {
        return products_of<0, bf16, bf16>(q, k, dim);
    } else {
        __m512 products = _mm512_setzero_ps();
#pragma GCC unroll 16
        for (int i = 0; i < N; i += 2)
            products = _mm512_dpbf16_ps(products, (__m512bh)_mm512_loadu_si512(k + i * W),
                                        (__m512bh)_mm512_loadu_si512(q + i * W));
        return (vf)products;
    }
}
#endif

// One head and W keys; keys beyond `last` repeat it.
template <int N, class Q, class T>
MP_INLINE void score_head(const Q* q, const T* k, int64_t last, int64_t dim, float scale, float* scores) {
    vf products[W];
    if (last >= W - 1) {
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) products[i] = products_of<N>(q, k + i * dim, dim);
    } else {
        for (int i = 0; i < W; i++) products[i] = products_of<N>(q, k + std::min<int64_t>(i, last) * dim, dim);
    }
    store(scores, sum_each(products) * scale);
}

// Two heads and W keys, half of the keys at a time, so that a key is loaded once for both heads.
template <int N, class Q, class T>
MP_INLINE void score_two_heads(const Q* q, const T* k, int64_t dim, float scale, float* scores) {
    vf halves[2];
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++, k += W / 2 * dim) {
        vf products[W];
#pragma GCC unroll 16
        for (int i = 0; i < W / 2; i++) {
            products[i] = products_of<N>(q, k + i * dim, dim);
            products[W / 2 + i] = products_of<N>(q + dim, k + i * dim, dim);
        }
        halves[half] = sum_each(products) * scale;
    }
    store(scores, blend<W / 2>(halves[0], swap<W / 2>(halves[1])));
    store(scores + PITCH, blend<W / 2>(swap<W / 2>(halves[0]), halves[1]));
}

// scores[g][i] = scale · q[g] · k[i]. Writes whole vectors.
template <class Q, class T, int N>
void score(const Q* q, int64_t group, int64_t any_dim, Run<T> keys, float scale, float* scores) {
    const int64_t dim = N > 0 ? N * W : any_dim, prefetch_size = (W * dim + group - 1) / group;
    const T* k = keys.rows;
    for (int64_t first = 0; first < keys.count; first += W, k += W * dim) {
        const int64_t last = keys.count - first - 1;
        int64_t g = 0;
        if constexpr (N > 0) {
            for (; last >= W - 1 && g + 2 <= group; g += 2) {
                prefetch_more(keys.prefetch, 2 * prefetch_size);
                score_two_heads<N>(q + g * dim, k, dim, scale, scores + g * PITCH + first);
            }
        }
        for (; g < group; g++) {
            prefetch_more(keys.prefetch, prefetch_size);
            score_head<N>(q + g * dim, k, last, dim, scale, scores + g * PITCH + first);
        }
    }
}

template <class Q, class T>
using Score = void (*)(const Q*, int64_t, int64_t, Run<T>, float, float*);

template <class Q, class T>
Score<Q, T> score_for(int64_t dim) {
    if (dim == W) return score<Q, T, 1>;
    if (dim == 2 * W) return score<Q, T, 2>;
    if (dim == 4 * W) return score<Q, T, 4>;
    if (dim == 8 * W) return score<Q, T, 8>;
    if (dim == 16 * W) return score<Q, T, 16>;
    return score<Q, T, 0>;
}
