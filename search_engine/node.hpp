// A node of the branch-and-bound tree of column generation: limits on the layers of each chunk and stage, and the
// vocabulary strategies that are left.
#pragma once

#include <algorithm>
#include <vector>

#include "critical_path.hpp"

namespace galvatron {

// Plans in which the numbers of each chunk's and of each stage's layers are within limits, under some strategies of the
// vocabulary.
struct Node {
  double bound = 0;
  std::vector<int> vocab_cases;                       // a vocabulary strategy each; rising
  std::vector<int> fewest, most;                      // layers of each chunk
  std::vector<int> fewest_of, most_of;                // layers of each stage
  double sum = 0;                                     // bound by the weights alone
  PathWeights weights{0, 0};                          // behind it
  std::vector<double> mean, spread;                   // of each chunk's layers in the plans of the saddle point
  std::vector<double> mean_of, spread_of;             // of each stage's
  std::vector<int> latest;                            // layers of each chunk in the last priced plan, or likely ones

  // `plan`: each chunk's layers, and the number of the vocabulary strategy.
  bool has(const std::vector<int>& plan) const {
    if (!std::binary_search(vocab_cases.begin(), vocab_cases.end(), plan.back())) return false;
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
