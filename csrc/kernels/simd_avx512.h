// Vector operations for AVX-512 (F, BW, VL, DQ, VNNI). simd_scalar.h specifies each of them.
#pragma once
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include <stdint.h>

#ifdef _MSC_VER  // all of it: GCC's bound on how much a file may grow would leave calls in the inner loops
#define INLINE static __forceinline
#else
#define INLINE static inline __attribute__((always_inline))
#endif

constexpr int W = 16;
using vf = __m512;

INLINE __mmask16 lanes_below(int n) { return __mmask16((1u << n) - 1); }
INLINE vf vset1(float x) { return _mm512_set1_ps(x); }
INLINE vf vzero() { return _mm512_setzero_ps(); }
INLINE vf vload(const float* p) { return _mm512_loadu_ps(p); }
INLINE vf vload_n(const float* p, int n) { return _mm512_maskz_loadu_ps(lanes_below(n), p); }
INLINE void vstore(float* p, vf a) { _mm512_storeu_ps(p, a); }
INLINE void vstore_n(float* p, vf a, int n) { _mm512_mask_storeu_ps(p, lanes_below(n), a); }
INLINE vf vload_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
INLINE vf vload_f16_n(const uint16_t* p, int n) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes_below(n), p));
}
INLINE void vstore_f16_n(uint16_t* p, vf a, int n) {
    _mm256_mask_storeu_epi16(p, lanes_below(n), _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
INLINE vf widen_bf16(__m256i h) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
INLINE vf vload_bf16(const uint16_t* p) { return widen_bf16(_mm256_loadu_si256((const __m256i*)p)); }
INLINE vf vload_bf16_n(const uint16_t* p, int n) {
    return widen_bf16(_mm256_maskz_loadu_epi16(lanes_below(n), p));
}
INLINE vf vadd(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf vsub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf vmul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf vdiv(vf a, vf b) { return _mm512_div_ps(a, b); }
INLINE vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE vf vabs(vf a) { return _mm512_abs_ps(a); }
INLINE vf vfma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf vround(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vf vpow2(vf a) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(a), _mm512_set1_epi32(127)), 23));
}
INLINE vf vgate(vf x, vf threshold) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, threshold, _CMP_NLE_UQ), x);
}
INLINE uint32_t vpositive(vf a) { return _mm512_cmp_ps_mask(a, vzero(), _CMP_GT_OQ); }  // bit i: a[i] > 0
INLINE uint32_t vnonzero(vf a) { return _mm512_cmp_ps_mask(a, vzero(), _CMP_NEQ_UQ); }  // NaN, too
INLINE float vsum(vf a) {
    const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
INLINE float vmaximum(vf a) { return _mm512_reduce_max_ps(a); }

INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }
INLINE void prefetch_near(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }

// ---- int32 vectors and quantised weights
using vi = __m512i;
INLINE vi vi_load(const void* p) { return _mm512_loadu_si512(p); }
// W bytes.
INLINE vi vi_u8(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
INLINE vi vi_i8(const uint8_t* p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }
INLINE void vi_store(void* p, vi a) { _mm512_storeu_si512(p, a); }
INLINE vi vi_set1(int32_t x) { return _mm512_set1_epi32(x); }
INLINE vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
INLINE vi vi_and(vi a, vi b) { return _mm512_and_si512(a, b); }
INLINE vi vi_xor(vi a, vi b) { return _mm512_xor_si512(a, b); }
template <int N>
INLINE vi vi_shr(vi a) {
    return _mm512_srli_epi32(a, N);
}
template <int N>
INLINE vi vi_shl(vi a) {
    return _mm512_slli_epi32(a, N);
}
INLINE vi vi_shr_by(vi a, int n) { return _mm512_srl_epi32(a, _mm_cvtsi32_si128(n)); }
INLINE vi vi_or(vi a, vi b) { return _mm512_or_si512(a, b); }
INLINE vi vi_sub(vi a, vi b) { return _mm512_sub_epi32(a, b); }
INLINE vf vi_f32(vi a) { return _mm512_cvtepi32_ps(a); }
INLINE vi vf_bits(vf a) { return _mm512_castps_si512(a); }

// vpdpbusd multiplies unsigned weights with signed activations: q8_0 is offset by 128 (and corrected with the
// sums of x).
constexpr int kOffsetQ8 = 128;
template <int BITS>
struct Dot {
    static constexpr int run = 8;
    static constexpr bool wide = true;
    static vi step(vi acc, vi w, vi x) { return _mm512_dpbusd_epi32(acc, w, x); }
    static vi widen(vi acc) { return acc; }
};

// 32 floats -> int8, their scale and their sum.
INLINE void x_quantize(const float* x, int8_t* q, float* d, int32_t* sum) {
    const vf lo = vload(x), hi = vload(x + 16);
    const float nan = vsum(vadd(vsub(lo, lo), vsub(hi, hi)));
    const float top = nan == 0 ? vmaximum(vmax(vabs(lo), vabs(hi))) : 0,
                inverse = top > 1e-36f ? 127.0f / top : 0;
    const vi qlo = _mm512_cvtps_epi32(vmul(lo, vset1(inverse))),
             qhi = _mm512_cvtps_epi32(vmul(hi, vset1(inverse)));
    _mm_storeu_si128((__m128i*)q, _mm512_cvtepi32_epi8(qlo));
    _mm_storeu_si128((__m128i*)(q + 16), _mm512_cvtepi32_epi8(qhi));
    *d = top / 127.0f + nan;
    *sum = nan == 0 ? _mm512_reduce_add_epi32(_mm512_add_epi32(qlo, qhi)) : 0;
}

// Per 128 bits: a0+a1, a2+a3, b0+b1, b2+b3.
INLINE vi add_pairs(vi a, vi b) {
    const vf fa = _mm512_castsi512_ps(a), fb = _mm512_castsi512_ps(b);
    return _mm512_add_epi32(_mm512_castps_si512(_mm512_shuffle_ps(fa, fb, 0x88)),
                            _mm512_castps_si512(_mm512_shuffle_ps(fa, fb, 0xdd)));
}
constexpr int kGroup = 4;                           // blocks whose first halves fill one vector
constexpr int kRowTokens = 4, kFloatRowTokens = 4;  // of a row as it is stored
// The 16 sums of products of 16 blocks (fewer: the rest is zero, because x is), for tokens `stride` bytes
// apart. A vector holds two blocks of 8-bit quants or four of 4-bit ones; its sums are added in a tree, 21
// (6) instructions for 512 weights.
template <int NT>
INLINE void q8_sums(const uint8_t* w, const int8_t* x, size_t stride, int blocks, vi (*out)[1]) {
    const vi flip = _mm512_set1_epi8(char(0x80));
    vi half[NT][2];
    for (int h = 0; h < 2; h++) {
        vi s[NT][4];
        for (int i = 0; i < 4; i++) {
            for (int n = 0; n < NT; n++) s[n][i] = _mm512_setzero_si512();
            if (2 * (4 * h + i) >= blocks) continue;
            const vi a = vi_xor(vi_load(w + 64 * (4 * h + i)), flip);
            for (int n = 0; n < NT; n++)
                s[n][i] = _mm512_dpbusd_epi32(s[n][i], a, vi_load(x + size_t(n) * stride + 64 * (4 * h + i)));
        }
        for (int n = 0; n < NT; n++)
            half[n][h] = add_pairs(add_pairs(s[n][0], s[n][1]), add_pairs(s[n][2], s[n][3]));
    }
    for (int n = 0; n < NT; n++) {
        const vi t = vi_add(_mm512_shuffle_i32x4(half[n][0], half[n][1], 0x88),
                            _mm512_shuffle_i32x4(half[n][0], half[n][1], 0xdd));
        out[n][0] = _mm512_permutexvar_epi32(
            _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15), t);
    }
}
// As add_pairs, for sums that fit an i16: the multiplier adds, and half the shuffles are left.
INLINE vi add_pairs16(vi a, vi b) {
    return _mm512_madd_epi16(_mm512_packs_epi32(a, b), _mm512_set1_epi16(1));
}
// ---- weights of a few bits, by blocks of 32: the first 16 of each block in `lo`, the others in `hi`
//
// vb: 16 bytes, the halves of one block. vq: those of kGroup blocks, one after the other.
using vb = __m128i;
using vq = __m512i;
INLINE vb vb_load(const void* p) { return _mm_loadu_si128((const __m128i*)p); }
INLINE vb vb_load_n(const void* p, size_t n) {
    if (n == 8) return _mm_loadl_epi64((const __m128i*)p);
    int32_t four;
    if (n == 4) return memcpy(&four, p, 4), _mm_cvtsi32_si128(four);
    return _mm_maskz_loadu_epi8(__mmask16((1u << n) - 1), (const char*)p);
}
INLINE void vb_store(void* p, vb a) { _mm_storeu_si128((__m128i*)p, a); }
INLINE vb vb_or(vb a, vb b) { return _mm_or_si128(a, b); }
INLINE vb vb_sub(vb a, vb b) { return _mm_sub_epi8(a, b); }
INLINE vb vb_set1(uint8_t x) { return _mm_set1_epi8(char(x)); }
template <int N>  // bits from N on, of those that the mask has
INLINE vb vb_bits(vb a, uint8_t mask) {
    return _mm_and_si128(_mm_srli_epi16(a, N), vb_set1(mask));
}
template <int N>
INLINE vb vb_up(vb a) {  // of bytes that are below 2^(8 - N)
    return _mm_slli_epi16(a, N);
}
// The first 8 bytes, 4 words, 2 dwords of each in turn; `high`: the last ones.
INLINE vb vb_zip8(vb a, vb b) { return _mm_unpacklo_epi8(a, b); }
INLINE vb vb_zip8_high(vb a, vb b) { return _mm_unpackhi_epi8(a, b); }
INLINE vb vb_zip16(vb a, vb b) { return _mm_unpacklo_epi16(a, b); }
INLINE vb vb_zip16_high(vb a, vb b) { return _mm_unpackhi_epi16(a, b); }
INLINE vb vb_zip32(vb a, vb b) { return _mm_unpacklo_epi32(a, b); }
INLINE void vb_f32(vb b, vf* out) { out[0] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(b)); }  // 16 int8

