// The optimum of a chain of layers that may all differ (`search.solve`), by label setting with Lagrangian bounds.
//
// A label is the memory and cost of strategies for the first layers. Layer by layer each label is extended by each
// strategy, and of those that end in the same strategy only labels stay that no other one beats in both. A label is
// dropped, too, if its cheapest completion exceeds the budget or the guessed optimum: a backward pass finds the
// cheapest
// completion of every layer and strategy where memory has a price, which bounds all completions (`completions`). The
// guess rises from the lower bound until a solution costs less (`solve`).
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "limits.hpp"

namespace galvatron {

// Tables of L layers and K strategies, row by row. An infinite entry forbids a choice.
struct LayerTables {
  int layers, strategies;
  const double* memory;  // [L][K]
  const double* cost;    // [L][K]
  const double* change;  // [K][K], or [L][K][K] when `change_by_layer`: [l][before][k] is paid on entering layer l
  bool change_by_layer;

  std::size_t at(int l, int k) const { return l * std::size_t(strategies) + k; }
  double change_of(int l, int before, int k) const {
    if (l == 0) return 0;
    return change[((change_by_layer ? l * std::size_t(strategies) : 0) + before) * strategies + k];
  }
  bool allowed(int l, int k) const { return memory[at(l, k)] < kInfinity && cost[at(l, k)] < kInfinity; }
};

struct LayerSolution {
  double cost = kInfinity;
  double memory = kInfinity;  // where nothing fits: the least that would
  double bound = kInfinity;   // no choice costs less
  std::vector<int> choice;    // strategy of each layer; empty where nothing fits
};

class LabelSetting {
 public:
  LabelSetting(const LayerTables& tables, double budget) : tables_(tables), budget_(within(budget)) {}

  // Least cost, proven to be within `gap` (a fraction of it) of the optimum; zero: the optimum itself.
  LayerSolution solve(double gap, WorkBudget& poll) {
    least_memory_ = completions(kInfinity, poll);
    best_.memory = least_memory_.memory[0];
    if (!(best_.memory <= budget_)) return best_;
    take(least_memory_);
    raise_bound(poll);
    // Half of the gap lets labels be dropped that are hardly better than another one, the other half ends the search
    // early. Where nothing is found below a guess, the guess is a bound.
    accepted_ = 1 - gap / 2;
    worthwhile_ = gap / 2 * bound_ / tables_.layers;
    const double dropped = gap / 2 * bound_;
    bool proven = false;  // a guess above the best solution leaves nothing to be found
    for (double guess = kFirstGuess; !proven && is_less(bound_, best_.cost * (1 - gap)); guess *= kGuessGrowth) {
      const double limit = bound_ + guess * std::max(bound_, best_.cost - bound_);
      proven = !(limit < best_.cost * accepted_);
      search(limit, poll);
      bound_ = std::max(bound_, std::min(limit, best_.cost * accepted_) - dropped);
    }
    best_.bound = std::min(bound_, best_.cost);
    return best_;
  }

 private:
  static constexpr double kFirstGuess = 1e-6, kGuessGrowth = 8;
  static constexpr int kMostPrices = 100;                     // tried; a few are enough
  static constexpr std::size_t kStepsOfLabel = 4;            // of WorkBudget, to sort and compare
  static constexpr std::size_t kMostSteps = 20'000'000'000;  // some minutes

  // Cheapest completions at a price of memory: of the layers from l on, if layer l - 1 has a strategy; [L + 1][K].
  struct Completions {
    double price;  // of one MiB; infinite: only memory counts
    Vector<double> cost, memory;
    Vector<int> next;  // strategy of layer l

    double priced(std::size_t at) const { return LabelSetting::priced(price, cost[at], memory[at]); }
  };
  struct Label {
    double memory, cost;
    int parent;  // index among the labels of the layer before
    int strategy;
  };
  using Labels = Vector<Label>;

