// Partitions of identical layers: a stage is described by its number of layers.
#pragma once

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>
#include <vector>

#include "bottleneck_partition.hpp"
#include "critical_path_bounds.hpp"
#include "limits.hpp"
#include "stage_solver.hpp"

namespace galvatron {

class IdenticalLayerPartitions : public Partitions {
 public:
  IdenticalLayerPartitions(const Problem& tables, const PathBounds& cuts, StageSolver& stages, const ChoiceCache& cache)
      : tables_(tables), cuts_(cuts), stages_(stages) {
    for (const Weighting below : kBelow)
      for (const Ending ending : kEndings) {
        const double above = cache.cheapest(0, cuts.weights(0, PathBounds::above(1, ending)));
        set_elsewhere(below, ending, above, cache.cheapest(0, cuts.weights(0, below)),
                      [&](int s, Weighting w) { return stages_.fixed(s, w); });
      }
  }

  // Greedy: each layer goes to the stage whose bound with one more layer is smallest.
  double bound(WorkBudget& poll) override {
    greedy_.assign(tables_.stages, tables_.stages == 1 ? tables_.layers : 1);
    double bound = 0;
    for (int s = 0; s < tables_.stages; ++s) bound = std::max(bound, bound_of(s, greedy_[s], poll));
    const int left = tables_.layers - greedy_partition();
    for (int n = 0; n < left && bound < kInfinity; ++n)
      bound = std::max(bound, deal([&](int s, int l) { return bound_of(s, l, poll); }, poll));
    return bound;
  }

  // The same with the stages' exact optima.
  double tight_bound(WorkBudget& poll) override {
    double bound = this->bound(poll);
    if (!(bound < kInfinity)) return bound;
    if (tables_.stages == 1) return least_of(0, tables_.layers, poll);
    for (int s = 0; s < tables_.stages; ++s)
      while (greedy_[s] > 1 && bound_of(s, greedy_[s], poll) <= bound && least_of(s, greedy_[s], poll) > bound)
        --greedy_[s];
    for (int s = 0; s < tables_.stages; ++s) {
      bound = std::max(bound, least_of(s, greedy_[s], poll));
      while (bound < kInfinity && least_of(s, greedy_[s] + 1, poll) <= bound) ++greedy_[s];
    }
    while (greedy_partition() < tables_.layers && bound < kInfinity)
      bound = std::max(bound, deal([&](int s, int l) { return least_of(s, l, poll); }, poll));
    return bound;
  }

  // Layers in excess are taken from where they weigh most.
  std::vector<int> promising(WorkBudget& poll) override {
    std::vector<int> division = greedy_;
    for (int excess = greedy_partition() - tables_.layers; excess > 0; --excess) {
      int heaviest = -1;
      for (int s = 0; s < tables_.stages; ++s)
        if (division[s] > 1 &&
            (heaviest < 0 || least_of(s, division[s], poll) > least_of(heaviest, division[heaviest], poll)))
          heaviest = s;
      --division[heaviest];
    }
    return division;
  }

  bool narrow(double limit, double& bound, WorkBudget& poll) override {
    bool any = set_ranges(limit, poll);
    for (int round = 0; any && tables_.stages > 1 && round < kStrengthenRounds; ++round) {
      strengthen(poll);
      any = set_ranges(limit, poll);
      if (any) bound = std::max(bound, std::min(limit, bound_in_ranges(poll)));
    }
    if (!any) bound = limit;
    return any;
  }

  std::pair<int, int> range(int stage, int first) const override {
    int later_fewest = 0, later_most = 0;
    for (int s = stage + 1; s < tables_.stages; ++s) later_fewest += fewest_[s], later_most += most_[s];
    const int left = tables_.layers - first;
    return {std::max(fewest_[stage], left - later_most), std::min(most_[stage], left - later_fewest)};
  }

  double rest(Weighting below, int stage, int first) const override {
    const Elsewhere& other = elsewhere_[below][kFirst];
    return stage == tables_.stages ? 0 : other.tail[stage] + (tables_.layers - first) * other.price_below;
  }

 private:
  static constexpr int kPriceSteps = 40, kStrengthenRounds = 3;

  struct Elsewhere {
    double price_above = 0, price_below = 0;  // of a layer in any stage above, below
    std::vector<double> head, tail;           // least of the stages above one; from one on, with the link above it
  };

