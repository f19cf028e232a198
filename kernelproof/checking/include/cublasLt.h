/* A substitute for cuBLASLt's header, with the same behaviour as the one in cublas_v2.h. */
#pragma once
#include <cublas_v2.h>

typedef struct cublasLtContext *cublasLtHandle_t;

static inline cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) {
  *handle = (cublasLtHandle_t)1;
  return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasLtDestroy(cublasLtHandle_t) { return CUBLAS_STATUS_SUCCESS; }
KERNELPROOF_PRODUCT(cublasLtMatmul)

/* Types and calls that prepare a product. The first of these calls already returns "not supported". */
typedef struct cublasLtMatmulDescOpaque *cublasLtMatmulDesc_t;
typedef struct cublasLtMatrixLayoutOpaque *cublasLtMatrixLayout_t;
typedef struct cublasLtMatmulPreferenceOpaque *cublasLtMatmulPreference_t;
typedef struct { uint64_t data[8]; } cublasLtMatmulAlgo_t;
typedef struct { cublasLtMatmulAlgo_t algo; size_t workspaceSize; cublasStatus_t state; float wavesCount; int reserved[4]; } cublasLtMatmulHeuristicResult_t;
typedef enum { CUBLASLT_MATMUL_DESC_TRANSA = 3, CUBLASLT_MATMUL_DESC_TRANSB = 4, CUBLASLT_MATMUL_DESC_EPILOGUE = 7, CUBLASLT_MATMUL_DESC_BIAS_POINTER = 8 } cublasLtMatmulDescAttributes_t;
typedef enum { CUBLASLT_EPILOGUE_DEFAULT = 1, CUBLASLT_EPILOGUE_RELU = 2, CUBLASLT_EPILOGUE_BIAS = 4, CUBLASLT_EPILOGUE_GELU = 32, CUBLASLT_EPILOGUE_GELU_BIAS = 36 } cublasLtEpilogue_t;
typedef enum { CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1 } cublasLtMatmulPreferenceAttributes_t;
KERNELPROOF_PRODUCT(cublasLtMatmulDescCreate)
KERNELPROOF_PRODUCT(cublasLtMatmulDescSetAttribute)
KERNELPROOF_PRODUCT(cublasLtMatmulDescDestroy)
KERNELPROOF_PRODUCT(cublasLtMatrixLayoutCreate)
KERNELPROOF_PRODUCT(cublasLtMatrixLayoutSetAttribute)
KERNELPROOF_PRODUCT(cublasLtMatrixLayoutDestroy)
KERNELPROOF_PRODUCT(cublasLtMatmulPreferenceCreate)
KERNELPROOF_PRODUCT(cublasLtMatmulPreferenceSetAttribute)
KERNELPROOF_PRODUCT(cublasLtMatmulPreferenceDestroy)
KERNELPROOF_PRODUCT(cublasLtMatmulAlgoGetHeuristic)
