// Optimal mixed strategies of a matrix game, by the simplex method.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "limits.hpp"

namespace galvatron {

struct MatrixGame {
  std::vector<double> rows, columns;  // share of each; both sum up to 1
};

// `table[row][column]` is what the columns' side pays to the rows' side. By the simplex method over a condensed
// tableau, from entries moved to between 1 and 2, which changes no optimal strategy: so no pivot vanishes.
inline MatrixGame balance(std::vector<std::vector<double>> table, WorkBudget& poll) {
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
    poll.tick(rows * columns / 4);
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
  MatrixGame found{std::vector<double>(rows, 0), std::vector<double>(columns, 0)};
  for (std::size_t row = 0; row < rows; ++row)
    if (basic[row] < columns) found.columns[basic[row]] = std::max(0.0, table[row][columns]);
  for (std::size_t column = 0; column < columns; ++column)
    if (free[column] >= columns) found.rows[free[column] - columns] = std::max(0.0, table[rows][column]);
  for (std::vector<double>* side : {&found.rows, &found.columns}) {
    double sum = 0;
    for (const double share : *side) sum += share;
    for (double& share : *side) share = sum > 0 ? share / sum : 1.0 / static_cast<double>(side->size());
  }
  return found;
}

}  // namespace galvatron
