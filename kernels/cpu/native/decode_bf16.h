// Weighted sums of bf16 values by the bf16 dot product, for head_dim a multiple of 32: the values of two tokens are
// interleaved, once for several rows, and multiplied by pairs of weights. A row is summed in the same order among any
// others.
#pragma once

#include "dot.h"
#include "run.h"
#include "tile.h"

#if defined(MP_BF16_DOT)

namespace bf16_decode {

constexpr int64_t STEP = 32;  // dimensions

// Weights in bf16, with zeros behind them: the last token may be half of a pair. n: a multiple of W.
MP_INLINE void round_weights(const float* weights, int64_t n, bf16* rounded) {
    for (int64_t i = 0; i < n; i += W) {
        const __m256i some = (__m256i)_mm512_cvtneps_pbh((__m512)load(weights + i));
        memcpy(rounded + i, &some, sizeof some);
    }
    memset(rounded + n, 0, W * sizeof(bf16));
}

// sums[r] += weights[r] · v for R rows and 32 C dimensions, which end up in the order of pairs.
template <int R, int C>
MP_INLINE void gather_part(const bf16* weights, Run<bf16> values, int64_t dim, float* sums, int64_t ahead) {
    vf registers[R][2 * C];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int c = 0; c < 2 * C; c++) registers[r][c] = load(sums + r * dim + c * W);
    const auto add = [&](const bf16* v, const bf16* next, const bf16* w) {
        vu low[C], high[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
            const vu a = pairs(v + c * STEP), b = next ? pairs(next + c * STEP) : vu{};
            low[c] = low_pairs(a, b), high[c] = high_pairs(a, b);
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            const vu weight = broadcast(w + r * PITCH);
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) {
                registers[r][2 * c] = dot(registers[r][2 * c], low[c], weight);
                registers[r][2 * c + 1] = dot(registers[r][2 * c + 1], high[c], weight);
            }
        }
    };
    const bf16* v = values.rows;
    int64_t i = 0;
    for (; i + 2 <= values.count; i += 2, v += 2 * dim) {
        prefetch_more(values.prefetch, 2 * ahead);
        add(v, v + dim, weights + i);
    }
    if (i < values.count) add(v, nullptr, weights + i);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int c = 0; c < 2 * C; c++) store(sums + r * dim + c * W, registers[r][c]);
}

// 32 C dimensions of all rows.
template <int MOST, int C>
void gather_columns(const bf16* weights, int64_t rows, Run<bf16>& values, int64_t dim, float* sums) {
    const int64_t ahead = part_of<bf16>(dim, dim / (C * STEP) * ((rows + MOST - 1) / MOST));
    for_row_groups<MOST>(rows, [&](int64_t row, auto R) {
        gather_part<R, C>(weights + row * PITCH, values, dim, sums + row * dim, ahead);
        values.skip(ahead * values.count);
    });
    values.rows += C * STEP;
}

// sums[r] += weights[r] · v
inline void gather(const bf16* weights, int64_t rows, Run<bf16> values, int64_t dim, float* sums) {
    int64_t at = 0;
    values.end = values.prefetch ? values.prefetch + values.count * dim : nullptr;
    if (rows <= 3)
        for (; at + 4 * STEP <= dim; at += 4 * STEP) gather_columns<3, 4>(weights, rows, values, dim, sums + at);
    for (; at + 2 * STEP <= dim; at += 2 * STEP) gather_columns<6, 2>(weights, rows, values, dim, sums + at);
    if (at < dim) gather_columns<8, 1>(weights, rows, values, dim, sums + at);
}

}  // namespace bf16_decode

#endif
