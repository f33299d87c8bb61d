// Column enumeration: branch and bound over all points of stages whose reduced cost is below the gap.
//
// A node keeps some points of each stage. Against a path, or a mean of paths, its plans cost at least the sum of the
// stages' cheapest points; a point whose sum is not below the best plan's time is removed. The saddle point over the
// points that are left is found as in column generation (restricted_master.hpp). Then the stage is split whose time or
// layers differ most among the plans of the saddle point.
// README.md, step 8.
#pragma once

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "critical_path.hpp"
#include "interleaved_stage.hpp"
#include "limits.hpp"
#include "pricing.hpp"
#include "restricted_master.hpp"

namespace galvatron {

// All points of each stage, of one chunk, that a plan which costs less than `target` on weighted paths may have;
// nothing: there are too many.
inline std::optional<std::vector<Points>> points_below(double target, const PathWeights& weights, double links,
                                                       const InterleavedStages& stages, const ChunkPlaces& places,
                                                       const std::vector<StageCosts>& stage_costs,
                                                       const AllocationDp& allocation, WorkBudget& budget) {
  constexpr std::size_t kMostListed = 20'000;          // points of all stages
  constexpr std::size_t kStepsOfListing = 20'000'000;  // some 0.1 s
  const std::vector<std::vector<double>> others = allocation.of_others(budget);
  std::vector<Points> points(stage_costs.size());
  std::size_t left = kMostListed;
  const std::size_t stop = budget.steps() + kStepsOfListing;
  for (std::size_t s = 0; s < stage_costs.size(); ++s)
    for (std::size_t more = 0; more < stage_costs[s].costs.size(); ++more) {
      const double most = target - others[s][more] - links;
      if (!is_less(stage_costs[s].costs[more], most)) continue;
      Points enumerated;
      const int layers = stage_costs[s].fewest + static_cast<int>(more);
      if (!stages.list(s, {layers}, places.weights(weights, s)[0], most, left, stop, enumerated, budget)) return {};
      left -= enumerated.size();
      points[s].insert(points[s].end(), enumerated.begin(), enumerated.end());
    }
  return points;
}

class ColumnEnumeration {
 public:
  ColumnEnumeration(int layers, double link, StepGraph& graph, std::vector<Points> points,
                    const std::vector<PathWeights>& paths)
      : layers_(layers), link_(link), graph_(graph), points_(std::move(points)), master_(link) {
    for (const PathWeights& path : paths) master_.learn(path);
    for (const Points& stage_points : points_) {
      numbers_.emplace_back();
      for (const auto& point : stage_points) numbers_.back().push_back(numbers_of(*point));
    }
  }

  // Lower bound over the plans of the points; `best` where none is faster. Calls `take(plan, time)` for each plan that
  // is faster than `best` and all earlier ones. Begins with `weights`.
  template <class Take>
  double solve(const PathWeights& weights, double best, std::size_t stop, Take take, WorkBudget& budget) {
    best_ = best, stop_ = stop;
    Vector<Node> open;  // a heap, the least bound first
    auto is_later = [](const Node& a, const Node& b) { return a.bound > b.bound; };
    auto enter = [&](Node node, int rounds) {
      tighten(node, rounds, take, budget);
      if (!is_less(node.bound, best_)) return;
      open.push_back(std::move(node));
      std::push_heap(open.begin(), open.end(), is_later);
    };
    Node root{0, {}, weights, {}};
    for (const Points& stage_points : points_) {
      root.kept.emplace_back(stage_points.size());
      std::iota(root.kept.back().begin(), root.kept.back().end(), 0);
    }
    enter(std::move(root), kFirstRounds);
    double settled = kInfinity;  // least bound of nodes that can't be split
    while (!open.empty() && is_less(open.front().bound, best_) && budget.steps() < stop_) {
      std::pop_heap(open.begin(), open.end(), is_later);
      const Node node = std::move(open.back());
      open.pop_back();
      const auto [stage, number, middle] = node.split;
      if (stage < 0) settled = std::min(settled, node.bound);
      for (const bool upper : {false, true}) {
        if (stage < 0) break;
        Node half = node;
        half.kept[stage].clear();
        for (const int i : node.kept[stage])
          if ((numbers_[stage][i][number] > middle) == upper) half.kept[stage].push_back(i);
        enter(std::move(half), kRounds);
      }
    }
    if (!open.empty()) settled = std::min(settled, open.front().bound);
    return std::min(settled, best_);
  }

