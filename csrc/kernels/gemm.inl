// Many tokens: weights go through panels. A panel is kPanelRows rows, unpacked and transposed once so that a
// vector holds one column (four for int8) of W rows; then a tile of two vectors by kTileTokens tokens needs
// no horizontal sums. Every element of the result is added up in the order of the row kernels (kernels.inl):
// lane by lane, and the lanes as the same binary tree. Panels and activations are therefore stored lane by
// lane, activations of the tokens of a tile side by side: the inner loops follow two pointers.
//
// A panel is for one thread and lives in its L2 cache: 32 rows of 4096 columns are 144 KiB for either int
// format.

constexpr int kPanelRows = 2 * W;
static_assert(kPanelRows <= kMostPanelRows, "the memory plan counts kMostPanelRows");

// The lane that comes i-th when lanes are added up as a tree with a counter: the bits of i reversed.
static constexpr int tree_order(int i, int lanes) {
    int r = 0;
    for (int bit = 1; bit < lanes; bit *= 2, i /= 2) r = 2 * r + i % 2;
    return r;
}

// Partial sums of a tile waiting for their sibling, by level of the tree.
template <int NT>
struct Tree {
    vf waiting[6][2][NT];  // up to 32 lanes
    // Lane number i (in tree order) is complete: add it to its left sibling, that to its own, and so on.
    void add(int i, vf (*lane)[NT]) {
        int level = 0;
        for (; i >> level & 1; level++)
            for (int v = 0; v < 2; v++)
                for (int n = 0; n < NT; n++) lane[v][n] = vadd(waiting[level][v][n], lane[v][n]);
        for (int v = 0; v < 2; v++)
            for (int n = 0; n < NT; n++) waiting[level][v][n] = lane[v][n];
    }
};

// ---------------------------------------------------------------------------------------------- float
// formats Chunk by chunk of kFloatChunk columns: [lane][step][kPanelRows] as stored, and activations
// [lane][step][kFloatTileTokens].

static size_t float_steps(size_t columns) { return (columns + kLanes - 1) / kLanes; }
// A lane has a step too many: at 4 KiB apart, lanes would share the sets of the L1 cache.
static size_t lane_stride(size_t steps) { return (steps + 1) * kPanelRows; }

static void float_lanes(const float* x, size_t cols, float* out) {  // out: this token's place in its tile
    for (size_t k0 = 0; k0 < cols; k0 += kFloatChunk) {
        const size_t n = smaller(kFloatChunk, cols - k0), steps = float_steps(n);
        for (size_t s = 0; s < steps; s++)
            for (size_t l = 0; l < size_t(kLanes); l++) {
                const size_t k = s * kLanes + l;
                out[(k0 + l * steps + s) * kFloatTileTokens] = k < n ? x[k0 + k] : 0.0f;
            }
    }
}

// 16-bit weights are transposed as pairs, and stay 16 bits wide: half the shuffles, half the cache.
template <class F>
static void float_panel(const uint8_t* const* rows, size_t k0, size_t n, typename F::Stored* panel) {
    using T = typename F::Stored;
    constexpr int per = int(4 / sizeof(T));  // columns of a dword
    const size_t stride = lane_stride(float_steps(n));
    T tail[kPanelRows][kLanes];
    for (size_t c = 0; c < n; c += kLanes, panel += kPanelRows) {
        const T* from[kPanelRows];
        for (int i = 0; i < kPanelRows; i++) {
            from[i] = (const T*)rows[i] + k0 + c;
            if (c + kLanes <= n) continue;
            for (size_t k = 0; k < size_t(kLanes); k++) tail[i][k] = c + k < n ? from[i][k] : T(0);
            from[i] = tail[i];
        }
        for (int d = 0; d < kLanes; d += W * per) {
            vi t[2][W];
            for (int v = 0; v < 2; v++) {
                for (int i = 0; i < W; i++) t[v][i] = vi_load(from[v * W + i] + d);
                transpose(t[v]);
            }
            for (int i = 0; i < W; i++) {
                T* to = panel + size_t(d + per * i) * stride;
                if constexpr (per == 1) {
                    vi_store(to, t[0][i]);
                    vi_store(to + W, t[1][i]);
                } else {
                    vi even, odd;
                    split_words(t[0][i], t[1][i], &even, &odd);
                    vi_store(to, even);
                    vi_store(to + stride, odd);
                }
            }
        }
    }
}

