// What a stage may choose from, and the Lagrangian bound of a stage of alike layers: the lower convex hull of its
// choices.
#pragma once

#include <algorithm>
#include <vector>

#include "common.hpp"

namespace galvatron {

// One strategy as the layers of a stage see it.
struct Choice {
  double memory;   // of every layer that takes it, MiB
  double cost;     // of every layer that takes it, any unit of time
  double working;  // MiB that the stage needs once, for the largest of its layers
  int id;          // the caller's number for it
  int group;       // choices of one group follow each other at no cost
};

// Of alike choices of one group, those that no other one matches in memory, cost and working memory.
inline std::vector<Choice> undominated(std::vector<Choice> choices) {
  std::sort(choices.begin(), choices.end(), [](const Choice& a, const Choice& b) {
    if (a.memory != b.memory) return a.memory < b.memory;
    if (a.cost != b.cost) return a.cost < b.cost;
    return a.working < b.working;
  });
  std::vector<Choice> kept;
  for (const Choice& choice : choices) {
    const bool beaten = std::any_of(kept.begin(), kept.end(), [&](const Choice& other) {
      return other.group == choice.group && other.cost <= choice.cost && other.working <= choice.working;
    });
    if (!beaten) kept.push_back(choice);
  }
  return kept;
}

// Least cost of layers that may mix choices in any fraction, by budget: a lower bound of every true mix.
class Frontier {
 public:
  struct Bound {
    double cost = kInfinity;  // of all layers
    double price = 0;         // cost that one more MiB saves
  };

  explicit Frontier(const std::vector<Choice>& choices) {
    std::vector<Corner> sorted;
    for (const Choice& choice : choices) sorted.push_back({choice.memory, choice.cost});
    std::sort(sorted.begin(), sorted.end(), [](const Corner& a, const Corner& b) {
      return a.memory < b.memory || (a.memory == b.memory && a.cost < b.cost);
    });
    for (const Corner& next : sorted) {
      if (!hull_.empty() && next.cost >= hull_.back().cost) continue;
      while (hull_.size() >= 2 && above_chord(hull_[hull_.size() - 2], hull_.back(), next)) hull_.pop_back();
      hull_.push_back(next);
    }
  }

  Bound bound(int layers, double budget) const {
    if (hull_.empty() || layers * hull_.front().memory > budget) return {};
    const double share = budget / layers;
    const auto above = std::upper_bound(hull_.begin(), hull_.end(), share,
                                        [](double value, const Corner& corner) { return value < corner.memory; });
    if (above == hull_.begin()) return {layers * hull_.front().cost, 0};  // a rounding below the first corner
    if (above == hull_.end()) return {layers * hull_.back().cost, 0};
    const Corner& low = *(above - 1);
    const double price = (low.cost - above->cost) / (above->memory - low.memory);
    return {layers * (low.cost - price * (share - low.memory)), price};
  }

 private:
  struct Corner {
    double memory, cost;
  };

  static bool above_chord(const Corner& a, const Corner& middle, const Corner& b) {
    return (a.cost - middle.cost) * (b.memory - a.memory) <= (a.cost - b.cost) * (middle.memory - a.memory);
  }

  std::vector<Corner> hull_;
};

}  // namespace galvatron
