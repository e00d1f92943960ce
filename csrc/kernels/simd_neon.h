// Vector operations for 64-bit ARM with dot products. simd_scalar.h specifies each of them. A vector is two
// registers: eight floats, as with AVX2. The 32 registers hold as many vectors as AVX2's 16.
#pragma once
#include <arm_neon.h>
#include <math.h>
#include <string.h>

#include <stdint.h>

constexpr int W = 8;
struct vf {
    float32x4_t lo, hi;
};

static inline vf vset1(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
static inline vf vzero() { return vset1(0); }
static inline vf vload(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
static inline void vstore(float* p, vf a) { vst1q_f32(p, a.lo), vst1q_f32(p + 4, a.hi); }
static inline vf vload_f16(const uint16_t* p) {
    const float16x8_t h = vreinterpretq_f16_u16(vld1q_u16(p));
    return {vcvt_f32_f16(vget_low_f16(h)), vcvt_high_f32_f16(h)};
}
static inline vf vload_bf16(const uint16_t* p) {
    const uint16x8_t h = vld1q_u16(p);
    return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(h), 16)),
            vreinterpretq_f32_u32(vshll_high_n_u16(h, 16))};
}
// Whole vectors come this way too (norms, rope), and are no copies.
template <class T, vf (*LOAD)(const T*)>
static inline vf load_some(const T* p, int n) {
    if (n >= W) return LOAD(p);
    T t[W] = {};
    memcpy(t, p, size_t(n) * sizeof(T));
    return LOAD(t);
}
static inline vf vload_n(const float* p, int n) { return load_some<float, vload>(p, n); }
static inline vf vload_f16_n(const uint16_t* p, int n) { return load_some<uint16_t, vload_f16>(p, n); }
static inline vf vload_bf16_n(const uint16_t* p, int n) { return load_some<uint16_t, vload_bf16>(p, n); }
static inline void vstore_n(float* p, vf a, int n) {
    if (n >= W) return vstore(p, a);
    float t[W];
    vstore(t, a);
    memcpy(p, t, size_t(n) * 4);
}
static inline void vstore_f16_n(uint16_t* p, vf a, int n) {
    const uint16x8_t h = vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(a.lo), a.hi));
    if (n >= W) return vst1q_u16(p, h);
    uint16_t t[W];
    vst1q_u16(t, h);
    memcpy(p, t, size_t(n) * 2);
}
static inline vf vadd(vf a, vf b) { return {vaddq_f32(a.lo, b.lo), vaddq_f32(a.hi, b.hi)}; }
static inline vf vsub(vf a, vf b) { return {vsubq_f32(a.lo, b.lo), vsubq_f32(a.hi, b.hi)}; }
static inline vf vmul(vf a, vf b) { return {vmulq_f32(a.lo, b.lo), vmulq_f32(a.hi, b.hi)}; }
static inline vf vdiv(vf a, vf b) { return {vdivq_f32(a.lo, b.lo), vdivq_f32(a.hi, b.hi)}; }
// ARM's own maximum of a NaN is a NaN whichever side it is on; here the second operand counts.
static inline float32x4_t larger(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
static inline float32x4_t lesser(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
static inline vf vmax(vf a, vf b) { return {larger(a.lo, b.lo), larger(a.hi, b.hi)}; }
static inline vf vmin(vf a, vf b) { return {lesser(a.lo, b.lo), lesser(a.hi, b.hi)}; }
static inline vf vabs(vf a) { return {vabsq_f32(a.lo), vabsq_f32(a.hi)}; }
static inline vf vfma(vf a, vf b, vf c) { return {vfmaq_f32(c.lo, a.lo, b.lo), vfmaq_f32(c.hi, a.hi, b.hi)}; }
static inline vf vround(vf a) { return {vrndnq_f32(a.lo), vrndnq_f32(a.hi)}; }
static inline float32x4_t power_of_2(float32x4_t a) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(a), vdupq_n_s32(127)), 23));
}
static inline vf vpow2(vf a) { return {power_of_2(a.lo), power_of_2(a.hi)}; }
static inline float32x4_t gate(float32x4_t x, float32x4_t threshold) {
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(x), vcleq_f32(x, threshold)));
}
static inline vf vgate(vf x, vf threshold) { return {gate(x.lo, threshold.lo), gate(x.hi, threshold.hi)}; }
static inline uint32_t lane_bits(uint32x4_t lo, uint32x4_t hi) {
    static const uint32_t kBits[8] = {1, 2, 4, 8, 16, 32, 64, 128};
    return vaddvq_u32(vorrq_u32(vandq_u32(lo, vld1q_u32(kBits)), vandq_u32(hi, vld1q_u32(kBits + 4))));
}
static inline uint32_t vpositive(vf a) { return lane_bits(vcgtzq_f32(a.lo), vcgtzq_f32(a.hi)); }
static inline uint32_t vnonzero(vf a) {
    return lane_bits(vmvnq_u32(vceqzq_f32(a.lo)), vmvnq_u32(vceqzq_f32(a.hi)));
}
static inline float vsum(vf a) {
    const float32x4_t s = vaddq_f32(a.lo, a.hi);
    return vpadds_f32(vadd_f32(vget_low_f32(s), vget_high_f32(s)));
}
static inline float vmaximum(vf a) { return vmaxvq_f32(larger(a.lo, a.hi)); }
#ifdef _MSC_VER
static TC_INLINE void prefetch(const void* p) { __prefetch(p); }
static TC_INLINE void prefetch_near(const void* p) { __prefetch(p); }
#else
static TC_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }
static TC_INLINE void prefetch_near(const void* p) { __builtin_prefetch(p, 0, 3); }
#endif

