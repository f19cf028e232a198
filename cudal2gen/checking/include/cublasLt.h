/* As cublas_v2.h. */
#pragma once
#include <cublas_v2.h>

typedef struct cublasLtContext *cublasLtHandle_t;

static inline cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) {
  *handle = (cublasLtHandle_t)1;
  return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasLtDestroy(cublasLtHandle_t) { return CUBLAS_STATUS_SUCCESS; }
CUDAL2GEN_PRODUCT(cublasLtMatmul)
