// Operations on rows of activations: RMS norm, SiLU-and-multiply, the index of the largest value, token masks.

#include <cmath>

#include "exp.h"
#include "lanes.h"
#include "threads.h"

namespace {

// Nanoseconds of one thread for a value, roughly.
constexpr double NORM_NS = 0.15, SILU_NS = 0.4, ARGMAX_NS = 0.1, FORBID_NS = 0.05;

template <class T>
void rms_norm(const T* x, const T* residual, const T* weight, T* normed, T* total, int64_t n, int64_t hidden,
              float eps) {
    for (int64_t row = 0; row < n; row++, x += hidden, normed += hidden) {
        const T* values = x;
        if (residual) {
            const T* other = residual + row * hidden;
            T* sums = total + row * hidden;
            for_vectors(hidden, [&](int64_t i, int count) {
                store_some(sums + i, load_some(x + i, count) + load_some(other + i, count), count);
            });
            values = sums;  // rounded, as the next layer gets it
        }
        vf squares[4] = {};
        int64_t i = 0;
        for (; i + 4 * W <= hidden; i += 4 * W)
            for (int j = 0; j < 4; j++) {
                const vf v = load(values + i + j * W);
                squares[j] += v * v;
            }
        for (; i < hidden; i += W) {
            const vf v = load_some(values + i, hidden - i < W ? (int)(hidden - i) : W);
            squares[0] += v * v;
        }
        const float mean = sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / (float)hidden;
        const float scale = 1.0f / std::sqrt(mean + eps);
        for_vectors(hidden, [&](int64_t i, int count) {
            store_some(normed + i, load_some(values + i, count) * scale * load_some(weight + i, count), count);
        });
    }
}

template <class T>
void silu_mul(const T* gate_up, T* out, int64_t n, int64_t inter) {
    for (int64_t row = 0; row < n; row++, gate_up += 2 * inter, out += inter)
        for_vectors(inter, [&](int64_t i, int count) {
            const vf gate = load_some(gate_up + i, count), up = load_some(gate_up + inter + i, count);
            store_some(out + i, gate / (1.0f + exp(-gate)) * up, count);
        });
}

template <class T>
int64_t argmax(const T* x, int64_t n) {
    vf best = splat(-INF);
    vi nan = {};
    for_vectors(n, [&](int64_t i, int count) {
        vf v = load_some(x + i, count);
        if (count < W)
            for (int j = count; j < W; j++) v[j] = -INF;
        best = vmax(v, best);
        nan |= v != v;
    });
    bool any_nan = false;
    for (int j = 0; j < W; j++) any_nan |= nan[j] != 0;
    const float top = largest(best);
    for (int64_t i = 0; i < n; i++) {
        const float v = to_float(x[i]);
        if (any_nan ? v != v : v == top) return i;
    }
    return 0;
}

template <class T>
void argmax_rows(const T* x, int64_t* out, int64_t n, int64_t vocab) {
    for (int64_t row = 0; row < n; row++) out[row] = argmax(x + row * vocab, vocab);
}

// Sets x[i] to -inf where bit i % 32 of mask[i / 32] is clear.
void forbid(float* x, const uint32_t* mask, int64_t n) {
    vu lanes;
    for (int j = 0; j < W; j++) lanes[j] = 1u << j;
    for (int64_t i = 0; i < n; i += 32) {
        const uint32_t allowed = mask[i / 32];
        if (allowed == 0xffffffffu) continue;
        if (n - i < 32) {
            for (int64_t j = i; j < n; j++)
                if (!(allowed >> (j - i) & 1)) x[j] = -INF;
            continue;
        }
        for (int j = 0; j < 32; j += W)
            store(x + i + j, ((lanes & allowed >> j) != 0) ? load(x + i + j) : splat(-INF));
    }
}

}  // namespace

#define MP_ROWS(T, NAME)                                                                                     \
    MP_EXPORT void rms_norm_##NAME(const T* x, const T* residual, const T* weight, T* normed, T* total,      \
                                   int64_t n, int64_t hidden, float eps) {                                   \
        parallel_ranges(n, NORM_NS * hidden, [=](int64_t first, int64_t end) {                               \
            const int64_t at = first * hidden;                                                               \
            rms_norm(x + at, residual ? residual + at : nullptr, weight, normed + at,                        \
                     residual ? total + at : nullptr, end - first, hidden, eps);                             \
        });                                                                                                  \
    }                                                                                                        \
    MP_EXPORT void silu_mul_##NAME(const T* gate_up, T* out, int64_t n, int64_t inter) {                     \
        parallel_ranges(n, SILU_NS * inter, [=](int64_t first, int64_t end) {                                \
            silu_mul(gate_up + 2 * first * inter, out + first * inter, end - first, inter);                  \
        });                                                                                                  \
    }                                                                                                        \
    MP_EXPORT void argmax_rows_##NAME(const T* x, int64_t* out, int64_t n, int64_t vocab) {                  \
        parallel_ranges(n, ARGMAX_NS * vocab, [=](int64_t first, int64_t end) {                              \
            argmax_rows(x + first * vocab, out + first, end - first, vocab);                                 \
        });                                                                                                  \
    }

MP_FOR_DTYPES(MP_ROWS)

MP_EXPORT void forbid_tokens(float* scores, const uint32_t* masks, int64_t n, int64_t vocab) {
    const int64_t words = (vocab + 31) / 32;
    parallel_ranges(n, FORBID_NS * vocab, [=](int64_t first, int64_t end) {
        for (int64_t row = first; row < end; row++) forbid(scores + row * vocab, masks + row * words, vocab);
    });
}
