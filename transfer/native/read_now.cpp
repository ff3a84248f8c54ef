// A whole read of few spans from a region of a peer that is mapped here, in one call: check the spans, copy and verify
// them, and see that the owner lives and still has the region.

#include "source.h"

#include <algorithm>
#include <utility>

namespace {

bool disjoint(const uint64_t* offset, const uint64_t* nbytes, int64_t spans) {
    bool ascending = true;
    for (int64_t i = 1; i < spans; i++) ascending &= offset[i - 1] + nbytes[i - 1] <= offset[i];
    if (ascending) return true;
    std::pair<uint64_t, uint64_t> sorted[MAX_SPANS];
    for (int64_t i = 0; i < spans; i++) sorted[i] = {offset[i], offset[i] + nbytes[i]};
    std::sort(sorted, sorted + spans);
    for (int64_t i = 1; i < spans; i++)
        if (sorted[i - 1].second > sorted[i].first) return false;
    return true;
}

}  // namespace

// columns: uint64 [5][spans]: local offsets, local sizes, remote offsets, remote sizes, checksums (absent unless
// `verified`); then uint32 [2][spans]: local and remote regions. Returns the number of bytes read. 0: something is
// unusual, so the caller must read in the general way, which finds out what; the local bytes are undefined then.
extern "C" __attribute__((visibility("default"))) int64_t moonpool_read_now(
    const Source* source, uint32_t region, uint64_t base, uint64_t region_nbytes, int64_t spans, const Byte* columns,
    int verified, uint64_t most_nbytes) {
    if (spans < 1 || spans > MAX_SPANS) return 0;
    const uint64_t* offset = (const uint64_t*)columns;
    const uint64_t *nbytes = offset + spans, *remote_offset = nbytes + spans, *remote_nbytes = remote_offset + spans;
    const uint64_t* expected = remote_nbytes + spans;
    const uint32_t* regions = (const uint32_t*)(verified ? expected + spans : expected);
    Byte* to[MAX_SPANS];
    const Byte* from[MAX_SPANS];
    uint64_t whole = 0;
    for (int64_t i = 0; i < spans; i++) {
        const uint64_t size = nbytes[i];
        if (regions[i] != region || regions[spans + i] != source->region || size != remote_nbytes[i]) return 0;
        if (size <= (verified ? SHORT : 0) || size > most_nbytes || (whole += size) > most_nbytes) return 0;
        if (!inside(offset[i], size, region_nbytes) || !inside(remote_offset[i], size, source->nbytes)) return 0;
        to[i] = (Byte*)(base + offset[i]);
        from[i] = (const Byte*)(source->base + remote_offset[i]);
    }
    if (!disjoint(offset, nbytes, spans)) return 0;
    uint64_t digests[MAX_SPANS];
    const Byte never = 0;
    moonpool_move(spans, to, from, nbytes, nullptr, 0, verified ? digests : nullptr, &never);
    if (verified && memcmp(digests, expected, spans * sizeof *digests)) return 0;
    return still_open(*source) ? (int64_t)whole : 0;
}
