// The matrix product of a linear layer in 8-bit integers, y = (X W^T) * scales + b. Meaning: int8_linear.py.
//
// W is cut into panels as in native_linear.h, but group of channels by group of channels (native_dot.h), and
// a step of the inner loop adds one group of a panel, times one of each of kRows rows of X, to sums held in registers.
// The sums run over all channels and are exact; each row has its own scale: a row's result is the same bits whoever
// its neighbours are.

#include <vector>

#include "native_dot.h"
#include "native_linear.h"

namespace ifb {
namespace {

constexpr int kBlock = 64, kBlockVecs = kBlock / kLanes;  // channels that are rotated together
constexpr float kBlockScale = 0.125f;              // kBlock^-1/2
constexpr int64_t kWorthThreads = 32768;           // values to quantize; fewer, and other threads wake in vain

struct Int8Weights {
  const PackedCode* packed;  // [panels, groups, kPanel, kGroup]
  const float* scales;       // [out]
  const float* bias;         // [out], or null
  int64_t out, in;
};

// What the product reads of X: codes [rows, groups, kGroup], and for each row its scale and what its sums start from.
struct Rows {
  Activation* codes;
  float* scales;
  int32_t* starts;
};

// The Walsh-Hadamard transform of kBlock channels in place, times kBlock^-1/2: orthogonal, and its own inverse.
void rotate(Vec* block) {
  VecInt lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
#pragma GCC unroll 8
  for (int step = 1; step < kLanes; step *= 2) {
    const Vec sign = (lane & step) != 0 ? splat(-1.0f) : splat(1.0f);
#pragma GCC unroll 16
    for (int v = 0; v < kBlockVecs; ++v) block[v] = multiply_add(block[v], sign, __builtin_shuffle(block[v], lane ^ step));
  }
#pragma GCC unroll 8
  for (int step = 1; step < kBlockVecs; step *= 2)
#pragma GCC unroll 16
    for (int v = 0; v < kBlockVecs; ++v)
      if (!(v & step)) {
        const Vec a = block[v], b = block[v + step];
        block[v] = a + b;
        block[v + step] = a - b;
      }
#pragma GCC unroll 16
  for (int v = 0; v < kBlockVecs; ++v) block[v] *= kBlockScale;
}

// Row `row` of X, rotated, as codes times a scale, rounded to nearest; `rotated` is room for it. The scale of a row
// that holds what is no number is none either.
void quantize_row(const float* x, int64_t in, int64_t blocks, float* rotated, const Rows& rows, int64_t row) {
  Vec largest = {}, poison = {};
  for (int64_t b = 0; b < blocks; ++b) {
    Vec block[kBlockVecs];
    for (int v = 0; v < kBlockVecs; ++v) {
      const int64_t channel = b * kBlock + v * kLanes, left = in - channel;
      block[v] = left >= kLanes ? load(x + channel) : left > 0 ? load_some(x + channel, int(left)) : Vec{};
    }
    rotate(block);
    for (int v = 0; v < kBlockVecs; ++v) {
      largest = maximum(largest, as_float(as_bits(block[v]) & 0x7fffffffu));
      poison += block[v] * 0.0f;
      store(rotated + b * kBlock + v * kLanes, block[v]);
    }
  }
  const float most = max_of(largest);
  const float inverse = most > 0 ? 127.0f / most : 0.0f;
  rows.scales[row] = most / 127.0f + sum_of(poison);

  Activation* codes = rows.codes + row * blocks * kBlock;
  VecInt total = {};
  for (int64_t i = 0; i < blocks * kBlock; i += kLanes) {
    // Adding 1.5 * 2^23 leaves the nearest integer in the low bits of the mantissa.
    const VecBits shifted = as_bits(multiply_add(load(rotated + i), splat(inverse), splat(0x1.8p23f)));
    const VecInt code = (VecInt)(shifted - as_bits(splat(0x1.8p23f)));
    total += code;
    store_activations(codes + i, code);
  }
  int32_t sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += total[i];
  rows.starts[row] = -kShift * sum;
}

// y[i][0 .. width) for `Count` rows from `first`.
template <int Count>
void multiply_codes(const Rows& rows, int64_t first, const PackedCode* panel, int64_t groups, const float* scales,
              const float* bias, float* y, int64_t y_stride, int width) {
  const Activation* codes = rows.codes + first * groups * kGroup;
  VecInt sums[Count][kVecs];
#pragma GCC unroll 16
  for (int i = 0; i < Count; ++i)
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; ++v) sums[i][v] = VecInt{} + rows.starts[first + i];
  for (int64_t g = 0; g < groups; ++g) {
    VecInt weights[kVecs];
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; ++v) weights[v] = load_codes(panel + (g * kPanel + v * kLanes) * kGroup);
#pragma GCC unroll 16
    for (int i = 0; i < Count; ++i) {
      int32_t activations;
      std::memcpy(&activations, codes + (i * groups + g) * kGroup, sizeof activations);
#pragma GCC unroll 16
      for (int v = 0; v < kVecs; ++v) sums[i][v] = add_dot(sums[i][v], weights[v], activations);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < Count; ++i)
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; ++v) {
      const int count = width - v * kLanes;
      const Vec product = __builtin_convertvector(sums[i][v], Vec) * rows.scales[first + i];
      float* target = y + i * y_stride + v * kLanes;
      if (count >= kLanes)
        store(target, multiply_add(product, load(scales + v * kLanes), bias ? load(bias + v * kLanes) : Vec{}));
      else if (count > 0)
        store_some(target,
                   multiply_add(product, load_some(scales + v * kLanes, count),
                                bias ? load_some(bias + v * kLanes, count) : Vec{}),
                   count);
    }
}

