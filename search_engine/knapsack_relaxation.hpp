// The relaxation of a multiple-choice knapsack: lower convex hulls of the strategies, with a Lagrange multiplier for
// memory.
// README.md, step 2.
#pragma once

#include <algorithm>
#include <array>
#include <tuple>
#include <vector>

#include "limits.hpp"
#include "workspace_levels.hpp"

namespace galvatron {

constexpr int kMostTypes = 17;  // layer types; chunks count as types

// Layers of a stage, by type; those of types `first_type` to `last_type` alone are more than 0.
struct Layers {
  std::array<int, kMostTypes> of{};
  int first_type = 0, last_type = 0;
};

// One strategy as the layers of a stage see it.
struct Choice {
  double memory;  // of every layer that takes it, MiB
  double cost;    // of every layer that takes it, any unit of time
  Workspace workspace;
  int id;        // the caller's number for it
  int layout;    // choices of one layout follow each other at no cost
  int type = 0;  // of the layers that may take it; those of a layout have one type
};

// Choices that no other choice of their layout dominates in memory, cost and workspace; of a layout by rising memory.
inline std::vector<Choice> undominated(std::vector<Choice> choices) {
  std::sort(choices.begin(), choices.end(), [](const Choice& a, const Choice& b) {
    return std::tie(a.layout, a.memory, a.cost, a.workspace) < std::tie(b.layout, b.memory, b.cost, b.workspace);
  });
  std::vector<Choice> kept;
  std::size_t first = 0;  // of the layout
  for (const Choice& choice : choices) {
    if (kept.empty() || kept.back().layout != choice.layout) first = kept.size();
    const bool beaten = std::any_of(kept.begin() + first, kept.end(), [&](const Choice& other) {
      return other.cost <= choice.cost && fits_in(other.workspace, choice.workspace);
    });
    if (!beaten) kept.push_back(choice);
  }
  return kept;
}

// Least cost of layers that may mix the choices of their type in any fraction, by budget: a lower bound of every true
// mix. All layers start at the choice of least memory; then memory is spent where it saves most.
class KnapsackRelaxation {
 public:
  struct Bound {
    double cost = kInfinity;  // of all layers
    double price = 0;         // cost that one more MiB saves
  };

  explicit KnapsackRelaxation(const std::vector<Choice>& choices) {
    std::array<std::vector<Corner>, kMostTypes> corners;
    for (const Choice& choice : choices) corners[choice.type].push_back({choice.memory, choice.cost});
    for (int type = 0; type < kMostTypes; ++type) add(type, std::move(corners[type]));
    std::stable_sort(steps_.begin(), steps_.end(), [](const Step& a, const Step& b) { return a.price > b.price; });
  }

  Bound bound(const Layers& layers, double mib) const {
    double memory = 0, cost = 0;
    for (int type = layers.first_type; type <= layers.last_type; ++type) {
      memory += layers.of[type] * least_[type].memory;
      cost += layers.of[type] * least_[type].cost;
    }
    if (!(memory <= mib)) return {};
    for (const Step& step : steps_) {
      const int count = layers.of[step.type];
      if (!count) continue;
      if (memory + count * step.memory > mib) return {cost - step.price * (mib - memory), step.price};
      memory += count * step.memory;
      cost -= count * step.saved;
    }
    return {cost, 0};
  }

 private:
  struct Corner {
    double memory, cost;
  };
  // From one corner of a type's hull to the next: more memory, less cost.
  struct Step {
    double price, memory, saved;  // of one layer
    int type;
  };

  void add(int type, std::vector<Corner> corners) {
    std::sort(corners.begin(), corners.end(), [](const Corner& a, const Corner& b) {
      return a.memory < b.memory || (a.memory == b.memory && a.cost < b.cost);
    });
    std::vector<Corner> hull;
    for (const Corner& next : corners) {
      if (!hull.empty() && next.cost >= hull.back().cost) continue;
      while (hull.size() >= 2 && above_chord(hull[hull.size() - 2], hull.back(), next)) hull.pop_back();
      hull.push_back(next);
    }
    least_[type] = hull.empty() ? Corner{kInfinity, kInfinity} : hull.front();
    for (std::size_t i = 1; i < hull.size(); ++i) {
      const double memory = hull[i].memory - hull[i - 1].memory, saved = hull[i - 1].cost - hull[i].cost;
      steps_.push_back({saved / memory, memory, saved, type});
    }
  }

  static bool above_chord(const Corner& a, const Corner& middle, const Corner& b) {
    return (a.cost - middle.cost) * (b.memory - a.memory) <= (a.cost - b.cost) * (middle.memory - a.memory);
  }

  std::array<Corner, kMostTypes> least_;  // by type: the corner of least memory
  Vector<Step> steps_;                    // of all types, by falling price
};

}  // namespace galvatron
