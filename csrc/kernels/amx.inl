// Products of many tokens in formats of blocks by a processor's matrix unit (AMX: tiles of 16 rows of 64
// bytes). One of its instructions multiplies a block of 16 rows with 16 tokens: as integers, so that the sums
// are those of any other kernel. What follows is done in the order of the row kernels: the same bits.
//
// A panel is that of gemm.inl with signed numbers. For the unit it is right as it lies: 8 dwords of a block,
// each of 16 rows. Activations lie token by token instead, 32 bytes of a block each.

constexpr int kUnitTokens = 16;
// Products that are on their way while one is scaled.
constexpr size_t kUnitAhead = 4;

// A block of kUnitTokens tokens. extra: as XTile's, of the kinds that have floats there.
template <Kind KIND>
struct UnitTile {
    static constexpr int extras = KIND == GROUPS_AFFINE ? 2 : KIND == AFFINE ? 1 : 0;
    int8_t q[kUnitTokens][32];
    float d[1 + extras][kUnitTokens];                                              // d, extra
    void put(size_t n, const int8_t* numbers, float scale, const int32_t* more) {  // token n's
        memcpy(q[n], numbers, 32);
        d[0][n] = scale;
        for (int i = 0; i < extras; i++) memcpy(&d[1 + i][n], &more[i], 4);
    }
};

struct alignas(64) UnitConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {0};
    uint16_t row_bytes[16] = {0};
    uint8_t rows[16] = {0};
};
// Tile registers: products; tokens and weights, of each part.
template <class F, int NT>
static UnitConfig unit_config() {
    constexpr int parts = F::grouped ? 2 : 1;
    UnitConfig c;
    for (int part = 0; part < parts; part++) {
        c.rows[part] = NT, c.row_bytes[part] = 64;
        c.rows[4 + 2 * part] = NT, c.row_bytes[4 + 2 * part] = 32 / parts;
        c.rows[5 + 2 * part] = 8 / parts, c.row_bytes[5 + 2 * part] = 64;
    }
    return c;
}

// Blocks of a panel and of a tile of tokens in the order in which they are multiplied: by lane, half of the
// panel's rows, chunk.
template <class F>
struct UnitWalk {
    const uint8_t* panel;
    const UnitTile<F::kind>* tile;
    size_t chunks;
    int lane = 0, half = 0;
    size_t chunk = 0;
    const uint8_t* w = panel;
    const UnitTile<F::kind>* x = tile;

    TC_INLINE void next() {
        w += 8 * kPanelStep, x++;
        if (++chunk < chunks) return;
        chunk = 0, lane = (lane + half) % 16, half ^= 1;  // past the last lane, the first again
        const size_t at = size_t(tree_order(lane, 16)) * chunks;
        w = panel + at * 8 * kPanelStep + half * 4 * W, x = tile + at;
    }
};

// Sums of 16 rows, of each of NT tokens and each part of a block.
template <class F, int NT>
struct UnitProduct {
    static constexpr int parts = F::grouped ? 2 : 1;
    alignas(64) int32_t sums[parts][NT][W];
    static TC_INLINE void begin(const uint8_t* w, const UnitTile<F::kind>& x) {
        _tile_zero(0);
        _tile_loadd(4, x.q, 32);
        _tile_loadd(5, w, kPanelStep);
        _tile_dpbssd(0, 4, 5);
        if constexpr (parts == 2) {
            _tile_zero(1);
            _tile_loadd(6, x.q[0] + 16, 32);
            _tile_loadd(7, w + 4 * kPanelStep, kPanelStep);
            _tile_dpbssd(1, 6, 7);
        }
    }
    TC_INLINE void end() {
        _tile_stored(0, sums[0], 64);
        if constexpr (parts == 2) _tile_stored(1, sums[1], 64);
    }
    // lane[n] += the block's product with token n; scale: of 16 rows.
    TC_INLINE void add_to(vf* lane, const float* scale, const UnitTile<F::kind>& x) const {
        auto real = [&](int f) TC_INLINED { return vload(scale + f * kPanelRows); };
        constexpr int s0 = F::kind == GROUPS_AFFINE ? 2 : 1;
        for (int n = 0; n < NT; n++) {
            vf sum = vi_f32(vi_load(sums[0][n]));
            if constexpr (F::grouped)
                sum = vfma(vi_f32(vi_load(sums[parts - 1][n])), real(s0 + 1), vmul(sum, real(s0)));
            lane[n] = add_scaled<F::kind>(lane[n], sum, real, x.d[0][n],
                                          [&](int i) TC_INLINED { return x.d[1 + i][n]; });
        }
    }
};