  int greedy_partition() const { return std::accumulate(greedy_.begin(), greedy_.end(), 0); }

  // So many layers of a stage, wherever it begins: inner stages are alike everywhere.
  Span span(int stage, int layers) const {
    if (stage == 0) return {0, layers};
    return {stage == tables_.stages - 1 ? tables_.layers - layers : 1, layers};
  }

  // Gives one more layer to the stage for which `bound(stage, layers)` is least then; returns that.
  template <class Bound>
  double deal(Bound bound, WorkBudget& poll) {
    poll.tick(tables_.stages);
    int best = 0;
    for (int s = 1; s < tables_.stages; ++s)
      if (bound(s, greedy_[s] + 1) < bound(best, greedy_[best] + 1)) best = s;
    return bound(best, ++greedy_[best]);
  }

  // Terms of the other stages in the paths bound at one stage: the least of each stage, and a price for each layer.
  template <class Least>
  void set_elsewhere(Weighting below, Ending ending, double price_above, double price_below, Least least) {
    const int stages = tables_.stages;
    const double send = tables_.least_send();
    Elsewhere& other = elsewhere_[below][ending];
    other.price_above = price_above, other.price_below = price_below;
    other.head.assign(stages + 1, 0);
    other.tail.assign(stages + 1, 0);
    for (int s = 0; s + 1 < stages; ++s)
      other.head[s + 1] = other.head[s] + least(s,
                                                PathBounds::above(s, ending)) + PathBounds::trips_above(ending) * send;
    for (int s = stages - 1; s >= 0; --s)
      other.tail[s] = other.tail[s + 1] + least(s, below) + (s > 0 ? cuts_.trips_below(below) * send : 0);
  }

  // Below the time of every pipeline in which the stage has so many layers.
  template <class Own>
  double paths(int stage, int layers, Own own) const {
    double longest = 0;
    const double sync = cuts_.most_sync(stage, layers);
    const bool is_first = stage == 0, is_last = stage == tables_.stages - 1;
    for (const PathBound& cut : cuts_.of(stage)) {
      auto others = [&](Ending ending) {
        const Elsewhere& other = elsewhere_[cut.below][ending];
        const double price = is_first  ? other.price_below
                             : is_last ? other.price_above
                                       : std::min(other.price_above, other.price_below);
        return other.head[stage] + other.tail[stage + 1] + (tables_.layers - layers) * price;
      };
      if (cut.ending != kFirst && others(kFirst) - others(kHere) >= sync) continue;  // the path that returns is longer
      longest = std::max(longest, others(cut.ending) + own(cut.own));
    }
    return longest;
  }

  // Better bounds, of pipelines that cost less than the limit alone: their stages have between fewest_ and most_
  // layers, so no layer elsewhere is as cheap as if its stage had memory for it. The price of a layer is the Lagrange
  // multiplier of their number: Σ time_s(n_s) over Σ n_s = L is at least
  // price * L + Σ min_n (time_s(n) - price * n). From here on a stage's bound need not grow with its layers: too few
  // of them burden the others.
  void strengthen(WorkBudget& poll) {
    for (const Weighting below : {kOnce, kTwice, kRounds}) {
      std::vector<std::vector<double>> times(tables_.stages);
      double low = 0, high = 0;
      for (int s = 0; s < tables_.stages; ++s) {
        times[s] = bounds_in_range(s, below, poll);
        for (std::size_t i = 1; i < times[s].size(); ++i) high = std::max(high, times[s][i] - times[s][i - 1]);
      }
      for (int step = 0; step < kPriceSteps; ++step) {
        poll.tick(tables_.layers);
        const double price = (low + high) / 2;
        int layers = 0;
        for (int s = 0; s < tables_.stages; ++s) layers += fewest_[s] + cheapest(times[s], price).first;
        (layers < tables_.layers ? low : high) = price;
      }
      const double price = (low + high) / 2;
      set_elsewhere(below, kFirst, price, price, [&](int s, Weighting weighting) {
        const std::vector<double> own = weighting == below ? times[s] : bounds_in_range(s, weighting, poll);
        return cheapest(own, price).second - price * fewest_[s];
      });
    }
    bounds_.clear();
    leasts_.clear();
  }

  std::vector<double> bounds_in_range(int stage, Weighting weighting, WorkBudget& poll) {
    std::vector<double> bounds;
    for (int n = fewest_[stage]; n <= most_[stage]; ++n)
      bounds.push_back(stages_.bound(stage, span(stage, n), weighting, poll));
    return bounds;
  }

