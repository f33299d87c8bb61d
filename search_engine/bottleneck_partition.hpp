// The partition of the layers into stages that minimises the cost of the most expensive stage.
// README.md, step 5.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "limits.hpp"
#include "problem.hpp"

namespace galvatron {

struct Minimax {
  double bound = kInfinity;  // every division has a stage that costs as much
  double value = kInfinity;  // of this one's dearest stage
  std::vector<int> division;
};

constexpr std::size_t kStepsOfCost = 16;  // of WorkBudget, some 100 ns
// A search begins this share above a known bound, and continues in ever larger steps to so many times it, then to the
// end.
constexpr double kFirstStep = 1e-3, kFarthest = 10;

// The partition that minimises the largest `cost(stage, span, limit)`, to a relative tolerance. Costs above the limit
// may be estimates; none is below `known`. A span within another must not cost more: then each stage takes as many
// layers as the limit allows, if the next stage can take another.
template <class Cost>
Minimax least_dearest(const Problem& problem, Cost cost, double least, double tolerance, WorkBudget& budget) {
  Minimax best;
  std::vector<int> division(problem.stages);
  double even = 0;
  for (int stage = 0, first = 0; stage < problem.stages; first += division[stage++]) {
    division[stage] = (problem.layers - first) / (problem.stages - stage);
    if (least == 0) even = std::max(even, cost(stage, Span{first, division[stage]}, kInfinity));
  }
  // Whether some division has all stages below the limit; makes that the best. By all layers with which each stage may
  // end: a layer that the next stage cannot bear at all may have to go to this one.
  auto reach = [&](double limit) {
    std::vector<std::vector<int>> first(problem.stages + 1, std::vector<int>(problem.layers + 1, -1));  // [stages][end]
    first[0][0] = 0;
    for (int stage = 0; stage < problem.stages; ++stage) {
      int end = 0, filled = 0;
      for (int start = stage; start < problem.layers; ++start) {
        if (first[stage][start] < 0) continue;
        end = std::max(end, start);
        auto bears = [&] { return cost(stage, Span{start, end + 1 - start}, limit) < limit; };
        for (; end < problem.layers && bears(); ++end) budget.tick(kStepsOfCost);
        for (filled = std::max(filled, start); filled < end; ++filled) first[stage + 1][filled + 1] = start;
      }
    }
    int end = problem.layers;
    if (first[problem.stages][end] < 0) return false;
    best.value = 0;
    for (int stage = problem.stages; stage-- > 0;) {
      const int start = first[stage + 1][end];
      division[stage] = end - start;
      best.value = std::max(best.value, cost(stage, Span{start, end - start}, limit));
      end = start;
    }
    best.division = division;
    return true;
  };
  // The same, fast where each stage can bear the layer that it comes to.
  auto improve = [&](double limit) {
    double value = 0;
    int first = 0;
    for (int stage = 0; stage < problem.stages; ++stage) {
      const int most = problem.layers - first - (problem.stages - stage - 1);
      int n = 0, beyond = most + 1;  // the stage bears the one, not the other; looked for around its last number
      for (int step = 1, at = division[stage]; beyond - n > 1; step = std::min(2 * step, most)) {
        at = std::min(std::max(at, n + 1), beyond - 1);
        budget.tick(kStepsOfCost);
        (cost(stage, Span{first, at}, limit) < limit ? n : beyond) = at;
        at = beyond > most ? n + step : n == 0 ? beyond - step : (n + beyond) / 2;
      }
      if (!n) return reach(limit);
      value = std::max(value, cost(stage, Span{first, n}, limit));
      division[stage] = n;
      first += n;
    }
    if (first < problem.layers) return false;
    best.value = value;
    best.division = division;
    return true;
  };
  best.bound = least;
  for (double limit = (least > 0 ? least : even) * (1 + kFirstStep); !improve(limit);) {
    if (limit == kInfinity) return {};
    best.bound = limit;
    limit = limit < kFarthest * least ? limit + 4 * (limit - least) : kInfinity;
  }
  while (best.value - best.bound > tolerance * best.value) {
    const double middle = (best.bound + best.value) / 2;
    if (!(best.bound < middle && middle < best.value)) break;
    if (!improve(middle)) best.bound = middle;
  }
  return best;
}

}  // namespace galvatron
