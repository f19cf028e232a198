// What the launcher shares with kernel/launch.py: the facts of a built kernel in its file kernel.launch, the options with which
// it is opened, and the rules by which sizes and matrices are refused.
#ifndef CUDAL2GEN_LAUNCH_H
#define CUDAL2GEN_LAUNCH_H

#include <cuda.h>
#include <driver_types.h>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <istream>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "sized.h"

namespace cudal2gen {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Why something is refused. Code 0 means that it is accepted.
struct Refusal {
  cudaError_t code = cudaSuccess;
  char const* why = "";

  explicit operator bool() const { return code != cudaSuccess; }
};

// The operations that a kernel applies to its sums, see `Fusion` in kernel/fusion.py. The launcher does not need the activation.
struct Fusion {
  bool any = false, bias_n = false, bias_m = false, residual = false, aux = false, gate = false;

  bool bias() const { return bias_n || bias_m; }
};

// Parses "none", or parts joined by +, in the order in which they are applied and at most one of each kind. Returns false if
// the text is not such a list, or if parts in it exclude each other.
inline bool parse_fusion(std::string const& text, Fusion& fusion) {
  // The number of a part is its place in the order; parts with the same number exclude each other.
  static constexpr std::pair<char const*, int> kParts[] = {
      {"alpha", 0}, {"bias_n", 1}, {"bias_m", 1}, {"residual", 2},
      {"aux", 3},   {"relu", 4},   {"gelu_tanh", 4}, {"gelu", 4},  {"silu", 4}, {"gate", 5}};
  if (text == "none") return true;
  int last = -1;
  for (size_t begin = 0; begin <= text.size();) {
    size_t const end = std::min(text.find('+', begin), text.size());
    std::string const word = text.substr(begin, end - begin);
    auto const part = std::find_if(std::begin(kParts), std::end(kParts), [&](auto const& candidate) { return word == candidate.first; });
    if (part == std::end(kParts) || part->second <= last) return false;
    last = part->second;
    fusion.any = true;
    fusion.bias_n |= word == "bias_n";
    fusion.bias_m |= word == "bias_m";
    fusion.residual |= word == "residual";
    fusion.aux |= word == "aux";
    fusion.gate |= word == "gate";
    begin = end + 1;
  }
  return !(fusion.residual && fusion.gate) && !(fusion.aux && last < 4);  // aux needs an activation or a gate
}

// Tokens `name=value`, separated by white space. A token is removed when it is read. The first fault is kept.
class Tokens {
 public:
  // noun: the word for a token in messages.
  Tokens(std::istream& text, std::string noun) : noun_(std::move(noun)) {
    for (std::string token; text >> token;) {
      auto const split = token.find('=');
      if (split == std::string::npos) blame(token + " is no " + noun_ + ", which is name=value");
      else if (!values_.emplace(token.substr(0, split), token.substr(split + 1)).second)
        blame(noun_ + " " + token.substr(0, split) + " appears more than once");
    }
  }

  // Returns a token's value; "" if it is missing, which is a fault.
  std::string word(std::string const& name) {
    auto const token = values_.find(name);
    if (token == values_.end()) {
      blame(noun_ + " " + name + " is missing");
      return "";
    }
    std::string const value = token->second;
    values_.erase(token);
    return value;
  }

  // Returns the index of a word in the list of legal ones.
  int choice(std::string const& name, std::vector<char const*> const& words) {
    std::string const value = word(name);
    auto const place = std::find(words.begin(), words.end(), value);
    if (place != words.end()) return int(place - words.begin());
    std::string list;
    for (char const* option : words) list += (list.empty() ? "" : ", ") + std::string(option);
    blame(name + "=" + value + ": must be one of " + list);
    return 0;
  }

  // Returns a token's value as a number of at least `least`; another value is a fault.
  int number(std::string const& name, int least = 0) {
    std::string const value = word(name);
    char* end = nullptr;
    long long const parsed = std::strtoll(value.c_str(), &end, 10);
    if (value.empty() || *end || parsed < least || parsed > INT_MAX)
      blame(name + "=" + value + ": must be a number from " + std::to_string(least) + " to " + std::to_string(INT_MAX));
    return int(parsed);
  }

  // Returns the fusion that the text of a token names.
  Fusion fusion(std::string const& name) {
    std::string const value = word(name);
    Fusion fusion;
    if (!parse_fusion(value, fusion)) blame(name + "=" + value + ": must be none, or parts such as bias_n+silu, each once and in order");
    return fusion;
  }

