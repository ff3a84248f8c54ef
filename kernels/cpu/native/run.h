// The unit in which the decode kernel goes through pages, and the rows of scores it fills.
#pragma once

#include "pool.h"

constexpr int64_t CHUNK = 256;             // tokens; a multiple of W
constexpr int64_t PITCH = CHUNK + W;       // a row of scores, with room for one vector too many

// K or V of `count` tokens of one kv head, one after the other in memory, and what will be read a little
// later.
template <class T>
struct Run {
    const T* rows;
    const T* soon;  // or null
    int64_t count;
};

// What rows of T are computed from: float8 is widened first, once for all heads that share a row.
template <class T>
using Wide = std::conditional_t<std::is_same<T, fp8>::value, float, T>;

// Asks for n more values behind `soon`. Spread over the work: asked for all at once they would hold it up.
template <class T>
MP_INLINE void ask(const T*& soon, int64_t n) {
    if (!soon) return;
    prefetch_row(soon, n);
    soon += n;
}

// Calls f(run of Wide<T>, tokens before it) for the whole run at once, or for W widened tokens after the other.
// room: W * dim floats.
template <class T, class F>
MP_INLINE void for_wide(Run<T> run, int64_t dim, float* room, F f) {
    if constexpr (std::is_same<T, fp8>::value) {
        for (int64_t first = 0; first < run.count; first += W) {
            const int64_t count = run.count - first < W ? run.count - first : W, values = count * dim;
            for (int64_t i = 0; i < values; i += 64) {
                const int64_t some = values - i < 64 ? values - i : 64;
                ask(run.soon, some);
                for_vectors(some, [&](int64_t j, int n) {
                    store_some(room + i + j, load_some(run.rows + first * dim + i + j, n), n);
                });
            }
            f(Run<float>{room, nullptr, count}, first);
        }
    } else {
        f(run, 0);
    }
}
