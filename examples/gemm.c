/* Computes D = A B on a GPU without Python, by a kernel of a pack. To build and run it:

     cudal2gen pack --gpu h200 --mnk 64_64_128 --acc f32 --out pack
     g++ gemm.c -o gemm -Ipack -I$CUDA/include -Lpack -lcudal2gen -L$CUDA/lib64 -lcudart
     ./gemm pack

   All elements of A and B are 1, so every element of D is k = 128. A program that wants a kernel only where it was
   measured faster leaves `prefer` at 0, and calls its own library if the answer is CUDAL2GEN_VENDOR. */
#include <cuda_runtime_api.h>
#include <cudal2gen.h>
#include <stdio.h>
#include <stdlib.h>

int main(int count, char** words) {
  char const *directory = count > 1 ? words[1] : "pack", *runtime = count > 2 ? words[2] : NULL;
  /* Zeros mean fp16, B stored (n,k), and one product without fusion. */
  static cudal2gen_problem problem;
  problem.acc = CUDAL2GEN_F32, problem.m = 64, problem.n = 64, problem.k = 128;
  problem.prefer = CUDAL2GEN_KERNEL; /* take a kernel even if none was measured */
  int const m = problem.m, n = problem.n, k = problem.k;
  cudal2gen_pack* pack;
  cudal2gen_answer answer;
  if (cudal2gen_pack_open(directory, runtime, &pack) || cudal2gen_query(pack, &problem, &answer))
    return fprintf(stderr, "%s\n", cudal2gen_last_error()), 1;
  unsigned short* host = (unsigned short*)malloc(2 * (size_t)(m * k + n * k));
  for (int i = 0; i < (m + n) * k; ++i) host[i] = 0x3C00; /* 1.0 in fp16 */
  void *a, *b, *d, *workspace = NULL;
  cudaMalloc(&a, 2 * m * k), cudaMalloc(&b, 2 * n * k), cudaMalloc(&d, 2 * m * n);
  if (answer.workspace_bytes) cudaMalloc(&workspace, answer.workspace_bytes);
  cudaMemcpy(a, host, 2 * m * k, cudaMemcpyHostToDevice), cudaMemcpy(b, host + m * k, 2 * n * k, cudaMemcpyHostToDevice);
  int code = cudal2gen_matmul(pack, &problem, a, k, b, k, d, n, workspace, NULL);
  if (!code) code = cudaMemcpy(host, d, 2 * m * n, cudaMemcpyDeviceToHost);
  if (code) return fprintf(stderr, "%s\n", cudal2gen_last_error()), 1;
  printf("%s: D[0][0] = 0x%04X, 0x5800 is 128.0\n", answer.kernel, host[0]);
  fflush(stdout);
  cudal2gen_pack_close(pack);
  return host[0] == 0x5800 ? 0 : 1;
}
