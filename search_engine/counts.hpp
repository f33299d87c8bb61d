// The exact optimum of a stage of alike layers, by counts: only how many layers take each choice matters, not which.
#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <vector>

#include "common.hpp"
#include "frontier.hpp"
#include "walks.hpp"

namespace galvatron {

struct Count {
  int id;  // of the choice
  int layers;
};

struct Mix {
  double cost = kInfinity;
  double memory = 0;  // MiB, the largest working memory included
  std::vector<Count> counts;
  GroupSet groups = 0;  // that the counts use
};

// Least cost of n alike layers within a budget. Working memory is handled by levels: at each level only choices that
// need no more are allowed, and the budget is less by so much. Groups are handled by sets that grow while they can pay.
class AlikeLayers {
 public:
  AlikeLayers(std::vector<Choice> choices, Walks& walks) : choices_(undominated(std::move(choices))), walks_(walks) {
    for (const Choice& choice : choices_) levels_.push_back(choice.working);
    std::sort(levels_.begin(), levels_.end());
    levels_.erase(std::unique(levels_.begin(), levels_.end()), levels_.end());
    for (const Choice& choice : choices_) all_ |= bit(choice.group);
  }

  // A lower bound of `solve`, cheap.
  double bound(int layers, double budget) {
    double least = kInfinity;
    for (double level : levels_)
      if (budget > level) least = std::min(least, part(all_, level).frontier.bound(layers, within(budget) - level).cost);
    return least + walks_.least();
  }

  // The optimum if it costs less than `limit`; else a mix of infinite cost.
  Mix solve(int layers, double budget, double limit, Poll& poll) {
    Mix best;
    best.cost = limit;
    std::vector<Candidate> candidates;
    for (double level : levels_) grow(0, 0, level, layers, within(budget) - level, limit, candidates);
    std::sort(candidates.begin(), candidates.end(),
              [](const Candidate& a, const Candidate& b) { return a.bound < b.bound; });
    for (const Candidate& candidate : candidates) {
      if (!is_less(candidate.bound, best.cost)) break;
      Part& choices = part(candidate.set, candidate.level);
      descend(choices, layers, within(budget) - candidate.level, walks_.cost(candidate.set), best, poll);
    }
    if (best.counts.empty()) return {};
    finish(best);
    return best;
  }

 private:
  // The choices of some groups up to a level of working memory.
  struct Part {
    std::vector<Choice> choices;
    Frontier frontier;
  };
  struct Candidate {
    double bound;
    GroupSet set;
    double level;
  };
  struct Priced {
    double reduced;  // what one layer of it costs beyond the bound's cheapest
    Choice choice;
  };

  static GroupSet bit(int group) { return GroupSet{1} << group; }

  Part& part(GroupSet set, double level) {
    const auto found = parts_.find({set, level});
    if (found != parts_.end()) return found->second;
    std::vector<Choice> chosen;
    for (const Choice& choice : choices_)
      if (choice.working <= level && (bit(choice.group) & set)) chosen.push_back(choice);
    Frontier frontier(chosen);
    return parts_.emplace(std::make_pair(set, level), Part{std::move(chosen), std::move(frontier)}).first->second;
  }

  void grow(GroupSet set, int first, double level, int layers, double budget, double limit,
            std::vector<Candidate>& candidates) {
    const double unlimited = part(all_, level).frontier.bound(layers, budget).cost;
    for (int group = first; group < walks_.groups(); ++group) {
      if (!(all_ & bit(group))) continue;
      const GroupSet larger = set | bit(group);
      const double walk = walks_.cost(larger);
      if (!is_less(unlimited + walk, limit)) continue;
      const double bound = part(larger, level).frontier.bound(layers, budget).cost + walk;
      if (is_less(bound, limit)) candidates.push_back({bound, larger, level});
      grow(larger, group + 1, level, layers, budget, limit, candidates);
    }
  }