  bool has(std::string const& name) const { return values_.count(name) != 0; }

  // The first fault, in words; empty if there is none and all tokens were read.
  std::string fault() const {
    if (fault_.empty() && !values_.empty()) return "unknown " + noun_ + " " + values_.begin()->first;
    return fault_;
  }

 private:
  void blame(std::string const& why) {
    if (fault_.empty()) fault_ = why;
  }

  std::string noun_, fault_;
  std::map<std::string, std::string> values_;
};

// The type of A and B, or of D.
struct Element {
  char const* name;
  int bytes;
  CUtensorMapDataType map_type;
};

// The types of A and B, as in element.py, and the additional type of D.
constexpr Element kElements[] = {{"f16", 2, CU_TENSOR_MAP_DATA_TYPE_FLOAT16}, {"bf16", 2, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16}};
constexpr Element kF32 = {"f32", 4, CU_TENSOR_MAP_DATA_TYPE_FLOAT32};

// How B and A are stored, in the order of the enum cudal2gen_layout.
constexpr char const* kLayouts[] = {"tn", "nn", "nt", "tt"};

// The `cols` x `rows` elements of a matrix that one TMA copy moves; the swizzle is as wide as a row of them. cols = 0: there is no box.
struct Box {
  int cols = 0, rows = 0;
};

// How a kernel is called. kTiles: with pointers, one CTA for each tile. kTma: with tensor maps. kCluster: with pointers, one cluster for
// each tile, whose CTAs share k.
enum class Convention { kTiles, kTma, kCluster };
enum class Raster { kPlain, kZsplit, kPersistent };  // how the grid of kTiles covers the tiles: choose_grid in launcher.cpp
enum class Reduce { kNone, kWorkspace, kCluster };   // where the slices of k of a tile are added

// A matrix of the caller. Each row has `cols` elements, and rows are `ld` elements apart.
struct Matrix {
  void const* address;
  int64_t ld, cols;

  bool in_vectors(Element const& element) const {
    return reinterpret_cast<uintptr_t>(address) % 16 == 0 && ld * element.bytes % 16 == 0;
  }
  bool packed() const { return ld == cols; }
};

constexpr int kMaxExtent = 1 << 24;         // the largest m, n, k and leading dimension
constexpr int64_t kMostCtaTiles = 1 << 30;  // the most CTA tiles of a launch; the sum of two tile numbers then fits in 32 bits

// Groups of consecutive rows of A and D, each with its own B. `ends`: an array on the device with the row after the last one of
// each group, ascending. `b`, `bias`: strides, which are the elements from one group's B, and from its bias along n, to the next
// one's; 0: all groups share it. It is an argument of the kernel, so its members and layout are those of the kernel's struct.
struct Groups {
  int const* ends = nullptr;
  int count = 0;
  int64_t b = 0, bias = 0;
};

enum class Batch { kNone, kStrided, kGrouped };
constexpr int kMostGroups = 65535;
constexpr int64_t kMostStride = int64_t(1) << 48;  // so that the bytes of a stride do not overflow

// The layout of the workspace: a counter for each tile whose sum is stored in parts, padding to a multiple of 256 bytes, the parts.
// `tiles` and `parts` are their numbers. A part is a tile of bm x bn partial sums in fp32.
struct Scratch {
  int64_t tiles = 0, parts = 0;

  int64_t counter_bytes() const { return tiles * 4; }
  int64_t parts_at() const { return ceil_div(counter_bytes(), 256) * 256; }
};

// The facts of a kernel, as `Launch` of kernel/launch.py has them. From them follow the grid and the workspace of a launch, and which sizes
// and operands are legal.
struct Launch {
  std::string entry;
  Convention convention;
  bool a_along_k, b_along_k;  // whether rows of A and B run along k: A is (m,k) or else (k,m), B is (n,k) or else (k,n)
  int threads, smem_bytes, bm, bn, bk, split_k;
  Raster raster = Raster::kPlain;
  Reduce reduce = Reduce::kNone;
  bool predicated = true, persistent = false, stream_k = false;
  bool returns_counters = false;  // whether a launch leaves the counters of tiles at zero, as it finds them
  int baked_k = 0, cluster_m = 1, cluster_n = 1;
  int k_steps = 0;  // how many k-tiles of a slice a CTA can hold; 0: no limit
  Box box_a, box_b, box_d, box_d_rest;  // box_d_rest: for the columns of a tile of D that box_d leaves
  Element element = kElements[0], output = kElements[0];  // of A and B; of D
  Fusion fusion;
  Batch batch = Batch::kNone;

