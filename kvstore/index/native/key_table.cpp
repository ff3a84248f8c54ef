// A hash table from block keys of 16 bytes to the number of the set of nodes that hold the block. Number 0: unknown.
//
// 256 parts, by the keys' last byte, so that growing takes well under a millisecond at a time, and one key in N can be
// listed without visiting the others. Linear probing; an erased entry is filled by its followers.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

// Of Python's stable ABI; the interpreter that loads this library has them.
extern "C" {
typedef struct _object PyObject;
PyObject* PyList_GetItem(PyObject*, intptr_t);
intptr_t PyList_Size(PyObject*);
char* PyBytes_AsString(PyObject*);
intptr_t PyBytes_Size(PyObject*);
}

namespace {

constexpr int KEY = 16, PARTS = 256;
constexpr uint32_t SMALLEST = 16;

struct Entry {
    uint64_t low, high;  // the key
    uint32_t set;        // 0: the entry is free
} __attribute__((packed));

Entry named(const void* key) {
    Entry entry;
    memcpy(&entry, key, KEY);
    entry.set = 0;
    return entry;
}

struct Part {
    Entry* entries = nullptr;
    uint32_t capacity = 0, used = 0;

    uint32_t home(const Entry& of) const {
        const uint64_t mixed = (of.low ^ of.high * 0x9e3779b97f4a7c15u) * 0xd6e8feb86659fd93u;
        return (mixed >> 32) * capacity >> 32;
    }

    uint32_t next(uint32_t at) const { return at + 1 == capacity ? 0 : at + 1; }

    // The entry of the key, or the free one where it belongs. There is always a free one.
    Entry* find(const Entry& of) const {
        uint32_t at = home(of);
        while (entries[at].set && (entries[at].low != of.low || entries[at].high != of.high)) at = next(at);
        return entries + at;
    }

    // False: no memory; nothing has changed.
    bool resize(uint32_t entries_wanted) {
        Part made;
        made.capacity = entries_wanted < SMALLEST ? SMALLEST : entries_wanted;
        made.used = used;
        made.entries = (Entry*)calloc(made.capacity, sizeof(Entry));
        if (!made.entries) return false;
        for (uint32_t at = 0; at < capacity; at++)
            if (entries[at].set) *made.find(entries[at]) = entries[at];
        free(entries);
        *this = made;
        return true;
    }

    bool has_room() { return (used + 1) * 16ull <= capacity * 13ull || resize(capacity + capacity / 2); }

    void erase(uint32_t hole) {
        for (uint32_t at = next(hole); entries[at].set; at = next(at)) {
            const uint32_t wanted = home(entries[at]);
            const uint32_t from_home = at >= wanted ? at - wanted : at + capacity - wanted;
            const uint32_t from_hole = at >= hole ? at - hole : at + capacity - hole;
            if (from_home >= from_hole) {
                entries[hole] = entries[at];
                hole = at;
            }
        }
        entries[hole].set = 0;
        used--;
    }
};

struct Table {
    Part parts[PARTS];
    std::vector<uint32_t> counts;  // blocks of each set; [0] has no meaning
    int64_t size = 0;

    Part& part_of(const void* key) { return parts[((const uint8_t*)key)[KEY - 1]]; }

    uint32_t get(const void* key) { return part_of(key).find(named(key))->set; }

    void prefetch(const void* key) {
        const Part& part = part_of(key);
        __builtin_prefetch(part.entries + part.home(named(key)));
    }

    void count(uint32_t before, uint32_t after) {
        if (after >= counts.size()) counts.resize(2 * (size_t)after + 64);
        if (before) counts[before]--;
        if (after) counts[after]++;
        size += !before - !after;
    }
};

// The keys of a list of bytes.
struct Keys {
    PyObject* list;

    // Null: it is no key; Python's exception is set unless it is bytes of another length.
    const char* operator[](int64_t at) const {
        PyObject* key = PyList_GetItem(list, at);
        return key && PyBytes_Size(key) == KEY ? PyBytes_AsString(key) : nullptr;
    }
};

uint32_t set_at(Table& table, const Keys& keys, int64_t at) {
    const char* key = keys[at];
    return key ? table.get(key) : 0;
}

// Load what the next three steps of a binary search between `low` and `high` may look at.
void prefetch_steps(Table& table, const Keys& keys, int64_t low, int64_t high, int steps = 3) {
    const int64_t middle = (low + high) >> 1;
    if (middle == low) return;
    if (const char* key = keys[middle]) table.prefetch(key);
    if (steps == 1) return;
    prefetch_steps(table, keys, low, middle, steps - 1);
    prefetch_steps(table, keys, middle, high, steps - 1);
}

}  // namespace

EXPORT void moonpool_index_free(Table* table) {
    for (Part& part : table->parts) free(part.entries);
    delete table;
}

// Null: no memory.
EXPORT Table* moonpool_index_new() {
    Table* table = new (std::nothrow) Table();
    if (!table) return nullptr;
    for (Part& part : table->parts)
        if (!part.resize(SMALLEST)) {
            moonpool_index_free(table);
            return nullptr;
        }
    return table;
}

EXPORT int64_t moonpool_index_size(const Table* table) { return table->size; }

EXPORT uint32_t moonpool_index_get(Table* table, const char* key) { return table->get(key); }

