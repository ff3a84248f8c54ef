// Attention of one query token a sequence over its pages.
//
// A sequence goes in chunks of tokens: first all scores of a chunk, then their weights, then the weighted sum
// of V. Both passes over the pages take a block's kv heads one after the other, as they lie in memory, and
// ask for a few kilobytes ahead; the query heads that share a kv head go together, so that a page is read
// once. A sequence's result does not depend on the batch.

#include <algorithm>
#include <vector>

#include "pool.h"
#include "softmax.h"

namespace {

constexpr int64_t CHUNK = 256;             // tokens; a multiple of W
constexpr int64_t PITCH = CHUNK + W;       // a row of scores, with room for one vector too many
constexpr int64_t AHEAD_NBYTES = 4096;     // how far ahead memory is asked for

struct Rules {
    float scale, soft_cap;
    int64_t window;
};

// K or V of `count` tokens of one kv head, one after the other in memory, and what will be read a little
// later.
template <class T>
struct Run {
    const T* rows;
    const T* soon;  // or null
    int64_t count;
};

// Asks for n more values behind `soon`. Spread over the work: asked for all at once they would hold it up.
template <class T>
MP_INLINE void ask(const T*& soon, int64_t n) {
    if (!soon) return;
    prefetch_row(soon, n);
    soon += n;
}

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

// scores[g][i] = scale · q[g] · k[i]. Writes whole vectors.
template <class T, int N>
void score(const T* q, int64_t group, int64_t dim, Run<T> keys, float scale, float* scores) {
    const int64_t width = N > 0 ? N * W : dim, share = (W * width + group - 1) / group;
    const T* k = keys.rows;
    for (int64_t first = 0; first < keys.count; first += W, k += W * width) {
        const int64_t last = keys.count - first - 1;
        for (int64_t g = 0; g < group; g++) {
            ask(keys.soon, share);
            vf products[W];
            if (last >= W - 1) {
#pragma GCC unroll 16
                for (int i = 0; i < W; i++) products[i] = products_of<N>(q + g * width, k + i * width, width);
            } else {
                for (int i = 0; i < W; i++)
                    products[i] = products_of<N>(q + g * width, k + std::min<int64_t>(i, last) * width, width);
            }
            store(scores + g * PITCH + first, sum_each(products) * scale);
        }
    }
}

// ---------------------------------------------------------------- weights · v

// sums[g] += weights[g] · v for G heads and C vectors of dimensions. Few sums are kept twice, for even and
// for odd tokens, so that the adder need not wait for itself.
template <class T, int G, int C>
MP_INLINE void gather_part(const float* weights, Run<T> values, int64_t dim, float* sums) {
    constexpr int COPIES = G * C <= 4 ? 2 : 1;
    const T* v = values.rows;
    vf registers[COPIES][G][C];
#pragma GCC unroll 8
    for (int g = 0; g < G; g++)
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) {
            registers[0][g][c] = load(sums + g * dim + c * W);
            if (COPIES > 1) registers[COPIES - 1][g][c] = splat(0.0f);
        }
    int64_t i = 0;
    for (; i + COPIES <= values.count; i += COPIES)
#pragma GCC unroll 2
        for (int copy = 0; copy < COPIES; copy++, v += dim) {
            ask(values.soon, dim);
            vf row[C];
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) row[c] = load(v + c * W);
#pragma GCC unroll 8
            for (int g = 0; g < G; g++)
#pragma GCC unroll 8
                for (int c = 0; c < C; c++) registers[copy][g][c] += row[c] * weights[g * PITCH + i + copy];
        }
#pragma GCC unroll 8
    for (int g = 0; g < G; g++)
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) {
            vf total = registers[0][g][c];
            if (COPIES > 1) {
                if (i < values.count) total += load(v + c * W) * weights[g * PITCH + i];
                total += registers[COPIES - 1][g][c];
            }
            store(sums + g * dim + c * W, total);
        }
}

// C vectors of dimensions for all heads. Only the first call of a run asks for what comes soon.
template <class T, int C>
MP_INLINE void gather_columns(const float* weights, int64_t group, Run<T>& values, int64_t dim, float* sums) {
    for (; group >= 4; group -= 4, weights += 4 * PITCH, sums += 4 * dim, values.soon = nullptr)
        gather_part<T, 4, C>(weights, values, dim, sums);
    if (group == 3) gather_part<T, 3, C>(weights, values, dim, sums);
    if (group == 2) gather_part<T, 2, C>(weights, values, dim, sums);
    if (group == 1) gather_part<T, 1, C>(weights, values, dim, sums);
    values.soon = nullptr;
    values.rows += C * W;
}

// sums[g] += weights[g] · v
template <class T>
void gather(const float* weights, int64_t group, Run<T> values, int64_t dim, float* sums) {
    int64_t at = 0;
    for (; at + 4 * W <= dim; at += 4 * W) gather_columns<T, 4>(weights, group, values, dim, sums + at);
    for (; at + 2 * W <= dim; at += 2 * W) gather_columns<T, 2>(weights, group, values, dim, sums + at);
    for (; at + W <= dim; at += W) gather_columns<T, 1>(weights, group, values, dim, sums + at);
    if (at == dim) return;
    const int rest = (int)(dim - at);
    for (int64_t g = 0; g < group; g++) {
        vf total = load_n(sums + g * dim + at, rest);
        for (int64_t i = 0; i < values.count; i++)
            total += load_n(values.rows + i * dim, rest) * weights[g * PITCH + i];
        store_n(sums + g * dim + at, total, rest);
    }
}

