// The fastest pipeline of alike layers, whose stages may have several chunks of them.
//
// A step takes as long as the longest path through its passes. Each path's length is a weighted sum of the chunks'
// times, and so is the mean of several paths; so the least that any plan makes of such a sum is a lower bound of all
// steps. It falls apart into stages, which share the layers out among them. This is a game between plans and paths: the
// mixtures of the known ones with which both sides fare best (balance.hpp) are answered by a plan and by a path, which
// are known from then on, and so both come closer to the optimum of fractions of layers (double oracle). What is left
// open is split: a chunk has few layers, or many. The region of least bound goes first. A single division is played out
// over its stages' strategies. Where stages answer exactly, what is left is searched as lists of their points
// (listed.hpp).
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <map>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "chunks.hpp"
#include "common.hpp"
#include "graph.hpp"
#include "listed.hpp"
#include "mixture.hpp"
#include "offers.hpp"
#include "points.hpp"
#include "region.hpp"
#include "tables.hpp"

namespace galvatron {

class PathGame {
 public:
  explicit PathGame(PipelineTables tables)
      : tables_(std::move(tables)),
        cache_(tables_),
        graph_(tables_.passes),
        chunks_(tables_.stages * tables_.passes.chunks()) {
    const std::vector<int> vocabs = useful_vocabs(tables_);
    known_ = Known(vocabs.size(), link());
    for (const int v : vocabs) {
      auto stages = std::make_unique<ChunkedStages>(tables_, tables_.vocabs[v], cache_, inner_);
      auto offers = std::make_unique<Offers>(tables_, cache_, *stages);
      games_.push_back({v, std::move(stages), std::move(offers), {}, KnownPoints(std::vector<Points>(tables_.stages))});
    }
  }

  PathGame(const PathGame&) = delete;

  static constexpr long kMostEffort = 20'000'000;  // passes: a second or two

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
    allow(kEffortOfBound, poll);
    open(limit, poll);
    for (Game& game : games_) game.stages->forget();
    return std::min({limit, best_.cost, least_open()});
  }

  // The optimum, if it costs less than `limit`; `proven`: nothing costs less than that. Given up after simulating
  // `effort` passes; then the best one found. `exactly`: stages of one chunk answer exactly, which takes longer.
  Found solve(double limit, long effort, double& proven, Poll& poll, bool exactly = false) {
    const Turn turn(busy_, poll);
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
  static constexpr long kEffortOfLists = 40'000'000;     // passes: a second
  static constexpr std::size_t kStepsOfExchange = 2'000'000;  // some 10 ms
  static constexpr double kLonger = 1.05;  // a stage's time, to see which path is longest then
  static constexpr double kSure = 0.02;    // layers by which the plans of a mixture differ
  static constexpr double kWorthwhile = 1.02;  // a plan so far above the best one is not made better

  // Over the plans under one strategy of the vocabulary.
  struct Game {
    int vocab;
    std::unique_ptr<ChunkedStages> stages;
    std::unique_ptr<Offers> offers;
    std::vector<int> division;  // whose stages work about alike
    KnownPoints points;
  };

  static bool is_later(const Region& a, const Region& b) { return a.bound > b.bound; }

  void allow(long effort, const Poll& poll) {
    stop_ = poll.steps() + kStepsOfPass * static_cast<std::size_t>(std::max(effort, 0L));
  }

  bool is_over(const Poll& poll) const { return poll.steps() >= stop_; }

  int stages() const { return tables_.stages; }
  int chunks_a_stage() const { return tables_.passes.chunks(); }
  int place(int stage, int chunk) const { return chunk * stages() + stage; }
  double link() const { return tables_.send.inside[0]; }
  double least_open() const { return regions_.empty() ? kInfinity : regions_.front().bound; }

  std::size_t number(const Game& game) const { return &game - games_.data(); }

  Weights weights_of(const PathWeights& path, int stage, int chunk) const {
    return {path.forward[place(stage, chunk)], path.backward[place(stage, chunk)], path.sync[stage]};
  }

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
      for (int c = 0; c < v; ++c) game.division[place(s, c)] = 1 + more[s] / v + (c < more[s] % v);
    return bound;
  }

