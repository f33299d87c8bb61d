// The fastest pipeline under one vocabulary strategy: depth-first branch and bound over partitions and, at a leaf, over
// the Pareto points of its stages. The bounds are those of paths (critical_path_bounds.hpp), for all partitions
// (partitions.hpp), from exact optima of stages (stage_solver.hpp); a leaf is timed by simulation (critical_path.hpp).
// README.md, step 6.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "critical_path.hpp"
#include "critical_path_bounds.hpp"
#include "limits.hpp"
#include "partitions.hpp"
#include "stage_solver.hpp"

namespace galvatron {

struct PipelineSolution : PlanFound {
  double limit = kInfinity;  // of further pipelines that are wanted: below `cost` by the gap
};

class PartitionSearch {
 public:
  PartitionSearch(const Problem& problem, const PathBounds& bounds, StageSolver& solver, ChoiceCache& cache,
                  StepGraph& graph)
      : problem_(problem),
        bounds_(bounds),
        solver_(solver),
        graph_(graph),
        partitions_(problem, bounds, solver, cache) {}

  // Cheap lower bound over all partitions; infinite where none fits.
  double bound(WorkBudget& budget) { return partitions_.bound(budget); }

  // Tighter lower bound.
  double tight_bound(WorkBudget& budget) { return partitions_.tight_bound(budget); }

  // Sets `best` to a pipeline below its limit, and within the gap of the optimum; call one of the bounds before it.
  // Subtracts its work, in simulated passes, from `effort`. False: the effort was used up, and `bound` is a lower
  // bound.
  bool solve(PipelineSolution& best, double& bound, double gap, long& effort, WorkBudget& budget) {
    budget_ = &budget;
    effort_ = effort;
    gap_ = gap;
    if (best.limit == kInfinity || partitions_.narrow(best.limit, bound, budget)) {
      division_ = partitions_.promising(budget);
      leaf(best, false);
      if (partitions_.narrow(best.limit, bound, budget)) divide(0, 0, best);
    }
    effort = std::max(effort_, 0L);
    return effort_ > 0;
  }

 private:
  static constexpr std::size_t kMostPoints = 20'000;  // of one stage at one node
  static constexpr long kBoundPasses = 20;  // a stage's share in a bound is as much work as so many simulated passes

  double simulate(const std::vector<StageTime>& times) {
    effort_ -= graph_.work();
    return graph_.time(times, links_, *budget_);
  }

  // Makes a pipeline of the selected partition the best one, if it is.
  void take(PipelineSolution& best, double cost, const std::vector<StagePoint>& points) const {
    if (!is_less(cost, best.cost)) return;
    best.cost = cost, best.limit = std::min(best.limit, cost * (1 - gap_));
    best.division = division_;
    best.strategies.clear();
    for (const StagePoint& point : points)  // layout by layout, in their order
      for (const int layout : point.order)
        for (const auto& [id, layers] : point.counts)
          if (problem_.strategies[id].layout == layout) best.strategies.insert(best.strategies.end(), layers, id);
  }

  void settle_spans(int stages) {
    spans_.resize(problem_.stages);
    links_.resize(problem_.stages);
    for (int s = 0; s < stages; ++s) {
      spans_[s] = {s > 0 ? spans_[s - 1].end() : 0, division_[s]};
      links_[s] = problem_.send_after(spans_[s]);
    }
  }

  // --- partitions -------------------------------------------------------------------------------------------------

  // Depth-first search over the sizes of `stage` and all later ones.
  void divide(int stage, int first, PipelineSolution& best) {
    if (stage == problem_.stages) return leaf(best, true);
    const auto& arcs = partitions_.arcs(stage);
    for (auto arc = arcs.rbegin(); arc != arcs.rend() && effort_ > 0; ++arc) {
      if (arc->span.first != first || !is_less(arc->cost, best.limit)) continue;
      const int n = arc->span.layers;
      budget_->tick();
      effort_ -= kBoundPasses * problem_.stages;
      division_[stage] = n;
      if (is_less(partial_bound(stage + 1, first + n), best.limit)) divide(stage + 1, first + n, best);
    }
  }

  // Lower bound of all pipelines with the first stages as selected, which have this number of layers.
  double partial_bound(int stages, int layers) {
    settle_spans(stages);
    return bounds_.longest(
        stages, [&](int s, Weighting w) { return least(s, w); }, [&](int s) { return links_[s]; },
        [&](int s) { return division_[s]; }, [&](Weighting below) { return partitions_.rest(below, stages, layers); });
  }

  double least(int stage, Weighting weighting) {
    if (PathBounds::is_minor(stage, weighting)) return solver_.bound(stage, spans_[stage], weighting, *budget_);
    return solver_.least(stage, spans_[stage], weighting, *budget_);
  }

  // --- strategies of one partition ------------------------------------------------------------------------------

  // A good pipeline of the selected partition, or its optimum.
  void leaf(PipelineSolution& best, bool exactly) {
    settle_spans(problem_.stages);
    free_.assign(problem_.stages, true);
    chosen_.assign(problem_.stages, StagePoint{});
    if (!is_less(node_bound(), best.limit)) return;
    settle(best);
    if (exactly) refine(best);
  }

  double share(int stage, Weighting weighting) {
    if (free_[stage]) return solver_.least(stage, spans_[stage], weighting, *budget_);
    return bounds_.weights(stage, weighting).of(chosen_[stage].time);
  }