  // Depth first over counts, the dearest reduced cost first, cut where the bound plus reduced costs cannot win.
  void descend(const Part& part, int layers, double budget, double walk, Mix& best, Poll& poll) {
    const Frontier::Bound bound = part.frontier.bound(layers, budget);
    double cheapest = kInfinity;
    for (const Choice& choice : part.choices) cheapest = std::min(cheapest, choice.cost + bound.price * choice.memory);
    order_.clear();
    for (const Choice& choice : part.choices) {
      const double reduced = choice.cost + bound.price * choice.memory - cheapest;
      if (bound.cost + walk + reduced < best.cost) order_.push_back({reduced, choice});
    }
    std::sort(order_.begin(), order_.end(), [](const Priced& a, const Priced& b) { return a.reduced > b.reduced; });
    const int choices = static_cast<int>(order_.size());
    if (choices == 0) return;
    least_memory_.assign(choices + 1, kInfinity);
    for (int i = choices - 1; i >= 0; --i) least_memory_[i] = std::min(least_memory_[i + 1], order_[i].choice.memory);
    counts_.assign(choices, 0);
    budget_ = budget;
    floor_ = bound.cost + walk;
    walk_ = walk;
    start_from_pairs(layers, best);
    if (choices == 1)
      pair(0, 0, layers, 0, walk, best);
    else
      visit(0, layers, 0, walk, 0, best, poll);
  }

  // A first good mix: the best pair of choices.
  void start_from_pairs(int layers, Mix& best) {
    for (int a = 0; a < static_cast<int>(order_.size()); ++a)
      for (int b = 0; b < a; ++b) pair(a, b, layers, 0, walk_, best);
  }

  void visit(int i, int left, double memory, double cost, double reduced, Mix& best, Poll& poll) {
    poll.tick();
    const int choices = static_cast<int>(order_.size());
    if (i + 2 == choices) return pair(i, i + 1, left, memory, cost, best);
    const auto& [price, choice] = order_[i];
    for (int n = 0; n <= left; ++n) {
      if (!is_less(floor_ + reduced + n * price, best.cost)) break;
      if (memory + n * choice.memory + (left - n) * least_memory_[i + 1] > budget_) {
        if (choice.memory >= least_memory_[i + 1]) break;
        continue;
      }
      counts_[i] = n;
      visit(i + 1, left - n, memory + n * choice.memory, cost + n * choice.cost, reduced + n * price, best, poll);
    }
    counts_[i] = 0;
  }

  // The best split of the last layers between two choices, in closed form.
  void pair(int i, int j, int left, double memory, double cost, Mix& best) {
    if (order_[i].choice.cost > order_[j].choice.cost) std::swap(i, j);
    const Choice &fast = order_[i].choice, &slow = order_[j].choice;
    int n = left;
    if (memory + left * fast.memory > budget_) {
      if (fast.memory <= slow.memory || memory + left * slow.memory > budget_) return;
      n = std::min(left, static_cast<int>((budget_ - memory - left * slow.memory) / (fast.memory - slow.memory)) + 1);
      while (n > 0 && memory + n * fast.memory + (left - n) * slow.memory > budget_) --n;
    }
    const double total = cost + n * fast.cost + (left - n) * slow.cost;
    if (!is_less(total, best.cost)) return;
    best.cost = total;
    best.counts.clear();
    for (int k = 0; k < static_cast<int>(order_.size()); ++k) {
      const int layers = counts_[k] + (k == i ? n : 0) + (k == j && i != j ? left - n : 0);
      if (layers) best.counts.push_back({order_[k].choice.id, layers});
    }
  }

  void finish(Mix& best) {
    double working = 0;
    for (const auto& [id, layers] : best.counts) {
      const Choice& choice = *std::find_if(choices_.begin(), choices_.end(), [id = id](const Choice& c) { return c.id == id; });
      best.memory += layers * choice.memory;
      best.groups |= bit(choice.group);
      working = std::max(working, choice.working);
    }
    best.memory += working;
  }

  std::vector<Choice> choices_;
  Walks& walks_;
  std::vector<double> levels_;
  GroupSet all_ = 0;
  std::map<std::pair<GroupSet, double>, Part> parts_;

  // Scratch of `descend`.
  std::vector<Priced> order_;
  std::vector<double> least_memory_;
  std::vector<int> counts_;
  double budget_ = 0, floor_ = 0, walk_ = 0;
};

}  // namespace galvatron
