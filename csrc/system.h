// What the core asks of the operating system. Only system.cpp, and uring.cpp for Linux's io_uring, include
// its headers: Linux, macOS and Windows differ there and nowhere else.
#pragma once
#include <cstddef>
#include <cstdint>

namespace tc {

// Zeroed memory that begins where a huge page may, with a page beyond `bytes` that is never used; data null:
// there is none.
struct Pages {
    uint8_t* data;
    void* mapping;  // what was asked for, of `mapped` bytes
    size_t mapped;
};
Pages map_pages(size_t bytes);
void unmap_pages(const Pages& pages);
void gather_huge_pages(uint8_t* data,
                       size_t bytes);  // where they were not given as such (Linux 6.1; else nothing happens)
bool forbid_page(uint8_t* page);       // from now on an access there ends the process

// Which file it is, and which version of it.
struct FileState {
    uint64_t device, inode, bytes;
    int64_t modified_ns;
    bool operator==(const FileState& o) const {
        return device == o.device && inode == o.inode && bytes == o.bytes && modified_ns == o.modified_ns;
    }
};
bool file_state(const char* path, FileState& state);  // false: there is no such file

// A file read by position. Several threads may read at once.
class File {
 public:
    enum Way {
        THROUGH_CACHE,
        DIRECT
    };  // direct: past the page cache, where the system and the file system have that
    File(const char* path, Way way);  // path: UTF-8
    ~File();
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    bool open() const { return fd_ >= 0; }
    int error() const { return error_; }  // an errno: why it is not open
    // Bytes read: fewer than n only at the end of the file, or with an errno in `error`. EINVAL of a direct
    // file: it wants other alignments.
    size_t read(uint8_t* to, size_t n, size_t at, int& error) const;
    bool cached(size_t at, size_t n)
        const;  // are all of these bytes in the page cache? false where the system does not say
    bool state(FileState& state) const;
    // What direct reads want offsets, lengths and addresses to be multiples of, 512 to 4096; 0: this file has
    // none.
    size_t direct_alignment() const;
    void expect_random_reads() const;  // through the cache: no reading ahead
    int descriptor() const { return fd_; }

 private:
    int fd_ = -1, error_ = 0;
};

unsigned forks_so_far();  // between the first process and this one: what has threads stays behind in the one
                          // that made it
constexpr const char* kForked =
    "this process was forked from the one that made the model: make it again in this one";

// What this CPU has: ARM lets only the system ask.
bool arm_has_dot_products();
bool arm_has_crc32();

}  // namespace tc
