// The least memory in which a pipeline fits, whatever its time.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "limits.hpp"
#include "problem.hpp"
#include "stage_solver.hpp"

namespace galvatron {

class MinMemory {
 public:
  struct Need {
    double mib = kInfinity;
    std::array<int, kMostTypes> strategy{};  // of all layers of each type
  };

  MinMemory(const Problem& tables, const ChoiceCache& cache,
            WorkBudget& poll) : tables_(tables), levels_(tables.stages) {
    for (const int k : cache.useful()) workings_.push_back(tables.strategies[k].working);
    std::sort(workings_.begin(), workings_.end());
    workings_.erase(std::unique(workings_.begin(), workings_.end()), workings_.end());
    for (int stage = 0; stage < tables.stages; ++stage) {
      Level level;
      level.mib.fill(kInfinity);
      if (stage > 0 && tables.in_flight[stage] == tables.in_flight[stage - 1]) {
        levels_[stage] = levels_[stage - 1];
        continue;
      }
      for (const double working : workings_) {
        poll.tick(cache.useful().size());
        for (const int k : cache.useful()) {
          const Part& part = tables.strategies[k];
          const double mib = part.states + tables.in_flight[stage] * part.activation;
          double& least = level.mib[cache.type_of(k)];
          if (part.working == working && mib < least) least = mib, level.strategy[cache.type_of(k)] = k;
        }
        levels_[stage].push_back(level);
      }
    }
  }

  // Of a stage with these layers.
  Need of(const Vocab& vocab, int stage, Span span) const {
    const int held = tables_.in_flight[stage];
    const Part& fixed = tables_.beside(vocab, stage);
    const Layers layers = tables_.layers_of(span);
    Need need;
    for (std::size_t i = 0; i < workings_.size(); ++i) {
      const Level& level = levels_[stage][i];
      double mib = fixed.states + held * fixed.activation + std::max(fixed.working, workings_[i]);
      for (int type = layers.first_type; type <= layers.last_type; ++type) mib += layers.of[type] * level.mib[type];
      if (mib < need.mib) need = {mib, level.strategy};
    }
    return need;
  }

 private:
  // Of one layer of each type, with a strategy whose working memory is not above the level's.
  struct Level {
    std::array<double, kMostTypes> mib;
    std::array<int, kMostTypes> strategy{};
  };

  const Problem& tables_;
  std::vector<double> workings_;            // rising
  std::vector<Vector<Level>> levels_;       // of each stage, by working memory
};

}  // namespace galvatron
