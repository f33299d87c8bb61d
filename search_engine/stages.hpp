// The stages of a pipeline, each with what it may choose from: bounds and optima of one stage, for any weighting of its
// forward, backward and sync times.
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <vector>

#include "common.hpp"
#include "counts.hpp"
#include "cuts.hpp"
#include "tables.hpp"
#include "walks.hpp"

namespace galvatron {

// A stage's layers settled: how many take which strategy, the groups in order, and the times of the whole stage.
struct StagePoint {
  StageTime time;
  std::vector<Count> counts;
  std::vector<int> order;
};

// A stage's best point for one number of layers.
struct Solved {
  double cost = kInfinity;
  StagePoint point;
};

// Choices, and what is solved, by weights and micro-batches in flight; shared by all stages and vocabulary strategies.
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

  std::map<int, Solved>& inner(int in_flight, const Weights& weights) { return inner_[{in_flight, weights}]; }

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
          rival.time.backward > part.time.backward || rival.time.sync > part.time.sync || rival.states > part.states ||
          rival.activation > part.activation || rival.working > part.working)
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
  std::map<std::pair<int, Weights>, std::map<int, Solved>> inner_;
};

// The stages of one pipeline under one vocabulary strategy. Everything asked is remembered.
class Stages {
 public:
  Stages(const PipelineTables& tables, const Cuts& cuts, const Vocab& vocab, ChoiceCache& cache)
      : tables_(tables), cuts_(cuts), vocab_(vocab), cache_(cache), views_(tables.stages) {
    for (int stage = 0; stage < tables.stages; ++stage) {
      View& view = views_[stage];
      view.room = {tables.budget, 0};
      if (stage == 0) take_off(view, vocab.first, stage);
      if (stage > 0 && stage == tables.stages - 1) take_off(view, vocab.last, stage);
    }
  }

  // Times of a stage's vocabulary layers.
  const StageTime& fixed(int stage) const { return views_[stage].fixed; }

  // Below every weighted time of a stage with so many layers.
  double bound(int stage, int layers, Weighting weighting) {
    const Weights& weights = cuts_.weights(stage, weighting);
    return weights.of(fixed(stage)) +
           choices(stage, weighting).bound(layers, views_[stage].room, walks(stage, weighting));
  }

  // The least weighted time itself; infinite where nothing fits.
  double least(int stage, int layers, Weighting weighting, Poll& poll) {
    return weighting == kNowhere ? 0 : solved(stage, layers, weighting, poll).cost;
  }

  // The point that has it.
  const StagePoint& best(int stage, int layers, Weighting weighting, Poll& poll) {
    return solved(stage, layers, weighting, poll).point;
  }

  // All points whose weighted time is below the limit; false when there are more than `most`.
  bool points(int stage, int layers, Weighting weighting, double limit, std::size_t most,
              std::vector<StagePoint>& found, Poll& poll) {
    AlikeLayers all = cache_.complete(tables_.in_flight[stage], cuts_.weights(stage, weighting));
    auto emit = [&](const std::vector<Count>& counts, GroupSet groups) {
      std::vector<int> order;
      for (int group = 0; group < tables_.groups(); ++group)
        if (groups >> group & 1) order.push_back(group);
      do found.push_back(point(stage, counts, order));
      while (found.size() <= most && std::next_permutation(order.begin(), order.end()));
      return found.size() <= most;
    };
    const double own = limit - cuts_.weights(stage, weighting).of(fixed(stage));
    all.enumerate(layers, views_[stage].room, walks(stage, weighting), own, emit, poll);
    return found.size() <= most;
  }

 private:
  struct View {
    StageTime fixed;
    Room room;
    std::array<AlikeLayers*, kWeightings> choices{};
    std::array<std::unique_ptr<Walks>, kWeightings> walks;
    std::array<std::map<int, Solved>, kWeightings> solved;  // by layers
  };

  void take_off(View& view, const Part& part, int stage) const {
    view.fixed = part.time;
    view.room = {tables_.budget - part.states - tables_.in_flight[stage] * part.activation, part.working};
  }

  const std::vector<Change>& entry(int stage) const { return stage == 0 ? vocab_.enter : tables_.enter; }
  const std::vector<Change>& exit(int stage) const {
    return stage == tables_.stages - 1 ? vocab_.leave : tables_.leave;
  }

  AlikeLayers& choices(int stage, Weighting weighting) {
    AlikeLayers*& known = views_[stage].choices[weighting];
    if (!known) known = &cache_.weighted(tables_.in_flight[stage], cuts_.weights(stage, weighting));
    return *known;
  }

  Walks& walks(int stage, Weighting weighting) {
    std::unique_ptr<Walks>& walks = views_[stage].walks[weighting];
    if (walks) return *walks;
    const Weights& weights = cuts_.weights(stage, weighting);
    GroupPrices prices;
    for (int a = 0; a < tables_.groups(); ++a) {
      prices.enter.push_back(weights.of(entry(stage)[a]));
      prices.leave.push_back(weights.of(exit(stage)[a]));
      prices.change.emplace_back();
      for (int b = 0; b < tables_.groups(); ++b) prices.change[a].push_back(weights.of(tables_.change[a][b]));
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

  // Stages between the first and the last know nothing of the vocabulary, so what is solved there is shared.
  const Solved& solved(int stage, int layers, Weighting weighting, Poll& poll) {
    const bool inner = stage > 0 && stage < tables_.stages - 1;
    auto& known = inner ? cache_.inner(tables_.in_flight[stage], cuts_.weights(stage, weighting))
                        : views_[stage].solved[weighting];
    const auto [place, fresh] = known.try_emplace(layers);
    Solved& solved = place->second;
    if (!fresh) return solved;
    Walks& walk = walks(stage, weighting);
    const Mix mix = choices(stage, weighting).solve(layers, views_[stage].room, walk, kInfinity, poll);
    if (mix.counts.empty()) return solved;
    GroupSet used = 0;
    for (const auto& [id, n] : mix.counts) used |= GroupSet{1} << tables_.strategies[id].group;
    solved.point = point(stage, mix.counts, walk.order(used));
    solved.cost = cuts_.weights(stage, weighting).of(solved.point.time);
    return solved;
  }

  const PipelineTables& tables_;
  const Cuts& cuts_;
  const Vocab& vocab_;
  ChoiceCache& cache_;
  std::vector<View> views_;
};

}  // namespace galvatron
