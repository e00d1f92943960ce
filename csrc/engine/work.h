// How ops divide their work among threads, and how they grow scratch: for the files of engine/ and storage/.
#pragma once
#include <algorithm>
#include <atomic>
#include <vector>

#include "model_ops.h"
#include "round.h"

namespace tc {

// Returns v's data, at least n elements. Old memory is freed before new memory is taken, and no more than n
// elements are: a vector that grows by itself holds both, and doubles.
template <class T>
T* grown(Scratch<T>& v, size_t n) {
    if (v.size() < n) {
        Scratch<T>().swap(v);
        v.resize(n);
    }
    return v.data();
}

inline bool quantised(const Matrix& w) { return kFormats[w.format].quantised; }  // x is, then

// The rows of a piece at least, a multiple of `unit`: the shares of all threads are 128 KiB. A piece begins
// with lines that nobody has asked for, and the last one to end is waited for.
inline size_t piece_rows(size_t row_bytes, size_t unit, int threads) {
    return whole(std::max<size_t>(1, (size_t(128) << 10) / size_t(threads) / std::max<size_t>(1, row_bytes)),
                 unit);
}

// Work handed out in pieces that shrink: a thread whose core is busy elsewhere simply takes fewer, and the
// long first pieces let prefetching run on. `unit`: pieces are multiples of it; `most`: none is longer.
class Pieces {
 public:
    Pieces(size_t n, size_t unit, int threads, size_t most = SIZE_MAX)
        : n_(n), unit_(unit), threads_(size_t(threads)), most_(most) {}
    bool take(size_t* begin, size_t* end) {
        size_t at = next_.load(std::memory_order_relaxed), size;
        do {
            if (at >= n_) return false;
            size = next_piece(n_ - at, most_, unit_, threads_);
        } while (!next_.compare_exchange_weak(at, at + size, std::memory_order_relaxed));
        *begin = at, *end = std::min(n_, at + size);
        return true;
    }

 private:
    const size_t n_, unit_, threads_, most_;
    std::atomic<size_t> next_{0};
};

inline const uint8_t* row_of(const Matrix& w, size_t row) { return w.data + row * w.stride; }

// A thread's pieces. `ahead`: each is taken while the one before is still to be worked on, so that its first
// rows can be asked for: a piece that nobody has asked for begins at the speed of single reads from memory.
// Of many tokens a piece takes too long for that, and others would wait for one that nobody works on.
class PiecesAhead {
 public:
    PiecesAhead(Pieces& pieces, bool ahead)
        : pieces_(pieces), ahead_(ahead), more_(ahead && pieces.take(&begin_, &end_)) {}
    bool take(size_t* begin, size_t* end) {
        if (!ahead_) return pieces_.take(begin, end);
        if (!more_) return false;
        *begin = begin_, *end = end_;
        more_ = pieces_.take(&begin_, &end_);
        return true;
    }
    // The address of the first row that `take` gives next, or `otherwise` where that is not known.
    template <class Fn>
    const uint8_t* next(Fn row, const uint8_t* otherwise = nullptr) const {
        return more_ ? row(begin_) : otherwise;
    }
    const uint8_t* next(const Matrix& w, const uint8_t* otherwise = nullptr) const {
        return more_ ? row_of(w, begin_) : otherwise;
    }

 private:
    Pieces& pieces_;
    const bool ahead_;
    size_t begin_ = 0, end_ = 0;
    bool more_;
};

// Columns [begin, end) of thread t when `cols` are split in units of 32.
inline void column_range(size_t cols, int threads, int t, size_t* begin, size_t* end) {
    const size_t units = (cols + 31) / 32;
    *begin = std::min(cols, units * size_t(t) / size_t(threads) * 32);
    *end = std::min(cols, units * size_t(t + 1) / size_t(threads) * 32);
}

// gate [n] := act(gate) * up_act(up), or act(gate) where up is null; returns how many are not 0.
size_t activate(const Kernels& k, const FFN& f, float* gate, const float* up, size_t n);

// Calls f(t) for each token of one thread's tiles: thread t has every `threads`-th tile from tile t on.
template <class Fn>
void own_tokens(size_t tokens, size_t tile, int thread, int threads, Fn f) {
    for (size_t t0 = size_t(thread) * tile; t0 < tokens; t0 += size_t(threads) * tile)
        for (size_t t = t0; t < std::min(tokens, t0 + tile); t++) f(t);
}

// Calls f(t) for every token, on all threads. A single token is the caller's: handing it over costs more than
// the work.
template <class Fn>
void each_token(Pool& pool, size_t tokens, size_t tile, Fn f) {
    auto some = [&](int thread) { own_tokens(tokens, tile, thread, pool.threads(), f); };
    if (tokens > 1)
        pool.run(some);
    else if (tokens)
        f(0);
}

}  // namespace tc
