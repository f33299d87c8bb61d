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
  double cost = kInfinity;         // step time, ms
  int vocab = -1;                  // number of the vocabulary strategy; -1: nothing found
  std::vector<int> division;       // layers of each stage
  std::vector<StagePoint> points;  // of each stage
};

class DivisionSearch {
 public:
  DivisionSearch(const PipelineTables& tables, const Cuts& cuts, Stages& stages, const ChoiceCache& cache)
      : tables_(tables), cuts_(cuts), stages_(stages), timer_(tables.gpipe, tables.micro_batches, tables.send) {
    for (const Weighting below : kBelow) {
      const double price = std::min(cache.cheapest(cuts.weights(0, below)), cache.cheapest(cuts.weights(0, kLast)));
      set_elsewhere(below, price, [&](int s, Weighting w) { return fixed(s, w); });
    }
  }

  // A lower bound of every pipeline, cheap: layers are dealt one by one to the stage that bears one more best. Infinite
  // where no division fits.
  double bound() {
    dealt_.assign(tables_.stages, tables_.stages == 1 ? tables_.layers : 1);
    double bound = 0;
    for (int s = 0; s < tables_.stages; ++s) bound = std::max(bound, bound_of(s, dealt_[s]));
    const int left = tables_.layers - std::accumulate(dealt_.begin(), dealt_.end(), 0);
    for (int n = 0; n < left && bound < kInfinity; ++n)
      bound = std::max(bound, deal([&](int s, int l) { return bound_of(s, l); }));
    return bound;
  }

  // A better one: the same with the stages' exact optima.
  double tight_bound(Poll& poll) {
    poll_ = &poll;
    return least_bound();
  }

  // Makes `best` the optimum, if that costs less than `best` does. Takes its work, in simulated passes, off `effort`;
  // false: given up when that was used up, and no pipeline costs less than `bound`.
  bool solve(PipelineSolution& best, double& bound, long& effort, Poll& poll) {
    poll_ = &poll;
    effort_ = effort;
    if (best.cost == kInfinity || narrow(best.cost, bound)) {
      start(best);
      improve(best);
      if (narrow(best.cost, bound)) divide(0, tables_.layers, best);
    }
    effort = std::max(effort_, 0L);
    return effort_ > 0;
  }

 private:
  static constexpr std::size_t kMostPoints = 20'000;  // of one stage at one node
  static constexpr int kPriceSteps = 40, kStrengthenRounds = 3;
  static constexpr long kBoundPasses = 20;  // a stage's share in a bound is as much work as so many simulated passes

  struct Elsewhere {
    double price = 0;                // of a layer in any other stage
    std::vector<double> head, tail;  // least of the stages above one; from one on, with the link above it
  };

  double simulate(const std::vector<StageTime>& times) {
    const long before = timer_.passes();
    const double time = timer_(times);
    effort_ -= timer_.passes() - before;
    return time;
  }

  // --- bounds of a division -------------------------------------------------------------------------------------

  double fixed(int stage, Weighting weighting) const {
    return cuts_.weights(stage, weighting).of(stages_.fixed(stage));
  }

