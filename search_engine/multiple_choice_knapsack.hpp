// The exact optimum of a stage, as a multiple-choice knapsack over counts: of identical layers, only the number with
// each strategy matters. Layouts are enumerated as sets, extended while the lower bound stays below the best plan;
// counts by branch and bound on reduced costs.
// README.md, step 2.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>
#include <vector>

#include "knapsack_relaxation.hpp"
#include "limits.hpp"
#include "resharding_path.hpp"
#include "workspace_levels.hpp"

namespace galvatron {

struct Count {
  int id;  // of the choice
  int layers;
};

struct Assignment {
  double cost = kInfinity;
  std::vector<Count> counts;  // empty: nothing fits
  double bound = kInfinity;   // nothing costs less; below the cost where the search was given up
};

// Memory that a stage leaves for its layers.
struct MemoryBudget {
  double budget;        // MiB, less the stage's need besides its layers
  Workspace workspace;  // that the stage needs anyway, within the budget
};

// Mixes of layers within a budget; those of one type are identical. Workspace is handled by levels: at each level only
// choices that need no more are allowed, and the budget is less by so much. Layouts are enumerated as sets, extended
// while the lower bound stays below the best mix. A search of too many steps ends with a gap to the bound.
class CountKnapsack {
 public:
  explicit CountKnapsack(std::vector<Choice> choices) : choices_(std::move(choices)), levels_(choices_) {
    for (const Choice& choice : choices_) all_ |= bit(choice.layout), types_ = std::max(types_, choice.type + 1);
  }

  // Clears the cache.
  void forget() { frontiers_.clear(); }

  // A lower bound of the layers' cost without resharding, cheap.
  double bound(const Layers& layers, MemoryBudget room, WorkBudget& budget) {
    double least = kInfinity;
    each_level(
        layers, room, [&](double bound) { return bound < least; }, [&](const Level&, double bound) { least = bound; },
        budget);
    return least;
  }

  // The mix of least cost.
  Assignment solve(const Layers& layers, MemoryBudget room, ReshardingPath& walks, WorkBudget& budget) {
    Assignment best;
    // One layout a type first: its cost prunes most other sets.
    for (const bool all : {false, true}) {
      last_ = budget.steps() + 2 * allowance(budget);
      auto may = [&](double bound) {
        if (!is_less(bound + walks.least(), best.cost)) return false;
        if (budget.steps() < last_) return true;
        if (all) best.bound = std::min(best.bound, bound + walks.least());
        return false;
      };
      auto visit = [&](const Level& level, double bound) {
        solve(level, bound, all, layers, room, walks, budget, best);
      };
      each_level(layers, room, may, visit, budget);
    }
    best.bound = std::min(best.bound, best.cost);
    return best;
  }

  // All mixes that cost less than `limit`, given to `emit(counts, layouts)`, until that returns false or the effort, in
  // counts tried, is used up. `steps`: for sets of layouts; 0: as many as a search is allowed.
  template <class Emit>
  void enumerate(const Layers& layers, MemoryBudget room, ReshardingPath& walks, double limit, Emit emit, long& effort,
                 WorkBudget& budget, std::size_t steps = 0) {
    const int types = layers.last_type - layers.first_type + 1;
    stop_ = budget.steps() + (steps ? steps : allowance(budget));
    BoundedSets bounded;
    auto may = [&](double bound) {
      if (!is_less(bound + walks.least(), limit)) return false;
      bounded.complete &= budget.steps() < stop_;
      return bounded.complete;
    };
    auto visit = [&](const Level& level, double bound) {
      bounded_sets(level, bound, layers, room, walks, limit, types + kMostChanges, bounded, budget);
    };
    each_level(layers, room, may, visit, budget);
    std::sort(bounded.sets.begin(), bounded.sets.end());
    if (!bounded.complete) effort = 0;
    for (const BoundedSet& set : bounded.sets) {
      if (effort <= 0) return;
      descend(set, layers, room, walks, limit, budget);
      if (order_.empty()) continue;
      if (!visit_all(0, layers.of[layers.first_type], 0, 0, set, limit, emit, effort, budget)) return;
    }
  }

