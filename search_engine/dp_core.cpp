// The Python module galvatron_dp_core: arrays in, arrays out. The one unit that includes all the rest of the core.
// README.md, step 10.
#if __cplusplus < 201703L
#error "galvatron_dp_core needs C++17: compile it with -std=c++17"
#endif

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "column_generation.hpp"
#include "critical_path.hpp"
#include "search.hpp"

namespace py = pybind11;
using namespace galvatron;

namespace {

using Array = py::array_t<double, py::array::c_style | py::array::forcecast>;

// Within these, sums, products and quotients of entries, and of their differences, neither overflow nor vanish.
constexpr double kSmallest = 1e-60, kLargest = 1e60;
constexpr py::ssize_t kMostLayers = 100'000, kMostLayerTypes = 8, kMostStrategies = 2'000, kMostVocabs = 2'000;
constexpr py::ssize_t kMostCells = 5'000'000;
constexpr py::ssize_t kKinds = kPassKinds.size(), kNumbers = kKinds + 3 + std::tuple_size<Workspace>::value;
constexpr std::int64_t kMostMicroBatches = 1'000'000, kMostChunks = 1'000;

// Set by one thread to end a search in another.
class Cancel {
 public:
  void cancel() { flag_ = true; }
  bool cancelled() const { return flag_; }

