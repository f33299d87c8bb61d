// Time of one step of a pipeline: the event simulation of any schedule's lists of passes.
//
// A pass starts when its stage has finished the pass before it and its input has arrived. The passes of all stages are
// brought into one order, in rounds that repeat (once); then a step takes a few operations a pass. Rounds repeated
// after they have become steady are skipped.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "common.hpp"
#include "passes.hpp"

namespace galvatron {

struct StageTime {
  double forward = 0, backward = 0;  // one micro-batch
  double sync = 0;                   // after the last backward; no other stage waits for it
};

// Passes of all stages in an order in which each comes after what it waits for. Messages wait in queues: one for what
// goes forward from each chunk of each stage, one for what goes back from it.
class Rounds {
 public:
  struct Step {
    int stage, chunk;
    bool is_backward;
    int input, output;  // queues; -1: none
  };
  struct Round {
    std::size_t first, last;  // of its steps, the last excluded
    int times;
    bool is_even;             // before and after it a queue has one message at most, the last thing that its stage did
    std::vector<int> queues;  // with a message after it
  };

  // Round by round every stage does its next pass, or the passes of the run that it is in, as far as their input is
  // there. Throws where stages wait for each other in a circle.
  explicit Rounds(const PassLists& lists)
      : lists_(lists), places_(lists.stages()), queues_(2 * virtual_stages()) {
    order(true);
    for (int q = 0; q < queues(); ++q) {
      if (q == turn() || queues_[q].most < 2) continue;
      // Rounds may repeat only where each message takes the place of the one before it.
      *this = Rounds(lists, false);
      return;
    }
  }

  const std::vector<Step>& steps() const { return steps_; }
  const std::vector<Round>& rounds() const { return rounds_; }
  int queues() const { return static_cast<int>(queues_.size()); }
  int most_waiting(int queue) const { return queue == turn() ? 0 : queues_[queue].most; }

  // The stage that a queue's messages come from.
  int source(int queue) const { return queue % virtual_stages() % lists_.get().stages(); }

  // The first of the two chunks, among those of all stages, between which a queue's messages go.
  int link(int queue) const { return queue < virtual_stages() ? queue : queue - virtual_stages() - 1; }

 private:
  struct Place {  // of a stage in its list
    std::size_t run = 0, pass = 0;
    int time = 0;
    bool moved = false;
  };
  struct Queue {  // messages in it, now, at most, and before a round; and those that the round takes
    int waiting = 0, most = 0, before = 0, taken = 0;
  };

  Rounds(const PassLists& lists, bool may_repeat)
      : lists_(lists), places_(lists.stages()), queues_(2 * virtual_stages()) {
    order(may_repeat);
  }

  void order(bool may_repeat) {
    while (!done()) {
      const std::vector<Place> before = places_;
      for (Queue& queue : queues_) queue.before = queue.waiting, queue.taken = 0;
      const std::size_t first = steps_.size();
      for (int stage = 0; stage < lists_.get().stages(); ++stage) advance(stage);
      if (first == steps_.size()) throw std::invalid_argument("passes: stages wait for each other in a circle");
      const int more = may_repeat ? repeats(before) : 0;
      for (int stage = 0; stage < lists_.get().stages(); ++stage)
        if (more > 0 && places_[stage].moved) move(stage, more);
      for (Queue& queue : queues_) {
        queue.waiting += more * (queue.waiting - queue.before);
        queue.most = std::max(queue.most, queue.waiting);
      }
      Round round{first, steps_.size(), 1 + more, true, {}};
      for (int q = 0; q < queues(); ++q) {
        if (q == turn() || queues_[q].waiting == 0) continue;
        round.queues.push_back(q);
        round.is_even = round.is_even && queues_[q].waiting == 1 && queues_[q].before == 1 && is_last(first, q);
      }
      rounds_.push_back(std::move(round));
    }
  }

  int virtual_stages() const { return lists_.get().stages() * lists_.get().chunks(); }
  int turn() const { return virtual_stages() - 1; }  // where forwards end and backwards begin: within a stage

  bool done() const {
    for (int stage = 0; stage < lists_.get().stages(); ++stage)
      if (places_[stage].run < lists_.get().of(stage).size()) return false;
    return true;
  }

