// y = x W^T + bias for weights of 8 or 4 bits: W = scale × (code − zero), a scale a group of inputs.
//
// Integer codes are multiplied as integers (VNNI): a row of x is made 16-bit integers, 256 hi + lo, with a scale
// for each segment of at most 128 inputs. A segment's sum is exact; segments are added in order in float32.
// float8 codes become bf16, which is exact, for the bf16 dot product. Where an instruction is missing, codes become
// float32 and the loop is that of plain weights.
//
// As in linear.cpp outputs are in lanes, in panels of 4 vectors, and a row's result does not depend on the others.

#include <vector>

#include "lines.h"
#include "panels.h"

#if defined(MP_AVX512) && defined(__AVX512VNNI__)
#define MP_VNNI 1
#endif
#if defined(MP_BF16_DOT) && defined(__AVX512VBMI__)
#define MP_FP8_DOT 1  // two lookups of bytes make bf16 of float8
#endif

namespace {

enum Kind { INT8, INT4, FP8 };
constexpr int64_t SEGMENT = 128;  // 128 inputs × 255 × 32,639 is below 2^31
constexpr int64_t OCTET = 8;      // inputs are stored in eights

constexpr int64_t nbytes_of(Kind kind, int64_t codes) { return kind == INT4 ? codes / 2 : codes; }

// Inputs with one scale of activations, all in one group of the weight. count: rounded up to an octet.
struct Segment {
    int64_t start, count, group;
};

const std::vector<Segment>& segments_of(int64_t inputs, int64_t group) {
    static thread_local std::vector<Segment> found;
    static thread_local int64_t of_inputs = -1, of_group = -1;
    if (of_inputs != inputs || of_group != group) {
        found.clear();
        for (int64_t first = 0, g = 0; first < inputs; first += group, g++) {
            const int64_t end = std::min(first + group, inputs);
            for (int64_t at = first; at < end; at += SEGMENT)
                found.push_back({at, round_up(std::min(SEGMENT, end - at), OCTET), g});
        }
        of_inputs = inputs, of_group = group;
    }
    return found;
}

// A packed matrix. A panel's codes are those of its first four inputs (of eight with 4 bits), output by output,
// then the next. scales and zeros: [panel][group][outputs of the panel]; zeros null: 128 or 8, of float8 none.
struct Weight {
    const uint8_t* codes;
    const float* scales;
    const int16_t* zeros;
    int64_t inputs, outputs, group;

    int64_t stored() const { return round_up(inputs, OCTET); }
    int64_t groups() const { return (inputs + group - 1) / group; }
};

// The part of a panel's weight for some segments.
struct Part {
    const void* codes;  // of the first segment
    const float* scales;
    const int16_t* zeros;
    const Segment* segments;
    int64_t first, end;
};

// Few rows wait for memory: each pass of up to `most` of them prefetches an equal part of the chunk after the present
// one, `nbytes` in each of its steps. One row does not.
struct Ahead {
    const uint8_t* next;
    int64_t most, passes, chunk_nbytes, nbytes;

    Ahead(int64_t rows, int64_t most, const uint8_t* chunk, int64_t chunk_nbytes, int64_t steps)
        : next(chunk + chunk_nbytes), most(most), passes((rows + most - 1) / most), chunk_nbytes(chunk_nbytes),
          nbytes(rows == 1 || rows > ROWS_THAT_WAIT ? 0 : round_up(chunk_nbytes / steps / passes, 64)) {}

    const uint8_t* from(int64_t row) const { return next + chunk_nbytes * (row / most) / passes; }
};

// The byte of a code within its panel of so many lanes.
MP_INLINE int64_t byte_at(Kind kind, int64_t lanes, int64_t lane, int64_t k) {
    if (kind == INT4) return (k / 8 * lanes + lane) * 4 + k % 4;
#if defined(MP_FP8_DOT)
    // The unpacking of bytes makes pairs of inputs of four outputs from each half of 16 bytes.
    if (kind == FP8)
        return (k / 4 * lanes + lane / W * W) * 4 + lane % W / 4 * 16 + k % 4 / 2 * 8 + lane % 4 * 2 + k % 2;
#endif
    return (k / 4 * lanes + lane) * 4 + k % 4;
}
MP_INLINE int nibble_at(int64_t k) { return k % 8 < 4 ? 0 : 4; }

// ---------------------------------------------------------------- float32

struct Floats {
    const float* x;
    int64_t ld;