// ---- int32 vectors and quantised weights
struct vi {
    int32x4_t lo, hi;
};
static inline vi vi_load(const void* p) {
    return {vreinterpretq_s32_u8(vld1q_u8((const uint8_t*)p)),
            vreinterpretq_s32_u8(vld1q_u8((const uint8_t*)p + 16))};
}
static inline vi vi_u8(const uint8_t* p) {  // W bytes
    const uint16x8_t wide = vmovl_u8(vld1_u8(p));
    return {vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(wide))),
            vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(wide)))};
}
static inline vi vi_i8(const uint8_t* p) {
    const int16x8_t wide = vmovl_s8(vreinterpret_s8_u8(vld1_u8(p)));
    return {vmovl_s16(vget_low_s16(wide)), vmovl_s16(vget_high_s16(wide))};
}
static inline void vi_store(void* p, vi a) {
    vst1q_u8((uint8_t*)p, vreinterpretq_u8_s32(a.lo)), vst1q_u8((uint8_t*)p + 16, vreinterpretq_u8_s32(a.hi));
}
static inline vi vi_set1(int32_t x) { return {vdupq_n_s32(x), vdupq_n_s32(x)}; }
static inline vi vi_add(vi a, vi b) { return {vaddq_s32(a.lo, b.lo), vaddq_s32(a.hi, b.hi)}; }
static inline vi vi_and(vi a, vi b) { return {vandq_s32(a.lo, b.lo), vandq_s32(a.hi, b.hi)}; }
static inline vi vi_xor(vi a, vi b) { return {veorq_s32(a.lo, b.lo), veorq_s32(a.hi, b.hi)}; }
template <int N>
static inline int32x4_t shifted(int32x4_t a) {
    return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(a), N));
}
template <int N>
static inline vi vi_shr(vi a) {
    return {shifted<N>(a.lo), shifted<N>(a.hi)};
}
template <int N>
static inline vi vi_shl(vi a) {
    return {vshlq_n_s32(a.lo, N), vshlq_n_s32(a.hi, N)};
}
static inline vi vi_shr_by(vi a, int n) {
    const int32x4_t by = vdupq_n_s32(-n);
    return {vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(a.lo), by)),
            vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(a.hi), by))};
}
static inline vi vi_or(vi a, vi b) { return {vorrq_s32(a.lo, b.lo), vorrq_s32(a.hi, b.hi)}; }
static inline vi vi_sub(vi a, vi b) { return {vsubq_s32(a.lo, b.lo), vsubq_s32(a.hi, b.hi)}; }
static inline vf vi_f32(vi a) { return {vcvtq_f32_s32(a.lo), vcvtq_f32_s32(a.hi)}; }
static inline vi vf_bits(vf a) { return {vreinterpretq_s32_f32(a.lo), vreinterpretq_s32_f32(a.hi)}; }

