// Column generation for pipelines of identical layers, with one or several chunks a stage.
//
// A step takes as long as the longest path through its passes. A path's length is a weighted sum of the chunks' times,
// and so is the mean of several paths; the least weighted sum over all plans is a lower bound of the step. It separates
// by stage, and a dynamic program allocates the layers (node_pricing.hpp). Rows are paths, columns are plans: solve the
// matrix game between the known ones (restricted_master.hpp), price a new plan against the paths' weights, and add the
// critical path of the mixture of plans. A remaining gap is branched on (branching.hpp); the node of least bound goes
// first. With one chunk a stage, column enumeration closes the rest (column_enumeration.hpp).
// README.md, step 7.
#pragma once

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "branching.hpp"
#include "column_enumeration.hpp"
#include "critical_path.hpp"
#include "interleaved_stage.hpp"
#include "limits.hpp"
#include "node_pricing.hpp"
#include "pricing.hpp"
#include "problem.hpp"
#include "restricted_master.hpp"

namespace galvatron {

class ColumnGeneration : public Search {
 public:
  explicit ColumnGeneration(Problem problem)
      : problem_(std::move(problem)),
        cache_(problem_),
        graph_(problem_.passes),
        places_(problem_),
        chunks_(problem_.stages * problem_.passes.chunks),
        master_(link()) {
    std::vector<int> vocabs = useful_vocabs(problem_);
    std::stable_sort(vocabs.begin(), vocabs.end(), [&](int a, int b) { return busy(a) < busy(b); });
    for (const int v : vocabs) {
      auto stages = std::make_unique<InterleavedStages>(problem_, problem_.vocabs[v], inner_);
      auto pricing = std::make_unique<Pricing>(problem_, cache_, *stages);
      vocab_cases_.push_back({v, std::move(stages), std::move(pricing), {}});
    }
  }

  static constexpr long kMostEffort = 20'000'000;  // passes: a second or two; of more effort a share

  // Lower bound: the busiest stage under a greedy partition.
  double bound(WorkBudget& budget) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    double least = kInfinity;
    for (VocabCase& vocab_case : vocab_cases_) least = std::min(least, greedy_partition(vocab_case, budget));
    return least;
  }

