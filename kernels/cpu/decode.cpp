// Attention of one query token a sequence over its pages.
//
// All query heads of a kv head go together, tile of tokens after tile, so that K and V come from memory once; while
// a tile is worked on, the next one's rows are asked for. A sequence's result does not depend on the batch.

#include <algorithm>
#include <vector>

#include "pool.h"
#include "softmax.h"

namespace {

constexpr int64_t TILE = 64;  // tokens

// One kv head of one sequence, and the query heads that read it.
template <class T>
struct Work {
    const T* q;                 // [group, dim]
    int64_t group, dim;
    const T* rows[2][TILE];     // K of this tile's tokens and of the next one's
    int64_t count, next_count;  // tokens in them
    int64_t kv_stride;
    float* scores;              // [group, TILE]
    float* sums;                // [group, dim]
};

// ---------------------------------------------------------------- q · k

// Lanes whose sum is q · k, for N vectors of dimensions; N = 0: for any number of dimensions.
template <int N, class T>
MP_INLINE vf products_of(const T* q, const T* k, int64_t dim) {
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
        return products_of<0, bf16>(q, k, dim);
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

template <class T, int N>
void score(const Work<T>& work, float scale) {
    for (int64_t first = 0; first < work.count; first += W) {
        const int64_t last = work.count - 1;
        for (int64_t i = first; i < first + W && i < work.next_count; i++) prefetch_row(work.rows[1][i], work.dim);
        for (int64_t g = 0; g < work.group; g++) {
            const T* q = work.q + g * work.dim;
            vf products[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; i++)
                products[i] = products_of<N>(q, work.rows[0][std::min(first + i, last)], work.dim);
            store(work.scores + g * TILE + first, sum_each(products) * scale);
        }
    }
}

// ---------------------------------------------------------------- weights · v

// sums[g] += weights[g] · V for G heads and C vectors of dimensions from `first` on; begin with sums times factors.
template <class T, int G, int C>
MP_INLINE void gather_values(const Work<T>& work, int64_t head, int64_t first, const float* factors, bool prefetch) {
    const float* weights = work.scores + head * TILE;
    float* sums = work.sums + head * work.dim + first;
    vf registers[G][C];
#pragma GCC unroll 8
    for (int g = 0; g < G; g++)
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) registers[g][c] = load(sums + g * work.dim + c * W) * factors[head + g];
    for (int64_t i = 0; i < work.count; i++) {
        const T* row = work.rows[0][i] + work.kv_stride + first;
        if (prefetch && i < work.next_count) prefetch_row(work.rows[1][i] + work.kv_stride, work.dim);
        vf values[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) values[c] = load(row + c * W);
#pragma GCC unroll 8
        for (int g = 0; g < G; g++)
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) registers[g][c] += values[c] * weights[g * TILE + i];
    }
#pragma GCC unroll 8
    for (int g = 0; g < G; g++)
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) store(sums + g * work.dim + c * W, registers[g][c]);
}

template <class T, int C>
void gather_columns(const Work<T>& work, int64_t first, const float* factors) {
    int64_t g = 0;
    for (; g + 4 <= work.group; g += 4) gather_values<T, 4, C>(work, g, first, factors, first + g == 0);
    switch (work.group - g) {
        case 3: gather_values<T, 3, C>(work, g, first, factors, first + g == 0); break;
        case 2: gather_values<T, 2, C>(work, g, first, factors, first + g == 0); break;
        case 1: gather_values<T, 1, C>(work, g, first, factors, first + g == 0); break;
    }
}

template <class T>
void gather(const Work<T>& work, const float* factors) {
    int64_t first = 0;
    for (; first + 4 * W <= work.dim; first += 4 * W) gather_columns<T, 4>(work, first, factors);
    for (; first + 2 * W <= work.dim; first += 2 * W) gather_columns<T, 2>(work, first, factors);
    for (; first + W <= work.dim; first += W) gather_columns<T, 1>(work, first, factors);
    if (first == work.dim) return;
    const int rest = (int)(work.dim - first);
    for (int64_t g = 0; g < work.group; g++) {
        float* sums = work.sums + g * work.dim + first;
        vf values = load_n(sums, rest) * factors[g];
        for (int64_t i = 0; i < work.count; i++)
            values += load_n(work.rows[0][i] + work.kv_stride + first, rest) * work.scores[g * TILE + i];
        store_n(sums, values, rest);
    }
}

