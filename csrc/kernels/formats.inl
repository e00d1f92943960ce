// The weight formats as the kernels read them: a struct `FormatNAME` for each row of formats.h. Included by
// kernels.inl. FormatFloat is for numbers without blocks, FormatBlocks for all others so far: of a `Block`,
// one line of which numbers, which scales and which arithmetic. Another kind of format needs all of
//   block, block_bytes, row_bytes(cols)
//   row_tokens, dot<NT>   one row times NT tokens as `quantize` left them, asking memory for the next row
//   scales                what `unpack` and the sum need of n times 32 columns: `factors` floats of each
//   unpack, unpack_n      32 weights (fewer) as floats, without their scale where that is one factor
//   (`apart`):
//                         then it is `scales`, times h
//   Gemm<F>               in gemm.inl: the activations' two arrangements, and a product through a panel

constexpr size_t kChunkFactors = 64;  // floats of 16 blocks: as many as GCC sees `scales` write

// -------------------------------------------------------------------------------- float formats

template <class T, vf (*LOAD)(const T*), vf (*LOAD_N)(const T*, int)>
struct FormatFloat {
    using Stored = T;
    static constexpr bool apart = true;
    static constexpr size_t factors = 1;
    static constexpr size_t block = 1, block_bytes = sizeof(T);
    static constexpr bool packs_short_rows = false;
    static size_t row_bytes(size_t n) { return sizeof(T) * n; }
    static vf load(const uint8_t* row, size_t c) { return LOAD((const T*)row + c); }
    static vf load_some(const uint8_t* row, size_t c, int n) {
        return n >= W ? load(row, c) : LOAD_N((const T*)row + c, n);
    }
    static constexpr int row_tokens = kFloatRowTokens;
    // Of NT tokens, `stride` bytes apart. `next`: a row to ask memory for meanwhile.
    template <int NT>
    static void dot(const uint8_t* row, const uint8_t* next, const uint8_t* input, size_t stride, size_t cols,
                    float* out) {
        const T* w = (const T*)row;
        auto x = [&](int n, size_t k) { return (const float*)(input + size_t(n) * stride) + k; };
        for (int n = 0; n < NT; n++) out[n] = 0;
        prefetch(next);
        for (size_t k0 = 0; k0 < cols; k0 += kFloatChunk) {
            const size_t end = smaller(cols, k0 + kFloatChunk);
            vf acc[NT][kLanes / W];  // several sums hide the latency of the fused multiply-add
            for (int n = 0; n < NT; n++)
                for (int v = 0; v < kLanes / W; v++) acc[n][v] = vzero();
            size_t k = k0;
            for (; k + kLanes <= end; k += kLanes) {
                prefetch_on(next + sizeof(T) * k, sizeof(T) * kLanes);
                for (int v = 0; v < kLanes / W; v++) {
                    const vf a = LOAD(w + k + v * W);
                    for (int n = 0; n < NT; n++) acc[n][v] = vfma(a, vload(x(n, k + v * W)), acc[n][v]);
                }
            }
            for (int v = 0; v < kLanes / W; v++, k += W) {
                if (k >= end) continue;
                const vf a = load_some(row, k, int(end - k));
                for (int n = 0; n < NT; n++) acc[n][v] = vfma(a, x_some(x(n, k), int(end - k)), acc[n][v]);
            }
            for (int n = 0; n < NT; n++) out[n] += vsum(halves<kLanes / W>(acc[n]));
        }
    }
    static void unpack(const uint8_t* row, size_t, size_t c, const float*, size_t, size_t, vf* out) {
        for (int k = 0; k < 32 / W; k++) out[k] = LOAD((const T*)row + c + k * W);
    }
    static vf unpack_n(const uint8_t* row, size_t c, int n) { return LOAD_N((const T*)row + c, n); }
    static TC_INLINE void ask(const uint8_t* row, size_t, size_t c, size_t width) {
        prefetch_lines(row + sizeof(T) * c, sizeof(T) * width);
    }
    static void scales(const uint8_t*, size_t, size_t, size_t n, float h, float* out) {
        for (size_t b = 0; b < n; b++) out[b] = h;
    }
};
using FormatF32 = FormatFloat<float, vload, vload_n>;
using FormatF16 = FormatFloat<uint16_t, vload_f16, vload_f16_n>;
using FormatBF16 = FormatFloat<uint16_t, vload_bf16, vload_bf16_n>;

// ---------------------------------------------------------------------------------------------- blocks
//
// A row of a format of blocks is planar: one plane of all its blocks, then the next (the bits are in
// thermocline/model/block_layout.py). To the kernels a block is 32 weights, whatever it is in the file: a
// format of blocks of 256 has 8, which share an f16. A weight is one of
//   OFFSET          d * (q - added)                  d: f32 of each block
//   AFFINE          d * q - m                        m: f32 of each block
//   GROUPS          d * s * (q - added)              s: an int8 of each half of a block
//   GROUPS_AFFINE   d * s * q - m * t                s, t: int8 of each half
// q times x is added up as an integer, in GROUPS with s too: at most 16 * 2 * 32 * 127 * 128 < 2^24, so that
// its float is exact.
enum Kind { OFFSET, AFFINE, GROUPS, GROUPS_AFFINE };

