// The matrix product of a linear layer, y = x W^T + b, with W [out, in] packed once. Meaning: packed_linear.py.
//
// Panels and their product: native_linear.h. Each output's sum is taken in one fixed order, kDepth channels at a
// time from zero, however many rows are computed together: a row's result is the same bits whoever its neighbours are.
// No code is made at run time, so any number of rows costs the same.

#include "native_linear.h"

namespace ifb {
namespace {

struct PackedWeights {
  const void* packed;  // [panels, in, kPanel] of `type`
  const float* bias;   // [out], or null
  int64_t out, in, type;
};

template <typename T>
void linear(float* y, const float* x, int64_t x_stride, const T* packed, const float* bias, int64_t rows, int64_t out,
            int64_t in, int threads) {
  for_each_task(rows, out, threads, [&](int64_t p, int64_t first, int64_t end) {
    const int width = int(std::min<int64_t>(kPanel, out - p * kPanel));
    for (int64_t d = 0; d < in; d += kDepth)
      multiply_rows(x + d, x_stride, packed + (p * in + d) * kPanel, int(std::min<int64_t>(kDepth, in - d)),
                    bias ? bias + p * kPanel : nullptr, d == 0, y + p * kPanel, out, width, first, end);
  });
}

template <typename T>
void pack(T* packed, const T* weight, int64_t stride, int64_t out, int64_t in, int threads) {
  const int64_t panels = (out + kPanel - 1) / kPanel;
  share_out(panels, threads, [&](int64_t p) {
    for (int64_t d = 0; d < in; ++d)
      for (int64_t j = 0; j < kPanel; ++j) {
        const int64_t output = p * kPanel + j;
        packed[(p * in + d) * kPanel + j] = output < out ? weight[output * stride + d] : T{};
      }
  });
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