    Floats from(int64_t row) const { return {x + row * ld, ld}; }
};

// A chunk of codes as float32 rows of C vectors, without their scale. Integers: the codes of four inputs, or of eight
// with 4 bits, are one word of an output.
template <Kind KIND, int C>
void to_floats(const uint8_t* codes, const int16_t* zeros, const Segment& segment, float* to) {
    constexpr int64_t lanes = C * W;
    if constexpr (KIND == FP8) {
        for (int64_t k = 0; k < segment.count; k++, to += lanes)
            for (int64_t lane = 0; lane < lanes; lane++) to[lane] = to_float(fp8{codes[byte_at(KIND, lanes, lane, k)]});
    } else {
        constexpr int bits = KIND == INT4 ? 4 : 8, inputs = 32 / bits;
        vf zero[C];
        for (int c = 0; c < C; c++)
            for (int lane = 0; lane < W; lane++)
                zero[c][lane] = zeros ? zeros[segment.group * lanes + c * W + lane] : KIND == INT4 ? 8 : 128;
        for (int64_t k = 0; k < segment.count; k += inputs, to += inputs * lanes, codes += 4 * lanes)
            for (int c = 0; c < C; c++) {
                vu words;
                memcpy(&words, codes + 4 * c * W, sizeof words);
                for (int i = 0; i < inputs; i++) {
                    const int shift = 8 * (i % 4) + nibble_at(i);
                    const vi code = (vi)(words >> shift & ((1u << bits) - 1));
                    store(to + i * lanes + c * W, __builtin_convertvector(code, vf) - zero[c]);
                }
            }
    }
}

template <int R, int C>
__attribute__((noinline)) void pass_floats(Floats x, const float* w, const Segment& segment, int64_t count,
                                           const float* scales, bool begin, float* sums) {
    vf part[R][C];
    fetch<R, C>(part, sums, PANEL, true);
    accumulate<R, C>(x.x + segment.start, x.ld, w, C * W, count, part);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) {
            float* sum = sums + r * PANEL + c * W;
            const vf before = begin ? splat(0.0f) : load(sum);
            store(sum, fused(part[r][c], load(scales + segment.group * C * W + c * W), before));
        }
}

template <Kind KIND, int C>
void panel(const Floats& x, int64_t rows, const Weight& weight, const uint8_t* codes, const float* scales,
           const int16_t* zeros, float* sums) {
    alignas(64) static thread_local float wide[SEGMENT * PANEL];
    for (const Segment& segment : segments_of(weight.inputs, weight.group)) {
        to_floats<KIND, C>(codes + nbytes_of(KIND, segment.start * C * W), zeros, segment, wide);
        const int64_t count = std::min(segment.count, weight.inputs - segment.start);
        for_row_groups<ROWS>(rows, [&](int64_t row, auto R) {
            pass_floats<R, C>(x.from(row), wide, segment, count, scales, segment.start == 0, sums + row * PANEL);
        });
    }
}

// ---------------------------------------------------------------- integers

// Rows as 16-bit integers in two bytes, of `ld` inputs, with a scale and a sum for each of `segments`.
struct Integers {
    const int8_t *hi, *lo;
    const float* scales;
    const int32_t* sums;
    int64_t ld, segments;

    Integers from(int64_t row) const {
        return {hi + row * ld, lo + row * ld, scales + row * segments, sums + row * segments, ld, segments};
    }
};

#if defined(MP_VNNI)

// Calls f(i) for the first values of a segment, W at a time, with the rest as zeros.
template <class X>
MP_INLINE vf load_part(const X* x, int64_t at, int64_t count) {
    return at + W <= count ? load(x + at) : at < count ? load_n(x + at, (int)(count - at)) : splat(0.0f);
}

