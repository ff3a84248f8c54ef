// Small writes of peers on this host, served without the interpreter: the thread of a connection waits here, checks a
// request against what is granted, and copies from the peer's mapped region.
//
// Whatever is larger or unusual is left in the socket, for the general way in Python. A grant, a region or a source is
// withdrawn under the lock that a copy holds, so none lands a byte afterwards. A copy takes less than a millisecond.

#include <sys/socket.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "source.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// `Request` and `Reply` of `wire.py`.
struct Request {
    Byte magic[4];
    uint8_t op, reserved;
    uint16_t padding;
    uint32_t spans, budget_ms;
    uint64_t nbytes, grant;
} __attribute__((packed));

struct Reply {
    Byte magic[4] = {'M', 'P', 'r', '1'};
    uint8_t status = 0, reserved = 0;
    uint16_t padding = 0;
    uint32_t detail = 0;
    uint64_t nbytes = 0;
} __attribute__((packed));

constexpr uint8_t PULL = 3, PULL_CHECKED = 6;
// Of a span: offset and size u64, region u32; of its source: offset u64, region u32.
constexpr uint64_t SPAN = 20, SOURCE = 12;
constexpr uint64_t MOST_NBYTES = 1 << 20;

struct Range {
    uint32_t region;
    uint64_t begin, end;

    bool operator<(const Range& other) const {
        return std::tie(region, begin) < std::tie(other.region, other.begin);
    }
};

struct Grant {
    std::vector<Range> ranges;  // sorted, not adjacent
    int64_t ends_ns;  // by CLOCK_MONOTONIC
};

struct Memory {
    Byte* base;
    uint64_t nbytes;
};

template <typename T>
T load(const Byte* from, int64_t index) {
    T value;
    memcpy(&value, from + index * sizeof(T), sizeof(T));
    return value;
}

int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

// What peers may write, and where it is.
struct Ledger {
    std::mutex lock;
    std::map<uint64_t, Grant> grants;
    std::map<uint32_t, Memory> regions;                        // writable ones, in host memory
    std::map<std::pair<uint64_t, uint32_t>, Source> sources;  // by connection and region

    // Whether the grant covers it, and the region is there: then where it is.
    Byte* target(const Grant& grant, uint32_t region, uint64_t offset, uint64_t nbytes) const {
        const auto memory = regions.find(region);
        if (memory == regions.end() || !inside(offset, nbytes, memory->second.nbytes)) return nullptr;
        const auto after = std::upper_bound(grant.ranges.begin(), grant.ranges.end(), Range{region, offset, 0});
        if (after == grant.ranges.begin()) return nullptr;
        const Range& range = after[-1];
        return range.region == region && offset + nbytes <= range.end ? memory->second.base + offset : nullptr;
    }

    // False: leave it to the general way. digests: [spans], written if the request is checked.
    bool pull(uint64_t connection, const Request& request, const Byte* body, uint64_t* digests) const {
        const int64_t spans = request.spans;
        const Byte *sizes = body + 8 * spans, *regions_there = sizes + 8 * spans, *origins = regions_there + 4 * spans;
        const Byte* origin_regions = origins + 8 * spans;
        const auto grant = grants.find(request.grant);
        const auto origin = sources.find({connection, load<uint32_t>(origin_regions, 0)});
        if (grant == grants.end() || grant->second.ends_ns <= now_ns() || origin == sources.end()) return false;
        const Source& source = origin->second;
        const bool checked = request.op == PULL_CHECKED;
        Byte* to[MAX_SPANS];
        const Byte* from[MAX_SPANS];
        uint64_t nbytes[MAX_SPANS], whole = 0;
        for (int64_t i = 0; i < spans; i++) {
            const uint64_t size = nbytes[i] = load<uint64_t>(sizes, i), at = load<uint64_t>(origins, i);
            if (size <= (checked ? SHORT : 0) || size > MOST_NBYTES || (whole += size) > MOST_NBYTES) return false;
            if (load<uint32_t>(origin_regions, i) != source.region || !inside(at, size, source.nbytes)) return false;
            from[i] = (const Byte*)(source.base + at);
            to[i] = target(grant->second, load<uint32_t>(regions_there, i), load<uint64_t>(body, i), size);
            if (!to[i]) return false;
        }
        if (whole != request.nbytes) return false;
        const Byte never = 0;
        moonpool_move(spans, to, from, nbytes, nullptr, 0, checked ? digests : nullptr, &never);
        return still_open(source);
    }
};

}  // namespace

