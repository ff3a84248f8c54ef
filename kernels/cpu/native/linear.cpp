// y = x W^T + bias, with W packed in the order of its use.
//
// Outputs are in lanes. W is split into panels of 4 vectors of outputs; a panel has the weights of its outputs
// input by input, so that one pass reads it sequentially. bf16 weights are in pairs of inputs (one vector: W
// outputs x 2 inputs), the operand of the bf16 dot product; a shift and a mask convert them to float32.
//
// Every output is summed over the inputs in order, so that a row's result does not depend on the other rows,
// bit for bit.

#include <vector>

#include "lines.h"
#include "panels.h"

namespace {

// ---------------------------------------------------------------- bf16 weights, in pairs of inputs

// The first (shift) or second (mask) input of a pair of bf16 as float32.
MP_INLINE vf first_of(vu pairs) { return (vf)(pairs << 16); }
MP_INLINE vf second_of(vu pairs) { return (vf)(pairs & 0xffff0000u); }

// C vectors of pairs. One copy of all goes through the stack, in parts smaller than a vector.
template <int C>
MP_INLINE void load_pairs(const bf16* w, vu (&pairs)[C]) {
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) memcpy(&pairs[c], w + c * 2 * W, sizeof pairs[c]);
}

// sums[r][c] += the products of x[r][0] and x[r][1] with pairs[c].
template <int R, int C>
MP_INLINE void multiply_pairs(const float* x, int64_t ldx, const vu (&pairs)[C], vf (&sums)[R][C]) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) sums[r][c] += first_of(pairs[c]) * x[r * ldx];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) sums[r][c] += second_of(pairs[c]) * x[r * ldx + 1];
}

#if defined(MP_BF16_DOT)
template <int R, int C>
MP_INLINE void multiply_pairs(const bf16* x, int64_t ldx, const vu (&pairs)[C], vf (&sums)[R][C]) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        int32_t both;
        memcpy(&both, x + r * ldx, 4);
        const __m512bh inputs_pair = (__m512bh)_mm512_set1_epi32(both);
#pragma GCC unroll 8
        for (int c = 0; c < C; c++)
            sums[r][c] = (vf)_mm512_dpbf16_ps((__m512)sums[r][c], (__m512bh)pairs[c], inputs_pair);
    }
}
#endif

// A chunk of C vectors of bf16 pairs as float32 rows. `to` has space for an even number of inputs.
template <int C>
void widen(const bf16* w, int64_t inputs, float* to) {
    for (int64_t k = 0; k < inputs; k += 2, to += 2 * C * W, w += 2 * C * W)
        for (int c = 0; c < C; c++) {
            vu pairs;
            memcpy(&pairs, w + c * 2 * W, sizeof pairs);
            store(to + c * W, first_of(pairs));
            store(to + (C + c) * W, second_of(pairs));
        }
}

// ---------------------------------------------------------------- rows through panels

// One pass of R rows over C vectors of a chunk with rows of ldw weights; AHEAD prefetches the next chunk. x: rows
// of stride ldx; sums: [R, PANEL]. Not inlined, because only then the compiler keeps every sum in a register.
template <int R, int C, bool AHEAD, class T>
__attribute__((noinline)) void pass(const float* x, int64_t ldx, const T* w, int64_t ldw, int64_t inputs, bool begin,
                                    float* sums) {
    vf registers[R][C];
    fetch<R, C>(registers, sums, PANEL, begin);
    accumulate<R, C, AHEAD>(x, ldx, w, ldw, inputs, registers, inputs * ldw);
    keep<R, C>(registers, sums, PANEL);
}

// As `pass`, with pairs of weights. Every step prefetches LINES vectors, from `next` on.
template <int R, int C, int LINES, class X>
__attribute__((noinline)) void pair_pass(const X* x, int64_t ldx, const bf16* w, int64_t ldw, int64_t inputs,
                                         bool begin, float* sums, const bf16* next) {
    vf registers[R][C];
    fetch<R, C>(registers, sums, PANEL, begin);
    for (int64_t k = 0; k < inputs; k += 2, w += 2 * ldw, next += LINES * 2 * W) {
        vu pairs[C];
        prefetch_row(next, LINES * 2 * W);
        load_pairs(w, pairs);
        multiply_pairs<R, C>(x + k, ldx, pairs, registers);
    }
    keep<R, C>(registers, sums, PANEL);
}

// All rows through one chunk. With converted weights the first group of rows loads a chunk into the caches, and
// the second one prefetches the next chunk. In the other cases prefetching was measured to be slower.
template <int C, class T>
void passes(const float* x, int64_t ldx, int64_t rows, const T* w, int64_t inputs, bool begin, float* sums) {
    int64_t group = 0;
    for_tiles<C>(rows, [&](int64_t row, auto R, int64_t at, auto some) {
        const auto run = [&](auto ahead) {
            pass<R, some, ahead>(x + row * ldx, ldx, w + at * W, C * W, inputs, begin, sums + row * PANEL + at * W);
        };
        if (sizeof(T) == 2 && group++ == 1) run(std::true_type());
        else run(std::false_type());
    });
}

