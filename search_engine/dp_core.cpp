// The Python module galvatron_dp_core: arrays in, arrays out. The one unit that includes all the rest of the core.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <cmath>
#include <stdexcept>
#include <string>

#include "layers.hpp"

namespace py = pybind11;
using namespace galvatron;

namespace {

using Array = py::array_t<double, py::array::c_style | py::array::forcecast>;

constexpr double kLargest = 1e150;  // sums and products of finite entries stay finite
constexpr py::ssize_t kMostLayers = 100'000, kMostStrategies = 10'000;

// Set by one thread to end a search in another.
class Cancel {
 public:
  void cancel() { flag_ = true; }
  bool cancelled() const { return flag_; }

 private:
  std::atomic<bool> flag_{false};
};

// A check that ends the search on Ctrl-C (in the main thread) or when it was cancelled.
Poll poll_for(const Cancel* cancel) {
  return Poll([cancel] {
    if (cancel && cancel->cancelled()) throw std::runtime_error("the search was cancelled");
    py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  });
}

void check_entries(const std::string& name, const Array& array) {
  const double* values = array.data();
  for (py::ssize_t i = 0; i < array.size(); ++i) {
    if (std::isnan(values[i])) throw py::value_error(name + ": holds NaN");
    if (values[i] < 0) throw py::value_error(name + ": holds a negative number");
    if (values[i] > kLargest && !std::isinf(values[i])) throw py::value_error(name + ": holds a number above 1e150");
  }
}

void check_number(const std::string& name, double value) {
  if (std::isnan(value)) throw py::value_error(name + ": is NaN");
  if (value < 0) throw py::value_error(name + ": is negative");
}

std::string shape_of(const Array& array) {
  std::string text = "[";
  for (py::ssize_t axis = 0; axis < array.ndim(); ++axis) text += (axis ? ", " : "") + std::to_string(array.shape(axis));
  return text + "]";
}

void check_shape(const std::string& name, const Array& array, const std::vector<py::ssize_t>& shape) {
  if (std::vector<py::ssize_t>(array.shape(), array.shape() + array.ndim()) == shape) return;
  std::string wanted;
  for (py::ssize_t length : shape) wanted += (wanted.empty() ? "" : ", ") + std::to_string(length);
  throw py::value_error(name + ": has shape " + shape_of(array) + "; give [" + wanted + "]");
}

py::tuple solve_layers(const Array& memory, const Array& time, const Array& change, double budget, double gap,
                       const Cancel* cancel) {
  if (memory.ndim() != 2 || memory.size() == 0)
    throw py::value_error("memory_mib: has shape " + shape_of(memory) + "; give [layers, strategies], neither of them 0");
  const py::ssize_t layers = memory.shape(0), strategies = memory.shape(1);
  if (layers > kMostLayers || strategies > kMostStrategies)
    throw py::value_error("memory_mib: at most 100000 layers and 10000 strategies");
  check_shape("time_s", time, {layers, strategies});
  if (change.ndim() == 3)
    check_shape("switch_s", change, {layers, strategies, strategies});
  else
    check_shape("switch_s", change, {strategies, strategies});
  check_entries("memory_mib", memory);
  check_entries("time_s", time);
  check_entries("switch_s", change);
  check_number("budget_mib", budget);
  check_number("gap", gap);
  if (gap >= 1) throw py::value_error("gap: is not below 1");
  const LayerTables tables{static_cast<int>(layers), static_cast<int>(strategies), memory.data(), time.data(),
                           change.data(), change.ndim() == 3};
  Poll poll = poll_for(cancel);
  ChainSolution solution;
  {
    py::gil_scoped_release release;
    solution = LayerProblem(tables, budget).solve(gap, poll);
  }
  return py::make_tuple(solution.cost, solution.choice, solution.memory, solution.bound);
}

}  // namespace

PYBIND11_MODULE(galvatron_dp_core, module) {
  module.doc() = "Exact search for parallel strategies: the compiled core of paddlenlp_galvatron.search.";

  py::class_<Cancel>(module, "Cancel", "Ends searches that run in other threads.")
      .def(py::init<>())
      .def("cancel", &Cancel::cancel)
      .def_property_readonly("cancelled", &Cancel::cancelled);

  module.def("solve_layers", &solve_layers, py::arg("memory_mib"), py::arg("time_s"), py::arg("switch_s"),
             py::arg("budget_mib"), py::arg("gap") = 0.0, py::arg("cancel") = nullptr,
             "See paddlenlp_galvatron.search.solver.solve. Returns (time_s, choice, memory_mib, lower_bound_s).");
}
