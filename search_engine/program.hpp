// Weights of paths and prices of memory under which plans of fractions of layers cost most: a linear program.
//
// Its rows say what a layer of each strategy in each chunk, and each strategy of the vocabulary, pays at most; they are
// the same in all regions. What differs from region to region, the limits on layers, is in the goal alone, and a path
// that becomes known is one more column: so each program starts where the last one ended.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "chunks.hpp"
#include "common.hpp"
#include "graph.hpp"
#include "region.hpp"
#include "tables.hpp"

namespace galvatron {

// The most that `goal` comes to where no row's sum of columns exceeds its limit and nothing is below 0: the simplex
// method over a condensed tableau, from wherever the last goal ended.
class Simplex {
 public:
  explicit Simplex(std::vector<double> limits) : rows_(limits.size()), place_(limits.size()) {
    for (std::size_t row = 0; row < rows_.size(); ++row) {
      rows_[row] = {limits[row]};  // what it comes to is first
      basic_.push_back(row);
      place_[row] = {true, row};
    }
  }

  // A column by its entries in the rows; returns its number.
  std::size_t add(const std::vector<double>& entries, Poll& poll) {
    const std::size_t number = place_.size();
    for (auto& row : rows_) row.push_back(0);
    free_.push_back(number);
    place_.push_back({false, free_.size()});
    put(number, entries, poll);
    return number;
  }

  // A new column in the place of one that is 0.
  void put(std::size_t number, const std::vector<double>& entries, Poll& poll) {
    const std::size_t column = place_[number].second;
    for (auto& row : rows_) row[column] = 0;
    for (std::size_t slack = 0; slack < entries.size(); ++slack) {
      if (entries[slack] == 0) continue;
      const auto [is_basic, at] = place_[slack];
      if (is_basic) {
        rows_[at][column] += entries[slack];
        continue;
      }
      poll.tick(rows_.size() / kEntriesAStep + 1);
      for (auto& row : rows_) row[column] += entries[slack] * row[at];
    }
  }

  // `goal`: of each column, from the first one after the rows.
  void solve(const std::vector<double>& goal, std::size_t stop, Poll& poll) {
    auto worth = [&](std::size_t number) { return number < rows_.size() ? 0.0 : goal[number - rows_.size()]; };
    gains_.assign(free_.size() + 1, 0);
    for (std::size_t column = 0; column < free_.size(); ++column) gains_[column + 1] = worth(free_[column]);
    for (std::size_t row = 0; row < rows_.size(); ++row) {
      const double each = worth(basic_[row]);
      if (each == 0) continue;
      for (std::size_t column = 0; column < gains_.size(); ++column) gains_[column] -= each * rows_[row][column];
    }
    poll.tick(rows_.size() * gains_.size() / kEntriesAStep);
    const double least = kZero * *std::max_element(goal.begin(), goal.end());
    while (poll.steps() < stop) {
      const std::size_t enters = std::max_element(gains_.begin() + 1, gains_.end()) - gains_.begin();
      if (enters == gains_.size() || gains_[enters] <= least) return;
      std::size_t leaves = rows_.size();
      for (std::size_t row = 0; row < rows_.size(); ++row)
        if (rows_[row][enters] > kZero && (leaves == rows_.size() || rows_[row][0] * rows_[leaves][enters] <
                                                                         rows_[leaves][0] * rows_[row][enters]))
          leaves = row;
      if (leaves == rows_.size()) return;
      pivot(leaves, enters, poll);
    }
  }

  double value(std::size_t number) const {
    const auto [is_basic, at] = place_[number];
    return is_basic ? std::max(0.0, rows_[at][0]) : 0;
  }

  // What more of a column would lose; nothing where it isn't 0, or new.
  double loss(std::size_t number) const {
    const auto [is_basic, at] = place_[number];
    return is_basic || at >= gains_.size() ? 0 : -gains_[at];
  }

  // What a row's limit is worth.
  double price(std::size_t row) const {
    const auto [is_basic, at] = place_[row];
    return is_basic ? 0 : std::max(0.0, -gains_[at]);
  }

 private:
  static constexpr double kZero = 1e-9;
  static constexpr std::size_t kEntriesAStep = 16;  // of a table in cache

  void pivot(std::size_t leaves, std::size_t enters, Poll& poll) {
    poll.tick(rows_.size() * gains_.size() / kEntriesAStep);
    std::vector<double>& turned = rows_[leaves];
    const double pivot = turned[enters];
    turned[enters] = 1;
    for (double& entry : turned) entry /= pivot;
    entries_.clear();
    for (std::size_t column = 0; column < turned.size(); ++column)
      if (turned[column] != 0) entries_.push_back(static_cast<int>(column));
    const bool few = 4 * entries_.size() < turned.size();
    auto clear = [&](std::vector<double>& row) {
      const double factor = std::exchange(row[enters], 0);
      if (factor == 0) return;
      if (few)
        for (const int column : entries_) row[column] -= factor * turned[column];
      else
        for (std::size_t column = 0; column < row.size(); ++column) row[column] -= factor * turned[column];
    };
    for (auto& row : rows_)
      if (&row != &turned) clear(row);
    clear(gains_);
    std::swap(basic_[leaves], free_[enters - 1]);
    place_[basic_[leaves]] = {true, leaves};
    place_[free_[enters - 1]] = {false, enters};
  }

