// Rows of weights -> rows of a pack, on several threads.
#pragma once
#include <string>

#include "search.h"

namespace tc {

// Writes in.rows rows, `stride` bytes apart. -> false if memory or threads ran out.
bool quantise(const SearchInput& in, const SearchKernels& kernels, int threads, uint8_t* out, size_t stride);

// The search of a format's name; COUNT if there is none.
Search search_named(const std::string& format);

}  // namespace tc
