// LoRA adapters: a product to a few ranks and one back, each row with its own adapter.

#include <algorithm>
#include <vector>

#include "lanes.h"
#include "threads.h"

namespace {

// Nanoseconds of one thread for a value of an adapter and a row, roughly.
constexpr double VALUE_NS = 0.05;
// Rows of one adapter that share a read of it.
constexpr int64_t ROWS = 4;
// Ranks that share a read of M rows: as many sums as there are registers for.
constexpr int ranks_of(int m) { return m == 1 ? 8 : 4; }
// Rows of adapters begin at multiples of this.
constexpr int64_t LINE_NBYTES = 64;

// A value that products of M rows share: without this the compiler reads it again for each of them.
template <int M>
MP_INLINE vf shared(vf value) {
#if defined(__x86_64__)
    if (M > 1) asm("" : "+v"(value));
#endif
    return value;
}

// The first K rows of A or B, from the lines where they begin: every second one of `lines`.
template <class T, int K>
struct Rows {
    const T* row[K];

    MP_INLINE Rows(const T* weights, const int32_t* lines) {
#pragma GCC unroll 8
        for (int k = 0; k < K; k++) row[k] = weights + lines[2 * k] * (LINE_NBYTES / (int64_t)sizeof(T));
    }
};

// low[m * rank + k] = a.row[k] · x[m] for M rows and K ranks. Each has a sum of its own, in the order of `ins`: the
// result of a row does not depend on the others.
template <class T, int M, int K>
MP_INLINE void down_part(const T* x, const Rows<T, K>& a, int64_t ins, float* low, int64_t rank) {
    vf sums[M][K] = {};
    for_vectors(ins, [&](int64_t i, int count) {
        vf row[M];
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) row[m] = shared<M>(load_some(x + m * ins + i, count));
#pragma GCC unroll 8
        for (int k = 0; k < K; k++) {
            const vf factor = shared<M>(load_some(a.row[k] + i, count));
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) sums[m][k] = fused(row[m], factor, sums[m][k]);
        }
    });
    for (int m = 0; m < M; m++)
        for (int k = 0; k < K; k++) low[m * rank + k] = sum(sums[m][k]);
}

// total[m] += low[m][k] * b.row[k] for M rows and K ranks, in the order of the ranks: whole rows of B are read, one
// after the other, as memory gives them fastest.
template <class T, int M, int K>
MP_INLINE void up_part(const float* low, const Rows<T, K>& b, int64_t outs, int64_t rank, float* total) {
    vf one[M][K];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int k = 0; k < K; k++) one[m][k] = splat(low[m * rank + k]);
    for_vectors(outs, [&](int64_t i, int count) {
        vf sums[M];
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) sums[m] = load_some(total + m * outs + i, count);
#pragma GCC unroll 8
        for (int k = 0; k < K; k++) {
            const vf factor = shared<M>(load_some(b.row[k] + i, count));
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) sums[m] = fused(factor, one[m][k], sums[m]);
        }
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) store_some(total + m * outs + i, sums[m], count);
    });
}

template <class T, int M>
void add_rows(T* y, int64_t stride, const T* x, const T* weights, const int32_t* lines, int64_t rank, int64_t ins,
              int64_t outs, float* low) {
    constexpr int K = ranks_of(M);
    float* total = low + M * rank;
    std::fill_n(total, M * outs, 0.0f);
    int64_t k = 0;
    for (; k + K <= rank; k += K) down_part<T, M, K>(x, {weights, lines + 2 * k}, ins, low + k, rank);
    for (; k < rank; k++) down_part<T, M, 1>(x, {weights, lines + 2 * k}, ins, low + k, rank);
    for (k = 0; k + K <= rank; k += K) up_part<T, M, K>(low + k, {weights, lines + 2 * k + 1}, outs, rank, total);
    for (; k < rank; k++) up_part<T, M, 1>(low + k, {weights, lines + 2 * k + 1}, outs, rank, total);
    for (int m = 0; m < M; m++)
        for_vectors(outs, [&](int64_t i, int count) {
            T* target = y + m * stride + i;
            store_some(target, load_some(target, count) + load_some(total + m * outs + i, count), count);
        });
}

template <class T>
void add_lora(T* y, int64_t stride, const T* x, const T* weights, const int32_t* ids, const int32_t* extents,
              const int32_t* lines, int64_t n, int64_t ins, int64_t outs) {
    static thread_local std::vector<float> scratch;
    for (int64_t row = 0, count; row < n; row += count) {
        const int32_t id = ids[row];
        for (count = 1; row + count < n && count < ROWS && ids[row + count] == id;) count++;
        if (id < 0 || extents[2 * id + 1] == 0) continue;
        const int64_t first = extents[2 * id], rank = extents[2 * id + 1];
        scratch.resize(ROWS * (rank + outs));
        const auto add = count == 4   ? add_rows<T, 4>
                         : count == 3 ? add_rows<T, 3>
                         : count == 2 ? add_rows<T, 2>
                                      : add_rows<T, 1>;
        add(y + row * stride, stride, x + row * ins, weights, lines + 2 * first, rank, ins, outs, scratch.data());
    }
}

}  // namespace

#define MP_ADAPTERS(T, NAME)                                                                                 \
    MP_EXPORT void add_lora_##NAME(T* y, int64_t stride, const T* x, const T* weights, const int32_t* ids,   \
                                   const int32_t* extents, const int32_t* lines, int64_t n, int64_t ins,     \
                                   int64_t outs, int64_t max_rank) {                                         \
        parallel_ranges(n, VALUE_NS * max_rank * (ins + outs), [=](int64_t first, int64_t end) {             \
            add_lora(y + first * stride, stride, x + first * ins, weights, ids + first, extents, lines,      \
                     end - first, ins, outs);                                                                \
        });                                                                                                  \
    }

MP_FOR_DTYPES(MP_ADAPTERS)