  // Whether a queue's latest message is the last thing that its stage did, from a step on.
  bool is_last(std::size_t first, int queue) const {
    for (std::size_t i = steps_.size(); i-- > first;)
      if (steps_[i].stage == source(queue)) return steps_[i].output == queue;
    return false;
  }

  void advance(int stage) {
    Place& place = places_[stage];
    place.moved = false;
    if (place.run == lists_.get().of(stage).size()) return;
    const Run& run = lists_.get().of(stage)[place.run];
    const int turn = this->turn();
    while (place.pass < run.passes.size()) {
      const Pass& pass = run.passes[place.pass];
      const int at = pass.chunk * lists_.get().stages() + stage;
      const int input = pass.is_backward ? (at == turn ? turn : turn + 1 + at + 1) : at - 1;
      const int output = pass.is_backward ? (at == 0 ? -1 : turn + 1 + at) : at;
      if (input >= 0) {
        if (queues_[input].waiting == 0) return;
        --queues_[input].waiting, ++queues_[input].taken;
      }
      if (output >= 0) queues_[output].most = std::max(queues_[output].most, ++queues_[output].waiting);
      steps_.push_back({stage, pass.chunk, pass.is_backward, input == turn ? -1 : input, output == turn ? -1 : output});
      ++place.pass, place.moved = true;
    }
    place.pass = 0;
    move(stage, 1);
  }

  void move(int stage, int times) {
    Place& place = places_[stage];
    place.time += times;
    if (place.time == lists_.get().of(stage)[place.run].times) ++place.run, place.time = 0;
  }

  // How often the last round can be run again.
  int repeats(const std::vector<Place>& before) const {
    int most = std::numeric_limits<int>::max();
    for (int stage = 0; stage < lists_.get().stages(); ++stage) {
      const Place &was = before[stage], &is = places_[stage];
      if (is.run != was.run || is.pass != was.pass) return 0;
      if (!is.moved && is.run < lists_.get().of(stage).size()) return 0;  // what it waits for may come
      if (is.moved) most = std::min(most, lists_.get().of(stage)[is.run].times - is.time);
    }
    for (const Queue& queue : queues_) {
      const int fewer = queue.before - queue.waiting;
      if (fewer > 0) most = std::min(most, std::max(queue.waiting - queue.taken + fewer, 0) / fewer);
    }
    return most;
  }

  std::reference_wrapper<const PassLists> lists_;
  std::vector<Place> places_;
  std::vector<Queue> queues_;
  std::vector<Step> steps_;
  std::vector<Round> rounds_;
};

class StepTimer {
 public:
  explicit StepTimer(const PassLists& lists) : lists_(lists) {}

  // Passes simulated so far: the work done.
  long passes() const { return passes_; }

  // `chunks`: of all stages, first the first one of each, then the second of each, and so on. `send`: time from each to
  // the next, and of the gradient back, at least one entry for each but the last.
  double operator()(const std::vector<StageTime>& chunks, const std::vector<double>& send, Poll& poll) {
    passes_ += static_cast<long>(chunks.size());
    if (chunks.size() == 1)
      return lists_.micro_batches() * (chunks[0].forward + chunks[0].backward) + chunks[0].sync;
    if (!rounds_) prepare();
    start(chunks, send);
    for (const Rounds::Round& round : rounds_->rounds()) {
      for (int time = 0; time < round.times; ++time) {
        run(round, poll);
        const int left = round.times - time - 1;
        if (left > 1 && round.is_even) time += skip(round, time, left - 1);
      }
    }
    double latest = 0;
    for (int s = 0; s < lists_.stages(); ++s) {
      double sync = 0;
      for (std::size_t at = s; at < chunks.size(); at += lists_.stages()) sync += chunks[at].sync;
      latest = std::max(latest, state_[s] + sync);
    }
    return latest;
  }

 private:
  // A step whose times lie at these places: of its input in `state_`, the message's own in `links_`, its duration in
  // `durations_`, and of its output in `state_`.
  struct Operation {
    int stage, input, link, duration, output;
  };

