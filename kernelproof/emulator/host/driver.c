/* The CUDA driver's functions (cu..) of the stand-in runtime. This is a part of runtime.c's text and uses its calls. Kernels,
   modules and libraries are handles that the session assigns. There is one device and one context. */

/* A driver call does not change the runtime's last error. */
static int driver_call(const char *name, int64_t *args) { return pass_to_session(name, args); }
/* The body of a driver's function: it passes a call of this name to the session, with its arguments as 64-bit words, and
   returns the session's error. */
#define DRIVER(name, ...)                  \
  do {                                     \
    int64_t words[] = {__VA_ARGS__, 0};    \
    return driver_call(name, words);       \
  } while (0)
/* Functions with a stream have a second form, _ptsz, for which stream 0 is the thread's own default stream. */
#define WITH_STREAM(name, params, args) EXPORT int name params; EXPORT int name##_ptsz params { PER_THREAD(name args); } EXPORT int name params
typedef struct { unsigned gx, gy, gz, bx, by, bz, shared; void *stream; void *attrs; unsigned count; } driver_config_t;
static char g_context;

EXPORT int cuInit(unsigned flags) { (void)flags; return 0; }
EXPORT int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
EXPORT int cuGetErrorString(int code, const char **text) { *text = describe(code, 0); return 0; }
EXPORT int cuGetErrorName(int code, const char **text) { *text = describe(code, 1); return 0; }
EXPORT int cuGetProcAddress_v2(const char *symbol, void **f, int version, uint64_t flags, int *status) {
  (void)version; (void)flags;
  *f = driver_function(symbol);
  if (status) *status = *f ? 0 : 1;
  return *f ? 0 : kErrorSymbolNotFound;
}
EXPORT int cuGetProcAddress(const char *symbol, void **f, int version, uint64_t flags) { return cuGetProcAddress_v2(symbol, f, version, flags, 0); }

/* --- device and context --- */
EXPORT int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal ? kErrorInvalidDevice : 0; }
EXPORT int cuDeviceGetCount(int *n) { *n = 1; return 0; }
EXPORT int cuDeviceGetName(char *name, int n, int device) { (void)device; DRIVER("device_name", W(name), n); }
EXPORT int cuDeviceTotalMem_v2(size_t *n, int device) { size_t available; (void)device; DRIVER("mem_info", W(&available), W(n)); }
EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) { DRIVER("device_attribute", W(value), attribute, device); }
EXPORT int cuDeviceComputeCapability(int *major, int *minor, int device) {
  int rc = cuDeviceGetAttribute(major, 75, device); /* ..COMPUTE_CAPABILITY_MAJOR, and below ..MINOR */
  return rc ? rc : cuDeviceGetAttribute(minor, 76, device);
}
EXPORT int cuDevicePrimaryCtxRetain(void **c, int device) { (void)device; *c = &g_context; return 0; }
EXPORT int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return 0; }
EXPORT int cuDevicePrimaryCtxReset_v2(int device) { (void)device; DRIVER("device_reset", 0); }
EXPORT int cuDevicePrimaryCtxSetFlags_v2(int device, unsigned flags) { (void)device; (void)flags; return 0; }
EXPORT int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { (void)device; *flags = 0; *active = 1; return 0; }
EXPORT int cuCtxCreate_v2(void **c, unsigned flags, int device) { (void)flags; (void)device; *c = &g_context; return 0; }
EXPORT int cuCtxCreate_v4(void **c, void *params, unsigned flags, int device) { (void)params; return cuCtxCreate_v2(c, flags, device); }
EXPORT int cuCtxDestroy_v2(void *c) { (void)c; return 0; }
EXPORT int cuCtxGetCurrent(void **c) { *c = &g_context; return 0; }
EXPORT int cuCtxSetCurrent(void *c) { (void)c; return 0; }
EXPORT int cuCtxPushCurrent_v2(void *c) { (void)c; return 0; }
EXPORT int cuCtxPopCurrent_v2(void **c) { if (c) *c = &g_context; return 0; }
EXPORT int cuCtxGetDevice(int *device) { *device = 0; return 0; }
EXPORT int cuCtxSetLimit(int limit, size_t value) { (void)limit; (void)value; return 0; }
EXPORT int cuCtxSetCacheConfig(int config) { (void)config; return 0; }
EXPORT int cuCtxSynchronize(void) { DRIVER("synchronize", 0); }
EXPORT int cuProfilerStart(void) { return 0; }
EXPORT int cuProfilerStop(void) { return 0; }

