// What the matrix products of linear layers have in common: panels, the product of a few rows by one, and who does what.
//
// W is cut into *panels* of kPanel outputs; a panel holds, input channel by input channel, the weights of its outputs
// side by side. A step of the inner loop reads one channel of a panel and adds it, times one value of each of kRows rows
// of x, to sums held in registers (after Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication, 2008).
#pragma once

#include <algorithm>

#include "native_threads.h"
#include "native_vector.h"

namespace ifb {

constexpr int kVecs = 3, kPanel = kVecs * kLanes;  // outputs in a panel
constexpr int kRows = kAccumulators / kVecs;       // rows of x taken together
constexpr int kDepth = 576;                        // channels at a time: kRows rows of x stay in the first-level cache
constexpr int kTasksPerThread = 4;
// From here on each thread takes all panels with rows of its own, the same that it normalizes and activates: what a core
// has written it reads quicker than another's, many times so where the two share no cache.
constexpr int kOwnRows = 96;

// y[i][0 .. width) = before + sums[i], for `Rows` rows, where `before` is y itself or, at the first channels, the bias
// (null: zero).
template <int Rows>
inline __attribute__((always_inline)) void add_sums(const Vec (&sums)[Rows][kVecs], const float* bias, bool first,
                                                    float* y, int64_t y_stride, int width) {
#pragma GCC unroll 16
  for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; ++v) {
      float* target = y + i * y_stride + v * kLanes;
      const float* before = !first ? target : bias ? bias + v * kLanes : nullptr;
      const int count = width - v * kLanes;
      if (count >= kLanes)
        store(target, (before ? load(before) : Vec{}) + sums[i][v]);
      else if (count > 0)
        store_some(target, (before ? load_some(before, count) : Vec{}) + sums[i][v], count);
    }
}

// sums[i] += the sums over `depth` channels of x[i][d] * panel[d].
template <int Rows, typename T>
inline __attribute__((always_inline)) void add_products(Vec (&sums)[Rows][kVecs], const float* x, int64_t x_stride,
                                                        const T* panel, int depth) {
  for (int d = 0; d < depth; ++d) {
    Vec weights[kVecs];
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; ++v) weights[v] = load(panel + d * kPanel + v * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < Rows; ++i) {
      const Vec value = splat_at(x + i * x_stride + d);
#pragma GCC unroll 16
      for (int v = 0; v < kVecs; ++v) sums[i][v] = multiply_add(value, weights[v], sums[i][v]);
    }
  }
}

// y[i][0 .. width) = before + the products' sums over `depth` channels, for `Rows` rows of x.
template <int Rows, typename T>
void multiply(const float* x, int64_t x_stride, const T* panel, int depth, const float* bias, bool first, float* y,
              int64_t y_stride, int width) {
  Vec sums[Rows][kVecs] = {};
  add_products<Rows>(sums, x, x_stride, panel, depth);
  add_sums<Rows>(sums, bias, first, y, y_stride, width);
}

// For at most `Most` rows.
template <int Most, typename T>
void multiply_some(int rows, const float* x, int64_t x_stride, const T* panel, int depth, const float* bias, bool first,
                   float* y, int64_t y_stride, int width) {
  if (rows == Most) return multiply<Most>(x, x_stride, panel, depth, bias, first, y, y_stride, width);
  if constexpr (Most > 1)
    multiply_some<Most - 1>(rows, x, x_stride, panel, depth, bias, first, y, y_stride, width);
}

// The same for rows `first` to `end`, kRows at a time.
template <typename T>
void multiply_rows(const float* x, int64_t x_stride, const T* panel, int depth, const float* bias, bool start, float* y,
                   int64_t y_stride, int width, int64_t first, int64_t end) {
  for (int64_t r = first; r < end; r += kRows)
    multiply_some<kRows>(int(std::min<int64_t>(kRows, end - r)), x + r * x_stride, x_stride, panel, depth, bias, start,
                         y + r * y_stride, y_stride, width);
}

// Calls f(panel, first row, end of rows) until all panels have met all rows. A task is one panel and a chunk of the rows:
// all of them, unless the panels are too few to keep the threads busy or each thread has rows enough of its own.
template <typename F>
void for_each_task(int64_t rows, int64_t out, int threads, F f) {
  const int64_t panels = (out + kPanel - 1) / kPanel, blocks = (rows + kRows - 1) / kRows;
  const int64_t to_be_busy = threads == 1 ? 1 : (threads * kTasksPerThread + panels - 1) / panels;
  const int64_t wanted = std::max(to_be_busy, std::min<int64_t>(threads, rows / kOwnRows));
  const int64_t chunk = (blocks + wanted - 1) / wanted * kRows;
  const int64_t tasks = chunk ? (rows + chunk - 1) / chunk * panels : 0;
  const auto task = [&](int64_t i) {
    const int64_t first = i / panels * chunk;
    f(i % panels, first, std::min(rows, first + chunk));
  };
  share_out(tasks, threads, task);
}

}  // namespace ifb
