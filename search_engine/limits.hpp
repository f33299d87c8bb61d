// Infinity, tolerances, and the limits of a search on work and memory.
// README.md, step 9.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

namespace galvatron {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A sum of doubles is trusted to this relative error: a plan that misses the budget by less fits, and a plan that is
// faster by less is not faster.
constexpr double kRounding = 1e-12;

inline double within(double budget) { return budget + kRounding * (budget < 0 ? -budget : budget); }
inline bool is_less(double a, double b) { return a < b - kRounding * (b < kInfinity ? b : 0.0); }

// The optimum would exceed the limits on memory or time.
class TooHard : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Called now and then in long loops; leaves them by throwing: when it is cancelled, or after the steps that it allows.
class WorkBudget {
 public:
  explicit WorkBudget(std::function<void()> check) : check_(std::move(check)) {}

  // Some steps of a few nanoseconds each.
  void tick(std::size_t steps = 1) {
    steps_ += steps;
    if (steps_ < next_check_) return;
    next_check_ = steps_ + kInterval;
    check();
  }

  // Steps taken so far.
  std::size_t steps() const { return steps_; }

  // Sets the number of steps that may follow.
  void allow(std::size_t steps) { most_ = steps_ + steps; }

  void check() const {
    check_();
    if (steps_ > most_) throw TooHard("the search would take too long");
  }

 private:
  static constexpr std::size_t kInterval = 1u << 14;  // some 0.1 ms of search
  std::function<void()> check_;
  std::size_t steps_ = 0, next_check_ = kInterval, most_ = std::numeric_limits<std::size_t>::max();
};

// Allocates memory that may grow with a search. All searches of a process share one limit.
constexpr std::size_t kMostBytes = 400u << 20;
inline std::atomic<std::size_t> held_bytes{0};

template <class T>
class Counted {
 public:
  using value_type = T;

  Counted() = default;
  template <class Other>
  Counted(const Counted<Other>&) {}

  T* allocate(std::size_t count) {
    T* const place = std::allocator<T>().allocate(count);
    if (held_bytes.fetch_add(count * sizeof(T)) + count * sizeof(T) <= kMostBytes) return place;
    deallocate(place, count);
    throw TooHard("the search would take more than 400 MiB of memory");
  }

  void deallocate(T* place, std::size_t count) {
    std::allocator<T>().deallocate(place, count);
    held_bytes -= count * sizeof(T);
  }

  friend bool operator==(const Counted&, const Counted&) { return true; }
  friend bool operator!=(const Counted&, const Counted&) { return false; }
};

template <class T>
using Vector = std::vector<T, Counted<T>>;
template <class Key, class Value>
using Map = std::map<Key, Value, std::less<Key>, Counted<std::pair<const Key, Value>>>;

}  // namespace galvatron
