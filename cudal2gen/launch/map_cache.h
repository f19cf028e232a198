// Caches the tensor maps of operands between launches.
#ifndef CUDAL2GEN_MAP_CACHE_H
#define CUDAL2GEN_MAP_CACHE_H

#include "launch.h"

#include <cuda.h>

#include <array>
#include <cstdint>
#include <map>
#include <mutex>

namespace cudal2gen {

// Finds the tensor map of an operand, or has the driver encode it. Encoding takes a microsecond, so a map is kept for later calls with the
// same operands. The key has everything that the map depends on: address, columns, rows, leading dimension, box, type, and for a batch the
// number of matrices and the elements from one to the next. The cache is emptied when it is full, so its memory is bounded.
class MapCache {
 public:
  using Key = std::array<uint64_t, 9>;
  decltype(&cuTensorMapEncodeTiled) encode = nullptr;  // the driver's function, set before the first `find`

  // Stores the map of a matrix of so many rows, or of `depth` matrices, `stride` elements apart, if depth > 0. Returns false if the driver
  // refuses to encode it.
  bool find(Matrix const& matrix, int64_t rows, int depth, int64_t stride, Box box, Element const& element, CUtensorMap& map) {
    Key const key = {reinterpret_cast<uint64_t>(matrix.address), uint64_t(matrix.cols), uint64_t(rows), uint64_t(matrix.ld),
                     uint64_t(box.cols), uint64_t(box.rows), uint64_t(element.map_type), uint64_t(depth),
                     uint64_t(stride)};
    std::lock_guard<std::mutex> const guard(mutex_);
    auto kept = maps_.find(key);
    if (kept == maps_.end()) {
      cuuint64_t const extents[] = {cuuint64_t(matrix.cols), cuuint64_t(rows), cuuint64_t(depth)};
      cuuint64_t const strides[] = {cuuint64_t(matrix.ld * element.bytes), cuuint64_t(stride * element.bytes)};
      cuuint32_t const sizes[] = {cuuint32_t(box.cols), cuuint32_t(box.rows), 1}, steps[] = {1, 1, 1};
      int const row_bytes = box.cols * element.bytes;
      CUtensorMapSwizzle const swizzle = row_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                         : row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                           : CU_TENSOR_MAP_SWIZZLE_32B;
      if (encode(&map, element.map_type, depth ? 3 : 2, const_cast<void*>(matrix.address), extents, strides, sizes, steps,
                 CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS)
        return false;
      if (maps_.size() >= kMostMaps) maps_.clear();
      kept = maps_.emplace(key, map).first;
    }
    map = kept->second;
    return true;
  }

 private:
  static constexpr size_t kMostMaps = 256;  // of 128 bytes each: 32 KiB of maps
  std::mutex mutex_;
  std::map<Key, CUtensorMap> maps_;
};

}  // namespace cudal2gen

#endif
