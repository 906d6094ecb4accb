// All layers of a Llama-family decoder in one call: the operations of the other files, in the order of decoder.py.
//
// Called one by one from Python, some nine operations a layer cost more than a single decoding row's arithmetic: each
// makes its tensors and gathers its arguments, and meanwhile the other threads fall asleep. Here all of a step's
// intermediate values lie in one workspace that stays warm in the caches from layer to layer.
//
// Structures are those of decoder_layers.py, field by field.

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "native_operations.h"

namespace ifb {
namespace {

// y [rows, out] = x W^T + b for x [rows, in], rows of x `x_stride` values apart, by whatever kind of weights they are.
struct Linear {
  void (*multiply)(const void* weights, float* y, const float* x, int64_t x_stride, int64_t rows, int threads);
  const void* weights;

  void operator()(float* y, const float* x, int64_t x_stride, int64_t rows, int threads) const {
    multiply(weights, y, x, x_stride, rows, threads);
  }
};

struct Layer {
  const float *attention_norm, *query_norm, *key_norm, *feed_forward_norm;  // those of queries and keys may be null
  Linear qkv, attention_out, gate_up, down;
  int64_t window;  // 0: none
};

struct Pages {
  void *keys, *values, *key_scales, *value_scales;
};

struct Model {
  const Layer* layers;
  const float* norm;
  int64_t num_layers, hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim;
  double eps, scale;  // of the norms; of attention's scores
};

// Whose queries attend to what, as in layout.py.
struct Queries {
  const int32_t *starts, *context_lens, *block_tables;
  int64_t table_stride, num_rows;
};

struct Step {
  float* hidden;     // [T, hidden_size]: the embedded tokens; the sum of all layers' outputs when done
  float* output;     // [num_wanted, hidden_size]
  float* workspace;  // [T, workspace_floats of decoder_layers.py]
  const Pages* pages;
  const float *cos, *sin;
  const int64_t *positions, *slots;
  const int64_t* wanted;           // [num_wanted], rising: the tokens that `output` is of; not read if it is of all
  Queries queries, wanted_queries;
  int64_t num_tokens, num_wanted, half, block_size, page_type, threads;
  double gemm_seconds, attention_seconds;  // filled in
};

class Timer {
 public:
  explicit Timer(double& total) : total_(total), started_(Clock::now()) {}
  ~Timer() { total_ += std::chrono::duration<double>(Clock::now() - started_).count(); }

 private:
  using Clock = std::chrono::steady_clock;
  double& total_;
  Clock::time_point started_;
};

// Rows `wanted` of x, rows `stride` values apart, become the first ones.
void keep_rows(float* x, int64_t stride, int64_t width, const int64_t* wanted, int64_t num_wanted) {
  for (int64_t i = 0; i < num_wanted; ++i)
    if (wanted[i] != i) std::copy_n(x + wanted[i] * stride, width, x + i * stride);
}

void run(const Model& m, Step& s) {
  constexpr int kFloat32 = 0;
  const int64_t hidden = m.hidden_size, dim = m.head_dim;
  int64_t tokens = s.num_tokens;
  const Queries* queries = &s.queries;
  const int64_t q_size = m.num_heads * dim, k_size = m.num_kv_heads * dim, qkv_size = q_size + 2 * k_size;
  const int threads = int(s.threads);
  float* x = s.workspace;  // what a half of a layer leaves for the next norm to add
  float* normed = x + tokens * hidden;
  float* qkv = normed + tokens * hidden;
  float* q_normed = qkv + tokens * qkv_size;
  float* k_normed = q_normed + tokens * q_size;
  float* attended = k_normed + tokens * k_size;
  float* gate_up = attended + tokens * q_size;
  float* activated = gate_up + tokens * 2 * m.intermediate_size;
  s.gemm_seconds = s.attention_seconds = 0;

  const auto norm = [&](float* target, float* residual, const float* source, const float* weight) {
    ifb_rms_norm(target, residual, source, hidden, weight, tokens, 1, hidden, float(m.eps), kFloat32, threads);
  };
  const auto multiply = [&](const Linear& linear, float* y, const float* source, int64_t width) {
    const Timer timer(s.gemm_seconds);
    linear(y, source, width, tokens, threads);
  };
  for (int64_t l = 0; l < m.num_layers; ++l) {
    const Layer& layer = m.layers[l];
    if (l == 0)
      norm(normed, nullptr, s.hidden, layer.attention_norm);
    else
      norm(normed, s.hidden, x, layer.attention_norm);
    multiply(layer.qkv, qkv, normed, hidden);
    float *q = qkv, *k = qkv + q_size;
    const float* v = k + k_size;
    int64_t q_stride = qkv_size, k_stride = qkv_size;
    if (layer.query_norm && layer.key_norm) {
      const float eps = float(m.eps);
      ifb_rms_norm(q_normed, nullptr, q, qkv_size, layer.query_norm, tokens, m.num_heads, dim, eps, kFloat32, threads);
      ifb_rms_norm(k_normed, nullptr, k, qkv_size, layer.key_norm, tokens, m.num_kv_heads, dim, eps, kFloat32, threads);
      q = q_normed, q_stride = q_size;
      k = k_normed, k_stride = k_size;
    }
    ifb_rotary_embedding(q, q_stride, int(m.num_heads), k, k_stride, int(m.num_kv_heads), s.cos, s.sin, s.positions,
                         tokens, int(dim), int(s.half), kFloat32, threads);
    {
      const Timer timer(s.attention_seconds);
      const Pages& pages = s.pages[l];
      ifb_kv_cache_write(k, k_stride, v, qkv_size, pages.keys, pages.values, pages.key_scales, pages.value_scales,
                         s.slots, int(tokens), int(m.num_kv_heads), int(dim), int(s.block_size), kFloat32,
                         int(s.page_type), threads);
      if (l + 1 == m.num_layers && s.num_wanted < s.num_tokens) {
        keep_rows(q, q_stride, q_size, s.wanted, s.num_wanted);
        keep_rows(s.hidden, hidden, hidden, s.wanted, s.num_wanted);
        tokens = s.num_wanted;
        queries = &s.wanted_queries;
        if (!tokens) return;
      }
      ifb_paged_attention(attended, q, q_stride, pages.keys, pages.values, pages.key_scales, pages.value_scales,
                          queries->starts, queries->context_lens, queries->block_tables, queries->table_stride,
                          int(queries->num_rows), int(m.num_heads), int(m.num_kv_heads), int(dim), int(s.block_size),
                          int(layer.window), float(m.scale), kFloat32, int(s.page_type), threads);
    }
    multiply(layer.attention_out, x, attended, q_size);
    norm(normed, s.hidden, x, layer.feed_forward_norm);
    multiply(layer.gate_up, gate_up, normed, hidden);
    ifb_silu_and_mul(activated, gate_up, 2 * m.intermediate_size, tokens, m.intermediate_size, kFloat32, threads);
    multiply(layer.down, x, activated, m.intermediate_size);
  }
  norm(s.output, s.hidden, x, m.norm);
}

}  // namespace
}  // namespace ifb

extern "C" void ifb_decoder_layers(const void* model, void* step) {
  ifb::run(*static_cast<const ifb::Model*>(model), *static_cast<ifb::Step*>(step));
}