// One token's activations for the row kernels: chunks of 16 blocks. Blocks past the end are zero, scale and
// all.
struct XChunk {
    int8_t q[512];  // in the order of `place`
    float d[16];
    int32_t extra[16];  // OFFSET: - added * (sum of q). AFFINE: - d * (sum of q), a float. GROUPS: both
                        // halves' sums of q, an i16 each
};

// Bytes between two dwords of a block in a panel: a dword of each of 2 * W rows (gemm.inl).
constexpr int kPanelStep = 2 * 4 * W;

struct Planes {
    const uint8_t* at[kMostPlanes];
    const uint16_t* f16(int plane) const { return (const uint16_t*)at[plane]; }
};
// The scales of a chunk, as far as its kind has them. Zero past the end.
struct Scales {
    vf d[16 / W], m[16 / W];
    vb s[2], t[2];  // of 8 blocks each
};

// ---- numbers of 32 weights, from one plane or two, as bytes from 0 to `top` (as Dot<8> takes them: int8 and
// kOffsetQ8, bytes that wrap). `load`: of one block (vb) or of kGroup (vq), its first 16 and its last 16. It
// may read kGroup blocks where one is left: what follows is another plane, another row, or the arena's
// padding. `spread`: dwords K and K + 4 of a block of W rows, from the block's dwords in both planes.

static TC_INLINE vi repeated(int byte) { return vi_set1(int32_t(0x01010101u * unsigned(byte))); }
template <int N>
static TC_INLINE vi vi_times(vi a) {  // by a power of two
    constexpr int shift = N == 16 ? 4 : 5;
    static_assert(1 << shift == N, "no power of two known here");
    return vi_shl<shift>(a);
}
template <int N>
static TC_INLINE vi vi_moved(vi a) {  // up by N bits, or down
    if constexpr (N >= 0)
        return vi_shl<N>(a);
    else
        return vi_shr<-N>(a);
}
template <int K>
static TC_INLINE void spread_nibbles(const vi* dwords, vi* lo, vi* hi) {
    *lo = vi_and(dwords[K], repeated(15)), *hi = vi_and(vi_shr<4>(dwords[K]), repeated(15));
}
template <int K>
static TC_INLINE void spread_fifths(const vi* dwords, vi* lo, vi* hi) {
    *lo = vi_and(vi_shl<4 - K>(dwords[0]), repeated(16)), *hi = vi_and(vi_moved<-K>(dwords[0]), repeated(16));
}
template <int K, int AT>
static TC_INLINE void spread_pairs(const vi* dwords, vi* lo, vi* hi) {
    constexpr int up = AT - K / 2 * 2;
    *lo = vi_and(vi_moved<up>(dwords[K % 2]), repeated(3 << AT));
    *hi = vi_and(vi_moved<up - 4>(dwords[K % 2]), repeated(3 << AT));
}

