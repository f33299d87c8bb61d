// The search problem of one family of plans: the arrays that the Python side hands over.
// README.md, step 1.
#pragma once

#include <algorithm>
#include <array>
#include <functional>
#include <stdexcept>
#include <vector>

#include "knapsack_relaxation.hpp"
#include "schedule.hpp"

namespace galvatron {

// Cost of a layer strategy, or of the vocabulary layers of a stage. Times in ms, memory in MiB.
struct Part {
  StageTime time;
  double states, activation;  // activation: of each micro-batch in flight
  Workspace workspace;
  int layout = 0;  // of layer strategies: between strategies of one layout a change is free
};

// In the order in which Python gives them.
inline std::vector<double> numbers_of(const Part& part) {
  std::vector<double> numbers(part.time.passes.begin(), part.time.passes.end());
  numbers.insert(numbers.end(), {part.time.sync, part.states, part.activation});
  numbers.insert(numbers.end(), part.workspace.begin(), part.workspace.end());
  return numbers;
}

// One strategy of the vocabulary layers; with one stage, `first` is both of them and `last` is nothing.
struct Vocab {
  Part first, last;
  std::vector<PassTimes> enter, leave;  // by layout: from the embedding, to the head
};

// Consecutive layers: those of a stage.
struct Span {
  int first, layers;

  int end() const { return first + layers; }
};

// Prices that differ by boundary: between layers of one type, or of two.
template <class Price>
struct ByBoundary {
  Price inside, between;

  const Price& at(bool is_between) const { return is_between ? between : inside; }
};

struct Problem {
  int layers, stages, micro_batches;
  Schedule passes;          // of each stage
  std::vector<int> starts;  // first layer of each type, in order, and the number of layers
  int most_first;           // max layers of stage 0
  std::vector<Part> strategies;
  std::vector<int> types;                           // of each layout; strategies of a layout are of its type
  std::vector<std::vector<PassTimes>> change;       // [layout before][layout after]
  ByBoundary<std::vector<PassTimes>> enter, leave;  // by layout: from, to the edge of a stage
  std::vector<Vocab> vocabs;
  Part middle;                                      // of a stage without vocabulary layers, besides its layers
  Part later;                                       // of its second chunk, and of a further one of any stage
  std::vector<std::vector<std::vector<int>>> held;  // of each stage: micro-batches in flight of each of its chunks, at
                                                    // each moment at which they may take most
  std::vector<int> in_flight;                       // micro-batches whose activations a stage holds
  ByBoundary<std::vector<double>> send;             // ms from a stage to the next, by the type of the layer after
  double budget;                                    // MiB a device

  int layouts() const { return static_cast<int>(change.size()); }
  int type_count() const { return static_cast<int>(starts.size()) - 1; }

  int type_of(int layer) const {
    int type = 0;
    while (layer >= starts[type + 1]) ++type;
    return type;
  }

  // Whether another type starts at this layer.
  bool is_between(int layer) const { return layer > 0 && layer < layers && starts[type_of(layer)] == layer; }

  // Cost of a stage without its layers.
  const Part& fixed_part(const Vocab& vocab, int stage) const {
    return stage == 0 ? vocab.first : stage == stages - 1 ? vocab.last : middle;
  }

  // Time of the hand-over to a stage that starts with this layer.
  double send_to(int layer) const { return send.at(is_between(layer))[type_of(layer)]; }

  double send_after(Span span) const { return span.end() < layers ? send_to(span.end()) : 0; }

  // The layers of each stage.
  std::vector<Span> spans(const std::vector<int>& division) const {
    std::vector<Span> spans;
    for (const int count : division) spans.push_back({spans.empty() ? 0 : spans.back().end(), count});
    return spans;
  }

  double least_send() const {
    double least = send.inside[0];
    for (int type = 0; type < type_count(); ++type) {
      least = std::min(least, send.inside[type]);
      if (type > 0) least = std::min(least, send.between[type]);
    }
    return least;
  }

  Layers layers_of(Span span) const {
    Layers layers;
    layers.first_type = type_of(span.first);
    layers.last_type = type_of(span.end() - 1);
    for (int type = layers.first_type; type <= layers.last_type; ++type)
      layers.of[type] = std::min(span.end(), starts[type + 1]) - std::max(span.first, starts[type]);
    return layers;
  }
};

// Vocabulary strategies that no other one beats in everything (of equal ones, the first stays).
inline std::vector<int> useful_vocabs(const Problem& problem) {
  std::vector<std::vector<double>> rows;
  for (const Vocab& vocab : problem.vocabs) {
    rows.emplace_back();
    for (const Part* part : {&vocab.first, &vocab.last})
      for (const double number : numbers_of(*part)) rows.back().push_back(number);
    for (const std::vector<PassTimes>* changes : {&vocab.enter, &vocab.leave})
      for (const PassTimes& change : *changes) rows.back().insert(rows.back().end(), change.begin(), change.end());
  }
  std::vector<int> kept;
  for (int row = 0; row < static_cast<int>(rows.size()); ++row) {
    auto beats = [&](int other) {
      const bool as_good = std::equal(rows[other].begin(), rows[other].end(), rows[row].begin(), std::less_equal<>());
      return as_good && (other < row || rows[other] != rows[row]);
    };
    bool beaten = std::any_of(kept.begin(), kept.end(), beats);
    for (int other = row + 1; !beaten && other < static_cast<int>(rows.size()); ++other) beaten = beats(other);
    if (!beaten) kept.push_back(row);
  }
  return kept;
}

// The fastest plan that was found, or the one of least memory.
struct PlanFound {
  double cost = kInfinity;      // step time, ms; or MiB a device
  int vocab = -1;               // number of the vocabulary strategy; -1: nothing found
  std::vector<int> division;    // layers of each stage; of several chunks: of each chunk, in the layers' order
  std::vector<int> strategies;  // of each layer
};

// The search of one problem; its methods may be called from several threads.
class Search {
 public:
  virtual ~Search() = default;

  // A lower bound of the step time, in ms, cheap; infinite where nothing fits.
  virtual double bound(WorkBudget& budget) = 0;

  // Tighter lower bound; bounds above `limit` stay cheap.
  virtual double tight_bound(double limit, WorkBudget& budget) = 0;

  // The optimum, if it costs less than `limit`; `proven`: nothing costs less than that. Given up after simulating
  // `effort` passes; then the best one found.
  virtual PlanFound solve(double limit, double gap, long effort, double& proven, WorkBudget& budget) = 0;

  // The pipeline that fits in least memory. Only those with one chunk a stage have it.
  virtual PlanFound least_memory(WorkBudget&) const { throw std::invalid_argument("passes: several chunks a stage"); }
};

}  // namespace galvatron
