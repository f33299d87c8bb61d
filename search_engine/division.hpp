// The fastest pipeline under one vocabulary strategy: a division of the layers into stages and the strategies of each
// stage, under the step time that the schedule really takes. Branch and bound: bounds from paths through the schedule
// (cuts.hpp), stages from their exact optima (stages.hpp), and at the leaves the simulation (schedule.hpp).
#pragma once

#include <algorithm>
#include <array>
#include <numeric>
#include <tuple>
#include <utility>
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

class DivisionSearch {
 public:
  DivisionSearch(const PipelineTables& tables, const Cuts& cuts, Stages& stages, const ChoiceCache& cache)
      : tables_(tables), cuts_(cuts), stages_(stages), timer_(tables.gpipe, tables.micro_batches, tables.send) {
    for (const Weighting below : kBelow) per_layer_[below] = cache.cheapest(cuts.weights(0, below));
    head_.assign(tables.stages + 1, 0);
    for (int s = 0; s < tables.stages; ++s)
      head_[s + 1] = head_[s] + fixed(s, kLast) + (s + 1 < tables.stages ? 2 * tables.send[s] : 0);
    for (const Weighting below : kBelow) {
      below_[below].assign(tables.stages + 1, 0);
      for (int s = tables.stages - 1; s >= 0; --s)
        below_[below][s] = below_[below][s + 1] + fixed(s, below) + (s > 0 ? Cuts::trips(below) * tables.send[s - 1] : 0);
    }
  }

  // A lower bound of every pipeline, cheap: layers are dealt one by one to the stage that bears one more best. Infinite
  // where no division fits.
  double bound() {
    dealt_.assign(tables_.stages, tables_.stages == 1 ? tables_.layers : 1);
    double bound = 0;
    for (int s = 0; s < tables_.stages; ++s) bound = std::max(bound, bound_of(s, dealt_[s]));
    const int left = tables_.layers - std::accumulate(dealt_.begin(), dealt_.end(), 0);
    for (int n = 0; n < left && bound < kInfinity; ++n) bound = std::max(bound, deal([&](int s, int l) { return bound_of(s, l); }));
    return bound;
  }

  // A better one: the same with the stages' exact optima.
  double tight_bound(Poll& poll) {
    poll_ = &poll;
    double bound = this->bound();
    if (!(bound < kInfinity)) return bound;
    if (tables_.stages == 1) return least_of(0, tables_.layers);
    for (int s = 0; s < tables_.stages; ++s)
      while (dealt_[s] > 1 && bound_of(s, dealt_[s]) <= bound && least_of(s, dealt_[s]) > bound) --dealt_[s];
    for (int s = 0; s < tables_.stages; ++s) {
      bound = std::max(bound, least_of(s, dealt_[s]));
      while (bound < kInfinity && least_of(s, dealt_[s] + 1) <= bound) ++dealt_[s];
    }
    while (std::accumulate(dealt_.begin(), dealt_.end(), 0) < tables_.layers && bound < kInfinity)
      bound = std::max(bound, deal([&](int s, int l) { return least_of(s, l); }));
    return bound;
  }

  // Makes `best` the optimum, if that costs less than `best` does. False: given up after so many nodes.
  bool solve(PipelineSolution& best, long nodes, Poll& poll) {
    poll_ = &poll;
    nodes_ = nodes;
    start(best);
    improve(best);
    set_ranges(best.cost);
    if (std::accumulate(most_.begin(), most_.end(), 0) >= tables_.layers) divide(0, tables_.layers, best);
    return nodes_ > 0;
  }

 private:
  static constexpr std::size_t kMostPoints = 20'000;  // of one stage at one node

  // --- bounds of a division -------------------------------------------------------------------------------------

  double fixed(int stage, Weighting weighting) const { return cuts_.weights(stage, weighting).of(stages_.fixed(stage)); }

  // Gives one more layer to the stage for which `bound(stage, layers)` is least then; returns that.
  template <class Bound>
  double deal(Bound bound) {
    int best = 0;
    for (int s = 1; s < tables_.stages; ++s)
      if (bound(s, dealt_[s] + 1) < bound(best, dealt_[best] + 1)) best = s;
    return bound(best, ++dealt_[best]);
  }

  // Below the time of every pipeline in which the stage has so many layers: its own paths, and each layer elsewhere at
  // the least that the path can make of it.
  template <class Own>
  double paths(int stage, int layers, Own own) const {
    double longest = 0;
    const int rest = tables_.layers - layers;
    for (const Cut& cut : cuts_.of(stage)) {
      double elsewhere = stage + 1 < tables_.stages ? per_layer_[cut.below] : kInfinity;
      if (stage > 0) elsewhere = std::min(elsewhere, per_layer_[kLast]);
      longest = std::max(longest, head_[stage] + own(cut.own) + below_[cut.below][stage + 1] + (rest ? rest * elsewhere : 0));
    }
    return longest;
  }

