// The optimum of a chain of layers that may all differ: Pareto labels, cut by Lagrangian bounds.
//
// Strategies with equal rows of switching costs are alike for what follows them, those with equal columns for what
// came before: labels are kept per class in which a layer is left, and layers are entered per entering class.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "common.hpp"

namespace galvatron {

struct ChainItem {
  double memory, cost;
  int id;
  int entering, leaving;  // classes
};

using ChainChange = Vector<Vector<double>>;  // cost [leaving class of the layer before][entering class of this one]

struct ChainLayer {
  Vector<ChainItem> items;
  std::shared_ptr<const ChainChange> change;
  int leaving_classes;
};

struct ChainSolution {
  double cost = kInfinity;
  double memory = kInfinity;  // where nothing fits: the least that would
  double bound = kInfinity;   // no choice costs less
  std::vector<int> choice;    // ids, empty where nothing fits
};

class Chain {
 public:
  // The first layer is entered from the one class 0.
  Chain(std::vector<ChainLayer> layers, double budget) : layers_(std::move(layers)), budget_(within(budget)) {
    for (ChainLayer& layer : layers_) prune(layer);
  }

  // Least cost, proven to be within `gap` (a fraction of it) of the optimum; zero: the optimum itself.
  ChainSolution solve(double gap, Poll& poll) {
    least_memory_ = costs_to_go(kInfinity, poll);
    best_.memory = least_memory_.memory[0][0];
    if (!(best_.memory <= budget_)) return best_;
    take(least_memory_, poll);
    raise_bound(poll);
    // Guess how far the optimum is above the bound. A search below the guess keeps few labels; what it finds is the
    // optimum, and finding nothing raises the bound to the guess. One half of the gap lets labels be dropped that are
    // hardly better than another one, the other half lets the search end early.
    accepted_ = 1 - gap / 2;
    worthwhile_ = gap / 2 * bound_ / static_cast<double>(layers_.size());
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
  static constexpr std::size_t kStepsOfLabel = 4;            // of Poll, to sort and compare
  static constexpr std::size_t kMostSteps = 20'000'000'000;  // some minutes

  // Cheapest completions at one price of memory: of the layers from l on, when layer l - 1 is left in a class.
  struct CostsToGo {
    double price;                         // of one MiB; infinite: only memory counts
    Vector<Vector<double>> cost, memory;  // [layer][class]

    double priced(std::size_t layer, int at) const { return Chain::priced(price, cost[layer][at], memory[layer][at]); }
  };
  struct Label {
    double memory, cost;
    int parent;  // index among the labels of the layer before
    int id;
    int leaving;
  };
  using Labels = Vector<Label>;

  // Drops items that another one of the same classes beats.
  static void prune(ChainLayer& layer) {
    std::sort(layer.items.begin(), layer.items.end(), [](const ChainItem& a, const ChainItem& b) {
      if (a.entering != b.entering) return a.entering < b.entering;
      if (a.leaving != b.leaving) return a.leaving < b.leaving;
      if (a.memory != b.memory) return a.memory < b.memory;
      return a.cost < b.cost;
    });
    Vector<ChainItem> kept;
    for (const ChainItem& item : layer.items) {
      const bool alike = !kept.empty() && kept.back().entering == item.entering && kept.back().leaving == item.leaving;
      if (!alike || item.cost < kept.back().cost) kept.push_back(item);
    }
    layer.items = std::move(kept);
  }

  static double priced(double price, double cost, double memory) {
    if (price == 0) return cost;  // whatever memory: also without end
    return price == kInfinity ? memory : cost + price * memory;
  }

  CostsToGo costs_to_go(double price, Poll& poll) const {
    const int layers = static_cast<int>(layers_.size());
    CostsToGo go{price, {}, {}};
    go.cost.resize(layers + 1), go.memory.resize(layers + 1);
    for (auto* table : {&go.cost, &go.memory}) (*table)[layers].assign(layers_.back().leaving_classes, 0.0);
    std::vector<double> entered, entered_cost, entered_memory;
    for (int l = layers - 1; l >= 0; --l) {
      const ChainLayer& layer = layers_[l];
      const std::size_t entering = (*layer.change)[0].size(), classes = layer.change->size();
      poll.tick(layer.items.size() + classes * entering / 4);
      for (auto* best : {&entered, &entered_cost, &entered_memory}) best->assign(entering, kInfinity);
      for (const ChainItem& item : layer.items) {
        const double total = priced(price, item.cost, item.memory) + go.priced(l + 1, item.leaving);
        if (total >= entered[item.entering]) continue;
        entered[item.entering] = total;
        entered_cost[item.entering] = item.cost + go.cost[l + 1][item.leaving];
        entered_memory[item.entering] = item.memory + go.memory[l + 1][item.leaving];
      }
      for (auto* table : {&go.cost, &go.memory}) (*table)[l].assign(classes, kInfinity);
      for (std::size_t c = 0; c < classes; ++c) {
        double least = kInfinity;
        for (std::size_t e = 0; e < entering; ++e) {
          const double change = (*layer.change)[c][e];
          const double total = entered[e] + priced(price, change, 0);
          if (total >= least || !(change < kInfinity)) continue;
          least = total;
          go.cost[l][c] = change + entered_cost[e];
          go.memory[l][c] = entered_memory[e];
        }
      }
    }
    return go;
  }

  // The best price of memory: cross the line of the cheapest path that fits with that of the cheapest that does not.
  void raise_bound(Poll& poll) {
    double best_price = 0;
    {
      const CostsToGo low = costs_to_go(0, poll);
      take(low, poll);
      if (low.memory[0][0] > budget_) best_price = crossing(low.cost[0][0], low.memory[0][0], poll);
    }
    prices_.clear();
    for (double factor : {1.0, 0.8, 1.25, 0.0})
      if (best_price > 0 || factor == 0.0) prices_.push_back(costs_to_go(factor * best_price, poll));
  }

  double crossing(double low_cost, double low_memory, Poll& poll) {
    double price = 0, high_cost = least_memory_.cost[0][0], high_memory = least_memory_.memory[0][0];
    for (int tries = 0; tries < kMostPrices && low_memory > high_memory && high_cost > low_cost; ++tries) {
      const double crossed = (high_cost - low_cost) / (low_memory - high_memory);
      if (!(crossed < kInfinity)) break;
      price = crossed;
      const CostsToGo middle = costs_to_go(price, poll);
      take(middle, poll);
      const double cost = middle.cost[0][0], memory = middle.memory[0][0];
      if (!is_less(middle.priced(0, 0), low_cost + price * low_memory)) break;
      if (!(high_memory < memory && memory < low_memory)) break;  // rounding: no path lies between
      (memory <= budget_ ? high_cost : low_cost) = cost;
      (memory <= budget_ ? high_memory : low_memory) = memory;
    }
    return price;
  }

  // Takes the bound that a price gives, and its path where that fits.
  void take(const CostsToGo& go, Poll& poll) {
    if (go.price == 0) bound_ = std::max(bound_, go.cost[0][0]);
    if (go.price > 0 && go.price < kInfinity && budget_ < kInfinity)
      bound_ = std::max(bound_, go.priced(0, 0) - go.price * budget_);
    if (go.memory[0][0] <= budget_ && go.cost[0][0] < best_.cost) complete({}, 0, 0, 0, go, poll);
  }

  // Makes the best solution of a beginning (ids of the first layers) and a price's completion of it.
  void complete(std::vector<int> choice, int leaving, double memory, double cost, const CostsToGo& go,
                Poll& poll) {
    for (std::size_t l = choice.size(); l < layers_.size(); ++l) {
      poll.tick(layers_[l].items.size());
      const ChainItem* next = nullptr;
      double least = kInfinity, change = 0;
      for (const ChainItem& item : layers_[l].items) {
        const double entry = (*layers_[l].change)[leaving][item.entering];
        const double total = priced(go.price, entry + item.cost, item.memory) + go.priced(l + 1, item.leaving);
        if (total < least && entry < kInfinity) least = total, next = &item, change = entry;
      }
      choice.push_back(next->id);
      leaving = next->leaving, memory += next->memory, cost += change + next->cost;
    }
    if (memory <= budget_ && cost < best_.cost) best_ = {cost, memory, best_.bound, std::move(choice)};
  }

  // Whether a label may still lead to a solution that fits and costs less than the limit.
  bool promising(std::size_t layer, int leaving, double memory, double cost, double limit) const {
    if (memory + least_memory_.memory[layer + 1][leaving] > budget_) return false;
    return std::all_of(prices_.begin(), prices_.end(), [&](const CostsToGo& go) {
      const double slack = go.price > 0 ? go.price * (budget_ - memory) : 0;
      return is_less(cost + go.priced(layer + 1, leaving) - slack, limit);
    });
  }

  // Keeps, by class, the labels that beat all of less memory by more than `worthwhile`.
  static void keep_best(Labels& labels, double worthwhile, Poll& poll) {
    poll.tick(kStepsOfLabel * labels.size());
    std::sort(labels.begin(), labels.end(), [](const Label& a, const Label& b) {
      if (a.leaving != b.leaving) return a.leaving < b.leaving;
      if (a.memory != b.memory) return a.memory < b.memory;
      return a.cost < b.cost;
    });
    std::size_t kept = 0;
    for (const Label& label : labels) {
      const bool alike = kept && labels[kept - 1].leaving == label.leaving;
      if (!alike || label.cost < labels[kept - 1].cost - worthwhile) labels[kept++] = label;
    }
    labels.resize(kept);
  }

  // Finds the optimum if it costs less than the limit and than what is good enough.
  void search(double limit, Poll& poll) {
    limit = std::min(limit, best_.cost * accepted_);
    Vector<Labels> labels{{{0, 0, -1, -1, 0}}};
    Labels entered;
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      if (poll.steps() > kMostSteps) throw TooHard("the search would take too many steps");
      const ChainLayer& layer = layers_[l];
      Labels next;
      std::size_t item = 0;
      while (item < layer.items.size()) {
        const int entering = layer.items[item].entering;
        entered.clear();
        for (int parent = 0; parent < static_cast<int>(labels[l].size()); ++parent) {
          const Label& label = labels[l][parent];
          const double change = (*layer.change)[label.leaving][entering];
          if (change < kInfinity) entered.push_back({label.memory, label.cost + change, parent, -1, 0});
        }
        keep_best(entered, 0, poll);
        for (; item < layer.items.size() && layer.items[item].entering == entering; ++item) {
          const ChainItem& choice = layer.items[item];
          for (const Label& label : entered) {
            poll.tick();
            const double memory = label.memory + choice.memory, cost = label.cost + choice.cost;
            if (!promising(l, choice.leaving, memory, cost, limit)) continue;
            next.push_back({memory, cost, label.parent, choice.id, choice.leaving});
          }
        }
      }
      keep_best(next, worthwhile_, poll);
      next.shrink_to_fit();  // few are kept, and stay until the end
      labels.push_back(std::move(next));
      limit = std::min(limit, shortcut(labels, l, poll) * accepted_);
    }
  }

