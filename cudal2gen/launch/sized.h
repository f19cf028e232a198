// Functions that launch kernels often with the same sizes, for callers to whom each argument of a call costs time. launcher.cpp implements
// them, and torch_launcher.cpp calls them without a header of CUDA. They return a cudaError_t, and cudal2gen_message() then says why.
#pragma once

#include <cstdint>

struct cudal2gen_kernel;

extern "C" {
// The operands of a fused kernel besides A, B and D; it is the kernel's last parameter. Members that its operations do not need are
// ignored. `bias` has the type of A and B; C and aux are (m,n), row-major, in the type of D; ldc and ldaux count elements. New
// members must come after these.
struct cudal2gen_fused {
  void const *bias, *c;
  int ldc;
  float alpha, beta;
  void* aux;
  int ldaux;
};
}

namespace cudal2gen {

// How many products a launch computes, and how many elements lie between the matrices of one and the next; 0: all share A,
// B, bias or C. It is an argument of the kernel; kernels that are not fused read only the members before `bias`.
struct Batches {
  int count = 1;
  int64_t a = 0, b = 0, d = 0;
  int64_t bias = 0, c = 0, aux = 0;
};

}  // namespace cudal2gen

extern "C" {

// The kernel and the sizes of a launch, of one product or a batch. Leading dimensions count elements.
struct cudal2gen_sized {
  cudal2gen_kernel const* kernel;
  int lda, ldb, ldd, m, n, k;
  cudal2gen::Batches batches;
};

// Enqueues D = A * B with these sizes on the stream, by a kernel without fused operations. workspace: device memory of
// cudal2gen_batch_workspace_bytes() bytes.
int cudal2gen_launch_sized(cudal2gen_sized const* sized, void const* a, void const* b, void* d, void* workspace, void* stream);

// Enqueues D(m,n) = activation(alpha A(m,k) * B + bias + beta C) on the given stream, with those operations that the kernel has;
// `fused` may be null if it has none. D of a gated kernel has n / 2 columns. Leading dimensions count elements. workspace:
// cudal2gen_workspace_bytes().
int cudal2gen_launch_fused(cudal2gen_kernel const* kernel, void const* a, int lda, void const* b, int ldb, void* d, int ldd, int m,
                           int n, int k, cudal2gen_fused const* fused, void* workspace, void* stream);
}
