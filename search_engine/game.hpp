// The fastest pipeline of alike layers, whose stages may have several chunks of them.
//
// A step takes as long as the longest path through its passes. Each path's length is a weighted sum of the chunks'
// times, and so is the mean of several paths; so the least that any plan makes of such a sum is a lower bound of all
// steps. It falls apart into stages, which share the layers out among them. This is a game between plans and paths: the
// mixtures of the known ones with which both sides fare best (balance.hpp) are answered by a plan and by a path, which
// are known from then on, and so both come closer to the optimum of fractions of layers (double oracle). What is left
// open is split: a chunk has few layers, or many; the vocabulary takes these strategies, or those. The region of least
// bound goes first. A single division is played out over its stages' strategies. Where stages answer exactly, what is
// left is searched as lists of their points (listed.hpp).
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "chunks.hpp"
#include "common.hpp"
#include "graph.hpp"
#include "listed.hpp"
#include "mixture.hpp"
#include "offers.hpp"
#include "region.hpp"
#include "region_offers.hpp"
#include "tables.hpp"

namespace galvatron {

class PathGame {
 public:
  explicit PathGame(PipelineTables tables)
      : tables_(std::move(tables)),
        cache_(tables_),
        graph_(tables_.passes),
        places_(tables_),
        chunks_(tables_.stages * tables_.passes.chunks()),
        known_(link()) {
    std::vector<int> vocabs = useful_vocabs(tables_);
    std::stable_sort(vocabs.begin(), vocabs.end(), [&](int a, int b) { return busy(a) < busy(b); });
    for (const int v : vocabs) {
      auto stages = std::make_unique<ChunkedStages>(tables_, tables_.vocabs[v], cache_, inner_);
      auto offers = std::make_unique<Offers>(tables_, cache_, *stages);
      games_.push_back({v, std::move(stages), std::move(offers), {}});
    }
  }

  PathGame(const PathGame&) = delete;

  static constexpr long kMostEffort = 20'000'000;  // passes: a second or two; of more effort a share

  // A lower bound of the step time, in ms: some stage works as long. Infinite where nothing fits.
  double bound(Poll& poll) {
    const std::lock_guard<std::mutex> lock(mutex_);
    double least = kInfinity;
    for (Game& game : games_) least = std::min(least, dealt(game, poll));
    return least;
  }

  // A better one: the whole game's. What is beyond `limit` stays rough.
  double tight_bound(double limit, Poll& poll) {
    const std::lock_guard<std::mutex> lock(mutex_);
    allow(kEffortOfBound, poll);
    open(limit, poll);
    for (Game& game : games_) game.stages->forget();
    return std::min({limit, best_.cost, least_open()});
  }

  // The optimum, if it costs less than `limit`; `proven`: nothing costs less than that. Given up after simulating
  // `effort` passes; then the best one found. `exactly`: stages of one chunk answer exactly, which takes longer.
  Found solve(double limit, long effort, double& proven, Poll& poll, bool exactly = false) {
    const std::lock_guard<std::mutex> lock(mutex_);
    exact_ = exactly && chunks_a_stage() == 1;
    proven = searched(limit, effort, poll);
    for (Game& game : games_) game.stages->forget();
    Found best = std::exchange(best_, {});
    return is_less(best.cost, limit) ? best : Found{};
  }

 private:
  static constexpr int kFirstRounds = 100, kRounds = 12;  // of the game: over all divisions, over a region
  static constexpr int kExactSplits = 400;               // made however close they are; further ones
  static constexpr double kNear = 5e-4;                  // only while they may gain this share of the time
  static constexpr double kSettled = 1e-5;               // share of the time that rounds need not raise a bound by
  static constexpr std::size_t kMostListed = 20'000;     // points of all stages
  static constexpr std::size_t kStepsOfListing = 20'000'000;  // some 0.1 s
  static constexpr std::size_t kStepsOfPass = 5;
  static constexpr long kEffortOfBound = 2'000'000;      // passes: 0.1 s
  static constexpr long kShare = 5;                      // a game's plans cost more than its passes
  static constexpr long kListsShare = 2;                 // lists have so much more effort
  static constexpr double kSure = 0.02;    // layers by which the plans of a mixture differ
  static constexpr double kWorthwhile = 1.02;  // a plan so far above the best one is not made better

  static bool is_later(const Region& a, const Region& b) { return a.bound > b.bound; }

  void allow(long effort, const Poll& poll) {
    stop_ = poll.steps() + kStepsOfPass * static_cast<std::size_t>(std::max(effort, 0L));
  }

