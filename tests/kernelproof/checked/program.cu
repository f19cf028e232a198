// One program, many cases: argv[1] chooses. Each is right or breaks one rule.
#include <cassert>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda.h>
#include <cuda_runtime.h>
#include <sys/wait.h>
#include <unistd.h>

__constant__ int factor;
__managed__ int total;

__global__ void scale(const int *x, int *y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = factor * x[i];
}
__global__ void beyond(const int *x, int *y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i <= n) y[i] = x[i];
}
__global__ void reversed(const int *x, int *y, bool synchronised) {
  __shared__ int tile[64];
  tile[threadIdx.x] = x[threadIdx.x];
  if (synchronised) __syncthreads();
  y[threadIdx.x] = tile[63 - threadIdx.x];
}
__global__ void increment(int *y) { atomicAdd(y, 1); }
__global__ void waiting(int *y) { for (long i = 0; i < 1l << 40; ++i) atomicAdd(y, 1); }
__global__ void serial(int *y, int iterations) {
  unsigned value = 1;
#pragma unroll 1
  for (int i = 0; i < iterations; ++i) value = value % 1000003 * 4093 + 1;
  *y = value;
}
__global__ void circle(int *y, int step) {
  int i = 0;
  while (i >= 0) i = (i + step) % 7;
  *y = i;
}
__global__ void poll(volatile int *flag, int *y) {
  while (*flag == 0) {}
  y[threadIdx.x] = 1;
}
// Every CTA waits for the one before.
__global__ void relay(volatile int *flags, int *y) {
  if (threadIdx.x == 0 && blockIdx.x > 0)
    while (flags[blockIdx.x - 1] == 0) {}
  __syncthreads();
  y[blockIdx.x * blockDim.x + threadIdx.x] = blockIdx.x;
  __syncthreads();
  if (threadIdx.x == 0) __threadfence(), flags[blockIdx.x] = 1;
}
__global__ void add_total() { atomicAdd(&total, threadIdx.x); }
__global__ void speak(int n) {
  if (threadIdx.x % 32 == 0) printf("warp %d of %s: %5.2f %x %lld%%\n", threadIdx.x / 32, "block", 0.5 * n, n, -5ll);
}
__global__ void doubt(int n) { assert(threadIdx.x < n); }
// Right if the last digits to base 256 of what "to" holds are all different within a CTA.
__global__ void permuted(const int *to, int *y) {
  __shared__ int tile[256];
  const int i = blockIdx.x * 256 + threadIdx.x;
  tile[to[i] % 256] = i;
  __syncthreads();
  y[i] = tile[threadIdx.x];
}
__global__ void texture(cudaTextureObject_t) {}

static const int n = 1000;
static int *x, *y, host[n];

static void check(const char *what, int got, int expected) {
  if (got != expected) printf("%s: %d, not %d\n", what, got, expected), exit(9);
}
static void prepare() {
  int three = 3;
  for (int i = 0; i < n; ++i) host[i] = i;
  cudaMemcpyToSymbol(factor, &three, 4);
  cudaMalloc(&x, sizeof host);
  cudaMalloc(&y, sizeof host);
  cudaMemcpy(x, host, sizeof host, cudaMemcpyHostToDevice);
}
static void verify(int times) {
  check("copy", cudaMemcpy(host, y, sizeof host, cudaMemcpyDeviceToHost), 0);
  for (int i = 0; i < n; ++i) check("value", host[i], times * i);
}
static void add_ten(void *p) { *(int *)p += 10; }