  explicit Launch(Tokens& facts);

  // The CTAs of a cluster: one for each of its tiles, or for each slice of k of one tile.
  int cluster() const { return reduce == Reduce::kCluster ? split_k : cluster_m * cluster_n; }
  // Whether partial sums of a tile are exchanged in global memory.
  bool needs_workspace() const { return reduce == Reduce::kWorkspace || stream_k; }
  // Whether CTAs wait for each other's partial sums, so that all must run at the same time: a cooperative launch.
  bool waits() const { return convention == Convention::kTma && needs_workspace(); }
  bool stores_vectors() const { return box_d.cols > 0 || !predicated; }
  // The elements in a row of A and of B as stored, and their numbers of rows.
  int row_a(int m, int k) const { return a_along_k ? k : m; }
  int row_b(int n, int k) const { return b_along_k ? k : n; }
  int rows_a(int m, int k) const { return a_along_k ? m : k; }
  int rows_b(int n, int k) const { return b_along_k ? n : k; }
  // The columns of D if the product has n columns.
  int d_cols(int n) const { return fusion.gate ? n / 2 : n; }
  // Tiles along m. For several groups this is an upper bound for any division of the m rows; the kernel leaves unused ones out.
  int64_t row_tiles(int m, int groups) const { return (m + int64_t(groups) * (bm - 1)) / bm; }
  int64_t tiles(int m, int n, int groups = 1) const { return row_tiles(m, groups) * ceil_div(n, bn); }
  // The most clusters that can have work at the same time. `count`: the products of a batch.
  int64_t clusters(int m, int n, int k, int count, int groups = 1) const {
    int64_t const slices = stream_k ? ceil_div(k, bk) : reduce == Reduce::kWorkspace ? split_k : 1;
    return cluster_tiles(m, n, groups) * count * slices;
  }
  // How many clusters it takes to cover D once.
  int64_t cluster_tiles(int m, int n, int groups = 1) const {
    return cluster_rows(m, groups) * cluster_cols(n);
  }
  int64_t cluster_rows(int m, int groups = 1) const { return ceil_div(row_tiles(m, groups), cluster_m); }
  int64_t cluster_cols(int n) const { return ceil_div(ceil_div(n, bn), cluster_n); }
  Scratch scratch(int m, int n, int k, int count, int64_t resident) const;

