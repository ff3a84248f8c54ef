// The online softmax of a row: the largest score so far and the sum of exponentials relative to it. The caller
// keeps the weighted sum of the values on the same scale.
#pragma once

#include <cmath>

#include "exp.h"
#include "lanes.h"

struct Softmax {
    float top = -INF;
    float total = 0.0f;

    // Converts n scores (a multiple of W; -inf for invisible keys) to weights. Returns the factor by which the
    // caller must multiply its sums.
    MP_INLINE float take(float* scores, int64_t n) {
        vf best = load(scores);
        for (int64_t i = W; i < n; i += W) best = vmax(best, load(scores + i));
        const float before = top, tile_top = largest(best);
        const float now = tile_top > before || tile_top != tile_top ? tile_top : before;
        if (now == -INF) {  // no key seen yet
            for (int64_t i = 0; i < n; i += W) store(scores + i, splat(0.0f));
            return 1.0f;
        }
        vf sums = {};
        for (int64_t i = 0; i < n; i += W) {
            const vf weights = exp_falling(load(scores + i) - now);
            sums += weights;
            store(scores + i, weights);
        }
        // Before the first key the sums are zero.
        const float factor = now == before || before == -INF ? 1.0f : exp_falling(splat(before - now))[0];
        total = total * factor + sum(sums);
        top = now;
        return factor;
    }
};

// Natural logarithm of the sum of exponentials; -inf if no key was seen.
MP_INLINE float log_sum(const Softmax& state) {
    return state.total == 0.0f ? -INF : state.top + std::log(state.total);
}

MP_INLINE void cap_scores(float* scores, int64_t n, float soft_cap) {
    for (int64_t i = 0; i < n; i += W) store(scores + i, soft_cap * tanh(load(scores + i) / soft_cap));
}
