// Cost of passing through groups of choices one after another, when each change of group costs something.
#pragma once

#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "common.hpp"

namespace galvatron {

using GroupSet = std::uint64_t;  // one bit a group
constexpr int kMostGroups = 64;

// Prices of changing group, in any unit of time: `enter` a stage in a group, `leave` it from one, `change[a][b]`.
// All of them together must obey the triangle inequality: then no group is worth visiting twice.
struct GroupPrices {
  std::vector<double> enter, leave;
  std::vector<std::vector<double>> change;

  int groups() const { return static_cast<int>(enter.size()); }
};

class Walks {
 public:
  explicit Walks(GroupPrices prices) : prices_(std::move(prices)) {
    for (int group = 0; group < prices_.groups(); ++group) {
      least_enter_ = std::min(least_enter_, prices_.enter[group]);
      least_leave_ = std::min(least_leave_, prices_.leave[group]);
    }
  }

  int groups() const { return prices_.groups(); }

  // No walk costs less.
  double least() const { return least_enter_ + least_leave_; }

  // Cost of the cheapest order of these groups; it grows with the set.
  double cost(GroupSet set) {
    double best = kInfinity;
    for (int last : members(set)) best = std::min(best, to(set, last) + prices_.leave[last]);
    return best;
  }

  // That order.
  std::vector<int> order(GroupSet set) {
    std::vector<int> reversed;
    auto total = [&](int last) {
      return to(set, last) + (reversed.empty() ? prices_.leave[last] : prices_.change[last][reversed.back()]);
    };
    while (set) {
      const std::vector<int> candidates = members(set);
      const int last =
          *std::min_element(candidates.begin(), candidates.end(), [&](int a, int b) { return total(a) < total(b); });
      reversed.push_back(last);
      set &= ~(GroupSet{1} << last);
    }
    return {reversed.rbegin(), reversed.rend()};
  }

 private:
  static std::vector<int> members(GroupSet set) {
    std::vector<int> result;
    for (int group = 0; set >> group && group < kMostGroups; ++group)
      if (set >> group & 1) result.push_back(group);
    return result;
  }

  // Cheapest walk through the set that ends in `last` (Held and Karp's recursion, remembered).
  double to(GroupSet set, int last) {
    const GroupSet rest = set & ~(GroupSet{1} << last);
    if (!rest) return prices_.enter[last];
    double& known = known_[set].try_emplace(last, -1.0).first->second;
    if (known >= 0) return known;
    double best = kInfinity;
    for (int before : members(rest)) best = std::min(best, to(rest, before) + prices_.change[before][last]);
    return known_[set][last] = best;
  }

  GroupPrices prices_;
  double least_enter_ = kInfinity, least_leave_ = kInfinity;
  std::unordered_map<GroupSet, std::unordered_map<int, double>> known_;
};

}  // namespace galvatron
