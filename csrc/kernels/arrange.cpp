#include "arrange.h"

#include <string.h>

#include <type_traits>

#ifdef THERMOCLINE_X86
#include <emmintrin.h>
#endif

// Plain loops over words of 4 and 8 bytes: a compiler's baseline vectorises them, and a row stays in the
// first cache between one plane and the next. Bits change places by delta swaps: to swap two bits of all
// positions' numbers, exchange what lies at the positions that have the one and those that have the other.

namespace tc {
namespace {

template <class T>
T load(const uint8_t* p) {
    T v;
    memcpy(&v, p, sizeof v);
    return v;
}
template <class T>
void store(uint8_t* p, T v) {
    memcpy(p, &v, sizeof v);
}

template <class T>
T swapped(T x, unsigned shift, T mask) {
    const T t = ((x >> shift) ^ x) & mask;
    return x ^ t ^ T(t << shift);
}
template <class T>
void swap_between(T& low, T& high, unsigned shift,
                  T mask) {  // the high bits of `low` with the low ones of `high`
    const T t = ((low >> shift) ^ high) & mask;
    high ^= t, low ^= T(t << shift);
}

// ---- fields as they are
template <size_t Offset, size_t Bytes>
struct Field {};

template <size_t BlockBytes, size_t Offset, size_t Bytes>
uint8_t* copy(Field<Offset, Bytes>, size_t n, const uint8_t* from, uint8_t* to) {
    for (size_t i = 0; i < n; i++) memcpy(to + i * Bytes, from + i * BlockBytes + Offset, Bytes);
    return to + n * Bytes;
}
template <size_t BlockBytes, class... Fields>
void fields(size_t n, const uint8_t* from, uint8_t* to) {
    ((to = copy<BlockBytes>(Fields(), n, from, to)), ...);
}

// ---- what moves

// Of each u32, bit 4j + k (weight 4j + k) to bit j of byte k.
void spread_fifths(size_t n, uint8_t* bits) {
    for (size_t i = 0; i < n; i++) {
        uint32_t x = load<uint32_t>(bits + 4 * i);
        x = swapped<uint32_t>(x, 3, 0x0a0a0a0au);
        x = swapped<uint32_t>(x, 6, 0x00cc00ccu);
        x = swapped<uint32_t>(x, 12, 0x0000f0f0u);
        store(bits + 4 * i, swapped<uint32_t>(x, 8, 0x0000ff00u));
    }
}

// 32 bytes whose low nibbles are 32 weights and whose high ones 32 others: 16 bytes of either, weight j and
// weight j + 16 in byte j.
void split_nibbles(const uint8_t* from, uint8_t* low, uint8_t* high) {
    constexpr uint64_t kLow = 0x0f0f0f0f0f0f0f0full;
    for (size_t i = 0; i < 16; i += 8) {
        const uint64_t a = load<uint64_t>(from + i), b = load<uint64_t>(from + 16 + i);
        store(low + i, (a & kLow) | (b & kLow) << 4);
        store(high + i, (a >> 4 & kLow) | (b & ~kLow));
    }
}

// 32 bytes with a pair of bits for each of 4 blocks: 8 bytes for each block, weight 8g + k at bits 2g of byte
// k.
void turn_pairs(const uint8_t* from, uint8_t* to) {
    uint64_t a = load<uint64_t>(from), b = load<uint64_t>(from + 8);
    uint64_t c = load<uint64_t>(from + 16), d = load<uint64_t>(from + 24);
    constexpr uint64_t kOne = 0x3333333333333333ull, kTwo = 0x0f0f0f0f0f0f0f0full;
    swap_between(a, b, 2, kOne), swap_between(c, d, 2, kOne);
    swap_between(a, c, 4, kTwo), swap_between(b, d, 4, kTwo);
    store(to, a), store(to + 8, b), store(to + 16, c), store(to + 24, d);
}

// 32 bytes with a bit for each of 8 blocks: 4 bytes for each block, weight 4j + k at bit j of byte k.
void turn_bits(const uint8_t* from, uint8_t* to) {
    uint64_t a = load<uint64_t>(from), b = load<uint64_t>(from + 8);  // each of two words of 4 bytes
    uint64_t c = load<uint64_t>(from + 16), d = load<uint64_t>(from + 24);
    constexpr uint64_t kOne = 0x00000000aaaaaaaaull, kTwo = 0x3333333333333333ull;
    constexpr uint64_t kFour = 0x0f0f0f0f0f0f0f0full;
    a = swapped(a, 31, kOne), b = swapped(b, 31, kOne), c = swapped(c, 31, kOne), d = swapped(d, 31, kOne);
    swap_between(a, b, 2, kTwo), swap_between(c, d, 2, kTwo);
    swap_between(a, c, 4, kFour), swap_between(b, d, 4, kFour);
    store(to, a), store(to + 8, b), store(to + 16, c), store(to + 24, d);
}

// 8 scales and 8 minima of 6 bits out of 12 bytes: 8 bytes with the scales and the minima's low pairs, 4 with
// the minima's high nibbles.
void part_scales(const uint8_t* packed, uint8_t* scales, uint8_t* minima) {
    const uint32_t a = load<uint32_t>(packed), b = load<uint32_t>(packed + 4), c = load<uint32_t>(packed + 8);
    constexpr uint32_t kSix = 0x3f3f3f3fu, kFour = 0x0f0f0f0fu, kTop = 0x30303030u, kTwo = 0x03030303u;
    const uint32_t low = b & kSix, high = (c >> 4 & kFour) | (b >> 2 & kTop);  // minima
    store(scales, (a & kSix) | (low & kTwo) << 6);
    store(scales + 4, (c & kFour) | (a >> 2 & kTop) | (high & kTwo) << 6);
    store(minima, (low >> 2 & kFour) | (high << 2 & ~kFour));
}

// The low nibbles of 8 bytes, two to a byte.
uint32_t joined_nibbles(uint64_t x) {
    x &= 0x0f0f0f0f0f0f0f0full;
    x = (x | x >> 4) & 0x00ff00ff00ff00ffull;
    x = (x | x >> 8) & 0x0000ffff0000ffffull;
    return uint32_t(x | x >> 16);
}

// 16 scales of 6 bits out of 12 bytes: 8 bytes with two low nibbles each, 4 with four high pairs each.
void part_sixteen_scales(const uint8_t* packed, uint8_t* scales, uint8_t* scales_high) {
    const uint64_t nibbles = load<uint64_t>(packed);
    store(scales, joined_nibbles(nibbles));
    store(scales + 4, joined_nibbles(nibbles >> 4));
    const uint32_t x = swapped<uint32_t>(load<uint32_t>(packed + 8), 6, 0x00cc00ccu);
    store(scales_high, swapped<uint32_t>(x, 12, 0x0000f0f0u));
}

// ---- formats whose bits move, n blocks each
void q5_0(size_t n, const uint8_t* from, uint8_t* to) {
    fields<22, Field<6, 16>, Field<2, 4>, Field<0, 2>>(n, from, to);
    spread_fifths(n, to + 16 * n);
}

void q5_1(size_t n, const uint8_t* from, uint8_t* to) {
    fields<24, Field<8, 16>, Field<4, 4>, Field<0, 2>, Field<2, 2>>(n, from, to);
    spread_fifths(n, to + 16 * n);
}

void q4_k(size_t n, const uint8_t* from, uint8_t* to) {
    uint8_t *scales = to + 128 * n, *minima = scales + 8 * n;
    for (size_t i = 0; i < n; i++) {
        const uint8_t* block = from + 144 * i;
        for (size_t c = 0; c < 4; c++)
            split_nibbles(block + 16 + 32 * c, to + 128 * i + 32 * c, to + 128 * i + 32 * c + 16);
        part_scales(block + 4, scales + 8 * i, minima + 4 * i);
    }
    fields<144, Field<0, 2>, Field<2, 2>>(n, from, minima + 4 * n);
}

void q5_k(size_t n, const uint8_t* from, uint8_t* to) {
    uint8_t *fifth = to + 128 * n, *scales = fifth + 32 * n, *minima = scales + 8 * n;
    for (size_t i = 0; i < n; i++) {
        const uint8_t* block = from + 176 * i;
        for (size_t c = 0; c < 4; c++)
            split_nibbles(block + 48 + 32 * c, to + 128 * i + 32 * c, to + 128 * i + 32 * c + 16);
        turn_bits(block + 16, fifth + 32 * i);
        part_scales(block + 4, scales + 8 * i, minima + 4 * i);
    }
    fields<176, Field<0, 2>, Field<2, 2>>(n, from, minima + 4 * n);
}

void q6_k(size_t n, const uint8_t* from, uint8_t* to) {
    uint8_t* pairs = to + 128 * n;
    for (size_t i = 0; i < n; i++) {
        const uint8_t* block = from + 210 * i;
        for (size_t half = 0; half < 2; half++) {
            const uint8_t* nibbles = block + 64 * half;  // weights 0 to 63 of the half are the low ones
            uint8_t* out = to + 128 * i + 64 * half;
            split_nibbles(nibbles, out, out + 32), split_nibbles(nibbles + 32, out + 16, out + 48);
            turn_pairs(block + 128 + 32 * half, pairs + 64 * i + 32 * half);
        }
    }
    fields<210, Field<192, 16>, Field<208, 2>>(n, from, pairs + 64 * n);
}

void q3_k(size_t n, const uint8_t* from, uint8_t* to) {
    uint8_t *third = to + 64 * n, *scales = third + 32 * n, *scales_high = scales + 8 * n;
    for (size_t i = 0; i < n; i++) {
        const uint8_t* block = from + 110 * i;
        for (size_t half = 0; half < 64; half += 32) turn_pairs(block + 32 + half, to + 64 * i + half);
        turn_bits(block, third + 32 * i);
        part_sixteen_scales(block + 96, scales + 8 * i, scales_high + 4 * i);
    }
    fields<110, Field<108, 2>>(n, from, scales_high + 4 * n);
}

void q2_k(size_t n, const uint8_t* from, uint8_t* to) {
    for (size_t i = 0; i < n; i++)
        for (size_t half = 0; half < 64; half += 32)
            turn_pairs(from + 84 * i + 16 + half, to + 64 * i + half);
    fields<84, Field<0, 16>, Field<80, 2>, Field<82, 2>>(n, from, to + 64 * n);
}

void tq2_0(size_t n, const uint8_t* from, uint8_t* to) {
    for (size_t i = 0; i < n; i++)
        for (size_t half = 0; half < 64; half += 32) turn_pairs(from + 66 * i + half, to + 64 * i + half);
    fields<66, Field<64, 2>>(n, from, to + 64 * n);
}

// ---- rows in groups

#ifdef THERMOCLINE_X86
template <size_t UNIT>
using Unit = std::integral_constant<size_t, UNIT>;

const __m128i* vector_at(const uint8_t* p) { return reinterpret_cast<const __m128i*>(p); }
__m128i* vector_at(uint8_t* p) { return reinterpret_cast<__m128i*>(p); }

// Squares of units are turned: 4 by 4 of 4 bytes, else 8 by 8. Each comes from as many rows that are
// neighbours in their group, from byte `from` of each. Unit i of all of them goes to to + i * stride.

void turn(Unit<4>, const LaneOfGroup* rows, size_t from, uint8_t* to, size_t stride) {
    __m128i x[4], y[4];
    for (int r = 0; r < 4; r++) x[r] = _mm_loadu_si128(vector_at(rows[r].row + from));
    for (int i = 0; i < 2; i++) {
        y[i] = _mm_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
        y[i + 2] = _mm_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
    }
    for (size_t i = 0; i < 4; i += 2, to += 2 * stride) {
        _mm_storeu_si128(vector_at(to), _mm_unpacklo_epi64(y[i], y[i + 1]));
        _mm_storeu_si128(vector_at(to + stride), _mm_unpackhi_epi64(y[i], y[i + 1]));
    }
}

void turn(Unit<2>, const LaneOfGroup* rows, size_t from, uint8_t* to, size_t stride) {
    __m128i x[8], y[8];
    for (int r = 0; r < 8; r++) x[r] = _mm_loadu_si128(vector_at(rows[r].row + from));
    for (int i = 0; i < 4; i++) {  // of two rows: four units, and the other four
        y[i] = _mm_unpacklo_epi16(x[2 * i], x[2 * i + 1]);
        y[i + 4] = _mm_unpackhi_epi16(x[2 * i], x[2 * i + 1]);
    }
    for (int i = 0; i < 8; i += 4)  // of four rows: two units
        for (int r = 0; r < 2; r++) {
            x[i + r] = _mm_unpacklo_epi32(y[i + 2 * r], y[i + 2 * r + 1]);
            x[i + r + 2] = _mm_unpackhi_epi32(y[i + 2 * r], y[i + 2 * r + 1]);
        }
    for (size_t i = 0; i < 8; i += 2, to += 2 * stride) {
        _mm_storeu_si128(vector_at(to), _mm_unpacklo_epi64(x[i], x[i + 1]));
        _mm_storeu_si128(vector_at(to + stride), _mm_unpackhi_epi64(x[i], x[i + 1]));
    }
}

void turn(Unit<1>, const LaneOfGroup* rows, size_t from, uint8_t* to, size_t stride) {
    __m128i x[4], y[4];
    for (int i = 0; i < 4; i++)
        x[i] = _mm_unpacklo_epi8(_mm_loadl_epi64(vector_at(rows[2 * i].row + from)),
                                 _mm_loadl_epi64(vector_at(rows[2 * i + 1].row + from)));
    for (int i = 0; i < 2; i++) {  // of four rows: four units, and the other four
        y[i] = _mm_unpacklo_epi16(x[2 * i], x[2 * i + 1]);
        y[i + 2] = _mm_unpackhi_epi16(x[2 * i], x[2 * i + 1]);
    }
    for (int i = 0; i < 4; i += 2) {  // of all: two units
        x[i] = _mm_unpacklo_epi32(y[i], y[i + 1]);
        x[i + 1] = _mm_unpackhi_epi32(y[i], y[i + 1]);
    }
    for (size_t i = 0; i < 4; i++, to += 2 * stride) {
        _mm_storel_epi64(vector_at(to), x[i]);
        _mm_storel_epi64(vector_at(to + stride), _mm_unpackhi_epi64(x[i], x[i]));
    }
}
#endif

// A line that will be written, into the caches.
void ask_for(uint8_t* p) {
#ifdef __GNUC__
    __builtin_prefetch(p, 1);
#else
    (void)p;
#endif
}

bool are_neighbours(const LaneOfGroup* rows, size_t count) {
    for (size_t r = 1; r < count; r++)
        if (rows[r].lane != rows[0].lane + r) return false;
    return true;
}

// n units of each of `count` rows, from byte `from` of a row on, to the lanes of a group, or back.
template <size_t UNIT>
void to_group(size_t n, size_t from, const LaneOfGroup* rows, size_t count, uint8_t* to, size_t group,
              bool in_turn) {
    size_t i = 0;
#ifdef THERMOCLINE_X86
    constexpr size_t kSide = UNIT == 4 ? 4 : 8;
    if (in_turn && count % kSide == 0)
        for (; i + kSide <= n; i += kSide)
            for (size_t r = 0; r < count; r += kSide)
                turn(Unit<UNIT>(), rows + r, from + i * UNIT, to + (i * group + rows[r].lane) * UNIT,
                     group * UNIT);
#else
    (void)in_turn;
#endif
    for (; i < n; i++)
        for (size_t r = 0; r < count; r++)
            memcpy(to + (i * group + rows[r].lane) * UNIT, rows[r].row + from + i * UNIT, UNIT);
}
template <size_t UNIT>
void from_group(size_t n, const uint8_t* from, size_t group, uint8_t* to) {
    for (size_t i = 0; i < n; i++) memcpy(to + i * UNIT, from + i * UNIT * group, UNIT);
}

// Calls f(unit, n, where n units begin in a row of `cols` columns, and in their slab of a group) for what the
// slab at column c has of its first row. Returns the slab's bytes.
template <class Fn>
size_t each_run(Format format, size_t cols, size_t c, size_t group, Fn f) {
    const FormatFacts& facts = kFormats[format];
    const size_t n = kSlab * 32 < cols - c ? kSlab * 32 : cols - c;
    size_t plane[kMostPlanes], start = 0, at = 0;
    int numbers = 0;  // planes of them, which come first in a row
    for (int i = 0; i < kMostPlanes; start += cols * facts.planes[i++] / 256) {
        plane[i] = start + c * facts.planes[i] / 256;
        numbers += facts.units[i] == 4;
    }
    auto run = [&](int i, size_t from, size_t bytes) {
        f(facts.units[i], bytes / facts.units[i], from, at);
        at += bytes * group;
    };
    for (int i = numbers; i < kMostPlanes && facts.planes[i]; i++)
        run(i, plane[i], n * facts.planes[i] / 256);
    if (numbers == 1)  // they are one run
        run(0, plane[0], n * facts.planes[0] / 256);
    else
        for (size_t b = 0; b < n / 32; b++)
            for (int i = 0; i < numbers; i++) run(i, plane[i] + b * facts.planes[i] / 8, facts.planes[i] / 8);
    return at;
}

constexpr Arrangement kArrangements[] = {
    {F32, 1, 4, 0, false, nullptr},
    {F16, 1, 2, 0, false, nullptr},
    {BF16, 1, 2, 0, false, nullptr},
    {Q8_0, 32, 34, 1, false, fields<34, Field<2, 32>, Field<0, 2>>},
    {Q4_0, 32, 18, 1, false, fields<18, Field<2, 16>, Field<0, 2>>},
    {Q4_1, 32, 20, 2, false, fields<20, Field<4, 16>, Field<0, 2>, Field<2, 2>>},
    {Q5_0, 32, 22, 1, false, q5_0},
    {Q5_1, 32, 24, 2, false, q5_1},
    {Q4_K, 256, 144, 2, false, q4_k},
    {Q5_K, 256, 176, 2, false, q5_k},
    {Q6_K, 256, 210, 1, false, q6_k},
    {Q3_K, 256, 110, 1, false, q3_k},
    {Q2_K, 256, 84, 2, false, q2_k},
    {IQ4_NL, 32, 18, 1, false, fields<18, Field<2, 16>, Field<0, 2>>},
    {IQ4_XS, 256, 136, 1, false, fields<136, Field<8, 128>, Field<4, 4>, Field<2, 2>, Field<0, 2>>},
    {MXFP4, 32, 17, 0, true, fields<17, Field<1, 16>, Field<0, 1>>},
    {TQ2_0, 256, 66, 1, false, tq2_0},
};

}  // namespace

const Arrangement* arrangement(const char* format) {
    for (const Arrangement& a : kArrangements)
        if (!strcmp(kFormats[a.format].name, format)) return &a;
    return nullptr;
}

bool scales_are_finite(const Arrangement& a, size_t blocks, const uint8_t* row) {
    const uint8_t* end = row + blocks * a.block_bytes;
    if (a.exponents) return !memchr(end - blocks, 0xff, blocks);
    uint16_t bad = 0;
    for (const uint8_t* p = end - 2 * a.halves * blocks; p != end; p += 2)
        bad |= uint16_t((load<uint16_t>(p) & 0x7c00) == 0x7c00);
    return !bad;
}

void interleave_rows(Format format, size_t cols, size_t group, const LaneOfGroup* rows, size_t count,
                     uint8_t* to) {
    const bool in_turn = are_neighbours(rows, count);
    // The next slab but one is asked for, which is in no cache as a rule: 3.0 GB/s were 2.5 on Zen 3.
    for (size_t c = 0, slab = 0; c < cols; c += kSlab * 32, to += slab) {
        for (size_t i = 0; i < slab; i += 64) ask_for(to + 2 * slab + i);
        slab = each_run(format, cols, c, group, [&](size_t unit, size_t n, size_t from, size_t at) {
            if (unit == 4)
                to_group<4>(n, from, rows, count, to + at, group, in_turn);
            else if (unit == 2)
                to_group<2>(n, from, rows, count, to + at, group, in_turn);
            else
                to_group<1>(n, from, rows, count, to + at, group, in_turn);
        });
    }
}

void slab_row(Format format, size_t cols, size_t group, size_t lane, const uint8_t* from, uint8_t* row) {
    each_run(format, cols, 0, group, [&](size_t unit, size_t n, size_t to, size_t at) {
        const uint8_t* const units = from + at + lane * unit;
        if (unit == 4)
            from_group<4>(n, units, group, row + to);
        else if (unit == 2)
            from_group<2>(n, units, group, row + to);
        else
            from_group<1>(n, units, group, row + to);
    });
}

}  // namespace tc