 private:
  // Steps of one search; where those before took many, of each further one. With several chunks a tenth: the relaxation
  // of many types is almost exact, and longer searches found no better mix (Mixtral-8x7B on 128 GPUs, half the time).
  // More than eleven reshardings a stage never paid.
  static constexpr std::size_t kMostSteps = 500'000, kManySteps = 50'000'000, kFewSteps = 10'000;
  static constexpr std::size_t kShareOfChunks = 10;
  static constexpr std::size_t kStepsOfLevel = 16;
  static constexpr int kMostChanges = 11;
  static constexpr std::size_t kMostKept = 20'000;  // frontiers, some 10 MiB

  struct BoundedSet {
    double bound;
    LayoutSet layouts;
    Level level;

    bool operator<(const BoundedSet& other) const { return bound < other.bound; }
  };
  struct BoundedSets {
    Vector<BoundedSet> sets;
    bool complete = true;  // none of so many layouts was left alone
  };
  // A choice in the search over counts.
  struct Priced {
    double reduced;  // cost of one layer of it beyond the bound's cheapest
    Choice choice;
    bool last = false;        // of its type: takes all layers that are left
    double least_memory = 0;  // of this choice and those of its type after it
    double later_memory = 0;  // least of all layers of later types
  };

  static double net(const MemoryBudget& room, const Level& level) { return within(room.budget) - level.mib; }

  std::size_t allowance(const WorkBudget& budget) const {
    const std::size_t share = types_ > 2 ? kShareOfChunks : 1;  // one chunk has two: its layers, and those to come
    return (budget.steps() < kManySteps / share ? kMostSteps : kFewSteps) / share;
  }

  void allow(const WorkBudget& budget) { stop_ = std::min(budget.steps() + allowance(budget), last_); }

  // Goes through the levels that may hold a mix below a limit, the best bound first.
  template <class May, class Visit>
  void each_level(const Layers& layers, MemoryBudget room, May may, Visit visit, WorkBudget& budget) {
    auto bound = [&](const Level& level) {
      budget.tick(kStepsOfLevel);
      return frontier(all_, level.workspace, budget).bound(layers, net(room, level)).cost;
    };
    levels_.search(room.workspace, bound, may, visit);
  }

  // Makes the best mix of a level the best, if that costs less: of one layout a type, or of all sets of layouts.
  void solve(const Level& level, double bound, bool all, const Layers& layers, MemoryBudget room, ReshardingPath& walks,
             WorkBudget& budget, Assignment& best) {
    const int types = layers.last_type - layers.first_type + 1;
    BoundedSets bounded;
    allow(budget);
    bounded_sets(level, bound, layers, room, walks, best.cost, all ? types + kMostChanges : types, bounded, budget);
    if (all && !bounded.complete) {
      best.bound = std::min(best.bound, bound + walks.least());
      bounded = {};
      allow(budget);
      bounded_sets(level, bound, layers, room, walks, best.cost, types + 1, bounded, budget);
    }
    std::sort(bounded.sets.begin(), bounded.sets.end());
    allow(budget);
    for (const BoundedSet& set : bounded.sets) {
      if (!is_less(set.bound, best.cost)) break;
      descend(set, layers, room, walks, best.cost, budget);
      if (order_.empty()) continue;
      const int first = layers.of[layers.first_type];
      if (types == 1) start_with_pair(first, best, budget);
      visit(0, first, 0, walk_, 0, best, budget);
      if (budget.steps() < stop_) continue;
      best.bound = std::min(best.bound, set.bound);
      break;
    }
  }

  // The choices of some layouts that need no more.
  std::vector<Choice> chosen(LayoutSet layouts, const Workspace& level, WorkBudget& budget) const {
    budget.tick(choices_.size());
    std::vector<Choice> chosen;
    for (const Choice& choice : choices_)
      if ((bit(choice.layout) & layouts) && fits_in(choice.workspace, level)) chosen.push_back(choice);
    return chosen;
  }

  const KnapsackRelaxation& frontier(LayoutSet layouts, const Workspace& level, WorkBudget& budget) {
    const auto entry = frontiers_.find({layouts, level});
    if (entry != frontiers_.end()) return entry->second;
    if (frontiers_.size() > kMostKept) frontiers_.clear();
    const std::vector<Choice> choices = chosen(layouts, level, budget);
    budget.tick(7 * choices.size());
    return frontiers_.emplace(std::make_pair(layouts, level), KnapsackRelaxation(choices)).first->second;
  }

