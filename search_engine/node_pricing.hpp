// Pricing over a node of the branch-and-bound tree: the plan of least weighted sum, under each vocabulary strategy that
// is left. Only the first and the last stage depend on the vocabulary strategy.
// README.md, steps 7 and 8.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <tuple>
#include <utility>
#include <vector>

#include "branching.hpp"
#include "critical_path.hpp"
#include "interleaved_stage.hpp"
#include "limits.hpp"
#include "pricing.hpp"
#include "problem.hpp"

namespace galvatron {

// The plans under one strategy of the vocabulary.
struct VocabCase {
  int vocab;
  std::unique_ptr<InterleavedStages> stages;
  std::unique_ptr<Pricing> pricing;
  std::vector<int> division;  // whose stages work about equally long
};

// A plan that costs least on weighted paths.
struct Column {
  double sum = kInfinity;
  int vocab_case = -1;
  std::vector<int> division;
  std::vector<Points> options;  // of each stage: the point that costs so much, where it was requested
};

class NodePricing {
 public:
  // Removes the vocabulary strategies from the node under which nothing costs less than the limit, as `least` does.
  NodePricing(const Problem& problem, const ChoiceCache& cache, std::vector<VocabCase>& vocab_cases, Node& node,
              double limit, WorkBudget& budget)
      : problem_(problem),
        cache_(cache),
        places_(problem),
        vocab_cases_(vocab_cases),
        node_(node),
        inner_(problem.stages) {
    for (const int vocab_case : node.vocab_cases)
      outer_.push_back(
          {vocab_case, std::vector<FeasibleSizes>(problem.stages), std::vector<StageCosts>(problem.stages), {}});
    const Weights trip = Weights::of_each(kTrip, 1);
    double ends = 0;
    for (int s = 0; s < problem.stages; ++s) {
      PassTimes fixed = StageTime::of_each(kPassKinds, kInfinity).passes;
      auto add = [&](int vocab_case, FeasibleSizes& sizes) {
        sizes = feasible(vocab_case, s, ends, limit, budget);
        fixed = least_of(fixed, vocab_cases_[vocab_case].stages->fixed_time(s, 0).passes);
      };
      if (is_inner(s))
        add(0, inner_[s]);
      else
        for (Outer& outer : outer_) add(outer.vocab_case, outer.feasible_of[s]);
      ends += trip.of(fixed) + node.fewest[s] * cache.cheapest(0, trip) + 2 * link();
    }
    keep([&](Outer& outer) {
      const double longest = this->longest(outer);
      longest_ = std::min(longest_, longest);
      return is_less(longest, limit);
    });
  }

  // The least time that the longest stage takes.
  double longest() const { return longest_; }

  // Costs of each stage under a vocabulary strategy.
  std::vector<StageCosts> of(int vocab_case, const PathWeights& weights, WorkBudget& budget) {
    Outer& outer =
        *std::find_if(outer_.begin(), outer_.end(), [&](const Outer& outer) { return outer.vocab_case == vocab_case; });
    std::vector<StageCosts> stage_costs;
    for (int s = 0; s < problem_.stages; ++s)
      stage_costs.push_back(stage_cost(is_inner(s) ? 0 : vocab_case, s, weights, sizes(outer, s), budget));
    return stage_costs;
  }

