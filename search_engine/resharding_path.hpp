// The cheapest order of the token layouts in a stage, where each resharding has a cost (Held-Karp).
// README.md, step 3.
#pragma once

#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "limits.hpp"

namespace galvatron {

using LayoutSet = std::uint64_t;  // one bit a layout
constexpr int kMostGroups = 64;

inline LayoutSet bit(int layout) { return LayoutSet{1} << layout; }

// The layouts of a set, rising.
inline std::vector<int> layouts_of(LayoutSet set) {
  std::vector<int> layouts;
  for (int layout = 0; layout < kMostGroups && set >> layout; ++layout)
    if (set >> layout & 1) layouts.push_back(layout);
  return layouts;
}

// Prices of changing layout, in any unit of time: `enter` a stage in a layout, `leave` it from one, `change[a][b]`.
// Groups are numbered by the type of their layers, all of a type are passed before the next, and between types that are
// no neighbours a change is free. All of them together must obey the triangle inequality: then no layout is worth
// visiting twice, nor any that is not requested.
struct GroupPrices {
  std::vector<double> enter, leave;
  Vector<Vector<double>> change;
  std::vector<int> types;  // of each layout, rising; empty: all the same

  int layouts() const { return static_cast<int>(enter.size()); }
};

class ReshardingPath {
 public:
  // Through layers of these types.
  explicit ReshardingPath(GroupPrices prices, int first_type = 0, int last_type = 0)
      : prices_(std::move(prices)), first_type_(first_type), last_type_(last_type) {
    for (int layout = 0; layout < layouts(); ++layout) {
      const int type = type_of(layout);
      of_type_.resize(type + 1);
      of_type_[type] |= bit(layout);
      if (type == first_type_) least_enter_ = std::min(least_enter_, prices_.enter[layout]);
      if (type == last_type_) least_leave_ = std::min(least_leave_, prices_.leave[layout]);
    }
  }

  int layouts() const { return prices_.layouts(); }

  // No path costs less.
  double least() const { return least_enter_ + least_leave_; }

  // Whether all types are in the set.
  bool is_whole(LayoutSet set) const {
    for (int type = first_type_; type <= last_type_; ++type)
      if (!(of_type_[type] & set)) return false;
    return true;
  }

  // All layouts of the path's types.
  LayoutSet all() const {
    LayoutSet all = 0;
    for (int type = first_type_; type <= last_type_; ++type) all |= of_type_[type];
    return all;
  }

  // Cost of the cheapest order of these layouts; it grows with the set, and types that are missing cost nothing.
  double cost(LayoutSet set, WorkBudget& budget) {
    if (known_.size() > kMostKnown) known_.clear();
    double best = kInfinity;
    for (int last : latest(set)) best = std::min(best, to(set, last, budget) + leave(last));
    return best;
  }

  // Clears the cache where it is large.
  void forget() {
    if (known_.size() > kMostIdle) known_.clear();
  }

  // The cheapest order of the set's layouts.
  std::vector<int> order(LayoutSet set, WorkBudget& budget) {
    std::vector<int> reversed;
    auto total = [&](int last) {
      return to(set, last, budget) + (reversed.empty() ? leave(last) : prices_.change[last][reversed.back()]);
    };
    while (set) {
      const std::vector<int> candidates = latest(set);
      const int last =
          *std::min_element(candidates.begin(), candidates.end(), [&](int a, int b) { return total(a) < total(b); });
      reversed.push_back(last);
      set &= ~bit(last);
    }
    return {reversed.rbegin(), reversed.rend()};
  }

 private:
  static constexpr std::size_t kMostKnown = 100'000, kMostIdle = 1000;  // some 6 MiB, and 60 KiB
  static constexpr std::size_t kStepsOfSet = 8;                         // of WorkBudget

  static constexpr LayoutSet kGolden = 0x9E3779B97F4A7C15u;  // 2^64 / golden ratio

  using Key = std::pair<LayoutSet, int>;
  struct Hash {
    std::size_t operator()(const Key& key) const {
      return std::hash<LayoutSet>()((key.first * kMostGroups + key.second) * kGolden);
    }
  };

  int type_of(int layout) const { return prices_.types.empty() ? 0 : prices_.types[layout]; }
  double enter(int layout) const { return type_of(layout) == first_type_ ? prices_.enter[layout] : 0; }
  double leave(int layout) const { return type_of(layout) == last_type_ ? prices_.leave[layout] : 0; }

  // Those layouts of the set that may come last: of its last type.
  std::vector<int> latest(LayoutSet set) const {
    std::size_t type = of_type_.size();
    while (type-- > 1 && !(of_type_[type] & set)) {
    }
    return layouts_of(set & of_type_[type]);
  }

  // Cheapest path through the set that ends in `last` (Held and Karp's recursion, remembered).
  double to(LayoutSet set, int last, WorkBudget& budget) {
    const LayoutSet rest = set & ~bit(last);
    if (!rest) return enter(last);
    const auto entry = known_.find({set, last});
    if (entry != known_.end()) return entry->second;
    budget.tick(kStepsOfSet);
    double best = kInfinity;
    for (int previous : latest(rest))
      best = std::min(best, to(rest, previous, budget) + prices_.change[previous][last]);
    known_.emplace(std::make_pair(set, last), best);
    return best;
  }

  GroupPrices prices_;
  int first_type_, last_type_;
  std::vector<LayoutSet> of_type_;
  double least_enter_ = kInfinity, least_leave_ = kInfinity;
  std::unordered_map<Key, double, Hash, std::equal_to<Key>, Counted<std::pair<const Key, double>>> known_;
};

}  // namespace galvatron