constexpr int kOffsetQ8 = 0;  // sdot multiplies signed with signed
static inline int32x4_t dot_4(int32x4_t acc, int32x4_t a, int32x4_t b) {
    return vdotq_s32(acc, vreinterpretq_s8_s32(a), vreinterpretq_s8_s32(b));
}
template <int BITS>
struct Dot {
    static constexpr int run = 8;
    static constexpr bool wide = true;
    static vi step(vi acc, vi w, vi x) { return {dot_4(acc.lo, w.lo, x.lo), dot_4(acc.hi, w.hi, x.hi)}; }
    static vi widen(vi acc) { return acc; }
};

// 32 floats -> int8, their scale and their sum. An infinity or NaN times 0 is a NaN, and that is 0 as an
// integer.
static inline void x_quantize(const float* x, int8_t* q, float* d, int32_t* sum) {
    float32x4_t m = vdupq_n_f32(0), finite = m;
    for (int i = 0; i < 32; i += 4) {
        const float32x4_t v = vld1q_f32(x + i);
        m = vmaxq_f32(m, vabsq_f32(v)), finite = vaddq_f32(finite, vsubq_f32(v, v));
    }
    const float nan = vaddvq_f32(finite), top = nan == 0 ? vmaxvq_f32(m) : 0,
                inverse = top > 1e-36f ? 127.0f / top : 0;
    *d = top / 127.0f + nan;
    *sum = 0;
    for (int i = 0; i < 32; i += 8) {
        const vf scaled = vmul(vload(x + i), vset1(inverse));
        const int32x4_t lo = vcvtnq_s32_f32(scaled.lo), hi = vcvtnq_s32_f32(scaled.hi);
        vst1_s8(q + i, vmovn_s16(vcombine_s16(vmovn_s32(lo), vmovn_s32(hi))));
        *sum += vaddvq_s32(vaddq_s32(lo, hi));
    }
}

constexpr int kGroup = 1;                           // blocks whose first halves fill one vector
constexpr int kRowTokens = 4, kFloatRowTokens = 2;  // of a row as it is stored
// The 16 sums of products of 16 blocks (fewer: the rest is zero, because x is), for tokens `stride` bytes
// apart. BLOCK: the four sums of one.
template <int32x4_t (*BLOCK)(const uint8_t*, const int8_t*), int QUANT, int NT>
static inline void block_sums(const uint8_t* w, const int8_t* x, size_t stride, int blocks, vi (*out)[2]) {
    int32x4_t s[NT][4];
    for (int g = 0; g < 4; g++) {
        int32x4_t t[NT][4];
        for (int i = 0; i < 4; i++) {
            const int b = 4 * g + i;  // a block's weights are unpacked once: BLOCK is inlined
            for (int n = 0; n < NT; n++)
                t[n][i] = b < blocks ? BLOCK(w + QUANT * b, x + size_t(n) * stride + 32 * b) : vdupq_n_s32(0);
        }
        for (int n = 0; n < NT; n++)
            s[n][g] = vpaddq_s32(vpaddq_s32(t[n][0], t[n][1]), vpaddq_s32(t[n][2], t[n][3]));
    }
    for (int n = 0; n < NT; n++) out[n][0] = {s[n][0], s[n][1]}, out[n][1] = {s[n][2], s[n][3]};
}
static inline int32x4_t q8_block(const uint8_t* w, const int8_t* x) {
    const int32x4_t first = vdotq_s32(vdupq_n_s32(0), vreinterpretq_s8_u8(vld1q_u8(w)), vld1q_s8(x));
    return vdotq_s32(first, vreinterpretq_s8_u8(vld1q_u8(w + 16)), vld1q_s8(x + 16));
}
template <int NT>
static inline void q8_sums(const uint8_t* w, const int8_t* x, size_t stride, int blocks, vi (*out)[2]) {
    block_sums<q8_block, 32, NT>(w, x, stride, blocks, out);
}
// ---- weights of a few bits, by blocks of 32: the first 16 of each block in `lo`, the others in `hi`
//
// vb: 16 bytes, the halves of one block. vq: those of kGroup blocks, one after the other.
using vb = uint8x16_t;
using vq = vb;
static inline vb vb_load(const void* p) { return vld1q_u8((const uint8_t*)p); }
static inline vb vb_load_n(const void* p, size_t n) {
    uint8_t t[16] = {0};
    memcpy(t, p, n);
    return vb_load(t);
}
static inline void vb_store(void* p, vb a) { vst1q_u8((uint8_t*)p, a); }
static inline vb vb_or(vb a, vb b) { return vorrq_u8(a, b); }
static inline vb vb_sub(vb a, vb b) { return vsubq_u8(a, b); }
static inline vb vb_set1(uint8_t x) { return vdupq_n_u8(x); }
template <int N>  // bits from N on, of those that the mask has
static inline vb vb_bits(vb a, uint8_t mask) {
    if constexpr (N > 0) a = vshrq_n_u8(a, N);
    return vandq_u8(a, vdupq_n_u8(mask));
}
template <int N>
static inline vb vb_up(vb a) {  // of bytes that are below 2^(8 - N)
    return vshlq_n_u8(a, N);
}
// The first 8 bytes, 4 words, 2 dwords of each in turn; `high`: the last ones.
static inline vb vb_zip8(vb a, vb b) { return vzip1q_u8(a, b); }
static inline vb vb_zip8_high(vb a, vb b) { return vzip2q_u8(a, b); }
static inline vb vb_zip16(vb a, vb b) {
    return vreinterpretq_u8_u16(vzip1q_u16(vreinterpretq_u16_u8(a), vreinterpretq_u16_u8(b)));
}
static inline vb vb_zip16_high(vb a, vb b) {
    return vreinterpretq_u8_u16(vzip2q_u16(vreinterpretq_u16_u8(a), vreinterpretq_u16_u8(b)));
}
static inline vb vb_zip32(vb a, vb b) {
    return vreinterpretq_u8_u32(vzip1q_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b)));
}