// top: the largest number. first, second: bytes of a block in the first two planes.
struct Numbers4 {
    static constexpr int bits = 4, top = 15, first = 16, second = 0;
    template <class T>
    static TC_INLINE void load(const uint8_t* a, const uint8_t*, T* lo, T* hi) {
        nibbles(a, lo, hi);
    }
    template <int K>
    static TC_INLINE void spread(const vi* a, const vi*, vi* lo, vi* hi) {
        spread_nibbles<K>(a, lo, hi);
    }
};
struct Numbers5 {
    static constexpr int bits = 5, top = 31, first = 16, second = 4;
    template <class T>
    static TC_INLINE void load(const uint8_t* a, const uint8_t* b, T* lo, T* hi) {
        T l, h;
        nibbles(a, &l, &h), fifths(b, lo, hi);
        *lo = bits_or(l, *lo), *hi = bits_or(h, *hi);
    }
    template <int K>
    static TC_INLINE void spread(const vi* a, const vi* b, vi* lo, vi* hi) {
        vi l, h;
        spread_nibbles<K>(a, &l, &h), spread_fifths<K>(b, lo, hi);
        *lo = vi_or(l, *lo), *hi = vi_or(h, *hi);
    }
};
struct Numbers6 {
    static constexpr int bits = 6, top = 63, first = 16, second = 8;
    template <class T>
    static TC_INLINE void load(const uint8_t* a, const uint8_t* b, T* lo, T* hi) {
        T l, h;
        nibbles(a, &l, &h), pairs<4>(b, lo, hi);
        *lo = bits_or(l, *lo), *hi = bits_or(h, *hi);
    }
    template <int K>
    static TC_INLINE void spread(const vi* a, const vi* b, vi* lo, vi* hi) {
        vi l, h;
        spread_nibbles<K>(a, &l, &h), spread_pairs<K, 4>(b, lo, hi);
        *lo = vi_or(l, *lo), *hi = vi_or(h, *hi);
    }
};
struct Numbers2 {
    static constexpr int bits = 4, top = 3, first = 8, second = 0;
    template <class T>
    static TC_INLINE void load(const uint8_t* a, const uint8_t*, T* lo, T* hi) {
        pairs<0>(a, lo, hi);
    }
    template <int K>
    static TC_INLINE void spread(const vi* a, const vi*, vi* lo, vi* hi) {
        spread_pairs<K, 0>(a, lo, hi);
    }
};
struct Numbers3 {  // times 4: where single bits and pairs are without another shift
    static constexpr int bits = 5, top = 28, first = 8, second = 4;
    template <class T>
    static TC_INLINE void load(const uint8_t* a, const uint8_t* b, T* lo, T* hi) {
        T l, h;
        pairs<2>(a, &l, &h), fifths(b, lo, hi);
        *lo = bits_or(l, *lo), *hi = bits_or(h, *hi);
    }
    template <int K>
    static TC_INLINE void spread(const vi* a, const vi* b, vi* lo, vi* hi) {
        vi l, h;
        spread_pairs<K, 2>(a, &l, &h), spread_fifths<K>(b, lo, hi);
        *lo = vi_or(l, *lo), *hi = vi_or(h, *hi);
    }
};
template <class TABLE, int BITS, int TOP>
struct NumbersOfTable {
    static constexpr int bits = BITS, top = TOP, first = 16, second = 0;
    template <class T>
    static TC_INLINE void load(const uint8_t* a, const uint8_t*, T* lo, T* hi) {
        nibbles(a, lo, hi);
        *lo = looked_up(TABLE::values, *lo), *hi = looked_up(TABLE::values, *hi);
    }
    template <int K>
    static TC_INLINE void spread(const vi* a, const vi*, vi* lo, vi* hi) {
        spread_nibbles<K>(a, lo, hi);
        *lo = looked_up(TABLE::values, *lo), *hi = looked_up(TABLE::values, *hi);
    }
};
struct TableIQ4 {  // for Dot<8>
#define TC_V(x) int8_t(uint8_t(x + kOffsetQ8))
    static constexpr int8_t values[16] = {TC_V(-127), TC_V(-104), TC_V(-83), TC_V(-65), TC_V(-49), TC_V(-35),
                                          TC_V(-22),  TC_V(-10),  TC_V(1),   TC_V(13),  TC_V(25),  TC_V(38),
                                          TC_V(53),   TC_V(69),   TC_V(89),  TC_V(113)};
#undef TC_V
};
struct TableE2M1 {  // doubled, and 16 more
    static constexpr int8_t values[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};
};
struct Numbers8 {  // as they are stored; the row kernel is q8_sums
    static constexpr int bits = 8, top = 255, first = 32, second = 0;
    template <int K>
    static TC_INLINE void spread(const vi* a, const vi*, vi* lo, vi* hi) {
        *lo = vi_xor(a[K], repeated(kOffsetQ8)), *hi = vi_xor(a[4 + K], repeated(kOffsetQ8));
    }
};

// ---- scales

static TC_INLINE void f16_scales(const uint16_t* d, int blocks, vf* out) {
    for (int v = 0; v < 16 / W; v++) {
        const int left = blocks - v * W;
        out[v] = left >= W ? vload_f16(d + v * W) : left > 0 ? vload_f16_n(d + v * W, left) : vzero();
    }
}
static TC_INLINE void times(const vf* a, vf* b) {
    for (int v = 0; v < 16 / W; v++) b[v] = vmul(a[v], b[v]);
}
// The first n bytes, n a multiple of 4 up to 16.
static TC_INLINE vb vb_first(const uint8_t* p, int n) {
    return n >= 16 ? vb_load(p) : vb_load_n(p, size_t(n));
}
// 2 bits of each number, four a byte: 16 numbers of 4 bytes, at bits 4 and 5; and of the next 4.
static TC_INLINE void fours(vb packed, vb* first, vb* second) {
    const vb even = vb_zip8(vb_bits<0>(packed, 3), vb_bits<2>(packed, 3)),
             odd = vb_zip8(vb_bits<4>(packed, 3), vb_bits<6>(packed, 3));
    *first = vb_up<4>(vb_zip16(even, odd)), *second = vb_up<4>(vb_zip16_high(even, odd));
}
static TC_INLINE vb nibbles_in_turn(vb packed) {
    return vb_zip8(vb_bits<0>(packed, 15), vb_bits<4>(packed, 15));
}
static TC_INLINE float one_f16(const uint16_t* p) {
    float out[W];
    vstore(out, vload_f16_n(p, 1));
    return out[0];
}

