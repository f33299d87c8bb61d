// Partitions of the layers into stages, as a layered graph: a node is a boundary between two stages, an arc the layers
// of a stage.
//
// The paths around a stage (critical_path_bounds.hpp) bound the time of every pipeline with one of its arcs. At
// first the layers of all other stages cost as much as the cheapest strategy; then dynamic programs over the arcs
// that are left bound the cost of the stages before and after each boundary, and arcs that cannot win are removed.
// README.md, step 5.
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <vector>

#include "bottleneck_partition.hpp"
#include "critical_path_bounds.hpp"
#include "limits.hpp"
#include "stage_solver.hpp"

namespace galvatron {

class Partitions {
 public:
  struct Arc {
    Span span;
    double cost;  // ms, of every pipeline with it, at least
  };

  Partitions(const Problem& problem, const PathBounds& bounds, StageSolver& solver, ChoiceCache& cache)
      : problem_(problem), bounds_(bounds), solver_(solver), cache_(cache), times_(problem.stages) {
    for (const Ending ending : kEndings) {
      Elsewhere& head = heads_[ending];
      head.stages.assign(problem.stages, 0);
      for (int s = 0; s + 1 < problem.stages; ++s)
        head.stages[s + 1] = head.stages[s] + solver.fixed(s, PathBounds::above(s, ending)) +
                             PathBounds::trips_above(ending) * problem.least_send();
      head.layers = priced(cache, PathBounds::above(1, ending));
    }
    for (const Weighting below : kBelow) {
      Elsewhere& tail = tails_[below];
      tail.stages.assign(problem.stages + 1, 0);
      for (int s = problem.stages - 1; s >= 0; --s)
        tail.stages[s] = tail.stages[s + 1] + solver.fixed(s, below) +
                         (s > 0 ? PathBounds::trips_below(below) * problem.least_send() : 0);
      tail.layers = priced(cache, below);
      for (double& sum : tail.layers) sum = tail.layers.back() - sum;
    }
  }

  // Cheap lower bound over all partitions; infinite where none fits.
  double bound(WorkBudget& budget) {
    auto cost = [&](int stage, Span span, double) { return this->cost(stage, span, false, budget); };
    found_ = least_dearest(problem_, cost, 0, kTolerance, budget);
    return found_.bound;
  }

  // Tighter lower bound with exact optima of stages; call `bound` before it. Optima may fall with more layers of
  // another type.
  double tight_bound(WorkBudget& budget) {
    if (problem_.type_count() > 1 || !(found_.bound < kInfinity)) return found_.bound;
    auto cost = [&](int stage, Span span, double limit) {
      const double cheap = this->cost(stage, span, false, budget);
      return cheap < limit ? this->cost(stage, span, true, budget) : cheap;
    };
    found_ = least_dearest(problem_, cost, found_.bound, kTolerance, budget);
    return found_.bound;
  }

  // The partition behind the bound, with layers moved from the dearest stage to where they cost least.
  std::vector<int> promising(WorkBudget& budget) {
    std::vector<int> division = found_.division;
    auto cost = [&](int stage, int layers) {
      int first = 0;
      for (int s = 0; s < stage; ++s) first += division[s];
      layers = std::min(layers, problem_.layers - first);
      return this->cost(stage, {first, layers}, false, budget);
    };
    for (int moves = 0; moves < problem_.layers; ++moves) {
      int dearest = -1, cheapest = 0;
      for (int s = 0; s < problem_.stages; ++s) {
        if (division[s] > 1 && (dearest < 0 || cost(s, division[s]) > cost(dearest, division[dearest]))) dearest = s;
        if (cost(s, division[s] + 1) < cost(cheapest, division[cheapest] + 1)) cheapest = s;
      }
      if (dearest < 0 || cost(cheapest, division[cheapest] + 1) >= cost(dearest, division[dearest])) break;
      --division[dearest], ++division[cheapest];
    }
    return division;
  }