  // Completes every label by the best price's path; returns the least cost known.
  double shortcut(const Vector<Labels>& labels, std::size_t layer, Poll& poll) {
    for (const Label& label : labels[layer + 1]) {
      poll.tick();
      for (const CostsToGo& go : prices_) {
        if (!is_less(label.cost + go.cost[layer + 1][label.leaving], best_.cost)) continue;
        if (label.memory + go.memory[layer + 1][label.leaving] > budget_) continue;
        complete(ids(labels, layer, label), label.leaving, label.memory, label.cost, go, poll);
      }
    }
    return best_.cost;
  }

  static std::vector<int> ids(const Vector<Labels>& labels, std::size_t layer, const Label& last) {
    std::vector<int> reversed;
    for (const Label* label = &last; label->id >= 0; label = &labels[layer--][label->parent])
      reversed.push_back(label->id);
    return {reversed.rbegin(), reversed.rend()};
  }

  std::vector<ChainLayer> layers_;
  double budget_;
  double bound_ = 0;
  double accepted_ = 1;    // a solution is good enough if nothing costs less than its cost times this
  double worthwhile_ = 0;  // cost by which a label must beat one of less memory
  ChainSolution best_;
  CostsToGo least_memory_;
  std::vector<CostsToGo> prices_;
};

}  // namespace galvatron