// The same for at most `Most` rows.
template <int Most>
void multiply_some_codes(int count, const Rows& rows, int64_t first, const PackedCode* panel, int64_t groups,
                   const float* scales, const float* bias, float* y, int64_t y_stride, int width) {
  if (count == Most) return multiply_codes<Most>(rows, first, panel, groups, scales, bias, y, y_stride, width);
  if constexpr (Most > 1)
    multiply_some_codes<Most - 1>(count, rows, first, panel, groups, scales, bias, y, y_stride, width);
}

void linear(const Int8Weights& w, float* y, const float* x, int64_t x_stride, int64_t rows, int threads) {
  const int64_t blocks_in = (w.in + kBlock - 1) / kBlock, groups = blocks_in * kBlock / kGroup;
  // A thread that calls keeps its room from call to call: new memory costs more to touch than it is worth.
  thread_local std::vector<Activation> codes;
  thread_local std::vector<float> scales;
  thread_local std::vector<int32_t> starts;
  if (int64_t(codes.size()) < rows * blocks_in * kBlock) codes.resize(rows * blocks_in * kBlock);
  if (int64_t(scales.size()) < rows) scales.resize(rows), starts.resize(rows);
  const Rows quantized{codes.data(), scales.data(), starts.data()};
  share_out(rows, rows * w.in >= kWorthThreads ? threads : 1, [&](int64_t r) {
    thread_local std::vector<float> rotated;
    if (int64_t(rotated.size()) < blocks_in * kBlock) rotated.resize(blocks_in * kBlock);
    quantize_row(x + r * x_stride, w.in, blocks_in, rotated.data(), quantized, r);
  });

  for_each_task(rows, w.out, threads, [&](int64_t p, int64_t first, int64_t end) {
    const int width = int(std::min<int64_t>(kPanel, w.out - p * kPanel));
    const PackedCode* panel = w.packed + p * groups * kPanel * kGroup;
    for (int64_t r = first; r < end; r += kRows)
      multiply_some_codes<kRows>(int(std::min<int64_t>(kRows, end - r)), quantized, r, panel, groups,
                                 w.scales + p * kPanel, w.bias ? w.bias + p * kPanel : nullptr,
                                 y + r * w.out + p * kPanel, w.out, width);
  });
}

// `in` is whole blocks.
void pack(PackedCode* packed, const int8_t* codes, int64_t out, int64_t in, int threads) {
  const int64_t panels = (out + kPanel - 1) / kPanel, groups = in / kGroup;
  share_out(panels, threads, [&](int64_t p) {
    for (int64_t g = 0; g < groups; ++g)
      for (int64_t j = 0; j < kPanel; ++j)
        for (int64_t k = 0; k < kGroup; ++k) {
          const int64_t output = p * kPanel + j;
          const int code = output < out ? codes[output * in + g * kGroup + k] : 0;
          packed[((p * groups + g) * kPanel + j) * kGroup + k] = PackedCode(code + kShift);
        }
  });
}

}  // namespace
}  // namespace ifb

extern "C" {

void ifb_linear_int8_pack(void* packed, const int8_t* codes, int64_t out, int64_t in, int threads) {
  ifb::pack(static_cast<ifb::PackedCode*>(packed), codes, out, in, threads);
}

// y [rows, out] in float32 for x [rows, in], rows of x `x_stride` values apart. `weights`: Int8Weights of int8_linear.py.
void ifb_linear_int8(const void* weights, float* y, const float* x, int64_t x_stride, int64_t rows, int threads) {
  ifb::linear(*static_cast<const ifb::Int8Weights*>(weights), y, x, x_stride, rows, threads);
}

}  // extern "C"