// ---------------------------------------------------------------- one sequence

template <class T>
using Score = void (*)(const T*, int64_t, int64_t, Run<T>, float, float*);

template <class T>
Score<T> score_for(int64_t dim) {
    if (dim == W) return score<T, 1>;
    if (dim == 2 * W) return score<T, 2>;
    if (dim == 4 * W) return score<T, 4>;
    if (dim == 8 * W) return score<T, 8>;
    if (dim == 16 * W) return score<T, 16>;
    return score<T, 0>;
}

// Scratch of one sequence.
struct Gathered {
    std::vector<float> scores;    // [heads, PITCH]
    std::vector<float> sums;      // [heads, dim]
    std::vector<Softmax> states;  // [heads]

    void begin(int64_t heads, int64_t dim) {
        scores.resize(heads * PITCH);
        sums.assign(heads * dim, 0.0f);
        states.assign(heads, Softmax());
    }
};

// Calls f(kv head, run, tokens before it) for K (kv = 0) or V (kv = 1) of tokens first … end - 1: block after
// block, and in a block head after head.
template <class T, class F>
MP_INLINE void walk(const Pool& pool, int64_t layer, const int32_t* table, int64_t first, int64_t end, int64_t kv, F f) {
    const int64_t size = pool.block_size, heads = pool.num_kv_heads, last_block = (end - 1) / size;
    const int64_t steps = 1 + AHEAD_NBYTES / (size * pool.head_dim * (int64_t)sizeof(T));
    int64_t soon_block = first / size + steps / heads, soon_head = steps % heads;
    for (int64_t token = first; token < end;) {
        const int64_t block = token / size, offset = token % size, count = std::min(size - offset, end - token);
        for (int64_t head = 0; head < heads; head++) {
            const T* rows = block_k<T>(pool, table[block], layer, head) + kv * pool.kv_stride;
            const T* soon = nullptr;
            if (soon_block <= last_block)
                soon = block_k<T>(pool, table[soon_block], layer, soon_head) + kv * pool.kv_stride;
            if (++soon_head == heads) soon_head = 0, soon_block++;
            f(head, Run<T>{rows + offset * pool.head_dim, soon, count}, token - first);
        }
        token += count;
    }
}

template <class T>
void attend(const Pool& pool, int64_t layer, const T* q, const int32_t* table, int64_t context, int64_t heads,
            const Rules& rules, Gathered& gathered, T* out) {
    const int64_t dim = pool.head_dim, group = heads / pool.num_kv_heads;
    const Score<T> score = score_for<T>(dim);
    gathered.begin(heads, dim);
    float* scores = gathered.scores.data();
    float* sums = gathered.sums.data();
    int64_t first = rules.window > 0 ? std::max<int64_t>(0, context - rules.window) : 0;
    for (int64_t end; first < context; first = end) {
        end = std::min(first / CHUNK * CHUNK + CHUNK, context);
        walk<T>(pool, layer, table, first, end, 0, [&](int64_t head, Run<T> keys, int64_t at) {
            score(q + head * group * dim, group, dim, keys, rules.scale, scores + head * group * PITCH + at);
        });
        const int64_t count = end - first, whole = (count + W - 1) / W * W;
        for (int64_t head = 0; head < heads; head++) {
            float* row = scores + head * PITCH;
            if (rules.soft_cap > 0) cap_scores(row, whole, rules.soft_cap);
            std::fill(row + count, row + whole, -INF);
            const float factor = gathered.states[head].take(row, whole);
            if (factor == 1.0f) continue;
            for_vectors(dim, [&](int64_t i, int n) {
                store_some(sums + head * dim + i, load_some(sums + head * dim + i, n) * factor, n);
            });
        }
        walk<T>(pool, layer, table, first, end, 1, [&](int64_t head, Run<T> values, int64_t at) {
            gather(scores + head * group * PITCH + at, group, values, dim, sums + head * group * dim);
        });
    }
    for (int64_t head = 0; head < heads; head++) {
        const float total = context > 0 ? gathered.states[head].total : 1.0f;
        for_vectors(dim, [&](int64_t i, int n) {
            store_some(out + head * dim + i, load_some(sums + head * dim + i, n) / total, n);
        });
    }
}

template <class T>
void decode(const Pool& pool, int64_t layer, const T* q, T* out, const int32_t* tables, int64_t table_stride,
            const int32_t* contexts, int64_t batch, int64_t heads, const Rules& rules) {
    static thread_local Gathered gathered;
    const int64_t stride = heads * pool.head_dim;
    for (int64_t i = 0; i < batch; i++)
        attend(pool, layer, q + i * stride, tables + i * table_stride, contexts[i], heads, rules, gathered,
               out + i * stride);
}

}  // namespace

#define MP_DECODE(T, NAME)                                                                                   \
    MP_EXPORT void decode_##NAME(const Pool* pool, int64_t layer, const T* q, T* out, const int32_t* tables, \
                                 int64_t table_stride, const int32_t* contexts, int64_t batch,               \
                                 int64_t num_heads, float scale, int64_t window, float soft_cap) {           \
        decode(*pool, layer, q, out, tables, table_stride, contexts, batch, num_heads,                       \
               Rules{scale, soft_cap, window});                                                              \
    }

MP_DECODE(float, f32)
MP_DECODE(bf16, bf16)
MP_DECODE(fp16, f16)
