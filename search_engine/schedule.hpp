// Time of one step of a pipeline: the same event simulation as paddlenlp_galvatron.cost_model.simulate, term by term.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

namespace galvatron {

struct StageTime {
  double forward = 0, backward = 0;  // one micro-batch
  double sync = 0;                   // on top of the last backward
};

class StepTimer {
 public:
  // `send`: time from stage s to s + 1, and of the gradient back.
  StepTimer(bool gpipe, int micro_batches, std::vector<double> send)
      : gpipe_(gpipe), micro_batches_(micro_batches), send_(std::move(send)) {
    send_.push_back(0);
  }

  // Passes simulated so far: the work done.
  long passes() const { return passes_; }

  double operator()(const std::vector<StageTime>& stages) {
    passes_ += static_cast<long>(stages.size());
    if (stages.size() == 1) return micro_batches_ * (stages[0].forward + stages[0].backward) + stages[0].sync;
    return gpipe_ ? gpipe(stages) : one_f_one_b(stages);
  }

 private:
  double gpipe(const std::vector<StageTime>& stages) const {
    double forward = 0, slowest_forward = 0;
    for (std::size_t s = 0; s < stages.size(); ++s) {
      forward += stages[s].forward + send_[s];
      slowest_forward = std::max(slowest_forward, stages[s].forward);
    }
    forward += (micro_batches_ - 1) * slowest_forward;
    double end = 0, path = 0, slowest = 0, latest = 0;
    for (std::size_t s = stages.size(); s-- > 0;) {
      path += send_[s] + stages[s].backward;
      slowest = std::max(slowest, stages[s].backward);
      const double before = micro_batches_ > 1 ? path + (micro_batches_ - 2) * slowest : 0;
      end = std::max(before, end + send_[s]) + stages[s].backward + stages[s].sync;
      latest = std::max(latest, end);
    }
    return forward + latest;
  }

  // Round k holds forward k and backward k - (stages - stage - 1) of every stage. Once a full round moves every stage
  // by the same time, all further full rounds do, and are skipped.
  double one_f_one_b(const std::vector<StageTime>& stages) {
    const int count = static_cast<int>(stages.size());
    free_.assign(count, 0);
    done_.assign(count + 1, 0);
    for (int k = 0; k < micro_batches_ + count - 1; ++k) {
      before_ = free_;
      passes_ += count;
      double arrival = 0;
      for (int s = 0; s < count; ++s) {
        double now = free_[s];
        if (k < micro_batches_) {
          now = std::max(now, arrival) + stages[s].forward;
          arrival = now + send_[s];
        }
        const int index = k - (count - s - 1);
        if (0 <= index && index < micro_batches_) {
          now = std::max(now, done_[s + 1] + send_[s]) + stages[s].backward;
          if (index == micro_batches_ - 1) now += stages[s].sync;
          done_[s] = now;
        }
        free_[s] = now;
      }
      if (count <= k && k < micro_batches_ - 2) k += skip(micro_batches_ - 2 - k);
    }
    return *std::max_element(free_.begin(), free_.end());
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
  std::vector<double> send_;
  std::vector<double> free_, done_, before_;  // scratch
};

}  // namespace galvatron
