// Rows of weights times activations, and sums of rows: the kernels of decode, once. Included by each
// isa_*.cpp after its simd_*.h, inside its own namespace, then gemm.inl and ops.inl; no STL, no exceptions
// (an inline STL function compiled with AVX flags here could be the copy the linker keeps for everyone).
// formats.inl has the formats' structs; no other file names one.
//
// The order of additions is the format's: a dot product of a float format adds up chunks of kFloatChunk
// columns; in a chunk, column k goes to lane k mod 32. Of a quantised format, block b (32 columns, an exact
// integer) goes to lane b mod 16. Lanes are added as a binary tree of halves. gemm.inl adds in the same
// order: the same bits.

constexpr int kLanes = 32;

// NOINLINE: a loop over a format's rows, which is a function of its own for each format. With all formats'
// loops inlined where the format is chosen, GCC keeps fewer of their values in registers.
#ifdef _MSC_VER
#define NOINLINE __declspec(noinline)
#else
#define NOINLINE __attribute__((noinline))
#endif

// How far ahead of its use a weight is asked for, in bytes of rows to come. On Zen 4, 8 to 32 KiB measured
// alike. By row, not by address: between two up rows lies a down row nobody wants yet.
constexpr size_t kAhead = 16384;
static inline void prefetch_span(const uint8_t* p, size_t n) {
    for (size_t k = 0; k < n; k += 64) prefetch(p + k);
}
// The lines that n bytes lie in, wherever they begin. TC_INLINE, as `prefetch` is: GCC 12 takes a function
// that only asks for memory for one without effects, and had dropped calls of this one.
static TC_INLINE void prefetch_lines(const uint8_t* p, size_t n) {
    for (size_t at = (size_t)p / 64 * 64; at < (size_t)p + n; at += 64) prefetch((const void*)at);
}
// The next part of a row: the lines that begin in it. (The first line of a row is asked for by itself.) Every
// line once: asking for every second, fourth or eighth and leaving the rest to the hardware halves the speed
// of gathered rows.
static inline void prefetch_on(const uint8_t* p, size_t n) {
    const size_t first = (0 - (size_t)p) % 64;
    if (rows_near.load(std::memory_order_relaxed))
        for (size_t k = first; k < n; k += 64) prefetch_near(p + k);
    else
        for (size_t k = first; k < n; k += 64) prefetch(p + k);
}
// n bytes into the first level, of what is read next.
static inline void prefetch_near_span(const uint8_t* p, size_t n) {
    for (size_t k = 0; k < n; k += 64) prefetch_near(p + k);
}
static inline size_t smaller(size_t a, size_t b) { return a < b ? a : b; }
static inline size_t sign_bytes(size_t cols) { return row_bytes(SIGNS, cols); }

// f(t, tile size) over all tokens: tiles of NT, then one of what is left.
template <int N>
struct Constant {
    static constexpr int value = N;
};
template <int NT, class Fn>
static void tiles(size_t t, size_t tokens, Fn f) {
    for (; t + NT <= tokens; t += NT) f(t, Constant<NT>());
    if constexpr (NT > 1) tiles<NT - 1>(t, tokens, f);
}

// The first n of a vector's lanes, n >= 0.
static inline vf x_some(const float* p, int n) { return n >= W ? vload(p) : vload_n(p, n); }
static inline void store_some(float* p, vf x, int n) {
    if (n >= W)
        vstore(p, x);
    else
        vstore_n(p, x, n);
}

// The sum of N vectors as a tree of halves. (As a loop whose bound is halved it kept `dot`'s sums in memory.)
template <int N>
static inline vf halves(vf* a) {
    if constexpr (N > 1) {
        for (int i = 0; i < N / 2; i++) a[i] = vadd(a[i], a[i + N / 2]);
        return halves<N / 2>(a);
    }
    return a[0];
}

#include "formats.inl"

// ---------------------------------------------------------------------------------------------- dot products

