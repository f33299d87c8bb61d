// The fastest pipeline over all strategies of the vocabulary layers.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "common.hpp"
#include "cuts.hpp"
#include "division.hpp"
#include "needs.hpp"
#include "stages.hpp"
#include "tables.hpp"

namespace galvatron {

// Least memory in which a pipeline fits, and the one that does.
struct LeastMemory {
  double budget = kInfinity;  // MiB a device
  int vocab = -1;
  std::vector<int> division;
  std::vector<int> strategy;  // of each layer
};

class Pipeline {
 public:
  explicit Pipeline(PipelineTables tables) : tables_(std::move(tables)), cuts_(tables_), cache_(tables_) {
    for (int v = 0; v < static_cast<int>(tables_.vocabs.size()); ++v)
      if (!beaten(v)) useful_.push_back(v);
  }

  Pipeline(const Pipeline&) = delete;

  // A lower bound of the step time, in ms, under a vocabulary strategy as good as all of them at once; infinite where
  // nothing fits.
  double bound(Poll& poll) {
    const Turn turn(busy_, poll);
    if (useful_.empty()) return kInfinity;
    if (!ideal_) {
      Vocab ideal = tables_.vocabs[useful_.front()];
      for (const int v : useful_) ideal = least_of_each(ideal, tables_.vocabs[v]);
      ideal_ = std::make_unique<Vocab>(std::move(ideal));
    }
    Stages stages(tables_, cuts_, *ideal_, cache_);
    return DivisionSearch(tables_, cuts_, stages, cache_).bound(poll);
  }

  // A better one: under each vocabulary strategy, stages at their exact optima. What is beyond `limit` stays rough.
  double tight_bound(double limit, Poll& poll) {
    const Turn turn(busy_, poll);
    const Candidates candidates = candidates_below(limit, poll);
    return candidates.empty() ? limit : candidates.front().bound;
  }

  // The optimum, if it costs less than `limit`; `proven`: nothing costs less than that. Given up after simulating
  // `effort` passes, or where it would take too much memory.
  PipelineSolution solve(double limit, long effort, double& proven, Poll& poll) {
    const Turn turn(busy_, poll);
    PipelineSolution best;
    best.cost = limit;
    double unproven = kInfinity;
    for (Candidate& candidate : candidates_below(limit, poll)) {
      if (!is_less(candidate.bound, best.cost)) break;
      PipelineSolution found;
      found.cost = best.cost;
      if (!solved(candidate, found, effort, poll)) unproven = std::min(unproven, candidate.bound);
      if (!is_less(found.cost, best.cost)) continue;
      best = std::move(found);
      best.vocab = candidate.vocab;
    }
    proven = std::min(unproven, best.cost);
    if (best.vocab < 0) best.cost = kInfinity;
    return best;
  }

  // Strategy of each layer of a stage: group by group, in the groups' order.
  std::vector<int> sequence(const StagePoint& point) const {
    std::vector<int> result;
    for (const int group : point.order)
      for (const auto& [id, layers] : point.counts)
        if (tables_.strategies[id].group == group) result.insert(result.end(), layers, id);
    return result;
  }

  LeastMemory least_memory(Poll& poll) const {
    LeastMemory least;
    const Needs needs(tables_, cache_, poll);
    for (const int v : useful_) {
      auto need = [&](int stage, Span span) { return needs.of(tables_.vocabs[v], stage, span).mib; };
      const Minimax division = least_dearest(tables_, need, 0, poll);
      if (!(division.value < least.budget)) continue;
      least = {division.value, v, division.division, {}};
      int first = 0;
      for (int s = 0; s < tables_.stages; ++s) {
        const Span span{first, division.division[s]};
        const Needs::Need stage = needs.of(tables_.vocabs[v], s, span);
        for (int l = span.first; l < span.end(); ++l) least.strategy.push_back(stage.strategy[tables_.type_of(l)]);
        first = span.end();
      }
    }
    return least;
  }

