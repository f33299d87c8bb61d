// Every pass of a step, each with what it waits for: the time of a step, and the longest path that makes it so long.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <utility>
#include <vector>

#include "common.hpp"
#include "passes.hpp"

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

class PassGraph {
 public:
  // Throws where stages wait for each other in a circle.
  explicit PassGraph(const PassLists& lists)
      : stages_(lists.stages()), chunks_(stages_ * lists.chunks()), last_(stages_, -1) {
    std::vector<std::vector<Pass>> passes(stages_);
    std::size_t all = 0;
    for (int stage = 0; stage < stages_; ++stage) {
      for (const Run& run : lists.of(stage))
        for (int time = 0; time < run.times; ++time)
          passes[stage].insert(passes[stage].end(), run.passes.begin(), run.passes.end());
      all += passes[stage].size();
      if (all > kMostPasses) throw TooHard("the search would simulate too many passes");
    }
    std::vector<std::size_t> place(stages_, 0);
    std::vector<std::vector<int>> forwards(chunks_), backwards(chunks_);  // nodes of each chunk, by micro-batch
    for (bool moved = true; moved;) {
      moved = false;
      for (int stage = 0; stage < stages_; ++stage)
        for (; place[stage] < passes[stage].size(); ++place[stage], moved = true) {
          const Pass& pass = passes[stage][place[stage]];
          const int at = pass.chunk * stages_ + stage;
          std::vector<int>& own = (pass.is_backward ? backwards : forwards)[at];
          const bool turns = pass.is_backward && at + 1 == chunks_;
          int input = -1;
          if (pass.is_backward || at > 0) {
            const std::vector<int>& before = turns              ? forwards[at]
                                             : pass.is_backward ? backwards[at + 1]
                                                                : forwards[at - 1];
            if (before.size() <= own.size()) break;
            input = before[own.size()];
          }
          const int number = static_cast<int>(nodes_.size());
          nodes_.push_back({at, last_[stage], input, pass.is_backward, !turns});
          own.push_back(number);
          last_[stage] = number;
        }
    }
    if (nodes_.size() < all) throw std::invalid_argument("passes: stages wait for each other in a circle");
    ends_.resize(all);
  }

  // Time of a step, and the path that takes it.
  double longest(const ChunkTimes& times, double link, PathWeights& path, Poll& poll) {
    poll.tick(nodes_.size());
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      const Node& node = nodes_[i];
      const double free = node.before < 0 ? 0 : ends_[node.before];
      ends_[i] = std::max(free, arrival(node, link)) + (node.is_backward ? times.backward : times.forward)[node.chunk];
    }
    int latest = 0;
    auto end = [&](int stage) { return ends_[last_[stage]] + times.sync[stage]; };
    for (int stage = 1; stage < stages_; ++stage)
      if (end(stage) > end(latest)) latest = stage;
    path = PathWeights(chunks_, stages_);
    path.sync[latest] = 1;
    for (int i = last_[latest]; i >= 0;) {
      const Node& node = nodes_[i];
      ++(node.is_backward ? path.backward : path.forward)[node.chunk];
      const bool waited = node.input >= 0 && (node.before < 0 || arrival(node, link) > ends_[node.before]);
      path.links += waited && node.travels;
      i = waited ? node.input : node.before;
    }
    return end(latest);
  }

 private:
  static constexpr std::size_t kMostPasses = 4'000'000;  // some 100 MiB

  struct Node {
    int chunk;          // among those of all stages
    int before, input;  // nodes: the stage's pass before it, and the one that it takes its input from; -1: none
    bool is_backward, travels;
  };

  double arrival(const Node& node, double link) const {
    return node.input < 0 ? 0 : ends_[node.input] + (node.travels ? link : 0);
  }

  int stages_, chunks_;
  std::vector<int> last_;  // node of each stage
  std::vector<Node> nodes_;
  std::vector<double> ends_;
};

}  // namespace galvatron
