// Vector operations for AVX2 + FMA + F16C. simd_scalar.h specifies each of them.
#pragma once
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include <stdint.h>

constexpr int W = 8;
using vf = __m256;

static inline __m256i lanes_below(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
static inline vf vset1(float x) { return _mm256_set1_ps(x); }
static inline vf vzero() { return _mm256_setzero_ps(); }
static inline vf vload(const float* p) { return _mm256_loadu_ps(p); }
static inline vf vload_n(const float* p, int n) { return _mm256_maskload_ps(p, lanes_below(n)); }
static inline void vstore(float* p, vf a) { _mm256_storeu_ps(p, a); }
static inline void vstore_n(float* p, vf a, int n) { _mm256_maskstore_ps(p, lanes_below(n), a); }
static inline vf vload_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
static inline vf vload_f16_n(const uint16_t* p, int n) {
    uint16_t t[8] = {0};
    memcpy(t, p, size_t(n) * 2);
    return vload_f16(t);
}
static inline void vstore_f16_n(uint16_t* p, vf a, int n) {
    uint16_t t[8];
    _mm_storeu_si128((__m128i*)t, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
    memcpy(p, t, size_t(n) * 2);
}
static inline vf vload_bf16(const uint16_t* p) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
static inline vf vload_bf16_n(const uint16_t* p, int n) {
    uint16_t t[8] = {0};
    memcpy(t, p, size_t(n) * 2);
    return vload_bf16(t);
}
static inline vf vadd(vf a, vf b) { return _mm256_add_ps(a, b); }
static inline vf vsub(vf a, vf b) { return _mm256_sub_ps(a, b); }
static inline vf vmul(vf a, vf b) { return _mm256_mul_ps(a, b); }
static inline vf vdiv(vf a, vf b) { return _mm256_div_ps(a, b); }
static inline vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
static inline vf vmin(vf a, vf b) { return _mm256_min_ps(a, b); }
static inline vf vabs(vf a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
static inline vf vfma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
static inline vf vround(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline vf vpow2(vf a) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(a), _mm256_set1_epi32(127)), 23));
}
static inline vf vgate(vf x, vf threshold) {
    return _mm256_and_ps(x, _mm256_cmp_ps(x, threshold, _CMP_NLE_UQ));
}
static inline uint32_t vpositive(vf a) {
    return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a, vzero(), _CMP_GT_OQ)));
}
static inline uint32_t vnonzero(vf a) {
    return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a, vzero(), _CMP_NEQ_UQ)));
}
static inline float vsum(vf a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
static inline float vmaximum(vf a) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

static TC_INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }
static TC_INLINE void prefetch_near(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }

// ---- int32 vectors and quantised weights
using vi = __m256i;
static inline vi vi_load(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
// W bytes.
static inline vi vi_u8(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
static inline vi vi_i8(const uint8_t* p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
static inline void vi_store(void* p, vi a) { _mm256_storeu_si256((__m256i*)p, a); }
static inline vi vi_set1(int32_t x) { return _mm256_set1_epi32(x); }
static inline vi vi_add(vi a, vi b) { return _mm256_add_epi32(a, b); }
static inline vi vi_and(vi a, vi b) { return _mm256_and_si256(a, b); }
static inline vi vi_xor(vi a, vi b) { return _mm256_xor_si256(a, b); }
template <int N>
static inline vi vi_shr(vi a) {
    return _mm256_srli_epi32(a, N);
}
template <int N>
static inline vi vi_shl(vi a) {
    return _mm256_slli_epi32(a, N);
}
static inline vi vi_shr_by(vi a, int n) { return _mm256_srl_epi32(a, _mm_cvtsi32_si128(n)); }
static inline vi vi_or(vi a, vi b) { return _mm256_or_si256(a, b); }
static inline vi vi_sub(vi a, vi b) { return _mm256_sub_epi32(a, b); }
static inline vf vi_f32(vi a) { return _mm256_cvtepi32_ps(a); }
static inline vi vf_bits(vf a) { return _mm256_castps_si256(a); }

// Without this GCC moves additions about until it runs out of registers: half the accumulators went through
// memory.
static inline vi in_register(vi a) {
#ifdef __GNUC__
    asm("" : "+x"(a));
#endif
    return a;
}
#ifdef AVXVNNI  // vpdpbusd: unsigned weights (q8_0 is offset by 128, and corrected with the sums of x),
                // signed x
constexpr int kOffsetQ8 = 128;
template <int BITS>
struct Dot {
    static constexpr int run = 8;
    static constexpr bool wide = true;
    static vi step(vi acc, vi w, vi x) { return in_register(_mm256_dpbusd_avx_epi32(acc, w, x)); }
    static vi widen(vi acc) { return acc; }
};
#else
constexpr int kOffsetQ8 = 0;
// maddubs wants unsigned x signed and saturates at i16. A step of unsigned weights adds two products of at
// most (2^BITS - 1) * 127, so that after `run` steps the sums still fit; `widen` makes i32 of them.
template <int BITS>
struct Dot {
    static constexpr int run = 1 << (7 - BITS);  // 8, 4, 2
    static constexpr bool wide = false;          // sums are i16 before
    static vi step(vi acc, vi w, vi x) {
        return in_register(_mm256_add_epi16(acc, _mm256_maddubs_epi16(w, x)));
    }
    static vi widen(vi acc) { return _mm256_madd_epi16(acc, _mm256_set1_epi16(1)); }
};
template <>
struct Dot<8> {  // signed: |w| <= 128, |x| <= 127: two products fit
    static constexpr int run = 8;
    static constexpr bool wide = true;
    static vi step(vi acc, vi w, vi x) {
        const vi p = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
        return in_register(vi_add(acc, _mm256_madd_epi16(p, _mm256_set1_epi16(1))));
    }
    static vi widen(vi acc) { return acc; }
};
#endif

// 32 floats -> int8, their scale and their sum.
static inline void x_quantize(const float* x, int8_t* q, float* d, int32_t* sum) {
    vf m = vzero(), finite = vzero();
    for (int i = 0; i < 32; i += W) {
        m = vmax(m, vabs(vload(x + i)));
        finite = vadd(finite, vsub(vload(x + i), vload(x + i)));
    }
    const float nan = vsum(finite), top = nan == 0 ? vmaximum(m) : 0,
                inverse = top > 1e-36f ? 127.0f / top : 0;
    *d = top / 127.0f + nan;
    *sum = 0;
    for (int i = 0; i < 32; i += W) {
        int32_t t[W];
        vi_store(t, _mm256_cvtps_epi32(vmul(vload(x + i), vset1(inverse))));
        for (int k = 0; k < W; k++) q[i + k] = nan == 0 ? int8_t(t[k]) : int8_t(0), *sum += q[i + k];
    }
}

// Per 128 bits: a0+a1, a2+a3, b0+b1, b2+b3.
static inline vi add_pairs(vi a, vi b) {
    const vf fa = _mm256_castsi256_ps(a), fb = _mm256_castsi256_ps(b);
    return vi_add(_mm256_castps_si256(_mm256_shuffle_ps(fa, fb, 0x88)),
                  _mm256_castps_si256(_mm256_shuffle_ps(fa, fb, 0xdd)));
}
constexpr int kGroup = 2;                           // blocks whose first halves fill one vector
constexpr int kRowTokens = 2, kFloatRowTokens = 2;  // of a row as it is stored
// The 16 sums of products of 16 blocks (fewer: the rest is zero, because x is), for tokens `stride` bytes
// apart.
template <int NT>
static inline void q8_sums(const uint8_t* w, const int8_t* x, size_t stride, int blocks, vi (*out)[2]) {
    const vi flip = _mm256_set1_epi8(char(kOffsetQ8));
    vi quarter[NT][4];
    for (int g = 0; g < 4; g++) {
        vi s[NT][4];
        for (int i = 0; i < 4; i++) {
            const int b = 4 * g + i;
            for (int n = 0; n < NT; n++) s[n][i] = _mm256_setzero_si256();
            if (b >= blocks) continue;
            const vi a = vi_xor(vi_load(w + 32 * b), flip);
            for (int n = 0; n < NT; n++)
                s[n][i] = Dot<8>::step(s[n][i], a, vi_load(x + size_t(n) * stride + 32 * b));
        }
        for (int n = 0; n < NT; n++)
            quarter[n][g] = add_pairs(add_pairs(s[n][0], s[n][1]), add_pairs(s[n][2], s[n][3]));
    }
    for (int n = 0; n < NT; n++)
        for (int h = 0; h < 2; h++) {
            const vi p = quarter[n][2 * h], q = quarter[n][2 * h + 1];
            out[n][h] = vi_add(_mm256_permute2x128_si256(p, q, 0x20), _mm256_permute2x128_si256(p, q, 0x31));
        }
}
#ifndef AVXVNNI
// Per 128 bits of i16, and added in them: a0+a4, .., a3+a7, b0+b4, .., b3+b7.
static inline vi add_halves(vi a, vi b) {
    return _mm256_add_epi16(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
}
static inline vi add_pairs16(vi a, vi b) {
    const vf fa = _mm256_castsi256_ps(a), fb = _mm256_castsi256_ps(b);
    return _mm256_add_epi16(_mm256_castps_si256(_mm256_shuffle_ps(fa, fb, 0x88)),
                            _mm256_castps_si256(_mm256_shuffle_ps(fa, fb, 0xdd)));
}
#endif
// ---- weights of a few bits, by blocks of 32: the first 16 of each block in `lo`, the others in `hi`
//
// vb: 16 bytes, the halves of one block. vq: those of kGroup blocks, one after the other.
using vb = __m128i;
using vq = __m256i;
static inline vb vb_load(const void* p) { return _mm_loadu_si128((const __m128i*)p); }
static TC_INLINE vb vb_load_n(const void* p, size_t n) {
    if (n == 8) return _mm_loadl_epi64((const __m128i*)p);
    int32_t four;
    if (n == 4) return memcpy(&four, p, 4), _mm_cvtsi32_si128(four);
    alignas(16) uint8_t t[16] = {0};
    memcpy(t, p, n);
    return vb_load(t);
}
static inline void vb_store(void* p, vb a) { _mm_storeu_si128((__m128i*)p, a); }
static inline vb vb_or(vb a, vb b) { return _mm_or_si128(a, b); }
static inline vb vb_sub(vb a, vb b) { return _mm_sub_epi8(a, b); }
static inline vb vb_set1(uint8_t x) { return _mm_set1_epi8(char(x)); }
template <int N>  // bits from N on, of those that the mask has
static inline vb vb_bits(vb a, uint8_t mask) {
    return _mm_and_si128(_mm_srli_epi16(a, N), vb_set1(mask));
}
template <int N>
static inline vb vb_up(vb a) {  // of bytes that are below 2^(8 - N)
    return _mm_slli_epi16(a, N);
}
// The first 8 bytes, 4 words, 2 dwords of each in turn; `high`: the last ones.
static inline vb vb_zip8(vb a, vb b) { return _mm_unpacklo_epi8(a, b); }
static inline vb vb_zip8_high(vb a, vb b) { return _mm_unpackhi_epi8(a, b); }
static inline vb vb_zip16(vb a, vb b) { return _mm_unpacklo_epi16(a, b); }
static inline vb vb_zip16_high(vb a, vb b) { return _mm_unpackhi_epi16(a, b); }
static inline vb vb_zip32(vb a, vb b) { return _mm_unpacklo_epi32(a, b); }
static inline void vb_f32(vb b, vf* out) {  // 16 int8
    out[0] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(b));
    out[1] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(b, 8)));
}

static TC_INLINE void nibbles(const uint8_t* p, vb* lo, vb* hi) {
    const vb raw = vb_load(p);
    *lo = vb_bits<0>(raw, 15), *hi = vb_bits<4>(raw, 15);
}
static TC_INLINE void nibbles(const uint8_t* p, vq* lo, vq* hi) {
    const vq raw = vi_load(p), low = _mm256_set1_epi8(15);
    *lo = vi_and(raw, low), *hi = vi_and(vi_shr<4>(raw), low);
}
// Single bits, as bit 4.
static TC_INLINE void fifths(const uint8_t* p, vb* lo, vb* hi) {
    int32_t bits;
    memcpy(&bits, p, 4);
    const vb raw = _mm_set1_epi32(bits), at = vb_set1(16);
    *lo = _mm_and_si128(_mm_sllv_epi32(raw, _mm_setr_epi32(4, 3, 2, 1)), at);
    *hi = _mm_and_si128(_mm_srlv_epi32(raw, _mm_setr_epi32(0, 1, 2, 3)), at);
}
static TC_INLINE void fifths(const uint8_t* p, vq* lo, vq* hi) {
    const vq raw = _mm256_permutevar8x32_epi32(_mm256_castsi128_si256(_mm_loadl_epi64((const __m128i*)p)),
                                               _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1)),
             at = _mm256_set1_epi8(16);
    *lo = vi_and(_mm256_sllv_epi32(raw, _mm256_setr_epi32(4, 3, 2, 1, 4, 3, 2, 1)), at);
    *hi = vi_and(_mm256_srlv_epi32(raw, _mm256_setr_epi32(0, 1, 2, 3, 0, 1, 2, 3)), at);
}
// Pairs of bits, as bits AT and AT + 1.
template <int AT>
static TC_INLINE void pairs(const uint8_t* p, vb* lo, vb* hi) {
    const vb raw = _mm_set1_epi64x(_mm_cvtsi128_si64(_mm_loadl_epi64((const __m128i*)p))),
             at = vb_set1(3 << AT);
    if constexpr (AT == 0) {
        *lo = _mm_and_si128(_mm_srlv_epi64(raw, _mm_set_epi64x(2, 0)), at);
        *hi = _mm_and_si128(_mm_srlv_epi64(raw, _mm_set_epi64x(6, 4)), at);
    } else {
        *lo = _mm_and_si128(_mm_sllv_epi64(raw, _mm_set_epi64x(AT - 2, AT)), at);
        *hi = _mm_and_si128(_mm_srlv_epi64(raw, _mm_set_epi64x(6 - AT, 4 - AT)), at);
    }
}
template <int AT>
static TC_INLINE void pairs(const uint8_t* p, vq* lo, vq* hi) {
    const vq raw = _mm256_permute4x64_epi64(_mm256_castsi128_si256(vb_load(p)), 0x50),
             at = _mm256_set1_epi8(3 << AT);
    if constexpr (AT == 0) {
        *lo = vi_and(_mm256_srlv_epi64(raw, _mm256_setr_epi64x(0, 2, 0, 2)), at);
        *hi = vi_and(_mm256_srlv_epi64(raw, _mm256_setr_epi64x(4, 6, 4, 6)), at);
    } else {
        *lo = vi_and(_mm256_sllv_epi64(raw, _mm256_setr_epi64x(AT, AT - 2, AT, AT - 2)), at);
        *hi = vi_and(_mm256_srlv_epi64(raw, _mm256_setr_epi64x(4 - AT, 6 - AT, 4 - AT, 6 - AT)), at);
    }
}
static inline vb bits_or(vb a, vb b) { return _mm_or_si128(a, b); }
static inline vq bits_or(vq a, vq b) { return vi_or(a, b); }
// table[nibble] of each byte.
static inline vb looked_up(const int8_t* table, vb nibbles) {
    return _mm_shuffle_epi8(vb_load(table), nibbles);
}
static inline vq looked_up(const int8_t* table, vq nibbles) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(vb_load(table)), nibbles);
}

