/* The CUDA driver's functions for graphs and for 2D and 3D copies, by means of those in graphs.c. This is a part of
   runtime.c's text. The parameters of kernel, memset, host and memory nodes begin with the same fields as the runtime's. */

/* Defines a driver function that calls one of the runtime and restores the runtime's last error. */
#define FACE(name, work, params)                 \
  EXPORT int name params {                       \
    int last = g_last_error, code = work;        \
    g_last_error = last;                         \
    return code;                                 \
  }

/* --- 2D and 3D copies, with the layouts of CUDA_MEMCPY3D and CUDA_MEMCPY2D --- */
enum { kHostMemory = 1, kDeviceMemory = 2, kArrayMemory = 3 };
typedef struct { size_t x, y, z, level; int memory; char *host; address_t device; void *array, *reserved; size_t pitch, height; } corner_t;
typedef struct { corner_t from, to; size_t width, height, depth; } driver_box_t;
typedef struct { size_t x, y; int memory; char *host; address_t device; void *array; size_t pitch; } flat_corner_t;
typedef struct { flat_corner_t from, to; size_t width, height; } driver_flat_t;

static pitched_t pitched(const corner_t *c, size_t width, size_t height) {
  pitched_t p = {c->memory == kHostMemory ? c->host : (char *)c->device, c->pitch ? c->pitch : width, width, c->height ? c->height : height};
  return p;
}
static box_copy_t box_of(const driver_box_t *b) {
  box_copy_t c = {0};
  extent_t from = {b->from.x, b->from.y, b->from.z}, to = {b->to.x, b->to.y, b->to.z}, extent = {b->width, b->height, b->depth};
  int host_from = b->from.memory == kHostMemory, host_to = b->to.memory == kHostMemory;
  c.from = pitched(&b->from, b->width, b->height), c.from_at = from;
  c.to = pitched(&b->to, b->width, b->height), c.to_at = to;
  if (b->from.memory == kArrayMemory) c.from_array = &g_context;
  if (b->to.memory == kArrayMemory) c.to_array = &g_context;
  c.extent = extent;
  c.kind = host_from && b->to.memory == kDeviceMemory ? 1 : b->from.memory == kDeviceMemory && host_to ? 2 : 4;
  return c;
}
static int driver_box(const driver_box_t *b, void *stream, int async) {
  box_copy_t c = box_of(b);
  return copy3d(&c, stream, async);
}
static corner_t corner(const flat_corner_t *f) {
  corner_t c = {f->x, f->y, 0, 0, f->memory, f->host, f->device, f->array, 0, f->pitch, 0};
  return c;
}
static int driver_flat(const driver_flat_t *f, void *stream, int async) {
  driver_box_t b = {corner(&f->from), corner(&f->to), f->width, f->height, 1};
  return driver_box(&b, stream, async);
}
FACE(cuMemcpy3D_v2, driver_box(b, 0, 0), (const driver_box_t *b))
FACE(cuMemcpy3D_v2_ptds, driver_box(b, 0, 0), (const driver_box_t *b))
FACE(cuMemcpy3DAsync_v2, driver_box(b, stream, 1), (const driver_box_t *b, void *stream))
FACE(cuMemcpy3DAsync_v2_ptsz, driver_box(b, stream, 1), (const driver_box_t *b, void *stream))
FACE(cuMemcpy2D_v2, driver_flat(f, 0, 0), (const driver_flat_t *f))
FACE(cuMemcpy2D_v2_ptds, driver_flat(f, 0, 0), (const driver_flat_t *f))
FACE(cuMemcpy2DUnaligned_v2, driver_flat(f, 0, 0), (const driver_flat_t *f))
FACE(cuMemcpy2DAsync_v2, driver_flat(f, stream, 1), (const driver_flat_t *f, void *stream))
FACE(cuMemcpy2DAsync_v2_ptsz, driver_flat(f, stream, 1), (const driver_flat_t *f, void *stream))