static int streams(bool ordered) {
  cudaStream_t a, b;
  cudaEvent_t event;
  cudaStreamCreate(&a);
  cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking);
  cudaEventCreate(&event);
  scale<<<4, 256, 0, a>>>(x, y, n);
  cudaEventRecord(event, a);
  if (ordered) cudaStreamWaitEvent(b, event, 0);
  cudaMemsetAsync(y, 0, 400, b);
  return cudaDeviceSynchronize();
}
// Two streams, each copies its half and then scales it; "shift" elements of the second reach into the first.
static int halves(int shift) {
  cudaStream_t a, b;
  cudaStreamCreate(&a);
  cudaStreamCreate(&b);
  cudaMemcpyAsync(y, x, 2002, cudaMemcpyDeviceToDevice, a);
  cudaMemcpyAsync((char *)y + 2002 - shift, x, 1998, cudaMemcpyDeviceToDevice, b);
  scale<<<1, 256, 0, a>>>(x, y + 100, 200);
  scale<<<1, 256, 0, b>>>(x, y + 600, 200);
  return cudaDeviceSynchronize();
}
static int graph() {
  cudaStream_t s;
  cudaGraph_t captured;
  cudaGraphExec_t executable;
  cudaStreamCreate(&s);
  cudaMemset(y, 0, sizeof host);
  cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal);
  increment<<<1, 32, 0, s>>>(y);
  cudaStreamEndCapture(s, &captured);
  cudaGraphInstantiate(&executable, captured, 0);
  for (int i = 0; i < 3; ++i) cudaGraphLaunch(executable, s);
  cudaMemcpy(host, y, 4, cudaMemcpyDeviceToHost);
  check("graph", host[0], 96);
  return 0;
}
// Three kernel nodes behind a memset node; "path" says whether they wait for it.
static int nodes(bool path) {
  cudaGraph_t built, clone;
  cudaGraphExec_t executable;
  cudaGraphNode_t fill, kernel, copy;
  size_t count = 0;
  int into = 0, again = 0;
  void *arguments[] = {&y};
  cudaMemsetParams zero = {};
  zero.dst = y, zero.elementSize = 4, zero.width = 100, zero.height = 1, zero.value = 7;
  cudaKernelNodeParams run = {};
  run.func = (void *)increment, run.gridDim = dim3(1), run.blockDim = dim3(32), run.kernelParams = arguments;
  check("create", cudaGraphCreate(&built, 0), 0);
  check("memset node", cudaGraphAddMemsetNode(&fill, built, 0, 0, &zero), 0);
  check("kernel node", cudaGraphAddKernelNode(&kernel, built, &fill, path, &run), 0);
  check("copy node", cudaGraphAddMemcpyNode1D(&copy, built, &kernel, 1, &into, y, 4, cudaMemcpyDeviceToHost), 0);
  check("nodes", cudaGraphGetNodes(built, 0, &count), 0);
  check("count", count, 3);
  check("clone", cudaGraphClone(&clone, built), 0);
  check("instantiate", cudaGraphInstantiate(&executable, clone, 0), 0);
  for (int i = 0; i < 2; ++i) check("launch", cudaGraphLaunch(executable, 0), 0);
  check("end", cudaDeviceSynchronize(), 0);
  if (path) check("seven and 32", into, 39);
  zero.value = 8;
  check("other value", cudaGraphExecMemsetNodeSetParams(executable, fill, &zero), 0);
  check("other copy", cudaGraphExecMemcpyNodeSetParams1D(executable, copy, &again, y + 1, 4, cudaMemcpyDeviceToHost), 0);
  check("launch", cudaGraphLaunch(executable, 0), 0);
  if (path) check("eight", again, 8);
  check("cycle", cudaGraphAddDependencies(built, &copy, &copy, 0, 1), 0);
  return cudaGraphInstantiate(&executable, built, 0) == cudaErrorInvalidValue ? 0 : 1;
}
__global__ void meet(unsigned *arrived) {
  atomicAdd(arrived, 1);
  while (atomicAdd(arrived, 0) < gridDim.x) {}
}
static int cooperative() {
  unsigned *arrived = (unsigned *)y;
  cudaMemset(y, 0, 4);
  void *arguments[] = {&arrived};
  check("launch", cudaLaunchCooperativeKernel((void *)meet, dim3(8), dim3(1), arguments, 0, 0), 0);
  return cudaDeviceSynchronize();
}
// Nodes by the driver, with memory that the graph allocates, and a box of 2 x 2 words.
static int driver_nodes(bool path) {
  CUgraph built;
  CUgraphExec executable;
  CUgraphNode memory, fill, kernel, copy, end;
  CUmodule module;
  CUDA_KERNEL_NODE_PARAMS run = {};
  CUDA_MEMSET_NODE_PARAMS zero = {};
  CUDA_MEM_ALLOC_NODE_PARAMS space = {};
  CUDA_MEMCPY3D box = {};
  const char *text = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry add(.param .u64 p) {\n"
                     ".reg .b64 %d; .reg .b32 %t; ld.param.u64 %d, [p]; mov.u32 %t, %tid.x;\n"
                     "mad.wide.u32 %d, %t, 4, %d; red.global.add.u32 [%d], %t; ret; }\n";
  unsigned into[4] = {};
  cuInit(0);
  check("create", cuGraphCreate(&built, 0), 0);
  space.bytesize = 400;
  check("memory", cuGraphAddMemAllocNode(&memory, built, 0, 0, &space), 0);
  zero.dst = space.dptr, zero.elementSize = 4, zero.width = 100, zero.height = 1, zero.value = 7;
  check("memset", cuGraphAddMemsetNode(&fill, built, &memory, 1, &zero, 0), 0);
  check("load", cuModuleLoadData(&module, text), 0);
  check("function", cuModuleGetFunction(&run.func, module, "add"), 0);
  void *arguments[] = {&space.dptr};
  run.gridDimX = run.gridDimY = run.gridDimZ = run.blockDimY = run.blockDimZ = 1, run.blockDimX = 32;
  run.kernelParams = arguments;
  check("kernel", cuGraphAddKernelNode(&kernel, built, &fill, path, &run), 0);
  box.srcMemoryType = CU_MEMORYTYPE_DEVICE, box.srcDevice = space.dptr, box.srcPitch = 40, box.srcY = 1, box.srcXInBytes = 4;
  box.dstMemoryType = CU_MEMORYTYPE_HOST, box.dstHost = into, box.dstPitch = 8;
  box.WidthInBytes = 8, box.Height = 2, box.Depth = 1;
  check("copy", cuGraphAddMemcpyNode(&copy, built, &kernel, 1, &box, 0), 0);
  check("free", cuGraphAddMemFreeNode(&end, built, &copy, 1, space.dptr), 0);
  check("instantiate", cuGraphInstantiate(&executable, built, 0), 0);
  for (int i = 0; i < 2; ++i) check("launch", cuGraphLaunch(executable, 0), 0);
  check("end", cuCtxSynchronize(), 0);
  if (path) for (int i = 0; i < 4; ++i) check("word", into[i], 7 + 11 + i % 2 + i / 2 * 10);
  zero.value = 20;
  check("other value", cuGraphExecMemsetNodeSetParams(executable, fill, &zero, 0), 0);
  check("launch", cuGraphLaunch(executable, 0), 0);
  if (path) check("other word", into[0], 31);
  box.srcDevice = (CUdeviceptr)x, box.dstPitch = 0, box.Height = 1;  // what the graph allocated is free by now
  check("box", cuMemcpy3D(&box), 0);
  check("word of a box", into[0], host[11]);
  return cudaDeviceSynchronize();
}
// A graph allocates "a" and "b", frees "a" and leaves "b" to whoever launches it; by nodes or by capture.
struct Left {
  cudaGraph_t graph;
  int *a, *b;
};
static Left by_nodes() {
  Left left;
  cudaMemAllocNodeParams space = {};
  cudaMemsetParams fill = {};
  cudaGraphNode_t node[5];
  space.poolProps.allocType = cudaMemAllocationTypePinned, space.poolProps.location.type = cudaMemLocationTypeDevice;
  space.bytesize = 400, fill.elementSize = 4, fill.width = 100, fill.height = 1, fill.value = 7;
  check("create", cudaGraphCreate(&left.graph, 0), 0);
  check("a", cudaGraphAddMemAllocNode(node, left.graph, 0, 0, &space), 0);
  left.a = (int *)space.dptr, fill.dst = space.dptr;
  check("fill", cudaGraphAddMemsetNode(node + 1, left.graph, node, 1, &fill), 0);
  check("b", cudaGraphAddMemAllocNode(node + 2, left.graph, node + 1, 1, &space), 0);
  left.b = (int *)space.dptr;
  check("copy", cudaGraphAddMemcpyNode1D(node + 3, left.graph, node + 2, 1, left.b, left.a, 400, cudaMemcpyDeviceToDevice), 0);
  check("free", cudaGraphAddMemFreeNode(node + 4, left.graph, node + 3, 1, left.a), 0);
  return left;
}
static Left by_capture() {
  Left left;
  cudaStream_t s;
  cudaStreamCreate(&s);
  cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal);
  check("a", cudaMallocAsync(&left.a, 400, s), 0);
  cuMemsetD32Async((CUdeviceptr)left.a, 7, 100, s);
  check("b", cudaMallocAsync(&left.b, 400, s), 0);
  check("copy", cudaMemcpyAsync(left.b, left.a, 400, cudaMemcpyDeviceToDevice, s), 0);
  check("free", cudaFreeAsync(left.a, s), 0);
  cudaStreamEndCapture(s, &left.graph);
  cudaStreamDestroy(s);
  return left;
}
static void add_scale(CUgraph built, cudaGraphNode_t *node) {
  int count = n - 1;
  void *arguments[] = {&x, &y, &count};
  cudaKernelNodeParams run = {};
  run.func = (void *)scale, run.gridDim = dim3(1), run.blockDim = dim3(256), run.kernelParams = arguments;
  check("kernel", cudaGraphAddKernelNode(node, built, 0, 0, &run), 0);
  count = -1;
}
// What nodes say of themselves is enough to make them again; their arguments are their own.
static int parameters() {
  cudaGraph_t built, second;
  cudaGraphExec_t executable;
  CUgraphNode node[6], other;
  CUgraphNodeType type;
  CUgraphNodeParams make = {};
  CUDA_KERNEL_NODE_PARAMS run;
  CUDA_MEMSET_NODE_PARAMS fill;
  CUDA_MEMCPY3D box;
  size_t offset, size;
  int into[2] = {};
  check("create", cudaGraphCreate(&built, 0) | cudaGraphCreate(&second, 0), 0);
  add_scale(built, node);
  check("type", cuGraphNodeGetType(node[0], &type) || type != CU_GRAPH_NODE_TYPE_KERNEL, 0);
  check("kernel", cuGraphKernelNodeGetParams(node[0], &run), 0);
  check("third", *(int *)run.kernelParams[2], n - 1);
  check("layout", cuFuncGetParamInfo(run.func, 2, &offset, &size) || offset != 16 || size != 4, 0);
  check("layout", cuFuncGetParamInfo(run.func, 3, &offset, &size), CUDA_ERROR_INVALID_VALUE);
  run.gridDimX = 4;
  check("larger", cuGraphKernelNodeSetParams(node[0], &run), 0);
  check("kernel", cuGraphKernelNodeGetParams(node[0], &run) || run.gridDimX != 4, 0);
  check("not a fill", cuGraphMemsetNodeGetParams(node[0], &fill), CUDA_ERROR_INVALID_VALUE);
  make.type = CU_GRAPH_NODE_TYPE_MEMSET;
  make.memset.dst = (CUdeviceptr)y, make.memset.elementSize = 4, make.memset.width = n, make.memset.height = 1;
  make.memset.value = 7;
  check("fill", cuGraphAddNode_v2(node + 1, second, 0, 0, 0, &make), 0);
  check("fill", cuGraphMemsetNodeGetParams(node[1], &fill) || fill.value != 7 || fill.width != n, 0);
  make = {}, make.type = CU_GRAPH_NODE_TYPE_KERNEL;
  memcpy(&make.kernel, &run, sizeof run);
  check("again", cuGraphAddNode_v2(node + 2, second, node + 1, 0, 1, &make), 0);
  make = {}, make.type = CU_GRAPH_NODE_TYPE_MEM_ALLOC, make.alloc.bytesize = 8;
  check("memory", cuGraphAddNode_v2(node + 3, second, node + 2, 0, 1, &make), 0);
  const CUdeviceptr space = make.alloc.dptr;
  check("copy", cudaGraphAddMemcpyNode1D(node + 4, second, node + 3, 1, (void *)space, y + n - 2, 8, cudaMemcpyDeviceToDevice), 0);
  check("box", cuGraphMemcpyNodeGetParams(node[4], &box) || box.WidthInBytes != 8 || box.dstDevice != space, 0);
  check("type", box.srcMemoryType, CU_MEMORYTYPE_DEVICE);
  box.srcDevice = space, box.dstMemoryType = CU_MEMORYTYPE_HOST, box.dstHost = into;
  check("out", cuGraphAddMemcpyNode(&other, second, node + 4, 1, &box, 0), 0);
  make = {}, make.type = CU_GRAPH_NODE_TYPE_MEM_FREE, make.free.dptr = space;
  check("free", cuGraphAddNode_v2(node + 5, second, &other, 0, 1, &make), 0);
  CUdeviceptr freed = 0;
  check("freed", cuGraphMemFreeNodeGetParams(node[5], &freed) || freed != space, 0);
  check("instantiate", cudaGraphInstantiate(&executable, second, 0), 0);
  for (int i = 0; i < 2; ++i) check("launch", cudaGraphLaunch(executable, 0), 0);
  cudaDeviceSynchronize();
  check("scaled", into[0], 3 * (n - 2));
  check("filled", into[1], 7);
  return 0;
}
static size_t used(cudaGraphMemAttributeType attribute) {
  size_t bytes;
  check("attribute", cudaDeviceGetGraphMemAttribute(0, attribute, &bytes), 0);
  return bytes;
}
// Freed by the host, on a stream, by another graph, by the next launch, or "never".
static int graph_memory(Left left, bool never) {
  cudaGraph_t freeing, other;
  cudaGraphExec_t executable, second, end;
  cudaGraphNode_t node;
  cudaStream_t s;
  cudaStreamCreate(&s);
  check("instantiate", cudaGraphInstantiate(&executable, left.graph, 0), 0);
  check("two at a time", cudaGraphInstantiate(&second, left.graph, 0) != 0, 1);
  check("clone", cudaGraphClone(&other, left.graph) != 0, 1);
  check("freed in its own graph", cudaGraphCreate(&freeing, 0) || !cudaGraphAddMemFreeNode(&node, freeing, 0, 0, left.a), 0);
  check("of no graph", cudaGraphAddMemFreeNode(&node, freeing, 0, 0, y) != 0, 1);
  check("free node", cudaGraphAddMemFreeNode(&node, freeing, 0, 0, left.b), 0);
  check("twice", cudaGraphAddMemFreeNode(&node, freeing, 0, 0, left.b) != 0, 1);
  check("in both", cudaGraphAddMemFreeNode(&node, left.graph, 0, 0, left.b) != 0, 1);
  check("free graph", cudaGraphInstantiate(&end, freeing, 0), 0);
  check("before", used(cudaGraphMemAttrUsedMemCurrent), 0);
  for (int i = 0; i < 3; ++i) {
    host[99] = 0;
    check("launch", cudaGraphLaunch(executable, s), 0);
    increment<<<1, 32, 0, s>>>(left.b + 99);
    cudaMemcpyAsync(host, left.b, 400, cudaMemcpyDeviceToHost, s);
    cudaStreamSynchronize(s);
    check("7 and 32", host[99], 39);
    check("current", used(cudaGraphMemAttrUsedMemCurrent), 400);
    if (never) return cudaGraphLaunch(executable, s) == cudaErrorInvalidValue ? 0 : 1;
    if (i == 0) check("free", cudaFree(left.b), 0);
    if (i == 1) check("free", cudaFreeAsync(left.b, s), 0);
    if (i == 2) check("free", cudaGraphLaunch(end, s), 0);
  }
  check("high", used(cudaGraphMemAttrUsedMemHigh), 800);
  check("reserved", used(cudaGraphMemAttrReservedMemCurrent), 800);
  check("trim", cudaDeviceGraphMemTrim(0), 0);
  check("trimmed", used(cudaGraphMemAttrReservedMemCurrent), 0);
  check("destroy", cudaGraphExecDestroy(executable), 0);
  check("again", cudaGraphInstantiate(&executable, left.graph, cudaGraphInstantiateFlagAutoFreeOnLaunch), 0);
  for (int i = 0; i < 3; ++i) check("free on launch", cudaGraphLaunch(executable, s), 0);
  increment<<<1, 1, 0, s>>>(left.b);
  check("free", cudaFree(left.b), 0);
  return cudaStreamSynchronize(s);
}
static int pools(bool ordered) {
  cudaMemPool_t pool;
  cudaStream_t a, b;
  int *p, *q;
  unsigned long long kept = ~0ull;
  check("pool", cudaDeviceGetDefaultMemPool(&pool, 0), 0);
  check("threshold", cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &kept), 0);
  cudaStreamCreate(&a);
  cudaStreamCreate(&b);
  check("pool", cudaMallocFromPoolAsync(&p, 400, pool, a), 0);
  check("async", cudaMallocAsync(&q, 400, a), 0);
  cudaMemsetAsync(p, 1, 400, a);
  if (ordered) cudaStreamSynchronize(a);
  cudaMemcpyAsync(q, p, 400, cudaMemcpyDeviceToDevice, b);
  if (ordered) cudaStreamSynchronize(b);
  check("free", cudaFreeAsync(p, a), 0);
  check("trim", cudaMemPoolTrimTo(pool, 0), 0);
  return cudaDeviceSynchronize();
}
// The box (1..3, 1..2, 0..1) of 6 x 4 x 2 bytes on the host, to a pitched allocation and back.
static int boxes() {
  unsigned char there[48], back[12] = {};
  cudaPitchedPtr device;
  for (int i = 0; i < 48; ++i) there[i] = i;
  check("malloc", cudaMalloc3D(&device, make_cudaExtent(3, 2, 2)), 0);
  check("memset", cudaMemset3D(device, 9, make_cudaExtent(3, 2, 2)), 0);
  cudaMemcpy3DParms c = {};
  c.srcPtr = make_cudaPitchedPtr(there, 6, 6, 4), c.srcPos = make_cudaPos(1, 1, 0);
  c.dstPtr = device, c.extent = make_cudaExtent(3, 2, 2), c.kind = cudaMemcpyHostToDevice;
  check("there", cudaMemcpy3D(&c), 0);
  cudaMemcpy3DParms d = {};
  d.srcPtr = device, d.dstPtr = make_cudaPitchedPtr(back, 3, 3, 2), d.extent = c.extent, d.kind = cudaMemcpyDeviceToHost;
  check("back", cudaMemcpy3DAsync(&d, 0), 0);
  cudaDeviceSynchronize();
  for (int i = 0; i < 12; ++i) check("byte", back[i], i / 6 * 24 + (1 + i / 3 % 2) * 6 + 1 + i % 3);
  cudaArray_t array;
  cudaChannelFormatDesc format = {32, 0, 0, 0, cudaChannelFormatKindFloat};
  check("array", cudaMallocArray(&array, &format, 64, 64), cudaErrorNotSupported);
  return 0;
}
// A program that closes what it can reach and leaves a child: neither loses a report nor keeps the check waiting.
static int hidden() {
  if (!fork()) pause();
  for (int i = 0; i < 256; ++i) close(i);
  beyond<<<4, 256>>>(x, y, n);
  return 0;
}
static int driver() {
  CUdeviceptr p;
  size_t available, bytes;
  int major;
  CUmodule module;
  CUfunction f;
  check("init", cuInit(0), 0);
  check("capability", cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 0), 0);
  check("major", major, 8);
  check("memory", cuMemGetInfo(&available, &bytes), 0);
  check("malloc", cuMemAlloc(&p, 256), 0);
  const char *text = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry five(.param .u64 p) {\n"
                     ".reg .b64 %d; ld.param.u64 %d, [p]; st.global.u32 [%d], 5; ret; }\n";
  check("load", cuModuleLoadData(&module, text), 0);
  check("function", cuModuleGetFunction(&f, module, "five"), 0);
  void *params[] = {&p};
  check("launch", cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, 0, params, 0), 0);
  void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &p, CU_LAUNCH_PARAM_BUFFER_SIZE, &(bytes = 8), CU_LAUNCH_PARAM_END};
  check("packed", cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, 0, 0, extra), 0);
  check("copy", cuMemcpyDtoH(host, p, 4), 0);
  check("five", host[0], 5);
  int blocks, threads;
  check("occupancy", cuOccupancyMaxPotentialBlockSize(&blocks, &threads, f, [](int b) { return size_t(b > 512 ? 200000 : 0); }, 0, 0), 0);
  check("threads", threads, 512);
  check("blocks", blocks, 4 * 108);
  check("missing", cuModuleGetFunction(&f, module, "six"), CUDA_ERROR_NOT_FOUND);
  char path[] = "/tmp/moduleXXXXXX";
  FILE *file = fdopen(mkstemp(path), "w");
  fputs(text, file);
  fclose(file);
  check("file", cuModuleLoad(&module, path), 0);
  check("of the file", cuModuleGetFunction(&f, module, "five"), 0);
  remove(path);
  CUtensorMap map;
  cuuint64_t dims[] = {64, 4}, strides[] = {128};
  cuuint32_t box[] = {64, 4}, steps[] = {1, 1};
  check("map", cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, (void *)p, dims, strides, box, steps,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE), 0);
  return 0;
}
static int memory() {
  int *managed, *pinned, *alias;
  cudaPointerAttributes attributes;
  check("no bytes", cudaMemcpy(x + n, y + n, 0, cudaMemcpyDeviceToDevice), 0);
  cudaMallocManaged(&managed, sizeof host);
  cudaHostAlloc(&pinned, sizeof host, cudaHostAllocMapped);
  for (int i = 0; i < n; ++i) pinned[i] = i;
  cudaHostGetDevicePointer(&alias, pinned, 0);
  scale<<<4, 256>>>(alias, managed, n);
  cudaDeviceSynchronize();
  check("managed", managed[999], 2997);
  cudaPointerGetAttributes(&attributes, managed);
  check("type", attributes.type, cudaMemoryTypeManaged);
  add_total<<<1, 10>>>();
  cudaDeviceSynchronize();
  check("total", total, 45);
  cudaFree(managed);
  cudaFreeHost(pinned);
  return 0;
}
static int timed() {
  cudaEvent_t start, end;
  cudaEventCreate(&start);
  cudaEventCreate(&end);
  float ms = 0;
  cudaEventRecord(start);
  for (int i = 0; i < 50; ++i) cudaMemset(x + n - 1, 0, 4), scale<<<4, 256>>>(x, y, n);
  cudaEventRecord(end);
  cudaEventSynchronize(end);
  cudaEventElapsedTime(&ms, start, end);
  return ms > 0 ? 0 : 1;
}
static int reset() {
  for (int i = 0; i < 20; ++i) {
    host[5] = 7 + i / 10;
    cudaMemcpy(x, host, sizeof host, cudaMemcpyHostToDevice);
    cudaMemset(y, 0, sizeof host);
    scale<<<4, 256>>>(x, y, n);
    int back[n];
    cudaMemcpy(back, y, sizeof back, cudaMemcpyDeviceToHost);
    check("behind a reset", back[5], 3 * host[5]);
  }
  return 0;
}
static int changed() {
  for (int i = 0; i < 3; ++i) scale<<<4, 256>>>(x, y, n);
  host[5] = 7;
  cudaMemcpy(x, host, sizeof host, cudaMemcpyHostToDevice);
  scale<<<4, 256>>>(x, y, n);
  cudaMemcpy(host, y, sizeof host, cudaMemcpyDeviceToHost);
  check("behind a copy", host[5], 21);
  int *managed;
  cudaMallocManaged(&managed, sizeof host);
  for (int i = 0; i < 4; ++i) {
    managed[0] = i / 3;
    scale<<<1, 1>>>(managed, y, 1);
    cudaDeviceSynchronize();
  }
  cudaMemcpy(host, y, 4, cudaMemcpyDeviceToHost);
  check("behind a write", host[0], 3);
  return 0;
}