// sums [tokens][kPanelRows] = panel of rows . tokens, at most NT. Of `next`, `share` bytes are asked for per
// lane. (Lane by lane for 2 or 4 tiles, whose weights would stay in the L1 cache: the tiles' trees push them
// out, 0.56 became 0.50 TOP/s.)
template <class F, int NT>
NOINLINE static void unit_tile(const uint8_t* panel, size_t chunks, const UnitTile<F::kind>* x, size_t tokens,
                               const uint8_t* next, size_t share, float* sums) {
    constexpr int floats = panel_floats<F>();
    const float* scales = (const float*)(panel + chunks * 512 * kPanelRows);
    Tree<NT, 1> trees[2];
    const UnitConfig config = unit_config<F, NT>();
    _tile_loadconfig(&config);
    // A product takes its time, and so does what the unit stores until it can be read.
    UnitProduct<F, NT> products[kUnitAhead];
    UnitWalk<F> ahead{panel, x, chunks};
    size_t step = 0;
    for (size_t i = 0; i < kUnitAhead; i++, ahead.next()) {
        if (i > 0) products[i - 1].end();
        products[i].begin(ahead.w, *ahead.x);
    }
    for (int i = 0; i < 16; i++) {
        const size_t at = size_t(tree_order(i, 16)) * chunks;
        prefetch_span(next + size_t(i) * share, share);
        // Tokens do not fit the L1 cache: half a block of the next lane is asked for with each half of this
        // one's.
        const uint8_t* soon = (const uint8_t*)(x + size_t(tree_order((i + 1) % 16, 16)) * chunks);
        for (int v = 0; v < 2; v++) {
            const float* scale = scales + at * floats * kPanelRows + v * W;
            vf lane[1][NT];
            for (int n = 0; n < NT; n++) lane[0][n] = vzero();
            for (size_t c = at; c < at + chunks; c++, step++, scale += floats * kPanelRows) {
                products[(step + kUnitAhead - 1) % kUnitAhead].end();
                products[0].begin(ahead.w, *ahead.x);
                ahead.next();
                prefetch_span(soon, sizeof *x / 2), soon += sizeof *x / 2;
                products[step % kUnitAhead].add_to(lane[0], scale, x[c]);
            }
            trees[v].add(i, lane);
        }
    }
    for (size_t t = 0; t < tokens; t++)
        for (int v = 0; v < 2; v++) vstore(sums + t * kPanelRows + v * W, trees[v].waiting[4][0][t]);
}

template <class F>
struct UnitGemm {
    using Tile = UnitTile<F::kind>;
    static size_t input_bytes(size_t cols) { return int_chunks(cols) * 16 * sizeof(Tile) / kUnitTokens; }
    // Token `from` of a tile becomes token `to` of another.
    static void copy(const uint8_t* tile, size_t from, uint8_t* out, size_t to, size_t cols) {
        const Tile* source = (const Tile*)tile;
        Tile* target = (Tile*)out;
        for (size_t i = int_chunks(cols) * 16; i > 0; i--, source++, target++) {
            memcpy(target->q[to], source->q[from], 32);
            for (int f = 0; f <= Tile::extras; f++) target->d[f][to] = source->d[f][from];
        }
    }
    static void run(const uint8_t* const* rows, bool interleaved, size_t cols, const Input& x,
                    const uint8_t* next, uint8_t* panel, float* sums) {
        if (interleaved)
            interleaved_panel<F>(rows[0], cols, panel);
        else
            int_panel<F>(rows, cols, panel);
        const size_t chunks = int_chunks(cols), share = kPanelRows * F::row_bytes(cols) / (x.tokens * 16);
        for (size_t t = 0; t < x.tokens; t += kUnitTokens) {
            const size_t n = smaller(kUnitTokens, x.tokens - t);
            const auto product = n > 8 ? unit_tile<F, kUnitTokens> : unit_tile<F, 8>;
            product(panel, chunks, (const Tile*)(x.data + t * x.row_bytes), n, next, n * share,
                    sums + t * kPanelRows);
            next += n * share * 16;
        }
    }
};

