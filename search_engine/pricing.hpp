// Pricing: the least cost that a stage adds to a weighted sum of all chunks' times, by its number of layers; and the
// dynamic program that allocates the layers to the stages.
// README.md, step 7.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "critical_path.hpp"
#include "interleaved_stage.hpp"
#include "limits.hpp"
#include "problem.hpp"
#include "stage_solver.hpp"

namespace galvatron {

// Where the chunks of each stage are, in the order of the layers.
struct ChunkPlaces {
  int stages, chunks;  // chunks: of a stage

  explicit ChunkPlaces(const Problem& problem) : stages(problem.stages), chunks(problem.passes.chunks) {}

  int of(int stage, int chunk) const { return chunk * stages + stage; }

  // The numbers of a stage's chunks among those of all chunks.
  std::vector<int> of_stage(const std::vector<int>& of_all, int stage) const {
    std::vector<int> result;
    for (int chunk = 0; chunk < chunks; ++chunk) result.push_back(of_all[of(stage, chunk)]);
    return result;
  }

  // Path coefficients of each chunk of a stage. Every entry carries the stage's sync coefficient.
  std::vector<Weights> weights(const PathWeights& path, int stage) const {
    std::vector<Weights> result;
    for (int chunk = 0; chunk < chunks; ++chunk)
      result.push_back({path.chunks[of(stage, chunk)].passes, path.chunks[stage].sync});
    return result;
  }
};

// The least that the layers of a stage cost where one more costs so much in each of its chunks, by their number: those
// of the cheapest chunks come first, as far as these go. `cost`: of the fewest layers. Leaves out the `skipped` fewest
// numbers, and what is beyond `count` of them; calls `take(number, cost)`. `order`: of the chunks.
template <class Take>
void cheapest_first(double cost, const std::vector<double>& layer, const std::vector<int>& fewest,
                    const std::vector<int>& most, int skipped, int count, std::vector<int>& order, Take take) {
  order.resize(layer.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int a, int b) { return layer[a] < layer[b]; });
  int at = -skipped;
  if (at >= 0) take(at, cost);
  for (const int c : order)
    for (int n = fewest[c]; n < most[c] && at + 1 < count; ++n) {
      cost += layer[c];
      if (++at >= 0) take(at, cost);
    }
}

// A stage with its fewest layers, one more, and so on, without sizes that cannot win.
struct FeasibleSizes {
  int fewest = 0;                    // layers of the stage
  int skipped = 0;                   // of them, beyond the fewest of its chunks
  double ends = 0;                   // ms before the stage's first pass and after its last one, at least
  std::vector<double> work, synced;  // ms that it works in a step; with its sync (empty: not yet requested)

  // Least time of a step with so many layers more; infinite: it cannot win.
  double at(int more) const { return more < static_cast<int>(work.size()) ? work[more] + ends : kInfinity; }
};

// Shares layers out one by one, each to the stage that then takes least: adds them to the `more` of each stage. Returns
// the time of the longest stage; infinite, and some layers left, where they do not fit. `time(stage, more)`: of a
// stage.
template <class Time>
double share_out(int layers, std::vector<int>& more, Time time) {
  const int stages = static_cast<int>(more.size());
  double longest = 0;
  for (int s = 0; s < stages; ++s) longest = std::max(longest, time(s, 0));
  for (; layers > 0 && longest < kInfinity; --layers) {
    int best = 0;
    for (int s = 1; s < stages; ++s)
      if (time(s, more[s] + 1) < time(best, more[best] + 1)) best = s;
    longest = std::max(longest, time(best, ++more[best]));
  }
  return longest;
}

// Costs of a stage in the weighted sum, by its number of layers.
struct StageCosts {
  int fewest = 0;  // layers of the stage
  std::vector<double> costs;
  std::vector<int> cheapest;  // the stage's chunks by rising cost of a layer more
};