  bool is_over(const Poll& poll) const { return poll.steps() >= stop_; }

  int stages() const { return tables_.stages; }
  int chunks_a_stage() const { return tables_.passes.chunks(); }
  double link() const { return tables_.send.inside[0]; }
  double least_open() const { return regions_.empty() ? kInfinity : regions_.front().bound; }

  int number(const Game& game) const { return static_cast<int>(&game - games_.data()); }

  // Time of a strategy of the vocabulary for one micro-batch.
  double busy(int vocab) const {
    const Vocab& own = tables_.vocabs[vocab];
    return own.first.time.forward + own.first.time.backward + own.last.time.forward + own.last.time.backward;
  }

  // Shares the layers out one by one to the stage that then works least. Returns how long some stage works at least.
  double dealt(Game& game, Poll& poll) {
    const int v = chunks_a_stage();
    const std::vector<int> one(v, 1);
    std::vector<int> more(stages(), 0);
    double bound = 0;
    const int most = tables_.layers - chunks_;
    std::vector<std::vector<double>> known;
    for (int s = 0; s < stages(); ++s) {
      known.push_back(game.stages->rough_works(s, one, most, most / stages(), poll));
      if (known.back()[0] == kInfinity) return kInfinity;
    }
    auto works = [&](int stage, int extra) { return known[stage][extra]; };
    for (int s = 0; s < stages(); ++s) bound = std::max(bound, works(s, 0));
    for (int left = tables_.layers - chunks_; left > 0 && bound < kInfinity; --left) {
      int best = 0;
      for (int s = 1; s < stages(); ++s)
        if (works(s, more[s] + 1) < works(best, more[best] + 1)) best = s;
      bound = std::max(bound, works(best, ++more[best]));
    }
    game.division.assign(chunks_, 0);
    for (int s = 0; s < stages(); ++s)
      for (int c = 0; c < v; ++c) game.division[places_.of(s, c)] = 1 + more[s] / v + (c < more[s] % v);
    return bound;
  }

  // Branch and bound over divisions. Returns what nothing costs less than.
  double searched(double limit, long effort, Poll& poll) {
    effort = std::max(std::min(effort, kMostEffort), effort / kShare);
    allow(effort, poll);
    open(limit, poll);
    improve(poll);
    double settled = kInfinity;  // least bound of what can't be split
    if (exact_) {
      allow(kListsShare * effort, poll);
      for (Region& region : std::exchange(regions_, {})) {
        list(region, limit, poll);
        keep(std::move(region), limit);
      }
      allow(effort, poll);
    }
    for (int splits = 0; !is_over(poll); ++splits) {
      const double least = least_open(), target = std::min(limit, best_.cost);
      if (!is_less(least, target) || (splits >= kExactSplits && least >= target * (1 - kNear))) break;
      std::pop_heap(regions_.begin(), regions_.end(), is_later);
      const Region region = std::move(regions_.back());
      regions_.pop_back();
      const double known = best_.cost;
      if (!split(region, limit, poll)) settled = std::min(settled, region.bound);
      if (is_less(best_.cost, known)) improve(poll);
    }
    opened_ = -1;  // nothing is left to go on with
    return std::min({settled, least_open(), limit, best_.cost});
  }

  // Plays over all divisions, under all strategies of the vocabulary; not again for the same limit or less.
  void open(double limit, Poll& poll) {
    if (limit <= opened_) return;
    regions_.clear();
    known_.answers().clear();
    Region all = everything();
    Game* likely = nullptr;
    for (Game& game : games_) {
      const double bound = dealt(game, poll);
      if (!is_less(bound, std::min(limit, best_.cost))) continue;
      all.games.push_back(number(game));
      if (is_less(bound, all.bound)) all.bound = bound, likely = &game;
    }
    if (likely) {
      all.latest = likely->division;
      all.weights = tried(*likely, likely->division, std::vector<Points>(stages()), poll);
      ChunkTimes times(chunks_, stages());
      for (const int game : all.games)  // a good plan keeps many a game from being played
        if (!is_over(poll)) attempt(games_[game], games_[game].division, times, poll);
      play(all, limit, kFirstRounds, poll);
      keep(std::move(all), limit);
    }
    opened_ = limit;
  }

  // Every division under no strategy yet.
  Region everything() const {
    Region all;
    all.bound = kInfinity;
    all.fewest.assign(chunks_, 1), all.most.assign(chunks_, tables_.layers - chunks_ + 1);
    all.fewest_of.assign(stages(), chunks_a_stage()), all.most_of.assign(stages(), tables_.layers);
    return all;
  }

