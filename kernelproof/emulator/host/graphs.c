/* Graphs that are built node by node, 3D copies, and memory pools. This is a part of runtime.c's text and uses its calls. */

/* --- 3D copies, with the layouts of cudaPitchedPtr, cudaExtent, cudaPos and cudaMemcpy3DParms --- */
typedef struct { char *p; size_t pitch, width, height; } pitched_t;
typedef struct { size_t width, height, depth; } extent_t;
typedef struct {
  void *from_array; extent_t from_at; pitched_t from;
  void *to_array; extent_t to_at; pitched_t to;
  extent_t extent; int kind;
} box_copy_t;

/* Returns the address of plane z of a box that begins at `at`; widths are in bytes. */
static char *address_at(const pitched_t *p, const extent_t *at, size_t z) {
  return p->p + (at->depth + z) * p->pitch * p->height + at->height * p->pitch + at->width;
}
static int copy3d(const box_copy_t *c, void *stream, int async) {
  int rc = 0;
  if (c->from_array || c->to_array) return unsupported("cudaMemcpy3D of a cudaArray");
  for (size_t z = 0; z < c->extent.depth && !rc; ++z)
    rc = copy2d(address_at(&c->to, &c->to_at, z), c->to.pitch, address_at(&c->from, &c->from_at, z), c->from.pitch,
                c->extent.width, c->extent.height, c->kind, stream, async);
  return rc;
}
static int fill3d(pitched_t p, int value, extent_t e, void *stream, int async) {
  int rc = 0;
  for (size_t z = 0; z < e.depth && !rc; ++z)
    rc = fill2d(p.p + z * p.pitch * p.height, p.pitch, value, e.width, e.height, 1, stream, async);
  return rc;
}
BOTH(cudaMemcpy3D, (const box_copy_t *c), (c)) { return copy3d(c, 0, 0); }
BOTH_ASYNC(cudaMemcpy3DAsync, (const box_copy_t *c, void *stream), (c, stream)) { return copy3d(c, stream, 1); }
BOTH(cudaMemset3D, (pitched_t p, int value, extent_t e), (p, value, e)) { return fill3d(p, value, e, 0, 0); }
BOTH_ASYNC(cudaMemset3DAsync, (pitched_t p, int value, extent_t e, void *stream), (p, value, e, stream)) { return fill3d(p, value, e, stream, 1); }
EXPORT int cudaMalloc3D(pitched_t *p, extent_t e) {
  p->width = e.width;
  p->height = e.height;
  return cudaMallocPitch((void **)&p->p, &p->pitch, e.width, e.height * e.depth);
}

/* --- memory pools: all are the device's memory; the session checks the stream order of allocations --- */
static char g_pool;
static uint64_t g_release_threshold;
enum { kReleaseThreshold = 4, kAccessReadWrite = 3 };

BOTH_ASYNC(cudaMallocAsync, (void **p, size_t n, void *stream), (p, n, stream)) { CALL("malloc_async", W(p), W(n), W(stream)); }
BOTH_ASYNC(cudaFreeAsync, (void *p, void *stream), (p, stream)) { CALL("free_async", W(p), W(stream)); }
BOTH_ASYNC(cudaMallocFromPoolAsync, (void **p, size_t n, void *pool, void *stream), (p, n, pool, stream)) { (void)pool; return cudaMallocAsync(p, n, stream); }
WITH_STREAM(cuMemAllocAsync, (address_t *p, size_t n, void *stream), (p, n, stream)) { DRIVER("malloc_async", W(p), W(n), W(stream)); }
WITH_STREAM(cuMemFreeAsync, (address_t p, void *stream), (p, stream)) { DRIVER("free_async", W(p), W(stream)); }
WITH_STREAM(cuMemAllocFromPoolAsync, (address_t *p, size_t n, void *pool, void *stream), (p, n, pool, stream)) { (void)pool; return cuMemAllocAsync(p, n, stream); }
/* Gets or sets an attribute of a pool (cudaMemPoolAttr). Those before the release threshold are ints that allow reuse: always 1. Those after
   it are 64-bit statistics: always 0. */
