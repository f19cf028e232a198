/* Matrix products by the kernels of a pack, for programs without Python: D(m,n) = A(m,k) B in fp16 or bf16, row-major.
   A pack may also have kernels that add a bias and C and apply an activation, or compute several products in one launch.

   cudal2gen pack --gpu h200 --out pack     makes the folder; this header and libcudal2gen.so are in it.
   g++ gemm.c -Ipack -Lpack -lcudal2gen     builds a program; neither nvcc nor the CUDA headers are needed.

   For readers who know cuBLAS:

   cublasCreate                     cudal2gen_pack_open, for the current device; any threads may share it
   cublasGemmEx, row-major          cudal2gen_matmul(pack, problem, a, lda, b, ldb, d, ldd, workspace, stream) computes what
                                    cublasGemmEx(handle, OP_B, OP_A, n, m, k, &one, b, ldb, a, lda, &zero, d, ldd, ..)
                                    does, with the operations that are the letters of the layout (CUDAL2GEN_TN: T for B,
                                    N for A): cuBLAS is column-major, and the transpose of D is that of B times that of A
   cublasGemmStridedBatchedEx       problem.batch = CUDAL2GEN_STRIDED, and the strides of cudal2gen_operands
   cublasLtMatmul with an epilogue  problem.fusion, and cudal2gen_gemm
   cublasLtMatmulAlgoGetHeuristic   cudal2gen_plan_create; cudal2gen_plan_run then chooses nothing
   CUBLAS_GEMM_AUTOTUNE             cudal2gen_plan_autotune, against your own call of cuBLAS
   cublasSetStream, SetWorkspace    arguments of each call. Once the kernel is loaded (by a query or a plan), cudal2gen_matmul,
                                    _gemm and _plan_run never wait, allocate no device memory, and may be captured in a graph
   CUBLAS_STATUS_INVALID_VALUE      CUDAL2GEN_INVALID_VALUE; cudal2gen_last_error() names the argument
   CUBLAS_STATUS_NOT_SUPPORTED      CUDAL2GEN_VENDOR: call cuBLAS

   As in BLAS nothing is done where m, n or the number of products is 0, whatever the addresses; where k is 0, D is filled
   with zeros (if the problem has a fusion or a batch, the answer is CUDAL2GEN_VENDOR). A null argument, a value outside of
   an enum, a negative size, a leading dimension shorter than a row, a misaligned address and a pack or plan that is
   no longer open return an error. D must not overlap with A or B; this is not checked.

   Functions return CUDAL2GEN_OK, one of the numbers below, or a positive cudaError_t. cudal2gen_last_error() then says in
   words why the last call of this thread was refused. */
#ifndef CUDAL2GEN_H
#define CUDAL2GEN_H

#include <stdint.h>

/* The version of this interface, 10000 major + 100 minor + patch. A library serves programs that were compiled with a header of the same
   major version that is not newer: structures do not change within a major version, and functions are only added. */
#define CUDAL2GEN_VERSION 10000