// Rows of at most 8 blocks, as a predictor's second half has: as many as fill a chunk are multiplied at once.
// One by one they cost three times what memory takes for them. The same bits: a row's lanes are added as in
// `dot`.
constexpr size_t kShortBlocks = 8;
template <class F>
static void short_rows(const Matrix& w, size_t begin, size_t end, const Input& x, const float* bias, bool add,
                       float* y, size_t ldy) {
    const size_t blocks = w.cols / 32;
    size_t lanes = 1;  // of a row: its blocks, and zeros up to a power of two
    while (lanes < blocks) lanes *= 2;
    XChunk many[kFewTokens];  // each token's blocks over and over
    for (size_t t = 0; t < x.tokens; t++) {
        const XChunk* once = (const XChunk*)(x.data + t * x.row_bytes);
        for (size_t at = 0; at < 16; at += lanes) {
            memcpy(many[t].q + 32 * at, once->q, 32 * lanes);
            memcpy(many[t].d + at, once->d, 4 * lanes);
            memcpy(many[t].extra + at, once->extra, 4 * lanes);
        }
    }
    constexpr size_t size = F::Numbers::first;
    alignas(64) uint8_t q[16 * size] = {};
    uint16_t d[16] = {};
    const Planes both = {{q, (const uint8_t*)d}};
    for (size_t r = begin; r < end; r += 16 / lanes) {
        const size_t rows = smaller(16 / lanes, end - r);
        prefetch_on(w.data + r * w.stride + kAhead, rows * w.stride);
        for (size_t i = 0; i < rows; i++) {
            const Planes row = F::planes(w.data + (r + i) * w.stride, w.cols, 0);
            for (size_t b = 0; b < blocks; b++)
                memcpy(q + size * (i * lanes + b), row.at[0] + size * b, size);
            for (size_t b = 0; b < blocks; b++) d[i * lanes + b] = row.f16(1)[b];
        }
        for (size_t t = 0; t < x.tokens; t++) {
            vf acc[1][16 / W];
            for (int v = 0; v < 16 / W; v++) acc[0][v] = vzero();
            F::template add_chunk<1, 16>(both, &many[t], 0, 16, acc);
            float sums[16];
            for (int v = 0; v < 16 / W; v++) vstore(sums + v * W, acc[0][v]);
            for (size_t half = lanes / 2; half; half /= 2)
                for (size_t i = 0; i < 16 - half; i++) sums[i] += sums[i + half];
            for (size_t i = 0; i < rows; i++) {
                float* out = y + t * ldy + (r + i - begin);
                const float v = sums[i * lanes] + (bias ? bias[r + i] : 0.0f);
                *out = add ? *out + v : v;
            }
        }
    }
}

template <class F>
NOINLINE static void matmul_rows(const Matrix& w, const int32_t* ids, size_t begin, size_t end,
                                 const Input& x, const float* bias, bool add, float* y, size_t ldy) {
    if constexpr (F::packs_short_rows)
        if (!ids && w.cols <= 32 * kShortBlocks && x.tokens <= kFewTokens)
            return short_rows<F>(w, begin, end, x, bias, add, y, ldy);
    const size_t ahead = kAhead / F::row_bytes(w.cols) + 1;
    auto number = [&](size_t r) { return ids ? size_t(ids[r]) : r; };
    for (size_t r = begin; r < smaller(end, begin + ahead); r++)
        prefetch_on(w.data + number(r) * w.stride, F::row_bytes(w.cols));
    for (size_t r = begin; r < end; r++) {
        const size_t id = number(r);
        const uint8_t* next = w.data + number(smaller(r + ahead, end - 1)) * w.stride;
        tiles<F::row_tokens>(0, x.tokens, [&](size_t t, auto nt) {
            float sums[nt.value];
            F::template dot<nt.value>(w.data + id * w.stride, next, x.data + t * x.row_bytes, x.row_bytes,
                                      w.cols, sums);
            for (size_t n = 0; n < nt.value; n++) {
                float* out = y + (t + n) * ldy + (r - begin);
                const float v = sums[n] + (bias ? bias[id] : 0.0f);
                *out = add ? *out + v : v;
            }
        });
    }
}

// ---------------------------------------------------------------------------------------------- weighted row
// sums
//
// y += h_i * row_i, as fma(q, h_i * scale, y) with the product of h and the scale rounded once: the same in
// all paths.

