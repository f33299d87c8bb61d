// Partitions of layers of several types: a stage is described by its first layer and its number of layers.
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <utility>
#include <vector>

#include "bottleneck_partition.hpp"
#include "critical_path_bounds.hpp"
#include "limits.hpp"
#include "stage_solver.hpp"

namespace galvatron {

class MixedLayerPartitions : public Partitions {
 public:
  MixedLayerPartitions(const Problem& tables, const PathBounds& cuts, StageSolver& stages, const ChoiceCache& cache)
      : tables_(tables), cuts_(cuts), stages_(stages), known_(tables.stages) {
    const int stages_count = tables.stages;
    for (const Ending ending : kEndings) {
      std::vector<double>& head = head_[ending];
      head.assign(stages_count, 0);
      for (int s = 0; s + 1 < stages_count; ++s)
        head[s + 1] = head[s] + stages.fixed(s, PathBounds::above(s, ending)) +
                      PathBounds::trips_above(ending) * tables.least_send();
      layers_above_[ending] = priced(cache, PathBounds::above(1, ending));
    }
    for (const Weighting below : kBelow) {
      std::vector<double>& tail = tail_[below];
      tail.assign(stages_count + 1, 0);
      for (int s = stages_count - 1; s >= 0; --s)
        tail[s] = tail[s + 1] + stages.fixed(s, below) + (s > 0 ? cuts_.trips_below(below) * tables.least_send() : 0);
      layers_below_[below] = priced(cache, below);
    }
  }

  double bound(WorkBudget& poll) override {
    found_ = least_dearest(tables_, [&](int s, Span span) { return bound_of(s, span, poll); }, kTolerance, poll);
    return found_.bound;
  }

  double tight_bound(WorkBudget& poll) override { return bound(poll); }

  std::vector<int> promising(WorkBudget&) override { return found_.division; }

  // Where stages may begin: not later than the stages before can reach, nor earlier than those from there on.
  bool narrow(double limit, double& bound, WorkBudget& poll) override {
    const int stages = tables_.stages, layers = tables_.layers;
    latest_.assign(stages + 1, 0);
    earliest_.assign(stages + 1, layers);
    auto may_win = [&](int s, Span span) {
      poll.tick();
      return is_less(bound_of(s, span, poll), limit);
    };
    for (int s = 0; s < stages; ++s) {
      int& end = latest_[s + 1] = latest_[s];
      while (end < layers && may_win(s, {latest_[s], end + 1 - latest_[s]})) ++end;
    }
    for (int s = stages - 1; s >= 0; --s) {
      int& first = earliest_[s] = earliest_[s + 1];
      while (first > 0 && may_win(s, {first - 1, earliest_[s + 1] - first + 1})) --first;
    }
    for (int s = 0; s <= stages; ++s) {
      latest_[s] = std::min(latest_[s], layers - (stages - s));
      earliest_[s] = std::max(earliest_[s], s);
      if (earliest_[s] > latest_[s]) {
        bound = limit;
        return false;
      }
    }
    for (const Weighting below : kBelow) set_rest(below, may_win, poll);
    return true;
  }

  std::pair<int, int> range(int stage, int first) const override {
    return {std::max(1, earliest_[stage + 1] - first), latest_[stage + 1] - first};
  }

  double rest(Weighting below, int stage, int first) const override {
    return stage == tables_.stages ? 0 : rest_[below][stage][first];
  }

 private:
  static constexpr double kTolerance = 1e-6;

  // Price of the layers before each layer, each as cheap as a layer of its type can be.
  std::vector<double> priced(const ChoiceCache& cache, Weighting weighting) const {
    std::vector<double> sums{0};
    for (int type = 0; type < tables_.type_count(); ++type) {
      const double price = cache.cheapest(type, cuts_.weights(0, weighting));
      for (int l = tables_.starts[type]; l < tables_.starts[type + 1]; ++l) sums.push_back(sums.back() + price);
    }
    return sums;
  }

  // Below the time of every pipeline in which a stage has these layers. It grows with them: elsewhere none is dearer.
  double bound_of(int stage, Span span, WorkBudget& poll) {
    const std::pair<int, int> place{span.first, span.layers};
    const auto found = known_[stage].find(place);
    if (found != known_[stage].end()) return found->second;
    auto head = [&](Ending ending) { return head_[ending][stage] + layers_above_[ending][span.first]; };
    const bool returns = head(kFirst) - head(kHere) >= cuts_.most_sync(stage, span.layers);  // all the longest paths do
    double longest = 0;
    for (const PathBound& cut : cuts_.of(stage)) {
      if (cut.ending != kFirst && returns) continue;
      const std::vector<double>& below = layers_below_[cut.below];
      const double others = head(cut.ending) + tail_[cut.below][stage + 1] + below.back() - below[span.end()];
      longest = std::max(longest, others + stages_.bound_without_switches(stage, span, cut.own, poll));
    }
    return known_[stage][place] = longest;
  }

  // The least of all divisions that are left, from each stage and layer on.
  template <class MayWin>
  void set_rest(Weighting below, MayWin may_win, WorkBudget& poll) {
    const int stages = tables_.stages, layers = tables_.layers;
    Vector<Vector<double>>& rest = rest_[below];
    rest.assign(stages + 1, Vector<double>(layers + 1, kInfinity));
    rest[stages][layers] = 0;
    for (int s = stages - 1; s >= 0; --s)
      for (int first = earliest_[s]; first <= latest_[s]; ++first) {
        double& least = rest[s][first];
        for (int end = std::max(first + 1, earliest_[s + 1]); end <= latest_[s + 1]; ++end) {
          const Span span{first, end - first};
          if (rest[s + 1][end] == kInfinity || !may_win(s, span)) continue;
          const double own = below == kNowhere ? 0 : stages_.bound(s, span, below, poll);
          least = std::min(least, own + rest[s + 1][end]);
        }
        if (s > 0) least += cuts_.trips_below(below) * tables_.send_to(first);
      }
  }

  const Problem& tables_;
  const PathBounds& cuts_;
  StageSolver& stages_;

  // Terms of the other stages in the paths bound at one stage: their vocabulary and links, and the layers before each.
  std::array<std::vector<double>, kEndings.size()> head_, layers_above_;  // by where paths end
  std::array<std::vector<double>, kWeightings> tail_, layers_below_;  // by what lies below
  std::vector<Map<std::pair<int, int>, double>> known_;               // of each stage: bounds by first layer and layers
  Minimax found_;
  std::vector<int> earliest_, latest_;                                 // first layer of each stage
  std::array<Vector<Vector<double>>, kWeightings> rest_;               // [stage][first layer]
};

}  // namespace galvatron
