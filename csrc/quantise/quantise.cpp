#include "quantise.h"

#include <atomic>
#include <memory>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "../kernels/kernels.h"

namespace tc {

extern const SearchKernels kSearch_base;
#ifdef THERMOCLINE_X86
extern const SearchKernels kSearch_avx2, kSearch_avx512;
#endif

const SearchKernels* search_kernels_named(const char* isa) {
#ifdef THERMOCLINE_X86
    const std::string name = isa;
    if (name == "avx512" || name == "amx") return &kSearch_avx512;
    if (name == "avx2" || name == "avxvnni") return &kSearch_avx2;
#endif
    (void)isa;
    return &kSearch_base;
}

size_t searched_together(Search s) {
    switch (s) {
#define TC_ROW(id, name, together, bytes) \
    case Search::id:                      \
        return together;
        TC_SEARCHES(TC_ROW)
#undef TC_ROW
        case Search::COUNT:
            break;
    }
    return 1;
}

size_t stored_bytes(Search s, size_t columns) {
    switch (s) {
#define TC_ROW(id, name, together, bytes) \
    case Search::id:                      \
        return columns / together * bytes;
        TC_SEARCHES(TC_ROW)
#undef TC_ROW
        case Search::COUNT:
            break;
    }
    return 0;
}

Search search_named(const std::string& format) {
#define TC_ROW(id, name, together, bytes) \
    if (format == name) return Search::id;
    TC_SEARCHES(TC_ROW)
#undef TC_ROW
    return Search::COUNT;
}

bool quantise(const SearchInput& in, const SearchKernels& kernels, int threads, uint8_t* out, size_t stride) {
    const size_t per_row = in.columns / searched_together(in.format);
    std::atomic<size_t> next{0};
    std::atomic<bool> failed{false};
    auto work = [&] {
        try {
            std::vector<float> memory(in.columns * kPanelRows + 16);
            const size_t past = reinterpret_cast<uintptr_t>(memory.data()) % 64 / 4;
            float* scratch = memory.data() + (past ? 16 - past : 0);
            std::vector<BlockNumbers> blocks(kPanelRows * per_row);
            for (size_t r; (r = next.fetch_add(kPanelRows)) < in.rows;) {
                kernels.search(in, r, scratch, blocks.data());
                for (size_t i = 0; i < kPanelRows && r + i < in.rows; i++)
                    store_row(in.format, blocks.data() + i * per_row, in.columns, out + (r + i) * stride);
            }
        } catch (const std::bad_alloc&) {
            failed = true;
        }
    };
    std::vector<std::thread> others;
    try {
        for (int t = 1; t < threads && size_t(t) * kPanelRows < in.rows; t++) others.emplace_back(work);
    } catch (const std::system_error&) {  // no more threads: fewer will do
    }
    work();
    for (std::thread& t : others) t.join();
    return !failed;
}

}  // namespace tc
