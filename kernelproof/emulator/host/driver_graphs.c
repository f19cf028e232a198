/* The CUDA driver's functions for graphs and for 2D and 3D copies, which call those of graphs.c. This is a part of
   runtime.c's text. The parameters of kernel, memset, host and memory nodes begin with the same fields as the runtime's. */

/* Defines a driver function that calls one of the runtime and restores the runtime's last error. */
#define DRIVER_FORM(name, work, params)   \
  EXPORT int name params {                \
    int last = g_last_error, code = work; \
    g_last_error = last;                  \
    return code;                          \
  }

/* --- 2D and 3D copies, with the layouts of CUDA_MEMCPY3D and CUDA_MEMCPY2D --- */
enum { kHostMemory = 1, kDeviceMemory = 2, kArrayMemory = 3 };
typedef struct { size_t x, y, z, level; int memory; char *host; address_t device; void *array, *reserved; size_t pitch, height; } corner_t;
typedef struct { corner_t from, to; size_t width, height, depth; } driver_copy3d_t;
typedef struct { size_t x, y; int memory; char *host; address_t device; void *array; size_t pitch; } corner2d_t;
typedef struct { corner2d_t from, to; size_t width, height; } driver_copy2d_t;

/* The runtime's form of one side of a copy. A pitch or height of 0 means that rows or planes follow each other. */
static pitched_t pitched(const corner_t *c, size_t width, size_t height) {
  pitched_t p = {c->memory == kHostMemory ? c->host : (char *)c->device, c->pitch ? c->pitch : width, width, c->height ? c->height : height};
  return p;
}
/* The runtime's form of a copy. Its kind is 1 from host to device, 2 from device to host, 4 if the addresses decide. */
static box_copy_t runtime_copy(const driver_copy3d_t *b) {
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
static int driver_copy3d(const driver_copy3d_t *b, void *stream, int async) {
  box_copy_t c = runtime_copy(b);
  return copy3d(&c, stream, async);
}
static corner_t corner(const corner2d_t *f) {
  corner_t c = {f->x, f->y, 0, 0, f->memory, f->host, f->device, f->array, 0, f->pitch, 0};
  return c;
}
static int driver_copy2d(const driver_copy2d_t *f, void *stream, int async) {
  driver_copy3d_t b = {corner(&f->from), corner(&f->to), f->width, f->height, 1};
  return driver_copy3d(&b, stream, async);
}
DRIVER_FORM(cuMemcpy3D_v2, driver_copy3d(b, 0, 0), (const driver_copy3d_t *b))
DRIVER_FORM(cuMemcpy3D_v2_ptds, driver_copy3d(b, 0, 0), (const driver_copy3d_t *b))
DRIVER_FORM(cuMemcpy3DAsync_v2, driver_copy3d(b, stream, 1), (const driver_copy3d_t *b, void *stream))
DRIVER_FORM(cuMemcpy3DAsync_v2_ptsz, driver_copy3d(b, stream, 1), (const driver_copy3d_t *b, void *stream))
DRIVER_FORM(cuMemcpy2D_v2, driver_copy2d(f, 0, 0), (const driver_copy2d_t *f))
DRIVER_FORM(cuMemcpy2D_v2_ptds, driver_copy2d(f, 0, 0), (const driver_copy2d_t *f))
DRIVER_FORM(cuMemcpy2DUnaligned_v2, driver_copy2d(f, 0, 0), (const driver_copy2d_t *f))
DRIVER_FORM(cuMemcpy2DAsync_v2, driver_copy2d(f, stream, 1), (const driver_copy2d_t *f, void *stream))
DRIVER_FORM(cuMemcpy2DAsync_v2_ptsz, driver_copy2d(f, stream, 1), (const driver_copy2d_t *f, void *stream))

/* --- capture and whole graphs --- */
DRIVER_FORM(cuStreamBeginCapture_v2, cudaStreamBeginCapture(s, mode), (void *s, int mode))
DRIVER_FORM(cuStreamBeginCapture_v2_ptsz, cudaStreamBeginCapture(s, mode), (void *s, int mode))
DRIVER_FORM(cuStreamEndCapture, cudaStreamEndCapture(s, graph), (void *s, void **graph))
DRIVER_FORM(cuStreamEndCapture_ptsz, cudaStreamEndCapture(s, graph), (void *s, void **graph))
DRIVER_FORM(cuStreamIsCapturing, cudaStreamIsCapturing(s, status), (void *s, int *status))
DRIVER_FORM(cuStreamIsCapturing_ptsz, cudaStreamIsCapturing(s, status), (void *s, int *status))
DRIVER_FORM(cuGraphCreate, cudaGraphCreate(graph, flags), (void **graph, unsigned flags))
DRIVER_FORM(cuGraphDestroy, cudaGraphDestroy(graph), (void *graph))
DRIVER_FORM(cuGraphExecDestroy, cudaGraphExecDestroy(executable), (void *executable))
DRIVER_FORM(cuGraphClone, cudaGraphClone(copy, graph), (void **copy, void *graph))
DRIVER_FORM(cuGraphGetNodes, cudaGraphGetNodes(graph, nodes, n), (void *graph, void **nodes, size_t *n))
DRIVER_FORM(cuGraphGetRootNodes, cudaGraphGetRootNodes(graph, nodes, n), (void *graph, void **nodes, size_t *n))
DRIVER_FORM(cuGraphAddDependencies_v2, cudaGraphAddDependencies(graph, from, to, edges, n), (void *graph, void *const *from, void *const *to, const void *edges, size_t n))
DRIVER_FORM(cuGraphAddDependencies, cudaGraphAddDependencies(graph, from, to, 0, n), (void *graph, void *const *from, void *const *to, size_t n))
DRIVER_FORM(cuGraphInstantiateWithFlags, cudaGraphInstantiate(executable, graph, flags), (void **executable, void *graph, unsigned long long flags))
DRIVER_FORM(cuGraphInstantiateWithParams, cudaGraphInstantiateWithParams(executable, graph, params), (void **executable, void *graph, instantiate_t *params))
DRIVER_FORM(cuGraphInstantiateWithParams_ptsz, cudaGraphInstantiateWithParams(executable, graph, params), (void **executable, void *graph, instantiate_t *params))
DRIVER_FORM(cuGraphInstantiate_v2, cudaGraphInstantiate(executable, graph, 0), (void **executable, void *graph, void **node, char *log, size_t room))
DRIVER_FORM(cuGraphUpload, cudaGraphUpload(executable, s), (void *executable, void *s))
DRIVER_FORM(cuGraphUpload_ptsz, cudaGraphUpload(executable, s), (void *executable, void *s))
DRIVER_FORM(cuGraphLaunch, cudaGraphLaunch(executable, s), (void *executable, void *s))
DRIVER_FORM(cuGraphLaunch_ptsz, cudaGraphLaunch(executable, s), (void *executable, void *s))
DRIVER_FORM(cuDeviceGetGraphMemAttribute, cudaDeviceGetGraphMemAttribute(device, attribute, value), (int device, int attribute, void *value))
DRIVER_FORM(cuDeviceSetGraphMemAttribute, cudaDeviceSetGraphMemAttribute(device, attribute, value), (int device, int attribute, void *value))
DRIVER_FORM(cuDeviceGraphMemTrim, cudaDeviceGraphMemTrim(device), (int device))
DRIVER_FORM(cuGraphExecUpdate_v2, cudaGraphExecUpdate(executable, graph, result), (void *executable, void *graph, void **result))

/* --- nodes --- */
/* The parameters with which every function that adds a node begins. */
#define NODE_PARAMS void **node, void *graph, void *const *before, size_t n
typedef struct { kernel_node_t kernel; void *library_kernel, *context; } driver_kernel_node_t;
/* The driver's structure has a kernel of a library after the runtime's fields. It is used if the function is null. */
static kernel_node_t kernel_of(const driver_kernel_node_t *d) {
  kernel_node_t k = d->kernel;
  if (!k.kernel) k.kernel = d->library_kernel;
  return k;
}
static int add_kernel(NODE_PARAMS, kernel_node_t k) { return cudaGraphAddKernelNode(node, graph, before, n, &k); }
static int set_kernel(void *executable, void *node, kernel_node_t k) { return cudaGraphExecKernelNodeSetParams(executable, node, &k); }
static int add_box(NODE_PARAMS, box_copy_t c) { return cudaGraphAddMemcpyNode(node, graph, before, n, &c); }
static int set_box(void *executable, void *node, box_copy_t c) { return cudaGraphExecMemcpyNodeSetParams(executable, node, &c); }
DRIVER_FORM(cuGraphAddKernelNode_v2, add_kernel(node, graph, before, n, kernel_of(p)), (NODE_PARAMS, const driver_kernel_node_t *p))
DRIVER_FORM(cuGraphAddKernelNode, add_kernel(node, graph, before, n, *p), (NODE_PARAMS, const kernel_node_t *p))
DRIVER_FORM(cuGraphExecKernelNodeSetParams_v2, set_kernel(executable, node, kernel_of(p)), (void *executable, void *node, const driver_kernel_node_t *p))
DRIVER_FORM(cuGraphExecKernelNodeSetParams, set_kernel(executable, node, *p), (void *executable, void *node, const kernel_node_t *p))
DRIVER_FORM(cuGraphKernelNodeSetParams_v2, set_kernel(0, node, kernel_of(p)), (void *node, const driver_kernel_node_t *p))
DRIVER_FORM(cuGraphKernelNodeSetParams, set_kernel(0, node, *p), (void *node, const kernel_node_t *p))
DRIVER_FORM(cuGraphAddMemcpyNode, add_box(node, graph, before, n, runtime_copy(b)), (NODE_PARAMS, const driver_copy3d_t *b, void *context))
DRIVER_FORM(cuGraphExecMemcpyNodeSetParams, set_box(executable, node, runtime_copy(b)), (void *executable, void *node, const driver_copy3d_t *b, void *context))
DRIVER_FORM(cuGraphMemcpyNodeSetParams, set_box(0, node, runtime_copy(b)), (void *node, const driver_copy3d_t *b))
DRIVER_FORM(cuGraphAddMemsetNode, cudaGraphAddMemsetNode(node, graph, before, n, p), (NODE_PARAMS, const fill_node_t *p, void *context))
DRIVER_FORM(cuGraphExecMemsetNodeSetParams, cudaGraphExecMemsetNodeSetParams(executable, node, p), (void *executable, void *node, const fill_node_t *p, void *context))
DRIVER_FORM(cuGraphMemsetNodeSetParams, cudaGraphMemsetNodeSetParams(node, p), (void *node, const fill_node_t *p))
DRIVER_FORM(cuGraphAddHostNode, cudaGraphAddHostNode(node, graph, before, n, p), (NODE_PARAMS, const host_node_t *p))
DRIVER_FORM(cuGraphExecHostNodeSetParams, cudaGraphExecHostNodeSetParams(executable, node, p), (void *executable, void *node, const host_node_t *p))
DRIVER_FORM(cuGraphHostNodeSetParams, cudaGraphHostNodeSetParams(node, p), (void *node, const host_node_t *p))
DRIVER_FORM(cuGraphAddChildGraphNode, cudaGraphAddChildGraphNode(node, graph, before, n, child), (NODE_PARAMS, void *child))
DRIVER_FORM(cuGraphExecChildGraphNodeSetParams, cudaGraphExecChildGraphNodeSetParams(executable, node, child), (void *executable, void *node, void *child))
DRIVER_FORM(cuGraphAddEmptyNode, cudaGraphAddEmptyNode(node, graph, before, n), (NODE_PARAMS))
DRIVER_FORM(cuGraphAddMemAllocNode, cudaGraphAddMemAllocNode(node, graph, before, n, p), (NODE_PARAMS, allocation_node_t *p))
DRIVER_FORM(cuGraphAddMemFreeNode, cudaGraphAddMemFreeNode(node, graph, before, n, (void *)p), (NODE_PARAMS, address_t p))

/* CUgraphNodeParams, and the function that adds a node of any type. */
typedef struct { int type, reserved[3]; union { driver_kernel_node_t kernel; struct { int flags, reserved; void *context; driver_copy3d_t box; } copy; fill_node_t fill; host_node_t host; void *graph; allocation_node_t allocation; void *freed; }; } driver_any_node_t;
static int add_any(NODE_PARAMS, driver_any_node_t *p) {
  any_node_t a = {p->type};
  int rc;
  if (p->type == kKernel) a.kernel = kernel_of(&p->kernel);
  else if (p->type == kCopy) a.copy.box = runtime_copy(&p->copy.box);
  else memcpy(&a.kernel, &p->kernel, sizeof a.allocation); /* the other parameters begin alike; those of allocations are the longest */
  rc = cudaGraphAddNode(node, graph, before, 0, n, &a);
  if (p->type == kAllocation) p->allocation = a.allocation;
  return rc;
}
static corner_t corner_of(const pitched_t *p, const extent_t *at, int on_host) {
  corner_t c = {at->width, at->height, at->depth, 0, on_host ? kHostMemory : kDeviceMemory, on_host ? p->p : 0, on_host ? 0 : (address_t)p->p, 0, 0, p->pitch, p->height};
  return c;
}
static int driver_kernel_params(void *node, driver_kernel_node_t *p) {
  p->library_kernel = p->context = 0;
  return cudaGraphKernelNodeGetParams(node, &p->kernel);
}
static int driver_copy_params(void *node, driver_copy3d_t *p) {
  box_copy_t c;
  int rc = cudaGraphMemcpyNodeGetParams(node, &c);
  if (rc) return rc;
  p->from = corner_of(&c.from, &c.from_at, c.kind == 0 || c.kind == 1);
  p->to = corner_of(&c.to, &c.to_at, c.kind == 0 || c.kind == 2);
  p->width = c.extent.width, p->height = c.extent.height, p->depth = c.extent.depth;
  return 0;
}
DRIVER_FORM(cuGraphAddNode, add_any(node, graph, before, n, p), (NODE_PARAMS, driver_any_node_t *p))
DRIVER_FORM(cuGraphAddNode_v2, add_any(node, graph, before, n, p), (void **node, void *graph, void *const *before, const void *edges, size_t n, driver_any_node_t *p))
DRIVER_FORM(cuGraphNodeGetType, cudaGraphNodeGetType(node, type), (void *node, int *type))
DRIVER_FORM(cuGraphKernelNodeGetParams, cudaGraphKernelNodeGetParams(node, p), (void *node, kernel_node_t *p))
DRIVER_FORM(cuGraphKernelNodeGetParams_v2, driver_kernel_params(node, p), (void *node, driver_kernel_node_t *p))
DRIVER_FORM(cuGraphMemcpyNodeGetParams, driver_copy_params(node, p), (void *node, driver_copy3d_t *p))
DRIVER_FORM(cuGraphMemsetNodeGetParams, cudaGraphMemsetNodeGetParams(node, p), (void *node, fill_node_t *p))
DRIVER_FORM(cuGraphHostNodeGetParams, cudaGraphHostNodeGetParams(node, p), (void *node, host_node_t *p))
DRIVER_FORM(cuGraphChildGraphNodeGetGraph, cudaGraphChildGraphNodeGetGraph(node, p), (void *node, void **p))
DRIVER_FORM(cuGraphMemAllocNodeGetParams, cudaGraphMemAllocNodeGetParams(node, p), (void *node, allocation_node_t *p))
DRIVER_FORM(cuGraphMemFreeNodeGetParams, cudaGraphMemFreeNodeGetParams(node, p), (void *node, void *p))
DRIVER_FORM(cuFuncGetParamInfo, cudaFuncGetParamInfo(f, i, offset, size), (void *f, size_t i, size_t *offset, size_t *size))
DRIVER_FORM(cuKernelGetParamInfo, cudaFuncGetParamInfo(f, i, offset, size), (void *f, size_t i, size_t *offset, size_t *size))
