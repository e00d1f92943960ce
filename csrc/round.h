// Sizes in whole units: pages, cache lines, blocks of a disk, groups of rows, and pieces of work of these.
#pragma once
#include <algorithm>
#include <cstddef>

namespace tc {

// The smallest multiple of `unit` that is at least n.
template <class N, class Unit>
constexpr N whole(N n, Unit unit) {
    return (n + N(unit) - 1) / N(unit) * N(unit);
}

// The next piece of `left` rows or columns, a multiple of `unit` that may reach beyond them. Pieces shrink,
// for all threads to end at about the same time. `most`: none is longer.
inline size_t next_piece(size_t left, size_t most, size_t unit, size_t threads) {
    return std::max<size_t>(1, std::min(most, left / (threads == 1 ? 1 : 2 * threads)) / unit) * unit;
}

}  // namespace tc