// Of interleaved rows (interleaved.inl): unit `at` of a plane, of W rows.
constexpr size_t kGroupRows = 2 * W;
static TC_INLINE vi bytes_of(const Planes& p, int plane, size_t at) {
    return vi_u8(p.at[plane] + at * kGroupRows);
}
static TC_INLINE vf halves_of(const Planes& p, int plane, size_t at) {
    return vload_f16(p.f16(plane) + at * kGroupRows);
}
static TC_INLINE vi vi_bits(vi a, size_t n, int mask) {  // from n on, of those that the mask has
    return vi_and(vi_shr_by(a, int(n)), vi_set1(mask));
}

// `load`: of a chunk. `of_rows`: of block j of a slab of W rows, as floats in the order of a panel
// (panel_floats), after `unpack`, which may put bytes elsewhere once for a slab.
struct AsTheyAre {
    static TC_INLINE void unpack(Planes*, uint8_t*) {}
};
constexpr size_t kUnpacked = 2 * kSlab * kGroupRows;  // bytes
//
// What is stored of 32 weights with an f16 scale, and perhaps an f16 minimum: planes FIRST and FIRST + 1.
template <int FIRST>
struct ScaleF16 : AsTheyAre {
    static constexpr bool apart = true;  // of the numbers of a block: one factor for all of them
    static TC_INLINE void load(const Planes& p, int blocks, Scales* out) {
        f16_scales(p.f16(FIRST), blocks, out->d);
    }
    static TC_INLINE void of_rows(const Planes& p, size_t j, vf* out) { out[0] = halves_of(p, FIRST, j); }
};
template <int FIRST>
struct ScaleAndMinimumF16 : AsTheyAre {
    static constexpr bool apart = false;
    static TC_INLINE void load(const Planes& p, int blocks, Scales* out) {
        f16_scales(p.f16(FIRST), blocks, out->d), f16_scales(p.f16(FIRST + 1), blocks, out->m);
        for (int v = 0; v < 16 / W; v++) out->m[v] = vsub(vzero(), out->m[v]);  // q4_1, q5_1: + minimum
    }
    static TC_INLINE void of_rows(const Planes& p, size_t j, vf* out) {
        out[0] = halves_of(p, FIRST, j), out[1] = vsub(vzero(), halves_of(p, FIRST + 1, j));
    }
};
template <int FIRST>
struct ScaleE8M0 : AsTheyAre {
    static constexpr bool apart = true;
    static TC_INLINE void load(const Planes& p, int blocks, Scales* out) {
        alignas(16) uint8_t t[16] = {0};
        const uint8_t* e = p.at[FIRST];
        if (blocks < 16) memcpy(t, e, size_t(blocks)), e = t;
        for (int v = 0; v < 16 / W; v++) out->d[v] = vload_e8m0(e + v * W);
    }
    static TC_INLINE void of_rows(const Planes& p, size_t j, vf* out) {
        out[0] = vload_e8m0(p.at[FIRST] + j * kGroupRows);
    }
};
// q4_k, q5_k: scales and minima of 6 bits, 8 + 4 bytes for 8 blocks.
template <int FIRST>
struct ScaleK {
    static constexpr bool apart = false;
    static TC_INLINE void load(const Planes& p, int blocks, Scales* out) {
        const vb a = vb_first(p.at[FIRST], blocks), b = vb_load_n(p.at[FIRST + 1], size_t(blocks / 2));
        const vb high = vb_zip32(vb_bits<0>(b, 15), vb_bits<4>(b, 15));
        vf scale[16 / W], minimum[16 / W];
        vb_f32(vb_bits<0>(a, 63), scale), vb_f32(vb_or(vb_bits<6>(a, 3), vb_up<2>(high)), minimum);
        super_scales(p.f16(FIRST + 2), blocks, out->d), super_scales(p.f16(FIRST + 3), blocks, out->m);
        times(scale, out->d), times(minimum, out->m);
    }
    static TC_INLINE void unpack(Planes* p, uint8_t* to) {
        constexpr size_t half = kSlab * kGroupRows;
        for (size_t i = 0; i < half; i += 4 * W) {
            const vi a = vi_load(p->at[FIRST] + i), high = vi_load(p->at[FIRST + 1] + i % (half / 2));
            const vi top = i < half / 2 ? vi_shl<2>(high) : vi_shr<2>(high);
            vi_store(to + i, vi_and(a, repeated(63)));
            vi_store(to + half + i, vi_or(vi_and(vi_shr<6>(a), repeated(3)), vi_and(top, repeated(60))));
        }
        p->at[FIRST] = to, p->at[FIRST + 1] = to + half;
    }
    static TC_INLINE void of_rows(const Planes& p, size_t j, vf* out) {
        out[0] = vmul(vi_f32(bytes_of(p, FIRST, j)), halves_of(p, FIRST + 2, 0));
        out[1] = vmul(vi_f32(bytes_of(p, FIRST + 1, j)), halves_of(p, FIRST + 3, 0));
    }
};
// iq4_xs: scales of 6 bits, less 32: 4 + 2 bytes for 8 blocks.
template <int FIRST>
struct ScaleXS : AsTheyAre {
    static constexpr bool apart = false;
    static TC_INLINE void load(const Planes& p, int blocks, Scales* out) {
        vb high, none;
        fours(vb_load_n(p.at[FIRST + 1], size_t(blocks / 4)), &high, &none);
        const vb low = nibbles_in_turn(vb_load_n(p.at[FIRST], size_t(blocks / 2)));
        vf scale[16 / W];
        vb_f32(vb_sub(vb_or(low, high), vb_set1(32)), scale);
        super_scales(p.f16(FIRST + 2), blocks, out->d);
        times(scale, out->d);
    }
    static TC_INLINE void of_rows(const Planes& p, size_t j, vf* out) {
        const vi low = vi_bits(bytes_of(p, FIRST, j / 2), j % 2 * 4, 15),
                 high = vi_bits(bytes_of(p, FIRST + 1, j / 4), j % 4 * 2, 3);
        const vi scale = vi_sub(vi_or(low, vi_shl<4>(high)), vi_set1(32));
        out[0] = vmul(vi_f32(scale), halves_of(p, FIRST + 2, 0));
    }
};
template <int FIRST>
struct ScaleSuper : AsTheyAre {  // tq2_0
    static constexpr bool apart = false;
    static TC_INLINE void load(const Planes& p, int blocks, Scales* out) {
        super_scales(p.f16(FIRST), blocks, out->d);
    }
    static TC_INLINE void of_rows(const Planes& p, size_t, vf* out) { out[0] = halves_of(p, FIRST, 0); }
};
template <int FIRST>
struct GroupsQ6 : AsTheyAre {
    static constexpr bool apart = false;
    static TC_INLINE void load(const Planes& p, int blocks, Scales* out) {
        out->s[0] = vb_load(p.at[FIRST]), out->s[1] = blocks > 8 ? vb_load(p.at[FIRST] + 16) : vb_set1(0);
        super_scales(p.f16(FIRST + 1), blocks, out->d);
    }
    static TC_INLINE void of_rows(const Planes& p, size_t j, vf* out) {
        out[0] = halves_of(p, FIRST + 1, 0);
        for (size_t h = 0; h < 2; h++) out[1 + h] = vi_f32(vi_i8(p.at[FIRST] + (2 * j + h) * kGroupRows));
    }
};
template <int FIRST>
struct GroupsQ3 : AsTheyAre {
    static constexpr bool apart = false;
    static TC_INLINE void load(const Planes& p, int blocks, Scales* out) {
        const vb low = vb_first(p.at[FIRST], blocks), thirty_two = vb_set1(32);
        fours(vb_load_n(p.at[FIRST + 1], size_t(blocks / 2)), &out->s[0], &out->s[1]);
        const vb even = vb_bits<0>(low, 15), odd = vb_bits<4>(low, 15);
        out->s[0] = vb_sub(vb_or(out->s[0], vb_zip8(even, odd)), thirty_two);
        out->s[1] = vb_sub(vb_or(out->s[1], vb_zip8_high(even, odd)), thirty_two);
        super_scales(p.f16(FIRST + 2), blocks, out->d);
        for (int v = 0; v < 16 / W; v++) out->d[v] = vmul(out->d[v], vset1(0.25f));  // numbers times 4
    }
    static TC_INLINE void of_rows(const Planes& p, size_t j, vf* out) {
        const vi low = bytes_of(p, FIRST, j), high = bytes_of(p, FIRST + 1, j / 2), most = vi_set1(32);
        out[0] = vmul(halves_of(p, FIRST + 2, 0), vset1(0.25f));
        for (size_t h = 0; h < 2; h++) {
            const vi top = vi_shl<4>(vi_bits(high, j % 2 * 4 + 2 * h, 3));
            out[1 + h] = vi_f32(vi_sub(vi_or(vi_bits(low, 4 * h, 15), top), most));
        }
    }
};
template <int FIRST>
struct GroupsQ2 : AsTheyAre {
    static constexpr bool apart = false;
    static TC_INLINE void load(const Planes& p, int blocks, Scales* out) {
        for (int h = 0; h < 2; h++) {
            const vb both = 8 * h < blocks ? vb_load(p.at[FIRST] + 16 * h) : vb_set1(0);
            out->s[h] = vb_bits<0>(both, 15), out->t[h] = vb_bits<4>(both, 15);
        }
        super_scales(p.f16(FIRST + 1), blocks, out->d), super_scales(p.f16(FIRST + 2), blocks, out->m);
    }
    static TC_INLINE void of_rows(const Planes& p, size_t j, vf* out) {
        out[0] = halves_of(p, FIRST + 1, 0), out[1] = halves_of(p, FIRST + 2, 0);
        for (size_t h = 0; h < 2; h++) {
            const vi both = bytes_of(p, FIRST, 2 * j + h);
            out[2 + h] = vi_f32(vi_and(both, vi_set1(15))), out[4 + h] = vi_f32(vi_shr<4>(both));
        }
    }
};

