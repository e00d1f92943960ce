// CPU work inside a GPU's queue: the driver calls HostTask::call when the queue gets there, on a thread of
// its own and without Python.
#pragma once
#include <atomic>
#include <exception>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "model_ops.h"

namespace tc {

class HostTask {
 public:
    using Part = std::function<FFNCounts(Context&)>;
    explicit HostTask(Context& context) : context_(context) {}
    void add(Part part) { parts_.push_back(std::move(part)); }

    // Runs all parts in order. A driver's thread must not see exceptions, so `take` throws them; until then,
    // no further part is computed. Nor is Python asked whether to go on: the thread that waits for the task
    // may hold Python's lock.
    static void call(void* task) noexcept {
        HostTask& self = *static_cast<HostTask*>(task);
        self.begun_.fetch_add(1);
        try {
            std::lock_guard<std::mutex> lock(self.context_.one_call);
            struct Undisturbed {
                Context& context;
                bool (*was)() = std::exchange(context.interrupted, nullptr);
                ~Undisturbed() { context.interrupted = was; }
            } undisturbed{self.context_};
            for (const Part& part : self.parts_)
                if (!self.error_) self.total_ += part(self.context_);
        } catch (...) {
            self.error_ = std::current_exception();
        }
        self.ended_.fetch_add(1);
    }

    // Returns what was counted since the last time, or throws what a part threw. Not while a call runs.
    FFNCounts take() {
        const FFNCounts found = total_;
        const std::exception_ptr error = error_;
        total_ = {}, error_ = nullptr;
        if (error) std::rethrow_exception(error);
        return found;
    }
    size_t begun() const { return begun_.load(); }
    size_t ended() const { return ended_.load(); }

 private:
    Context& context_;
    std::vector<Part> parts_;
    FFNCounts total_{};
    std::exception_ptr error_;
    std::atomic<size_t> begun_{0}, ended_{0};
};

}  // namespace tc
