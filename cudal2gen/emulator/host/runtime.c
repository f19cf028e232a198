/* A stand-in for the CUDA runtime: keeps what nvcc's generated code registers, hands every call to one callback.
   Arguments travel as 64-bit words; pointers stay pointers. Compiled by the package with the system's C compiler. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int (*callback_t)(const char *name, int64_t *args);
typedef struct { unsigned x, y, z; } dim3_t;
typedef struct { dim3_t grid, block; size_t shared; void *stream; void *attrs; unsigned count; } config_t;
typedef struct { const void *host; const char *name; int owner; size_t size; } entry_t;

#define EXPORT __attribute__((visibility("default")))
enum { kErrorNoDevice = 100, kErrorInvalidConfiguration = 9, kErrorNotSupported = 801 };

static callback_t g_callback;
static int g_owner;
static int g_last_error;
static entry_t *g_functions, *g_variables;
static int g_function_count, g_variable_count;
static __thread struct { dim3_t grid, block; size_t shared; void *stream; } g_config[16];
static __thread int g_depth;

EXPORT void emulator_install(callback_t callback) { g_callback = callback; }
EXPORT void emulator_owner(int owner) { g_owner = owner; }

static const entry_t *find(const entry_t *table, int count, const void *host) {
  for (int i = count - 1; i >= 0; --i)
    if (table[i].host == host) return &table[i];
  return 0;
}
/* The device name behind a host symbol, and who registered it (the owner set when its library was opened). */
EXPORT const char *emulator_function(const void *host, int *owner) {
  const entry_t *e = find(g_functions, g_function_count, host);
  if (!e) return 0;
  *owner = e->owner;
  return e->name;
}
EXPORT const char *emulator_variable(const void *host, int *owner) {
  const entry_t *e = find(g_variables, g_variable_count, host);
  if (!e) return 0;
  *owner = e->owner;
  return e->name;
}
static void add(entry_t **table, int *count, const void *host, const char *name, size_t size) {
  if (!(*count & (*count - 1)) || !*count)
    *table = realloc(*table, sizeof(entry_t) * (size_t)(*count ? 2 * *count : 1));
  entry_t e = {host, strdup(name), g_owner, size};
  (*table)[(*count)++] = e;
}

static int call(const char *name, int64_t *args) {
  int rc = g_callback ? g_callback(name, args) : kErrorNoDevice;
  if (rc) g_last_error = rc;
  return rc;
}
#define W(x) ((int64_t)(x))
#define CALL(name, ...)                    \
  do {                                     \
    int64_t words[] = {__VA_ARGS__, 0};    \
    return call(name, words);              \
  } while (0)

