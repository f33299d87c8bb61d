// What the plans of a region add up to at least, where paths have weights: under each of its strategies of the
// vocabulary, of which only the first stage and the last one know.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <tuple>
#include <utility>
#include <vector>

#include "chunks.hpp"
#include "common.hpp"
#include "graph.hpp"
#include "offers.hpp"
#include "region.hpp"
#include "tables.hpp"

namespace galvatron {

// The plans under one strategy of the vocabulary.
struct Game {
  int vocab;
  std::unique_ptr<ChunkedStages> stages;
  std::unique_ptr<Offers> offers;
  std::vector<int> division;  // whose stages work about alike
};

// A plan that costs least on weighted paths.
struct Bid {
  double sum = kInfinity;
  int game = -1;
  std::vector<int> division;
  std::vector<Points> options;  // of each stage: the point that costs so much, where it was asked for
};

class RegionOffers {
 public:
  // As `least`, takes those games out of the region under which nothing costs less than the limit.
  RegionOffers(const PipelineTables& tables, const ChoiceCache& cache, std::vector<Game>& games, Region& region,
               double limit, Poll& poll)
      : tables_(tables), cache_(cache), places_(tables), games_(games), region_(region), inner_(tables.stages) {
    for (const int game : region.games)
      outer_.push_back({game, std::vector<Menu>(tables.stages), std::vector<Offer>(tables.stages), {}});
    double ends = 0;
    for (int s = 0; s < tables.stages; ++s) {
      StageTime beside{kInfinity, kInfinity, 0};
      auto add = [&](int game, Menu& own) {
        own = menu(game, s, ends, limit, poll);
        const StageTime time = games_[game].stages->beside(s, 0);
        beside.forward = std::min(beside.forward, time.forward);
        beside.backward = std::min(beside.backward, time.backward);
      };
      if (is_inner(s))
        add(0, inner_[s]);
      else
        for (Outer& outer : outer_) add(outer.game, outer.menus[s]);
      ends += beside.forward + beside.backward + region.fewest[s] * cache.cheapest(0, {1, 1, 0}) + 2 * link();
    }
    keep([&](const Outer& outer) {
      const double longest = this->longest(outer);
      longest_ = std::min(longest_, longest);
      return is_less(longest, limit);
    });
  }

  // The least time that the longest stage takes.
  double longest() const { return longest_; }

  // What each stage offers under a game.
  std::vector<Offer> of(int game, const PathWeights& weights, Poll& poll) {
    Outer& outer = *std::find_if(outer_.begin(), outer_.end(), [&](const Outer& one) { return one.game == game; });
    std::vector<Offer> offers;
    for (int s = 0; s < tables_.stages; ++s)
      offers.push_back(offer(is_inner(s) ? 0 : game, s, weights, is_inner(s) ? inner_[s] : outer.menus[s], poll));
    return offers;
  }

  // The least weighted sum, and a plan that has it. `exactly`: the optimum is asked of all stages that might have it.
  Bid least(const PathWeights& weights, bool exactly, double limit, Poll& poll) {
    std::vector<Offer> offers;  // of inner stages, then of the others together
    for (int s = 1; s + 1 < tables_.stages; ++s) offers.push_back(offer(0, s, weights, inner_[s], poll));
    for (Outer& outer : outer_) {
      for (int s = 0; s < tables_.stages; s += std::max(tables_.stages - 1, 1))
        outer.offers[s] = offer(outer.game, s, weights, outer.menus[s], poll);
      join(outer, poll);
    }
    offers.emplace_back();
    const double links = weights.links * link();
    std::map<std::tuple<int, int, int>, Work> known;  // by game (0: any), stage and layers
    for (bool raised = true; raised;) {
      offers.back() = together();
      const int fewest = offers.back().fewest;
      const Shares shares(offers, tables_.layers, poll);
      keep([&](const Outer& outer) {
        double sum = kInfinity;
        for (int more = 0; more < static_cast<int>(outer.joint.size()); ++more)
          sum = std::min(sum, outer.joint[more] + shares.before_last(fewest + more));
        return is_less(sum + links, limit);
      });
      if (outer_.empty()) return {};
      std::vector<int> layers = shares.layers_of_stages();
      Outer& outer = cheapest(layers.back() - fewest);
      layers = whole(layers, outer);
      Bid bid{shares.least() + links, outer.game, region_.fewest, std::vector<Points>(tables_.stages)};
      raised = false;
      for (int s = 0; s < tables_.stages; ++s) {
        const Menu& menu = is_inner(s) ? inner_[s] : outer.menus[s];
        Offer& own = is_inner(s) ? offers[s - 1] : outer.offers[s];
        int more = layers[s] - menu.fewest + menu.skipped;
        for (const int at : own.cheapest)
          for (; more > 0 && bid.division[at] < region_.most[at]; --more) ++bid.division[at];
        if (!exactly) continue;
        const auto [found, is_new] = known.try_emplace({is_inner(s) ? 0 : outer.game, s, layers[s]});
        Work& best = found->second;
        if (is_new) {
          const std::vector<int> chunks = places_.own(bid.division, s);
          best = games_[outer.game].stages->weighted(s, chunks, places_.weights(weights, s), poll);
          double& cost = own.costs[layers[s] - own.fewest];
          raised = raised || is_less(cost, best.least);
          cost = std::max(cost, best.least);
        }
        if (best.point) bid.options[s] = {best.point};
      }
      if (!raised) return bid;
      join(outer, poll);
    }
    return {};
  }