  Refusal refuse_sizes(int m, int n, int k) const;
  Refusal refuse_operands(Matrix const& a, Matrix const& b, Matrix const& d) const;
  Refusal refuse_fused(void const* bias, Matrix const& c, Matrix const& aux) const;
  Refusal refuse_count(int count, int m, int n) const;
  Refusal refuse_batches(Batches const& batches, int m, int n, int64_t ldd) const;
  Refusal refuse_groups(Groups const& groups, int m, int n) const;
};

// The scratch memory of a launch, for tiles whose sums are stored in parts. `count`: the products of a batch. `resident`: clusters that
// run at once.
inline Scratch Launch::scratch(int m, int n, int k, int count, int64_t resident) const {
  if (!needs_workspace()) return {};
  int64_t const tiles = cluster_tiles(m, n) * count;
  if (!stream_k) return {tiles * cluster(), tiles * cluster() * split_k};
  // Stream-k splits only the tiles of the last, incomplete wave. The running clusters divide the k-steps of these tiles, one tile after the
  // other. The number of a part is the sum of the numbers of its cluster and of its tile, so it is less than last_wave + running.
  int64_t const running = std::min(clusters(m, n, k, count), resident), last_wave = tiles % running;
  return {last_wave * cluster(), last_wave ? (last_wave + running) * cluster() : 0};
}

inline Launch::Launch(Tokens& facts) {
  convention = Convention(facts.choice("launch", {"tiles", "tma", "cluster"}));
  entry = facts.word("entry");
  std::string const layout = kLayouts[facts.choice("layout", {std::begin(kLayouts), std::end(kLayouts)})];
  a_along_k = layout[1] == 'n';
  b_along_k = layout[0] == 't';
  threads = facts.number("threads", 1);
  smem_bytes = facts.number("smem_bytes");
  bm = facts.number("bm", 1);
  bn = facts.number("bn", 1);
  bk = facts.number("bk", 1);
  split_k = facts.number("split_k", 1);
  if (facts.has("fusion")) fusion = facts.fusion("fusion");
  if (facts.has("element")) {
    std::vector<char const*> names;
    for (Element const& type : kElements) names.push_back(type.name);
    element = kElements[facts.choice("element", names)];
  }
  output = facts.has("output") && facts.choice("output", {"same", "f32"}) ? kF32 : element;
  if (facts.has("batch")) batch = Batch(facts.choice("batch", {"none", "strided", "grouped"}));
  auto const counters = [&] { return facts.has("counters") && facts.choice("counters", {"cleared", "returned"}); };
  auto const box = [&](std::string const& name) { return Box{facts.number(name + "_cols"), facts.number(name + "_rows")}; };
  switch (convention) {
    case Convention::kTiles:
      raster = Raster(facts.choice("raster", {"plain", "zsplit", "persistent"}));
      predicated = facts.choice("predicated", {"0", "1"});
      facts.choice("baked_n", {"0"});  // why it is there: kernel/launch.py
      baked_k = facts.number("baked_k");
      returns_counters = counters();
      reduce = split_k > 1 ? Reduce::kWorkspace : Reduce::kNone;
      persistent = raster == Raster::kPersistent;
      break;
    case Convention::kTma:
      reduce = Reduce(facts.choice("reduce", {"none", "workspace", "cluster"}));
      persistent = facts.choice("persistent", {"0", "1"});
      cluster_m = facts.number("cluster_m", 1);
      cluster_n = facts.number("cluster_n", 1);
      box_a = box("box_a");
      box_b = box("box_b");
      box_d = box("box_d");
      if (facts.has("box_d_rest_cols")) box_d_rest = {facts.number("box_d_rest_cols", 1), box_d.rows};
      stream_k = facts.has("stream_k") && facts.choice("stream_k", {"0", "1"});
      returns_counters = counters();
      break;
    case Convention::kCluster:
      reduce = Reduce(facts.choice("reduce", {"none", "workspace", "cluster"}));
      k_steps = facts.number("steps", 1);
      break;
  }
}

// Refuses sizes that the kernel does not compute.
inline Refusal Launch::refuse_sizes(int m, int n, int k) const {
  if (m <= 0 || n <= 0 || k <= 0) return {cudaErrorInvalidValue, "m, n and k must be positive"};
  if (m > kMaxExtent || n > kMaxExtent || k > kMaxExtent)
    return {cudaErrorInvalidValue, "sizes must not exceed 16777216: offsets within a tile are 32-bit"};
  if (!predicated && (m % bm || n % bn || k % bk))
    return {cudaErrorInvalidValue, "the tile does not divide the problem, and this kernel has no predicates"};
  if (convention != Convention::kTma && predicated && (a_along_k || b_along_k) && k % 8)
    return {cudaErrorInvalidValue, "k must be a multiple of 8: rows along k are read in 16-byte vectors"};
  if (fusion.gate && n % 16) return {cudaErrorInvalidValue, "n must be a multiple of 16: this kernel gates 8 columns by the next 8"};
  if (baked_k && k != baked_k) return {cudaErrorInvalidValue, "this kernel has k baked in: it takes that k only"};
  if (ceil_div(k, bk) < split_k) return {cudaErrorInvalidValue, "k has fewer steps than this kernel has slices"};
  if (k_steps && ceil_div(ceil_div(k, bk), split_k) > k_steps)
    return {cudaErrorInvalidValue, "k is larger than this kernel holds in shared memory"};
  if (tiles(m, n) * split_k > kMostCtaTiles) return {cudaErrorInvalidValue, "the problem has more CTA tiles than are counted"};
  return {};
}

// Refuses matrices whose address, leading dimension or alignment the kernel cannot use, as `Launch.takes` in kernel/launch.py.
inline Refusal Launch::refuse_operands(Matrix const& a, Matrix const& b, Matrix const& d) const {
  if (a.ld > kMaxExtent || b.ld > kMaxExtent || d.ld > kMaxExtent)
    return {cudaErrorInvalidValue, "leading dimensions must not exceed 16777216: offsets within a tile are 32-bit"};
  if (a.ld < a.cols || b.ld < b.cols || d.ld < d.cols) return {cudaErrorInvalidValue, "a leading dimension is shorter than its row"};
  if (baked_k && ((a_along_k && !a.packed()) || (b_along_k && !b.packed())))
    return {cudaErrorInvalidValue, "this kernel has k baked in: it takes that k only, packed"};
  if (!a.in_vectors(element) || !b.in_vectors(element))
    return {cudaErrorMisalignedAddress, "A and B must be aligned to 16 bytes, lda and ldb be multiples of 8"};
  if (stores_vectors() ? !d.in_vectors(output) : reinterpret_cast<uintptr_t>(d.address) % output.bytes != 0)
    return {cudaErrorMisalignedAddress, output.bytes == 4 ? "D must be aligned to 16 bytes, ldd be a multiple of 4"
                                                          : "D must be aligned to 16 bytes, ldd be a multiple of 8"};
  return {};
}

// Refuses a bias, C or aux whose address, leading dimension or alignment the kernel cannot use. The rule for C is that of D.
inline Refusal Launch::refuse_fused(void const* bias, Matrix const& c, Matrix const& aux) const {
  if (fusion.bias() && (!bias || reinterpret_cast<uintptr_t>(bias) % 16))
    return {cudaErrorMisalignedAddress, "this kernel adds a bias, which must be aligned to 16 bytes"};
  if (fusion.aux && (!aux.address || aux.ld < aux.cols || aux.ld > kMaxExtent || !aux.in_vectors(output)))
    return {cudaErrorInvalidValue, "this kernel stores aux (m,n): it must be there, aligned to 16 bytes, ldaux a multiple of 8 (4 for f32)"
                                   " that holds its rows and does not exceed 16777216"};
  if (!fusion.residual) return {};
  if (!c.address || c.ld < c.cols || c.ld > kMaxExtent)
    return {cudaErrorInvalidValue, "this kernel adds beta C: C must be there, ldc hold its rows and not exceed 16777216"};
  if (stores_vectors() ? !c.in_vectors(output) : reinterpret_cast<uintptr_t>(c.address) % output.bytes != 0)
    return {cudaErrorMisalignedAddress, output.bytes == 4 ? "C must lie as D: aligned to 16 bytes, ldc a multiple of 4"
                                                          : "C must lie as D: aligned to 16 bytes, ldc a multiple of 8"};
  return {};
}

// Refuses counts of products or groups for which a launch would have more CTA tiles than are counted.
inline Refusal Launch::refuse_count(int count, int m, int n) const {
  if (batch == Batch::kGrouped) {
    if (count < 1 || count > kMostGroups) return {cudaErrorInvalidValue, "a grouped launch has from 1 to 65535 groups"};
    if (tiles(m, n, count) > kMostCtaTiles) return {cudaErrorInvalidValue, "the groups have more CTA tiles than are counted"};
    return {};
  }
  if (count < 1) return {cudaErrorInvalidValue, "a launch computes at least one product"};
  if (tiles(m, n) * split_k * count > kMostCtaTiles)
    return {cudaErrorInvalidValue, "the batch has more CTA tiles than are counted"};
  return {};
}

// Refuses batches that the kernel cannot use: matrices D must not overlap, and each matrix must be aligned like a single one.
inline Refusal Launch::refuse_batches(Batches const& batches, int m, int n, int64_t ldd) const {
  if (Refusal const refusal = refuse_count(batches.count, m, n)) return refusal;
  if (batches.count == 1) return {};
  if (std::max({batches.a, batches.b, batches.d, batches.bias, batches.c, batches.aux}) > kMostStride)
    return {cudaErrorInvalidValue, "strides of a batch must not exceed 2^48 elements"};
  if (batch != Batch::kStrided)
    return {cudaErrorInvalidValue, "this kernel computes one product a launch; one of batch=strided computes several"};
  if (batches.a < 0 || batches.b < 0 || batches.bias < 0 || batches.c < 0 || batches.aux < 0)
    return {cudaErrorInvalidValue, "strides of a batch must not be negative"};
  int const cols = d_cols(n);
  // Matrices D do not overlap if each begins after the last element of the previous one, or if all lie within the rows of the first.
  bool const disjoint = batches.d >= (m - 1) * ldd + cols;
  bool const interleaved = batches.d >= cols && (batches.count - 1) * batches.d + cols <= ldd;
  if (!disjoint && !interleaved) return {cudaErrorInvalidValue, "matrices D of a batch overlap"};
  if (batches.a * element.bytes % 16 || batches.b * element.bytes % 16 || (stores_vectors() && batches.d * output.bytes % 16))
    return {cudaErrorMisalignedAddress, "matrices of a batch must be aligned to 16 bytes, as the first ones are"};
  if (fusion.bias() && batches.bias * element.bytes % 16)
    return {cudaErrorMisalignedAddress, "each bias of a batch must be aligned to 16 bytes, as the first one is"};
  if (fusion.aux && batches.aux * output.bytes % 16)
    return {cudaErrorMisalignedAddress, "matrices aux of a batch must be aligned to 16 bytes, as the first one is"};
  if (fusion.residual && stores_vectors() && batches.c * output.bytes % 16)
    return {cudaErrorMisalignedAddress, "matrices C of a batch must be aligned to 16 bytes, as the first one is"};
  return {};
}

// Refuses groups that the kernel cannot use. The values of `ends` are on the device, so a launch cannot check them.
inline Refusal Launch::refuse_groups(Groups const& groups, int m, int n) const {
  if (batch != Batch::kGrouped)
    return {cudaErrorInvalidValue, "this kernel computes no groups; one of batch=grouped does"};
  if (Refusal const refusal = refuse_count(groups.count, m, n)) return refusal;
  if (!groups.ends || reinterpret_cast<uintptr_t>(groups.ends) % 4)
    return {cudaErrorInvalidValue, "a grouped launch needs the ends of its groups: int32 on the device, aligned to 4 bytes"};
  if (groups.b < 0 || groups.bias < 0) return {cudaErrorInvalidValue, "strides of groups must not be negative"};
  if (std::max(groups.b, groups.bias) > kMostStride) return {cudaErrorInvalidValue, "strides of groups must not exceed 2^48 elements"};
  if (groups.b * element.bytes % 16 || (fusion.bias_n && groups.bias * element.bytes % 16))
    return {cudaErrorMisalignedAddress, "B and bias of each group must be aligned to 16 bytes, as the first ones are"};
  return {};
}

// L2 eviction priorities, as createpolicy.fractional encodes them: normal, first, last.
constexpr uint64_t kPolicies[] = {0x1000000000000000, 0x12F0000000000000, 0x14F0000000000000};

// A number by which kernels divide, with its reciprocal, as the Divisor of a kernel's text (templates/macros/tma.j2).
struct Divisor {
  uint32_t number, multiplier, shift;