  std::vector<std::vector<double>> rows_;  // what each comes to, then an entry a free variable
  std::vector<double> gains_;              // of the goal, a unit of each free variable
  std::vector<int> entries_;               // scratch: columns of a row that are not 0
  std::vector<std::size_t> basic_, free_;  // variables: slacks of rows, then columns
  std::vector<std::pair<bool, std::size_t>> place_;  // of each: whether it is basic, and its row or column
};

class Program {
 public:
  static constexpr std::size_t kMostPrices = 1000;  // of strategies in chunks: its table is some MiB then

  // `stages`: of each strategy of the vocabulary.
  Program(const PipelineTables& tables, const std::vector<int>& strategies, std::vector<const ChunkedStages*> stages)
      : tables_(tables),
        strategies_(strategies),
        stages_(std::move(stages)),
        chunks_(tables.stages * tables.passes.chunks()),
        simplex_(limits()) {
    Poll poll([] {});
    auto column = [&](auto fill) {
      std::vector<double> entries(rows(), 0);
      fill(entries);
      goal_.push_back(0);
      return simplex_.add(entries, poll);
    };
    auto of_chunk = [&](std::vector<double>& entries, int chunk, double entry) {
      for (int k = 0; k < count(); ++k) entries[chunk * count() + k] = entry;
    };
    column([&](auto& entries) {
      for (int at = 0; at < chunks_; ++at) of_chunk(entries, at, 1);
    });
    column([&](auto& entries) { std::fill(entries.begin() + chunks_ * count(), entries.end() - 1, 1); });
    for (int v = 0; v < vocabs(); ++v) column([&](auto& entries) { entries[chunks_ * count() + v] = -1; });
    for (const double sign : {1.0, -1.0}) {
      for (int at = 0; at < chunks_; ++at) column([&](auto& entries) { of_chunk(entries, at, sign); });
      for (int s = 0; s < tables.stages; ++s)
        column([&](auto& entries) {
          for (int at = s; at < chunks_; at += tables.stages) of_chunk(entries, at, sign);
        });
    }
    for (int s = 0; s < tables.stages; ++s)
      for (const auto& held : tables.held[s])
        prices_.push_back(column([&](auto& entries) {
          for (int c = 0; c < tables.passes.chunks(); ++c)
            for (int k = 0; k < count(); ++k)
              entries[(c * tables.stages + s) * count() + k] = -share(tables.strategies[strategies[k]], held[c]);
          for (int v = 0; v < vocabs(); ++v) entries[chunks_ * count() + v] = -beside(s, held, v, true);
        }));
  }

  // What a region's plans of fractions come to.
  struct Answer {
    PathWeights weights;
    std::vector<std::vector<double>> memory;  // ms per MiB, of each stage's moments
    std::vector<double> layers;               // of each chunk
    std::vector<double> vocabs;               // share of each strategy
    ChunkTimes times;
  };

  // Columns of those paths that became known.
  void learn(const std::vector<PathWeights>& paths, double link, Poll& poll) {
    for (const PathWeights& path : paths) {
      if (std::find(paths_.begin(), paths_.end(), path) != paths_.end()) continue;
      std::vector<double> entries(rows(), 0);
      for (int at = 0; at < chunks_; ++at) {
        const Weights weights{path.forward[at], path.backward[at], path.sync[at % tables_.stages]};
        for (int k = 0; k < count(); ++k)
          entries[at * count() + k] = -weights.of(tables_.strategies[strategies_[k]].time) / scale();
      }
      double fixed = path.links * link;
      for (int v = 0; v < vocabs(); ++v) entries[chunks_ * count() + v] = -of_vocab(path, v) / scale();
      entries.back() = 1;
      const std::size_t useless = paths_.size() < kMostPaths ? paths_.size() : least_useful();
      if (useless < paths_.size()) {
        simplex_.put(number(useless), entries, poll);
        goal_[goal_.size() - paths_.size() + useless] = fixed / scale();
        paths_[useless] = path;
        continue;
      }
      simplex_.add(entries, poll);
      goal_.push_back(fixed / scale());
      paths_.push_back(path);
    }
  }

