// Rows of weights times activations, and sums of rows: the kernels of decode, once. Included by each
// isa_*.cpp after its simd_*.h, inside its own namespace, then gemm.inl and ops.inl; no STL, no exceptions
// (an inline STL function compiled with AVX flags here could be the copy the linker keeps for everyone).
//
// A format is a struct of: row_bytes, dot (one row, one token), unpack (weights as floats without their
// scale), scales (of every 32 columns; 1 for float formats) and, in gemm.inl, a panel.
//
// The order of additions is the format's: a dot product of a float format adds up chunks of kFloatChunk
// columns; in a chunk, column k goes to lane k mod 32. Of a quantised format, block b (32 columns, an exact
// integer) goes to lane b mod 16. Lanes are added as a binary tree of halves. gemm.inl adds in the same
// order: the same bits.

constexpr int kLanes = 32;

// How far ahead of its use a weight is asked for, in bytes of rows to come. 4 to 10 KiB measured alike.
// By row, not by address: between two up rows lies a down row nobody wants yet.
constexpr size_t kAhead = 8192;
static inline void prefetch_span(const uint8_t* p, size_t n) {
    for (size_t k = 0; k < n; k += 64) prefetch(p + k);
}
// The next part of a row: the lines that begin in it. (The first line of a row is asked for by itself.) Every
// line once: asking for every second, fourth or eighth and leaving the rest to the hardware halves the speed
// of gathered rows.
static inline void prefetch_on(const uint8_t* p, size_t n) {
    for (size_t k = (0 - (size_t)p) % 64; k < n; k += 64) prefetch(p + k);
}
static inline size_t smaller(size_t a, size_t b) { return a < b ? a : b; }
static inline size_t sign_bytes(size_t cols) { return (cols + 7) / 8; }

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

static vf x_some(const float* p, int n) { return n >= W ? vload(p) : vload_n(p, n); }

// The sum of N vectors as a tree of halves. (As a loop whose bound is halved it kept `dot`'s sums in memory.)
template <int N>
static inline vf halves(vf* a) {
    if constexpr (N > 1) {
        for (int i = 0; i < N / 2; i++) a[i] = vadd(a[i], a[i + N / 2]);
        return halves<N / 2>(a);
    }
    return a[0];
}

template <class T, vf (*LOAD)(const T*), vf (*LOAD_N)(const T*, int)>
struct FormatFloat {
    using Stored = T;
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
    static void unpack(const uint8_t* row, size_t c, vf* out) {
        for (int k = 0; k < 32 / W; k++) out[k] = LOAD((const T*)row + c + k * W);
    }
    static vf unpack_n(const uint8_t* row, size_t c, int n) { return LOAD_N((const T*)row + c, n); }
    static void scales(const uint8_t*, size_t, size_t, size_t n, float h, float* out) {
        for (size_t b = 0; b < n; b++) out[b] = h;
    }
};
using FormatF32 = FormatFloat<float, vload, vload_n>;
using FormatF16 = FormatFloat<uint16_t, vload_f16, vload_f16_n>;
using FormatBF16 = FormatFloat<uint16_t, vload_bf16, vload_bf16_n>;

// One token's activations for the row kernels: chunks of 16 blocks. Blocks past the end are zero, scale and
// all.
struct XChunk {
    int8_t q[512];  // q4_0: low halves of kQ4Group blocks, then their high halves, as the nibbles lie in a
                    // vector
    float d[16];
    int32_t offset[16];  // - (what was added to the weights) * (sum of q)
};