  // Branch and bound over divisions. Returns what nothing costs less than.
  double searched(double limit, long effort, Poll& poll) {
    allow(std::min(effort, kMostEffort), poll);
    open(limit, poll);
    improve(poll);
    double settled = kInfinity;  // least bound of what can't be split
    if (exact_) {
      allow(std::min(effort, kEffortOfLists), poll);
      for (Region& region : std::exchange(regions_, {}))
        if (!listed(region, limit, poll)) keep(std::move(region), limit);
      allow(std::min(effort, kMostEffort), poll);
    }
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
    opened_ = -1;  // nothing is left to go on with
    return std::min({settled, least_open(), limit, best_.cost});
  }

  // Plays all games over all divisions; not again for the same limit or less.
  void open(double limit, Poll& poll) {
    if (limit <= opened_) return;
    regions_.clear();
    PathWeights weights(0, 0);  // of the game before
    for (std::size_t number = 0; number < games_.size(); ++number) {
      Game& game = games_[number];
      const double bound = dealt(game, poll);
      if (!is_less(bound, std::min(limit, best_.cost))) continue;
      known_.answers(number).clear();
      const std::vector<int> fewest(chunks_, 1), most(chunks_, tables_.layers - chunks_ + 1);
      Region all = between(fewest, most, bound, number);
      all.weights = tried(game, game.division, std::vector<Points>(stages()), poll);
      lean(game, poll);
      if (!weights.forward.empty()) all.weights = weights;
      play(all, limit, kFirstRounds, poll);
      weights = all.weights;
      keep(std::move(all), limit);
    }
    opened_ = limit;
  }

  Region between(std::vector<int> fewest, std::vector<int> most, double bound, std::size_t game) const {
    const std::vector<int> least_of(stages(), chunks_a_stage()), most_of(stages(), tables_.layers);
    return {bound,   game, std::move(fewest),              std::move(most), least_of,
            most_of, 0,    PathWeights(chunks_, stages()), {},              {},       {}, {}, {}};
  }

  // Makes those paths known that would be longest if one stage took a little longer than in the first answer.
  void lean(const Game& game, Poll& poll) {
    const std::vector<Answer>& answers = known_.answers(number(game));
    if (answers.empty()) return;
    for (int s = 0; s < stages() && !is_over(poll); ++s) {
      ChunkTimes times = answers.front().times;
      for (int c = 0; c < chunks_a_stage(); ++c)
        for (auto* some : {&times.forward, &times.backward}) (*some)[place(s, c)] *= kLonger;
      PathWeights path(chunks_, stages());
      simulate(times, path, poll);
      known_.learn(std::move(path));
    }
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
        roughly(*game.stages, times, s, own(division, s));
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
    known_.learn(number(game), division, std::move(asked ? times : shortest));
    return longest;
  }

  void keep(Region region, double limit) {
    if (!is_less(region.bound, std::min(limit, best_.cost))) return;
    regions_.push_back(std::move(region));
    std::push_heap(regions_.begin(), regions_.end(), is_later);
  }