 private:
  static constexpr int kFirstRounds = 60, kRounds = 20;  // of column generation: at the root, at a further node
  static constexpr double kSettled = 1e-6;               // share of the time that rounds need not raise a bound by

  // By which number of a stage's points a node is split.
  struct Split {
    int stage = -1;  // none
    int number = 0;
    double middle = 0;
  };
  struct Node {
    double bound;
    std::vector<Vector<int>> kept;  // points of each stage
    PathWeights weights;            // behind the bound
    Split split;
  };
  struct Answered {
    double sum = kInfinity;
    std::vector<int> plan;
  };

  // Layers, the time of each pass, sync, and the time of all passes together.
  static std::vector<double> numbers_of(const InterleavedPoint& point) {
    std::vector<double> numbers{static_cast<double>(point.layers())};
    numbers.insert(numbers.end(), point.passes[0].begin(), point.passes[0].end());
    numbers.push_back(point.sync), numbers.push_back(total(point.passes[0]));
    return numbers;
  }

  // Path coefficients: 0 for layers, then those of the times, and the least one of all passes.
  static std::vector<double> counts_of(const PathWeights& weights, std::size_t stage) {
    std::vector<double> counts{0};
    double least = kInfinity;
    for (const double weight : weights.chunks[stage].passes) counts.push_back(weight), least = std::min(least, weight);
    counts.push_back(weights.chunks[stage].sync), counts.push_back(least);
    return counts;
  }

  int layers_of(std::size_t stage, int point) const { return static_cast<int>(numbers_[stage][point][0]); }

  // The plan of a node's points that costs least on paths. Raises the bound to that, and removes points that
  // can't be part of a faster plan than the best one.
  Answered answer(Node& node, const PathWeights& weights, WorkBudget& budget) const {
    const std::size_t stages = points_.size();
    std::vector<StageCosts> stage_costs(stages);  // `cheapest`: points
    std::vector<std::vector<double>> costs(stages);
    for (std::size_t s = 0; s < stages; ++s) {
      const Vector<int>& kept = node.kept[s];
      if (kept.empty()) return node.bound = kInfinity, Answered{};
      const std::vector<double> counts = counts_of(weights, s);
      const auto [fewest, most] = std::minmax_element(kept.begin(), kept.end(),
                                                      [&](int a, int b) { return layers_of(s, a) < layers_of(s, b); });
      StageCosts& stage_cost = stage_costs[s];
      stage_cost.fewest = layers_of(s, *fewest);
      stage_cost.costs.assign(layers_of(s, *most) - stage_cost.fewest + 1, kInfinity);
      stage_cost.cheapest.assign(stage_cost.costs.size(), -1);
      budget.tick(kept.size() * counts.size() / 4);
      for (const int i : kept) {
        const std::vector<double>& numbers = numbers_[s][i];
        double cost = 0;  // of the times alone
        for (std::size_t number = 1; number + 1 < counts.size(); ++number) cost += counts[number] * numbers[number];
        costs[s].push_back(cost);
        const int more = layers_of(s, i) - stage_cost.fewest;
        if (cost < stage_cost.costs[more]) stage_cost.costs[more] = cost, stage_cost.cheapest[more] = i;
      }
    }
    const AllocationDp allocation(stage_costs, layers_, budget);
    const double links = weights.links * link_;
    Answered answered{allocation.least() + links, {}};
    node.bound = std::max(node.bound, answered.sum);
    if (!is_less(node.bound, best_)) return answered;
    const std::vector<int> layers = allocation.layers_of_stages();
    const std::vector<std::vector<double>> others = allocation.of_others(budget);
    for (std::size_t s = 0; s < stages; ++s) {
      answered.plan.push_back(stage_costs[s].cheapest[layers[s] - stage_costs[s].fewest]);
      Vector<int> left;
      for (std::size_t k = 0; k < costs[s].size(); ++k) {
        const int i = node.kept[s][k];
        if (is_less(costs[s][k] + others[s][layers_of(s, i) - stage_costs[s].fewest] + links, best_)) left.push_back(i);
      }
      node.kept[s] = std::move(left);
    }
    return answered;
  }

