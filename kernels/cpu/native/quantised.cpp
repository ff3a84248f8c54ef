// y = x W^T + bias for weights of 8 or 4 bits: W = scale × (code − zero), a scale a group of inputs.
//
// Integer codes are multiplied as integers: a row of x is made 16-bit integers with a scale for each segment of at
// most 128 inputs, which VNNI multiplies as 256 hi + lo, and AVX2 as they are. A segment's sum is exact; segments are
// added in order in float32. float8 codes become bf16, which is exact, for the bf16 dot product. Where an instruction
// is missing, codes become float32 and the loop is that of plain weights.
//
// As in linear.cpp outputs are in lanes, in panels of 4 vectors, and a row's result does not depend on the others.

#include <vector>

#include "lanes.h"
#include "lines.h"
#include "panels.h"

#if defined(MP_AVX512) && defined(__AVX512VNNI__)
#define MP_VNNI 1
#endif
#if defined(MP_VNNI) || defined(MP_AVX2)
#define MP_INTEGERS 1
#endif
#if defined(MP_BF16_DOT) && defined(__AVX512VBMI__)
#define MP_FP8_DOT 1  // two lookups of bytes make bf16 of float8
#endif
#if defined(MP_AVX512) || defined(MP_AVX2)
#define MP_FP8_PAIRS 1
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
#if defined(MP_FP8_PAIRS)
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

#if defined(MP_FP8_PAIRS)

// float32 of eight outputs' float8 codes of four inputs. Its bf16 has the lower four bits of a code in the lower byte, and
// sign and the other three bits plus 60 in the upper one; where those three are 0, lookups replace both.
MP_INLINE void four_inputs(__m256i codes, __m256i (&values)[4]) {
    const auto table = [](__m128i bytes) { return _mm256_broadcastsi128_si256(bytes); };
    const __m256i upper = table(_mm_setr_epi8(0, 61, 62, 63, 64, 65, 66, 67, -128, -67, -66, -65, -64, -63, -62, -61));
    const __m256i small_upper = table(_mm_setr_epi8(0, 59, 59, 59, 60, 60, 60, 60, 60, 60, 60, 60, 60, 60, 60, 60));
    const __m256i small_lower =
        table(_mm_setr_epi8(0, 0, -128, -64, 0, 32, 64, 96, -128, -112, -96, -80, -64, -48, -32, -16));
    const __m256i nibble = _mm256_set1_epi8(15), seven = _mm256_set1_epi8(7), magnitude = _mm256_set1_epi8(127);
    const __m256i last = _mm256_and_si256(codes, nibble);
    const __m256i first = _mm256_and_si256(_mm256_srli_epi16(codes, 4), nibble);
    const __m256i small = _mm256_cmpeq_epi8(_mm256_and_si256(first, seven), _mm256_setzero_si256());
    const __m256i nan = _mm256_cmpeq_epi8(_mm256_and_si256(codes, magnitude), magnitude);
    __m256i high = _mm256_shuffle_epi8(upper, first);
    high = _mm256_or_si256(high, _mm256_and_si256(small, _mm256_shuffle_epi8(small_upper, last)));
    high = _mm256_or_si256(high, _mm256_and_si256(nan, magnitude));
    __m256i low = _mm256_slli_epi16(last, 4);
    low = _mm256_or_si256(_mm256_blendv_epi8(low, _mm256_shuffle_epi8(small_lower, last), small), nan);
    const __m256i one = _mm256_unpacklo_epi8(low, high), other = _mm256_unpackhi_epi8(low, high);
    const __m256i second = _mm256_set1_epi32((int32_t)0xffff0000);
    values[0] = _mm256_slli_epi32(one, 16), values[1] = _mm256_and_si256(one, second);
    values[2] = _mm256_slli_epi32(other, 16), values[3] = _mm256_and_si256(other, second);
}

#endif

