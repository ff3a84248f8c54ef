// Attention of one query token of each sequence.
//
// A sequence is computed in chunks of tokens: all scores of a chunk, their weights, then the weighted sum of V.
// Both passes read a block's kv heads in memory order and prefetch a few kilobytes ahead. The query heads that
// share a kv head are computed together, so that K and V are read once. A sequence's result does not depend
// on the batch.

#include <algorithm>
#include <vector>

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
    std::vector<float> scores;    // [heads, PITCH]
    std::vector<float> sums;      // [heads, dim]
    std::vector<float> queries;   // [heads, dim], if converted to float32
    std::vector<float> converted;      // [W, dim], keys and values as float32
    std::vector<Softmax> states;  // [heads]

    void begin(int64_t heads, int64_t dim) {
        scores.resize(heads * PITCH);
        sums.assign(heads * dim, 0.0f);
        queries.resize(heads * dim);
        converted.resize(W * dim);
        states.assign(heads, Softmax());
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
                f(head, Run<T>{at(block, head, kv) + offset * pool.head_dim, prefetch, count}, token - first);
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

// heads: query heads of the blocks' kv heads; q, out and lse are of the first of them.
template <class Q, class T>
void attend(const Blocks<T>& blocks, const Q* q, Seen seen, int64_t heads, const Rules& rules, Gathered& gathered,
            const T* then, Q* out, float* lse) {
    const int64_t dim = blocks.pool.head_dim, size = blocks.pool.block_size;
    const int64_t group = heads / blocks.heads;
    const Score<Wide<T>> score = score_for<Wide<T>>(dim);
    gathered.begin(heads, dim);
    float* converted = gathered.converted.data();
    const Wide<T>* queries;
    if constexpr (std::is_same<Q, Wide<T>>::value) {
        queries = q;
    } else {
        for_vectors(heads * dim, [&](int64_t i, int n) {
            store_some(gathered.queries.data() + i, load_some(q + i, n), n);
        });
        queries = gathered.queries.data();
    }
    float* scores = gathered.scores.data();
    float* sums = gathered.sums.data();
    for (int64_t first = seen.first, end; first < seen.end; first = end) {
        end = std::min(first / CHUNK * CHUNK + CHUNK, seen.end);
        blocks.walk(first, end, 0, blocks.at(first / size, 0, 1), [&](int64_t head, Run<T> keys, int64_t at) {
            for_wide(keys, dim, converted, [&](Run<Wide<T>> some, int64_t before) {
                score(queries + head * group * dim, group, dim, some, rules.scale,
                      scores + head * group * PITCH + at + before);
            });
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
        const T* next = end < seen.end ? blocks.at(end / size, 0, 0) : then;
        blocks.walk(first, end, 1, next, [&](int64_t head, Run<T> values, int64_t at) {
            for_wide(values, dim, converted, [&](Run<Wide<T>> some, int64_t before) {
                gather(scores + head * group * PITCH + at + before, group, some, dim, sums + head * group * dim);
            });
        });
    }
    for (int64_t head = 0; head < heads; head++) {
        const Softmax& state = gathered.states[head];
        const float total = seen.empty() ? 1.0f : state.total / rules.v_scale;
        for_vectors(dim, [&](int64_t i, int n) {
            store_some(out + head * dim + i, load_some(sums + head * dim + i, n) / total, n);
        });
        if (lse) lse[head] = log_sum(state);
    }
}

template <class Q, class T>
void decode(const Pool& pool, int64_t layer, const Q* q, Q* out, float* lse, const int32_t* tables,
            int64_t table_stride, const int32_t* positions, const int32_t* contexts, int64_t batch, int64_t heads,
            const Rules& rules) {
    const auto seen_by = [&](int64_t i) {
        return Seen(positions ? positions[i] : contexts[i] - 1, contexts[i], rules);
    };
    // One thread reads all kv heads of a sequence in memory order. Several threads divide the sequences, and the
    // heads of each where there are few sequences.
    if (batch == 0) return;
    const int64_t kv_heads = pool.num_kv_heads, group = heads / kv_heads, wanted = 2 * num_threads();
    const int64_t parts = num_threads() == 1 ? 1 : std::min(kv_heads, (wanted - 1) / batch + 1);
    double keys = 0;
    for (int64_t i = 0; i < batch; i++) keys += (double)std::max<int64_t>(0, seen_by(i).end - seen_by(i).first);
    const double ns = keys / (double)(batch * parts) * (double)(kv_heads * pool.head_dim * sizeof(T)) * READ_NS;
    parallel_ranges(batch * parts, ns, [=, &pool, &rules](int64_t begin, int64_t end) {
        static thread_local Gathered gathered;
        for (int64_t task = begin; task < end; task++) {
            const int64_t i = task / parts, part = task % parts;
            const int64_t head = kv_heads * part / parts, num = kv_heads * (part + 1) / parts - head;
            const Blocks<T> blocks{pool, layer, tables + i * table_stride, head, num};
            const T* then = nullptr;
            if (i + 1 < batch && parts == 1 && !seen_by(i + 1).empty()) {
                const Blocks<T> next{pool, layer, blocks.table + table_stride, head, num};
                then = next.at(seen_by(i + 1).first / pool.block_size, 0, 0);
            }
            const int64_t first = i * heads + head * group;
            attend(blocks, q + first * pool.head_dim, seen_by(i), num * group, rules, gathered, then,
                   out + first * pool.head_dim, lse ? lse + first : nullptr);
        }
    });
}

}  // namespace

#define MP_DECODE(Q, T, NAME)                                                                                 \
    MP_EXPORT void decode_##NAME(const Pool* pool, int64_t layer, const Q* q, Q* out, float* lse,             \
                                 const int32_t* tables, int64_t table_stride, const int32_t* positions,       \
                                 const int32_t* contexts, int64_t batch, int64_t num_heads, float scale,      \
                                 float v_scale, int64_t window, float soft_cap) {                             \
        decode<Q, T>(*pool, layer, q, out, lse, tables, table_stride, positions, contexts, batch, num_heads,  \
                     Rules{scale, soft_cap, v_scale, window});                                                \
    }

MP_FOR_POOLS(MP_DECODE)