/* --- modules, libraries, functions --- */
EXPORT int cuModuleLoad(void **module, const char *path) { DRIVER("library_load_file", W(module), W(path)); }
EXPORT int cuModuleLoadData(void **module, const void *image) { DRIVER("library_load_data", W(module), W(image)); }
EXPORT int cuModuleLoadDataEx(void **module, const void *image, unsigned n, void *options, void *values) {
  (void)n; (void)options; (void)values;
  return cuModuleLoadData(module, image);
}
EXPORT int cuModuleLoadFatBinary(void **module, const void *image) { return cuModuleLoadData(module, image); }
EXPORT int cuModuleUnload(void *module) { DRIVER("library_unload", W(module)); }
EXPORT int cuModuleGetFunction(void **f, void *module, const char *name) { DRIVER("library_get_kernel", W(f), W(module), W(name)); }
EXPORT int cuModuleGetGlobal_v2(uint64_t *p, size_t *n, void *module, const char *name) { DRIVER("library_get_global", W(p), W(n), W(module), W(name)); }
EXPORT int cuLibraryLoadData(void **library, const void *code, void *a, void *b, unsigned n, void *c, void *d, unsigned m) {
  (void)a; (void)b; (void)n; (void)c; (void)d; (void)m;
  return cuModuleLoadData(library, code);
}
EXPORT int cuLibraryLoadFromFile(void **library, const char *path, void *a, void *b, unsigned n, void *c, void *d, unsigned m) {
  (void)a; (void)b; (void)n; (void)c; (void)d; (void)m;
  return cuModuleLoad(library, path);
}
EXPORT int cuLibraryUnload(void *library) { return cuModuleUnload(library); }
EXPORT int cuLibraryGetKernel(void **f, void *library, const char *name) { return cuModuleGetFunction(f, library, name); }
EXPORT int cuLibraryGetModule(void **module, void *library) { *module = library; return 0; }
EXPORT int cuLibraryGetGlobal(uint64_t *p, size_t *n, void *library, const char *name) { return cuModuleGetGlobal_v2(p, n, library, name); }
EXPORT int cuKernelGetFunction(void **f, void *kernel) { *f = kernel; return 0; }
EXPORT int cuFuncSetAttribute(void *f, int attribute, int value) { DRIVER("func_set_attribute", W(f), attribute, value); }
EXPORT int cuKernelSetAttribute(int attribute, int value, void *f, int device) { (void)device; return cuFuncSetAttribute(f, attribute, value); }
EXPORT int cuFuncGetAttribute(int *value, int attribute, void *f) { DRIVER("func_get_attribute", W(value), attribute, W(f)); }
EXPORT int cuKernelGetAttribute(int *value, int attribute, void *f, int device) { (void)device; return cuFuncGetAttribute(value, attribute, f); }
EXPORT int cuFuncSetCacheConfig(void *f, int config) { (void)f; (void)config; return 0; }
EXPORT int cuFuncSetSharedMemConfig(void *f, int config) { (void)f; (void)config; return 0; }
EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *f, int block, size_t shared) { DRIVER("occupancy", W(n), W(f), block, W(shared)); }
EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, void *f, int block, size_t shared, unsigned flags) {
  (void)flags;
  return cuOccupancyMaxActiveBlocksPerMultiprocessor(n, f, block, shared);
}
/* Finds the block size with which the most threads fit on an SM, the largest of several, and a grid that fills the device. */
EXPORT int cuOccupancyMaxPotentialBlockSizeWithFlags(int *grid, int *block, void *f, size_t (*shared_of)(int), size_t shared, int limit, unsigned flags) {
  int sms, most, count, rc = cuDeviceGetAttribute(&sms, 16, 0); /* ..MULTIPROCESSOR_COUNT */
  (void)flags;
  if (!rc) rc = cuFuncGetAttribute(&most, 0, f); /* ..MAX_THREADS_PER_BLOCK */
  if (limit > 0 && !rc && limit < most) most = limit;
  *grid = *block = 0;
  for (int threads = most, best = 0; !rc && threads > 0; threads = (threads - 1) / 32 * 32) {
    rc = cuOccupancyMaxActiveBlocksPerMultiprocessor(&count, f, threads, shared_of ? shared_of(threads) : shared);
    if (!rc && count * threads > best) best = count * threads, *block = threads, *grid = count * sms;
  }
  return rc;
}
EXPORT int cuOccupancyMaxPotentialBlockSize(int *grid, int *block, void *f, size_t (*shared_of)(int), size_t shared, int limit) {
  return cuOccupancyMaxPotentialBlockSizeWithFlags(grid, block, f, shared_of, shared, limit, 0);
}