  // The bound of the root node.
  double tight_bound(double limit, WorkBudget& budget) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    allow(kEffortOfBound, budget);
    open(limit, budget);
    for (VocabCase& vocab_case : vocab_cases_) vocab_case.stages->forget();
    return std::min({limit, best_.cost, least_open()});
  }

  PlanFound solve(double limit, double gap, long effort, double& proven, WorkBudget& budget) override {
    return solve(limit, gap, effort, proven, budget, false);
  }

  // `exactly`: stages of one chunk answer exactly, which takes longer.
  PlanFound solve(double limit, double gap, long effort, double& proven, WorkBudget& budget, bool exactly) {
    const std::lock_guard<std::mutex> lock(mutex_);
    gap_ = gap;
    exact_ = exactly && chunks_a_stage() == 1;
    proven = searched(limit, effort, budget);
    for (VocabCase& vocab_case : vocab_cases_) vocab_case.stages->forget();
    PlanFound best = std::exchange(best_, {});
    return is_less(best.cost, limit) ? best : PlanFound{};
  }

 private:
  static constexpr int kFirstRounds = 100, kRounds = 12;  // at the root; at a further node
  static constexpr int kExactSplits = 400;                // made however close they are; further ones
  static constexpr double kNear = 5e-4;                   // only while they may gain this share of the time
  static constexpr double kSettled = 1e-5;                // share of the time that rounds need not raise a bound by
  static constexpr std::size_t kStepsOfPass = 5;
  static constexpr long kEffortOfBound = 2'000'000;  // passes: 0.1 s
  static constexpr long kShare = 5;                  // making plans takes longer than simulating them
  static constexpr long kListsShare = 2;             // lists have so much more effort
  static constexpr double kWorthwhile = 1.02;        // a plan so far above the best one is not made better

  static bool is_later(const Node& a, const Node& b) { return a.bound > b.bound; }

  void allow(long effort, const WorkBudget& budget) {
    stop_ = budget.steps() + kStepsOfPass * static_cast<std::size_t>(std::max(effort, 0L));
  }

  bool is_over(const WorkBudget& budget) const { return budget.steps() >= stop_; }

  int stages() const { return problem_.stages; }
  int chunks_a_stage() const { return problem_.passes.chunks; }
  // The limit of further plans: less with each that is found.
  double target() const { return std::min(limit_, best_.cost * (1 - gap_)); }
  double link() const { return problem_.send.inside[0]; }
  double least_open() const { return open_nodes_.empty() ? kInfinity : open_nodes_.front().bound; }

  int number(const VocabCase& vocab_case) const { return static_cast<int>(&vocab_case - vocab_cases_.data()); }

  // Time of a strategy of the vocabulary for one micro-batch.
  double busy(int vocab) const {
    const Vocab& ends = problem_.vocabs[vocab];
    return total(ends.last.time.passes, total(ends.first.time.passes));
  }

  // Shares the layers out one by one to the stage that then works least. Returns how long some stage works at least.
  double greedy_partition(VocabCase& vocab_case, WorkBudget& budget) {
    const int v = chunks_a_stage();
    const std::vector<int> one_layer(v, 1);
    std::vector<int> more(stages(), 0);
    const int most = problem_.layers - chunks_;
    std::vector<std::vector<double>> stage_works;
    for (int s = 0; s < stages(); ++s) {
      stage_works.push_back(vocab_case.stages->rough_works(s, one_layer, most, most / stages(), budget));
      if (stage_works.back()[0] == kInfinity) return kInfinity;
    }
    const double bound = share_out(most, more, [&](int stage, int extra) { return stage_works[stage][extra]; });
    vocab_case.division.assign(chunks_, 0);
    for (int s = 0; s < stages(); ++s)
      for (int c = 0; c < v; ++c) vocab_case.division[places_.of(s, c)] = 1 + more[s] / v + (c < more[s] % v);
    return bound;
  }

  // Branch and bound over divisions. Returns a lower bound.
  double searched(double limit, long effort, WorkBudget& budget) {
    effort = std::max(std::min(effort, kMostEffort), effort / kShare);
    allow(effort, budget);
    open(limit, budget);
    improve(budget);
    double settled = kInfinity;  // least bound of nodes that can't be split
    if (exact_) {
      allow(kListsShare * effort, budget);
      for (Node& node : std::exchange(open_nodes_, {})) {
        list(node, budget);
        keep(std::move(node));
      }
      allow(effort, budget);
    }
    for (int splits = 0; !is_over(budget); ++splits) {
      const double least = least_open();
      if (!is_less(least, target()) || (splits >= kExactSplits && least >= target() * (1 - kNear))) break;
      std::pop_heap(open_nodes_.begin(), open_nodes_.end(), is_later);
      const Node node = std::move(open_nodes_.back());
      open_nodes_.pop_back();
      const double old_cost = best_.cost;
      const std::vector<Node> halves = node.halves();
      if (halves.empty()) settled = std::min(settled, node.bound);
      for (Node half : halves) {
        tighten(half, kRounds, budget);
        keep(std::move(half));
      }
      if (is_less(best_.cost, old_cost)) improve(budget);
    }
    opened_ = -1;  // nothing is left to continue with
    return std::min({settled, least_open(), target()});
  }

  // Builds and tightens the root node. Skipped when already done for this limit or a higher one.
  void open(double limit, WorkBudget& budget) {
    limit_ = limit;
    if (limit <= opened_) return;
    open_nodes_.clear();
    master_.answers().clear();
    Node all(problem_.layers, stages(), chunks_);
    VocabCase* likely = nullptr;
    for (VocabCase& vocab_case : vocab_cases_) {
      const double bound = greedy_partition(vocab_case, budget);
      if (!is_less(bound, target())) continue;
      all.vocab_cases.push_back(number(vocab_case));
      if (is_less(bound, all.bound)) all.bound = bound, likely = &vocab_case;
    }
    if (likely) {
      all.latest = likely->division;
      all.weights = tried(*likely, likely->division, std::vector<Points>(stages()), budget);
      ChunkTimes times(chunks_);
      for (const int vocab_case : all.vocab_cases)  // a good plan closes many vocabulary strategies
        if (!is_over(budget)) attempt(vocab_cases_[vocab_case], vocab_cases_[vocab_case].division, times, budget);
      tighten(all, kFirstRounds, budget);
      keep(std::move(all));
    }
    opened_ = limit;
  }

  // Evaluates a partition, each stage with the given points or with its least work; adds its plan as a column and its
  // critical paths as rows.
  PathWeights tried(VocabCase& vocab_case, const std::vector<int>& division, std::vector<Points> options,
                    WorkBudget& budget) {
    ChunkTimes times(chunks_), shortest = times;
    bool limited = false;
    for (int s = 0; s < stages(); ++s) {
      limited = limited || !options[s].empty();
      const Points busiest = this->busiest(vocab_case, s, division, budget);
      options[s].insert(options[s].end(), busiest.begin(), busiest.end());
      put(vocab_case, times, s, division, options[s]);
    }
    PathWeights longest = attempt(vocab_case, division, options, shortest, budget);
    master_.learn(longest);
    if (limited) {
      PathWeights path;
      simulate(times, path, budget);
      master_.learn(std::move(path));
    }
    std::vector<int> plan = division;
    plan.push_back(number(vocab_case));
    master_.learn(std::move(plan), std::move(limited ? times : shortest));
    return longest;
  }

  void keep(Node node) {
    if (node.vocab_cases.empty() || !is_less(node.bound, target())) return;
    open_nodes_.push_back(std::move(node));
    std::push_heap(open_nodes_.begin(), open_nodes_.end(), is_later);
  }

  // Column enumeration over a node, under one vocabulary strategy after the other; raises its bound. A vocabulary
  // strategy with too many points stays in the node.
  void list(Node& node, WorkBudget& budget) {
    if (!(target() < kInfinity)) return;
    NodePricing pricing(problem_, cache_, vocab_cases_, node, target(), budget);
    const double links = node.weights.links * link();
    double least = kInfinity;
    std::vector<int> left;
    for (const int number : node.vocab_cases) {
      VocabCase& vocab_case = vocab_cases_[number];
      const std::vector<StageCosts> stage_costs = pricing.of(number, node.weights, budget);
      const AllocationDp allocation(stage_costs, problem_.layers, budget);
      double bound = std::max(node.bound, allocation.least() + links);
      std::optional<std::vector<Points>> points;
      if (is_less(bound, target()))
        points =
            points_below(target(), node.weights, links, *vocab_case.stages, places_, stage_costs, allocation, budget);
      if (points) {
        ColumnEnumeration lists(problem_.layers, link(), graph_, std::move(*points), master_.paths());
        auto take = [&](const Points& plan, double time) { this->take(vocab_case, plan, time); };
        bound = std::max(bound, lists.solve(node.weights, target(), stop_, take, budget));
      }
      if (is_less(bound, target())) left.push_back(number), least = std::min(least, bound);
    }
    node.vocab_cases = std::move(left);
    if (least < kInfinity) node.bound = std::max(node.bound, least);
  }

  // Raises a node's bound by column generation: price a plan against the weights of paths, add it, solve the restricted
  // master problem, and so on. Weights halfway to the best known ones give more useful plans (stabilization).
  void tighten(Node& node, int rounds, WorkBudget& budget) {
    NodePricing pricing(problem_, cache_, vocab_cases_, node, target(), budget);
    node.bound = std::max(node.bound, pricing.longest());
    PathWeights weights = node.weights;
    const bool exactly = exact_ || node.fewest == node.most;
    node.sum = 0;
    for (int round = 0; round < rounds && is_less(node.bound, target()); ++round) {
      Column column = pricing.least(weights, exactly, target(), budget);
      if (node.vocab_cases.empty()) return;
      if (column.sum > node.sum) node.sum = column.sum, node.weights = weights;
      node.bound = std::max(node.bound, column.sum);
      node.latest = column.division;
      tried(vocab_cases_[column.vocab_case], column.division, std::move(column.options), budget);
      const double open = answer(node, weights, budget);
      if (open - node.sum <= kSettled * node.sum || is_over(budget)) return;
      if (round % 2 == 0) weights = halfway(node.weights, weights);
    }
  }

  // Solves the restricted master problem of a node and adds the critical path of the mixture of plans. Returns the time
  // of a step of that mixture; sets `weights` to those of the paths.
  double answer(Node& node, PathWeights& weights, WorkBudget& budget) {
    const MasterSolution solution = master_.solve([&](const std::vector<int>& plan) { return node.has(plan); }, budget);
    if (solution.plans.empty()) return kInfinity;
    weights = solution.weights;
    node.compare(solution);
    PathWeights path;
    const double time = simulate(solution.times, path, budget);
    master_.learn(std::move(path));
    return time;
  }

  // Strategies with which a stage works least, with its sync and without.
  Points busiest(VocabCase& vocab_case, int stage, const std::vector<int>& division, WorkBudget& budget) const {
    Points points;
    for (const bool with_sync : {true, false}) {
      const Work& work = vocab_case.stages->work(stage, places_.of_stage(division, stage), 0, with_sync, budget);
      if (work.point && (points.empty() || points[0]->sync != work.point->sync)) points.push_back(work.point);
    }
    return points;
  }

  // The longest path under a division, each stage with those of its points that make the step short. Makes that the
  // best, if it is.
  PathWeights attempt(VocabCase& vocab_case, const std::vector<int>& division, const std::vector<Points>& options,
                      ChunkTimes& times, WorkBudget& budget) {
    Points chosen(stages());
    bool fits = true;
    for (int s = 0; s < stages(); ++s) {
      fits = fits && !options[s].empty();
      if (fits) chosen[s] = options[s].front();
      put(vocab_case, times, s, division, options[s]);
    }
    PathWeights path;
    double time = simulate(times, path, budget);
    PathWeights other;
    for (int s = 0; fits && s < stages(); ++s)
      for (std::size_t option = 1; option < options[s].size(); ++option) {
        if (!(time < best_.cost * kWorthwhile) || is_over(budget)) break;
        options[s][option]->put(times, s);
        const double attempted = simulate(times, other, budget);
        if (is_less(attempted, time))
          time = attempted, path = other, chosen[s] = options[s][option];
        else
          chosen[s]->put(times, s);
      }
    if (fits && is_less(time, best_.cost)) take(vocab_case, chosen, time);
    return path;
  }

  // Makes a plan the best one.
  void take(VocabCase& vocab_case, const Points& chosen, double time) {
    best_ = {time, vocab_case.vocab, std::vector<int>(chunks_), {}};
    for (int at = 0; at < chunks_; ++at) {
      const std::vector<int>& strategies = chosen[at % stages()]->strategies[at / stages()];
      best_.division[at] = static_cast<int>(strategies.size());
      best_.strategies.insert(best_.strategies.end(), strategies.begin(), strategies.end());
    }
    best_vocab_case_ = &vocab_case;
  }

  PathWeights attempt(VocabCase& vocab_case, const std::vector<int>& division, ChunkTimes& times, WorkBudget& budget) {
    std::vector<Points> options;
    for (int s = 0; s < stages(); ++s) options.push_back(busiest(vocab_case, s, division, budget));
    return attempt(vocab_case, division, options, times, budget);
  }

  // Sets a stage's times to those of its first point; without one, to lower bounds that ignore the memory budget.
  void put(const VocabCase& vocab_case, ChunkTimes& times, int stage, const std::vector<int>& division,
           const Points& points) const {
    if (!points.empty()) return points.front()->put(times, stage);
    for (int at = stage; at < chunks_; at += stages()) {
      PassTimes& passes = times[at].passes = vocab_case.stages->fixed_time(stage, at / stages()).passes;
      for (const PassKind kind : kPassKinds)
        passes[kind] += division[at] * cache_.cheapest(0, Weights::of_each(std::array{kind}, 1));
    }
  }

  double simulate(const ChunkTimes& times, PathWeights& path, WorkBudget& budget) {
    return graph_.longest(times, link(), path, budget);
  }

  // Moves a layer of the best plan from one chunk to another, as long as that helps.
  void improve(WorkBudget& budget) {
    ChunkTimes times(chunks_);
    for (bool better = best_.vocab >= 0; better && !is_over(budget);) {
      better = false;
      const std::vector<int> from_here = best_.division;
      const double old_cost = best_.cost;
      for (int from = 0; from < chunks_ && !better; ++from)
        for (int to = 0; to < chunks_ && from_here[from] > 1 && !better && !is_over(budget); ++to) {
          if (to == from) continue;
          std::vector<int> moved = from_here;
          --moved[from], ++moved[to];
          attempt(*best_vocab_case_, moved, times, budget);
          better = is_less(best_.cost, old_cost);
        }
    }
  }

  Problem problem_;
  ChoiceCache cache_;
  KnownWorks inner_;  // of stages between the first and the last
  StepGraph graph_;
  ChunkPlaces places_;
  int chunks_;  // of all stages
  std::vector<VocabCase> vocab_cases_;
  RestrictedMaster master_;       // plans: each chunk's layers, and the vocabulary strategy
  std::vector<Node> open_nodes_;  // not yet settled: a heap, the least bound first
  double limit_ = kInfinity;      // of the plans that are searched
  double opened_ = -1;            // the limit for which nodes were opened
  double gap_ = 0;                // share of the best plan's time by which others may be faster
  PlanFound best_;
  VocabCase* best_vocab_case_ = nullptr;
  bool exact_ = false;    // stages of one chunk are answered exactly, for any division
  std::size_t stop_ = 0;  // steps after which it is given up
  std::mutex mutex_;      // one thread at a time
};

}  // namespace galvatron