  // Searches all of a region that may be faster as lists of stages' points, and raises its bound. False: they are too
  // many to do so to the end.
  bool listed(Region& region, double limit, Poll& poll) {
    Game& game = games_[region.game];
    const double target = std::min(limit, best_.cost);
    if (!(target < kInfinity)) return false;
    std::vector<Menu> menus = this->menus(region, limit, poll);
    if (menus.empty()) return region.bound = target, true;
    const std::vector<Offer> offers = this->offers(region, menus, region.weights, poll);
    const std::vector<std::vector<double>> others = Shares(offers, tables_.layers, poll).of_others(poll);
    std::vector<Points> points(stages());
    std::size_t left = kMostListed;
    const std::size_t stop = poll.steps() + kStepsOfListing;
    for (int s = 0; s < stages(); ++s)
      for (std::size_t more = 0; more < offers[s].costs.size(); ++more) {
        const double most = target - others[s][more] - region.weights.links * link();
        if (!is_less(offers[s].costs[more], most)) continue;
        Points found;
        const int layers = menus[s].fewest + static_cast<int>(more);
        if (!game.stages->list(s, {layers}, weights_of(region.weights, s, 0), most, left, stop, found, poll))
          return false;
        left -= found.size();
        points[s].insert(points[s].end(), found.begin(), found.end());
      }
    ListedGame listed(tables_.layers, link(), graph_, std::move(points), known_.paths());
    auto take = [&](Points plan, double time) { this->take(game, std::move(plan), time); };
    region.bound = std::max(region.bound, listed.solve(region.weights, target, stop_, take, poll));
    return !is_less(region.bound, std::min(target, best_.cost));
  }

  // Splits a region and plays both parts: by a stage's layers, then by a chunk's. False: it is a single division.
  bool split(const Region& region, double limit, Poll& poll) {
    int chosen = -1, middle = 0;
    double widest = -1;
    const bool of_stage = widest_of(region, chosen, middle);
    for (int at = 0; at < chunks_ && !of_stage; ++at) {
      const int free = region.most[at] - region.fewest[at];
      if (free == 0) continue;
      const double spread = region.spread.empty() ? 0 : region.spread[at];
      const double width = spread + 1e-6 * free / tables_.layers;
      if (width <= widest) continue;
      widest = width, chosen = at;
      middle = spread > 1e-9 ? static_cast<int>(region.mean[at]) : region.latest[at];
      middle = std::min(std::max(middle, region.fewest[at]), region.most[at] - 1);
    }
    if (chosen < 0) return false;
    for (const bool upper : {false, true}) {
      Region half = region;
      std::vector<int>& fewest = of_stage ? half.fewest_of : half.fewest;
      std::vector<int>& most = of_stage ? half.most_of : half.most;
      (upper ? fewest : most)[chosen] = upper ? middle + 1 : middle;
      play(half, limit, kRounds, poll);
      keep(std::move(half), limit);
    }
    return true;
  }

  // The stage of whose layers the mixture of plans is least sure, if it is of any.
  bool widest_of(const Region& region, int& chosen, int& middle) const {
    double widest = kSure;
    for (int s = 0; s < stages() && !region.spread_of.empty(); ++s) {
      const int mean = static_cast<int>(region.mean_of[s]);
      if (region.spread_of[s] <= widest || mean < region.fewest_of[s] || mean >= region.most_of[s]) continue;
      widest = region.spread_of[s], chosen = s, middle = mean;
    }
    return chosen >= 0;
  }

  // Raises a region's bound: the mixtures of paths and of plans with which both fare best are answered by a plan and by
  // a path, and so on. Halfway to the best weights known, answers are more useful.
  void play(Region& region, double limit, int rounds, Poll& poll) {
    Game& game = games_[region.game];
    std::vector<Menu> menus = this->menus(region, limit, poll);
    const double target = std::min(limit, best_.cost);
    region.bound = std::max(region.bound, menus.empty() ? target : longest(menus, tables_.layers));
    if (!is_less(region.bound, target)) return;
    PathWeights weights = region.weights;
    const bool exactly = exact_ || region.fewest == region.most;
    region.sum = 0;
    for (int round = 0; round < rounds; ++round) {
      std::vector<int> division;
      std::vector<Points> options(stages());
      const double sum = least(region, menus, weights, exactly, division, options, poll);
      if (sum > region.sum) region.sum = sum, region.weights = weights;
      region.bound = std::max(region.bound, sum);
      if (!(sum < kInfinity) || !is_less(region.bound, std::min(limit, best_.cost))) return;
      region.latest = division;
      tried(game, division, std::move(options), poll);
      const double open = answer(region, weights, poll);
      if (open - region.sum <= kSettled * region.sum || is_over(poll)) return;
      if (round % 2 == 0) weights = halfway(region.weights, weights);
    }
  }

