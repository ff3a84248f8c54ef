// Causal attention of many new tokens over cached and new blocks.
//
// For one kv head, query rows (tokens x the heads that share the kv head) are computed in blocks, keys in tiles
// aligned to 64 positions. A tile of K is transposed to float32 with keys in lanes, a tile of V is converted to
// float32, and both products use the loop of tile.h; bf16 has a form of its own where there is an instruction
// for it. A row's result does not depend on the other rows, nor on the chunks of a prompt.

#include <algorithm>
#include <vector>

#include "lines.h"
#include "query_block.h"
#include "softmax.h"
#include "threads.h"
#include "tile.h"
#include "prefill_bf16.h"

namespace {

constexpr int64_t TILE = 64;        // keys
constexpr int64_t BLOCK_ROWS = 96;  // query rows
#if defined(MP_BF16_DOT)
constexpr int64_t BF16_ROWS = bf16_prefill::ROWS;
#else
constexpr int64_t BF16_ROWS = 0;
#endif
constexpr double ATTEND_NS = 0.02;  // nanoseconds of one thread for a row, key and dimension, roughly

// Scratch of one block of rows. dim is head_dim rounded up to whole vectors; the padding is zero.
struct Scratch {
    Lines<float> keys, values, queries, scores, sums;
    float k_scales[TILE], v_scales[TILE];
    std::vector<Softmax> states;