  static double priced(double price, double cost, double memory) {
    if (price == 0) return cost;  // whatever memory: also without end
    return price == kInfinity ? memory : cost + price * memory;
  }

  Completions completions(double price, WorkBudget& poll) const {
    const int layers = tables_.layers, strategies = tables_.strategies;
    const std::size_t size = tables_.at(layers + 1, 0);
    Completions go{price, Vector<double>(size, kInfinity), Vector<double>(size, kInfinity), Vector<int>(size, -1)};
    std::fill(go.cost.end() - strategies, go.cost.end(), 0), std::fill(go.memory.end() - strategies, go.memory.end(),
                                                                       0);
    std::vector<double> entered(strategies);
    for (int l = layers - 1; l >= 0; --l) {
      poll.tick(std::size_t(strategies) * strategies / 4);
      for (int k = 0; k < strategies; ++k) {
        const std::size_t at = tables_.at(l, k);
        entered[k] = kInfinity;
        if (tables_.allowed(l, k))
          entered[k] = priced(price, tables_.cost[at], tables_.memory[at]) + go.priced(at + strategies);
      }
      for (int before = 0; before < (l ? strategies : 1); ++before) {
        double least = kInfinity;
        int next = -1;
        for (int k = 0; k < strategies; ++k) {
          const double change = tables_.change_of(l, before, k);
          const double total = entered[k] + priced(price, change, 0);
          if (total < least && change < kInfinity) least = total, next = k;
        }
        if (next < 0) continue;
        const std::size_t here = tables_.at(l, before), at = tables_.at(l, next);
        go.next[here] = next;
        go.cost[here] = tables_.change_of(l, before, next) + tables_.cost[at] + go.cost[at + strategies];
        go.memory[here] = tables_.memory[at] + go.memory[at + strategies];
      }
    }
    return go;
  }

  // The best price of memory: cross the line of the cheapest solution that fits with that of the cheapest that does
  // not.
  void raise_bound(WorkBudget& poll) {
    double price = 0, high_cost = least_memory_.cost[0], high_memory = least_memory_.memory[0];
    Completions now = completions(0, poll);
    take(now);
    double low_cost = now.cost[0], low_memory = now.memory[0];
    for (int tries = 0; tries < kMostPrices && low_memory > std::max(budget_, high_memory) && high_cost > low_cost;
         ++tries) {
      const double crossed = (high_cost - low_cost) / (low_memory - high_memory);
      if (!(crossed < kInfinity)) break;
      price = crossed;
      now = completions(price, poll);
      take(now);
      const double cost = now.cost[0], memory = now.memory[0];
      if (!is_less(now.priced(0), low_cost + price * low_memory)) break;
      if (!(high_memory < memory && memory < low_memory)) break;  // rounding: no solution lies between
      (memory <= budget_ ? high_cost : low_cost) = cost;
      (memory <= budget_ ? high_memory : low_memory) = memory;
    }
    now = Completions{};
    for (const double factor : {1.0, 0.8, 1.25, 0.0})
      if (price > 0 || factor == 0.0) prices_.push_back(completions(factor * price, poll));
  }

  // Takes the bound that a price gives, and its solution where that fits.
  void take(const Completions& go) {
    if (go.price == 0) bound_ = std::max(bound_, go.cost[0]);
    if (go.price > 0 && go.price < kInfinity && budget_ < kInfinity)
      bound_ = std::max(bound_, go.priced(0) - go.price * budget_);
    complete({}, 0, 0, go);
  }

