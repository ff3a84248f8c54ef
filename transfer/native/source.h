// A region of a peer that is mapped here, and the peer's lifeline.

#pragma once

#include <poll.h>

#include <atomic>
#include <cstdint>
#include <cstring>

typedef uint8_t Byte;

extern "C" int64_t moonpool_move(int64_t spans, Byte* const* to, const Byte* const* from, const uint64_t* nbytes,
                                 const uint32_t* counts, int stream, uint64_t* digests, const volatile Byte* stop);

namespace {

constexpr int64_t MAX_SPANS = 256;
// Checksums of spans up to this size are not computed here.
constexpr uint64_t SHORT = 240;

// As `mapped_region.py` packs it.
struct Source {
    const Byte* lifeline;  // of the owner, mapped here
    Byte incarnation[16];
    uint64_t base, nbytes;
    uint32_t region;
    uint32_t slot;  // offset of the region's id in the lifeline
    int pidfd;      // of the owner's process, or -1
};

bool inside(uint64_t offset, uint64_t nbytes, uint64_t size) { return nbytes <= size && offset <= size - nbytes; }

// Whether the owner lives and has the region. Called after the copy: ids of regions are never reused, so a region that
// is open now was open then.
bool still_open(const Source& source) {
    pollfd ended = {source.pidfd, POLLIN, 0};
    if (source.pidfd >= 0 && poll(&ended, 1, 0) != 0) return false;
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (memcmp(source.lifeline, source.incarnation, sizeof source.incarnation)) return false;
    return *(const volatile uint32_t*)(source.lifeline + source.slot) == source.region;
}

}  // namespace
