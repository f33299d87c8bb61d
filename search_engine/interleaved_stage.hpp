// The stages of a pipeline with one or several chunks each, for identical layers: lower bounds of the time that a stage
// works, and strategies that reach it.
//
// The knapsack treats a chunk as a layer type: its layers hold as many micro-batches as the schedule has of it in
// flight. Their memory is largest at one of some moments; each moment alone is a relaxation. With several chunks, the
// bound leaves out resharding within a chunk.
// README.md, step 4.
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <numeric>
#include <tuple>
#include <utility>
#include <vector>

#include "critical_path.hpp"
#include "limits.hpp"
#include "multiple_choice_knapsack.hpp"
#include "problem.hpp"
#include "resharding_path.hpp"
#include "stage_solver.hpp"

namespace galvatron {

constexpr int kMostChunks = kMostTypes - 1;  // of a stage

// A stage with all its layers' strategies, chunk by chunk.
struct InterleavedPoint {
  std::vector<PassTimes> passes;  // of each chunk
  double sync = 0;                // ms
  std::vector<std::vector<int>> strategies;

  int layers() const {
    std::size_t sum = 0;
    for (const std::vector<int>& chunk : strategies) sum += chunk.size();
    return static_cast<int>(sum);
  }

  // Whether it is as good as another one of as many layers, in everything.
  bool matches(const InterleavedPoint& other) const {
    return layers() == other.layers() && sync <= other.sync &&
           std::equal(passes.begin(), passes.end(), other.passes.begin(), fits_in<PassTimes>);
  }

  // Makes its times those of a stage.
  void put(ChunkTimes& times, std::size_t stage) const {
    const std::size_t stages = times.sync.size();
    for (std::size_t c = 0; c < passes.size(); ++c) times.passes[c * stages + stage] = passes[c];
    times.sync[stage] = sync;
  }
};

using Points = std::vector<std::shared_ptr<const InterleavedPoint>>;

// Whether no point of as many layers is as good as another one; then those go that are not better than it.
inline bool makes_way(Points& points, const InterleavedPoint& other) {
  if (std::any_of(points.begin(), points.end(), [&](const auto& point) { return point->matches(other); })) return false;
  points.erase(std::remove_if(points.begin(), points.end(), [&](const auto& point) { return other.matches(*point); }),
               points.end());
  return true;
}

// Time that a stage works in a step, with its sync or without; or any other weighted sum of its times.
struct Work {
  double least = 0;                               // ms; infinite: nothing fits
  std::shared_ptr<const InterleavedPoint> point;  // that fits and takes least, as far as is known
};

// Works of stages, by query.
struct KnownWorks {
  std::map<std::tuple<int, bool, int, std::vector<int>>, Work> exact;
  std::map<std::tuple<int, int, int, std::vector<int>>, std::vector<double>> rough;
};

class InterleavedStages {
 public:
  // `inner`: those of stages that know nothing of the vocabulary, shared by all of its strategies.
  InterleavedStages(const Problem& problem, const Vocab& vocab, const ChoiceCache& cache, KnownWorks& inner)
      : problem_(problem), vocab_(vocab), inner_(inner), useful_(cache.useful()), chunks_(problem.passes.chunks()) {
    if (chunks_ > kMostChunks) throw TooHard("the search knows 16 chunks a stage");
    layouts_ = chunks_ == 1 ? problem.layouts() : 1;
    for (const bool with_sync : {false, true})
      busy_[with_sync].weights.assign(chunks_, Weights::uniform(problem.micro_batches, with_sync));
  }

  // Work of a stage whose chunks have so many layers, and `more` wherever they need least.
  const Work& work(int stage, std::vector<int> layers, int more, bool with_sync, WorkBudget& budget) {
    if (chunks_ == 1) layers[0] += std::exchange(more, 0);
    auto& works = works_of(stage).exact;
    const auto key = std::make_tuple(stage, with_sync, more, layers);
    const auto entry = works.find(key);
    if (entry != works.end()) return entry->second;
    return works.emplace(key, solve({stage, layers, more, busy_[with_sync]}, budget)).first->second;
  }

  // Cheap lower bounds of work() for 0..most additional layers; infinite where they don't fit. Closest for
  // `likely` more.
  const std::vector<double>& rough_works(int stage, const std::vector<int>& layers, int most, int likely,
                                         WorkBudget& budget) {
    auto& works = works_of(stage).rough;
    const auto key = std::make_tuple(stage, most, likely, layers);
    const auto entry = works.find(key);
    if (entry != works.end()) return entry->second;
    return works.emplace(key, roughly(stage, layers, most, likely, budget)).first->second;
  }