// x = scale × (256 hi + lo), to nearest, of a segment with `count` values. A row with NaN or infinity has no scale
// but NaN.
template <class X>
void to_integers(const X* x, int64_t count, int64_t stored, int8_t* hi, int8_t* lo, float* scale, int32_t* sum) {
    constexpr float MOST = 127 * 256 + 127;
    __m512 largest = _mm512_setzero_ps();
    __mmask16 unordered = 0;
    for (int64_t i = 0; i < count; i += W) {
        const __m512 v = (__m512)load_part(x, i, count);
        unordered |= _mm512_cmp_ps_mask(v - v, v - v, _CMP_UNORD_Q);
        largest = _mm512_max_ps(largest, _mm512_abs_ps(v));
    }
    const float most = _mm512_reduce_max_ps(largest);
    const float inverse = unordered || most < 1e-30f ? 0.0f : MOST / most;
    __m512i total = _mm512_setzero_si512();
    for (int64_t i = 0; i < stored; i += W) {
        const __m512i value = _mm512_cvtps_epi32((__m512)(load_part(x, i, count) * inverse));
        const __m512i kept = unordered ? _mm512_setzero_si512() : value;
        total = _mm512_add_epi32(total, kept);
        const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(kept, _mm512_set1_epi32(128)), 8);
        const __m512i low = _mm512_sub_epi32(kept, _mm512_slli_epi32(high, 8));
        const __mmask16 there = stored - i >= W ? 0xffff : (__mmask16)((1u << (stored - i)) - 1);
        _mm512_mask_cvtepi32_storeu_epi8(hi + i, there, high);
        _mm512_mask_cvtepi32_storeu_epi8(lo + i, there, low);
    }
    *sum = _mm512_reduce_add_epi32(total);
    *scale = unordered ? std::numeric_limits<float>::quiet_NaN() : most < 1e-30f ? 0.0f : most / MOST;
}

template <class X>
Integers integers_of(const X* x, int64_t rows, int64_t inputs, int64_t group) {
    static thread_local std::vector<int8_t> bytes;
    static thread_local std::vector<float> scales;
    static thread_local std::vector<int32_t> sums;
    const std::vector<Segment>& segments = segments_of(inputs, group);
    const int64_t ld = round_up(inputs, OCTET), count = (int64_t)segments.size();
    if ((int64_t)bytes.size() < 2 * rows * ld) bytes.resize(2 * rows * ld);
    if ((int64_t)scales.size() < rows * count) scales.resize(rows * count), sums.resize(rows * count);
    int8_t *hi = bytes.data(), *lo = hi + rows * ld;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t s = 0; s < count; s++) {
            const Segment& segment = segments[s];
            const int64_t at = row * ld + segment.start, there = std::min(segment.count, inputs - segment.start);
            to_integers(x + row * inputs + segment.start, there, segment.count, hi + at, lo + at,
                        &scales[row * count + s], &sums[row * count + s]);
        }
    return {hi, lo, scales.data(), sums.data(), ld, count};
}

MP_INLINE __m512i broadcast4(const int8_t* at) {
    int32_t four;
    memcpy(&four, at, 4);
    return _mm512_set1_epi32(four);
}

// Zeros of a vector of outputs, each times `factor`.
MP_INLINE __m512i times(const int16_t* zeros, int32_t factor) {
    const __m512i wide = _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i*)zeros));
    return _mm512_mullo_epi32(wide, _mm512_set1_epi32(factor));
}

constexpr int64_t ONE_ROW_AHEAD = 4096;  // bytes

