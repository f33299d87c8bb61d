// A pipeline schedule: each stage's list of passes, with repeated passes kept as one run.
//
// Every stage runs each micro-batch once forward and once backward through each of its chunks; forwards of a chunk come
// in the order of the micro-batches, and so do backwards. Chunk c of stage s follows chunk c of stage s - 1, and chunk
// c + 1 of the first stage follows chunk c of the last.
// README.md, step 1.
#pragma once

#include <optional>
#include <utility>
#include <vector>

namespace galvatron {

// Times of a chunk of a stage, ms.
struct StageTime {
  double forward = 0, backward = 0;  // one micro-batch
  double sync = 0;                   // after the last backward; no other stage waits for it
};

struct Pass {
  bool is_backward;
  int chunk = 0;
};

// Passes that follow each other so many times.
struct Run {
  std::vector<Pass> passes;
  int times;
};

class Schedule {
 public:
  Schedule() = default;
  Schedule(int micro_batches, std::vector<std::vector<Run>> of, int chunks = 1)
      : micro_batches_(micro_batches), chunks_(chunks), of_(std::move(of)) {}

  int micro_batches() const { return micro_batches_; }
  int chunks() const { return chunks_; }
  int stages() const { return static_cast<int>(of_.size()); }
  const std::vector<Run>& of(int stage) const { return of_[stage]; }

  // Forwards of a stage before its backward of a micro-batch; and the other way round. For one chunk a stage.
  int forwards_before(int stage, int backward) const { return others_before(stage, true, backward); }
  int backwards_before(int stage, int forward) const { return others_before(stage, false, forward); }

  // Forwards and backwards of a stage on a path through the schedule that leaves it with the forward of each of these
  // micro-batches, goes down to the last stage, and comes back with the first backward there; nothing: there is none.
  std::optional<std::pair<int, int>> on_path(int stage, const std::vector<int>& leaving) const {
    int forwards = 0, backwards = 0;            // on the path
    int forwards_done = 0, backwards_done = 0;  // of the stage, when the path is on it (again)
    bool returned = false;
    for (const int micro_batch : leaving) {
      const int backwards_then = backwards_before(stage, micro_batch);
      if (returned && backwards_then <= backwards_done) return std::nullopt;  // it left before the path came back
      forwards += micro_batch + 1 - forwards_done;
      backwards += backwards_then - backwards_done;
      backwards_done = returning(micro_batch);
      forwards_done = forwards_before(stage, backwards_done);
      returned = true;
    }
    return std::make_pair(forwards + micro_batches_ - forwards_done, backwards + micro_batches_ - backwards_done);
  }

 private:
  // The first backward of the last stage after its forward of a micro-batch.
  int returning(int micro_batch) const { return backwards_before(stages() - 1, micro_batch); }

  int others_before(int stage, bool is_backward, int micro_batch) const {
    int mine = 0, others = 0;
    for (const Run& run : of_[stage]) {
      int mine_each = 0;
      for (const Pass& pass : run.passes) mine_each += pass.is_backward == is_backward;
      const int others_each = static_cast<int>(run.passes.size()) - mine_each;
      if (micro_batch >= mine + mine_each * run.times) {
        mine += mine_each * run.times, others += others_each * run.times;
        continue;
      }
      const int times = (micro_batch - mine) / mine_each;
      mine += mine_each * times, others += others_each * times;
      for (const Pass& pass : run.passes) {
        if (pass.is_backward != is_backward)
          ++others;
        else if (mine++ == micro_batch)
          return others;
      }
    }
    return others;
  }

  int micro_batches_ = 0, chunks_ = 1;
  std::vector<std::vector<Run>> of_;
};

}  // namespace galvatron
