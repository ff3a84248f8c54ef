// The online softmax that both attention kernels keep a row of: the largest score so far, the sum of
// exponentials relative to it, and (with the caller) the weighted values on the same scale.
#pragma once

#include <cmath>

#include "exp.h"
#include "lanes.h"

struct Softmax {
    float top = -INF;
    float total = 0.0f;

    // Turns n scores (a multiple of W, those of unseen keys -inf) into weights; returns the factor by which
    // everything gathered before must be multiplied.
    MP_INLINE float take(float* scores, int64_t n) {
        vf best = load(scores);
        for (int64_t i = W; i < n; i += W) best = vmax(best, load(scores + i));
        const float before = top, tile_top = largest(best);
        const float now = tile_top > before || tile_top != tile_top ? tile_top : before;
        if (now == -INF) {  // nothing seen yet
            for (int64_t i = 0; i < n; i += W) store(scores + i, splat(0.0f));
            return 1.0f;
        }
        vf sums = {};
        for (int64_t i = 0; i < n; i += W) {
            const vf weights = exp_falling(load(scores + i) - now);
            sums += weights;
            store(scores + i, weights);
        }
        // At first there is nothing to be multiplied.
        const float factor = now == before || before == -INF ? 1.0f : exp_falling(splat(before - now))[0];
        total = total * factor + sum(sums);
        top = now;
        return factor;
    }
};

// Natural logarithm of the sum of exponentials; -inf where nothing was seen.
MP_INLINE float log_sum(const Softmax& state) {
    return state.total == 0.0f ? -INF : state.top + std::log(state.total);
}

MP_INLINE void cap_scores(float* scores, int64_t n, float soft_cap) {
    for (int64_t i = 0; i < n; i += W) store(scores + i, soft_cap * tanh(load(scores + i) / soft_cap));
}
