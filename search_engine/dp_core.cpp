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

using Cancel = std::atomic<bool>;  // set by one thread to end a search in another

// A check that ends the search on Ctrl-C (in the main thread) or when it was cancelled.
WorkBudget budget_for(const Cancel* cancel) {
  return WorkBudget([cancel] {
    if (cancel && *cancel) throw std::runtime_error("the search was cancelled");
    py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  });
}

void refuse_if(bool wrong, const char* message) {
  if (wrong) throw py::value_error(message);
}

// Says why a number is no time or memory; empty: it is fine.
std::string fault_of(double value) {
  if (std::isnan(value)) return "NaN";
  if (value < 0) return "a negative number";
  return value > 0 && value < kSmallest ? "a number between 0 and 1e-60; give 0" : "";
}

void check_limit(double limit) {
  const std::string fault = fault_of(limit);
  if (!fault.empty()) throw py::value_error("limit_ms: is " + fault);
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
    const std::string fault = std::isinf(*entry) && *entry > 0 ? "an infinite number"
                              : *entry > kLargest              ? "a number above 1e60"
                                                               : fault_of(*entry);
    if (!fault.empty()) throw py::value_error(name + ": holds " + fault);
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
  refuse_if(layers.ndim() != 1 || layers.size() < 1 || layers.size() > kMostLayerTypes,
            "layers: give the number of layers of each type, of 8 types at most");
  std::vector<int> starts{0};
  for (py::ssize_t type = 0; type < layers.size(); ++type) {
    const std::int64_t count = layers.data()[type];
    refuse_if(count < 1 || count > kMostLayers - starts.back(), "layers: at least 1 of each type, and at most 100000");
    starts.push_back(starts.back() + static_cast<int>(count));
  }
  return starts;
}

// The lists of passes of all stages; see paddlenlp_galvatron.plan.schedule.arrays. Checks them.
Schedule lists_of(const Integers& passes, const Integers& runs, py::ssize_t stages, std::int64_t micro_batches) {
  refuse_if(micro_batches < 1 || micro_batches > kMostMicroBatches, "micro_batches: give 1 to 1000000");
  refuse_if(passes.ndim() != 2 || passes.shape(1) != 3, "passes: give kind, chunk and micro-batch of each");
  refuse_if(runs.ndim() != 2 || runs.shape(1) != 4, "runs: give stage, passes, times and step of each");
  std::int64_t chunks = 1;
  for (py::ssize_t i = 0; i < passes.shape(0); ++i) {
    const std::int64_t kind = passes.at(i, 0), chunk = passes.at(i, 1);
    refuse_if(kind < 0 || kind >= kKinds || chunk < 0 || chunk >= kMostChunks, "passes: kind or chunk is out of range");
    chunks = std::max(chunks, chunk + 1);
  }
  std::vector<std::vector<Run>> of(stages);
  std::vector<std::int64_t> done(stages * chunks * kKinds, 0);  // micro-batches of each stage, chunk and kind
  py::ssize_t at = 0;
  for (py::ssize_t i = 0; i < runs.shape(0); ++i) {
    const std::int64_t stage = runs.at(i, 0), count = runs.at(i, 1), times = runs.at(i, 2), step = runs.at(i, 3);
    refuse_if(stage < 0 || stage >= stages || (i > 0 && stage < runs.at(i - 1, 0)),
              "runs: stages are out of range or do not rise");
    refuse_if(count < 1 || count > passes.shape(0) - at || times < 1 || times > micro_batches,
              "runs: passes or times are out of range");
    Run run{{}, static_cast<int>(times)};
    std::map<std::int64_t*, std::int64_t> in_run;
    for (const py::ssize_t end = at + count; at < end; ++at) {
      const std::int64_t kind = passes.at(at, 0), chunk = passes.at(at, 1);
      std::int64_t& passes_done = done[(stage * chunks + chunk) * kKinds + kind];
      refuse_if(passes.at(at, 2) != passes_done + in_run[&passes_done]++,
                "passes: micro-batches of a stage, chunk and kind are not 0, 1, 2, …");
      run.passes.push_back({static_cast<PassKind>(kind), static_cast<int>(chunk)});
    }
    for (const auto& [passes_done, each] : in_run) {
      refuse_if(times > 1 && each != step, "runs: step is not the number of micro-batches in a run");
      *passes_done += each * times;
    }
    of[stage].push_back(std::move(run));
  }
  for (const std::int64_t count : done)
    refuse_if(count != micro_batches, "passes: not every micro-batch goes through each kind of pass everywhere");
  return {static_cast<int>(micro_batches), static_cast<int>(chunks), std::move(of)};
}