  // Lower bound of the partition's pipelines with the points chosen so far.
  double node_bound() {
    const double longest = bounds_.longest(
        problem_.stages, [&](int s, Weighting w) { return share(s, w); }, [&](int s) { return links_[s]; },
        [&](int s) { return division_[s]; }, [](Weighting) { return 0.0; });
    if (!(longest < kInfinity)) return kInfinity;
    times_.resize(problem_.stages);
    for (int s = 0; s < problem_.stages; ++s) {
      for (const PassKind kind : kPassKinds) times_[s].passes[kind] = share(s, single(kind));
      times_[s].sync = share(s, kSync);
    }
    effort_ -= kBoundPasses * problem_.stages;
    return std::max(longest, simulate(times_));
  }

  // A good pipeline fast: each stage's optima under the paths' weightings, tried in turn.
  void settle(PipelineSolution& best) {
    std::vector<StagePoint> points(problem_.stages);
    std::vector<StageTime> times(problem_.stages);
    for (int s = 0; s < problem_.stages; ++s) {
      points[s] = solver_.best(s, spans_[s], kBusy, *budget_);
      if (points[s].counts.empty()) return;  // none is known
      times[s] = points[s].time;
    }
    double cost = simulate(times);
    for (bool better = true; better;) {
      better = false;
      for (int s = 0; s < problem_.stages && effort_ > 0; ++s) {
        auto attempt = [&](Weighting weighting) {
          const StagePoint& point = solver_.best(s, spans_[s], weighting, *budget_);
          if (point.counts.empty()) return;
          const StageTime old_time = std::exchange(times[s], point.time);
          const double attempted = simulate(times);
          if (!is_less(attempted, cost)) {
            times[s] = old_time;
            return;
          }
          cost = attempted, points[s] = point, better = true;
        };
        for (const PathBound& path_bound : bounds_.of(s)) attempt(path_bound.at_stage);
        attempt(kOnce), attempt(kOnceLast);
      }
    }
    take(best, cost, points);
  }

  // Proves the partition's optimum: while the bound is below the best, branches on the points of one more stage that a
  // better pipeline could have.
  void refine(PipelineSolution& best) {
    budget_->tick();
    if (effort_ <= 0 || !is_less(node_bound(), best.limit)) return;
    const int stage = loosest();
    if (stage < 0) return take(best, simulate(times_), chosen_);
    Vector<StagePoint> points;
    if (!points_below(stage, best.limit, points)) {
      effort_ = 0;  // too many to prove anything
      return;
    }
    free_[stage] = false;
    for (StagePoint& point : points) {
      chosen_[stage] = std::move(point);
      refine(best);
    }
    free_[stage] = true;
  }

  // The free stage whose relaxed times hide most: settling it at its best point lengthens the step most. -1: none.
  int loosest() {
    int loosest = -1;
    double longest = -1;
    for (int s = 0; s < problem_.stages; ++s) {
      if (!free_[s]) continue;
      const StageTime relaxed = std::exchange(times_[s], solver_.best(s, spans_[s], kBusy, *budget_).time);
      const double time = simulate(times_);
      times_[s] = relaxed;
      if (time > longest) longest = time, loosest = s;
    }
    return loosest;
  }

  // Undominated points of a stage that a pipeline below the limit may have.
  bool points_below(int stage, double limit, Vector<StagePoint>& points) {
    // The path that leaves the stage least time, for its weight, keeps the enumeration smallest.
    Weighting narrow = kBusy;
    double least_room = kInfinity, narrow_limit = kInfinity;
    for (const PathBound& path_bound : bounds_.of(stage)) {
      const double left = limit - path_without(stage, path_bound);
      const Weights& weights = bounds_.weights(stage, path_bound.at_stage);
      const double room = (left - share(stage, path_bound.at_stage)) / total(weights.passes);
      if (room < least_room) least_room = room, narrow = path_bound.at_stage, narrow_limit = left;
    }
    if (!solver_.points(stage, spans_[stage], narrow, narrow_limit, kMostPoints, points, effort_, *budget_))
      return false;
    std::sort(points.begin(), points.end(), [](const StagePoint& a, const StagePoint& b) { return a.time < b.time; });
    Vector<StagePoint> kept;
    for (StagePoint& point : points) {
      budget_->tick(kept.size());
      const bool beaten = std::any_of(kept.begin(), kept.end(), [&](const StagePoint& other) {
        return fits_in(other.time.passes, point.time.passes) && other.time.sync <= point.time.sync;
      });
      if (!beaten) kept.push_back(std::move(point));
    }
    points = std::move(kept);
    return true;
  }

  // Sum of a stage's path bound over the other stages.
  double path_without(int stage, const PathBound& path_bound) {
    double sum = 0;
    for (int s = 0; s < stage; ++s)
      sum += share(s, PathBounds::above(s, path_bound.ending)) + PathBounds::trips_above(path_bound.ending) * links_[s];
    for (int s = stage + 1; s < problem_.stages; ++s)
      sum += share(s, path_bound.below) + PathBounds::trips_below(path_bound.below) * links_[s - 1];
    return sum;
  }

  const Problem& problem_;
  const PathBounds& bounds_;
  StageSolver& solver_;
  StepGraph& graph_;
  Partitions partitions_;
  WorkBudget* budget_ = nullptr;
  long effort_ = 0;
  double gap_ = 0;

  std::vector<int> division_;       // worked on: layers of each stage
  std::vector<Span> spans_;         // the same
  std::vector<double> links_;       // messages from each stage to the next
  std::vector<bool> free_;          // stages not yet settled
  std::vector<StagePoint> chosen_;  // of the others
  std::vector<StageTime> times_;    // scratch
};

}  // namespace galvatron