INLINE void nibbles(const uint8_t* p, vb* lo, vb* hi) {
    const vb raw = vb_load(p);
    *lo = vb_bits<0>(raw, 15), *hi = vb_bits<4>(raw, 15);
}
INLINE void nibbles(const uint8_t* p, vq* lo, vq* hi) {
    const vq raw = vi_load(p), low = _mm512_set1_epi8(15);
    *lo = vi_and(raw, low), *hi = vi_and(vi_shr<4>(raw), low);
}
// Single bits, as bit 4.
INLINE void fifths(const uint8_t* p, vb* lo, vb* hi) {
    int32_t bits;
    memcpy(&bits, p, 4);
    const vb raw = _mm_set1_epi32(bits), at = vb_set1(16);
    *lo = _mm_and_si128(_mm_sllv_epi32(raw, _mm_setr_epi32(4, 3, 2, 1)), at);
    *hi = _mm_and_si128(_mm_srlv_epi32(raw, _mm_setr_epi32(0, 1, 2, 3)), at);
}
INLINE void fifths(const uint8_t* p, vq* lo, vq* hi) {
    const vq raw = _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3),
                                            _mm512_castsi128_si512(vb_load(p))),
             at = _mm512_set1_epi8(16);
    *lo = vi_and(_mm512_sllv_epi32(raw, _mm512_set4_epi32(1, 2, 3, 4)), at);
    *hi = vi_and(_mm512_srlv_epi32(raw, _mm512_set4_epi32(3, 2, 1, 0)), at);
}
// Pairs of bits, as bits AT and AT + 1.
template <int AT>
INLINE void pairs(const uint8_t* p, vb* lo, vb* hi) {
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
INLINE void pairs(const uint8_t* p, vq* lo, vq* hi) {
    const vq raw = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 0, 1, 1, 2, 2, 3, 3),
                                            _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)p))),
             at = _mm512_set1_epi8(3 << AT);
    if constexpr (AT == 0) {
        *lo = vi_and(_mm512_srlv_epi64(raw, _mm512_set4_epi64(2, 0, 2, 0)), at);
        *hi = vi_and(_mm512_srlv_epi64(raw, _mm512_set4_epi64(6, 4, 6, 4)), at);
    } else {
        *lo = vi_and(_mm512_sllv_epi64(raw, _mm512_set4_epi64(AT - 2, AT, AT - 2, AT)), at);
        *hi = vi_and(_mm512_srlv_epi64(raw, _mm512_set4_epi64(6 - AT, 4 - AT, 6 - AT, 4 - AT)), at);
    }
}
INLINE vb bits_or(vb a, vb b) { return _mm_or_si128(a, b); }
INLINE vq bits_or(vq a, vq b) { return vi_or(a, b); }
// table[nibble] of each byte.
INLINE vb looked_up(const int8_t* table, vb nibbles) { return _mm_shuffle_epi8(vb_load(table), nibbles); }
INLINE vq looked_up(const int8_t* table, vq nibbles) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(vb_load(table)), nibbles);
}