  double bound_of(int stage, int layers) {
    return remembered(bounds_, stage, layers, [&](Weighting own) { return stages_.bound(stage, layers, own); });
  }

  double least_of(int stage, int layers) {
    return remembered(leasts_, stage, layers, [&](Weighting own) { return stages_.least(stage, layers, own, *poll_); });
  }

  template <class Own>
  double remembered(std::vector<std::vector<double>>& memory, int stage, int layers, Own own) {
    if (layers > tables_.layers - tables_.stages + 1) return kInfinity;
    if (memory.empty()) memory.assign(tables_.stages, std::vector<double>(tables_.layers + 1, -1));
    double& known = memory[stage][layers];
    if (known < 0) known = paths(stage, layers, own);
    return known;
  }

  // Fewest and most layers of each stage in a pipeline that costs less than the limit.
  void set_ranges(double limit) {
    const int stages = tables_.stages;
    most_.assign(stages, 0);
    fewest_.assign(stages, 1);
    for (int s = 0; s < stages; ++s)
      while (is_less(bound_of(s, most_[s] + 1), limit) && is_less(least_of(s, most_[s] + 1), limit)) ++most_[s];
    const int all = std::accumulate(most_.begin(), most_.end(), 0);
    for (int s = 0; s < stages; ++s) fewest_[s] = std::max(1, tables_.layers - (all - most_[s]));
  }

  // The divisions from a stage on, depth first.
  void divide(int stage, int left, PipelineSolution& best) {
    if (stage == tables_.stages) return leaf(best);
    const int later = tables_.stages - stage - 1;
    int later_most = 0;
    for (int s = stage + 1; s < tables_.stages; ++s) later_most += most_[s];
    const int least = std::max(fewest_[stage], left - later_most);
    for (int n = std::min(most_[stage], left - later); n >= least && --nodes_ > 0; --n) {
      poll_->tick();
      division_[stage] = n;
      if (is_less(partial_bound(stage + 1, left - n), best.cost)) divide(stage + 1, left - n, best);
    }
  }

  // Below the time of every pipeline whose first stages are divided so; the rest gets `left` layers.
  double partial_bound(int stages, int left) {
    auto open = [&](Weighting below) {
      if (stages == tables_.stages) return 0.0;
      const double link = Cuts::trips(below) * tables_.send[stages - 1];  // in below_ and in Cuts::longest
      return below_[below][stages] - link + left * per_layer_[below];
    };
    return cuts_.longest(stages, [&](int s, Weighting w) { return stages_.least(s, division_[s], w, *poll_); }, open);
  }

  // --- the strategies of one division ---------------------------------------------------------------------------

  // The division's best pipeline.
  void leaf(PipelineSolution& best) {
    free_.assign(tables_.stages, true);
    chosen_.assign(tables_.stages, StagePoint{});
    if (!is_less(node_bound(), best.cost)) return;
    settle(best);
    refine(best);
  }

  double share(int stage, Weighting weighting) {
    if (free_[stage]) return stages_.least(stage, division_[stage], weighting, *poll_);
    return cuts_.weights(stage, weighting).of(chosen_[stage].time);
  }

  // Below the time of every pipeline of the division with the points chosen so far.
  double node_bound() {
    const double cut =
        cuts_.longest(tables_.stages, [&](int s, Weighting w) { return share(s, w); }, [](Weighting) { return 0.0; });
    if (!(cut < kInfinity)) return kInfinity;
    times_.resize(tables_.stages);
    for (int s = 0; s < tables_.stages; ++s) times_[s] = {share(s, kForward), share(s, kBackward), share(s, kSync)};
    return std::max(cut, timer_(times_));
  }

