// Norm, rotation and write of K and V into the pool, in one pass over a token's heads.

#include <cmath>

#include "lanes.h"
#include "pool.h"
#include "threads.h"

namespace {

// Tables of rotary_dim / 2 angles a position; the rest of a head is not rotated.
struct Rotary {
    const float* cos;
    const float* sin;
    int64_t half;
};

// A head's values as float32: times `scale` and its weight, if there is one.
template <class T>
struct Head {
    const T* x;
    const T* weight;
    float scale = 1.0f;

    Head(const T* x, const T* weight, float eps, int64_t dim) : x(x), weight(weight) {
        if (!weight) return;
        vf squares = {};
        for_vectors(dim, [&](int64_t i, int count) {
            const vf v = load_some(x + i, count);
            squares = fused(v, v, squares);
        });
        scale = 1.0f / std::sqrt(sum(squares) / (float)dim + eps);
    }
    MP_INLINE vf at(int64_t i, int count) const {
        const vf v = load_some(x + i, count);
        return weight ? v * scale * load_some(weight + i, count) : v;
    }
};

// The head, rotated and multiplied by `factor`.
template <class Q, class T>
MP_INLINE void rotate_head(const Head<Q>& head, const float* cos, const float* sin, int64_t half, int64_t dim,
                           float factor, T* to) {
    for_vectors(half, [&](int64_t i, int count) {
        const vf first = head.at(i, count), second = head.at(half + i, count);
        const vf c = load_some(cos + i, count), s = load_some(sin + i, count);
        store_some(to + i, (first * c - second * s) * factor, count);
        store_some(to + half + i, (second * c + first * s) * factor, count);
    });
    for_vectors(dim - 2 * half, [&](int64_t i, int count) {
        store_some(to + 2 * half + i, head.at(2 * half + i, count) * factor, count);
    });
}

constexpr float TINY = 1e-30f;  // a head with less is zeros, as 127 / TINY is finite

// One head in codes of 8 bits, and its scale: the largest |value| / 127. With a NaN or an infinity that is NaN.
template <class Q>
MP_INLINE void put_codes(const Q* head, int64_t dim, code8* to, float* scale) {
    vf most = {}, zeros = {};
    for_vectors(dim, [&](int64_t i, int count) {
        const vf v = load_some(head + i, count);
        most = vmax(most, vmax(v, -v));
        zeros += v * 0.0f;
    });
    const float largest_value = largest(most), factor = largest_value > TINY ? 127.0f / largest_value : 0.0f;
    *scale = largest_value / 127.0f + sum(zeros);
    for_vectors(dim, [&](int64_t i, int count) {
        store_some(to + i, load_some(head + i, count) * factor, count);
    });
}

// One head of token `offset` of a block, copied or quantized.
template <class Q, class T>
MP_INLINE void put_head(const Q* head, const Pool& pool, T* block, int64_t offset, float factor) {
    const int64_t dim = pool.head_dim;
    T* to = block + offset * dim;
    if constexpr (has_scales<T>) {
        put_codes(head, dim, to, block_scales(pool, block) + offset);
    } else if constexpr (std::is_same<Q, T>::value) {
        memcpy(to, head, dim * sizeof(T));
    } else {
        for_vectors(dim, [&](int64_t i, int count) {
            store_some(to + i, load_some(head + i, count) * factor, count);
        });
    }
}

// Factors of K and V: the reciprocals of their scales.
struct Factors {
    float k, v;
};

template <class Q, class T>
void rotate_and_write(const Q* qkv, const int64_t* positions, Rotary rotary, const Pool& pool, int64_t layer,
                      const int64_t* slots, Q* q, int64_t n, int64_t num_heads, const Q* q_norm, const Q* k_norm,
                      float eps, Factors factors) {
    const int64_t dim = pool.head_dim;
    float turned[1024];
    for (int64_t token = 0; token < n; token++, qkv += (num_heads + 2 * pool.num_kv_heads) * dim) {
        const float* cos = rotary.cos + positions[token] * rotary.half;
        const float* sin = rotary.sin + positions[token] * rotary.half;
        for (int64_t h = 0; h < num_heads; h++, q += dim) {
            rotate_head(Head<Q>(qkv + h * dim, q_norm, eps, dim), cos, sin, rotary.half, dim, 1.0f, q);
        }
        if (slots[token] < 0) continue;
        const int64_t block = slots[token] / pool.block_size, offset = slots[token] % pool.block_size;
        for (int64_t h = 0; h < pool.num_kv_heads; h++) {
            T* to = block_k<T>(pool, block, layer, h);
            const Head<Q> head(qkv + (num_heads + h) * dim, k_norm, eps, dim);
            if constexpr (has_scales<T>) {
                rotate_head(head, cos, sin, rotary.half, dim, 1.0f, turned);
                put_head(turned, pool, to, offset, 1.0f);
            } else {
                rotate_head(head, cos, sin, rotary.half, dim, factors.k, to + offset * dim);
            }
            put_head(qkv + (num_heads + pool.num_kv_heads + h) * dim, pool, to + pool.kv_stride, offset, factors.v);
        }
    }
}

template <class Q, class T>
void write_kv(const Q* k, const Q* v, const Pool& pool, int64_t layer, const int64_t* slots, int64_t n,
              Factors factors) {
    const int64_t dim = pool.head_dim;
    for (int64_t token = 0; token < n; token++) {
        if (slots[token] < 0) continue;
        const int64_t block = slots[token] / pool.block_size, offset = slots[token] % pool.block_size;
        for (int64_t h = 0; h < pool.num_kv_heads; h++) {
            T* to = block_k<T>(pool, block, layer, h);
            put_head(k + (token * pool.num_kv_heads + h) * dim, pool, to, offset, factors.k);
            put_head(v + (token * pool.num_kv_heads + h) * dim, pool, to + pool.kv_stride, offset, factors.v);
        }
    }
}

}  // namespace