// As `passes`. Few rows wait for memory: each pass prefetches an equal part of the next chunk. One row is faster
// without.
template <int C, class X>
void pair_passes(const X* x, int64_t ldx, int64_t rows, const bf16* w, int64_t inputs, bool begin, float* sums) {
    // The conversion of pairs uses the registers that the sums of a sixth row would need.
    constexpr int most = std::is_same_v<X, float> ? TALL_ROWS - 1 : TALL_ROWS;
    int64_t count = 0, group = 0;
    for_tiles<C, most>(rows, [&](auto...) { count++; });
    for_tiles<C, most>(rows, [&](int64_t row, auto R, int64_t at, auto some) {
        const auto run = [&](auto lines) {
            pair_pass<R, some, lines>(x + row * ldx, ldx, w + at * 2 * W, C * W, inputs, begin,
                                      sums + row * PANEL + at * W, w + inputs * C * W * (count + group) / count);
        };
        if (rows == 1 || rows > ROWS_THAT_WAIT) run(std::integral_constant<int, 0>());
        else if (count == 1) run(std::integral_constant<int, C>());
        else if (count <= 3) run(std::integral_constant<int, (C + 1) / 2>());
        else run(std::integral_constant<int, 1>());
        group++;
    });
}

// All rows through one panel of C vectors. sums: [rows, PANEL].
template <int C, class X, class T>
void panel(const X* x, int64_t ldx, int64_t rows, const T* w, int64_t inputs, float* sums) {
    alignas(64) static thread_local float wide[CHUNK * PANEL];
    constexpr bool pairs = std::is_same_v<T, bf16>;
    const bool widens = pairs && std::is_same_v<X, float> && rows >= ROWS_TO_WIDEN;
    // What several passes read fits into the L1 cache, beside what they prefetch.
    const int64_t few = rows > 2 * TALL_ROWS ? 2 * CHUNK_OF_FEW : CHUNK_OF_FEW;
    const int64_t chunk = !pairs || widens || rows > ROWS_THAT_WAIT ? CHUNK : std::min(few, CHUNK);
    for (int64_t first = 0; first < inputs; first += chunk) {
        const int64_t count = std::min(chunk, inputs - first);
        const X* from = x + first;
        const T* weights = w + first * C * W;
        if constexpr (pairs) {
            if constexpr (std::is_same_v<X, float>) {
                if (widens) {
                    widen<C>(weights, count, wide);
                    passes<C>(from, ldx, rows, (const float*)wide, count, first == 0, sums);
                    continue;
                }
            }
            pair_passes<C>(from, ldx, rows, weights, count, first == 0, sums);
        } else {
            passes<C>(from, ldx, rows, weights, count, first == 0, sums);
        }
    }
}

// Rows first … end - 1 of one matrix product: rows of x and y, and the packed weight.
template <class X, class T, class Y>
struct Product {
    const X* x;
    int64_t ldx;
    const T* w;
    const float* bias;  // or null
    Y* y;
    int64_t rows;
    int64_t inputs;  // as packed: rounded up to a pair for bf16
    int64_t outputs;

    // Panels first … end - 1 of the outputs.
    void panels(int64_t first, int64_t end) const {
        static thread_local Lines<float> scratch;
        if ((int64_t)scratch.size() < rows * PANEL) scratch.resize(rows * PANEL);
        float* sums = scratch.data();
        for (int64_t at = first * PANEL; at < std::min(end * PANEL, outputs); at += PANEL) {
            const int64_t count = std::min<int64_t>(PANEL, outputs - at);
            const T* weights = w + at * inputs;
            with_constant<4>((count + W - 1) / W, [&](auto C) { panel<C>(x, ldx, rows, weights, inputs, sums); });
            finish(sums, bias ? bias + at : nullptr, y + at, outputs, rows, count);
        }
    }

    int64_t num_panels() const { return (outputs + PANEL - 1) / PANEL; }
    // Nanoseconds of one thread for a panel, roughly: it is read from memory, and multiplied.
    double panel_ns() const { return (double)(inputs * PANEL) * (sizeof(T) / 20.0 + (double)rows / 60.0); }
    Product part(int64_t first, int64_t end) const {
        return {x + first * ldx, ldx, w, bias, y + first * outputs, end - first, inputs, outputs};
    }
};

