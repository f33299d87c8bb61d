// Random and hostile problems for the search's core, each against plain enumeration.
//
//     fuzz FIRST_SEED CASES            one problem a seed
//     fuzz FIRST_SEED CASES threads    the same in two threads, and each pipeline in both of them at once
//
// Built with sanitizers by tests/planner/test_fuzz.py. Ends with the first wrong answer, telling its seed.
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "search.hpp"

using namespace galvatron;

namespace {

constexpr double kTolerance = 1e-9;

class Draw {
 public:
  explicit Draw(unsigned long seed) : engine_(seed) {}
  int from(int low, int high) { return low + static_cast<int>(engine_() % (high - low + 1)); }
  bool chance(int percent) { return from(1, 100) <= percent; }
  double unit() { return (engine_() >> 11) * 0x1p-53; }

  // By the kind of the problem: whole numbers with ties, fractions, or magnitudes up to the limits of the API.
  double number(int kind) {
    if (kind == 0) return from(0, 9);
    if (kind == 1) return 10 * unit();
    switch (from(0, 5)) {
      case 0: return 0;
      case 1: return 1e-60 * (1 + unit());
      case 2: return 1e60 * unit();
      case 3: return std::pow(10.0, from(-60, 59)) * (1 + unit());
      case 4: return 1 + from(0, 3) * 0x1p-52;
      default: return from(0, 4);
    }
  }