  // Removes arcs that no pipeline below the limit has, and raises `bound`. False: no arc is left.
  bool narrow(double limit, double& bound, WorkBudget& budget) {
    if (arcs_.empty()) list(limit, budget);
    for (int round = 0; round < kRounds; ++round) {
      bool removed = round == 0;
      for (int s = 0; s < problem_.stages; ++s) {
        auto loses = [&](Arc& arc) {
          budget.tick();
          arc.cost = cost(s, arc.span, false, budget);
          if (is_less(arc.cost, limit)) arc.cost = std::max(arc.cost, cost(s, arc.span, true, budget));
          return !is_less(arc.cost, limit);
        };
        const auto left = std::remove_if(arcs_[s].begin(), arcs_[s].end(), loses);
        removed = removed || left != arcs_[s].end();
        arcs_[s].erase(left, arcs_[s].end());
      }
      if (!removed) break;
      const double least = pass(budget);
      bound = std::max(bound, std::min(limit, least));
      if (!is_less(least, limit)) return bound = limit, false;
    }
    return true;
  }

  // Sorted by first layer and number of layers; call `narrow` before it.
  const Vector<Arc>& arcs(int stage) const { return arcs_[stage]; }

  // Lower bound of the weighted times of `stage` and all later ones, after `first` layers, and of the link to them.
  double rest(Weighting below, int stage, int first) const { return tails_[below].at(stage, first); }

 private:
  static constexpr double kTolerance = 1e-6;
  static constexpr int kRounds = 4;

  // The weighted times of all stages before a boundary, or after it, and of the links between: of the stages besides
  // their layers, and of the layers; or of both, by stage and layer.
  struct Elsewhere {
    std::vector<double> stages, layers;
    Vector<Vector<double>> both;

    double at(int stage, int layer) const { return both.empty() ? stages[stage] + layers[layer] : both[stage][layer]; }
  };

  // Price of the layers before each layer, each as cheap as a layer of its type can be.
  std::vector<double> priced(const ChoiceCache& cache, Weighting weighting) const {
    std::vector<double> sums{0};
    for (int type = 0; type < problem_.type_count(); ++type) {
      const double price = cache.cheapest(type, bounds_.weights(0, weighting));
      for (int l = problem_.starts[type]; l < problem_.starts[type + 1]; ++l) sums.push_back(sums.back() + price);
    }
    return sums;
  }

  StageTimes& times(int stage, Span span) {
    const bool inner = stage > 0 && stage < problem_.stages - 1;
    TimesOfSpans& times = inner ? cache_.inner_times(stage) : times_[stage];
    const auto [entry, is_new] = times.try_emplace(solver_.key(span));
    if (is_new) entry->second.fill(-1);
    return entry->second;
  }

  double time(StageTimes& stage_times, int stage, Span span, Weighting weighting, bool exactly, WorkBudget& budget) {
    if (exactly && !PathBounds::is_minor(stage, weighting)) return solver_.least(stage, span, weighting, budget);
    double& time = stage_times[weighting];
    if (time < 0) time = solver_.bound(stage, span, weighting, budget);
    return time;
  }

  // Lower bound of all pipelines in which a stage has these layers. The cheap one grows with their number as long as
  // other layers have their least cost.
  double cost(int stage, Span span, bool exactly, WorkBudget& budget) {
    if (stage == 0 && span.layers > problem_.most_first) return kInfinity;
    const auto head = [&](Ending ending) { return heads_[ending].at(stage, span.first); };
    const bool returns =
        head(kFirst) - head(kHere) >= bounds_.most_sync(stage, span.layers);  // all the longest paths do
    StageTimes& stage_times = times(stage, span);
    double longest = 0;
    for (const PathBound& path_bound : bounds_.of(stage)) {
      if (path_bound.ending != kFirst && returns) continue;
      const double others = head(path_bound.ending) + tails_[path_bound.below].at(stage + 1, span.end());
      if (!(others < kInfinity)) return kInfinity;
      longest = std::max(longest, others + time(stage_times, stage, span, path_bound.at_stage, exactly, budget));
    }
    return longest;
  }

