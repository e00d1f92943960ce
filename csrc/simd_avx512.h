// The vector vocabulary for AVX-512 (F, BW, VL, DQ, VNNI). simd_scalar.h says what each does.
#pragma once
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "quant.inl"

constexpr int W = 16;
using vf = __m512;

static inline __mmask16 lanes_below(int n) { return __mmask16((1u << n) - 1); }
static inline float f16_to_f32(uint16_t h) { return _cvtsh_ss(h); }
static inline vf vset1(float x) { return _mm512_set1_ps(x); }
static inline vf vzero() { return _mm512_setzero_ps(); }
static inline vf vload(const float* p) { return _mm512_loadu_ps(p); }
static inline vf vload_n(const float* p, int n) { return _mm512_maskz_loadu_ps(lanes_below(n), p); }
static inline void vstore(float* p, vf a) { _mm512_storeu_ps(p, a); }
static inline void vstore_n(float* p, vf a, int n) { _mm512_mask_storeu_ps(p, lanes_below(n), a); }
static inline vf vload_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
static inline vf vload_f16_n(const uint16_t* p, int n) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes_below(n), p));
}
static inline void vstore_f16_n(uint16_t* p, vf a, int n) {
    _mm256_mask_storeu_epi16(p, lanes_below(n), _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
static inline vf widen_bf16(__m256i h) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16)); }
static inline vf vload_bf16(const uint16_t* p) { return widen_bf16(_mm256_loadu_si256((const __m256i*)p)); }
static inline vf vload_bf16_n(const uint16_t* p, int n) {
    return widen_bf16(_mm256_maskz_loadu_epi16(lanes_below(n), p));
}
static inline vf vadd(vf a, vf b) { return _mm512_add_ps(a, b); }
static inline vf vsub(vf a, vf b) { return _mm512_sub_ps(a, b); }
static inline vf vmul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static inline vf vdiv(vf a, vf b) { return _mm512_div_ps(a, b); }
static inline vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
static inline vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }
static inline vf vabs(vf a) { return _mm512_abs_ps(a); }
static inline vf vfma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static inline vf vround(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline vf vpow2(vf a) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(a), _mm512_set1_epi32(127)), 23));
}
static inline vf vgate(vf x, vf threshold) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, threshold, _CMP_GT_OQ), x);
}
static inline float vsum(vf a) {
    const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
static inline float vmaximum(vf a) { return _mm512_reduce_max_ps(a); }
// Into L2: a group of records, the next one, x and y together outgrow an L1.
static inline void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }

constexpr int QB = 2;
// One step is two blocks; per-lane copies of scale and sum turn their use into plain loads. 192 bytes.
struct XBlock {
    int8_t q[64];
    float d[16];
    int32_t ns[16];  // minus the sum of q over the lane's block
};
static inline void x_quantize(const float* x, int blocks, XBlock* out) {
    memset(out, 0, sizeof *out);
    for (int b = 0; b < blocks; b++) {
        const vf lo = vload(x + 32 * b), hi = vload(x + 32 * b + 16);
        const float nan = vsum(vadd(vsub(lo, lo), vsub(hi, hi)));
        const float top = nan == 0 ? vmaximum(vmax(vabs(lo), vabs(hi))) : 0, inverse = top > 1e-36f ? 127.0f / top : 0;
        const __m512i qlo = _mm512_cvtps_epi32(vmul(lo, vset1(inverse)));
        const __m512i qhi = _mm512_cvtps_epi32(vmul(hi, vset1(inverse)));
        _mm_storeu_si128((__m128i*)(out->q + 32 * b), _mm512_cvtepi32_epi8(qlo));
        _mm_storeu_si128((__m128i*)(out->q + 32 * b + 16), _mm512_cvtepi32_epi8(qhi));
        const int32_t ns = _mm512_reduce_add_epi32(_mm512_sub_epi32(_mm512_setzero_si512(), _mm512_add_epi32(qlo, qhi)));
        for (int i = 8 * b; i < 8 * b + 8; i++) out->d[i] = top / 127.0f + nan, out->ns[i] = ns;
    }
}
struct QW {
    __m512i q;  // unsigned bytes: q8_0 offset by 128, q4_0 by 8
    vf d;
};
static inline vf two_scales(uint16_t a, uint16_t b) {
    const __m128i lo = _mm_set1_epi16(short(a)), hi = _mm_set1_epi16(short(b));
    return _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(lo), hi, 1));
}
static inline QW q8_load(const BlockQ8_0* b, int blocks) {
    const __m512i flip = _mm512_set1_epi8(char(0x80));
    const __m512i lo = _mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i*)b[0].q));
    if (blocks < 2) return {_mm512_xor_si512(lo, flip), two_scales(b[0].d, 0)};
    const __m512i q = _mm512_inserti64x4(lo, _mm256_loadu_si256((const __m256i*)b[1].q), 1);
    return {_mm512_xor_si512(q, flip), two_scales(b[0].d, b[1].d)};
}
// Two blocks are 36 bytes: one load of 64 (arenas end in kArenaPadding), and two permutations of its words put nibbles
// and scales in their lanes. Vector ports are what bounds q4_0 here: 34 -> 40 GB/s over separate broadcasts.
static inline QW q4_load(const BlockQ4_0* b, int blocks) {
    const __m512i shift = _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4), low = _mm512_set1_epi8(15);
    if (blocks < 2) {
        const __m512i raw = _mm512_maskz_broadcast_i32x4(0x00ff, _mm_loadu_si128((const __m128i*)b[0].q));
        return {_mm512_and_si512(_mm512_srlv_epi64(raw, shift), low), two_scales(b[0].d, 0)};
    }
    const __m512i all = _mm512_loadu_si512(b);
    const __m512i words = _mm512_setr_epi64(0x0004000300020001, 0x0008000700060005, 0x0004000300020001, 0x0008000700060005,
                                            0x000d000c000b000a, 0x00110010000f000e, 0x000d000c000b000a, 0x00110010000f000e);
    const __m256i where = _mm256_setr_epi64x(0, 0, 0x0009000900090009, 0x0009000900090009);
    const __m512i q = _mm512_srlv_epi64(_mm512_permutexvar_epi16(words, all), shift);
    return {_mm512_and_si512(q, low), _mm512_cvtph_ps(_mm256_permutexvar_epi16(where, _mm512_castsi512_si256(all)))};
}
// sum (u - 128) x = sum u x - 128 sum x: each of a block's eight lanes starts at an eighth of that, 16 * ns.
static inline vf q8_dot(const QW& w, const XBlock* x, vf acc) {
    const __m512i start = _mm512_slli_epi32(_mm512_loadu_si512(x->ns), 4);
    const __m512i s = _mm512_dpbusd_epi32(start, w.q, _mm512_loadu_si512(x->q));
    return vfma(_mm512_cvtepi32_ps(s), vmul(w.d, vload(x->d)), acc);
}
static inline vf q4_dot(const QW& w, const XBlock* x, vf acc) {
    const __m512i s = _mm512_dpbusd_epi32(_mm512_loadu_si512(x->ns), w.q, _mm512_loadu_si512(x->q));
    return vfma(_mm512_cvtepi32_ps(s), vmul(w.d, vload(x->d)), acc);
}
static inline vf bytes_f32(__m128i b) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(b)); }
static inline void q8_unpack(const BlockQ8_0* b, vf* out) {
    out[0] = bytes_f32(_mm_loadu_si128((const __m128i*)b->q));
    out[1] = bytes_f32(_mm_loadu_si128((const __m128i*)(b->q + 16)));
}
// vpermps reads the low four bits of each index: a table look-up turns a nibble into its float, no conversion needed.
static inline void q4_unpack(const BlockQ4_0* b, vf* out) {
    const vf values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    const __m512i q = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)b->q));
    out[0] = _mm512_permutexvar_ps(q, values);
    out[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(q, 4), values);
}
// The scales of 16 blocks. A 64-byte load holds two of q8_0 (words 0 and 17) or four of q4_0 (words 0, 9, 18, 27); a
// masked permutation puts them in place. One by one through an array they cost a quarter of a down row's time.
template <int PER_LOAD, class Block>
static inline vf sixteen_scales(const Block* b, __m512i words) {
    __m512i d = _mm512_setzero_si512();
    for (int i = 0; i < 16; i += PER_LOAD)
        d = _mm512_mask_permutexvar_epi16(d, ((1u << PER_LOAD) - 1) << i, words, _mm512_loadu_si512(b + i));
    return _mm512_cvtph_ps(_mm512_castsi512_si256(d));
}
static inline vf q8_scales(const BlockQ8_0* b) { return sixteen_scales<2>(b, _mm512_set1_epi32(0x00110000)); }
static inline vf q4_scales(const BlockQ4_0* b) { return sixteen_scales<4>(b, _mm512_set1_epi64(0x001b001200090000)); }