  // Raises a node's bound, strikes points off, and finds where to split it.
  template <class Take>
  void tighten(Node& node, int rounds, Take take, WorkBudget& budget) {
    for (const PathWeights& path : master_.paths()) {
      answer(node, path, budget);
      if (!is_less(node.bound, best_)) return;
    }
    PathWeights weights = node.weights, path = weights;
    ChunkTimes times(points_.size());
    MasterSolution solution{path, times, {}};
    double least = 0;
    for (int round = 0; round < rounds; ++round) {
      const Answered now = answer(node, weights, budget);
      if (!is_less(node.bound, best_)) return;
      if (now.sum > least) least = now.sum, node.weights = weights;
      for (std::size_t s = 0; s < now.plan.size(); ++s) points_[s][now.plan[s]]->put(times, s);
      const double time = graph_.longest(times, link_, path, budget);
      master_.learn(path);
      const std::vector<KnownPlan>& answers = master_.answers();
      if (std::none_of(answers.begin(), answers.end(),
                       [&](const KnownPlan& answer) { return answer.plan == now.plan; }))
        master_.learn(now.plan, times);
      if (is_less(time, best_)) {
        Points plan;
        for (std::size_t s = 0; s < now.plan.size(); ++s) plan.push_back(points_[s][now.plan[s]]);
        take(plan, best_ = time);
      }
      solution = master_.solve([&](const std::vector<int>& plan) { return has(node, plan); }, budget);
      if (solution.plans.empty()) break;
      const double open = graph_.longest(solution.times, link_, path, budget);
      master_.learn(path);
      if (open - least <= kSettled * least || budget.steps() >= stop_) break;
      weights = solution.weights;
    }
    if (std::all_of(node.kept.begin(), node.kept.end(), [](const auto& kept) { return kept.size() == 1; }))
      node.bound = kInfinity;  // its one plan is known
    else
      node.split = split_of(node, solution);
  }

  bool has(const Node& node, const std::vector<int>& plan) const {
    for (std::size_t s = 0; s < plan.size(); ++s)
      if (!std::binary_search(node.kept[s].begin(), node.kept[s].end(), plan[s])) return false;
    return true;
  }

  // By the number in which the plans of the saddle point differ most, in ms of their paths; a layer counts its mean
  // time. If they don't differ: in the middle of any stage's points.
  Split split_of(const Node& node, const MasterSolution& solution) const {
    Split best;
    double widest = 0;
    for (std::size_t s = 0; s < points_.size() && !solution.plans.empty(); ++s) {
      std::vector<double> counts = counts_of(solution.weights, s);
      counts[0] = best_ / layers_;
      for (std::size_t number = 0; number < counts.size(); ++number) {
        const Spread spread =
            solution.spread([&](const std::vector<int>& plan) { return numbers_[s][plan[s]][number]; });
        const double width = counts[number] * spread.deviation;
        if (width > widest && divides(node, s, number, spread.mean))
          widest = width, best = {static_cast<int>(s), static_cast<int>(number), spread.mean};
      }
    }
    for (std::size_t s = 0; s < points_.size(); ++s)
      for (std::size_t number = 0; number < numbers_[s][0].size() && best.stage < 0; ++number) {
        double middle = 0;
        for (const int i : node.kept[s]) middle += numbers_[s][i][number] / static_cast<double>(node.kept[s].size());
        if (divides(node, s, number, middle)) best = {static_cast<int>(s), static_cast<int>(number), middle};
      }
    return best;
  }

  bool divides(const Node& node, std::size_t stage, std::size_t number, double middle) const {
    bool below = false, above = false;
    for (const int i : node.kept[stage]) (numbers_[stage][i][number] > middle ? above : below) = true;
    return below && above;
  }

  int layers_;
  double link_;
  StepGraph& graph_;
  std::vector<Points> points_;                             // of each stage
  std::vector<std::vector<std::vector<double>>> numbers_;  // of each of them
  RestrictedMaster master_;
  double best_ = kInfinity;
  std::size_t stop_ = 0;  // steps after which it is given up
};

}  // namespace galvatron