static int pool_attribute(int attribute, void *value, int set) {
  if (attribute < kReleaseThreshold) { if (!set) *(int *)value = 1; }
  else if (attribute > kReleaseThreshold) { if (!set) *(uint64_t *)value = 0; }
  else if (set) g_release_threshold = *(uint64_t *)value;
  else *(uint64_t *)value = g_release_threshold;
  return 0;
}
#define POOLS(api)                                                                                                         \
  EXPORT int api##DeviceGetDefaultMemPool(void **pool, int device) { *pool = &g_pool; return device ? kErrorInvalidDevice : 0; }           \
  EXPORT int api##DeviceGetMemPool(void **pool, int device) { *pool = &g_pool; return device ? kErrorInvalidDevice : 0; }                  \
  EXPORT int api##DeviceSetMemPool(int device, void *pool) { (void)pool; return device ? kErrorInvalidDevice : 0; }                        \
  EXPORT int api##MemPoolCreate(void **pool, const void *properties) { (void)properties; *pool = &g_pool; return 0; }      \
  EXPORT int api##MemPoolDestroy(void *pool) { (void)pool; return 0; }                                                     \
  EXPORT int api##MemPoolTrimTo(void *pool, size_t kept) { (void)pool; (void)kept; return 0; }                             \
  EXPORT int api##MemPoolSetAccess(void *pool, const void *list, size_t n) { (void)pool; (void)list; (void)n; return 0; }  \
  EXPORT int api##MemPoolGetAccess(int *flags, void *pool, void *place) { (void)pool; (void)place; *flags = kAccessReadWrite; return 0; } \
  EXPORT int api##MemPoolSetAttribute(void *pool, int a, void *value) { (void)pool; return pool_attribute(a, value, 1); }  \
  EXPORT int api##MemPoolGetAttribute(void *pool, int a, void *value) { (void)pool; return pool_attribute(a, value, 0); }  \
  EXPORT int api##MemGetDefaultMemPool(void **pool, void *place, int type) { (void)place; (void)type; *pool = &g_pool; return 0; }
POOLS(cuda)
POOLS(cu)

/* --- nodes: calls on the stream NODE_STREAM between "node_begin" and "node_end" are recorded as the node's work --- */
#define NODE_STREAM ((void *)3)
typedef struct { void *kernel; dim3_t grid, block; unsigned shared; void **arguments, **extra; } kernel_node_t;
typedef struct { void *to; size_t pitch; unsigned value, size; size_t width, height; } fill_node_t;
typedef struct { void (*f)(void *); void *data; } host_node_t;
/* cudaMemAllocNodeParams. The address is fixed when the node is made, and a launch of the graph allocates the memory there. */
typedef struct { char pool[88]; const void *access; size_t count, bytes; void *address; } allocation_node_t;
typedef struct { int type, reserved[3]; union { kernel_node_t kernel; struct { int flags[4]; box_copy_t box; } copy; fill_node_t fill; host_node_t host; void *graph; allocation_node_t allocation; void *freed; }; } any_node_t;
enum { kKernel, kCopy, kFill, kHost, kChild, kEmpty, kAllocation = 10, kFree };

/* A node's type and parameters, for the functions cudaGraph..NodeGetParams. */
typedef struct { void *node; int type; union { kernel_node_t kernel; box_copy_t box; fill_node_t fill; host_node_t host; void *graph; allocation_node_t allocation; void *freed; }; } node_record_t;
static node_record_t *g_records;
static int g_record_count;