 private:
  std::atomic<bool> flag_{false};
};

// A check that ends the search on Ctrl-C (in the main thread) or when it was cancelled.
WorkBudget budget_for(const Cancel* cancel) {
  return WorkBudget([cancel] {
    if (cancel && cancel->cancelled()) throw std::runtime_error("the search was cancelled");
    py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  });
}

void check_number(const std::string& name, double value) {
  if (std::isnan(value)) throw py::value_error(name + ": is NaN");
  if (value < 0) throw py::value_error(name + ": is negative");
  if (value > 0 && value < kSmallest) throw py::value_error(name + ": is between 0 and 1e-60; give 0");
}

void check_shape(const std::string& name, const Array& array, const std::vector<py::ssize_t>& shape) {
  const std::vector<py::ssize_t> actual(array.shape(), array.shape() + array.ndim());
  auto text = [](const std::vector<py::ssize_t>& lengths) {
    std::string text;
    for (const py::ssize_t length : lengths) text += (text.empty() ? "" : ", ") + std::to_string(length);
    return "[" + text + "]";
  };
  if (actual != shape) throw py::value_error(name + ": has shape " + text(actual) + "; give " + text(shape));
}

void check_all(const std::string& name, const Array& array, const std::vector<py::ssize_t>& shape) {
  check_shape(name, array, shape);
  for (const double* entry = array.data(); entry != array.data() + array.size(); ++entry) {
    if (std::isnan(*entry)) throw py::value_error(name + ": holds NaN");
    if (*entry < 0) throw py::value_error(name + ": holds a negative number");
    if (std::isinf(*entry)) throw py::value_error(name + ": holds an infinite number");
    if (*entry > kLargest) throw py::value_error(name + ": holds a number above 1e60");
    if (*entry > 0 && *entry < kSmallest) throw py::value_error(name + ": holds a number between 0 and 1e-60; give 0");
  }
}

using Integers = py::array_t<std::int64_t, py::array::c_style | py::array::forcecast>;

Part part_of(const double* numbers, int layout = 0) {
  const double* others = numbers + kKinds;
  Part part{{{}, others[0]}, others[1], others[2], {}, layout};
  std::copy(numbers, others, part.time.passes.begin());
  std::copy(others + 3, numbers + kNumbers, part.workspace.begin());
  return part;
}

std::vector<PassTimes> changes_of(const double* numbers, py::ssize_t count) {
  std::vector<PassTimes> changes(count);
  for (PassTimes& change : changes) std::copy_n(std::exchange(numbers, numbers + kKinds), kKinds, change.begin());
  return changes;
}

ByBoundary<std::vector<PassTimes>> changes_by_boundary(const Array& array, py::ssize_t count) {
  return {changes_of(array.data(0), count), changes_of(array.data(1), count)};
}

// First layer of each type, and the number of layers. Checks the counts.
std::vector<int> starts_of(const Integers& layers) {
  if (layers.ndim() != 1 || layers.size() < 1 || layers.size() > kMostLayerTypes)
    throw py::value_error("layers: give the number of layers of each type, of 8 types at most");
  std::vector<int> starts{0};
  for (py::ssize_t type = 0; type < layers.size(); ++type) {
    const std::int64_t count = layers.data()[type];
    if (count < 1 || count > kMostLayers - starts.back())
      throw py::value_error("layers: at least 1 of each type, and at most 100000");
    starts.push_back(starts.back() + static_cast<int>(count));
  }
  return starts;
}

// The lists of passes of all stages; see paddlenlp_galvatron.plan.schedule.arrays. Checks them.
Schedule lists_of(const Integers& passes, const Integers& runs, py::ssize_t stages, std::int64_t micro_batches) {
  if (micro_batches < 1 || micro_batches > kMostMicroBatches) throw py::value_error("micro_batches: give 1 to 1000000");
  if (passes.ndim() != 2 || passes.shape(1) != 3)
    throw py::value_error("passes: give kind, chunk and micro-batch of each");
  if (runs.ndim() != 2 || runs.shape(1) != 4) throw py::value_error("runs: give stage, passes, times and step of each");
  std::int64_t chunks = 1;
  for (py::ssize_t i = 0; i < passes.shape(0); ++i) {
    const std::int64_t kind = passes.at(i, 0), chunk = passes.at(i, 1);
    if (kind < 0 || kind >= kKinds || chunk < 0 || chunk >= kMostChunks)
      throw py::value_error("passes: kind or chunk is out of range");
    chunks = std::max(chunks, chunk + 1);
  }
  std::vector<std::vector<Run>> of(stages);
  std::vector<std::int64_t> done(stages * chunks * kKinds, 0);  // micro-batches of each stage, chunk and kind
  py::ssize_t at = 0;
  for (py::ssize_t i = 0; i < runs.shape(0); ++i) {
    const std::int64_t stage = runs.at(i, 0), count = runs.at(i, 1), times = runs.at(i, 2), step = runs.at(i, 3);
    if (stage < 0 || stage >= stages || (i > 0 && stage < runs.at(i - 1, 0)))
      throw py::value_error("runs: stages are out of range or do not rise");
    if (count < 1 || count > passes.shape(0) - at || times < 1 || times > micro_batches)
      throw py::value_error("runs: passes or times are out of range");
    Run run{{}, static_cast<int>(times)};
    std::map<std::int64_t*, std::int64_t> in_run;
    for (const py::ssize_t end = at + count; at < end; ++at) {
      const std::int64_t kind = passes.at(at, 0), chunk = passes.at(at, 1);
      std::int64_t& passes_done = done[(stage * chunks + chunk) * kKinds + kind];
      if (passes.at(at, 2) != passes_done + in_run[&passes_done]++)
        throw py::value_error("passes: micro-batches of a stage, chunk and kind are not 0, 1, 2, …");
      run.passes.push_back({static_cast<PassKind>(kind), static_cast<int>(chunk)});
    }
    for (const auto& [passes_done, each] : in_run) {
      if (times > 1 && each != step)
        throw py::value_error("runs: step is not the passes_done of micro-batches in a run");
      *passes_done += each * times;
    }
    of[stage].push_back(std::move(run));
  }
  for (const std::int64_t count : done)
    if (count != micro_batches)
      throw py::value_error("passes: not every micro-batch goes forward and backward everywhere");
  return {static_cast<int>(micro_batches), std::move(of), static_cast<int>(chunks)};
}

double step_ms(const Integers& passes, const Integers& runs, std::int64_t micro_batches, const Array& each,
               const Array& sync, const Array& send) {
  const py::ssize_t stages = sync.size();
  if (stages < 1) throw py::value_error("sync: no stages");
  check_shape("sync", sync, {stages});
  const Schedule lists = lists_of(passes, runs, stages, micro_batches);
  const py::ssize_t chunks = stages * lists.chunks();
  check_shape("passes_ms", each, {kKinds, chunks});
  if (send.ndim() != 1 || send.size() < chunks - 1)
    throw py::value_error("send: one less than there are chunks of stages");
  std::vector<StageTime> times(chunks);
  for (py::ssize_t at = 0; at < chunks; ++at) {
    for (const PassKind kind : kPassKinds) times[at].passes[kind] = each.at(static_cast<int>(kind), at);
    if (at < stages) times[at].sync = sync.at(at);
  }
  WorkBudget budget = budget_for(nullptr);
  return StepGraph(lists).time(times, {send.data(), send.data() + send.size()}, budget);
}

int in_flight_of(std::int64_t count, int least, int micro_batches) {
  if (count < least || count > micro_batches) throw py::value_error("in_flight: between 1 and micro_batches");
  return static_cast<int>(count);
}

// Micro-batches in flight: a row for each moment, the stage and a number a chunk.
void set_in_flight(Problem& problem, const Integers& in_flight) {
  const int chunks = problem.passes.chunks();
  if (in_flight.shape(1) != 1 + chunks) throw py::value_error("in_flight: not as many chunks as in passes");
  problem.held.resize(problem.stages);
  for (py::ssize_t row = 0; row < in_flight.shape(0); ++row) {
    const std::int64_t stage = in_flight.at(row, 0);
    if (stage < 0 || stage >= problem.stages) throw py::value_error("in_flight: a stage is out of range");
    std::vector<int> moment;
    for (int chunk = 0; chunk < chunks; ++chunk)
      moment.push_back(in_flight_of(in_flight.at(row, 1 + chunk), chunks == 1, problem.micro_batches));
    problem.held[stage].push_back(std::move(moment));
  }
  for (const auto& moments : problem.held) {
    if (moments.empty() || (chunks == 1 && moments.size() > 1))
      throw py::value_error("in_flight: a stage is missing, or has several moments but one chunk");
    problem.in_flight.push_back(moments.front().front());
  }
}

std::unique_ptr<Search> make_pipeline(const Integers& layers, std::optional<std::int64_t> most_first,
                                      std::int64_t micro_batches, const Integers& passes, const Integers& runs,
                                      const Array& strategies, const Integers& layouts, const Integers& types,
                                      const Array& change, const Array& enter, const Array& leave, const Array& vocabs,
                                      const Array& vocab_enter, const Array& vocab_leave, const Array& middle,
                                      const Integers& in_flight, const Array& send, double budget) {
  if (in_flight.ndim() != 2 || in_flight.shape(0) < 1 || in_flight.shape(1) < 2)
    throw py::value_error("in_flight: give stage and micro-batches of each of its chunks, a moment a row");
  const std::int64_t stages = in_flight.at(in_flight.shape(0) - 1, 0) + 1;
  const py::ssize_t count = strategies.ndim() ? strategies.shape(0) : 0;
  const py::ssize_t kinds = types.size(), options = vocabs.ndim() ? vocabs.shape(0) : 0;
  Problem problem;
  problem.starts = starts_of(layers);
  problem.layers = problem.starts.back();
  problem.most_first = static_cast<int>(most_first.value_or(problem.layers));
  if (most_first && (*most_first < 1 || *most_first > problem.layers || problem.type_count() == 1))
    throw py::value_error("most_first: at least 1, at most all layers, where they are of several types");
  if (stages < 1 || stages > problem.layers) throw py::value_error("in_flight: fewer layers than stages");
  if (problem.layers * stages > kMostCells)
    throw py::value_error("in_flight: layers times stages are more than 5000000");
  problem.passes = lists_of(passes, runs, stages, micro_batches);
  if (count < 1 || count > kMostStrategies) throw py::value_error("strategies: none, or more than 2000");
  if (options > kMostVocabs) throw py::value_error("vocabs: more than 2000");
  if (types.ndim() != 1 || kinds < 1 || kinds > kMostGroups)
    throw py::value_error("types: no layouts, or more than 64");
  check_all("strategies", strategies, {count, kNumbers});
  check_all("change", change, {kinds, kinds, kKinds});
  check_all("enter", enter, {2, kinds, kKinds});
  check_all("leave", leave, {2, kinds, kKinds});
  check_all("vocabs", vocabs, {options, 2, kNumbers});
  check_all("vocab_enter", vocab_enter, {options, kinds, kKinds});
  check_all("vocab_leave", vocab_leave, {options, kinds, kKinds});
  check_all("middle", middle, {2, kNumbers});
  check_all("send", send, {2, problem.type_count()});
  if (problem.passes.chunks() > 1 && (problem.type_count() > 1 || stages < 2))
    throw py::value_error("passes: several chunks need layers of one type, and two stages");
  if (problem.layers < stages * problem.passes.chunks()) throw py::value_error("layers: fewer than chunks");
  if (std::isnan(budget)) throw py::value_error("budget_mib: is NaN");  // below 0: the reserve is more than there is
  if (layouts.ndim() != 1 || layouts.size() != count) throw py::value_error("layouts: one a strategy");
  problem.stages = static_cast<int>(stages);
  problem.micro_batches = static_cast<int>(micro_batches);
  problem.budget = budget;
  problem.types.assign(types.data(), types.data() + kinds);
  if (!std::is_sorted(problem.types.begin(), problem.types.end()) || problem.types.front() != 0 ||
      problem.types.back() != problem.type_count() - 1)
    throw py::value_error("types: of each layout, rising from the first type of layers to the last");
  for (py::ssize_t k = 0; k < count; ++k) {
    const std::int64_t layout = layouts.data()[k];
    if (layout < 0 || layout >= kinds) throw py::value_error("layouts: out of range");
    problem.strategies.push_back(part_of(strategies.data(k), static_cast<int>(layout)));
  }
  for (py::ssize_t g = 0; g < kinds; ++g) problem.change.push_back(changes_of(change.data(g), kinds));
  problem.enter = changes_by_boundary(enter, kinds);
  problem.leave = changes_by_boundary(leave, kinds);
  for (py::ssize_t v = 0; v < options; ++v)
    problem.vocabs.push_back({part_of(vocabs.data(v)), part_of(vocabs.data(v) + kNumbers),
                              changes_of(vocab_enter.data(v), kinds), changes_of(vocab_leave.data(v), kinds)});
  problem.send.inside.assign(send.data(0), send.data(0) + problem.type_count());
  problem.send.between.assign(send.data(1), send.data(1) + problem.type_count());
  problem.middle = part_of(middle.data(0));
  problem.later = part_of(middle.data(1));
  set_in_flight(problem, in_flight);
  if (problem.passes.chunks() > 1) return std::make_unique<ColumnGeneration>(std::move(problem));
  return std::make_unique<PipelineSearch>(std::move(problem));
}

// Calls `work(budget)` while other threads of Python run.
template <class Work>
auto without_gil(const Cancel* cancel, Work work) {
  WorkBudget budget = budget_for(cancel);
  py::gil_scoped_release release;
  return work(budget);
}

double bound_of(Search& pipeline, const Cancel* cancel) {
  return without_gil(cancel, [&](WorkBudget& budget) { return pipeline.bound(budget); });
}

double tight_bound_of(Search& pipeline, double limit, const Cancel* cancel) {
  check_number("limit_ms", limit);
  return without_gil(cancel, [&](WorkBudget& budget) { return pipeline.tight_bound(limit, budget); });
}

auto solved(Search& pipeline, double limit, long effort, const Cancel* cancel, double gap) {
  check_number("limit_ms", limit);
  if (!(gap >= 0 && gap < 1)) throw py::value_error("gap: at least 0, below 1");
  double bound = 0;
  const PlanFound best =
      without_gil(cancel, [&](WorkBudget& budget) { return pipeline.solve(limit, gap, effort, bound, budget); });
  return std::make_tuple(best.cost, bound, best.vocab, best.division, best.strategies);
}

auto least_memory_of(const Search& pipeline, const Cancel* cancel) {
  const PlanFound least = without_gil(cancel, [&](WorkBudget& budget) { return pipeline.least_memory(budget); });
  return std::make_tuple(least.cost, least.vocab, least.division, least.strategies);
}

}  // namespace

