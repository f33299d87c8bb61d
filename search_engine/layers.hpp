// The stage problem of the public API: tables of layers x strategies, solved by counts where the layers are alike.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "chain.hpp"
#include "counts.hpp"

namespace galvatron {

// Tables of L layers and K strategies, row by row; an infinite entry forbids the choice.
struct LayerTables {
  int layers, strategies;
  const double* memory;  // [L][K] MiB
  const double* cost;    // [L][K]
  const double* change;  // [K][K], or [L][K][K] when `change_by_layer`: [l][before][k] is paid on entering layer l
  bool change_by_layer;

  double memory_of(int l, int k) const { return memory[l * std::size_t(strategies) + k]; }
  double cost_of(int l, int k) const { return cost[l * std::size_t(strategies) + k]; }
  double change_of(int l, int before, int k) const {
    const std::size_t row = change_by_layer ? std::size_t(l) * strategies + before : std::size_t(before);
    return change[row * strategies + k];
  }
  bool allowed(int l, int k) const { return memory_of(l, k) < kInfinity && cost_of(l, k) < kInfinity; }
};

// Numbers equal vectors alike, from 0 on.
inline std::vector<int> classes_of(const std::vector<std::vector<double>>& vectors) {
  std::map<std::vector<double>, int> numbers;
  std::vector<int> result;
  for (const auto& vector : vectors)
    result.push_back(numbers.try_emplace(vector, static_cast<int>(numbers.size())).first->second);
  return result;
}

class LayerProblem {
 public:
  LayerProblem(const LayerTables& tables, double budget) : tables_(tables), budget_(budget) {}

  ChainSolution solve(double gap, Poll& poll) {
    GroupPrices prices;
    std::vector<int> groups;
    if (layers_alike() && grouped(groups, prices)) {
      ChainSolution solution = by_counts(groups, std::move(prices), poll);
      if (!is_less(solution.bound, solution.cost * (1 - gap))) return solution;
    }
    try {
      return Chain(chain(poll), budget_).solve(gap, poll);
    } catch (const TooHard& error) {
      throw TooHard(error.what() + std::string("; allow a gap, or give fewer layers or strategies"));
    }
  }

 private:
  static constexpr int kFewGroups = 8;  // beyond, sets of groups are too many

  bool layers_alike() const {
    const std::size_t row = tables_.strategies, square = row * row;
    for (int l = 1; l < tables_.layers; ++l) {
      if (!std::equal(tables_.memory, tables_.memory + row, tables_.memory + l * row)) return false;
      if (!std::equal(tables_.cost, tables_.cost + row, tables_.cost + l * row)) return false;
      if (tables_.change_by_layer && l > 1 &&
          !std::equal(tables_.change + square, tables_.change + 2 * square, tables_.change + l * square))
        return false;
    }
    return true;
  }

  // Groups of strategies between which changing is free. False where changes are no metric on few groups.
  bool grouped(std::vector<int>& groups, GroupPrices& prices) const {
    const int strategies = tables_.strategies, layer = std::min(1, tables_.layers - 1);
    groups.assign(strategies, -1);
    std::vector<int> first;  // strategy of each group
    for (int k = 0; k < strategies; ++k) {
      for (int g = 0; g < static_cast<int>(first.size()) && groups[k] < 0; ++g) {
        bool alike = true;
        for (int other = 0; other < strategies && alike; ++other)
          alike = tables_.change_of(layer, k, other) == tables_.change_of(layer, first[g], other) &&
                  tables_.change_of(layer, other, k) == tables_.change_of(layer, other, first[g]);
        if (alike) groups[k] = g;
      }
      if (groups[k] >= 0) continue;
      if (static_cast<int>(first.size()) == kFewGroups || tables_.change_of(layer, k, k) != 0) return false;
      groups[k] = static_cast<int>(first.size());
      first.push_back(k);
    }
    const int count = static_cast<int>(first.size());
    prices.enter.assign(count, 0.0);
    prices.leave.assign(count, 0.0);
    prices.change.assign(count, Vector<double>(count));
    for (int a = 0; a < count; ++a)
      for (int b = 0; b < count; ++b) prices.change[a][b] = tables_.change_of(layer, first[a], first[b]);
    for (int a = 0; a < count; ++a)
      for (int b = 0; b < count; ++b)
        for (int c = 0; c < count; ++c)
          if (prices.change[a][c] > prices.change[a][b] + prices.change[b][c]) return false;
    return true;
  }

