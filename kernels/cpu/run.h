// The unit in which the decode kernel goes through pages, and the rows of scores it fills.
#pragma once

#include "pool.h"

constexpr int64_t CHUNK = 256;             // tokens; a multiple of W
constexpr int64_t PITCH = CHUNK + W;       // a row of scores, with room for one vector too many

// K or V of `count` tokens of one kv head, one after the other in memory, and what will be read a little
// later.
template <class T>
struct Run {
    const T* rows;
    const T* soon;  // or null
    int64_t count;
};

// Asks for n more values behind `soon`. Spread over the work: asked for all at once they would hold it up.
template <class T>
MP_INLINE void ask(const T*& soon, int64_t n) {
    if (!soon) return;
    prefetch_row(soon, n);
    soon += n;
}
