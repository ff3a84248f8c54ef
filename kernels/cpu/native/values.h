// Weighted sums of a run of values for the query heads that share a kv head.
#pragma once

#include "run.h"

// sums[g] += weights[g] · v for G heads and C vectors of dimensions. With few vectors, even and odd tokens have
// separate sums, which hides the latency of the additions. G does not decide: a head would be rounded otherwise
// among others than alone. Prefetches `ahead` values with each token: the turns of a run share its prefetch, as the
// first alone would wait for it.
template <class T, int G, int C>
MP_INLINE void gather_part(const float* weights, Run<T> values, int64_t dim, float* sums, int64_t ahead) {
    constexpr int COPIES = C <= 2 ? 2 : 1;
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
            prefetch_more(values.prefetch, ahead);
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

// C vectors of dimensions for all heads.
template <class T, int C>
MP_INLINE void gather_columns(const float* weights, int64_t group, Run<T>& values, int64_t dim, float* sums) {
    const int64_t ahead = part_of<T>(dim, dim / (C * W) * ((group + 3) / 4)), all = ahead * values.count;
    for (; group >= 4; group -= 4, weights += 4 * PITCH, sums += 4 * dim, values.skip(all))
        gather_part<T, 4, C>(weights, values, dim, sums, ahead);
    if (group == 3) gather_part<T, 3, C>(weights, values, dim, sums, ahead);
    if (group == 2) gather_part<T, 2, C>(weights, values, dim, sums, ahead);
    if (group == 1) gather_part<T, 1, C>(weights, values, dim, sums, ahead);
    if (group) values.skip(all);
    values.rows += C * W;
}

// sums[g] += weights[g] · v
template <class T>
void gather(const float* weights, int64_t group, Run<T> values, int64_t dim, float* sums) {
    int64_t at = 0;
    values.end = values.prefetch ? values.prefetch + values.count * dim : nullptr;
    if (group == 1)
        for (; at + 8 * W <= dim; at += 8 * W) gather_columns<T, 8>(weights, group, values, dim, sums + at);
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
