// Asynchronous reads of one file by position, or of several as one queue, past the page cache where that is
// possible: by io_uring, or by threads where the system has none. It knows offsets and bytes; what they mean,
// and whether they are right, is its caller's.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "system.h"

namespace tc {

struct ReadRequest {
    uint64_t offset;
    uint32_t bytes;
    uint8_t* to;  // a registered buffer costs least, any other memory does
    uint64_t tag;
    unsigned file = 0;
    uint32_t least = 0;  // so many bytes will do: a file's end may be no multiple of the alignment; 0: all

    uint32_t needed() const { return least ? least : bytes; }
};

struct ReadDone {
    uint64_t tag;
    int error;  // an errno; -1: the file ends early; 0: all bytes are there
};

enum class Method { AUTO, URING, THREADS };

class Ring;         // uring.h
class ReadThreads;  // reader.cpp
class Fetches;      // fetches.h

// Thread-safe. Interrupted and short reads go on inside. Whoever waits holds no lock that a taker needs:
//   one mutex around { take, then publish what came } is enough for many threads. A thread that needs a
//   record locks it, looks again, and only then waits inside; a thread that only looks in passing uses
//   try_lock. So no wake-up is lost: all that others took is published by the time one looks.
class Reader {
 public:
    // `depth`: reads in flight at most, 1 to 4096; as many buffers of `buffer_bytes`, each from a page's
    // begin on.
    Reader(const char* path, unsigned depth, size_t buffer_bytes, Method method = Method::AUTO,
           bool direct = true);
    Reader(const std::vector<std::string>& paths, unsigned depth, size_t buffer_bytes,
           Method method = Method::AUTO, bool direct = true);
    // Waits for reads in flight, which write into the caller's memory; not for those left behind, which write
    // into the buffers.
    ~Reader();
    Reader(const Reader&) = delete;
    Reader& operator=(const Reader&) = delete;

    int error() const { return error_; }  // an errno: why there is no reader; then nothing else may be called
    unsigned depth() const { return depth_; }
    size_t buffer_bytes() const { return buffer_bytes_; }
    uint8_t* buffer(unsigned i) const { return buffers_.data + i * buffer_stride_; }
    // `offset`, `bytes` and `to` of a request are multiples of it: 512 to 4096 direct, 1 through the cache.
    size_t alignment() const { return alignment_; }
    const char* how() const { return how_.c_str(); }  // for people: "io_uring, direct"
    // Whether this process was forked from the one that made the reader: no read of it ever ends here.
    bool forked() const { return forks_ != forks_so_far(); }
    // Whether another file has the path now, or this file another size or time than when it was opened.
    bool changed(unsigned file = 0) const;
    const FileState& state(unsigned file) const { return files_[file].opened; }  // when it was opened
    unsigned failed_file() const { return failed_file_; }  // where there is an error: whose it is

    // Begin n reads, all or none. false: more than `depth` would be in flight, or this process was forked
    // from the one that made the reader. Never waits for the disk.
    bool submit(const ReadRequest* requests, size_t n);
    // Reads that are done, in any order, at most `max`. `wait`: sleep until there is one, but not for ever: 0
    // after 100 ms, a signal or a part of a read, and at once when nothing is in flight.
    size_t take(ReadDone* out, size_t max, bool wait);
    // Reads in flight, into the buffers, that their call no longer needs. The next call takes them first.
    size_t left_behind = 0;
    // Reads begun for a call that has not come yet, which takes them over. One call at a time has the
    // buffers: if another comes first, they are left behind.
    std::shared_ptr<Fetches> early;

    // Measures a disk: reads `bytes` at each of n offsets into the buffers, `depth` at a time, for `seconds`.
    // Returns how many reads ended; `error` becomes the first failure, which ends it, or 0.
    size_t measure(const uint64_t* offsets, size_t n, uint32_t bytes, double seconds, int& error);

 private:
    int open(bool direct);
    int begin(Method method);

    struct Source {
        std::string path;
        std::unique_ptr<File> file;
        FileState opened;
    };
    std::vector<Source> files_;
    const unsigned depth_;
    const size_t buffer_bytes_, buffer_stride_;
    const unsigned forks_;  // this process has been forked from, when the reader was made
    size_t alignment_ = 1;
    Pages buffers_{};
    std::unique_ptr<Ring> ring_;  // one of these two
    std::unique_ptr<ReadThreads> threads_;
    std::string how_;
    int error_ = 0;
    unsigned failed_file_ = 0;
};

}  // namespace tc