// QUANT: bytes of 32 quants.
template <int QUANT, void (*UNPACK)(const uint8_t*, vf*)>
struct FormatQ {
    static constexpr int quant_bytes = QUANT, row_tokens = kRowTokens;
    static size_t row_bytes(size_t n) { return n / 32 * (QUANT + 2); }
    static const uint16_t* row_scales(const uint8_t* row, size_t cols) {
        return (const uint16_t*)(row + cols / 32 * QUANT);
    }
    template <int NT>
    static inline void add_chunk(const uint8_t* q, const uint16_t* d, const XChunk* first, size_t stride,
                                 int blocks, vf (*acc)[16 / W]) {
        vi sums[NT][16 / W];
        if constexpr (QUANT == 32)
            q8_sums<NT>(q, first->q, stride, blocks, sums);
        else
            q4_sums<NT>(q, first->q, stride, blocks, sums);
        for (int v = 0; v < 16 / W; v++) {
            const int left = blocks - v * W;
            const vf scale = left >= W  ? vload_f16(d + v * W)
                             : left > 0 ? vload_f16_n(d + v * W, left)
                                        : vzero();
            for (int n = 0; n < NT; n++) {
                const XChunk* x = (const XChunk*)((const uint8_t*)first + size_t(n) * stride);
                const vf s = vi_f32(vi_add(sums[n][v], vi_load(x->offset + v * W)));
                acc[n][v] = vfma(s, vmul(scale, vload(x->d + v * W)), acc[n][v]);
            }
        }
    }
    template <int NT>
    static void dot(const uint8_t* row, const uint8_t* next, const uint8_t* input, size_t stride, size_t cols,
                    float* out) {
        const XChunk* x = (const XChunk*)input;
        const uint16_t* d = row_scales(row, cols);
        const size_t blocks = cols / 32;
        vf acc[NT][16 / W];
        for (int n = 0; n < NT; n++)
            for (int v = 0; v < 16 / W; v++) acc[n][v] = vzero();
        size_t b = 0;
        prefetch(next);
        for (; b + 16 <= blocks; b += 16, x++, next += 16 * (QUANT + 2)) {
            prefetch_on(next, 16 * (QUANT + 2));
            add_chunk<NT>(row + b * QUANT, d + b, x, stride, 16, acc);
        }
        if (b < blocks) {
            prefetch_on(next, (blocks - b) * (QUANT + 2));
            add_chunk<NT>(row + b * QUANT, d + b, x, stride, int(blocks - b), acc);
        }
        for (int n = 0; n < NT; n++) {
            for (int v = 1; v < 16 / W; v++) acc[n][0] = vadd(acc[n][0], acc[n][v]);
            out[n] = vsum(acc[n][0]);
        }
    }
    static void unpack(const uint8_t* row, size_t c, vf* out) { UNPACK(row + c / 32 * QUANT, out); }
    static vf unpack_n(const uint8_t*, size_t, int) { return vzero(); }  // cols % 32 == 0: never reached
    // out[b] = h * scale of block c/32 + b, for b in [0, n)
    static void scales(const uint8_t* row, size_t cols, size_t c, size_t n, float h, float* out) {
        const uint16_t* d = row_scales(row, cols) + c / 32;
        size_t b = 0;
        for (; b + W <= n; b += W) vstore(out + b, vmul(vload_f16(d + b), vset1(h)));
        if (b < n) vstore_n(out + b, vmul(vload_f16_n(d + b, int(n - b)), vset1(h)), int(n - b));
    }
};
using FormatQ8_0 = FormatQ<32, q8_unpack>;
using FormatQ4_0 = FormatQ<16, q4_unpack>;

// Bits of weights and of activations (packed by `quantize`): only `matmul` knows them.
struct FormatSigns {
    static size_t row_bytes(size_t n) { return sign_bytes(n); }
    static constexpr int row_tokens = 1;
    template <int NT>
    static void dot(const uint8_t* row, const uint8_t* next, const uint8_t* input, size_t, size_t cols,
                    float* out) {
        prefetch_span(next, sign_bytes(cols));
        *out = float(int64_t(cols) - 2 * int64_t(bits_that_differ(row, input, sign_bytes(cols))));
    }
};

#define FOR_FORMAT(format, CALL)  \
    switch (format) {             \
        case F32: {               \
            using F = FormatF32;  \
            CALL;                 \
            break;                \
        }                         \
        case F16: {               \
            using F = FormatF16;  \
            CALL;                 \
            break;                \
        }                         \
        case BF16: {              \
            using F = FormatBF16; \
            CALL;                 \
            break;                \
        }                         \
        case Q8_0: {              \
            using F = FormatQ8_0; \
            CALL;                 \
            break;                \
        }                         \
        case Q4_0: {              \
            using F = FormatQ4_0; \
            CALL;                 \
            break;                \
        }                         \
        default:                  \
            break;                \
    }

// ---------------------------------------------------------------------------------------------- dot products