  // The price of memory, near a known one or far from it, at which a relaxation costs most: a search in ever smaller
  // steps, as long as they help.
  template <class Cost>
  static double highest(Cost cost, double price, bool far) {
    const std::vector<double> steps = far ? std::vector<double>{16, 4, 1.6, 1.2} : std::vector<double>{1.15};
    double best = cost(price);
    for (const double step : steps)
      for (const double factor : {step, 1 / step})
        for (int moves = 0; moves < kMostMoves; ++moves) {
          const double attempted = cost(price * factor);
          if (!(attempted > best)) break;
          best = attempted, price *= factor;
        }
    return price;
  }

  // Lagrangian relaxation of a stage, for any weights of each chunk's passes and of the sync: memory has a price, ms
  // per MiB, instead of a limit, and of the workspace only a single layer's need counts. Calls
  // `take(fixed, layer)` once a level of that, with the cost without layers and that of a layer of each chunk. The
  // least of them is a lower bound, for any price and for any of the moments, or mean of them, in `held`.
  template <class Take>
  void relax(int stage, const std::vector<double>& held, const std::vector<Weights>& weights, double price,
             Take take) const {
    const MemoryBudget room = this->room(stage, held);
    double fixed = -price * within(room.budget);
    for (int chunk = 0; chunk < chunks_; ++chunk) fixed += weights[chunk].of(fixed_time(stage, chunk));
    std::vector<double> least(chunks_, kInfinity);
    bool better = false;
    std::vector<std::pair<double, int>>& rising = by_workspace_[room.workspace];
    if (rising.empty()) {
      for (const int k : useful_)
        rising.push_back({total(most_of(room.workspace, problem_.strategies[k].workspace)), k});
      std::sort(rising.begin(), rising.end());
    }
    for (std::size_t i = 0; i < rising.size(); ++i) {
      const Part& part = problem_.strategies[rising[i].second];
      for (int chunk = 0; chunk < chunks_; ++chunk) {
        const double cost = weights[chunk].of(part.time) + price * (part.states + held[chunk] * part.activation);
        if (cost < least[chunk]) least[chunk] = cost, better = true;
      }
      if (!better || (i + 1 < rising.size() && rising[i + 1].first == rising[i].first)) continue;
      take(fixed + price * rising[i].first, least);
      better = false;
    }
  }

  // At the moment at which identical layers would hold most.
  std::vector<double> likely_held(int stage, const std::vector<int>& layers) const {
    const Held& held = fullest(stage, layers, 0);
    return {held.begin(), held.end()};
  }

  // Clears large caches that are soon filled again.
  void forget() {
    for (ChunkWeights& pricing : busy_)
      for (auto& [key, knapsack] : pricing.knapsack) knapsack->forget();
  }

  // Steps of one relaxation, about.
  std::size_t choices() const { return useful_.size() * chunks_; }

  // As `work`, for any weights of each chunk's passes, and of the stage's sync in all of them; not remembered.
  Work weighted(int stage, const std::vector<int>& layers, std::vector<Weights> weights, WorkBudget& budget) const {
    ChunkWeights pricing{std::move(weights), {}, {}};
    return solve({stage, layers, 0, pricing}, budget);
  }

  // The points of a stage of one chunk that weigh less than `limit`, but those that others match. False: there are more
  // than `most`, or it would take beyond `stop`.
  bool list(int stage, const std::vector<int>& layers, const Weights& weights, double limit, std::size_t most,
            std::size_t stop, Points& points, WorkBudget& budget) const {
    ChunkWeights pricing{{weights}, {}, {}};
    const Question question{stage, layers, 0, pricing};
    const Held& held = problem_.held[stage].front();
    CountKnapsack knapsack(choices(question, held));
    auto add = [&](const std::vector<Count>& counts, LayoutSet layouts) {
      std::vector<int> order;
      for (int layout = 0; layout < layouts_; ++layout)
        if (layouts & bit(layout)) order.push_back(layout);
      do {
        InterleavedPoint point = point_of(question, counts, order);
        budget.tick(points.size());
        if (makes_way(points, point)) points.push_back(std::make_shared<InterleavedPoint>(std::move(point)));
      } while (points.size() <= most && std::next_permutation(order.begin(), order.end()));
      return points.size() <= most && budget.steps() < stop;
    };
    long effort = kMostListed;
    knapsack.enumerate(layers_of(question), room(stage, held), walks(question), limit - fixed(pricing, stage), add,
                       effort, budget, kMostListed);
    return points.size() <= most && effort > 0 && budget.steps() < stop;
  }