double step_ms(const Integers& passes, const Integers& runs, std::int64_t micro_batches, const Array& each,
               const Array& sync, const Array& send) {
  const py::ssize_t stages = sync.size();
  refuse_if(stages < 1, "sync: no stages");
  check_shape("sync", sync, {stages});
  const Schedule lists = lists_of(passes, runs, stages, micro_batches);
  const py::ssize_t chunks = stages * lists.chunks;
  check_shape("passes_ms", each, {kKinds, chunks});
  refuse_if(send.ndim() != 1 || send.size() < chunks - 1, "send: one less than there are chunks of stages");
  std::vector<StageTime> times(chunks);
  for (py::ssize_t at = 0; at < chunks; ++at) {
    for (const PassKind kind : kPassKinds) times[at].passes[kind] = each.at(static_cast<int>(kind), at);
    if (at < stages) times[at].sync = sync.at(at);
  }
  WorkBudget budget = budget_for(nullptr);
  return StepGraph(lists).time(times, {send.data(), send.data() + send.size()}, budget);
}

// Micro-batches in flight: a row for each moment, the stage and a number a chunk.
void set_in_flight(Problem& problem, const Integers& in_flight) {
  const int chunks = problem.passes.chunks;
  refuse_if(in_flight.shape(1) != 1 + chunks, "in_flight: not as many chunks as in passes");
  problem.held.resize(problem.stages);
  for (py::ssize_t row = 0; row < in_flight.shape(0); ++row) {
    const std::int64_t stage = in_flight.at(row, 0);
    refuse_if(stage < 0 || stage >= problem.stages, "in_flight: a stage is out of range");
    std::vector<int> moment;
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const std::int64_t count = in_flight.at(row, 1 + chunk);
      refuse_if(count < (chunks == 1) || count > problem.micro_batches, "in_flight: between 1 and micro_batches");
      moment.push_back(static_cast<int>(count));
    }
    problem.held[stage].push_back(std::move(moment));
  }
  for (const auto& moments : problem.held) {
    refuse_if(moments.empty() || (chunks == 1 && moments.size() > 1),
              "in_flight: a stage is missing, or has several moments but one chunk");
    problem.in_flight.push_back(moments.front().front());
  }
}