// One token: G rows at a time straight from the stored format, y loaded and stored once per group; meanwhile
// the G rows at `next` are asked for, one after the other. factors: scratch for what F::scales gives of
// G rows.
template <class F, int G>
static void accumulate_group(const uint8_t* const* rows, const float* h, size_t cols, float* y,
                             const uint8_t* const* next, float* factors) {
    constexpr int U = 32 / W;
    const size_t blocks = (cols + 31) / 32;
    for (int g = 0; g < G; g++)
        F::scales(rows[g], cols, 0, blocks, h[g], factors + size_t(g) * F::factors * blocks);
    const size_t row = F::row_bytes(cols);
    size_t c = 0, ahead = 0, segment = 0;
    auto block = [&](size_t c) {
        vf acc[U];
        for (int k = 0; k < U; k++) acc[k] = vload(y + c + k * W);
        for (int g = 0; g < G; g++) {
            vf w[U];
            const float* const scales = factors + size_t(g) * F::factors * blocks;
            F::unpack(rows[g], cols, c, scales, blocks, c / 32, w);
            const vf f = vset1(F::apart ? scales[c / 32] : h[g]);
            for (int k = 0; k < U; k++) acc[k] = vfma(w[k], f, acc[k]);
        }
        for (int k = 0; k < U; k++) vstore(y + c + k * W, acc[k]);
    };
    for (; c + 128 <= cols; c += 128) {  // four blocks a turn: instructions bound this loop, not memory
        const size_t span = G * F::row_bytes(128);
        if (ahead == 0) prefetch(next[segment]);
        prefetch_on(next[segment] + ahead, span);
        if ((ahead += span) >= row && segment + 1 < G) ahead = 0, segment++;
        for (size_t i = 0; i < 128; i += 32) block(c + i);
    }
    for (; c + 32 <= cols; c += 32) block(c);
    for (; c < cols; c += W) {
        const int n = int(smaller(W, cols - c));
        vf acc = vload_n(y + c, n);
        for (int g = 0; g < G; g++) acc = vfma(F::unpack_n(rows[g], c, n), vset1(h[g]), acc);
        vstore_n(y + c, acc, n);
    }
}

// Several tokens: a tile of rows is unpacked once (32 KiB), then each token adds those of them whose h is not
// 0. Zeros, most of a ReLU's, would add nothing. A tile has a few bytes of each row, so no row leads to the
// next: each is asked for while this many before it are unpacked. (Without, a quarter of the samples in here
// waited for them: q4_0, AVX2, Zen 3.)
constexpr size_t kRowsAhead = 16;

static inline int lowest_bit(uint64_t bits) {
#ifdef _MSC_VER
    unsigned long at;
    _BitScanForward64(&at, bits);
    return int(at);
#else
    return __builtin_ctzll(bits);
#endif
}

static_assert(kTileRows <= 64, "a tile's rows are bits of one word");
// Bit g: whether h[g] is not 0. n <= 64.
static uint64_t nonzero_bits(const float* h, size_t n) {
    uint64_t bits = 0;
    size_t g = 0;
    for (; g + W <= n; g += W) bits |= uint64_t(vnonzero(vload(h + g))) << g;
    if (g < n) bits |= uint64_t(vnonzero(vload_n(h + g, int(n - g)))) << g;
    return bits;
}

// y[0, 32 * B) += the tile's rows in `bits`, ascending, each times its h and the scale of the block. The last
// block has `left` columns.
template <class F, int B>
static TC_INLINE void add_listed(const float* tile, const float (*scale)[kTileColumns / 32], size_t first,
                                 const float* h, uint64_t bits, int left, float* y) {
    constexpr int U = 32 / W;
    constexpr bool one_factor = F::block == 1 || !F::apart;  // of a row, and not of each block
    vf acc[B][U];
    auto columns = [&](int b, int u) { return b < B - 1 ? W : left > u * W ? left - u * W : 0; };
    for (int b = 0; b < B; b++)
        for (int u = 0; u < U; u++) acc[b][u] = x_some(y + 32 * b + u * W, columns(b, u));
    for (; bits; bits &= bits - 1) {
        const int g = lowest_bit(bits);
        const float* row = tile + size_t(g) * kTileColumns;
        for (int b = 0; b < B; b++) {
            const vf f = vset1(one_factor ? h[g] : scale[g][first + size_t(b)] * h[g]);
            for (int u = 0; u < U; u++) acc[b][u] = vfma(vload(row + 32 * b + u * W), f, acc[b][u]);
        }
    }
    for (int b = 0; b < B; b++)
        for (int u = 0; u < U; u++) store_some(y + 32 * b + u * W, acc[b][u], columns(b, u));
}

