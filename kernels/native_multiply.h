// The two small matrix products of attention, with their sums held in registers: scores = Q K^T and output = P V.
//
// A *tile* is 16 keys. Both products broadcast one value of the left matrix against rows of the right one. Each sum is
// taken in one fixed order, a channel (a key) after the other from zero, however many rows are computed together: this
// is what makes a row's result the same bits whoever its neighbours are. T is what the pages hold
// (codes of quantized pages are multiplied as they are: their scales are the caller's, one a key, not one a channel).
//
// Pages lie scattered, so the processor cannot guess where the next tile is: each product asks for what it will read
// next while it computes. The arrays of tiles hold kLookahead more entries than there are tiles.
#pragma once

#include <utility>

#include "native_vector.h"

namespace ifb {

constexpr int kTile = 16;                        // keys in a tile; also the channels in a panel of the values
constexpr int kTileVecs = kTile / kLanes;        // registers to a tile's row
constexpr int kSpan = 256;                       // keys whose scores are held at once (see native_attention.cpp)
constexpr int kScoreStride = kSpan + kTile;      // a row of scores; off a power of two, to spread over cache sets
constexpr int kMaxRows = kAccumulators / kTileVecs < 6 ? kAccumulators / kTileVecs : 6;  // query rows taken together
constexpr int kLookahead = 4;

// How many tiles (or panels) wide a product of `rows` rows may be.
constexpr int widest(int rows) {
  return rows * 4 * kTileVecs <= kAccumulators ? 4 : rows * 2 * kTileVecs <= kAccumulators ? 2 : 1;
}

template <typename T>
inline void prefetch(const T* p) { __builtin_prefetch(p, 0, 2); }  // into the second-level cache

// scores[i][16 n + j] = sum over d of queries[d][i] * keys[n][d][j], for `Rows` queries and `Tiles` tiles of keys.
template <typename T, int Rows, int Tiles>
inline void score_tiles(const float* queries, const void* const* keys, int64_t key_stride, int head_dim,
                        float* scores) {
  constexpr int kVecs = Tiles * kTileVecs;
  const T *tiles[Tiles], *next[Tiles];
#pragma GCC unroll 16
  for (int n = 0; n < Tiles; ++n) {
    tiles[n] = static_cast<const T*>(keys[n]);
    next[n] = static_cast<const T*>(keys[n + Tiles]);
  }
  Vec sums[Rows][kVecs] = {};
  for (int d = 0; d < head_dim; ++d) {
    Vec row[kVecs];
#pragma GCC unroll 16
    for (int n = 0; n < Tiles; ++n) prefetch(next[n] + d * key_stride);
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; ++v) row[v] = load(tiles[v / kTileVecs] + d * key_stride + (v % kTileVecs) * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < Rows; ++i) {
      Vec query = splat(queries[d * Rows + i]);
#pragma GCC unroll 16
      for (int v = 0; v < kVecs; ++v) sums[i][v] += query * row[v];
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; ++v) store(scores + i * kScoreStride + v * kLanes, sums[i][v]);
}

// output[i][16 n + c] = sum over keys of weights[i][key] * values[key][16 n + c], for `Panels` panels of 16 channels.
// Key 16 t + j lies at values[t] + j * value_stride.
template <typename T, int Rows, int Panels>
inline void weigh_panels(const float* weights, const void* const* values, int64_t value_stride, int num_keys,
                         int panel, float* output, int64_t output_stride) {
  constexpr int kVecs = Panels * kTileVecs;
  Vec sums[Rows][kVecs] = {};
  for (int first = 0; first < num_keys; first += kTile) {
    const T* tile = static_cast<const T*>(values[first / kTile]) + panel * kTile;
    const T* next = static_cast<const T*>(values[first / kTile + 2]) + panel * kTile;
    const int count = num_keys - first < kTile ? num_keys - first : kTile;
    for (int j = 0; j < count; ++j) {
      Vec row[kVecs];
#pragma GCC unroll 16
      for (int n = 0; n < Panels; ++n) prefetch(next + j * value_stride + n * kTile);
#pragma GCC unroll 16
      for (int v = 0; v < kVecs; ++v) row[v] = load(tile + j * value_stride + v * kLanes);
#pragma GCC unroll 16
      for (int i = 0; i < Rows; ++i) {
        Vec weight = splat(weights[i * kScoreStride + first + j]);
#pragma GCC unroll 16
        for (int v = 0; v < kVecs; ++v) sums[i][v] += weight * row[v];
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; ++v) store(output + i * output_stride + panel * kTile + v * kLanes, sums[i][v]);
}

template <typename T, int Rows>
void score_rows(const float* queries, const void* const* keys, int64_t key_stride, int head_dim, int num_tiles,
                float* scores) {
  constexpr int kWide = widest(Rows);
  int tile = 0;
  for (; tile + kWide <= num_tiles; tile += kWide)
    score_tiles<T, Rows, kWide>(queries, keys + tile, key_stride, head_dim, scores + tile * kTile);
  for (; tile < num_tiles; ++tile)
    score_tiles<T, Rows, 1>(queries, keys + tile, key_stride, head_dim, scores + tile * kTile);
}

template <typename T, int Rows>
void weigh_rows(const float* weights, const void* const* values, int64_t value_stride, int num_keys, int num_panels,
                float* output, int64_t output_stride) {
  constexpr int kWide = widest(Rows);
  int panel = 0;
  for (; panel + kWide <= num_panels; panel += kWide)
    weigh_panels<T, Rows, kWide>(weights, values, value_stride, num_keys, panel, output, output_stride);
  for (; panel < num_panels; ++panel)
    weigh_panels<T, Rows, 1>(weights, values, value_stride, num_keys, panel, output, output_stride);
}

struct Products {
  decltype(&score_rows<float, 1>) score_rows;
  decltype(&weigh_rows<float, 1>) weigh_rows;
};

template <typename T, int... I>
inline const Products& products_of(int rows, std::integer_sequence<int, I...>) {
  static constexpr Products kTable[] = {{&score_rows<T, I + 1>, &weigh_rows<T, I + 1>}...};
  return kTable[rows - 1];
}

// The products for 1 .. kMaxRows rows over pages of one type, compiled one by one.
inline const Products& products_for(DataType type, int rows) {
  const auto counts = std::make_integer_sequence<int, kMaxRows>();
  switch (type) {
    case kBfloat16: return products_of<Bfloat16>(rows, counts);
    case kFloat16: return products_of<Float16>(rows, counts);
    case kInt8: return products_of<Int8>(rows, counts);
    case kFloat8: return products_of<Float8>(rows, counts);
    default: return products_of<float>(rows, counts);
  }
}

}  // namespace ifb