static TC_INLINE void nibbles(const uint8_t* p, vb* lo, vb* hi) {
    const vb raw = vld1q_u8(p);
    *lo = vandq_u8(raw, vdupq_n_u8(15)), *hi = vshrq_n_u8(raw, 4);
}
// Single bits, as bit 4.
static TC_INLINE void fifths(const uint8_t* p, vb* lo, vb* hi) {
    static const int32_t kUp[4] = {4, 3, 2, 1}, kDown[4] = {0, -1, -2, -3};
    uint32_t bits;
    memcpy(&bits, p, 4);
    const uint32x4_t raw = vdupq_n_u32(bits);
    const vb at = vdupq_n_u8(16);
    *lo = vandq_u8(vreinterpretq_u8_u32(vshlq_u32(raw, vld1q_s32(kUp))), at);
    *hi = vandq_u8(vreinterpretq_u8_u32(vshlq_u32(raw, vld1q_s32(kDown))), at);
}
// Pairs of bits, as bits AT and AT + 1.
template <int AT>
static TC_INLINE void pairs(const uint8_t* p, vb* lo, vb* hi) {
    static const int64_t kFirst[2] = {AT, AT - 2}, kSecond[2] = {AT - 4, AT - 6};
    uint64_t bits;
    memcpy(&bits, p, 8);
    const uint64x2_t raw = vdupq_n_u64(bits);
    const vb at = vdupq_n_u8(uint8_t(3 << AT));
    *lo = vandq_u8(vreinterpretq_u8_u64(vshlq_u64(raw, vld1q_s64(kFirst))), at);
    *hi = vandq_u8(vreinterpretq_u8_u64(vshlq_u64(raw, vld1q_s64(kSecond))), at);
}
static inline vb bits_or(vb a, vb b) { return vorrq_u8(a, b); }
// table[nibble] of each byte.
static inline vb looked_up(const int8_t* table, vb nibbles) {
    return vqtbl1q_u8(vld1q_u8((const uint8_t*)table), nibbles);
}
static inline vi looked_up(const int8_t* table, vi n) {
    return {vreinterpretq_s32_u8(looked_up(table, vreinterpretq_u8_s32(n.lo))),
            vreinterpretq_s32_u8(looked_up(table, vreinterpretq_u8_s32(n.hi)))};
}