  // Sets of so many layouts at most that may cost less than the limit at a level.
  void bounded_sets(const Level& level, double bound, const Layers& layers, MemoryBudget room, ReshardingPath& walks,
                    double limit, int most, BoundedSets& bounded, WorkBudget& budget) {
    const double mib = net(room, level);
    reduce(level.workspace, frontier(all_, level.workspace, budget).bound(layers, mib).price, walks.layouts(), budget);
    grow(0, 0, most, level, layers, mib, bound, walks, limit, bounded, budget);
  }

  // Reduced cost of the first layer of each layout, where memory has a price.
  void reduce(const Workspace& level, double price, int layouts, WorkBudget& budget) {
    const std::vector<Choice> choices = chosen(all_, level, budget);
    const std::array<double, kMostTypes> cheapest = cheapest_of(choices, price);
    reduced_.assign(layouts, kInfinity);
    for (const Choice& choice : choices) {
      double& least = reduced_[choice.layout];
      least = std::min(least, choice.cost + price * choice.memory - cheapest[choice.type]);
    }
  }

  // Adds layouts to a set. `least` is the bound of all mixes that have a layer of each of its layouts, without
  // resharding.
  void grow(LayoutSet layouts, int first, int most, const Level& level, const Layers& layers, double mib, double least,
            ReshardingPath& walks, double limit, BoundedSets& bounded, WorkBudget& budget) {
    if (most == 0) {
      bounded.complete &= first >= walks.layouts();
      return;
    }
    for (int layout = first; layout < walks.layouts(); ++layout) {
      budget.tick();
      const double more = least + reduced_[layout];
      if (!(all_ & walks.all() & bit(layout)) || !is_less(more + walks.least(), limit)) continue;
      const LayoutSet larger = layouts | bit(layout);
      const double walk = walks.cost(larger, budget);
      if (!is_less(more + walk, limit)) continue;
      if (budget.steps() >= stop_) {
        bounded.complete = false;
        return;
      }
      if (walks.is_whole(larger)) {
        const double bound = std::max(frontier(larger, level.workspace, budget).bound(layers, mib).cost, more) + walk;
        if (is_less(bound, limit)) bounded.sets.push_back({bound, larger, level});
      }
      grow(larger, layout + 1, most - 1, level, layers, mib, more, walks, limit, bounded, budget);
    }
  }

  // Least cost of one layer of each type, where memory has a price.
  static std::array<double, kMostTypes> cheapest_of(const std::vector<Choice>& choices, double price) {
    std::array<double, kMostTypes> cheapest;
    cheapest.fill(kInfinity);
    for (const Choice& choice : choices)
      cheapest[choice.type] = std::min(cheapest[choice.type], choice.cost + price * choice.memory);
    return cheapest;
  }

  // Sets the scratch up for a search over counts: choices by type and falling reduced cost, those that cannot win left
  // out.
  void descend(const BoundedSet& set, const Layers& layers, MemoryBudget room, ReshardingPath& walks, double limit,
               WorkBudget& budget) {
    const std::vector<Choice> choices = chosen(set.layouts, set.level.workspace, budget);
    layers_ = layers;
    budget_ = net(room, set.level);
    workspace_ = room.workspace;
    walk_ = walks.cost(set.layouts, budget);
    const KnapsackRelaxation::Bound bound = frontier(set.layouts, set.level.workspace, budget).bound(layers, budget_);
    floor_ = bound.cost + walk_;
    const std::array<double, kMostTypes> cheapest = cheapest_of(choices, bound.price);
    order_.clear();
    for (const Choice& choice : choices) {
      const double reduced = choice.cost + bound.price * choice.memory - cheapest[choice.type];
      if (is_less(floor_ + reduced, limit)) order_.push_back({reduced, choice});
    }
    std::sort(order_.begin(), order_.end(), [](const Priced& a, const Priced& b) {
      return a.choice.type != b.choice.type ? a.choice.type < b.choice.type : a.reduced > b.reduced;
    });
    int types = 0;
    double later = 0;
    for (std::size_t i = order_.size(); i-- > 0;) {
      Priced& here = order_[i];
      const Priced* next = i + 1 < order_.size() ? &order_[i + 1] : nullptr;
      here.last = !next || next->choice.type != here.choice.type;
      if (here.last && next) later += layers.of[next->choice.type] * next->least_memory;
      types += here.last;
      here.least_memory = here.last ? here.choice.memory : std::min(here.choice.memory, next->least_memory);
      here.later_memory = later;
    }
    if (types <= layers.last_type - layers.first_type) order_.clear();
    counts_.assign(order_.size(), 0);
  }

