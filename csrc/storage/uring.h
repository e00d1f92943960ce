// Reads through Linux's io_uring, by raw system calls. Nowhere else does it begin.
#pragma once
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "reader.h"

namespace tc {

class Ring {
 public:
    // `fixed`, of fixed_bytes: memory that most reads go to. Offsets in the file are multiples of
    // `alignment`.
    Ring(const File& file, unsigned depth, uint8_t* fixed, size_t fixed_bytes, size_t alignment);
    ~Ring();
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;

    int error() const { return error_; }  // an errno: why there is none; then nothing else may be called
    int not_registered() const { return not_registered_; }  // an errno: why `fixed` is memory like any other
    bool submit(const ReadRequest* requests, size_t n);
    size_t take(ReadDone* out, size_t max, bool wait);
    void drain();  // wait for all that is in flight, and forget it

 private:
    struct Flight {
        ReadRequest request;
        uint32_t done;  // bytes, from the start
        bool blocking;  // in a thread of the kernel's: it would not be done without waiting
    };
    int begin(const File& file, unsigned entries);
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
    // Shared with the kernel: it moves *sq_head_ and *cq_tail_, we the other two, under `mutex_`.
    uint32_t *sq_head_ = nullptr, *sq_tail_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
    uint32_t sq_mask_ = 0, cq_mask_ = 0;
    const void* completions_ = nullptr;
    mutable std::mutex mutex_;  // of all that follows; never held in a system call
    std::vector<Flight> flights_;
    std::vector<uint32_t> free_;    // flights
    std::vector<ReadDone> failed_;  // that the kernel would not even take
};

}  // namespace tc
