// Reads through Linux's io_uring, with raw system calls. All use of io_uring is here.
#pragma once
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "reader.h"

namespace tc {

class Ring {
 public:
    // Most reads go to the fixed_bytes of memory at `fixed`. Offsets in a file are multiples of `alignment`.
    Ring(const std::vector<const File*>& files, unsigned depth, uint8_t* fixed, size_t fixed_bytes,
         size_t alignment);
    ~Ring();
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;

    int error() const { return error_; }  // an errno if there is no ring; then nothing else may be called
    int not_registered() const { return not_registered_; }  // an errno if `fixed` could not be registered
    bool submit(const ReadRequest* requests, size_t n);
    size_t take(ReadDone* out, size_t max, bool wait);
    void drain();  // wait for all that is in flight, and forget it

 private:
    struct Flight {
        ReadRequest request;
        uint32_t done;  // bytes, from the start
        bool blocking;  // runs in a thread of the kernel, because it has to wait
    };
    int begin(const std::vector<const File*>& files, unsigned entries);
    int answers();
    void push(uint32_t flight);
    bool finished(uint32_t flight, int result, ReadDone& done);
    size_t reap(ReadDone* out, size_t max);
    bool flush();
    void give_up(int error);
    unsigned unsubmitted() const;
    int enter(unsigned submit, unsigned wait_for) const;

    int fd_ = -1, error_ = 0, not_registered_ = 0;
    uint8_t* const fixed_;
    const size_t fixed_bytes_, alignment_;
    void *rings_ = nullptr, *entries_ = nullptr;
    size_t rings_bytes_ = 0, entries_bytes_ = 0;
    // Shared with the kernel. The kernel moves *sq_head_ and *cq_tail_; we move the others, under `mutex_`.
    uint32_t *sq_head_ = nullptr, *sq_tail_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
    uint32_t sq_mask_ = 0, cq_mask_ = 0;
    const void* completions_ = nullptr;
    mutable std::mutex mutex_;  // guards all members below; never held in a system call
    std::vector<Flight> flights_;
    std::vector<uint32_t> free_;    // flights
    std::vector<ReadDone> failed_;  // reads that the kernel did not accept
};

}  // namespace tc
