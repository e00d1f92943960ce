// All that the core uses of the operating system. Only system.cpp (and uring.cpp, for Linux's io_uring)
// includes its headers, so Linux, macOS and Windows differ there and nowhere else.
#pragma once
#include <cstddef>
#include <cstdint>

namespace tc {

// Zeroed memory, aligned to a huge page, with an unused page after `bytes`. data is null if there is no
// memory.
struct Pages {
    uint8_t* data;
    void* mapping;  // the whole mapping, of `mapped` bytes
    size_t mapped;
};
Pages map_pages(size_t bytes);
void unmap_pages(const Pages& pages);
void gather_huge_pages(uint8_t* data,
                       size_t bytes);  // move the bytes into huge pages (Linux 6.1; otherwise no effect)
bool forbid_page(uint8_t* page);       // any later access to the page ends the process

// The identity and the version of a file.
struct FileState {
    uint64_t device, inode, bytes;
    int64_t modified_ns;
    bool operator==(const FileState& o) const {
        return device == o.device && inode == o.inode && bytes == o.bytes && modified_ns == o.modified_ns;
    }
};
bool file_state(const char* path, FileState& state);  // false if there is no such file

// A file that is read by position. Several threads may read at once.
class File {
 public:
    enum Way {
        THROUGH_CACHE,
        DIRECT
    };  // DIRECT: past the page cache, if the system and the file system support it
    File(const char* path, Way way);  // path: UTF-8
    ~File();
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    bool open() const { return fd_ >= 0; }
    int error() const { return error_; }  // an errno if the file is not open
    // Return the number of bytes read: fewer than n only at the end of the file, or with an errno in `error`.
    // EINVAL for a direct file means that it needs other alignments.
    size_t read(uint8_t* to, size_t n, size_t at, int& error) const;
    bool cached(size_t at, size_t n)
        const;  // whether all of these bytes are in the page cache; false if the system does not say
    bool state(FileState& state) const;
    // The alignment of offsets, lengths and addresses of direct reads, 512 to 4096. 0: the file has no direct
    // reads.
    size_t direct_alignment() const;
    void expect_random_reads() const;  // switch off read-ahead of the page cache
    int descriptor() const { return fd_; }

 private:
    int fd_ = -1, error_ = 0;
};

unsigned forks_so_far();  // forks between the first process and this one; threads do not survive a fork
constexpr const char* kForked =
    "this process was forked from the one that made the model: make it again in this one";

// Ask for the tile registers of AMX: 8 KiB, which Linux gives to a process that asks. It refuses where a
// stack for signals is too small to hold them. false: this process must not use them.
bool may_use_tiles();

// Features of an ARM CPU, which only the system can tell.
bool arm_has_dot_products();
bool arm_has_crc32();

}  // namespace tc
