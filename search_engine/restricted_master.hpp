// The restricted master problem of column generation: known plans and critical paths, and the saddle point between
// them, which the simplex method finds (`balance`).
// README.md, step 7.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "critical_path.hpp"
#include "limits.hpp"

namespace galvatron {

// Optimal mixed strategies of a matrix game.
struct MatrixGame {
  std::vector<double> rows, columns;  // share of each; both sum up to 1
};

// `table[row][column]` is the payment of the columns' side to the rows' side. By the simplex method over a condensed
// tableau, from entries moved to between 1 and 2, which changes no optimal strategy: so no pivot vanishes.
inline MatrixGame balance(std::vector<std::vector<double>> table, WorkBudget& budget) {
  const std::size_t rows = table.size(), columns = table.front().size();
  double least = kInfinity, most = -kInfinity;
  for (const auto& row : table)
    for (const double entry : row) least = std::min(least, entry), most = std::max(most, entry);
  for (auto& row : table) {
    for (double& entry : row) entry = most > least ? 1 + (entry - least) / (most - least) : 1;
    row.push_back(1);
  }
  table.emplace_back(columns + 1, -1).back() = 0;
  std::vector<std::size_t> basic(rows), free(columns);  // variables: columns, then slacks of rows
  for (std::size_t row = 0; row < rows; ++row) basic[row] = columns + row;
  for (std::size_t column = 0; column < columns; ++column) free[column] = column;
  constexpr double kZero = 1e-11;
  for (std::size_t pivots = 3 * (rows + columns); pivots > 0; --pivots) {
    std::vector<double>& goal = table.back();
    const std::size_t enters = std::min_element(goal.begin(), goal.end() - 1) - goal.begin();
    if (goal[enters] > -kZero) break;
    std::size_t leaves = rows;
    for (std::size_t row = 0; row < rows; ++row)
      if (table[row][enters] > kZero &&
          (leaves == rows || table[row][columns] * table[leaves][enters] < table[leaves][columns] * table[row][enters]))
        leaves = row;
    if (leaves == rows) break;
    budget.tick(rows * columns / 4);
    std::vector<double>& turned = table[leaves];
    const double pivot = turned[enters];
    for (double& entry : turned) entry /= pivot;
    for (auto& row : table) {
      const double factor = row[enters];
      if (&row == &turned || factor == 0) continue;
      for (std::size_t at = 0; at <= columns; ++at) row[at] -= factor * turned[at];
      row[enters] = -factor / pivot;
    }
    turned[enters] = 1 / pivot;
    std::swap(basic[leaves], free[enters]);
  }
  MatrixGame game{std::vector<double>(rows, 0), std::vector<double>(columns, 0)};
  for (std::size_t row = 0; row < rows; ++row)
    if (basic[row] < columns) game.columns[basic[row]] = std::max(0.0, table[row][columns]);
  for (std::size_t column = 0; column < columns; ++column)
    if (free[column] >= columns) game.rows[free[column] - columns] = std::max(0.0, table[rows][column]);
  for (std::vector<double>* side : {&game.rows, &game.columns}) {
    double sum = 0;
    for (const double share : *side) sum += share;
    for (double& share : *side) share = sum > 0 ? share / sum : 1.0 / static_cast<double>(side->size());
  }
  return game;
}

// A plan (column), by its numbers.
struct KnownPlan {
  std::vector<int> plan;
  ChunkTimes times;
  std::vector<double> lengths;  // of each known path
};

// Mean and deviation of a number over a mixture of plans.
struct Spread {
  double mean = 0, deviation = 0;  // deviation: the mean one from the mean
};

// Weights of the known paths, and the mixture of plans that is best against them.
struct MasterSolution {
  PathWeights weights;
  ChunkTimes times;
  std::vector<std::pair<double, const KnownPlan*>> plans;  // with their shares; none: no plan is known

  // The spread of `number(plan)`.
  template <class Number>
  Spread spread(Number number) const {
    Spread spread;
    for (const auto& [share, known] : plans) spread.mean += share * number(known->plan);
    for (const auto& [share, known] : plans) spread.deviation += share * std::abs(number(known->plan) - spread.mean);
    return spread;
  }
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
  MasterSolution solve(Has has, WorkBudget& budget) {
    std::vector<const KnownPlan*> answers;
    for (auto answer = answers_.rbegin(); answer != answers_.rend() && answers.size() < kMostAnswers; ++answer)
      if (has(answer->plan)) answers.push_back(&*answer);
    if (answers.empty()) return {};
    std::vector<std::vector<double>> table(paths_.size());
    for (std::size_t path = 0; path < paths_.size(); ++path)
      for (const KnownPlan* answer : answers) table[path].push_back(answer->lengths[path]);
    budget.tick(answers.size() * paths_.size());
    const MatrixGame allocation = balance(std::move(table), budget);
    MasterSolution solution;
    solution.weights.chunks.resize(paths_[0].chunks.size()), solution.times.resize(paths_[0].chunks.size());
    ++now_;
    for (std::size_t path = 0; path < paths_.size(); ++path)
      if (allocation.rows[path] > 0) solution.weights.add(paths_[path], allocation.rows[path]), used_[path] = now_;
    for (std::size_t plan = 0; plan < answers.size(); ++plan) {
      if (!(allocation.columns[plan] > 0)) continue;
      add(solution.times, answers[plan]->times, allocation.columns[plan]);
      solution.plans.push_back({allocation.columns[plan], answers[plan]});
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