/* Returns the newest record of a node, or 0. */
static node_record_t *find_record(void *node) {
  for (int i = g_record_count - 1; i >= 0; --i)
    if (g_records[i].node == node) return &g_records[i];
  return 0;
}
/* Records a node's type and parameters, or replaces them. Returns 0. */
static int record_node(void *node, int type, const void *params, size_t size) {
  node_record_t *m = find_record(node);
  if (!m) {
    g_records = with_room(g_records, g_record_count, sizeof *g_records);
    m = &g_records[g_record_count++];
  }
  memset(m, 0, sizeof *m);
  m->node = node;
  m->type = type;
  if (size) memcpy(&m->kernel, params, size);
  return 0;
}
/* Stores offset and size in bytes of a kernel's parameter i. Returns an error after the last one. */
static int parameter_layout(const void *kernel, size_t i, size_t *offset, size_t *size) {
  int64_t words[] = {W(kernel), W(i), W(offset), W(size), 0};
  return g_callback ? g_callback("parameter_layout", words) : kErrorNoDevice;
}
/* Returns the block of memory with a kernel's arguments, or 0 if they are passed one by one. */
static void *packed_arguments(const kernel_node_t *k) {
  for (void **e = k->arguments ? 0 : k->extra; e && *e; e += 2)
    if ((intptr_t)e[0] == 1) return e[1]; /* CU_LAUNCH_PARAM_BUFFER_POINTER */
  return 0;
}
/* Copies the arguments of a kernel into the node, since the caller's may be freed before they are queried. */
static int record_kernel_node(void *node, const kernel_node_t *k) {
  kernel_node_t own = *k;
  char *packed = packed_arguments(k);
  size_t n = 0, offset, size;
  while (!parameter_layout(k->kernel, n, &offset, &size)) ++n;
  own.arguments = n ? calloc(n, sizeof(void *)) : 0;
  own.extra = 0;
  for (size_t i = 0; i < n; ++i) {
    parameter_layout(k->kernel, i, &offset, &size);
    own.arguments[i] = memcpy(malloc(size), packed ? packed + offset : k->arguments[i], size);
  }
  return record_node(node, kKernel, &own, sizeof own);
}
/* Stores the recorded parameters of a node of this type. */
static int params_of(void *node, int type, void *out, size_t size) {
  node_record_t *m = find_record(node);
  if (!m || m->type != type) return g_last_error = kErrorInvalidValue;
  memcpy(out, &m->kernel, size);
  return 0;
}

/* Begins a new node of a graph, after the n nodes `before`. */
static int begin_node(void **node, void *graph, void *const *before, size_t n) { CALL("node_begin", W(node), W(graph), W(before), W(n)); }
/* Begins the new work of an existing node: of its graph if executable is 0, else of the executable graph. */
static int begin_change(void *executable, void *node) { CALL("node_again", W(executable), W(node)); }
/* Ends the work of the node that was begun. Returns the code that its calls returned. */
static int end_node(int code) {
  int64_t words[] = {code, 0};
  call("node_end", words);
  return code;
}
static int kernel_work(const kernel_node_t *k) {
  return launch_packed(k->kernel, k->grid, k->block, k->arguments, k->shared, NODE_STREAM, 0, 0, packed_arguments(k));
}
static int fill_work(const fill_node_t *f) {
  return fill2d(f->to, f->pitch, (int)f->value, f->width * f->size, f->height, (int)f->size, NODE_STREAM, 1);
}
static int child_work(void *graph) { CALL("child_graph", W(graph), W(NODE_STREAM)); }
/* Returns the parameters of a copy of consecutive bytes. */
static box_copy_t one_row(void *to, const void *from, size_t bytes, int kind) {
  box_copy_t c = {0};
  pitched_t source = {(char *)from, bytes, bytes, 1}, target = {to, bytes, bytes, 1};
  extent_t extent = {bytes, 1, 1};
  c.from = source, c.to = target, c.extent = extent, c.kind = kind;
  return c;
}
/* The bodies of functions that add a node, or change the work of one. `work` is an expression whose calls are recorded as the node's work,
   and `recording` one that records the parameters of recorded_node. Executable graphs have no parameters to query. */
#define ADD_NODE(node, graph, before, n, work, recording) \
  int rc = begin_node(node, graph, before, n);            \
  if (!rc) rc = end_node(work);                           \
  void *recorded_node = rc ? 0 : *node;                   \
  return rc ? rc : recording
#define CHANGE_NODE(executable, node, work, recording) \
  int rc = begin_change(executable, node);             \
  if (!rc) rc = end_node(work);                        \
  void *recorded_node = node;                          \
  return rc || executable ? rc : recording
/* Defines cudaGraphAdd..Node, and ..NodeSetParams for graphs and executable graphs, for one kind of work. */
#define NODES(name, type, work, recording)                                                               \
  EXPORT int cudaGraphAdd##name##Node(void **node, void *graph, void *const *before, size_t n, type p) { \
    ADD_NODE(node, graph, before, n, work, recording);                                                   \
  }                                                                                                      \
  EXPORT int cudaGraphExec##name##NodeSetParams(void *executable, void *node, type p) {                  \
    CHANGE_NODE(executable, node, work, recording);                                                      \
  }                                                                                                      \
  EXPORT int cudaGraph##name##NodeSetParams(void *node, type p) { return cudaGraphExec##name##NodeSetParams(0, node, p); }
