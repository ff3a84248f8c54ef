// Prefill attention in bf16, by the bf16 dot product, for head_dim a multiple of 32.
//
// Query rows are in lanes, so that keys are read as they lie in the pool, each pair of dimensions broadcast, and
// the softmax has no operation across lanes. For the second product pairs of values of V are interleaved.
#pragma once

#include <vector>

#include "dot.h"
#include "exp.h"
#include "query_block.h"
#include "softmax.h"
#include "tile.h"

#if defined(MP_BF16_DOT)

namespace bf16_prefill {

constexpr int64_t TILE = 64;                  // keys
constexpr int ROW_VECTORS = 4;                // of a block at most
constexpr int64_t ROWS = ROW_VECTORS * W;

MP_INLINE void prefetch_far(const bf16* row, int64_t n) {
    for (int64_t i = 0; i < n; i += 32) __builtin_prefetch(row + i, 0, 2);
}

struct Scratch {
    std::vector<uint32_t> queries;  // [dim / 2, row vectors * W], pairs of dimensions
    std::vector<uint32_t> weights;  // [TILE / 2, row vectors * W], pairs of keys
    std::vector<bf16> values;       // [TILE / 2, dim * 2], pairs of keys
    std::vector<float> scores;      // [TILE, row vectors * W]
    std::vector<float> sums;        // [rows, dim], each 32 dimensions in the order of the interleaved values
    vf top[ROW_VECTORS], total[ROW_VECTORS];
    vi first[ROW_VECTORS], last[ROW_VECTORS];  // positions of the keys that a row sees
    float factors[ROWS];

    void fit(int64_t dim) {
        queries.resize(dim / 2 * ROWS);
        weights.resize(TILE / 2 * ROWS);
        values.resize(TILE * dim);
        scores.resize(TILE * ROWS);
        sums.resize(ROWS * dim);
    }
};

// scores[key][row] = scale * (key · row), for R vectors of rows.
template <int R>
void score(Scratch& s, const bf16* const* keys, const bf16* const* next, int64_t dim, float scale) {
    constexpr int K = 16 / R;  // keys at a time
    for (int64_t key = 0; key < TILE; key += K) {
        vf sums[K][R] = {};
        const uint32_t* q = s.queries.data();
        for (int64_t d = 0; d < dim; d += 2, q += R * W) {
            vu rows[R];
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) rows[r] = pairs(q + r * W);
#pragma GCC unroll 16
            for (int k = 0; k < K; k++) {
                const vu pair = broadcast(keys[key + k] + d);
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) sums[k][r] = dot(sums[k][r], rows[r], pair);
            }
        }
#pragma GCC unroll 16
        for (int k = 0; k < K; k++) {
            if (next) prefetch_far(next[key + k], dim);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) store(s.scores.data() + ((key + k) * R + r) * W, sums[k][r] * scale);
        }
    }
}

// Scores to weights, and the factors of the sums so far. tile: position of the first key.
template <int R>
void weigh(Scratch& s, int64_t tile, bool all_visible) {
    for (int r = 0; r < R; r++) {
        float* scores = s.scores.data() + r * W;
        vf best = s.top[r];
        for (int64_t key = 0; key < TILE; key++) {
            vf score = load(scores + key * R * W);
            if (!all_visible) {
                const int32_t position = (int32_t)(tile + key);
                const vi hidden = (position > s.last[r]) | (position < s.first[r]);
                score = hidden ? splat(-INF) : score;
                store(scores + key * R * W, score);
            }
            best = vmax(best, score);
        }
        const vf before = s.top[r], none = splat(-INF), zero = splat(0.0f);
        const vf now = best == none ? zero : best;  // no key seen yet: all weights are 0
        vf total = {};
        uint32_t* weights = s.weights.data() + r * W;
        for (int64_t key = 0; key < TILE; key += 2) {
            const vf even = exp_falling(load(scores + key * R * W) - now);
            const vf odd = exp_falling(load(scores + (key + 1) * R * W) - now);
            total += even;
            total += odd;
            const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)even));
            const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)odd));
            const __m512i both = _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
            memcpy(weights + key / 2 * R * W, &both, sizeof both);
        }
        const vf one = splat(1.0f), fallen = exp_falling(before - now);
        const vf factor = before == none ? one : fallen;
        store(s.factors + r * W, factor);
        s.total[r] = s.total[r] * factor + total;
        s.top[r] = best;
    }
}

// values[key / 2] = the values of both keys, interleaved; null: zeros.
inline void interleave(Scratch& s, const bf16* const* values, const bf16* const* next, int64_t dim) {
    bf16* to = s.values.data();
    for (int64_t key = 0; key < TILE; key += 2)
        for (int64_t d = 0; d < dim; d += 32, to += 64) {
            const vu a = values[key] ? pairs(values[key] + d) : vu{};
            const vu b = values[key + 1] ? pairs(values[key + 1] + d) : vu{};
            if (next) __builtin_prefetch(next[key] + d, 0, 2), __builtin_prefetch(next[key + 1] + d, 0, 2);
            const vu low = low_pairs(a, b), high = high_pairs(a, b);
            memcpy(to, &low, sizeof low);
            memcpy(to + 32, &high, sizeof high);
        }
}

// sums[row] = factor * sums[row] + weights[row] · values, for N rows and C vectors of dimensions.
template <int N, int C>
__attribute__((noinline)) void gather_rows(Scratch& s, int64_t row, int64_t stride, int64_t column, int64_t dim) {
    vf sums[N][C];
    float* at = s.sums.data() + row * dim + column;
#pragma GCC unroll 8
    for (int n = 0; n < N; n++)
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) sums[n][c] = load(at + n * dim + c * W) * s.factors[row + n];
    const bf16* values = s.values.data() + 2 * column;
    const uint32_t* weights = s.weights.data() + row;
    for (int64_t pair = 0; pair < TILE / 2; pair++, values += 2 * dim, weights += stride) {
        vu v[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) v[c] = pairs(values + c * 2 * W);
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
            const vu weight = broadcast(weights + n);
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) sums[n][c] = dot(sums[n][c], v[c], weight);
        }
    }