/* --- capture and whole graphs --- */
FACE(cuStreamBeginCapture_v2, cudaStreamBeginCapture(s, mode), (void *s, int mode))
FACE(cuStreamBeginCapture_v2_ptsz, cudaStreamBeginCapture(s, mode), (void *s, int mode))
FACE(cuStreamEndCapture, cudaStreamEndCapture(s, graph), (void *s, void **graph))
FACE(cuStreamEndCapture_ptsz, cudaStreamEndCapture(s, graph), (void *s, void **graph))
FACE(cuStreamIsCapturing, cudaStreamIsCapturing(s, status), (void *s, int *status))
FACE(cuStreamIsCapturing_ptsz, cudaStreamIsCapturing(s, status), (void *s, int *status))
FACE(cuGraphCreate, cudaGraphCreate(graph, flags), (void **graph, unsigned flags))
FACE(cuGraphDestroy, cudaGraphDestroy(graph), (void *graph))
FACE(cuGraphExecDestroy, cudaGraphExecDestroy(executable), (void *executable))
FACE(cuGraphClone, cudaGraphClone(copy, graph), (void **copy, void *graph))
FACE(cuGraphGetNodes, cudaGraphGetNodes(graph, nodes, n), (void *graph, void **nodes, size_t *n))
FACE(cuGraphGetRootNodes, cudaGraphGetRootNodes(graph, nodes, n), (void *graph, void **nodes, size_t *n))
FACE(cuGraphAddDependencies_v2, cudaGraphAddDependencies(graph, from, to, edges, n), (void *graph, void *const *from, void *const *to, const void *edges, size_t n))
FACE(cuGraphAddDependencies, cudaGraphAddDependencies(graph, from, to, 0, n), (void *graph, void *const *from, void *const *to, size_t n))
FACE(cuGraphInstantiateWithFlags, cudaGraphInstantiate(executable, graph, flags), (void **executable, void *graph, unsigned long long flags))
FACE(cuGraphInstantiateWithParams, cudaGraphInstantiateWithParams(executable, graph, params), (void **executable, void *graph, instantiate_t *params))
FACE(cuGraphInstantiateWithParams_ptsz, cudaGraphInstantiateWithParams(executable, graph, params), (void **executable, void *graph, instantiate_t *params))
FACE(cuGraphInstantiate_v2, cudaGraphInstantiate(executable, graph, 0), (void **executable, void *graph, void **node, char *log, size_t room))
FACE(cuGraphUpload, cudaGraphUpload(executable, s), (void *executable, void *s))
FACE(cuGraphUpload_ptsz, cudaGraphUpload(executable, s), (void *executable, void *s))
FACE(cuGraphLaunch, cudaGraphLaunch(executable, s), (void *executable, void *s))
FACE(cuGraphLaunch_ptsz, cudaGraphLaunch(executable, s), (void *executable, void *s))
FACE(cuDeviceGetGraphMemAttribute, cudaDeviceGetGraphMemAttribute(device, attribute, value), (int device, int attribute, void *value))
FACE(cuDeviceSetGraphMemAttribute, cudaDeviceSetGraphMemAttribute(device, attribute, value), (int device, int attribute, void *value))
FACE(cuDeviceGraphMemTrim, cudaDeviceGraphMemTrim(device), (int device))
FACE(cuGraphExecUpdate_v2, cudaGraphExecUpdate(executable, graph, result), (void *executable, void *graph, void **result))

/* --- nodes --- */
#define NEW void **node, void *graph, void *const *before, size_t n
typedef struct { kernel_node_t kernel; void *other, *context; } driver_kernel_node_t;
/* The driver's structure has a kernel of a library after the runtime's fields. It is used if the function is null. */
static kernel_node_t kernel_of(const driver_kernel_node_t *d) {
  kernel_node_t k = d->kernel;
  if (!k.kernel) k.kernel = d->other;
  return k;
}
static int add_kernel(NEW, kernel_node_t k) { return cudaGraphAddKernelNode(node, graph, before, n, &k); }
static int set_kernel(void *executable, void *node, kernel_node_t k) { return cudaGraphExecKernelNodeSetParams(executable, node, &k); }
static int add_box(NEW, box_copy_t c) { return cudaGraphAddMemcpyNode(node, graph, before, n, &c); }
static int set_box(void *executable, void *node, box_copy_t c) { return cudaGraphExecMemcpyNodeSetParams(executable, node, &c); }
FACE(cuGraphAddKernelNode_v2, add_kernel(node, graph, before, n, kernel_of(p)), (NEW, const driver_kernel_node_t *p))
FACE(cuGraphAddKernelNode, add_kernel(node, graph, before, n, *p), (NEW, const kernel_node_t *p))
FACE(cuGraphExecKernelNodeSetParams_v2, set_kernel(executable, node, kernel_of(p)), (void *executable, void *node, const driver_kernel_node_t *p))
FACE(cuGraphExecKernelNodeSetParams, set_kernel(executable, node, *p), (void *executable, void *node, const kernel_node_t *p))
FACE(cuGraphKernelNodeSetParams_v2, set_kernel(0, node, kernel_of(p)), (void *node, const driver_kernel_node_t *p))
FACE(cuGraphKernelNodeSetParams, set_kernel(0, node, *p), (void *node, const kernel_node_t *p))
FACE(cuGraphAddMemcpyNode, add_box(node, graph, before, n, box_of(b)), (NEW, const driver_box_t *b, void *context))
FACE(cuGraphExecMemcpyNodeSetParams, set_box(executable, node, box_of(b)), (void *executable, void *node, const driver_box_t *b, void *context))
FACE(cuGraphMemcpyNodeSetParams, set_box(0, node, box_of(b)), (void *node, const driver_box_t *b))
FACE(cuGraphAddMemsetNode, cudaGraphAddMemsetNode(node, graph, before, n, p), (NEW, const fill_node_t *p, void *context))
FACE(cuGraphExecMemsetNodeSetParams, cudaGraphExecMemsetNodeSetParams(executable, node, p), (void *executable, void *node, const fill_node_t *p, void *context))
FACE(cuGraphMemsetNodeSetParams, cudaGraphMemsetNodeSetParams(node, p), (void *node, const fill_node_t *p))
FACE(cuGraphAddHostNode, cudaGraphAddHostNode(node, graph, before, n, p), (NEW, const host_node_t *p))
FACE(cuGraphExecHostNodeSetParams, cudaGraphExecHostNodeSetParams(executable, node, p), (void *executable, void *node, const host_node_t *p))
FACE(cuGraphHostNodeSetParams, cudaGraphHostNodeSetParams(node, p), (void *node, const host_node_t *p))
FACE(cuGraphAddChildGraphNode, cudaGraphAddChildGraphNode(node, graph, before, n, child), (NEW, void *child))
FACE(cuGraphExecChildGraphNodeSetParams, cudaGraphExecChildGraphNodeSetParams(executable, node, child), (void *executable, void *node, void *child))
FACE(cuGraphAddEmptyNode, cudaGraphAddEmptyNode(node, graph, before, n), (NEW))
FACE(cuGraphAddMemAllocNode, cudaGraphAddMemAllocNode(node, graph, before, n, p), (NEW, allocation_node_t *p))
FACE(cuGraphAddMemFreeNode, cudaGraphAddMemFreeNode(node, graph, before, n, (void *)p), (NEW, address_t p))

