// Defines an opened pack: its kernels, and the table that says which of them computes a problem. pack.cpp reads it, and the C interface
// (interface.cpp, autotune.cpp) queries it.
#ifndef CUDAL2GEN_PACK_H
#define CUDAL2GEN_PACK_H

#include "cudal2gen.h"
#include "launch.h"

#include <cuda_runtime_api.h>

#include <array>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

// Functions of the launcher; launcher.cpp and sized.h describe them.
extern "C" {
char const* cudal2gen_message();
int cudal2gen_open(char const* directory, char const* options, char const* runtime, cudal2gen_kernel** out);
int cudal2gen_close(cudal2gen_kernel* kernel);
int64_t cudal2gen_batch_workspace_bytes(cudal2gen_kernel const* kernel, int m, int n, int k, int count);
int cudal2gen_launch_batched(cudal2gen_kernel const* kernel, void const* a, int lda, void const* b, int ldb, void* d, int ldd,
                             int m, int n, int k, cudal2gen::Batches const* batches, cudal2gen_fused const* fused,
                             void* workspace, void* stream);
int cudal2gen_launch_grouped(cudal2gen_kernel const* kernel, void const* a, int lda, void const* b, int ldb, void* d, int ldd,
                             int m, int n, int k, cudal2gen::Groups const* groups, cudal2gen_fused const* fused, void* stream);
}

namespace cudal2gen {

// Stores the words that cudal2gen_last_error() returns to this thread, and returns the code.
int refuse(int code, std::string const& why);
inline int invalid(std::string const& why) { return refuse(CUDAL2GEN_INVALID_VALUE, why); }

using Sizes = std::array<int, 3>;  // m, n, k

// Everything but the sizes that a kernel and a problem must agree on: the header's enums ab, d, acc, layout and batch, in
// this order, and the text of the fusion.
struct Kind {
  std::array<int, 5> enums;
  std::string fusion;

  // Whether this is one product without fused operations.
  bool plain() const { return fusion == "none" && enums[4] == CUDAL2GEN_ALONE; }
  // The plain product with the same types and layout.
  Kind alone() const { return {{enums[0], enums[1], enums[2], enums[3], CUDAL2GEN_ALONE}, "none"}; }
  bool operator==(Kind const& other) const { return enums == other.enums && fusion == other.fusion; }
  bool operator<(Kind const& other) const { return std::tie(enums, fusion) < std::tie(other.enums, other.fusion); }
};

// A kernel of a pack. `digest` names its folder, `options` are those of cudal2gen_open, and `sizes` are those for which it was made.
struct PackKernel {
  std::string digest, options;
  Kind kind;
  Sizes sizes;
  int plain;  // the number of the kernel with the same design for the plain product, -1 if there is none
  Launch launch;
  bool fits;  // whether the card has enough shared memory
  cudal2gen_kernel* opened;  // null until `open`
  std::string refused;  // why the driver refused it; empty if it did not. Guarded by `opening`

  // Whether it computes this many products of these sizes with A and B packed. D's leading dimension is not known before
  // the call: it is assumed to be rounded up to a whole vector, and the launcher checks the real one.
  bool takes(Sizes const& problem, int products) const;

  // The distance of these sizes from its own: |log2| of the ratios summed over m, n and k, as in kernel/serving.py.
  double distance(Sizes const& problem) const;
};

// The GPU on which the kernels of an open pack run. `pack_gpu` is empty if the pack was made for this model, else it names the model
// for which it was made. `capability` is 90 for 9.0, and `smem_bytes` is the most shared memory that a CTA can have.
struct Card {
  std::string name, pack_gpu;
  int capability;
  int64_t smem_bytes;

