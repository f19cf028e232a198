// The C interface (cudal2gen.h): it checks the arguments of callers, makes plans and runs them. A call returns a code for every
// wrong argument, also for a handle that was destroyed, except for addresses that are neither null nor valid.
#include "handles.h"
#include "pack.h"

#include <exception>
#include <memory>
#include <new>
#include <utility>

using namespace cudal2gen;

namespace {

thread_local std::string message;

// Stores zeros in D (m,n), the product for k = 0.
int clear(cudal2gen_plan const& plan, void* d, int ldd, void* stream) {
  cudal2gen_problem const& problem = plan.problem;
  size_t const bytes = problem.d == CUDAL2GEN_D_F32 ? 4 : size_t(kElements[problem.ab].bytes);
  if (!d) return invalid("D is null");
  if (ldd < problem.n) return invalid("ldd is shorter than a row of D");
  HostRuntime const& host = plan.pack->host;
  if (!host.memset_2d) return refuse(cudaErrorSymbolNotFound, "cudaMemset2DAsync is missing from the CUDA runtime");
  cudaError_t const error =
      host.memset_2d(d, size_t(ldd) * bytes, 0, size_t(problem.n) * bytes, size_t(problem.m), static_cast<cudaStream_t>(stream));
  return error ? host.failed(error) : CUDAL2GEN_OK;
}

}  // namespace

int cudal2gen::refuse(int code, std::string const& why) {
  message = why;
  return code;
}

int cudal2gen::make_plan(cudal2gen_pack& pack, cudal2gen_problem const& problem, cudal2gen_plan& plan) {
  Choice choice = {};
  if (int const code = check(problem)) return code;
  if (int const code = pack.choose(problem, choice)) return code;
  if (choice.kernel >= 0)
    if (int const code = pack.open(choice.kernel)) return code;
  plan = {&pack, problem, choice};
  return CUDAL2GEN_OK;
}

cudal2gen_answer cudal2gen_plan::answer() const {
  if (choice.kernel < 0) return {"", 0, 0};
  PackKernel const& kernel = pack->kernels[size_t(choice.kernel)];
  // A grouped launch keeps no partial sums in device memory, so it needs no workspace for any number of groups.
  int const products = problem.batch == CUDAL2GEN_GROUPED ? 1 : products_of(problem);
  return {kernel.digest.c_str(), choice.speedup,
          cudal2gen_batch_workspace_bytes(kernel.opened, problem.m, problem.n, problem.k, products)};
}

int cudal2gen_plan::run(void const* a, int lda, void const* b, int ldb, void* d, int ldd, cudal2gen_operands const* operands,
                        void* workspace, void* stream) const {
  if (choice.kernel == kNothing) return CUDAL2GEN_OK;
  if (choice.kernel == kZeros) return clear(*this, d, ldd, stream);
  PackKernel const& kernel = pack->kernels[size_t(choice.kernel)];
  if (!operands && !kernel.kind.plain())
    return invalid("a fused or batched product needs operands: call cudal2gen_gemm with them");
  cudal2gen_operands const given = operands ? *operands : cudal2gen_operands{};
  cudal2gen_fused const fused = {given.bias, given.c, given.ldc, given.alpha, given.beta, given.aux, given.ldaux};
  auto const [m, n, k] = Sizes{problem.m, problem.n, problem.k};
  int code = CUDAL2GEN_OK;
  if (problem.batch == CUDAL2GEN_GROUPED) {
    Groups const groups = {given.ends, problem.products, given.stride_b, given.stride_bias};
    code = cudal2gen_launch_grouped(kernel.opened, a, lda, b, ldb, d, ldd, m, n, k, &groups, &fused, stream);
  } else if (problem.batch == CUDAL2GEN_STRIDED) {
    Batches const batches = {problem.products, given.stride_a,    given.stride_b, given.stride_d,
                             given.stride_bias, given.stride_c, given.stride_aux};
    code = cudal2gen_launch_batched(kernel.opened, a, lda, b, ldb, d, ldd, m, n, k, &batches, &fused, workspace, stream);
  } else {
    code = cudal2gen_launch_fused(kernel.opened, a, lda, b, ldb, d, ldd, m, n, k, &fused, workspace, stream);
  }
  // `refuse` copies the launcher's message, so that cudal2gen_last_error returns it.
  return code ? refuse(code, cudal2gen_message()) : CUDAL2GEN_OK;
}

