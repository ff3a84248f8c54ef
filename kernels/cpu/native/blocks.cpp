// Whole blocks: copies within a pool, and the checksum that reference/blocks.py defines.

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

// Block sources[i] goes to targets[i], `nbytes` each.
MP_EXPORT void copy_blocks(char* pool, const int64_t* sources, const int64_t* targets, int64_t n, int64_t nbytes) {
    for (int64_t i = 0; i < n; i++) memcpy(pool + targets[i] * nbytes, pool + sources[i] * nbytes, nbytes);
}
