// The fastest pipeline: a division of the layers into stages, and the strategies of each stage, under the step time
// that the schedule really takes. Branch and bound: bounds from paths through the schedule (cuts.hpp), stages from their
// exact optima (stages.hpp), and at the leaves the simulation (schedule.hpp).
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <numeric>
#include <vector>

#include "common.hpp"
#include "cuts.hpp"
#include "schedule.hpp"
#include "stages.hpp"

namespace galvatron {

struct PipelineSolution {
  double cost = kInfinity;  // step time, ms
  int vocab = -1;           // number of the vocabulary strategy; -1: nothing found
  std::vector<int> division;       // layers of each stage
  std::vector<StagePoint> points;  // of each stage
};

// The search under one vocabulary strategy.
class DivisionSearch {
 public:
  DivisionSearch(const PipelineTables& tables, const Cuts& cuts, Stages& stages, StepTimer& timer)
      : tables_(tables), cuts_(cuts), stages_(stages), timer_(timer) {}

  // A lower bound of every pipeline, and the division that it comes from: layers are dealt one by one to the stage that
  // bears one more best. Infinite where no division fits.
  double root_bound(ChoiceCache& cache) {
    for (int below = 0; below < 4; ++below) per_layer_[below] = cache.cheapest(kBelow[below]);
    sum_fixed();
    bounds_.assign(tables_.stages, std::vector<double>(tables_.layers + 1, -1));
    dealt_.assign(tables_.stages, tables_.stages == 1 ? tables_.layers : 1);
    if (tables_.stages == 1) return bound_of(0, tables_.layers);
    double bound = 0;
    for (int stage = 0; stage < tables_.stages; ++stage) bound = std::max(bound, bound_of(stage, 1));
    for (int left = tables_.layers - tables_.stages; left > 0 && bound < kInfinity; --left) {
      int best = 0;
      for (int stage = 1; stage < tables_.stages; ++stage)
        if (bound_of(stage, dealt_[stage] + 1) < bound_of(best, dealt_[best] + 1)) best = stage;
      bound = std::max(bound, bound_of(best, ++dealt_[best]));
    }
    return bound;
  }

  // Makes `best` the optimum, if that costs less than `best` does. False: given up after `nodes`.
  bool solve(PipelineSolution& best, long nodes, Poll& poll) {
    nodes_ = nodes;
    poll_ = &poll;
    division_ = dealt_;
    leaf(best);
    improve(best);
    set_ranges(best.cost);
    if (std::accumulate(most_.begin(), most_.end(), 0) >= tables_.layers) divide(0, tables_.layers, best);
    return nodes_ > 0;
  }

 private:
  static constexpr std::size_t kMostPoints = 20'000;  // of one stage at one node

  // --- bounds of a division -------------------------------------------------------------------------------------

  void sum_fixed() {
    const int stages = tables_.stages;
    head_.assign(stages + 1, 0);
    for (auto& below : below_) below.assign(stages + 1, 0);
    for (int s = 0; s < stages; ++s)
      head_[s + 1] = head_[s] + kLast.of(stages_.fixed(s)) + (s + 1 < stages ? 2 * tables_.send[s] : 0);
    for (int below = 0; below < 4; ++below)
      for (int s = stages - 1; s >= 0; --s)
        below_[below][s] = below_[below][s + 1] + kBelow[below].of(stages_.fixed(s)) +
                           (s > 0 ? kTripsBelow[below] * tables_.send[s - 1] : 0);
  }

  // Below the time of every pipeline in which the stage has so many layers: its own paths, and each layer elsewhere at
  // the least that the path can make of it.
  double bound_of(int stage, int layers) {
    if (layers > tables_.layers - tables_.stages + 1) return kInfinity;
    double& known = bounds_[stage][layers];
    if (known >= 0) return known;
    double bound = 0;
    for (const Cut& cut : cuts_.of(stage)) {
      double elsewhere = kInfinity;
      if (stage > 0) elsewhere = per_layer_[2];
      if (stage + 1 < tables_.stages) elsewhere = std::min(elsewhere, per_layer_[cut.below]);
      const int rest = tables_.layers - layers;
      bound = std::max(bound, head_[stage] + stages_.bound(stage, layers, cut.own) + below_[cut.below][stage + 1] +
                                  (rest ? rest * elsewhere : 0.0));
    }
    return known = bound;
  }

  // Fewest and most layers of each stage in a pipeline that costs less than the limit.
  void set_ranges(double limit) {
    const int stages = tables_.stages;
    fewest_.assign(stages, 1);
    most_.assign(stages, 0);
    for (int s = 0; s < stages; ++s)
      while (is_less(bound_of(s, most_[s] + 1), limit)) ++most_[s];
    const int all = std::accumulate(most_.begin(), most_.end(), 0);
    for (int s = 0; s < stages; ++s) fewest_[s] = std::max(1, tables_.layers - (all - most_[s]));
  }