  ChainSolution by_counts(const std::vector<int>& groups, GroupPrices prices, Poll& poll) const {
    std::vector<Choice> choices;
    for (int k = 0; k < tables_.strategies; ++k)
      if (tables_.allowed(0, k)) choices.push_back({tables_.memory_of(0, k), tables_.cost_of(0, k), 0, k, groups[k]});
    ChainSolution solution;
    for (const Choice& choice : choices) solution.memory = std::min(solution.memory, tables_.layers * choice.memory);
    Walks walks(std::move(prices));
    const Mix mix = Mixes(undominated(choices)).solve(tables_.layers, {budget_, 0}, walks, poll);
    solution.bound = mix.bound;
    if (mix.counts.empty()) return solution;
    solution.cost = mix.cost;
    solution.memory = 0;
    GroupSet used = 0;
    for (const auto& [id, layers] : mix.counts) {
      used |= bit(groups[id]);
      solution.memory += layers * tables_.memory_of(0, id);
    }
    for (const int group : walks.order(used, poll))
      for (const auto& [id, layers] : mix.counts)
        if (groups[id] == group) solution.choice.insert(solution.choice.end(), layers, id);
    return solution;
  }

  std::vector<ChainLayer> chain(Poll& poll) const {
    std::vector<ChainLayer> chain;
    std::shared_ptr<const ChainChange> shared;
    const std::vector<int> one_class(tables_.strategies, 0);
    std::vector<int> left = one_class, entering = one_class, leaving;
    for (int l = 0; l < tables_.layers; ++l) {
      ChainLayer layer;
      poll.tick(tables_.strategies);
      if (l == 1 || (l > 1 && tables_.change_by_layer)) entering = classes_of(changes(l, /*into=*/true));
      if (l == 0 || tables_.change_by_layer)
        leaving = l + 1 < tables_.layers ? classes_of(changes(l + 1, /*into=*/false)) : one_class;
      if (l < 2 || tables_.change_by_layer) {  // the others' are the second one's
        const int classes = l ? 1 + *std::max_element(entering.begin(), entering.end()) : 1;
        ChainChange change(l ? chain.back().leaving_classes : 1, Vector<double>(classes));
        for (int a = 0; l && a < tables_.strategies; ++a)
          for (int b = 0; b < tables_.strategies; ++b) change[left[a]][entering[b]] = tables_.change_of(l, a, b);
        shared = std::make_shared<const ChainChange>(std::move(change));
        poll.tick(std::size_t(tables_.strategies) * tables_.strategies);
      }
      layer.change = shared;
      layer.leaving_classes = 1 + *std::max_element(leaving.begin(), leaving.end());
      for (int k = 0; k < tables_.strategies; ++k)
        if (tables_.allowed(l, k))
          layer.items.push_back({tables_.memory_of(l, k), tables_.cost_of(l, k), k, entering[k], leaving[k]});
      left = leaving;
      chain.push_back(std::move(layer));
    }
    return chain;
  }

  // Per strategy, what every change into it, or out of it, costs on entering a layer.
  std::vector<std::vector<double>> changes(int layer, bool into) const {
    std::vector<std::vector<double>> result(tables_.strategies);
    for (int k = 0; k < tables_.strategies; ++k)
      for (int other = 0; other < tables_.strategies; ++other)
        result[k].push_back(into ? tables_.change_of(layer, other, k) : tables_.change_of(layer, k, other));
    return result;
  }

  const LayerTables& tables_;
  double budget_;
};

}  // namespace galvatron
