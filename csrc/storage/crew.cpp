#include "crew.h"

#include <errno.h>

#include <algorithm>
#include <chrono>
#include <exception>

namespace tc {

Crew::Crew(size_t chunks, size_t threads, size_t buffer_bytes, Work work, Last last)
    : chunks_(chunks), buffer_bytes_(buffer_bytes), work_(std::move(work)), last_(std::move(last)) {
    threads = std::max(size_t(1), std::min(threads, chunks));
    if (buffer_bytes_) {
        buffers_ = map_pages(threads * buffer_bytes_);
        if (!buffers_.data) buffers_ = map_pages((threads = 1) * buffer_bytes_);
        if (!buffers_.data) {
            failure_ = Failure{ENOMEM, 0};
            failed_ = 0;
            return;
        }
    }
    std::lock_guard<std::mutex> lock(mutex_);  // nobody ends before all are counted
    try {
        threads_.reserve(threads);
        for (size_t i = 0; i < threads && chunks_; i++) {
            uint8_t* buffer = buffer_bytes_ ? buffers_.data + i * buffer_bytes_ : nullptr;
            threads_.emplace_back([this, buffer] { take_all(buffer); });
            active_++;
        }
    } catch (const std::exception&) {
    }  // the system has no more threads for us: those there are do the work
}

Crew::~Crew() {
    stop();
    if (!forked()) unmap_pages(buffers_);
}

bool Crew::take_one(uint8_t* buffer) {
    const size_t chunk = next_.fetch_add(1);
    if (chunk >= chunks_ || chunk >= failed_.load()) return false;
    const ChunkDone done = work_(chunk, buffer);
    done_.fetch_add(done.bytes);
    if (!done.failure) return true;
    std::lock_guard<std::mutex> lock(mutex_);
    if (chunk < failed_.load()) {
        failure_ = done.failure;
        failed_.store(chunk);
    }
    return true;
}

void Crew::take_all(uint8_t* buffer) {
    while (take_one(buffer)) {
    }
    std::lock_guard<std::mutex> lock(mutex_);
    if (--active_ == 0) over_.notify_all();
}

bool Crew::wait(unsigned ms) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(ms);
    if (threads_.empty()) {
        while (take_one(buffers_.data))
            if (std::chrono::steady_clock::now() >= end) return false;
        return true;
    }
    std::unique_lock<std::mutex> lock(mutex_);
    return over_.wait_until(lock, end, [&] { return active_ == 0; });
}

void Crew::stop() {
    next_.store(chunks_);
    for (std::thread& t : threads_) {
        if (forked())
            t.detach();
        else
            t.join();
    }
    threads_.clear();
}

std::optional<Failure> Crew::failure() {
    stop();
    if (last_) {
        if (const std::optional<Failure> found = last_()) failure_ = found;
        last_ = {};
    }
    return failure_;
}

}  // namespace tc