#pragma GCC unroll 8
    for (int n = 0; n < N; n++)
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) store(at + n * dim + c * W, sums[n][c]);
}

template <int MOST, int C>
void gather_columns(Scratch& s, int64_t rows, int64_t stride, int64_t column, int64_t dim) {
    for_row_groups<MOST>(rows, [&](int64_t row, auto N) { gather_rows<N, C>(s, row, stride, column, dim); });
}

inline void gather(Scratch& s, int64_t rows, int64_t stride, int64_t dim) {
    int64_t column = 0;
    for (; column + 8 * W <= dim; column += 8 * W) gather_columns<3, 8>(s, rows, stride, column, dim);
    if (column + 4 * W <= dim) gather_columns<6, 4>(s, rows, stride, column, dim), column += 4 * W;
    if (column + 2 * W <= dim) gather_columns<8, 2>(s, rows, stride, column, dim);
}

// The rows of `block`, at most R * W.
template <int R>
void attend_rows(Scratch& s, const QueryBlock<bf16>& block, const Pool& pool, int64_t layer, const Rules& rules) {
    const int64_t dim = pool.head_dim, rows = block.tokens * block.group;
    std::fill(s.queries.begin(), s.queries.end(), 0);
    std::fill(s.sums.begin(), s.sums.begin() + rows * dim, 0.0f);
    int32_t first_seen[R * W], last_seen[R * W];
    std::fill(first_seen, first_seen + R * W, 0);
    std::fill(last_seen, last_seen + R * W, -1);
    for (int64_t row = 0; row < rows; row++) {
        const bf16* q = block.query(row, dim);
        for (int64_t d = 0; d < dim; d += 2) memcpy(&s.queries[d / 2 * R * W + row], q + d, 4);
        const int64_t position = block.position + row / block.group;
        last_seen[row] = (int32_t)std::min(position, block.context - 1);
        first_seen[row] = (int32_t)(rules.window > 0 ? std::max<int64_t>(0, position + 1 - rules.window) : 0);
    }
    for (int r = 0; r < R; r++) {
        memcpy(&s.first[r], first_seen + r * W, sizeof s.first[r]);
        memcpy(&s.last[r], last_seen + r * W, sizeof s.last[r]);
        s.top[r] = splat(-INF);
        s.total[r] = splat(0.0f);
    }
    // Every row sees the keys from the last row's first to the first row's last one.
    const bool is_full = rows == R * W;
    const int64_t shared_first = first_seen[rows - 1], shared_last = last_seen[0];

    const bf16* keys[2][TILE];
    const bf16* values[2][TILE];
    const int64_t end = std::min(block.context, block.position + block.tokens), first = first_seen[0];
    const auto find = [&](int64_t tile, int at) {
        const int64_t from = std::max(first, tile), to = std::min(end, tile + TILE);
        std::fill(values[at], values[at] + TILE, nullptr);
        find_tokens(pool, layer, block.head, block.table, from, to, keys[at] + (from - tile));
        for (int64_t i = from - tile; i < to - tile; i++) values[at][i] = keys[at][i] + pool.kv_stride;
        // Keys that no row sees: any memory will do, their scores are hidden.
        std::fill(keys[at], keys[at] + (from - tile), keys[at][from - tile]);
        std::fill(keys[at] + (to - tile), keys[at] + TILE, keys[at][from - tile]);
    };
    int now = 0;
    int64_t tile = first < end ? first / TILE * TILE : end;
    if (tile < end) find(tile, now);
    for (; tile < end; tile += TILE, now ^= 1) {
        const bool more = tile + TILE < end;
        if (more) find(tile + TILE, now ^ 1);
        score<R>(s, keys[now], more ? keys[now ^ 1] : nullptr, dim, rules.scale);
        if (rules.soft_cap > 0) cap_scores(s.scores.data(), TILE * R * W, rules.soft_cap);
        weigh<R>(s, tile, is_full && tile >= shared_first && tile + TILE - 1 <= shared_last);
        interleave(s, values[now], more ? values[now ^ 1] : nullptr, dim);
        gather(s, rows, R * W, dim);
    }

    for (int64_t row = 0; row < rows; row++) {
        const float* sums = s.sums.data() + row * dim;
        const float total = s.total[row / W][row % W], top = s.top[row / W][row % W];
        // The sums of a query that sees no key are zero.
        const float divisor = total == 0.0f ? 1.0f : total / rules.v_scale;
        bf16* out = block.output(row, dim);
        for (int64_t d = 0; d < dim; d += 2 * W)
            store_ordered(out + d, load(sums + d) / divisor, load(sums + d + W) / divisor);
        if (block.lse) *block.log_sum(row) = total == 0.0f ? -INF : top + std::log(total);
    }
}

inline void attend(Scratch& s, const QueryBlock<bf16>& block, const Pool& pool, int64_t layer, const Rules& rules) {
    s.fit(pool.head_dim);
    const int64_t rows = block.tokens * block.group;
    if (rows <= W) return attend_rows<1>(s, block, pool, layer, rules);
    if (rows <= 2 * W) return attend_rows<2>(s, block, pool, layer, rules);
    attend_rows<4>(s, block, pool, layer, rules);
}

}  // namespace bf16_prefill

#endif