// Nanoseconds of one thread for a value, roughly.
constexpr double ROTATE_NS = 0.5, COPY_NS = 0.1;

// head_dim: at most 1024. Tokens have different slots.
#define MP_KV(Q, T, NAME)                                                                                     \
    MP_EXPORT void rotate_and_write_##NAME(                                                                   \
        const Q* qkv, const int64_t* positions, const float* cos, const float* sin, int64_t half,             \
        const Pool* pool, int64_t layer, const int64_t* slots, Q* q, int64_t n, int64_t num_heads,            \
        const Q* q_norm, const Q* k_norm, float eps, float k_factor, float v_factor) {                        \
        const int64_t width = (num_heads + 2 * pool->num_kv_heads) * pool->head_dim;                          \
        parallel_ranges(n, ROTATE_NS * width, [=](int64_t first, int64_t end) {                               \
            rotate_and_write<Q, T>(qkv + first * width, positions + first, Rotary{cos, sin, half}, *pool,     \
                                   layer, slots + first, q + first * num_heads * pool->head_dim, end - first, \
                                   num_heads, q_norm, k_norm, eps, Factors{k_factor, v_factor});              \
        });                                                                                                   \
    }                                                                                                         \
    MP_EXPORT void write_kv_##NAME(const Q* k, const Q* v, const Pool* pool, int64_t layer,                   \
                                   const int64_t* slots, int64_t n, float k_factor, float v_factor) {         \
        const int64_t width = pool->num_kv_heads * pool->head_dim;                                            \
        parallel_ranges(n, COPY_NS * width, [=](int64_t first, int64_t end) {                                 \
            write_kv<Q, T>(k + first * width, v + first * width, *pool, layer, slots + first, end - first,    \
                           Factors{k_factor, v_factor});                                                      \
        });                                                                                                   \
    }

MP_FOR_POOLS(MP_KV)