// Numbers, their scales, and what each number is too large by.
template <Format FORMAT, class NUMBERS, class SCALES, Kind KIND, int ADDED>
struct Block {
    using Numbers = NUMBERS;
    using ScalesOf = SCALES;
    static constexpr Kind kind = KIND;
    static constexpr int added = ADDED;
    static constexpr const FormatFacts& facts = kFormats[FORMAT];
};

template <class BLOCK>
struct FormatBlocks {
    using Block = BLOCK;
    using Numbers = typename BLOCK::Numbers;
    using ScalesOf = typename BLOCK::ScalesOf;
    static constexpr Kind kind = BLOCK::kind;
    static constexpr int added = BLOCK::added;
    static constexpr bool grouped = kind == GROUPS || kind == GROUPS_AFFINE,
                          natural = Numbers::bits == 8 && Numbers::first == 32;
    static constexpr const FormatFacts& facts = BLOCK::facts;
    static constexpr size_t block = facts.block, block_bytes = facts.block_bytes;
    static constexpr int row_tokens = kRowTokens;
    // Their blocks lie in an XChunk in their order, so that those of several rows fit one.
    static constexpr bool packs_short_rows = natural;
    static size_t row_bytes(size_t n) { return n / block * block_bytes; }

    // The planes of a row, from 32 weights number b on; b a multiple of 8 where blocks are of 256.
    static TC_INLINE Planes planes(const uint8_t* row, size_t cols, size_t b) {
        Planes p;
        for (int i = 0; i < kMostPlanes; i++) {
            p.at[i] = row + b * facts.planes[i] / 8;
            row += cols * facts.planes[i] / 256;
        }
        return p;
    }
    static TC_INLINE void advance(Planes* p) {  // by a chunk
        for (int i = 0; i < kMostPlanes; i++) p->at[i] += 2 * facts.planes[i];
    }