  // Least times of a chunk without its layers.
  StageTime fixed_time(int stage, int chunk) const {
    StageTime time = part(stage, chunk).time;
    PassTimes changes = least(entry(stage, chunk));
    add_to(changes, least(exit(stage, chunk)));
    add_to(time.passes, changes);
    return time;
  }

  const Part& part(int stage, int chunk) const {
    if (stage == 0 && chunk == 0) return vocab_.first;
    if (stage == problem_.stages - 1 && chunk == chunks_ - 1) return vocab_.last;
    return stage > 0 && stage < problem_.stages - 1 && chunk == 0 ? problem_.middle : problem_.later;
  }

 private:
  static constexpr int kMostMoves = 8;            // of a price of memory into one direction
  static constexpr double kRoom = 1e-9;           // share of the budget that sums of memory may be off by
  static constexpr long kMostListed = 1'000'000;  // counts looked at: some 0.1 s
  static constexpr int kMostMoments = 4;          // tried one after the other before all at once

  using Held = std::vector<int>;  // micro-batches of each chunk

  // Weights of each chunk's times, and the results known under them.
  struct ChunkWeights {
    std::vector<Weights> weights;
    std::map<Held, std::unique_ptr<CountKnapsack>> knapsack;
    std::map<std::pair<int, bool>, std::unique_ptr<ReshardingPath>> walks;  // by stage, and whether there are `more`

    // Weights of a chunk; after the last one, the least over all chunks.
    Weights of(int chunk) const {
      if (chunk < static_cast<int>(weights.size())) return weights[chunk];
      Weights least = weights.front();
      for (const Weights& other : weights) least.passes = least_of(least.passes, other.passes);
      return least;
    }
  };
  struct Question {
    int stage;
    const std::vector<int>& layers;
    int more;
    ChunkWeights& pricing;
  };

  KnownWorks& works_of(int stage) { return stage > 0 && stage < problem_.stages - 1 ? inner_ : works_; }

  std::vector<double> roughly(int stage, const std::vector<int>& layers, int most, int likely,
                              WorkBudget& budget) const {
    std::vector<double> costs(most + 1), works(most + 1, 0);
    const std::vector<double> held = likely_held(stage, layers);
    auto at_price = [&](double price, const std::vector<Weights>& weights) {
      budget.tick(useful_.size() * (chunks_ + most / 4));
      std::fill(costs.begin(), costs.end(), kInfinity);
      relax(stage, held, weights, price, [&](double cost, const std::vector<double>& layer) {
        for (int chunk = 0; chunk < chunks_; ++chunk) cost += layers[chunk] * layer[chunk];
        const double least = *std::min_element(layer.begin(), layer.end());  // where least is held
        for (int more = 0; more <= most; ++more) costs[more] = std::min(costs[more], cost + more * least);
      });
      return costs[likely];
    };
    at_price(1, std::vector<Weights>(chunks_));  // memory beyond the budget
    while (most >= 0 && costs[most] > kRoom * problem_.budget) works[most--] = kInfinity;
    if (most < 0) return works;
    likely = std::min(likely, most);
    auto raise = [&](double price) {
      const double cost = at_price(price, busy_[false].weights);
      for (int more = 0; more <= most; ++more) works[more] = std::max(works[more], costs[more]);
      return cost;
    };
    highest(raise, raise(0) / std::max(problem_.budget, 1.0), true);
    return works;
  }

  static PassTimes least(const std::vector<PassTimes>& changes) {
    return std::accumulate(changes.begin(), changes.end(), changes.front(), least_of<PassTimes>);
  }

  const std::vector<PassTimes>& entry(int stage, int chunk) const {
    return stage == 0 && chunk == 0 ? vocab_.enter : problem_.enter.inside;
  }
  const std::vector<PassTimes>& exit(int stage, int chunk) const {
    return stage == problem_.stages - 1 && chunk == chunks_ - 1 ? vocab_.leave : problem_.leave.inside;
  }

  // Strategies' numbers count on by the chunk; those of `more` come last.
  int id(int chunk, int strategy) const { return chunk * static_cast<int>(problem_.strategies.size()) + strategy; }
  int layout(int chunk, int strategy) const {
    return chunk * layouts_ + (layouts_ > 1 ? problem_.strategies[strategy].layout : 0);
  }