// A chunk of codes as float32 rows of C vectors, without their scale. Integers: the codes of four inputs, or of eight
// with 4 bits, are one word of an output.
template <Kind KIND, int C>
void to_floats(const uint8_t* codes, const int16_t* zeros, const Segment& segment, float* to) {
    constexpr int64_t lanes = C * W;
    if constexpr (KIND == FP8) {
#if defined(MP_FP8_PAIRS)
        for (int64_t k = 0; k < segment.count; k += 4, to += 4 * lanes)
            for (int64_t lane = 0; lane < lanes; lane += 8, codes += 32) {
                __m256i values[4];
                four_inputs(_mm256_loadu_si256((const __m256i*)codes), values);
                for (int i = 0; i < 4; i++) _mm256_storeu_si256((__m256i*)(to + i * lanes + lane), values[i]);
            }
#else
        for (int64_t k = 0; k < segment.count; k++, to += lanes)
            for (int64_t lane = 0; lane < lanes; lane++) to[lane] = to_float(fp8{codes[byte_at(KIND, lanes, lane, k)]});
#endif
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

#if defined(MP_INTEGERS)

// Rows as 16-bit integers, of `ld` inputs, with a scale and a sum for each of `segments`.
struct Integers {
#if defined(MP_VNNI)
    int8_t *hi, *lo;  // 256 hi + lo
#else
    int16_t* values;  // of each four inputs the first, third, second and fourth
#endif
    float* scales;
    int32_t* sums;
    int64_t ld, segments;

    Integers from(int64_t row) const {
        Integers rows = *this;
        rows.scales += row * segments, rows.sums += row * segments;
        return rows.at(row * ld);
    }
    Integers at(int64_t input) const {
        Integers inputs = *this;
#if defined(MP_VNNI)
        inputs.hi += input, inputs.lo += input;
#else
        inputs.values += input;
#endif
        return inputs;
    }
};

// W values of a segment from `at` on, those from `count` on as zeros.
template <class X>
MP_INLINE vf load_part(const X* x, int64_t at, int64_t count) {
    return at + W <= count ? load(x + at) : at < count ? load_n(x + at, (int)(count - at)) : splat(0.0f);
}

#if defined(MP_VNNI)

// Stores W integers, or those there are of `stored`, and returns them as they are added.
MP_INLINE vi store_integers(vf whole, const Integers& to, int64_t i, int64_t stored) {
    const __m512i value = _mm512_cvtps_epi32((__m512)whole);
    const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(value, _mm512_set1_epi32(128)), 8);
    const __m512i low = _mm512_sub_epi32(value, _mm512_slli_epi32(high, 8));
    const __mmask16 there = stored - i >= W ? 0xffff : (__mmask16)((1u << (stored - i)) - 1);
    _mm512_mask_cvtepi32_storeu_epi8(to.hi + i, there, high);
    _mm512_mask_cvtepi32_storeu_epi8(to.lo + i, there, low);
    return (vi)value;
}

#else

MP_INLINE vi store_integers(vf whole, const Integers& to, int64_t i, int64_t) {
    const __m256i value = _mm256_cvtps_epi32((__m256)whole);
    const __m256i crossed = _mm256_shuffle_epi32(value, _MM_SHUFFLE(3, 1, 2, 0));
    const __m128i narrow = _mm_packs_epi32(_mm256_castsi256_si128(crossed), _mm256_extracti128_si256(crossed, 1));
    _mm_storeu_si128((__m128i*)(to.values + i), narrow);
    return (vi)value;
}

#endif

// x = scale × integer, to nearest, of a segment with `count` values. A row with NaN or infinity has no scale but NaN.
template <class X>
void to_integers(const X* x, int64_t count, int64_t stored, const Integers& to, float* scale, int32_t* sum) {
    constexpr float MOST = 127 * 256 + 127;
    vf highest = splat(0.0f);
    vi unordered = {};
    for (int64_t i = 0; i < count; i += W) {
        const vf v = load_part(x, i, count);
        unordered |= v - v != 0.0f;
        highest = vmax((vf)((vu)v & 0x7fffffffu), highest);
    }
    const float most = largest(highest);
    const bool finite = ::sum(unordered) == 0;
    const bool kept = finite && most >= 1e-30f;
    const float inverse = kept ? MOST / most : 0.0f;
    vi total = {};
    for (int64_t i = 0; i < stored; i += W)
        total += store_integers(kept ? load_part(x, i, count) * inverse : splat(0.0f), to, i, stored);
    *sum = ::sum(total);
    *scale = kept ? most / MOST : finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
}

template <class X>
Integers integers_of(const X* x, int64_t rows, int64_t inputs, int64_t group) {
    static thread_local std::vector<int16_t> integers;
    static thread_local std::vector<float> scales;
    static thread_local std::vector<int32_t> sums;
    const std::vector<Segment>& segments = segments_of(inputs, group);
    const int64_t ld = round_up(inputs, OCTET), count = (int64_t)segments.size();
    if ((int64_t)integers.size() < rows * ld) integers.resize(rows * ld);
    if ((int64_t)scales.size() < rows * count) scales.resize(rows * count), sums.resize(rows * count);
#if defined(MP_VNNI)
    int8_t* bytes = (int8_t*)integers.data();
    const Integers all{bytes, bytes + rows * ld, scales.data(), sums.data(), ld, count};
#else
    const Integers all{integers.data(), scales.data(), sums.data(), ld, count};
#endif
    for (int64_t row = 0; row < rows; row++)
        for (int64_t s = 0; s < count; s++) {
            const Segment& segment = segments[s];
            const int64_t there = std::min(segment.count, inputs - segment.start);
            to_integers(x + row * inputs + segment.start, there, segment.count, all.at(row * ld + segment.start),
                        &scales[row * count + s], &sums[row * count + s]);
        }
    return all;
}

#if defined(MP_VNNI)

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

#endif

constexpr int64_t ONE_ROW_AHEAD = 4096;  // bytes

#if defined(MP_VNNI)

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

#else

// As above. The even and the odd bytes of a word are two pairs of 16-bit integers.
template <int R, int C, Kind KIND>
__attribute__((noinline)) void pass_integers(Integers x, const Part& part, float* sums, const uint8_t* next,
                                             int64_t ahead) {
    const uint8_t* w = (const uint8_t*)part.codes;
    const __m256i mask = _mm256_set1_epi16(KIND == INT4 ? 15 : 255);
    for (int64_t s = part.first; s < part.end; s++) {
        const Segment& segment = part.segments[s];
        __m256i products[R][C];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const int32_t total = -x.sums[r * x.segments + s];
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) {
                products[r][c] = _mm256_set1_epi32(total * (KIND == INT4 ? 8 : 128));
                if (part.zeros) {
                    const int16_t* zeros = part.zeros + (segment.group * C + c) * W;
                    const __m256i wide = _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i*)zeros));
                    products[r][c] = _mm256_mullo_epi32(wide, _mm256_set1_epi32(total));
                }
            }
        }
        const int16_t* values = x.values + segment.start;
        const auto pair = [&](const __m256i(&weights)[C]) {
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                int32_t both;
                memcpy(&both, values + r * x.ld, 4);
#pragma GCC unroll 8
                for (int c = 0; c < C; c++) {
                    const __m256i product = _mm256_madd_epi16(weights[c], _mm256_set1_epi32(both));
                    products[r][c] = _mm256_add_epi32(products[r][c], product);
                }
            }
            values += 2;
        };
        for (int64_t k = 0; k < segment.count; k += OCTET) {
            prefetch_row(next, ahead);
            next += ahead;
            if constexpr (R == 1) prefetch_row(w + ONE_ROW_AHEAD, nbytes_of(KIND, OCTET * C * W));
#pragma GCC unroll 2
            for (int word = 0; word < (KIND == INT4 ? 1 : 2); word++, w += C * 32) {
#pragma GCC unroll 4
                for (int i = 0; i < (KIND == INT4 ? 4 : 2); i++) {
                    const int shift = 8 * (i % 2) + 4 * (i / 2);
                    __m256i weights[C];
#pragma GCC unroll 8
                    for (int c = 0; c < C; c++) {
                        const __m256i codes = _mm256_loadu_si256((const __m256i*)(w + c * 32));
                        weights[c] = _mm256_and_si256(_mm256_srli_epi16(codes, shift), mask);
                    }
                    pair(weights);
                }
            }
        }
        const float* scales = part.scales + segment.group * C * W;
#pragma GCC unroll 8
        for (int c = 0; c < C; c++)
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const vf step = load(scales + c * W) * x.scales[r * x.segments + s];
                float* sum = sums + r * PANEL + c * W;
                const vf before = s == 0 ? splat(0.0f) : load(sum);
                store(sum, fused((vf)_mm256_cvtepi32_ps(products[r][c]), step, before));
            }
    }
}

#endif

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
    if (rows == 0) return;  // an expert without tokens: there are no passes to divide by
    const int64_t inputs = weight.inputs;
#if defined(MP_INTEGERS)
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
