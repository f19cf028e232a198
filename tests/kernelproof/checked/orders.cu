// Host code and work in flight, many cases: argv[1] chooses. Comments mark the lines that a finding of a case names:
// "here CASE" where the rule is broken, "there CASE" where the other side was given.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda.h>
#include <cuda_runtime.h>
#include <map>
#include <string>
#include <thread>
#include <vector>

static const int n = 1000, bytes = 4 * n;
__managed__ int counts[4];
__device__ int variable;

__global__ void fill(int *x, int from, int to) {
  int i = from + blockIdx.x * blockDim.x + threadIdx.x;
  if (i < to) x[i] = i;
}
__global__ void copy(const int *x, int *y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i];
}
__global__ void count() { atomicAdd(&counts[threadIdx.x % 4], 1); }
__global__ void produce(int *data, volatile int *flag) {
  data[threadIdx.x] = threadIdx.x;
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) *flag = 1;
}
template <class T> __global__ void twice(T *x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] = 2 * x[i];
}

// What every case has: device memory d and e, pinned memory h, managed memory m, two streams and an event.
static int *d, *e, *h, *m;
static cudaStream_t s, t, free_running;
static cudaEvent_t event;
static volatile int sink;

static void fill_all(int *x, cudaStream_t on = 0) { fill<<<4, 256, 0, on>>>(x, 0, n); }
static int sum(const int *x, int count = n) {
  int total = 0;
  for (int i = 0; i < count; ++i) total += x[i];
  return total;
}
static void must(int got, int expected) {
  if (got != expected) printf("%d, not %d\n", got, expected), exit(9);
}
static const int total_of_all = n * (n - 1) / 2;

// Two branches of a captured graph fill parts of d; "joined": the second waits for the first.
static cudaGraphExec_t branches(int first, int second, bool joined) {
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  cudaEvent_t back;
  cudaEventCreate(&back);
  cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal);
  if (!joined) cudaEventRecord(event, s);
  fill<<<4, 256, 0, s>>>(d, 0, first);  // there branches; there late branch
  if (joined) cudaEventRecord(event, s);
  cudaStreamWaitEvent(t, event, 0);
  fill<<<4, 256, 0, t>>>(d, second, n);  // here branches; here late branch
  cudaEventRecord(back, t);
  cudaStreamWaitEvent(s, back, 0);
  cudaStreamEndCapture(s, &graph);
  cudaGraphInstantiate(&executable, graph, 0);
  return executable;
}
static void sum_into(void *p) { *(int *)p = sum(h); }  // here host function elsewhere
static void CUDART_CB sum_callback(cudaStream_t, cudaError_t, void *p) { *(int *)p = sum(h); }

