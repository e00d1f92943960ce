#include "doorbell.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <utility>

#include "system.h"
#include "threads.h"

namespace tc {

using Clock = std::chrono::steady_clock;

// Between the hand-overs of a step lie 50 to 500 microseconds. Whoever waits for longer waits for a prompt,
// or for what was broken off: then the thread sleeps for a hundredth of the time that it has waited for.
static constexpr std::chrono::nanoseconds kSpin = std::chrono::milliseconds(5);
static constexpr std::chrono::nanoseconds kSleep = std::chrono::milliseconds(1);  // at most
static constexpr int kPauses = 16;  // between two looks: about 0.5 microseconds

Doorbell::Doorbell(std::vector<Words> queues) : forks_(forks_so_far()), state_(std::make_shared<State>()) {
    state_->queues = std::move(queues);
    thread_ = std::thread([s = state_] { work(*s); });
}

Doorbell::~Doorbell() {
    if (forks_so_far() != forks_) {
        thread_.detach();  // it is the parent's
        return;
    }
    bool running;
    {
        std::lock_guard<std::mutex> lock(state_->mutex);
        state_->stop.store(true);
        running = state_->running;
    }
    state_->wake.notify_all();
    if (running)
        thread_.detach();
    else
        thread_.join();
}

void Doorbell::expect(const std::vector<Call>& calls) {
    if (forks_so_far() != forks_) throw std::runtime_error(kForked);
    {
        std::lock_guard<std::mutex> lock(state_->mutex);
        state_->calls.insert(state_->calls.end(), calls.begin(), calls.end());
        state_->waiting.store(state_->calls.size());
    }
    state_->wake.notify_all();
}

bool Doorbell::settle() {
    std::lock_guard<std::mutex> lock(state_->mutex);
    if (state_->running) return false;
    state_->calls.clear();
    state_->waiting.store(0);
    for (const Words& w : state_->queues) w.asked->store(0), w.answered->store(0);
    return true;
}

// Runs the call that a queue asks for, if it is expected.
bool Doorbell::answer(State& s, Words w, uint32_t number) {
    Call call;
    {
        std::lock_guard<std::mutex> lock(s.mutex);
        const auto found =
            std::find_if(s.calls.begin(), s.calls.end(), [&](const Call& c) { return c.number == number; });
        if (s.stop.load() || found == s.calls.end()) return false;
        call = *found;
        s.calls.erase(found);
        s.waiting.store(s.calls.size());
        s.running = true;
        w.asked->store(0);
    }
    call.function(call.argument);
    std::lock_guard<std::mutex> lock(s.mutex);
    s.running = false;
    if (!s.stop.load()) w.answered->store(number);  // whoever stopped us may have freed the words
    return true;
}

void Doorbell::work(State& s) {
    for (;;) {
        {
            std::unique_lock<std::mutex> lock(s.mutex);
            s.wake.wait(lock, [&] { return s.stop.load() || !s.calls.empty(); });
        }
        for (auto since = Clock::now(); !s.stop.load() && s.waiting.load() > 0;) {
            bool met = false;
            for (const Words& w : s.queues) {
                // Acquire: what the queue wrote before its word is then seen, as it is by a host function.
                const uint32_t number = w.asked->load(std::memory_order_acquire);
                met = (number != 0 && answer(s, w, number)) || met;
            }
            const auto now = Clock::now();
            const std::chrono::nanoseconds waited = now - since;
            if (met)
                since = now;
            else if (waited > kSpin)
                std::this_thread::sleep_for(std::min(waited / 100, kSleep));
            else
                for (int i = 0; i < kPauses; i++) relax();
        }
        if (s.stop.load()) return;
    }
}

}  // namespace tc
