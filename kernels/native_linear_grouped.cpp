// The matrix product of a linear layer whose weights are codes of 8 or 4 bits, each group of 32 input channels of an
// output with a scale (and a least value), and whose activations are floats. Meaning: grouped_linear.py.
//
// Panels as in native_linear.h. For a few rows the codes become floats in registers, on their way into the sums; for more,
// group by group in a buffer that the first rows read at once and the others after them. Both take each output's sum in
// the same order as native_linear.cpp: a row's result is the same bits whoever its neighbours are, and the same as with
// the weights in floats.

#include "native_linear.h"

namespace ifb {
namespace {

struct GroupedWeights {
  const void* codes;       // int8 [panels, in, kPanel]; or, of 4 bits, uint32 [panels, groups * 4, kPanel]: see nibble
  const Float16* scales;   // [panels, groups, kPanel]
  const Float16* minimums; // the same, or null: zero. Never null for 4 bits
  const float* bias;       // [out], or null
  int64_t out, in, bits;
};

constexpr int kGroup = 32;                // channels
constexpr int kInRegisters = kRows / 2;   // more rows, and a weight is worth keeping for the next of them
static_assert(kDepth % kGroup == 0);

struct Panel {
  const uint8_t* codes;
  const Float16 *scales, *minimums;

  // What `w` holds of panel `p`, from channel `d` on: whole groups.
  Panel(const GroupedWeights& w, int64_t p, int64_t d) {
    const int64_t groups = (w.in + kGroup - 1) / kGroup, first = (p * groups + d / kGroup) * kPanel;
    codes = static_cast<const uint8_t*>(w.codes) + first * kGroup * w.bits / 8;
    scales = w.scales + first;
    minimums = w.minimums ? w.minimums + first : nullptr;
  }
};

// Asks for what lies `kAhead` groups on: a group is read quicker than the processor foresees it by itself.
constexpr int kAhead = 4, kLine = 64;
template <int Bits>
inline __attribute__((always_inline)) void prefetch(const Panel& panel, int group) {
  constexpr int bytes = kGroup * kPanel * Bits / 8;
  const uint8_t* codes = panel.codes + (group + kAhead) * bytes;
#pragma GCC unroll 32
  for (int i = 0; i < bytes; i += kLine) __builtin_prefetch(codes + i);
  const int next = (group + kAhead) * kPanel;
  __builtin_prefetch(panel.scales + next);
  if (panel.minimums) __builtin_prefetch(panel.minimums + next);
}

constexpr int kNibbles = 8;  // codes of neighbouring channels in a word, the first in its lowest bits

// Code `i` of each word.
inline __attribute__((always_inline)) Vec nibble(VecBits words, int i) {
  const VecBits shifted = words >> (4 * i);
#if defined(__AVX512F__)
  // A look-up reads the lowest four bits of its index and no others.
  const __m512 values = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return (Vec)_mm512_permutexvar_ps((__m512i)shifted, values);
#else
  return __builtin_convertvector((VecInt)(shifted & 15), Vec);
#endif
}

// Calls f(channel, weights as Vec[kVecs]) for the first `count` channels of a group.
template <int Bits, typename F>
inline __attribute__((always_inline)) void unpack_some(const Panel& panel, int group, int count, F f) {
  Vec scales[kVecs], minimums[kVecs] = {};
#pragma GCC unroll 16
  for (int v = 0; v < kVecs; ++v) {
    scales[v] = load(panel.scales + group * kPanel + v * kLanes);
    if (panel.minimums) minimums[v] = load(panel.minimums + group * kPanel + v * kLanes);
  }
  Vec weights[kVecs];
  if constexpr (Bits == 8) {
    const auto* codes = reinterpret_cast<const Int8*>(panel.codes) + group * kGroup * kPanel;
    for (int d = 0; d < count; ++d) {
#pragma GCC unroll 16
      for (int v = 0; v < kVecs; ++v)
        weights[v] = multiply_add(load(codes + d * kPanel + v * kLanes), scales[v], minimums[v]);
      f(d, weights);
    }
  } else {
    const auto* words = reinterpret_cast<const uint32_t*>(panel.codes) + group * kGroup / kNibbles * kPanel;
    for (int d = 0; d < count; d += kNibbles) {
      VecBits codes[kVecs];
#pragma GCC unroll 16
      for (int v = 0; v < kVecs; ++v) std::memcpy(&codes[v], words + d / kNibbles * kPanel + v * kLanes, sizeof codes[v]);
#pragma GCC unroll 16
      for (int i = 0; i < kNibbles; ++i)
        if (d + i < count) {
#pragma GCC unroll 16
          for (int v = 0; v < kVecs; ++v) weights[v] = multiply_add(nibble(codes[v], i), scales[v], minimums[v]);
          f(d + i, weights);
        }
    }
  }
}

// The same for the whole of most groups, which is quicker for being known beforehand.
template <int Bits, typename F>
inline __attribute__((always_inline)) void unpack(const Panel& panel, int group, int count, F f) {
  if (count == kGroup)
    unpack_some<Bits>(panel, group, kGroup, f);
  else
    unpack_some<Bits>(panel, group, count, f);
}

// y[i][0 .. width) = before + sums over `depth` channels, for `Rows` rows of x.
//
// Above kInRegisters rows the weights pass through `unpacked`: [depth, kPanel] where `keep` is set, else room for a group.
template <int Rows, int Bits>
void multiply_packed(const float* x, int64_t x_stride, const Panel& panel, int depth, float* unpacked, bool keep,
                     const float* bias, bool first, float* y, int64_t y_stride, int width) {
  Vec sums[Rows][kVecs] = {};
  for (int d = 0; d < depth; d += kGroup) {
    const int count = std::min(kGroup, depth - d);
    if constexpr (Rows <= kInRegisters) {
      prefetch<Bits>(panel, d / kGroup);
      unpack<Bits>(panel, d / kGroup, count, [&](int channel, const Vec* weights) __attribute__((always_inline)) {
#pragma GCC unroll 16
        for (int i = 0; i < Rows; ++i) {
          const Vec value = splat_at(x + i * x_stride + d + channel);
#pragma GCC unroll 16
          for (int v = 0; v < kVecs; ++v) sums[i][v] = multiply_add(value, weights[v], sums[i][v]);
        }
      });
    } else {
      float* group = unpacked + (keep ? d * kPanel : 0);
      unpack<Bits>(panel, d / kGroup, count, [&](int channel, const Vec* weights) __attribute__((always_inline)) {
#pragma GCC unroll 16
        for (int v = 0; v < kVecs; ++v) store(group + channel * kPanel + v * kLanes, weights[v]);
      });
      add_products<Rows>(sums, x + d, x_stride, group, count);
    }
  }
  add_sums<Rows>(sums, bias, first, y, y_stride, width);
}

template <int Most, int Bits>
void multiply_some_packed(int rows, const float* x, int64_t x_stride, const Panel& panel, int depth, float* unpacked,
                          bool keep, const float* bias, bool first, float* y, int64_t y_stride, int width) {
  if (rows == Most)
    return multiply_packed<Most, Bits>(x, x_stride, panel, depth, unpacked, keep, bias, first, y, y_stride, width);
  if constexpr (Most > 1)
    multiply_some_packed<Most - 1, Bits>(rows, x, x_stride, panel, depth, unpacked, keep, bias, first, y, y_stride, width);
}

template <int Bits>
void linear(const GroupedWeights& w, float* y, const float* x, int64_t x_stride, int64_t rows, int threads) {
  for_each_task(rows, w.out, threads, [&](int64_t p, int64_t first, int64_t end) {
    alignas(64) thread_local float unpacked[kDepth * kPanel];
    const int width = int(std::min<int64_t>(kPanel, w.out - p * kPanel));
    const float* bias = w.bias ? w.bias + p * kPanel : nullptr;
    const int some = int(std::min<int64_t>(kRows, end - first));
    for (int64_t d = 0; d < w.in; d += kDepth) {
      const int depth = int(std::min<int64_t>(kDepth, w.in - d));
      multiply_some_packed<kRows, Bits>(some, x + first * x_stride + d, x_stride, Panel(w, p, d), depth, unpacked,
                                        end - first > some, bias, d == 0, y + first * w.out + p * kPanel, w.out, width);
      multiply_rows(x + d, x_stride, unpacked, depth, bias, d == 0, y + p * kPanel, w.out, width, first + some, end);
    }
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
