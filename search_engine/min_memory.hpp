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
    std::vector<Workspace> of_layers;
    for (const int k : cache.useful()) of_layers.push_back(tables.strategies[k].workspace);
    workspaces_ = workspace_levels(of_layers);
    for (int stage = 0; stage < tables.stages; ++stage) {
      if (stage > 0 && tables.in_flight[stage] == tables.in_flight[stage - 1]) {
        levels_[stage] = levels_[stage - 1];
        continue;
      }
      for (const Workspace& workspace : workspaces_) {
        Level level;
        level.mib.fill(kInfinity);
        poll.tick(cache.useful().size());
        for (const int k : cache.useful()) {
          const Part& part = tables.strategies[k];
          const double mib = part.states + tables.in_flight[stage] * part.activation;
          double& least = level.mib[cache.type_of(k)];
          if (fits_in(part.workspace, workspace) && mib < least) least = mib, level.strategy[cache.type_of(k)] = k;
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
    for (std::size_t i = 0; i < workspaces_.size(); ++i) {
      const Level& level = levels_[stage][i];
      double mib = fixed.states + held * fixed.activation + total(most_of(fixed.workspace, workspaces_[i]));
      for (int type = layers.first_type; type <= layers.last_type; ++type) mib += layers.of[type] * level.mib[type];
      if (mib < need.mib) need = {mib, level.strategy};
    }
    return need;
  }

 private:
  // Of one layer of each type, with a strategy whose workspace is not above the level's.
  struct Level {
    std::array<double, kMostTypes> mib;
    std::array<int, kMostTypes> strategy{};
  };

  const Problem& tables_;
  std::vector<Workspace> workspaces_;
  std::vector<Vector<Level>> levels_;  // of each stage, by workspace
};

}  // namespace galvatron