  CountKnapsack& knapsack(const Question& question, const Held& held) const {
    std::unique_ptr<CountKnapsack>& knapsack = question.pricing.knapsack[held];
    if (!knapsack) knapsack = std::make_unique<CountKnapsack>(undominated(choices(question, held)));
    return *knapsack;
  }

  std::vector<Choice> choices(const Question& question, const Held& held) const {
    std::vector<Choice> choices;
    for (int chunk = 0; chunk <= chunks_; ++chunk) {
      const Weights weights = question.pricing.of(chunk);
      const int count = chunk < chunks_ ? held[chunk] : *std::min_element(held.begin(), held.end());
      for (const int k : useful_) {
        const Part& part = problem_.strategies[k];
        choices.push_back({part.states + count * part.activation, weights.of(part.time), part.workspace, id(chunk, k),
                           chunk < chunks_ ? layout(chunk, k) : chunks_ * layouts_, chunk});
      }
    }
    return choices;
  }

  // Price of a change at a chunk's edge; with several chunks the least of all layouts.
  double price(const std::vector<PassTimes>& changes, int layout, const Weights& weights) const {
    if (chunks_ == 1) return weights.of(changes[layout]);
    double least = kInfinity;
    for (const PassTimes& change : changes) least = std::min(least, weights.of(change));
    return least;
  }

  ReshardingPath& walks(const Question& question) const {
    std::unique_ptr<ReshardingPath>& walks = question.pricing.walks[{question.stage, question.more > 0}];
    if (walks) return *walks;
    GroupPrices prices;
    const int all = chunks_ * layouts_ + 1;  // the last one of `more`
    prices.enter.assign(all, 0), prices.leave.assign(all, 0);
    prices.change.assign(all, Vector<double>(all, 0));
    for (int at = 0; at < all; ++at) prices.types.push_back(at / layouts_);
    prices.types.back() = chunks_;
    for (int chunk = 0; chunk < chunks_; ++chunk)
      for (int g = 0; g < layouts_; ++g) {
        const Weights weights = question.pricing.of(chunk), next = question.pricing.of(chunk + 1);
        const int end = chunk * layouts_ + g;
        const double leaves = price(exit(question.stage, chunk), g, weights);
        if (chunk == 0) prices.enter[end] = price(entry(question.stage, chunk), g, weights);
        if (chunk == chunks_ - 1) prices.leave[end] = prices.change[end][all - 1] = leaves;
        for (int other = 0; other < layouts_; ++other) {
          if (layouts_ > 1) prices.change[end][other] = weights.of(problem_.change[g][other]);
          if (chunk < chunks_ - 1)
            prices.change[end][end - g + layouts_ + other] =
                leaves + price(entry(question.stage, chunk + 1), other, next);
        }
      }
    walks = std::make_unique<ReshardingPath>(std::move(prices), 0, question.more > 0 ? chunks_ : chunks_ - 1);
    return *walks;
  }

  Layers layers_of(const Question& question) const {
    Layers layers;
    std::copy(question.layers.begin(), question.layers.end(), layers.of.begin());
    layers.of[chunks_] = question.more;
    layers.last_type = question.more > 0 ? chunks_ : chunks_ - 1;
    return layers;
  }

  // The moment at which identical layers would hold most.
  const Held& fullest(int stage, const std::vector<int>& layers, int more) const {
    const std::vector<Held>& moments = problem_.held[stage];
    return *std::max_element(moments.begin(), moments.end(), [&](const Held& a, const Held& b) {
      return layers_held(layers, more, a) < layers_held(layers, more, b);
    });
  }

  template <class Held>
  MemoryBudget room(int stage, const Held& held) const {
    MemoryBudget room{problem_.budget, {}};
    for (int chunk = 0; chunk < chunks_; ++chunk) {
      const Part& fixed = part(stage, chunk);
      room.budget -= fixed.states + held[chunk] * fixed.activation;
      room.workspace = most_of(room.workspace, fixed.workspace);
    }
    return room;
  }