  // The divisions from a stage on, depth first.
  void divide(int stage, int left, PipelineSolution& best) {
    if (nodes_ <= 0) return;
    if (stage == tables_.stages) return leaf(best);
    int later = 0;
    for (int s = stage + 1; s < tables_.stages; ++s) later += most_[s];
    const int later_fewest = tables_.stages - stage - 1;
    for (int n = std::min(most_[stage], left - later_fewest); n >= std::max(fewest_[stage], left - later); --n) {
      poll_->tick();
      if (--nodes_ <= 0) return;
      division_[stage] = n;
      if (is_less(partial_bound(stage + 1, left - n), best.cost)) divide(stage + 1, left - n, best);
    }
  }

  // Below the time of every pipeline whose first stages are divided so; the rest gets `left` layers.
  double partial_bound(int stages, int left) {
    std::array<double, 4> open{};
    for (int below = 0; below < 4; ++below)
      open[below] = stages < tables_.stages ? below_[below][stages] - links_above(below, stages) + left * per_layer_[below] : 0;
    return cuts_.longest(
        stages, [&](int s, const Weights& weights) { return stages_.least(s, division_[s], weights, *poll_); }, open);
  }

  // `below_` counts the link above its first stage, and so does `Cuts::longest`.
  double links_above(int below, int stage) const { return kTripsBelow[below] * tables_.send[stage - 1]; }

  // --- the strategies of one division ---------------------------------------------------------------------------

  // The division's best pipeline.
  void leaf(PipelineSolution& best) {
    free_.assign(tables_.stages, true);
    chosen_.assign(tables_.stages, StagePoint{});
    if (!is_less(node_bound(), best.cost)) return;
    settle(best);
    refine(best);
  }

  double share(int stage, const Weights& weights) {
    return free_[stage] ? stages_.least(stage, division_[stage], weights, *poll_) : weights.of(chosen_[stage].time);
  }

  // Below the time of every pipeline of the division with the points chosen so far.
  double node_bound() {
    const double cut = cuts_.longest(
        tables_.stages, [&](int s, const Weights& weights) { return share(s, weights); }, {});
    if (!(cut < kInfinity)) return kInfinity;
    times_.resize(tables_.stages);
    for (int s = 0; s < tables_.stages; ++s)
      times_[s] = {share(s, {1, 0, 0}), share(s, {0, 1, 0}), share(s, {0, 0, 1})};
    return std::max(cut, timer_(times_));
  }

  // A good pipeline fast: each stage's optima under the paths' weightings, tried in turn.
  void settle(PipelineSolution& best) {
    std::vector<StagePoint> points(tables_.stages);
    std::vector<StageTime> times(tables_.stages);
    for (int s = 0; s < tables_.stages; ++s) {
      points[s] = stages_.best(s, division_[s], cuts_.of(s)[0].own, *poll_);
      times[s] = points[s].time;
    }
    double cost = timer_(times);
    for (bool better = true; better;) {
      better = false;
      for (int s = 0; s < tables_.stages; ++s) {
        auto attempt = [&](const Weights& weights) {
          const StagePoint& point = stages_.best(s, division_[s], weights, *poll_);
          const StageTime before = times[s];
          times[s] = point.time;
          --nodes_;
          const double attempted = timer_(times);
          if (is_less(attempted, cost)) {
            cost = attempted, points[s] = point, better = true;
          } else {
            times[s] = before;
          }
        };
        for (const Cut& cut : cuts_.of(s)) attempt(cut.own);
        attempt(kFirst), attempt(kLast);
      }
    }
    if (is_less(cost, best.cost)) best = {cost, best.vocab, division_, std::move(points)};
  }