 private:
  struct Candidate {
    double bound;
    int vocab;
    std::unique_ptr<Stages> stages;
    std::unique_ptr<DivisionSearch> search;
  };

  using Candidates = std::vector<Candidate>;

  // The one thread that works on a pipeline; others wait.
  class Turn {
   public:
    Turn(std::atomic<bool>& busy, const Poll& poll) : busy_(busy) {
      while (busy_.exchange(true)) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        poll.check();
      }
    }
    ~Turn() { busy_ = false; }
    Turn(const Turn&) = delete;

   private:
    std::atomic<bool>& busy_;
  };

  // Vocabulary strategies under which a pipeline may cost less than the limit, the best bound first.
  Candidates candidates_below(double limit, Poll& poll) {
    Candidates candidates;
    for (const int v : useful_) {
      auto stages = std::make_unique<Stages>(tables_, cuts_, tables_.vocabs[v], cache_);
      auto search = std::make_unique<DivisionSearch>(tables_, cuts_, *stages, cache_);
      double bound = search->bound(poll);
      if (is_less(bound, limit)) bound = search->tight_bound(poll);
      if (is_less(bound, limit)) candidates.push_back({bound, v, std::move(stages), std::move(search)});
    }
    std::sort(candidates.begin(), candidates.end(),
              [](const Candidate& a, const Candidate& b) { return a.bound < b.bound; });
    return candidates;
  }

  // Whether the candidate was searched to the end. Raises its bound.
  static bool solved(Candidate& candidate, PipelineSolution& best, long& effort, Poll& poll) {
    try {
      return candidate.search->solve(best, candidate.bound, effort, poll);
    } catch (const TooHard&) {
      return false;
    }
  }

  static Part least_of_each(const Part& a, const Part& b) {
    return {{std::min(a.time.forward, b.time.forward), std::min(a.time.backward, b.time.backward),
             std::min(a.time.sync, b.time.sync)},
            std::min(a.states, b.states),
            std::min(a.activation, b.activation),
            std::min(a.working, b.working)};
  }

  static Vocab least_of_each(const Vocab& a, const Vocab& b) {
    Vocab least{least_of_each(a.first, b.first), least_of_each(a.last, b.last), a.enter, a.leave};
    for (std::size_t g = 0; g < a.enter.size(); ++g) {
      least.enter[g] = least_of_each(a.enter[g], b.enter[g]);
      least.leave[g] = least_of_each(a.leave[g], b.leave[g]);
    }
    return least;
  }

  static Change least_of_each(const Change& a, const Change& b) {
    return {std::min(a.forward, b.forward), std::min(a.backward, b.backward)};
  }

  // Whether another vocabulary strategy is as good in everything (of equal ones, the first stays).
  bool beaten(int v) const {
    const std::vector<double> numbers = numbers_of(tables_.vocabs[v]);
    for (int other = 0; other < static_cast<int>(tables_.vocabs.size()); ++other) {
      if (other == v) continue;
      const std::vector<double> rival = numbers_of(tables_.vocabs[other]);
      const bool as_good =
          std::equal(rival.begin(), rival.end(), numbers.begin(), [](double a, double b) { return a <= b; });
      if (as_good && (rival != numbers || other < v)) return true;
    }
    return false;
  }

  static std::vector<double> numbers_of(const Vocab& vocab) {
    std::vector<double> numbers;
    for (const Part* part : {&vocab.first, &vocab.last})
      for (const double number :
           {part->time.forward, part->time.backward, part->time.sync, part->states, part->activation, part->working})
        numbers.push_back(number);
    for (const std::vector<Change>* changes : {&vocab.enter, &vocab.leave})
      for (const Change& change : *changes) numbers.push_back(change.forward), numbers.push_back(change.backward);
    return numbers;
  }

  PipelineTables tables_;
  Cuts cuts_;
  ChoiceCache cache_;
  std::vector<int> useful_;       // vocabulary strategies that no other one beats
  std::unique_ptr<Vocab> ideal_;  // as good as all of them at once
  std::atomic<bool> busy_{false};
};

}  // namespace galvatron