/* CUgraphNodeParams. */
typedef struct { int type, reserved[3]; union { driver_kernel_node_t kernel; struct { int flags, reserved; void *context; driver_box_t box; } copy; fill_node_t fill; host_node_t host; void *graph; allocation_node_t allocation; void *freed; }; } driver_any_node_t;
static int add_any(NEW, driver_any_node_t *p) {
  any_node_t a = {p->type};
  int rc;
  if (p->type == kKernel) a.kernel = kernel_of(&p->kernel);
  else if (p->type == kCopy) a.copy.box = box_of(&p->copy.box);
  else memcpy(&a.kernel, &p->kernel, sizeof a.allocation);
  rc = cudaGraphAddNode(node, graph, before, 0, n, &a);
  if (p->type == kAllocation) p->allocation = a.allocation;
  return rc;
}
static corner_t corner_of(const pitched_t *p, const extent_t *at, int on_host) {
  corner_t c = {at->width, at->height, at->depth, 0, on_host ? kHostMemory : kDeviceMemory, on_host ? p->p : 0, on_host ? 0 : (address_t)p->p, 0, 0, p->pitch, p->height};
  return c;
}
static int driver_kernel_params(void *node, driver_kernel_node_t *p) {
  p->other = p->context = 0;
  return cudaGraphKernelNodeGetParams(node, &p->kernel);
}
static int driver_copy_params(void *node, driver_box_t *p) {
  box_copy_t c;
  int rc = cudaGraphMemcpyNodeGetParams(node, &c);
  if (rc) return rc;
  p->from = corner_of(&c.from, &c.from_at, c.kind == 0 || c.kind == 1);
  p->to = corner_of(&c.to, &c.to_at, c.kind == 0 || c.kind == 2);
  p->width = c.extent.width, p->height = c.extent.height, p->depth = c.extent.depth;
  return 0;
}
FACE(cuGraphAddNode, add_any(node, graph, before, n, p), (NEW, driver_any_node_t *p))
FACE(cuGraphAddNode_v2, add_any(node, graph, before, n, p), (void **node, void *graph, void *const *before, const void *edges, size_t n, driver_any_node_t *p))
FACE(cuGraphNodeGetType, cudaGraphNodeGetType(node, type), (void *node, int *type))
FACE(cuGraphKernelNodeGetParams, cudaGraphKernelNodeGetParams(node, p), (void *node, kernel_node_t *p))
FACE(cuGraphKernelNodeGetParams_v2, driver_kernel_params(node, p), (void *node, driver_kernel_node_t *p))
FACE(cuGraphMemcpyNodeGetParams, driver_copy_params(node, p), (void *node, driver_box_t *p))
FACE(cuGraphMemsetNodeGetParams, cudaGraphMemsetNodeGetParams(node, p), (void *node, fill_node_t *p))
FACE(cuGraphHostNodeGetParams, cudaGraphHostNodeGetParams(node, p), (void *node, host_node_t *p))
FACE(cuGraphChildGraphNodeGetGraph, cudaGraphChildGraphNodeGetGraph(node, p), (void *node, void **p))
FACE(cuGraphMemAllocNodeGetParams, cudaGraphMemAllocNodeGetParams(node, p), (void *node, allocation_node_t *p))
FACE(cuGraphMemFreeNodeGetParams, cudaGraphMemFreeNodeGetParams(node, p), (void *node, void *p))
FACE(cuFuncGetParamInfo, cudaFuncGetParamInfo(f, i, offset, size), (void *f, size_t i, size_t *offset, size_t *size))
FACE(cuKernelGetParamInfo, cudaFuncGetParamInfo(f, i, offset, size), (void *f, size_t i, size_t *offset, size_t *size))