  // The best mixture of the known paths against the region's known plans; learns what answers the plans' own. Returns
  // how long a step of that mixture of plans takes.
  double answer(Region& region, PathWeights& weights, Poll& poll) {
    const Mixture mixture =
        known_.mixture(region.game, [&](const std::vector<int>& division) { return region.has(division); }, poll);
    if (mixture.plans.empty()) return kInfinity;
    weights = mixture.weights;
    region.mean.assign(chunks_, 0), region.spread.assign(chunks_, 0);
    region.mean_of.assign(stages(), 0), region.spread_of.assign(stages(), 0);
    for (const auto& [share, answer] : mixture.plans)
      for (int at = 0; at < chunks_; ++at) {
        region.mean[at] += share * answer->plan[at];
        region.mean_of[at % stages()] += share * answer->plan[at];
      }
    for (const auto& [share, answer] : mixture.plans) {
      std::vector<double> beyond(stages(), 0);
      for (int at = 0; at < chunks_; ++at) {
        region.spread[at] += share * std::abs(answer->plan[at] - region.mean[at]);
        beyond[at % stages()] += answer->plan[at] - region.mean[at];
      }
      for (int s = 0; s < stages(); ++s) region.spread_of[s] += share * std::abs(beyond[s]);
    }
    PathWeights path(chunks_, stages());
    const double time = simulate(mixture.times, path, poll);
    known_.learn(std::move(path));
    return time;
  }

  // --- the plan's turn ----------------------------------------------------------------------------------------------

  // Of all stages; none where nothing of the region can win.
  std::vector<Menu> menus(const Region& region, double limit, Poll& poll) {
    ChunkedStages& exact = *games_[region.game].stages;
    std::vector<Menu> menus(stages());
    double ends = 0;
    int all_fewest = 0, all_most = 0;
    for (int s = 0; s < stages(); ++s) {
      Menu& menu = menus[s];
      const std::vector<int> fewest = own(region.fewest, s), most = own(region.most, s);
      const int few = std::accumulate(fewest.begin(), fewest.end(), 0);
      menu.fewest = std::max(few, region.fewest_of[s]);
      menu.skipped = menu.fewest - few;
      menu.ends = ends;
      const int wide = std::min({std::accumulate(most.begin(), most.end(), 0), region.most_of[s],
                                 tables_.layers - chunks_ + chunks_a_stage()});
      for (int n = menu.fewest; n <= wide; ++n) {
        const double work = exact.work(s, fewest, n - few, false, poll).least;
        if (!is_less(work + ends, std::min(limit, best_.cost))) break;
        menu.work.push_back(work);
      }
      if (menu.work.empty()) return {};
      all_fewest += menu.fewest, all_most += menu.most();
      const StageTime beside = exact.beside(s, 0);
      ends += beside.forward + beside.backward + region.fewest[s] * cache_.cheapest(0, {1, 1, 0}) + 2 * link();
    }
    if (all_fewest > tables_.layers || all_most < tables_.layers) return {};
    return menus;
  }

  std::vector<Offer> offers(const Region& region, std::vector<Menu>& menus, const PathWeights& weights, Poll& poll) {
    const Game& game = games_[region.game];
    const std::vector<int>& now = region.latest.empty() ? game.division : region.latest;
    std::vector<Offer> offers;
    for (int s = 0; s < stages(); ++s)
      offers.push_back(game.offers->of(s, region.fewest, region.most, now, weights, menus[s], poll));
    return offers;
  }