    void fit(int64_t dim) {
        keys.assign(dim * TILE, 0.0f);          // [dim, TILE]
        values.assign(TILE * dim, 0.0f);        // [TILE, dim]
        queries.assign(BLOCK_ROWS * dim, 0.0f); // [rows, dim]
        scores.resize(BLOCK_ROWS * TILE);       // [rows, TILE]
        sums.resize(BLOCK_ROWS * dim);          // [rows, dim]
        states.resize(BLOCK_ROWS);
    }
};

// One tile: keys[d][i], values[i][d] for i in begin … end - 1; the other keys of the tile become zero.
template <class T>
void take_tile(Scratch& s, const T** rows, int64_t begin, int64_t end, int64_t kv_stride, int64_t head_dim,
               int64_t dim) {
    for (int64_t i = 0; i < TILE; i++) {
        float* to = s.values.data() + i * dim;
        if (i < begin || i >= end) {
            std::fill(to, to + dim, 0.0f);
            continue;
        }
        const T* v = rows[i - begin] + kv_stride;
        for_vectors(head_dim, [&](int64_t d, int n) {
            vf some = load_some(v + d, n);
            if constexpr (has_scales<T>) some *= s.v_scales[i - begin];
            store_some(to + d, some, n);
        });
    }
    for (int64_t first = 0; first < TILE; first += W)
        for_vectors(head_dim, [&](int64_t d, int n) {
            vf block[W];
            for (int i = 0; i < W; i++) {
                const int64_t key = first + i;
                block[i] = key < begin || key >= end ? splat(0.0f) : load_some(rows[key - begin] + d, n);
                if constexpr (has_scales<T>)
                    if (key >= begin && key < end) block[i] *= s.k_scales[key - begin];
            }
            transpose(block);
            for (int j = 0; j < n; j++) store(s.keys.data() + (d + j) * TILE + first, block[j]);
        });
}

// One tile: sums[r][c], rows of stride lds, += x · w, or = with `begin`. Not inlined, because only then the compiler
// keeps every sum in a register.
template <int R, int C>
__attribute__((noinline)) void product(const float* x, int64_t ldx, const float* w, int64_t ldw, int64_t inputs,
                                       bool begin, float* sums, int64_t lds) {
    vf registers[R][C];
    fetch<R, C>(registers, sums, lds, begin);
    accumulate<R, C>(x, ldx, w, ldw, inputs, registers);
    keep<R, C>(registers, sums, lds);
}

// scores[rows, TILE] = queries · keys
void score(Scratch& s, int64_t rows, int64_t head_dim, int64_t dim) {
    constexpr int C = 4;
    for (int64_t first = 0; first < TILE; first += C * W)
        for_tiles<C>(rows, [&](int64_t row, auto R, int64_t at, auto some) {
            const int64_t key = first + at * W;
            product<R, some>(s.queries.data() + row * dim, dim, s.keys.data() + key, TILE, head_dim, true,
                             s.scores.data() + row * TILE + key, TILE);
        });
}

// sums[rows, dim] += scores · values
template <int C>
void gather_columns(Scratch& s, int64_t rows, int64_t first, int64_t dim) {
    for_tiles<C>(rows, [&](int64_t row, auto R, int64_t at, auto some) {
        const int64_t column = first + at * W;
        product<R, some>(s.scores.data() + row * TILE, TILE, s.values.data() + column, dim, TILE, false,
                         s.sums.data() + row * dim + column, dim);
    });
}

void gather(Scratch& s, int64_t rows, int64_t dim) {
    int64_t first = 0;
    for (; first + 4 * W <= dim; first += 4 * W) gather_columns<4>(s, rows, first, dim);
    for (; first + 2 * W <= dim; first += 2 * W) gather_columns<2>(s, rows, first, dim);
    for (; first < dim; first += W) gather_columns<1>(s, rows, first, dim);
}

// Sets the scores of keys that the query at `position` does not see to -inf.
MP_INLINE void hide(float* scores, int64_t tile, int64_t position, int64_t context, int64_t window) {
    const int64_t end = std::clamp<int64_t>(std::min(position + 1, context) - tile, 0, TILE);
    const int64_t begin = window > 0 ? std::clamp<int64_t>(position + 1 - window - tile, 0, TILE) : 0;
    std::fill(scores, scores + std::min(begin, end), -INF);
    std::fill(scores + end, scores + TILE, -INF);
}

template <class Q, class T>
void attend(Scratch& s, const QueryBlock<Q>& block, const Pool& pool, int64_t layer, const Rules& rules) {
    const int64_t head_dim = pool.head_dim, dim = (head_dim + W - 1) / W * W, rows = block.tokens * block.group;
    for (int64_t row = 0; row < rows; row++) {
        const Q* q = block.query(row, head_dim);
        float* to = s.queries.data() + row * dim;
        for_vectors(head_dim, [&](int64_t d, int n) { store_some(to + d, load_some(q + d, n) * rules.scale, n); });
    }
    std::fill(s.sums.begin(), s.sums.begin() + rows * dim, 0.0f);
    std::fill(s.states.begin(), s.states.begin() + rows, Softmax());

    const int64_t end = std::min(block.context, block.position + block.tokens);
    const int64_t first = rules.window > 0 ? std::max<int64_t>(0, block.position + 1 - rules.window) : 0;
    for (int64_t tile = first / TILE * TILE; tile < end; tile += TILE) {
        const T* found[TILE];
        const int64_t from = std::max(first, tile), to = std::min(end, tile + TILE);
        find_tokens(pool, layer, block.head, block.table, from, to, found);
        if constexpr (has_scales<T>)
            find_scales<T>(pool, layer, block.head, block.table, from, to, s.k_scales, s.v_scales);
        take_tile(s, found, from - tile, to - tile, pool.kv_stride, head_dim, dim);
        score(s, rows, head_dim, dim);
        for (int64_t row = 0; row < rows; row++) {
            float* scores = s.scores.data() + row * TILE;
            if (rules.soft_cap > 0) cap_scores(scores, TILE, rules.soft_cap);
            hide(scores, tile, block.position + row / block.group, block.context, rules.window);
            const float factor = s.states[row].take(scores, TILE);
            if (factor == 1.0f) continue;
            float* sums = s.sums.data() + row * dim;
            for (int64_t d = 0; d < dim; d += W) store(sums + d, load(sums + d) * factor);
        }
        gather(s, rows, dim);
    }
    for (int64_t row = 0; row < rows; row++) {
        Q* out = block.output(row, head_dim);
        const float* sums = s.sums.data() + row * dim;
        const Softmax& state = s.states[row];
        // The sums of a query that sees no key are zero.
        const float total = state.total == 0.0f ? 1.0f : state.total / rules.v_scale;
        for_vectors(head_dim, [&](int64_t d, int n) { store_some(out + d, load_some(sums + d, n) / total, n); });
        if (block.lse) *block.log_sum(row) = log_sum(state);
    }
}

// Whether the bf16 dot product is used.
template <class Q, class T>
constexpr bool dots(int64_t head_dim) {
    return BF16_ROWS > 0 && std::is_same_v<Q, bf16> && std::is_same_v<T, bf16> && head_dim % 32 == 0;
}

template <class Q, class T>
void prefill(const Pool& pool, int64_t layer, const Q* q, Q* out, float* lse, const int32_t* tables,
             int64_t table_stride, const int32_t* starts, const int32_t* positions, const int32_t* contexts,
             int64_t batch, int64_t num_heads, const Rules& rules) {
    static thread_local std::vector<QueryBlock<Q>> blocks;
    blocks.clear();
    double keys = 0;
    const int64_t group = num_heads / pool.num_kv_heads, stride = num_heads * pool.head_dim;
    // A kv head with more query heads than a block has rows is split.
    const int64_t most = dots<Q, T>(pool.head_dim) ? BF16_ROWS : BLOCK_ROWS;
    const int64_t part = std::min(group, most), step = std::max<int64_t>(1, most / part);
    for (int64_t i = 0; i < batch; i++) {
        const int64_t tokens = starts[i + 1] - starts[i];
        const int64_t first = positions ? positions[i] : contexts[i] - tokens;
        for (int64_t head = 0; head < pool.num_kv_heads; head++)
            for (int64_t member = 0; member < group; member += part)
                for (int64_t token = 0; token < tokens; token += step) {
                    const int64_t row = (starts[i] + token) * num_heads + head * group + member;
                    const int64_t at = row * pool.head_dim;
                    blocks.push_back({q + at,
                                      out + at,
                                      lse ? lse + row : nullptr,
                                      num_heads,
                                      stride,
                                      std::min(part, group - member),
                                      first + token,
                                      std::min(step, tokens - token),
                                      contexts[i],
                                      head,
                                      tables + i * table_stride});
                    keys += (double)std::min(contexts[i] * 1.0, (double)(first + token + step));
                }
    }
    if (blocks.empty()) return;
    // The last blocks see the most keys. They come first, so that the threads end with the short ones.
    const QueryBlock<Q>* last = &blocks.back();
    const double ns = keys / (double)blocks.size() * (double)(step * part + 16) *
                      (double)pool.head_dim * ATTEND_NS;
    parallel_ranges((int64_t)blocks.size(), ns, [=, &pool, &rules](int64_t begin, int64_t end) {
#if defined(MP_BF16_DOT)
        if constexpr (std::is_same_v<Q, bf16> && std::is_same_v<T, bf16>) {
            static thread_local bf16_prefill::Scratch pairs;
            if (dots<Q, T>(pool.head_dim)) {
                for (int64_t i = begin; i < end; i++) bf16_prefill::attend(pairs, *(last - i), pool, layer, rules);
                return;
            }
        }
#endif
        static thread_local Scratch scratch;
        scratch.fit((pool.head_dim + W - 1) / W * W);
        for (int64_t i = begin; i < end; i++) attend<Q, T>(scratch, *(last - i), pool, layer, rules);
    });
}

}  // namespace

#define MP_PREFILL(Q, T, NAME)                                                                                \
    MP_EXPORT void prefill_##NAME(const Pool* pool, int64_t layer, const Q* q, Q* out, float* lse,            \
                                  const int32_t* tables, int64_t table_stride, const int32_t* starts,         \
                                  const int32_t* positions, const int32_t* contexts, int64_t batch,           \
                                  int64_t num_heads, float scale, float v_scale, int64_t window,              \
                                  float soft_cap) {                                                           \
        prefill<Q, T>(*pool, layer, q, out, lse, tables, table_stride, starts, positions, contexts, batch,    \
                      num_heads, Rules{scale, soft_cap, v_scale, window});                                    \
    }

MP_FOR_POOLS(MP_PREFILL)
