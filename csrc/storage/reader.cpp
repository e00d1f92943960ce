#include "reader.h"

#include <errno.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>

#include "round.h"
#include "uring.h"

namespace tc {

static constexpr size_t kPage = 4096;
static constexpr auto kWait = std::chrono::milliseconds(100);
static constexpr unsigned kThreads = 32;  // each waits for one read at a time

// ---- threads: each takes a request, waits for the disk, and says so
class ReadThreads {
 public:
    ReadThreads(std::vector<const File*> files, unsigned depth) : files_(std::move(files)), depth_(depth) {
        try {
            for (unsigned i = 0; i < std::min(depth, kThreads); i++)
                threads_.emplace_back([this] { work(); });
        } catch (const std::exception&) {
        }  // the system has no more threads for us: those there are do the work
    }

    ~ReadThreads() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stop_ = true;
            queue_.clear();  // nobody is there to take what these would read
        }
        requested_.notify_all();
        for (std::thread& t : threads_) t.join();  // each may be within a read
    }

    size_t count() const { return threads_.size(); }

    bool submit(const ReadRequest* requests, size_t n) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            if (n > depth_ - in_flight_) return false;
            in_flight_ += unsigned(n);
            queue_.insert(queue_.end(), requests, requests + n);
        }
        n == 1 ? requested_.notify_one() : requested_.notify_all();
        return true;
    }

    size_t take(ReadDone* out, size_t max, bool wait) {
        std::unique_lock<std::mutex> lock(mutex_);
        if (wait) done_.wait_for(lock, kWait, [this] { return !finished_.empty() || !in_flight_; });
        size_t n = 0;
        for (; n < max && !finished_.empty(); finished_.pop_back()) out[n++] = finished_.back();
        in_flight_ -= unsigned(n);
        return n;
    }

 private:
    void work() {
        for (std::unique_lock<std::mutex> lock(mutex_);;) {
            requested_.wait(lock, [this] { return stop_ || !queue_.empty(); });
            if (queue_.empty()) return;
            const ReadRequest r = queue_.front();
            queue_.pop_front();
            lock.unlock();
            int error;
            const size_t got = files_[r.file]->read(r.to, r.bytes, r.offset, error);
            if (got >= r.needed())
                error = 0;
            else if (!error)
                error = -1;
            lock.lock();
            finished_.push_back({r.tag, error});
            done_.notify_all();
        }
    }

    const std::vector<const File*> files_;
    const unsigned depth_;
    std::mutex mutex_;  // of all that follows
    std::condition_variable requested_, done_;
    std::deque<ReadRequest> queue_;
    std::vector<ReadDone> finished_;
    unsigned in_flight_ = 0;  // not taken yet
    bool stop_ = false;
    std::vector<std::thread> threads_;  // last: they use the others
};

// ---- the reader
static std::string name_of(int error) {
    switch (error) {
#define NAME(e) \
    case e:     \
        return #e
        NAME(EPERM);
        NAME(EACCES);
        NAME(EAGAIN);
        NAME(EINVAL);
        NAME(EMFILE);
        NAME(ENFILE);
        NAME(ENOMEM);
        NAME(ENOSYS);
        NAME(EIO);
#undef NAME
        default:
            return error == EOPNOTSUPP ? "EOPNOTSUPP" : "errno " + std::to_string(error);
    }
}

Reader::Reader(const char* path, unsigned depth, size_t buffer_bytes, Method method, bool direct)
    : Reader(std::vector<std::string>{path}, depth, buffer_bytes, method, direct) {}

Reader::Reader(const std::vector<std::string>& paths, unsigned depth, size_t buffer_bytes, Method method,
               bool direct)
    : depth_(depth),
      buffer_bytes_(buffer_bytes),
      buffer_stride_(whole(buffer_bytes, kPage)),
      forks_(forks_so_far()) {
    for (const std::string& path : paths) files_.push_back({path, nullptr, {}});
    error_ = open(direct);
    if (error_) return;
    buffers_ = map_pages(depth * buffer_stride_);
    error_ = buffers_.data ? begin(method) : ENOMEM;
}

