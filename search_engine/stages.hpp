// The stages of a pipeline, each with what it may choose from: bounds and optima of one stage, for any weighting of its
// forward, backward and sync times.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <vector>

#include "common.hpp"
#include "counts.hpp"
#include "schedule.hpp"
#include "walks.hpp"

namespace galvatron {

// What a layer strategy, or the vocabulary layers of a stage, cost there. Times in ms, memory in MiB.
struct Part {
  StageTime time;
  double states, activation, working;  // activation: of each micro-batch in flight
  int group = 0;                       // of layer strategies: between strategies of one group a change is free
};

struct Change {
  double forward = 0, backward = 0;  // ms of one micro-batch
};

// One strategy of the vocabulary layers; with one stage, `first` is both of them and `last` is nothing.
struct Vocab {
  Part first, last;
  std::vector<Change> enter, leave;  // by group: from the embedding, to the head
};

struct PipelineTables {
  int layers, stages, micro_batches;
  bool gpipe;
  std::vector<Part> strategies;
  std::vector<std::vector<Change>> change;  // [group before][group after]
  std::vector<Change> enter, leave;         // by group: from, to the edge of a stage
  std::vector<Vocab> vocabs;
  std::vector<int> in_flight;  // micro-batches whose activations a stage holds
  std::vector<double> send;    // ms from stage s to s + 1
  double budget;               // MiB a device
};

// How often a path through the schedule runs through a stage's forward, backward and sync.
struct Weights {
  double forward, backward, sync;

  double of(const StageTime& time) const {
    return forward * time.forward + backward * time.backward + sync * time.sync;
  }
  double of(const Change& change) const { return forward * change.forward + backward * change.backward; }
  bool operator<(const Weights& other) const {
    return std::tie(forward, backward, sync) < std::tie(other.forward, other.backward, other.sync);
  }
};

// A stage's layers settled: how many take which strategy, the groups in order, and the times of the whole stage.
struct StagePoint {
  StageTime time;
  std::vector<Count> counts;
  std::vector<int> order;
};

// Choices by weighting and micro-batches in flight; shared by all stages and vocabulary strategies.
class ChoiceCache {
 public:
  explicit ChoiceCache(const PipelineTables& tables) : tables_(tables) {
    for (std::size_t k = 0; k < tables.strategies.size(); ++k)
      if (!beaten(static_cast<int>(k))) useful_.push_back(static_cast<int>(k));
  }

  AlikeLayers& weighted(int in_flight, const Weights& weights) {
    std::unique_ptr<AlikeLayers>& layers = weighted_[{in_flight, weights}];
    if (!layers) layers = std::make_unique<AlikeLayers>(undominated(choices(in_flight, weights)));
    return *layers;
  }

  // With every choice that some weighting might want.
  AlikeLayers complete(int in_flight, const Weights& weights) const { return AlikeLayers(choices(in_flight, weights)); }

  // Least cost of one layer, whatever memory it takes.
  double cheapest(const Weights& weights) const {
    double least = kInfinity;
    for (const int k : useful_) least = std::min(least, weights.of(tables_.strategies[k].time));
    return least;
  }

  const std::vector<int>& useful() const { return useful_; }

 private:
  std::vector<Choice> choices(int in_flight, const Weights& weights) const {
    std::vector<Choice> result;
    for (const int k : useful_) {
      const Part& part = tables_.strategies[k];
      result.push_back({part.states + in_flight * part.activation, weights.of(part.time), part.working, k, part.group});
    }
    return result;
  }

  // Whether another strategy of the group is as good in everything (of equal ones, the first stays).
  bool beaten(int k) const {
    const Part& part = tables_.strategies[k];
    for (int other = 0; other < static_cast<int>(tables_.strategies.size()); ++other) {
      const Part& rival = tables_.strategies[other];
      if (other == k || rival.group != part.group || rival.time.forward > part.time.forward ||
          rival.time.backward > part.time.backward || rival.time.sync > part.time.sync ||
          rival.states > part.states || rival.activation > part.activation || rival.working > part.working)
        continue;
      const bool equal = rival.time.forward == part.time.forward && rival.time.backward == part.time.backward &&
                         rival.time.sync == part.time.sync && rival.states == part.states &&
                         rival.activation == part.activation && rival.working == part.working;
      if (!equal || other < k) return true;
    }
    return false;
  }

  const PipelineTables& tables_;
  std::vector<int> useful_;
  std::map<std::pair<int, Weights>, std::unique_ptr<AlikeLayers>> weighted_;
};

// The stages of one pipeline under one vocabulary strategy. Everything asked is remembered.
class Stages {
 public:
  Stages(const PipelineTables& tables, const Vocab& vocab, ChoiceCache& cache)
      : tables_(tables), vocab_(vocab), cache_(cache), views_(tables.stages) {
    for (int stage = 0; stage < tables.stages; ++stage) {
      View& view = views_[stage];
      view.room = {tables.budget, 0};
      if (stage == 0) take_off(view, vocab.first, stage);
      if (stage > 0 && stage == tables.stages - 1) take_off(view, vocab.last, stage);
    }
  }

  // Times of a stage's vocabulary layers.
  const StageTime& fixed(int stage) const { return views_[stage].fixed; }
  const Room& room(int stage) const { return views_[stage].room; }

