// Softmax of one query row, some keys at a time (Milakov and Gimelshein, 2018).
#pragma once

#include <algorithm>
#include <cmath>

#include "native_multiply.h"

namespace ifb {

// What one query row knows after some keys: out = weighted / sum once all are seen.
struct Softmax {
  float maximum = -INFINITY, sum = 0;
};

// Takes `later` keys into what is known of earlier ones. One compiled body: it rounds alike wherever it is called.
__attribute__((noinline)) inline void merge(Softmax& state, float* weighted, const Softmax& later,
                                            const float* later_weighted, int dim) {
  if (later.sum == 0) return;
  if (state.sum == 0) {
    state = later;
    std::copy(later_weighted, later_weighted + dim, weighted);
    return;
  }
  const float maximum = std::max(state.maximum, later.maximum);
  const float keep = exp2_of(state.maximum - maximum), take = exp2_of(later.maximum - maximum);
  for (int c = 0; c < dim; c += kLanes)
    store(weighted + c, load(weighted + c) * keep + load(later_weighted + c) * take);
  state.maximum = maximum;
  state.sum = state.sum * keep + later.sum * take;
}

// Scores of one row -> exponentials in place; keys outside `from` .. `to` - 1 get weight exactly 0.
inline Softmax exponentiate(float* scores, int num_keys, int from, int to) {
  std::fill(scores, scores + from, -INFINITY);
  std::fill(scores + to, scores + num_keys, -INFINITY);
  Vec highest = splat(-INFINITY);
  for (int j = 0; j < num_keys; j += kLanes) highest = maximum(highest, load(scores + j));
  Softmax state;
  state.maximum = max_of(highest);
  const float shift = std::max(state.maximum, -1e30f);  // finite where nothing is visible
  Vec sums[kTileVecs] = {};
  for (int j = 0; j < num_keys; j += kTile)
    for (int v = 0; v < kTileVecs; ++v) {
      Vec weights = exp2_of(load(scores + j + v * kLanes) - shift);
      store(scores + j + v * kLanes, weights);
      sums[v] += weights;
    }
  for (int v = 1; v < kTileVecs; ++v) sums[0] += sums[v];
  state.sum = sum_of(sums[0]);
  return state;
}

// One factor a key, for a row's scores (or weights) of whole tiles.
inline void multiply_by(const float* factors, float* row, int num_keys) {
  for (int j = 0; j < num_keys; j += kLanes) store(row + j, load(row + j) * load(factors + j));
}

}  // namespace ifb
