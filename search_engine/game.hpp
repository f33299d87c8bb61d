// The fastest pipeline of alike layers, whose stages may have several chunks of them.
//
// A step takes as long as the longest path through its passes. Each path's length is a weighted sum of the chunks' times,
// and so is the mean of several paths; so the least that any plan makes of such a sum is a lower bound of all steps. It
// falls apart into stages, which share the layers out among them. That plan is simulated, its longest path moves the
// mean, and so on: a game between a plan and a path (fictitious play), in which both come closer to the optimum of
// fractions of layers. What is left open is split: a chunk has few layers, or many. The region of least bound goes first.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "chunks.hpp"
#include "common.hpp"
#include "graph.hpp"
#include "tables.hpp"

namespace galvatron {

class PathGame {
 public:
  explicit PathGame(PipelineTables tables)
      : tables_(std::move(tables)),
        cache_(tables_),
        graph_(tables_.passes),
        chunks_(tables_.stages * tables_.passes.chunks()) {
    for (const int v : useful_vocabs(tables_))
      games_.push_back({v, std::make_unique<ChunkedStages>(tables_, tables_.vocabs[v], cache_), {}});
  }

  PathGame(const PathGame&) = delete;

  // A lower bound of the step time, in ms: some stage works as long. Infinite where nothing fits.
  double bound(Poll& poll) {
    const Turn turn(busy_, poll);
    double least = kInfinity;
    for (Game& game : games_) least = std::min(least, dealt(game, poll));
    return least;
  }

  // A better one: the whole game's. What is beyond `limit` stays rough.
  double tight_bound(double limit, Poll& poll) {
    const Turn turn(busy_, poll);
    open(limit, poll);
    return std::min({limit, best_.cost, least_open()});
  }

  // The optimum, if it costs less than `limit`; `proven`: nothing costs less than that. Given up after simulating
  // `effort` passes; then the best one found.
  Found solve(double limit, long effort, double& proven, Poll& poll) {
    const Turn turn(busy_, poll);
    open(limit, poll);
    stop_ = poll.steps() + kStepsOfPass * static_cast<std::size_t>(std::min(std::max(effort, 0L), kMostEffort));
    improve(poll);
    double settled = kInfinity;  // least bound of what can't be split
    for (int splits = 0; !is_over(poll); ++splits) {
      const double least = least_open(), target = std::min(limit, best_.cost);
      if (!is_less(least, target) || (splits >= kExactSplits && least >= target * (1 - kNear))) break;
      std::pop_heap(regions_.begin(), regions_.end(), is_later);
      const Region region = std::move(regions_.back());
      regions_.pop_back();
      const double before = best_.cost;
      if (!split(region, limit, poll)) settled = std::min(settled, region.bound);
      if (is_less(best_.cost, before)) improve(poll);
    }
    proven = std::min({settled, least_open(), limit, best_.cost});
    opened_ = -1;  // nothing is left to go on with
    Found best = std::exchange(best_, {});
    return is_less(best.cost, limit) ? best : Found{};
  }

 private:
  static constexpr int kFirstRounds = 60, kRounds = 16;  // of the game: over all divisions, over a region
  static constexpr int kExactSplits = 400;               // made however close they are; further ones
  static constexpr double kNear = 5e-4;                  // only while they may gain this share of the time
  static constexpr std::size_t kStepsOfPass = 5;
  static constexpr long kMostEffort = 20'000'000;  // passes: a second or two

  // Over the plans under one strategy of the vocabulary.
  struct Game {
    int vocab;
    std::unique_ptr<ChunkedStages> stages;
    std::vector<int> division;  // whose stages work about alike
  };
  // Divisions in which the number of each chunk's layers is within limits.
  struct Region {
    double bound;
    std::size_t game;
    std::vector<int> fewest, most;  // layers of each chunk
    PathWeights weights;            // behind the bound
    std::vector<int> low, high;     // layers that the game has given to each chunk
    std::vector<int> latest;        // the last time
  };

  static bool is_later(const Region& a, const Region& b) { return a.bound > b.bound; }

  bool is_over(const Poll& poll) const { return poll.steps() >= stop_; }

  int stages() const { return tables_.stages; }
  int chunks_a_stage() const { return tables_.passes.chunks(); }
  int place(int stage, int chunk) const { return chunk * stages() + stage; }
  double least_open() const { return regions_.empty() ? kInfinity : regions_.front().bound; }

  std::vector<int> own(const std::vector<int>& of_all, int stage) const {
    std::vector<int> result;
    for (int chunk = 0; chunk < chunks_a_stage(); ++chunk) result.push_back(of_all[place(stage, chunk)]);
    return result;
  }