  // The least that a stage takes at any moment, and a point that fits at all of them, if one was found and there are no
  // layers of `more`.
  Work solve(const Question& question, WorkBudget& budget) const {
    Work work;
    const std::vector<Held>& moments = problem_.held[question.stage];
    Held held = fullest(question.stage, question.layers, question.more);
    ReshardingPath& walks = this->walks(question);
    for (int tried = 0; tried <= kMostMoments; ++tried) {
      const Assignment mix =
          knapsack(question, held).solve(layers_of(question), room(question.stage, held), walks, budget);
      walks.forget();
      if (tried < kMostMoments)
        work.least = std::max(work.least, fixed(question.pricing, question.stage) + std::min(mix.cost, mix.bound));
      if (mix.counts.empty() || question.more > 0) break;
      InterleavedPoint point = point_of(question, mix.counts, budget);
      const Held& fullest = *std::max_element(moments.begin(), moments.end(), [&](const Held& a, const Held& b) {
        return memory(question.stage, point, a) < memory(question.stage, point, b);
      });
      if (memory(question.stage, point, fullest) <= within(problem_.budget)) {
        work.point = std::make_shared<InterleavedPoint>(std::move(point));
        break;
      }
      held = fullest;
      for (const Held& moment : moments)  // finally all moments at once
        for (int chunk = 0; tried + 1 == kMostMoments && chunk < chunks_; ++chunk)
          held[chunk] = std::max(held[chunk], moment[chunk]);
    }
    return work;
  }

  static double layers_held(const std::vector<int>& layers, int more, const Held& held) {
    double sum = more * *std::min_element(held.begin(), held.end());
    for (std::size_t chunk = 0; chunk < held.size(); ++chunk) sum += layers[chunk] * held[chunk];
    return sum;
  }

  double fixed(const ChunkWeights& pricing, int stage) const {
    double sum = 0;
    for (int chunk = 0; chunk < chunks_; ++chunk) sum += pricing.of(chunk).of(part(stage, chunk).time);
    return sum;
  }

  InterleavedPoint point_of(const Question& question, const std::vector<Count>& counts, WorkBudget& budget) const {
    const int count = static_cast<int>(problem_.strategies.size());
    LayoutSet used = 0;
    for (const auto& [id, layers] : counts) used |= bit(layout(id / count, id % count));
    return point_of(question, counts, walks(question).order(used, budget));
  }

  InterleavedPoint point_of(const Question& question, const std::vector<Count>& counts,
                            const std::vector<int>& order) const {
    const int count = static_cast<int>(problem_.strategies.size());
    InterleavedPoint point{{}, 0, std::vector<std::vector<int>>(chunks_)};
    for (const int layout : order)
      for (const auto& [id, layers] : counts)
        if (this->layout(id / count, id % count) == layout) {
          std::vector<int>& strategies = point.strategies[id / count];
          strategies.insert(strategies.end(), layers, id % count);
        }
    for (int chunk = 0; chunk < chunks_; ++chunk) {
      std::vector<int>& strategies = point.strategies[chunk];
      if (layouts_ == 1)
        std::stable_sort(strategies.begin(), strategies.end(),
                         [&](int a, int b) { return problem_.strategies[a].layout < problem_.strategies[b].layout; });
      StageTime time = part(question.stage, chunk).time;
      add_to(time.passes, entry(question.stage, chunk)[problem_.strategies[strategies.front()].layout]);
      for (std::size_t i = 0; i < strategies.size(); ++i) {
        const Part& layer = problem_.strategies[strategies[i]];
        time.add(layer.time);
        if (i > 0) add_to(time.passes, problem_.change[problem_.strategies[strategies[i - 1]].layout][layer.layout]);
      }
      add_to(time.passes, exit(question.stage, chunk)[problem_.strategies[strategies.back()].layout]);
      point.passes.push_back(time.passes), point.sync += time.sync;
    }
    return point;
  }

  double memory(int stage, const InterleavedPoint& point, const Held& held) const {
    double mib = 0;
    Workspace workspace{};
    for (int chunk = 0; chunk < chunks_; ++chunk) {
      auto add = [&](const Part& part) {
        mib += part.states + held[chunk] * part.activation;
        workspace = most_of(workspace, part.workspace);
      };
      add(part(stage, chunk));
      for (const int k : point.strategies[chunk]) add(problem_.strategies[k]);
    }
    return mib + total(workspace);
  }

  const Problem& problem_;
  const Vocab& vocab_;
  KnownWorks& inner_;
  const std::vector<int>& useful_;
  // The same by rising total workspace within a stage, by the stage's own workspace.
  mutable std::map<Workspace, std::vector<std::pair<double, int>>> by_workspace_;
  int chunks_, layouts_;
  std::array<ChunkWeights, 2> busy_;  // by whether sync counts
  KnownWorks works_;                  // of the first and the last stage
};

}  // namespace galvatron