// The 16 sums of products of 16 blocks of Q's numbers, as q8_sums.
template <class Q, int NT>
static TC_INLINE void q_sums(const uint8_t* first, const uint8_t* second, const int8_t* x, size_t stride,
                             int blocks, vi (*out)[2]) {
    using D = Dot<Q::bits>;
    for (int h = 0; h < 2; h++) {
        vi s[NT][4];
        for (int i = 0; i < 4; i++) {
            const int v = 4 * h + i;
            for (int n = 0; n < NT; n++) s[n][i] = _mm256_setzero_si256();
            if (2 * v >= blocks) continue;
            vq lo, hi;
            Q::load(first + 2 * Q::first * v, second + 2 * Q::second * v, &lo, &hi);
            for (int n = 0; n < NT; n++) {
                const int8_t* q = x + size_t(n) * stride + 64 * v;
                s[n][i] = D::step(D::step(s[n][i], lo, vi_load(q)), hi, vi_load(q + 32));
            }
        }
        for (int n = 0; n < NT; n++) {
            vi t;
#ifndef AVXVNNI
            if constexpr (Q::top <= 16) {  // 16 products of at most 16 * 127 fit an i16
                const vi p = add_pairs16(add_halves(s[n][0], s[n][1]), add_halves(s[n][2], s[n][3]));
                t = _mm256_madd_epi16(p, _mm256_set1_epi16(1));
            } else
#endif
            {
                for (int i = 0; i < 4; i++) s[n][i] = D::widen(s[n][i]);
                t = add_pairs(add_pairs(s[n][0], s[n][1]), add_pairs(s[n][2], s[n][3]));
            }
            out[n][h] = _mm256_permutevar8x32_epi32(t, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        }
    }
}
// The same with a scale for each half of a block: 32 int8, of 8 blocks in each of `scales`.
template <class Q, int NT>
static TC_INLINE void group_sums(const uint8_t* first, const uint8_t* second, const vb* scales,
                                 const int8_t* x, size_t stride, int blocks, vi (*out)[2]) {
    for (int h = 0; h < 2; h++) {
        vi s[NT][4];
        const vi wide = _mm256_cvtepi8_epi16(scales[h]);
        const vi four[2] = {_mm256_permute2x128_si256(wide, wide, 0x00),
                            _mm256_permute2x128_si256(wide, wide, 0x11)};
        for (int i = 0; i < 4; i++) {
            const int v = 4 * h + i;
            for (int n = 0; n < NT; n++) s[n][i] = _mm256_setzero_si256();
            if (2 * v >= blocks) continue;
            vq lo, hi;
            Q::load(first + 2 * Q::first * v, second + 2 * Q::second * v, &lo, &hi);
            // Words 4 (i % 2) .. + 3 of `four`: two scales of each of two blocks.
            const vi at = _mm256_setr_epi32(0x01000100, 0x01000100, 0x01000100, 0x01000100, 0x05040504,
                                            0x05040504, 0x05040504, 0x05040504),
                     shift = _mm256_set1_epi8(char(8 * (i % 2)));
            const vi a = _mm256_shuffle_epi8(four[i / 2], _mm256_add_epi8(at, shift)),
                     b = _mm256_shuffle_epi8(
                         four[i / 2], _mm256_add_epi8(_mm256_add_epi8(at, shift), _mm256_set1_epi8(2)));
#ifdef AVXVNNI
            const vi both = _mm256_unpacklo_epi64(a, b);
#endif
            for (int n = 0; n < NT; n++) {
                const int8_t* q = x + size_t(n) * stride + 64 * v;
#ifdef AVXVNNI
                using D = Dot<Q::bits>;
                const vi zero = _mm256_setzero_si256();
                const vi p =
                    _mm256_packs_epi32(D::step(zero, lo, vi_load(q)), D::step(zero, hi, vi_load(q + 32)));
                s[n][i] = _mm256_madd_epi16(p, both);
#else
                s[n][i] = vi_add(_mm256_madd_epi16(_mm256_maddubs_epi16(lo, vi_load(q)), a),
                                 _mm256_madd_epi16(_mm256_maddubs_epi16(hi, vi_load(q + 32)), b));
#endif
            }
        }
        for (int n = 0; n < NT; n++)
            out[n][h] = _mm256_permutevar8x32_epi32(
                add_pairs(add_pairs(s[n][0], s[n][1]), add_pairs(s[n][2], s[n][3])),
                _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    }
}
// Of each block: scale * sum of the first half of x, plus the same of the second; `sums` are pairs of i16.
static TC_INLINE void pair_sums(const vb* scales, const int32_t* sums, vi* out) {
    for (int h = 0; h < 2; h++)
        out[h] = _mm256_madd_epi16(_mm256_cvtepi8_epi16(scales[h]), vi_load(sums + 8 * h));
}
// f16 scales of superblocks, each for 8 blocks: n of 16/W vectors' blocks.
static TC_INLINE void super_scales(const uint16_t* d, int blocks, vf* out) {
    int32_t both = d[0];
    if (blocks > 8) memcpy(&both, d, 4);
    const __m128 two = _mm_cvtph_ps(_mm_cvtsi32_si128(both));
    out[0] = _mm256_broadcastss_ps(two);
    out[1] = _mm256_broadcastss_ps(_mm_movehdup_ps(two));
}
// E8M0, halved: 2^(e - 128).
static inline vf vload_e8m0(const uint8_t* p) {
    const vi e = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)), one = vi_set1(1);
    return _mm256_castsi256_ps(_mm256_max_epi32(
        vi_shl<23>(vi_sub(e, one)), _mm256_sllv_epi32(vi_set1(0x00200000), _mm256_min_epi32(e, one))));
}