  // Shares the layers out one by one to the stage that then works least. Returns how long some stage works at least.
  double dealt(Game& game, Poll& poll) {
    const int v = chunks_a_stage();
    const std::vector<int> one(v, 1);
    std::vector<int> more(stages(), 0);
    double bound = 0;
    auto works = [&](int stage, int extra) { return game.stages->work(stage, one, extra, false, poll).least; };
    for (int s = 0; s < stages(); ++s) bound = std::max(bound, works(s, 0));
    for (int left = tables_.layers - chunks_; left > 0 && bound < kInfinity; --left) {
      int best = 0;
      for (int s = 1; s < stages(); ++s)
        if (works(s, more[s] + 1) < works(best, more[best] + 1)) best = s;
      bound = std::max(bound, works(best, ++more[best]));
    }
    game.division.assign(chunks_, 0);
    for (int s = 0; s < stages(); ++s)
      for (int c = 0; c < v; ++c) game.division[place(s, c)] = 1 + more[s] / v + (c < more[s] % v);
    return bound;
  }

  // Plays all games over all divisions; not again for the same limit or less.
  void open(double limit, Poll& poll) {
    if (limit <= opened_) return;
    regions_.clear(), best_ = {};
    stop_ = poll.steps() + kStepsOfPass * kMostEffort;
    for (std::size_t number = 0; number < games_.size(); ++number) {
      Game& game = games_[number];
      const double bound = dealt(game, poll);
      if (!is_less(bound, std::min(limit, best_.cost))) continue;
      const std::vector<int> fewest(chunks_, 1), most(chunks_, tables_.layers - chunks_ + 1);
      Region all{bound, number, fewest, most, busy_weights(), {}, {}, {}};
      attempt(game, game.division, poll);
      play(all, limit, kFirstRounds, poll);
      keep(std::move(all), limit);
    }
    opened_ = limit;
  }

  // The mean of the paths that lean on one stage: down to it, all its passes, and up again.
  PathWeights busy_weights() const {
    PathWeights weights(chunks_, stages());
    weights.sync[0] = 1;
    const double share = 1.0 / stages();
    for (int s = 0; s < stages(); ++s) {
      for (int c = 0; c < chunks_a_stage(); ++c)
        for (auto* passes : {&weights.forward, &weights.backward}) (*passes)[place(s, c)] += share * tables_.micro_batches;
      for (int above = 0; above < s; ++above)
        for (auto* passes : {&weights.forward, &weights.backward}) (*passes)[above] += share;
      weights.links += 2 * s * share;
    }
    return weights;
  }

  void keep(Region region, double limit) {
    if (!is_less(region.bound, std::min(limit, best_.cost))) return;
    regions_.push_back(std::move(region));
    std::push_heap(regions_.begin(), regions_.end(), is_later);
  }

  // Splits a region in two and plays both. False: it is one division, which stays as it is.
  bool split(const Region& region, double limit, Poll& poll) {
    int chosen = -1, widest = -1, middle = 0;
    for (int at = 0; at < chunks_; ++at) {
      const int swing = region.high[at] - region.low[at], free = region.most[at] - region.fewest[at];
      const int width = swing * 2 * tables_.layers + free;
      if (free == 0 || width <= widest) continue;
      widest = width, chosen = at;
      middle = swing ? (region.low[at] + region.high[at]) / 2 : std::min(region.latest[at], region.most[at] - 1);
    }
    if (chosen < 0) return false;
    for (const bool upper : {false, true}) {
      Region half = region;
      (upper ? half.fewest : half.most)[chosen] = upper ? middle + 1 : middle;
      play(half, limit, kRounds, poll);
      keep(std::move(half), limit);
    }
    return true;
  }

  // Raises a region's bound.
  void play(Region& region, double limit, int rounds, Poll& poll) {
    PathWeights weights = region.weights;
    std::vector<int> division;
    for (int round = 0; round < rounds; ++round) {
      const double bound = least(region, weights, limit, division, poll);
      if (bound > region.bound) region.bound = bound, region.weights = weights;
      if (!(bound < kInfinity) || !is_less(region.bound, std::min(limit, best_.cost))) return;
      if (round == 0) region.low = region.high = division;
      for (int at = 0; at < chunks_; ++at) {
        region.low[at] = std::min(region.low[at], division[at]);
        region.high[at] = std::max(region.high[at], division[at]);
      }
      region.latest = division;
      const bool is_single = region.fewest == region.most;  // division: its own longest path bounds it best
      weights.mix(attempt(games_[region.game], division, poll), is_single ? 1.0 : 1.0 / (round + 2));
      if (is_over(poll)) return;
    }
  }

  // --- the plan's turn ----------------------------------------------------------------------------------------------

