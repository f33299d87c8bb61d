// What every part of the core shares: infinity, tolerances, and the way out of a long search.
#pragma once

#include <functional>
#include <limits>
#include <stdexcept>

namespace galvatron {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A sum of doubles is trusted to this relative error: a plan that misses the budget by less fits, and a plan that is
// faster by less is not faster.
constexpr double kRounding = 1e-12;

inline double within(double budget) { return budget + kRounding * (budget < 0 ? -budget : budget); }
inline bool is_less(double a, double b) { return a < b - kRounding * (b < kInfinity ? b : 0.0); }

// The optimum would take more memory than there should be.
class TooHard : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Called now and then in long loops; leaves them by throwing.
class Poll {
 public:
  explicit Poll(std::function<void()> check) : check_(std::move(check)) {}
  void tick() {
    if (++ticks_ % kInterval == 0) check_();
  }

 private:
  static constexpr unsigned kInterval = 1u << 14;  // some 0.1 ms of search
  std::function<void()> check_;
  unsigned ticks_ = 0;
};

}  // namespace galvatron
