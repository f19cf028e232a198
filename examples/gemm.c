/* D = A B on a GPU without Python: a pack's kernel where it was measured faster, else what your program does today.
   cudal2gen pack --gpu h200 --out pack
   g++ gemm.c -o gemm -Ipack -I$CUDA/include -Lpack -lcudal2gen -L$CUDA/lib64 -lcudart && ./gemm pack */
#include <cuda_runtime_api.h>
#include <cudal2gen.h>
#include <stdio.h>
#include <stdlib.h>

int main(int count, char** words) {
  char const *directory = count > 1 ? words[1] : "pack", *runtime = count > 2 ? words[2] : NULL;
  static cudal2gen_problem problem; /* zeros: fp16, B stored (n,k), one plain product */
  problem.acc = CUDAL2GEN_F32, problem.m = 64, problem.n = 64, problem.k = 128, problem.prefer = CUDAL2GEN_KERNEL;
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
