// Sizes in whole units: pages, cache lines, blocks of a disk, groups of rows.
#pragma once

namespace tc {

// The smallest multiple of `unit` that is at least n.
template <class N, class Unit>
constexpr N whole(N n, Unit unit) {
    return (n + N(unit) - 1) / N(unit) * N(unit);
}

}  // namespace tc