  // `working`: MiB that each stage is taken to need so much of.
  Answer solve(const Region& region, const std::vector<double>& working, std::size_t stop, Poll& poll) {
    std::size_t at = 0;
    goal_[at++] = tables_.layers;
    goal_[at++] = 1;
    for (int v = 0; v < vocabs(); ++v)
      goal_[at++] = std::binary_search(region.games.begin(), region.games.end(), v) ? -1 : 0;
    for (const auto* some : {&region.fewest, &region.fewest_of})
      for (const int layers : *some) goal_[at++] = layers;
    for (const auto* some : {&region.most, &region.most_of})
      for (const int layers : *some) goal_[at++] = -layers;
    for (int s = 0; s < tables_.stages; ++s)
      for (const auto& held : tables_.held[s])
        goal_[at++] = (beside(s, held, 0, false) + working[s]) / tables_.budget - 1;
    simplex_.solve(goal_, stop, poll);
    Answer answer{PathWeights(chunks_, tables_.stages), {}, {}, {}, ChunkTimes(chunks_, tables_.stages)};
    double sum = 0;
    for (std::size_t p = 0; p < paths_.size(); ++p) sum += simplex_.value(number(p));
    for (std::size_t p = 0; p < paths_.size(); ++p)
      if (const double share = simplex_.value(number(p)); share > 0) answer.weights.add(paths_[p], share / sum);
    std::size_t price = 0;
    for (int s = 0; s < tables_.stages; ++s) {
      answer.memory.emplace_back();
      for (std::size_t moment = 0; moment < tables_.held[s].size(); ++moment)
        answer.memory.back().push_back(simplex_.value(prices_[price++]) * scale() /
                                       (tables_.budget * std::max(sum, kRounding)));
    }
    double all = 0;
    for (int v = 0; v < vocabs(); ++v) all += simplex_.price(chunks_ * count() + v);
    for (int v = 0; v < vocabs(); ++v)
      answer.vocabs.push_back(all > 0 ? simplex_.price(chunks_ * count() + v) / all : 1.0 / vocabs());
    for (int at = 0; at < chunks_; ++at) {
      const int s = at % tables_.stages, c = at / tables_.stages;
      double layers = 0;
      StageTime time{0, 0, 0};
      auto add = [&](const StageTime& other, double share) {
        time.forward += share * other.forward, time.backward += share * other.backward, time.sync += share * other.sync;
      };
      for (int k = 0; k < count(); ++k) {
        const double share = simplex_.price(at * count() + k);
        layers += share;
        add(tables_.strategies[strategies_[k]].time, share);
      }
      for (int v = 0; v < vocabs(); ++v) add(stages_[v]->beside(s, c), answer.vocabs[v]);
      answer.layers.push_back(layers);
      answer.times.forward[at] = time.forward, answer.times.backward[at] = time.backward;
      answer.times.sync[s] += time.sync;
    }
    return answer;
  }

 private:
  static constexpr double kApart = 1e-7;  // of a row's scale: so that no two pivots are alike

  static constexpr std::size_t kMostPaths = 1024;  // then new ones take the places of others

  // Of a path's column.
  std::size_t number(std::size_t path) const { return rows() + goal_.size() - paths_.size() + path; }

  // The path that would lose most; of equal ones the first. All of them: none would.
  std::size_t least_useful() const {
    std::size_t chosen = paths_.size();
    double most = 0;
    for (std::size_t p = 0; p < paths_.size(); ++p)
      if (simplex_.loss(number(p)) > most) most = simplex_.loss(number(p)), chosen = p;
    return chosen;
  }

  int count() const { return static_cast<int>(strategies_.size()); }
  int vocabs() const { return static_cast<int>(stages_.size()); }
  std::size_t rows() const { return chunks_ * count() + vocabs() + 1; }
  double scale() const { return tables_.micro_batches; }  // of times

  std::vector<double> limits() const {
    std::vector<double> limits(rows());
    for (std::size_t row = 0; row < limits.size(); ++row)
      limits[row] = kApart * (1 + static_cast<double>(row * 7919 % 1009) / 1009);  // two primes: about evenly
    limits.back() = 1;
    return limits;
  }

  // Of the budget.
  double share(const Part& part, int held) const { return (part.states + held * part.activation) / tables_.budget; }

  // What a stage holds beside its layers: of the vocabulary's, a share of the budget; or of all else, MiB.
  double beside(int stage, const std::vector<int>& held, int vocab, bool of_vocab) const {
    double mib = 0;
    for (int c = 0; c < tables_.passes.chunks(); ++c) {
      const bool is_end = (stage == 0 && c == 0) || (stage == tables_.stages - 1 && c + 1 == tables_.passes.chunks());
      const Part& part = stages_[vocab]->part(stage, c);
      if (is_end == of_vocab) mib += part.states + held[c] * part.activation;
    }
    return of_vocab ? mib / tables_.budget : mib;
  }

  double of_vocab(const PathWeights& path, int vocab) const {
    double sum = 0;
    for (int at = 0; at < chunks_; ++at)
      sum += Weights{path.forward[at], path.backward[at], path.sync[at % tables_.stages]}.of(
          stages_[vocab]->beside(at % tables_.stages, at / tables_.stages));
    return sum;
  }

  const PipelineTables& tables_;
  const std::vector<int>& strategies_;
  std::vector<const ChunkedStages*> stages_;
  int chunks_;
  std::vector<double> goal_;
  std::vector<std::size_t> prices_;  // columns of memory
  std::vector<PathWeights> paths_;
  Simplex simplex_;
};

}  // namespace galvatron