  // A good pipeline fast: each stage's optima under the paths' weightings, tried in turn.
  void settle(PipelineSolution& best) {
    std::vector<StagePoint> points(tables_.stages);
    std::vector<StageTime> times(tables_.stages);
    for (int s = 0; s < tables_.stages; ++s) {
      points[s] = stages_.best(s, division_[s], kBusy, *poll_);
      times[s] = points[s].time;
    }
    double cost = timer_(times);
    for (bool better = true; better;) {
      better = false;
      for (int s = 0; s < tables_.stages; ++s) {
        auto attempt = [&](Weighting weighting) {
          const StagePoint& point = stages_.best(s, division_[s], weighting, *poll_);
          const StageTime before = std::exchange(times[s], point.time);
          --nodes_;
          const double attempted = timer_(times);
          if (!is_less(attempted, cost)) {
            times[s] = before;
            return;
          }
          cost = attempted, points[s] = point, better = true;
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
    poll_->tick();
    if (--nodes_ <= 0 || !is_less(node_bound(), best.cost)) return;
    const int stage = loosest();
    if (stage < 0) {
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
      const StageTime relaxed = std::exchange(times_[s], stages_.best(s, division_[s], kBusy, *poll_).time);
      const double time = timer_(times_);
      times_[s] = relaxed;
      if (time > longest) longest = time, loosest = s;
    }
    return loosest;
  }

  // Points of a stage that no other one beats and that may be part of a pipeline below the limit.
  bool points_below(int stage, double limit, std::vector<StagePoint>& points) {
    // The path that leaves the stage least room, for its weight, keeps the enumeration smallest.
    Weighting narrow = kBusy;
    double least_room = kInfinity, narrow_limit = kInfinity;
    for (const Cut& cut : cuts_.of(stage)) {
      const double left = limit - path_without(stage, cut);
      const Weights& weights = cuts_.weights(stage, cut.own);
      const double room = (left - share(stage, cut.own)) / (weights.forward + weights.backward);
      if (room < least_room) least_room = room, narrow = cut.own, narrow_limit = left;
    }
    if (!stages_.points(stage, division_[stage], narrow, narrow_limit, kMostPoints, points, *poll_)) return false;
    auto key = [](const StagePoint& p) { return std::tie(p.time.forward, p.time.backward, p.time.sync); };
    std::sort(points.begin(), points.end(), [&](const StagePoint& a, const StagePoint& b) { return key(a) < key(b); });
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
      sum += share(s, cut.below) + Cuts::trips(cut.below) * tables_.send[s - 1];
    return sum;
  }

  // --- a good start -----------------------------------------------------------------------------------------------

  // The division behind the bound, layers in excess taken from where they weigh most.
  void start(PipelineSolution& best) {
    if (dealt_.empty()) tight_bound(*poll_);
    division_ = dealt_;
    int excess = std::accumulate(division_.begin(), division_.end(), 0) - tables_.layers;
    for (; excess > 0; --excess) {
      int heaviest = -1;
      for (int s = 0; s < tables_.stages; ++s)
        if (division_[s] > 1 && (heaviest < 0 || least_of(s, division_[s]) > least_of(heaviest, division_[heaviest])))
          heaviest = s;
      --division_[heaviest];
    }
    free_.assign(tables_.stages, true);
    if (is_less(node_bound(), best.cost)) settle(best);
  }

  // Moves layers, one at a time, from the stage that binds and to the others, as long as that helps.
  void improve(PipelineSolution& best) {
    for (bool better = !best.division.empty(); better;) {
      better = false;
      const std::vector<int> from_here = best.division;
      const int from = binding(best);
      for (int to = 0; to < tables_.stages && !better && from_here[from] > 1; ++to) {
        if (to == from || !is_less(least_of(to, from_here[to] + 1), best.cost)) continue;
        poll_->tick();
        if (--nodes_ <= 0) return;
        const double before = best.cost;
        division_ = from_here;
        --division_[from], ++division_[to];
        free_.assign(tables_.stages, true);
        if (is_less(node_bound(), best.cost)) settle(best);
        better = is_less(best.cost, before);
      }
    }
  }

  // The stage without whose time a solution would gain most.
  int binding(const PipelineSolution& solution) {
    times_.resize(tables_.stages);
    for (int s = 0; s < tables_.stages; ++s) times_[s] = solution.points[s].time;
    int binding = 0;
    double least = kInfinity;
    for (int s = 0; s < tables_.stages; ++s) {
      const StageTime whole = times_[s];
      times_[s] = {whole.forward * 0.5, whole.backward * 0.5, whole.sync};
      const double time = timer_(times_);
      times_[s] = whole;
      if (time < least) least = time, binding = s;
    }
    return binding;
  }

  const PipelineTables& tables_;
  const Cuts& cuts_;
  Stages& stages_;
  StepTimer timer_;
  Poll* poll_ = nullptr;
  long nodes_ = 0;

  std::array<double, kWeightings> per_layer_{};           // least of one layer, by what lies below
  std::vector<double> head_;                              // fixed times and links above each stage
  std::array<std::vector<double>, kWeightings> below_;    // and from each stage on, with the link above it
  std::vector<std::vector<double>> bounds_, leasts_;      // [stage][layers], negative: not yet known
  std::vector<int> dealt_, fewest_, most_, division_;
  std::vector<bool> free_;                                // stages not yet settled
  std::vector<StagePoint> chosen_;                        // of the others
  std::vector<StageTime> times_;                          // scratch
};

}  // namespace galvatron