/* --- what nvcc's generated code calls --- */
EXPORT void **__cudaRegisterFatBinary(void *image) {
  void **handle = malloc(2 * sizeof(void *));
  handle[0] = image;
  return handle;
}
EXPORT void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
EXPORT void __cudaUnregisterFatBinary(void **handle) { free(handle); }
EXPORT char __cudaInitModule(void **handle) { (void)handle; return 1; }
EXPORT void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, void *tid,
                                   void *bid, void *block, void *grid, int *size) {
  (void)handle; (void)device; (void)limit; (void)tid; (void)bid; (void)block; (void)grid; (void)size;
  add(&g_functions, &g_function_count, host, name, 0);
}
EXPORT void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int ext, size_t size, int constant, int global) {
  (void)handle; (void)device; (void)ext; (void)constant; (void)global;
  add(&g_variables, &g_variable_count, host, name, size);
}
EXPORT unsigned __cudaPushCallConfiguration(dim3_t grid, dim3_t block, size_t shared, void *stream) {
  if (g_depth >= 16) return kErrorInvalidConfiguration;
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

static int launch(const void *kernel, dim3_t grid, dim3_t block, void **args, size_t shared, void *stream, void *attrs, unsigned count) {
  CALL("launch", W(kernel), grid.x, grid.y, grid.z, block.x, block.y, block.z, W(shared), W(args), W(stream), W(attrs), count);
}
EXPORT int cudaLaunchKernel(const void *f, dim3_t grid, dim3_t block, void **args, size_t shared, void *stream) {
  return launch(f, grid, block, args, shared, stream, 0, 0);
}
EXPORT int cudaLaunchKernel_ptsz(const void *f, dim3_t g, dim3_t b, void **a, size_t s, void *st) { return launch(f, g, b, a, s, st, 0, 0); }
EXPORT int __cudaLaunchKernel(const void *f, dim3_t g, dim3_t b, void **a, size_t s, void *st) { return launch(f, g, b, a, s, st, 0, 0); }
EXPORT int __cudaLaunchKernel_ptsz(const void *f, dim3_t g, dim3_t b, void **a, size_t s, void *st) { return launch(f, g, b, a, s, st, 0, 0); }
EXPORT int cudaLaunchCooperativeKernel(const void *f, dim3_t g, dim3_t b, void **a, size_t s, void *st) {
  /* A cudaLaunchAttribute: cudaLaunchAttributeCooperative, 1. */
  unsigned attribute[18] = {2, 0, 1};
  return launch(f, g, b, a, s, st, attribute, 1);
}
EXPORT int cudaLaunchKernelExC(const config_t *c, const void *f, void **args) {
  return launch(f, c->grid, c->block, args, c->shared, c->stream, c->attrs, c->count);
}
EXPORT int cudaLaunchKernelExC_ptsz(const config_t *c, const void *f, void **args) { return cudaLaunchKernelExC(c, f, args); }

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
  *n = 8;
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
EXPORT int cudaMalloc(void **p, size_t n) { CALL("malloc", W(p), W(n)); }
EXPORT int cudaMallocAsync(void **p, size_t n, void *stream) { (void)stream; CALL("malloc", W(p), W(n)); }
EXPORT int cudaMallocManaged(void **p, size_t n, unsigned flags) { (void)flags; CALL("malloc", W(p), W(n)); }
EXPORT int cudaFree(void *p) { CALL("free", W(p)); }
EXPORT int cudaFreeAsync(void *p, void *stream) { (void)stream; CALL("free", W(p)); }
EXPORT int cudaMemcpy(void *d, const void *s, size_t n, int kind) { CALL("memcpy", W(d), W(s), W(n), kind); }
EXPORT int cudaMemcpyAsync(void *d, const void *s, size_t n, int kind, void *stream) { (void)stream; CALL("memcpy", W(d), W(s), W(n), kind); }
EXPORT int cudaMemset(void *d, int value, size_t n) { CALL("memset", W(d), value, W(n)); }
EXPORT int cudaMemsetAsync(void *d, int value, size_t n, void *stream) { (void)stream; CALL("memset", W(d), value, W(n)); }
EXPORT int cudaMemset2DAsync(void *d, size_t pitch, int value, size_t w, size_t h, void *stream) {
  (void)stream;
  for (size_t i = 0; i < h; ++i) {
    int rc = cudaMemset((char *)d + i * pitch, value, w);
    if (rc) return rc;
  }
  return 0;
}
EXPORT int cudaMemset2D(void *d, size_t pitch, int value, size_t w, size_t h) { return cudaMemset2DAsync(d, pitch, value, w, h, 0); }
EXPORT int cudaMemcpy2D(void *d, size_t dp, const void *s, size_t sp, size_t w, size_t h, int kind) {
  for (size_t i = 0; i < h; ++i) {
    int rc = cudaMemcpy((char *)d + i * dp, (const char *)s + i * sp, w, kind);
    if (rc) return rc;
  }
  return 0;
}
EXPORT int cudaMemcpy2DAsync(void *d, size_t dp, const void *s, size_t sp, size_t w, size_t h, int kind, void *stream) {
  (void)stream;
  return cudaMemcpy2D(d, dp, s, sp, w, h, kind);
}
EXPORT int cudaMemcpyToSymbol(const void *symbol, const void *s, size_t n, size_t offset, int kind) { CALL("memcpy_to_symbol", W(symbol), W(s), W(n), W(offset), kind); }
EXPORT int cudaMemcpyToSymbolAsync(const void *symbol, const void *s, size_t n, size_t offset, int kind, void *stream) {
  (void)stream;
  return cudaMemcpyToSymbol(symbol, s, n, offset, kind);
}
EXPORT int cudaMemcpyFromSymbol(void *d, const void *symbol, size_t n, size_t offset, int kind) { CALL("memcpy_from_symbol", W(d), W(symbol), W(n), W(offset), kind); }
EXPORT int cudaGetSymbolAddress(void **p, const void *symbol) { CALL("symbol_address", W(p), W(symbol)); }
EXPORT int cudaMallocHost(void **p, size_t n) { *p = malloc(n); return *p || !n ? 0 : 2; }
EXPORT int cudaHostAlloc(void **p, size_t n, unsigned flags) { (void)flags; return cudaMallocHost(p, n); }
EXPORT int cudaFreeHost(void *p) { free(p); return 0; }
EXPORT int cudaMemGetInfo(size_t *available, size_t *total) { CALL("mem_info", W(available), W(total)); }
EXPORT int cudaHostRegister(void *p, size_t n, unsigned flags) { (void)p; (void)n; (void)flags; return 0; }
EXPORT int cudaHostUnregister(void *p) { (void)p; return 0; }

/* --- device --- */
EXPORT int cudaGetDevice(int *device) { CALL("get_device", W(device)); }
EXPORT int cudaSetDevice(int device) { return device ? (g_last_error = 101) : 0; }
EXPORT int cudaGetDeviceCount(int *n) { CALL("device_count", W(n)); }
EXPORT int cudaDeviceGetAttribute(int *value, int attr, int device) { CALL("device_attribute", W(value), attr, device); }
EXPORT int cudaGetDeviceProperties(void *out, int device) { CALL("device_properties", W(out), device); }
EXPORT int cudaGetDeviceProperties_v2(void *out, int device) { CALL("device_properties", W(out), device); }
EXPORT int cudaDeviceSynchronize(void) { CALL("synchronize", 0); }
EXPORT int cudaDeviceReset(void) { return 0; }
EXPORT int cudaDeviceSetLimit(int limit, size_t value) { (void)limit; (void)value; return 0; }
EXPORT int cudaDeviceGetLimit(size_t *value, int limit) { (void)limit; *value = 0; return 0; }
EXPORT int cudaDeviceSetCacheConfig(int config) { (void)config; return 0; }
EXPORT int cudaDriverGetVersion(int *v) { *v = 13000; return 0; }
EXPORT int cudaRuntimeGetVersion(int *v) { *v = 13000; return 0; }
/* A driver function: its errors are CUresults, the runtime's last error stays as it is. */
static int tensor_map_encode(void *map, int type, unsigned rank, void *address, const uint64_t *dims, const uint64_t *strides,
                             const uint32_t *box, const uint32_t *steps, int interleave, int swizzle, int promotion, int fill) {
  int64_t words[] = {W(map), type, rank, W(address), W(dims), W(strides), W(box), W(steps), interleave, swizzle, promotion, fill};
  return g_callback ? g_callback("tensor_map", words) : kErrorNoDevice;
}
EXPORT int cudaGetDriverEntryPointByVersion(const char *symbol, void **f, unsigned version, unsigned long long flags, int *status) {
  (void)version; (void)flags;
  *f = strcmp(symbol, "cuTensorMapEncodeTiled") ? 0 : (void *)tensor_map_encode;
  if (status) *status = *f ? 0 : 1; /* cudaDriverEntryPointSymbolNotFound */
  return *f ? 0 : (g_last_error = 500);
}
EXPORT int cudaGetDriverEntryPoint(const char *symbol, void **f, unsigned long long flags, int *status) {
  return cudaGetDriverEntryPointByVersion(symbol, f, 0, flags, status);
}

/* --- streams and events: everything is synchronous --- */
static char g_stream;
EXPORT int cudaStreamCreate(void **s) { *s = &g_stream; return 0; }
EXPORT int cudaStreamCreateWithFlags(void **s, unsigned flags) { (void)flags; *s = &g_stream; return 0; }
EXPORT int cudaStreamCreateWithPriority(void **s, unsigned flags, int priority) { (void)flags; (void)priority; *s = &g_stream; return 0; }
EXPORT int cudaStreamDestroy(void *s) { (void)s; return 0; }
EXPORT int cudaStreamSynchronize(void *s) { (void)s; CALL("synchronize", 0); }
EXPORT int cudaStreamQuery(void *s) { (void)s; return 0; }
EXPORT int cudaStreamWaitEvent(void *s, void *e, unsigned flags) { (void)s; (void)e; (void)flags; return 0; }
EXPORT int cudaStreamIsCapturing(void *s, int *status) { (void)s; *status = 0; return 0; }
EXPORT int cudaStreamGetCaptureInfo(void *s, int *status, void *id, void *graph, void *nodes, void *edges, size_t *count) {
  (void)s; (void)id; (void)graph; (void)nodes; (void)edges;
  *status = 0;
  if (count) *count = 0;
  return 0;
}
EXPORT int cudaGraphNodeGetType(void *node, int *type) { (void)node; (void)type; return g_last_error = 1; }
EXPORT int cudaEventCreate(void **e) { *e = &g_stream; return 0; }
EXPORT int cudaEventCreateWithFlags(void **e, unsigned flags) { (void)flags; *e = &g_stream; return 0; }
EXPORT int cudaEventDestroy(void *e) { (void)e; return 0; }
EXPORT int cudaEventRecord(void *e, void *s) { (void)e; (void)s; return 0; }
EXPORT int cudaEventRecordWithFlags(void *e, void *s, unsigned flags) { (void)e; (void)s; (void)flags; return 0; }
EXPORT int cudaEventSynchronize(void *e) { (void)e; return 0; }
EXPORT int cudaEventQuery(void *e) { (void)e; return 0; }
EXPORT int cudaEventElapsedTime(float *ms, void *a, void *b) { (void)a; (void)b; *ms = 0; return 0; }
