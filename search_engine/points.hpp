// Points of stages that a game has come across, and plans made of them.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "chunks.hpp"
#include "common.hpp"
#include "graph.hpp"

namespace galvatron {

class KnownPoints {
 public:
  explicit KnownPoints(std::vector<Points> of) : of_(std::move(of)) {}

  // Keeps a stage's point, unless another of as many layers is as good; then that stays.
  void add(int stage, const std::shared_ptr<const ChunkedPoint>& point) {
    Points& known = of_[stage];
    if (!makes_way(known, *point)) return;
    if (known.size() >= kMostPoints) known.erase(known.begin());
    known.push_back(point);
  }

  // Takes other known points for one stage of a plan, or for two whose layers add up to the same, as long as that makes
  // the step shorter and `stop` isn't reached. Returns its time.
  double improve(Points& plan, PassGraph& graph, double link, std::size_t stop, Poll& poll) const {
    const std::size_t stages = plan.size(), chunks = stages * plan[0]->forward.size();
    ChunkTimes times(chunks, stages);
    PathWeights path(chunks, stages), other = path;
    for (std::size_t s = 0; s < stages; ++s) plan[s]->put(times, s);
    double least = graph.longest(times, link, path, poll);
    for (bool better = true; better && poll.steps() < stop;) {
      better = false;
      exchange(plan, path, [&](const Points& attempted) {
        for (std::size_t s = 0; s < stages; ++s)
          if (attempted[s] != plan[s]) attempted[s]->put(times, s);
        const double time = graph.longest(times, link, other, poll);
        better = is_less(time, least);
        if (better) least = time, path = other;
        for (std::size_t s = 0; s < stages; ++s)
          if (attempted[s] != plan[s]) (better ? attempted : plan)[s]->put(times, s);
        if (better) plan = attempted;
        return !better && poll.steps() < stop;
      });
    }
    return least;
  }

 private:
  // Those exchanges first that make the plan's longest path shortest; `attempt(plan)` says whether to go on.
  template <class Attempt>
  void exchange(const Points& now, const PathWeights& path, Attempt attempt) const {
    struct Move {
      double change;  // of the path
      int stage;      // -1: none
      std::shared_ptr<const ChunkedPoint> to;
    };
    std::map<int, std::vector<Move>> moves{{0, {{0, -1, nullptr}}}};  // by layers more
    for (int s = 0; s < static_cast<int>(of_.size()); ++s)
      for (const auto& point : of_[s])
        moves[point->layers() - now[s]->layers()].push_back({point->on(path, s) - now[s]->on(path, s), s, point});
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
          if (!attempt(plan)) return;
        }
    }
  }

  static constexpr std::size_t kMostPoints = 64;  // of a stage: what a second's answers leave, about

  std::vector<Points> of_;
};

}  // namespace galvatron
