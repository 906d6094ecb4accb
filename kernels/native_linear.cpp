// The matrix product of a linear layer, y = x W^T + b, with W [out, in] packed once. Meaning: packed_linear.py.
//
// W is cut into *panels* of kPanel outputs; a panel holds, input channel by input channel, the weights of its outputs
// side by side. A step of the inner loop reads one channel of a panel and adds it, times one value of each of kRows rows
// of x, to sums held in registers (after Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication, 2008).
//
// Each output's sum is taken in one fixed order, kDepth channels at a time from zero, however many rows are computed
// together: a row's result is the same bits whoever its neighbours are. No code is made at run time, so any number of
// rows costs the same.

#include <algorithm>

#include "native_vector.h"

namespace ifb {
namespace {

struct PackedWeights {
  const void* packed;  // [panels, in, kPanel] of `type`
  const float* bias;   // [out], or null
  int64_t out, in, type;
};

constexpr int kVecs = 3, kPanel = kVecs * kLanes;  // outputs in a panel
constexpr int kRows = kAccumulators / kVecs;       // rows of x taken together
constexpr int kDepth = 576;                        // channels at a time: kRows rows of x stay in the first-level cache
constexpr int kTasksPerThread = 4;

// y[i][0 .. width) = before + sum over `depth` channels of x[i][d] * panel[d][0 .. width), for `Rows` rows, where
// `before` is y itself or, at the first channels, the bias (null: zero).
template <int Rows, typename T>
void multiply(const float* x, int64_t x_stride, const T* panel, int depth, const float* bias, bool first, float* y,
              int64_t y_stride, int width) {
  Vec sums[Rows][kVecs] = {};
  for (int d = 0; d < depth; ++d) {
    Vec weights[kVecs];
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; ++v) weights[v] = load(panel + d * kPanel + v * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < Rows; ++i) {
      const Vec value = splat(x[i * x_stride + d]);
#pragma GCC unroll 16
      for (int v = 0; v < kVecs; ++v) sums[i][v] += value * weights[v];
    }
  }
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

// The same for at most `Most` rows.
template <int Most, typename T>
void multiply_some(int rows, const float* x, int64_t x_stride, const T* panel, int depth, const float* bias, bool first,
                   float* y, int64_t y_stride, int width) {
  if (rows == Most) return multiply<Most>(x, x_stride, panel, depth, bias, first, y, y_stride, width);
  if constexpr (Most > 1)
    multiply_some<Most - 1>(rows, x, x_stride, panel, depth, bias, first, y, y_stride, width);
}

template <typename T>
void linear(float* y, const float* x, int64_t x_stride, const T* packed, const float* bias, int64_t rows, int64_t out,
            int64_t in, int threads) {
  // A task is one panel and a chunk of the rows: all of them, unless the panels are too few to keep the threads busy.
  const int64_t panels = (out + kPanel - 1) / kPanel;
  const int64_t chunks_wanted = (threads * kTasksPerThread + panels - 1) / panels;
  const int64_t blocks = (rows + kRows - 1) / kRows;
  const int64_t chunk = threads == 1 ? rows : (blocks + chunks_wanted - 1) / chunks_wanted * kRows;
  const int64_t chunks = chunk ? (rows + chunk - 1) / chunk : 0;
  // Tasks are dealt as threads become free: one that the system has put aside holds up a task, not its share of them.
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads) if (threads > 1)
  for (int64_t p = 0; p < panels; ++p)
    for (int64_t c = 0; c < chunks; ++c) {
      const int width = int(std::min<int64_t>(kPanel, out - p * kPanel));
      const int64_t end = std::min(rows, (c + 1) * chunk);
      for (int64_t d = 0; d < in; d += kDepth) {
        const int depth = int(std::min<int64_t>(kDepth, in - d));
        const T* panel = packed + (p * in + d) * kPanel;
        const float* panel_bias = bias ? bias + p * kPanel : nullptr;
        for (int64_t r = c * chunk; r < end; r += kRows)
          multiply_some<kRows>(int(std::min<int64_t>(kRows, end - r)), x + r * x_stride + d, x_stride, panel, depth,
                               panel_bias, d == 0, y + r * out + p * kPanel, out, width);
      }
    }
}

template <typename T>
void pack(T* packed, const T* weight, int64_t stride, int64_t out, int64_t in, int threads) {
  const int64_t panels = (out + kPanel - 1) / kPanel;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t p = 0; p < panels; ++p)
    for (int64_t d = 0; d < in; ++d)
      for (int64_t j = 0; j < kPanel; ++j) {
        const int64_t output = p * kPanel + j;
        packed[(p * in + d) * kPanel + j] = output < out ? weight[output * stride + d] : T{};
      }
}

}  // namespace
}  // namespace ifb

extern "C" {

// Outputs in a panel, for whoever allocates `packed`: [panels, in, panel].
void ifb_linear_panel(int* outputs) { *outputs = ifb::kPanel; }

void ifb_linear_pack(void* packed, const void* weight, int64_t stride, int64_t out, int64_t in, int type, int threads) {
  ifb::with_type(ifb::DataType(type), [&](auto t) {
    using T = decltype(t);
    ifb::pack(static_cast<T*>(packed), static_cast<const T*>(weight), stride, out, in, threads);
  });
}

// y [rows, out] = x W^T + b in float32, rows of x `x_stride` values apart. `weights`: PackedWeights of packed_linear.py.
void ifb_linear(const void* weights, float* y, const float* x, int64_t x_stride, int64_t rows, int threads) {
  const auto& w = *static_cast<const ifb::PackedWeights*>(weights);
  ifb::with_type(ifb::DataType(w.type), [&](auto t) {
    using T = decltype(t);
    ifb::linear(y, x, x_stride, static_cast<const T*>(w.packed), w.bias, rows, w.out, w.in, threads);
  });
}

}  // extern "C"
