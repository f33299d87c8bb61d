// A pipeline schedule: each stage's list of passes, with repeated passes kept as one run.
//
// Every stage runs each micro-batch once in each kind of pass through each of its chunks; passes of one kind and chunk
// come in the order of the micro-batches. Chunk c of stage s follows chunk c of stage s - 1, and chunk c + 1 of the
// first stage follows chunk c of the last.
// README.md, step 1.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "componentwise.hpp"

namespace galvatron {

// In the order of Python's `PassKind`.
enum class PassKind { forward, backward };
constexpr std::array<PassKind, 2> kPassKinds{PassKind::forward, PassKind::backward};

// The kinds of a way down to the last stage and back: forwards go down, backwards come up.
constexpr std::array<PassKind, 2> kTrip{PassKind::forward, PassKind::backward};

template <class T>
struct ByKind : std::array<T, kPassKinds.size()> {
  using std::array<T, kPassKinds.size()>::operator[];
  T& operator[](PassKind kind) { return (*this)[static_cast<std::size_t>(kind)]; }
  const T& operator[](PassKind kind) const { return (*this)[static_cast<std::size_t>(kind)]; }
};

using PassTimes = ByKind<double>;  // ms, of one micro-batch

// Times of a chunk of a stage, ms; or weights of them: how often a path runs through each.
struct StageTime {
  PassTimes passes{};
  double sync = 0;  // after the last backward; no other stage waits for it

  // The same number for each of some kinds.
  template <class Kinds>
  static StageTime of_each(const Kinds& kinds, double number, double sync = 0) {
    StageTime result{{}, sync};
    for (const PassKind kind : kinds) result.passes[kind] = number;
    return result;
  }

  void add(const StageTime& other, double times = 1) {
    add_to(passes, other.passes, times);
    sync += times * other.sync;
  }
  // Weighted sum.
  double of(const PassTimes& times) const { return dot(passes, times); }
  double of(const StageTime& time) const { return of(time.passes) + sync * time.sync; }

  friend bool operator==(const StageTime& a, const StageTime& b) { return a.passes == b.passes && a.sync == b.sync; }
  friend bool operator<(const StageTime& a, const StageTime& b) {
    return std::tie(a.passes, a.sync) < std::tie(b.passes, b.sync);
  }
};

using Weights = StageTime;

struct Pass {
  PassKind kind;
  int chunk = 0;
};

// Passes that follow each other so many times.
struct Run {
  std::vector<Pass> passes;
  int times;
};

struct Schedule {
  int micro_batches = 0, chunks = 1;  // chunks: of a stage
  std::vector<std::vector<Run>> of;   // each stage

  int stages() const { return static_cast<int>(of.size()); }

  // Passes of a stage on a path through the schedule that leaves it with the forward of each of these micro-batches,
  // goes down to the last stage, and comes back with the first backward there; nothing: there is none. For one chunk a
  // stage.
  std::optional<ByKind<int>> on_path(int stage, const std::vector<int>& leaving) const {
    constexpr PassKind down = PassKind::forward, up = PassKind::backward;
    ByKind<int> passes{};  // on the path
    ByKind<int> done{};    // of the stage, when the path is on it (again)
    for (const int micro_batch : leaving) {
      ByKind<int> left = passes_before(stage, down, micro_batch);
      ++left[down];
      if (done[down] > 0 && left[up] <= done[up]) return std::nullopt;  // it left before the path came back
      add_to(passes, left), add_to(passes, done, -1);
      done = passes_before(stage, up, passes_before(stages() - 1, down, micro_batch)[up]);
    }
    for (const PassKind kind : kPassKinds) passes[kind] += micro_batches - done[kind];
    return passes;
  }

 private:
  // Passes of a stage before its pass of this kind for a micro-batch.
  ByKind<int> passes_before(int stage, PassKind kind, int micro_batch) const {
    ByKind<int> done{};
    for (const Run& run : of[stage]) {
      ByKind<int> each{};
      for (const Pass& pass : run.passes) ++each[pass.kind];
      const int times = each[kind] ? std::min(run.times, (micro_batch - done[kind]) / each[kind]) : run.times;
      add_to(done, each, times);
      if (times == run.times) continue;
      for (const Pass& pass : run.passes) {
        if (pass.kind == kind && done[kind] == micro_batch) return done;
        ++done[pass.kind];
      }
    }
    return done;
  }
};

}  // namespace galvatron
