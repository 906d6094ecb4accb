// The matrix product of a linear layer whose weights are codes of 8 or 4 bits, each group of 32 input channels of an
// output with a scale (and a least value), and whose activations are floats. Meaning: grouped_linear.py.
//
// Panels as in native_linear.h. For a few rows the codes become floats in registers, on their way into the sums; for more
// a panel is unpacked once, kDepth channels at a time, and multiplied as floats are. Both take each output's sum in the
// same order: a row's result is the same bits whoever its neighbours are.

#include <vector>

#include "native_linear.h"

namespace ifb {
namespace {

struct GroupedWeights {
  const uint8_t* codes;    // [panels, in, kPanel] int8; or [panels, in / 2, kPanel] with channels 2i and 2i + 1 in a byte
  const Float16* scales;   // [panels, groups, kPanel]
  const Float16* minimums; // the same, or null: zero. Never null for 4 bits
  const float* bias;       // [out], or null
  int64_t out, in, bits;
};

constexpr int kGroup = 32;                // channels
constexpr int kUnpackedRows = kRows / 2;  // more rows, and unpacking once pays
static_assert(kDepth % kGroup == 0);

struct Panel {
  const uint8_t* codes;
  const Float16 *scales, *minimums;

  // What `w` holds of panel `p`, from channel `d` on: whole groups.
  Panel(const GroupedWeights& w, int64_t p, int64_t d) {
    const int64_t groups = (w.in + kGroup - 1) / kGroup, first = (p * groups + d / kGroup) * kPanel;
    codes = w.codes + first * kGroup * w.bits / 8;
    scales = w.scales + first;
    minimums = w.minimums ? w.minimums + first : nullptr;
  }
};

// Calls f(channel, weights as Vec[kVecs]) for channels 0 to `depth`.
template <int Bits, typename F>
inline __attribute__((always_inline)) void unpack(const Panel& panel, int depth, F f) {
  for (int group = 0; group * kGroup < depth; ++group) {
    Vec scales[kVecs], minimums[kVecs] = {};
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; ++v) {
      scales[v] = load(panel.scales + group * kPanel + v * kLanes);
      if (panel.minimums) minimums[v] = load(panel.minimums + group * kPanel + v * kLanes);
    }
    const int first = group * kGroup, end = std::min(depth, first + kGroup);
    if constexpr (Bits == 8) {
      for (int d = first; d < end; ++d) {
        Vec weights[kVecs];
#pragma GCC unroll 16
        for (int v = 0; v < kVecs; ++v) {
          const Vec codes = load(reinterpret_cast<const Int8*>(panel.codes) + d * kPanel + v * kLanes);
          weights[v] = multiply_add(codes, scales[v], minimums[v]);
        }
        f(d, weights);
      }
    } else {
      for (int d = first; d < end; d += 2) {
        Vec even[kVecs], odd[kVecs];
#pragma GCC unroll 16
        for (int v = 0; v < kVecs; ++v) {
          const VecInt both = load_bytes(panel.codes + d / 2 * kPanel + v * kLanes);
          even[v] = multiply_add(__builtin_convertvector(both & 15, Vec), scales[v], minimums[v]);
          odd[v] = multiply_add(__builtin_convertvector(both >> 4 & 15, Vec), scales[v], minimums[v]);
        }
        f(d, even);
        if (d + 1 < end) f(d + 1, odd);
      }
    }
  }
}

// y[i][0 .. width) for `Rows` rows of x over all channels.
template <int Rows, int Bits>
void multiply_packed(const GroupedWeights& w, int64_t p, const float* x, int64_t x_stride, float* y) {
  const int width = int(std::min<int64_t>(kPanel, w.out - p * kPanel));
  const float* bias = w.bias ? w.bias + p * kPanel : nullptr;
  for (int64_t d = 0; d < w.in; d += kDepth) {
    Vec sums[Rows][kVecs] = {};
    unpack<Bits>(Panel(w, p, d), int(std::min<int64_t>(kDepth, w.in - d)),
                 [&](int channel, const Vec* weights) __attribute__((always_inline)) {
#pragma GCC unroll 16
                   for (int i = 0; i < Rows; ++i) {
                     const Vec value = splat(x[i * x_stride + d + channel]);
#pragma GCC unroll 16
                     for (int v = 0; v < kVecs; ++v) sums[i][v] = multiply_add(value, weights[v], sums[i][v]);
                   }
                 });
    add_sums<Rows>(sums, bias, d == 0, y, w.out, width);
  }
}

template <int Most, int Bits>
void multiply_some_packed(int rows, const GroupedWeights& w, int64_t p, const float* x, int64_t x_stride, float* y) {
  if (rows == Most) return multiply_packed<Most, Bits>(w, p, x, x_stride, y);
  if constexpr (Most > 1) multiply_some_packed<Most - 1, Bits>(rows, w, p, x, x_stride, y);
}

template <int Bits>
void multiply_unpacked(const GroupedWeights& w, int64_t p, const float* x, int64_t x_stride, float* y, int64_t first,
                       int64_t end) {
  thread_local std::vector<float> unpacked(kDepth * kPanel);
  const int width = int(std::min<int64_t>(kPanel, w.out - p * kPanel));
  for (int64_t d = 0; d < w.in; d += kDepth) {
    const int depth = int(std::min<int64_t>(kDepth, w.in - d));
    float* panel = unpacked.data();
    unpack<Bits>(Panel(w, p, d), depth, [&](int channel, const Vec* weights) __attribute__((always_inline)) {
#pragma GCC unroll 16
      for (int v = 0; v < kVecs; ++v) store(panel + channel * kPanel + v * kLanes, weights[v]);
    });
    multiply_rows(x + d, x_stride, panel, depth, w.bias ? w.bias + p * kPanel : nullptr, d == 0, y, w.out, width, first,
                  end);
  }
}

template <int Bits>
void linear(const GroupedWeights& w, float* y, const float* x, int64_t x_stride, int64_t rows, int threads) {
  for_each_task(rows, w.out, threads, [&](int64_t p, int64_t first, int64_t end) {
    float* target = y + p * kPanel;
    if (end - first > kUnpackedRows)
      multiply_unpacked<Bits>(w, p, x, x_stride, target, first, end);
    else
      multiply_some_packed<kUnpackedRows, Bits>(int(end - first), w, p, x + first * x_stride, x_stride,
                                                target + first * w.out);
  });
}

}  // namespace
}  // namespace ifb

extern "C" {

// y [rows, out] = x W^T + b in float32, rows of x `x_stride` values apart. `weights`: GroupedWeights of grouped_linear.py.
void ifb_linear_grouped(const void* weights, float* y, const float* x, int64_t x_stride, int64_t rows, int threads) {
  const auto& w = *static_cast<const ifb::GroupedWeights*>(weights);
  if (w.bits == 8)
    ifb::linear<8>(w, y, x, x_stride, rows, threads);
  else
    ifb::linear<4>(w, y, x, x_stride, rows, threads);
}

}  // extern "C"