  // The least weighted sum over the divisions of a region, and a division that has it; or the time that some stage of
  // each takes, where that is more.
  double least(const Region& region, const PathWeights& weights, double limit, std::vector<int>& division, Poll& poll) {
    const int layers = tables_.layers;
    std::vector<double> sums(layers + 1, kInfinity), next;  // of the stages so far, by their layers
    std::vector<std::vector<int>> taken(stages(), std::vector<int>(layers + 1, -1));
    std::vector<Offer> offers;
    sums[0] = 0;
    int first = 0, last = 0;
    double ends = 0;  // before the stage's first pass and after its last one, at least
    for (int s = 0; s < stages(); ++s) {
      offers.push_back(offer(region, weights, s, ends, limit, poll));
      const StageTime beside = games_[region.game].stages->beside(s, 0);
      ends += beside.forward + beside.backward + region.fewest[s] * cache_.cheapest(0, {1, 1, 0}) +
              2 * tables_.send.inside[0];
      const Offer& own = offers.back();
      if (own.costs.empty()) return kInfinity;
      next.assign(layers + 1, kInfinity);
      const int count = static_cast<int>(own.costs.size());
      poll.tick(count * (last - first + 1) / 2);
      for (int l = first; l <= last; ++l)
        for (int i = 0; i < count && l + own.fewest + i <= layers; ++i) {
          double& sum = next[l + own.fewest + i];
          if (sums[l] + own.costs[i] < sum) sum = sums[l] + own.costs[i], taken[s][l + own.fewest + i] = own.fewest + i;
        }
      first += own.fewest, last = std::min(last + own.fewest + count - 1, layers);
      if (first > layers) return kInfinity;
      sums.swap(next);
    }
    if (!(sums[layers] < kInfinity)) return kInfinity;
    division = region.fewest;
    for (int s = stages() - 1, left = layers; s >= 0; --s) {
      int more = taken[s][left] - offers[s].fewest;
      left -= taken[s][left];
      for (const int at : offers[s].cheapest)
        for (; more > 0 && division[at] < region.most[at]; --more) ++division[at];
    }
    return std::max(sums[layers] + weights.links * tables_.send.inside[0], longest(offers));
  }

  // What a stage adds to the weighted sum with its fewest layers, one more, and so on; those that can't win left out.
  struct Offer {
    int fewest = 0;
    std::vector<double> costs, times;  // shares in the sum, and how long the step takes at least
    std::vector<int> cheapest;  // the stage's chunks, the one first that takes layers cheapest
  };

  // The least time that the longest stage takes, whatever each takes of the layers.
  double longest(const std::vector<Offer>& offers) const {
    std::vector<std::size_t> more(offers.size(), 0);
    double longest = 0;
    int left = tables_.layers;
    for (const Offer& offer : offers) left -= offer.fewest, longest = std::max(longest, offer.times[0]);
    for (; left > 0; --left) {
      std::size_t best = 0;
      auto next = [&](std::size_t s) {
        return more[s] + 1 < offers[s].times.size() ? offers[s].times[more[s] + 1] : kInfinity;
      };
      for (std::size_t s = 1; s < offers.size(); ++s)
        if (next(s) < next(best)) best = s;
      longest = std::max(longest, next(best));
      ++more[best];
    }
    return longest;
  }

  // Of the weights, as much as all passes of the stage have in common goes to the exact optimum of its work; the rest to
  // the least times.
  Offer offer(const Region& region, const PathWeights& weights, int stage, double ends, double limit, Poll& poll) {
    ChunkedStages& exact = *games_[region.game].stages;
    const std::vector<int> fewest = own(region.fewest, stage);
    double common = kInfinity;
    for (int c = 0; c < chunks_a_stage(); ++c)
      common = std::min({common, weights.forward[place(stage, c)], weights.backward[place(stage, c)]});
    const double busy = common / tables_.micro_batches, sync = std::min(weights.sync[stage], busy);
    const double more_sync = weights.sync[stage] - sync;
    Offer result;
    std::vector<double> price(chunks_, 0);  // of a layer more
    std::vector<double> rest;               // of the first layers, one after the other
    double beside = 0;
    for (int c = 0; c < chunks_a_stage(); ++c) {
      const int at = place(stage, c);
      const Weights left{weights.forward[at] - common, weights.backward[at] - common, more_sync};
      beside += left.of(exact.beside(stage, c));
      price[at] = cache_.cheapest(0, left);
      beside += fewest[c] * price[at];
      result.fewest += fewest[c];
      result.cheapest.push_back(at);
    }
    std::stable_sort(result.cheapest.begin(), result.cheapest.end(), [&](int a, int b) { return price[a] < price[b]; });
    auto add = [&](int more) {
      const double work = exact.work(stage, fewest, more, false, poll).least;
      if (!is_less(work + ends, std::min(limit, best_.cost))) return false;
      const double with_sync = sync > 0 ? exact.work(stage, fewest, more, true, poll).least : 0;
      result.times.push_back(work + ends);
      result.costs.push_back((busy - sync) * work + sync * with_sync + beside);
      return true;
    };
    if (!add(0)) return result;
    for (const int at : result.cheapest)
      for (int n = region.fewest[at]; n < region.most[at]; ++n) {
        beside += price[at];
        const int more = static_cast<int>(result.costs.size());
        if (result.fewest + more > tables_.layers - chunks_ + chunks_a_stage() || !add(more)) return result;
      }
    return result;
  }