  double least_bound() {
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

  // Gives one more layer to the stage for which `bound(stage, layers)` is least then; returns that.
  template <class Bound>
  double deal(Bound bound) {
    int best = 0;
    for (int s = 1; s < tables_.stages; ++s)
      if (bound(s, dealt_[s] + 1) < bound(best, dealt_[best] + 1)) best = s;
    return bound(best, ++dealt_[best]);
  }

  // What the other stages add to the paths that lean on one: each its least, and each layer a price.
  template <class Least>
  void set_elsewhere(Weighting below, double price, Least least) {
    const int stages = tables_.stages;
    Elsewhere& other = elsewhere_[below];
    other.price = price;
    other.head.assign(stages + 1, 0);
    other.tail.assign(stages + 1, 0);
    for (int s = 0; s < stages; ++s)
      other.head[s + 1] = other.head[s] + least(s, kLast) + (s + 1 < stages ? 2 * tables_.send[s] : 0);
    for (int s = stages - 1; s >= 0; --s)
      other.tail[s] = other.tail[s + 1] + least(s, below) + (s > 0 ? Cuts::trips(below) * tables_.send[s - 1] : 0);
  }

  // Below the time of every pipeline in which the stage has so many layers.
  template <class Own>
  double paths(int stage, int layers, Own own) const {
    double longest = 0;
    for (const Cut& cut : cuts_.of(stage)) {
      const Elsewhere& other = elsewhere_[cut.below];
      const double rest = (tables_.layers - layers) * other.price;
      longest = std::max(longest, other.head[stage] + own(cut.own) + other.tail[stage + 1] + rest);
    }
    return longest;
  }

  // Better bounds, of pipelines that cost less than the limit alone: their stages have between fewest_ and most_
  // layers, so no layer elsewhere is as cheap as if its stage had room for it. The price of a layer is the Lagrange
  // multiplier of their number: Σ time_s(n_s) over Σ n_s = L is at least price * L + Σ min_n (time_s(n) - price * n).
  void strengthen() {
    for (const Weighting below : kBelow) {
      if (below == kNowhere) continue;
      std::vector<std::vector<double>> times(tables_.stages);
      double low = 0, high = 0;
      for (int s = 0; s < tables_.stages; ++s) {
        for (int n = fewest_[s]; n <= most_[s]; ++n) times[s].push_back(stages_.bound(s, n, below));
        for (std::size_t i = 1; i < times[s].size(); ++i) high = std::max(high, times[s][i] - times[s][i - 1]);
      }
      for (int step = 0; step < kPriceSteps; ++step) {
        const double price = (low + high) / 2;
        int layers = 0;
        for (int s = 0; s < tables_.stages; ++s) layers += fewest_[s] + cheapest(times[s], price).first;
        (layers < tables_.layers ? low : high) = price;
      }
      const double price = (low + high) / 2;
      set_elsewhere(below, price, [&](int s, Weighting weighting) {
        if (weighting == below) return cheapest(times[s], price).second - price * fewest_[s];
        std::vector<double> head;
        for (int n = fewest_[s]; n <= most_[s]; ++n) head.push_back(stages_.bound(s, n, weighting));
        return cheapest(head, price).second - price * fewest_[s];
      });
    }
    bounds_.clear();
    leasts_.clear();
  }

  // Ranges and bounds for pipelines that cost less than the limit; raises `bound`. False: there is no such pipeline.
  bool narrow(double limit, double& bound) {
    for (int round = 0; round < kStrengthenRounds; ++round) {
      if (!set_ranges(limit)) {
        bound = limit;
        return false;
      }
      bound = std::min(limit, std::max(bound, least_bound()));
      if (tables_.stages > 1) strengthen();
    }
    return set_ranges(limit);
  }

  // The index i for which times[i] - price * i is least, and that.
  static std::pair<int, double> cheapest(const std::vector<double>& times, double price) {
    std::pair<int, double> best{0, times[0]};
    for (int i = 1; i < static_cast<int>(times.size()); ++i)
      if (times[i] - price * i < best.second) best = {i, times[i] - price * i};
    return best;
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

  // Fewest and most layers of each stage in a pipeline that costs less than the limit; false: there is none.
  bool set_ranges(double limit) {
    const int stages = tables_.stages;
    std::vector<int> most(stages, 0);
    for (int s = 0; s < stages; ++s)
      while (is_less(bound_of(s, most[s] + 1), limit) && is_less(least_of(s, most[s] + 1), limit)) ++most[s];
    const int all = std::accumulate(most.begin(), most.end(), 0);
    if (all < tables_.layers || *std::min_element(most.begin(), most.end()) < 1) return false;
    most_ = most;
    fewest_.assign(stages, 1);
    for (int s = 0; s < stages; ++s) fewest_[s] = std::max(1, tables_.layers - (all - most_[s]));
    return true;
  }

  // The divisions from a stage on, depth first.
  void divide(int stage, int left, PipelineSolution& best) {
    if (stage == tables_.stages) return leaf(best);
    const int later = tables_.stages - stage - 1;
    int later_most = 0;
    for (int s = stage + 1; s < tables_.stages; ++s) later_most += most_[s];
    const int least = std::max(fewest_[stage], left - later_most);
    for (int n = std::min(most_[stage], left - later); n >= least && effort_ > 0; --n) {
      poll_->tick();
      effort_ -= kBoundPasses * tables_.stages;
      division_[stage] = n;
      if (is_less(partial_bound(stage + 1, left - n), best.cost)) divide(stage + 1, left - n, best);
    }
  }

  // Below the time of every pipeline whose first stages are divided so; the rest gets `left` layers.
  double partial_bound(int stages, int left) {
    auto open = [&](Weighting below) {
      if (stages == tables_.stages) return 0.0;
      const double link = Cuts::trips(below) * tables_.send[stages - 1];  // in `tail` and in Cuts::longest
      return elsewhere_[below].tail[stages] - link + left * elsewhere_[below].price;
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
    effort_ -= kBoundPasses * tables_.stages;
    return std::max(cut, simulate(times_));
  }

  // A good pipeline fast: each stage's optima under the paths' weightings, tried in turn.
  void settle(PipelineSolution& best) {
    std::vector<StagePoint> points(tables_.stages);
    std::vector<StageTime> times(tables_.stages);
    for (int s = 0; s < tables_.stages; ++s) {
      points[s] = stages_.best(s, division_[s], kBusy, *poll_);
      times[s] = points[s].time;
    }
    double cost = simulate(times);
    for (bool better = true; better;) {
      better = false;
      for (int s = 0; s < tables_.stages && effort_ > 0; ++s) {
        auto attempt = [&](Weighting weighting) {
          const StagePoint& point = stages_.best(s, division_[s], weighting, *poll_);
          const StageTime before = std::exchange(times[s], point.time);
          const double attempted = simulate(times);
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
    if (effort_ <= 0 || !is_less(node_bound(), best.cost)) return;
    const int stage = loosest();
    if (stage < 0) {
      const double cost = simulate(times_);
      if (is_less(cost, best.cost)) best = {cost, best.vocab, division_, chosen_};
      return;
    }
    std::vector<StagePoint> points;
    if (!points_below(stage, best.cost, points)) {
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
    for (int s = 0; s < tables_.stages; ++s) {
      if (!free_[s]) continue;
      const StageTime relaxed = std::exchange(times_[s], stages_.best(s, division_[s], kBusy, *poll_).time);
      const double time = simulate(times_);
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
    if (dealt_.empty()) least_bound();
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
        if (effort_ <= 0) return;
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
      const double time = simulate(times_);
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
  long effort_ = 0;

  std::array<Elsewhere, kWeightings> elsewhere_;      // by what lies below
  std::vector<std::vector<double>> bounds_, leasts_;  // [stage][layers], negative: not yet known
  std::vector<int> dealt_, fewest_, most_, division_;
  std::vector<bool> free_;          // stages not yet settled
  std::vector<StagePoint> chosen_;  // of the others
  std::vector<StageTime> times_;    // scratch
};

}  // namespace galvatron
