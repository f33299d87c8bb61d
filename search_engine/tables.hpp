// What a pipeline is made of: the arrays that the Python side hands over.
#pragma once

#include <vector>

#include "schedule.hpp"

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

  int groups() const { return static_cast<int>(change.size()); }
};

}  // namespace galvatron