  // The arcs between boundaries that the stages before can reach, and those from there on.
  void list(double limit, WorkBudget& budget) {
    const int stages = problem_.stages, layers = problem_.layers;
    auto may_win = [&](int s, Span span) {
      budget.tick();
      return is_less(cost(s, span, false, budget), limit);
    };
    std::vector<int> latest(stages + 1, 0), earliest(stages + 1, layers);
    for (int s = 0; s < stages; ++s) {
      int& end = latest[s + 1] = latest[s];
      while (end < layers && may_win(s, {latest[s], end + 1 - latest[s]})) ++end;
    }
    for (int s = stages - 1; s >= 0; --s) {
      int& first = earliest[s] = earliest[s + 1];
      while (first > 0 && may_win(s, {first - 1, earliest[s + 1] - first + 1})) --first;
    }
    arcs_.resize(stages);
    // Every stage has a layer.
    auto last = [&](int boundary) { return std::min(latest[boundary], layers - (stages - boundary)); };
    for (int s = 0; s < stages; ++s)
      for (int first = std::max(earliest[s], s); first <= last(s); ++first)
        for (int end = std::max(first + 1, earliest[s + 1]); end <= last(s + 1); ++end) {
          const Span span{first, end - first};
          if (!may_win(s, span)) break;
          arcs_[s].push_back({span, 0});
        }
  }

  // Bounds the cost of the stages before and after each boundary. Returns a lower bound of
  // the dearest arc of every partition.
  double pass(WorkBudget& budget) {
    const int stages = problem_.stages, layers = problem_.layers;
    const Vector<Vector<double>> none(stages + 1, Vector<double>(layers + 1, kInfinity));
    std::array<Vector<Vector<double>>, kEndings.size()> heads{none, none};
    std::array<Vector<Vector<double>>, kWeightings> tails;
    Vector<Vector<double>> dearest = none;
    for (const Ending ending : kEndings) heads[ending][0][0] = 0;
    for (const Weighting below : kBelow) tails[below] = none, tails[below][stages][layers] = 0;
    dearest[0][0] = 0;
    for (int s = 0; s < stages; ++s)
      for (const Arc& arc : arcs_[s]) {
        const int first = arc.span.first, end = arc.span.end();
        StageTimes& stage_times = times(s, arc.span);
        budget.tick();
        for (const Ending ending : kEndings) {
          const double link = s + 1 < stages ? PathBounds::trips_above(ending) * problem_.send_to(end) : 0;
          const double time_here = time(stage_times, s, arc.span, PathBounds::above(s, ending), false, budget);
          heads[ending][s + 1][end] = std::min(heads[ending][s + 1][end], heads[ending][s][first] + time_here + link);
        }
        dearest[s + 1][end] = std::min(dearest[s + 1][end], std::max(dearest[s][first], arc.cost));
      }
    for (int s = stages - 1; s >= 0; --s)
      for (const Arc& arc : arcs_[s]) {
        const int first = arc.span.first, end = arc.span.end();
        StageTimes& stage_times = times(s, arc.span);
        for (const Weighting below : kBelow) {
          const double link = s > 0 ? PathBounds::trips_below(below) * problem_.send_to(first) : 0;
          const double time_here = below == kNowhere ? 0 : time(stage_times, s, arc.span, below, false, budget);
          tails[below][s][first] = std::min(tails[below][s][first], tails[below][s + 1][end] + time_here + link);
        }
      }
    for (const Ending ending : kEndings) heads_[ending].both = std::move(heads[ending]);
    for (const Weighting below : kBelow) tails_[below].both = std::move(tails[below]);
    return dearest[stages][layers];
  }

  const Problem& problem_;
  const PathBounds& bounds_;
  StageSolver& solver_;
  ChoiceCache& cache_;
  std::array<Elsewhere, kEndings.size()> heads_;  // by where paths end
  std::array<Elsewhere, kWeightings> tails_;      // by the stages below
  std::vector<TimesOfSpans> times_;               // of the first and the last stage
  Minimax found_;
  std::vector<Vector<Arc>> arcs_;  // of each stage
};

}  // namespace galvatron