int main(int argc, char **argv) {
  const char *name = argc > 1 ? argv[1] : "right";
  auto is = [&](const char *other) { return !strcmp(name, other); };
  printf("case %s\n", name);
  prepare();
  if (is("right")) scale<<<4, 256>>>(x, y, n), verify(3);
  if (is("bounds")) beyond<<<4, 256>>>(x, y, n), exit(0);
  if (is("race")) reversed<<<1, 64>>>(x, y, false);
  if (is("barrier")) reversed<<<1, 64>>>(x, y, true);
  if (is("unordered")) return streams(false);
  if (is("ordered")) return streams(true);
  if (is("halves")) return halves(0);
  if (is("overlap")) return halves(1);
  if (is("threads")) scale<<<1, 2048>>>(x, y, n);
  if (is("long copy")) cudaMemcpy(host, y, sizeof host + 4, cudaMemcpyDeviceToHost);
  if (is("chain")) {
    int *z;
    cudaMalloc(&z, n * sizeof *z);
    scale<<<8, 128>>>(x, z, n);
    scale<<<4, 256>>>(z, y, n);
  }
  if (is("permuted") || is("permuted, beyond")) {
    int *z;
    cudaMalloc(&z, n * sizeof *z);
    scale<<<4, 256>>>(x, y, n);
    permuted<<<3, 256>>>(y, z);
    if (is("permuted, beyond")) beyond<<<4, 256>>>(y, z, n);
  }
  if (is("printf")) speak<<<1, 64>>>(5);
  if (is("assert")) doubt<<<1, 64>>>(40), check("failure", cudaDeviceSynchronize(), cudaErrorAssert);
  if (is("graph")) return graph();
  if (is("nodes")) return nodes(true);
  if (is("no path")) return nodes(false);
  if (is("graph memory")) return graph_memory(by_nodes(), false) | graph_memory(by_capture(), false);
  if (is("parameters")) return parameters();
  if (is("launched twice")) return graph_memory(by_capture(), true);
  if (is("freed")) {
    const Left left = by_nodes();
    cudaGraphExec_t executable;
    cudaGraphInstantiate(&executable, left.graph, 0), cudaGraphLaunch(executable, 0);
    increment<<<1, 1>>>(left.b), increment<<<1, 1>>>(left.a);
  }
  if (is("pools")) return pools(true);
  if (is("early")) return pools(false);
  if (is("boxes")) return boxes();
  if (is("hidden")) return hidden();
  if (is("driver")) return driver();
  if (is("cooperative")) return cooperative();
  if (is("driver nodes")) return driver_nodes(true);
  if (is("driver no path")) return driver_nodes(false);
  if (is("memory")) return memory();
  if (is("timed")) return timed();
  if (is("reset")) return reset();
  if (is("changed")) return changed();
  if (is("exit code")) exit(3);
  if (is("abort")) beyond<<<4, 256>>>(x, y, n), abort();
  if (is("endless")) for (volatile int i = 0;; ++i) {}
  if (is("endless kernel")) cudaMemset(y, 0, 4), waiting<<<2, 32>>>(y), cudaDeviceSynchronize();
  if (is("wide box")) {
    CUtensorMap map;
    cuuint64_t extents[] = {1024, 8}, strides[] = {2048};
    cuuint32_t box[] = {512, 8}, steps[] = {1, 1};
    for (int i = 0; i < 2; ++i)
      cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, x, extents, strides, box, steps,
                             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                             CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  }
  if (is("long loop")) serial<<<1, 1>>>(y, 1100000), cudaDeviceSynchronize();
  if (is("circle")) circle<<<1, 1>>>(y, 1), cudaDeviceSynchronize();
  if (is("relay") || is("poll")) cudaMemset(x, 0, 4 * n), is("poll") ? poll<<<1, 32>>>(x, y) : relay<<<16, 32>>>(x, y);
  if (is("late flag")) {
    int *flag;
    cudaMallocManaged(&flag, 4);
    *flag = 0;
    poll<<<1, 32>>>(flag, y);
    *flag = 1;
    scale<<<4, 256>>>(y, x, n);  // what the kernel before did not write
    cudaDeviceSynchronize();
  }
  if (is("greedy")) for (size_t i = 0;; ++i) memset(malloc(1 << 26), 1, 1 << 26);
  // Processes that each take memory, or that share what their parent has.
  if (is("family") || is("greedy family")) {
    const size_t bytes = is("family") ? size_t(1) << 29 : 0;
    void *common = memset(malloc(bytes), 1, bytes);
    for (int i = 0; i < 4; ++i)
      if (!fork()) {
        if (!bytes) memset(malloc(1 << 29), 1, 1 << 29);
        sleep(bytes ? 1 : 30);
        _exit(common == nullptr);
      }
    while (wait(0) > 0) {}
  }
  if (is("callback")) {
    cudaLaunchHostFunc(0, add_ten, host);
    check("callback", host[0], 10);
  }
  if (is("unsupported")) {
    cudaTextureObject_t object = 0;
    check("texture", cudaCreateTextureObject(&object, 0, 0, 0), cudaErrorNotSupported);
  }
  return 0;
}
