// The search in SSE2's vectors.
#define TC_SEARCH_ISA search_base
#define TC_LANES 4
#include "search.inl"

namespace tc {
extern const SearchKernels kSearch_base;
const SearchKernels kSearch_base = {"base", search_base::search};
}  // namespace tc
