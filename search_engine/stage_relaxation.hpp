// The stages of a pipeline with one or several chunks each, for identical layers: their parts, and Lagrangian
// relaxations of their memory. README.md, step 4.
#pragma once

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>
#include <vector>

#include "limits.hpp"
#include "problem.hpp"

namespace galvatron {

class StageRelaxation {
 public:
  StageRelaxation(const Problem& problem, const Vocab& vocab)
      : problem_(problem), vocab_(vocab), chunks_(problem.passes.chunks) {}

  // The price of memory, near a known one or far from it, at which a relaxation costs most: a search in ever smaller
  // steps, as long as they help.
  template <class Cost>
  static double highest(Cost cost, double price, bool far) {
    const std::vector<double> steps = far ? std::vector<double>{16, 4, 1.6, 1.2} : std::vector<double>{1.15};
    double best = cost(price);
    for (const double step : steps)
      for (const double factor : {step, 1 / step})
        for (int moves = 0; moves < kMostMoves; ++moves) {
          const double attempted = cost(price * factor);
          if (!(attempted > best)) break;
          best = attempted, price *= factor;
        }
    return price;
  }

  // Lagrangian relaxation of a stage, for any weights of each chunk's passes and of the sync: memory has a price, ms
  // per MiB, instead of a limit, and of the workspace only a single layer's need counts. Calls
  // `take(fixed, layer)` once a level of that, with the cost without layers and that of a layer of each chunk. The
  // least of them is a lower bound, for any price and for any of the moments, or mean of them, in `held`.
  template <class Take>
  void relax(int stage, const std::vector<double>& held, const std::vector<Weights>& weights, double price,
             Take take) const {
    const MemoryBudget room = this->room(stage, held);
    double fixed = -price * within(room.budget);
    for (int chunk = 0; chunk < chunks_; ++chunk) fixed += weights[chunk].of(fixed_time(stage, chunk));
    std::vector<double> least(chunks_, kInfinity);
    bool better = false;
    std::vector<std::pair<double, const Part*>>& rising = by_workspace_[room.workspace];
    if (rising.empty()) {
      for (const Part& part : problem_.strategies)
        rising.push_back({total(most_of(room.workspace, part.workspace)), &part});
      std::sort(rising.begin(), rising.end());
    }
    for (std::size_t i = 0; i < rising.size(); ++i) {
      const Part& part = *rising[i].second;
      for (int chunk = 0; chunk < chunks_; ++chunk) {
        const double cost = weights[chunk].of(part.time) + price * (part.states + held[chunk] * part.activation);
        if (cost < least[chunk]) least[chunk] = cost, better = true;
      }
      if (!better || (i + 1 < rising.size() && rising[i + 1].first == rising[i].first)) continue;
      take(fixed + price * rising[i].first, least);
      better = false;
    }
  }

  // At the moment at which identical layers would hold most.
  std::vector<double> likely_held(int stage, const std::vector<int>& layers) const {
    const Held& held = fullest(stage, layers, 0);
    return {held.begin(), held.end()};
  }

  // Least times of a chunk without its layers.
  StageTime fixed_time(int stage, int chunk) const {
    StageTime time = part(stage, chunk).time;
    PassTimes changes = least(entry(stage, chunk));
    add_to(changes, least(exit(stage, chunk)));
    add_to(time.passes, changes);
    return time;
  }

  const Part& part(int stage, int chunk) const {
    if (stage == 0 && chunk == 0) return vocab_.first;
    if (stage == problem_.stages - 1 && chunk == chunks_ - 1) return vocab_.last;
    return stage > 0 && stage < problem_.stages - 1 && chunk == 0 ? problem_.middle : problem_.later;
  }

  // Cheap lower bounds of the time that a stage works in a step, for 0..most additional layers; infinite where they
  // don't fit. Closest for `likely` more.
  std::vector<double> roughly(int stage, const std::vector<int>& layers, int most, int likely,
                              WorkBudget& budget) const {
    std::vector<double> costs(most + 1), works(most + 1, 0);
    const std::vector<double> held = likely_held(stage, layers);
    auto at_price = [&](double price, const std::vector<Weights>& weights) {
      budget.tick(problem_.strategies.size() * (chunks_ + most / 4));
      std::fill(costs.begin(), costs.end(), kInfinity);
      relax(stage, held, weights, price, [&](double cost, const std::vector<double>& layer) {
        for (int chunk = 0; chunk < chunks_; ++chunk) cost += layers[chunk] * layer[chunk];
        const double least = *std::min_element(layer.begin(), layer.end());  // where least is held
        for (int more = 0; more <= most; ++more) costs[more] = std::min(costs[more], cost + more * least);
      });
      return costs[likely];
    };
    at_price(1, std::vector<Weights>(chunks_));  // memory beyond the budget
    while (most >= 0 && costs[most] > kRoom * problem_.budget) works[most--] = kInfinity;
    if (most < 0) return works;
    likely = std::min(likely, most);
    auto raise = [&](double price) {
      const double cost =
          at_price(price, std::vector<Weights>(chunks_, Weights::of_each(kPassKinds, problem_.micro_batches)));
      for (int more = 0; more <= most; ++more) works[more] = std::max(works[more], costs[more]);
      return cost;
    };
    highest(raise, raise(0) / std::max(problem_.budget, 1.0), true);
    return works;
  }

 protected:
  using Held = std::vector<int>;  // micro-batches of each chunk

  const std::vector<PassTimes>& entry(int stage, int chunk) const {
    return stage == 0 && chunk == 0 ? vocab_.enter : problem_.enter.inside;
  }
  const std::vector<PassTimes>& exit(int stage, int chunk) const {
    return stage == problem_.stages - 1 && chunk == chunks_ - 1 ? vocab_.leave : problem_.leave.inside;
  }

  // The moment at which identical layers would hold most.
  const Held& fullest(int stage, const std::vector<int>& layers, int more) const {
    const std::vector<Held>& moments = problem_.held[stage];
    auto layers_held = [&](const Held& held) {
      const double least = more * *std::min_element(held.begin(), held.end());
      return std::inner_product(held.begin(), held.end(), layers.begin(), least);
    };
    return *std::max_element(moments.begin(), moments.end(),
                             [&](const Held& a, const Held& b) { return layers_held(a) < layers_held(b); });
  }

  template <class Held>
  MemoryBudget room(int stage, const Held& held) const {
    MemoryBudget room{problem_.budget, {}};
    for (int chunk = 0; chunk < chunks_; ++chunk) {
      const Part& fixed = part(stage, chunk);
      room.budget -= fixed.states + held[chunk] * fixed.activation;
      room.workspace = most_of(room.workspace, fixed.workspace);
    }
    return room;
  }

  const Problem& problem_;
  const Vocab& vocab_;
  int chunks_;

 private:
  static constexpr int kMostMoves = 8;   // of a price of memory into one direction
  static constexpr double kRoom = 1e-9;  // share of the budget that sums of memory may be off by

  static PassTimes least(const std::vector<PassTimes>& changes) {
    return std::accumulate(changes.begin(), changes.end(), changes.front(), least_of<PassTimes>);
  }

  // Strategies by rising total workspace within a stage, by the stage's own workspace.
  mutable std::map<Workspace, std::vector<std::pair<double, const Part*>>> by_workspace_;
};

}  // namespace galvatron
