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

  explicit ChunkPlaces(const Problem& problem) : stages(problem.stages), chunks(problem.passes.chunks()) {}

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
    for (int chunk = 0; chunk < chunks; ++chunk) result.push_back({path.passes[of(stage, chunk)], path.sync[stage]});
    return result;
  }
};

// The least that the layers of a stage cost where one costs so much in each of its chunks, by their number: those of
// the cheapest chunks come first, as far as these go. Leaves out the `skipped` fewest numbers, and what is beyond
// `count` of them; calls `take(number, cost)`. `order`: of the chunks.
template <class Take>
void cheapest_first(double cost, const std::vector<double>& layer, const std::vector<int>& fewest,
                    const std::vector<int>& most, int skipped, int count, std::vector<int>& order, Take take) {
  order.resize(layer.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int a, int b) { return layer[a] < layer[b]; });
  for (std::size_t c = 0; c < layer.size(); ++c) cost += fewest[c] * layer[c];
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
};

// The least time that the longest stage takes, for any division of the layers; infinite where the layers are too few
// or too many. `feasible(stage)`: sizes of a stage.
template <class SizesOf>
double longest(int stages, int layers, SizesOf feasible) {
  std::vector<std::size_t> more(stages, 0);
  double longest = 0;
  for (int s = 0; s < stages; ++s) {
    if (feasible(s).work.empty()) return kInfinity;
    layers -= feasible(s).fewest, longest = std::max(longest, feasible(s).work[0] + feasible(s).ends);
  }
  if (layers < 0) return kInfinity;
  for (; layers > 0; --layers) {
    int best = 0;
    auto next = [&](int s) {
      return more[s] + 1 < feasible(s).work.size() ? feasible(s).work[more[s] + 1] + feasible(s).ends : kInfinity;
    };
    for (int s = 1; s < stages; ++s)
      if (next(s) < next(best)) best = s;
    longest = std::max(longest, next(best));
    ++more[best];
  }
  return longest;
}

// Costs of a stage in the weighted sum, by its number of layers.
struct StageCosts {
  int fewest = 0;  // layers of the stage
  std::vector<double> costs;
  std::vector<int> cheapest;  // the stage's chunks, the one first that takes layers cheapest
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
      : problem_(problem), cache_(cache), exact_(exact), places_(problem), prices_(problem.stages, 0) {}

  // Costs of divisions with `fewest` to `most` layers in each chunk; `now` is a likely one. The better of two bounds:
  // one weighs all passes of the stage equally and is exact; the other prices memory and keeps the chunks' own weights.
  StageCosts of(int stage, const std::vector<int>& fewest, const std::vector<int>& most, const std::vector<int>& now,
                const PathWeights& weights, FeasibleSizes& feasible, WorkBudget& budget) {
    StageCosts best = evenly(stage, fewest, most, weights, feasible, budget);
    best.fewest = feasible.fewest;
    relax(stage, fewest, most, now, weights, feasible, best, budget);
    return best;
  }

 private:
  // The weight common to all passes of the stage multiplies the exact optimum of its work; the rest multiplies the
  // least times.
  StageCosts evenly(int stage, const std::vector<int>& fewest, const std::vector<int>& most, const PathWeights& weights,
                    FeasibleSizes& feasible, WorkBudget& budget) {
    const int chunks = problem_.passes.chunks();
    double common = kInfinity;
    for (int c = 0; c < chunks; ++c)
      for (const double weight : weights.passes[places_.of(stage, c)]) common = std::min(common, weight);
    const double busy = common / problem_.micro_batches, sync = std::min(weights.sync[stage], busy);
    const double more_sync = weights.sync[stage] - sync;
    if (sync > 0 && feasible.synced.empty())
      for (int more = feasible.skipped; more < feasible.skipped + static_cast<int>(feasible.work.size()); ++more)
        feasible.synced.push_back(exact_.work(stage, places_.of_stage(fewest, stage), more, true, budget).least);
    StageCosts result;
    std::vector<double> price(weights.passes.size(), 0);  // of a layer more
    double fixed = 0;
    for (int c = 0; c < chunks; ++c) {
      const int at = places_.of(stage, c);
      Weights left = Weights::uniform(-common, more_sync);
      add_to(left.passes, weights.passes[at]);
      price[at] = cache_.cheapest(0, left);
      fixed += left.of(exact_.fixed_time(stage, c)) + fewest[at] * price[at];
      result.cheapest.push_back(at);
    }
    std::stable_sort(result.cheapest.begin(), result.cheapest.end(), [&](int a, int b) { return price[a] < price[b]; });
    int skip = feasible.skipped;
    auto add = [&] {
      if (skip-- > 0) return;
      const std::size_t more = result.costs.size();
      const double synced = sync > 0 ? sync * feasible.synced[more] : 0;
      result.costs.push_back((busy - sync) * feasible.work[more] + synced + fixed);
    };
    add();
    for (const int at : result.cheapest)
      for (int n = fewest[at]; n < most[at] && result.costs.size() < feasible.work.size(); ++n) {
        fixed += price[at];
        add();
      }
    return result;
  }

  // Raises costs to those of a Lagrangian relaxation of memory, at the price that is best for the layers that the
  // stage is likely to have. It is looked for near the stage's last one.
  void relax(int stage, const std::vector<int>& fewest, const std::vector<int>& most, const std::vector<int>& now,
             const PathWeights& weights, const FeasibleSizes& feasible, StageCosts& stage_cost, WorkBudget& budget) {
    const int chunks = problem_.passes.chunks();
    const std::vector<int> likely = places_.of_stage(now, stage), few = places_.of_stage(fewest, stage),
                           many = places_.of_stage(most, stage);
    const int more = std::accumulate(likely.begin(), likely.end(), 0) - feasible.fewest;
    const int target = std::min(std::max(more, 0), static_cast<int>(stage_cost.costs.size()) - 1);
    const std::vector<Weights> own_weights = places_.weights(weights, stage);
    const std::vector<double> held = exact_.likely_held(stage, likely);
    std::vector<double> costs(stage_cost.costs.size());
    std::vector<int> order, cheapest(chunks);
    auto at_price = [&](double price) {
      std::fill(costs.begin(), costs.end(), kInfinity);
      budget.tick(exact_.choices());
      exact_.relax(stage, held, own_weights, price, [&](double cost, const std::vector<double>& layer) {
        const int count = static_cast<int>(costs.size());
        cheapest_first(cost, layer, few, many, feasible.skipped, count, order, [&](int at, double sum) {
          if (at == target && sum < costs[at])
            for (int c = 0; c < chunks; ++c) cheapest[c] = places_.of(stage, order[c]);
          costs[at] = std::min(costs[at], sum);
        });
      });
      for (std::size_t at = 0; at < costs.size(); ++at)
        stage_cost.costs[at] = std::max(stage_cost.costs[at], costs[at]);
      return costs[target];
    };
    double best = -kInfinity;
    std::vector<int> chosen = stage_cost.cheapest;
    double& price = prices_[stage];
    const double start = price > 0 ? price : stage_cost.costs[target] / std::max(problem_.budget, 1.0);
    price = InterleavedStages::highest(
        [&](double attempted) {
          const double cost = at_price(attempted);
          if (cost > best) best = cost, chosen = cheapest;
          return cost;
        },
        start, price == 0);
    stage_cost.cheapest = chosen;
  }

  const Problem& problem_;
  const ChoiceCache& cache_;
  InterleavedStages& exact_;
  ChunkPlaces places_;
  std::vector<double> prices_;  // of each stage's memory, ms per MiB; 0: none yet
};

}  // namespace galvatron