  // The least weighted sum, and a plan that has it. `exactly`: the optimum is asked of all stages that might have it.
  Column least(const PathWeights& weights, bool exactly, double limit, WorkBudget& budget) {
    std::vector<StageCosts> stage_costs;  // of inner stages, then of the others together
    for (int s = 1; s + 1 < problem_.stages; ++s) stage_costs.push_back(stage_cost(0, s, weights, inner_[s], budget));
    for (Outer& outer : outer_) {
      for (int s = 0; s < problem_.stages; s += std::max(problem_.stages - 1, 1))
        outer.stage_costs[s] = stage_cost(outer.vocab_case, s, weights, outer.feasible_of[s], budget);
      join(outer, budget);
    }
    stage_costs.emplace_back();
    const double links = weights.links * link();
    std::map<std::tuple<int, int, int>, Work> works;  // by vocabulary strategy (0: any), stage and layers
    for (bool raised = true; raised;) {
      stage_costs.back() = together();
      const int fewest = stage_costs.back().fewest;
      const AllocationDp allocation(stage_costs, problem_.layers, budget);
      keep([&](const Outer& outer) {
        double sum = kInfinity;
        for (int more = 0; more < static_cast<int>(outer.joint.size()); ++more)
          sum = std::min(sum, outer.joint[more] + allocation.before_last(fewest + more));
        return is_less(sum + links, limit);
      });
      if (outer_.empty()) return {};
      std::vector<int> layers = allocation.layers_of_stages();
      Outer& outer = cheapest(layers.back() - fewest);
      layers = whole(layers, outer);
      Column column{allocation.least() + links, outer.vocab_case, node_.fewest, std::vector<Points>(problem_.stages)};
      raised = false;
      for (int s = 0; s < problem_.stages; ++s) {
        const FeasibleSizes& feasible = sizes(outer, s);
        StageCosts& stage_cost = is_inner(s) ? stage_costs[s - 1] : outer.stage_costs[s];
        int more = layers[s] - feasible.fewest + feasible.skipped;
        for (const int chunk : stage_cost.cheapest)
          for (const int at = places_.of(s, chunk); more > 0 && column.division[at] < node_.most[at]; --more)
            ++column.division[at];
        if (!exactly) continue;
        const auto [entry, is_new] = works.try_emplace({is_inner(s) ? 0 : outer.vocab_case, s, layers[s]});
        Work& best = entry->second;
        if (is_new) {
          const std::vector<int> chunks = places_.of_stage(column.division, s);
          best = vocab_cases_[outer.vocab_case].stages->weighted(s, chunks, places_.weights(weights, s), budget);
          double& cost = stage_cost.costs[layers[s] - stage_cost.fewest];
          raised = raised || is_less(cost, best.least);
          cost = std::max(cost, best.least);
        }
        if (best.point) column.options[s] = {best.point};
      }
      if (!raised) return column;
      join(outer, budget);
    }
    return {};
  }

 private:
  // The stages that depend on the vocabulary strategy, under one of them. By stage; empty for the others.
  struct Outer {
    int vocab_case;
    std::vector<FeasibleSizes> feasible_of;
    std::vector<StageCosts> stage_costs;
    std::vector<double> joint;  // least costs of these stages together, for their fewest layers, one more, and so on
  };

  FeasibleSizes& sizes(Outer& outer, int stage) { return is_inner(stage) ? inner_[stage] : outer.feasible_of[stage]; }
  bool is_inner(int stage) const { return stage > 0 && stage < problem_.stages - 1; }
  double link() const { return problem_.send.inside[0]; }

  // Keeps the vocabulary strategies that may still win.
  template <class May>
  void keep(May may) {
    outer_.erase(std::remove_if(outer_.begin(), outer_.end(), [&](Outer& outer) { return !may(outer); }), outer_.end());
    node_.vocab_cases.clear();
    for (const Outer& outer : outer_) node_.vocab_cases.push_back(outer.vocab_case);
  }

  FeasibleSizes feasible(int vocab_case, int stage, double ends, double limit, WorkBudget& budget) {
    const std::vector<int> fewest = places_.of_stage(node_.fewest, stage), most = places_.of_stage(node_.most, stage);
    const int few = std::accumulate(fewest.begin(), fewest.end(), 0);
    FeasibleSizes feasible;
    feasible.fewest = std::max(few, node_.fewest_of[stage]);
    feasible.skipped = feasible.fewest - few;
    feasible.ends = ends;
    const int others = (problem_.stages - 1) * places_.chunks;
    const int wide =
        std::min({std::accumulate(most.begin(), most.end(), 0), node_.most_of[stage], problem_.layers - others});
    for (int n = feasible.fewest; n <= wide; ++n) {
      const double work = vocab_cases_[vocab_case].stages->work(stage, fewest, n - few, false, budget).least;
      if (!is_less(work + ends, limit)) break;
      feasible.work.push_back(work);
    }
    return feasible;
  }

