// Linear lower bounds of a step's time: a fixed family of paths through the schedule, each around one stage.
//
// A path goes down the pipeline to a stage and stays there. In between it may go down to the last stage and back once
// or twice: while the stage waits for its first gradient, or for its last one. Then it ends with the stage's own sync,
// or it comes back up and ends with the first stage's. The lists of passes say how many passes of the stage each path
// has (schedule.hpp), for any schedule. A path's length is a weighted sum of the stages' times, so the sum of
// bounds of the stages bounds it.
// README.md, step 4.
#pragma once

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "limits.hpp"
#include "problem.hpp"

namespace galvatron {

// The weightings of a stage's times: as the main stage of a path (Busy: it never waits; the others make the trip down
// and back with the first micro-batch, with the last, with both), by the path's end; as another stage of the path; and
// of a single time.
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
  kSync,
  kSingle  // of a pass of each kind, in their order
};
constexpr int kWeightings = kSingle + kPassKinds.size();

constexpr Weighting single(PassKind kind) { return static_cast<Weighting>(kSingle + static_cast<int>(kind)); }
constexpr Weighting kForward = single(PassKind::forward);

// End of a path: at the first stage, to which it returns, or at its main stage.
enum Ending : int { kFirst, kHere };
constexpr std::array<Ending, 2> kEndings{kFirst, kHere};

// A family of paths: weights of its main stage and of later stages, and its end.
struct PathBound {
  Weighting at_stage, below;
  Ending ending;
};

constexpr std::array<Weighting, 3> kBelow{kNowhere, kOnce, kTwice};

class PathBounds {
 public:
  explicit PathBounds(const Problem& problem) : of_(problem.stages), weights_(problem.stages) {
    for (const Part& part : problem.strategies) layer_sync_ = std::max(layer_sync_, part.time.sync);
    for (const Vocab& vocab : problem.vocabs)
      vocab_sync_ = std::max({vocab_sync_, vocab.first.time.sync, vocab.last.time.sync});
    const Schedule& passes = problem.passes;
    const int last = problem.micro_batches - 1;
    for (int stage = 0; stage < problem.stages; ++stage) {
      std::array<Weights, kWeightings>& weights = weights_[stage];
      weights[kNowhere] = {};
      weights[kOnce] = Weights::of_each(kTrip, 1);
      weights[kOnceLast] = Weights::of_each(kTrip, 1, 1);
      weights[kTwice] = Weights::of_each(kTrip, 2);
      weights[kSync] = {{}, 1};
      for (const PassKind kind : kPassKinds) weights[single(kind)] = Weights::of_each(std::array{kind}, 1);
      const bool is_last = stage + 1 == problem.stages;
      // Below the last stage is nothing, but as kOnce its paths share the better bounds of the stages above.
      std::vector<Path> paths{{kBusy, is_last && stage > 0 ? kOnce : kNowhere, 0, passes.on_path(stage, {})}};
      if (!is_last) {
        paths.push_back({kStart, kOnce, 1, passes.on_path(stage, {0})});
        paths.push_back({kEnd, kOnce, 1, passes.on_path(stage, {last})});
        paths.push_back({kBothEnds, kTwice, 2, passes.on_path(stage, {0, last})});
      }
      for (const Path& path : paths) {
        if (!path.passes) continue;
        const bool covered =
            std::any_of(paths.begin(), paths.end(), [&](const Path& other) { return other.covers(path); });
        for (const Ending ending : kEndings) {
          Weights& weighted = weights[ended(path.weighting, ending)] = {{}, ending == kHere ? 1.0 : 0.0};
          std::copy(path.passes->begin(), path.passes->end(), weighted.passes.begin());
          if (covered || (stage == 0 && ending == kFirst)) continue;  // the first stage's end here in any case
          const Weighting at_stage = ended(path.passes == paths.front().passes ? kBusy : path.weighting, ending);
          of_[stage].push_back({at_stage, path.below, stage == 0 ? kFirst : ending});
        }
      }
    }
  }

  const std::vector<PathBound>& of(int stage) const { return of_[stage]; }
  const Weights& weights(int stage, Weighting weighting) const { return weights_[stage][weighting]; }

  // No stage's sync takes longer.
  double most_sync(int stage, int layers) const {
    return layers * layer_sync_ + (stage == 0 || stage + 1 == static_cast<int>(of_.size()) ? vocab_sync_ : 0);
  }

  // Weighting of the stages above a path's main stage.
  static Weighting above(int stage, Ending ending) {
    if (ending == kHere) return kForward;
    return stage == 0 ? kOnceLast : kOnce;
  }

  // Messages over each link above, and below, the stage.
  static double trips_above(Ending ending) { return ending == kFirst ? 2 : 1; }
  static double trips_below(Weighting below) { return below == kNowhere ? 0 : below == kOnce ? 2 : 4; }

  // Whether a stage's cheap bound is enough: its exact optimum under this weighting seldom decides.
  static bool is_minor(int stage, Weighting weighting) {
    return weighting == kForward || (stage > 0 && kBusyLast <= weighting && weighting <= kBothEndsLast);
  }

  // The longest path, where `time(stage, weighting)` is each stage's share, `link(stage)` a message's to the next, and
  // `layers(stage)` their number. Only the first `stages` are settled: `open(below)` is the share of the others and of
  // the link to them.
  template <class Time, class Link, class Count, class Open>
  double longest(int stages, Time time, Link link, Count layers, Open open) const {
    std::array<double, kWeightings> longest;  // by the stages below
    longest.fill(-kInfinity);
    std::array<double, kEndings.size()> head{};
    for (int stage = 0; stage < stages; ++stage) {
      for (const Weighting below : kBelow)
        if (longest[below] >= 0) longest[below] += time(stage, below);
      const bool returns = head[kFirst] - head[kHere] >= most_sync(stage, layers(stage));  // all the longest paths do
      for (const PathBound& path_bound : of_[stage])
        if (path_bound.ending == kFirst || !returns) {
          double& length = longest[path_bound.below];
          length = std::max(length, head[path_bound.ending] + time(stage, path_bound.at_stage));
        }
      if (stage + 1 == stages) break;
      for (const Weighting below : kBelow) longest[below] += trips_below(below) * link(stage);
      for (const Ending ending : kEndings)
        head[ending] += time(stage, above(stage, ending)) + trips_above(ending) * link(stage);
    }
    double best = 0;
    for (const Weighting below : kBelow)
      if (longest[below] >= 0) best = std::max(best, longest[below] + open(below));
    return best;
  }

 private:
  static Weighting ended(Weighting weighting, Ending ending) {
    return static_cast<Weighting>(weighting + (kBusyLast - kBusy) * ending);
  }

  // A path around a stage: passes there, and trips to the last stage and back in between.
  struct Path {
    Weighting weighting, below;
    double trips;
    std::optional<ByKind<int>> passes;  // nothing: there is no such path

    // Whether this path is at least as long for all times.
    bool covers(const Path& other) const {
      if (!passes || !other.passes || &other == this) return false;
      const bool equal = trips == other.trips && *passes == *other.passes;
      if (equal) return this < &other;
      return trips >= other.trips && fits_in(*other.passes, *passes);
    }
  };

  double layer_sync_ = 0, vocab_sync_ = 0;  // longest
  std::vector<std::vector<PathBound>> of_;
  std::vector<std::array<Weights, kWeightings>> weights_;
};

}  // namespace galvatron
