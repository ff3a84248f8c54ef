// Routing, grouping and weighted sum of MoE experts. linear.cpp has the matrix products.

#include <algorithm>
#include <vector>

#include "exp.h"
#include "lanes.h"

namespace {

// The index of the largest of n values (a multiple of W); the first of equal ones. With NaN among the values,
// the index of the first that is not below 0.
int64_t largest_at(const float* values, int64_t n) {
    vf best = load(values);
    for (int64_t i = W; i < n; i += W) best = vmax(load(values + i), best);
    const float top = largest(best);
    for (int64_t i = 0; i < n; i++)
        if (values[i] == top && top >= 0) return i;
    for (int64_t i = 0; i < n; i++)
        if (!(values[i] < 0)) return i;
    return 0;
}

template <class T>
void route(const T* logits, float* weights, int32_t* ids, int64_t n, int64_t experts, int64_t k,
           bool renormalize) {
    static thread_local std::vector<float> scratch;
    const int64_t padded = (experts + W - 1) / W * W;
    scratch.resize(padded);
    float* values = scratch.data();
    for (int64_t row = 0; row < n; row++, logits += experts, weights += k, ids += k) {
        std::fill(values + experts, values + padded, -INF);
        for_vectors(experts, [&](int64_t i, int count) {
            store_some(values + i, load_some(logits + i, count), count);
        });
        vf best = load(values);
        for (int64_t i = W; i < padded; i += W) best = vmax(load(values + i), best);
        const float top = largest(best);
        vf sums = {};
        for (int64_t i = 0; i < padded; i += W) {
            const vf weight = exp_falling(load(values + i) - top);
            sums += weight;
            store(values + i, weight);
        }
        const float total = sum(sums);
        // Chosen experts and the padding are below 0.
        std::fill(values + experts, values + padded, -1.0f);
        float chosen = 0.0f;
        for (int64_t j = 0; j < k; j++) {
            const int64_t expert = largest_at(values, padded);
            ids[j] = (int32_t)expert;
            weights[j] = values[expert] / total;
            chosen += weights[j];
            values[expert] = -1.0f;
        }
        if (renormalize)
            for (int64_t j = 0; j < k; j++) weights[j] /= chosen;
    }
}

template <class T>
void combine(const T* rows, const int64_t* order, const float* weights, T* out, int64_t n, int64_t k,
             int64_t hidden) {
    static thread_local std::vector<int64_t> scratch;
    scratch.resize(n * k);
    int64_t* positions = scratch.data();
    for (int64_t i = 0; i < n * k; i++) positions[order[i]] = i;
    for (int64_t token = 0; token < n; token++, positions += k, weights += k, out += hidden)
        for_vectors(hidden, [&](int64_t i, int count) {
            vf sum = {};
            for (int64_t j = 0; j < k; j++) sum += load_some(rows + positions[j] * hidden + i, count) * weights[j];
            store_some(out + i, sum, count);
        });
}

}  // namespace

MP_EXPORT void group_by_expert(const int32_t* ids, int64_t* order, int32_t* offsets, int64_t m, int64_t experts) {
    static thread_local std::vector<int32_t> next;
    std::fill(offsets, offsets + experts + 1, 0);
    for (int64_t i = 0; i < m; i++) offsets[ids[i] + 1]++;
    for (int64_t e = 0; e < experts; e++) offsets[e + 1] += offsets[e];
    next.assign(offsets, offsets + experts);
    for (int64_t i = 0; i < m; i++) order[next[ids[i]]++] = i;
}

MP_EXPORT void group_rows(const char* x, const int64_t* order, int64_t k, char* out, int64_t m, int64_t nbytes) {
    for (int64_t i = 0; i < m; i++) memcpy(out + i * nbytes, x + order[i] / k * nbytes, nbytes);
}

#define MP_EXPERTS(T, NAME)                                                                                \
    MP_EXPORT void route_experts_##NAME(const T* logits, float* weights, int32_t* ids, int64_t n,          \
                                        int64_t experts, int64_t k, int64_t renormalize) {                 \
        route(logits, weights, ids, n, experts, k, renormalize);                                           \
    }                                                                                                      \
    MP_EXPORT void combine_experts_##NAME(const T* rows, const int64_t* order, const float* weights,       \
                                          T* out, int64_t n, int64_t k, int64_t hidden) {                  \
        combine(rows, order, weights, out, n, k, hidden);                                                  \
    }

MP_FOR_DTYPES(MP_EXPERTS)
