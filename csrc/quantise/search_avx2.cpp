// The search in AVX2's vectors.
#define TC_SEARCH_ISA search_avx2
#define TC_LANES 8
#include "search.inl"

namespace tc {
extern const SearchKernels kSearch_avx2;
const SearchKernels kSearch_avx2 = {"avx2", search_avx2::search};
}  // namespace tc