  // Attempts a division, each stage with these points or with what works least; makes the first points' plan and the
  // best one's longest path known, and the first one's.
  PathWeights tried(Game& game, const std::vector<int>& division, std::vector<Points> options, Poll& poll) {
    ChunkTimes times(chunks_, stages()), shortest = times;
    bool asked = false;
    for (int s = 0; s < stages(); ++s) {
      asked = asked || !options[s].empty();
      const Points busiest = this->busiest(game, s, division, poll);
      options[s].insert(options[s].end(), busiest.begin(), busiest.end());
      if (options[s].empty())
        roughly(*game.stages, times, s, places_.own(division, s));
      else
        options[s].front()->put(times, s);
    }
    PathWeights longest = attempt(game, division, options, shortest, poll);
    known_.learn(longest);
    if (asked) {
      PathWeights path(chunks_, stages());
      simulate(times, path, poll);
      known_.learn(std::move(path));
    }
    std::vector<int> plan = division;
    plan.push_back(number(game));
    known_.learn(std::move(plan), std::move(asked ? times : shortest));
    return longest;
  }

  void keep(Region region, double limit) {
    if (region.games.empty() || !is_less(region.bound, std::min(limit, best_.cost))) return;
    regions_.push_back(std::move(region));
    std::push_heap(regions_.begin(), regions_.end(), is_later);
  }

  // Searches all of a region that may be faster as lists of stages' points, game by game, and raises its bound. Where
  // they are too many, a game stays in it.
  void list(Region& region, double limit, Poll& poll) {
    auto target = [&] { return std::min(limit, best_.cost); };  // less with each plan that is found
    if (!(target() < kInfinity)) return;
    RegionOffers offers(tables_, cache_, games_, region, target(), poll);
    double least = kInfinity;
    std::vector<int> left;
    for (const int game : region.games) {
      const double bound = listed(games_[game], region, offers.of(game, region.weights, poll), target(), poll);
      if (is_less(bound, target())) left.push_back(game), least = std::min(least, bound);
    }
    region.games = std::move(left);
    if (least < kInfinity) region.bound = std::max(region.bound, least);
  }

  // What no plan of a region costs less than under a game, as far as lists tell.
  double listed(Game& game, const Region& region, const std::vector<Offer>& offers, double target, Poll& poll) {
    const Shares shares(offers, tables_.layers, poll);
    const double links = region.weights.links * link();
    double least = std::max(region.bound, shares.least() + links);
    if (!is_less(least, target)) return least;
    const std::vector<std::vector<double>> others = shares.of_others(poll);
    std::vector<Points> points(stages());
    std::size_t left = kMostListed;
    const std::size_t stop = poll.steps() + kStepsOfListing;
    for (int s = 0; s < stages(); ++s)
      for (std::size_t more = 0; more < offers[s].costs.size(); ++more) {
        const double most = target - others[s][more] - links;
        if (!is_less(offers[s].costs[more], most)) continue;
        Points found;
        const int layers = offers[s].fewest + static_cast<int>(more);
        const Weights weights = places_.weights(region.weights, s)[0];
        if (!game.stages->list(s, {layers}, weights, most, left, stop, found, poll)) return least;
        left -= found.size();
        points[s].insert(points[s].end(), found.begin(), found.end());
      }
    ListedGame lists(tables_.layers, link(), graph_, std::move(points), known_.paths());
    auto take = [&](const Points& plan, double time) { this->take(game, plan, time); };
    return std::max(least, lists.solve(region.weights, target, stop_, take, poll));
  }

  // Splits a region where its mixture of plans is least sure, and plays both parts. False: it is a single division
  // under one strategy of the vocabulary.
  bool split(const Region& region, double limit, Poll& poll) {
    Region below = region, above = region;
    if (!by_stage(below, above) && !by_games(below, above, region.mean_game, region.spread_game > kSure) &&
        !by_chunk(below, above) &&
        !by_games(below, above, region.games[region.games.size() / 2] - 1, region.games.size() > 1))
      return false;
    for (Region* half : {&below, &above}) {
      play(*half, limit, kRounds, poll);
      keep(std::move(*half), limit);
    }
    return true;
  }

  static bool by_games(Region& below, Region& above, double middle, bool unsure) {
    auto is_above = [&](int game) { return game > middle; };
    auto& games = below.games;
    const auto end = std::find_if(games.begin(), games.end(), is_above);
    if (!unsure || end == games.begin() || end == games.end()) return false;
    above.games.assign(end, games.end());
    games.erase(end, games.end());
    return true;
  }

