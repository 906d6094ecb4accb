// A random token of each row, after temperature, top_k, top_p and min_p. Meaning: draw_tokens.py.
//
// Nothing is sorted but what lies at an edge. What surely goes is left out first: a few passes over a row find a score
// that every kept token reaches. The others are counted into buckets by the leading bits of their scores, whose order is
// theirs; sums over buckets tell in which one the k-th token, the last of top_p, or the drawn one is, and only that one's
// tokens are put in order. A row is one thread's, so that its sums are the same whoever its neighbours are.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "native_threads.h"
#include "native_vector.h"

namespace ifb {
namespace {

constexpr int kBlock = 64;                     // tokens whose weights are summed together
constexpr int kBucketShift = 18;               // a bucket is a 32nd of an octave of scores
constexpr int kBuckets = (0x7f800000 >> kBucketShift) + 1;

struct Filters {
  double temperature, top_p, min_p, uniform;
  int64_t top_k;
};

// A row's tokens: scores (logit less the highest, over the temperature: 0 and below) and weights (their powers of e).
class Row {
 public:
  int64_t draw(const float* logits, int64_t size, float highest, const Filters& f) {
    size_ = size;
    weigh(logits, highest, float(f.temperature));
    const bool limited = f.top_k < size;
    if (!limited && f.top_p >= 1.0) {
      drop_below(float(f.min_p));
      return draw_by_id(f.uniform);
    }
    choose_candidates(limited ? floor_of_top_k(f.top_k) : floor_of_top_p(f.top_p));
    fill_buckets();
    last_ = ~uint64_t(0);
    if (limited) keep_top_k(f.top_k);
    if (f.top_p < 1.0) keep_top_p(f.top_p * (limited ? kept_weight() : whole()));
    if (f.min_p > 0) {
      drop_below(float(f.min_p));
      fill_buckets();
    }
    return draw_in_order(f.uniform);
  }

 private:
  // A token's place in the order of falling scores, equal ones in the order of their ids: the bits of the score without
  // its sign, which rise as it falls, above the id.
  static int64_t token_of(uint64_t place) { return int64_t(place & 0xffffffffu); }
  static int bucket_of(uint64_t place) { return std::min(int(place >> (32 + kBucketShift)), kBuckets - 1); }

  uint32_t key(int64_t token) const {
    uint32_t bits;
    std::memcpy(&bits, &scores_[token], sizeof bits);
    return bits & 0x7fffffffu;
  }

  void weigh(const float* logits, float highest, float temperature) {
    const int64_t blocks = (size_ + kBlock - 1) / kBlock;
    if (int64_t(scores_.size()) < blocks * kBlock) scores_.resize(blocks * kBlock), weights_.resize(blocks * kBlock);
    best_.resize(blocks), sums_.resize(blocks);
    for (int64_t b = 0; b < blocks; ++b) {
      Vec best = splat(-INFINITY), sum = {};
      for (int64_t i = b * kBlock; i < (b + 1) * kBlock; i += kLanes) {
        const Vec below = load_or_nothing(logits, i) - highest;
        const Vec score = below == 0.0f ? Vec{} : below / temperature;  // at any temperature the best one's is 0
        const Vec weight = exp2_of(score * 1.44269504088896340736f);
        store(&scores_[i], score);
        store(&weights_[i], weight);
        best = maximum(score, best);
        sum += weight;
      }
      best_[b] = max_of(best);
      sums_[b] = sum_of(sum);
    }
  }

  Vec load_or_nothing(const float* logits, int64_t i) const {
    if (i + kLanes <= size_) return load(logits + i);
    float some[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) some[lane] = i + lane < size_ ? logits[i + lane] : -INFINITY;
    return load(some);
  }

  double whole() const {
    double sum = 0;
    for (const float each : sums_) sum += each;
    return sum;
  }

  void drop_below(float min_p) {
    if (min_p <= 0) return;
    for (size_t b = 0; b < sums_.size(); ++b) {
      Vec sum = {};
      for (int64_t i = b * kBlock; i < int64_t(b + 1) * kBlock; i += kLanes) {
        const Vec weight = load(&weights_[i]), kept = weight < min_p ? Vec{} : weight;
        store(&weights_[i], kept);
        sum += kept;
      }
      sums_[b] = sum_of(sum);
    }
  }

  // The k-th of the blocks' best: k tokens, at least, are no worse.
  float floor_of_top_k(int64_t top_k) {
    if (top_k > int64_t(best_.size())) return -INFINITY;
    std::nth_element(best_.begin(), best_.begin() + (top_k - 1), best_.end(), std::greater<float>());
    return best_[top_k - 1];
  }

  // All tokens below it together weigh less than top_p leaves out of the best one's weight alone. (The e is for rounding.)
  float floor_of_top_p(double top_p) const { return float(std::log((1.0 - top_p) / double(size_)) - 1.0); }

  void choose_candidates(float floor) {
    if (int64_t(candidates_.size()) < size_) candidates_.resize(size_);
    num_candidates_ = 0;
    for (int64_t i = 0; i < size_; ++i) {
      candidates_[num_candidates_] = int32_t(i);
      num_candidates_ += scores_[i] >= floor;
    }
  }

