// The two small matrix products of attention, with their sums held in registers: scores = Q K^T and output = P V.
//
// A *tile* is 16 keys. Both products broadcast one value of the left matrix against rows of the right one. Each sum is
// taken in one fixed order, a channel (a key) after the other from zero, however many rows are computed together: this
// is what makes a row's result the same bits whoever its neighbours are.
#pragma once

#include <utility>

#include "native_vector.h"

namespace ifb {

constexpr int kTile = 16;                        // keys in a tile; also the channels in a panel of the values
constexpr int kTileVecs = kTile / kLanes;        // registers to a tile's row
constexpr int kSpan = 256;                       // keys whose scores are held at once (see native_attention.cpp)
constexpr int kScoreStride = kSpan + kTile;      // a row of scores; off a power of two, to spread over cache sets
constexpr int kMaxRows = kAccumulators / kTileVecs < 6 ? kAccumulators / kTileVecs : 6;  // query rows taken together

// How many tiles (or panels) wide a product of `rows` rows may be.
constexpr int widest(int rows) {
  return rows * 4 * kTileVecs <= kAccumulators ? 4 : rows * 2 * kTileVecs <= kAccumulators ? 2 : 1;
}

// scores[i][16 n + j] = sum over d of queries[d][i] * keys[n][d][j], for `rows` queries and `Tiles` tiles of keys.
template <int Rows, int Tiles>
inline void score_tiles(const float* queries, const float* const* keys, int64_t key_stride, int head_dim,
                        float* scores) {
  constexpr int kVecs = Tiles * kTileVecs;
  Vec sums[Rows][kVecs] = {};
  for (int d = 0; d < head_dim; ++d) {
    Vec row[kVecs];
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; ++v) row[v] = load(keys[v / kTileVecs] + d * key_stride + (v % kTileVecs) * kLanes);
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
template <int Rows, int Panels>
inline void weigh_panels(const float* weights, const float* const* values, int64_t value_stride, int num_keys,
                         int panel, float* output, int64_t output_stride) {
  constexpr int kVecs = Panels * kTileVecs;
  Vec sums[Rows][kVecs] = {};
  for (int first = 0; first < num_keys; first += kTile) {
    const float* tile = values[first / kTile] + panel * kTile;
    const int count = num_keys - first < kTile ? num_keys - first : kTile;
    for (int j = 0; j < count; ++j) {
      Vec row[kVecs];
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

template <int Rows>
void score_rows(const float* queries, const float* const* keys, int64_t key_stride, int head_dim, int num_tiles,
                float* scores) {
  constexpr int kWide = widest(Rows);
  int tile = 0;
  for (; tile + kWide <= num_tiles; tile += kWide)
    score_tiles<Rows, kWide>(queries, keys + tile, key_stride, head_dim, scores + tile * kTile);
  for (; tile < num_tiles; ++tile)
    score_tiles<Rows, 1>(queries, keys + tile, key_stride, head_dim, scores + tile * kTile);
}

template <int Rows>
void weigh_rows(const float* weights, const float* const* values, int64_t value_stride, int num_keys, int num_panels,
                float* output, int64_t output_stride) {
  constexpr int kWide = widest(Rows);
  int panel = 0;
  for (; panel + kWide <= num_panels; panel += kWide)
    weigh_panels<Rows, kWide>(weights, values, value_stride, num_keys, panel, output, output_stride);
  for (; panel < num_panels; ++panel)
    weigh_panels<Rows, 1>(weights, values, value_stride, num_keys, panel, output, output_stride);
}

using ScoreRows = decltype(&score_rows<1>);
using WeighRows = decltype(&weigh_rows<1>);

template <int... I>
inline ScoreRows pick_score_rows(int rows, std::integer_sequence<int, I...>) {
  static constexpr ScoreRows kTable[] = {&score_rows<I + 1>...};
  return kTable[rows - 1];
}

template <int... I>
inline WeighRows pick_weigh_rows(int rows, std::integer_sequence<int, I...>) {
  static constexpr WeighRows kTable[] = {&weigh_rows<I + 1>...};
  return kTable[rows - 1];
}

// The products for 1 .. kMaxRows rows, compiled one by one.
inline ScoreRows score_rows_for(int rows) {
  return pick_score_rows(rows, std::make_integer_sequence<int, kMaxRows>());
}
inline WeighRows weigh_rows_for(int rows) {
  return pick_weigh_rows(rows, std::make_integer_sequence<int, kMaxRows>());
}

}  // namespace ifb