// sums[n] [kPanelRows] += the chunk's dot products with token n. Of `next`, `share` bytes are asked for per
// lane.
template <class F, int NT>
static void float_tile(const typename F::Stored* panel, size_t steps, const float* x, const uint8_t* next,
                       size_t share, float* sums) {
    Tree<NT> tree;
    vf lane[2][NT];
    for (int i = 0; i < kLanes; i++) {
        const size_t at = size_t(tree_order(i, kLanes));
        const typename F::Stored* p = panel + at * lane_stride(steps);
        const float* xp = x + at * steps * kFloatTileTokens;
        prefetch_span(next + size_t(i) * share, share);
        for (int n = 0; n < NT; n++) lane[0][n] = lane[1][n] = vzero();
        for (size_t s = 0; s < steps; s++, p += kPanelRows, xp += kFloatTileTokens) {
            const vf a = F::load((const uint8_t*)p, 0), b = F::load((const uint8_t*)p, W);
            for (int n = 0; n < NT; n++) {
                const vf xs = vset1(xp[n]);
                lane[0][n] = vfma(a, xs, lane[0][n]);
                lane[1][n] = vfma(b, xs, lane[1][n]);
            }
        }
        tree.add(i, lane);
    }
    for (int n = 0; n < NT; n++)
        for (int v = 0; v < 2; v++) {
            float* s = sums + n * kPanelRows + v * W;
            vstore(s, vadd(vload(s), lane[v][n]));
        }
}

// ---------------------------------------------------------------------------------------------- quantised
// formats Lane l of C chunks (512 columns each) holds blocks l, 16 + l, ...: panel [lane][chunk][8
// dwords][kPanelRows], then scales [lane][chunk][kPanelRows] f32. Activations: [lane][chunk] of XTile.

static size_t int_chunks(size_t cols) { return (cols / 32 + 15) / 16; }
static size_t lane_slot(size_t block, size_t chunks) { return block % 16 * chunks + block / 16; }

template <class F>
static void int_panel(const uint8_t* const* rows, size_t cols, uint8_t* panel) {
    constexpr int dwords = F::quant_bytes / 4;  // of a stored block
    const size_t blocks = cols / 32, chunks = int_chunks(cols);
    for (size_t b0 = 0; b0 < blocks; b0 += W / dwords) {
        for (int v = 0; v < 2; v++) {
            vi t[W];
            for (int i = 0; i < W; i++) t[i] = vi_load(rows[v * W + i] + 4 * dwords * b0);
            transpose(t);
            for (int j = 0; j < W / dwords && b0 + j < blocks; j++) {
                uint8_t* to = panel + (lane_slot(b0 + j, chunks) * 16 + v) * (4 * W);
                for (int k = 0; k < dwords; k++, to += kPanelStep) F::Block::spread(t[j * dwords + k], to);
            }
        }
    }
    float* scales = (float*)(panel + chunks * 512 * kPanelRows);
    for (size_t b = 0; b < chunks * 16; b += W) {
        const int left = b < blocks ? int(smaller(W, blocks - b)) : 0;
        for (int v = 0; v < 2; v++) {
            vi t[W];
            for (int i = 0; i < W; i++) {
                const typename F::StoredScale* d = F::row_scales(rows[v * W + i], cols) + b;
                t[i] = vf_bits(left == W ? F::Scale::load(d) : left ? F::Scale::load_n(d, left) : vzero());
            }
            transpose(t);
            for (int i = 0; i < W; i++) vi_store(scales + (lane_slot(b + i, chunks) * 2 + v) * W, t[i]);
        }
    }
}

struct XTile {                  // a block of kTileTokens tokens
    int32_t q[8][kTileTokens];  // dword k of each
    float d[kTileTokens];
    int32_t offset[kTileTokens];
};

// x: the tile's, from its first token of NT on. Of `next`, `share` bytes are asked for per lane.
template <class DOT, int NT>
static void int_tile(const uint8_t* panel, size_t chunks, const XTile* x, size_t first, const uint8_t* next,
                     size_t share, float* sums) {
    const float* scales = (const float*)(panel + chunks * 512 * kPanelRows);
    Tree<NT> tree;
    vf lane[2][NT];
    for (int i = 0; i < 16; i++) {
        const size_t at = size_t(tree_order(i, 16)) * chunks;
        prefetch_span(next + size_t(i) * share, share);
        for (int n = 0; n < NT; n++) lane[0][n] = lane[1][n] = vzero();
        for (size_t c = at; c < at + chunks; c++) {
            const uint8_t* w = panel + c * (8 * 4 * kPanelRows);
            const int32_t* q = x[c].q[0] + first;
            vi s[2][NT];
            for (int n = 0; n < NT; n++) s[0][n] = s[1][n] = DOT::begin(x[c].offset[first + n]);
            for (int k = 0; k < 8; k++, w += 4 * kPanelRows, q += kTileTokens) {
                const vi a = vi_load(w), b = vi_load(w + 4 * W);
                for (int n = 0; n < NT; n++) {
                    const vi xs = vi_set1(q[n]);
                    s[0][n] = DOT::step(s[0][n], a, xs);
                    s[1][n] = DOT::step(s[1][n], b, xs);
                }
            }
            const vf da = vload(scales + c * kPanelRows), db = vload(scales + c * kPanelRows + W);
            for (int n = 0; n < NT; n++) {
                const vf d = vset1(x[c].d[first + n]);
                const int32_t offset = x[c].offset[first + n];
                lane[0][n] = vfma(vi_f32(DOT::end(s[0][n], offset)), vmul(da, d), lane[0][n]);
                lane[1][n] = vfma(vi_f32(DOT::end(s[1][n], offset)), vmul(db, d), lane[1][n]);
            }
        }
        tree.add(i, lane);
    }
    for (int n = 0; n < NT; n++)
        for (int v = 0; v < 2; v++) vstore(sums + n * kPanelRows + v * W, lane[v][n]);
}

