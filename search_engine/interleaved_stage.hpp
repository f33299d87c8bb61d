// The stages of a pipeline with one or several chunks each, for identical layers: the least time that a stage works,
// and strategies that reach it.
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
#include "stage_relaxation.hpp"

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
    const std::size_t stages = times.size() / passes.size();
    for (std::size_t c = 0; c < passes.size(); ++c) times[c * stages + stage].passes = passes[c];
    times[stage].sync = sync;
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

class InterleavedStages : public StageRelaxation {
 public:
  // `inner`: those of stages that know nothing of the vocabulary, shared by all of its strategies.
  InterleavedStages(const Problem& problem, const Vocab& vocab, KnownWorks& inner)
      : StageRelaxation(problem, vocab), inner_(inner) {
    if (chunks_ > kMostChunks) throw TooHard("the search knows 16 chunks a stage");
    layouts_ = chunks_ == 1 ? problem.layouts() : 1;
    for (const bool with_sync : {false, true})
      busy_[with_sync].weights.assign(chunks_, Weights::of_each(kPassKinds, problem.micro_batches, with_sync));
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

  // Clears large caches that are soon filled again.
  void forget() {
    for (ChunkWeights& pricing : busy_)
      for (auto& [key, knapsack] : pricing.knapsack) knapsack->forget();
  }

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
      std::vector<int> order = layouts_of(layouts);
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

 private:
  static constexpr long kMostListed = 1'000'000;  // counts looked at: some 0.1 s
  static constexpr int kMostMoments = 4;          // tried one after the other before all at once

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

  // Strategies' numbers count on by the chunk; those of `more` come last.
  int id(int chunk, int strategy) const { return chunk * static_cast<int>(problem_.strategies.size()) + strategy; }
  int layout(int id) const {
    const int count = static_cast<int>(problem_.strategies.size());
    return std::min(id / count * layouts_ + (layouts_ > 1 ? problem_.strategies[id % count].layout : 0),
                    chunks_ * layouts_);
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
      for (int k = 0; k < static_cast<int>(problem_.strategies.size()); ++k) {
        const Part& part = problem_.strategies[k];
        choices.push_back({part.states + count * part.activation, weights.of(part.time), part.workspace, id(chunk, k),
                           layout(id(chunk, k)), chunk});
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
        if (chunk == chunks_ - 1)
          prices.leave[end] = prices.change[end][all - 1] = leaves;
        else  // there is one layout
          prices.change[end][end + 1] = leaves + price(entry(question.stage, chunk + 1), 0, next);
        for (int other = 0; other < layouts_ && layouts_ > 1; ++other)
          prices.change[end][other] = weights.of(problem_.change[g][other]);
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
      LayoutSet used = 0;
      for (const auto& [id, layers] : mix.counts) used |= bit(layout(id));
      InterleavedPoint point = point_of(question, mix.counts, walks.order(used, budget));
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

  double fixed(const ChunkWeights& pricing, int stage) const {
    double sum = 0;
    for (int chunk = 0; chunk < chunks_; ++chunk) sum += pricing.of(chunk).of(part(stage, chunk).time);
    return sum;
  }

  InterleavedPoint point_of(const Question& question, const std::vector<Count>& counts,
                            const std::vector<int>& order) const {
    const int count = static_cast<int>(problem_.strategies.size());
    InterleavedPoint point{{}, 0, std::vector<std::vector<int>>(chunks_)};
    for (const int layout : order)
      for (const auto& [id, layers] : counts)
        if (this->layout(id) == layout) {
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

  KnownWorks& inner_;
  int layouts_;
  std::array<ChunkWeights, 2> busy_;  // by whether sync counts
  KnownWorks works_;                  // of the first and the last stage
};

}  // namespace galvatron
