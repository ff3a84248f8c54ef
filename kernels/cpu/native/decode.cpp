// Attention of the last query token of each sequence, or of the last few.
//
// A sequence is computed in chunks of tokens: all scores of a chunk, their weights, then the weighted sum of V.
// Both passes read a block's kv heads in memory order and prefetch a few kilobytes ahead. The query heads that
// share a kv head, and a sequence's few tokens, are computed together, so that K and V are read once. A token's
// result does not depend on the batch, nor, without a window, on the other tokens.

#include <algorithm>
#include <vector>

#include "decode_bf16.h"
#include "lines.h"
#include "run.h"
#include "scores.h"
#include "softmax.h"
#include "threads.h"
#include "values.h"

namespace {

constexpr int64_t PREFETCH_NBYTES = 4096;  // distance of the prefetch
constexpr double READ_NS = 0.1;            // nanoseconds of one thread for a byte of K and one of V, roughly

// Scratch of one sequence.
struct Gathered {
    // A row is one token's query head; all rows of a kv head follow each other.
    Lines<float> scores;     // [rows, PITCH]
    Lines<float> sums;       // [rows, dim]
    Lines<float> queries;    // [rows, dim], if converted to float32 or put in order
    Lines<float> converted;  // [W, dim], keys and values as float32
    Lines<bf16> rounded;     // [rows, PITCH], weights
    std::vector<Softmax> states;   // [rows]

    void begin(int64_t rows, int64_t dim) {
        scores.resize(rows * PITCH);
        rounded.resize(rows * PITCH);
        sums.assign(rows * dim, 0.0f);
        queries.resize(rows * dim);
        converted.resize(W * dim);
        states.assign(rows, Softmax());
    }
};

// Some kv heads of the blocks of one layer of one sequence.
template <class T>
struct Blocks {
    const Pool& pool;
    int64_t layer;
    const int32_t* table;
    int64_t first_head, heads;

    // K (kv = 0) or V (kv = 1) of a whole block and the head `first_head + head`.
    MP_INLINE const T* at(int64_t block, int64_t head, int64_t kv) const {
        return block_k<T>(pool, table[block], layer, first_head + head) + kv * pool.kv_stride;
    }

    // Calls f(kv head, run, tokens before it) for tokens first … end - 1, block by block, and head by head in a
    // block. `then`: memory that is read afterwards, or null; its prefetch starts near the end.
    template <class F>
    MP_INLINE void walk(int64_t first, int64_t end, int64_t kv, const T* then, F f) const {
        const int64_t size = pool.block_size, last_block = (end - 1) / size;
        const int64_t steps = 1 + PREFETCH_NBYTES / (size * pool.head_dim * (int64_t)sizeof(T));
        int64_t prefetch_block = first / size + steps / heads, prefetch_head = steps % heads;
        for (int64_t token = first; token < end;) {
            const int64_t block = token / size, offset = token % size;
            const int64_t count = std::min(size - offset, end - token);
            for (int64_t head = 0; head < heads; head++) {
                const T* prefetch = then ? then + prefetch_head * pool.head_stride : nullptr;
                if (prefetch_block <= last_block) prefetch = at(prefetch_block, prefetch_head, kv);
                if (++prefetch_head == heads) prefetch_head = 0, prefetch_block++;
                const T* rows = at(block, head, kv);
                const float* scales = block_scales(pool, rows);
                f(head, Run<T>{rows + offset * pool.head_dim, prefetch, count, scales ? scales + offset : nullptr},
                  token - first);
            }
            token += count;
        }
    }
};

// The keys first … end - 1 that a query sees.
struct Seen {
    int64_t first, end;

    Seen(int64_t position, int64_t context, const Rules& rules)
        : first(rules.window > 0 ? std::max<int64_t>(0, position + 1 - rules.window) : 0),
          end(std::min(context, position + 1)) {}
    bool empty() const { return end <= first; }
};

// The last tokens of a sequence and the query heads that share some kv heads.
template <class Q>
struct Queries {
    const Q* q;  // of the first token and head
    Q* out;
    float* lse;  // or null
    int64_t tokens, heads;
    int64_t num_heads;          // from a token to the next
    int64_t position, context;  // of the first token; number of keys

    MP_INLINE Seen seen(int64_t token, const Rules& rules) const { return Seen(position + token, context, rules); }
    // What any of the tokens sees.
    MP_INLINE Seen seen(const Rules& rules) const {
        Seen all = seen(0, rules);
        all.end = seen(tokens - 1, rules).end;
        return all;
    }
    // Calls f(row of the scratch, token, head).
    template <class F>
    MP_INLINE void for_rows(int64_t group, F f) const {
        int64_t row = 0;
        for (int64_t head = 0; head < heads; head += group)
            for (int64_t token = 0; token < tokens; token++)
                for (int64_t member = 0; member < group; member++) f(row++, token, head + member);
    }
};

// Products in float32, but for scores of bf16 keys.
template <class T>
struct Plain {
    const int64_t dim;
    Gathered& g;
    const Score<Asking<T>, Wide<T>> score_run = score_for<Asking<T>, Wide<T>>(dim);