template <class F>
NOINLINE static void accumulate_format(const Matrix& w, const int32_t* ids, size_t n, const float* h,
                                       size_t ldh, size_t tokens, size_t begin, size_t end, float* y,
                                       size_t ldy, float* tile) {
    constexpr size_t G = kTileRows, C = kTileColumns, B = W / 4;  // blocks with 8 vectors of sums
    const size_t width = end - begin, blocks = (width + 31) / 32;
    for (size_t k0 = 0; k0 < n; k0 += G) {
        const size_t rows = smaller(G, n - k0);
        float scale[G][C / 32];
        for (size_t g = 0; g < rows; g++) {
            const uint8_t* row = w.data + size_t(ids[k0 + g]) * w.stride;
            if (const size_t soon = k0 + g + kRowsAhead; soon < n)
                F::ask(w.data + size_t(ids[soon]) * w.stride, w.cols, begin, width);
            float s[kChunkFactors];
            F::scales(row, w.cols, begin, blocks, 1.0f, s);
            for (size_t b = 0; b < blocks; b++) scale[g][b] = s[b];
            size_t c = 0;
            for (; c + 32 <= width; c += 32) {
                vf u[32 / W];
                F::unpack(row, w.cols, begin + c, s, blocks, c / 32, u);
                for (int k = 0; k < 32 / W; k++) vstore(tile + g * C + c + k * W, u[k]);
            }
            for (; c < width; c += W)
                vstore(tile + g * C + c, F::unpack_n(row, begin + c, int(smaller(W, width - c))));
        }
        for (size_t t = 0; t < tokens; t++) {
            const float* of = h + t * ldh + k0;
            const uint64_t bits = nonzero_bits(of, rows);
            size_t b = 0;
            for (; bits && 32 * (b + B) <= width; b += B)
                add_listed<F, int(B)>(tile + 32 * b, scale, b, of, bits, 32, y + t * ldy + 32 * b);
            for (; bits && b < blocks; b++)
                add_listed<F, 1>(tile + 32 * b, scale, b, of, bits, int(smaller(32, width - 32 * b)),
                                 y + t * ldy + 32 * b);
        }
    }
}

// A few tokens, all columns: the group's up rows, then its down rows, each half of its own format. Meanwhile
// the next group's records are asked for at the rate at which this group's are used up. Where both halves
// are of one format they are asked for in the order they lie in memory, which then sees one stream; else up
// rows beside up rows, since a half asks for as many bytes as it reads.
template <class F, int G>
static void up_group(const uint8_t* const* up, const uint8_t* const* next, const Input& x, size_t cols,
                     float (*u)[kFewTokens]) {
    for (int g = 0; g < G; g++)
        tiles<F::row_tokens>(0, x.tokens, [&](size_t t, auto nt) {
            F::template dot<nt.value>(up[g], next[g], x.data + t * x.row_bytes, x.row_bytes, cols, u[g] + t);
        });
}

// The two halves of G records, each chosen by its format: pairs of formats would be N x N loops.
template <int G>
struct Halves {
    void (*up)(const uint8_t* const* up, const uint8_t* const* next, const Input& x, size_t cols,
               float (*u)[kFewTokens]) = nullptr;
    void (*down)(const uint8_t* const* rows, const float* h, size_t cols, float* y,
                 const uint8_t* const* next, float* factors) = nullptr;
    explicit Halves(const Bundles& w) {
        if (w.up.data) for_format(w.up.format, [&](auto f) { up = up_group<decltype(f), G>; });
        for_format(w.down.format, [&](auto f) { down = accumulate_group<decltype(f), G>; });
    }
};

