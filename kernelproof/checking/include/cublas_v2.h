/* A substitute for cuBLAS's header, so that programs which include it compile where cuBLAS is not installed. Handles can
   be created and configured. Every product reports its name as unsupported and returns CUBLAS_STATUS_NOT_SUPPORTED. If a
   program's own -I finds the real header, that one is used instead. */
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <library_types.h>
#include <stdint.h>

extern "C" int kernelproof_unsupported(const char *name);

typedef enum { CUBLAS_STATUS_SUCCESS = 0, CUBLAS_STATUS_NOT_INITIALIZED = 1, CUBLAS_STATUS_NOT_SUPPORTED = 15 } cublasStatus_t;
typedef enum { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1, CUBLAS_OP_C = 2 } cublasOperation_t;
typedef enum { CUBLAS_DEFAULT_MATH = 0, CUBLAS_TENSOR_OP_MATH = 1, CUBLAS_PEDANTIC_MATH = 2, CUBLAS_TF32_TENSOR_OP_MATH = 3 } cublasMath_t;
typedef enum { CUBLAS_COMPUTE_16F = 64, CUBLAS_COMPUTE_32F = 68, CUBLAS_COMPUTE_32F_FAST_16F = 74, CUBLAS_COMPUTE_32F_FAST_16BF = 75, CUBLAS_COMPUTE_32F_FAST_TF32 = 77, CUBLAS_COMPUTE_64F = 70 } cublasComputeType_t;
typedef enum { CUBLAS_GEMM_DEFAULT = -1, CUBLAS_GEMM_DEFAULT_TENSOR_OP = 99 } cublasGemmAlgo_t;
typedef enum { CUBLAS_POINTER_MODE_HOST = 0, CUBLAS_POINTER_MODE_DEVICE = 1 } cublasPointerMode_t;
typedef struct cublasContext *cublasHandle_t;

static inline cublasStatus_t cublasCreate(cublasHandle_t *handle) {
  *handle = (cublasHandle_t)1;
  return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasDestroy(cublasHandle_t) { return CUBLAS_STATUS_SUCCESS; }
static inline cublasStatus_t cublasSetMathMode(cublasHandle_t, cublasMath_t) { return CUBLAS_STATUS_SUCCESS; }
static inline cublasStatus_t cublasSetStream(cublasHandle_t, cudaStream_t) { return CUBLAS_STATUS_SUCCESS; }
static inline cublasStatus_t cublasSetPointerMode(cublasHandle_t, cublasPointerMode_t) { return CUBLAS_STATUS_SUCCESS; }
static inline const char *cublasGetStatusString(cublasStatus_t status) { return status ? "not supported" : "success"; }

#define KERNELPROOF_PRODUCT(name)                                                        \
  template <typename... T>                                                             \
  static inline cublasStatus_t name(T...) {                                            \
    return kernelproof_unsupported(#name) ? CUBLAS_STATUS_NOT_SUPPORTED : CUBLAS_STATUS_SUCCESS; \
  }
KERNELPROOF_PRODUCT(cublasSgemm)
KERNELPROOF_PRODUCT(cublasDgemm)
KERNELPROOF_PRODUCT(cublasHgemm)
KERNELPROOF_PRODUCT(cublasGemmEx)
KERNELPROOF_PRODUCT(cublasSgemv)
KERNELPROOF_PRODUCT(cublasSgemmStridedBatched)
KERNELPROOF_PRODUCT(cublasHgemmStridedBatched)
KERNELPROOF_PRODUCT(cublasGemmStridedBatchedEx)
KERNELPROOF_PRODUCT(cublasGemmBatchedEx)
KERNELPROOF_PRODUCT(cublasSgemmBatched)