std::unique_ptr<Search> make_pipeline(const Integers& layers, std::optional<std::int64_t> most_first,
                                      std::int64_t micro_batches, const Integers& passes, const Integers& runs,
                                      const Array& strategies, const Integers& layouts, const Integers& types,
                                      const Array& change, const Array& enter, const Array& leave, const Array& vocabs,
                                      const Array& vocab_enter, const Array& vocab_leave, const Array& middle,
                                      const Integers& in_flight, const Array& send, double budget) {
  refuse_if(in_flight.ndim() != 2 || in_flight.shape(0) < 1 || in_flight.shape(1) < 2,
            "in_flight: give stage and micro-batches of each of its chunks, a moment a row");
  const std::int64_t stages = in_flight.at(in_flight.shape(0) - 1, 0) + 1;
  const py::ssize_t count = strategies.ndim() ? strategies.shape(0) : 0;
  const py::ssize_t kinds = types.size(), options = vocabs.ndim() ? vocabs.shape(0) : 0;
  Problem problem;
  problem.starts = starts_of(layers);
  problem.layers = problem.starts.back();
  problem.most_first = static_cast<int>(most_first.value_or(problem.layers));
  refuse_if(most_first && (*most_first < 1 || *most_first > problem.layers || problem.type_count() == 1),
            "most_first: at least 1, at most all layers, where they are of several types");
  refuse_if(stages < 1 || stages > problem.layers, "in_flight: fewer layers than stages");
  refuse_if(problem.layers * stages > kMostCells, "in_flight: layers times stages are more than 5000000");
  problem.passes = lists_of(passes, runs, stages, micro_batches);
  refuse_if(count < 1 || count > kMostStrategies, "strategies: none, or more than 2000");
  refuse_if(options > kMostVocabs, "vocabs: more than 2000");
  refuse_if(types.ndim() != 1 || kinds < 1 || kinds > kMostGroups, "types: no layouts, or more than 64");
  check_all("strategies", strategies, {count, kNumbers});
  check_all("change", change, {kinds, kinds, kKinds});
  check_all("enter", enter, {2, kinds, kKinds});
  check_all("leave", leave, {2, kinds, kKinds});
  check_all("vocabs", vocabs, {options, 2, kNumbers});
  check_all("vocab_enter", vocab_enter, {options, kinds, kKinds});
  check_all("vocab_leave", vocab_leave, {options, kinds, kKinds});
  check_all("middle", middle, {2, kNumbers});
  check_all("send", send, {2, problem.type_count()});
  refuse_if(problem.passes.chunks > 1 && (problem.type_count() > 1 || stages < 2),
            "passes: several chunks need layers of one type, and two stages");
  refuse_if(problem.layers < stages * problem.passes.chunks, "layers: fewer than chunks");
  refuse_if(std::isnan(budget), "budget_mib: is NaN");  // below 0: the reserve is more than there is
  refuse_if(layouts.ndim() != 1 || layouts.size() != count, "layouts: one a strategy");
  problem.stages = static_cast<int>(stages);
  problem.micro_batches = static_cast<int>(micro_batches);
  problem.budget = budget;
  problem.types.assign(types.data(), types.data() + kinds);
  refuse_if(!std::is_sorted(problem.types.begin(), problem.types.end()) || problem.types.front() != 0 ||
                problem.types.back() != problem.type_count() - 1,
            "types: of each layout, rising from the first type of layers to the last");
  for (py::ssize_t k = 0; k < count; ++k) {
    const std::int64_t layout = layouts.data()[k];
    refuse_if(layout < 0 || layout >= kinds, "layouts: out of range");
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
  if (problem.passes.chunks > 1) return std::make_unique<ColumnGeneration>(std::move(problem));
  return std::make_unique<PipelineSearch>(std::move(problem));
}

// Calls `work(budget)` while other threads of Python run.
template <class Work>
auto without_gil(const Cancel* cancel, Work work) {
  WorkBudget budget = budget_for(cancel);
  py::gil_scoped_release release;
  return work(budget);
}

auto solved(Search& pipeline, double limit, long effort, const Cancel* cancel, double gap) {
  check_limit(limit);
  refuse_if(!(gap >= 0 && gap < 1), "gap: at least 0, below 1");
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
      .def("cancel", [](Cancel& cancel) { cancel = true; })
      .def_property_readonly("cancelled", [](const Cancel& cancel) { return cancel.load(); });

  module.def("step_ms", &step_ms, py::arg("passes"), py::arg("runs"), py::arg("micro_batches"), py::arg("passes_ms"),
             py::arg("sync_ms"), py::arg("send_ms"), "Time of one step; see paddlenlp_galvatron.cost_model.simulate.");

  py::class_<Search>(module, "Pipeline", "Pipelines of layers; its stub says what the arrays hold.")
      .def(py::init(&make_pipeline), py::kw_only(), py::arg("layers"), py::arg("most_first") = py::none(),
           py::arg("micro_batches"), py::arg("passes"), py::arg("runs"), py::arg("strategies"), py::arg("layouts"),
           py::arg("types"), py::arg("change"), py::arg("enter"), py::arg("leave"), py::arg("vocabs"),
           py::arg("vocab_enter"), py::arg("vocab_leave"), py::arg("middle"), py::arg("in_flight"), py::arg("send"),
           py::arg("budget_mib"))
      .def(
          "bound",
          [](Search& pipeline, const Cancel* cancel) {
            return without_gil(cancel, [&](WorkBudget& budget) { return pipeline.bound(budget); });
          },
          py::arg("cancel") = nullptr, "Lower bound of the step time in ms, cheap; infinite where nothing fits.")
      .def(
          "tight_bound",
          [](Search& pipeline, double limit, const Cancel* cancel) {
            check_limit(limit);
            return without_gil(cancel, [&](WorkBudget& budget) { return pipeline.tight_bound(limit, budget); });
          },
          py::arg("limit_ms"), py::arg("cancel") = nullptr, "A better one. The limit where nothing takes less.")
      .def("solve", &solved, py::arg("limit_ms"), py::arg("effort"), py::arg("cancel") = nullptr, py::arg("gap") = 0.0,
           "The fastest plan, or one within the gap of it. Infinite and -1 where nothing takes less than the limit.")
      .def("least_memory", &least_memory_of, py::arg("cancel") = nullptr,
           "The plan that needs least on a device, of those with one chunk a stage.");
}
