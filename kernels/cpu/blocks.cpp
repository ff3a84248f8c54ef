// The checksum of whole blocks: reference/blocks.py says what it is.

#include "simd.h"

namespace {

MP_INLINE uint64_t mix(uint64_t word) {
    word = (word ^ word >> 33) * 0xff51afd7ed558ccdu;
    word = (word ^ word >> 33) * 0xc4ceb9fe1a85ec53u;
    return word ^ word >> 33;
}

}  // namespace

// n blocks of `words` 64-bit words each.
MP_EXPORT void block_checksums(const uint64_t* blocks, int64_t n, int64_t words, uint64_t* sums) {
    for (int64_t block = 0; block < n; block++, blocks += words) {
        uint64_t sum = 0;
        for (int64_t i = 0; i < words; i++) sum += mix(blocks[i] ^ (uint64_t)(i + 1) * 0x9e3779b97f4a7c15u);
        sums[block] = sum;
    }
}
