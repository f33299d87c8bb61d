// Lower bounds of a step's time: paths through the schedule that lean on one stage.
//
// Each path goes down the pipeline to a stage, stays there, and comes back up. In between it may go down to the last
// stage and back once or twice: while the stage waits for its first gradient, or for its last one. Every path's length
// is a weighted sum of the stages' times, so a bound of it is a sum of bounds of the stages.
#pragma once

#include <algorithm>
#include <array>
#include <tuple>
#include <vector>

#include "common.hpp"
#include "tables.hpp"

namespace galvatron {

// How often a path runs through a stage's forward, backward and sync.
struct Weights {
  double forward, backward, sync;

  double of(const StageTime& time) const {
    return forward * time.forward + backward * time.backward + sync * time.sync;
  }
  double of(const Change& change) const { return forward * change.forward + backward * change.backward; }
  bool operator<(const Weights& other) const {
    return std::tie(forward, backward, sync) < std::tie(other.forward, other.backward, other.sync);
  }
};

// The weights that are asked of a stage: of its own paths (Busy: it never waits; the others wait at the start, at the
// end, at both), of the paths of the stages around it, and of one time alone.
enum Weighting : int { kBusy, kStart, kEnd, kBothEnds, kNowhere, kFirst, kLast, kTwice, kForward, kBackward, kSync };
constexpr int kWeightings = kSync + 1;

// A path that leans on a stage: how it weighs that stage, and those below it (towards the last).
struct Cut {
  Weighting own, below;
};

constexpr std::array<Weighting, 4> kBelow{kNowhere, kFirst, kLast, kTwice};

class Cuts {
 public:
  explicit Cuts(const PipelineTables& tables) : tables_(tables), of_(tables.stages), weights_(tables.stages) {
    const double m = tables.micro_batches;
    for (int stage = 0; stage < tables.stages; ++stage) {
      const double after = m - tables.in_flight[stage];  // forwards after the first backward
      weights_[stage] = {{{m, m, 1},
                          {1 + after, m, 1},
                          {m, 1 + after, 1},
                          {1 + after, 1 + after, 1},
                          {0, 0, 0},
                          {1, 1, 0},
                          {1, 1, 1},
                          {2, 2, 1},
                          {1, 0, 0},
                          {0, 1, 0},
                          {0, 0, 1}}};
      if (tables.stages == 1) {
        of_[stage] = {{kBusy, kNowhere}};
      } else if (tables.gpipe) {
        of_[stage] = {{kBusy, kFirst}, {kEnd, kLast}};
      } else {
        of_[stage] = {{kBusy, kNowhere}, {kStart, kFirst}, {kEnd, kLast}};
        if (after > 0) of_[stage].push_back({kBothEnds, kTwice});
      }
    }
  }

  const std::vector<Cut>& of(int stage) const { return of_[stage]; }
  const Weights& weights(int stage, Weighting weighting) const { return weights_[stage][weighting]; }

  // Messages over each link below the stage.
  static int trips(Weighting below) { return below == kNowhere ? 0 : below == kTwice ? 4 : 2; }

  // The longest path, where `time(stage, weighting)` is each stage's share. Only the first `stages` are settled:
  // `open(below)` is the share of the others.
  template <class Time, class Open>
  double longest(int stages, Time time, Open open) const {
    std::array<double, kWeightings> longest;  // by what lies below
    longest.fill(-kInfinity);
    double head = 0;
    for (int stage = 0; stage < stages; ++stage) {
      for (const Weighting below : kBelow)
        if (longest[below] >= 0) longest[below] += time(stage, below);
      for (const Cut& cut : of_[stage]) longest[cut.below] = std::max(longest[cut.below], head + time(stage, cut.own));
      if (stage + 1 == tables_.stages) break;
      for (const Weighting below : kBelow) longest[below] += trips(below) * tables_.send[stage];
      head += time(stage, kLast) + 2 * tables_.send[stage];
    }
    double best = 0;
    for (const Weighting below : kBelow)
      if (longest[below] >= 0) best = std::max(best, longest[below] + open(below));
    return best;
  }

 private:
  const PipelineTables& tables_;
  std::vector<std::vector<Cut>> of_;
  std::vector<std::array<Weights, kWeightings>> weights_;
};

}  // namespace galvatron