    // Where a half of block i of x lies in a chunk: in its order; or the first halves of kGroup blocks, then
    // their second halves, as the numbers lie in a vector.
    static constexpr size_t half_at(size_t i, size_t half) {
        const size_t group = i / kGroup * kGroup;
        return natural ? 32 * i + 16 * half : 32 * group + 16 * (half * kGroup + i - group);
    }
    static TC_INLINE void place(int8_t* chunk, size_t i, const int8_t* x) {
        for (size_t half = 0; half < 2; half++) memcpy(chunk + half_at(i, half), x + 16 * half, 16);
    }

    // BLOCKS: how many, which the compiler then knows; 0: `some`.
    template <int NT, int BLOCKS>
    static TC_INLINE void add_chunk(const Planes& p, const XChunk* first, size_t stride, int some,
                                    vf (*acc)[16 / W]) {
        const int blocks = BLOCKS ? BLOCKS : some;
        vi sums[NT][16 / W];
        Scales scales;
        ScalesOf::load(p, blocks, &scales);
        if constexpr (natural)
            q8_sums<NT>(p.at[0], first->q, stride, blocks, sums);
        else if constexpr (grouped)
            group_sums<Numbers, NT>(p.at[0], p.at[1], scales.s, first->q, stride, blocks, sums);
        else
            q_sums<Numbers, NT>(p.at[0], p.at[1], first->q, stride, blocks, sums);
        for (int n = 0; n < NT; n++) {
            const XChunk* x = (const XChunk*)((const uint8_t*)first + size_t(n) * stride);
            vi corrections[16 / W];
            if constexpr (kind == GROUPS) pair_sums(scales.s, x->extra, corrections);
            if constexpr (kind == GROUPS_AFFINE) pair_sums(scales.t, x->extra, corrections);
            for (int v = 0; v < 16 / W; v++) {
                vi s = sums[n][v];
                const vf d = vload(x->d + v * W);
                if constexpr (kind == OFFSET) s = vi_add(s, vi_load(x->extra + v * W));
                if constexpr (kind == GROUPS) s = vi_sub(s, vi_times<BLOCK::added>(corrections[v]));
                acc[n][v] = vfma(vi_f32(s), vmul(scales.d[v], d), acc[n][v]);
                if constexpr (kind == AFFINE)
                    acc[n][v] = vfma(scales.m[v], vload((const float*)x->extra + v * W), acc[n][v]);
                if constexpr (kind == GROUPS_AFFINE)
                    acc[n][v] = vfma(vi_f32(corrections[v]), vmul(scales.m[v], vsub(vzero(), d)), acc[n][v]);
            }
        }
    }
    template <int NT>
    static void dot(const uint8_t* row, const uint8_t* next, const uint8_t* input, size_t stride, size_t cols,
                    float* out) {
        const XChunk* x = (const XChunk*)input;
        const size_t blocks = cols / 32;
        Planes p = planes(row, cols, 0);
        vf acc[NT][16 / W];
        for (int n = 0; n < NT; n++)
            for (int v = 0; v < 16 / W; v++) acc[n][v] = vzero();
        size_t b = 0;
        prefetch(next);
        constexpr size_t chunk_bytes = 512 * block_bytes / block;
        for (; b + 16 <= blocks; b += 16, x++, next += chunk_bytes, advance(&p)) {
            prefetch_on(next, chunk_bytes);
            add_chunk<NT, 16>(p, x, stride, 16, acc);
        }
        if (b < blocks) {
            // Of formats of 256 half a chunk is left, if anything. For any number rows of 11008 are 1.4 times
            // as slow in q6_k.
            prefetch_on(next, (blocks - b) * chunk_bytes / 16);
            add_chunk<NT, block == 256 ? 8 : 0>(p, x, stride, int(blocks - b), acc);
        }
        for (int n = 0; n < NT; n++) {
            for (int v = 1; v < 16 / W; v++) acc[n][0] = vadd(acc[n][0], acc[n][v]);
            out[n] = vsum(acc[n][0]);
        }
    }

