/* A stand-in for the CUDA runtime. It keeps what nvcc's generated code registers, and passes every call to one callback, the
   session. Arguments are passed as 64-bit words, pointers included. Further parts are guard.c (accesses of the host),
   driver.c (the driver's functions), graphs.c (graphs, 3D copies, memory pools) and driver_graphs.c (the driver's functions
   for these). All are compiled as one text with the system's C compiler. At its end a function is appended for every other
   name in symbols.txt, which returns "not supported". */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The session's callback: the name of a call and its arguments. Returns an error code, 0 for success. */
typedef int (*callback_t)(const char *name, int64_t *args);
typedef struct { unsigned x, y, z; } dim3_t;
typedef struct { dim3_t grid, block; size_t shared; void *stream; void *attrs; unsigned count; } config_t;
/* A kernel or variable: its host symbol, its device name, the owner of its library, and the number of its fat binary. */
typedef struct { const void *host; const char *name; int owner, image; size_t size; } entry_t;
/* A registered fat binary. */
typedef struct { const void *wrapper, *group; int owner; } image_t;

#define EXPORT __attribute__((visibility("default")))
enum {
  kErrorInvalidValue = 1, kErrorInvalidConfiguration = 9, kErrorInvalidSymbol = 13, kErrorNoDevice = 100, kErrorInvalidDevice = 101,
  kErrorSymbolNotFound = 500, kErrorNotSupported = 801
};

static callback_t g_callback;
static int g_owner; /* the owner of what is registered now: a number that the session sets before it opens a library */
static int g_last_error;
static entry_t *g_functions, *g_variables, *g_managed;
static int g_function_count, g_variable_count, g_managed_count, g_image_count;
static image_t *g_images;
/* The configurations of launches <<<..>>> that this thread has pushed and not popped; nested launches are rare. */
enum { kMostNested = 16 };
static __thread struct { dim3_t grid, block; size_t shared; void *stream; } g_config[kMostNested];
static __thread int g_depth;
/* Whether this thread is in a function for which stream 0 is the thread's own default stream (nvcc --default-stream
   per-thread). */
static __thread int g_per_thread;
#define PER_THREAD(call) do { ++g_per_thread; int rc_ = (call); --g_per_thread; return rc_; } while (0)

/* Sets the session's callback; 0: there is no session. */
EXPORT void emulator_install(callback_t callback) { g_callback = callback; }
/* Returns whether stream 0 of the call in progress is this thread's own default stream: above 0 if so. */
EXPORT int emulator_per_thread(void) { return g_per_thread; }
/* Sets the owner of what is registered from now on. */
EXPORT void emulator_owner(int owner) { g_owner = owner; }

static const entry_t *find(const entry_t *table, int count, const void *host) {
  for (int i = count - 1; i >= 0; --i)
    if (table[i].host == host) return &table[i];
  return 0;
}
/* Returns an entry's device name, 0 if there is no entry. Stores its owner, which is the number that was set when its library was opened,
   and the number of its fat binary. The functions below do so for the host symbol of a kernel or variable. */
static const char *name_and_owner(const entry_t *e, int *owner, int *image) {
  if (!e) return 0;
  *owner = e->owner;
  *image = e->image;
  return e->name;
}
EXPORT const char *emulator_function(const void *host, int *owner, int *image) {
  return name_and_owner(find(g_functions, g_function_count, host), owner, image);
}
EXPORT const char *emulator_variable(const void *host, int *owner, int *image) {
  return name_and_owner(find(g_variables, g_variable_count, host), owner, image);
}
/* Returns the wrapper of a registered fat binary, whose numbers count from 0, or 0 after the last one. Also stores its owner,
   and the group in which it is linked, 0 if it is not. */