 private:
  // Of a game: the stages that know of the vocabulary. By stage; of others nothing.
  struct Outer {
    int game;
    std::vector<Menu> menus;
    std::vector<Offer> offers;
    std::vector<double> joint;  // least costs of these stages together, for their fewest layers, one more, and so on
  };

  bool is_inner(int stage) const { return stage > 0 && stage < tables_.stages - 1; }
  double link() const { return tables_.send.inside[0]; }

  // Keeps the games that may still win.
  template <class May>
  void keep(May may) {
    outer_.erase(std::remove_if(outer_.begin(), outer_.end(), [&](const Outer& outer) { return !may(outer); }),
                 outer_.end());
    region_.games.clear();
    for (const Outer& outer : outer_) region_.games.push_back(outer.game);
  }

  Menu menu(int game, int stage, double ends, double limit, Poll& poll) {
    const std::vector<int> fewest = places_.own(region_.fewest, stage), most = places_.own(region_.most, stage);
    const int few = std::accumulate(fewest.begin(), fewest.end(), 0);
    Menu menu;
    menu.fewest = std::max(few, region_.fewest_of[stage]);
    menu.skipped = menu.fewest - few;
    menu.ends = ends;
    const int others = (tables_.stages - 1) * places_.chunks;
    const int wide =
        std::min({std::accumulate(most.begin(), most.end(), 0), region_.most_of[stage], tables_.layers - others});
    for (int n = menu.fewest; n <= wide; ++n) {
      const double work = games_[game].stages->work(stage, fewest, n - few, false, poll).least;
      if (!is_less(work + ends, limit)) break;
      menu.work.push_back(work);
    }
    return menu;
  }

  double longest(const Outer& outer) const {
    return galvatron::longest(tables_.stages, tables_.layers,
                              [&](int s) -> const Menu& { return is_inner(s) ? inner_[s] : outer.menus[s]; });
  }

  Offer offer(int game, int stage, const PathWeights& weights, Menu& menu, Poll& poll) {
    return games_[game].offers->of(stage, region_.fewest, region_.most, region_.latest, weights, menu, poll);
  }

  void join(Outer& outer, Poll& poll) const {
    const Offer &first = outer.offers.front(), &last = outer.offers.back();
    outer.joint = first.costs;
    if (tables_.stages == 1) return;
    poll.tick(first.costs.size() * last.costs.size() / 4);
    outer.joint.assign(first.costs.size() + last.costs.size() - 1, kInfinity);
    for (std::size_t a = 0; a < first.costs.size(); ++a)
      for (std::size_t b = 0; b < last.costs.size(); ++b)
        outer.joint[a + b] = std::min(outer.joint[a + b], first.costs[a] + last.costs[b]);
  }

  // What these stages offer under the game in which they cost least.
  Offer together() const {
    Offer least;
    for (const Outer& outer : outer_) {
      least.fewest = outer.offers.front().fewest + (tables_.stages > 1 ? outer.offers.back().fewest : 0);
      if (outer.joint.size() > least.costs.size()) least.costs.resize(outer.joint.size(), kInfinity);
      for (std::size_t more = 0; more < outer.joint.size(); ++more)
        least.costs[more] = std::min(least.costs[more], outer.joint[more]);
    }
    return least;
  }

  // The game in which so many layers more cost these stages least.
  Outer& cheapest(int more) {
    auto cost = [&](const Outer& outer) {
      return more < static_cast<int>(outer.joint.size()) ? outer.joint[more] : kInfinity;
    };
    return *std::min_element(outer_.begin(), outer_.end(),
                             [&](const Outer& a, const Outer& b) { return cost(a) < cost(b); });
  }

  // The layers of each stage, from those of inner ones and of the others together.
  std::vector<int> whole(const std::vector<int>& layers, const Outer& outer) const {
    const Offer &first = outer.offers.front(), &last = outer.offers.back();
    if (tables_.stages == 1) return layers;
    const int more = layers.back() - first.fewest - last.fewest;
    int own = std::max(0, more - static_cast<int>(last.costs.size()) + 1);
    while (first.costs[own] + last.costs[more - own] > outer.joint[more]) ++own;
    std::vector<int> all{first.fewest + own};
    all.insert(all.end(), layers.begin(), layers.end() - 1);
    all.push_back(last.fewest + more - own);
    return all;
  }

  const PipelineTables& tables_;
  const ChoiceCache& cache_;
  Places places_;
  std::vector<Game>& games_;
  Region& region_;
  std::vector<Menu> inner_;   // of inner stages, under any game
  std::vector<Outer> outer_;  // of the region's games
  double longest_ = kInfinity;
};

}  // namespace galvatron
