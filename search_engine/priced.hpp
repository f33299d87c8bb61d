// What the plans of a region cost at least where paths have weights and the memory of each moment has a price.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "chunks.hpp"
#include "common.hpp"
#include "graph.hpp"
#include "offers.hpp"
#include "region.hpp"
#include "region_offers.hpp"
#include "tables.hpp"

namespace galvatron {

class PricedRegion {
 public:
  PricedRegion(const PipelineTables& tables, const std::vector<Game>& games)
      : tables_(tables), games_(games), places_(tables) {}

  // The least weighted sum of whole layers a stage, whatever the prices. Takes those games out of the region under
  // which nothing costs less than the limit; `working`: MiB that each stage needs so much of then.
  double least(Region& region, const PathWeights& weights, const std::vector<std::vector<double>>& memory, double link,
               double limit, std::vector<double>& working, Poll& poll) const {
    std::vector<Offer> offers(tables_.stages);
    for (int s = 1; s + 1 < tables_.stages; ++s) offers[s] = offer(region, 0, s, weights, memory[s], working[s], poll);
    double least = kInfinity;
    std::vector<int> left;
    for (const int game : region.games) {
      double first = 0, last = 0;
      offers.front() = offer(region, game, 0, weights, memory.front(), first, poll);
      if (tables_.stages > 1)
        offers.back() = offer(region, game, tables_.stages - 1, weights, memory.back(), last, poll);
      const double sum = Shares(offers, tables_.layers, poll).least() + weights.links * link;
      if (is_less(sum, limit)) left.push_back(game);
      if (!(sum < least)) continue;
      least = sum, working.front() = first;
      if (tables_.stages > 1) working.back() = last;
    }
    region.games = std::move(left);
    return least;
  }

 private:
  Offer offer(const Region& region, int game, int stage, const PathWeights& weights, const std::vector<double>& memory,
              double& working, Poll& poll) const {
    const ChunkedStages& stages = *games_[game].stages;
    const std::vector<int> few = places_.own(region.fewest, stage), many = places_.own(region.most, stage);
    const int fewest = std::accumulate(few.begin(), few.end(), 0), most = std::accumulate(many.begin(), many.end(), 0);
    Offer offer;
    offer.fewest = std::max(fewest, region.fewest_of[stage]);
    const int others = (tables_.stages - 1) * places_.chunks;
    const int count = std::min({most, region.most_of[stage], tables_.layers - others}) - offer.fewest + 1;
    if (count < 1) {
      offer.costs = {kInfinity};
      return offer;
    }
    offer.costs.assign(count, kInfinity);
    const int skipped = offer.fewest - fewest;
    const int mean = static_cast<int>(region.mean_of[stage] + 0.5);
    const int target = std::min(std::max(mean - offer.fewest, 0), count - 1);
    const double price = std::accumulate(memory.begin(), memory.end(), 0.0);
    std::vector<double> held(places_.chunks, 0);  // on the moments' average
    for (int c = 0; c < places_.chunks; ++c)
      for (std::size_t moment = 0; moment < memory.size(); ++moment)
        held[c] += tables_.held[stage][moment][c] * (price > 0 ? memory[moment] / price : 1.0 / memory.size());
    std::vector<int> order;
    poll.tick(stages.choices());
    stages.relax(stage, held, places_.weights(weights, stage), price,
                 [&](double cost, const std::vector<double>& layer, double level) {
                   cheapest_first(cost, layer, few, many, skipped, count, order, [&](int at, double sum) {
                     if (!(sum < offer.costs[at])) return;
                     offer.costs[at] = sum;
                     if (at == target) working = level;
                   });
                 });
    return offer;
  }

  const PipelineTables& tables_;
  const std::vector<Game>& games_;
  Places places_;
};

}  // namespace galvatron