/* --- launches --- */
/* Launches a kernel. Its parameters are params, or one block of memory that extra names. */
static int driver_launch(void *f, const driver_config_t *c, void **params, void **extra) {
  void *packed = 0;
  for (void **e = params ? 0 : extra; e && *e; e += 2)
    if ((intptr_t)e[0] == 1) packed = e[1]; /* CU_LAUNCH_PARAM_BUFFER_POINTER */
  DRIVER("launch", W(f), c->gx, c->gy, c->gz, c->bx, c->by, c->bz, c->shared, W(params), W(c->stream), W(c->attrs), c->count, W(packed));
}
WITH_STREAM(cuLaunchKernel, (void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream, void **params, void **extra),
            (f, gx, gy, gz, bx, by, bz, shared, stream, params, extra)) {
  driver_config_t c = {gx, gy, gz, bx, by, bz, shared, stream, 0, 0};
  return driver_launch(f, &c, params, extra);
}
WITH_STREAM(cuLaunchKernelEx, (const driver_config_t *c, void *f, void **params, void **extra), (c, f, params, extra)) { return driver_launch(f, c, params, extra); }
EXPORT int cuLaunchCooperativeKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream, void **params) {
  unsigned attribute[18] = {2, 0, 1}; /* the 72 bytes of a CUlaunchAttribute: CU_LAUNCH_ATTRIBUTE_COOPERATIVE is 1 */
  driver_config_t c = {gx, gy, gz, bx, by, bz, shared, stream, attribute, 1};
  return driver_launch(f, &c, params, 0);
}

/* --- memory. Kinds of copies are those of cudaMemcpyKind: 1 to the device, 2 to the host, 3 within the device, 4 by the addresses --- */
typedef uint64_t address_t;
EXPORT int cuMemAlloc_v2(address_t *p, size_t n) { DRIVER("malloc", W(p), W(n)); }
EXPORT int cuMemAllocPitch_v2(address_t *p, size_t *pitch, size_t width, size_t height, unsigned element) {
  (void)element;
  *pitch = (width + 511) / 512 * 512; /* rows begin at multiples of 512 bytes, as on a device */
  return cuMemAlloc_v2(p, *pitch * height);
}
EXPORT int cuMemAllocManaged(address_t *p, size_t n, unsigned flags) { (void)flags; DRIVER("malloc_host", W(p), W(n), 1); }
EXPORT int cuMemAllocHost_v2(void **p, size_t n) { DRIVER("malloc_host", W(p), W(n), 0); }
EXPORT int cuMemHostAlloc(void **p, size_t n, unsigned flags) { (void)flags; return cuMemAllocHost_v2(p, n); }
EXPORT int cuMemHostGetDevicePointer_v2(address_t *d, void *h, unsigned flags) { (void)flags; DRIVER("host_pointer", W(d), W(h)); }
EXPORT int cuMemFree_v2(address_t p) { DRIVER("free", W(p), 0); }
EXPORT int cuMemFreeHost(void *p) { DRIVER("free", W(p), 1); }
EXPORT int cuMemGetInfo_v2(size_t *available, size_t *total) { DRIVER("mem_info", W(available), W(total)); }
static int driver_copy(address_t d, address_t s, size_t n, int kind, void *stream, int async) { DRIVER("memcpy", W(d), W(s), W(n), kind, W(stream), async); }
static int driver_fill(address_t d, unsigned value, size_t n, int size, void *stream, int async) { DRIVER("memset", W(d), value, W(n), size, W(stream), async); }
#define COPY(name, to, from, kind)                                                                                       \
  EXPORT int name##_v2(to d, from s, size_t n) { return driver_copy((address_t)d, (address_t)s, n, kind, 0, 0); }          \
  EXPORT int name##_v2_ptds(to d, from s, size_t n) { PER_THREAD(name##_v2(d, s, n)); }                                       \
  EXPORT int name##Async_v2(to d, from s, size_t n, void *stream) { return driver_copy((address_t)d, (address_t)s, n, kind, stream, 1); } \
  EXPORT int name##Async_v2_ptsz(to d, from s, size_t n, void *stream) { PER_THREAD(name##Async_v2(d, s, n, stream)); }
