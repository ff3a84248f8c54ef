// The unit of work of prefill attention.
#pragma once

#include "pool.h"

// Some tokens of a sequence, and the heads that share one kv head: tokens * group rows.
template <class Q>
struct QueryBlock {
    const Q* q;         // of the first token and head
    Q* out;
    float* lse;         // or null
    int64_t num_heads;  // from a token's lse to the next's
    int64_t stride;     // elements from a token to the next
    int64_t group;      // heads
    int64_t position;   // of the first token
    int64_t tokens;
    int64_t context;    // number of keys
    int64_t head;       // kv head
    const int32_t* table;

    MP_INLINE const Q* query(int64_t row, int64_t dim) const { return q + row / group * stride + row % group * dim; }
    MP_INLINE Q* output(int64_t row, int64_t dim) const { return out + row / group * stride + row % group * dim; }
    MP_INLINE float* log_sum(int64_t row) const { return lse + row / group * num_heads + row % group; }
};