    // Of each block: h * scale; or its scale, or those of both halves (`each`), and in a second plane what is
    // subtracted then.
    static constexpr bool apart = ScalesOf::apart;
    static constexpr size_t each = grouped ? 2 : 1,
                            factors = each * (kind == AFFINE || kind == GROUPS_AFFINE ? 2 : 1);

    // 32 weights from column c on. scales: of n blocks, of which that is number i.
    static TC_INLINE void unpack(const uint8_t* row, size_t cols, size_t c, const float* scales, size_t n,
                                 size_t i, vf* out) {
        constexpr size_t whole = block / 32;
        const size_t b = c / 32, in = b % whole;  // of the blocks that share an f16
        if constexpr (natural) {
            q8_unpack(row + 32 * b, out);
        } else if constexpr (Numbers::top == 15 && Numbers::first == 16 && (added == 8 || !added)) {
            q4_unpack<added>(row + 16 * b, out);
        } else {
            const Planes p = planes(row, cols, b - in);
            vb lo, hi;
            Numbers::load(p.at[0] + size_t(Numbers::first) * in, p.at[1] + size_t(Numbers::second) * in, &lo,
                          &hi);
            const vb zero = vb_set1(uint8_t(added));
            vb_f32(vb_sub(lo, zero), out), vb_f32(vb_sub(hi, zero), out + 16 / W);
        }
        if constexpr (apart) return;
        for (size_t half = 0; half < 2; half++) {
            const float* const mine = scales + each * i + half * (each - 1);
            const vf scale = vset1(mine[0]);
            for (int v = 0; v < 16 / W; v++) {
                vf& w = out[half * (16 / W) + size_t(v)];
                w = vmul(w, scale);
                if constexpr (kind == AFFINE || kind == GROUPS_AFFINE) w = vsub(w, vset1(mine[each * n]));
            }
        }
    }
    static vf unpack_n(const uint8_t*, size_t, int) { return vzero(); }  // cols % 32 == 0: never reached
    // Asks for the columns [c, c + width) of a row; c % 32 == 0.
    static TC_INLINE void ask(const uint8_t* row, size_t cols, size_t c, size_t width) {
        const Planes p = planes(row, cols, c / 32);
        for (int i = 0; i < kMostPlanes; i++)
            if (facts.planes[i]) prefetch_lines(p.at[i], width * facts.planes[i] / 256);
    }

    // The factors of n blocks from column c on.
    static void scales(const uint8_t* row, size_t cols, size_t c, size_t n, float h, float* out) {
        if constexpr (apart) {
            Planes p = planes(row, cols, c / 32);
            for (size_t b = 0; b < n; b += 16, advance(&p)) {
                Scales scales;
                const int left = int(smaller(16, n - b));
                ScalesOf::load(p, left, &scales);
                for (int v = 0; v < 16 / W && v * W < left; v++)
                    vstore_n(out + b + v * W, vmul(scales.d[v], vset1(h)), int(smaller(W, left - v * W)));
            }
        } else {
            constexpr size_t whole = block / 32;
            const size_t lead = c / 32 % whole, all = (lead + n + whole - 1) / whole * whole;
            Planes p = planes(row, cols, c / 32 - lead);
            for (size_t b = 0; b < all; b += 16, advance(&p)) {
                alignas(64) float of[2][16 * each];
                chunk_factors(p, int(smaller(16, all - b)), of);
                const size_t first = b < lead ? lead - b : 0, end = smaller(16, lead + n - b);
                for (size_t f = 0; f < factors / each; f++) {
                    float* to = out + each * (f * n + b + first - lead);
                    if (end - first == 16)  // a size that the compiler knows is no call
                        memcpy(to, of[f], sizeof of[f]);
                    else
                        memcpy(to, of[f] + each * first, 4 * each * (end - first));
                }
            }
        }
    }
    // Of 16 blocks: their scales, and what is subtracted.
    static TC_INLINE void chunk_factors(const Planes& p, int blocks, float (*out)[16 * each]) {
        Scales scales;
        ScalesOf::load(p, blocks, &scales);
        if constexpr (grouped) {
            halves_times(scales.s, scales.d, out[0]);
            if constexpr (kind == GROUPS_AFFINE) halves_times(scales.t, scales.m, out[1]);
        } else {
            for (int v = 0; v < 16 / W; v++) vstore(out[0] + v * W, scales.d[v]);
            for (int v = 0; v < 16 / W && kind == AFFINE; v++) vstore(out[1] + v * W, scales.m[v]);
        }
    }
    // of: int8 of each half of 16 blocks; by: f32 of each block, alike for the 8 of an f16.
    static TC_INLINE void halves_times(const vb* of, const vf* by, float* out) {
        float d[16];
        for (int v = 0; v < 16 / W; v++) vstore(d + v * W, by[v]);
        for (int i = 0; i < 2; i++) {
            vf halves[16 / W];
            vb_f32(of[i], halves);
            for (int v = 0; v < 16 / W; v++) vstore(out + 16 * i + v * W, vmul(halves[v], vset1(d[8 * i])));
        }
    }
};