// ---- the table: avx512's, where these lines do not say otherwise

static bool by_unit(Format format) { return kFormats[format].block > 1 && format != SIGNS; }

template <class Fn>
static void for_unit_format(Format format, Fn call) {
    for_format(format, [&](auto f) {
        if constexpr (decltype(f)::block > 1) call(f);
    });
}

static size_t unit_input_bytes(Format format, size_t cols) {  // of a row in either arrangement
    size_t bytes = avx512_kernels()->input_bytes(format, cols);
    for_unit_format(format, [&](auto f) {
        const size_t lanes = UnitGemm<decltype(f)>::input_bytes(cols);
        bytes = lanes > bytes ? lanes : bytes;
    });
    return bytes;
}
static size_t unit_tile_tokens(Format format) {
    return by_unit(format) ? kUnitTokens : avx512_kernels()->tile_tokens(format);
}
static void unit_quantize(Format format, const float* x, size_t cols, size_t begin, size_t end, bool lanes,
                          size_t row_bytes, size_t t, uint8_t* out) {
    if (!lanes || !by_unit(format))
        return avx512_kernels()->quantize(format, x, cols, begin, end, lanes, row_bytes, t, out);
    const size_t n = t % kUnitTokens;
    for_unit_format(format, [&](auto f) {
        using Tile = UnitTile<decltype(f)::kind>;
        Gemm<decltype(f)>::template quantize<Tile>(x, cols, begin, end, true, n, out + (t - n) * row_bytes);
    });
}
static void unit_copy_lanes(Format format, size_t cols, const uint8_t* all, size_t from, uint8_t* out,
                            size_t to) {
    if (!by_unit(format)) return avx512_kernels()->copy_lanes(format, cols, all, from, out, to);
    const size_t tile = unit_input_bytes(format, cols) * kUnitTokens;
    for_unit_format(format, [&](auto f) {
        UnitGemm<decltype(f)>::copy(all + from / kUnitTokens * tile, from % kUnitTokens,
                                    out + to / kUnitTokens * tile, to % kUnitTokens, cols);
    });
}
template <class F>
NOINLINE static void unit_panels(const Matrix& w, const int32_t* ids, size_t begin, size_t end,
                                 const Input& x, const float* bias, bool add, float* y, size_t ldy,
                                 uint8_t* scratch) {
    matmul_panels<F, UnitGemm<F>>(w, ids, begin, end, x, bias, add, y, ldy, scratch);
    _tile_release();
}
static void unit_matmul(const Matrix& w, const int32_t* ids, size_t begin, size_t end, const Input& x,
                        const float* bias, bool add, float* y, size_t ldy, uint8_t* scratch,
                        const uint8_t* then) {
    if (!x.lanes || !by_unit(w.format))
        return avx512_kernels()->matmul(w, ids, begin, end, x, bias, add, y, ldy, scratch, then);
    for_unit_format(w.format, [&](auto f) {
        unit_panels<decltype(f)>(w, ids, begin, end, x, bias, add, y, ldy, scratch);
    });
}

static Kernels unit_kernels() {
    Kernels k = *avx512_kernels();
    k.isa = "amx";
    k.grouped_tokens = kFewTokens;
    k.input_bytes = unit_input_bytes;
    k.tile_tokens = unit_tile_tokens;
    k.quantize = unit_quantize;
    k.copy_lanes = unit_copy_lanes;
    k.matmul = unit_matmul;
    return k;
}
