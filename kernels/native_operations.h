// The library's C interface, as far as its own parts call one another. Meanings are in the Python files of these names.
#pragma once

#include <cstdint>

extern "C" {

void ifb_rms_norm(void* normed, void* residual, const void* x, int64_t stride, const void* weight, int64_t outer,
                  int64_t inner, int64_t size, float eps, int type, int threads);

void ifb_rotary_embedding(void* q, int64_t q_stride, int num_heads, void* k, int64_t k_stride, int num_kv_heads,
                          const float* cos, const float* sin, const int64_t* positions, int64_t num_tokens,
                          int head_dim, int half, int type, int threads);

void ifb_silu_and_mul(void* output, const void* gate_up, int64_t stride, int64_t num_tokens, int64_t size, int type,
                      int threads);

void ifb_kv_cache_write(const void* keys, int64_t key_stride, const void* values, int64_t value_stride,
                        void* key_pages, void* value_pages, void* key_scales, void* value_scales, const int64_t* slots,
                        int num_tokens, int num_kv_heads, int head_dim, int block_size, int source_type, int page_type,
                        int threads);

void ifb_paged_attention(void* output, const void* queries, int64_t query_stride, const void* keys, const void* values,
                         const void* key_scales, const void* value_scales, const int32_t* query_starts,
                         const int32_t* context_lens, const int32_t* block_tables, int64_t table_stride, int num_rows,
                         int num_heads, int num_kv_heads, int head_dim, int block_size, int window, float scale,
                         int query_type, int page_type, int threads);

}  // extern "C"