template <int G>
static size_t bundle_group(const Halves<G>& half, const Bundles& w, size_t k, const Input& x,
                           const float* gate, size_t ldg, float* y, float* factors) {
    const uint8_t *up[G] = {}, *down[G], *next[2 * G];
    const size_t dim = w.down.cols;
    const bool gated = w.up.data != nullptr, alike = w.up.format == w.down.format;
    size_t live = 0;
    for (int g = 0; g < G; g++) {
        const size_t row = size_t(w.rows[k + g]), later = size_t(w.rows[smaller(k + G + g, w.listed - 1)]);
        down[g] = w.down.data + row * w.down.stride;
        next[gated && alike ? 2 * g + 1 : G + g] = w.down.data + later * w.down.stride;
        if (!gated) continue;
        up[g] = w.up.data + row * w.up.stride;
        next[alike ? 2 * g : g] = w.up.data + later * w.up.stride;
    }
    float u[G][kFewTokens];
    if (gated) half.up(up, next, x, dim, u);
    for (size_t t = 0; t < x.tokens; t++) {
        float h[G];
        for (int g = 0; g < G; g++) {
            h[g] = gate[t * ldg + size_t(w.ids[k + g])];
            if (gated) h[g] = w.up_relu && u[g][t] <= 0 ? 0.0f : h[g] * u[g][t];
        }
        for (int g = 0; g < G; g++) live += h[g] != 0;
        half.down(down, h, dim, y + t * dim, next + G, factors);
    }
    return live;
}

template <class F>
static void decode_row_format(const uint8_t* row, size_t cols, float* out) {
    for (size_t c = 0; c < cols; c += 32) {
        float scales[kChunkFactors];
        F::scales(row, cols, c, 1, 1.0f, scales);
        const float scale = F::apart ? scales[0] : 1.0f;
        vf u[32 / W];
        if (c + 32 <= cols) {
            F::unpack(row, cols, c, scales, 1, 0, u);
            for (int k = 0; k < 32 / W; k++) vstore(out + c + k * W, vmul(u[k], vset1(scale)));
        } else {
            for (size_t i = c; i < cols; i += W) {
                const int n = int(cols - i < size_t(W) ? cols - i : size_t(W));
                vstore_n(out + i, F::unpack_n(row, i, n), n);
            }
        }
    }
}

static void accumulate(const Matrix& w, const int32_t* ids, size_t n, const float* h, size_t ldh,
                       size_t tokens, size_t begin, size_t end, float* y, size_t ldy, float* scratch) {
    for_format(w.format, [&](auto f) {
        accumulate_format<decltype(f)>(w, ids, n, h, ldh, tokens, begin, end, y, ldy, scratch);
    });
}
static size_t bundles(const Bundles& w, const Input& x, const float* gate, size_t ldg, float* y,
                      float* factors) {
    const Halves<4> four(w);
    const Halves<1> one(w);
    size_t k = 0, live = 0;
    for (; k + 4 <= w.n; k += 4) live += bundle_group<4>(four, w, k, x, gate, ldg, y, factors);
    for (; k < w.n; k++) live += bundle_group<1>(one, w, k, x, gate, ldg, y, factors);
    return live;
}
static void decode_row(const Matrix& w, size_t row, float* out) {
    if (w.group == 1)
        return for_format(
            w.format, [&](auto f) { decode_row_format<decltype(f)>(w.data + row * w.stride, w.cols, out); });
    alignas(64) uint8_t part[kMostSlabBytes];
    const uint8_t* group = w.data + row / w.group * w.group * w.stride;
    for (size_t c = 0, n; c < w.cols; c += n) {
        n = smaller(32 * kSlab, w.cols - c);
        slab_row(w.format, n, w.group, row % w.group, group + row_bytes(w.format, c) * w.group, part);
        for_format(w.format, [&](auto f) { decode_row_format<decltype(f)>(part, n, out + c); });
    }
}