EXPORT const void *emulator_image(int image, int *owner, const void **group) {
  if (image < 0 || image >= g_image_count) return 0;
  *owner = g_images[image].owner;
  *group = g_images[image].group;
  return g_images[image].wrapper;
}
/* Returns the table, moved if necessary, with room for one more entry of `size` bytes: it is doubled when its count is a power of two. */
static void *with_room(void *table, int count, size_t size) {
  return count & (count - 1) ? table : realloc(table, size * (size_t)(count ? 2 * count : 1));
}
static void add(entry_t **table, int *count, const void *host, const char *name, int image, size_t size) {
  *table = with_room(*table, *count, sizeof(entry_t));
  entry_t e = {host, strdup(name), g_owner, image, size};
  (*table)[(*count)++] = e;
}

static void note_caller(void);
static int pass_to_session(const char *name, int64_t *args);
/* Passes a call to the session and stores its error as the runtime's last error. */
static int call(const char *name, int64_t *args) {
  int rc = pass_to_session(name, args);
  if (rc) g_last_error = rc;
  return rc;
}
/* Reports a call of a function that has no substitute here. */
static int unsupported(const char *name) {
  int64_t words[] = {(int64_t)name, 0};
  return call("unsupported", words);
}
EXPORT int kernelproof_unsupported(const char *name) { return unsupported(name); }
/* An argument as a 64-bit word, and a runtime function's body that passes a call with its arguments to the session. */
#define W(x) ((int64_t)(x))
#define CALL(name, ...)                    \
  do {                                     \
    int64_t words[] = {__VA_ARGS__, 0};    \
    return call(name, words);              \
  } while (0)

/* --- what nvcc's generated code calls --- */
static void **register_image(void *wrapper, const void *group) {
  void **handle = malloc(2 * sizeof(void *));
  g_images = with_room(g_images, g_image_count, sizeof(image_t));
  image_t image = {wrapper, group, g_owner};
  handle[0] = wrapper;
  handle[1] = (void *)(intptr_t)g_image_count;
  g_images[g_image_count++] = image;
  return handle;
}
EXPORT void **__cudaRegisterFatBinary(void *wrapper) { return register_image(wrapper, 0); }
/* Relocatable device code: the images of a group are linked when one of them is used. "callback" registers symbols. */
EXPORT void kernelproof_register_linked(void (*callback)(void **), void *wrapper, const void *group) {
  callback(register_image(wrapper, group));
}
static int image_of(void **handle) { return (int)(intptr_t)handle[1]; }
EXPORT void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
EXPORT void __cudaUnregisterFatBinary(void **handle) { free(handle); }
EXPORT char __cudaInitModule(void **handle) {
  int64_t words[] = {image_of(handle), 0};
  call("init_module", words);
  return 1;
}
EXPORT void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, void *tid,
                                   void *bid, void *block, void *grid, int *size) {
  (void)device; (void)limit; (void)tid; (void)bid; (void)block; (void)grid; (void)size;
  add(&g_functions, &g_function_count, host, name, image_of(handle), 0);
}
EXPORT void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int ext, size_t size, int constant, int global) {
  (void)device; (void)ext; (void)constant; (void)global;
  add(&g_variables, &g_variable_count, host, name, image_of(handle), size);
}
/* A __managed__ variable: the host reads it through a pointer, which is set when the module is loaded. */
EXPORT void __cudaRegisterManagedVar(void **handle, void **pointer, char *device, const char *name, int ext, size_t size, int constant, int global) {
  (void)device; (void)ext; (void)constant; (void)global;
  add(&g_managed, &g_managed_count, pointer, name, image_of(handle), size);
}
/* The same for the managed variable of a number, from 0 on. Also stores the address of the host's pointer to it. */
EXPORT const char *emulator_managed(int number, void **pointer, int *owner, int *image) {
  if (number < 0 || number >= g_managed_count) return 0;
  *pointer = (void *)g_managed[number].host;
  return name_and_owner(&g_managed[number], owner, image);
}
EXPORT unsigned __cudaPushCallConfiguration(dim3_t grid, dim3_t block, size_t shared, void *stream) {
  if (g_depth >= kMostNested) return kErrorInvalidConfiguration;
  g_config[g_depth].grid = grid;
  g_config[g_depth].block = block;
  g_config[g_depth].shared = shared;
  g_config[g_depth].stream = stream;
  ++g_depth;
  return 0;
}
EXPORT int __cudaPopCallConfiguration(dim3_t *grid, dim3_t *block, size_t *shared, void *stream) {
  if (!g_depth) return kErrorInvalidConfiguration;
  --g_depth;
  *grid = g_config[g_depth].grid;
  *block = g_config[g_depth].block;
  *shared = g_config[g_depth].shared;
  *(void **)stream = g_config[g_depth].stream;
  return 0;
}
EXPORT int __cudaGetKernel(void **kernel, const void *host) { *kernel = (void *)host; return 0; }

