/* Functions that are linked with a checked program in place of those of the C library. Calls that pass memory to the system
   report it to the emulated runtime first, since the system refuses a forbidden access without a fault. Allocations get
   pages for themselves, so that they can be protected during an asynchronous copy (emulator/host/guard.c). If the program
   defines a function of one of these names, its own is used. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>

void kernelproof_touch(const void *, size_t, int);
void *kernelproof_allocate(size_t);
void kernelproof_release(void *);

#define OURS __attribute__((visibility("hidden"), weak))
/* The next function of this name, which the program would have called. */
#define REAL(name, result, params)                                  \
  ({                                                                \
    static void *real;                                              \
    if (!real) real = dlsym(RTLD_NEXT, name);                       \
    (result(*) params)real;                                         \
  })

/* --- memory that the system reads or writes --- */
OURS ssize_t read(int file, void *p, size_t n) { kernelproof_touch(p, n, 1); return REAL("read", ssize_t, (int, void *, size_t))(file, p, n); }
OURS ssize_t write(int file, const void *p, size_t n) { kernelproof_touch(p, n, 0); return REAL("write", ssize_t, (int, const void *, size_t))(file, p, n); }
OURS ssize_t pread(int file, void *p, size_t n, off_t at) { kernelproof_touch(p, n, 1); return REAL("pread", ssize_t, (int, void *, size_t, off_t))(file, p, n, at); }
OURS ssize_t pwrite(int file, const void *p, size_t n, off_t at) { kernelproof_touch(p, n, 0); return REAL("pwrite", ssize_t, (int, const void *, size_t, off_t))(file, p, n, at); }
OURS ssize_t recv(int file, void *p, size_t n, int flags) { kernelproof_touch(p, n, 1); return REAL("recv", ssize_t, (int, void *, size_t, int))(file, p, n, flags); }
OURS ssize_t send(int file, const void *p, size_t n, int flags) { kernelproof_touch(p, n, 0); return REAL("send", ssize_t, (int, const void *, size_t, int))(file, p, n, flags); }
OURS size_t fread(void *p, size_t size, size_t n, FILE *file) { kernelproof_touch(p, size * n, 1); return REAL("fread", size_t, (void *, size_t, size_t, FILE *))(p, size, n, file); }
OURS size_t fwrite(const void *p, size_t size, size_t n, FILE *file) { kernelproof_touch(p, size * n, 0); return REAL("fwrite", size_t, (const void *, size_t, size_t, FILE *))(p, size, n, file); }
/* What read and fread become in programs that are compiled with _FORTIFY_SOURCE. */
OURS ssize_t __read_chk(int file, void *p, size_t n, size_t room) { kernelproof_touch(p, n, 1); return REAL("__read_chk", ssize_t, (int, void *, size_t, size_t))(file, p, n, room); }
OURS size_t __fread_chk(void *p, size_t room, size_t size, size_t n, FILE *file) { kernelproof_touch(p, size * n, 1); return REAL("__fread_chk", size_t, (void *, size_t, size_t, size_t, FILE *))(p, room, size, n, file); }
/* std::istream::read and std::ostream::write. */
OURS void *_ZNSi4readEPcl(void *stream, char *p, long n) { kernelproof_touch(p, (size_t)n, 1); return REAL("_ZNSi4readEPcl", void *, (void *, char *, long))(stream, p, n); }
OURS void *_ZNSo5writeEPKcl(void *stream, const char *p, long n) { kernelproof_touch(p, (size_t)n, 0); return REAL("_ZNSo5writeEPKcl", void *, (void *, const char *, long))(stream, p, n); }

/* --- allocations --- */
#define ALLOCATE(name, n)                    \
  void *p = kernelproof_allocate(n);         \
  return p ? p : REAL(name, void *, (size_t))(n)
OURS void *malloc(size_t n) { ALLOCATE("malloc", n); }
OURS void *_Znwm(size_t n) { ALLOCATE("_Znwm", n); }
OURS void *_Znam(size_t n) { ALLOCATE("_Znam", n); }
OURS void *calloc(size_t n, size_t size) {
  void *p = size && n > (size_t)-1 / size ? 0 : kernelproof_allocate(n * size);
  return p ? memset(p, 0, n * size) : REAL("calloc", void *, (size_t, size_t))(n, size);
}
OURS void *realloc(void *p, size_t n) {
  kernelproof_release(p);
  return REAL("realloc", void *, (void *, size_t))(p, n);
}
#define RELEASE(name) kernelproof_release(p); REAL(name, void, (void *))(p)
OURS void free(void *p) { RELEASE("free"); }
OURS void _ZdlPv(void *p) { RELEASE("_ZdlPv"); }
OURS void _ZdaPv(void *p) { RELEASE("_ZdaPv"); }
OURS void _ZdlPvm(void *p, size_t n) { (void)n; RELEASE("_ZdlPv"); }
OURS void _ZdaPvm(void *p, size_t n) { (void)n; RELEASE("_ZdaPv"); }