// ---------------------------------------------------------------------------------------------- matrix
// products

// Activations as a format multiplies with them: input_bytes, tile_tokens, quantize (as in kernels.h; `n`: the
// token's place in its tile). The product: bytes (of a panel) and run, sums [tokens][kPanelRows] = panel of
// rows . tokens; `next`: what to ask memory for meanwhile.
template <class F>
struct Gemm;

template <class T, vf (*LOAD)(const T*), vf (*LOAD_N)(const T*, int)>
struct Gemm<FormatFloat<T, LOAD, LOAD_N>> {
    using Format = FormatFloat<T, LOAD, LOAD_N>;
    static constexpr int tile_tokens = kFloatTileTokens;
    static size_t input_bytes(size_t cols) { return 4 * (cols + kLanes); }
    static void quantize(const float* x, size_t cols, size_t, size_t, bool lanes, size_t n, uint8_t* out) {
        if (lanes)  // [begin, end) is the whole row here
            float_lanes(x, cols, (float*)out + n);
        else
            memcpy(out, x, 4 * cols);
    }
    static size_t bytes(size_t cols) {
        return sizeof(T) * kLanes * lane_stride(float_steps(smaller(cols, kFloatChunk)));
    }
    static void run(const uint8_t* const* rows, size_t cols, const Input& x, const uint8_t* next,
                    uint8_t* panel, float* sums) {
        constexpr size_t G = kFloatTileTokens;
        const size_t chunks = (cols + kFloatChunk - 1) / kFloatChunk;
        const size_t share =
            kPanelRows * sizeof(T) * cols / (chunks * x.tokens * kLanes);  // per token and lane
        for (size_t i = 0; i < x.tokens * kPanelRows; i++) sums[i] = 0;
        for (size_t k0 = 0; k0 < cols; k0 += kFloatChunk) {
            const size_t n = smaller(kFloatChunk, cols - k0), steps = float_steps(n);
            float_panel<Format>(rows, k0, n, (T*)panel);
            tiles<kFloatTileTokens>(0, x.tokens, [&](size_t t, auto nt) {
                const float* xs = (const float*)(x.data + t / G * G * x.row_bytes) + k0 * G + t % G;
                float_tile<Format, nt.value>((const T*)panel, steps, xs, next, nt.value * share,
                                             sums + t * kPanelRows);
                next += nt.value * share * kLanes;
            });
        }
    }
};

template <class BLOCK>
struct Gemm<FormatBlocks<BLOCK>> {
    using Format = FormatBlocks<BLOCK>;
    static constexpr int tile_tokens = kTileTokens;
    static size_t input_bytes(size_t cols) { return int_chunks(cols) * sizeof(XChunk); }
    static void quantize(const float* x, size_t cols, size_t begin, size_t end, bool lanes, size_t n,
                         uint8_t* out) {
        const size_t chunks = int_chunks(cols), last = cols / 32;
        for (size_t b = begin / 32; b < (end == cols ? chunks * 16 : end / 32); b++) {
            alignas(64) int8_t q[32] = {0};
            float d = 0;
            int32_t sum = 0;
            if (b < last) x_quantize(x + 32 * b, q, &d, &sum);
            if (lanes) {
                XTile* to = (XTile*)out + lane_slot(b, chunks);
                for (int k = 0; k < 8; k++) memcpy(&to->q[k][n], q + 4 * k, 4);
                to->d[n] = d;
                to->offset[n] = -BLOCK::added * sum;
                continue;
            }
            XChunk* chunk = (XChunk*)out + b / 16;
            BLOCK::place(chunk->q, b % 16, q);
            chunk->d[b % 16] = d;
            chunk->offset[b % 16] = -BLOCK::added * sum;
        }
    }
    static size_t bytes(size_t cols) { return int_chunks(cols) * 16 * kPanelRows * (32 + 4); }
    static void run(const uint8_t* const* rows, size_t cols, const Input& x, const uint8_t* next,
                    uint8_t* panel, float* sums) {
        constexpr size_t G = kTileTokens;
        const size_t chunks = int_chunks(cols),
                     share = kPanelRows * Format::row_bytes(cols) / (x.tokens * 16);
        int_panel<Format>(rows, cols, panel);
        tiles<kTileTokens>(0, x.tokens, [&](size_t t, auto nt) {
            const XTile* xs = (const XTile*)(x.data + t / G * G * x.row_bytes);
            int_tile<typename BLOCK::Product, nt.value>(panel, chunks, xs, t % G, next, nt.value * share,
                                                        sums + t * kPanelRows);
            next += nt.value * share * 16;
        });
    }
};