// The 16 sums of products of 16 blocks of Q's numbers, as q8_sums.
static inline int32x4_t dot_16(int32x4_t acc, vb w, const int8_t* x) {
    return vdotq_s32(acc, vreinterpretq_s8_u8(w), vld1q_s8(x));
}
template <class Q, int NT>
static TC_INLINE void q_sums(const uint8_t* first, const uint8_t* second, const int8_t* x, size_t stride,
                             int blocks, vi (*out)[2]) {
    int32x4_t s[NT][4];
    for (int g = 0; g < 4; g++) {
        int32x4_t t[NT][4];
        for (int i = 0; i < 4; i++) {
            const int b = 4 * g + i;
            for (int n = 0; n < NT; n++) t[n][i] = vdupq_n_s32(0);
            if (b >= blocks) continue;
            vb lo, hi;
            Q::load(first + Q::first * b, second + Q::second * b, &lo, &hi);
            for (int n = 0; n < NT; n++) {
                const int8_t* q = x + size_t(n) * stride + 32 * b;
                t[n][i] = dot_16(dot_16(t[n][i], lo, q), hi, q + 16);
            }
        }
        for (int n = 0; n < NT; n++)
            s[n][g] = vpaddq_s32(vpaddq_s32(t[n][0], t[n][1]), vpaddq_s32(t[n][2], t[n][3]));
    }
    for (int n = 0; n < NT; n++) out[n][0] = {s[n][0], s[n][1]}, out[n][1] = {s[n][2], s[n][3]};
}
// The same with a scale for each half of a block: 32 int8, of 8 blocks in each of `scales`.
template <class Q, int NT>
static TC_INLINE void group_sums(const uint8_t* first, const uint8_t* second, const vb* scales,
                                 const int8_t* x, size_t stride, int blocks, vi (*out)[2]) {
    int8_t scale[32];
    vst1q_s8(scale, vreinterpretq_s8_u8(scales[0])), vst1q_s8(scale + 16, vreinterpretq_s8_u8(scales[1]));
    int32x4_t s[NT][4];
    for (int g = 0; g < 4; g++) {
        int32x4_t t[NT][4];
        for (int i = 0; i < 4; i++) {
            const int b = 4 * g + i;
            for (int n = 0; n < NT; n++) t[n][i] = vdupq_n_s32(0);
            if (b >= blocks) continue;
            vb lo, hi;
            Q::load(first + Q::first * b, second + Q::second * b, &lo, &hi);
            for (int n = 0; n < NT; n++) {
                const int8_t* q = x + size_t(n) * stride + 32 * b;
                const int32x4_t zero = vdupq_n_s32(0);
                t[n][i] = vmlaq_n_s32(vmulq_n_s32(dot_16(zero, lo, q), scale[2 * b]),
                                      dot_16(zero, hi, q + 16), scale[2 * b + 1]);
            }
        }
        for (int n = 0; n < NT; n++)
            s[n][g] = vpaddq_s32(vpaddq_s32(t[n][0], t[n][1]), vpaddq_s32(t[n][2], t[n][3]));
    }
    for (int n = 0; n < NT; n++) out[n][0] = {s[n][0], s[n][1]}, out[n][1] = {s[n][2], s[n][3]};
}
// Of each block: scale * sum of the first half of x, plus the same of the second; `sums` are pairs of i16.
static TC_INLINE void pair_sums(const vb* scales, const int32_t* sums, vi* out) {
    const int16_t* of = (const int16_t*)sums;
    for (int h = 0; h < 2; h++, of += 16) {
        const int8x16_t s = vreinterpretq_s8_u8(scales[h]);
        const int16x8_t lo = vmovl_s8(vget_low_s8(s)), hi = vmovl_high_s8(s);
        const int16x8_t a = vld1q_s16(of), b = vld1q_s16(of + 8);
        out[h].lo = vpaddq_s32(vmull_s16(vget_low_s16(lo), vget_low_s16(a)), vmull_high_s16(lo, a));
        out[h].hi = vpaddq_s32(vmull_s16(vget_low_s16(hi), vget_low_s16(b)), vmull_high_s16(hi, b));
    }
}
// f16 scales of superblocks, each for 8 of up to 16 blocks.
static TC_INLINE void super_scales(const uint16_t* d, int blocks, vf* out) {
    auto one = [](uint16_t h) {
        return vset1(vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(h))), 0));
    };
    out[0] = one(d[0]);
    out[1] = blocks > 8 ? one(d[1]) : vzero();
}
static inline vf vload_e8m0(const uint8_t* p) {  // E8M0, halved: 2^(e - 128)
    float r[8];
    for (int i = 0; i < 8; i++) {
        const uint32_t bits = p[i] < 2 ? 0x00200000u << p[i] : uint32_t(p[i] - 1) << 23;
        memcpy(&r[i], &bits, 4);
    }
    return vload(r);
}