using BlockQ8_0 = Block<Q8_0, Numbers8, ScaleF16<1>, OFFSET, kOffsetQ8>;
using BlockQ4_0 = Block<Q4_0, Numbers4, ScaleF16<1>, OFFSET, 8>;
using BlockQ4_1 = Block<Q4_1, Numbers4, ScaleAndMinimumF16<1>, AFFINE, 0>;
using BlockQ5_0 = Block<Q5_0, Numbers5, ScaleF16<2>, OFFSET, 16>;
using BlockQ5_1 = Block<Q5_1, Numbers5, ScaleAndMinimumF16<2>, AFFINE, 0>;
using BlockQ4_K = Block<Q4_K, Numbers4, ScaleK<1>, AFFINE, 0>;
using BlockQ5_K = Block<Q5_K, Numbers5, ScaleK<2>, AFFINE, 0>;
using BlockQ6_K = Block<Q6_K, Numbers6, GroupsQ6<2>, GROUPS, 32>;
using BlockQ3_K = Block<Q3_K, Numbers3, GroupsQ3<2>, GROUPS, 16>;
using BlockQ2_K = Block<Q2_K, Numbers2, GroupsQ2<1>, GROUPS_AFFINE, 0>;
using NumbersIQ4 = NumbersOfTable<TableIQ4, 8, 255>;
using BlockIQ4_NL = Block<IQ4_NL, NumbersIQ4, ScaleF16<1>, OFFSET, kOffsetQ8>;
using BlockIQ4_XS = Block<IQ4_XS, NumbersIQ4, ScaleXS<1>, OFFSET, kOffsetQ8>;
using BlockMXFP4 = Block<MXFP4, NumbersOfTable<TableE2M1, 5, 28>, ScaleE8M0<1>, OFFSET, 16>;
using BlockTQ2_0 = Block<TQ2_0, Numbers2, ScaleSuper<1>, OFFSET, 1>;
#define TC_BLOCKS(id) using Format##id = FormatBlocks<Block##id>;
TC_BLOCKS(Q8_0)
TC_BLOCKS(Q4_0)
TC_BLOCKS(Q4_1)
TC_BLOCKS(Q5_0)
TC_BLOCKS(Q5_1)
TC_BLOCKS(Q4_K)
TC_BLOCKS(Q5_K)
TC_BLOCKS(Q6_K)
TC_BLOCKS(Q3_K)
TC_BLOCKS(Q2_K)
TC_BLOCKS(IQ4_NL)
TC_BLOCKS(IQ4_XS)
TC_BLOCKS(MXFP4)
TC_BLOCKS(TQ2_0)
#undef TC_BLOCKS

// ---------------------------------------------------------------------------------------------- signs

// Bits of weights and of activations (packed by `quantize`): only `matmul` knows them.
struct FormatSigns {
    static size_t row_bytes(size_t n) { return sign_bytes(n); }
    static constexpr int row_tokens = 1;
    static constexpr bool packs_short_rows = false;
    template <int NT>
    static void dot(const uint8_t* row, const uint8_t* next, const uint8_t* input, size_t, size_t cols,
                    float* out) {
        prefetch_span(next, sign_bytes(cols));
        *out = float(int64_t(cols) - 2 * int64_t(bits_that_differ(row, input, sign_bytes(cols))));
    }
};

// call(F()), F the struct of `format`; of SIGNS nothing.
template <class Fn>
static TC_INLINE void for_format(Format format, Fn call) {
    switch (format) {
#define TC_ROW(id, ...)     \
    case id:                \
        call(Format##id()); \
        break;
        TC_WEIGHT_FORMATS(TC_ROW)
#undef TC_ROW
        default:
            break;
    }
}