    // Scores of rows from `row` on, with `at` the place of the run's first key among a row's scores.
    void score(const Asking<T>* q, int64_t row, int64_t rows, Run<T> keys, int64_t at, float scale) const {
        float* scores = g.scores.data() + row * PITCH + at;
        for_wide(keys, dim, g.converted.data(), [&](Run<Wide<T>> some, int64_t before) {
            score_run(q + row * dim, rows, dim, some, scale, scores + before);
        });
        scale_rows(keys, scores, rows);
    }
    void weigh(int64_t, int64_t) const {}
    void gather(int64_t row, int64_t rows, Run<T> values, int64_t at) const {
        float* weights = g.scores.data() + row * PITCH + at;
        scale_rows(values, weights, rows);
        for_wide(values, dim, g.converted.data(), [&](Run<Wide<T>> some, int64_t before) {
            ::gather(weights + before, rows, some, dim, g.sums.data() + row * dim);
        });
    }
    template <class Q>
    void write(int64_t row, float total, Q* out) const {
        const float* sums = g.sums.data() + row * dim;
        for_vectors(dim, [&](int64_t i, int n) { store_some(out + i, load_some(sums + i, n) / total, n); });
    }
};

#if defined(MP_BF16_DOT)
// Products of pairs, for dim a multiple of 32.
struct Paired {
    const int64_t dim;
    Gathered& g;
    const Score<bf16, bf16> score_run = score_for<bf16, bf16>(dim);