#ifdef __cplusplus
extern "C" {
#endif

enum {
  CUDAL2GEN_OK = 0,
  CUDAL2GEN_INVALID_VALUE = 1, /* cudaErrorInvalidValue: an argument is not valid; nothing was done */
  CUDAL2GEN_VENDOR = -1,   /* no kernel is known to be faster, or none computes this: call the vendor's library */
  CUDAL2GEN_BAD_PACK = -2, /* the pack is missing, truncated, altered, or has no kernel that runs on this GPU */
  CUDAL2GEN_REFUSED = -3   /* the driver refuses the kernel's image: call the vendor's library. An open pack does not try that
                              kernel again; update the driver, or make the pack anew */
};

typedef enum { CUDAL2GEN_F16, CUDAL2GEN_F32 } cudal2gen_acc; /* the type in which products are summed */
/* How B and A are stored. */
typedef enum {
  CUDAL2GEN_TN, /* B (n,k), A (m,k) */
  CUDAL2GEN_NN, /* B (k,n), A (m,k) */
  CUDAL2GEN_NT, /* B (k,n), A (k,m) */
  CUDAL2GEN_TT  /* B (n,k), A (k,m) */
} cudal2gen_layout;
typedef enum { CUDAL2GEN_AB_F16, CUDAL2GEN_AB_BF16 } cudal2gen_ab; /* the type of A and B; bf16 needs acc f32 */
typedef enum { CUDAL2GEN_D_SAME, CUDAL2GEN_D_F32 } cudal2gen_d;    /* the type of D: as A and B, or fp32 */
typedef enum {
  CUDAL2GEN_MEASURED, /* a kernel that was measured faster than the vendor's library at exactly these sizes */
  CUDAL2GEN_KERNEL,   /* the nearest kernel that computes the product */
  CUDAL2GEN_INFERRED  /* like CUDAL2GEN_MEASURED; but if this fusion or batch was not measured, a kernel of the same design as
                         the one that was measured faster for the plain product of these sizes */
} cudal2gen_prefer;

typedef enum { CUDAL2GEN_NO_BIAS, CUDAL2GEN_BIAS_N, CUDAL2GEN_BIAS_M } cudal2gen_bias; /* one element for each column of D, or for each row */
typedef enum {
  CUDAL2GEN_NO_ACTIVATION,
  CUDAL2GEN_RELU,
  CUDAL2GEN_GELU_TANH, /* the approximation by tanh; GELU uses the error function */
  CUDAL2GEN_GELU,
  CUDAL2GEN_SILU
} cudal2gen_activation;

/* D = activation(alpha A B + bias + beta C), computed in fp32 and rounded once. All zeros: the plain product. */
typedef struct {
  int alpha;           /* 1: the sums are multiplied by operands.alpha */
  cudal2gen_bias bias;
  int residual;        /* 1: operands.beta times C is added */
  int aux;             /* 1: the sums before the activation are stored as well, (m,n) */
  cudal2gen_activation activation;
  int gate;            /* 1: D is (m,n/2): 8 activated columns times the next 8 */
} cudal2gen_fusion;

typedef enum {
  CUDAL2GEN_ALONE,   /* one product in a launch */
  CUDAL2GEN_STRIDED, /* several products of the same sizes, whose matrices are evenly spaced */
  CUDAL2GEN_GROUPED  /* groups of consecutive rows of A and D, each with its own B; m counts the rows of all groups */
} cudal2gen_batch;

/* Fill it with zeros first: they mean one plain product in fp16, by a measured kernel. */
typedef struct {
  cudal2gen_acc acc;
  cudal2gen_layout layout;
  int m, n, k;
  cudal2gen_prefer prefer;
  cudal2gen_ab ab;
  cudal2gen_d d;
  cudal2gen_fusion fusion;
  cudal2gen_batch batch;
  int products; /* how many products a batch has, or how many groups; 0 for one product */
} cudal2gen_problem;

/* What a fused or batched product reads and stores in addition to A, B and D. Only the members that its fusion and batch need are
   read. Addresses are device addresses, aligned to 16 bytes; leading dimensions and strides count elements. */
typedef struct {
  void const* bias; /* n or m elements in the type of A and B */
  void const* c;    /* the shape and type of D */
  int ldc;
  float alpha, beta;
  void* aux; /* (m,n) in the type of D */
  int ldaux;
  /* How far a matrix of one product of a batch is from that of the next; 0: all products share it (not D or aux). Groups use
     only stride_b, and stride_bias for a bias along n. */
  int64_t stride_a, stride_b, stride_d;
  int64_t stride_bias, stride_c, stride_aux;
  int const* ends; /* of groups: an array on the device with the row after the last one of each group, ascending */
} cudal2gen_operands;

typedef struct {
  char const* kernel;      /* its digest, a string that lives as long as the pack; "" if none is needed (m, n or k is 0) */
  double speedup;          /* the vendor's time over the kernel's: the lower end of its interval; 0 if it was not measured */
  int64_t workspace_bytes; /* size of the workspace, which must be aligned to 256 bytes. It needs no initial value. Launches that
                              may run concurrently, on two streams or in a graph, must not share it. */
} cudal2gen_answer;

typedef struct cudal2gen_pack cudal2gen_pack;
typedef struct cudal2gen_plan cudal2gen_plan;

/* CUDAL2GEN_VERSION of the library, which may differ from that of the header. */
int cudal2gen_version(void);

/* Opens a pack for the current device. It first checks every file, and that the device runs kernels of the pack. On a card
   of another model than the pack's nothing counts as measured: only CUDAL2GEN_KERNEL uses its kernels. runtime: file name or
   path of the CUDA runtime library, null for libcudart.so of CUDA 13. Any threads may use the pack, with the same device. */
int cudal2gen_pack_open(char const* directory, char const* runtime, cudal2gen_pack** out);

/* Unloads a pack's kernels. Its plans return an error afterwards. No launch may still be running. Null does nothing. */
int cudal2gen_pack_close(cudal2gen_pack* pack);

/* Says which kernel would compute a problem. The first query whose answer is a kernel loads it. */
int cudal2gen_query(cudal2gen_pack* pack, cudal2gen_problem const* problem, cudal2gen_answer* answer);

/* Enqueues one plain product on the stream, a cudaStream_t. a, b, d: device addresses. Leading dimensions count elements.
   workspace: device memory of workspace_bytes as cudal2gen_query says; null if none is needed. */
int cudal2gen_matmul(cudal2gen_pack* pack, cudal2gen_problem const* problem, void const* a, int lda, void const* b,
                     int ldb, void* d, int ldd, void* workspace, void* stream);

/* Enqueues any problem, with arguments like those of cudal2gen_matmul; operands may be null for a plain product. */
int cudal2gen_gemm(cudal2gen_pack* pack, cudal2gen_problem const* problem, void const* a, int lda, void const* b, int ldb,
                   void* d, int ldd, cudal2gen_operands const* operands, void* workspace, void* stream);

/* Chooses and loads the kernel once for many calls of one problem. answer may be null. A plan is constant, so threads may share
   it. Destroy it also after its pack is closed. Destroying null does nothing. */
int cudal2gen_plan_create(cudal2gen_pack* pack, cudal2gen_problem const* problem, cudal2gen_answer* answer,
                          cudal2gen_plan** plan);
/* Enqueues the plan's product, with arguments like those of cudal2gen_gemm. */
int cudal2gen_plan_run(cudal2gen_plan const* plan, void const* a, int lda, void const* b, int ldb, void* d, int ldd,
                       cudal2gen_operands const* operands, void* workspace, void* stream);
int cudal2gen_plan_destroy(cudal2gen_plan* plan);

/* The call that cudal2gen_plan_autotune times: its operands, and a workspace of workspace_bytes for kernels that need one. */
typedef struct {
  void const* a;
  int lda;
  void const* b;
  int ldb;
  void* d;
  int ldd;
  cudal2gen_operands const* operands; /* null for a plain product */
  void* workspace;                    /* aligned to 256 bytes; null admits only kernels that need none */
  int64_t workspace_bytes;
  void* stream;
} cudal2gen_call;

/* Enqueues the same product by the vendor's library on the stream. Returns 0, or its error. */
typedef int (*cudal2gen_vendor)(void* context, void* stream);

/* Makes a plan by measuring on this card. First up to 8 nearest kernels and the vendor's product are timed round robin, then
   the fastest kernel and the vendor's product in 12 to 64 pairs, whose order varies. The plan gets the kernel only if both hold;
   otherwise the call returns CUDAL2GEN_VENDOR:
   - With a confidence of 99.5 %, the median ratio of the pairs (the vendor's time over the kernel's) is at least 1.01.
     answer.speedup is the lower bound of the median with this confidence.
   - The expected gain is at least 10 %. It is the measured gain, reduced by the part that constant biases may explain: each
     contender has one, for example from addresses, with a standard deviation of 3 %.
   If vendor is null, the fastest kernel is chosen, and speedup is 0. problem.prefer is ignored.

   It waits for the stream, runs each contender hundreds of times on the same operands, so that those that fit are in the L2,
   and stops after about `milliseconds`: above 0 and at most 60000. If this time does not suffice for 12 pairs, or if the stream is
   captured, so that nothing can be timed, the call returns CUDAL2GEN_VENDOR. D must not overlap with an operand. */
int cudal2gen_plan_autotune(cudal2gen_pack* pack, cudal2gen_problem const* problem, cudal2gen_call const* call,
                            cudal2gen_vendor vendor, void* context, double milliseconds, cudal2gen_answer* answer,
                            cudal2gen_plan** plan);

/* Says why the last call of this thread did not return CUDAL2GEN_OK; "" if it did. Valid until the thread's next call. */
char const* cudal2gen_last_error(void);

#ifdef __cplusplus
}
#endif
#endif