  // Makes the best solution of a beginning and its completion at a price, if that fits and costs less.
  void complete(std::vector<int> choice, double memory, double cost, const Completions& go) {
    const std::size_t end = tables_.at(static_cast<int>(choice.size()), choice.empty() ? 0 : choice.back());
    if (!(memory + go.memory[end] <= budget_ && is_less(cost + go.cost[end], best_.cost))) return;
    for (int l = static_cast<int>(choice.size()); l < tables_.layers; ++l) {
      const int before = l ? choice.back() : 0, next = go.next[tables_.at(l, before)];
      memory += tables_.memory[tables_.at(l, next)];
      cost += tables_.change_of(l, before, next) + tables_.cost[tables_.at(l, next)];
      choice.push_back(next);
    }
    if (memory <= budget_ && cost < best_.cost) best_ = {cost, memory, best_.bound, std::move(choice)};
  }

  // Finds the optimum if it costs less than the limit and than what is good enough.
  void search(double limit, WorkBudget& poll) {
    limit = std::min(limit, best_.cost * accepted_);
    Vector<Labels> labels{{{0, 0, -1, 0}}};
    Labels extended;
    for (int l = 0; l < tables_.layers; ++l) {
      if (poll.steps() > kMostSteps) throw TooHard("the search would take too many steps");
      Labels next;
      for (int k = 0; k < tables_.strategies; ++k) {
        if (!tables_.allowed(l, k)) continue;
        const std::size_t at = tables_.at(l, k);
        extended.clear();
        poll.tick(labels[l].size());
        for (int parent = 0; parent < static_cast<int>(labels[l].size()); ++parent) {
          const Label& label = labels[l][parent];
          const double memory = label.memory + tables_.memory[at];
          const double cost = label.cost + tables_.change_of(l, label.strategy, k) + tables_.cost[at];
          if (is_promising(at + tables_.strategies, memory, cost, limit)) extended.push_back({memory, cost, parent, k});
        }
        keep_best(extended, next, poll);
      }
      next.shrink_to_fit();  // few are kept, and stay until the end
      labels.push_back(std::move(next));
      for (const Label& label : labels[l + 1]) {
        poll.tick();
        const std::size_t end = tables_.at(l + 1, label.strategy);
        for (const Completions& go : prices_)
          if (is_less(label.cost + go.cost[end], best_.cost) && label.memory + go.memory[end] <= budget_)
            complete(strategies_of(labels, label, l + 1), label.memory, label.cost, go);
      }
      limit = std::min(limit, best_.cost * accepted_);
    }
  }

  // Whether a beginning may still lead to a solution that fits and costs less than the limit.
  bool is_promising(std::size_t end, double memory, double cost, double limit) const {
    if (!(memory + least_memory_.memory[end] <= budget_ && cost < kInfinity)) return false;
    return std::all_of(prices_.begin(), prices_.end(), [&](const Completions& go) {
      const double slack = go.price > 0 ? go.price * (budget_ - memory) : 0;
      return is_less(cost + go.priced(end) - slack, limit);
    });
  }

  // Appends the labels that beat all of less memory by more than `worthwhile_`.
  void keep_best(Labels& labels, Labels& kept, WorkBudget& poll) const {
    poll.tick(kStepsOfLabel * labels.size());
    std::sort(labels.begin(), labels.end(), [](const Label& a, const Label& b) {
      return a.memory != b.memory ? a.memory < b.memory : a.cost < b.cost;
    });
    double least = kInfinity;
    for (const Label& label : labels)
      if (label.cost < least - (least < kInfinity ? worthwhile_ : 0)) kept.push_back(label), least = label.cost;
  }

  static std::vector<int> strategies_of(const Vector<Labels>& labels, const Label& last, int layers) {
    std::vector<int> choice(layers);
    for (const Label* label = &last; layers > 0; label = &labels[layers][label->parent])
      choice[--layers] = label->strategy;
    return choice;
  }

  const LayerTables& tables_;
  double budget_;
  double bound_ = 0;
  double accepted_ = 1;    // a solution is good enough if nothing costs less than its cost times this
  double worthwhile_ = 0;  // cost by which a label must beat one of less memory
  LayerSolution best_;
  Completions least_memory_;
  std::vector<Completions> prices_;
};

}  // namespace galvatron
