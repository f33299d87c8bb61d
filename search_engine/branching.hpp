// The nodes of the branch-and-bound tree of column generation, and how they are split.
// README.md, step 7.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "critical_path.hpp"
#include "limits.hpp"
#include "restricted_master.hpp"

namespace galvatron {

// Plans in which the numbers of each chunk's and of each stage's layers are within limits, under some strategies of the
// vocabulary.
struct Node {
  int layers;  // of all stages
  double bound = kInfinity;
  std::vector<int> vocab_cases;             // a vocabulary strategy each; rising
  std::vector<int> fewest, most;            // layers of each chunk
  std::vector<int> fewest_of, most_of;      // layers of each stage
  double sum = 0;                           // bound by the weights alone
  PathWeights weights;                      // of the paths that give this sum
  std::vector<Spread> spreads, spreads_of;  // of each chunk's, and each stage's layers over the master's plans
  std::vector<int> latest;                  // layers of each chunk in the last priced plan, or likely ones

  // All plans, without vocabulary strategies.
  Node(int layers, int stages, int chunks)
      : layers(layers),
        fewest(chunks, 1),
        most(chunks, layers - chunks + 1),
        fewest_of(stages, chunks / stages),
        most_of(stages, layers) {}

  // `plan`: each chunk's layers, and the number of the vocabulary strategy.
  bool has(const std::vector<int>& plan) const {
    if (!std::binary_search(vocab_cases.begin(), vocab_cases.end(), plan.back())) return false;
    for (std::size_t at = 0; at < fewest.size(); ++at)
      if (plan[at] < fewest[at] || plan[at] > most[at]) return false;
    for (std::size_t stage = 0; stage < fewest_of.size(); ++stage) {
      const int layers = layers_of(plan, stage);
      if (layers < fewest_of[stage] || layers > most_of[stage]) return false;
    }
    return true;
  }

  // Keeps how much the master's plans differ.
  void compare(const MasterSolution& solution) {
    spreads.clear(), spreads_of.clear();
    for (std::size_t at = 0; at < fewest.size(); ++at)
      spreads.push_back(solution.spread([&](const std::vector<int>& plan) { return plan[at]; }));
    for (std::size_t stage = 0; stage < fewest_of.size(); ++stage)
      spreads_of.push_back(solution.spread([&](const std::vector<int>& plan) { return layers_of(plan, stage); }));
  }

  // Two halves, where the plans of the saddle point differ most; nothing: a single division under one vocabulary
  // strategy.
  std::vector<Node> halves() const {
    std::vector<Node> halves{*this, *this};
    if (!by_stage(halves[0], halves[1]) && !by_chunk(halves[0], halves[1]) && !by_vocab_cases(halves[0], halves[1]))
      halves.clear();
    return halves;
  }

 private:
  static constexpr double kSure = 0.02;      // layers by which the plans of a saddle point differ
  static constexpr double kAnyFree = 1e-6;   // layers' spread that counts for the share of layers that are free
  static constexpr double kNoSpread = 1e-9;  // layers

  int layers_of(const std::vector<int>& plan, std::size_t stage) const {
    int layers = 0;
    for (std::size_t at = stage; at < fewest.size(); at += fewest_of.size()) layers += plan[at];
    return layers;
  }

  // On the layers of the stage in which the plans of the saddle point differ most, if they differ.
  bool by_stage(Node& below, Node& above) const {
    double widest = kSure;
    int chosen = -1, middle = 0;
    for (std::size_t s = 0; s < spreads_of.size(); ++s) {
      const int mean = static_cast<int>(spreads_of[s].mean);
      if (spreads_of[s].deviation <= widest || mean < fewest_of[s] || mean >= most_of[s]) continue;
      widest = spreads_of[s].deviation, chosen = static_cast<int>(s), middle = mean;
    }
    if (chosen < 0) return false;
    below.most_of[chosen] = middle, above.fewest_of[chosen] = middle + 1;
    return true;
  }

  bool by_chunk(Node& below, Node& above) const {
    double widest = -1;
    int chosen = -1, middle = 0;
    for (std::size_t at = 0; at < fewest.size(); ++at) {
      const int free = most[at] - fewest[at];
      if (free == 0) continue;
      const Spread spread = spreads.empty() ? Spread{} : spreads[at];
      const double width = spread.deviation + kAnyFree * free / layers;
      if (width <= widest) continue;
      widest = width, chosen = static_cast<int>(at);
      middle = spread.deviation > kNoSpread ? static_cast<int>(spread.mean) : latest[at];
      middle = std::min(std::max(middle, fewest[at]), most[at] - 1);
    }
    if (chosen < 0) return false;
    below.most[chosen] = middle, above.fewest[chosen] = middle + 1;
    return true;
  }

  bool by_vocab_cases(Node& below, Node& above) const {
    if (vocab_cases.size() < 2) return false;
    const auto middle = vocab_cases.begin() + vocab_cases.size() / 2;
    below.vocab_cases.assign(vocab_cases.begin(), middle), above.vocab_cases.assign(middle, vocab_cases.end());
    return true;
  }
};

}  // namespace galvatron