  // --- the path's turn ----------------------------------------------------------------------------------------------

  // The longest path under a division, with each stage's best strategies. Makes that the best, if it is.
  PathWeights attempt(Game& game, const std::vector<int>& division, Poll& poll) {
    ChunkTimes times{std::vector<double>(chunks_), std::vector<double>(chunks_), std::vector<double>(stages())};
    std::vector<const ChunkedPoint*> points(stages()), others(stages());
    bool fits = true;
    for (int s = 0; s < stages(); ++s) {
      const std::vector<int> layers = own(division, s);
      points[s] = game.stages->work(s, layers, 0, true, poll).point.get();
      others[s] = game.stages->work(s, layers, 0, false, poll).point.get();
      if (!points[s]) points[s] = others[s];
      fits = fits && points[s];
      if (points[s])
        set(times, s, *points[s]);
      else
        roughly(*game.stages, times, s, layers);
    }
    PathWeights path(chunks_, stages()), other = path;
    double time = simulate(times, path, poll);
    for (int s = 0; fits && s < stages(); ++s) {
      if (!others[s] || others[s]->sync == points[s]->sync) continue;
      set(times, s, *others[s]);
      const double attempted = simulate(times, other, poll);
      if (is_less(attempted, time))
        time = attempted, path = other, points[s] = others[s];
      else
        set(times, s, *points[s]);
    }
    if (!fits || !is_less(time, best_.cost)) return path;
    best_ = {time, game.vocab, division, {}};
    for (int at = 0; at < chunks_; ++at) {
      const std::vector<int>& chosen = points[at % stages()]->strategies[at / stages()];
      best_.strategies.insert(best_.strategies.end(), chosen.begin(), chosen.end());
    }
    best_game_ = &game;
    return path;
  }

  void set(ChunkTimes& times, int stage, const ChunkedPoint& point) const {
    for (int c = 0; c < chunks_a_stage(); ++c) {
      times.forward[place(stage, c)] = point.forward[c];
      times.backward[place(stage, c)] = point.backward[c];
    }
    times.sync[stage] = point.sync;
  }

  // As if memory had no end.
  void roughly(const ChunkedStages& exact, ChunkTimes& times, int stage, const std::vector<int>& layers) const {
    for (int c = 0; c < chunks_a_stage(); ++c) {
      const StageTime beside = exact.beside(stage, c);
      times.forward[place(stage, c)] = beside.forward + layers[c] * cache_.cheapest(0, {1, 0, 0});
      times.backward[place(stage, c)] = beside.backward + layers[c] * cache_.cheapest(0, {0, 1, 0});
    }
  }

  double simulate(const ChunkTimes& times, PathWeights& path, Poll& poll) {
    return graph_.longest(times, tables_.send.inside[0], path, poll);
  }

  // Moves a layer of the best plan from one chunk to another, as long as that helps.
  void improve(Poll& poll) {
    for (bool better = best_.vocab >= 0; better && !is_over(poll);) {
      better = false;
      const std::vector<int> from_here = best_.division;
      const double before = best_.cost;
      for (int from = 0; from < chunks_ && !better; ++from)
        for (int to = 0; to < chunks_ && from_here[from] > 1 && !better && !is_over(poll); ++to) {
          if (to == from) continue;
          std::vector<int> moved = from_here;
          --moved[from], ++moved[to];
          attempt(*best_game_, moved, poll);
          better = is_less(best_.cost, before);
        }
    }
  }

  PipelineTables tables_;
  ChoiceCache cache_;
  PassGraph graph_;
  int chunks_;  // of all stages
  std::vector<Game> games_;
  std::vector<Region> regions_;  // not yet settled: a heap, the least bound first
  double opened_ = -1;           // limit for which they were made
  Found best_;
  Game* best_game_ = nullptr;
  std::size_t stop_ = 0;  // steps after which it is given up
  std::atomic<bool> busy_{false};
};

}  // namespace galvatron
