/* Matrix products with the kernels of a pack, for programs without Python. D(m,n) = A(m,k) B, fp16 or bf16, row-major.

   cudal2gen pack --gpu h200 --out pack     makes the folder; this header and libcudal2gen.so are in it.
   g++ gemm.c -Ipack -Lpack -lcudal2gen     builds a program; neither nvcc nor the CUDA headers are needed.

   Functions return CUDAL2GEN_OK, a negative number below, or a positive cudaError_t; cudal2gen_last_error() says in
   words what the last one of this thread refused. */
#ifndef CUDAL2GEN_H
#define CUDAL2GEN_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
  CUDAL2GEN_OK = 0,
  CUDAL2GEN_VENDOR = -1,   /* no kernel is known to be faster, or none fits: call the vendor's library */
  CUDAL2GEN_BAD_PACK = -2, /* missing, truncated, altered, or for another GPU */
};

typedef enum { CUDAL2GEN_F16, CUDAL2GEN_F32 } cudal2gen_acc; /* the accumulator in the MMA */
typedef enum { CUDAL2GEN_TN, CUDAL2GEN_NN } cudal2gen_layout; /* B is stored (n,k), or (k,n) */
typedef enum { CUDAL2GEN_AB_F16, CUDAL2GEN_AB_BF16 } cudal2gen_ab; /* the type of A and B; of bf16 the accumulator is f32 */
typedef enum { CUDAL2GEN_D_SAME, CUDAL2GEN_D_F32 } cudal2gen_d;    /* the type of D: as A and B, or fp32 */
typedef enum {
  CUDAL2GEN_MEASURED, /* a kernel where it was measured faster than the vendor's library, at these very sizes */
  CUDAL2GEN_KERNEL,   /* the nearest kernel that computes the product */
} cudal2gen_prefer;

typedef struct {
  cudal2gen_acc acc;
  cudal2gen_layout layout;
  int m, n, k;
  cudal2gen_prefer prefer;
  cudal2gen_ab ab;
  cudal2gen_d d;
} cudal2gen_problem;

typedef struct {
  char const* kernel;      /* its digest; belongs to the pack */
  double speedup;          /* over the vendor's library, low end of the interval; 0 where it was not measured */
  int64_t workspace_bytes; /* what cudal2gen_matmul needs, aligned to 256 bytes */
} cudal2gen_answer;

typedef struct cudal2gen_pack cudal2gen_pack;

/* Checks every file of the pack, and that the current device is its GPU. runtime: the CUDA runtime library's file name
   or path, null for libcudart.so.13. A pack is used with the device that was current here, by any threads. */
int cudal2gen_pack_open(char const* directory, char const* runtime, cudal2gen_pack** out);
int cudal2gen_pack_close(cudal2gen_pack* pack);

/* What would compute this; the first question for a kernel loads it. */
int cudal2gen_query(cudal2gen_pack* pack, cudal2gen_problem const* problem, cudal2gen_answer* answer);

/* Enqueues the product on the stream. Leading dimensions count elements; workspace may be null where none is needed. */
int cudal2gen_matmul(cudal2gen_pack* pack, cudal2gen_problem const* problem, void const* a, int lda, void const* b,
                     int ldb, void* d, int ldd, void* workspace, void* stream);

char const* cudal2gen_last_error(void);

#ifdef __cplusplus
}
#endif
#endif
