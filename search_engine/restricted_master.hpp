// The restricted master problem of column generation: known plans and critical paths, and the saddle point between
// them.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "critical_path.hpp"
#include "limits.hpp"
#include "matrix_game.hpp"

namespace galvatron {

// A plan (column), by its numbers.
struct KnownPlan {
  std::vector<int> plan;
  ChunkTimes times;
  std::vector<double> lengths;  // of each known path
};

// Weights of the known paths, and the mixture of plans that is best against them.
struct MasterSolution {
  PathWeights weights;
  ChunkTimes times;
  std::vector<std::pair<double, const KnownPlan*>> plans;  // with their shares; none: no plan is known
};

class RestrictedMaster {
 public:
  explicit RestrictedMaster(double link) : link_(link) {}

  const std::vector<PathWeights>& paths() const { return paths_; }
  std::vector<KnownPlan>& answers() { return answers_; }

  void learn(PathWeights path) {
    if (std::find(paths_.begin(), paths_.end(), path) != paths_.end()) return;
    if (paths_.size() >= kMostAnswers) {
      const std::size_t oldest = std::min_element(used_.begin(), used_.end()) - used_.begin();
      paths_.erase(paths_.begin() + oldest), used_.erase(used_.begin() + oldest);
      for (KnownPlan& answer : answers_) answer.lengths.erase(answer.lengths.begin() + oldest);
    }
    for (KnownPlan& answer : answers_) answer.lengths.push_back(path.of(answer.times, link_));
    paths_.push_back(std::move(path));
    used_.push_back(++now_);
  }

  void learn(std::vector<int> plan, ChunkTimes times) {
    KnownPlan answer{std::move(plan), std::move(times), {}};
    for (const PathWeights& path : paths_) answer.lengths.push_back(path.of(answer.times, link_));
    if (answers_.size() >= 4 * kMostAnswers) answers_.erase(answers_.begin());
    answers_.push_back(std::move(answer));
  }

  // The saddle point of the known paths and those of the latest plans that `has(plan)` admits.
  template <class Has>
  MasterSolution solve(Has has, WorkBudget& poll) {
    std::vector<const KnownPlan*> known;
    for (auto answer = answers_.rbegin(); answer != answers_.rend() && known.size() < kMostAnswers; ++answer)
      if (has(answer->plan)) known.push_back(&*answer);
    if (known.empty()) return {PathWeights(0, 0), ChunkTimes(0, 0), {}};
    const std::size_t chunks = paths_[0].forward.size(), stages = paths_[0].sync.size();
    std::vector<std::vector<double>> table(paths_.size());
    for (std::size_t path = 0; path < paths_.size(); ++path)
      for (const KnownPlan* answer : known) table[path].push_back(answer->lengths[path]);
    poll.tick(known.size() * paths_.size());
    const MatrixGame shares = balance(std::move(table), poll);
    MasterSolution solution{PathWeights(chunks, stages), ChunkTimes(chunks, stages), {}};
    ++now_;
    for (std::size_t path = 0; path < paths_.size(); ++path)
      if (shares.rows[path] > 0) solution.weights.add(paths_[path], shares.rows[path]), used_[path] = now_;
    for (std::size_t plan = 0; plan < known.size(); ++plan) {
      if (!(shares.columns[plan] > 0)) continue;
      solution.times.add(known[plan]->times, shares.columns[plan]);
      solution.plans.push_back({shares.columns[plan], known[plan]});
    }
    return solution;
  }

 private:
  static constexpr std::size_t kMostAnswers = 64;  // of each side that are weighed against each other

  double link_;
  std::vector<PathWeights> paths_;
  std::vector<long> used_;  // when each last had a weight
  long now_ = 0;
  std::vector<KnownPlan> answers_;
};

}  // namespace galvatron