// 8 rows of 8 dwords -> 8 columns: quarters of 4 by 4.
static inline void transpose_4(int32x4_t* a) {
    const int64x2_t p = vreinterpretq_s64_s32(vtrn1q_s32(a[0], a[1])),
                    q = vreinterpretq_s64_s32(vtrn2q_s32(a[0], a[1]));
    const int64x2_t r = vreinterpretq_s64_s32(vtrn1q_s32(a[2], a[3])),
                    s = vreinterpretq_s64_s32(vtrn2q_s32(a[2], a[3]));
    a[0] = vreinterpretq_s32_s64(vtrn1q_s64(p, r)), a[1] = vreinterpretq_s32_s64(vtrn1q_s64(q, s));
    a[2] = vreinterpretq_s32_s64(vtrn2q_s64(p, r)), a[3] = vreinterpretq_s32_s64(vtrn2q_s64(q, s));
}
static inline void transpose(vi* t) {
    int32x4_t quarter[2][2][4];  // of rows, of columns
    for (int r = 0; r < 2; r++) {
        for (int i = 0; i < 4; i++) quarter[r][0][i] = t[4 * r + i].lo, quarter[r][1][i] = t[4 * r + i].hi;
        transpose_4(quarter[r][0]), transpose_4(quarter[r][1]);
    }
    for (int i = 0; i < 8; i++) t[i] = {quarter[0][i / 4][i % 4], quarter[1][i / 4][i % 4]};
}

// Words of a's dwords, then of b's: the low ones, the high ones.
static inline void split_words(vi a, vi b, vi* low, vi* high) {
    const int16x8_t a0 = vreinterpretq_s16_s32(a.lo), a1 = vreinterpretq_s16_s32(a.hi);
    const int16x8_t b0 = vreinterpretq_s16_s32(b.lo), b1 = vreinterpretq_s16_s32(b.hi);
    *low = {vreinterpretq_s32_s16(vuzp1q_s16(a0, a1)), vreinterpretq_s32_s16(vuzp1q_s16(b0, b1))};
    *high = {vreinterpretq_s32_s16(vuzp2q_s16(a0, a1)), vreinterpretq_s32_s16(vuzp2q_s16(b0, b1))};
}

// 32 weights of one block as floats, without the scale.
static inline void bytes_f32(int8x16_t b, vf* out) {
    const int16x8_t lo = vmovl_s8(vget_low_s8(b)), hi = vmovl_high_s8(b);
    out[0] = vi_f32({vmovl_s16(vget_low_s16(lo)), vmovl_high_s16(lo)});
    out[1] = vi_f32({vmovl_s16(vget_low_s16(hi)), vmovl_high_s16(hi)});
}
static inline void vb_f32(vb b, vf* out) { bytes_f32(vreinterpretq_s8_u8(b), out); }  // 16 int8
static inline void q8_unpack(const uint8_t* q, vf* out) {
    bytes_f32(vreinterpretq_s8_u8(vld1q_u8(q)), out);
    bytes_f32(vreinterpretq_s8_u8(vld1q_u8(q + 16)), out + 2);
}
template <int ADDED>
static inline void q4_unpack(const uint8_t* q, vf* out) {
    const uint8x16_t raw = vld1q_u8(q);
    const int8x16_t added = vdupq_n_s8(ADDED);
    bytes_f32(vsubq_s8(vreinterpretq_s8_u8(vandq_u8(raw, vdupq_n_u8(15))), added), out);
    bytes_f32(vsubq_s8(vreinterpretq_s8_u8(vshrq_n_u8(raw, 4)), added), out + 2);
}
// A matrix tile: 2 vectors of rows times 6 tokens of accumulators are 24 of 32 registers; 4 hold weights, one
// a token. The float loop needs more beside them: with 6 tokens GCC keeps 12 registers in memory, with 4
// none.
static inline size_t bits_that_differ(const uint8_t* a, const uint8_t* b, size_t n) {
    size_t i = 0, count = 0;
    for (; i + 16 <= n; i += 16) count += vaddlvq_u8(vcntq_u8(veorq_u8(vld1q_u8(a + i), vld1q_u8(b + i))));
    for (; i < n; i++)
        for (uint32_t x = uint32_t(a[i] ^ b[i]); x; x &= x - 1) count++;
    return count;
}
constexpr bool kMatrixUnit = false;
constexpr bool kInterleaves = false;  // nobody has measured it
constexpr int kTileTokens = 6, kFloatTileTokens = 4;

// ---- attention

constexpr int kRegisters = 16;
