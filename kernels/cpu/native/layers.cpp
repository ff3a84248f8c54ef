// The layers of a dense decoder for tokens that decode: one call instead of nine a layer. Results are those of the
// separate operations, bit for bit.

#include "lines.h"
#include "pool.h"

// Operations on rows, by dtype.
template <class X>
struct Rows;

#define MP_ROWS(X, NAME)                                                                                      \
    MP_EXPORT void rms_norm_##NAME(const X*, const X*, const X*, X*, X*, int64_t, int64_t, float);            \
    MP_EXPORT void silu_mul_##NAME(const X*, X*, int64_t, int64_t);                                           \
    template <>                                                                                               \
    struct Rows<X> {                                                                                          \
        static constexpr auto norm = rms_norm_##NAME;                                                         \
        static constexpr auto silu_mul = silu_mul_##NAME;                                                     \
    };

MP_FOR_DTYPES(MP_ROWS)

namespace {

// A linear layer with the function that multiplies by it. scales: null for plain weights.
struct Linear {
    const void *function, *weight, *scales, *zeros, *bias;
    int64_t inputs, outputs, group;

    template <class X>
    void multiply(const X* x, X* y, int64_t rows) const {
        using Plain = void (*)(const X*, const void*, const void*, X*, int64_t, int64_t, int64_t);
        using Quantised = void (*)(const X*, const void*, const void*, const void*, const void*, X*, int64_t, int64_t,
                                   int64_t, int64_t);
        if (scales) {
            ((Quantised)function)(x, weight, scales, zeros, bias, y, rows, inputs, outputs, group);
        } else {
            ((Plain)function)(x, weight, bias, y, rows, inputs, outputs);
        }
    }
};

// decoder_layers.py has the same structs. q_norm, k_norm: or null. k_factor, v_factor: reciprocals of the scales.
struct Layer {
    const void *attention_in, *q_norm, *k_norm, *mlp_in;
    const float *cos, *sin;
    int64_t half, window;
    float scale, v_scale, k_factor, v_factor;
    Linear qkv, o, gate_up, down;
};

// What the layers of a step share.
struct Step {
    const Pool* pool;
    const int64_t *positions, *slots;
    const int32_t *tables, *contexts;
    int64_t table_stride, batch, num_heads;
    float soft_cap, eps;
};

template <class X>
struct Scratch {
    Lines<X> normed, qkv, q, attended, gate_up, inner;

    void begin(const Layer& layer, int64_t rows) {
        normed.resize(rows * layer.qkv.inputs), qkv.resize(rows * layer.qkv.outputs);
        q.resize(rows * layer.o.inputs), attended.resize(rows * layer.o.inputs);
        gate_up.resize(rows * layer.gate_up.outputs), inner.resize(rows * layer.down.inputs);
    }
};

// hidden: [batch, inputs] of the first layer; at the end those of the last one, to be added to `residual`.
template <class X, class Rotate, class Attend>
void run_layers(const Layer* layers, int64_t count, const Step& step, X* hidden, X* residual, Rotate rotate,
                Attend attend) {
    static thread_local Scratch<X> scratch;
    const int64_t n = step.batch, width = layers[0].qkv.inputs;
    memcpy((void*)residual, hidden, n * width * sizeof(X));
    for (int64_t i = 0; i < count; i++) {
        const Layer& layer = layers[i];
        scratch.begin(layer, n);
        X *normed = scratch.normed.data(), *qkv = scratch.qkv.data(), *q = scratch.q.data();
        X *attended = scratch.attended.data(), *gate_up = scratch.gate_up.data(), *inner = scratch.inner.data();
        Rows<X>::norm(hidden, i ? residual : nullptr, (const X*)layer.attention_in, normed, residual, n, width,
                      step.eps);
        layer.qkv.multiply(normed, qkv, n);
        rotate(qkv, step.positions, layer.cos, layer.sin, layer.half, step.pool, i, step.slots, q, n, step.num_heads,
               (const X*)layer.q_norm, (const X*)layer.k_norm, step.eps, layer.k_factor, layer.v_factor);
        attend(step.pool, i, q, attended, nullptr, step.tables, step.table_stride, nullptr, nullptr, step.contexts, n,
               1, step.num_heads, layer.scale, layer.v_scale, layer.window, step.soft_cap);
        layer.o.multiply(attended, hidden, n);
        Rows<X>::norm(hidden, residual, (const X*)layer.mlp_in, normed, residual, n, width, step.eps);
        layer.gate_up.multiply(normed, gate_up, n);
        Rows<X>::silu_mul(gate_up, inner, n, layer.down.inputs);
        layer.down.multiply(inner, hidden, n);
    }
}

}  // namespace

#define MP_LAYERS(X, T, NAME)                                                                                 \
    MP_EXPORT void rotate_and_write_##NAME(const X*, const int64_t*, const float*, const float*, int64_t,     \
                                           const Pool*, int64_t, const int64_t*, X*, int64_t, int64_t,        \
                                           const X*, const X*, float, float, float);                          \
    MP_EXPORT void decode_##NAME(const Pool*, int64_t, const X*, X*, float*, const int32_t*, int64_t,         \
                                 const int32_t*, const int32_t*, const int32_t*, int64_t, int64_t, int64_t,   \
                                 float, float, int64_t, float);                                               \
    MP_EXPORT void decode_layers_##NAME(const Layer* layers, int64_t count, const Step* step, X* hidden,      \
                                        X* residual) {                                                        \
        run_layers(layers, count, *step, hidden, residual, rotate_and_write_##NAME, decode_##NAME);           \
    }

MP_FOR_POOLS(MP_LAYERS)
