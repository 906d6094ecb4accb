// Stores new keys and values in the pages of native_attention.cpp: keys transposed inside a page, values as they come,
// or, in quantized pages, both as codes with a scale for each token and head (kv_quantization.py says how they are made).

#include <algorithm>
#include <type_traits>

#include "native_threads.h"
#include "native_vector.h"

namespace ifb {
namespace {

constexpr int kBatch = 16;  // tokens handled together: a run of them in one page is transposed as a block

struct Write {
  const void* keys;
  const void* values;
  int64_t key_stride, value_stride;  // between tokens
  void* key_pages;
  void* value_pages;
  Bfloat16* key_scales;              // [num_blocks, kv_heads, block_size]
  Bfloat16* value_scales;
  const int64_t* slots;
  int num_tokens, num_kv_heads, head_dim, block_size;
};

template <typename Source, typename Page>
inline Page converted(Source x) {
  Page out;
  store_some(&out, splat(load_one(&x)), 1);
  return out;
}
template <>
inline float converted<float, float>(float x) { return x; }
template <>
inline Bfloat16 converted<Bfloat16, Bfloat16>(Bfloat16 x) { return x; }
template <>
inline Float16 converted<Float16, Float16>(Float16 x) { return x; }

inline float largest_code(Int8) { return 127; }
inline float largest_code(Float8) { return 448; }

// One token's head -> its codes, `stride` apart, and its scale.
template <typename Code, typename Source>
void quantize(const Source* source, int dim, Code* codes, int64_t stride, Bfloat16* scale) {
  VecBits highest = {};  // of magnitudes as bits, where a NaN is above infinity
  for (int d = 0; d < dim; d += kLanes) {
    const VecBits magnitude = as_bits(load_some(source + d, std::min(kLanes, dim - d))) & 0x7fffffffu;
    highest = magnitude > highest ? magnitude : highest;
  }
  uint32_t bits = 0;
  for (int lane = 0; lane < kLanes; ++lane) bits = std::max(bits, uint32_t(highest[lane]));
  store_some(scale, as_float(splat_bits(bits)) / largest_code(Code{}), 1);
  const float rounded = load_one(scale);
  const Vec divisor = splat(rounded == 0 ? 1 : rounded);
  for (int d = 0; d < dim; d += kLanes) {
    const int count = std::min(kLanes, dim - d);
    Code some[kLanes];
    store(some, load_some(source + d, count) / divisor);
    for (int i = 0; i < count; ++i) codes[(d + i) * stride] = some[i];
  }
}

template <typename Page>
constexpr bool kHoldsCodes = std::is_same_v<Page, Int8> || std::is_same_v<Page, Float8>;

template <typename Source, typename Page>
void write_batch(const Write& w, int first, int last, int head) {
  const int dim = w.head_dim, block = w.block_size;
  for (int token = first; token < last;) {
    const int64_t slot = w.slots[token];
    const int offset = int(slot % block);
    int run = 1;
    while (token + run < last && offset + run < block && w.slots[token + run] == slot + run) ++run;
    const int64_t page = (slot / block * w.num_kv_heads + head) * dim * block;
    const Source* keys = static_cast<const Source*>(w.keys) + token * w.key_stride + int64_t(head) * dim;
    Page* key_page = static_cast<Page*>(w.key_pages) + page + offset;
    const Source* values = static_cast<const Source*>(w.values) + token * w.value_stride + int64_t(head) * dim;
    Page* value_page = static_cast<Page*>(w.value_pages) + page + int64_t(offset) * dim;
    if constexpr (kHoldsCodes<Page>) {
      const int64_t scale = (slot / block * w.num_kv_heads + head) * block + offset;
      for (int i = 0; i < run; ++i) {
        quantize(keys + i * w.key_stride, dim, key_page + i, block, w.key_scales + scale + i);
        quantize(values + i * w.value_stride, dim, value_page + int64_t(i) * dim, 1, w.value_scales + scale + i);
      }
    } else {
      for (int d = 0; d < dim; ++d)
        for (int i = 0; i < run; ++i) key_page[d * block + i] = converted<Source, Page>(keys[i * w.key_stride + d]);
      for (int i = 0; i < run; ++i)
        for (int d = 0; d < dim; ++d) value_page[i * dim + d] = converted<Source, Page>(values[i * w.value_stride + d]);
    }
    token += run;
  }
}

template <typename Source, typename Page>
void write_all(const Write& w, int threads) {
  const int batches = (w.num_tokens + kBatch - 1) / kBatch;
  share_out(batches * w.num_kv_heads, w.num_tokens * w.num_kv_heads >= 2 * kBatch ? threads : 1, [&](int64_t i) {
    const int first = int(i) / w.num_kv_heads * kBatch;
    write_batch<Source, Page>(w, first, std::min(w.num_tokens, first + kBatch), int(i) % w.num_kv_heads);
  });
}

template <typename Source>
void write_to(const Write& w, DataType page_type, int threads) {
  with_page_type(page_type, [&](auto page) { write_all<Source, decltype(page)>(w, threads); });
}

}  // namespace
}  // namespace ifb

extern "C" void ifb_kv_cache_write(const void* keys, int64_t key_stride, const void* values, int64_t value_stride,
                                   void* key_pages, void* value_pages, void* key_scales, void* value_scales,
                                   const int64_t* slots, int num_tokens, int num_kv_heads, int head_dim,
                                   int block_size, int source_type, int page_type, int threads) {
  using namespace ifb;
  const Write w{keys, values, key_stride, value_stride, key_pages, value_pages, static_cast<Bfloat16*>(key_scales),
                static_cast<Bfloat16*>(value_scales), slots, num_tokens, num_kv_heads, head_dim, block_size};
  with_type(DataType(source_type), [&](auto source) { write_to<decltype(source)>(w, DataType(page_type), threads); });
}