template <class F>
NOINLINE static void matmul_panels(const Matrix& w, const int32_t* ids, size_t begin, size_t end,
                                   const Input& x, const float* bias, bool add, float* y, size_t ldy,
                                   uint8_t* scratch) {
    float* sums = (float*)scratch;
    uint8_t* panel = scratch + 4 * kPanelRows * x.tokens;
    const uint8_t* rows[kPanelRows];
    for (size_t r = begin; r < end; r += kPanelRows) {
        for (size_t i = 0; i < size_t(kPanelRows);
             i++) {  // past the end: the last row again, and nobody looks
            const size_t at = smaller(r + i, end - 1);
            rows[i] = w.data + (ids ? size_t(ids[at]) : at) * w.stride;
        }
        const size_t later = smaller(r + kPanelRows, end - 1);
        Gemm<F>::run(rows, w.cols, x, w.data + (ids ? size_t(ids[later]) : later) * w.stride, panel, sums);
        for (size_t t = 0; t < x.tokens; t++) {
            for (size_t i = 0; i < size_t(kPanelRows) && r + i < end; i += W) {
                const int n = int(smaller(W, end - r - i));
                float* out = y + t * ldy + (r + i - begin);
                vf v = vload(sums + t * kPanelRows + i);
                if (bias) v = vadd(v, vload_n(bias + r + i, n));
                vstore_n(out, add ? vadd(vload_n(out, n), v) : v, n);
            }
        }
    }
}

static void matmul(const Matrix& w, const int32_t* ids, size_t begin, size_t end, const Input& x,
                   const float* bias, bool add, float* y, size_t ldy, uint8_t* scratch) {
    if (x.lanes) {
        for_format(w.format, [&](auto f) {
            matmul_panels<decltype(f)>(w, ids, begin, end, x, bias, add, y, ldy, scratch);
        });
    } else if (w.format == SIGNS) {
        matmul_rows<FormatSigns>(w, ids, begin, end, x, bias, add, y, ldy);
    } else {
        for_format(w.format,
                   [&](auto f) { matmul_rows<decltype(f)>(w, ids, begin, end, x, bias, add, y, ldy); });
    }
}
static size_t panel_bytes(Format format, size_t cols, size_t tokens) {
    size_t bytes = 0;
    for_format(format, [&](auto f) { bytes = Gemm<decltype(f)>::bytes(cols); });
    return bytes + 4 * kPanelRows * tokens;
}

// ---------------------------------------------------------------------------------------------- activations

static size_t input_bytes(Format format, size_t cols) {
    size_t bytes = sign_bytes(cols);
    for_format(format, [&](auto f) { bytes = Gemm<decltype(f)>::input_bytes(cols); });
    return bytes;
}

static size_t tile_tokens(Format format) {
    size_t tokens = 1;
    for_format(format, [&](auto f) { tokens = size_t(Gemm<decltype(f)>::tile_tokens); });
    return tokens;
}

static void signs_of(const float* x, size_t cols, uint8_t* out) {
    for (size_t c = 0; c < cols; c += W) {
        const int n = int(smaller(W, cols - c));
        const uint32_t bits = vpositive(x_some(x + c, n));
        memcpy(out + c / 8, &bits, sign_bytes(size_t(n)));
    }
}

static void quantize(Format format, const float* x, size_t cols, size_t begin, size_t end, bool lanes,
                     size_t row_bytes, size_t t, uint8_t* out) {
    const size_t tile = lanes ? tile_tokens(format) : 1, n = t % tile;
    out += (t - n) * row_bytes;
    if (format == SIGNS) return signs_of(x, cols, out);
    for_format(format, [&](auto f) { Gemm<decltype(f)>::quantize(x, cols, begin, end, lanes, n, out); });
}
