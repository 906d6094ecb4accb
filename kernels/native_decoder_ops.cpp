// The element-wise operations of a Llama decoder layer, each in one pass over memory. Float32 arithmetic throughout.
// Signatures and meaning: rms_norm.py, rotary_embedding.py, silu_and_mul.py.

#include "native_threads.h"
#include "native_vector.h"

namespace ifb {
namespace {

constexpr int64_t kWorthThreads = 8192;  // values; below this, waking other threads costs more than it saves

// `outer` by `inner` rows of `size` values; rows of one outer index are contiguous, outer ones `stride` values apart.
template <typename T>
void rms_norm(T* normed, T* residual, const T* x, int64_t stride, const T* weight, int64_t outer, int64_t inner,
              int64_t size, float eps, int threads) {
  const int64_t whole = size / kLanes * kLanes;
  const int rest = int(size - whole);
  share_out(outer * inner, outer * inner * size >= kWorthThreads ? threads : 1, [&](int64_t row) {
    const T* source = x + row / inner * stride + row % inner * size;
    if (residual) {
      T* sum = residual + row * size;
      for (int64_t i = 0; i < whole; i += kLanes) store(sum + i, load(sum + i) + load(source + i));
      if (rest) store_some(sum + whole, load_some(sum + whole, rest) + load_some(source + whole, rest), rest);
      source = sum;
    }
    Vec squares = {};
    for (int64_t i = 0; i < whole; i += kLanes) squares += load(source + i) * load(source + i);
    if (rest) squares += load_some(source + whole, rest) * load_some(source + whole, rest);
    const float inverse = 1.0f / __builtin_sqrtf(sum_of(squares) / float(size) + eps);
    T* target = normed + row * size;
    for (int64_t i = 0; i < whole; i += kLanes)
      store(target + i, rounded_to<T>(load(source + i) * inverse) * load(weight + i));
    if (rest)
      store_some(target + whole,
                 rounded_to<T>(load_some(source + whole, rest) * inverse) * load_some(weight + whole, rest), rest);
  });
}

template <typename T>
inline void rotate(T* first, T* second, Vec cos, Vec sin, int count) {
  const Vec a = load_some(first, count), b = load_some(second, count);
  store_some(first, a * cos - b * sin, count);
  store_some(second, b * cos + a * sin, count);
}

template <typename T>
void rotate_heads(T* heads, int num_heads, int head_dim, const float* cos, const float* sin, int half) {
  for (int head = 0; head < num_heads; ++head, heads += head_dim) {
    int i = 0;
    for (; i + kLanes <= half; i += kLanes) {
      const Vec a = load(heads + i), b = load(heads + half + i), c = load(cos + i), s = load(sin + i);
      store(heads + i, a * c - b * s);
      store(heads + half + i, b * c + a * s);
    }
    if (i < half) rotate(heads + i, heads + half + i, load_some(cos + i, half - i), load_some(sin + i, half - i), half - i);
  }
}

template <typename T>
void rotary_embedding(T* q, int64_t q_stride, int num_heads, T* k, int64_t k_stride, int num_kv_heads,
                      const float* cos, const float* sin, const int64_t* positions, int64_t num_tokens, int head_dim,
                      int half, int threads) {
  const int64_t values = num_tokens * (num_heads + num_kv_heads) * head_dim;
  share_out(num_tokens, values >= kWorthThreads ? threads : 1, [&](int64_t token) {
    const float* token_cos = cos + positions[token] * half;
    const float* token_sin = sin + positions[token] * half;
    rotate_heads(q + token * q_stride, num_heads, head_dim, token_cos, token_sin, half);
    rotate_heads(k + token * k_stride, num_kv_heads, head_dim, token_cos, token_sin, half);
  });
}

inline Vec silu(Vec x) {
  const Vec power = minimum(x * -1.44269504088896340736f, splat(126.0f));
  return x / (exp2_of(power) + 1.0f);
}

template <typename T>
void silu_and_mul(T* output, const T* gate_up, int64_t stride, int64_t num_tokens, int64_t size, int threads) {
  share_out(num_tokens, num_tokens * size >= kWorthThreads ? threads : 1, [&](int64_t token) {
    const T* gate = gate_up + token * stride;
    const T* up = gate + size;
    T* target = output + token * size;
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) store(target + i, silu(load(gate + i)) * load(up + i));
    const int rest = int(size - i);
    if (rest) store_some(target + i, silu(load_some(gate + i, rest)) * load_some(up + i, rest), rest);
  });
}

}  // namespace
}  // namespace ifb

extern "C" {

void ifb_rms_norm(void* normed, void* residual, const void* x, int64_t stride, const void* weight, int64_t outer,
                  int64_t inner, int64_t size, float eps, int type, int threads) {
  ifb::with_type(ifb::DataType(type), [&](auto t) {
    using T = decltype(t);
    ifb::rms_norm(static_cast<T*>(normed), static_cast<T*>(residual), static_cast<const T*>(x), stride,
                  static_cast<const T*>(weight), outer, inner, size, eps, threads);
  });
}

void ifb_rotary_embedding(void* q, int64_t q_stride, int num_heads, void* k, int64_t k_stride, int num_kv_heads,
                          const float* cos, const float* sin, const int64_t* positions, int64_t num_tokens,
                          int head_dim, int half, int type, int threads) {
  ifb::with_type(ifb::DataType(type), [&](auto t) {
    using T = decltype(t);
    ifb::rotary_embedding(static_cast<T*>(q), q_stride, num_heads, static_cast<T*>(k), k_stride, num_kv_heads, cos,
                          sin, positions, num_tokens, head_dim, half, threads);
  });
}

void ifb_silu_and_mul(void* output, const void* gate_up, int64_t stride, int64_t num_tokens, int64_t size, int type,
                      int threads) {
  ifb::with_type(ifb::DataType(type), [&](auto t) {
    using T = decltype(t);
    ifb::silu_and_mul(static_cast<T*>(output), static_cast<const T*>(gate_up), stride, num_tokens, size, threads);
  });
}

}  // extern "C"