  // By the layers of the stage of which the mixture is least sure, if it is not of any.
  bool by_stage(Region& below, Region& above) const {
    double widest = kSure;
    int chosen = -1, middle = 0;
    for (int s = 0; s < stages() && !below.spread_of.empty(); ++s) {
      const int mean = static_cast<int>(below.mean_of[s]);
      if (below.spread_of[s] <= widest || mean < below.fewest_of[s] || mean >= below.most_of[s]) continue;
      widest = below.spread_of[s], chosen = s, middle = mean;
    }
    if (chosen < 0) return false;
    below.most_of[chosen] = middle, above.fewest_of[chosen] = middle + 1;
    return true;
  }

  bool by_chunk(Region& below, Region& above) const {
    double widest = -1;
    int chosen = -1, middle = 0;
    for (int at = 0; at < chunks_; ++at) {
      const int free = below.most[at] - below.fewest[at];
      if (free == 0) continue;
      const double spread = below.spread.empty() ? 0 : below.spread[at];
      const double width = spread + 1e-6 * free / tables_.layers;
      if (width <= widest) continue;
      widest = width, chosen = at;
      middle = spread > 1e-9 ? static_cast<int>(below.mean[at]) : below.latest[at];
      middle = std::min(std::max(middle, below.fewest[at]), below.most[at] - 1);
    }
    if (chosen < 0) return false;
    below.most[chosen] = middle, above.fewest[chosen] = middle + 1;
    return true;
  }

  // Raises a region's bound: the mixtures of paths and of plans with which both fare best are answered by a plan and by
  // a path, and so on. Halfway to the best weights known, answers are more useful.
  void play(Region& region, double limit, int rounds, Poll& poll) {
    auto target = [&] { return std::min(limit, best_.cost); };
    RegionOffers offers(tables_, cache_, games_, region, target(), poll);
    region.bound = std::max(region.bound, offers.longest());
    PathWeights weights = region.weights;
    const bool exactly = exact_ || region.fewest == region.most;
    region.sum = 0;
    for (int round = 0; round < rounds && is_less(region.bound, target()); ++round) {
      Bid bid = offers.least(weights, exactly, target(), poll);
      if (region.games.empty()) return;
      if (bid.sum > region.sum) region.sum = bid.sum, region.weights = weights;
      region.bound = std::max(region.bound, bid.sum);
      region.latest = bid.division;
      tried(games_[bid.game], bid.division, std::move(bid.options), poll);
      const double open = answer(region, weights, poll);
      if (open - region.sum <= kSettled * region.sum || is_over(poll)) return;
      if (round % 2 == 0) weights = halfway(region.weights, weights);
    }
  }

  // The best mixture of the known paths against the region's known plans; learns what answers the plans' own. Returns
  // how long a step of that mixture of plans takes.
  double answer(Region& region, PathWeights& weights, Poll& poll) {
    const Mixture mixture =
        known_.mixture([&](const std::vector<int>& plan) { return region.has(plan); }, poll);
    if (mixture.plans.empty()) return kInfinity;
    weights = mixture.weights;
    region.mean.assign(chunks_, 0), region.spread.assign(chunks_, 0);
    region.mean_of.assign(stages(), 0), region.spread_of.assign(stages(), 0);
    region.mean_game = region.spread_game = 0;
    for (const auto& [share, answer] : mixture.plans) {
      for (int at = 0; at < chunks_; ++at) {
        region.mean[at] += share * answer->plan[at];
        region.mean_of[at % stages()] += share * answer->plan[at];
      }
      region.mean_game += share * answer->plan.back();
    }
    for (const auto& [share, answer] : mixture.plans) {
      std::vector<double> beyond(stages(), 0);
      for (int at = 0; at < chunks_; ++at) {
        region.spread[at] += share * std::abs(answer->plan[at] - region.mean[at]);
        beyond[at % stages()] += answer->plan[at] - region.mean[at];
      }
      for (int s = 0; s < stages(); ++s) region.spread_of[s] += share * std::abs(beyond[s]);
      region.spread_game += share * std::abs(answer->plan.back() - region.mean_game);
    }
    PathWeights path(chunks_, stages());
    const double time = simulate(mixture.times, path, poll);
    known_.learn(std::move(path));
    return time;
  }

  // --- the path's turn ----------------------------------------------------------------------------------------------

