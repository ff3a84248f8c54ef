// Small requests of peers, served without the interpreter: the thread of a connection waits here, checks a request
// against our regions and what is granted, and copies between them and the message, or, for a peer on this host, from
// its mapped region.
//
// Whatever is larger or unusual is left in the socket, for the general way in Python. A grant, a region or a source is
// withdrawn under the lock that a copy holds, so none moves a byte afterwards. A copy takes less than a millisecond.

#include <poll.h>
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

constexpr uint8_t READ = 1, WRITE = 2, PULL = 3, CHECKSUM = 4, PULL_CHECKED = 6;
// Of a span: offset and size u64, region u32; of its source: offset u64, region u32.
constexpr uint64_t SPAN = 20, SOURCE = 12;
constexpr uint64_t MOST_NBYTES = 1 << 20;
// Of a request or a reply that carries the spans' bytes.
constexpr uint64_t MOST_CARRIED = 64 << 10;
// How long the rest of a message may be on its way behind its header.
constexpr int64_t ARRIVES_NS = 100000;
constexpr uint32_t MOST_BUDGET_MS = 600000;

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
    bool writable;
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

// The bytes of a whole request, as its header tells. 0: it is none for us.
uint64_t length(const Request& request) {
    if (memcmp(request.magic, "MPq2", 4) || request.padding || request.spans < 1 || request.spans > MAX_SPANS) return 0;
    const uint64_t head = sizeof request + request.spans * SPAN;
    switch (request.op) {
        case READ: return request.nbytes <= MOST_CARRIED ? head : 0;
        case WRITE: return request.nbytes <= MOST_CARRIED ? head + request.nbytes : 0;
        case CHECKSUM: return request.nbytes <= MOST_NBYTES ? head : 0;
        case PULL:
        case PULL_CHECKED: return head + request.spans * SOURCE;
    }
    return 0;
}

// The regions that peers may use, and what they may write.
struct Ledger {
    std::mutex lock;
    std::map<uint64_t, Grant> grants;
    std::map<uint32_t, Memory> regions;                        // in host memory
    std::map<std::pair<uint64_t, uint32_t>, Source> sources;  // by connection and region

    // A span of a request to read; null: there is no such memory.
    const Byte* origin(uint32_t region, uint64_t offset, uint64_t nbytes) const {
        const auto memory = regions.find(region);
        if (memory == regions.end() || !inside(offset, nbytes, memory->second.nbytes)) return nullptr;
        return memory->second.base + offset;
    }

    // Whether the grant covers it, and the region is there: then where it is.
    Byte* target(const Grant& grant, uint32_t region, uint64_t offset, uint64_t nbytes) const {
        const auto memory = regions.find(region);
        if (memory == regions.end() || !memory->second.writable) return nullptr;
        if (!inside(offset, nbytes, memory->second.nbytes)) return nullptr;
        const auto after = std::upper_bound(grant.ranges.begin(), grant.ranges.end(), Range{region, offset, 0});
        if (after == grant.ranges.begin()) return nullptr;
        const Range& range = after[-1];
        return range.region == region && offset + nbytes <= range.end ? memory->second.base + offset : nullptr;
    }

    // Answer a request, with `found` bytes in `reply`. False: leave it to the general way.
    bool answer(uint64_t connection, const Request& request, const Byte* body, Byte* reply, uint64_t* found) const {
        const int64_t spans = request.spans;
        const bool pulls = request.op == PULL || request.op == PULL_CHECKED, writes = pulls || request.op == WRITE;
        const bool digests = request.op == PULL_CHECKED || request.op == CHECKSUM;
        const Byte *sizes = body + 8 * spans, *regions_there = sizes + 8 * spans, *rest = regions_there + 4 * spans;
        const auto grant = grants.find(request.grant);
        if (writes && (grant == grants.end() || grant->second.ends_ns <= now_ns())) return false;
        const Source* source = nullptr;
        if (pulls) {
            const auto known = sources.find({connection, load<uint32_t>(rest + 8 * spans, 0)});
            if (known == sources.end()) return false;
            source = &known->second;
        }
        Byte* to[MAX_SPANS];
        const Byte* from[MAX_SPANS];
        uint64_t nbytes[MAX_SPANS], whole = 0;
        for (int64_t i = 0; i < spans; i++) {
            const uint64_t size = nbytes[i] = load<uint64_t>(sizes, i), at = load<uint64_t>(body, i);
            const uint32_t region = load<uint32_t>(regions_there, i);
            if (size <= (digests ? SHORT : 0) || size > MOST_NBYTES || size > request.nbytes - whole) return false;
            if (pulls) {
                const uint64_t there = load<uint64_t>(rest, i);
                if (load<uint32_t>(rest + 8 * spans, i) != source->region) return false;
                if (!inside(there, size, source->nbytes)) return false;
                from[i] = (const Byte*)(source->base + there);
            } else {
                from[i] = request.op == WRITE ? rest + whole : origin(region, at, size);
            }
            to[i] = writes ? target(grant->second, region, at, size) : reply + (request.op == READ ? whole : 0);
            if (!from[i] || !to[i]) return false;
            whole += size;
        }
        if (whole != request.nbytes || whole > MOST_NBYTES) return false;
        uint64_t sums[MAX_SPANS];
        const Byte never = 0;
        Byte* const* target_rows = request.op == CHECKSUM ? nullptr : to;
        moonpool_move(spans, target_rows, from, nbytes, nullptr, 0, digests ? sums : nullptr, &never);
        if (source && !still_open(*source)) return false;
        *found = request.op == READ ? whole : digests ? 8 * spans : 0;
        if (digests) memcpy(reply, sums, *found);
        return true;
    }
};

