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

// The times of each chunk, in the order of the layers: first the first chunk of each stage, then the second of each,
// and so on. A stage's sync is that of its first chunk.
using ChunkTimes = std::vector<StageTime>;

inline void add(ChunkTimes& sums, const ChunkTimes& others, double share) {
  for (std::size_t at = 0; at < sums.size(); ++at) sums[at].add(others[at], share);
}

// How often a path runs through each chunk, and over a link; or the mean of several paths.
struct PathWeights {
  std::vector<Weights> chunks;
  double links = 0;

  // Adds a share of another path.
  void add(const PathWeights& other, double share) {
    galvatron::add(chunks, other.chunks, share);
    links += share * other.links;
  }

  // How long the path is.
  double of(const ChunkTimes& times, double link) const {
    double sum = links * link;
    for (std::size_t at = 0; at < chunks.size(); ++at) sum += chunks[at].of(times[at].passes);
    for (std::size_t at = 0; at < chunks.size(); ++at) sum += chunks[at].sync * times[at].sync;
    return sum;
  }

  friend bool operator==(const PathWeights& a, const PathWeights& b) {
    return a.chunks == b.chunks && a.links == b.links;
  }
};

inline PathWeights halfway(const PathWeights& a, const PathWeights& b) {
  PathWeights mean{std::vector<Weights>(a.chunks.size())};
  mean.add(a, 0.5), mean.add(b, 0.5);
  return mean;
}

class StepGraph {
 public:
  explicit StepGraph(const Schedule& lists) : lists_(lists), stages_(lists.stages()), chunks_(stages_ * lists.chunks) {}
  // The work of simulating a step, in the unit of efforts.
  long work() const { return 1 + static_cast<long>(lists_.micro_batches) * chunks_ / kNodesOfUnit; }

  // Time of a step. `send`: from each chunk to the next, and of the gradient back, at least one entry for each but the
  // last. Throws where stages wait for each other in a circle.
  double time(const ChunkTimes& times, const std::vector<double>& send, WorkBudget& budget) {
    if (chunks_ == 1) return lists_.micro_batches * total(times[0].passes) + times[0].sync;
    links_.assign(send.begin(), send.begin() + (chunks_ - 1));
    run(times, budget);
    return end(times, latest(times));
  }

  // Time of a step, and the path that takes it; each message takes as long.
  double longest(const ChunkTimes& times, double link, PathWeights& path, WorkBudget& budget) {
    links_.assign(chunks_ - 1, link);
    run(times, budget);
    const int stage = latest(times);
    path = {std::vector<Weights>(chunks_)};
    path.chunks[stage].sync = 1;
    for (int i = last_[stage]; i > 0;) {
      const Node& node = nodes_[i];
      ++path.chunks[node.chunk].passes[node.kind];
      const bool waited = ends_[node.input] + links_[node.link] > ends_[node.previous];
      path.links += waited && node.link < chunks_;
      i = waited ? node.input : node.previous;
    }
    return end(times, stage);
  }

 private:
  static constexpr long kNodesOfUnit = 4;                // micro-batches of a chunk
  static constexpr std::size_t kMostPasses = 5'000'000;  // of a step: some 150 MiB

  // Number 0 is the start of the step.
  struct Node {
    int previous, input;  // nodes: the stage's pass before it, and the one that it takes its input from
    int link;             // its number in `links_`
    int chunk;            // of all stages
    PassKind kind;
  };

  double end(const ChunkTimes& times, int stage) const { return ends_[last_[stage]] + times[stage].sync; }

  // The stage that ends last.
  int latest(const ChunkTimes& times) const {
    int latest = 0;
    for (int stage = 1; stage < stages_; ++stage)
      if (end(times, stage) > end(times, latest)) latest = stage;
    return latest;
  }

  void run(const ChunkTimes& times, WorkBudget& budget) {
    if (nodes_.empty()) build();
    budget.tick(nodes_.size());
    links_.resize(chunks_), links_.push_back(0);  // the last two: no message
    for (std::size_t i = 1; i < nodes_.size(); ++i) {
      const Node& node = nodes_[i];
      ends_[i] =
          std::max(ends_[node.previous], ends_[node.input] + links_[node.link]) + times[node.chunk].passes[node.kind];
    }
  }

  // When a time is first requested.
  void build() {
    last_.assign(stages_, 0), nodes_.resize(1);
    std::vector<std::vector<Pass>> passes(stages_);
    std::size_t all = 1;
    for (int stage = 0; stage < stages_; ++stage) {
      for (const Run& run : lists_.of[stage]) {
        all += run.times * run.passes.size();
        if (all > kMostPasses) throw TooHard("a step of more than 5000000 passes is not simulated");
        for (int time = 0; time < run.times; ++time)
          passes[stage].insert(passes[stage].end(), run.passes.begin(), run.passes.end());
      }
    }
    std::vector<std::size_t> next(stages_, 0);
    std::vector<ByKind<std::vector<int>>> chunk_nodes(chunks_);  // by micro-batch
    for (bool moved = true; moved;) {
      moved = false;
      for (int stage = 0; stage < stages_; ++stage)
        for (; next[stage] < passes[stage].size(); ++next[stage], moved = true) {
          const Pass& pass = passes[stage][next[stage]];
          const int at = pass.chunk * stages_ + stage;
          std::vector<int>& nodes = chunk_nodes[at][pass.kind];
          // Forwards go down to the last chunk, where backwards turn and come up again.
          const bool down = pass.kind == PassKind::forward, turns = !down && at + 1 == chunks_;
          const int source = down ? at - 1 : turns ? at : at + 1;
          int input = 0;
          if (source >= 0) {
            const std::vector<int>& sources = chunk_nodes[source][turns ? PassKind::forward : pass.kind];
            if (sources.size() <= nodes.size()) break;
            input = sources[nodes.size()];
          }
          const int link = turns || source < 0 ? chunks_ : std::min(at, source);
          nodes.push_back(static_cast<int>(nodes_.size()));
          nodes_.push_back({last_[stage], input, link, at, pass.kind});
          last_[stage] = nodes.back();
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
  std::vector<double> links_;  // ms: from each chunk to the next
};

}  // namespace galvatron
