// Lower bounds of a step's time: paths through the schedule that lean on one stage.
//
// Each path goes down the pipeline to a stage and stays there. In between it may go down to the last stage and back once
// or twice: while the stage waits for its first gradient, or for its last one. Then it ends with the stage's own sync, or
// it comes back up and ends with the first stage's. Every path's length is a weighted sum of the stages' times, so a bound
// of it is a sum of bounds of the stages.
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

// The weights that are asked of a stage: of the stage that a path leans on (Busy: it never waits; the others wait at the
// start, at the end, at both), the same when the path ends there, of the stages around it, and of one time alone.
enum Weighting : int {
  kBusy,
  kStart,
  kEnd,
  kBothEnds,
  kBusyLast,
  kStartLast,
  kEndLast,
  kBothEndsLast,
  kNowhere,
  kOnce,
  kOnceLast,
  kTwice,
  kForward,
  kBackward,
  kSync
};
constexpr int kWeightings = kSync + 1;

// A path that leans on a stage: how it weighs that stage, those below it (towards the last), and whether it comes back up
// through those above it.
struct Cut {
  Weighting own, below;
  bool returns;
};

constexpr std::array<Weighting, 3> kBelow{kNowhere, kOnce, kTwice};

class Cuts {
 public:
  explicit Cuts(const PipelineTables& tables) : of_(tables.stages), weights_(tables.stages) {
    const double m = tables.micro_batches;
    for (int stage = 0; stage < tables.stages; ++stage) {
      const double after = m - tables.in_flight[stage];  // forwards after the first backward
      weights_[stage] = {{{m, m, 0},
                          {1 + after, m, 0},
                          {m, 1 + after, 0},
                          {1 + after, 1 + after, 0},
                          {m, m, 1},
                          {1 + after, m, 1},
                          {m, 1 + after, 1},
                          {1 + after, 1 + after, 1},
                          {0, 0, 0},
                          {1, 1, 0},
                          {1, 1, 1},
                          {2, 2, 0},
                          {1, 0, 0},
                          {0, 1, 0},
                          {0, 0, 1}}};
      if (tables.stages == 1) {
        add(stage, kBusy, kNowhere);
      } else if (tables.gpipe) {
        add(stage, kBusy, kOnce);
      } else {
        add(stage, kBusy, kNowhere);
        add(stage, kStart, kOnce);
        add(stage, kEnd, kOnce);
        if (after > 0) add(stage, kBothEnds, kTwice);
      }
    }
  }

  const std::vector<Cut>& of(int stage) const { return of_[stage]; }
  const Weights& weights(int stage, Weighting weighting) const { return weights_[stage][weighting]; }

  // How a path weighs a stage above the one that it leans on.
  static Weighting above(int stage, bool returns) { return !returns ? kForward : stage == 0 ? kOnceLast : kOnce; }

  // Messages over each link above, and below, the stage.
  static int trips_above(bool returns) { return returns ? 2 : 1; }
  static int trips_below(Weighting below) { return below == kNowhere ? 0 : below == kOnce ? 2 : 4; }

  // Whether a cheap bound of a stage will do: its exact optimum under this weighting seldom decides.
  static bool is_minor(int stage, Weighting weighting) {
    return weighting == kForward || (stage > 0 && kBusyLast <= weighting && weighting <= kBothEndsLast);
  }

  // The longest path, where `time(stage, weighting)` is each stage's share and `link(stage)` a message's to the next.
  // Only the first `stages` are settled: `open(below)` is the share of the others and the link to them.
  template <class Time, class Link, class Open>
  double longest(int stages, Time time, Link link, Open open) const {
    std::array<double, kWeightings> longest;  // by what lies below
    longest.fill(-kInfinity);
    std::array<double, 2> head{};  // by whether the path returns
    for (int stage = 0; stage < stages; ++stage) {
      for (const Weighting below : kBelow)
        if (longest[below] >= 0) longest[below] += time(stage, below);
      for (const Cut& cut : of_[stage])
        longest[cut.below] = std::max(longest[cut.below], head[cut.returns] + time(stage, cut.own));
      if (stage + 1 == stages) break;
      for (const Weighting below : kBelow) longest[below] += trips_below(below) * link(stage);
      for (const bool returns : {false, true})
        head[returns] += time(stage, above(stage, returns)) + trips_above(returns) * link(stage);
    }
    double best = 0;
    for (const Weighting below : kBelow)
      if (longest[below] >= 0) best = std::max(best, longest[below] + open(below));
    return best;
  }

 private:
  void add(int stage, Weighting own, Weighting below) {
    if (stage > 0) of_[stage].push_back({own, below, true});
    of_[stage].push_back({static_cast<Weighting>(own + kBusyLast), below, false});
  }

  std::vector<std::vector<Cut>> of_;
  std::vector<std::array<Weights, kWeightings>> weights_;
};

}  // namespace galvatron
