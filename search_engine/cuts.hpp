// Lower bounds of a step's time: paths through the schedule that lean on one stage.
//
// Each path goes down the pipeline to a stage, stays there, and comes back up. In between it may go down to the last
// stage and back once or twice: while the stage waits for its first gradient, or for its last one. Every path's length
// is a weighted sum of the stages' times, so a bound of it is a sum of bounds of the stages.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "common.hpp"
#include "stages.hpp"

namespace galvatron {

constexpr Weights kNowhere{0, 0, 0}, kFirst{1, 1, 0}, kLast{1, 1, 1}, kBoth{2, 2, 1};

// A path that leans on a stage: how often it passes that stage, and the stages below it (towards the last).
struct Cut {
  Weights own;
  int below;  // index into kBelow
};

constexpr std::array<Weights, 4> kBelow{kNowhere, kFirst, kLast, kBoth};
constexpr std::array<int, 4> kTripsBelow{0, 2, 2, 4};  // messages per link below the stage

class Cuts {
 public:
  explicit Cuts(const PipelineTables& tables) : tables_(tables), of_(tables.stages) {
    const double m = tables.micro_batches;
    for (int stage = 0; stage < tables.stages; ++stage) {
      const double waiting = m - tables.in_flight[stage];  // forwards after the first backward
      if (tables.stages == 1) {
        of_[stage] = {{{m, m, 1}, 0}};
      } else if (tables.gpipe) {
        of_[stage] = {{{m, m, 1}, 1}, {{m, 1, 1}, 2}};
      } else {
        of_[stage] = {{{m, m, 1}, 0}, {{1 + waiting, m, 1}, 1}, {{m, 1 + waiting, 1}, 2}};
        if (waiting > 0) of_[stage].push_back({{1 + waiting, 1 + waiting, 1}, 3});
      }
    }
  }

  const std::vector<Cut>& of(int stage) const { return of_[stage]; }

  // The longest path where `time(stage, weights)` is each stage's share. `open` is added for what lies below all stages
  // given, by index into kBelow: the shares of stages not yet settled.
  template <class Time>
  double longest(int stages, Time time, const std::array<double, 4>& open) const {
    std::array<double, 4> longest{-kInfinity, -kInfinity, -kInfinity, -kInfinity};
    double head = 0;
    for (int stage = 0; stage < stages; ++stage) {
      for (int below = 1; below < 4; ++below)
        if (longest[below] >= 0) longest[below] += time(stage, kBelow[below]);
      for (const Cut& cut : of_[stage]) longest[cut.below] = std::max(longest[cut.below], head + time(stage, cut.own));
      if (stage + 1 == tables_.stages) break;
      for (int below = 0; below < 4; ++below) longest[below] += kTripsBelow[below] * tables_.send[stage];
      head += time(stage, kLast) + 2 * tables_.send[stage];
    }
    double best = 0;
    for (int below = 0; below < 4; ++below) best = std::max(best, longest[below] + open[below]);
    return best;
  }

 private:
  const PipelineTables& tables_;
  std::vector<std::vector<Cut>> of_;
};

}  // namespace galvatron