// Reads that were left behind write into the buffers, which stay for as long as they take, but nobody waits:
// a program that is told to end does so, however slow the disk is.
Reader::~Reader() {
    const bool forked = this->forked();
    if (forked) {  // the parent's: there is none to join here, and locks are never given back
        threads_.release();
        for (Source& f : files_) f.file.release();
    }
    auto close = [forked, buffers = buffers_, files = std::move(files_), ring = std::move(ring_),
                  threads = std::move(threads_)]() mutable {
        if (ring && !ring->error() && !forked) ring->drain();
        threads.reset();
        ring.reset();
        unmap_pages(buffers);
    };
    if (!left_behind || forked) {
        close();
        return;
    }
    const auto later = std::make_shared<decltype(close)>(std::move(close));
    try {
        std::thread([later] { (*later)(); }).detach();
    } catch (const std::exception&) {
        (*later)();
    }
}

// All directly, or all through the page cache: one alignment.
int Reader::open(bool direct) {
    int refused = 0;
    alignment_ = 1;
    for (failed_file_ = 0; direct && failed_file_ < files_.size(); failed_file_++) {
        std::unique_ptr<File>& file = files_[failed_file_].file;
        file = std::make_unique<File>(files_[failed_file_].path.c_str(), File::DIRECT);
        const size_t alignment = file->open() ? file->direct_alignment() : 0;
        refused = !file->open() ? file->error() : !alignment ? EOPNOTSUPP : 0;
        if (refused) direct = false;
        alignment_ = std::max(alignment_, alignment);
    }
    how_ = ", direct";
    for (failed_file_ = 0; !direct && failed_file_ < files_.size(); failed_file_++) {
        std::unique_ptr<File>& file = files_[failed_file_].file;
        file = std::make_unique<File>(files_[failed_file_].path.c_str(), File::THROUGH_CACHE);
        if (!file->open()) return file->error();
        file->expect_random_reads();
        alignment_ = 1;
        how_ =
            ", through the page cache" + (refused ? " (direct I/O refused: " + name_of(refused) + ")" : "");
    }
    for (failed_file_ = 0; failed_file_ < files_.size(); failed_file_++)
        if (Source& f = files_[failed_file_]; !f.file->state(f.opened)) return EIO;
    return 0;
}

int Reader::begin(Method method) {
    int refused = 0;
    std::vector<const File*> files;
    for (const Source& f : files_) files.push_back(f.file.get());
    if (method != Method::THREADS) {
        ring_ = std::make_unique<Ring>(files, depth_, buffers_.data, depth_ * buffer_stride_, alignment_);
        refused = ring_->error();
        if (!refused) {
            how_ = "io_uring" + how_;
            if (const int e = ring_->not_registered())
                how_ += " (buffers not registered: " + name_of(e) + ")";
            return 0;
        }
        ring_.reset();
        if (method == Method::URING) return refused;
    }
    threads_ = std::make_unique<ReadThreads>(files, depth_);
    how_ = std::to_string(threads_->count()) + " threads" + how_;
    if (refused) how_ += " (io_uring refused: " + name_of(refused) + ")";
    return threads_->count() ? 0 : EAGAIN;
}

bool Reader::changed(unsigned file) const {
    const Source& f = files_[file];
    FileState there, opened;
    return !file_state(f.path.c_str(), there) || !f.file->state(opened) || !(there == f.opened) ||
           !(opened == f.opened);
}

bool Reader::submit(const ReadRequest* requests, size_t n) {
    if (forked()) return false;
    return ring_ ? ring_->submit(requests, n) : threads_->submit(requests, n);
}

size_t Reader::take(ReadDone* out, size_t max, bool wait) {
    if (forked()) return 0;
    return ring_ ? ring_->take(out, max, wait) : threads_->take(out, max, wait);
}

size_t Reader::measure(const uint64_t* offsets, size_t n, uint32_t bytes, double seconds, int& error) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    std::vector<unsigned> idle(depth_);  // buffers
    std::iota(idle.begin(), idle.end(), 0u);
    std::vector<ReadDone> done(depth_);
    std::vector<ReadRequest> requests;
    size_t begun = 0, read = 0;
    for (error = 0;;) {
        requests.clear();
        if (!error && std::chrono::steady_clock::now() < end)
            for (; begun < n && !idle.empty(); idle.pop_back())
                requests.push_back({offsets[begun++], bytes, buffer(idle.back()), idle.back()});
        if (!requests.empty() && !submit(requests.data(), requests.size())) {
            error = EBUSY;  // somebody else reads with it
            for (const ReadRequest& r : requests) idle.push_back(unsigned(r.tag));
        }
        if (idle.size() == depth_) return read;
        for (size_t i = take(done.data(), depth_, true); i--; idle.push_back(unsigned(done[i].tag))) {
            if (!done[i].error)
                read++;
            else if (!error)
                error = done[i].error;
        }
    }
}

}  // namespace tc
