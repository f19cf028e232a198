// The C face of one published host function, and the streams that its runtime calls use.
//
// The published code launches on the default stream, which a CUDA graph cannot capture and which waits for other
// streams. The linker's --wrap leads its calls of the runtime through here. The default stream becomes the stream of the
// call in progress. So does a stream that the published code made, if it is the only one and has no attributes; calls
// on others are counted and unchanged. While the given stream is captured, a wait of the host, which changes nothing
// that the device does, only returns success. Everything else is as published.

#include <torch/extension.h>

#define WRAPPED(name, parameters)                    \
  extern "C" cudaError_t __real_##name parameters;   \
  extern "C" cudaError_t __wrap_##name parameters
#define EXPORTED extern "C" __attribute__((visibility("default")))

// PUBLISHED_FUNCTION: the published function's name.
void PUBLISHED_FUNCTION(torch::Tensor a, torch::Tensor b, torch::Tensor b_col_major, torch::Tensor c);

static cudaStream_t current;     // the stream of the call in progress
static cudaStream_t own_stream;  // the first stream, not yet destroyed, that the published code made and used
static bool has_attributes;      // whether it set a stream's attributes, such as what stays in the L2
static int elsewhere;            // calls on other streams during the call in progress

extern "C" cudaStream_t published_stream() { return current; }

extern "C" cudaError_t __real_cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus*);

static bool captured(cudaStream_t stream = current) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return __real_cudaStreamIsCapturing(stream, &status) == cudaSuccess && status == cudaStreamCaptureStatusActive;
}

static cudaStream_t redirected(cudaStream_t stream) {
  if (stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread) return current;
  if (stream == current) return current;
  if (own_stream == nullptr) own_stream = stream;
  // A stream that the published code captures itself is left alone.
  if (stream == own_stream && !has_attributes) return captured(own_stream) ? own_stream : current;
  ++elsewhere;
  return stream;
}

extern "C" cudaError_t __wrap_cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return __real_cudaStreamIsCapturing(redirected(stream), status);
}

WRAPPED(cudaStreamSetAttribute, (cudaStream_t stream, cudaStreamAttrID name, const cudaStreamAttrValue* value)) {
  has_attributes = true;
  return __real_cudaStreamSetAttribute(stream, name, value);
}

WRAPPED(cudaStreamDestroy, (cudaStream_t stream)) {
  if (stream == own_stream) own_stream = nullptr;
  return __real_cudaStreamDestroy(stream);
}

// Launches

WRAPPED(__cudaLaunchKernel, (void* kernel, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t stream)) {
  return __real___cudaLaunchKernel(kernel, grid, block, arguments, shared, redirected(stream));
}

WRAPPED(cudaLaunchKernel,
        (const void* kernel, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t stream)) {
  return __real_cudaLaunchKernel(kernel, grid, block, arguments, shared, redirected(stream));
}

WRAPPED(cudaLaunchCooperativeKernel,
        (const void* kernel, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t stream)) {
  return __real_cudaLaunchCooperativeKernel(kernel, grid, block, arguments, shared, redirected(stream));
}

WRAPPED(cudaLaunchKernelExC, (const cudaLaunchConfig_t* config, const void* kernel, void** arguments)) {
  cudaLaunchConfig_t redirected_config = *config;
  redirected_config.stream = redirected(config->stream);
  return __real_cudaLaunchKernelExC(&redirected_config, kernel, arguments);
}

WRAPPED(cudaGraphLaunch, (cudaGraphExec_t graph, cudaStream_t stream)) {
  return __real_cudaGraphLaunch(graph, redirected(stream));
}

// Memory

WRAPPED(cudaMemsetAsync, (void* target, int value, size_t bytes, cudaStream_t stream)) {
  return __real_cudaMemsetAsync(target, value, bytes, redirected(stream));
}

WRAPPED(cudaMemset, (void* target, int value, size_t bytes)) {
  return __real_cudaMemsetAsync(target, value, bytes, current);
}

WRAPPED(cudaMemcpyAsync, (void* target, const void* source, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream)) {
  return __real_cudaMemcpyAsync(target, source, bytes, kind, redirected(stream));
}

WRAPPED(cudaMallocAsync, (void** pointer, size_t bytes, cudaStream_t stream)) {
  return __real_cudaMallocAsync(pointer, bytes, redirected(stream));
}

WRAPPED(cudaFreeAsync, (void* pointer, cudaStream_t stream)) { return __real_cudaFreeAsync(pointer, redirected(stream)); }

// Waits

WRAPPED(cudaStreamSynchronize, (cudaStream_t stream)) {
  return captured() ? cudaSuccess : __real_cudaStreamSynchronize(redirected(stream));
}

WRAPPED(cudaDeviceSynchronize, ()) { return captured() ? cudaSuccess : __real_cudaDeviceSynchronize(); }

WRAPPED(cudaEventRecord, (cudaEvent_t event, cudaStream_t stream)) {
  return __real_cudaEventRecord(event, redirected(stream));
}

WRAPPED(cudaStreamWaitEvent, (cudaStream_t stream, cudaEvent_t event, unsigned flags)) {
  return __real_cudaStreamWaitEvent(redirected(stream), event, flags);
}

WRAPPED(cudaMemcpy, (void* target, const void* source, size_t bytes, cudaMemcpyKind kind)) {
  const cudaError_t code = __real_cudaMemcpyAsync(target, source, bytes, kind, current);
  return code != cudaSuccess || captured() ? code : __real_cudaStreamSynchronize(current);
}

// Enqueues one product on a stream. Returns an error's text, or null. b: (k, n); b_col_major: the same, stored (n, k).
EXPORTED const char* published_call(void* a, void* b, void* b_col_major, void* c, int64_t m, int64_t n, int64_t k,
                                    cudaStream_t stream) {
  static std::string fault;
  current = stream;
  elsewhere = 0;
  try {
    PUBLISHED_FUNCTION({a, m, k}, {b, k, n}, {b_col_major, k, n}, {c, m, n});
  } catch (std::exception const& error) {
    return (fault = error.what()).c_str();
  } catch (...) {
    return "an exception";
  }
  const cudaError_t code = cudaGetLastError();
  return code == cudaSuccess ? nullptr : cudaGetErrorString(code);
}

// Returns how many runtime calls of the last product used streams that were not redirected, or 1 more if it has set
// attributes of a stream.
EXPORTED int published_elsewhere() { return elsewhere + has_attributes; }

// Returns null if a CUDA graph can hold the product, else a text that says why not. Nothing is launched.
EXPORTED const char* published_capture(void* a, void* b, void* b_col_major, void* c, int64_t m, int64_t n, int64_t k,
                                       cudaStream_t stream) {
  static std::string fault;
  cudaGraph_t graph = nullptr;
  cudaError_t code = cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
  if (code != cudaSuccess) return cudaGetErrorString(code);
  const char* text = published_call(a, b, b_col_major, c, m, n, k, stream);
  fault = text == nullptr ? "" : text;
  code = cudaStreamEndCapture(stream, &graph);
  if (graph != nullptr) cudaGraphDestroy(graph);
  cudaGetLastError();  // clears the error of a capture that failed
  if (fault.empty() && code != cudaSuccess) fault = cudaGetErrorString(code);
  return fault.empty() ? nullptr : fault.c_str();
}
