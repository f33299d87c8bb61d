// The least memory in which a pipeline fits, in any time.
// README.md, step 10.
#pragma once

#include <array>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "limits.hpp"
#include "problem.hpp"
#include "workspace_levels.hpp"

namespace galvatron {

class MinMemory {
 public:
  struct Need {
    double mib = kInfinity;
    std::array<int, kMostTypes> strategy{};  // of all layers of each type
  };

  explicit MinMemory(const Problem& problem) : problem_(problem) {
    for (const int held : problem.in_flight) {
      if (choices_.count(held)) continue;
      std::vector<Choice> choices;
      for (const Part& part : problem.strategies)
        choices.push_back({part.states + held * part.activation, 0, part.workspace, static_cast<int>(choices.size()),
                           problem.types[part.layout]});
      choices = undominated(std::move(choices));
      WorkspaceLevels levels(choices);
      choices_.emplace(held, std::make_pair(std::move(choices), std::move(levels)));
    }
  }

  // Least memory of a stage with these layers.
  const Need& of(const Vocab& vocab, int stage, Span span) {
    const int held = problem_.in_flight[stage];
    const auto& [choices, levels] = choices_.at(held);
    const Part& fixed = problem_.fixed_part(vocab, stage);
    const Layers layers = problem_.layers_of(span);
    const auto [entry, is_new] = known_.try_emplace({held, &fixed, layers.of});
    Need& best = entry->second;
    if (!is_new) return best;
    auto within = [&, &choices = choices](const Level& level) {
      Need need{fixed.states + held * fixed.activation + level.mib, {}};
      for (int type = layers.first_type; type <= layers.last_type; ++type) {
        const Choice* least = nullptr;
        for (const Choice& choice : choices)  // by rising memory
          if (!least && choice.layout == type && fits_in(choice.workspace, level.workspace)) least = &choice;
        need.mib += least ? layers.of[type] * least->memory : kInfinity;
        if (least) need.strategy[type] = least->id;
      }
      return need;
    };
    levels.search(
        fixed.workspace, [&](const Level& level) { return within(level).mib; },
        [&](double bound) { return bound < best.mib; }, [&](const Level& level, double) { best = within(level); });
    return best;
  }

 private:
  const Problem& problem_;
  std::map<std::tuple<int, const Part*, std::array<int, kMostTypes>>, Need> known_;
  std::map<int, std::pair<std::vector<Choice>, WorkspaceLevels>> choices_;  // by micro-batches in flight
};

}  // namespace galvatron
