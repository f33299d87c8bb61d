// The fastest pipeline of a family, over all vocabulary strategies: partition search first, then column generation.
// README.md, step 9.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "column_generation.hpp"
#include "critical_path.hpp"
#include "critical_path_bounds.hpp"
#include "limits.hpp"
#include "min_memory.hpp"
#include "partition_branch_and_bound.hpp"
#include "problem.hpp"
#include "stage_solver.hpp"

namespace galvatron {

class PipelineSearch : public Search {
 public:
  explicit PipelineSearch(Problem problem)
      : problem_(std::move(problem)),
        bounds_(problem_),
        cache_(problem_),
        graph_(problem_.passes),
        useful_(useful_vocabs(problem_)) {}

  PipelineSearch(const PipelineSearch&) = delete;

  double bound(WorkBudget& budget) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    double least = kInfinity;
    for (const int v : useful_) {
      StageSolver solver(problem_, bounds_, problem_.vocabs[v], cache_);
      least = std::min(least, PartitionSearch(problem_, bounds_, solver, cache_, graph_).bound(budget));
    }
    return least;
  }

  // Tighter lower bound: exact optima of stages under each vocabulary strategy. Bounds above `limit`, and those that
  // would take too much memory or time, stay cheap.
  double tight_bound(double limit, WorkBudget& budget) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const VocabSearches searches = searches_below(limit, budget);
    return searches.empty() ? limit : searches.front().bound;
  }

  // Also given up where it would take too much memory or time.
  PlanFound solve(double limit, double gap, long effort, double& proven, WorkBudget& budget) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    VocabSearches searches = searches_below(limit, budget);
    effort = std::min(std::max(effort, 0L), kMostEffort);
    PlanFound plan;
    std::unique_ptr<ColumnGeneration> column_generation;
    double tightened = kInfinity;  // the limit of the last exact column generation
    proven = 0;
    for (const long share : {effort / kFirstShare, effort}) {
      PipelineSolution best;
      best.cost = best.limit = limit;
      const double unproven = divided(searches, best, gap, share, budget);
      if (share == effort && plan.vocab < 0 && best.vocab < 0 && unproven < limit) take_least_memory(best, budget);
      if (best.vocab >= 0) plan = found_of(best), limit = std::min(best.limit, best.cost * (1 - gap));
      proven = std::max(proven, std::min(unproven, limit));
      if (!(proven < limit)) break;
      if (problem_.type_count() > 1) continue;
      if (share < effort) limit = tighten(column_generation, false, plan, limit, gap, effort, proven, budget);
      if (effort < ColumnGeneration::kMostEffort) continue;
      while (proven < limit && limit < tightened) {  // a better plan prunes more
        tightened = limit;
        limit = tighten(column_generation, true, plan, limit, gap, effort, proven, budget);
      }
      if (!(proven < limit)) break;
    }
    return plan;
  }

  PlanFound least_memory(WorkBudget& budget) const override {
    PlanFound least;
    MinMemory needs(problem_, cache_);
    for (const int v : useful_) {
      const Minimax division = least_needy(needs, problem_.vocabs[v], budget);
      if (!(division.value < least.cost)) continue;
      least = {division.value, v, division.division, {}};
      int first = 0;
      for (int s = 0; s < problem_.stages; ++s) {
        const Span span{first, division.division[s]};
        const MinMemory::Need stage = needs.of(problem_.vocabs[v], s, span);
        for (int l = span.first; l < span.end(); ++l) least.strategies.push_back(stage.strategy[problem_.type_of(l)]);
        first = span.end();
      }
    }
    return least;
  }

 private:
  // The time that bounds may take: some seconds.
  static constexpr std::size_t kMostSteps = 500'000'000, kStepsOfPass = 5;
  static constexpr long kMostEffort = 1'000'000'000'000;  // hours
  static constexpr long kFirstShare = 16;                 // of the effort, before column generation

  struct VocabSearch {
    double bound;
    int vocab;
    std::unique_ptr<StageSolver> solver;
    std::unique_ptr<PartitionSearch> search;

    void close() { search.reset(), solver.reset(); }
  };

  using VocabSearches = std::vector<VocabSearch>;

  // Partition search under each vocabulary strategy. Returns a lower bound over those that were given up.
  double divided(VocabSearches& searches, PipelineSolution& best, double gap, long effort, WorkBudget& budget) {
    double unproven = kInfinity;
    budget.allow(kStepsOfPass * static_cast<std::size_t>(effort));
    for (VocabSearch& vocab_search : searches) {
      if (!is_less(vocab_search.bound, best.limit)) break;
      PipelineSolution solution;
      solution.cost = best.cost, solution.limit = best.limit;
      if (!solved(vocab_search, solution, gap, effort, budget)) unproven = std::min(unproven, vocab_search.bound);
      vocab_search.close();
      if (!is_less(solution.cost, best.cost)) continue;
      best = std::move(solution);
      best.vocab = vocab_search.vocab;
    }
    budget.allow(4 * kMostSteps);
    return unproven;
  }

  // Column generation between the bound and the best plan. Returns the limit of further plans after it.
  double tighten(std::unique_ptr<ColumnGeneration>& column_generation, bool exactly, PlanFound& best, double limit,
                 double gap, long effort, double& proven, WorkBudget& budget) const {
    double bound = 0;
    try {
      if (!column_generation) column_generation = std::make_unique<ColumnGeneration>(problem_);
      PlanFound plan = column_generation->solve(limit, gap, effort, bound, budget, exactly);
      if (plan.vocab >= 0) best = std::move(plan), limit = best.cost * (1 - gap);
      proven = std::max(proven, bound);
    } catch (const TooHard&) {
    }
    return limit;
  }

  PlanFound found_of(const PipelineSolution& solution) const {
    if (solution.vocab < 0) return {};
    PlanFound plan{solution.cost, solution.vocab, solution.division, {}};
    for (const StagePoint& point : solution.points)  // layout by layout, in their order
      for (const int layout : point.order)
        for (const auto& [id, layers] : point.counts)
          if (problem_.strategies[id].layout == layout) plan.strategies.insert(plan.strategies.end(), layers, id);
    return plan;
  }

  // Vocabulary strategies under which a pipeline may cost less than the limit, the best bound first.
  VocabSearches searches_below(double limit, WorkBudget& budget) {
    VocabSearches searches;
    for (const int v : useful_) searches.push_back({0, v, nullptr, nullptr});
    for (const bool tight : {false, true}) {  // cheap bounds of all of them first
      budget.allow(kMostSteps);
      for (VocabSearch& vocab_search : searches) try {
          if (!vocab_search.search) vocab_search.bound = std::max(vocab_search.bound, open(vocab_search, budget));
          if (tight && is_less(vocab_search.bound, limit))
            vocab_search.bound = vocab_search.search->tight_bound(budget);
        } catch (const TooHard&) {
          for (VocabSearch& other : searches) other.close();
          cache_.forget();
        }
    }
    searches.erase(std::remove_if(searches.begin(), searches.end(),
                                  [&](const VocabSearch& vocab_search) { return !is_less(vocab_search.bound, limit); }),
                   searches.end());
    std::sort(searches.begin(), searches.end(),
              [](const VocabSearch& a, const VocabSearch& b) { return a.bound < b.bound; });
    return searches;
  }

  // Builds the solvers of a vocabulary strategy. Returns a cheap bound.
  double open(VocabSearch& vocab_search, WorkBudget& budget) {
    vocab_search.solver = std::make_unique<StageSolver>(problem_, bounds_, problem_.vocabs[vocab_search.vocab], cache_);
    vocab_search.search = std::make_unique<PartitionSearch>(problem_, bounds_, *vocab_search.solver, cache_, graph_);
    return vocab_search.search->bound(budget);
  }

  // Whether a vocabulary strategy was searched to the end. Raises its bound.
  bool solved(VocabSearch& vocab_search, PipelineSolution& best, double gap, long& effort, WorkBudget& budget) {
    try {
      if (!vocab_search.search) vocab_search.bound = std::max(vocab_search.bound, open(vocab_search, budget));
      return vocab_search.search->solve(best, vocab_search.bound, gap, effort, budget);
    } catch (const TooHard&) {
      vocab_search.close();
      cache_.forget();
      return false;
    }
  }

  // Makes the pipeline of least memory the best, if that fits and costs less.
  void take_least_memory(PipelineSolution& best, WorkBudget& budget) {
    const PlanFound least = least_memory(budget);
    if (!(least.cost <= within(problem_.budget))) return;
    const StageSolver solver(problem_, bounds_, problem_.vocabs[least.vocab], cache_);
    PipelineSolution uniform{0, best.limit, least.vocab, least.division, {}};
    std::vector<StageTime> times;
    std::vector<double> links;
    int first = 0;
    for (int s = 0; s < problem_.stages; ++s) {
      const Span span{first, least.division[s]};
      std::array<int, kMostTypes> strategy{};
      for (first = span.first; first < span.end(); ++first) strategy[problem_.type_of(first)] = least.strategies[first];
      uniform.points.push_back(solver.uniform(s, span, strategy));
      times.push_back(uniform.points.back().time);
      links.push_back(first < problem_.layers ? problem_.send_to(first) : 0);
    }
    uniform.cost = graph_.time(times, links, budget);
    if (is_less(uniform.cost, best.cost)) best = std::move(uniform);
  }

  // The partition that minimises the largest memory of a stage, MiB.
  Minimax least_needy(MinMemory& needs, const Vocab& vocab, WorkBudget& budget) const {
    auto mib = [&](int stage, Span span, double) {
      return stage == 0 && span.layers > problem_.most_first ? kInfinity : needs.of(vocab, stage, span).mib;
    };
    return least_dearest(problem_, mib, 0, 0, budget);
  }

  Problem problem_;
  PathBounds bounds_;
  ChoiceCache cache_;
  StepGraph graph_;
  std::vector<int> useful_;  // vocabulary strategies that no other one beats
  std::mutex mutex_;         // one thread at a time
};

}  // namespace galvatron