  // Below every weighted time of a stage with so many layers.
  double bound(int stage, int layers, const Weights& weights) {
    Known& known = at(stage, layers, weights);
    if (known.bound < 0)
      known.bound = weights.of(fixed(stage)) + cache_.weighted(tables_.in_flight[stage], weights)
                                                   .bound(layers, room(stage), walks(stage, weights));
    return known.bound;
  }

  // The least weighted time itself, and the point that has it; infinite where nothing fits.
  double least(int stage, int layers, const Weights& weights, Poll& poll) {
    solve(stage, layers, weights, poll);
    return at(stage, layers, weights).exact;
  }

  const StagePoint& best(int stage, int layers, const Weights& weights, Poll& poll) {
    solve(stage, layers, weights, poll);
    return at(stage, layers, weights).point;
  }

  // All points whose weighted time is below the limit; false when there are more than `most`.
  bool points(int stage, int layers, const Weights& weights, double limit, std::size_t most,
              std::vector<StagePoint>& found, Poll& poll) {
    AlikeLayers choices = cache_.complete(tables_.in_flight[stage], weights);
    bool all = true;
    auto emit = [&](const std::vector<Count>& counts, GroupSet groups) {
      std::vector<int> order;
      for (int group = 0; group < groups_count(); ++group)
        if (groups >> group & 1) order.push_back(group);
      do {
        found.push_back(point(stage, counts, order));
        if (found.size() > most) return all = false;
      } while (std::next_permutation(order.begin(), order.end()));
      return true;
    };
    choices.enumerate(layers, room(stage), walks(stage, weights), limit - weights.of(fixed(stage)), emit, poll);
    return all;
  }

 private:
  struct View {
    StageTime fixed;
    Room room;
  };
  struct Known {
    double bound = -1, exact = -1;  // negative: not yet known
    StagePoint point;
  };

  int groups_count() const { return static_cast<int>(tables_.change.size()); }

  void take_off(View& view, const Part& part, int stage) const {
    view.fixed = part.time;
    view.room = {tables_.budget - part.states - tables_.in_flight[stage] * part.activation, part.working};
  }

  const std::vector<Change>& entry(int stage) const { return stage == 0 ? vocab_.enter : tables_.enter; }
  const std::vector<Change>& exit(int stage) const { return stage == tables_.stages - 1 ? vocab_.leave : tables_.leave; }

  Walks& walks(int stage, const Weights& weights) {
    const int role = (stage == 0 ? 1 : 0) + (stage == tables_.stages - 1 ? 2 : 0);
    std::unique_ptr<Walks>& walks = walks_[{role, weights}];
    if (walks) return *walks;
    GroupPrices prices;
    for (int a = 0; a < groups_count(); ++a) {
      prices.enter.push_back(weights.of(entry(stage)[a]));
      prices.leave.push_back(weights.of(exit(stage)[a]));
      prices.change.emplace_back();
      for (int b = 0; b < groups_count(); ++b) prices.change[a].push_back(weights.of(tables_.change[a][b]));
    }
    walks = std::make_unique<Walks>(std::move(prices));
    return *walks;
  }

  StagePoint point(int stage, const std::vector<Count>& counts, const std::vector<int>& order) const {
    StagePoint point{fixed(stage), counts, order};
    for (const auto& [id, layers] : counts) {
      const StageTime& time = tables_.strategies[id].time;
      point.time.forward += layers * time.forward;
      point.time.backward += layers * time.backward;
      point.time.sync += layers * time.sync;
    }
    auto pass = [&](const Change& change) {
      point.time.forward += change.forward;
      point.time.backward += change.backward;
    };
    pass(entry(stage)[order.front()]);
    for (std::size_t i = 1; i < order.size(); ++i) pass(tables_.change[order[i - 1]][order[i]]);
    pass(exit(stage)[order.back()]);
    return point;
  }

  void solve(int stage, int layers, const Weights& weights, Poll& poll) {
    if (at(stage, layers, weights).exact >= 0) return;
    Walks& walk = walks(stage, weights);
    const Mix mix =
        cache_.weighted(tables_.in_flight[stage], weights).solve(layers, room(stage), walk, kInfinity, poll);
    Known& known = at(stage, layers, weights);
    known.exact = kInfinity;
    if (mix.counts.empty()) return;
    GroupSet used = 0;
    for (const auto& [id, n] : mix.counts) used |= GroupSet{1} << tables_.strategies[id].group;
    known.point = point(stage, mix.counts, walk.order(used));
    known.exact = weights.of(known.point.time);
  }

  Known& at(int stage, int layers, const Weights& weights) { return known_[{stage, layers, weights}]; }

  struct Key {
    int stage, layers;
    Weights weights;
    bool operator<(const Key& other) const {
      return std::tie(stage, layers, weights) < std::tie(other.stage, other.layers, other.weights);
    }
  };

  const PipelineTables& tables_;
  const Vocab& vocab_;
  ChoiceCache& cache_;
  std::vector<View> views_;
  std::map<std::pair<int, Weights>, std::unique_ptr<Walks>> walks_;
  std::map<Key, Known> known_;
};

}  // namespace galvatron
