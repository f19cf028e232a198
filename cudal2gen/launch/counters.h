// Holds the counters of kernels that add partial sums of a tile in device memory. A kernel finds its counters at zero and leaves them
// at zero, so they are set once, when the kernel is opened. Two launches that may run concurrently must not share counters: each
// stream, and each stream within each capture of a graph, has an array of its own, here called a block (no thread block). A launch
// that has a block neither allocates nor sets counters.
#ifndef CUDAL2GEN_COUNTERS_H
#define CUDAL2GEN_COUNTERS_H

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

namespace cudal2gen {

// The functions of the CUDA runtime that the counters need.
struct CounterRuntime {
  decltype(&cudaThreadExchangeStreamCaptureMode) capture_mode;
  decltype(&cudaStreamCreateWithFlags) stream_create;
  decltype(&cudaStreamSynchronize) stream_synchronize;
  decltype(&cudaStreamDestroy) stream_destroy;
  decltype(&cudaStreamGetId) stream_id;
  decltype(&cudaMemsetAsync) memset_async;
  cudaError_t (*malloc)(void**, size_t);
  decltype(&cudaFree) free;
};

// The blocks of one kernel. Streams have numbers that are never used again, so a destroyed stream keeps its block, and so does a
// capture, whose graph may be launched at any time. A launch that gets no block clears counters in the caller's workspace.
class CounterBlocks {
 public:
  // 256 KiB per kernel: programs use few streams, and a launch that adds partial sums has few tiles.
  static constexpr int kBlocks = 64, kCounters = 1024;
  static constexpr size_t kBytes = size_t(kBlocks) * kCounters * sizeof(unsigned);

  // Allocates all blocks, sets them to zero and waits for that. If there is no memory for them, `block_of` always returns null.
  cudaError_t open(CounterRuntime const& runtime) {
    // Relaxed, since another thread may be capturing a stream, which this does not use.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaError_t error = runtime.capture_mode(&mode);
    if (error) return error;
    if ((error = runtime.malloc(&memory_, kBytes)) == cudaSuccess) {
      error = clear_all(runtime);
    } else if (error == cudaErrorMemoryAllocation) {
      memory_ = nullptr;
      error = cudaSuccess;
    }
    cudaError_t const restored = runtime.capture_mode(&mode);
    return error ? error : restored;
  }

  // Frees the blocks. No launch may use them any more.
  cudaError_t close(CounterRuntime const& runtime) {
    void* const memory = memory_;
    memory_ = nullptr;
    return memory ? runtime.free(memory) : cudaSuccess;
  }

  // Returns the block of a stream within a capture (0: outside of captures), or null if the launch needs more counters than a block has
  // or all blocks are taken. `stream` and `capture` are the ids by which the CUDA runtime names a stream and a capture.
  unsigned* block_of(uint64_t stream, uint64_t capture, int64_t counters) {
    if (!memory_ || counters > kCounters) return nullptr;
    std::lock_guard<std::mutex> const guard(mutex_);
    auto const taken = blocks_.find({stream, capture});
    if (taken != blocks_.end()) return taken->second;
    if (blocks_.size() == kBlocks) return nullptr;
    return blocks_[{stream, capture}] = static_cast<unsigned*>(memory_) + blocks_.size() * kCounters;
  }

  // The memory of all blocks, kBytes long; null if there is none.
  void* memory() const { return memory_; }

 private:
  // Sets all counters to zero on a new stream that does not synchronise with others.
  cudaError_t clear_all(CounterRuntime const& runtime) {
    cudaStream_t stream;
    cudaError_t error = runtime.stream_create(&stream, cudaStreamNonBlocking);
    if (error) return error;
    if (!(error = runtime.memset_async(memory_, 0, kBytes, stream))) error = runtime.stream_synchronize(stream);
    cudaError_t const destroyed = runtime.stream_destroy(stream);
    return error ? error : destroyed;
  }

  void* memory_ = nullptr;
  std::mutex mutex_;
  std::map<std::pair<uint64_t, uint64_t>, unsigned*> blocks_;  // by stream and capture
};

}  // namespace cudal2gen

#endif