/* Launches a kernel by its host symbol or handle. "attrs" are "count" launch attributes. "packed", if not null, has the parameters as
   one block of memory in place of "args". */
static int launch_packed(const void *kernel, dim3_t grid, dim3_t block, void **args, size_t shared, void *stream, void *attrs, unsigned count, void *packed) {
  CALL("launch", W(kernel), grid.x, grid.y, grid.z, block.x, block.y, block.z, W(shared), W(args), W(stream), W(attrs), count, W(packed));
}
static int launch(const void *kernel, dim3_t grid, dim3_t block, void **args, size_t shared, void *stream, void *attrs, unsigned count) {
  return launch_packed(kernel, grid, block, args, shared, stream, attrs, count, 0);
}
EXPORT int cudaLaunchKernel(const void *f, dim3_t grid, dim3_t block, void **args, size_t shared, void *stream) {
  return launch(f, grid, block, args, shared, stream, 0, 0);
}
EXPORT int cudaLaunchKernel_ptsz(const void *f, dim3_t g, dim3_t b, void **a, size_t s, void *st) { PER_THREAD(launch(f, g, b, a, s, st, 0, 0)); }
EXPORT int __cudaLaunchKernel(const void *f, dim3_t g, dim3_t b, void **a, size_t s, void *st) { return launch(f, g, b, a, s, st, 0, 0); }
EXPORT int __cudaLaunchKernel_ptsz(const void *f, dim3_t g, dim3_t b, void **a, size_t s, void *st) { PER_THREAD(launch(f, g, b, a, s, st, 0, 0)); }
EXPORT int cudaLaunchCooperativeKernel(const void *f, dim3_t g, dim3_t b, void **a, size_t s, void *st) {
  /* The 72 bytes of a cudaLaunchAttribute: cudaLaunchAttributeCooperative is 1. */
  unsigned attribute[18] = {2, 0, 1};
  return launch(f, g, b, a, s, st, attribute, 1);
}
EXPORT int cudaLaunchKernelExC(const config_t *c, const void *f, void **args) {
  return launch(f, c->grid, c->block, args, c->shared, c->stream, c->attrs, c->count);
}
EXPORT int cudaLaunchKernelExC_ptsz(const config_t *c, const void *f, void **args) { PER_THREAD(cudaLaunchKernelExC(c, f, args)); }

