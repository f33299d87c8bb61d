// The stages of a pipeline with one chunk each: bounds and optima of one stage, for any weights of its forward,
// backward and sync times.
// README.md, step 4.
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <vector>

#include "critical_path_bounds.hpp"
#include "limits.hpp"
#include "multiple_choice_knapsack.hpp"
#include "problem.hpp"
#include "resharding_path.hpp"

namespace galvatron {

// A stage's layers settled: how many take which strategy, the layouts in order, and the times of the whole stage.
struct StagePoint {
  StageTime time;
  std::vector<Count> counts;
  std::vector<int> order;
};

// A stage's best point for some layers.
struct Solved {
  double cost = kInfinity;  // no point costs less
  StagePoint point;         // the best one known; without counts where nothing fits
};

using SolvedSpans = Map<long, Solved>;  // by StageSolver::key

// Cheap bounds of a stage's weighted times, ms; negative: not yet known.
using StageTimes = std::array<double, kWeightings>;
using TimesOfSpans = Map<long, StageTimes>;  // by StageSolver::key

// Choices, and what is solved, by weights and micro-batches in flight; shared by all stages and vocabulary strategies.
class ChoiceCache {
 public:
  explicit ChoiceCache(const Problem& problem) : problem_(problem) {}

  CountKnapsack& weighted(int in_flight, const Weights& weights) {
    std::unique_ptr<CountKnapsack>& knapsack = weighted_[{in_flight, weights}];
    if (!knapsack) knapsack = std::make_unique<CountKnapsack>(undominated(choices(in_flight, weights)));
    return *knapsack;
  }

  // Caches of middle stages, which don't depend on the vocabulary.
  SolvedSpans& inner(int in_flight, const Weights& weights) { return inner_[{in_flight, weights}]; }
  TimesOfSpans& inner_times(int stage) { return inner_times_[stage]; }

  // Clears the cache.
  void forget() {
    for (auto& [key, knapsack] : weighted_) knapsack->forget();
    inner_.clear();
    inner_times_.clear();
  }

  // Least cost of one layer of a type, in any memory.
  double cheapest(int type, const Weights& weights) const {
    double least = kInfinity;
    for (const Part& part : problem_.strategies)
      if (problem_.types[part.layout] == type) least = std::min(least, weights.of(part.time));
    return least;
  }

  // The choices that all strategies make.
  std::vector<Choice> choices(int in_flight, const Weights& weights) const {
    std::vector<Choice> result;
    for (const Part& part : problem_.strategies)
      result.push_back({part.states + in_flight * part.activation, weights.of(part.time), part.workspace,
                        static_cast<int>(result.size()), part.layout, problem_.types[part.layout]});
    return result;
  }

 private:
  const Problem& problem_;
  std::map<std::pair<int, Weights>, std::unique_ptr<CountKnapsack>> weighted_;
  std::map<std::pair<int, Weights>, SolvedSpans> inner_;
  std::map<int, TimesOfSpans> inner_times_;
};

// The stages of one pipeline under one vocabulary strategy. Everything asked is remembered.
class StageSolver {
 public:
  StageSolver(const Problem& problem, const PathBounds& bounds, const Vocab& vocab, ChoiceCache& cache)
      : problem_(problem), bounds_(bounds), vocab_(vocab), cache_(cache), views_(problem.stages) {
    for (int stage = 0; stage < problem.stages; ++stage) {
      const Part& fixed = problem.fixed_part(vocab, stage);
      views_[stage].fixed = fixed.time;
      views_[stage].room = {problem.budget - fixed.states - problem.in_flight[stage] * fixed.activation,
                            fixed.workspace};
    }
  }

  // Weighted time of a stage's vocabulary layers.
  double fixed(int stage, Weighting weighting) const {
    return bounds_.weights(stage, weighting).of(views_[stage].fixed);
  }

  // Below every weighted time of a stage with these layers; never less for more of them. Where layers have several
  // types, it leaves resharding out: more layers may end in a cheaper layout.
  double bound(int stage, Span span, Weighting weighting, WorkBudget& budget) {
    return fixed(stage, weighting) +
           choices(stage, weighting).bound(problem_.layers_of(span), views_[stage].room, budget) +
           (problem_.type_count() == 1 ? walks(stage, span, weighting).least() : 0);
  }

  // The least weighted time itself, or a lower bound where that is too hard; infinite where nothing fits.
  double least(int stage, Span span, Weighting weighting, WorkBudget& budget) {
    return weighting == kNowhere ? 0 : solved(stage, span, weighting, budget).cost;
  }

  // The point that has it, or the best one known; without counts where there is none.
  const StagePoint& best(int stage, Span span, Weighting weighting, WorkBudget& budget) {
    return solved(stage, span, weighting, budget).point;
  }

  // All points whose weighted time is below the limit; false when there are more than `most`, or when listing them
  // takes more than the effort.
  bool points(int stage, Span span, Weighting weighting, double limit, std::size_t most, Vector<StagePoint>& points,
              long& effort, WorkBudget& budget) {
    CountKnapsack all(cache_.choices(problem_.in_flight[stage], bounds_.weights(stage, weighting)));
    auto emit = [&](const std::vector<Count>& counts, LayoutSet layouts) {
      std::vector<int> order = layouts_of(layouts);
      do points.push_back(point(stage, span, counts, order));
      while (points.size() <= most && next_order(order));
      return points.size() <= most;
    };
    const double stage_limit = limit - fixed(stage, weighting);
    ReshardingPath& walk = walks(stage, span, weighting);
    all.enumerate(problem_.layers_of(span), views_[stage].room, walk, stage_limit, emit, effort, budget);
    walk.forget();
    return points.size() <= most && effort > 0;
  }

