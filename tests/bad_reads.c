/* A disk that misbehaves: preloaded, it counts a process's reads of files, by pread or by io_uring, and spoils some.
   `syscall` is where the core enters io_uring: what it is about to submit is changed there, since what the kernel then
   answers cannot be. BAD_READ, or bad_reads(...) inside the process, says how; bad_reads_seen() counts the reads since:
     eio N          the N-th read (from 1) fails
     eio_from N     that and all after it
     end N          the N-th finds the file's end
     short          each gives only a part
     interrupted    every other system call is
     busy           every other io_uring_enter has no memory
     slow MS        each pread takes as long
     forbidden      io_uring may be set up, but not entered
     sectors N      the system does not say how direct reads must lie, and refuses preads that are no multiples of N */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static char said[64];
static const char* word(void) { const char* w = getenv("BAD_READ"); return *said ? said : w ? w : ""; }
/* A thread that reads ahead asks while another one says. A lock, since a sanitizer does not see atomics here. */
static pthread_mutex_t saying = PTHREAD_MUTEX_INITIALIZER;
static int is(const char* what) {
    size_t n = strlen(what);
    pthread_mutex_lock(&saying);
    int found = !strncmp(word(), what, n) && (word()[n] == 0 || word()[n] == ' ');
    pthread_mutex_unlock(&saying);
    return found;
}
static long number(void) {
    pthread_mutex_lock(&saying);
    const char* n = strchr(word(), ' ');
    long found = n ? atol(n + 1) : 0;
    pthread_mutex_unlock(&saying);
    return found;
}
static atomic_long reads, calls;
void bad_reads(const char* what) {
    pthread_mutex_lock(&saying);
    strncpy(said, what, sizeof said - 1), reads = calls = 0;
    pthread_mutex_unlock(&saying);
}
long bad_reads_seen(void) { return reads; }
static int spoilt(long n) { return (is("eio") && n == number()) || (is("eio_from") && n >= number()); }
static uint64_t part(uint64_t n) { return n > 512 ? n / 2 & ~(uint64_t)511 : n; }

static ssize_t bad_pread(int fd, void* to, size_t n, off_t at) {
    static ssize_t (*real)(int, void*, size_t, off_t);
    struct stat s;
    if (!real) real = dlsym(RTLD_NEXT, "pread");
    if (fstat(fd, &s) || !S_ISREG(s.st_mode)) return real(fd, to, n, at);
    if (is("interrupted") && calls++ % 2 == 0) return errno = EINTR, -1;
    long mine = ++reads;
    if (spoilt(mine)) return errno = EIO, -1;
    if (is("end") && mine == number()) return 0;
    if (is("sectors") && (at | n) % number()) return errno = EINVAL, -1;
    if (is("slow")) usleep(1000 * number());
    return real(fd, to, is("short") ? part(n) : n, at);
}
ssize_t pread(int fd, void* to, size_t n, off_t at) { return bad_pread(fd, to, n, at); }
ssize_t pread64(int fd, void* to, size_t n, off_t at) { return bad_pread(fd, to, n, at); }

struct sqe {
    uint8_t op, flags;
    uint16_t prio;
    int32_t fd;
    uint64_t at, to;
    uint32_t n, rw;
    uint64_t user, rest[3];
};
struct params {
    uint32_t sq_entries, unused[9], head, tail, mask, unused2[5];
    uint64_t unused3;
    uint32_t cq[8];
    uint64_t end;
};
static struct ring { int fd; struct params p; uint8_t* rings; struct sqe* sqes; uint32_t seen; } all[64];
static int rings;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct ring* of(int fd) {
    for (int i = rings; i--;) if (all[i].fd == fd) return &all[i];
    return 0;
}

static void* bad_mmap(void* a, size_t n, int prot, int flags, int fd, off_t at) {
    static void* (*real)(void*, size_t, int, int, int, off_t);
    if (!real) real = dlsym(RTLD_NEXT, "mmap");
    void* got = real(a, n, prot, flags, fd, at);
    struct ring* r = fd >= 0 ? of(fd) : 0;
    if (r && at == 0) r->rings = got;
    if (r && at == 0x10000000) r->sqes = got;
    return got;
}
void* mmap(void* a, size_t n, int p, int f, int fd, off_t at) { return bad_mmap(a, n, p, f, fd, at); }
void* mmap64(void* a, size_t n, int p, int f, int fd, off_t at) { return bad_mmap(a, n, p, f, fd, at); }

static void spoil(struct sqe* e) {
    static int mem = -1;
    long mine = ++reads;
    if (spoilt(mine)) {  /* what is never mapped, read from where reading it is an I/O error */
        if (mem < 0) mem = open("/proc/self/mem", O_RDONLY);
        e->op = 22, e->flags &= ~1, e->fd = mem, e->at = 4096;
    }
    if (is("end") && mine == number()) e->at = (uint64_t)1 << 40;
    if (is("short")) e->n = part(e->n);
}

long syscall(long nr, ...) {
    static long (*real)(long, ...);
    va_list l;
    long a[6];
    va_start(l, nr);
    for (int i = 0; i < 6; i++) a[i] = va_arg(l, long);
    va_end(l);
    if (!real) real = dlsym(RTLD_NEXT, "syscall");
    if (is("sectors") && nr == SYS_statx) return errno = ENOSYS, -1;
    if (nr == 426) {
        struct ring* r = of((int)a[0]);
        long call = calls++;
        if (is("interrupted") && call % 2) return errno = EINTR, -1;
        if (is("busy") && a[1] && call % 2) return errno = EAGAIN, -1;
        if (is("forbidden")) return errno = EPERM, -1;
        pthread_mutex_lock(&lock);
        uint32_t tail = __atomic_load_n((uint32_t*)(r->rings + r->p.tail), __ATOMIC_ACQUIRE);
        for (; r->seen != tail; r->seen++) {
            struct sqe* e = &r->sqes[r->seen & (r->p.sq_entries - 1)];
            if (e->op == 4 || e->op == 22) spoil(e);
        }
        pthread_mutex_unlock(&lock);
    }
    long got = real(nr, a[0], a[1], a[2], a[3], a[4], a[5]);
    if (nr == 425 && got >= 0) {
        struct ring* r = of((int)got);  /* of a ring that is closed, perhaps */
        if (!r && rings == 64) abort();
        if (!r) r = &all[rings++];
        r->fd = (int)got, r->seen = 0, r->p = *(struct params*)a[1];
    }
    return got;
}