  double longest(Outer& outer) {
    int left = problem_.layers;
    for (int s = 0; s < problem_.stages; ++s) left -= sizes(outer, s).fewest;
    std::vector<int> more(problem_.stages, 0);
    return left < 0 ? kInfinity : share_out(left, more, [&](int s, int extra) { return sizes(outer, s).at(extra); });
  }

  StageCosts stage_cost(int vocab_case, int stage, const PathWeights& weights, FeasibleSizes& feasible,
                        WorkBudget& budget) {
    auto here = [&](const std::vector<int>& of_all) { return places_.of_stage(of_all, stage); };
    return vocab_cases_[vocab_case].pricing->of(stage, here(node_.fewest), here(node_.most), here(node_.latest),
                                                places_.weights(weights, stage), feasible, budget);
  }

  void join(Outer& outer, WorkBudget& budget) const {
    const StageCosts &first = outer.stage_costs.front(), &last = outer.stage_costs.back();
    outer.joint = first.costs;
    if (problem_.stages == 1) return;
    budget.tick(first.costs.size() * last.costs.size() / 4);
    outer.joint.assign(first.costs.size() + last.costs.size() - 1, kInfinity);
    for (std::size_t a = 0; a < first.costs.size(); ++a)
      for (std::size_t b = 0; b < last.costs.size(); ++b)
        outer.joint[a + b] = std::min(outer.joint[a + b], first.costs[a] + last.costs[b]);
  }

  // Costs of these stages under the vocabulary strategy with which they cost least.
  StageCosts together() const {
    StageCosts least;
    for (const Outer& outer : outer_) {
      least.fewest = outer.stage_costs.front().fewest + (problem_.stages > 1 ? outer.stage_costs.back().fewest : 0);
      if (outer.joint.size() > least.costs.size()) least.costs.resize(outer.joint.size(), kInfinity);
      for (std::size_t more = 0; more < outer.joint.size(); ++more)
        least.costs[more] = std::min(least.costs[more], outer.joint[more]);
    }
    return least;
  }

  // The vocabulary strategy with which so many layers more cost these stages least.
  Outer& cheapest(int more) {
    auto cost = [&](const Outer& outer) {
      return more < static_cast<int>(outer.joint.size()) ? outer.joint[more] : kInfinity;
    };
    return *std::min_element(outer_.begin(), outer_.end(),
                             [&](const Outer& a, const Outer& b) { return cost(a) < cost(b); });
  }

  // The layers of each stage, from those of inner ones and of the others together.
  std::vector<int> whole(const std::vector<int>& layers, const Outer& outer) const {
    const StageCosts &first = outer.stage_costs.front(), &last = outer.stage_costs.back();
    if (problem_.stages == 1) return layers;
    const int more = layers.back() - first.fewest - last.fewest;
    int extra = std::max(0, more - static_cast<int>(last.costs.size()) + 1);
    while (first.costs[extra] + last.costs[more - extra] > outer.joint[more]) ++extra;
    std::vector<int> all{first.fewest + extra};
    all.insert(all.end(), layers.begin(), layers.end() - 1);
    all.push_back(last.fewest + more - extra);
    return all;
  }

  const Problem& problem_;
  const ChoiceCache& cache_;
  ChunkPlaces places_;
  std::vector<VocabCase>& vocab_cases_;
  Node& node_;
  std::vector<FeasibleSizes> inner_;  // of inner stages, under any vocabulary strategy
  std::vector<Outer> outer_;          // by vocabulary strategy of the node
  double longest_ = kInfinity;
};

}  // namespace galvatron