// The least sums of stages' costs, by their layers together: a dynamic program over the stages.
class AllocationDp {
 public:
  AllocationDp(const std::vector<StageCosts>& stage_costs, int layers, WorkBudget& budget)
      : offers_(stage_costs), layers_(layers), stages_(static_cast<int>(stage_costs.size())), before_(stages_ + 1) {
    std::vector<int> most_later(stages_ + 1, 0);
    for (int s = stages_ - 1; s >= 0; --s) most_later[s] = most_later[s + 1] + most(s);
    before_[0].assign(layers + 1, kInfinity);
    before_[0][0] = 0;
    int first = 0, last = 0;  // layers of the stages so far
    for (int s = 0; s < stages_; ++s) {
      add(before_[s], s, first, last, before_[s + 1], budget);
      first = std::max(first + stage_costs[s].fewest, layers - most_later[s + 1]),
      last = std::min(last + most(s), layers);
    }
  }

  // Least cost of all layers over all stages; infinite where there is none.
  double least() const { return before_[stages_][layers_]; }

  // Least cost of all stages but the last, which has so many layers.
  double before_last(int layers) const {
    return layers <= layers_ ? before_[stages_ - 1][layers_ - layers] : kInfinity;
  }

  // Layers of each stage in the cheapest allocation.
  std::vector<int> layers_of_stages() const {
    std::vector<int> of_stages(stages_, 0);
    for (int s = stages_ - 1, left = layers_; s >= 0; left -= of_stages[s--])
      for (int n = std::min(most(s), left); n >= offers_[s].fewest; --n)
        if (before_[s][left - n] + offers_[s].costs[n - offers_[s].fewest] == before_[s + 1][left]) {
          of_stages[s] = n;
          break;
        }
    return of_stages;
  }

  // Least costs of all other stages for each stage with its fewest layers, one more, and so on.
  std::vector<std::vector<double>> of_others(WorkBudget& budget) const {
    std::vector<std::vector<double>> others(stages_);
    std::vector<double> after(layers_ + 1, kInfinity), next;
    after[0] = 0;
    for (int s = stages_ - 1; s >= 0; --s) {
      const StageCosts& offer = offers_[s];
      others[s].assign(offer.costs.size(), kInfinity);
      budget.tick(offer.costs.size() * layers_ / 2);
      for (int i = 0; i < static_cast<int>(offer.costs.size()); ++i)
        for (int l = 0, later = layers_ - offer.fewest - i; later >= 0; ++l, --later)
          others[s][i] = std::min(others[s][i], before_[s][l] + after[later]);
      add(after, s, 0, layers_, next, budget);
      after.swap(next);
    }
    return others;
  }

 private:
  int most(int s) const { return offers_[s].fewest + static_cast<int>(offers_[s].costs.size()) - 1; }

  // The least sums with a stage more, from those without it for between `first` and `last` layers.
  void add(const std::vector<double>& sums, int stage, int first, int last, std::vector<double>& next,
           WorkBudget& budget) const {
    const StageCosts& offer = offers_[stage];
    const int count = static_cast<int>(offer.costs.size());
    next.assign(layers_ + 1, kInfinity);
    budget.tick(count * (last - first + 1) / 2);
    for (int l = first; l <= last; ++l) {
      if (!(sums[l] < kInfinity)) continue;
      for (int i = 0; i < count && l + offer.fewest + i <= layers_; ++i) {
        double& sum = next[l + offer.fewest + i];
        sum = std::min(sum, sums[l] + offer.costs[i]);
      }
    }
  }

  const std::vector<StageCosts>& offers_;
  int layers_, stages_;
  std::vector<std::vector<double>> before_;  // of the stages before each
};

class Pricing {
 public:
  Pricing(const Problem& problem, const ChoiceCache& cache, InterleavedStages& exact)
      : problem_(problem), cache_(cache), exact_(exact), prices_(problem.stages, 0) {}

