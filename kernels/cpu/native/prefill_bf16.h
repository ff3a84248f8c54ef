// Prefill attention in bf16, by the bf16 dot product, for head_dim a multiple of 32.
//
// Query rows are in lanes, so that keys are read as they lie in the pool, each pair of dimensions broadcast, and
// the softmax has no operation across lanes. For the second product pairs of values of V are interleaved.
#pragma once

#include "dot.h"
#include "exp.h"
#include "lines.h"
#include "query_block.h"
#include "softmax.h"
#include "tile.h"

#if defined(MP_BF16_DOT)

namespace bf16_prefill {

constexpr int64_t TILE = 64;                  // keys
constexpr int ROW_VECTORS = 4;                // of a block at most
constexpr int64_t ROWS = ROW_VECTORS * W;
constexpr float LOG2_E = 1.44269504f;

MP_INLINE void prefetch_far(const bf16* row, int64_t n) {
    for (int64_t i = 0; i < n; i += 32) __builtin_prefetch(row + i, 0, 2);
}

struct Scratch {
    Lines<uint32_t> queries;  // [dim / 2, row vectors * W], pairs of dimensions
    Lines<uint32_t> weights;  // [TILE / 2, row vectors * W], pairs of keys
    Lines<bf16> values;       // [TILE / 2, dim * 2], pairs of keys
    Lines<float> scores;      // [TILE, row vectors * W], times log2 e
    Lines<float> sums;        // [rows, dim], each 32 dimensions in the order of the interleaved values
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

// The keys of a tile that are computed: begin … end - 1, both even. The others are seen by no row of the block.
struct Part {
    int64_t tile;  // position of the tile's first key
    int64_t begin, end;
};

// queries[d / 2][row] = the pair d, d + 1 of a row; null: zeros.
template <int R>
void take_queries(Scratch& s, const bf16* const* rows, int64_t dim) {
    for (int64_t first = 0; first < R * W; first += W)
        for (int64_t d = 0; d < dim; d += 2 * W) {
            vf block[W];
            for (int i = 0; i < W; i++) block[i] = rows[first + i] ? (vf)pairs(rows[first + i] + d) : vf{};
            transpose(block);
            uint32_t* to = s.queries.data() + d / 2 * R * W + first;
            for (int j = 0; j < W; j++) memcpy(to + j * R * W, &block[j], sizeof block[j]);
        }
}

// scores[key][row] = scale * (key · row), for K keys and R vectors of rows.
template <int R, int K>
__attribute__((noinline)) void score_keys(const uint32_t* q, const bf16* const* keys, int64_t dim, float scale,
                                          float* scores) {
    vf sums[K][R] = {};
    const bf16* key[K];
    for (int k = 0; k < K; k++) key[k] = keys[k];
    for (int64_t d = 0; d < dim; d += 2, q += R * W) {
        vu rows[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) rows[r] = pairs(q + r * W);
#pragma GCC unroll 8
        for (int k = 0; k < K; k++) {
            const vu pair = broadcast(key[k] + d);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) sums[k][r] = dot(sums[k][r], rows[r], pair);
        }
    }
#pragma GCC unroll 8
    for (int k = 0; k < K; k++)
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) store(scores + (k * R + r) * W, sums[k][r] * scale);
}

// The scores of a part. next: the keys of the next tile, which are prefetched, or null.
template <int R>
void score(Scratch& s, const Part& part, const bf16* const* keys, const bf16* const* next, int64_t dim, float scale) {
    constexpr int MOST = std::min(8, 24 / R);  // keys at a time
    for_row_groups<MOST>(part.end - part.begin, [&](int64_t at, auto K) {
        const int64_t key = part.begin + at;
        if (next)
            for (int k = 0; k < K; k++) prefetch_far(next[key + k], dim);
        score_keys<R, K>(s.queries.data(), keys + key, dim, scale, s.scores.data() + key * R * W);
    });
}

// Scores to weights, and the factors of the sums so far.
template <int R>
void weigh(Scratch& s, const Part& part, bool all_visible) {
    vf best[R];
    for (int r = 0; r < R; r++) best[r] = s.top[r];
    for (int64_t key = part.begin; key < part.end; key++)
        for (int r = 0; r < R; r++) {
            float* at = s.scores.data() + (key * R + r) * W;
            vf score = load(at);
            if (!all_visible) {
                const int32_t position = (int32_t)(part.tile + key);
                const vi hidden = (position > s.last[r]) | (position < s.first[r]);
                score = hidden ? splat(-INF) : score;
                store(at, score);
            }
            best[r] = vmax(best[r], score);
        }
    for (int r = 0; r < R; r++) {
        const float* scores = s.scores.data() + r * W;
        const vf before = s.top[r], none = splat(-INF), zero = splat(0.0f);
        const vf now = best[r] == none ? zero : best[r];  // no key seen yet: all weights are 0
        vf even_total = {}, odd_total = {};
        uint32_t* weights = s.weights.data() + r * W;
        for (int64_t key = part.begin; key < part.end; key += 2) {
            const vf even = exp2_falling(load(scores + key * R * W) - now);
            const vf odd = exp2_falling(load(scores + (key + 1) * R * W) - now);
            even_total += even;
            odd_total += odd;
            const vu both = pairs_of(even, odd);
            memcpy(weights + key / 2 * R * W, &both, sizeof both);
        }
        const vf one = splat(1.0f), fallen = exp2_falling(before - now);
        const vf factor = before == none ? one : fallen;
        store(s.factors + r * W, factor);
        s.total[r] = fused(s.total[r], factor, even_total + odd_total);
        s.top[r] = best[r];
    }
}