extern "C" {

int cudal2gen_version() { return CUDAL2GEN_VERSION; }

char const* cudal2gen_last_error() { return message.c_str(); }

int cudal2gen_pack_open(char const* directory, char const* runtime, cudal2gen_pack** out) {
  message.clear();
  if (!out) return invalid("out is null");
  *out = nullptr;
  if (!directory) return invalid("directory is null");
  return guarded([&] {
    auto pack = std::make_shared<cudal2gen_pack>();
    pack->directory = directory;
    pack->runtime = runtime ? runtime : "";
    try {
      if (int const code = load(*pack, runtime)) return code;
    } catch (std::bad_alloc const&) {
      throw;
    } catch (std::exception const&) {  // the digest is right, so another version wrote this file
      return refuse(CUDAL2GEN_BAD_PACK, pack->directory + "/pack.txt is not one that this library understands");
    }
    *out = Handles::of_process().add(std::move(pack));
    return int(CUDAL2GEN_OK);
  });
}

int cudal2gen_pack_close(cudal2gen_pack* handle) {
  message.clear();
  if (!handle) return CUDAL2GEN_OK;
  return guarded([&] {
    Handles::Pack const pack = Handles::of_process().remove(handle);
    if (!pack) return int(CUDAL2GEN_INVALID_VALUE);
    // A thread that still uses the pack, against the header's rule, keeps its kernels until its call returns.
    bool const unloaded = pack.use_count() > 1 || pack->unload();
    return unloaded ? int(CUDAL2GEN_OK) : refuse(cudaErrorUnknown, "a kernel could not be unloaded");
  });
}

int cudal2gen_query(cudal2gen_pack* handle, cudal2gen_problem const* problem, cudal2gen_answer* answer) {
  message.clear();
  return guarded([&] {
    Handles::Pack const pack = Handles::of_process().find(handle);
    if (!pack) return int(CUDAL2GEN_INVALID_VALUE);
    if (!problem || !answer) return invalid(!problem ? "problem is null" : "answer is null");
    cudal2gen_plan plan = {};
    int const code = make_plan(*pack, *problem, plan);
    if (!code) *answer = plan.answer();
    return code;
  });
}

int cudal2gen_gemm(cudal2gen_pack* handle, cudal2gen_problem const* problem, void const* a, int lda, void const* b, int ldb,
                   void* d, int ldd, cudal2gen_operands const* operands, void* workspace, void* stream) {
  message.clear();
  return guarded([&] {
    Handles::Pack const pack = Handles::of_process().find(handle);
    if (!pack) return int(CUDAL2GEN_INVALID_VALUE);
    if (!problem) return invalid("problem is null");
    cudal2gen_plan plan = {};
    int const code = make_plan(*pack, *problem, plan);
    return code ? code : plan.run(a, lda, b, ldb, d, ldd, operands, workspace, stream);
  });
}

int cudal2gen_matmul(cudal2gen_pack* pack, cudal2gen_problem const* problem, void const* a, int lda, void const* b,
                     int ldb, void* d, int ldd, void* workspace, void* stream) {
  return cudal2gen_gemm(pack, problem, a, lda, b, ldb, d, ldd, nullptr, workspace, stream);
}

int cudal2gen_plan_create(cudal2gen_pack* handle, cudal2gen_problem const* problem, cudal2gen_answer* answer,
                          cudal2gen_plan** out) {
  message.clear();
  if (!out) return invalid("out is null");
  *out = nullptr;
  return guarded([&] {
    Handles::Pack const pack = Handles::of_process().find(handle);
    if (!pack) return int(CUDAL2GEN_INVALID_VALUE);
    if (!problem) return invalid("problem is null");
    auto plan = std::make_shared<cudal2gen_plan>();
    if (int const code = make_plan(*pack, *problem, *plan)) return code;
    if (answer) *answer = plan->answer();
    *out = Handles::of_process().add(std::move(plan), handle);
    return int(CUDAL2GEN_OK);
  });
}

int cudal2gen_plan_run(cudal2gen_plan const* handle, void const* a, int lda, void const* b, int ldb, void* d, int ldd,
                       cudal2gen_operands const* operands, void* workspace, void* stream) {
  message.clear();
  return guarded([&] {
    Handles::Pack pack;
    Handles::Plan const plan = Handles::of_process().find(handle, pack);
    return plan ? plan->run(a, lda, b, ldb, d, ldd, operands, workspace, stream) : int(CUDAL2GEN_INVALID_VALUE);
  });
}

int cudal2gen_plan_destroy(cudal2gen_plan* handle) {
  message.clear();
  if (!handle) return CUDAL2GEN_OK;
  return guarded([&] { return Handles::of_process().remove(handle) ? CUDAL2GEN_OK : CUDAL2GEN_INVALID_VALUE; });
}

}  // extern "C"
