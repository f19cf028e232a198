/* Detects host code that accesses memory which it must not access at that time, such as the target of a copy that has not
   ended. This is a part of runtime.c's text. The addresses that programs get for emulated memory are a second mapping of
   it, whose pages are protected one by one (memory/host_view.py). A fault there is passed to the session like a runtime
   call, with the address and whether it is a write. If the session allows the access, the instruction is executed again;
   if not, the previous handler gets the signal. If only some bytes of a page are forbidden, the session says which. An
   access to other bytes of the page is single-stepped, and then the page is protected again. */
#include <errno.h>
#include <execinfo.h>
#include <malloc.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

/* The call stack of the runtime call or access that a thread is executing, the innermost frame first, as return addresses:
   the byte before each belongs to the instruction. */
enum { kFrames = 14 };
static __thread void *g_frames[kFrames];
static __thread int g_frame_count;
static __thread int g_inside; /* how many runtime calls the thread is in */
static struct { uintptr_t start, end; } g_guarded; /* the second mapping of emulated memory */
static struct sigaction g_previous_fault, g_previous_trap; /* the previous handlers of faults and traps */

/* Pages of which some bytes are forbidden. "access": the page's protection (PROT_..). "mask" has a byte for each byte of the page: 1
   forbids writes, 2 forbids reads. "left": how many more accesses are single-stepped; after these the page stays open until the session
   protects it again. */
enum { kPage = 4096, kMostPartial = 64, kMostSingleSteps = 65536, kMostOpenPages = 4 };
typedef struct { uintptr_t page; int access, left; unsigned char mask[kPage]; } partial_t;
static partial_t g_partial[kMostPartial];
static int g_partial_count;
/* The pages that are open for the instruction that a thread single-steps. */
static __thread struct { uintptr_t page; int access; } g_open_pages[kMostOpenPages];
static __thread int g_open_page_count;

/* Adds a page of which some bytes are forbidden. Returns 0 if this machine cannot single-step, or there are too many pages. */
EXPORT int emulator_add_partial_page(uintptr_t page, int access, const unsigned char *mask) {
#if defined(__x86_64__)
  partial_t *p = &g_partial[g_partial_count];
  if (g_partial_count == kMostPartial) return 0;
  p->page = page;
  p->access = access;
  p->left = kMostSingleSteps;
  memcpy(p->mask, mask, kPage);
  ++g_partial_count;
  return 1;
#else
  (void)page; (void)access; (void)mask;
  return 0;
#endif
}
/* Forgets all pages of which some bytes are forbidden. */
EXPORT void emulator_forget_partial_pages(void) { g_partial_count = 0; }

/* Stores the call stack of a runtime call in g_frames if memory is guarded. */
static void note_caller(void) {
  if (g_guarded.start) g_frame_count = backtrace(g_frames, kFrames);
}
/* Calls the session with a call's name and arguments, and returns its error code. */
static int pass_to_session(const char *name, int64_t *args) {
  if (!g_callback) return kErrorNoDevice;
  note_caller();
  ++g_inside;
  int rc = g_callback(name, args);
  --g_inside;
  return rc;
}
/* Stores the return addresses of g_frames, at most kFrames, and returns their number. */
EXPORT int emulator_frames(void **out) {
  memcpy(out, g_frames, sizeof *out * (size_t)g_frame_count);
  return g_frame_count;
}

