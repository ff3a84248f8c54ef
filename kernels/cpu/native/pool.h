// The paged KV pool: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]. The last two dimensions
// are contiguous, the others have any stride. With codes of 8 bits the last dimension is head_dim + 4, and its
// bytes and those of the dimension before are the codes [block_size, head_dim], then float32 scales [block_size].
#pragma once

#include "simd.h"

// Whether each token and head has a scale.
template <class T>
constexpr bool has_scales = std::is_same_v<std::remove_const_t<T>, code8>;

// Strides are in elements. library.py has the same struct.
struct Pool {
    void* data;
    int64_t num_kv_heads, block_size, head_dim;
    int64_t block_stride, layer_stride, kv_stride, head_stride;
};

// Parameters of both attentions. v_scale: factor of the values.
struct Rules {
    float scale, soft_cap, v_scale;
    int64_t window;
};

// K of the first token of a block; V is at + kv_stride.
template <class T>
MP_INLINE T* block_k(const Pool& pool, int64_t block, int64_t layer, int64_t head) {
    return (T*)pool.data + block * pool.block_stride + layer * pool.layer_stride + head * pool.head_stride;
}

// The scale of each token of a block's K, or of its V at + kv_stride; null: T has none.
template <class T>
MP_INLINE auto block_scales(const Pool& pool, T* block) {
    using Scales = std::conditional_t<std::is_const_v<T>, const float, float>*;
    if constexpr (has_scales<T>) return (Scales)(block + pool.block_size * pool.head_dim);
    return (Scales) nullptr;
}

// Where the K of tokens first … end - 1 of one sequence and head lie. Blocks of other tokens are not looked
// at.
template <class T>
MP_INLINE void find_tokens(const Pool& pool, int64_t layer, int64_t head, const int32_t* table, int64_t first,
                           int64_t end, const T** rows) {
    for (int64_t token = first; token < end;) {
        const int64_t block = token / pool.block_size, offset = token % pool.block_size;
        const int64_t stop = token - offset + pool.block_size < end ? token - offset + pool.block_size : end;
        const T* row = block_k<T>(pool, table[block], layer, head) + offset * pool.head_dim;
        for (; token < stop; token++, row += pool.head_dim) *rows++ = row;
    }
}

// The scales of those tokens' K and V.
template <class T>
MP_INLINE void find_scales(const Pool& pool, int64_t layer, int64_t head, const int32_t* table, int64_t first,
                           int64_t end, float* k, float* v) {
    for (int64_t token = first; token < end; token++) {
        const T* block = block_k<T>(pool, table[token / pool.block_size], layer, head);
        *k++ = block_scales(pool, block)[token % pool.block_size];
        *v++ = block_scales(pool, block + pool.kv_stride)[token % pool.block_size];
    }
}

// Instantiates DEFINE(type of activations, type of the pool, suffix of the symbol) for every pair.
#define MP_FOR_POOLS(DEFINE)                                                                       \
    DEFINE(float, float, f32_f32) DEFINE(bf16, bf16, bf16_bf16) DEFINE(fp16, fp16, f16_f16)        \
    DEFINE(float, fp8, f32_f8) DEFINE(bf16, fp8, bf16_f8) DEFINE(fp16, fp8, f16_f8)        \
    DEFINE(float, code8, f32_i8) DEFINE(bf16, code8, bf16_i8) DEFINE(fp16, code8, f16_i8)
