// Vector operations in portable C++: eight floats, and one block of 32 per quantised step. This file
// specifies the operations of the other simd_*.h files, and runs on CPUs that none of them fits.
#pragma once
#include <math.h>
#include <string.h>

#include <stdint.h>

constexpr int W = 8;
struct vf {
    float v[W];
};

static inline float f16_to_f32(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
    uint32_t bits;
    if (exponent == 31)
        bits = sign | 0x7f800000 | (mantissa << 13);
    else if (exponent)
        bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
    else {  // zero or subnormal: exact in f32
        const float f = float(mantissa) * (1.0f / 16777216.0f);
        memcpy(&bits, &f, 4);
        bits |= sign;
    }
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static inline uint16_t f32_to_f16(float f) {  // round to nearest, ties to even
    uint32_t x;
    memcpy(&x, &f, 4);
    const uint32_t sign = (x >> 16) & 0x8000;
    x &= 0x7fffffff;
    if (x > 0x7f800000) return uint16_t(sign | 0x7e00);
    if (x >= 0x477ff000) return uint16_t(sign | 0x7c00);  // rounds past 65504
    if (x < 0x38800000) {  // subnormal in f16: scale so that the integer is the mantissa
        float a;
        memcpy(&a, &x, 4);
        return uint16_t(sign | uint32_t(nearbyintf(a * 16777216.0f)));
    }
    const uint32_t rounded = x + 0xfff + ((x >> 13) & 1);
    return uint16_t(sign | ((rounded - 0x38000000) >> 13));
}

#define EACH for (int i = 0; i < W; i++)
static inline vf vset1(float x) {
    vf r;
    EACH r.v[i] = x;
    return r;
}
static inline vf vzero() { return vset1(0); }
static inline vf vload(const float* p) {
    vf r;
    EACH r.v[i] = p[i];
    return r;
}
static inline vf vload_n(const float* p, int n) {
    vf r;
    EACH r.v[i] = i < n ? p[i] : 0;
    return r;
}
static inline void vstore(float* p, vf a) { EACH p[i] = a.v[i]; }
static inline void vstore_n(float* p, vf a, int n) {
    for (int i = 0; i < n; i++) p[i] = a.v[i];
}
static inline vf vload_f16(const uint16_t* p) {
    vf r;
    EACH r.v[i] = f16_to_f32(p[i]);
    return r;
}
static inline vf vload_f16_n(const uint16_t* p, int n) {
    vf r;
    EACH r.v[i] = i < n ? f16_to_f32(p[i]) : 0;
    return r;
}
static inline void vstore_f16_n(uint16_t* p, vf a, int n) {
    for (int i = 0; i < n; i++) p[i] = f32_to_f16(a.v[i]);
}
static inline float bf16_to_f32(uint16_t h) {
    uint32_t b = uint32_t(h) << 16;
    float f;
    memcpy(&f, &b, 4);
    return f;
}
static inline vf vload_bf16(const uint16_t* p) {
    vf r;
    EACH r.v[i] = bf16_to_f32(p[i]);
    return r;
}
static inline vf vload_bf16_n(const uint16_t* p, int n) {
    vf r;
    EACH r.v[i] = i < n ? bf16_to_f32(p[i]) : 0;
    return r;
}
static inline vf vadd(vf a, vf b) {
    EACH a.v[i] += b.v[i];
    return a;
}
static inline vf vsub(vf a, vf b) {
    EACH a.v[i] -= b.v[i];
    return a;
}
static inline vf vmul(vf a, vf b) {
    EACH a.v[i] *= b.v[i];
    return a;
}
static inline vf vdiv(vf a, vf b) {
    EACH a.v[i] /= b.v[i];
    return a;
}
// the second operand where either is NaN, as on x86
static inline vf vmax(vf a, vf b) {
    EACH a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
    return a;
}
static inline vf vmin(vf a, vf b) {
    EACH a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
    return a;
}
static inline vf vabs(vf a) {
    EACH a.v[i] = fabsf(a.v[i]);
    return a;
}
static inline vf vfma(vf a, vf b, vf c) {
    EACH c.v[i] += a.v[i] * b.v[i];
    return c;
}
static inline vf vround(vf a) {
    EACH a.v[i] = nearbyintf(a.v[i]);
    return a;
}
static inline vf vpow2(vf a) {  // 2^a for integral a in [-126, 127]
    EACH {
        const uint32_t bits = uint32_t(int32_t(a.v[i]) + 127) << 23;
        memcpy(&a.v[i], &bits, 4);
    }
    return a;
}
// 0 where x is at most the threshold, else x: a NaN stays one
static inline vf vgate(vf x, vf threshold) {
    EACH x.v[i] = x.v[i] <= threshold.v[i] ? 0 : x.v[i];
    return x;
}
static inline uint32_t vpositive(vf a) {
    uint32_t bits = 0;
    EACH bits |= uint32_t(a.v[i] > 0) << i;
    return bits;
}  // bit i: a[i] > 0
static inline uint32_t vnonzero(vf a) {
    uint32_t bits = 0;
    EACH bits |= uint32_t(a.v[i] != 0) << i;
    return bits;
}
static inline float vsum(vf a) {
    return ((a.v[0] + a.v[4]) + (a.v[2] + a.v[6])) + ((a.v[1] + a.v[5]) + (a.v[3] + a.v[7]));
}
static inline float vmaximum(vf a) {
    float m = a.v[0];
    EACH m = m > a.v[i] ? m : a.v[i];
    return m;
}
// Into the second-level cache: the first has few miss buffers, and holds the activations. With it f16 rows
// streamed at 0.56 of the roof in place of 1.0 (Zen 4), gathered rows at 2/3 of the speed.
static inline void prefetch(const void*) {}
static inline void prefetch_near(const void*) {}

// ---- int32 vectors and quantised weights
struct vi {
    int32_t v[W];
};
static inline vi vi_load(const void* p) {
    vi r;
    memcpy(&r, p, sizeof r);
    return r;
}
static inline vi vi_u8(const uint8_t* p) {  // W bytes
    vi r;
    EACH r.v[i] = p[i];
    return r;
}
static inline vi vi_i8(const uint8_t* p) {
    vi r;
    EACH r.v[i] = int8_t(p[i]);
    return r;
}
static inline void vi_store(void* p, vi a) { memcpy(p, &a, sizeof a); }
static inline vi vi_set1(int32_t x) {
    vi r;
    EACH r.v[i] = x;
    return r;
}
static inline vi vi_add(vi a, vi b) {
    EACH a.v[i] += b.v[i];
    return a;
}
static inline vi vi_and(vi a, vi b) {
    EACH a.v[i] &= b.v[i];
    return a;
}
static inline vi vi_xor(vi a, vi b) {
    EACH a.v[i] ^= b.v[i];
    return a;
}
template <int N>
static inline vi vi_shr(vi a) {  // logical
    EACH a.v[i] = int32_t(uint32_t(a.v[i]) >> N);
    return a;
}
template <int N>
static inline vi vi_shl(vi a) {
    EACH a.v[i] = int32_t(uint32_t(a.v[i]) << N);
    return a;
}
static inline vi vi_shr_by(vi a, int n) {
    EACH a.v[i] = int32_t(uint32_t(a.v[i]) >> n);
    return a;
}
static inline vi vi_or(vi a, vi b) {
    EACH a.v[i] |= b.v[i];
    return a;
}
static inline vi vi_sub(vi a, vi b) {
    EACH a.v[i] -= b.v[i];
    return a;
}
static inline vf vi_f32(vi a) {
    vf r;
    EACH r.v[i] = float(a.v[i]);
    return r;
}
static inline vi vf_bits(vf a) {
    vi r;
    memcpy(&r, &a, sizeof r);
    return r;
}

// What is added to stored q8_0 weights before they are multiplied (mod 256): nothing here.
constexpr int kOffsetQ8 = 0;
// Dot products of weights with x, four a dword. BITS: 8, signed but for what was added to them; or up to 6,
// from 0 on. After up to `run` steps `widen` makes i32 of the sums.
template <int BITS>
struct Dot {
    static constexpr int run = 8;
    static constexpr bool wide = true;
    static vi step(vi acc, vi w, vi x) {  // acc[i] += the four int8 products of dword i
        const int8_t *a = (const int8_t*)w.v, *b = (const int8_t*)x.v;
        EACH acc.v[i] += a[4 * i] * b[4 * i] + a[4 * i + 1] * b[4 * i + 1] + a[4 * i + 2] * b[4 * i + 2] +
                         a[4 * i + 3] * b[4 * i + 3];
        return acc;
    }
    static vi widen(vi acc) { return acc; }
};

// 32 floats -> int8, their scale and their sum. An infinity or NaN makes the block's scale NaN, so that it
// shows in the result instead of vanishing in a rounding. Below 1e-36, 127/max would be infinite; such a
// block is zero.
static inline void x_quantize(const float* x, int8_t* q, float* d, int32_t* sum) {
    float m = 0, nan = 0;
    for (int i = 0; i < 32; i++) m = fabsf(x[i]) > m ? fabsf(x[i]) : m, nan += x[i] - x[i];
    const bool some = nan == 0 && m > 1e-36f;
    *d = nan == 0 ? m / 127.0f : nan;
    *sum = 0;
    for (int i = 0; i < 32; i++)
        q[i] = some ? int8_t(nearbyintf(x[i] * (127.0f / m))) : int8_t(0), *sum += q[i];
}

constexpr int kGroup = 1;                           // blocks whose first halves fill one vector
constexpr int kRowTokens = 1, kFloatRowTokens = 1;  // of a row as it is stored, to be multiplied at once
// The 16 sums of products of 16 blocks (fewer: the rest is zero, because x is), as 16/W vectors, for NT
// tokens whose x are `stride` bytes apart.
template <int NT>
static inline void q8_sums(const uint8_t* w, const int8_t* x, size_t stride, int blocks, vi (*out)[16 / W]) {
    for (int n = 0; n < NT; n++, x += stride)
        for (int b = 0; b < 16; b++) {
            int32_t s = 0;
            for (int i = 0; i < 32 && b < blocks; i++) s += int32_t((int8_t)w[32 * b + i]) * x[32 * b + i];
            out[n][b / W].v[b % W] = s;
        }
}
// ---- weights of a few bits, by blocks of 32: the first 16 of each block in `lo`, the others in `hi`
//
// vb: 16 bytes, the halves of one block. vq: those of kGroup blocks, one after the other.
struct vb {
    uint8_t v[16];
};
using vq = vb;
#define BYTES for (int i = 0; i < 16; i++)
static inline vb vb_load(const void* p) {
    vb r;
    memcpy(&r, p, 16);
    return r;
}
static inline vb vb_load_n(const void* p, size_t n) {
    vb r = {};
    memcpy(&r, p, n);
    return r;
}
static inline void vb_store(void* p, vb a) { memcpy(p, &a, 16); }
static inline vb vb_or(vb a, vb b) {
    BYTES a.v[i] |= b.v[i];
    return a;
}
static inline vb vb_sub(vb a, vb b) {
    BYTES a.v[i] = uint8_t(a.v[i] - b.v[i]);
    return a;
}
static inline vb vb_set1(uint8_t x) {
    vb r;
    BYTES r.v[i] = x;
    return r;
}
template <int N>  // bits from N on, of those that the mask has
static inline vb vb_bits(vb a, uint8_t mask) {
    BYTES a.v[i] = uint8_t(a.v[i] >> N & mask);
    return a;
}
template <int N>
static inline vb vb_up(vb a) {  // of bytes that are below 2^(8 - N)
    BYTES a.v[i] = uint8_t(a.v[i] << N);
    return a;
}
// The first 8 bytes, 4 words, 2 dwords of each in turn; `high`: the last ones.
static inline vb zipped(vb a, vb b, int size, int from) {
    vb r;
    for (int i = 0; i < 8; i += size) {
        memcpy(r.v + 2 * i, a.v + from + i, size_t(size));
        memcpy(r.v + 2 * i + size, b.v + from + i, size_t(size));
    }
    return r;
}
static inline vb vb_zip8(vb a, vb b) { return zipped(a, b, 1, 0); }
static inline vb vb_zip8_high(vb a, vb b) { return zipped(a, b, 1, 8); }
static inline vb vb_zip16(vb a, vb b) { return zipped(a, b, 2, 0); }
static inline vb vb_zip16_high(vb a, vb b) { return zipped(a, b, 2, 8); }
static inline vb vb_zip32(vb a, vb b) { return zipped(a, b, 4, 0); }
static inline void vb_f32(vb b, vf* out) {  // 16 int8
    BYTES out[i / W].v[i % W] = float(int8_t(b.v[i]));
}

static TC_INLINE void nibbles(const uint8_t* p, vb* lo, vb* hi) {
    BYTES lo->v[i] = p[i] & 15, hi->v[i] = p[i] >> 4;
}
static TC_INLINE void fifths(const uint8_t* p, vb* lo, vb* hi) {  // single bits, as bit 4
    BYTES {
        lo->v[i] = uint8_t((p[i % 4] >> (i / 4) & 1) << 4);
        hi->v[i] = uint8_t((p[i % 4] >> (4 + i / 4) & 1) << 4);
    }
}
template <int AT>
static TC_INLINE void pairs(const uint8_t* p, vb* lo, vb* hi) {  // pairs of bits, as bits AT and AT + 1
    BYTES {
        lo->v[i] = uint8_t((p[i % 8] >> (i / 8 * 2) & 3) << AT);
        hi->v[i] = uint8_t((p[i % 8] >> (4 + i / 8 * 2) & 3) << AT);
    }
}
static inline vb bits_or(vb a, vb b) { return vb_or(a, b); }
static inline vb looked_up(const int8_t* table, vb nibbles) {  // table[nibble] of each byte
    BYTES nibbles.v[i] = uint8_t(table[nibbles.v[i]]);
    return nibbles;
}
static inline vi looked_up(const int8_t* table, vi nibbles) {
    uint8_t* b = (uint8_t*)nibbles.v;
    for (int i = 0; i < 4 * W; i++) b[i] = uint8_t(table[b[i]]);
    return nibbles;
}

// The 16 sums of products of 16 blocks of Q's numbers, as q8_sums.
template <class Q, int NT>
static TC_INLINE void q_sums(const uint8_t* first, const uint8_t* second, const int8_t* x, size_t stride,
                             int blocks, vi (*out)[16 / W]) {
    for (int n = 0; n < NT; n++, x += stride)
        for (int b = 0; b < 16; b++) {
            int32_t s = 0;
            if (b < blocks) {
                vb lo, hi;
                Q::load(first + Q::first * b, second + Q::second * b, &lo, &hi);
                BYTES s += int8_t(lo.v[i]) * x[32 * b + i] + int8_t(hi.v[i]) * x[32 * b + 16 + i];
            }
            out[n][b / W].v[b % W] = s;
        }
}
// The same with a scale for each half of a block: 32 int8, of 8 blocks in each of `scales`.
template <class Q, int NT>
static TC_INLINE void group_sums(const uint8_t* first, const uint8_t* second, const vb* scales,
                                 const int8_t* x, size_t stride, int blocks, vi (*out)[16 / W]) {
    for (int n = 0; n < NT; n++, x += stride)
        for (int b = 0; b < 16; b++) {
            int32_t s = 0, t = 0;
            if (b < blocks) {
                vb lo, hi;
                Q::load(first + Q::first * b, second + Q::second * b, &lo, &hi);
                BYTES s += int8_t(lo.v[i]) * x[32 * b + i], t += int8_t(hi.v[i]) * x[32 * b + 16 + i];
            }
            const int8_t* scale = (const int8_t*)scales[b / 8].v + b % 8 * 2;
            out[n][b / W].v[b % W] = s * scale[0] + t * scale[1];
        }
}
// Of each block: scale * sum of the first half of x, plus the same of the second; `sums` are pairs of i16.
static TC_INLINE void pair_sums(const vb* scales, const int32_t* sums, vi* out) {
    const int16_t* of = (const int16_t*)sums;
    for (int b = 0; b < 16; b++) {
        const int8_t* scale = (const int8_t*)scales[b / 8].v + b % 8 * 2;
        out[b / W].v[b % W] = scale[0] * of[2 * b] + scale[1] * of[2 * b + 1];
    }
}
// f16 scales of superblocks, each for 8 of up to 16 blocks.
static TC_INLINE void super_scales(const uint16_t* d, int blocks, vf* out) {
    out[0] = vset1(f16_to_f32(d[0]));
    out[1] = blocks > 8 ? vset1(f16_to_f32(d[1])) : vzero();
}
static inline vf vload_e8m0(const uint8_t* p) {  // E8M0, halved: 2^(e - 128)
    vf r;
    EACH {
        const uint32_t bits = p[i] < 2 ? 0x00200000u << p[i] : uint32_t(p[i] - 1) << 23;
        memcpy(&r.v[i], &bits, 4);
    }
    return r;
}
#undef BYTES

static inline void transpose(vi* t) {  // W rows of W dwords -> W columns
    for (int i = 0; i < W; i++)
        for (int k = 0; k < i; k++) {
            const int32_t x = t[i].v[k];
            t[i].v[k] = t[k].v[i], t[k].v[i] = x;
        }
}
static inline void split_words(vi a, vi b, vi* low, vi* high) {  // words of a's dwords, then of b's
    uint16_t *l = (uint16_t*)low->v, *h = (uint16_t*)high->v;
    EACH l[i] = uint16_t(a.v[i]), l[W + i] = uint16_t(b.v[i]), h[i] = uint16_t(a.v[i] >> 16),
         h[W + i] = uint16_t(b.v[i] >> 16);
}
static inline void q8_unpack(const uint8_t* q, vf* out) {  // 32 weights as 32/W vectors, without the scale
    for (int k = 0; k < 32; k++) out[k / W].v[k % W] = float(int8_t(q[k]));
}
template <int ADDED>
static inline void q4_unpack(const uint8_t* q, vf* out) {
    for (int k = 0; k < 16; k++) {
        out[k / W].v[k % W] = float((q[k] & 15) - ADDED);
        out[(k + 16) / W].v[(k + 16) % W] = float((q[k] >> 4) - ADDED);
    }
}
static inline size_t bits_that_differ(const uint8_t* a, const uint8_t* b,
                                      size_t n) {  // popcount(a ^ b) over n bytes
    size_t count = 0;
    for (size_t i = 0; i < n; i++)
        for (uint32_t x = uint32_t(a[i] ^ b[i]); x; x &= x - 1) count++;
    return count;
}
constexpr bool kMatrixUnit = false;
constexpr bool kInterleaves = false;  // 0.5 to 1.4 times as fast
constexpr int kTileTokens = 4;        // a matrix tile: 2 vectors of rows times this many tokens
constexpr int kFloatTileTokens = 4;

// ---- attention

constexpr int kRegisters = 16;  // how many vectors registers hold
#undef EACH
