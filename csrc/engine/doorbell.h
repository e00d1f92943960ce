// The CPU's end of a hand-over by words in pinned memory: a thread runs a task when a GPU's queue has written
// the task's number, and writes the number back, for which the queue waits. Neither the driver nor Python
// takes part.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace tc {

class Doorbell {
 public:
    using Word = std::atomic<uint32_t>;
    static_assert(sizeof(Word) == 4 && Word::is_always_lock_free, "a GPU writes it");

    // A queue's two words, 64 bytes apart. The queue writes `asked` = number, waits until `answered` is that
    // number, then writes `answered` = 0. So a recording, in which numbers are fixed, can be replayed.
    struct Words {
        Word *asked, *answered;
    };
    struct Call {
        uint32_t number;  // not 0
        void (*function)(void*);
        void* argument;
    };

    explicit Doorbell(std::vector<Words> queues);  // throws std::system_error if there is no thread
    ~Doorbell();                                   // a task that runs is not waited for, and answers no more
    Doorbell(const Doorbell&) = delete;
    Doorbell& operator=(const Doorbell&) = delete;

    // Calls that queues will ask for, in any order, each once. Said before they are queued: whatever breaks
    // off the caller then, no queue waits for a call that is not known.
    void expect(const std::vector<Call>& calls);

    // Forgets calls that nobody has asked for, and returns whether nothing runs. Only while the queues are
    // empty: calls of a step that was broken off are asked for no more.
    bool settle();

    size_t expected() const { return state_->waiting.load(); }

 private:
    // The thread looks at the words while `waiting` is not 0, and sleeps on `wake` else. `mutex` guards
    // `calls`, `running`, `stop` and each answer. The thread's own, too, so that a task may outlast the rest.
    struct State {
        std::vector<Words> queues;
        std::mutex mutex;
        std::condition_variable wake;
        std::deque<Call> calls;
        std::atomic<size_t> waiting{0};  // calls.size()
        bool running = false;
        std::atomic<bool> stop{false};
    };
    static void work(State& s);
    static bool answer(State& s, Words w, uint32_t number);

    const unsigned forks_;  // forks_so_far() when the thread was made
    std::shared_ptr<State> state_;
    std::thread thread_;
};

}  // namespace tc
