// Decides whether a kernel that was timed against the vendor's product is used. operators/measuring/rule.py has the same rule and its
// reasons; tests/cudal2gen/test_c_interface.py compares the two.
#ifndef CUDAL2GEN_RACE_RULE_H
#define CUDAL2GEN_RACE_RULE_H

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

namespace cudal2gen {

constexpr double kMargin = 0.01;    // the bound on the median of the pairs must show at least this gain
constexpr double kGain = 0.1;       // least expected gain with which a kernel is accepted
constexpr double kBias = 0.03;      // standard deviation of a contender's constant bias, as a log ratio of times
constexpr double kPrior = 1;        // weight of kBias in the estimate of the spread, in kernels
constexpr double kFarthest = 0.2;   // log ratio from the kernels' median at which others are clipped
constexpr double kRisk = 0.005;     // probability that the median of the pairs lies below its bound

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  size_t const middle = values.size() / 2;
  return values.size() % 2 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

// Returns a value that is below the median with a probability of at least 1 - kRisk, for any distribution of the samples: an order
// statistic. Returns -infinity if there are too few samples.
inline double low_median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  double const count = double(values.size());
  double share = std::pow(0.5, count), below = share;
  size_t rank = 0;
  for (; below <= kRisk; below += share) {
    ++rank;
    share *= (count - double(rank) + 1) / double(rank);
  }
  return rank ? values[rank - 1] : -INFINITY;
}

// The log ratio to expect of a winner whose measured log ratio is `log`, without its bias. field: the log ratio of the vendor's time to
// that of each kernel.
inline double expected(double log, std::vector<double> const& field) {
  double const middle = median(field);
  double spread = kPrior * kBias * kBias;
  for (double const each : field) spread += std::pow(std::clamp(each - middle, -kFarthest, kFarthest), 2);
  spread /= double(field.size()) - 1 + kPrior;
  return middle + std::max(0.0, 1 - kBias * kBias / spread) * (log - middle);
}

// Whether a kernel is accepted. logs: the log ratios of the vendor's time to the kernel's, of pairs of samples.
inline bool accepts(std::vector<double> const& logs, std::vector<double> const& field) {
  return low_median(logs) >= std::log1p(kMargin) && expected(median(logs), field) >= std::log1p(kGain);
}

}  // namespace cudal2gen

#endif