  bool other_model() const { return !pack_gpu.empty(); }
};

// The kernel that was chosen for a problem: its number in the pack, or one of these.
constexpr int kNothing = -1;  // D has no elements, so nothing is done
constexpr int kZeros = -2;    // k is 0, so D is filled with zeros
struct Choice {
  int kernel;
  double speedup;  // over the vendor's library; 0 if it was not measured
};

// Returns the number of products or groups of a problem.
int products_of(cudal2gen_problem const& problem);

// Checks that a problem's enums are in range, and its sizes and number of products not negative. Returns CUDAL2GEN_OK if so.
int check(cudal2gen_problem const& problem);

// The functions of the CUDA runtime that the interface calls, not the launcher; null where the runtime lacks one.
struct HostRuntime {
  decltype(&cudaMemset2DAsync) memset_2d;
  cudaError_t (*event_create)(cudaEvent_t*);
  decltype(&cudaEventDestroy) event_destroy;
  decltype(&cudaEventRecord) event_record;
  decltype(&cudaEventSynchronize) event_synchronize;
  decltype(&cudaEventElapsedTime) event_elapsed;
  decltype(&cudaStreamIsCapturing) is_capturing;
  decltype(&cudaGetErrorString) error_string;
  decltype(&cudaGetLastError) last_error;

  // Reports an error of the runtime, and clears the runtime's last error: all code of the process shares it, and the program
  // would take it for an error of its own next call.
  int failed(cudaError_t error) const {
    last_error();
    return refuse(error, error_string(error));
  }
};

}  // namespace cudal2gen

struct cudal2gen_pack {
  cudal2gen_pack() = default;
  cudal2gen_pack(cudal2gen_pack const&) = delete;
  ~cudal2gen_pack() { unload(); }

  std::string directory, runtime;
  cudal2gen::Card card;
  cudal2gen::HostRuntime host = {};
  std::vector<cudal2gen::PackKernel> kernels;
  // The table of measured choices. The int is the number of products of a batch, 1 without one.
  std::map<std::tuple<cudal2gen::Kind, cudal2gen::Sizes, int>, cudal2gen::Choice> chosen;
  std::mutex opening;  // guards `opened` and `refused` of all kernels; nothing else changes after the load

  // Chooses the kernel for a problem that `check` accepts. Returns CUDAL2GEN_VENDOR with a reason if there is none.
  int choose(cudal2gen_problem const& problem, cudal2gen::Choice& choice) const;
  // The numbers of the kernels that compute a problem, the nearest ones first.
  std::vector<int> candidates(cudal2gen_problem const& problem) const;
  // Opens a kernel by its number unless it is open. Returns CUDAL2GEN_REFUSED if the driver refuses its image.
  int open(int kernel);
  // Unloads the kernels that were opened. Returns false if the runtime fails to unload one.
  bool unload();
  std::string kernel_folder(std::string const& digest) const { return directory + "/kernels/" + digest; }

 private:
  // Chooses an unmeasured kernel by the measured choice for the plain product. Returns false if there is none.
  bool infer(cudal2gen::Kind const& kind, cudal2gen::Sizes const& sizes, int products, cudal2gen::Choice& choice) const;
};

// A problem and the kernel that was chosen for it when the plan was made.
struct cudal2gen_plan {
  cudal2gen_pack* pack;
  cudal2gen_problem problem;
  cudal2gen::Choice choice;

  // Enqueues the product on the stream, as cudal2gen_plan_run does with the same arguments.
  int run(void const* a, int lda, void const* b, int ldb, void* d, int ldd, cudal2gen_operands const* operands,
          void* workspace, void* stream) const;
  cudal2gen_answer answer() const;
};

namespace cudal2gen {

// Reads a pack's folder and identifies the current device. runtime: as for cudal2gen_pack_open.
int load(cudal2gen_pack& pack, char const* runtime);

// Makes the plan for a problem. If it returns an error, `plan` is unchanged.
int make_plan(cudal2gen_pack& pack, cudal2gen_problem const& problem, cudal2gen_plan& plan);

// Runs a function that returns a code, and turns an exception into a code, since none may reach a caller in C.
template <class Body>
int guarded(Body body) {
  try {
    return body();
  } catch (std::bad_alloc const&) {
    return refuse(cudaErrorMemoryAllocation, "the host has no memory left");
  } catch (std::exception const& error) {
    return refuse(cudaErrorUnknown, error.what());
  }
}

}  // namespace cudal2gen

#endif