// Calls f(product) with activations in the type that is multiplied. The product is valid until the thread
// makes the next one.
template <class X, class T, class F>
void with_product(const X* x, const T* w, const float* bias, X* y, int64_t rows, int64_t inputs, int64_t outputs,
                  F f) {
    const int64_t stored = round_up(inputs, std::is_same_v<T, bf16> ? 2 : 1);
#if defined(MP_BF16_DOT)
    using A = std::conditional_t<std::is_same_v<X, bf16> && std::is_same_v<T, bf16>, bf16, float>;
#else
    using A = float;
#endif
    const A* even;
    if constexpr (std::is_same_v<X, A>) even = inputs == stored ? x : converted<A>(x, rows, inputs, stored);
    else even = converted<A>(x, rows, inputs, stored);
    f(Product<A, T, X>{even, stored, w, bias, y, rows, stored, outputs});
}

template <class X, class T>
void linear(const X* x, const T* w, const float* bias, X* y, int64_t rows, int64_t inputs, int64_t outputs) {
    with_product(x, w, bias, y, rows, inputs, outputs, [](const auto& product) { multiply(product); });
}

template <class T>
int64_t packed_size(int64_t inputs, int64_t outputs) {
    return round_up(inputs, std::is_same_v<T, bf16> ? 2 : 1) * round_up(outputs, W);
}

// Rows offsets[e] … offsets[e + 1] - 1 of x times the e-th of the packed weights, which are contiguous. Of the m
// rows of y, those beyond the last expert's are zeros.
template <class X, class T>
void grouped_linear(const X* x, const T* w, const int32_t* offsets, X* y, int64_t m, int64_t experts,
                    int64_t inputs, int64_t outputs) {
    const int64_t size = packed_size<T>(inputs, outputs);
    with_product(x, w, nullptr, y, offsets[experts], inputs, outputs, [&](auto all) {
        static thread_local std::vector<decltype(all)> products;
        products.clear();
        for (int64_t e = 0; e < experts; e++) {
            if (offsets[e + 1] == offsets[e]) continue;
            products.push_back(all.part(offsets[e], offsets[e + 1]));
            products.back().w = w + e * size;
        }
        const auto* some = products.data();
        const int64_t panels = all.num_panels(), count = (int64_t)products.size();
        if (count == 0) return;
        all.rows /= count;  // of an average product
        parallel_ranges(count * panels, all.panel_ns(), [&](int64_t first, int64_t end) {
            for (int64_t at = first, next; at < end; at = next) {
                next = std::min(end, (at / panels + 1) * panels);
                some[at / panels].panels(at % panels, at % panels + next - at);
            }
        });
    });
    const int64_t end = offsets[experts];
    if (m > end) memset((void*)(y + end * outputs), 0, (m - end) * outputs * sizeof(X));
}

// ---------------------------------------------------------------- packing

template <class T>
void pack(const T* weight, T* packed, int64_t inputs, int64_t outputs) {
    constexpr int pair = std::is_same_v<T, bf16> ? 2 : 1;
    const int64_t stored = round_up(inputs, pair);
    for (int64_t first = 0; first < outputs; first += PANEL) {
        const int64_t lanes = round_up(std::min<int64_t>(PANEL, outputs - first), W);
        for (int64_t lane = 0; lane < lanes; lane++)
            for (int64_t k = 0; k < stored; k++) {
                const bool there = first + lane < outputs && k < inputs;
                packed[first * stored + (k / pair * lanes + lane) * pair + k % pair] =
                    there ? weight[(first + lane) * inputs + k] : T{};
            }
    }
}

}  // namespace

#define MP_PACK(T, NAME)                                                                                    \
    MP_EXPORT int64_t packed_size_##NAME(int64_t inputs, int64_t outputs) {                                 \
        return packed_size<T>(inputs, outputs);                                                             \
    }                                                                                                       \
    MP_EXPORT void pack_##NAME(const T* weight, T* packed, int64_t inputs, int64_t outputs) {               \
        pack(weight, packed, inputs, outputs);                                                              \
    }

#define MP_LINEAR(X, XNAME, T, TNAME)                                                                       \
    MP_EXPORT void linear_##XNAME##_##TNAME(const X* x, const T* w, const float* bias, X* y, int64_t rows,  \
                                            int64_t inputs, int64_t outputs) {                              \
        linear(x, w, bias, y, rows, inputs, outputs);                                                       \
    }                                                                                                       \
    MP_EXPORT void grouped_linear_##XNAME##_##TNAME(const X* x, const T* w, const int32_t* offsets, X* y,   \
                                                    int64_t m, int64_t experts, int64_t inputs,             \
                                                    int64_t outputs) {                                      \
        grouped_linear(x, w, offsets, y, m, experts, inputs, outputs);                                      \
    }

MP_FOR_DTYPES(MP_PACK)
MP_LINEAR(float, f32, float, f32)
MP_LINEAR(float, f32, bf16, bf16)
MP_LINEAR(bf16, bf16, bf16, bf16)
MP_LINEAR(fp16, f16, fp16, f16)
