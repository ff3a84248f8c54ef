// The inner loop of the linear layers and of prefill attention: a few rows times a few vectors.
#pragma once

#include <algorithm>

#include "simd.h"

// 6 x 4 sums and their operands fill 32 registers. Of 16 registers, 2 x 4 sums leave some for a conversion; more
// rows take 6 x 2, which read each weight a third as often.
#if defined(MP_AVX512) || defined(__aarch64__)
constexpr int ROWS = 6, TALL_ROWS = 6, TALL_COLUMNS = 4;
#else
constexpr int ROWS = 2, TALL_ROWS = 6, TALL_COLUMNS = 2;
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

// Splits C vectors into parts of at most MOST. Calls f(first vector, number of vectors), both constants.
template <int C, int MOST, int AT = 0, class F>
MP_INLINE void for_columns(F f) {
    constexpr int some = C - AT < MOST ? C - AT : MOST;
    f(std::integral_constant<int, AT>(), std::integral_constant<int, some>());
    if constexpr (AT + some < C) for_columns<C, MOST, AT + some>(f);
}

// The size of the next tall tile, MOST or one less, of `rows` rows; 0: what is left is for wide ones.
template <int MOST>
MP_INLINE int64_t tall_rows(int64_t rows) {
    if (rows < MOST - 1) return 0;
    const int64_t rest = rows % MOST;
    const bool less = rows > MOST && (rest == 1 || rest == 3 || (rest == 4 && MOST == 6));
    return less ? MOST - 1 : std::min<int64_t>(rows, MOST);
}

// Splits rows x C vectors into tiles of at most MOST rows, so that sums fill the registers. Calls f(first row, number of
// rows as a constant, first vector, number of vectors as a constant).
template <int C, int MOST = TALL_ROWS, class F>
MP_INLINE void for_tiles(int64_t rows, F f) {
    int64_t tall = 0;
    if constexpr (C > TALL_COLUMNS) {
        for (int64_t size; (size = tall_rows<MOST>(rows - tall)) > 0;) tall += size;
        for_columns<C, TALL_COLUMNS>([&](auto at, auto some) {
            for (int64_t row = 0, size; row < tall; row += size) {
                size = tall_rows<MOST>(rows - row);
                if (size == MOST) f(row, std::integral_constant<int, MOST>(), at, some);
                else f(row, std::integral_constant<int, MOST - 1>(), at, some);
            }
        });
    }
    for_row_groups<std::min(ROWS, MOST)>(rows - tall, [&](int64_t row, auto R) {
        f(tall + row, R, std::integral_constant<int, 0>(), std::integral_constant<int, C>());
    });
}