  // The index i for which times[i] - price * i is least, and that.
  static std::pair<int, double> cheapest(const std::vector<double>& times, double price) {
    std::pair<int, double> best{0, times[0]};
    for (int i = 1; i < static_cast<int>(times.size()); ++i)
      if (times[i] - price * i < best.second) best = {i, times[i] - price * i};
    return best;
  }

  double bound_of(int stage, int layers, WorkBudget& poll) {
    return remembered(bounds_, stage, layers,
                      [&](Weighting own) { return stages_.bound(stage, span(stage, layers), own, poll); });
  }

  double least_of(int stage, int layers, WorkBudget& poll) {
    return remembered(leasts_, stage, layers, [&](Weighting own) {
      return PathBounds::is_minor(stage, own) ? stages_.bound(stage, span(stage, layers), own, poll)
                                        : stages_.least(stage, span(stage, layers), own, poll);
    });
  }

  template <class Own>
  double remembered(Vector<Vector<double>>& memory, int stage, int layers, Own own) {
    if (layers > tables_.layers - tables_.stages + 1) return kInfinity;
    if (memory.empty()) memory.resize(tables_.stages);
    Vector<double>& row = memory[stage];
    if (layers >= static_cast<int>(row.size())) row.resize(layers + 1, -1);
    if (row[layers] < 0) row[layers] = paths(stage, layers, own);
    return row[layers];
  }

  bool may_win(int stage, int layers, double limit, WorkBudget& poll) {
    return is_less(bound_of(stage, layers, poll), limit) && is_less(least_of(stage, layers, poll), limit);
  }

  // As `bound`, of the pipelines that are left. A stage's bound may fall with its layers here: at each number of them
  // counts the least for so many or more.
  double bound_in_ranges(WorkBudget& poll) {
    std::vector<std::vector<double>> bounds(tables_.stages);
    double bound = 0;
    for (int s = 0; s < tables_.stages; ++s) {
      for (int n = fewest_[s]; n <= most_[s]; ++n) bounds[s].push_back(least_of(s, n, poll));
      bounds[s].push_back(kInfinity);
      for (std::size_t i = bounds[s].size() - 1; i-- > 0;) bounds[s][i] = std::min(bounds[s][i], bounds[s][i + 1]);
      bound = std::max(bound, bounds[s].front());
    }
    greedy_ = fewest_;
    for (int left = tables_.layers - greedy_partition(); left > 0; --left)
      bound = std::max(bound, deal([&](int s, int n) {
                         const std::size_t more = n - fewest_[s];
                         return more < bounds[s].size() ? bounds[s][more] : kInfinity;
                       }, poll));
    return bound;
  }

  // Fewest and most layers of each stage in a pipeline that costs less than the limit; false: there is none.
  bool set_ranges(double limit, WorkBudget& poll) {
    const int stages = tables_.stages;
    if (most_.empty()) {
      most_.assign(stages, 0);
      for (int s = 0; s < stages; ++s)
        while (may_win(s, most_[s] + 1, limit, poll)) ++most_[s];
      fewest_.assign(stages, 1);
    }
    int all_fewest = 0, all_most = 0;
    for (int s = 0; s < stages; ++s) {
      while (fewest_[s] <= most_[s] && !may_win(s, most_[s], limit, poll)) --most_[s];
      while (fewest_[s] < most_[s] && !may_win(s, fewest_[s], limit, poll)) ++fewest_[s];
      if (fewest_[s] > most_[s]) return false;
      all_fewest += fewest_[s], all_most += most_[s];
    }
    if (all_fewest > tables_.layers || all_most < tables_.layers) return false;
    for (int s = 0; s < stages; ++s) {
      const int fewest = fewest_[s];
      fewest_[s] = std::max(fewest, tables_.layers - (all_most - most_[s]));
      most_[s] = std::min(most_[s], tables_.layers - (all_fewest - fewest));
    }
    return true;
  }

  const Problem& tables_;
  const PathBounds& cuts_;
  StageSolver& stages_;

  std::array<std::array<Elsewhere, kEndings.size()>, kWeightings> elsewhere_;  // by what lies below, and the ending
  Vector<Vector<double>> bounds_, leasts_;                       // [stage][layers], negative: not yet known
  std::vector<int> greedy_, fewest_, most_;
};

}  // namespace galvatron