// Wait until a message that has begun is in the socket. False: it is not, or only in part, after some time.
bool arrived(int fd, Byte* message, uint64_t whole) {
    const int64_t until = now_ns() + ARRIVES_NS;
    while (true) {
        const ssize_t came = recv(fd, message, whole, MSG_PEEK | MSG_DONTWAIT);
        if (came == (ssize_t)whole) return true;
        if (came == 0 || (came < 0 && errno != EAGAIN && errno != EINTR) || now_ns() >= until) return false;
    }
}

// False: the client has not taken it all within its time.
bool send_all(int fd, const Byte* from, uint64_t nbytes, uint32_t budget_ms) {
    const int64_t until = now_ns() + std::min(budget_ms, MOST_BUDGET_MS) * 1000000ll;
    for (uint64_t sent = 0; sent < nbytes;) {
        const ssize_t part = send(fd, from + sent, nbytes - sent, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (part > 0) {
            sent += part;
            continue;
        }
        if (part < 0 && errno != EAGAIN && errno != EINTR) return false;
        const int64_t left_ms = (until - now_ns()) / 1000000;
        pollfd writable = {fd, POLLOUT, 0};
        if (left_ms <= 0 || poll(&writable, 1, (int)left_ms) == 0) return false;
    }
    return true;
}

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
EXPORT void moonpool_ledger_region(Ledger* ledger, uint32_t region, uint64_t base, uint64_t nbytes, int writable) {
    std::lock_guard<std::mutex> held(ledger->lock);
    ledger->regions.erase(region);
    if (nbytes) ledger->regions[region] = {(Byte*)base, nbytes, writable != 0};
}

// source: as `mapped_region.py` packs it; null: withdraw the source. region 0: all of the connection.
EXPORT void moonpool_ledger_source(Ledger* ledger, uint64_t connection, uint32_t region, const Source* source) {
    std::lock_guard<std::mutex> held(ledger->lock);
    const auto first = ledger->sources.lower_bound({connection, region});
    const auto last = ledger->sources.upper_bound({connection, region ? region : UINT32_MAX});
    ledger->sources.erase(first, last);
    if (source) ledger->sources[{connection, region}] = *source;
}

// Serve small requests until something else is next in the socket: a request for Python, the end, or an error. Returns
// the bytes that were sent.
EXPORT uint64_t moonpool_serve_now(Ledger* ledger, int fd, uint64_t connection) {
    Byte message[sizeof(Request) + MAX_SPANS * (SPAN + SOURCE) + MOST_CARRIED];
    Byte reply[sizeof(Reply) + MOST_CARRIED];
    uint64_t sent = 0;
    while (true) {
        Request request;
        const ssize_t came = recv(fd, &request, sizeof request, MSG_PEEK);
        if (came < 0 && errno == EINTR) continue;
        const uint64_t whole = came == (ssize_t)sizeof request ? length(request) : 0;
        if (!whole || !arrived(fd, message, whole)) return sent;
        Reply head;
        uint64_t found = 0;
        {
            std::lock_guard<std::mutex> held(ledger->lock);
            const Byte* body = message + sizeof request;
            if (!ledger->answer(connection, request, body, reply + sizeof head, &found)) return sent;
        }
        head.nbytes = found;
        memcpy(reply, &head, sizeof head);
        if (recv(fd, message, whole, 0) != (ssize_t)whole) return sent;
        const uint64_t nbytes = sizeof head + found;
        if (!send_all(fd, reply, nbytes, request.budget_ms)) {
            shutdown(fd, SHUT_RDWR);  // what it gets next would not be a reply
            return sent;
        }
        sent += nbytes;
    }
}
