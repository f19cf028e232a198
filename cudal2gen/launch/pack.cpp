// The C interface of a pack (cudal2gen.h): reads pack.txt, checks the files, chooses kernels by its table, and launches
// through the generic launcher. It is linked into one library with launcher.cpp, and against no CUDA library.
#include "cudal2gen.h"

#include "launch.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

struct cudal2gen_kernel;
extern "C" {
char const* cudal2gen_message();
int cudal2gen_open(char const* directory, char const* options, char const* runtime, cudal2gen_kernel** out);
int cudal2gen_close(cudal2gen_kernel* kernel);
int64_t cudal2gen_batch_workspace_bytes(cudal2gen_kernel const* kernel, int m, int n, int k, int count);
int cudal2gen_launch_fused(cudal2gen_kernel const* kernel, void const* a, int lda, void const* b, int ldb, void* d, int ldd,
                           int m, int n, int k, cudal2gen_fused const* fused, void* workspace, void* stream);
int cudal2gen_launch_batched(cudal2gen_kernel const* kernel, void const* a, int lda, void const* b, int ldb, void* d, int ldd,
                             int m, int n, int k, cudal2gen::Batches const* batches, cudal2gen_fused const* fused,
                             void* workspace, void* stream);
int cudal2gen_launch_grouped(cudal2gen_kernel const* kernel, void const* a, int lda, void const* b, int ldb, void* d, int ldd,
                             int m, int n, int k, cudal2gen::Groups const* groups, cudal2gen_fused const* fused, void* stream);
}

namespace {

thread_local std::string message;

int refuse(int code, std::string const& why) {
  message = why;
  return code;
}

// SHA-256 (FIPS 180-4) in hexadecimal. Its constants are the first 32 bits of the fractions of square and cube roots of
// the first primes, for which a long double has enough digits.
class Sha256 {
 public:
  static std::string of(std::string data) {
    Sha256 state;
    uint64_t const bits = uint64_t(data.size()) * 8;
    data.push_back(char(0x80));
    while (data.size() % 64 != 56) data.push_back(0);
    for (int shift = 56; shift >= 0; shift -= 8) data.push_back(char(bits >> shift));
    for (size_t at = 0; at < data.size(); at += 64) state.block(reinterpret_cast<unsigned char const*>(data.data()) + at);
    std::string text;
    for (uint32_t word : state.hash_) {
      char digits[9];
      std::snprintf(digits, sizeof digits, "%08x", unsigned(word));
      text += digits;
    }
    return text;
  }

 private:
  Sha256() {
    for (int number = 2, primes = 0; primes < 64; ++number) {
      bool prime = true;
      for (int divisor = 2; divisor * divisor <= number; ++divisor) prime = prime && number % divisor;
      if (!prime) continue;
      if (primes < 8) hash_[primes] = fraction(std::sqrt((long double)number));
      rounds_[primes++] = fraction(std::cbrt((long double)number));
    }
  }

  static uint32_t fraction(long double root) { return uint32_t((root - std::floor(root)) * 4294967296.0L); }
  static uint32_t turn(uint32_t word, int by) { return word >> by | word << (32 - by); }

  void block(unsigned char const* data) {
    std::array<uint32_t, 64> w;
    for (int i = 0; i < 16; ++i, data += 4)
      w[i] = uint32_t(data[0]) << 24 | uint32_t(data[1]) << 16 | uint32_t(data[2]) << 8 | data[3];
    for (int i = 16; i < 64; ++i)
      w[i] = w[i - 16] + w[i - 7] + (turn(w[i - 15], 7) ^ turn(w[i - 15], 18) ^ w[i - 15] >> 3) +
             (turn(w[i - 2], 17) ^ turn(w[i - 2], 19) ^ w[i - 2] >> 10);
    std::array<uint32_t, 8> v = hash_;
    for (int i = 0; i < 64; ++i) {
      uint32_t const t1 = v[7] + (turn(v[4], 6) ^ turn(v[4], 11) ^ turn(v[4], 25)) + ((v[4] & v[5]) ^ (~v[4] & v[6])) +
                           rounds_[i] + w[i];
      uint32_t const t2 = (turn(v[0], 2) ^ turn(v[0], 13) ^ turn(v[0], 22)) + ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
      v = {t1 + t2, v[0], v[1], v[2], v[3] + t1, v[4], v[5], v[6]};
    }
    for (int i = 0; i < 8; ++i) hash_[i] += v[i];
  }