// Rows of at most 8 blocks of q8_0, as a predictor's second half has: as many as fill a chunk are multiplied
// at once. One by one they cost three times what memory takes for them. The same bits: a row's lanes are
// added as in `dot`.
constexpr size_t kShortBlocks = 8;
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
            memcpy(many[t].offset + at, once->offset, 4 * lanes);
        }
    }
    alignas(64) uint8_t q[512] = {};
    uint16_t d[16] = {};
    for (size_t r = begin; r < end; r += 16 / lanes) {
        const size_t rows = smaller(16 / lanes, end - r);
        prefetch_on(w.data + r * w.stride + kAhead, rows * w.stride);
        for (size_t i = 0; i < rows; i++) {
            const uint8_t* row = w.data + (r + i) * w.stride;
            for (size_t b = 0; b < blocks; b++) memcpy(q + 32 * (i * lanes + b), row + 32 * b, 32);
            for (size_t b = 0; b < blocks; b++) d[i * lanes + b] = FormatQ8_0::row_scales(row, w.cols)[b];
        }
        for (size_t t = 0; t < x.tokens; t++) {
            vf acc[1][16 / W];
            for (int v = 0; v < 16 / W; v++) acc[0][v] = vzero();
            FormatQ8_0::add_chunk<1>(q, d, &many[t], 0, 16, acc);
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
static void matmul_rows(const Matrix& w, const int32_t* ids, size_t begin, size_t end, const Input& x,
                        const float* bias, bool add, float* y, size_t ldy) {
    if (w.format == Q8_0 && !ids && w.cols <= 32 * kShortBlocks && x.tokens <= kFewTokens)
        return short_rows(w, begin, end, x, bias, add, y, ldy);
    const size_t ahead = kAhead / F::row_bytes(w.cols) + 1;
    for (size_t r = begin; r < end; r++) {
        const size_t id = ids ? size_t(ids[r]) : r, later = smaller(r + ahead, end - 1);
        const uint8_t* next = w.data + (ids ? size_t(ids[later]) : later) * w.stride;
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
// the G rows at `next` are asked for, one after the other. factors: G * blocks floats of scratch, h * scale
// of 32 columns.
template <class F, int G>
static void accumulate_group(const uint8_t* const* rows, const float* h, size_t cols, float* y,
                             const uint8_t* const* next, float* factors) {
    constexpr int U = 32 / W;
    const size_t blocks = (cols + 31) / 32;
    for (int g = 0; g < G; g++) F::scales(rows[g], cols, 0, blocks, h[g], factors + size_t(g) * blocks);
    const size_t row = F::row_bytes(cols);
    size_t c = 0, ahead = 0, segment = 0;
    auto block = [&](size_t c) {
        vf acc[U];
        for (int k = 0; k < U; k++) acc[k] = vload(y + c + k * W);
        for (int g = 0; g < G; g++) {
            vf w[U];
            F::unpack(rows[g], c, w);
            const vf f = vset1(factors[size_t(g) * blocks + c / 32]);
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

// Several tokens: a tile of rows is unpacked once (8 KiB, in L1), then added to every token, NT at a time.
// factor[n][g] = h * scale of the tile's block; columns [c, c + left) of the block.
template <int NT>
static void accumulate_block(const float (*factor)[kTileRows], const float* tile, size_t rows, int left,
                             float* y, size_t ldy) {
    constexpr int U = 32 / W;
    vf acc[NT][U];
    for (int n = 0; n < NT; n++)
        for (int u = 0; u < U; u++)
            acc[n][u] = left >= (u + 1) * W ? vload(y + n * ldy + u * W)
                        : left > u * W      ? vload_n(y + n * ldy + u * W, left - u * W)
                                            : vzero();
    for (size_t g = 0; g < rows; g++)
        for (int u = 0; u < U; u++) {
            const vf w = vload(tile + g * kTileColumns + u * W);
            for (int n = 0; n < NT; n++) acc[n][u] = vfma(w, vset1(factor[n][g]), acc[n][u]);
        }
    for (int n = 0; n < NT; n++)
        for (int u = 0; u < U; u++) {
            if (left >= (u + 1) * W)
                vstore(y + n * ldy + u * W, acc[n][u]);
            else if (left > u * W)
                vstore_n(y + n * ldy + u * W, acc[n][u], left - u * W);
        }
}

template <class F>
static void accumulate_format(const Matrix& w, const int32_t* ids, size_t n, const float* h, size_t ldh,
                              size_t tokens, size_t begin, size_t end, float* y, size_t ldy, float* tile) {
    constexpr size_t G = kTileRows, C = kTileColumns, B = C / 32;
    const size_t width = end - begin, blocks = (width + 31) / 32;
    for (size_t k0 = 0; k0 < n; k0 += G) {
        const size_t rows = smaller(G, n - k0);
        float scale[B][G] = {}, factor[4][G];
        for (size_t g = 0; g < rows; g++) {
            const uint8_t* row = w.data + size_t(ids[k0 + g]) * w.stride;
            float s[16];  // B, and room for a whole vector
            F::scales(row, w.cols, begin, blocks, 1.0f, s);
            for (size_t b = 0; b < blocks; b++) scale[b][g] = s[b];
            size_t c = 0;
            for (; c + 32 <= width; c += 32) {
                vf u[32 / W];
                F::unpack(row, begin + c, u);
                for (int k = 0; k < 32 / W; k++) vstore(tile + g * C + c + k * W, u[k]);
            }
            for (; c < width; c += W)
                vstore(tile + g * C + c, F::unpack_n(row, begin + c, int(smaller(W, width - c))));
        }
        for (size_t t = 0; t < tokens;) {
            const size_t nt = tokens - t >= 4 ? 4 : 1;
            for (size_t b = 0; b < blocks; b++) {
                for (size_t i = 0; i < nt; i++)
                    for (size_t g = 0; g < rows; g++) factor[i][g] = scale[b][g] * h[(t + i) * ldh + k0 + g];
                const int left = int(smaller(32, width - 32 * b));
                if (nt == 4)
                    accumulate_block<4>(factor, tile + 32 * b, rows, left, y + t * ldy + 32 * b, ldy);
                else
                    accumulate_block<1>(factor, tile + 32 * b, rows, left, y + t * ldy + 32 * b, ldy);
            }
            t += nt;
        }
    }
}

// A few tokens, all columns: the group's up rows, then its down rows. Meanwhile the next group's records are
// asked for in the order they lie in memory, at the rate at which this group's are used up: memory sees one
// stream.
template <class F, int G>
static size_t bundle_group(const Bundles& w, size_t k, const Input& x, const float* gate, size_t ldg,
                           float* y, float* factors) {
    constexpr int rows = 2;  // of a record
    const uint8_t *up[G] = {}, *down[G], *next[rows * G];
    const size_t dim = w.down.cols;
    const bool gated = w.up.data != nullptr;
    size_t live = 0;
    for (int g = 0; g < G; g++) {
        const size_t row = size_t(w.rows[k + g]), later = size_t(w.rows[smaller(k + G + g, w.listed - 1)]);
        down[g] = w.down.data + row * w.down.stride;
        if (gated) {
            up[g] = w.up.data + row * w.up.stride;
            next[rows * g] = w.up.data + later * w.up.stride;
            next[rows * g + 1] = w.down.data + later * w.down.stride;
        } else {
            next[G + g] = w.down.data + later * w.down.stride;
        }
    }
    float u[G][kFewTokens];
    for (int g = 0; gated && g < G; g++)
        tiles<F::row_tokens>(0, x.tokens, [&](size_t t, auto nt) {
            F::template dot<nt.value>(up[g], next[g], x.data + t * x.row_bytes, x.row_bytes, dim, u[g] + t);
        });
    for (size_t t = 0; t < x.tokens; t++) {
        float h[G];
        for (int g = 0; g < G; g++) {
            h[g] = gate[t * ldg + size_t(w.ids[k + g])];
            if (gated) h[g] = w.up_relu && u[g][t] <= 0 ? 0.0f : h[g] * u[g][t];
        }
        for (int g = 0; g < G; g++) live += h[g] != 0;
        accumulate_group<F, G>(down, h, dim, y + t * dim, next + G, factors);
    }
    return live;
}

template <class F>
static size_t bundles_format(const Bundles& w, const Input& x, const float* gate, size_t ldg, float* y,
                             float* factors) {
    size_t k = 0, live = 0;
    for (; k + 4 <= w.n; k += 4) live += bundle_group<F, 4>(w, k, x, gate, ldg, y, factors);
    for (; k < w.n; k++) live += bundle_group<F, 1>(w, k, x, gate, ldg, y, factors);
    return live;
}

template <class F>
static void decode_row_format(const uint8_t* row, size_t cols, float* out) {
    for (size_t c = 0; c < cols; c += 32) {
        float scale;
        F::scales(row, cols, c, 1, 1.0f, &scale);
        vf u[32 / W];
        if (c + 32 <= cols) {
            F::unpack(row, c, u);
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
    FOR_FORMAT(w.format, accumulate_format<F>(w, ids, n, h, ldh, tokens, begin, end, y, ldy, scratch))
}
static size_t bundles(const Bundles& w, const Input& x, const float* gate, size_t ldg, float* y,
                      float* factors) {
    size_t live = 0;
    FOR_FORMAT(w.down.format, live = bundles_format<F>(w, x, gate, ldg, y, factors))
    return live;
}
static void decode_row(const Matrix& w, size_t row, float* out) {
    FOR_FORMAT(w.format, decode_row_format<F>(w.data + row * w.stride, w.cols, out))
}
