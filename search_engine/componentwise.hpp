// Arithmetic of small arrays, number by number: terms of workspace, times by kind of pass.
// README.md, step 1.
#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>

namespace galvatron {

template <class Numbers>
Numbers most_of(Numbers a, const Numbers& b) {
  for (std::size_t i = 0; i < a.size(); ++i) a[i] = std::max(a[i], b[i]);
  return a;
}

template <class Numbers>
Numbers least_of(Numbers a, const Numbers& b) {
  for (std::size_t i = 0; i < a.size(); ++i) a[i] = std::min(a[i], b[i]);
  return a;
}

// Whether no number is larger than the other one's.
template <class Numbers>
bool fits_in(const Numbers& a, const Numbers& b) {
  for (std::size_t i = 0; i < a.size(); ++i)
    if (!(a[i] <= b[i])) return false;
  return true;
}

template <class Numbers>
auto total(const Numbers& numbers, typename Numbers::value_type sum = 0) {
  return std::accumulate(numbers.begin(), numbers.end(), sum);
}

template <class Numbers>
auto dot(const Numbers& a, const Numbers& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), typename Numbers::value_type{});
}

// Adds the others, multiplied by `times`, to the sums.
template <class Numbers>
void add_to(Numbers& sums, const Numbers& others, typename Numbers::value_type times = 1) {
  for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += times * others[i];
}

}  // namespace galvatron
