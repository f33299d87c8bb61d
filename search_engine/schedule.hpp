// Time of one step of a pipeline: the same event simulation as paddlenlp_galvatron.cost_model.simulate, term by term.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "common.hpp"

namespace galvatron {

struct StageTime {
  double forward = 0, backward = 0;  // one micro-batch
  double sync = 0;                   // after the last backward; no other stage waits for it
};

class StepTimer {
 public:
  StepTimer(bool gpipe, int micro_batches) : gpipe_(gpipe), micro_batches_(micro_batches) {}

  // Passes simulated so far: the work done.
  long passes() const { return passes_; }

  // `send`: time from each stage to the next, and of the gradient back; at least one entry for each stage but the last.
  double operator()(const std::vector<StageTime>& stages, const std::vector<double>& send, Poll& poll) {
    passes_ += static_cast<long>(stages.size());
    if (stages.size() == 1) return micro_batches_ * (stages[0].forward + stages[0].backward) + stages[0].sync;
    return gpipe_ ? gpipe(stages, send) : one_f_one_b(stages, send, poll);
  }

 private:
  double gpipe(const std::vector<StageTime>& stages, const std::vector<double>& send) const {
    double forward = 0, slowest_forward = 0;
    for (std::size_t s = 0; s < stages.size(); ++s) {
      forward += stages[s].forward;
      if (s + 1 < stages.size()) forward += send[s];
      slowest_forward = std::max(slowest_forward, stages[s].forward);
    }
    forward += (micro_batches_ - 1) * slowest_forward;
    double path = 0, slowest = 0, latest = 0;
    for (std::size_t s = stages.size(); s-- > 0;) {
      path += stages[s].backward;
      if (s + 1 < stages.size()) path += send[s];
      slowest = std::max(slowest, stages[s].backward);
      latest = std::max(latest, path + (micro_batches_ - 1) * slowest + stages[s].sync);
    }
    return forward + latest;
  }

  // Round k holds forward k and backward k - (stages - stage - 1) of every stage. Once a full round moves every stage
  // by the same time, all further full rounds do, and are skipped.
  double one_f_one_b(const std::vector<StageTime>& stages, const std::vector<double>& send, Poll& poll) {
    const int count = static_cast<int>(stages.size());
    free_.assign(count, 0);
    done_.assign(count + 1, 0);
    for (int k = 0; k < micro_batches_ + count - 1; ++k) {
      before_ = free_;
      passes_ += count;
      poll.tick(count);
      double arrival = 0;
      for (int s = 0; s < count; ++s) {
        const double link = s + 1 < count ? send[s] : 0;
        double now = free_[s];
        if (k < micro_batches_) {
          now = std::max(now, arrival) + stages[s].forward;
          arrival = now + link;
        }
        const int index = k - (count - s - 1);
        if (0 <= index && index < micro_batches_) {
          now = std::max(now, done_[s + 1] + link) + stages[s].backward;
          done_[s] = now;
        }
        free_[s] = now;
      }
      if (count <= k && k < micro_batches_ - 2) k += skip(micro_batches_ - 2 - k);
    }
    double latest = 0;
    for (int s = 0; s < count; ++s) latest = std::max(latest, free_[s] + stages[s].sync);
    return latest;
  }

  // Rounds skipped: all of them when every stage moved by the same time in the last one.
  int skip(int rounds) {
    const double shift = free_[0] - before_[0];
    for (std::size_t s = 0; s < free_.size(); ++s)
      if (std::abs(free_[s] - before_[s] - shift) > 1e-13 * free_[s]) return 0;
    for (double& now : free_) now += rounds * shift;
    std::copy(free_.begin(), free_.end(), done_.begin());
    return rounds;
  }

  bool gpipe_;
  int micro_batches_;
  long passes_ = 0;
  std::vector<double> free_, done_, before_;  // scratch
};

}  // namespace galvatron
