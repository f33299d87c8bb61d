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
    auto tighten = [&](bool exactly) {  // between the bound and the best plan
      double bound = 0;
      try {
        if (!column_generation) column_generation = std::make_unique<ColumnGeneration>(problem_);
        PlanFound better = column_generation->solve(limit, gap, effort, bound, budget, exactly);
        if (better.vocab >= 0) plan = std::move(better), limit = plan.cost * (1 - gap);
        proven = std::max(proven, bound);
      } catch (const TooHard&) {
      }
    };
    for (const long share : {effort / kFirstShare, effort}) {
      PipelineSolution best;
      best.cost = best.limit = limit;
      const double unproven = divided(searches, best, gap, share, budget);
      if (share == effort && plan.vocab < 0 && best.vocab < 0 && unproven < limit)
        take_least_memory(plan, limit, budget);
      if (best.vocab >= 0) plan = best, limit = best.limit;
      if (plan.vocab >= 0) limit = std::min(limit, plan.cost * (1 - gap));
      proven = std::max(proven, std::min(unproven, limit));
      if (!(proven < limit)) break;
      if (problem_.type_count() > 1) continue;
      if (share < effort) tighten(false);
      if (effort < ColumnGeneration::kMostEffort) continue;
      while (proven < limit && limit < tightened) {  // a better plan prunes more
        tightened = limit;
        tighten(true);
      }
      if (!(proven < limit)) break;
    }
    return plan;
  }

  PlanFound least_memory(WorkBudget& budget) const override {
    PlanFound least;
    MinMemory needs(problem_);
    for (const int v : useful_) {
      const Minimax division = least_needy(needs, problem_.vocabs[v], budget);
      if (!(division.value < least.cost)) continue;
      least = {division.value, v, division.division, {}};
      const std::vector<Span> spans = problem_.spans(division.division);
      for (int s = 0; s < problem_.stages; ++s) {
        const MinMemory::Need stage = needs.of(problem_.vocabs[v], s, spans[s]);
        for (int l = spans[s].first; l < spans[s].end(); ++l)
          least.strategies.push_back(stage.strategy[problem_.type_of(l)]);
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
      const double old_cost = best.cost;
      if (!solved(vocab_search, best, gap, effort, budget)) unproven = std::min(unproven, vocab_search.bound);
      vocab_search.close();
      if (best.cost < old_cost) best.vocab = vocab_search.vocab;
    }
    budget.allow(4 * kMostSteps);
    return unproven;
  }

  // Vocabulary strategies under which a pipeline may cost less than the limit, the best bound first.
  VocabSearches searches_below(double limit, WorkBudget& budget) {
    VocabSearches searches;
    for (const int v : useful_) searches.push_back({0, v, nullptr, nullptr});
    for (const bool tight : {false, true}) {  // cheap bounds of all of them first
      budget.allow(kMostSteps);
      for (VocabSearch& vocab_search : searches) try {
          open(vocab_search, budget);
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

  // Builds the solvers of a vocabulary strategy, and raises its bound to a cheap one.
  void open(VocabSearch& vocab_search, WorkBudget& budget) {
    if (vocab_search.search) return;
    vocab_search.solver = std::make_unique<StageSolver>(problem_, bounds_, problem_.vocabs[vocab_search.vocab], cache_);
    vocab_search.search = std::make_unique<PartitionSearch>(problem_, bounds_, *vocab_search.solver, cache_, graph_);
    vocab_search.bound = std::max(vocab_search.bound, vocab_search.search->bound(budget));
  }

  // Whether a vocabulary strategy was searched to the end. Raises its bound.
  bool solved(VocabSearch& vocab_search, PipelineSolution& best, double gap, long& effort, WorkBudget& budget) {
    try {
      open(vocab_search, budget);
      return vocab_search.search->solve(best, vocab_search.bound, gap, effort, budget);
    } catch (const TooHard&) {
      vocab_search.close();
      cache_.forget();
      return false;
    }
  }

  // Makes the pipeline of least memory the plan, if that fits and costs less than the limit.
  void take_least_memory(PlanFound& plan, double limit, WorkBudget& budget) {
    PlanFound least = least_memory(budget);
    if (!(least.cost <= within(problem_.budget))) return;
    const StageSolver solver(problem_, bounds_, problem_.vocabs[least.vocab], cache_);
    ChunkTimes times;
    std::vector<double> links;
    for (const Span span : problem_.spans(least.division)) {
      times.push_back(solver.uniform(static_cast<int>(times.size()), span, least.strategies));
      links.push_back(problem_.send_after(span));
    }
    least.cost = graph_.time(times, links, budget);
    if (is_less(least.cost, limit)) plan = std::move(least);
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