COPY(cuMemcpyHtoD, address_t, const void *, 1)
COPY(cuMemcpyDtoH, void *, address_t, 2)
COPY(cuMemcpyDtoD, address_t, address_t, 3)
EXPORT int cuMemcpy(address_t d, address_t s, size_t n) { return driver_copy(d, s, n, 4, 0, 0); }
EXPORT int cuMemcpyAsync(address_t d, address_t s, size_t n, void *stream) { return driver_copy(d, s, n, 4, stream, 1); }
EXPORT int cuMemsetD8_v2(address_t d, unsigned char value, size_t n) { return driver_fill(d, value, n, 1, 0, 0); }
EXPORT int cuMemsetD16_v2(address_t d, unsigned short value, size_t n) { return driver_fill(d, value, 2 * n, 2, 0, 0); }
EXPORT int cuMemsetD32_v2(address_t d, unsigned value, size_t n) { return driver_fill(d, value, 4 * n, 4, 0, 0); }
EXPORT int cuMemsetD8Async(address_t d, unsigned char value, size_t n, void *stream) { return driver_fill(d, value, n, 1, stream, 1); }
EXPORT int cuMemsetD16Async(address_t d, unsigned short value, size_t n, void *stream) { return driver_fill(d, value, 2 * n, 2, stream, 1); }
EXPORT int cuMemsetD32Async(address_t d, unsigned value, size_t n, void *stream) { return driver_fill(d, value, 4 * n, 4, stream, 1); }

/* --- streams and events --- */
EXPORT int cuStreamCreate(void **s, unsigned flags) { DRIVER("stream_create", W(s), flags); }
EXPORT int cuStreamCreateWithPriority(void **s, unsigned flags, int priority) { (void)priority; return cuStreamCreate(s, flags); }
EXPORT int cuStreamDestroy_v2(void *s) { DRIVER("stream_destroy", W(s)); }
WITH_STREAM(cuStreamSynchronize, (void *s), (s)) { DRIVER("stream_synchronize", W(s)); }
WITH_STREAM(cuStreamQuery, (void *s), (s)) { DRIVER("stream_synchronize", W(s)); }
WITH_STREAM(cuStreamWaitEvent, (void *s, void *e, unsigned flags), (s, e, flags)) { (void)flags; DRIVER("stream_wait_event", W(s), W(e)); }
EXPORT int cuEventCreate(void **e, unsigned flags) { (void)flags; DRIVER("event_create", W(e)); }
EXPORT int cuEventDestroy_v2(void *e) { DRIVER("event_destroy", W(e)); }
WITH_STREAM(cuEventRecord, (void *e, void *s), (e, s)) { DRIVER("event_record", W(e), W(s)); }
EXPORT int cuEventSynchronize(void *e) { DRIVER("event_synchronize", W(e)); }
EXPORT int cuEventQuery(void *e) { DRIVER("event_synchronize", W(e)); }
EXPORT int cuEventElapsedTime(float *ms, void *a, void *b) { DRIVER("event_elapsed", W(ms), W(a), W(b)); }
EXPORT int cuEventElapsedTime_v2(float *ms, void *a, void *b) { return cuEventElapsedTime(ms, a, b); }

EXPORT int cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *address, const uint64_t *dims, const uint64_t *strides,
                                  const uint32_t *box, const uint32_t *steps, int interleave, int swizzle, int promotion, int fill) {
  return tensor_map_encode(map, type, rank, address, dims, strides, box, steps, interleave, swizzle, promotion, fill);
}
