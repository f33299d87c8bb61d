// The directed acyclic graph of a step's passes: the time of a step, and its critical path.
//
// A pass starts when its stage has finished the pass before it and its input has arrived. This is the only simulation
// of a step: predictions use it, too (`step_ms`).
// README.md, step 1.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <utility>
#include <vector>

#include "limits.hpp"
#include "schedule.hpp"

namespace galvatron {

// Numbers of each chunk's forward and backward, in the order of the layers, and of each stage's sync.
struct OfChunks {
  std::vector<double> forward, backward, sync;

  OfChunks(std::size_t chunks, std::size_t stages) : forward(chunks, 0), backward(chunks, 0), sync(stages, 0) {}

  // Adds a share of others.
  void add(const OfChunks& other, double share) {
    for (std::size_t at = 0; at < forward.size(); ++at) {
      forward[at] += share * other.forward[at];
      backward[at] += share * other.backward[at];
    }
    for (std::size_t stage = 0; stage < sync.size(); ++stage) sync[stage] += share * other.sync[stage];
  }
};

using ChunkTimes = OfChunks;  // ms, of one micro-batch

// How often a path runs through each of them, and over a link; or the mean of several paths.
struct PathWeights : OfChunks {
  double links = 0;

  using OfChunks::OfChunks;

  // Adds a share of another path.
  void add(const PathWeights& other, double share) {
    OfChunks::add(other, share);
    links += share * other.links;
  }

  // How long the path is.
  double of(const ChunkTimes& times, double link) const {
    double sum = links * link;
    for (std::size_t at = 0; at < forward.size(); ++at)
      sum += forward[at] * times.forward[at] + backward[at] * times.backward[at];
    for (std::size_t stage = 0; stage < sync.size(); ++stage) sum += sync[stage] * times.sync[stage];
    return sum;
  }

  friend bool operator==(const PathWeights& a, const PathWeights& b) {
    return a.forward == b.forward && a.backward == b.backward && a.sync == b.sync && a.links == b.links;
  }
};

inline PathWeights halfway(const PathWeights& a, const PathWeights& b) {
  PathWeights mean(a.forward.size(), a.sync.size());
  mean.add(a, 0.5), mean.add(b, 0.5);
  return mean;
}

class StepGraph {
 public:
  explicit StepGraph(const Schedule& lists)
      : lists_(lists), stages_(lists.stages()), chunks_(stages_ * lists.chunks()) {}
  // The work of simulating a step, in the unit of efforts.
  long work() const { return 1 + static_cast<long>(lists_.micro_batches()) * chunks_ / kNodesOfUnit; }

  // Time of a step. `chunks`: of all stages, first the first one of each, then the second of each, and so on. `send`:
  // from each to the next, and of the gradient back, at least one entry for each but the last. Throws where stages wait
  // for each other in a circle.
  double time(const std::vector<StageTime>& chunks, const std::vector<double>& send, WorkBudget& budget) {
    if (chunks_ == 1) return lists_.micro_batches() * (chunks[0].forward + chunks[0].backward) + chunks[0].sync;
    durations_.clear();
    for (const StageTime& chunk : chunks) durations_.push_back(chunk.forward), durations_.push_back(chunk.backward);
    links_.assign(send.begin(), send.begin() + (chunks_ - 1));
    run(budget);
    double latest = 0;
    for (int stage = 0; stage < stages_; ++stage) {
      double sync = 0;
      for (int at = stage; at < chunks_; at += stages_) sync += chunks[at].sync;
      latest = std::max(latest, ends_[last_[stage]] + sync);
    }
    return latest;
  }