  std::array<uint32_t, 8> hash_;
  std::array<uint32_t, 64> rounds_;
};

using Tokens = std::map<std::string, std::string>;

// Returns the first word of a line of pack.txt, and stores its `name=value` tokens.
std::string parse(std::string const& line, Tokens& tokens) {
  std::istringstream text(line);
  std::string first, token;
  text >> first;
  while (text >> token) {
    auto const split = token.find('=');
    if (split != std::string::npos) tokens[token.substr(0, split)] = token.substr(split + 1);
  }
  return first;
}

bool read(std::string const& path, std::string& content) {
  std::ifstream file(path, std::ios::binary);
  content.assign(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  return bool(file);
}

std::set<std::string> words(std::string text) {
  for (char& c : text) c = std::isalnum(static_cast<unsigned char>(c)) ? char(std::tolower(c)) : ' ';
  std::istringstream stream(text);
  return {std::istream_iterator<std::string>(stream), std::istream_iterator<std::string>()};
}

using Sizes = std::array<int, 3>;

// Everything but the sizes that a kernel and a problem must agree on: the header's enums ab, d, acc, layout and batch, in
// this order, and the text of the fusion.
struct Kind {
  std::array<int, 5> enums;
  std::string fusion;

  int layout() const { return enums[3]; }
  bool plain() const { return fusion == "none" && enums[4] == CUDAL2GEN_ALONE; }
  Kind alone() const { return {{enums[0], enums[1], enums[2], enums[3], CUDAL2GEN_ALONE}, "none"}; }
  bool operator==(Kind const& other) const { return enums == other.enums && fusion == other.fusion; }
  bool operator<(Kind const& other) const { return std::tie(enums, fusion) < std::tie(other.enums, other.fusion); }
};

// The text of a fusion as in kernel/fusion.py; empty for values outside the header's enums.
std::string spell(cudal2gen_fusion const& fusion) {
  static constexpr char const *kBiases[] = {"", "bias_n", "bias_m"}, *kActivations[] = {"", "relu", "gelu_tanh", "gelu", "silu"};
  if (unsigned(fusion.bias) > CUDAL2GEN_BIAS_M || unsigned(fusion.activation) > CUDAL2GEN_SILU) return "";
  std::string text;
  for (char const* part : {fusion.alpha ? "alpha" : "", kBiases[fusion.bias], fusion.residual ? "residual" : "",
                           fusion.aux ? "aux" : "", kActivations[fusion.activation], fusion.gate ? "gate" : ""})
    if (*part) text += (text.empty() ? "" : "+") + std::string(part);
  return text.empty() ? "none" : text;
}

Kind kind_of(cudal2gen_problem const& problem) {
  return {{problem.ab, problem.d, problem.acc, problem.layout, problem.batch}, spell(problem.fusion)};
}

int products_of(cudal2gen_problem const& problem) { return problem.batch == CUDAL2GEN_ALONE ? 1 : problem.products; }

struct PackKernel {
  std::string digest, options;
  Kind kind;
  Sizes sizes;
  int plain;  // the number of the kernel with the same design for the plain product, -1 if there is none
  cudal2gen::Launch launch;
  bool fits;  // whether the card has enough shared memory
  cudal2gen_kernel* opened;
  std::string refused;  // why the driver does not load it; empty if it was not tried or loads. Guarded by `opening`

  // Whether it computes these sizes with A and B packed. D's leading dimension is not known before the call: here the
  // next whole vector stands for it, and the launcher checks the real one.
  bool takes(Sizes const& problem) const {
    auto const [m, n, k] = problem;
    int const row_b = kind.layout() == CUDAL2GEN_TN ? k : n, row_d = launch.d_cols(n);
    int const vector = 16 / launch.element.bytes;
    cudal2gen::Matrix const a = {nullptr, k, k}, b = {nullptr, row_b, row_b};
    cudal2gen::Matrix const d = {nullptr, cudal2gen::ceil_div(row_d, vector) * vector, row_d};
    return fits && !launch.refuse_sizes(m, n, k) && !launch.refuse_operands(a, b, d);
  }

  // How far these sizes are from its own, in octaves summed over m, n and k; the same measure as kernel/serving.py.
  double distance(Sizes const& problem) const {
    double octaves = 0;
    for (int i = 0; i < 3; ++i) octaves += std::abs(std::log2(double(problem[i]) / sizes[i]));
    return octaves;
  }
};

// Whether this code says that the driver refuses a kernel's image: the driver is too old, or the image is for other
// cards. Such an answer is final (see open).
bool unloadable(int code) {
  return code == cudaErrorInsufficientDriver || code == cudaErrorInvalidKernelImage ||
         code == cudaErrorNoKernelImageForDevice || code == cudaErrorInvalidPtx || code == cudaErrorUnsupportedPtxVersion;
}

// The device that a pack is used with. `pack_gpu`: the model that the pack is for, empty if the device is of that model;
// `capability`: 90 for 9.0; `smem_bytes`: the most shared memory of a CTA.
struct Card {
  std::string name, pack_gpu;
  int capability;
  int64_t smem_bytes;

  bool other_model() const { return !pack_gpu.empty(); }
};

struct Choice {
  int kernel;
  double speedup;
};

}  // namespace

struct cudal2gen_pack {
  std::string directory, runtime;
  Card card;
  std::vector<PackKernel> kernels;
  std::map<std::tuple<Kind, Sizes, int>, Choice> chosen;  // the int counts the products of a batch; 1 without
  std::mutex opening;  // guards `opened` and `refused` of all kernels; everything else is constant after the load