// Of four vectors of four blocks the sum of each block, in order.
INLINE vi block_order(vi t) {
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15),
                                    t);
}
// The 16 sums of products of 16 blocks of Q's numbers, as q8_sums. TOP: the largest number. Where so many
// products fit an i16, the multiplier adds.
template <class Q, int NT>
INLINE void q_sums(const uint8_t* first, const uint8_t* second, const int8_t* x, size_t stride, int blocks,
                   vi (*out)[1]) {
    vi s[NT][4];
    for (int i = 0; i < 4; i++) {
        for (int n = 0; n < NT; n++) s[n][i] = _mm512_setzero_si512();
        if (4 * i >= blocks) continue;
        vq lo, hi;
        Q::load(first + 4 * Q::first * i, second + 4 * Q::second * i, &lo, &hi);
        for (int n = 0; n < NT; n++) {
            const int8_t* q = x + size_t(n) * stride + 128 * i;
            s[n][i] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(s[n][i], lo, vi_load(q)), hi, vi_load(q + 64));
        }
    }
    for (int n = 0; n < NT; n++) {
        vi a, b;
        if constexpr (Q::top <= 32)
            a = add_pairs16(s[n][0], s[n][1]), b = add_pairs16(s[n][2], s[n][3]);
        else
            a = add_pairs(s[n][0], s[n][1]), b = add_pairs(s[n][2], s[n][3]);
        if constexpr (Q::top <= 16)
            a = add_pairs16(a, b);
        else
            a = add_pairs(a, b);
        out[n][0] = block_order(a);
    }
}
// The same with a scale for each half of a block: 32 int8, of 8 blocks in each of `scales`.
template <class Q, int NT>
INLINE void group_sums(const uint8_t* first, const uint8_t* second, const vb* scales, const int8_t* x,
                       size_t stride, int blocks, vi (*out)[1]) {
    const vi wide = _mm512_cvtepi8_epi16(_mm256_set_m128i(scales[1], scales[0])),
             zero = _mm512_setzero_si512();
    alignas(64) static const uint16_t of_four[32] = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3,
                                                     4, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7};
    vi s[NT][4];
    for (int i = 0; i < 4; i++) {
        for (int n = 0; n < NT; n++) s[n][i] = zero;
        if (4 * i >= blocks) continue;
        vq lo, hi;
        Q::load(first + 4 * Q::first * i, second + 4 * Q::second * i, &lo, &hi);
        const vi scale = _mm512_permutexvar_epi16(
            _mm512_add_epi16(vi_load(of_four), _mm512_set1_epi16(short(8 * i))), wide);
        for (int n = 0; n < NT; n++) {  // four products of at most 63 * 127 fit an i16
            const int8_t* q = x + size_t(n) * stride + 128 * i;
            const vi p = _mm512_packs_epi32(_mm512_dpbusd_epi32(zero, lo, vi_load(q)),
                                            _mm512_dpbusd_epi32(zero, hi, vi_load(q + 64)));
            s[n][i] = _mm512_madd_epi16(p, scale);
        }
    }
    for (int n = 0; n < NT; n++)
        out[n][0] = block_order(add_pairs(add_pairs(s[n][0], s[n][1]), add_pairs(s[n][2], s[n][3])));
}
// Of each block: scale * sum of the first half of x, plus the same of the second; `sums` are pairs of i16.
INLINE void pair_sums(const vb* scales, const int32_t* sums, vi* out) {
    out[0] = _mm512_madd_epi16(_mm512_cvtepi8_epi16(_mm256_set_m128i(scales[1], scales[0])), vi_load(sums));
}
// f16 scales of superblocks, each for 8 of up to 16 blocks.
INLINE void super_scales(const uint16_t* d, int blocks, vf* out) {
    int32_t both = d[0];
    if (blocks > 8) memcpy(&both, d, 4);
    const __m512 two = _mm512_castps128_ps512(_mm_cvtph_ps(_mm_cvtsi32_si128(both)));
    out[0] = _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1), two);
}
// E8M0, halved: 2^(e - 128).
INLINE vf vload_e8m0(const uint8_t* p) {
    const vi e = _mm512_cvtepu8_epi32(vb_load(p)), one = vi_set1(1);
    return _mm512_castsi512_ps(_mm512_max_epi32(
        vi_shl<23>(vi_sub(e, one)), _mm512_sllv_epi32(vi_set1(0x00200000), _mm512_min_epi32(e, one))));
}
INLINE vi vi_sub8(vi a, vi b) { return _mm512_sub_epi8(a, b); }