static void *instruction(const ucontext_t *c) {
#if defined(__x86_64__)
  return (void *)c->uc_mcontext.gregs[REG_RIP];
#else
  return (void *)c->uc_mcontext.pc;
#endif
}
static int is_write(const ucontext_t *c) {
#if defined(__x86_64__)
  return c->uc_mcontext.gregs[REG_ERR] >> 1 & 1;
#else
  (void)c;
  return 0; /* unknown on this machine; the session assumes a write if the page may be read */
#endif
}
/* Stores the call stack of a faulting access in g_frames, its instruction first, without the frames of the signal handler. */
static void note_fault(const ucontext_t *c) {
  void *raw[kFrames + 4], *at = instruction(c);
  int first = 0, n = backtrace(raw, kFrames + 4);
  while (first < n && raw[first] != at) ++first;
  g_frames[0] = (char *)at + 1;
  g_frame_count = 1;
  for (int i = first + 1; i < n && g_frame_count < kFrames; ++i) g_frames[g_frame_count++] = raw[i];
}
/* The program's own memory to or from which asynchronous copies are running. */
enum { kMostWatched = 64 };
static struct { uintptr_t start, end; } g_watched[kMostWatched];
static int g_watched_count;
/* Protects whole pages of the program's own memory. Returns 0 if that fails. */
EXPORT int emulator_watch_own(uintptr_t start, uintptr_t end, int access) {
  if (g_watched_count == kMostWatched || mprotect((void *)start, end - start, access)) return 0;
  g_watched[g_watched_count].start = start;
  g_watched[g_watched_count++].end = end;
  return 1;
}
/* Ends the protection of the pages that begin at start. */
EXPORT void emulator_unwatch_own(uintptr_t start) {
  for (int i = 0; i < g_watched_count; ++i)
    if (g_watched[i].start == start) {
      mprotect((void *)start, g_watched[i].end - start, PROT_READ | PROT_WRITE);
      g_watched[i] = g_watched[--g_watched_count];
      return;
    }
}
/* Returns the start of the watched pages of the program's own memory that have the address, or 0. */
static uintptr_t watched_start(uintptr_t at) {
  for (int i = 0; i < g_watched_count; ++i)
    if (at >= g_watched[i].start && at < g_watched[i].end) return g_watched[i].start;
  return 0;
}
static int is_guarded(uintptr_t at) { return (at >= g_guarded.start && at < g_guarded.end) || watched_start(at); }

/* Reports memory that a program passes to the system (host_calls.c) before the call, which would fail without a fault. */
EXPORT void kernelproof_touch(const void *p, size_t n, int write) {
  uintptr_t at = (uintptr_t)p, page = at / kPage * kPage;
  int guarded = 0;
  if (!g_callback || !g_guarded.start || !n || g_inside) return;
  if (at + n > g_guarded.start && at < g_guarded.end) guarded = 1;
  for (int i = 0; i < g_watched_count; ++i) guarded |= at + n > g_watched[i].start && page < g_watched[i].end;
  if (guarded) {
    int64_t words[] = {W(at), W(n), write, 0};
    note_caller();
    g_callback("host_range", words);
  }
}
/* The program's allocations that have whole pages for themselves, so that they can be protected. They come from memalign,
   so free accepts them. The table is a hash table without probing: a colliding block replaces the previous one. */
enum { kBlocks = 1 << 14 };
static struct { uintptr_t start, end; } g_blocks[kBlocks];
static int g_block_count; /* how many are not released; the limit bounds the memory that rounding up costs */
/* Returns the table's index of a block: the upper 14 bits of a multiplicative hash of its page. */
static size_t block_slot(uintptr_t start) { return start / kPage * 0x9E3779B97F4A7C15u >> 50; }
/* Allocates n bytes with pages for themselves. Returns 0 if malloc has to allocate them. */
EXPORT void *kernelproof_allocate(size_t n) {
  size_t whole = (n + kPage - 1) / kPage * kPage;
  if (!g_guarded.start || !n || whole < n || g_block_count >= kBlocks) return 0;
  uintptr_t start = (uintptr_t)memalign(kPage, whole);
  size_t i = block_slot(start);
  /* A block that is replaced here is merely not watched. */
  if (start) {
    g_blocks[i].start = start;
    g_blocks[i].end = start + whole;
    __atomic_add_fetch(&g_block_count, 1, __ATOMIC_RELAXED);
  }
  return (void *)start;
}
/* Reports the end of a block before free, since freeing during a copy is a race too. */
EXPORT void kernelproof_release(void *p) {
  size_t i = block_slot((uintptr_t)p);
  if (g_blocks[i].start == (uintptr_t)p && p) {
    kernelproof_touch(p, g_blocks[i].end - g_blocks[i].start, 1);
    g_blocks[i].start = g_blocks[i].end = 0;
    __atomic_sub_fetch(&g_block_count, 1, __ATOMIC_RELAXED);
  }
}
/* Finds the whole pages that the program's memory has for itself: those of its allocation, or those that it fills. Returns
   0 if there are none, or for memory on the stack, which signal handlers need. */