  explicit Divisor(uint32_t number)
      : number(number), multiplier(0), shift(31 - uint32_t(__builtin_clz(number))) {
    multiplier = uint32_t(((uint64_t(1) << (32 + shift)) - 1) / number);
  }
};

// How a kernel numbers its cluster tiles, of which there are `rows` along m and `cols` along n: as the Bands of its text.
struct Bands {
  uint32_t along_n, along, across;
  Divisor tiles, width, last_width;

  Bands(int64_t rows, int64_t cols, int along_n, int band)
      : along_n(uint32_t(along_n)), along(uint32_t(along_n ? cols : rows)), across(uint32_t(along_n ? rows : cols)),
        tiles(along * uint32_t(band)), width(uint32_t(band)), last_width(std::max(across % uint32_t(band), 1u)) {}
};

// The options of a launch, which are not compiled into the kernel; see kernel/launch.py for those of each convention. swizzle_stride: columns
// of a slice of a zsplit grid. along_n, band: tiles are visited in bands that are `band` tiles wide; bands run along n if along_n is 1, else
// along m. policy_a, policy_b: the priorities of A and B in the L2. overlaps: whether the kernel may start before the previous one ends (option pdl).
struct Options {
  int64_t swizzle_stride = 0;
  int along_n = 0, band = 1;
  uint64_t policy_a = kPolicies[0], policy_b = kPolicies[0];
  bool overlaps = false;

  Options(Tokens& options, Launch const& launch) {
    if (launch.convention == Convention::kTiles && options.has("swizzle_stride"))
      swizzle_stride = options.number("swizzle_stride", 1);
    if (launch.convention == Convention::kTiles) return;
    if (options.has("pdl")) overlaps = options.choice("pdl", {"0", "1"});
    if (launch.convention == Convention::kCluster) return;
    if (options.has("raster_axis")) along_n = options.choice("raster_axis", {"0", "1"});
    if (options.has("raster_group")) band = options.number("raster_group", 1);
    if (options.has("hint_a")) policy_a = kPolicies[options.choice("hint_a", {"0", "1", "2"})];
    if (options.has("hint_b")) policy_b = kPolicies[options.choice("hint_b", {"0", "1", "2"})];
  }
};

}  // namespace cudal2gen

#endif