/* --- errors --- */
EXPORT int cudaGetLastError(void) { int e = g_last_error; g_last_error = 0; return e; }
EXPORT int cudaPeekAtLastError(void) { return g_last_error; }
static const struct { int code; const char *name, *text; } kErrors[] = {
    {0, "cudaSuccess", "no error"},
    {1, "cudaErrorInvalidValue", "invalid argument"},
    {2, "cudaErrorMemoryAllocation", "out of memory"},
    {3, "cudaErrorInitializationError", "initialization error"},
    {9, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {13, "cudaErrorInvalidSymbol", "invalid device symbol"},
    {17, "cudaErrorInvalidDevicePointer", "invalid device pointer"},
    {98, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {100, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {101, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {200, "cudaErrorInvalidKernelImage", "device kernel image is invalid"},
    {301, "cudaErrorFileNotFound", "file not found"},
    {400, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {500, "cudaErrorSymbolNotFound", "named symbol not found"},
    {209, "cudaErrorNoKernelImageForDevice", "no kernel image is available for execution on the device"},
    {710, "cudaErrorAssert", "device-side assert triggered"},
    {701, "cudaErrorLaunchOutOfResources", "too many resources requested for launch"},
    {720, "cudaErrorCooperativeLaunchTooLarge", "too many blocks in cooperative launch"},
    {912, "cudaErrorInvalidClusterSize", "cluster configuration is invalid"},
    {719, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {801, "cudaErrorNotSupported", "operation not supported"},
};
static const char *describe(int code, int name) {
  for (size_t i = 0; i < sizeof(kErrors) / sizeof(kErrors[0]); ++i)
    if (kErrors[i].code == code) return name ? kErrors[i].name : kErrors[i].text;
  return "unrecognized error code";
}
EXPORT const char *cudaGetErrorString(int code) { return describe(code, 0); }
EXPORT const char *cudaGetErrorName(int code) { return describe(code, 1); }

/* --- kernels and libraries --- */
EXPORT int cudaFuncSetAttribute(const void *f, int attr, int value) { CALL("func_set_attribute", W(f), attr, value); }
EXPORT int cudaKernelSetAttributeForDevice(void *f, int attr, int value, int device) { CALL("func_set_attribute", W(f), attr, value, device); }
EXPORT int cudaFuncGetAttributes(void *out, const void *f) { CALL("func_get_attributes", W(out), W(f)); }
EXPORT int cudaFuncSetCacheConfig(const void *f, int config) { (void)f; (void)config; return 0; }
EXPORT int cudaFuncSetSharedMemConfig(const void *f, int config) { (void)f; (void)config; return 0; }
EXPORT int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int block, size_t shared) { CALL("occupancy", W(n), W(f), block, W(shared)); }
EXPORT int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int block, size_t shared, unsigned flags) {
  (void)flags;
  CALL("occupancy", W(n), W(f), block, W(shared));
}
EXPORT int cudaOccupancyMaxActiveClusters(int *n, const void *f, const config_t *c) {
  CALL("occupancy_clusters", W(n), W(f), c->grid.x, c->grid.y, c->grid.z, c->block.x * c->block.y * c->block.z, W(c->shared), W(c->attrs), c->count);
}
EXPORT int cudaOccupancyMaxPotentialClusterSize(int *n, const void *f, const config_t *c) {
  (void)f; (void)c;
  *n = 8; /* the largest cluster that every device with clusters runs */
  return 0;
}
EXPORT int cudaLibraryLoadFromFile(void **library, const char *path, void *a, void *b, unsigned n, void *c, void *d, unsigned m) {
  (void)a; (void)b; (void)n; (void)c; (void)d; (void)m;
  CALL("library_load_file", W(library), W(path));
}
EXPORT int cudaLibraryLoadData(void **library, const void *code, void *a, void *b, unsigned n, void *c, void *d, unsigned m) {
  (void)a; (void)b; (void)n; (void)c; (void)d; (void)m;
  CALL("library_load_data", W(library), W(code));
}
EXPORT int cudaLibraryUnload(void *library) { CALL("library_unload", W(library)); }
EXPORT int cudaLibraryGetKernel(void **kernel, void *library, const char *name) { CALL("library_get_kernel", W(kernel), W(library), W(name)); }

/* --- memory --- */
/* The last arguments of copies and fills are the stream, and whether the call may return before the operation ends. BOTH and BOTH_ASYNC define
   a function and its second form, _ptds or _ptsz, for which stream 0 is the thread's own default stream. */
#define BOTH(name, params, args) EXPORT int name params; EXPORT int name##_ptds params { PER_THREAD(name args); } EXPORT int name params
#define BOTH_ASYNC(name, params, args) EXPORT int name params; EXPORT int name##_ptsz params { PER_THREAD(name args); } EXPORT int name params
EXPORT int cudaMalloc(void **p, size_t n) { CALL("malloc", W(p), W(n)); }
EXPORT int cudaMallocManaged(void **p, size_t n, unsigned flags) { (void)flags; CALL("malloc_host", W(p), W(n), 1); }
EXPORT int cudaMallocPitch(void **p, size_t *pitch, size_t width, size_t height) {
  *pitch = (width + 511) / 512 * 512; /* rows begin at multiples of 512 bytes, as on a device */
  CALL("malloc", W(p), W(*pitch * height));
}
EXPORT int cudaMallocHost(void **p, size_t n) { CALL("malloc_host", W(p), W(n), 0); }
EXPORT int cudaHostAlloc(void **p, size_t n, unsigned flags) { (void)flags; return cudaMallocHost(p, n); }
EXPORT int cudaFree(void *p) { CALL("free", W(p), 0); }
EXPORT int cudaFreeHost(void *p) { CALL("free", W(p), 1); }
/* d and s: target and source. n: bytes. kind: a cudaMemcpyKind. size: bytes of the element that `value` fills. In the 2D functions w is the
   bytes of a row, h the number of rows, and dp, sp and pitch are the bytes from one row to the next. */
static int copy(void *d, const void *s, size_t n, int kind, void *stream, int async) { CALL("memcpy", W(d), W(s), W(n), kind, W(stream), async); }
static int fill(void *d, int value, size_t n, int size, void *stream, int async) { CALL("memset", W(d), value, W(n), size, W(stream), async); }
static int fill2d(void *d, size_t pitch, int value, size_t w, size_t h, int size, void *stream, int async) {
  int rc = 0;
  for (size_t i = 0; i < h && !rc; ++i) rc = fill((char *)d + i * pitch, value, w, size, stream, async);
  return rc;
}
static int copy2d(void *d, size_t dp, const void *s, size_t sp, size_t w, size_t h, int kind, void *stream, int async) {
  int rc = 0;
  for (size_t i = 0; i < h && !rc; ++i) rc = copy((char *)d + i * dp, (const char *)s + i * sp, w, kind, stream, async);
  return rc;
}
BOTH(cudaMemcpy, (void *d, const void *s, size_t n, int kind), (d, s, n, kind)) { return copy(d, s, n, kind, 0, 0); }
BOTH_ASYNC(cudaMemcpyAsync, (void *d, const void *s, size_t n, int kind, void *stream), (d, s, n, kind, stream)) { return copy(d, s, n, kind, stream, 1); }
EXPORT int cudaMemcpyPeer(void *d, int dd, const void *s, int sd, size_t n) { (void)dd; (void)sd; return copy(d, s, n, 3, 0, 0); }
EXPORT int cudaMemcpyPeerAsync(void *d, int dd, const void *s, int sd, size_t n, void *stream) { (void)dd; (void)sd; return copy(d, s, n, 3, stream, 1); }
BOTH(cudaMemset, (void *d, int value, size_t n), (d, value, n)) { return fill(d, value, n, 1, 0, 0); }
BOTH_ASYNC(cudaMemsetAsync, (void *d, int value, size_t n, void *stream), (d, value, n, stream)) { return fill(d, value, n, 1, stream, 1); }
EXPORT int cudaMemset2DAsync(void *d, size_t pitch, int value, size_t w, size_t h, void *stream) { return fill2d(d, pitch, value, w, h, 1, stream, 1); }
EXPORT int cudaMemset2D(void *d, size_t pitch, int value, size_t w, size_t h) { return fill2d(d, pitch, value, w, h, 1, 0, 0); }
BOTH(cudaMemcpy2D, (void *d, size_t dp, const void *s, size_t sp, size_t w, size_t h, int kind), (d, dp, s, sp, w, h, kind)) { return copy2d(d, dp, s, sp, w, h, kind, 0, 0); }
EXPORT int cudaMemcpy2DAsync(void *d, size_t dp, const void *s, size_t sp, size_t w, size_t h, int kind, void *stream) { return copy2d(d, dp, s, sp, w, h, kind, stream, 1); }
static int to_symbol(const void *symbol, const void *s, size_t n, size_t offset, void *stream, int async) { CALL("memcpy_to_symbol", W(symbol), W(s), W(n), W(offset), W(stream), async); }
static int from_symbol(void *d, const void *symbol, size_t n, size_t offset, void *stream, int async) { CALL("memcpy_from_symbol", W(d), W(symbol), W(n), W(offset), W(stream), async); }
EXPORT int cudaMemcpyToSymbol(const void *symbol, const void *s, size_t n, size_t offset, int kind) { (void)kind; return to_symbol(symbol, s, n, offset, 0, 0); }
EXPORT int cudaMemcpyToSymbolAsync(const void *symbol, const void *s, size_t n, size_t offset, int kind, void *stream) { (void)kind; return to_symbol(symbol, s, n, offset, stream, 1); }
EXPORT int cudaMemcpyFromSymbol(void *d, const void *symbol, size_t n, size_t offset, int kind) { (void)kind; return from_symbol(d, symbol, n, offset, 0, 0); }
EXPORT int cudaMemcpyFromSymbolAsync(void *d, const void *symbol, size_t n, size_t offset, int kind, void *stream) { (void)kind; return from_symbol(d, symbol, n, offset, stream, 1); }
EXPORT int cudaGetSymbolAddress(void **p, const void *symbol) { CALL("symbol_address", W(p), W(symbol)); }
EXPORT int cudaGetSymbolSize(size_t *n, const void *symbol) {
  const entry_t *e = find(g_variables, g_variable_count, symbol);
  if (!e) return g_last_error = kErrorInvalidSymbol;
  *n = e->size;
  return 0;
}
EXPORT int cudaMemGetInfo(size_t *available, size_t *total) { CALL("mem_info", W(available), W(total)); }
EXPORT int cudaHostRegister(void *p, size_t n, unsigned flags) { (void)flags; CALL("host_register", W(p), W(n)); }
EXPORT int cudaHostUnregister(void *p) { CALL("host_register", W(p), 0); }
EXPORT int cudaHostGetDevicePointer(void **d, void *h, unsigned flags) { (void)flags; CALL("host_pointer", W(d), W(h)); }
EXPORT int cudaHostGetFlags(unsigned *flags, void *h) { (void)h; *flags = 0; return 0; }
EXPORT int cudaPointerGetAttributes(void *out, const void *p) { CALL("pointer_attributes", W(out), W(p)); }
EXPORT int cudaMemPrefetchAsync(const void *p, size_t n, int device, int id, unsigned flags, void *stream) { (void)p; (void)n; (void)device; (void)id; (void)flags; (void)stream; return 0; }
EXPORT int cudaMemAdvise(const void *p, size_t n, int advice, int device, int id) { (void)p; (void)n; (void)advice; (void)device; (void)id; return 0; }

/* --- device --- */
EXPORT int cudaGetDevice(int *device) { CALL("get_device", W(device)); }
EXPORT int cudaSetDevice(int device) { return device ? (g_last_error = kErrorInvalidDevice) : 0; }
EXPORT int cudaGetDeviceCount(int *n) { CALL("device_count", W(n)); }
EXPORT int cudaDeviceGetAttribute(int *value, int attr, int device) { CALL("device_attribute", W(value), attr, device); }
EXPORT int cudaGetDeviceProperties(void *out, int device) { CALL("device_properties", W(out), device); }
EXPORT int cudaGetDeviceProperties_v2(void *out, int device) { CALL("device_properties", W(out), device); }
EXPORT int cudaDeviceSynchronize(void) { CALL("synchronize", 0); }
EXPORT int cudaDeviceReset(void) { CALL("device_reset", 0); }
EXPORT int cudaInitDevice(int device, unsigned flags, unsigned more) { (void)flags; (void)more; return cudaSetDevice(device); }
EXPORT int cudaSetDeviceFlags(unsigned flags) { (void)flags; return 0; }
EXPORT int cudaGetDeviceFlags(unsigned *flags) { *flags = 0; return 0; }
EXPORT int cudaChooseDevice(int *device, const void *properties) { (void)properties; *device = 0; return 0; }
EXPORT int cudaSetValidDevices(int *devices, int n) { (void)devices; (void)n; return 0; }
EXPORT int cudaDeviceGetByPCIBusId(int *device, const char *id) { (void)id; *device = 0; return 0; }
EXPORT int cudaDeviceGetPCIBusId(char *id, int n, int device) { (void)device; snprintf(id, (size_t)n, "0000:00:00.0"); return 0; }
EXPORT int cudaDeviceCanAccessPeer(int *can, int device, int peer) { (void)device; (void)peer; *can = 0; return 0; }
EXPORT int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { if (least) *least = 0; if (greatest) *greatest = -5; return 0; }
EXPORT int cudaDeviceGetCacheConfig(int *config) { *config = 0; return 0; }
EXPORT int cudaDeviceGetSharedMemConfig(int *config) { *config = 1; return 0; }
EXPORT int cudaDeviceSetSharedMemConfig(int config) { (void)config; return 0; }
EXPORT int cudaCtxResetPersistingL2Cache(void) { return 0; }
EXPORT int cudaProfilerStart(void) { return 0; }
EXPORT int cudaProfilerStop(void) { return 0; }
EXPORT int cudaDeviceSetLimit(int limit, size_t value) { (void)limit; (void)value; return 0; }
EXPORT int cudaDeviceGetLimit(size_t *value, int limit) { (void)limit; *value = 0; return 0; }
EXPORT int cudaDeviceSetCacheConfig(int config) { (void)config; return 0; }
EXPORT int cudaDriverGetVersion(int *v) { *v = 13000; return 0; }
EXPORT int cudaRuntimeGetVersion(int *v) { *v = 13000; return 0; }
/* A driver function: it returns a CUresult and does not change the runtime's last error. */
static int tensor_map_encode(void *map, int type, unsigned rank, void *address, const uint64_t *dims, const uint64_t *strides,
                             const uint32_t *box, const uint32_t *steps, int interleave, int swizzle, int promotion, int fill) {
  int64_t words[] = {W(map), type, rank, W(address), W(dims), W(strides), W(box), W(steps), interleave, swizzle, promotion, fill};
  return g_callback ? g_callback("tensor_map", words) : kErrorNoDevice;
}
/* Returns the newest version of a driver function. */
static void *driver_function(const char *symbol) {
  Dl_info info;
  if (!strcmp(symbol, "cuTensorMapEncodeTiled")) return (void *)tensor_map_encode;
  if (!dladdr((void *)driver_function, &info)) return 0;
  void *self = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD), *f = 0;
  static const char *const versions[] = {"_v4", "_v3", "_v2", ""};
  for (size_t i = 0; i < 4 && self && !f; ++i) {
    char name[160];
    snprintf(name, sizeof name, "%s%s", symbol, versions[i]);
    f = dlsym(self, name);
  }
  if (self) dlclose(self);
  return f;
}
EXPORT int cudaGetDriverEntryPointByVersion(const char *symbol, void **f, unsigned version, unsigned long long flags, int *status) {
  (void)version; (void)flags;
  *f = driver_function(symbol);
  if (status) *status = *f ? 0 : 1; /* cudaDriverEntryPointSymbolNotFound */
  return *f ? 0 : (g_last_error = kErrorSymbolNotFound);
}
EXPORT int cudaGetDriverEntryPoint(const char *symbol, void **f, unsigned long long flags, int *status) {
  return cudaGetDriverEntryPointByVersion(symbol, f, 0, flags, status);
}

/* --- streams and events: work is executed when it is enqueued; the session checks that the order is forced --- */
EXPORT int cudaStreamCreateWithPriority(void **s, unsigned flags, int priority) { (void)priority; CALL("stream_create", W(s), flags); }
EXPORT int cudaStreamCreateWithFlags(void **s, unsigned flags) { return cudaStreamCreateWithPriority(s, flags, 0); }
EXPORT int cudaStreamCreate(void **s) { return cudaStreamCreateWithPriority(s, 0, 0); }
EXPORT int cudaStreamDestroy(void *s) { CALL("stream_destroy", W(s)); }
BOTH_ASYNC(cudaStreamSynchronize, (void *s), (s)) { CALL("stream_synchronize", W(s)); }
BOTH_ASYNC(cudaStreamQuery, (void *s), (s)) { CALL("stream_synchronize", W(s)); }
BOTH_ASYNC(cudaStreamWaitEvent, (void *s, void *e, unsigned flags), (s, e, flags)) { (void)flags; CALL("stream_wait_event", W(s), W(e)); }
EXPORT int cudaStreamGetFlags(void *s, unsigned *flags) { (void)s; *flags = 0; return 0; }
EXPORT int cudaStreamGetPriority(void *s, int *priority) { (void)s; *priority = 0; return 0; }
EXPORT int cudaStreamGetDevice(void *s, int *device) { (void)s; *device = 0; return 0; }
EXPORT int cudaStreamAttachMemAsync(void *s, void *p, size_t n, unsigned flags) { (void)s; (void)p; (void)n; (void)flags; return 0; }
EXPORT int cudaStreamSetAttribute(void *s, int id, const void *value) { (void)s; (void)id; (void)value; return 0; }
EXPORT int cudaLaunchHostFunc(void *s, void (*f)(void *), void *data) { CALL("host_function", W(s), W(f), W(data), 0); }
EXPORT int cudaStreamAddCallback(void *s, void (*f)(void *, int, void *), void *data, unsigned flags) {
  (void)flags;
  CALL("host_function", W(s), W(f), W(data), 1);
}
EXPORT int cudaStreamIsCapturing(void *s, int *status) { CALL("capture_status", W(s), W(status)); }
EXPORT int cudaStreamGetCaptureInfo(void *s, int *status, void *id, void *graph, void *nodes, void *edges, size_t *count) {
  (void)graph; (void)nodes; (void)edges;
  if (count) *count = 0;
  CALL("capture_info", W(s), W(status), W(id));
}
EXPORT int cudaStreamGetId(void *s, unsigned long long *id) { CALL("stream_id", W(s), W(id)); }
EXPORT int cudaThreadExchangeStreamCaptureMode(int *mode) {
  static __thread int own = 0;
  int before = own;
  return own = *mode, *mode = before, 0;
}
BOTH_ASYNC(cudaStreamBeginCapture, (void *s, int mode), (s, mode)) { (void)mode; CALL("capture_begin", W(s)); }
BOTH_ASYNC(cudaStreamEndCapture, (void *s, void **graph), (s, graph)) { CALL("capture_end", W(s), W(graph)); }
EXPORT int cudaGraphInstantiate(void **executable, void *graph, unsigned long long flags) { CALL("graph_instantiate", W(executable), W(graph), W(flags)); }
EXPORT int cudaGraphInstantiateWithFlags(void **executable, void *graph, unsigned long long flags) { return cudaGraphInstantiate(executable, graph, flags); }
BOTH_ASYNC(cudaGraphLaunch, (void *executable, void *s), (executable, s)) { CALL("graph_launch", W(executable), W(s)); }
EXPORT int cudaGraphUpload(void *executable, void *s) { (void)executable; (void)s; return 0; }
EXPORT int cudaGraphDestroy(void *graph) { (void)graph; return 0; }
EXPORT int cudaGraphExecDestroy(void *executable) { CALL("graph_destroy_executable", W(executable)); }
EXPORT int cudaEventCreateWithFlags(void **e, unsigned flags) { (void)flags; CALL("event_create", W(e)); }
EXPORT int cudaEventCreate(void **e) { return cudaEventCreateWithFlags(e, 0); }
EXPORT int cudaEventDestroy(void *e) { CALL("event_destroy", W(e)); }
BOTH_ASYNC(cudaEventRecord, (void *e, void *s), (e, s)) { CALL("event_record", W(e), W(s)); }
EXPORT int cudaEventRecordWithFlags(void *e, void *s, unsigned flags) { (void)flags; return cudaEventRecord(e, s); }
EXPORT int cudaEventSynchronize(void *e) { CALL("event_synchronize", W(e)); }
EXPORT int cudaEventQuery(void *e) { return cudaEventSynchronize(e); }
EXPORT int cudaEventElapsedTime(float *ms, void *a, void *b) { CALL("event_elapsed", W(ms), W(a), W(b)); }
EXPORT int cudaEventElapsedTime_v2(float *ms, void *a, void *b) { return cudaEventElapsedTime(ms, a, b); }
