// What the instruction set allows: multiply-adds on registers alone.

#include "dot.h"

// `rounds` times as many as hide their latency, in bf16 where there is a dot product, else in float32. values: two
// floats, overwritten. Returns the operations, two of each multiply-add.
MP_EXPORT int64_t multiply_registers(float* values, int64_t rounds) {
    constexpr int N = W == 4 ? 8 : 12;
    vf sums[N];
    for (int i = 0; i < N; i++) sums[i] = splat(values[0]);
#if defined(MP_BF16_DOT)
    constexpr int PAIRS = 2;
    const vu a = broadcast(values), b = broadcast(values + 1);
    const auto step = [&](vf sum) { return dot(sum, a, b); };
#else
    constexpr int PAIRS = 1;
    const vf a = splat(values[0]), b = splat(values[1]);
    const auto step = [&](vf sum) { return fused(sum, a, b); };
#endif
    for (int64_t round = 0; round < rounds; round++) {
#pragma GCC unroll 16
        for (int i = 0; i < N; i++) sums[i] = step(sums[i]);
    }
    for (int i = 0; i < N; i++) values[0] += sums[i][0];
    return rounds * N * W * PAIRS * 2;
}
