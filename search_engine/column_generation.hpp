// Column generation for pipelines of identical layers, with one or several chunks a stage.
//
// A step takes as long as the longest path through its passes. A path's length is a weighted sum of the chunks' times,
// and so is the mean of several paths; the least weighted sum over all plans is a lower bound of the step. It separates
// by stage, and a dynamic program allocates the layers (node_pricing.hpp). Rows are paths, columns are plans: solve the
// matrix game between the known ones (restricted_master.hpp), price a new plan against the paths' weights, and add the
// critical path of the mixture of plans. A remaining gap is branched on: layers of a stage, vocabulary strategy, layers
// of a chunk; the node of least bound goes first. With one chunk a stage, column enumeration closes the rest
// (column_enumeration.hpp).
// README.md, step 7.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

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
        chunks_(problem_.stages * problem_.passes.chunks()),
        master_(link()) {
    std::vector<int> vocabs = useful_vocabs(problem_);
    std::stable_sort(vocabs.begin(), vocabs.end(), [&](int a, int b) { return busy(a) < busy(b); });
    for (const int v : vocabs) {
      auto stages = std::make_unique<InterleavedStages>(problem_, problem_.vocabs[v], cache_, inner_);
      auto pricing = std::make_unique<Pricing>(problem_, cache_, *stages);
      vocab_cases_.push_back({v, std::move(stages), std::move(pricing), {}});
    }
  }

  ColumnGeneration(const ColumnGeneration&) = delete;

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
  static constexpr int kFirstRounds = 100, kRounds = 12;      // at the root; at a further node
  static constexpr int kExactSplits = 400;                    // made however close they are; further ones
  static constexpr double kNear = 5e-4;                       // only while they may gain this share of the time
  static constexpr double kSettled = 1e-5;                    // share of the time that rounds need not raise a bound by
  static constexpr std::size_t kMostListed = 20'000;          // points of all stages
  static constexpr std::size_t kStepsOfListing = 20'000'000;  // some 0.1 s
  static constexpr std::size_t kStepsOfPass = 5;
  static constexpr long kEffortOfBound = 2'000'000;  // passes: 0.1 s
  static constexpr long kShare = 5;                  // making plans takes longer than simulating them
  static constexpr long kListsShare = 2;             // lists have so much more effort
  static constexpr double kSure = 0.02;              // layers by which the plans of a saddle point differ
  static constexpr double kWorthwhile = 1.02;        // a plan so far above the best one is not made better

  static bool is_later(const Node& a, const Node& b) { return a.bound > b.bound; }

  void allow(long effort, const WorkBudget& budget) {
    stop_ = budget.steps() + kStepsOfPass * static_cast<std::size_t>(std::max(effort, 0L));
  }

  bool is_over(const WorkBudget& budget) const { return budget.steps() >= stop_; }

  int stages() const { return problem_.stages; }
  int chunks_a_stage() const { return problem_.passes.chunks(); }
  double wanted(double limit) const { return std::min(limit, best_.cost * (1 - gap_)); }  // of further plans
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
    double bound = 0;
    const int most = problem_.layers - chunks_;
    std::vector<std::vector<double>> stage_works;
    for (int s = 0; s < stages(); ++s) {
      stage_works.push_back(vocab_case.stages->rough_works(s, one_layer, most, most / stages(), budget));
      if (stage_works.back()[0] == kInfinity) return kInfinity;
    }
    auto works = [&](int stage, int extra) { return stage_works[stage][extra]; };
    for (int s = 0; s < stages(); ++s) bound = std::max(bound, works(s, 0));
    for (int left = problem_.layers - chunks_; left > 0 && bound < kInfinity; --left) {
      int best = 0;
      for (int s = 1; s < stages(); ++s)
        if (works(s, more[s] + 1) < works(best, more[best] + 1)) best = s;
      bound = std::max(bound, works(best, ++more[best]));
    }
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
        list(node, limit, budget);
        keep(std::move(node), limit);
      }
      allow(effort, budget);
    }
    for (int splits = 0; !is_over(budget); ++splits) {
      const double least = least_open(), target = wanted(limit);
      if (!is_less(least, target) || (splits >= kExactSplits && least >= target * (1 - kNear))) break;
      std::pop_heap(open_nodes_.begin(), open_nodes_.end(), is_later);
      const Node node = std::move(open_nodes_.back());
      open_nodes_.pop_back();
      const double old_cost = best_.cost;
      if (!split(node, limit, budget)) settled = std::min(settled, node.bound);
      if (is_less(best_.cost, old_cost)) improve(budget);
    }
    opened_ = -1;  // nothing is left to continue with
    return std::min({settled, least_open(), wanted(limit)});
  }

  // Builds and tightens the root node. Skipped when already done for this limit or a higher one.
  void open(double limit, WorkBudget& budget) {
    if (limit <= opened_) return;
    open_nodes_.clear();
    master_.answers().clear();
    Node all = everything();
    VocabCase* likely = nullptr;
    for (VocabCase& vocab_case : vocab_cases_) {
      const double bound = greedy_partition(vocab_case, budget);
      if (!is_less(bound, wanted(limit))) continue;
      all.vocab_cases.push_back(number(vocab_case));
      if (is_less(bound, all.bound)) all.bound = bound, likely = &vocab_case;
    }
    if (likely) {
      all.latest = likely->division;
      all.weights = tried(*likely, likely->division, std::vector<Points>(stages()), budget);
      ChunkTimes times(chunks_, stages());
      for (const int vocab_case : all.vocab_cases)  // a good plan closes many vocabulary strategies
        if (!is_over(budget)) attempt(vocab_cases_[vocab_case], vocab_cases_[vocab_case].division, times, budget);
      tighten(all, limit, kFirstRounds, budget);
      keep(std::move(all), limit);
    }
    opened_ = limit;
  }

  // Root node without vocabulary cases.
  Node everything() const {
    Node all;
    all.bound = kInfinity;
    all.fewest.assign(chunks_, 1), all.most.assign(chunks_, problem_.layers - chunks_ + 1);
    all.fewest_of.assign(stages(), chunks_a_stage()), all.most_of.assign(stages(), problem_.layers);
    return all;
  }

  // Evaluates a partition, each stage with the given points or with its least work; adds its plan as a column and its
  // critical paths as rows.
  PathWeights tried(VocabCase& vocab_case, const std::vector<int>& division, std::vector<Points> options,
                    WorkBudget& budget) {
    ChunkTimes times(chunks_, stages()), shortest = times;
    bool limited = false;
    for (int s = 0; s < stages(); ++s) {
      limited = limited || !options[s].empty();
      const Points busiest = this->busiest(vocab_case, s, division, budget);
      options[s].insert(options[s].end(), busiest.begin(), busiest.end());
      if (options[s].empty())
        roughly(*vocab_case.stages, times, s, places_.of_stage(division, s));
      else
        options[s].front()->put(times, s);
    }
    PathWeights longest = attempt(vocab_case, division, options, shortest, budget);
    master_.learn(longest);
    if (limited) {
      PathWeights path(chunks_, stages());
      simulate(times, path, budget);
      master_.learn(std::move(path));
    }
    std::vector<int> plan = division;
    plan.push_back(number(vocab_case));
    master_.learn(std::move(plan), std::move(limited ? times : shortest));
    return longest;
  }

  void keep(Node node, double limit) {
    if (node.vocab_cases.empty() || !is_less(node.bound, wanted(limit))) return;
    open_nodes_.push_back(std::move(node));
    std::push_heap(open_nodes_.begin(), open_nodes_.end(), is_later);
  }

  // Column enumeration over a node, under one vocabulary strategy after the other; raises its bound. A vocabulary
  // strategy with too many points stays in the node.
  void list(Node& node, double limit, WorkBudget& budget) {
    auto target = [&] { return wanted(limit); };  // less with each plan that is found
    if (!(target() < kInfinity)) return;
    NodePricing pricing(problem_, cache_, vocab_cases_, node, target(), budget);
    double least = kInfinity;
    std::vector<int> left;
    for (const int vocab_case : node.vocab_cases) {
      const double bound =
          listed(vocab_cases_[vocab_case], node, pricing.of(vocab_case, node.weights, budget), target(), budget);
      if (is_less(bound, target())) left.push_back(vocab_case), least = std::min(least, bound);
    }
    node.vocab_cases = std::move(left);
    if (least < kInfinity) node.bound = std::max(node.bound, least);
  }

  // A lower bound of the plans of a node under a vocabulary strategy, by column enumeration.
  double listed(VocabCase& vocab_case, const Node& node, const std::vector<StageCosts>& stage_costs, double target,
                WorkBudget& budget) {
    const AllocationDp allocation(stage_costs, problem_.layers, budget);
    const double links = node.weights.links * link();
    double least = std::max(node.bound, allocation.least() + links);
    if (!is_less(least, target)) return least;
    const std::vector<std::vector<double>> others = allocation.of_others(budget);
    std::vector<Points> points(stages());
    std::size_t left = kMostListed;
    const std::size_t stop = budget.steps() + kStepsOfListing;
    for (int s = 0; s < stages(); ++s)
      for (std::size_t more = 0; more < stage_costs[s].costs.size(); ++more) {
        const double most = target - others[s][more] - links;
        if (!is_less(stage_costs[s].costs[more], most)) continue;
        Points enumerated;
        const int layers = stage_costs[s].fewest + static_cast<int>(more);
        const Weights weights = places_.weights(node.weights, s)[0];
        if (!vocab_case.stages->list(s, {layers}, weights, most, left, stop, enumerated, budget)) return least;
        left -= enumerated.size();
        points[s].insert(points[s].end(), enumerated.begin(), enumerated.end());
      }
    ColumnEnumeration lists(problem_.layers, link(), graph_, std::move(points), master_.paths());
    auto take = [&](const Points& plan, double time) { this->take(vocab_case, plan, time); };
    return std::max(least, lists.solve(node.weights, target, stop_, take, budget));
  }

  // Branches on a node where the plans of its saddle point differ most, and bounds both halves. False: the node is a
  // single division under one vocabulary strategy.
  bool split(const Node& node, double limit, WorkBudget& budget) {
    Node below = node, above = node;
    if (!by_stage(below, above) && !by_chunk(below, above) && !by_vocab_cases(below, above)) return false;
    for (Node* half : {&below, &above}) {
      tighten(*half, limit, kRounds, budget);
      keep(std::move(*half), limit);
    }
    return true;
  }

  static bool by_vocab_cases(Node& below, Node& above) {
    if (below.vocab_cases.size() < 2) return false;
    const auto middle = below.vocab_cases.begin() + below.vocab_cases.size() / 2;
    above.vocab_cases.assign(middle, below.vocab_cases.end());
    below.vocab_cases.erase(middle, below.vocab_cases.end());
    return true;
  }

  // On the layers of the stage in which the plans of the saddle point differ most, if they differ.
  bool by_stage(Node& below, Node& above) const {
    double widest = kSure;
    int chosen = -1, middle = 0;
    for (int s = 0; s < stages() && !below.spread_of.empty(); ++s) {
      const int mean = static_cast<int>(below.mean_of[s]);
      if (below.spread_of[s] <= widest || mean < below.fewest_of[s] || mean >= below.most_of[s]) continue;
      widest = below.spread_of[s], chosen = s, middle = mean;
    }
    if (chosen < 0) return false;
    below.most_of[chosen] = middle, above.fewest_of[chosen] = middle + 1;
    return true;
  }

  bool by_chunk(Node& below, Node& above) const {
    double widest = -1;
    int chosen = -1, middle = 0;
    for (int at = 0; at < chunks_; ++at) {
      const int free = below.most[at] - below.fewest[at];
      if (free == 0) continue;
      const double spread = below.spread.empty() ? 0 : below.spread[at];
      const double width = spread + 1e-6 * free / problem_.layers;
      if (width <= widest) continue;
      widest = width, chosen = at;
      middle = spread > 1e-9 ? static_cast<int>(below.mean[at]) : below.latest[at];
      middle = std::min(std::max(middle, below.fewest[at]), below.most[at] - 1);
    }
    if (chosen < 0) return false;
    below.most[chosen] = middle, above.fewest[chosen] = middle + 1;
    return true;
  }

  // Raises a node's bound by column generation: price a plan against the weights of paths, add it, solve the restricted
  // master problem, and so on. Weights halfway to the best known ones give more useful plans (stabilization).
  void tighten(Node& node, double limit, int rounds, WorkBudget& budget) {
    auto target = [&] { return wanted(limit); };
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
    node.mean.assign(chunks_, 0), node.spread.assign(chunks_, 0);
    node.mean_of.assign(stages(), 0), node.spread_of.assign(stages(), 0);
    for (const auto& [share, answer] : solution.plans)
      for (int at = 0; at < chunks_; ++at) {
        node.mean[at] += share * answer->plan[at];
        node.mean_of[at % stages()] += share * answer->plan[at];
      }
    for (const auto& [share, answer] : solution.plans) {
      std::vector<double> beyond(stages(), 0);
      for (int at = 0; at < chunks_; ++at) {
        node.spread[at] += share * std::abs(answer->plan[at] - node.mean[at]);
        beyond[at % stages()] += answer->plan[at] - node.mean[at];
      }
      for (int s = 0; s < stages(); ++s) node.spread_of[s] += share * std::abs(beyond[s]);
    }
    PathWeights path(chunks_, stages());
    const double time = simulate(solution.times, path, budget);
    master_.learn(std::move(path));
    return time;
  }

  // --- heuristics ---------------------------------------------------------------------------------------------------

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
      if (options[s].empty())
        roughly(*vocab_case.stages, times, s, places_.of_stage(division, s));
      else
        (chosen[s] = options[s].front())->put(times, s);
    }
    PathWeights path(chunks_, stages());
    double time = simulate(times, path, budget);
    PathWeights other = path;
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

  // Sets a stage's times to lower bounds that ignore the memory budget.
  void roughly(const InterleavedStages& exact, ChunkTimes& times, int stage, const std::vector<int>& layers) const {
    for (int c = 0; c < chunks_a_stage(); ++c) {
      PassTimes& passes = times.passes[places_.of(stage, c)] = exact.fixed_time(stage, c).passes;
      for (const PassKind kind : kPassKinds) passes[kind] += layers[c] * cache_.cheapest(0, Weights::single(kind));
    }
  }

  double simulate(const ChunkTimes& times, PathWeights& path, WorkBudget& budget) {
    return graph_.longest(times, link(), path, budget);
  }

  // Moves a layer of the best plan from one chunk to another, as long as that helps.
  void improve(WorkBudget& budget) {
    ChunkTimes times(chunks_, stages());
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
  double opened_ = -1;            // limit for which they were made
  double gap_ = 0;                // share of the best plan's time by which others may be faster
  PlanFound best_;
  VocabCase* best_vocab_case_ = nullptr;
  bool exact_ = false;    // stages of one chunk are answered exactly, for any division
  std::size_t stop_ = 0;  // steps after which it is given up
  std::mutex mutex_;      // one thread at a time
};

}  // namespace galvatron