NODES(Kernel, const kernel_node_t *, kernel_work(p), record_kernel_node(recorded_node, p))
NODES(Memcpy, const box_copy_t *, copy3d(p, NODE_STREAM, 1), record_node(recorded_node, kCopy, p, sizeof *p))
NODES(Memset, const fill_node_t *, fill_work(p), record_node(recorded_node, kFill, p, sizeof *p))
NODES(Host, const host_node_t *, cudaLaunchHostFunc(NODE_STREAM, p->f, p->data), record_node(recorded_node, kHost, p, sizeof *p))
NODES(ChildGraph, void *, child_work(p), record_node(recorded_node, kChild, &p, sizeof p))
EXPORT int cudaGraphAddEmptyNode(void **node, void *graph, void *const *before, size_t n) {
  ADD_NODE(node, graph, before, n, 0, record_node(recorded_node, kEmpty, 0, 0));
}
EXPORT int cudaGraphAddMemcpyNode1D(void **node, void *graph, void *const *before, size_t n, void *to, const void *from, size_t bytes, int kind) {
  box_copy_t c = one_row(to, from, bytes, kind);
  ADD_NODE(node, graph, before, n, copy(to, from, bytes, kind, NODE_STREAM, 1), record_node(recorded_node, kCopy, &c, sizeof c));
}
EXPORT int cudaGraphExecMemcpyNodeSetParams1D(void *executable, void *node, void *to, const void *from, size_t bytes, int kind) {
  box_copy_t c = one_row(to, from, bytes, kind);
  CHANGE_NODE(executable, node, copy(to, from, bytes, kind, NODE_STREAM, 1), record_node(recorded_node, kCopy, &c, sizeof c));
}
EXPORT int cudaGraphMemcpyNodeSetParams1D(void *node, void *to, const void *from, size_t bytes, int kind) {
  return cudaGraphExecMemcpyNodeSetParams1D(0, node, to, from, bytes, kind);
}
EXPORT int cudaGraphAddMemcpyNodeToSymbol(void **node, void *graph, void *const *before, size_t n, const void *symbol, const void *from, size_t bytes, size_t offset, int kind) {
  (void)kind;
  ADD_NODE(node, graph, before, n, to_symbol(symbol, from, bytes, offset, NODE_STREAM, 1), record_node(recorded_node, kCopy, 0, 0));
}
EXPORT int cudaGraphAddMemcpyNodeFromSymbol(void **node, void *graph, void *const *before, size_t n, void *to, const void *symbol, size_t bytes, size_t offset, int kind) {
  (void)kind;
  ADD_NODE(node, graph, before, n, from_symbol(to, symbol, bytes, offset, NODE_STREAM, 1), record_node(recorded_node, kCopy, 0, 0));
}
EXPORT int cudaGraphAddMemAllocNode(void **node, void *graph, void *const *before, size_t n, allocation_node_t *p) {
  ADD_NODE(node, graph, before, n, cudaMallocAsync(&p->address, p->bytes, NODE_STREAM), record_node(recorded_node, kAllocation, p, sizeof *p));
}
EXPORT int cudaGraphAddMemFreeNode(void **node, void *graph, void *const *before, size_t n, void *address) {
  ADD_NODE(node, graph, before, n, cudaFreeAsync(address, NODE_STREAM), record_node(recorded_node, kFree, &address, sizeof address));
}
EXPORT int cudaGraphNodeGetType(void *node, int *type) {
  node_record_t *m = find_record(node);
  if (!m) return g_last_error = kErrorInvalidValue;
  *type = m->type;
  return 0;
}
EXPORT int cudaGraphKernelNodeGetParams(void *node, kernel_node_t *p) { return params_of(node, kKernel, p, sizeof *p); }
EXPORT int cudaGraphMemcpyNodeGetParams(void *node, box_copy_t *p) { return params_of(node, kCopy, p, sizeof *p); }
EXPORT int cudaGraphMemsetNodeGetParams(void *node, fill_node_t *p) { return params_of(node, kFill, p, sizeof *p); }
EXPORT int cudaGraphHostNodeGetParams(void *node, host_node_t *p) { return params_of(node, kHost, p, sizeof *p); }
EXPORT int cudaGraphChildGraphNodeGetGraph(void *node, void **p) { return params_of(node, kChild, p, sizeof *p); }
EXPORT int cudaGraphMemAllocNodeGetParams(void *node, allocation_node_t *p) { return params_of(node, kAllocation, p, sizeof *p); }
EXPORT int cudaGraphMemFreeNodeGetParams(void *node, void *p) { return params_of(node, kFree, p, sizeof(void *)); }
EXPORT int cudaFuncGetParamInfo(const void *f, size_t i, size_t *offset, size_t *size) {
  size_t unused;
  CALL("parameter_layout", W(f), W(i), W(offset), W(size ? size : &unused));
}
EXPORT int cudaGraphAddNode(void **node, void *graph, void *const *before, const void *edges, size_t n, any_node_t *p) {
  (void)edges;
  switch (p->type) {
    case kKernel: return cudaGraphAddKernelNode(node, graph, before, n, &p->kernel);
    case kCopy: return cudaGraphAddMemcpyNode(node, graph, before, n, &p->copy.box);
    case kFill: return cudaGraphAddMemsetNode(node, graph, before, n, &p->fill);
    case kHost: return cudaGraphAddHostNode(node, graph, before, n, &p->host);
    case kChild: return cudaGraphAddChildGraphNode(node, graph, before, n, p->graph);
    case kEmpty: return cudaGraphAddEmptyNode(node, graph, before, n);
    case kAllocation: return cudaGraphAddMemAllocNode(node, graph, before, n, &p->allocation);
    case kFree: return cudaGraphAddMemFreeNode(node, graph, before, n, p->freed);
    default: return unsupported("cudaGraphAddNode of this type");
  }
}
EXPORT int cudaGraphCreate(void **graph, unsigned flags) { (void)flags; CALL("graph_create", W(graph)); }
EXPORT int cudaGraphClone(void **copy, void *graph) { CALL("graph_clone", W(copy), W(graph)); }
EXPORT int cudaGraphAddDependencies(void *graph, void *const *from, void *const *to, const void *edges, size_t n) { (void)edges; CALL("graph_edges", W(graph), W(from), W(to), W(n)); }
EXPORT int cudaGraphGetNodes(void *graph, void **nodes, size_t *n) { CALL("graph_nodes", W(graph), W(nodes), W(n), 0); }
EXPORT int cudaGraphGetRootNodes(void *graph, void **nodes, size_t *n) { CALL("graph_nodes", W(graph), W(nodes), W(n), 1); }
EXPORT int cudaGraphExecUpdate(void *executable, void *graph, void **result) {
  memset(result, 0, 3 * sizeof *result);
  CALL("graph_update", W(executable), W(graph));
}
/* cudaGraphInstantiateParams; results: 0 success, 1 error. */
typedef struct { unsigned long long flags; void *stream, *failed; int result; } instantiate_t;
BOTH_ASYNC(cudaGraphInstantiateWithParams, (void **executable, void *graph, instantiate_t *p), (executable, graph, p)) {
  int rc = cudaGraphInstantiate(executable, graph, p->flags);
  p->failed = 0;
  p->result = rc != 0;
  return rc;
}
static int graph_memory(int attribute, void *value) { CALL("graph_memory", W(attribute), W(value)); }
static int graph_memory_reset(int attribute) { CALL("graph_memory_reset", W(attribute)); }
static int graph_memory_trim(void) { CALL("graph_memory_trim", 0); }
EXPORT int cudaDeviceGetGraphMemAttribute(int device, int attribute, void *value) { return device ? kErrorInvalidDevice : graph_memory(attribute, value); }
EXPORT int cudaDeviceSetGraphMemAttribute(int device, int attribute, void *value) { (void)value; return device ? kErrorInvalidDevice : graph_memory_reset(attribute); }
EXPORT int cudaDeviceGraphMemTrim(int device) { return device ? kErrorInvalidDevice : graph_memory_trim(); }
