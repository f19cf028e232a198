// Reads a pack, which is pack.txt and the files whose digests it has, and chooses kernels by its table. It is linked into one
// library with the generic launcher (launcher.cpp) and the C interface (interface.cpp), but with no CUDA library.
#include "pack.h"

#include "runtime.h"
#include "sha256.h"

#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>
#include <utility>

namespace cudal2gen {

namespace {

using Values = std::map<std::string, std::string>;

// Returns the first word of a line of pack.txt, and stores its `name=value` tokens.
std::string parse(std::string const& line, Values& tokens) {
  std::istringstream text(line);
  std::string first, token;
  text >> first;
  while (text >> token) {
    auto const split = token.find('=');
    if (split != std::string::npos) tokens[token.substr(0, split)] = token.substr(split + 1);
  }
  return first;
}

// Stores the content of a file. Returns false if it cannot be read.
bool read(std::string const& path, std::string& content) {
  std::ifstream file(path, std::ios::binary);
  content.assign(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  return bool(file);
}

// Returns the words of a text, which are runs of letters and digits, in lower case.
std::set<std::string> words(std::string text) {
  for (char& c : text) c = std::isalnum(static_cast<unsigned char>(c)) ? char(std::tolower(c)) : ' ';
  std::istringstream stream(text);
  return {std::istream_iterator<std::string>(stream), std::istream_iterator<std::string>()};
}

// The text of a fusion as in kernel/fusion.py.
std::string spell(cudal2gen_fusion const& fusion) {
  static constexpr char const *kBiases[] = {"", "bias_n", "bias_m"}, *kActivations[] = {"", "relu", "gelu_tanh", "gelu", "silu"};
  std::string text;
  for (char const* part : {fusion.alpha ? "alpha" : "", kBiases[fusion.bias], fusion.residual ? "residual" : "",
                           fusion.aux ? "aux" : "", kActivations[fusion.activation], fusion.gate ? "gate" : ""})
    if (*part) text += (text.empty() ? "" : "+") + std::string(part);
  return text.empty() ? "none" : text;
}

Kind kind_of(cudal2gen_problem const& problem) {
  return {{problem.ab, problem.d, problem.acc, problem.layout, problem.batch}, spell(problem.fusion)};
}

// Whether an error code means that the driver refuses a kernel's image: the driver is too old, or the image is for other
// cards. `open` does not try such a kernel again.
bool unloadable(int code) {
  return code == cudaErrorInsufficientDriver || code == cudaErrorInvalidKernelImage ||
         code == cudaErrorNoKernelImageForDevice || code == cudaErrorInvalidPtx || code == cudaErrorUnsupportedPtxVersion;
}

}  // namespace

bool PackKernel::takes(Sizes const& problem, int products) const {
  auto const [m, n, k] = problem;
  int const row_a = launch.row_a(m, k), row_b = launch.row_b(n, k), row_d = launch.d_cols(n);
  int const vector = 16 / launch.element.bytes;
  Matrix const a = {nullptr, row_a, row_a}, b = {nullptr, row_b, row_b};
  Matrix const d = {nullptr, ceil_div(row_d, vector) * vector, row_d};
  return fits && !launch.refuse_sizes(m, n, k) && !launch.refuse_operands(a, b, d) && !launch.refuse_count(products, m, n);
}

double PackKernel::distance(Sizes const& problem) const {
  double octaves = 0;
  for (int i = 0; i < 3; ++i) octaves += std::abs(std::log2(double(problem[i]) / sizes[i]));
  return octaves;
}

int products_of(cudal2gen_problem const& problem) { return problem.batch == CUDAL2GEN_ALONE ? 1 : problem.products; }

namespace {

// Returns the number that a caller stored in an enum. It may be out of the enum's range, and reading such a number as the enum would
// be undefined behaviour.
template <class Enum>
int enum_value(Enum const& field) {
  static_assert(sizeof(Enum) == sizeof(int));
  int value;
  std::memcpy(&value, &field, sizeof value);
  return value;
}

}  // namespace

int check(cudal2gen_problem const& problem) {
  struct {
    char const* name;
    int value, last;
  } const enums[] = {{"acc", enum_value(problem.acc), CUDAL2GEN_F32},
                     {"layout", enum_value(problem.layout), CUDAL2GEN_TT},
                     {"prefer", enum_value(problem.prefer), CUDAL2GEN_INFERRED},
                     {"ab", enum_value(problem.ab), int(std::size(kElements)) - 1},
                     {"d", enum_value(problem.d), CUDAL2GEN_D_F32},
                     {"fusion.bias", enum_value(problem.fusion.bias), CUDAL2GEN_BIAS_M},
                     {"fusion.activation", enum_value(problem.fusion.activation), CUDAL2GEN_SILU},
                     {"batch", enum_value(problem.batch), CUDAL2GEN_GROUPED}};
  for (auto const& each : enums)
    if (each.value < 0 || each.value > each.last)
      return invalid(std::string(each.name) + "=" + std::to_string(each.value) + " is none of the header's");
  if (std::min({problem.m, problem.n, problem.k}) < 0) return invalid("m, n and k must not be negative");
  if (products_of(problem) < 0) return invalid("products must not be negative");
  return CUDAL2GEN_OK;
}

}  // namespace cudal2gen

using namespace cudal2gen;

int cudal2gen_pack::choose(cudal2gen_problem const& problem, Choice& choice) const {
  Sizes const sizes = {problem.m, problem.n, problem.k};
  int const products = products_of(problem);
  Kind const kind = kind_of(problem);
  auto const name = [&] {
    std::string const text = std::to_string(problem.m) + "_" + std::to_string(problem.n) + "_" + std::to_string(problem.k);
    if (kind.plain()) return text;
    return text + " " + kind.fusion + (problem.batch == CUDAL2GEN_ALONE ? "" : " x" + std::to_string(products));
  };
  if (!problem.m || !problem.n || !products) return choice = {kNothing, 0}, CUDAL2GEN_OK;
  if (!problem.k) {
    if (!kind.plain()) return refuse(CUDAL2GEN_VENDOR, name() + ": no kernel applies a fusion or a batch to sums of no products");
    return choice = {kZeros, 0}, CUDAL2GEN_OK;
  }
  if (problem.prefer != CUDAL2GEN_KERNEL) {
    auto const measured = chosen.find({kind, sizes, products});
    if (measured != chosen.end()) return choice = measured->second, CUDAL2GEN_OK;
    if (problem.prefer == CUDAL2GEN_INFERRED && infer(kind, sizes, products, choice)) return CUDAL2GEN_OK;
    if (card.other_model())
      return refuse(CUDAL2GEN_VENDOR, name() + ": nothing was measured on this card; the kernels are " + card.pack_gpu + "'s");
    return refuse(CUDAL2GEN_VENDOR, name() + ": no kernel was measured faster than the vendor's library");
  }
  std::vector<int> const able = candidates(problem);
  if (able.empty()) return refuse(CUDAL2GEN_VENDOR, name() + ": no kernel of this pack computes it");
  return choice = {able.front(), 0}, CUDAL2GEN_OK;
}

std::vector<int> cudal2gen_pack::candidates(cudal2gen_problem const& problem) const {
  Sizes const sizes = {problem.m, problem.n, problem.k};
  Kind const kind = kind_of(problem);
  std::vector<std::pair<double, int>> able;
  for (size_t i = 0; i < kernels.size(); ++i)
    if (kernels[i].kind == kind && kernels[i].takes(sizes, products_of(problem))) able.emplace_back(kernels[i].distance(sizes), int(i));
  std::sort(able.begin(), able.end());
  std::vector<int> numbers;
  for (auto const& each : able) numbers.push_back(each.second);
  return numbers;
}

// Chooses the kernel that has this fusion or batch and the design of the plain kernel that was measured faster.
bool cudal2gen_pack::infer(Kind const& kind, Sizes const& sizes, int products, Choice& choice) const {
  auto const plain = chosen.find({kind.alone(), sizes, 1});
  if (kind.plain() || plain == chosen.end()) return false;
  for (size_t i = 0; i < kernels.size(); ++i)
    if (kernels[i].kind == kind && kernels[i].plain == plain->second.kernel && kernels[i].takes(sizes, products)) {
      choice = {int(i), 0};
      return true;
    }
  return false;
}

int cudal2gen_pack::open(int number) {
  PackKernel& kernel = kernels[size_t(number)];
  std::lock_guard<std::mutex> const guard(opening);
  if (kernel.opened) return CUDAL2GEN_OK;
  if (!kernel.refused.empty()) return refuse(CUDAL2GEN_REFUSED, kernel.refused);
  std::string const folder = kernel_folder(kernel.digest);
  int const code = cudal2gen_open(folder.c_str(), kernel.options.c_str(), runtime.empty() ? nullptr : runtime.c_str(), &kernel.opened);
  if (!unloadable(code)) return code ? refuse(code, cudal2gen_message()) : CUDAL2GEN_OK;
  kernel.refused = std::string(cudal2gen_message()) + "; update the driver, or make the pack anew";
  return refuse(CUDAL2GEN_REFUSED, kernel.refused);
}

bool cudal2gen_pack::unload() {
  bool all = true;
  for (PackKernel& kernel : kernels)
    if (cudal2gen_kernel* const opened = std::exchange(kernel.opened, nullptr)) all = !cudal2gen_close(opened) && all;
  return all;
}

namespace cudal2gen {

namespace {

// Sets a pointer to the library's function of this name; null if it has none.
template <class Function>
void find(void* library, char const* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
}

// Looks up the functions of the CUDA runtime that only packs call.
void connect(void* library, HostRuntime& host) {
  find(library, "cudaMemset2DAsync", host.memset_2d);
  find(library, "cudaEventCreate", host.event_create);
  find(library, "cudaEventDestroy", host.event_destroy);
  find(library, "cudaEventRecord", host.event_record);
  find(library, "cudaEventSynchronize", host.event_synchronize);
  find(library, "cudaEventElapsedTime", host.event_elapsed);
  find(library, "cudaStreamIsCapturing", host.is_capturing);
  find(library, "cudaGetErrorString", host.error_string);
  find(library, "cudaGetLastError", host.last_error);
}

// Identifies the current device. It is of the pack's model if its name has all words of the model's title and no word that
// only other models have, and if it has the model's number of SMs. chips.py has the same rule and wrote these words.
int identify(Values const& facts, char const* runtime, HostRuntime& host, Card& card) {
  cudaError_t unusable = cudaSuccess;
  std::string why;
  void* const library = open_runtime(runtime, unusable, why);
  if (!library) return refuse(unusable, why);
  auto const get_device = reinterpret_cast<decltype(&cudaGetDevice)>(dlsym(library, "cudaGetDevice"));
  auto const attribute = reinterpret_cast<decltype(&cudaDeviceGetAttribute)>(dlsym(library, "cudaDeviceGetAttribute"));
  auto const properties = reinterpret_cast<cudaError_t (*)(void*, int)>(dlsym(library, "cudaGetDeviceProperties"));
  connect(library, host);
  if (!get_device || !attribute || !properties || !host.last_error || !host.error_string) return refuse(cudaErrorSymbolNotFound, "the CUDA runtime lacks functions of CUDA " + std::to_string(CUDAL2GEN_CUDA));
  // CUDA 12 and 13 write structures of different lengths. Both begin with the name, which is all that is read here.
  alignas(cudaDeviceProp) char device_name[4 * sizeof(cudaDeviceProp)] = {};
  int device = 0, major = 0, minor = 0, sms = 0, smem = 0;
  cudaError_t error = get_device(&device);
  if (!error) error = properties(device_name, device);
  if (!error) error = attribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (!error) error = attribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (!error) error = attribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (!error) error = attribute(&smem, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error) {
    host.last_error();  // clears it: the program would find it at its own next call
    return refuse(error, "no CUDA device answers");
  }
  std::set<std::string> const name = words(device_name), title = words(facts.at("title")), others = words(facts.at("others"));
  bool same = std::includes(name.begin(), name.end(), title.begin(), title.end()) &&
              sms == std::stoi(facts.at("sms"));
  for (auto const& word : name) same = same && (title.count(word) || !others.count(word));
  card = {device_name, same ? "" : facts.at("gpu"), 10 * major + minor, smem};
  return CUDAL2GEN_OK;
}

// Returns the number of a token, 0 if there is none.
int number(Values const& tokens, char const* name) {
  auto const token = tokens.find(name);
  return token == tokens.end() ? 0 : std::atoi(token->second.c_str());
}

// The value of an enum with two members, as a number: 1 if the token is the word of the second one.
int is_second(Values const& tokens, char const* name, char const* second) { return tokens.at(name) == second; }

// The type of A and B as a number of the enum, which has the order of `kElements`. A line without it means fp16.
int ab_of(Values const& tokens) {
  auto const token = tokens.find("ab");
  if (token == tokens.end()) return CUDAL2GEN_AB_F16;
  auto const type = std::find_if(std::begin(kElements), std::end(kElements),
                                 [&](Element const& element) { return token->second == element.name; });
  if (type == std::end(kElements)) throw std::runtime_error("ab is unknown");
  return int(type - std::begin(kElements));
}

int d_of(Values const& tokens) {
  auto const token = tokens.find("d");
  if (token != tokens.end() && token->second != "f32") throw std::runtime_error("d is unknown");
  return token != tokens.end();
}

int layout_of(Values const& tokens) {
  auto const layout = std::find(std::begin(kLayouts), std::end(kLayouts), tokens.at("layout"));
  if (layout == std::end(kLayouts)) throw std::runtime_error("layout is unknown");
  return int(layout - std::begin(kLayouts));
}

int batch_of(Values const& tokens) {
  auto const token = tokens.find("batch");
  if (token == tokens.end()) return CUDAL2GEN_ALONE;
  if (token->second != "strided" && token->second != "grouped") throw std::runtime_error("batch is unknown");
  return token->second == "strided" ? CUDAL2GEN_STRIDED : CUDAL2GEN_GROUPED;
}

// Adds what a line of pack.txt describes, if its first word, line_word, is `kernel` or `choice`. On a card of another model, kernels that it
// does not run are ignored, and so are choices, since a measurement says nothing of another card. Throws std::exception if a line lacks a
// token.
void add_line(cudal2gen_pack& pack, std::string const& line_word, Values const& tokens) {
  if (line_word != "kernel" && (line_word != "choice" || pack.card.other_model())) return;
  Sizes const sizes = {number(tokens, "m"), number(tokens, "n"), number(tokens, "k")};
  Kind const kind = {{ab_of(tokens), d_of(tokens), is_second(tokens, "acc", "f32"), layout_of(tokens), batch_of(tokens)},
                    tokens.count("fusion") ? tokens.at("fusion") : "none"};
  if (line_word == "choice") {
    pack.chosen[{kind, sizes, tokens.count("products") ? number(tokens, "products") : 1}] = {number(tokens, "kernel"), std::atof(tokens.at("low").c_str())};
  } else {
    std::string options = tokens.count("options") ? tokens.at("options") : "";
    std::replace(options.begin(), options.end(), ',', ' ');
    std::ifstream file(pack.kernel_folder(tokens.at("digest")) + "/kernel.launch");
    Tokens facts(file, "fact");
    Launch const launch(facts);
    if (!facts.fault().empty()) throw std::runtime_error(facts.fault());
    int const plain = tokens.count("plain") ? number(tokens, "plain") : -1;
    // The first and last compute capability on which the kernel runs, and its shared memory per CTA in bytes.
    int const first = std::stoi(tokens.at("first")), last = std::stoi(tokens.at("last")), smem = std::stoi(tokens.at("smem"));
    if (pack.card.other_model() && (pack.card.capability < first || pack.card.capability > last)) return;
    bool const fits = !pack.card.other_model() || smem <= pack.card.smem_bytes;
    pack.kernels.push_back({tokens.at("digest"), options, kind, sizes, plain, launch, fits, nullptr, ""});
  }
}

}  // namespace

int load(cudal2gen_pack& pack, char const* runtime) {
  std::string text;
  if (!read(pack.directory + "/pack.txt", text)) return refuse(CUDAL2GEN_BAD_PACK, pack.directory + " holds no pack.txt");
  // The last line is the digest of all lines before it.
  size_t const last = text.rfind("sha256=");
  if (last == std::string::npos || text.substr(last) != "sha256=" + Sha256::hex_digest(text.substr(0, last)) + "\n")
    return refuse(CUDAL2GEN_BAD_PACK, pack.directory + "/pack.txt is truncated or was altered");
  std::istringstream lines(text.substr(0, last));
  for (std::string line; std::getline(lines, line);) {
    Values tokens;
    std::string const line_word = parse(line, tokens);
    if (line_word == "pack") {
      if (tokens.at("format") != "1") return refuse(CUDAL2GEN_BAD_PACK, pack.directory + " is of another format");
      if (int const code = identify(tokens, runtime, pack.host, pack.card)) return code;
    } else if (line_word == "file") {
      std::string const path = pack.directory + "/" + tokens.at("path");
      std::string content;
      if (!read(path, content)) return refuse(CUDAL2GEN_BAD_PACK, path + " is missing");
      if (Sha256::hex_digest(content) != tokens.at("sha256")) return refuse(CUDAL2GEN_BAD_PACK, path + " is truncated or was altered");
    } else {
      add_line(pack, line_word, tokens);
    }
  }
  // at() throws if a choice names a kernel that the pack does not have.
  for (auto const& [problem, choice] : pack.chosen) pack.kernels.at(size_t(choice.kernel));
  if (!pack.kernels.empty() || !pack.card.other_model()) return CUDAL2GEN_OK;
  return refuse(CUDAL2GEN_BAD_PACK, "no kernels for " + pack.card.name + " (sm_" + std::to_string(pack.card.capability) +
                                        "): this pack is for " + pack.card.pack_gpu + "; see 'cudal2gen pack --help'");
}

}  // namespace cudal2gen
