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
constexpr double kGain = 0.1;       // least expected gain (expected_log) with which a kernel is accepted
constexpr double kBias = 0.03;      // standard deviation of a contender's constant bias, as a log ratio of times
constexpr double kPrior = 1;        // kBias^2 counts in the estimate of the spread as much as this many kernels
constexpr double kClip = 0.2;       // a kernel's log ratio counts as at most this far from the kernels' median
constexpr double kRisk = 0.005;     // probability that the median of the pairs lies below its bound

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  size_t const middle = values.size() / 2;
  return values.size() % 2 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

// Returns a value that is below the median with a probability of at least 1 - kRisk, for any distribution of the samples: an order
// statistic. Returns -infinity if there are too few samples.
inline double median_lower_bound(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  double const count = double(values.size());
  // A sample is below the median with a probability of 1/2. The sample of rank r (from 1) is above the median if fewer than r samples are
  // below it, which has the probability `risk`: the sum of `term` = C(count, i) / 2^count over i < r, here for r = rank + 1.
  double term = std::pow(0.5, count), risk = term;
  size_t rank = 0;
  for (; risk <= kRisk; risk += term) {
    ++rank;
    term *= (count - double(rank) + 1) / double(rank);
  }
  return rank ? values[rank - 1] : -INFINITY;
}

// Returns the log ratio to expect of a winner whose measured log ratio is `log`, without its bias. field: the log ratio of the vendor's time
// to that of each kernel. A part of the spread of `field` is the variance of the biases, kBias^2; the winner's distance from the median
// shrinks by this part, because the fastest of many kernels is likely to have a favourable bias.
inline double expected_log(double log, std::vector<double> const& field) {
  double const middle = median(field);
  double spread = kPrior * kBias * kBias;
  for (double const log_ratio : field) spread += std::pow(std::clamp(log_ratio - middle, -kClip, kClip), 2);
  spread /= double(field.size()) - 1 + kPrior;
  return middle + std::max(0.0, 1 - kBias * kBias / spread) * (log - middle);
}

// Whether a kernel is accepted. logs: the log ratio of the vendor's time to the kernel's, for each pair of samples. field: as for
// expected_log.
inline bool accepts(std::vector<double> const& logs, std::vector<double> const& field) {
  return median_lower_bound(logs) >= std::log1p(kMargin) && expected_log(median(logs), field) >= std::log1p(kGain);
}

}  // namespace cudal2gen

#endif
