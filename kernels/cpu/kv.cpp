// K and V on their way into the pool: norm, rotation and write in one pass over a token's heads.

#include <cmath>

#include "lanes.h"
#include "pool.h"

namespace {

// What rotation needs: rotary_dim / 2 angles a position, the rest of a head passes through.
struct Rotary {
    const float* cos;
    const float* sin;
    int64_t half;
};

// One head of x, as float32 in `head`, normed by weight where there is one.
template <class T>
MP_INLINE void take_head(const T* x, const T* weight, float eps, int64_t dim, float* head) {
    vf squares = {};
    for_vectors(dim, [&](int64_t i, int count) {
        const vf v = load_some(x + i, count);
        store_some(head + i, v, count);
        squares += v * v;
    });
    if (!weight) return;
    const float scale = 1.0f / std::sqrt(sum(squares) / (float)dim + eps);
    for_vectors(dim, [&](int64_t i, int count) {
        store_some(head + i, load_some(head + i, count) * scale * load_some(weight + i, count), count);
    });
}

template <class T>
MP_INLINE void rotate_head(const float* head, const float* cos, const float* sin, int64_t half, int64_t dim, T* to) {
    for_vectors(half, [&](int64_t i, int count) {
        const vf first = load_some(head + i, count), second = load_some(head + half + i, count);
        const vf c = load_some(cos + i, count), s = load_some(sin + i, count);
        store_some(to + i, first * c - second * s, count);
        store_some(to + half + i, second * c + first * s, count);
    });
    for_vectors(dim - 2 * half, [&](int64_t i, int count) {
        store_some(to + 2 * half + i, load_some(head + 2 * half + i, count), count);
    });
}

template <class T>
void rotate_and_write(const T* qkv, const int64_t* positions, Rotary rotary, const Pool& pool, int64_t layer,
                      const int64_t* slots, T* q, int64_t n, int64_t num_heads, const T* q_norm, const T* k_norm,
                      float eps) {
    const int64_t dim = pool.head_dim;
    float head[1024];
    for (int64_t token = 0; token < n; token++, qkv += (num_heads + 2 * pool.num_kv_heads) * dim) {
        const float* cos = rotary.cos + positions[token] * rotary.half;
        const float* sin = rotary.sin + positions[token] * rotary.half;
        for (int64_t h = 0; h < num_heads; h++, q += dim) {
            take_head(qkv + h * dim, q_norm, eps, dim, head);
            rotate_head(head, cos, sin, rotary.half, dim, q);
        }
        if (slots[token] < 0) continue;
        const int64_t block = slots[token] / pool.block_size, offset = slots[token] % pool.block_size;
        for (int64_t h = 0; h < pool.num_kv_heads; h++) {
            T* to = block_k<T>(pool, block, layer, h) + offset * dim;
            take_head(qkv + (num_heads + h) * dim, k_norm, eps, dim, head);
            rotate_head(head, cos, sin, rotary.half, dim, to);
            memcpy(to + pool.kv_stride, qkv + (num_heads + pool.num_kv_heads + h) * dim, dim * sizeof(T));
        }
    }
}

template <class T>
void write_kv(const T* k, const T* v, const Pool& pool, int64_t layer, const int64_t* slots, int64_t n) {
    const int64_t dim = pool.head_dim;
    for (int64_t token = 0; token < n; token++) {
        if (slots[token] < 0) continue;
        const int64_t block = slots[token] / pool.block_size, offset = slots[token] % pool.block_size;
        for (int64_t h = 0; h < pool.num_kv_heads; h++) {
            T* to = block_k<T>(pool, block, layer, h) + offset * dim;
            memcpy(to, k + (token * pool.num_kv_heads + h) * dim, dim * sizeof(T));
            memcpy(to + pool.kv_stride, v + (token * pool.num_kv_heads + h) * dim, dim * sizeof(T));
        }
    }
}

}  // namespace

// head_dim: at most 1024.
#define MP_KV(T, NAME)                                                                                       \
    MP_EXPORT void rotate_and_write_##NAME(                                                                  \
        const T* qkv, const int64_t* positions, const float* cos, const float* sin, int64_t half,            \
        const Pool* pool, int64_t layer, const int64_t* slots, T* q, int64_t n, int64_t num_heads,           \
        const T* q_norm, const T* k_norm, float eps) {                                                       \
        rotate_and_write(qkv, positions, Rotary{cos, sin, half}, *pool, layer, slots, q, n, num_heads, q_norm, \
                         k_norm, eps);                                                                       \
    }                                                                                                        \
    MP_EXPORT void write_kv_##NAME(const T* k, const T* v, const Pool* pool, int64_t layer, const int64_t* slots, \
                                   int64_t n) {                                                              \
        write_kv(k, v, *pool, layer, slots, n);                                                              \
    }

MP_KV(float, f32)
MP_KV(bf16, bf16)
MP_KV(fp16, f16)