  // The least weighted sum over the divisions of a region, and a division that has it. `exactly`: of the stages of all
  // divisions that might have it the optimum is asked, and the points that have it go to `options`.
  double least(const Region& region, std::vector<Menu>& menus, const PathWeights& weights, bool exactly,
               std::vector<int>& division, std::vector<Points>& options, Poll& poll) {
    const Game& game = games_[region.game];
    std::vector<Offer> offers = this->offers(region, menus, weights, poll);
    std::vector<std::map<int, Work>> known(stages());  // by layers
    for (bool raised = true; raised;) {
      const Shares shares(offers, tables_.layers, poll);
      const double sum = shares.least();
      if (!(sum < kInfinity)) return kInfinity;
      const std::vector<int> layers = shares.layers_of_stages();
      division = region.fewest;
      for (int s = 0; s < stages(); ++s) {
        int more = layers[s] - menus[s].fewest + menus[s].skipped;
        for (const int at : offers[s].cheapest)
          for (; more > 0 && division[at] < region.most[at]; --more) ++division[at];
      }
      raised = false;
      for (int s = 0; exactly && s < stages(); ++s) {
        const auto [found, is_new] = known[s].try_emplace(layers[s]);
        Work& best = found->second;
        if (is_new) {
          std::vector<Weights> own_weights;
          for (int c = 0; c < chunks_a_stage(); ++c) own_weights.push_back(weights_of(weights, s, c));
          best = game.stages->weighted(s, own(division, s), std::move(own_weights), poll);
          double& cost = offers[s].costs[layers[s] - menus[s].fewest];
          raised = raised || is_less(cost, best.least);
          cost = std::max(cost, best.least);
        }
        options[s] = best.point ? Points{best.point} : Points{};
      }
      if (!raised) return sum + weights.links * link();
    }
    return kInfinity;
  }

  // --- the path's turn ----------------------------------------------------------------------------------------------

  // Strategies with which a stage works least, with its sync and without.
  Points busiest(Game& game, int stage, const std::vector<int>& division, Poll& poll) const {
    Points points;
    for (const bool with_sync : {true, false}) {
      const Work& work = game.stages->work(stage, own(division, stage), 0, with_sync, poll);
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
      for (const auto& point : options[s]) game.points.add(s, point);
      if (options[s].empty())
        roughly(*game.stages, times, s, own(division, s));
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
    if (fits && is_less(time, best_.cost)) take(game, std::move(chosen), time);
    return path;
  }

  // Makes a plan the best one.
  void take(Game& game, Points chosen, double time) {
    best_ = {time, game.vocab, std::vector<int>(chunks_), {}};
    for (int at = 0; at < chunks_; ++at) {
      const std::vector<int>& own = chosen[at % stages()]->strategies[at / stages()];
      best_.division[at] = static_cast<int>(own.size());
      best_.strategies.insert(best_.strategies.end(), own.begin(), own.end());
    }
    best_game_ = &game;
    best_points_ = std::move(chosen);
  }

  // Exchanges points of the best plan's stages for other known ones, as long as that helps.
  void exchange(Poll& poll) {
    if (best_.vocab < 0) return;
    Points plan = best_points_;
    const std::size_t last = std::min(stop_, poll.steps() + kStepsOfExchange);
    const double time = best_game_->points.improve(plan, graph_, link(), last, poll);
    if (is_less(time, best_.cost)) take(*best_game_, std::move(plan), time);
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
      times.forward[place(stage, c)] = beside.forward + layers[c] * cache_.cheapest(0, {1, 0, 0});
      times.backward[place(stage, c)] = beside.backward + layers[c] * cache_.cheapest(0, {0, 1, 0});
    }
  }

  double simulate(const ChunkTimes& times, PathWeights& path, Poll& poll) {
    return graph_.longest(times, link(), path, poll);
  }

  // Moves a layer of the best plan from one chunk to another, as long as that helps.
  void improve(Poll& poll) {
    exchange(poll);
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
  int chunks_;  // of all stages
  std::vector<Game> games_;
  Known known_{0, 0};
  std::vector<Region> regions_;  // not yet settled: a heap, the least bound first
  double opened_ = -1;           // limit for which they were made
  Found best_;
  Game* best_game_ = nullptr;
  Points best_points_;  // of each stage
  bool exact_ = false;  // stages of one chunk are answered exactly, whatever the division
  std::size_t stop_ = 0;  // steps after which it is given up
  std::atomic<bool> busy_{false};
};

}  // namespace galvatron