  // Depth first over counts, the dearest first, cut where the bound plus reduced costs cannot win.
  void visit(std::size_t i, int left, double memory, double cost, double reduced, Assignment& best,
             WorkBudget& budget) {
    budget.tick();
    if (budget.steps() >= stop_) return;
    const auto& [price, choice, last, least_memory, later] = order_[i];
    const std::size_t end = order_.size();
    if (i + 1 == end || (i + 2 == end && !last))
      return take_pair(static_cast<int>(i), static_cast<int>(end - 1), left, memory, cost, best);
    for (int n = last ? left : 0; n <= left && is_less(floor_ + reduced + n * price, best.cost); ++n) {
      const double least_others = last ? 0 : order_[i + 1].least_memory;
      if (memory + n * choice.memory + (left - n) * least_others + later > budget_) {
        if (choice.memory >= least_others) break;
        continue;
      }
      counts_[i] = n;
      const int next = last ? layers_.of[order_[i + 1].choice.type] : left - n;
      visit(i + 1, next, memory + n * choice.memory, cost + n * choice.cost, reduced + n * price, best, budget);
    }
    counts_[i] = 0;
  }

  // A good start: the best pair of choices, of those whose reduced costs leave them a chance.
  void start_with_pair(int layers, Assignment& best, WorkBudget& budget) {
    for (int a = static_cast<int>(order_.size()) - 1; a >= 0; --a) {
      const double cheap = floor_ + (layers - 1) * order_[a].reduced;
      for (int b = a; b >= 0 && is_less(cheap + order_[b].reduced, best.cost); --b) {
        budget.tick();
        take_pair(a, b, layers, 0, walk_, best);
      }
    }
  }

  // The best split of the last layers between two choices, in closed form.
  void take_pair(int i, int j, int left, double memory, double cost, Assignment& best) {
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

  template <class Emit>
  bool visit_all(std::size_t i, int left, double memory, double reduced, const BoundedSet& set, double limit,
                 Emit& emit, long& effort, WorkBudget& budget) {
    budget.tick();
    if (--effort <= 0) return false;
    const auto& [price, choice, last, least_memory, later] = order_[i];
    const bool end = i + 1 == order_.size();
    for (int n = last ? left : 0; n <= left && is_less(floor_ + reduced + n * price, limit); ++n) {
      counts_[i] = n;
      const double more = memory + n * choice.memory;
      if (more + (last ? 0 : (left - n) * order_[i + 1].least_memory) + later > budget_) continue;
      const int next = end ? 0 : last ? layers_.of[order_[i + 1].choice.type] : left - n;
      if (end ? !give(set, emit) : !visit_all(i + 1, next, more, reduced + n * price, set, limit, emit, effort, budget))
        return false;
    }
    counts_[i] = 0;
    return true;
  }

  // Emits the counts of the scratch, once: at the set and level that they need, not at wider ones.
  template <class Emit>
  bool give(const BoundedSet& set, Emit& emit) {
    std::vector<Count> counts;
    LayoutSet layouts = 0;
    Workspace workspace = workspace_;
    for (std::size_t k = 0; k < order_.size(); ++k) {
      if (!counts_[k]) continue;
      counts.push_back({order_[k].choice.id, counts_[k]});
      layouts |= bit(order_[k].choice.layout);
      workspace = most_of(workspace, order_[k].choice.workspace);
    }
    if (layouts != set.layouts || workspace != most_of(workspace_, set.level.workspace)) return true;
    return emit(counts, layouts);
  }

  std::vector<Choice> choices_;
  WorkspaceLevels levels_;
  LayoutSet all_ = 0;
  int types_ = 0;                                                       // of layers
  Map<std::pair<LayoutSet, Workspace>, KnapsackRelaxation> frontiers_;  // known ones, by layouts and level

  // Scratch of one search over counts.
  Layers layers_;
  std::vector<Priced> order_;
  std::vector<int> counts_;
  std::vector<double> reduced_;  // of each layout
  double budget_ = 0, floor_ = 0, walk_ = 0;
  Workspace workspace_{};            // of the stage
  std::size_t stop_ = 0, last_ = 0;  // steps at which a part of it is given up; all of it
};

}  // namespace galvatron