  // Proves the division's optimum: while the bound is below the best, one more stage is settled in every way that could
  // be part of something better.
  void refine(PipelineSolution& best) {
    if (--nodes_ <= 0) return;
    poll_->tick();
    if (!is_less(node_bound(), best.cost)) return;
    const int stage = loosest();
    if (stage < 0) {
      for (int s = 0; s < tables_.stages; ++s) times_[s] = chosen_[s].time;
      const double cost = timer_(times_);
      if (is_less(cost, best.cost)) best = {cost, best.vocab, division_, chosen_};
      return;
    }
    std::vector<StagePoint> points;
    if (!points_below(stage, best.cost, points)) {
      nodes_ = 0;  // too many to prove anything
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
    for (int s = 0; s < tables_.stages; ++s) {
      if (!free_[s]) continue;
      const StageTime relaxed = times_[s];
      times_[s] = stages_.best(s, division_[s], cuts_.of(s)[0].own, *poll_).time;
      const double time = timer_(times_);
      times_[s] = relaxed;
      if (time > longest) longest = time, loosest = s;
    }
    return loosest;
  }

  // Points of a stage that no other one beats and that may be part of a pipeline below the limit.
  bool points_below(int stage, double limit, std::vector<StagePoint>& points) {
    // The path that leaves the stage least room, per layer time, keeps the enumeration smallest.
    Weights narrow = cuts_.of(stage)[0].own;
    double least_room = kInfinity, narrow_limit = kInfinity;
    for (const Cut& cut : cuts_.of(stage)) {
      const double others = path_without(stage, cut);
      const double room = (limit - others - share(stage, cut.own)) / (cut.own.forward + cut.own.backward);
      if (room < least_room) least_room = room, narrow = cut.own, narrow_limit = limit - others;
    }
    if (!stages_.points(stage, division_[stage], narrow, narrow_limit, kMostPoints, points, *poll_)) return false;
    std::sort(points.begin(), points.end(), [](const StagePoint& a, const StagePoint& b) {
      return std::tie(a.time.forward, a.time.backward, a.time.sync) < std::tie(b.time.forward, b.time.backward, b.time.sync);
    });
    std::vector<StagePoint> kept;
    for (StagePoint& point : points) {
      const bool beaten = std::any_of(kept.begin(), kept.end(), [&](const StagePoint& other) {
        return other.time.backward <= point.time.backward && other.time.sync <= point.time.sync;
      });
      if (!beaten) kept.push_back(std::move(point));
    }
    points = std::move(kept);
    return true;
  }

  // What a stage's cut adds up to in the other stages.
  double path_without(int stage, const Cut& cut) {
    double sum = 0;
    for (int s = 0; s < stage; ++s) sum += share(s, kLast) + 2 * tables_.send[s];
    for (int s = stage + 1; s < tables_.stages; ++s)
      sum += share(s, kBelow[cut.below]) + kTripsBelow[cut.below] * tables_.send[s - 1];
    return sum;
  }

  // Moves layers, one at a time, from and to the stages that bind, as long as that helps.
  void improve(PipelineSolution& best) {
    for (bool better = best.cost < kInfinity; better;) {
      better = false;
      const std::vector<int> start = best.division;
      if (start.empty()) return;
      for (int from = 0; from < tables_.stages && !better; ++from) {
        if (start[from] == 1) continue;
        for (int to = 0; to < tables_.stages && !better; ++to) {
          if (to == from || !is_less(bound_of(to, start[to] + 1), best.cost)) continue;
          poll_->tick();
          if (--nodes_ <= 0) return;
          const double before = best.cost;
          division_ = start;
          --division_[from], ++division_[to];
          free_.assign(tables_.stages, true);
          if (is_less(node_bound(), best.cost)) settle(best);
          better = is_less(best.cost, before);
        }
      }
    }
  }

  const PipelineTables& tables_;
  const Cuts& cuts_;
  Stages& stages_;
  StepTimer& timer_;
  Poll* poll_ = nullptr;
  long nodes_ = 0;

  std::array<double, 4> per_layer_{};           // least of one layer, by kBelow
  std::vector<double> head_;                    // fixed times and links above each stage
  std::array<std::vector<double>, 4> below_;    // and from each stage on, with the link above it
  std::vector<std::vector<double>> bounds_;     // [stage][layers], negative: not yet known
  std::vector<int> dealt_, fewest_, most_, division_;
  std::vector<bool> free_;                      // stages not yet settled
  std::vector<StagePoint> chosen_;              // of the others
  std::vector<StageTime> times_;                // scratch
};

// Least memory in which a pipeline fits, and the one that does.
struct LeastMemory {
  double budget = kInfinity;  // MiB a device
  int vocab = -1;
  std::vector<int> division;
  std::vector<int> strategy;  // of all layers of each stage
};

// The search over all vocabulary strategies.
class Pipeline {
 public:
  explicit Pipeline(PipelineTables tables)
      : tables_(std::move(tables)), cuts_(tables_), cache_(tables_),
        timer_(tables_.gpipe, tables_.micro_batches, tables_.send) {
    for (int v = 0; v < static_cast<int>(tables_.vocabs.size()); ++v)
      if (!beaten(v)) useful_.push_back(v);
  }

  Pipeline(const Pipeline&) = delete;

  // A lower bound of the step time, in ms; infinite where nothing fits.
  double bound(Poll& poll) {
    if (candidates_.empty()) {
      for (const int v : useful_) {
        auto stages = std::make_unique<Stages>(tables_, tables_.vocabs[v], cache_);
        auto search = std::make_unique<DivisionSearch>(tables_, cuts_, *stages, timer_);
        const double bound = search->root_bound(cache_);
        candidates_.push_back({bound, v, std::move(stages), std::move(search)});
        poll.tick();
      }
      std::sort(candidates_.begin(), candidates_.end(),
                [](const Candidate& a, const Candidate& b) { return a.bound < b.bound; });
    }
    return candidates_.empty() ? kInfinity : candidates_.front().bound;
  }

