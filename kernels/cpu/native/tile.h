// The inner loop of the linear layers and of prefill attention: a few rows times a few vectors.
#pragma once

#include "simd.h"

#if defined(MP_AVX512) || defined(__aarch64__)
constexpr int ROWS = 6;  // 6 x 4 sums and their operands fill 32 registers
#else
constexpr int ROWS = 2;  // 16 registers
#endif

// sums[r][c] += x[r][k] * w[k][c] in the order of k, so that a row's sum does not depend on the other rows.
// x: rows of stride ldx; w: rows of stride ldw. AHEAD: prefetch the memory `ahead` elements behind w.
template <int R, int C, bool AHEAD = false, class T>
MP_INLINE void accumulate(const float* x, int64_t ldx, const T* w, int64_t ldw, int64_t inputs,
                          vf (&sums)[R][C], int64_t ahead = 0) {
    for (int64_t k = 0; k < inputs; k++, w += ldw) {
        if constexpr (AHEAD) prefetch_row(w + ahead, C * W);
        vf weights[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) weights[c] = load(w + c * W);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) sums[r][c] += weights[c] * x[r * ldx + k];
    }
}

// Loads the registers of the loop, or zeros them with `begin`. sums: rows of stride ld.
template <int R, int C>
MP_INLINE void fetch(vf (&registers)[R][C], const float* sums, int64_t ld, bool begin) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) registers[r][c] = begin ? splat(0.0f) : load(sums + r * ld + c * W);
}

template <int R, int C>
MP_INLINE void keep(const vf (&registers)[R][C], float* sums, int64_t ld) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) store(sums + r * ld + c * W, registers[r][c]);
}

// Calls f with the smallest std::integral_constant of 1 … MOST that is at least n.
template <int MOST, class F>
MP_INLINE void with_constant(int64_t n, F f) {
    if constexpr (MOST > 1) {
        if (n < MOST) return with_constant<MOST - 1>(n, f);
    }
    f(std::integral_constant<int, MOST>());
}

// Splits rows into the fewest groups of at most MOST, of equal size: 8 rows are 4 + 4, not 6 + 2. Calls
// f(first row, number of rows as a constant).
template <int MOST = ROWS, class F>
MP_INLINE void for_row_groups(int64_t rows, F f) {
    const int64_t groups = (rows + MOST - 1) / MOST;
    if (groups == 0) return;
    const int64_t base = rows / groups, larger = rows % groups;
    for (int64_t group = 0, row = 0; group < groups; group++) {
        const int64_t size = base + (group < larger);
        with_constant<MOST>(size, [&](auto count) { f(row, count); });
        row += size;
    }
}