    void score(const bf16* q, int64_t row, int64_t rows, Run<bf16> keys, int64_t at, float scale) const {
        score_run(q + row * dim, rows, dim, keys, scale, g.scores.data() + row * PITCH + at);
    }
    // The weights of a row are complete.
    void weigh(int64_t row, int64_t n) const {
        bf16_decode::round_weights(g.scores.data() + row * PITCH, n, g.rounded.data() + row * PITCH);
    }
    void gather(int64_t row, int64_t rows, Run<bf16> values, int64_t at) const {
        bf16_decode::gather(g.rounded.data() + row * PITCH + at, rows, values, dim, g.sums.data() + row * dim);
    }
    void write(int64_t row, float total, bf16* out) const {
        const float* sums = g.sums.data() + row * dim;
        for (int64_t i = 0; i < dim; i += 2 * W)
            store_ordered(out + i, load(sums + i) / total, load(sums + i + W) / total);
    }
};
#endif

template <class Products, class Q, class T>
void attend(const Blocks<T>& blocks, const Queries<Q>& asked, const Rules& rules, Gathered& gathered, const T* then) {
    const int64_t dim = blocks.pool.head_dim, size = blocks.pool.block_size;
    const int64_t group = asked.heads / blocks.heads, rows = group * asked.tokens;  // of a kv head
    const Seen seen = asked.seen(rules);
    const Products products{dim, gathered};
    gathered.begin(asked.heads * asked.tokens, dim);
    const Asking<T>* queries = (const Asking<T>*)asked.q;
    if (asked.tokens > 1 || !std::is_same<Q, Asking<T>>::value) {
        Asking<T>* to = (Asking<T>*)gathered.queries.data();
        queries = to;
        asked.for_rows(group, [&](int64_t row, int64_t token, int64_t head) {
            const Q* from = asked.q + (token * asked.num_heads + head) * dim;
            for_vectors(dim, [&](int64_t i, int n) { store_some(to + row * dim + i, load_some(from + i, n), n); });
        });
    }
    float* scores = gathered.scores.data();
    float* sums = gathered.sums.data();
    for (int64_t first = seen.first, end; first < seen.end; first = end) {
        end = std::min(first / CHUNK * CHUNK + CHUNK, seen.end);
        blocks.walk(first, end, 0, blocks.at(first / size, 0, 1), [&](int64_t head, Run<T> keys, int64_t at) {
            products.score(queries, head * rows, rows, keys, at, rules.scale);
        });
        const int64_t count = end - first, whole = (count + W - 1) / W * W;
        asked.for_rows(group, [&](int64_t at, int64_t token, int64_t) {
            float* row = scores + at * PITCH;
            if (rules.soft_cap > 0) cap_scores(row, whole, rules.soft_cap);
            std::fill(row + count, row + whole, -INF);
            if (asked.tokens > 1) {
                const Seen own = asked.seen(token, rules);
                const int64_t stop = std::clamp<int64_t>(own.end - first, 0, count);
                std::fill(row, row + std::clamp<int64_t>(own.first - first, 0, stop), -INF);
                std::fill(row + stop, row + count, -INF);
            }
            const float factor = gathered.states[at].take(row, whole);
            products.weigh(at, whole);
            if (factor == 1.0f) return;
            for_vectors(dim, [&](int64_t i, int n) {
                store_some(sums + at * dim + i, load_some(sums + at * dim + i, n) * factor, n);
            });
        });
        const T* next = end < seen.end ? blocks.at(end / size, 0, 0) : then;
        blocks.walk(first, end, 1, next, [&](int64_t head, Run<T> values, int64_t at) {
            products.gather(head * rows, rows, values, at);
        });
    }
    asked.for_rows(group, [&](int64_t row, int64_t token, int64_t head) {
        const Softmax& state = gathered.states[row];
        // The sums of a token that sees no key are zero.
        const float total = state.total == 0.0f ? 1.0f : state.total / rules.v_scale;
        products.write(row, total, asked.out + (token * asked.num_heads + head) * dim);
        if (asked.lse) asked.lse[token * asked.num_heads + head] = log_sum(state);
    });
}

// starts: of each sequence's tokens, and their end; null: each has as many.
template <class Products, class Q, class T>
void decode(const Pool& pool, int64_t layer, const Q* q, Q* out, float* lse, const int32_t* tables,
            int64_t table_stride, const int32_t* starts, const int32_t* positions, const int32_t* contexts,
            int64_t batch, int64_t each, int64_t heads, const Rules& rules) {
    const auto asked_by = [=](int64_t i, int64_t head, int64_t num) {
        const int64_t tokens = starts ? starts[i + 1] - starts[i] : each;
        const int64_t at = (starts ? starts[i] : i * each) * heads + head;
        const int64_t position = positions ? positions[i] : contexts[i] - tokens;
        return Queries<Q>{q + at * pool.head_dim, out + at * pool.head_dim, lse ? lse + at : nullptr, tokens, num,
                          heads, position, contexts[i]};
    };
    // One thread reads all kv heads of a sequence in memory order. Several threads divide the sequences, and the
    // heads of each where there are few sequences.
    if (batch == 0) return;
    const int64_t kv_heads = pool.num_kv_heads, group = heads / kv_heads, wanted = 2 * num_threads();
    const int64_t parts = num_threads() == 1 ? 1 : std::min(kv_heads, (wanted - 1) / batch + 1);
    double keys = 0;
    for (int64_t i = 0; i < batch; i++) {
        const Seen seen = asked_by(i, 0, heads).seen(rules);
        keys += (double)std::max<int64_t>(0, seen.end - seen.first);
    }
    const double ns = keys / (double)(batch * parts) * (double)(kv_heads * pool.head_dim * sizeof(T)) * READ_NS;
    parallel_ranges(batch * parts, ns, [=, &pool, &rules](int64_t begin, int64_t end) {
        static thread_local Gathered gathered;
        for (int64_t task = begin; task < end; task++) {
            const int64_t i = task / parts, part = task % parts;
            const int64_t head = kv_heads * part / parts, num = kv_heads * (part + 1) / parts - head;
            const Queries<Q> asked = asked_by(i, head * group, num * group);
            if (asked.tokens == 0) continue;
            const Blocks<T> blocks{pool, layer, tables + i * table_stride, head, num};
            const T* then = nullptr;
            if (i + 1 < batch && parts == 1) {
                const Seen seen = asked_by(i + 1, 0, heads).seen(rules);
                const Blocks<T> next{pool, layer, blocks.table + table_stride, head, num};
                if (!seen.empty()) then = next.at(seen.first / pool.block_size, 0, 0);
            }
            attend<Products>(blocks, asked, rules, gathered, then);
        }
    });
}

template <class Q, class T>
auto decode_for(int64_t dim) {
#if defined(MP_BF16_DOT)
    if constexpr (std::is_same_v<Q, bf16> && std::is_same_v<T, bf16>)
        if (dim % bf16_decode::STEP == 0) return decode<Paired, Q, T>;
#endif
    return decode<Plain<T>, Q, T>;
}

}  // namespace

#define MP_DECODE(Q, T, NAME)                                                                                 \
    MP_EXPORT void decode_##NAME(const Pool* pool, int64_t layer, const Q* q, Q* out, float* lse,             \
                                 const int32_t* tables, int64_t table_stride, const int32_t* starts,          \
                                 const int32_t* positions, const int32_t* contexts, int64_t batch,            \
                                 int64_t tokens, int64_t num_heads, float scale, float v_scale,               \
                                 int64_t window, float soft_cap) {                                            \
        const auto run = decode_for<Q, T>(pool->head_dim);                                                    \
        run(*pool, layer, q, out, lse, tables, table_stride, starts, positions, contexts, batch, tokens,      \
            num_heads, Rules{scale, soft_cap, v_scale, window});                                              \
    }

MP_FOR_POOLS(MP_DECODE)
