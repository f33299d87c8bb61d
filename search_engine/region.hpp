// A part of the divisions that a game is played over.
#pragma once

#include <algorithm>
#include <vector>

#include "graph.hpp"

namespace galvatron {

// Plans in which the numbers of each chunk's and of each stage's layers are within limits, under some strategies of the
// vocabulary.
struct Region {
  double bound = 0;
  std::vector<int> games;               // a strategy of the vocabulary each; rising
  std::vector<int> fewest, most;        // layers of each chunk
  std::vector<int> fewest_of, most_of;  // layers of each stage
  double sum = 0;                 // bound by the weights alone
  PathWeights weights{0, 0};      // behind it
  std::vector<double> mean, spread;        // of each chunk's layers in the mixture of plans
  std::vector<double> mean_of, spread_of;  // of each stage's
  double mean_game = 0, spread_game = 0;   // of the games' numbers
  std::vector<int> latest;                 // the last answer, or what is likely

  // `plan`: each chunk's layers, and the game.
  bool has(const std::vector<int>& plan) const {
    if (!std::binary_search(games.begin(), games.end(), plan.back())) return false;
    std::vector<int> of(fewest_of.size(), 0);
    for (std::size_t at = 0; at + 1 < plan.size(); ++at) {
      if (plan[at] < fewest[at] || plan[at] > most[at]) return false;
      of[at % of.size()] += plan[at];
    }
    for (std::size_t stage = 0; stage < of.size(); ++stage)
      if (of[stage] < fewest_of[stage] || of[stage] > most_of[stage]) return false;
    return true;
  }
};

}  // namespace galvatron
