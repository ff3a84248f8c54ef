// The paged KV pool: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]. The last two dimensions
// are contiguous, the others have any stride.
#pragma once

#include "simd.h"

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

// Instantiates DEFINE(type of activations, type of the pool, suffix of the symbol) for every pair.
#define MP_FOR_POOLS(DEFINE)                                                                       \
    DEFINE(float, float, f32_f32) DEFINE(bf16, bf16, bf16_bf16) DEFINE(fp16, fp16, f16_f16)        \
    DEFINE(float, fp8, f32_f8) DEFINE(bf16, fp8, bf16_f8) DEFINE(fp16, fp8, f16_f8)