PYBIND11_MODULE(galvatron_dp_core, module) {
  py::register_exception<TooHard>(module, "TooHard", PyExc_MemoryError);
  module.doc() = "Exact search for parallel strategies: the compiled core of paddlenlp_galvatron.planner.";

  // All signatures: galvatron_dp_core.pyi.
  py::class_<Cancel>(module, "Cancel", "Ends searches that run in other threads.")
      .def(py::init<>())
      .def("cancel", &Cancel::cancel)
      .def_property_readonly("cancelled", &Cancel::cancelled);

  module.def("step_ms", &step_ms, py::arg("passes"), py::arg("runs"), py::arg("micro_batches"), py::arg("passes_ms"),
             py::arg("sync_ms"), py::arg("send_ms"), "Time of one step; see paddlenlp_galvatron.cost_model.simulate.");

  py::class_<Search>(
      module, "Pipeline",
      "Pipelines of layers; see paddlenlp_galvatron.planner.core_arrays for the arrays. A strategy's and a "
      "vocabulary part's nine numbers: forward, backward, sync (ms), states, activation, workspace: own, "
      "message, weights, tables (MiB); a change's two: forward, backward (ms); `middle`: of a stage's "
      "first chunk, of a later one; `most_first`: layers that the first stage has at most, if there are "
      "several types; `in_flight`: stage and micro-batches of its chunks, by moments.")
      .def(py::init(&make_pipeline), py::kw_only(), py::arg("layers"), py::arg("most_first") = py::none(),
           py::arg("micro_batches"), py::arg("passes"), py::arg("runs"), py::arg("strategies"), py::arg("layouts"),
           py::arg("types"), py::arg("change"), py::arg("enter"), py::arg("leave"), py::arg("vocabs"),
           py::arg("vocab_enter"), py::arg("vocab_leave"), py::arg("middle"), py::arg("in_flight"), py::arg("send"),
           py::arg("budget_mib"))
      .def("bound", &bound_of, py::arg("cancel") = nullptr,
           "Lower bound of the step time in ms, cheap; infinite where nothing fits.")
      .def("tight_bound", &tight_bound_of, py::arg("limit_ms"), py::arg("cancel") = nullptr,
           "A better one, stage by stage. The limit where nothing takes less.")
      .def("solve", &solved, py::arg("limit_ms"), py::arg("effort"), py::arg("cancel") = nullptr, py::arg("gap") = 0.0,
           "The fastest plan, or one within the gap of it: vocabulary strategy, layers of each stage and chunk, "
           "strategy of each layer. Infinite "
           "and -1 where nothing takes less than the limit.")
      .def("least_memory", &least_memory_of, py::arg("cancel") = nullptr,
           "The plan that needs least on a device, of those with one chunk a stage.");
}