// Divide a chain, a list of bytes, into runs of blocks with one set each, until the first unknown block. Blocks of equal
// sets have no other between them, so bounds are found by binary search: of all runs in step, as the time goes into
// waiting for memory. Returns the number of runs; of a single one, the negative of `end << 32 | set`. runs: uint32
// [len(keys)][2]: where each ends, and its set.
EXPORT int64_t moonpool_index_runs(Table* table, PyObject* list, uint32_t* runs) {
    struct Bound {
        int64_t low, high;     // it lies between these blocks
        uint32_t first, last;  // their sets; the end of the chain is like an unknown block
    };
    const Keys keys{list};
    int64_t low = 0, high = PyList_Size(list);
    const uint32_t first = high > 0 ? set_at(*table, keys, 0) : 0;
    if (!first) return 0;
    // The end of the first run, which is usually the only one.
    uint32_t last = 0;
    std::vector<Bound> bounds, next;
    for (int step = 0; high - low > 1; step++) {
        if (step % 3 == 0) prefetch_steps(*table, keys, low, high);
        const int64_t middle = (low + high) >> 1;
        const uint32_t here = set_at(*table, keys, middle);
        if (here == first) {
            low = middle;
            continue;
        }
        if (here != last) bounds.push_back({middle, high, here, last});
        high = middle, last = here;
    }
    if (!last) return -(high << 32 | first);
    std::reverse(bounds.begin(), bounds.end());
    bool more = true;
    for (int step = 0; more; step++, bounds.swap(next)) {
        if (step % 3 == 0)
            for (const Bound& bound : bounds) prefetch_steps(*table, keys, bound.low, bound.high);
        more = false;
        next.clear();
        for (const Bound& bound : bounds) {
            const int64_t middle = (bound.low + bound.high) >> 1;
            const uint32_t here = middle == bound.low ? bound.first : set_at(*table, keys, middle);
            if (here != bound.first) next.push_back({bound.low, middle, bound.first, here});
            if (here != bound.last) next.push_back({middle, bound.high, here, bound.last});
            more |= bound.high - bound.low > 2;
        }
    }
    int64_t found = 0;
    const auto add = [&](int64_t end, uint32_t set) {
        runs[2 * found] = (uint32_t)end;
        runs[2 * found++ + 1] = set;
    };
    add(high, first);
    for (const Bound& bound : bounds) {
        add(bound.high, bound.first);
        if (!bound.last) break;
    }
    return found;
}

// Move the packed keys from `start` on from their sets to others. changes: int32 [num_changes][3]: a set, the set that
// replaces it (0: erase), and what that adds to the number of blocks. Returns where it stopped: `count`, or a key
// with a set that is not in `changes`; -1: no memory. result: what was added, and the set that is missing.
EXPORT int64_t moonpool_index_move(Table* table, const uint8_t* keys, int64_t count, int64_t start,
                                   const int32_t* changes, int64_t num_changes, int64_t* result) {
    constexpr int64_t AHEAD = 8;
    int64_t last = 0;  // the change that was used
    for (int64_t i = start; i < count; i++) {
        if (i + AHEAD < count) table->prefetch(keys + (i + AHEAD) * KEY);
        Part& part = table->part_of(keys + i * KEY);
        if (!part.has_room()) return -1;
        const Entry key = named(keys + i * KEY);
        Entry* entry = part.find(key);
        const uint32_t before = entry->set;
        if (last >= num_changes || (uint32_t)changes[3 * last] != before) {
            for (last = 0; last < num_changes && (uint32_t)changes[3 * last] != before;) last++;
            if (last == num_changes) {
                result[1] = before;
                return i;
            }
        }
        const uint32_t after = changes[3 * last + 1];
        result[0] += changes[3 * last + 2];
        if (before == after) continue;
        if (!before) {
            *entry = key;
            part.used++;
        }
        if (after)
            entry->set = after;
        else
            part.erase(entry - part.entries);
        table->count(before, after);
    }
    return count;
}

// counts: uint32 [num], receives the number of blocks of each set.
EXPORT void moonpool_index_counts(const Table* table, uint32_t* counts, int64_t num) {
    const int64_t known = (int64_t)table->counts.size();
    for (int64_t set = 0; set < num; set++) counts[set] = set && set < known ? table->counts[set] : 0;
}

// Replace each set of one part by `to[set]`, 0: erase. Sets from `num` on stay. Returns how many entries were visited.
EXPORT int64_t moonpool_index_replace(Table* table, int64_t part_number, const uint32_t* to, int64_t num) {
    Part& part = table->parts[part_number];
    const int64_t visited = part.used;
    for (uint32_t at = 0; at < part.capacity;) {
        const uint32_t before = part.entries[at].set, after = before < num ? to[before] : before;
        if (before != after) {
            table->count(before, after);
            part.entries[at].set = after;
            if (!after) {
                part.erase(at);  // what takes its place is visited too
                continue;
            }
        }
        at++;
    }
    if (part.used * 4ull < part.capacity && part.capacity > SMALLEST) part.resize(part.used * 2);
    return visited;
}

// List the keys with a last byte of `part` modulo `num_parts` and a set below `num` that is `wanted`; at most `room`.
// keys: [room][16], sets: uint32 [room]. Returns how many.
EXPORT int64_t moonpool_index_list(const Table* table, int64_t part, int64_t num_parts, const uint8_t* wanted,
                                   int64_t num, uint8_t* keys, uint32_t* sets, int64_t room) {
    int64_t found = 0;
    for (int64_t number = part; number < PARTS; number += num_parts) {
        const Part& of = table->parts[number];
        for (uint32_t at = 0; at < of.capacity; at++) {
            const Entry& entry = of.entries[at];
            if (!entry.set || entry.set >= num || !wanted[entry.set]) continue;
            if (found == room) return found;
            memcpy(keys + found * KEY, &entry, KEY);
            sets[found++] = entry.set;
        }
    }
    return found;
}