  int choose(cudal2gen_problem const& problem, Choice& choice) const {
    Sizes const sizes = {problem.m, problem.n, problem.k};
    if (std::min({problem.m, problem.n, problem.k}) <= 0) return refuse(cudaErrorInvalidValue, "m, n and k must be positive");
    Kind const kind = kind_of(problem);
    if (kind.fusion.empty()) return refuse(cudaErrorInvalidValue, "bias or activation is none of the header's");
    if (products_of(problem) < 1) return refuse(cudaErrorInvalidValue, "a batch has at least one product");
    std::string name = std::to_string(problem.m) + "_" + std::to_string(problem.n) + "_" + std::to_string(problem.k);
    if (!kind.plain()) name += " " + kind.fusion + (problem.batch == CUDAL2GEN_ALONE ? "" : " x" + std::to_string(problem.products));
    if (problem.prefer != CUDAL2GEN_KERNEL) {
      auto const measured = chosen.find({kind, sizes, products_of(problem)});
      if (measured != chosen.end()) {
        choice = measured->second;
        return CUDAL2GEN_OK;
      }
      if (problem.prefer == CUDAL2GEN_INFERRED && infer(kind, sizes, choice)) return CUDAL2GEN_OK;
      if (card.other_model())
        return refuse(CUDAL2GEN_VENDOR, name + ": nothing was measured on this card; the kernels are " + card.pack_gpu + "'s");
      return refuse(CUDAL2GEN_VENDOR, name + ": no kernel was measured faster than the vendor's library");
    }
    choice = {-1, 0};
    for (size_t i = 0; i < kernels.size(); ++i) {
      PackKernel const& kernel = kernels[i];
      if (kernel.kind == kind && kernel.takes(sizes) &&
          (choice.kernel < 0 || kernel.distance(sizes) < kernels[choice.kernel].distance(sizes)))
        choice.kernel = int(i);
    }
    return choice.kernel < 0 ? refuse(CUDAL2GEN_VENDOR, name + ": no kernel of this pack computes it") : CUDAL2GEN_OK;
  }

  // Chooses the kernel that has this fusion or batch and the design of the plain kernel that was measured faster.
  bool infer(Kind const& kind, Sizes const& sizes, Choice& choice) const {
    auto const plain = chosen.find({kind.alone(), sizes, 1});
    if (kind.plain() || plain == chosen.end()) return false;
    for (size_t i = 0; i < kernels.size(); ++i)
      if (kernels[i].kind == kind && kernels[i].plain == plain->second.kernel && kernels[i].takes(sizes)) {
        choice = {int(i), 0};
        return true;
      }
    return false;
  }