// ---------------------------------------------------------------- one sequence

struct Rules {
    float scale, soft_cap;
    int64_t window;
};

template <class T>
using Score = void (*)(const Work<T>&, float);

template <class T>
Score<T> score_for(int64_t dim) {
    if (dim == W) return score<T, 1>;
    if (dim == 2 * W) return score<T, 2>;
    if (dim == 4 * W) return score<T, 4>;
    if (dim == 8 * W) return score<T, 8>;
    if (W < 16 && dim == 16 * W) return score<T, 16>;
    return score<T, 0>;
}

template <class T>
void attend(Work<T>& work, const Pool& pool, int64_t layer, int64_t head, const int32_t* table, int64_t context,
            const Rules& rules, Softmax* states, float* factors, T* out) {
    const Score<T> score = score_for<T>(work.dim);
    const int64_t first = rules.window > 0 ? std::max<int64_t>(0, context - rules.window) : 0;
    std::fill(states, states + work.group, Softmax());
    std::fill(work.sums, work.sums + work.group * work.dim, 0.0f);
    work.next_count = std::min(TILE, context - first);
    find_tokens(pool, layer, head, table, first, first + work.next_count, work.rows[1]);
    for (int64_t token = first; token < context; token += TILE) {
        std::copy(work.rows[1], work.rows[1] + work.next_count, work.rows[0]);
        work.count = work.next_count;
        work.next_count = std::max<int64_t>(0, std::min(TILE, context - token - TILE));
        find_tokens(pool, layer, head, table, token + TILE, token + TILE + work.next_count, work.rows[1]);
        score(work, rules.scale);
        const int64_t whole = (work.count + W - 1) / W * W;
        for (int64_t g = 0; g < work.group; g++) {
            float* scores = work.scores + g * TILE;
            if (rules.soft_cap > 0) cap_scores(scores, whole, rules.soft_cap);
            std::fill(scores + work.count, scores + whole, -INF);
            factors[g] = states[g].take(scores, whole);
        }
        gather(work, factors);
    }
    for (int64_t g = 0; g < work.group; g++, out += work.dim)
        for_vectors(work.dim, [&](int64_t i, int n) {
            const float total = states[g].total;
            store_some(out + i, load_some(work.sums + g * work.dim + i, n) / (context > 0 ? total : 1.0f), n);
        });
}

template <class T>
void decode(const Pool& pool, int64_t layer, const T* q, T* out, const int32_t* tables, int64_t table_stride,
            const int32_t* contexts, int64_t batch, int64_t num_heads, const Rules& rules) {
    Work<T> work;
    work.dim = pool.head_dim;
    work.group = num_heads / pool.num_kv_heads;
    work.kv_stride = pool.kv_stride;
    static thread_local std::vector<float> scratch;
    scratch.resize(work.group * (TILE + work.dim + 1));
    static thread_local std::vector<Softmax> states;
    states.resize(work.group);
    work.scores = scratch.data();
    work.sums = work.scores + work.group * TILE;
    float* factors = work.sums + work.group * work.dim;
    for (int64_t i = 0; i < batch; i++)
        for (int64_t head = 0; head < pool.num_kv_heads; head++) {
            const int64_t at = (i * num_heads + head * work.group) * work.dim;
            work.q = q + at;
            attend(work, pool, layer, head, tables + i * table_stride, contexts[i], rules, states.data(), factors,
                   out + at);
        }
}

}  // namespace

#define MP_DECODE(T, NAME)                                                                                       \
    MP_EXPORT void decode_##NAME(const Pool* pool, int64_t layer, const T* q, T* out, const int32_t* tables,     \
                                 int64_t table_stride, const int32_t* contexts, int64_t batch,                   \
                                 int64_t num_heads, float scale, int64_t window, float soft_cap) {               \
        decode(*pool, layer, q, out, tables, table_stride, contexts, batch, num_heads,                           \
               Rules{scale, soft_cap, window});                                                                  \
    }

MP_DECODE(float, f32)
MP_DECODE(bf16, bf16)
MP_DECODE(fp16, f16)