  void fill_buckets() {
    count_.assign(kBuckets, 0);
    weight_.assign(kBuckets, 0.0);
    for (int64_t c = 0; c < num_candidates_; ++c) {
      const int64_t token = candidates_[c];
      const int bucket = int(key(token) >> kBucketShift);
      ++count_[bucket];
      weight_[bucket] += weights_[token];
    }
  }

  // The places of a bucket's tokens that are kept.
  std::vector<uint64_t>& in_bucket(int bucket) {
    places_.clear();
    for (int64_t c = 0; c < num_candidates_; ++c) {
      const int64_t token = candidates_[c];
      if (int(key(token) >> kBucketShift) != bucket) continue;
      const uint64_t place = uint64_t(key(token)) << 32 | uint64_t(token);
      if (place <= last_) places_.push_back(place);
    }
    return places_;
  }

  double kept_weight() {
    const int last_bucket = bucket_of(last_);
    double sum = 0;
    for (int b = 0; b < last_bucket; ++b) sum += weight_[b];
    for (const uint64_t place : in_bucket(last_bucket)) sum += weights_[token_of(place)];
    return sum;
  }

  // Tokens as likely as the k-th stay, too.
  void keep_top_k(int64_t top_k) {
    int bucket = 0;
    for (; top_k > count_[bucket]; ++bucket) top_k -= count_[bucket];
    std::vector<uint64_t>& places = in_bucket(bucket);
    std::nth_element(places.begin(), places.begin() + (top_k - 1), places.end());
    last_ = places[top_k - 1] | 0xffffffffu;
  }

  // A token stays if those before it weigh less than `enough`.
  void keep_top_p(double enough) {
    double before = 0;
    for (int bucket = 0; bucket <= bucket_of(last_); ++bucket) {
      if (before + weight_[bucket] < enough) {
        before += weight_[bucket];
        continue;
      }
      std::vector<uint64_t>& places = in_bucket(bucket);
      std::sort(places.begin(), places.end());
      for (const uint64_t place : places) {
        if (!(before < enough)) return;
        last_ = place;
        before += weights_[token_of(place)];
      }
    }
  }

  int64_t draw_in_order(double uniform) {
    double target = uniform * kept_weight(), before = 0;
    int bucket = 0;
    for (const int end = bucket_of(last_); bucket < end && before + weight_[bucket] <= target; ++bucket)
      before += weight_[bucket];
    // What rounding leaves beyond the last sum is the last token's that has any weight.
    for (;; --bucket, target = INFINITY) {
      std::vector<uint64_t>& places = in_bucket(bucket);
      std::sort(places.begin(), places.end());
      int64_t chosen = -1;
      for (const uint64_t place : places) {
        const double weight = weights_[token_of(place)];
        if (weight == 0) continue;
        chosen = token_of(place);
        if ((before += weight) > target) return chosen;
      }
      if (chosen >= 0 || bucket == 0) return chosen;
    }
  }

  int64_t draw_by_id(double uniform) {
    double target = uniform * whole(), before = 0;
    int64_t block = 0;
    for (const int64_t end = int64_t(sums_.size()) - 1; block < end && before + sums_[block] <= target; ++block)
      before += sums_[block];
    for (;; --block, target = INFINITY) {
      int64_t chosen = -1;
      for (int64_t i = block * kBlock; i < std::min(size_, (block + 1) * kBlock); ++i) {
        if (weights_[i] == 0) continue;
        chosen = i;
        if ((before += weights_[i]) > target) return chosen;
      }
      if (chosen >= 0 || block == 0) return chosen;
    }
  }

  int64_t size_ = 0;
  uint64_t last_ = 0;  // the last place that is kept
  std::vector<float> scores_, weights_;
  std::vector<float> best_, sums_;  // of each block: its highest score, what its tokens weigh
  std::vector<int32_t> candidates_;
  int64_t num_candidates_ = 0;
  std::vector<int32_t> count_;  // of each bucket: how many candidates, what they weigh
  std::vector<double> weight_;
  std::vector<uint64_t> places_;
};

}  // namespace
}  // namespace ifb

// For each of `num_rows`: chosen[rows[i]], on entry the token of the row's highest logit, becomes the one that is drawn.
// Negative ones are left: their rows can not be sampled.
extern "C" void ifb_draw_tokens(int64_t* chosen, const float* logits, int64_t stride, int64_t size, const int64_t* rows,
                                int64_t num_rows, const double* temperature, const int64_t* top_k, const double* top_p,
                                const double* min_p, const double* uniforms, int threads) {
  ifb::share_out(num_rows, threads, [&](int64_t i) {
    static thread_local ifb::Row row;
    int64_t& token = chosen[rows[i]];
    if (token < 0) return;
    const float* own = logits + rows[i] * stride;
    token = row.draw(own, size, own[token], {temperature[i], top_p[i], min_p[i], uniforms[i], top_k[i]});
  });
}
