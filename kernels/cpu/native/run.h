// The unit in which the decode kernel reads blocks, and the layout of its scores.
#pragma once

#include <algorithm>

#include "pool.h"

constexpr int64_t CHUNK = 256;             // tokens; a multiple of W
constexpr int64_t PITCH = CHUNK + W;       // row of scores, with space for one extra vector

// K or V of `count` tokens of one kv head, contiguous in memory, and the memory to prefetch meanwhile.
template <class T>
struct Run {
    const T* rows;
    const T* prefetch;  // or null
    int64_t count;
    const float* scales = nullptr;  // of each token, or null: none
    const T* end = nullptr;         // of the memory to prefetch, where `skip` is called

    // `n` values have been prefetched.
    MP_INLINE void skip(int64_t n) { prefetch = prefetch && prefetch + n < end ? prefetch + n : nullptr; }
};

// rows[g][i] *= scales[i], for rows of scores.
template <class T>
MP_INLINE void scale_rows(Run<T> run, float* rows, int64_t group) {
    if constexpr (has_scales<T>)
        for (int64_t g = 0; g < group; g++, rows += PITCH)
            for_vectors(run.count, [&](int64_t i, int n) {
                store_some(rows + i, load_some(rows + i, n) * load_some(run.scales + i, n), n);
            });
}

// The type that rows of T are computed in: float8 is converted once for all heads that share a row.
template <class T>
using Wide = std::conditional_t<std::is_same<T, fp8>::value, float, T>;

// The type of the queries.
template <class T>
using Asking = std::conditional_t<has_scales<T>, float, Wide<T>>;

// Prefetches n values and advances. The prefetch is spread over the work, as issuing all at once would stall.
template <class T>
MP_INLINE void prefetch_more(const T*& prefetch, int64_t n) {
    if (!prefetch) return;
    prefetch_row(prefetch, n);
    prefetch += n;
}

// Values to prefetch with each token of a run that is read in several turns: whole cache lines.
template <class T>
MP_INLINE int64_t part_of(int64_t dim, int64_t turns) {
    constexpr int64_t line = 64 / (int64_t)sizeof(T);
    return std::max(line, dim / turns / line * line);
}

// Calls f(run of Wide<T>, tokens before it): once for the whole run, or for each W converted tokens.
// converted: W * dim floats.
template <class T, class F>
MP_INLINE void for_wide(Run<T> run, int64_t dim, float* converted, F f) {
    if constexpr (std::is_same<T, fp8>::value) {
        for (int64_t first = 0; first < run.count; first += W) {
            const int64_t count = run.count - first < W ? run.count - first : W, values = count * dim;
            for (int64_t i = 0; i < values; i += 64) {
                const int64_t some = values - i < 64 ? values - i : 64;
                prefetch_more(run.prefetch, some);
                for_vectors(some, [&](int64_t j, int n) {
                    store_some(converted + i + j, load_some(run.rows + first * dim + i + j, n), n);
                });
            }
            f(Run<float>{converted, nullptr, count}, first);
        }
    } else {
        f(run, 0);
    }
}