// 8 rows of 8 dwords -> 8 columns.
static inline void transpose(vi* t) {
    vi a[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_epi32(t[i], t[i + 1]);
        a[i + 1] = _mm256_unpackhi_epi32(t[i], t[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {  // t[i + c]: of rows i to i + 3, columns c and 4 + c
        t[i] = _mm256_unpacklo_epi64(a[i], a[i + 2]);
        t[i + 1] = _mm256_unpackhi_epi64(a[i], a[i + 2]);
        t[i + 2] = _mm256_unpacklo_epi64(a[i + 1], a[i + 3]);
        t[i + 3] = _mm256_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    for (int c = 0; c < 4; c++) {
        a[c] = _mm256_permute2x128_si256(t[c], t[c + 4], 0x20);
        a[c + 4] = _mm256_permute2x128_si256(t[c], t[c + 4], 0x31);
    }
    for (int i = 0; i < 8; i++) t[i] = a[i];
}

// Words of a's dwords, then of b's: the low ones, the high ones.
static inline void split_words(vi a, vi b, vi* low, vi* high) {
    const vi word = vi_set1(0xffff);
    *low = _mm256_permute4x64_epi64(_mm256_packus_epi32(vi_and(a, word), vi_and(b, word)), 0xd8);
    *high = _mm256_permute4x64_epi64(_mm256_packus_epi32(_mm256_srli_epi32(a, 16), _mm256_srli_epi32(b, 16)),
                                     0xd8);
}

// 32 weights of one block as floats, without the scale.
static inline vf bytes_f32(__m128i b) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(b)); }
static inline void q8_unpack(const uint8_t* q, vf* out) {
    for (int k = 0; k < 4; k++) out[k] = bytes_f32(_mm_loadl_epi64((const __m128i*)(q + 8 * k)));
}
template <int ADDED>
static inline void q4_unpack(const uint8_t* q, vf* out) {
    const __m128i raw = _mm_loadu_si128((const __m128i*)q), m = _mm_set1_epi8(15),
                  added = _mm_set1_epi8(ADDED);
    const __m128i lo = _mm_sub_epi8(_mm_and_si128(raw, m), added);
    const __m128i hi = _mm_sub_epi8(_mm_and_si128(_mm_srli_epi16(raw, 4), m), added);
    out[0] = bytes_f32(lo), out[1] = bytes_f32(_mm_srli_si128(lo, 8));
    out[2] = bytes_f32(hi), out[3] = bytes_f32(_mm_srli_si128(hi, 8));
}
static inline size_t bits_that_differ(const uint8_t* a, const uint8_t* b, size_t n) {
    const vi table =
                 _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4)),
             low = _mm256_set1_epi8(15);
    vi sum = _mm256_setzero_si256();
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        const vi x = vi_xor(vi_load(a + i), vi_load(b + i));
        const vi counts = _mm256_add_epi8(_mm256_shuffle_epi8(table, vi_and(x, low)),
                                          _mm256_shuffle_epi8(table, vi_and(vi_shr<4>(x), low)));
        sum = _mm256_add_epi64(sum, _mm256_sad_epu8(counts, _mm256_setzero_si256()));
    }
    uint64_t parts[4];
    vi_store(parts, sum);
    for (; i < n; i++) parts[0] += size_t(_mm_popcnt_u32(uint32_t(a[i] ^ b[i])));
    return size_t(parts[0] + parts[1] + parts[2] + parts[3]);
}
constexpr bool kMatrixUnit = false;
constexpr bool kInterleaves = true;  // 1.3 to 1.9 times as fast from the L2 cache (Zen 4, 1792 columns)
constexpr int kTileTokens =
    4;  // a matrix tile: 2 vectors of rows times this many tokens of accumulators, of 16 registers
constexpr int kFloatTileTokens = 6;

// ---- attention

constexpr int kRegisters = 16;