  // Times where all layers of a type take one strategy. `strategies`: of each layer of the pipeline.
  StageTime uniform(int stage, Span span, const std::vector<int>& strategies) const {
    std::vector<Count> counts;
    std::vector<int> order;
    for (int layer = span.first; layer < span.end(); ++layer) {
      const int layout = problem_.strategies[strategies[layer]].layout;
      if (order.empty() || order.back() != layout) order.push_back(layout), counts.push_back({strategies[layer], 0});
      ++counts.back().layers;
    }
    return point(stage, span, counts, order).time;
  }

  // Equal for spans of equal content between equal ends of a stage.
  long key(Span span) const {
    const Ends ends = this->ends(span);
    const int start = problem_.starts[ends.first_type];
    const bool inside =
        ends.first_type == ends.last_type && span.first > start && span.end() < problem_.starts[ends.first_type + 1];
    return (inside ? start + 1L : span.first) * (problem_.layers + 1L) + span.layers;
  }

 private:
  struct View {
    StageTime fixed;
    MemoryBudget room;
    std::array<CountKnapsack*, kWeightings> choices{};
    std::array<std::map<int, std::unique_ptr<ReshardingPath>>, kWeightings> walks;  // by Ends::key
    std::array<SolvedSpans, kWeightings> solved;
  };

  // End points of a layout path: layer type, and whether the type changes there.
  struct Ends {
    int first_type, last_type;
    bool enters_type, leaves_type;

    int key() const { return ((first_type * kMostTypes + last_type) * 2 + enters_type) * 2 + leaves_type; }
  };

  Ends ends(Span span) const {
    return {problem_.type_of(span.first), problem_.type_of(span.end() - 1), problem_.is_between(span.first),
            problem_.is_between(span.end())};
  }

  const std::vector<PassTimes>& entry(int stage, const Ends& ends) const {
    return stage == 0 ? vocab_.enter : problem_.enter.at(ends.enters_type);
  }
  const std::vector<PassTimes>& exit(int stage, const Ends& ends) const {
    return stage == problem_.stages - 1 ? vocab_.leave : problem_.leave.at(ends.leaves_type);
  }

  CountKnapsack& choices(int stage, Weighting weighting) {
    CountKnapsack*& knapsack = views_[stage].choices[weighting];
    if (!knapsack) knapsack = &cache_.weighted(problem_.in_flight[stage], bounds_.weights(stage, weighting));
    return *knapsack;
  }

  ReshardingPath& walks(int stage, Span span, Weighting weighting) {
    const Ends ends = this->ends(span);
    std::unique_ptr<ReshardingPath>& walks = views_[stage].walks[weighting][ends.key()];
    if (walks) return *walks;
    const Weights& weights = bounds_.weights(stage, weighting);
    GroupPrices prices;
    prices.types = problem_.types;
    for (int a = 0; a < problem_.layouts(); ++a) {
      prices.enter.push_back(weights.of(entry(stage, ends)[a]));
      prices.leave.push_back(weights.of(exit(stage, ends)[a]));
      prices.change.emplace_back();
      for (int b = 0; b < problem_.layouts(); ++b) prices.change[a].push_back(weights.of(problem_.change[a][b]));
    }
    walks = std::make_unique<ReshardingPath>(std::move(prices), ends.first_type, ends.last_type);
    return *walks;
  }

  // The next order of layouts in which types stay in theirs.
  bool next_order(std::vector<int>& order) const {
    while (std::next_permutation(order.begin(), order.end()))
      if (std::is_sorted(order.begin(), order.end(),
                         [&](int a, int b) { return problem_.types[a] < problem_.types[b]; }))
        return true;
    return false;
  }

  StagePoint point(int stage, Span span, const std::vector<Count>& counts, const std::vector<int>& order) const {
    const Ends ends = this->ends(span);
    StagePoint point{views_[stage].fixed, counts, order};
    for (const auto& [id, layers] : counts) point.time.add(problem_.strategies[id].time, layers);
    PassTimes& passes = point.time.passes;
    add_to(passes, entry(stage, ends)[order.front()]);
    for (std::size_t i = 1; i < order.size(); ++i) add_to(passes, problem_.change[order[i - 1]][order[i]]);
    add_to(passes, exit(stage, ends)[order.back()]);
    return point;
  }

  // Middle stages don't depend on the vocabulary, so their solutions are cached across vocabulary strategies.
  const Solved& solved(int stage, Span span, Weighting weighting, WorkBudget& budget) {
    const bool inner = stage > 0 && stage < problem_.stages - 1;
    SolvedSpans& works = inner ? cache_.inner(problem_.in_flight[stage], bounds_.weights(stage, weighting))
                               : views_[stage].solved[weighting];
    const long number = key(span);
    const auto entry = works.find(number);
    if (entry != works.end()) return entry->second;
    ReshardingPath& walk = walks(stage, span, weighting);
    const Assignment mix = choices(stage, weighting).solve(problem_.layers_of(span), views_[stage].room, walk, budget);
    Solved solved;
    if (!mix.counts.empty()) {
      LayoutSet used = 0;
      for (const auto& [id, n] : mix.counts) used |= bit(problem_.strategies[id].layout);
      solved.point = point(stage, span, mix.counts, walk.order(used, budget));
      solved.cost = bounds_.weights(stage, weighting).of(solved.point.time);
    }
    walk.forget();
    if (mix.bound < mix.cost) solved.cost = std::min(solved.cost, fixed(stage, weighting) + mix.bound);
    return works.emplace(number, std::move(solved)).first->second;
  }

  const Problem& problem_;
  const PathBounds& bounds_;
  const Vocab& vocab_;
  ChoiceCache& cache_;
  Vector<View> views_;
};

}  // namespace galvatron