  // Costs of divisions with `fewest` to `most` layers in each chunk of the stage; `likely` is a likely one. The better
  // of two bounds: one weighs all passes of the stage equally and is exact; the other prices memory and keeps the
  // chunks' own weights.
  StageCosts of(int stage, const std::vector<int>& fewest, const std::vector<int>& most, const std::vector<int>& likely,
                const std::vector<Weights>& weights, FeasibleSizes& feasible, WorkBudget& budget) {
    StageCosts best = evenly(stage, fewest, most, weights, feasible, budget);
    relax(stage, fewest, most, likely, weights, feasible, best, budget);
    return best;
  }

 private:
  // The weight common to all passes of the stage multiplies the exact optimum of its work; the rest multiplies the
  // least times.
  StageCosts evenly(int stage, const std::vector<int>& fewest, const std::vector<int>& most,
                    const std::vector<Weights>& weights, FeasibleSizes& feasible, WorkBudget& budget) {
    double common = kInfinity;
    for (const Weights& of_chunk : weights)
      for (const double weight : of_chunk.passes) common = std::min(common, weight);
    const double busy = common / problem_.micro_batches, sync = std::min(weights[0].sync, busy);
    const int count = static_cast<int>(feasible.work.size());
    if (sync > 0 && feasible.synced.empty())
      for (int more = feasible.skipped; more < feasible.skipped + count; ++more)
        feasible.synced.push_back(exact_.work(stage, fewest, more, true, budget).least);
    StageCosts result;
    result.fewest = feasible.fewest;
    std::vector<double> price;  // of a layer more
    double fixed = 0;
    for (std::size_t c = 0; c < weights.size(); ++c) {
      Weights left = Weights::of_each(kPassKinds, -common, -sync);
      left.add(weights[c]);
      price.push_back(cache_.cheapest(0, left));
      fixed += left.of(exact_.fixed_time(stage, c)) + fewest[c] * price[c];
    }
    cheapest_first(fixed, price, fewest, most, feasible.skipped, count, result.cheapest, [&](int more, double cost) {
      const double synced = sync > 0 ? sync * feasible.synced[more] : 0;
      result.costs.push_back((busy - sync) * feasible.work[more] + synced + cost);
    });
    return result;
  }

  // Raises costs to those of a Lagrangian relaxation of memory, at the price that is best for the layers that the
  // stage is likely to have. It is looked for near the stage's last one.
  void relax(int stage, const std::vector<int>& fewest, const std::vector<int>& most, const std::vector<int>& likely,
             const std::vector<Weights>& weights, const FeasibleSizes& feasible, StageCosts& stage_cost,
             WorkBudget& budget) {
    const int more = std::accumulate(likely.begin(), likely.end(), 0) - feasible.fewest;
    const int count = static_cast<int>(stage_cost.costs.size()), target = std::min(std::max(more, 0), count - 1);
    const std::vector<double> held = exact_.likely_held(stage, likely);
    std::vector<double> costs(count);
    std::vector<int> order, cheapest;
    double best = -kInfinity;
    auto at_price = [&](double price) {
      std::fill(costs.begin(), costs.end(), kInfinity);
      budget.tick(problem_.strategies.size() * weights.size());
      exact_.relax(stage, held, weights, price, [&](double cost, const std::vector<double>& layer) {
        for (std::size_t c = 0; c < layer.size(); ++c) cost += fewest[c] * layer[c];
        cheapest_first(cost, layer, fewest, most, feasible.skipped, count, order, [&](int at, double sum) {
          if (at == target && sum < costs[at]) cheapest = order;
          costs[at] = std::min(costs[at], sum);
        });
      });
      for (int at = 0; at < count; ++at) stage_cost.costs[at] = std::max(stage_cost.costs[at], costs[at]);
      if (costs[target] > best) best = costs[target], stage_cost.cheapest = cheapest;
      return costs[target];
    };
    double& price = prices_[stage];
    const double start = price > 0 ? price : stage_cost.costs[target] / std::max(problem_.budget, 1.0);
    price = InterleavedStages::highest(at_price, start, price == 0);
  }

  const Problem& problem_;
  const ChoiceCache& cache_;
  InterleavedStages& exact_;
  std::vector<double> prices_;  // of each stage's memory, ms per MiB; 0: none yet
};

}  // namespace galvatron