EXPORT int emulator_own_pages(uintptr_t at, size_t n, uintptr_t *start, uintptr_t *end) {
  uintptr_t stack = (uintptr_t)__builtin_frame_address(0);
  if (at + n > stack && at < stack + (16 << 20)) return 0; /* 16 MiB above this frame count as the stack */
  for (int i = 0; i < kBlocks; ++i)
    if (g_blocks[i].start && at >= g_blocks[i].start && at + n <= g_blocks[i].end) {
      *start = at / kPage * kPage;
      *end = (at + n + kPage - 1) / kPage * kPage;
      return 1;
    }
  *start = at / kPage * kPage + kPage; /* the first page has what malloc writes when it frees */
  *end = (at + n) / kPage * kPage;
  return *start < *end;
}

/* Opens a partly forbidden page for one instruction if the byte that it accesses is allowed. Returns whether it did; on_trap protects the
   page again after the instruction. */
static int single_step(uintptr_t at, int write, ucontext_t *c) {
#if defined(__x86_64__)
  for (int i = 0; i < g_partial_count; ++i) {
    partial_t *p = &g_partial[i];
    if (p->page != at / kPage * kPage || p->mask[at % kPage] & (write ? 1 : 2) || g_open_page_count == kMostOpenPages) continue;
    if (mprotect((void *)p->page, kPage, PROT_READ | PROT_WRITE)) return 0;
    if (p->left-- <= 0) return 1;
    g_open_pages[g_open_page_count].page = p->page;
    g_open_pages[g_open_page_count++].access = p->access;
    c->uc_mcontext.gregs[REG_EFL] |= 0x100; /* the trap flag */
    return 1;
  }
#endif
  return 0;
}
static void on_trap(int number, siginfo_t *info, void *context) {
  (void)number; (void)info;
  if (!g_open_page_count) {
    sigaction(SIGTRAP, &g_previous_trap, 0);
    raise(SIGTRAP);
    return;
  }
  while (g_open_page_count) {
    --g_open_page_count;
    mprotect((void *)g_open_pages[g_open_page_count].page, kPage, g_open_pages[g_open_page_count].access);
  }
#if defined(__x86_64__)
  ((ucontext_t *)context)->uc_mcontext.gregs[REG_EFL] &= ~0x100l;
#endif
}
static void on_fault(int number, siginfo_t *info, void *context) {
  uintptr_t at = (uintptr_t)info->si_addr;
  (void)number;
  if (g_inside && watched_start(at)) { /* the session itself copies */
    emulator_unwatch_own(watched_start(at));
    return;
  }
  if (g_callback && is_guarded(at)) {
    if (single_step(at, is_write(context), context)) return;
    int saved = errno;
    int64_t words[] = {(int64_t)at, is_write(context), 0};
    note_fault(context);
    int refused = g_callback("host_access", words);
    errno = saved;
    if (!refused) return;
  }
  sigaction(SIGSEGV, &g_previous_fault, 0); /* the instruction is executed again, and faults again */
}
/* Guards the addresses from "start" to "end"; 0, 0: none. */
EXPORT void emulator_guard(uintptr_t start, uintptr_t end) {
  struct sigaction now, own = {0};
  g_guarded.start = start;
  g_guarded.end = end;
  sigaction(SIGSEGV, 0, &now);
  if (!start || now.sa_sigaction == on_fault) return;
  own.sa_sigaction = on_fault;
  own.sa_flags = SA_SIGINFO;
  sigemptyset(&own.sa_mask);
  g_previous_fault = now;
  sigaction(SIGSEGV, &own, 0);
  own.sa_sigaction = on_trap;
  sigaction(SIGTRAP, &own, &g_previous_trap);
}
/* Returns whether faults still reach this handler. A program may have installed its own. */
EXPORT int emulator_is_guarding(void) {
  struct sigaction now;
  return !sigaction(SIGSEGV, 0, &now) && now.sa_sigaction == on_fault;
}
