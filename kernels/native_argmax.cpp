// The index of each row's highest value. Meaning: finite_argmax.py.

#include <algorithm>
#include <cmath>

#include "native_threads.h"
#include "native_vector.h"

namespace ifb {
namespace {

constexpr int64_t kBlock = 64 * kLanes;   // values; only the block of the highest is searched for its place
constexpr int64_t kWorthThreads = 65536;  // values; below this, waking other threads costs more than it saves

int64_t finite_argmax(const float* row, int64_t size) {
  float best = -INFINITY;
  int64_t best_block = 0;
  VecInt not_a_number = {};
  for (int64_t first = 0; first < size; first += kBlock) {
    const int64_t end = std::min(size, first + kBlock), whole = first + (end - first) / kLanes * kLanes;
    Vec highest = splat(best);
    for (int64_t i = first; i < whole; i += kLanes) {
      const Vec values = load(row + i);
      highest = maximum(values, highest);
      not_a_number |= values != values;
    }
    float block_best = max_of(highest);
    for (int64_t i = whole; i < end; ++i) {
      block_best = std::max(block_best, row[i]);
      not_a_number |= splat(row[i]) != splat(row[i]);
    }
    if (block_best > best) best = block_best, best_block = first;
  }
  bool valid = best < INFINITY && best > -INFINITY;
  for (int lane = 0; lane < kLanes; ++lane) valid &= !not_a_number[lane];
  if (!valid) return -1;
  int64_t at = best_block;
  while (row[at] != best) ++at;
  return at;
}

}  // namespace
}  // namespace ifb

extern "C" void ifb_finite_argmax(int64_t* chosen, const float* values, int64_t stride, int64_t rows, int64_t size,
                                  int threads) {
  ifb::share_out(rows, rows * size >= ifb::kWorthThreads ? threads : 1, [&](int64_t row) {
    chosen[row] = ifb::finite_argmax(values + row * stride, size);
  });
}
