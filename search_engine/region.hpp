// A part of the divisions that a game is played over.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
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

  // Its plans mix to so many layers of each chunk, and to these shares of the games. Means that are no whole numbers
  // are unsure.
  void is_at(const std::vector<double>& layers, const std::vector<double>& shares) {
    auto unsure = [](double number) { return std::abs(number - std::round(number)); };
    mean = layers, spread.clear(), spread_of.clear();
    mean_of.assign(fewest_of.size(), 0);
    for (std::size_t at = 0; at < mean.size(); ++at) {
      mean[at] = std::max<double>(fewest[at], std::min<double>(most[at], mean[at]));
      mean_of[at % mean_of.size()] += mean[at];
      spread.push_back(unsure(mean[at]));
    }
    for (const double layers_of_stage : mean_of) spread_of.push_back(unsure(layers_of_stage));
    mean_game = spread_game = 0;
    for (std::size_t game = 0; game < shares.size(); ++game) mean_game += shares[game] * static_cast<double>(game);
    for (std::size_t game = 0; game < shares.size(); ++game)
      spread_game += shares[game] * std::abs(static_cast<double>(game) - mean_game);
  }

  // A division near the mean.
  std::vector<int> rounded(int layers) const {
    constexpr double kWhole = 1e-6;  // a number is rounded up by so much
    std::vector<int> division, order(mean.size());
    for (const double some : mean) division.push_back(std::max(1, static_cast<int>(some + kWhole)));
    int left = layers - std::accumulate(division.begin(), division.end(), 0);
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(),
              [&](int a, int b) { return mean[a] - division[a] > mean[b] - division[b]; });
    if (left < 0) std::reverse(order.begin(), order.end());
    for (std::size_t i = 0; left != 0; i = (i + 1) % order.size()) {
      const int step = left > 0 ? 1 : -1;
      if (division[order[i]] + step < 1) continue;
      division[order[i]] += step, left -= step;
    }
    return division;
  }

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
