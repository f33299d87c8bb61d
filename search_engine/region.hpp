// A part of the divisions that a game is played over.
#pragma once

#include <vector>

#include "graph.hpp"

namespace galvatron {

// Divisions in which the numbers of each chunk's and of each stage's layers are within limits.
struct Region {
  double bound;
  std::size_t game;
  std::vector<int> fewest, most;        // layers of each chunk
  std::vector<int> fewest_of, most_of;  // layers of each stage
  double sum = 0;                 // bound by the weights alone
  PathWeights weights;            // behind it
  std::vector<double> mean, spread;        // of each chunk's layers in the mixture of plans
  std::vector<double> mean_of, spread_of;  // of each stage's
  std::vector<int> latest;                 // the last answer

  bool has(const std::vector<int>& division) const {
    std::vector<int> of(fewest_of.size(), 0);
    for (std::size_t at = 0; at < division.size(); ++at) {
      if (division[at] < fewest[at] || division[at] > most[at]) return false;
      of[at % of.size()] += division[at];
    }
    for (std::size_t stage = 0; stage < of.size(); ++stage)
      if (of[stage] < fewest_of[stage] || of[stage] > most_of[stage]) return false;
    return true;
  }
};

}  // namespace galvatron