// 16 rows of 16 dwords -> 16 columns.
INLINE void transpose(vi* t) {
    vi a[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32(t[i], t[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(t[i], t[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {  // t[i + c]: of rows i to i + 3, columns c, 4 + c, 8 + c, 12 + c
        t[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        t[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        t[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        t[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    for (int c = 0; c < 4; c++) {
        const vi p = _mm512_shuffle_i32x4(t[c], t[c + 4], 0x44),
                 q = _mm512_shuffle_i32x4(t[c], t[c + 4], 0xee);
        const vi r = _mm512_shuffle_i32x4(t[c + 8], t[c + 12], 0x44),
                 s = _mm512_shuffle_i32x4(t[c + 8], t[c + 12], 0xee);
        a[c] = _mm512_shuffle_i32x4(p, r, 0x88), a[c + 4] = _mm512_shuffle_i32x4(p, r, 0xdd);
        a[c + 8] = _mm512_shuffle_i32x4(q, s, 0x88), a[c + 12] = _mm512_shuffle_i32x4(q, s, 0xdd);
    }
    for (int i = 0; i < 16; i++) t[i] = a[i];
}

// Words of a's dwords, then of b's: the low ones, the high ones.
INLINE void split_words(vi a, vi b, vi* low, vi* high) {
    alignas(64) static const uint16_t even[32] = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20,
                                                  22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42,
                                                  44, 46, 48, 50, 52, 54, 56, 58, 60, 62};
    const vi i = vi_load(even);
    *low = _mm512_permutex2var_epi16(a, i, b);
    *high = _mm512_permutex2var_epi16(a, _mm512_add_epi16(i, _mm512_set1_epi16(1)), b);
}

// 32 weights of one block as floats, without the scale.
INLINE vf bytes_f32(__m128i b) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(b)); }
INLINE void q8_unpack(const uint8_t* q, vf* out) {
    out[0] = bytes_f32(_mm_loadu_si128((const __m128i*)q));
    out[1] = bytes_f32(_mm_loadu_si128((const __m128i*)(q + 16)));
}
// vpermps reads the low four bits of each index: a table look-up turns a nibble into its float, no conversion
// needed.
template <int ADDED>
INLINE void q4_unpack(const uint8_t* q, vf* out) {
    const vf values = _mm512_sub_ps(_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                    _mm512_set1_ps(ADDED));
    const __m512i n = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)q));
    out[0] = _mm512_permutexvar_ps(n, values);
    out[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(n, 4), values);
}

// popcount(a ^ b) over n bytes.
INLINE __m512i differing(const uint8_t* a, const uint8_t* b,
                         size_t n) {  // 64 bytes, fewer where n says so
    if (n >= 64) return vi_xor(vi_load(a), vi_load(b));
    const __mmask64 some = (uint64_t(1) << n) - 1;
    return vi_xor(_mm512_maskz_loadu_epi8(some, a), _mm512_maskz_loadu_epi8(some, b));
}
INLINE size_t differ_by_table(const uint8_t* a, const uint8_t* b, size_t n) {
    const vi table = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4)),
             low = _mm512_set1_epi8(15);
    vi sum = _mm512_setzero_si512();
    for (size_t i = 0; i < n; i += 64) {
        const vi x = differing(a + i, b + i, n - i);
        const vi counts = _mm512_add_epi8(_mm512_shuffle_epi8(table, vi_and(x, low)),
                                          _mm512_shuffle_epi8(table, vi_and(vi_shr<4>(x), low)));
        sum = _mm512_add_epi64(sum, _mm512_sad_epu8(counts, _mm512_setzero_si512()));
    }
    return size_t(_mm512_reduce_add_epi64(sum));
}
#if defined(__GNUC__)  // vpopcntq came a generation after the rest of this file's instructions
__attribute__((target("avx512vpopcntdq"))) static size_t differ_by_popcount(const uint8_t* a,
                                                                            const uint8_t* b, size_t n) {
    vi sum = _mm512_setzero_si512();
    for (size_t i = 0; i < n; i += 64)
        sum = _mm512_add_epi64(sum, _mm512_popcnt_epi64(differing(a + i, b + i, n - i)));
    return size_t(_mm512_reduce_add_epi64(sum));
}
static const bool has_popcount = __builtin_cpu_supports("avx512vpopcntdq");
INLINE size_t bits_that_differ(const uint8_t* a, const uint8_t* b, size_t n) {
    return has_popcount ? differ_by_popcount(a, b, n) : differ_by_table(a, b, n);
}
#else
INLINE size_t bits_that_differ(const uint8_t* a, const uint8_t* b, size_t n) {
    return differ_by_table(a, b, n);
}
#endif
constexpr bool kInterleaves = true;  // 1.6 to 2.4 times as fast from the L2 cache (Zen 4, 1792 columns)
// Tokens of a matrix tile, times 2 vectors of rows. Int: a sum of a block and one of a lane for each, of 32
// registers (8 tokens spill: 600 against 630 GFLOP/s). Float: one sum, of 24.
constexpr int kTileTokens = 6, kFloatTileTokens = 12;
#ifdef TC_AMX
constexpr bool kMatrixUnit = true;
#else
constexpr bool kMatrixUnit = false;
#endif

// ---- attention

constexpr int kRegisters = 32;