  // Strategies with which a stage works least, with its sync and without.
  Points busiest(Game& game, int stage, const std::vector<int>& division, Poll& poll) const {
    Points points;
    for (const bool with_sync : {true, false}) {
      const Work& work = game.stages->work(stage, places_.own(division, stage), 0, with_sync, poll);
      if (work.point && (points.empty() || points[0]->sync != work.point->sync)) points.push_back(work.point);
    }
    return points;
  }

  // The longest path under a division, each stage with those of its points that make the step short. Makes that the
  // best, if it is.
  PathWeights attempt(Game& game, const std::vector<int>& division, const std::vector<Points>& options,
                      ChunkTimes& times, Poll& poll) {
    Points chosen(stages());
    bool fits = true;
    for (int s = 0; s < stages(); ++s) {
      fits = fits && !options[s].empty();
      if (options[s].empty())
        roughly(*game.stages, times, s, places_.own(division, s));
      else
        (chosen[s] = options[s].front())->put(times, s);
    }
    PathWeights path(chunks_, stages());
    double time = simulate(times, path, poll);
    PathWeights other = path;
    for (int s = 0; fits && s < stages(); ++s)
      for (std::size_t option = 1; option < options[s].size(); ++option) {
        if (!(time < best_.cost * kWorthwhile) || is_over(poll)) break;
        options[s][option]->put(times, s);
        const double attempted = simulate(times, other, poll);
        if (is_less(attempted, time))
          time = attempted, path = other, chosen[s] = options[s][option];
        else
          chosen[s]->put(times, s);
      }
    if (fits && is_less(time, best_.cost)) take(game, chosen, time);
    return path;
  }

  // Makes a plan the best one.
  void take(Game& game, const Points& chosen, double time) {
    best_ = {time, game.vocab, std::vector<int>(chunks_), {}};
    for (int at = 0; at < chunks_; ++at) {
      const std::vector<int>& own = chosen[at % stages()]->strategies[at / stages()];
      best_.division[at] = static_cast<int>(own.size());
      best_.strategies.insert(best_.strategies.end(), own.begin(), own.end());
    }
    best_game_ = &game;
  }

  PathWeights attempt(Game& game, const std::vector<int>& division, ChunkTimes& times, Poll& poll) {
    std::vector<Points> options;
    for (int s = 0; s < stages(); ++s) options.push_back(busiest(game, s, division, poll));
    return attempt(game, division, options, times, poll);
  }

  // As if memory had no end.
  void roughly(const ChunkedStages& exact, ChunkTimes& times, int stage, const std::vector<int>& layers) const {
    for (int c = 0; c < chunks_a_stage(); ++c) {
      const StageTime beside = exact.beside(stage, c);
      times.forward[places_.of(stage, c)] = beside.forward + layers[c] * cache_.cheapest(0, {1, 0, 0});
      times.backward[places_.of(stage, c)] = beside.backward + layers[c] * cache_.cheapest(0, {0, 1, 0});
    }
  }

  double simulate(const ChunkTimes& times, PathWeights& path, Poll& poll) {
    return graph_.longest(times, link(), path, poll);
  }

  // Moves a layer of the best plan from one chunk to another, as long as that helps.
  void improve(Poll& poll) {
    ChunkTimes times(chunks_, stages());
    for (bool better = best_.vocab >= 0; better && !is_over(poll);) {
      better = false;
      const std::vector<int> from_here = best_.division;
      const double before = best_.cost;
      for (int from = 0; from < chunks_ && !better; ++from)
        for (int to = 0; to < chunks_ && from_here[from] > 1 && !better && !is_over(poll); ++to) {
          if (to == from) continue;
          std::vector<int> moved = from_here;
          --moved[from], ++moved[to];
          attempt(*best_game_, moved, times, poll);
          better = is_less(best_.cost, before);
        }
    }
  }

  PipelineTables tables_;
  ChoiceCache cache_;
  KnownWorks inner_;  // of stages between the first and the last
  PassGraph graph_;
  Places places_;
  int chunks_;  // of all stages
  std::vector<Game> games_;
  Known known_;  // plans: each chunk's layers, and the game
  std::vector<Region> regions_;  // not yet settled: a heap, the least bound first
  double opened_ = -1;           // limit for which they were made
  Found best_;
  Game* best_game_ = nullptr;
  bool exact_ = false;  // stages of one chunk are answered exactly, whatever the division
  std::size_t stop_ = 0;  // steps after which it is given up
  std::mutex mutex_;  // one thread at a time
};

}  // namespace galvatron
