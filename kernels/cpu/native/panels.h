// Matrix products with packed weights: how they are divided among threads, and what ends them.
#pragma once

#include <algorithm>
#include <vector>

#include "threads.h"
#include "tile.h"

constexpr int PANEL = 4 * W;              // outputs in a panel
constexpr int64_t CHUNK = 512;            // inputs of a panel that stay in the L1/L2 caches for all rows
constexpr int64_t CHUNK_OF_FEW = (16 << 10) / (PANEL * 2);  // the same for few rows: 16 KiB of 16-bit weights
constexpr int64_t MIN_ROWS_A_TASK = 192;  // a block of rows reads, and perhaps converts, its weights anew
constexpr int64_t ROWS_THAT_WAIT = 192;  // up to so many, passes prefetch: more are bound by arithmetic
constexpr int64_t ROWS_TO_WIDEN = 48;     // from so many rows on, a chunk is converted once for all

MP_INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Rows as To, each padded with zeros to `stored` values. Valid until the thread's next call for this type.
template <class To, class X>
const To* converted(const X* x, int64_t rows, int64_t inputs, int64_t stored) {
    static thread_local std::vector<To> scratch;
    if ((int64_t)scratch.size() < rows * stored) scratch.resize(rows * stored);
    for (int64_t row = 0; row < rows; row++, x += inputs) {
        To* to = scratch.data() + row * stored;
        for_vectors(inputs, [&](int64_t i, int count) { store_some(to + i, load_some(x + i, count), count); });
        for (int64_t i = inputs; i < stored; i++) from_float(to + i, 0.0f);
    }
    return scratch.data();
}

// y[row] = sums[row] + bias; sums: [rows, PANEL]; bias may be null.
template <class Y>
void finish(const float* sums, const float* bias, Y* y, int64_t ldy, int64_t rows, int64_t outputs) {
    for (int64_t row = 0; row < rows; row++, sums += PANEL, y += ldy)
        for_vectors(outputs, [&](int64_t i, int count) {
            const vf v = load(sums + i);
            store_some(y + i, bias ? v + load_some(bias + i, count) : v, count);
        });
}

// Parts of a product for the threads: ranges of panels and, where there are few panels, of rows too.
template <class P>
void multiply(const P& product) {
    const int64_t panels = product.num_panels(), wanted = num_threads() * TASKS_A_THREAD;
    const int64_t blocks = num_threads() == 1 ? 1
                           : std::clamp<int64_t>(product.rows / MIN_ROWS_A_TASK, 1, 1 + (wanted - 1) / panels);
    if (blocks == 1)
        return parallel_ranges(panels, product.panel_ns(), [&](int64_t first, int64_t end) {
            product.panels(first, end);
        });
    parallel(panels * blocks, [&](int64_t i) {
        const int64_t block = i % blocks, rows = product.rows;
        product.part(rows * block / blocks, rows * (block + 1) / blocks).panels(i / blocks, i / blocks + 1);
    });
}