// values[key / 2] = the values of both keys, interleaved; null: zeros.
inline void interleave(Scratch& s, const Part& part, const bf16* const* values, const bf16* const* next, int64_t dim) {
    bf16* to = s.values.data() + part.begin * dim;
    for (int64_t key = part.begin; key < part.end; key += 2)
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
__attribute__((noinline)) void gather_rows(Scratch& s, const Part& part, int64_t row, int64_t stride, int64_t column,
                                           int64_t dim) {
    vf sums[N][C];
    float* at = s.sums.data() + row * dim + column;
#pragma GCC unroll 8
    for (int n = 0; n < N; n++)
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) sums[n][c] = load(at + n * dim + c * W) * s.factors[row + n];
    const bf16* values = s.values.data() + part.begin * dim + 2 * column;
    const uint32_t* weights = s.weights.data() + part.begin / 2 * stride + row;
    for (int64_t key = part.begin; key < part.end; key += 2, values += 2 * dim, weights += stride) {
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
void gather_columns(Scratch& s, const Part& part, int64_t rows, int64_t stride, int64_t column, int64_t dim) {
    for_row_groups<MOST>(rows, [&](int64_t row, auto N) { gather_rows<N, C>(s, part, row, stride, column, dim); });
}

// Sums of 6 rows and 4 vectors leave registers for the values: of 3 rows and 8, each row would read them again.
inline void gather(Scratch& s, const Part& part, int64_t rows, int64_t stride, int64_t dim) {
    int64_t column = 0;
    for (; column + 4 * W <= dim; column += 4 * W) gather_columns<6, 4>(s, part, rows, stride, column, dim);
    if (column < dim) gather_columns<8, 2>(s, part, rows, stride, column, dim);
}

// The rows of `block`, at most R * W.
template <int R>
void attend_rows(Scratch& s, const QueryBlock<bf16>& block, const Pool& pool, int64_t layer, const Rules& rules) {
    const int64_t dim = pool.head_dim, rows = block.tokens * block.group;
    std::fill(s.sums.begin(), s.sums.begin() + rows * dim, 0.0f);
    int32_t first_seen[R * W], last_seen[R * W];
    std::fill(first_seen, first_seen + R * W, 0);
    std::fill(last_seen, last_seen + R * W, -1);
    const bf16* queries[R * W] = {};
    for (int64_t row = 0; row < rows; row++) {
        queries[row] = block.query(row, dim);
        const int64_t position = block.position + row / block.group;
        last_seen[row] = (int32_t)std::min(position, block.context - 1);
        first_seen[row] = (int32_t)(rules.window > 0 ? std::max<int64_t>(0, position + 1 - rules.window) : 0);
    }
    take_queries<R>(s, queries, dim);
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
        const int64_t from = std::max(first, tile) - tile, to = std::min(end - tile, TILE);
        const Part part{tile, from / 2 * 2, (to + 1) / 2 * 2};
        score<R>(s, part, keys[now], more ? keys[now ^ 1] : nullptr, dim, rules.scale * LOG2_E);
        if (rules.soft_cap > 0)
            cap_scores(s.scores.data() + part.begin * R * W, (part.end - part.begin) * R * W, rules.soft_cap * LOG2_E);
        weigh<R>(s, part, is_full && tile + part.begin >= shared_first && tile + part.end - 1 <= shared_last);
        interleave(s, part, values[now], more ? values[now ^ 1] : nullptr, dim);
        gather(s, part, rows, R * W, dim);
    }

    for (int64_t row = 0; row < rows; row++) {
        const float* sums = s.sums.data() + row * dim;
        const float total = s.total[row / W][row % W], top = s.top[row / W][row % W];
        // The sums of a query that sees no key are zero.
        const float factor = total == 0.0f ? 1.0f : rules.v_scale / total;
        bf16* out = block.output(row, dim);
        for (int64_t d = 0; d < dim; d += 2 * W)
            store_ordered(out + d, load(sums + d) * factor, load(sums + d + W) * factor);
        if (block.lse) *block.log_sum(row) = total == 0.0f ? -INF : top / LOG2_E + std::log(total);
    }
}

inline void attend(Scratch& s, const QueryBlock<bf16>& block, const Pool& pool, int64_t layer, const Rules& rules) {
    s.fit(pool.head_dim);
    const int64_t rows = block.tokens * block.group;
    if (rows <= W) return attend_rows<1>(s, block, pool, layer, rules);
    if (rows <= 2 * W) return attend_rows<2>(s, block, pool, layer, rules);
    attend_rows<ROW_VECTORS>(s, block, pool, layer, rules);
}

}  // namespace bf16_prefill

#endif