static std::map<std::string, void (*)()> cases = {
    // --- wrong ---
    {"managed read", [] {
       fill_all(m);  // there managed read
       sink = sum(m);  // here managed read
     }},
    {"managed write", [] {
       copy<<<4, 256>>>(m, d, n);  // there managed write
       m[3] = 5;  // here managed write
       cudaDeviceSynchronize();
     }},
    {"managed variable", [] {
       count<<<1, 64>>>();  // there managed variable
       sink = counts[1];  // here managed variable
     }},
    {"mapped result", [] {
       int *on_device, *mapped;
       cudaHostAlloc(&mapped, bytes, cudaHostAllocMapped);
       cudaHostGetDevicePointer(&on_device, mapped, 0);
       fill_all(on_device, s);  // there mapped result
       cudaStreamSynchronize(t);
       sink = mapped[n - 1];  // here mapped result
       cudaDeviceSynchronize();
       cudaFreeHost(mapped);
     }},
    {"pinned read", [] {
       cudaMemcpyAsync(h, d, bytes, cudaMemcpyDeviceToHost, s);  // there pinned read
       sink = h[7];  // here pinned read
       cudaStreamSynchronize(s);
     }},
    {"pinned read before event", [] {
       cudaEventRecord(event, s);
       cudaMemcpyAsync(h, d, bytes, cudaMemcpyDeviceToHost, s);  // there pinned read before event
       cudaEventSynchronize(event);
       sink = h[7];  // here pinned read before event
     }},
    {"pinned write", [] {
       cudaMemcpyAsync(h, d, bytes, cudaMemcpyDeviceToHost, s);  // there pinned write
       h[9] = 1;  // here pinned write
       cudaStreamSynchronize(s);
     }},
    {"host function elsewhere", [] {
       static int result;
       cudaMemcpyAsync(h, d, bytes, cudaMemcpyDeviceToHost, s);  // there host function elsewhere
       cudaLaunchHostFunc(t, sum_into, &result);
       cudaStreamSynchronize(s);
     }},
    {"pinned read under a host function", [] {
       static int result;
       cudaMemcpyAsync(h, d, bytes, cudaMemcpyDeviceToHost, s);  // there pinned read under a host function
       cudaLaunchHostFunc(s, sum_into, &result);
       sink = h[7];  // here pinned read under a host function
       cudaStreamSynchronize(s);
     }},
    {"source", [] {
       cudaMemcpyAsync(d, h, bytes, cudaMemcpyHostToDevice, s);  // there source
       for (int i = 0; i < n; ++i)
         h[i] = i;  // here source
       cudaStreamSynchronize(s);
     }},
    {"source by memset", [] {
       cudaMemcpyAsync(d, h, bytes, cudaMemcpyHostToDevice, s);  // there source by memset
       memset(h, 0, bytes);  // here source by memset
       cudaStreamSynchronize(s);
     }},
    {"source of the last round", [] {
       for (int i = 0; i < 3; ++i) {
         h[0] = i;  // here source of the last round
         cudaMemcpyAsync(d, h, bytes, cudaMemcpyHostToDevice, s);  // there source of the last round
         if (i == 0) cudaStreamSynchronize(s);
       }
       cudaStreamSynchronize(s);
     }},
    {"half", [] {
       fill<<<2, 256, 0, s>>>(m, 0, n / 2);
       fill<<<2, 256, 0, t>>>(m, n / 2, n);  // there half
       cudaStreamSynchronize(s);
       sink = sum(m, n / 2);
       sink = sum(m + n / 2, n / 2);  // in sum
     }},
    {"fill", [] {
       cudaMemsetAsync(m, 0, bytes, s);  // there fill
       sink = m[0];  // here fill
     }},
    {"copy on the device", [] {
       fill_all(m);  // there copy on the device
       cudaMemcpy(d, e, bytes, cudaMemcpyDeviceToDevice);
       sink = m[1];  // here copy on the device
     }},
    {"memset of the device", [] {
       fill_all(m);  // there memset of the device
       cudaMemset(d, 0, bytes);
       sink = m[1];  // here memset of the device
     }},
    {"other stream", [] {
       fill_all(m, free_running);  // there other stream
       cudaStreamSynchronize(0);
       sink = m[1];  // here other stream
     }},
    {"another thread", [] {
       fill_all(m, s);  // there another thread
       std::thread([] {
         sink = m[1];  // here another thread
       }).join();
     }},
    {"graph result", [] {
       cudaGraph_t graph;
       cudaGraphExec_t executable;
       cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal);
       cudaMemcpyAsync(h, d, bytes, cudaMemcpyDeviceToHost, s);  // there graph result
       cudaStreamEndCapture(s, &graph);
       cudaGraphInstantiate(&executable, graph, 0);
       cudaGraphLaunch(executable, s);
       sink = h[0];  // here graph result
     }},
    {"repeated launch", [] {
       for (int i = 0; i < 4; ++i) {
         fill_all(m);  // there repeated launch
         if (i < 3) cudaDeviceSynchronize();
         sink = m[1];  // here repeated launch
       }
     }},
    {"branches", [] { cudaGraphLaunch(branches(600, 500, false), s); }},
    {"late branch", [] {
       cudaGraphExec_t right = branches(500, 500, false), wrong = branches(1, 0, false);
       cudaGraphLaunch(right, s);
       cudaStreamSynchronize(s);
       cudaGraphLaunch(wrong, t);
     }},
    {"device read", [] {
       fill_all(d);
       cudaDeviceSynchronize();
       must(sum(d), total_of_all);  // in sum
     }},
    {"device write", [] {
       d[n - 1] = 1;  // here device write
       cudaDeviceSynchronize();
     }},
    {"device by driver", [] {
       CUdeviceptr p;
       cuMemAlloc(&p, 64);
       *(int *)p = 1;  // here device by driver
       cuMemFree(p);
     }},
    {"device copied by host", [] {
       std::vector<int> own(n);
       memcpy(own.data(), d, bytes);  // here device copied by host
     }},
    {"device variable", [] {
       int *p;
       cudaGetSymbolAddress((void **)&p, variable);
       sink = *p;  // here device variable
     }},
    {"beyond pinned", [] {
       char *pages;
       cudaMallocHost(&pages, 8192);
       sink = pages[8192];  // here beyond pinned
       cudaFreeHost(pages);
     }},
    {"freed twice", [] {
       int *p;
       cudaMalloc(&p, 400);  // made freed twice
       cudaFree(p);  // freed freed twice
       cudaFree(p);  // here freed twice
     }},
    {"pinned freed twice", [] {
       int *p;
       cudaMallocHost((void **)&p, 400);  // made pinned freed twice
       cudaFreeHost(p);  // freed pinned freed twice
       cudaFreeHost(p);  // here pinned freed twice
     }},
    {"freed in order twice", [] {
       int *p;
       cudaMallocAsync(&p, 400, s);  // made freed in order twice
       cudaFreeAsync(p, s);  // freed freed in order twice
       cudaFreeAsync(p, s);  // here freed in order twice
     }},
    {"wrong free", [] { cudaFree(h); }},  // here wrong free
    {"wrong free of the host", [] { cudaFreeHost(d); }},  // here wrong free of the host
    {"inner free", [] { cudaFree(d + 10); }},  // here inner free
    {"foreign free", [] { cudaFree(malloc(100)); }},  // here foreign free
    {"freed, launched", [] {
       int *p;
       cudaMalloc(&p, bytes);  // made freed, launched
       cudaFree(p);  // freed freed, launched
       fill_all(p);
       cudaDeviceSynchronize();
     }},
    {"freed, copied", [] {
       int *p, own;
       cudaMalloc(&p, bytes);  // made freed, copied
       cudaFree(p);  // freed freed, copied
       cudaMemcpy(&own, p + 3, 4, cudaMemcpyDeviceToHost);  // here freed, copied
     }},
    {"freed, set", [] {
       int *p;
       cudaMallocManaged(&p, bytes);  // made freed, set
       cudaFree(p);  // freed freed, set
       cudaMemset(p, 0, bytes);  // here freed, set
     }},
    {"freed, read by host", [] {
       int *p;
       cudaMallocHost(&p, bytes);  // made freed, read by host
       cudaFreeHost(p);  // freed freed, read by host
       sink = p[1];  // here freed, read by host
     }},
    {"to the host", [] { cudaMemcpy(d, h, bytes, cudaMemcpyDeviceToHost); }},  // here to the host
    {"from the host", [] {
       std::vector<int> own(n);
       cudaMemcpy(own.data(), d, bytes, cudaMemcpyHostToDevice);  // here from the host
     }},
    {"on the device", [] {
       std::vector<int> own(n);
       cudaMemcpy(d, own.data(), bytes, cudaMemcpyDeviceToDevice);  // here on the device
     }},
    {"between hosts", [] { cudaMemcpyAsync(h, d, bytes, cudaMemcpyHostToHost, s); }},  // here between hosts

    {"own memory", [] {
       std::vector<int> own(n);
       cudaMemcpyAsync(own.data(), d, bytes, cudaMemcpyDeviceToHost, s);  // there own memory
       sink = own[3];  // here own memory
       cudaStreamSynchronize(s);
     }},
    {"own number", [] {
       int *own = new int;
       cudaMemcpyAsync(own, d + 5, 4, cudaMemcpyDeviceToHost);  // there own number
       sink = *own;  // here own number
       cudaDeviceSynchronize();
       delete own;
     }},
    {"own half", [] {
       std::vector<int> own(n);
       cudaMemcpyAsync(own.data(), d, bytes / 2, cudaMemcpyDeviceToHost, s);  // there own half
       for (int i = n / 2; i < n; ++i) own[i] = i;
       own[n / 2 - 1] = 1;  // here own half
       cudaStreamSynchronize(s);
     }},
    {"own memory freed", [] {
       int *own = (int *)malloc(bytes);
       cudaMemcpyAsync(own, d, bytes, cudaMemcpyDeviceToHost, s);  // there own memory freed
       free(own);  // here own memory freed
       cudaStreamSynchronize(s);
     }},
    {"registered source", [] {
       std::vector<int> own(n);
       cudaHostRegister(own.data(), bytes, cudaHostRegisterDefault);
       cudaMemcpyAsync(d, own.data(), bytes, cudaMemcpyHostToDevice, s);  // there registered source
       own[3] = 1;  // here registered source
       cudaStreamSynchronize(s);
     }},
    {"file into pinned", [] {
       int *large;
       cudaMallocHost(&large, 1 << 20);
       FILE *file = fopen("/dev/zero", "rb");
       cudaMemcpyAsync(d, large, bytes, cudaMemcpyHostToDevice, s);  // there file into pinned
       sink = fread(large, 1, 1 << 20, file);  // here file into pinned
       cudaStreamSynchronize(s);
       fclose(file);
       cudaFreeHost(large);
     }},
    {"file from device", [] {
       FILE *file = fopen("/dev/null", "wb");
       sink = fwrite(d, 1, bytes, file);  // here file from device
       fclose(file);
     }},

    // --- right ---
    {"r managed", [] {
       fill_all(m);
       cudaDeviceSynchronize();
       must(sum(m), total_of_all);
       m[0] = 5;
       twice<<<4, 256, 0, s>>>(m, n);
       cudaStreamSynchronize(s);
       must(sum(m), 2 * total_of_all + 10);
     }},
    {"r managed variable", [] {
       counts[1] = 3;
       count<<<1, 64>>>();
       cudaDeviceSynchronize();
       must(counts[1], 19);
     }},
    {"r managed, read twice", [] {
       m[1] = 7;
       copy<<<1, 32>>>(m, d, 2);
       must(m[1], 7);
       cudaDeviceSynchronize();
     }},
    {"r mapped", [] {
       int *on_device, *mapped;
       cudaHostAlloc(&mapped, bytes, cudaHostAllocMapped);
       cudaHostGetDevicePointer(&on_device, mapped, 0);
       fill_all(on_device);
       cudaDeviceSynchronize();
       must(sum(mapped), total_of_all);
       cudaFreeHost(mapped);
     }},
    {"r event", [] {
       fill_all(d, s);
       cudaMemcpyAsync(h, d, bytes, cudaMemcpyDeviceToHost, s);
       cudaEventRecord(event, s);
       cudaEventSynchronize(event);
       must(sum(h), total_of_all);
     }},
    {"r query", [] {
       cudaMemcpyAsync(h, d, bytes, cudaMemcpyDeviceToHost, s);
       while (cudaStreamQuery(s) == cudaErrorNotReady) {}
       sink = h[0];
     }},
    {"r event of another stream", [] {
       fill_all(d, s);
       cudaEventRecord(event, s);
       cudaStreamWaitEvent(free_running, event, 0);
       cudaMemcpyAsync(h, d, bytes, cudaMemcpyDeviceToHost, free_running);
       cudaStreamSynchronize(free_running);
       must(sum(h), total_of_all);
     }},
    {"r blocking copy", [] {
       fill_all(m);
       cudaMemcpy(h, m, bytes, cudaMemcpyDefault);
       must(sum(h) + sum(m), 2 * total_of_all);
     }},
    {"r blocking copy to the device", [] {
       for (int i = 0; i < n; ++i) h[i] = i;
       cudaMemcpy(d, h, bytes, cudaMemcpyHostToDevice);
       h[0] = 99;
       std::vector<int> own(n);
       cudaMemcpy(own.data(), d, bytes, cudaMemcpyDeviceToHost);
       must(sum(own.data()), total_of_all);
     }},
    {"r legacy stream", [] {
       fill_all(m, s);
       fill<<<1, 1>>>(d, 0, 1);
       cudaStreamSynchronize(0);
       must(sum(m), total_of_all);
     }},
    {"r halves", [] {
       fill<<<2, 256, 0, s>>>(m, 0, n / 2);
       fill<<<2, 256, 0, t>>>(m, n / 2, n);
       cudaStreamSynchronize(s);
       must(m[n / 2 - 1], n / 2 - 1);
       cudaStreamSynchronize(t);
       must(sum(m), total_of_all);
     }},
    {"r host's own part", [] {
       fill<<<2, 256, 0, s>>>(m, 0, n / 2);
       for (int i = n / 2; i < n; ++i) m[i] = i;
       cudaStreamSynchronize(s);
       must(sum(m), total_of_all);
     }},
    {"r two buffers", [] {
       int *buffers[2];
       cudaEvent_t done[2];
       for (int k = 0; k < 2; ++k) cudaMallocHost(&buffers[k], bytes), cudaEventCreate(&done[k]);
       for (int i = 0; i < 6; ++i) {
         cudaEventSynchronize(done[i % 2]);
         for (int k = 0; k < n; ++k) buffers[i % 2][k] = i * k;
         cudaMemcpyAsync(d, buffers[i % 2], bytes, cudaMemcpyHostToDevice, s);
         cudaEventRecord(done[i % 2], s);
       }
       cudaStreamSynchronize(s);
       for (int *buffer : buffers) cudaFreeHost(buffer);
     }},
    {"r prefetch", [] {
       cudaMemLocation location = {cudaMemLocationTypeDevice, 0};
       cudaMemAdvise(m, bytes, cudaMemAdviseSetReadMostly, location);
       cudaMemPrefetchAsync(m, bytes, location, 0, s);
       fill_all(m, s);
       cudaStreamSynchronize(s);
       must(sum(m), total_of_all);
     }},
    {"r pools", [] {
       int *p;
       cudaMallocAsync(&p, bytes, s);
       fill_all(p, s);
       cudaMemcpyAsync(h, p, bytes, cudaMemcpyDeviceToHost, s);
       cudaFreeAsync(p, s);
       cudaStreamSynchronize(s);
       must(sum(h), total_of_all);
       cudaMallocAsync(&p, bytes, s);
       cudaStreamSynchronize(s);
       cudaFree(p);
       cudaMalloc(&p, bytes);
       cudaFreeAsync(p, s);
     }},
    {"r registered", [] {
       std::vector<int> own(n);
       cudaHostRegister(own.data(), bytes, cudaHostRegisterDefault);
       fill_all(d, s);
       cudaMemcpyAsync(own.data(), d, bytes, cudaMemcpyDeviceToHost, s);
       cudaStreamSynchronize(s);
       must(sum(own.data()), total_of_all);
       cudaHostUnregister(own.data());
     }},
    {"r graph", [] {
       cudaGraphLaunch(branches(500, 500, false), s);
       cudaMemcpyAsync(h, d, bytes, cudaMemcpyDeviceToHost, s);
       cudaStreamSynchronize(s);
       must(sum(h), total_of_all);
     }},
    {"r joined branches", [] {
       cudaGraphExec_t graph = branches(600, 400, true);
       for (int i = 0; i < 3; ++i) cudaGraphLaunch(graph, s);
       cudaStreamSynchronize(s);
     }},
    {"r host function", [] {
       static int result;
       fill_all(d, s);
       cudaMemcpyAsync(h, d, bytes, cudaMemcpyDeviceToHost, s);
       cudaLaunchHostFunc(s, sum_into, &result);
       cudaStreamSynchronize(s);
       must(result, total_of_all);
     }},
    {"r host function behind an event", [] {
       static int result;
       fill_all(d, s);
       cudaMemcpyAsync(h, d, bytes, cudaMemcpyDeviceToHost, s);
       cudaEventRecord(event, s);
       cudaStreamWaitEvent(t, event, 0);
       cudaLaunchHostFunc(t, sum_into, &result);
       cudaStreamSynchronize(t);
       must(result, total_of_all);
       must(sum(h), total_of_all);
     }},
    {"r host function on own memory", [] {
       static std::vector<int> own(1 << 16);
       static int result;
       fill_all(d, s);
       cudaMemcpyAsync(own.data(), d, bytes, cudaMemcpyDeviceToHost, s);
       cudaLaunchHostFunc(s, [](void *p) { *(int *)p = sum(own.data()); }, &result);
       cudaStreamSynchronize(s);
       must(result, total_of_all);
     }},
    {"r callback", [] {
       static int result;
       fill_all(d, s);
       cudaMemcpyAsync(h, d, bytes, cudaMemcpyDeviceToHost, s);
       cudaStreamAddCallback(s, sum_callback, &result, 0);
       cudaStreamSynchronize(s);
       must(result, total_of_all);
     }},
    {"r threads", [] {
       std::vector<std::thread> threads;
       for (int k = 0; k < 3; ++k)
         threads.emplace_back([k] {
           int *own, *pinned;
           cudaStream_t mine;
           cudaStreamCreateWithFlags(&mine, cudaStreamNonBlocking);
           cudaMalloc(&own, bytes);
           cudaMallocHost(&pinned, bytes);
           for (int i = 0; i < 3; ++i) {
             fill_all(own, mine);
             cudaMemcpyAsync(pinned, own, bytes, cudaMemcpyDeviceToHost, mine);
             cudaStreamSynchronize(mine);
             must(sum(pinned), total_of_all);
           }
           cudaFree(own);
           cudaFreeHost(pinned);
         });
       for (auto &thread : threads) thread.join();
     }},
    {"r one thread waits", [] {
       fill_all(m, s);
       std::atomic<bool> ready{false};
       std::thread waiter([&] { cudaStreamSynchronize(s), ready = true; });
       while (!ready) {}
       must(sum(m), total_of_all);
       waiter.join();
     }},
    {"r freed while busy", [] {
       int *p;
       cudaMalloc(&p, bytes);
       fill_all(p, s);
       fill_all(m, s);
       cudaFree(p);
       cudaFree(nullptr);
       cudaFreeHost(nullptr);
       cudaStreamSynchronize(s);
       must(sum(m), total_of_all);
     }},
    {"r pageable source", [] {
       for (int i = 0; i < 3; ++i) {
         int value = i;
         cudaMemcpyAsync(d + i, &value, 4, cudaMemcpyHostToDevice, s);
       }
       cudaMemcpyAsync(h, d, 12, cudaMemcpyDeviceToHost, s);
       cudaStreamSynchronize(s);
       must(sum(h, 3), 3);
     }},
    {"r symbols", [] {
       int value = 5, back = 0;
       cudaMemcpyToSymbol(variable, &value, 4);
       value = 6;
       cudaMemcpyFromSymbol(&back, variable, 4);
       must(back, 5);
     }},
    {"r own memory", [] {
       std::vector<int> own(n);
       for (int i = 0; i < 3; ++i) {
         own[0] = i;
         cudaMemcpyAsync(d, own.data(), bytes, cudaMemcpyHostToDevice, s);
         own[0] = 7;
         cudaMemcpyAsync(own.data(), d, bytes, cudaMemcpyDeviceToHost, s);
         cudaStreamSynchronize(s);
         must(own[0], i);
       }
     }},
    {"r own half", [] {
       std::vector<int> own(n);
       fill_all(d, s);
       cudaMemcpyAsync(own.data(), d, bytes / 2, cudaMemcpyDeviceToHost, s);
       for (int i = n / 2; i < n; ++i) own[i] = i;
       must(own[n / 2], n / 2);
       cudaStreamSynchronize(s);
       must(sum(own.data()), total_of_all);
     }},
    {"r stack", [] {
       int own[n], number;
       fill_all(d, s);
       cudaMemcpyAsync(own, d, bytes, cudaMemcpyDeviceToHost, s);
       cudaMemcpyAsync(&number, d + 5, 4, cudaMemcpyDeviceToHost, s);
       cudaStreamSynchronize(s);
       must(sum(own) + number, total_of_all + 5);
     }},
    {"r file beside", [] {
       int *large;
       const int count = 1 << 18;
       cudaMallocManaged(&large, 4 * count);
       FILE *file = fopen("/dev/zero", "rb");
       fill<<<1, 256, 0, s>>>(large, 0, 100);
       must(fread(large + 100, 4, count - 100, file), count - 100);
       cudaStreamSynchronize(s);
       must(sum(large, count), 4950);
       fclose(file);
       cudaFree(large);
     }},
    {"r file", [] {
       FILE *file = tmpfile();
       fill<<<1, 256, 0, s>>>(m, 0, 100);
       for (int i = 100; i < n; ++i) m[i] = i;
       must(fwrite(m + 100, 4, n - 100, file), n - 100);
       cudaStreamSynchronize(s);
       rewind(file);
       must(fread(m + 100, 4, n - 100, file), n - 100);
       must(sum(m), total_of_all);
       fclose(file);
     }},
    {"r fork of a stream's work", [] {
       fill_all(d, s);
       cudaEventRecord(event, s);
       cudaStreamWaitEvent(t, event, 0);
       copy<<<4, 256, 0, t>>>(d, m, n);
       cudaEventRecord(event, t);
       while (cudaEventQuery(event) != cudaSuccess) {}
       must(sum(m), total_of_all);
     }},
    {"r two directions", [] {
       cudaMemcpy(h, d, bytes, cudaMemcpyDefault);
       cudaMemcpy(h, h + n / 2, bytes / 2, cudaMemcpyHostToHost);
       cudaMemcpy(m, h, bytes, cudaMemcpyHostToDevice);
       cudaMemcpy(h, m, bytes, cudaMemcpyDeviceToHost);
       cudaMemcpy(m, h, bytes, cudaMemcpyHostToHost);
       cudaMemcpy(d, m, bytes, cudaMemcpyDeviceToDevice);
     }},
    {"r reset", [] {
       fill_all(m);
       cudaDeviceSynchronize();
       must(sum(m), total_of_all);
       cudaDeviceReset();
       exit(0);
     }},

    // --- not decided ---
    {"poll", [] {
       int *data = h, *flag = m;
       flag[0] = 0;
       produce<<<1, 32>>>(data, flag);
       while (!*(volatile int *)flag) {}
       must(data[5], 5);
       cudaDeviceSynchronize();
     }},
    {"leak", [] {
       int *p;
       cudaMalloc(&p, 100);  // made leak
     }},
};

int main(int argc, char **argv) {
  if (argc < 2) {
    for (auto &[name, run] : cases) printf("%s\n", name.c_str());
    return 0;
  }
  cudaMalloc(&d, bytes);
  cudaMalloc(&e, bytes);
  cudaMallocHost(&h, bytes);
  cudaMallocManaged(&m, bytes);
  cudaStreamCreate(&s);
  cudaStreamCreate(&t);
  cudaStreamCreateWithFlags(&free_running, cudaStreamNonBlocking);
  cudaEventCreate(&event);
  cudaMemset(d, 0, bytes);
  cudaMemset(e, 0, bytes);
  memset(h, 0, bytes);
  memset(m, 0, bytes);
  cases.at(argv[1])();
  cudaFree(d);
  cudaFree(e);
  cudaFreeHost(h);
  cudaFree(m);
}