EXPORT Ledger* moonpool_ledger_new() { return new Ledger(); }

EXPORT void moonpool_ledger_free(Ledger* ledger) { delete ledger; }

// ranges: [count]. count 0: withdraw the grant.
EXPORT void moonpool_ledger_grant(Ledger* ledger, uint64_t grant, int64_t ends_ns, const uint64_t* begins,
                                  const uint64_t* ends, const uint32_t* regions, int64_t count) {
    std::lock_guard<std::mutex> held(ledger->lock);
    ledger->grants.erase(grant);
    if (!count) return;
    Grant& made = ledger->grants[grant];
    made.ends_ns = ends_ns;
    for (int64_t i = 0; i < count; i++) made.ranges.push_back({regions[i], begins[i], ends[i]});
    std::sort(made.ranges.begin(), made.ranges.end());
}

// nbytes 0: withdraw the region.
EXPORT void moonpool_ledger_region(Ledger* ledger, uint32_t region, uint64_t base, uint64_t nbytes) {
    std::lock_guard<std::mutex> held(ledger->lock);
    ledger->regions.erase(region);
    if (nbytes) ledger->regions[region] = {(Byte*)base, nbytes};
}

// source: as `mapped_region.py` packs it; null: withdraw the source. region 0: all of the connection.
EXPORT void moonpool_ledger_source(Ledger* ledger, uint64_t connection, uint32_t region, const Source* source) {
    std::lock_guard<std::mutex> held(ledger->lock);
    const auto first = ledger->sources.lower_bound({connection, region});
    const auto last = ledger->sources.upper_bound({connection, region ? region : UINT32_MAX});
    ledger->sources.erase(first, last);
    if (source) ledger->sources[{connection, region}] = *source;
}

// Serve small writes until something else is next in the socket: a request for Python, the end, or an error.
EXPORT void moonpool_serve_now(Ledger* ledger, int fd, uint64_t connection) {
    Byte message[sizeof(Request) + MAX_SPANS * (SPAN + SOURCE)];
    struct {
        Reply head;
        uint64_t digests[MAX_SPANS];
    } __attribute__((packed)) reply;
    while (true) {
        const ssize_t came = recv(fd, message, sizeof message, MSG_PEEK);
        if (came < 0 && errno == EINTR) continue;
        Request request;
        if (came < (ssize_t)sizeof request) return;
        memcpy(&request, message, sizeof request);
        const bool pulls = request.op == PULL || request.op == PULL_CHECKED;
        const uint64_t whole = sizeof request + request.spans * (SPAN + SOURCE);
        if (memcmp(request.magic, "MPq2", 4) || !pulls || request.padding) return;
        if (request.spans < 1 || request.spans > MAX_SPANS || (uint64_t)came < whole) return;
        uint64_t digests[MAX_SPANS];
        {
            std::lock_guard<std::mutex> held(ledger->lock);
            if (!ledger->pull(connection, request, message + sizeof request, digests)) return;
        }
        reply.head = Reply();
        reply.head.nbytes = request.op == PULL_CHECKED ? 8 * request.spans : 0;
        memcpy(reply.digests, digests, reply.head.nbytes);
        if (recv(fd, message, whole, 0) != (ssize_t)whole) return;
        const uint64_t length = sizeof reply.head + reply.head.nbytes;
        if (send(fd, &reply, length, MSG_NOSIGNAL) != (ssize_t)length) return;
    }
}
