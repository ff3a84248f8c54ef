// Copies many runs of bytes, checksums them, or both in one pass over memory.
//
// The checksum is XXH3-64 with its default secret and no seed, of runs longer than 240 bytes. The caller computes
// those of shorter runs, which XXH3 mixes differently. Integers are little-endian, as on all supported machines.

#include "lanes.h"

namespace {

typedef uint8_t Byte;

constexpr size_t STRIPE = 64, BLOCK = 1024, SHORT = 240;
// Distance of prefetching. The processor's own prefetching ends with the page.
constexpr size_t AHEAD = 4096;
// From this size on prefetching does not help.
constexpr size_t LONG = 2 << 20;
// Bytes between two looks at *stop: about 40 µs.
constexpr size_t LOOK = 1 << 20;

constexpr uint64_t PRIME32_2 = 0x85EBCA77u, PRIME32_3 = 0xC2B2AE3Du;
constexpr uint64_t PRIME64_1 = 0x9E3779B185EBCA87u, PRIME64_2 = 0xC2B2AE3D27D4EB4Fu;
constexpr uint64_t PRIME64_3 = 0x165667B19E3779F9u, PRIME64_4 = 0x85EBCA77C2B2AE63u;
constexpr uint64_t PRIME64_5 = 0x27D4EB2F165667C5u;

alignas(64) constexpr Byte SECRET[] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};
static_assert(sizeof SECRET == 192);
constexpr size_t LAST_SECRET = sizeof SECRET - STRIPE - 7, MERGE_SECRET = 11;

INLINE uint64_t word(const Byte* from) {
    uint64_t value;
    memcpy(&value, from, sizeof value);
    return value;
}

INLINE uint64_t folded(uint64_t a, uint64_t b) {
    const unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

constexpr uint64_t START[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};

uint64_t merged(Lanes lanes, uint64_t nbytes) {
    uint64_t sum[8], result = nbytes * PRIME64_1;
    lanes.store((Byte*)sum);
    for (int i = 0; i < 8; i += 2) {
        const Byte* secret = SECRET + MERGE_SECRET + 8 * i;
        result += folded(sum[i] ^ word(secret), sum[i + 1] ^ word(secret + 8));
    }
    result = (result ^ (result >> 37)) * 0x165667919E3779F9u;
    return result ^ (result >> 32);
}

template <class Word>
uint64_t sum(const Word* words, int64_t count) {
    uint64_t all = 0;
    for (int64_t i = 0; i < count; i++) all += words[i];
    return all;
}

enum Store { NONE, KEEP, STREAM };

// Copy one stripe. `ahead`: address to prefetch, or null.
template <Store STORE, bool DIGEST>
INLINE void stripe(Byte* to, const Byte* from, const Byte* ahead, int at, Lanes& lanes) {
    if (ahead) __builtin_prefetch(ahead);
    Lanes data = Lanes::load(from);
    data.pin();
    if (DIGEST) lanes.accumulate(data, Lanes::load(SECRET + 8 * at));
    if (STORE == KEEP) data.store(to);
    if (STORE == STREAM) data.stream(to);
}

struct Run {
    Byte* to;
    const Byte* from;
    size_t nbytes;
    const Byte* next;  // source of the next run, or null

    // The address to prefetch while the bytes at `position` are moved.
    INLINE const Byte* ahead(size_t position) const {
        if (nbytes >= LONG) return nullptr;
        if (position + AHEAD < nbytes) return from + position + AHEAD;
        return next ? next + (position + AHEAD - nbytes) % AHEAD : nullptr;
    }
};

// The digest of the first `done` of `nbytes`, which may lie in several runs.
struct Digest {
    Lanes lanes;
    size_t nbytes, done;

    explicit Digest(size_t nbytes) : lanes(Lanes::load((const Byte*)START)), nbytes(nbytes), done(0) {}
};

// False: stopped. A run must end on a stripe of the digest's bytes, or with the last byte.
template <Store STORE, bool DIGEST>
bool move(const Run& run, Digest& digest, const volatile Byte* stop) {
    Lanes lanes = digest.lanes;
    // The last block, even a whole one, is finished differently.
    const size_t last = (digest.nbytes - 1) / BLOCK * BLOCK, end = digest.done + run.nbytes;
    size_t offset = 0;
    for (int at = digest.done % BLOCK / STRIPE; digest.done + offset + STRIPE < digest.nbytes && offset < run.nbytes;) {
        const Byte* ahead = run.ahead(offset);
        if (at == 0 && digest.done + offset < last && offset + BLOCK <= run.nbytes) {
            if ((digest.done + offset) % LOOK == 0 && *stop) return false;
            for (; at < (int)(BLOCK / STRIPE); at++, offset += STRIPE)
                stripe<STORE, DIGEST>(run.to + offset, run.from + offset, ahead ? ahead + at * STRIPE : nullptr, at,
                                      lanes);
        } else {
            stripe<STORE, DIGEST>(run.to + offset, run.from + offset, ahead, at, lanes);
            offset += STRIPE, at++;
        }
        if (at < (int)(BLOCK / STRIPE)) continue;
        at = 0;
        if (DIGEST) lanes.scramble(Lanes::load(SECRET + sizeof SECRET - STRIPE));
    }
    if (STORE != NONE) memcpy(run.to + offset, run.from + offset, run.nbytes - offset);
    if (DIGEST && end == digest.nbytes)
        lanes.accumulate(Lanes::load(run.from + run.nbytes - STRIPE), Lanes::load(SECRET + LAST_SECRET));
    digest.lanes = lanes, digest.done = end;
    return true;
}

template <bool DIGEST>
bool move(const Run& run, bool stream, Digest& digest, const volatile Byte* stop) {
    // Streaming stores write whole cache lines.
    if (!run.to) return move<NONE, DIGEST>(run, digest, stop);
    if (stream && (uintptr_t)run.to % STRIPE == 0) return move<STREAM, DIGEST>(run, digest, stop);
    return move<KEEP, DIGEST>(run, digest, stop);
}

}  // namespace

// to, from, nbytes: [rows]; to: null: only compute digests. stream: bypass the caches, faster for large copies. counts:
// [spans], number of rows of each span, or null: one. digests: [spans], or null; those of spans up to 240 bytes are not
// written. Of a span with several rows only the last may end within a stripe, and must not be shorter than one. Stops
// soon after *stop becomes non-zero. Returns the number of completed spans.
extern "C" __attribute__((visibility("default"))) int64_t moonpool_move(
    int64_t spans, Byte* const* to, const Byte* const* from, const uint64_t* nbytes, const uint32_t* counts, int stream,
    uint64_t* digests, const volatile Byte* stop) {
    int64_t span = 0, row = 0, rows = spans;
    if (counts) rows = sum(counts, spans);
    for (; span < spans && !*stop; span++) {
        const int64_t end = row + (counts ? counts[span] : 1);
        const uint64_t whole = sum(nbytes + row, end - row);
        const bool digested = digests && whole > SHORT;
        for (Digest digest(whole); row < end; row++) {
            const Run run = {to ? to[row] : nullptr, from[row], nbytes[row], row + 1 < rows ? from[row + 1] : nullptr};
            Digest alone(run.nbytes);
            if (*stop || !(digested ? move<true>(run, stream, digest, stop) : move<false>(run, stream, alone, stop)))
                goto stopped;
            if (digested && row + 1 == end) digests[span] = merged(digest.lanes, whole);
        }
    }
stopped:
#if defined(__AVX2__)
    // The bytes must be visible to other cores before they are told.
    _mm_sfence();
#endif
    return span;
}
