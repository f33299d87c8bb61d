// The dynamic program that existing Galvatron uses for one stage, in its best
// form: the peer that benchmarks compare with.
//
// Over layers x strategies x memory in whole MiB, f[v][k] is the least time of
// the layers so far that use v MiB at most and end in strategy k: f'[v][k] =
// min over j of f[v - memory(k)][j] + switch(j, k), + time(k). Memory is
// rounded up to MiB. Tuned: no allocation in loops, the inner minimum runs over
// contiguous memory, without back-pointers where only the optimum's time is
// asked for.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace py = pybind11;
using Array = py::array_t<double, py::array::c_style | py::array::forcecast>;

double solve(const Array& memory, const Array& time, const Array& change, double budget) {
  const int layers = static_cast<int>(memory.shape(0)), strategies = static_cast<int>(memory.shape(1));
  const int units = static_cast<int>(budget) + 1;
  constexpr double infinity = std::numeric_limits<double>::infinity();
  // [strategy][unit]: the loop over units is the innermost, so that it
  // vectorises.
  std::vector<std::vector<double>> best(strategies, std::vector<double>(units, 0.0)), next = best;
  std::vector<double> entered(units);
  for (int l = 0; l < layers; ++l) {
    for (int k = 0; k < strategies; ++k) {
      const int need = static_cast<int>(std::ceil(memory.at(l, k)));
      const double cost = time.at(l, k);
      std::fill(next[k].begin(), next[k].end(), infinity);
      if (need >= units) continue;
      const int left = units - need;
      std::fill(entered.begin(), entered.begin() + left, infinity);
      for (int j = 0; j < strategies; ++j) {
        const double step = l ? change.at(j, k) : 0.0;
        const double* from = best[j].data();
        for (int v = 0; v < left; ++v) entered[v] = std::min(entered[v], from[v] + step);
      }
      for (int v = 0; v < left; ++v) next[k][need + v] = entered[v] + cost;
    }
    std::swap(best, next);
  }
  double least = infinity;
  for (const auto& row : best) least = std::min(least, row[units - 1]);
  return least;
}

PYBIND11_MODULE(peer_dp, module) {
  module.def("solve", &solve, py::arg("memory_mib"), py::arg("time_s"), py::arg("switch_s"), py::arg("budget_mib"),
             "Least time of one stage, memory in whole MiB.");
}
