// Points of stages that a game has come across, and plans made of them.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <vector>

#include "chunks.hpp"

namespace galvatron {

using Points = std::vector<std::shared_ptr<const ChunkedPoint>>;

class KnownPoints {
 public:
  explicit KnownPoints(int stages) : of_(stages) {}

  // Keeps a stage's point, unless another of as many layers is as good; then that stays.
  void add(int stage, const std::shared_ptr<const ChunkedPoint>& point) {
    Points& known = of_[stage];
    if (std::any_of(known.begin(), known.end(), [&](const auto& other) { return is_as_good(*other, *point); })) return;
    known.erase(
        std::remove_if(known.begin(), known.end(), [&](const auto& other) { return is_as_good(*point, *other); }),
        known.end());
    if (known.size() >= kMostPoints) known.erase(known.begin());
    known.push_back(point);
  }

  // Takes other known points for one stage of a plan, or for two whose layers add up to the same. Those go first that
  // make the plan's longest path, of which a stage's point is `length(stage, point)`, shortest; `attempt(plan)` says
  // whether to go on.
  template <class Length, class Attempt>
  void exchange(const Points& now, Length length, Attempt attempt) const {
    struct Move {
      double change;  // of the path
      int stage;      // -1: none
      std::shared_ptr<const ChunkedPoint> to;
    };
    std::map<int, std::vector<Move>> moves{{0, {{0, -1, nullptr}}}};  // by layers more
    for (int s = 0; s < static_cast<int>(of_.size()); ++s)
      for (const auto& point : of_[s])
        moves[point->layers() - now[s]->layers()].push_back({length(s, *point) - length(s, *now[s]), s, point});
    for (auto& [more, some] : moves)
      std::sort(some.begin(), some.end(), [](const Move& a, const Move& b) { return a.change < b.change; });
    for (auto fewer = moves.begin(); fewer != moves.end() && fewer->first <= 0; ++fewer) {
      const auto more = moves.find(-fewer->first);
      if (more == moves.end()) continue;
      for (const Move& one : fewer->second)
        for (const Move& two : more->second) {
          if (!(one.change + two.change < 0)) break;
          if (one.stage == two.stage) continue;
          Points plan = now;
          for (const Move* move : {&one, &two})
            if (move->to) plan[move->stage] = move->to;
          if (!attempt(std::move(plan))) return;
        }
    }
  }

 private:
  static constexpr std::size_t kMostPoints = 64;  // of a stage: what a second's answers leave, about

  static bool is_as_good(const ChunkedPoint& a, const ChunkedPoint& b) {
    auto none_longer = [](const std::vector<double>& a, const std::vector<double>& b) {
      return std::equal(a.begin(), a.end(), b.begin(), [](double a, double b) { return a <= b; });
    };
    return a.layers() == b.layers() && a.sync <= b.sync && none_longer(a.forward, b.forward) &&
           none_longer(a.backward, b.backward);
  }

  std::vector<Points> of_;
};

}  // namespace galvatron
