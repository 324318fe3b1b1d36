// Cross-entropy of a row from its sums over the classes, and the coefficients of its derivatives; in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <optional>

#include "tensor.h"

namespace seqkern {

struct LossOptions {
  int64_t ignore_index;
  double label_smoothing, z_loss, softcap;
};

template <class A>
class RowLosses {
 public:
  RowLosses(const LossOptions& options, int64_t classes, const A* class_weight)
      : options(options), classes_(classes), class_weight_(class_weight) {
    if (class_weight)
      for (int64_t c = 0; c < classes; ++c) all_weights_ += weight_of(c);
    else all_weights_ = static_cast<double>(classes);
  }

  // Whether the row counts. Raises for a target that is no class.
  bool counts(const int64_t* targets, int64_t row, const char* op) const {
    const int64_t target = targets[row];
    if (target == options.ignore_index) return false;
    SK_CHECK(0 <= target && target < classes_, op, ": target must be in [0, ", classes_,
             ") or ignore_index = ", options.ignore_index, ", got ", target, " in row ", row);
    return true;
  }
  double weight_of(int64_t c) const { return class_weight_ ? static_cast<double>(class_weight_[c]) : 1; }
  bool smooths() const { return options.label_smoothing != 0; }

  // max, and the sums of exp(logit - max) and of class_weight * (logit - max). Kept apart: lse - logit would cancel.
  A loss(int64_t target, A max, A sum, A weighted, A hit_logit) const {
    const double log_sum = std::log(static_cast<double>(sum)), top = static_cast<double>(max),
                 e = options.label_smoothing;
    double loss = (1 - e) * weight_of(target) * (log_sum + (top - static_cast<double>(hit_logit)));
    if (e != 0) loss += share() * (all_weights_ * log_sum - static_cast<double>(weighted));
    if (options.z_loss != 0) loss += options.z_loss * (top + log_sum) * (top + log_sum);
    return static_cast<A>(loss);
  }

  struct Coefficients {
    A p_scale, hit, spread;
  };
  // For the upstream gradients of the row's loss and log-sum-exp.
  Coefficients coefficients(int64_t target, A max, A sum, double of_loss, double of_lse) const {
    const double hit = (1 - options.label_smoothing) * weight_of(target), total = static_cast<double>(sum);
    const double lse = static_cast<double>(max) + std::log(total);
    const double scale = of_loss * (hit + share() * all_weights_ + 2 * options.z_loss * lse) + of_lse;
    return {static_cast<A>(scale / total), static_cast<A>(of_loss * hit), static_cast<A>(of_loss * share())};
  }

  const LossOptions options;

 private:
  double share() const { return options.label_smoothing / static_cast<double>(std::max<int64_t>(1, classes_)); }

  const int64_t classes_;
  const A* const class_weight_;
  double all_weights_ = 0;
};

}  // namespace seqkern