// R rows over some segments of C vectors of outputs. Every octet prefetches `ahead` bytes, from `next` on, and for one
// row what is read ONE_ROW_AHEAD later.
template <int R, int C, Kind KIND>
__attribute__((noinline)) void pass_integers(Integers x, const Part& part, float* sums, const uint8_t* next,
                                             int64_t ahead) {
    const uint8_t* w = (const uint8_t*)part.codes;
    const __m512i nibbles = _mm512_set1_epi8(15);
    for (int64_t s = part.first; s < part.end; s++) {
        const Segment& segment = part.segments[s];
        __m512i highs[R][C], lows[R][C];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const int32_t total = -x.sums[r * x.segments + s];
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) {
                highs[r][c] = _mm512_setzero_si512();
                lows[r][c] = part.zeros ? times(part.zeros + (segment.group * C + c) * W, total)
                                        : _mm512_set1_epi32(total * (KIND == INT4 ? 8 : 128));
            }
        }
        const int8_t *hi = x.hi + segment.start, *lo = x.lo + segment.start;
        const auto four = [&](const __m512i(&weights)[C], int64_t k) {
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const __m512i high = broadcast4(hi + r * x.ld + k), low = broadcast4(lo + r * x.ld + k);
#pragma GCC unroll 8
                for (int c = 0; c < C; c++) {
                    highs[r][c] = _mm512_dpbusd_epi32(highs[r][c], weights[c], high);
                    lows[r][c] = _mm512_dpbusd_epi32(lows[r][c], weights[c], low);
                }
            }
        };
        for (int64_t k = 0; k < segment.count; k += OCTET) {
            __m512i weights[C];
            prefetch_row(next, ahead);
            next += ahead;
            if constexpr (R == 1) prefetch_row(w + ONE_ROW_AHEAD, nbytes_of(KIND, OCTET * C * W));
            if constexpr (KIND == INT4) {
                __m512i pairs[C];
#pragma GCC unroll 8
                for (int c = 0; c < C; c++) {
                    pairs[c] = _mm512_loadu_si512(w + c * 64);
                    weights[c] = _mm512_and_si512(pairs[c], nibbles);
                }
                four(weights, k);
#pragma GCC unroll 8
                for (int c = 0; c < C; c++)
                    weights[c] = _mm512_and_si512(_mm512_srli_epi16(pairs[c], 4), nibbles);
                four(weights, k + 4);
                w += C * 64;
            } else {
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++, w += C * 64) {
#pragma GCC unroll 8
                    for (int c = 0; c < C; c++) weights[c] = _mm512_loadu_si512(w + c * 64);
                    four(weights, k + 4 * half);
                }
            }
        }
        const float* scales = part.scales + segment.group * C * W;
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) {
            const __m512 scale = (__m512)load(scales + c * W);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const __m512i products = _mm512_add_epi32(_mm512_slli_epi32(highs[r][c], 8), lows[r][c]);
                const __m512 value = _mm512_cvtepi32_ps(products);
                const __m512 step = _mm512_mul_ps(scale, _mm512_set1_ps(x.scales[r * x.segments + s]));
                float* sum = sums + r * PANEL + c * W;
                store(sum, (vf)_mm512_fmadd_ps(value, step, s == 0 ? _mm512_setzero_ps() : (__m512)load(sum)));
            }
        }
    }
}

template <Kind KIND, int C>
void panel(const Integers& x, int64_t rows, const Weight& weight, const uint8_t* codes, const float* scales,
           const int16_t* zeros, float* sums) {
    const std::vector<Segment>& segments = segments_of(weight.inputs, weight.group);
    Part part{nullptr, scales, zeros, segments.data(), 0, 0};
    for (const int64_t count = (int64_t)segments.size(); part.first < count; part.first = part.end) {
        const int64_t start = segments[part.first].start;
        int64_t inputs = 0;
        while (part.end < count && inputs < CHUNK) inputs += segments[part.end++].count;
        part.codes = codes + nbytes_of(KIND, start * C * W);
        // The sums of highs and lows are twice as many registers as rows.
        const Ahead ahead(rows, 2, (const uint8_t*)part.codes, nbytes_of(KIND, inputs * C * W), inputs / OCTET);
        for_row_groups<2>(rows, [&](int64_t row, auto R) {
            pass_integers<R, C, KIND>(x.from(row), part, sums + row * PANEL, ahead.from(row), ahead.nbytes);
        });
    }
}

#endif

// ---------------------------------------------------------------- float8 as bf16

#if defined(MP_FP8_DOT)

struct Halves {
    const bf16* x;
    int64_t ld;

    Halves from(int64_t row) const { return {x + row * ld, ld}; }
};

// The bytes of bf16 for the seven lower bits of float8.
struct Tables {
    alignas(64) uint8_t high[128], low[128];
    Tables() {
        for (int code = 0; code < 128; code++) {
            bf16 value;
            from_float(&value, to_float(fp8{(uint8_t)code}));
            high[code] = (uint8_t)(value.bits >> 8), low[code] = (uint8_t)value.bits;
        }
    }
};
const Tables tables;

