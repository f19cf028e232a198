/* Computes relu(A B + bias), and then three products with the same B in one launch, without Python. To build and run it:

     cudal2gen pack --gpu h200 --mnk 64_64_128 --acc f32 --also bias_n+relu --also strided --out pack
     g++ fused.c -o fused -Ipack -I$CUDA/include -Lpack -lcudal2gen -L$CUDA/lib64 -lcudart
     ./fused pack

   All elements of A and B are 1, those of the third A are 2; the bias is -127 and -129 by turns. */
#include <cuda_runtime_api.h>
#include <cudal2gen.h>
#include <stdio.h>

enum { M = 64, N = 64, K = 128, PRODUCTS = 3 };
static unsigned short host[PRODUCTS * (M + N) * K];

int main(int count, char** words) {
  char const *directory = count > 1 ? words[1] : "pack", *runtime = count > 2 ? words[2] : NULL;
  static cudal2gen_problem problem;
  static cudal2gen_operands operands;
  problem.acc = CUDAL2GEN_F32, problem.m = M, problem.n = N, problem.k = K, problem.prefer = CUDAL2GEN_KERNEL;
  cudal2gen_pack* pack;
  cudal2gen_answer answer;
  void *a, *b, *bias, *d, *workspace = NULL;
  if (cudal2gen_pack_open(directory, runtime, &pack)) return fprintf(stderr, "%s\n", cudal2gen_last_error()), 1;
  cudaMalloc(&a, 2 * PRODUCTS * M * K), cudaMalloc(&b, 2 * N * K), cudaMalloc(&bias, 2 * N);
  cudaMalloc(&d, 2 * PRODUCTS * M * N);
  for (int i = 0; i < PRODUCTS * M * K; ++i) host[i] = i < 2 * M * K ? 0x3C00 : 0x4000; /* 1.0; 2.0 in the third A */
  cudaMemcpy(a, host, 2 * PRODUCTS * M * K, cudaMemcpyHostToDevice), cudaMemcpy(b, host, 2 * N * K, cudaMemcpyHostToDevice);
  for (int i = 0; i < N; ++i) host[i] = i % 2 ? 0xD808 : 0xD7F0; /* -129, -127 */
  cudaMemcpy(bias, host, 2 * N, cudaMemcpyHostToDevice);

  problem.fusion.bias = CUDAL2GEN_BIAS_N, problem.fusion.activation = CUDAL2GEN_RELU;
  operands.bias = bias;
  int code = cudal2gen_query(pack, &problem, &answer);
  if (!code && answer.workspace_bytes) cudaMalloc(&workspace, answer.workspace_bytes);
  if (!code) code = cudal2gen_gemm(pack, &problem, a, K, b, K, d, N, &operands, workspace, NULL);
  if (!code) code = cudaMemcpy(host, d, 2 * M * N, cudaMemcpyDeviceToHost);
  if (code) return fprintf(stderr, "%s\n", cudal2gen_last_error()), 1;
  printf("fused: D[0][0] = 0x%04X, 0x3C00 is 1.0; D[0][1] = 0x%04X\n", host[0], host[1]);
  int right = host[0] == 0x3C00 && host[1] == 0;

  problem.fusion.bias = CUDAL2GEN_NO_BIAS, problem.fusion.activation = CUDAL2GEN_NO_ACTIVATION;
  problem.batch = CUDAL2GEN_STRIDED, problem.products = PRODUCTS;
  operands.stride_a = M * K, operands.stride_b = 0, operands.stride_d = M * N; /* all products share B */
  code = cudal2gen_query(pack, &problem, &answer);
  if (!code && answer.workspace_bytes) cudaMalloc(&workspace, answer.workspace_bytes);
  if (!code) code = cudal2gen_gemm(pack, &problem, a, K, b, K, d, N, &operands, workspace, NULL);
  if (!code) code = cudaMemcpy(host, d, 2 * PRODUCTS * M * N, cudaMemcpyDeviceToHost);
  if (code) return fprintf(stderr, "%s\n", cudal2gen_last_error()), 1;
  printf("batched: D[1] = 0x%04X, D[2] = 0x%04X, 0x5800 is 128.0, 0x5C00 is 256.0\n", host[M * N], host[2 * M * N]);
  fflush(stdout);
  cudal2gen_pack_close(pack);
  return right && host[M * N] == 0x5800 && host[2 * M * N] == 0x5C00 ? 0 : 1;
}
