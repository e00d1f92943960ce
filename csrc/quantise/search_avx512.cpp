// The search in AVX-512's vectors.
#define TC_SEARCH_ISA search_avx512
#define TC_LANES 16
#include "search.inl"

namespace tc {
extern const SearchKernels kSearch_avx512;
const SearchKernels kSearch_avx512 = {"avx512", search_avx512::search};
}  // namespace tc