  // Time of a step, and the path that takes it; each message takes as long.
  double longest(const ChunkTimes& times, double link, PathWeights& path, WorkBudget& budget) {
    durations_.clear();
    for (int at = 0; at < chunks_; ++at)
      durations_.push_back(times.forward[at]), durations_.push_back(times.backward[at]);
    links_.assign(chunks_ - 1, link);
    run(budget);
    int latest = 0;
    auto end = [&](int stage) { return ends_[last_[stage]] + times.sync[stage]; };
    for (int stage = 1; stage < stages_; ++stage)
      if (end(stage) > end(latest)) latest = stage;
    path = PathWeights(chunks_, stages_);
    path.sync[latest] = 1;
    for (int i = last_[latest]; i > 0;) {
      const Node& node = nodes_[i];
      ++(node.duration % 2 ? path.backward : path.forward)[node.duration / 2];
      const bool waited = ends_[node.input] + links_[node.link] > ends_[node.previous];
      path.links += waited && node.link < chunks_;
      i = waited ? node.input : node.previous;
    }
    return end(latest);
  }

 private:
  static constexpr long kNodesOfUnit = 4;                // pairs of passes
  static constexpr std::size_t kMostPasses = 5'000'000;  // of a step: some 150 MiB

  // Number 0 is the start of the step.
  struct Node {
    int previous, input;  // nodes: the stage's pass before it, and the one that it takes its input from
    int link, duration;   // their numbers in `links_` and `durations_`
  };

  void run(WorkBudget& budget) {
    if (nodes_.empty()) build();
    budget.tick(nodes_.size());
    links_.resize(chunks_), links_.push_back(0);  // the last two: no message
    for (std::size_t i = 1; i < nodes_.size(); ++i) {
      const Node& node = nodes_[i];
      ends_[i] = std::max(ends_[node.previous], ends_[node.input] + links_[node.link]) + durations_[node.duration];
    }
  }

  // When a time is first requested.
  void build() {
    last_.assign(stages_, 0), nodes_.resize(1);
    std::vector<std::vector<Pass>> passes(stages_);
    std::size_t all = 1;
    for (int stage = 0; stage < stages_; ++stage) {
      for (const Run& run : lists_.of(stage)) {
        all += run.times * run.passes.size();
        if (all > kMostPasses) throw TooHard("a step of more than 5000000 passes is not simulated");
        for (int time = 0; time < run.times; ++time)
          passes[stage].insert(passes[stage].end(), run.passes.begin(), run.passes.end());
      }
    }
    std::vector<std::size_t> next(stages_, 0);
    std::vector<std::vector<int>> forwards(chunks_), backwards(chunks_);  // nodes of each chunk, by micro-batch
    for (bool moved = true; moved;) {
      moved = false;
      for (int stage = 0; stage < stages_; ++stage)
        for (; next[stage] < passes[stage].size(); ++next[stage], moved = true) {
          const Pass& pass = passes[stage][next[stage]];
          const int at = pass.chunk * stages_ + stage;
          std::vector<int>& nodes = (pass.is_backward ? backwards : forwards)[at];
          const bool turns = pass.is_backward && at + 1 == chunks_, starts = !pass.is_backward && at == 0;
          int input = 0;
          if (!starts) {
            const std::vector<int>& sources = turns              ? forwards[at]
                                              : pass.is_backward ? backwards[at + 1]
                                                                 : forwards[at - 1];
            if (sources.size() <= nodes.size()) break;
            input = sources[nodes.size()];
          }
          const int number = static_cast<int>(nodes_.size());
          const int link = turns || starts ? chunks_ : pass.is_backward ? at : at - 1;
          nodes_.push_back({last_[stage], input, link, 2 * at + pass.is_backward});
          nodes.push_back(number);
          last_[stage] = number;
        }
    }
    if (nodes_.size() < all) throw std::invalid_argument("passes: stages wait for each other in a circle");
    ends_.resize(all);
  }

  const Schedule& lists_;
  int stages_, chunks_;
  std::vector<int> last_;    // node of each stage
  std::vector<Node> nodes_;  // each after those that it waits for
  std::vector<double> ends_;
  std::vector<double> links_, durations_;  // ms: from each chunk to the next; of each chunk's forward and backward
};

}  // namespace galvatron