// As `pass_integers`; it prefetches at every fourth input.
template <int R, int C>
__attribute__((noinline)) void pass_halves(Halves x, const Part& part, float* sums, const uint8_t* next,
                                           int64_t ahead) {
    const uint8_t* w = (const uint8_t*)part.codes;
    const __m512i high0 = _mm512_load_si512(tables.high), high1 = _mm512_load_si512(tables.high + 64);
    const __m512i low0 = _mm512_load_si512(tables.low), low1 = _mm512_load_si512(tables.low + 64);
    for (int64_t s = part.first; s < part.end; s++) {
        const Segment& segment = part.segments[s];
        __m512 products[R][C];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) products[r][c] = _mm512_setzero_ps();
        for (int64_t k = segment.start; k < segment.start + segment.count; k += 4, next += ahead) {
            prefetch_row(next, ahead);
            __m512bh pairs[R][2];
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
#pragma GCC unroll 2
                for (int i = 0; i < 2; i++) {
                    int32_t both;
                    memcpy(&both, x.x + r * x.ld + k + 2 * i, 4);
                    pairs[r][i] = (__m512bh)_mm512_set1_epi32(both);
                }
#pragma GCC unroll 8
            for (int c = 0; c < C; c++, w += 64) {
                const __m512i codes = _mm512_loadu_si512(w);
                const __m512i sign = _mm512_and_si512(codes, _mm512_set1_epi8((char)0x80));
                const __m512i high = _mm512_or_si512(_mm512_permutex2var_epi8(high0, codes, high1), sign);
                const __m512i low = _mm512_permutex2var_epi8(low0, codes, low1);
                const __m512bh first = (__m512bh)_mm512_unpacklo_epi8(low, high);
                const __m512bh second = (__m512bh)_mm512_unpackhi_epi8(low, high);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    products[r][c] = _mm512_dpbf16_ps(products[r][c], first, pairs[r][0]);
                    products[r][c] = _mm512_dpbf16_ps(products[r][c], second, pairs[r][1]);
                }
            }
        }
        const float* scales = part.scales + segment.group * C * W;
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) {
                float* sum = sums + r * PANEL + c * W;
                const __m512 before = s == 0 ? _mm512_setzero_ps() : (__m512)load(sum);
                store(sum, (vf)_mm512_fmadd_ps(products[r][c], (__m512)load(scales + c * W), before));
            }
    }
}

template <Kind KIND, int C>
void panel(const Halves& x, int64_t rows, const Weight& weight, const uint8_t* codes, const float* scales,
           const int16_t*, float* sums) {
    const std::vector<Segment>& segments = segments_of(weight.inputs, weight.group);
    Part part{nullptr, scales, nullptr, segments.data(), 0, 0};
    for (const int64_t count = (int64_t)segments.size(); part.first < count; part.first = part.end) {
        part.codes = codes + segments[part.first].start * C * W;
        int64_t inputs = 0;
        while (part.end < count && inputs < CHUNK) inputs += segments[part.end++].count;
        const Ahead ahead(rows, 3, (const uint8_t*)part.codes, inputs * C * W, inputs / 4);
        for_row_groups<3>(rows, [&](int64_t row, auto R) {
            pass_halves<R, C>(x.from(row), part, sums + row * PANEL, ahead.from(row), ahead.nbytes);
        });
    }
}

#endif

// ---------------------------------------------------------------- a product

// Rows first … end - 1 of x W^T. X: the activations as they are multiplied.
template <Kind KIND, class X, class Y>
struct Product {
    X x;
    Weight weight;
    const float* bias;  // or null
    Y* y;
    int64_t rows;

    void panels(int64_t first, int64_t end) const {
        static thread_local Lines<float> scratch;
        if ((int64_t)scratch.size() < rows * PANEL) scratch.resize(rows * PANEL);
        float* sums = scratch.data();
        const int64_t stored = weight.stored(), groups = weight.groups(), outputs = weight.outputs;
        for (int64_t at = first * PANEL; at < std::min(end * PANEL, outputs); at += PANEL) {
            const int64_t count = std::min<int64_t>(PANEL, outputs - at);
            const uint8_t* codes = weight.codes + nbytes_of(KIND, at * stored);
            const int16_t* zeros = weight.zeros ? weight.zeros + at * groups : nullptr;
            with_constant<4>((count + W - 1) / W, [&](auto C) {
                panel<KIND, C>(x, rows, weight, codes, weight.scales + at * groups, zeros, sums);
            });
            finish(sums, bias ? bias + at : nullptr, y + at, outputs, rows, count);
        }
    }