  // After the stages, `state_` has a place for no input, one for no output, and some for each queue: when a message was
  // sent. `links_` has one for no input too.
  void prepare() {
    rounds_ = std::make_unique<Rounds>(lists_);
    const int nothing = lists_.stages(), nowhere = nothing + 1, queues = rounds_->queues();
    int next = nowhere + 1;
    for (int q = 0; q < queues; ++q) {
      places_.push_back(next);
      next += rounds_->most_waiting(q);
    }
    state_.resize(next);
    links_.resize(queues + 1);
    std::vector<int> taken(queues, 0), sent(queues, 0);
    auto place = [&](int queue, int& number) { return places_[queue] + number++ % rounds_->most_waiting(queue); };
    for (const Rounds::Step& step : rounds_->steps())
      operations_.push_back({step.stage, step.input < 0 ? nothing : place(step.input, taken[step.input]),
                             step.input < 0 ? queues : step.input,
                             2 * (step.chunk * lists_.stages() + step.stage) + step.is_backward,
                             step.output < 0 ? nowhere : place(step.output, sent[step.output])});
  }

  void start(const std::vector<StageTime>& chunks, const std::vector<double>& send) {
    std::fill(state_.begin(), state_.end(), 0);
    durations_.clear();
    for (const StageTime& chunk : chunks) {
      durations_.push_back(chunk.forward);
      durations_.push_back(chunk.backward);
    }
    const int queues = rounds_->queues();
    for (int q = 0; q < queues; ++q) {
      const int link = rounds_->link(q);
      links_[q] = link >= 0 && link < static_cast<int>(send.size()) ? send[link] : 0;
    }
  }

  void run(const Rounds::Round& round, Poll& poll) {
    passes_ += static_cast<long>(round.last - round.first + 1) / 2;  // a forward and a backward count as one
    poll.tick(round.last - round.first);
    double* const state = state_.data();
    for (const Operation *at = &operations_[round.first], *end = at + (round.last - round.first); at < end; ++at) {
      const double now = std::max(state[at->stage], state[at->input] + links_[at->link]) + durations_[at->duration];
      state[at->output] = now;
      state[at->stage] = now;
    }
  }

  // Moves on by `rounds` rounds at once, if that is what they would do; returns how many.
  //
  // A round is a map of sums and maxima. If it moves everything by the same time, it always will; so it will where two
  // rounds moved each stage by a time of its own, and none waits for one that moves faster.
  int skip(const Rounds::Round& round, int time, int rounds) {
    std::swap(earlier_, before_), std::swap(before_, now_);
    now_.assign(state_.begin(), state_.begin() + lists_.stages());
    if (time == 0) return 0;
    const bool alike = is_alike();
    if (!alike && !(time > 1 && is_steady(round))) return 0;
    for (int stage = 0; stage < lists_.stages(); ++stage) state_[stage] += rounds * moved(alike ? 0 : stage);
    for (const int q : round.queues) state_[places_[q]] = state_[rounds_->source(q)];
    return rounds;
  }

  double moved(int stage) const { return now_[stage] - before_[stage]; }

  bool is_alike() const {
    for (int stage = 1; stage < lists_.stages(); ++stage)
      if (std::abs(moved(stage) - moved(0)) > kSteady * now_[stage]) return false;
    return true;
  }

  bool is_steady(const Rounds::Round& round) const {
    for (int stage = 0; stage < lists_.stages(); ++stage)
      if (std::abs(moved(stage) - (before_[stage] - earlier_[stage])) > kSteady * now_[stage]) return false;
    for (std::size_t i = round.first; i < round.last; ++i) {
      const Rounds::Step& step = rounds_->steps()[i];
      if (step.input < 0) continue;
      if (moved(rounds_->source(step.input)) > moved(step.stage) + kSteady * now_[step.stage]) return false;
    }
    return true;
  }

  static constexpr double kSteady = 1e-13;  // relative: what counts as moved by the same time

  const PassLists& lists_;
  long passes_ = 0;
  std::unique_ptr<Rounds> rounds_;                          // made when first asked for
  std::vector<Operation> operations_;                       // one a step
  std::vector<int> places_;                                 // of each queue in state_
  std::vector<double> state_;                               // when each stage is free; then the queues
  std::vector<double> links_;                               // how long a message of each queue takes
  std::vector<double> durations_;                           // of each chunk's forward and backward pass
  std::vector<double> now_, before_, earlier_;              // scratch: when stages were free after the last rounds
};

}  // namespace galvatron