 private:
  std::mt19937_64 engine_;
};

[[noreturn]] void fail(unsigned long seed, const std::string& what, double a = 0, double b = 0) {
  std::printf("seed %lu: %s (%.17g, %.17g)\n", seed, what.c_str(), a, b);
  std::exit(1);
}

bool near(double a, double b) { return a == b || std::abs(a - b) <= kTolerance * std::max(std::abs(a), std::abs(b)); }

// Calls `use` with every sequence of `length` numbers below `base`.
void each_sequence(int length, int base, const std::function<void(const std::vector<int>&)>& use) {
  std::vector<int> sequence(length, 0);
  for (;;) {
    use(sequence);
    int at = length - 1;
    while (at >= 0 && ++sequence[at] == base) sequence[at--] = 0;
    if (at < 0) return;
  }
}

// --- a pipeline -----------------------------------------------------------------------------------------------------

// GPipe's lists, or 1F1B's.
Schedule lists(bool gpipe, int stages, int micro_batches) {
  const Pass forward{false}, backward{true};
  std::vector<std::vector<Run>> of(stages);
  for (int s = 0; s < stages; ++s) {
    const int early = gpipe ? micro_batches : std::min(stages - s - 1, micro_batches);
    for (Run run : {Run{{forward}, early}, Run{{forward, backward}, micro_batches - early}, Run{{backward}, early}})
      if (run.times > 0) of[s].push_back(run);
  }
  return {micro_batches, of};
}

Problem random_pipeline(Draw& draw) {
  const int kind = draw.from(0, 2) % 2, types = draw.chance(30) ? 2 : 1;
  Problem tables;
  tables.stages = draw.from(1, 3);
  tables.layers = std::max(tables.stages, types) + draw.from(0, 2);
  tables.starts = types == 1 ? std::vector<int>{0, tables.layers}
                             : std::vector<int>{0, draw.from(1, tables.layers - 1), tables.layers};
  tables.micro_batches = draw.chance(5) ? 10'000 : draw.from(1, 9);
  const bool gpipe = draw.chance(40);
  tables.passes = lists(gpipe, tables.stages, tables.micro_batches);
  auto part = [&](int layout) {
    Workspace workspace;
    for (double& term : workspace) term = draw.chance(50) ? 0 : draw.number(kind) / 2;
    return Part{{draw.number(kind), draw.number(kind), draw.number(kind)}, draw.number(kind), draw.number(kind),
                workspace, layout};
  };
  const int layouts = types * draw.from(1, 2);
  for (int g = 0; g < layouts; ++g) tables.types.push_back(g * types / layouts);
  for (int g = 0; g < layouts; ++g) tables.strategies.push_back(part(g));
  if (draw.chance(50)) tables.strategies.push_back(part(draw.from(0, layouts - 1)));
  // Prices of change are distances on a line: a metric.
  std::vector<double> place;
  for (int i = 0; i < layouts + 4; ++i) place.push_back(draw.number(kind) * (draw.chance(50) ? 0.1 : 0));
  auto distance = [&](int a, int b) { return Change{std::abs(place[a] - place[b]), 2 * std::abs(place[a] - place[b])}; };
  auto from = [&](int where) {
    std::vector<Change> changes;
    for (int g = 0; g < layouts; ++g) changes.push_back(distance(where, g));
    return changes;
  };
  for (int g = 0; g < layouts; ++g) tables.change.push_back(from(g));
  tables.enter = tables.leave = {from(layouts), from(layouts)};
  for (int v = draw.from(1, 2); v > 0; --v) tables.vocabs.push_back({part(0), part(0), from(layouts + v), from(layouts + v)});
  tables.middle = part(0);
  tables.middle.time = {};
  for (int s = 0; s < tables.stages; ++s)
    tables.in_flight.push_back(gpipe ? tables.micro_batches : std::min(tables.stages - s, tables.micro_batches));
  for (const int count : tables.in_flight) tables.held.push_back({{count}});
  tables.send = {std::vector<double>(types, 0.5), std::vector<double>(types, 0.25)};
  tables.budget = 10 * draw.unit() * (tables.layers + 2) * (gpipe && tables.micro_batches < 10 ? 3 : 2);
  return tables;
}

// Least step time over everything, and over plans that surely fit.
std::pair<double, double> enumerate(const Problem& t) {
  double best = kInfinity, best_within = kInfinity;
  StepGraph graph(t.passes);
  WorkBudget poll([] {});
  const int count = static_cast<int>(t.strategies.size());
  each_sequence(t.layers, count, [&](const std::vector<int>& choice) {
    for (int l = 0; l < t.layers; ++l)
      if (t.types[t.strategies[choice[l]].layout] != t.type_of(l)) return;
    each_sequence(t.stages - 1, t.layers, [&](const std::vector<int>& ends) {  // the last layer of each stage but one
      std::vector<int> first{0};
      for (const int end : ends) first.push_back(end + 1);
      first.push_back(t.layers);
      for (int s = 0; s < t.stages; ++s)
        if (first[s] >= first[s + 1]) return;
      for (const Vocab& vocab : t.vocabs) {
        std::vector<StageTime> times;
        std::vector<double> send;
        double excess = -kInfinity;
        for (int s = 0; s < t.stages; ++s) {
          const Part& beside = t.beside(vocab, s);
          StageTime time = beside.time;
          double used = beside.states + t.in_flight[s] * beside.activation;
          Workspace workspace = beside.workspace;
          auto pass = [&](const Change& change) { time.forward += change.forward, time.backward += change.backward; };
          for (int l = first[s]; l < first[s + 1]; ++l) {
            const Part& part = t.strategies[choice[l]];
            time.forward += part.time.forward, time.backward += part.time.backward, time.sync += part.time.sync;
            used += part.states + t.in_flight[s] * part.activation;
            workspace = most_of(workspace, part.workspace);
            if (l > first[s]) pass(t.change[t.strategies[choice[l - 1]].layout][part.layout]);
          }
          const int enters = t.strategies[choice[first[s]]].layout, leaves = t.strategies[choice[first[s + 1] - 1]].layout;
          pass(s == 0 ? vocab.enter[enters] : t.enter.at(t.is_between(first[s]))[enters]);
          pass(s + 1 == t.stages ? vocab.leave[leaves] : t.leave.at(t.is_between(first[s + 1]))[leaves]);
          times.push_back(time);
          send.push_back(s + 1 < t.stages ? t.send_to(first[s + 1]) : 0);
          excess = std::max(excess, used + total(workspace) - t.budget);
        }
        if (excess > kTolerance * t.budget) continue;
        const double step = graph.time(times, send, poll);
        best = std::min(best, step);
        if (excess < -kTolerance * t.budget) best_within = std::min(best_within, step);
      }
    });
  });
  return {best, best_within};
}

void check_pipeline(unsigned long seed, bool shared) {
  Draw draw(seed);
  const Problem tables = random_pipeline(draw);
  const auto [best, best_within] = enumerate(tables);
  PipelineSearch pipeline(tables);
  auto check = [&, best = best, best_within = best_within] {
    WorkBudget poll([] {});
    const double bound = pipeline.bound(poll), tight = pipeline.tight_bound(kInfinity, poll);
    double proven = 0;
    const PlanFound solution = pipeline.solve(kInfinity, 1'000'000'000, proven, poll);
    const PlanFound least = pipeline.least_memory(poll);
    if (solution.cost < best && !near(solution.cost, best)) fail(seed, "below the optimum", solution.cost, best);
    if (solution.cost > best_within && !near(solution.cost, best_within))
      fail(seed, "above the optimum", solution.cost, best_within);
    for (const double lower : {bound, tight, proven})
      if (lower > best_within && !near(lower, best_within)) fail(seed, "the bound is none", lower, best_within);
    if (solution.cost < kInfinity && least.cost > tables.budget * (1 + kTolerance))
      fail(seed, "the least memory is too much", least.cost, tables.budget);
    for (const bool exactly : {false, true}) {  // as where a search gives up
      if (tables.type_count() > 1) break;
      const double limit = exactly ? 2 * best_within : kInfinity;  // points are listed below a limit
      const bool ends = exactly && tables.micro_batches < 10;
      const long effort = ends ? ColumnGeneration::kMostEffort : 1'000'000;
      const double found = ColumnGeneration(tables).solve(limit, effort, proven, poll, exactly).cost;
      if (found < best && !near(found, best)) fail(seed, "a game below the optimum", found, best);
      if (ends && found > best_within && !near(found, best_within))
        fail(seed, "a game above the optimum", found, best_within);
      if (proven > best_within && !near(proven, best_within)) fail(seed, "a game's bound is none", proven, best_within);
    }
  };
  if (!shared) return check();
  std::thread other(check);
  check();
  other.join();
}

// --- stages of several chunks ---------------------------------------------------------------------------------------

// Megatron's interleaved order.
Schedule interleaved(int stages, int chunks, int rounds) {
  const int micro_batches = rounds * stages, all = micro_batches * chunks;
  std::vector<std::vector<Run>> of(stages);
  for (int s = 0; s < stages; ++s) {
    auto pass = [&](int number, bool is_backward) {
      const int chunk = number / stages % chunks;
      return Pass{is_backward, is_backward ? chunks - 1 - chunk : chunk};
    };
    const int early = std::min(2 * (stages - s - 1) + (chunks - 1) * stages, all);
    Run run{{}, 1};
    for (int i = 0; i < early; ++i) run.passes.push_back(pass(i, false));
    for (int i = early; i < all + early; ++i) {
      if (i < all) run.passes.push_back(pass(i, false));
      run.passes.push_back(pass(i - early, true));
    }
    of[s].push_back(std::move(run));
  }
  return {micro_batches, of, chunks};
}

Problem random_chunks(Draw& draw) {
  Problem tables = random_pipeline(draw);
  const int kind = draw.from(0, 1), chunks = draw.chance(70) ? 2 : 3;
  while (tables.type_count() > 1 || tables.stages != 2) tables = random_pipeline(draw);
  tables.layers = 2 * chunks + draw.from(0, chunks == 2 ? 3 : 1);
  tables.starts = {0, tables.layers};
  tables.passes = interleaved(2, chunks, draw.from(1, 4));
  tables.micro_batches = tables.passes.micro_batches();
  tables.later = tables.middle;
  tables.later.states += draw.number(kind);
  tables.held.assign(2, {});
  for (int s = 0; s < 2; ++s) {
    std::vector<int> now(chunks, 0);
    for (const Pass& pass : tables.passes.of(s).front().passes) {
      now[pass.chunk] += pass.is_backward ? -1 : 1;
      if (!pass.is_backward) tables.held[s].push_back(now);
    }
  }
  tables.budget = 10 * draw.unit() * (tables.layers + 2) * 3;
  return tables;
}

// Least step time over everything that surely fits, or that fits: nothing below is right.
std::pair<double, double> enumerate_chunks(const Problem& t) {
  const int chunks = t.passes.chunks(), all = 2 * chunks, count = static_cast<int>(t.strategies.size());
  double best = kInfinity, best_within = kInfinity;
  StepGraph graph(t.passes);
  WorkBudget poll([] {});
  each_sequence(all, t.layers, [&](const std::vector<int>& more) {
    int sum = 0;
    for (const int n : more) sum += n + 1;
    if (sum != t.layers) return;
    each_sequence(t.layers, count, [&](const std::vector<int>& choice) {
      for (const Vocab& vocab : t.vocabs) {
        std::vector<StageTime> times(all);
        std::vector<std::vector<double>> states(2, std::vector<double>(chunks)), activation = states;
        Workspace workspace[2] = {};
        for (int at = 0, l = 0; at < all; ++at) {
          const int s = at % 2, c = at / 2;
          const Part& beside = at == 0 ? vocab.first : at == all - 1 ? vocab.last : t.later;
          StageTime& time = times[at] = beside.time;
          states[s][c] = beside.states, activation[s][c] = beside.activation;
          workspace[s] = most_of(workspace[s], beside.workspace);
          auto pass = [&](const Change& change) { time.forward += change.forward, time.backward += change.backward; };
          pass((at == 0 ? vocab.enter : t.enter.inside)[t.strategies[choice[l]].layout]);
          for (int i = 0; i <= more[at]; ++i, ++l) {
            const Part& part = t.strategies[choice[l]];
            time.forward += part.time.forward, time.backward += part.time.backward, time.sync += part.time.sync;
            states[s][c] += part.states, activation[s][c] += part.activation;
            workspace[s] = most_of(workspace[s], part.workspace);
            if (i > 0) pass(t.change[t.strategies[choice[l - 1]].layout][part.layout]);
          }
          pass((at == all - 1 ? vocab.leave : t.leave.inside)[t.strategies[choice[l - 1]].layout]);
        }
        double excess = -kInfinity;
        for (int s = 0; s < 2; ++s)
          for (const std::vector<int>& held : t.held[s]) {
            double used = total(workspace[s]);
            for (int c = 0; c < chunks; ++c) used += states[s][c] + held[c] * activation[s][c];
            excess = std::max(excess, used - t.budget);
          }
        if (excess > kTolerance * t.budget) continue;
        const double step = graph.time(times, std::vector<double>(all, t.send.inside[0]), poll);
        best = std::min(best, step);
        if (excess < -kTolerance * t.budget) best_within = std::min(best_within, step);
      }
    });
  });
  return {best, best_within};
}

void check_chunks(unsigned long seed) {
  Draw draw(seed);
  const Problem tables = random_chunks(draw);
  const auto [best, best_within] = enumerate_chunks(tables);
  WorkBudget poll([] {});
  ColumnGeneration generation(tables);
  const double bound = generation.bound(poll), tight = generation.tight_bound(draw.chance(50) ? kInfinity : 2 * best_within, poll);
  for (const long effort : {1'000L, 1'000'000L}) {
    double proven = 0;
    const PlanFound found = generation.solve(kInfinity, effort, proven, poll);
    if (found.cost < best && !near(found.cost, best)) fail(seed, "chunks below the optimum", found.cost, best);
    for (const double lower : {bound, tight, proven})
      if (lower > best_within && !near(lower, best_within)) fail(seed, "a bound of chunks is none", lower, best_within);
  }
}

void run(unsigned long first, unsigned long cases, bool shared) {
  for (unsigned long seed = first; seed < first + cases; ++seed) {
    if (seed % 10 == 0)
      check_chunks(seed);
    else
      check_pipeline(seed, shared);
  }
}

}  // namespace

int main(int count, char** words) {
  if (count < 3) return 2;
  const unsigned long first = std::strtoul(words[1], nullptr, 10), cases = std::strtoul(words[2], nullptr, 10);
  if (count == 3) {
    run(first, cases, false);
  } else {
    std::thread other([&] { run(first + cases / 2, cases - cases / 2, true); });
    run(first, cases / 2, true);
    other.join();
  }
  if (held_bytes != 0) fail(first, "memory is still counted", static_cast<double>(held_bytes));
  std::printf("%lu cases are right\n", cases);
  return 0;
}