    int64_t num_panels() const { return (weight.outputs + PANEL - 1) / PANEL; }
    // Nanoseconds of one thread for a panel, roughly: it is read from memory, and multiplied.
    double panel_ns() const {
        const double codes = (double)(weight.stored() * PANEL);
        return codes * ((double)nbytes_of(KIND, 2) / 40.0 + (double)rows / 60.0);
    }
    Product part(int64_t first, int64_t end) const {
        return {x.from(first), weight, bias, y + first * weight.outputs, end - first};
    }
};

template <Kind KIND, class X>
void linear(const X* x, const Weight& weight, const float* bias, X* y, int64_t rows) {
    const int64_t inputs = weight.inputs;
#if defined(MP_VNNI)
    if constexpr (KIND != FP8)
        return multiply(
            Product<KIND, Integers, X>{integers_of(x, rows, inputs, weight.group), weight, bias, y, rows});
#endif
#if defined(MP_FP8_DOT)
    if constexpr (KIND == FP8 && std::is_same_v<X, bf16>) {
        const int64_t stored = weight.stored();
        const bf16* padded = stored == inputs ? x : converted<bf16>(x, rows, inputs, stored);
        return multiply(Product<KIND, Halves, X>{{padded, stored}, weight, bias, y, rows});
    }
#endif
    const float* wide;
    if constexpr (std::is_same_v<X, float>) {
        wide = x;
    } else {
        wide = converted<float>(x, rows, inputs, inputs);
    }
    multiply(Product<KIND, Floats, X>{{wide, inputs}, weight, bias, y, rows});
}

// codes: [outputs, inputs], a byte each; packed: zeroed.
template <Kind KIND>
void pack(const uint8_t* codes, uint8_t* packed, int64_t inputs, int64_t outputs) {
    const int64_t stored = round_up(inputs, OCTET);
    for (int64_t first = 0; first < outputs; first += PANEL) {
        const int64_t count = std::min<int64_t>(PANEL, outputs - first), lanes = round_up(count, W);
        uint8_t* to = packed + nbytes_of(KIND, first * stored);
        for (int64_t lane = 0; lane < count; lane++)
            for (int64_t k = 0; k < inputs; k++) {
                const uint8_t code = codes[(first + lane) * inputs + k];
                to[byte_at(KIND, lanes, lane, k)] |= KIND == INT4 ? code << nibble_at(k) : code;
            }
    }
}

}  // namespace

// Outputs of a panel are padded to whole vectors, inputs to octets.
#define MP_QUANTISED(KIND, NAME)                                                                              \
    MP_EXPORT int64_t packed_size_##NAME(int64_t inputs, int64_t outputs) {                                   \
        return nbytes_of(KIND, round_up(inputs, OCTET) * round_up(outputs, W));                               \
    }                                                                                                         \
    MP_EXPORT void pack_##NAME(const uint8_t* codes, uint8_t* packed, int64_t inputs, int64_t outputs) {      \
        pack<KIND>(codes, packed, inputs, outputs);                                                           \
    }                                                                                                         \
    MP_QUANTISED_LINEAR(KIND, NAME, float, f32)                                                               \
    MP_QUANTISED_LINEAR(KIND, NAME, bf16, bf16)                                                               \
    MP_QUANTISED_LINEAR(KIND, NAME, fp16, f16)

#define MP_QUANTISED_LINEAR(KIND, NAME, X, XNAME)                                                             \
    MP_EXPORT void quantised_linear_##XNAME##_##NAME(                                                         \
        const X* x, const uint8_t* codes, const float* scales, const int16_t* zeros, const float* bias, X* y, \
        int64_t rows, int64_t inputs, int64_t outputs, int64_t group) {                                       \
        linear<KIND>(x, Weight{codes, scales, zeros, inputs, outputs, group}, bias, y, rows);                 \
    }

MP_QUANTISED(INT8, int8)
MP_QUANTISED(INT4, int4)
MP_QUANTISED(FP8, fp8)

// Outputs in a vector, to which those of the last panel are padded.
MP_EXPORT int64_t vector_width() { return W; }