  std::string kernel_folder(std::string const& digest) const { return directory + "/kernels/" + digest; }

  int open(PackKernel& kernel) {
    std::lock_guard<std::mutex> const guard(opening);
    if (kernel.opened) return CUDAL2GEN_OK;
    if (!kernel.refused.empty()) return refuse(CUDAL2GEN_REFUSED, kernel.refused);
    std::string const folder = kernel_folder(kernel.digest);
    int const code = cudal2gen_open(folder.c_str(), kernel.options.c_str(), runtime.empty() ? nullptr : runtime.c_str(), &kernel.opened);
    if (!unloadable(code)) return code ? refuse(code, cudal2gen_message()) : CUDAL2GEN_OK;
    kernel.refused = std::string(cudal2gen_message()) + "; update the driver, or make the pack anew";
    return refuse(CUDAL2GEN_REFUSED, kernel.refused);
  }
};

namespace {

// Reads the current device, and whether it is of the pack's model: its name has all words of the title and none of other
// models', and it has as many SMs. The Python package decides alike (chips.py) and wrote these words.
int identify(Tokens const& facts, char const* runtime, Card& card) {
  void* const library = dlopen(runtime ? runtime : "libcudart.so.13", RTLD_NOW | RTLD_LOCAL);
  if (!library) return refuse(cudaErrorInitializationError, dlerror());
  auto const get_device = reinterpret_cast<decltype(&cudaGetDevice)>(dlsym(library, "cudaGetDevice"));
  auto const properties =
      reinterpret_cast<cudaError_t (*)(cudaDeviceProp*, int)>(dlsym(library, "cudaGetDeviceProperties"));
  auto const last_error = reinterpret_cast<decltype(&cudaGetLastError)>(dlsym(library, "cudaGetLastError"));
  if (!get_device || !properties || !last_error) return refuse(cudaErrorSymbolNotFound, "the CUDA runtime is not of version 13");
  int number = 0;
  cudaDeviceProp device_facts = {};
  cudaError_t error = get_device(&number);
  if (!error) error = properties(&device_facts, number);
  if (error) {
    last_error();  // clears it: the program would find it at its own next call
    return refuse(error, "no CUDA device answers");
  }
  std::set<std::string> const name = words(device_facts.name), title = words(facts.at("title")), others = words(facts.at("others"));
  bool same = std::includes(name.begin(), name.end(), title.begin(), title.end()) &&
              device_facts.multiProcessorCount == std::stoi(facts.at("sms"));
  for (auto const& word : name) same = same && (title.count(word) || !others.count(word));
  card = {device_facts.name, same ? "" : facts.at("gpu"), 10 * device_facts.major + device_facts.minor,
          int64_t(device_facts.sharedMemPerBlockOptin)};
  return CUDAL2GEN_OK;
}

int number(Tokens const& tokens, char const* name) {
  auto const token = tokens.find(name);
  return token == tokens.end() ? 0 : std::atoi(token->second.c_str());
}

int enumerated(Tokens const& tokens, char const* name, char const* second) { return tokens.at(name) == second; }

// The type of A and B, which a line states if it is not the first of its enum; the enum has the order of `kElements`.
int typed_ab(Tokens const& tokens) {
  auto const token = tokens.find("ab");
  if (token == tokens.end()) return CUDAL2GEN_AB_F16;
  auto const type = std::find_if(std::begin(cudal2gen::kElements), std::end(cudal2gen::kElements),
                                 [&](cudal2gen::Element const& element) { return token->second == element.name; });
  if (type == std::end(cudal2gen::kElements)) throw std::runtime_error("ab is unknown");
  return int(type - std::begin(cudal2gen::kElements));
}

int typed_d(Tokens const& tokens) {
  auto const token = tokens.find("d");
  if (token != tokens.end() && token->second != "f32") throw std::runtime_error("d is unknown");
  return token != tokens.end();
}

int batch_of(Tokens const& tokens) {
  auto const token = tokens.find("batch");
  if (token == tokens.end()) return CUDAL2GEN_ALONE;
  if (token->second != "strided" && token->second != "grouped") throw std::runtime_error("batch is unknown");
  return token->second == "strided" ? CUDAL2GEN_STRIDED : CUDAL2GEN_GROUPED;
}

// Adds the kernel or the choice of a line; other lines are ignored. On a card of another model, kernels that it does not
// run are ignored too, and so are choices, since a measurement says nothing of another card. Throws std::exception if a
// line lacks a token.
void add(cudal2gen_pack& pack, std::string const& kind, Tokens const& tokens) {
  if (kind != "kernel" && (kind != "choice" || pack.card.other_model())) return;
  Sizes const sizes = {number(tokens, "m"), number(tokens, "n"), number(tokens, "k")};
  Kind const own = {{typed_ab(tokens), typed_d(tokens), enumerated(tokens, "acc", "f32"),
                     enumerated(tokens, "layout", "nn"), batch_of(tokens)},
                    tokens.count("fusion") ? tokens.at("fusion") : "none"};
  if (kind == "choice") {
    pack.chosen[{own, sizes, tokens.count("products") ? number(tokens, "products") : 1}] = {number(tokens, "kernel"), std::atof(tokens.at("low").c_str())};
  } else {
    std::string options = tokens.count("options") ? tokens.at("options") : "";
    std::replace(options.begin(), options.end(), ',', ' ');
    std::ifstream file(pack.kernel_folder(tokens.at("digest")) + "/kernel.launch");
    cudal2gen::Tokens facts(file, "fact");
    cudal2gen::Launch const launch(facts);
    if (!facts.fault().empty()) throw std::runtime_error(facts.fault());
    int const plain = tokens.count("plain") ? number(tokens, "plain") : -1;
    int const first = std::stoi(tokens.at("first")), last = std::stoi(tokens.at("last")), smem = std::stoi(tokens.at("smem"));
    if (pack.card.other_model() && (pack.card.capability < first || pack.card.capability > last)) return;
    bool const fits = !pack.card.other_model() || smem <= pack.card.smem_bytes;
    pack.kernels.push_back({tokens.at("digest"), options, own, sizes, plain, launch, fits, nullptr, ""});
  }
}

int load(cudal2gen_pack& pack, char const* runtime) {
  std::string text;
  if (!read(pack.directory + "/pack.txt", text)) return refuse(CUDAL2GEN_BAD_PACK, pack.directory + " holds no pack.txt");
  // The last line is the digest of all lines before it.
  size_t const last = text.rfind("sha256=");
  if (last == std::string::npos || text.substr(last) != "sha256=" + Sha256::of(text.substr(0, last)) + "\n")
    return refuse(CUDAL2GEN_BAD_PACK, pack.directory + "/pack.txt is truncated or was altered");
  std::istringstream lines(text.substr(0, last));
  for (std::string line; std::getline(lines, line);) {
    Tokens tokens;
    std::string const kind = parse(line, tokens);
    if (kind == "pack") {
      if (tokens.at("format") != "1") return refuse(CUDAL2GEN_BAD_PACK, pack.directory + " is of another format");
      if (int const code = identify(tokens, runtime, pack.card)) return code;
    } else if (kind == "file") {
      std::string const path = pack.directory + "/" + tokens.at("path");
      std::string content;
      if (!read(path, content)) return refuse(CUDAL2GEN_BAD_PACK, path + " is missing");
      if (Sha256::of(content) != tokens.at("sha256")) return refuse(CUDAL2GEN_BAD_PACK, path + " is truncated or was altered");
    } else {
      add(pack, kind, tokens);
    }
  }
  // at() throws for a choice of a kernel that is not there.
  for (auto const& [problem, choice] : pack.chosen) pack.kernels.at(size_t(choice.kernel));
  if (!pack.kernels.empty() || !pack.card.other_model()) return CUDAL2GEN_OK;
  return refuse(CUDAL2GEN_BAD_PACK, "no kernels for " + pack.card.name + " (sm_" + std::to_string(pack.card.capability) +
                                        "): this pack is for " + pack.card.pack_gpu + "; see 'cudal2gen pack --help'");
}

}  // namespace

extern "C" {

char const* cudal2gen_last_error() { return message.c_str(); }

int cudal2gen_pack_open(char const* directory, char const* runtime, cudal2gen_pack** out) {
  message.clear();
  *out = nullptr;
  auto pack = std::make_unique<cudal2gen_pack>();
  pack->directory = directory;
  pack->runtime = runtime ? runtime : "";
  try {
    if (int const code = load(*pack, runtime)) return code;
  } catch (std::exception const&) {  // undamaged, and yet written by something else
    return refuse(CUDAL2GEN_BAD_PACK, pack->directory + "/pack.txt is not one that this library understands");
  }
  *out = pack.release();
  return CUDAL2GEN_OK;
}

int cudal2gen_pack_close(cudal2gen_pack* pack) {
  message.clear();
  int code = CUDAL2GEN_OK;
  for (PackKernel& kernel : pack->kernels)
    if (kernel.opened && cudal2gen_close(kernel.opened)) code = refuse(cudaErrorUnknown, "a kernel could not be unloaded");
  delete pack;
  return code;
}

int cudal2gen_query(cudal2gen_pack* pack, cudal2gen_problem const* problem, cudal2gen_answer* answer) {
  message.clear();
  Choice choice = {};
  if (int const code = pack->choose(*problem, choice)) return code;
  PackKernel& kernel = pack->kernels[choice.kernel];
  if (int const code = pack->open(kernel)) return code;
  // A grouped launch sums within its CTAs and needs no workspace, however many groups there are.
  int const products = problem->batch == CUDAL2GEN_GROUPED ? 1 : products_of(*problem);
  *answer = {kernel.digest.c_str(), choice.speedup,
             cudal2gen_batch_workspace_bytes(kernel.opened, problem->m, problem->n, problem->k, products)};
  return CUDAL2GEN_OK;
}

int cudal2gen_gemm(cudal2gen_pack* pack, cudal2gen_problem const* problem, void const* a, int lda, void const* b, int ldb,
                   void* d, int ldd, cudal2gen_operands const* operands, void* workspace, void* stream) {
  message.clear();
  Choice choice = {};
  if (int const code = pack->choose(*problem, choice)) return code;
  PackKernel& kernel = pack->kernels[choice.kernel];
  if (!operands && !kernel.kind.plain())
    return refuse(cudaErrorInvalidValue, "a fused or batched product needs operands: call cudal2gen_gemm with them");
  if (int const code = pack->open(kernel)) return code;
  cudal2gen_operands const own = operands ? *operands : cudal2gen_operands{};
  cudal2gen_fused const fused = {own.bias, own.c, own.ldc, own.alpha, own.beta, own.aux, own.ldaux};
  auto const [m, n, k] = Sizes{problem->m, problem->n, problem->k};
  int code = cudaSuccess;
  if (problem->batch == CUDAL2GEN_GROUPED) {
    cudal2gen::Groups const groups = {own.ends, problem->products, own.stride_b, own.stride_bias};
    code = cudal2gen_launch_grouped(kernel.opened, a, lda, b, ldb, d, ldd, m, n, k, &groups, &fused, stream);
  } else if (problem->batch == CUDAL2GEN_STRIDED) {
    cudal2gen::Batches const batches = {problem->products, own.stride_a, own.stride_b, own.stride_d,
                                        own.stride_bias, own.stride_c, own.stride_aux};
    code = cudal2gen_launch_batched(kernel.opened, a, lda, b, ldb, d, ldd, m, n, k, &batches, &fused, workspace, stream);
  } else {
    code = cudal2gen_launch_fused(kernel.opened, a, lda, b, ldb, d, ldd, m, n, k, &fused, workspace, stream);
  }
  return code ? refuse(code, cudal2gen_message()) : CUDAL2GEN_OK;
}

int cudal2gen_matmul(cudal2gen_pack* pack, cudal2gen_problem const* problem, void const* a, int lda, void const* b,
                     int ldb, void* d, int ldd, void* workspace, void* stream) {
  return cudal2gen_gemm(pack, problem, a, lda, b, ldb, d, ldd, nullptr, workspace, stream);
}

}  // extern "C"