  // The optimum, if it costs less than `limit`, and a lower bound of what costs less than `limit`.
  PipelineSolution solve(double limit, long nodes, double& proven, Poll& poll) {
    bound(poll);
    PipelineSolution best;
    best.cost = limit;
    double unproven = kInfinity;
    for (Candidate& candidate : candidates_) {
      if (!is_less(candidate.bound, best.cost)) break;
      PipelineSolution found;
      found.cost = best.cost;
      if (!candidate.search->solve(found, nodes, poll)) unproven = std::min(unproven, candidate.bound);
      if (!is_less(found.cost, best.cost)) continue;
      best = std::move(found);
      best.vocab = candidate.vocab;
    }
    proven = std::min(unproven, best.cost);
    if (best.vocab < 0) best.cost = kInfinity;
    return best;
  }

  // Strategy of each layer of a stage: group by group, in the groups' order.
  std::vector<int> sequence(const StagePoint& point) const {
    std::vector<int> result;
    for (const int group : point.order)
      for (const auto& [id, layers] : point.counts)
        if (tables_.strategies[id].group == group) result.insert(result.end(), layers, id);
    return result;
  }

  LeastMemory least_memory() const {
    LeastMemory least;
    for (const int v : useful_) {
      const std::vector<int> division = division_of_least_memory(v);
      double budget = 0;
      for (int s = 0; s < tables_.stages; ++s) budget = std::max(budget, need(v, s, division[s]).first);
      if (!(budget < least.budget)) continue;
      least = {budget, v, division, {}};
      for (int s = 0; s < tables_.stages; ++s) least.strategy.push_back(need(v, s, division[s]).second);
    }
    return least;
  }

 private:
  struct Candidate {
    double bound;
    int vocab;
    std::unique_ptr<Stages> stages;
    std::unique_ptr<DivisionSearch> search;
  };

  // Whether another vocabulary strategy is as good in everything (of equal ones, the first stays).
  bool beaten(int v) const {
    const std::vector<double> numbers = numbers_of(tables_.vocabs[v]);
    for (int other = 0; other < static_cast<int>(tables_.vocabs.size()); ++other) {
      if (other == v) continue;
      const std::vector<double> rival = numbers_of(tables_.vocabs[other]);
      const bool as_good = std::equal(rival.begin(), rival.end(), numbers.begin(), [](double a, double b) { return a <= b; });
      if (as_good && (rival != numbers || other < v)) return true;
    }
    return false;
  }

  static std::vector<double> numbers_of(const Vocab& vocab) {
    std::vector<double> numbers;
    for (const Part* part : {&vocab.first, &vocab.last})
      for (const double number : {part->time.forward, part->time.backward, part->time.sync, part->states,
                                  part->activation, part->working})
        numbers.push_back(number);
    for (const std::vector<Change>* changes : {&vocab.enter, &vocab.leave})
      for (const Change& change : *changes) numbers.push_back(change.forward), numbers.push_back(change.backward);
    return numbers;
  }

  // MiB that a stage needs at least for so many layers, and the strategy that needs it.
  std::pair<double, int> need(int v, int stage, int layers) const {
    const Vocab& vocab = tables_.vocabs[v];
    const int held = tables_.in_flight[stage];
    double fixed = 0, working = 0;
    if (stage == 0) fixed = vocab.first.states + held * vocab.first.activation, working = vocab.first.working;
    if (stage > 0 && stage == tables_.stages - 1)
      fixed = vocab.last.states + held * vocab.last.activation, working = vocab.last.working;
    std::pair<double, int> least{kInfinity, -1};
    for (const int k : cache_.useful()) {
      const Part& part = tables_.strategies[k];
      const double mib = fixed + layers * (part.states + held * part.activation) + std::max(working, part.working);
      if (mib < least.first) least = {mib, k};
    }
    return least;
  }

  // Layers dealt one by one to the stage that bears one more best.
  std::vector<int> division_of_least_memory(int v) const {
    std::vector<int> dealt(tables_.stages, 1);
    for (int left = tables_.layers - tables_.stages; left > 0; --left) {
      int best = 0;
      for (int s = 1; s < tables_.stages; ++s)
        if (need(v, s, dealt[s] + 1).first < need(v, best, dealt[best] + 1).first) best = s;
      ++dealt[best];
    }
    return dealt;
  }

  PipelineTables tables_;
  Cuts cuts_;
  ChoiceCache cache_;
  StepTimer timer_;
  std::vector<int> useful_;
  std::vector<Candidate> candidates_;  // by bound; empty: not yet bounded
};

}  // namespace galvatron
