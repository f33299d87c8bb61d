// Transient memory of a stage's layers, and the search over its levels: best first over boxes.
// README.md, step 2.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>
#include <vector>

#include "componentwise.hpp"
#include "limits.hpp"

namespace galvatron {

// Transients of layers, MiB. A stage needs each term once, for the layer that needs most of it.
using Workspace = std::array<double, 4>;

// Most workspace that a stage's layers may have, and the MiB that the stage needs then.
struct Level {
  Workspace workspace;
  double mib;
};

// The levels of workspace that layers may come to, by the need of each of their strategies. There may be thousands, so
// a search goes through boxes of levels: its strategies may need as much as the box's highest level, and memory is
// charged as for its lowest one. The box of least bound is split in two, at the middle of its widest term.
class WorkspaceLevels {
 public:
  template <class Strategies>
  explicit WorkspaceLevels(const Strategies& strategies) {
    for (const auto& strategy : strategies) needs_.push_back(strategy.workspace);
    std::sort(needs_.begin(), needs_.end());
    needs_.erase(std::unique(needs_.begin(), needs_.end()), needs_.end());
    for (const Workspace& need : needs_) least_ = least_of(least_, need), most_ = most_of(most_, need);
  }

  // Calls `visit(level, bound)` for single levels, of rising bound, as long as `may(bound)`. `bound(level)`: below the
  // cost of all mixes within a level's workspace, in memory less by its MiB; infinite where there is none.
  template <class Bound, class May, class Visit>
  void search(const Workspace& stage, Bound bound, May may, Visit visit) const {
    std::vector<Box> open;  // a heap, the least bound first
    auto is_later = [](const Box& a, const Box& b) { return a.bound > b.bound; };
    auto enter = [&](const Workspace& low, const Workspace& most) {
      const Level level{most, total(low)};
      if (!fits_in(low, most_of(most, stage))) return;  // no strategy needs as much
      open.push_back({bound(level), low, most_of(most, stage), level});
      std::push_heap(open.begin(), open.end(), is_later);
    };
    enter(most_of(least_, stage), most_);
    while (!open.empty() && may(open.front().bound)) {
      std::pop_heap(open.begin(), open.end(), is_later);
      const Box box = open.back();
      open.pop_back();
      std::size_t widest = 0;
      for (std::size_t term = 1; term < box.low.size(); ++term)
        if (box.high[term] - box.low[term] > box.high[widest] - box.low[widest]) widest = term;
      if (!(box.high[widest] > box.low[widest])) {
        visit(box.level, box.bound);
        continue;
      }
      const double middle = (box.low[widest] + box.high[widest]) / 2;
      Workspace below = box.high, most{}, low = box.low;
      below[widest] = std::min(middle, std::nexttoward(box.high[widest], 0));
      low[widest] = box.high[widest];
      for (const Workspace& need : needs_)
        if (fits_in(need, below))
          most = most_of(most, need);
        else if (need[widest] > below[widest] && fits_in(need, box.high))
          low[widest] = std::min(low[widest], need[widest]);
      enter(box.low, most), enter(low, box.level.workspace);
    }
  }

 private:
  struct Box {
    double bound;
    Workspace low, high;  // together with the stage's own
    Level level;
  };

  std::vector<Workspace> needs_;                                          // of strategies, each once
  Workspace least_{kInfinity, kInfinity, kInfinity, kInfinity}, most_{};  // of each term
};

}  // namespace galvatron
