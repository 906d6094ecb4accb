// Paged attention for ragged batches on CPU: FlashAttention's tiling (Dao, 2023) over PagedAttention's pages.
//
// Pages lie as keys [num_blocks, kv_heads, head_dim, block_size] and values [num_blocks, kv_heads, block_size, head_dim]:
// with keys transposed inside a page, 16 tokens' scores are one multiply-add a channel and need no horizontal sum.
// They are read where they lie. Only where that does not serve - odd sizes, or narrower than float32 with many query rows,
// which would convert the same values again and again - is a span widened into a buffer first.
//
// Quantized pages hold codes; a token and head has one scale for its key and one for its value. They never multiply a
// channel: a score is (query . codes) * key scale, and a weight is multiplied by its value's scale before the sum.
//
// The query heads of one KV head are rows of the same products, so keys and values are read once for all of them.
// The context is cut into *spans* of 256 keys at fixed positions. For each span a query row gets (maximum, sum of
// exponentials, weighted values); spans are merged in order. One thread may walk all spans of its rows, or several
// threads take a span each (FlashDecoding): the arithmetic, and so every bit of the result, is the same.

#include <algorithm>
#include <atomic>
#include <new>
#include <vector>

#include "native_multiply.h"
#include "native_softmax.h"
#include "native_threads.h"

namespace ifb {
namespace {

constexpr float kLog2E = 1.44269504088896340736f;
constexpr int kBlockRows = 96;  // query rows of a unit, at most: the more, the fewer times keys are read from memory
constexpr int kFewRows = 12;    // up to so many, narrow values are widened as they are read

struct Problem {
  void* output;          // [T, num_heads, head_dim], contiguous
  const void* queries;   // [T, num_heads, head_dim], tokens `query_stride` values apart
  int64_t query_stride;
  const void* keys;
  const void* values;
  const Bfloat16* key_scales;    // [num_blocks, kv_heads, block_size]; null unless the pages hold codes
  const Bfloat16* value_scales;
  const int32_t* query_starts;
  const int32_t* context_lens;
  const int32_t* block_tables;
  int64_t table_stride;
  int num_rows, num_heads, num_kv_heads, head_dim, block_size;
  int window;            // 0: none
  float scale;
  DataType query_type, page_type;

  int group() const { return num_heads / num_kv_heads; }
  int padded_dim() const { return (head_dim + kTile - 1) / kTile * kTile; }
  bool reads_in_place(int rows) const {
    return block_size % kTile == 0 && head_dim % kTile == 0 && (page_type == kFloat32 || rows <= kFewRows);
  }
  int first_visible(int position) const { return window > 0 ? std::max(0, position - window + 1) : 0; }
};

// Some consecutive query tokens of one row, with the query heads of one KV head.
struct Unit {
  int row, kv_head;
  int first_token, num_tokens;     // on the flat axis
  int first_position;              // of the first token, in its sequence
  int first_span, end_span;
  int64_t partials;                // where its spans' results lie when they are computed apart; -1: they are not
  int last_position() const { return first_position + num_tokens - 1; }
};

struct Task {
  int unit, first_span, end_span;
  int64_t cost;
};

// Memory that begins a cache line, so that no vector straddles two; malloc's begins 16 bytes into one.
template <typename T>
struct LineAllocator {
  using value_type = T;
  static constexpr std::align_val_t kLine{64};
  T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), kLine)); }
  void deallocate(T* p, size_t) { ::operator delete(p, kLine); }
  bool operator==(const LineAllocator&) const { return true; }
  bool operator!=(const LineAllocator&) const { return false; }
};
using Floats = std::vector<float, LineAllocator<float>>;

// One thread's memory for one task.
struct Workspace {
  Floats queries;   // by tile of rows: [head_dim][rows], scaled
  Floats weighted;  // [rows of the unit][padded_dim]
  Floats partial;   // [kMaxRows][padded_dim]
  Floats keys, values;  // widened copies of a span, where pages cannot be read in place
  std::vector<Softmax> states;
  alignas(64) float key_scales[kSpan + kTile], value_scales[kSpan + kTile];  // of the span's keys, if they have scales
  alignas(64) float scores[kMaxRows * kScoreStride];

  static void grow(Floats& v, size_t n) {
    if (v.size() < n) v.resize(n);
  }

  void prepare(const Problem& p, int rows) {
    grow(queries, rows * p.head_dim);
    grow(weighted, rows * p.padded_dim());
    grow(partial, kMaxRows * p.padded_dim());
    if (!p.reads_in_place(rows)) {
      grow(keys, kSpan * p.head_dim);
      grow(values, kSpan * p.padded_dim());
    }
    states.assign(rows, Softmax{});
  }
};

// Where one span's tiles lie, and as what.
struct SpanView {
  const void* keys[kSpan / kTile + kLookahead];
  const void* values[kSpan / kTile + kLookahead];
  int64_t key_stride, value_stride;
  DataType type;
};

// Pages of which nothing is visible are not read: they may have been given back, and hold anything.
template <typename T>
void widen_tile(const Problem& p, const int32_t* table, int kv_head, int first_key, int num_keys, int first_visible,
                float* keys, float* values) {
  const int dim = p.head_dim, padded = p.padded_dim(), block = p.block_size;
  for (int j = 0; j < kTile;) {
    // The run of this tile's keys that lie in one page; before the window and past the context's end, zeros.
    const int offset = (first_key + j) % block;
    const int run = std::min(kTile - j, block - offset);
    const bool hidden = first_key + j + run <= first_visible;
    const int count = hidden ? 0 : std::clamp(num_keys - j, 0, run);
    if (hidden) std::fill_n(values + int64_t(j) * padded, run * padded, 0.0f);
    if (count > 0) {
      const int64_t page = (int64_t(table[(first_key + j) / block]) * p.num_kv_heads + kv_head) * dim * block;
      const T* page_keys = static_cast<const T*>(p.keys) + page;
      const T* page_values = static_cast<const T*>(p.values) + page;
      for (int d = 0; d < dim; ++d) {
        const T* source = page_keys + int64_t(d) * block + offset;
        int i = 0;
        for (; i + kLanes <= count; i += kLanes) store(keys + d * kTile + j + i, load(source + i));
        for (; i < count; ++i) keys[d * kTile + j + i] = load_one(source + i);
      }
      for (int i = 0; i < count; ++i) {
        const T* source = page_values + int64_t(offset + i) * dim;
        float* target = values + int64_t(j + i) * padded;
        int c = 0;
        for (; c + kLanes <= dim; c += kLanes) store(target + c, load(source + c));
        if (c < dim) store_some(target + c, load_some(source + c, dim - c), dim - c);
        std::fill(target + dim, target + padded, 0.0f);
      }
    }
    for (int d = 0; d < dim; ++d) std::fill(keys + d * kTile + j + count, keys + d * kTile + j + run, 0.0f);
    j += run;
  }
}

// The scales of keys `first` .. `end` - 1 in order, 0 for those of pages that nothing is visible of. What follows them
// stays as it was, and is not used.
void load_scales(const Problem& p, const int32_t* table, int kv_head, int first, int end, int first_visible,
                 const Bfloat16* scales, float* target) {
  for (int key = first; key < end;) {
    const int offset = key % p.block_size, run = std::min(p.block_size - offset, end - key);
    if (key + run <= first_visible) {
      std::fill_n(target, run, 0.0f);
      key += run;
      target += run;
      continue;
    }
    const int64_t page = int64_t(table[key / p.block_size]) * p.num_kv_heads + kv_head;
    const Bfloat16* source = scales + page * p.block_size + offset;
    int i = 0;
    for (; i + kLanes <= run; i += kLanes) store(target + i, load(source + i));
    for (; i < run; ++i) target[i] = load_one(source + i);
    key += run;
    target += run;
  }
}

// Finds (or widens) the tiles of keys `first` .. `end` - 1, which lie in one span; `first` begins a tile.
void view_span(const Problem& p, const Unit& unit, int first, int end, Workspace& work, SpanView& view) {
  const int32_t* table = p.block_tables + unit.row * p.table_stride;
  const bool in_place = p.reads_in_place(unit.num_tokens * p.group());
  const int first_visible = p.first_visible(unit.first_position);
  const int64_t value_bytes = bytes_of(p.page_type);
  view.key_stride = in_place ? p.block_size : kTile;
  view.value_stride = p.padded_dim();
  view.type = in_place ? p.page_type : kFloat32;
  int tile = 0;
  for (int key = first; key < end; key += kTile, ++tile) {
    if (in_place) {
      const int64_t page = int64_t(table[key / p.block_size]) * p.num_kv_heads + unit.kv_head;
      const int64_t base = page * p.head_dim * p.block_size;
      const int offset = key % p.block_size;
      view.keys[tile] = static_cast<const char*>(p.keys) + (base + offset) * value_bytes;
      view.values[tile] = static_cast<const char*>(p.values) + (base + int64_t(offset) * p.head_dim) * value_bytes;
    } else {
      float* keys = work.keys.data() + tile * kTile * p.head_dim;
      float* values = work.values.data() + tile * kTile * p.padded_dim();
      with_page_type(p.page_type, [&](auto type) {
        widen_tile<decltype(type)>(p, table, unit.kv_head, key, end - key, first_visible, keys, values);
      });
      view.keys[tile] = keys;
      view.values[tile] = values;
    }
  }
  if (p.key_scales) {
    load_scales(p, table, unit.kv_head, first, end, first_visible, p.key_scales, work.key_scales);
    load_scales(p, table, unit.kv_head, first, end, first_visible, p.value_scales, work.value_scales);
  }
  // What is read after the last keys are the first values.
  for (int i = 0; i < kLookahead; ++i) {
    view.keys[tile + i] = view.values[std::min(i, tile - 1)];
    view.values[tile + i] = view.values[tile - 1];
  }
}

// The unit's rows in tiles of at most kMaxRows, as even as can be.
template <typename F>
void for_row_tiles(int rows, F f) {
  const int tiles = (rows + kMaxRows - 1) / kMaxRows;
  for (int t = 0; t < tiles; ++t) f(rows * t / tiles, rows * (t + 1) / tiles);
}

// Row i of a unit is query head kv_head * group + i % group of token i / group.
void load_queries(const Problem& p, const Unit& unit, Workspace& work) {
  const int group = p.group();
  for_row_tiles(unit.num_tokens * group, [&](int begin, int end) {
    float* tile = work.queries.data() + int64_t(begin) * p.head_dim;
    for (int i = begin; i < end; ++i) {
      const int64_t at = (unit.first_token + i / group) * p.query_stride +
                         int64_t(unit.kv_head * group + i % group) * p.head_dim;
      with_type(p.query_type, [&](auto type) {
        const auto* source = static_cast<const decltype(type)*>(p.queries) + at;
        for (int d = 0; d < p.head_dim; ++d)
          tile[d * (end - begin) + i - begin] = load_one(source + d) * (p.scale * kLog2E);
      });
    }
  });
}

void attend_span(const Problem& p, const Unit& unit, int span, Workspace& work) {
  const int group = p.group(), padded = p.padded_dim();
  const int span_begin = std::max(span * kSpan, p.first_visible(unit.first_position) / kTile * kTile);
  const int span_end = std::min((span + 1) * kSpan, unit.last_position() + 1);
  SpanView view{};
  view_span(p, unit, span_begin, span_end, work, view);
  for_row_tiles(unit.num_tokens * group, [&](int begin, int end) {
    // Only the tiles of keys that some row of this tile sees. Keys past its last position are never touched: the rest
    // of a page may hold anything.
    const int first_position = unit.first_position + begin / group;
    const int last_position = unit.first_position + (end - 1) / group;
    const int keys_begin = std::max(span_begin, p.first_visible(first_position) / kTile * kTile);
    const int keys_end = std::min(span_end, last_position + 1);
    if (keys_begin >= keys_end) return;
    const int skipped = (keys_begin - span_begin) / kTile;
    const int num_keys = keys_end - keys_begin, num_tiles = (num_keys + kTile - 1) / kTile;
    const Products& products = products_for(view.type, end - begin);
    products.score_rows(work.queries.data() + int64_t(begin) * p.head_dim, view.keys + skipped, view.key_stride,
                        p.head_dim, num_tiles, work.scores);
    Softmax later[kMaxRows];
    for (int i = begin; i < end; ++i) {
      const int position = unit.first_position + i / group;
      const int from = std::clamp(p.first_visible(position) - keys_begin, 0, num_keys);
      const int to = std::clamp(position + 1 - keys_begin, from, num_keys);
      float* scores = work.scores + (i - begin) * kScoreStride;
      if (p.key_scales) multiply_by(work.key_scales + skipped * kTile, scores, num_tiles * kTile);
      later[i - begin] = exponentiate(scores, num_tiles * kTile, from, to);
      if (p.value_scales) multiply_by(work.value_scales + skipped * kTile, scores, num_tiles * kTile);
    }
    products.weigh_rows(work.scores, view.values + skipped, view.value_stride, num_keys, padded / kTile,
                        work.partial.data(), padded);
    for (int i = begin; i < end; ++i)
      merge(work.states[i], work.weighted.data() + int64_t(i) * padded, later[i - begin],
            work.partial.data() + int64_t(i - begin) * padded, padded);
  });
}

void write_output(const Problem& p, const Unit& unit, const Workspace& work) {
  const int group = p.group();
  for (int i = 0; i < unit.num_tokens * group; ++i) {
    const float* weighted = work.weighted.data() + int64_t(i) * p.padded_dim();
    const Vec sum = splat(work.states[i].sum);
    const int64_t at = (int64_t(unit.first_token + i / group) * p.num_heads + unit.kv_head * group + i % group) *
                       p.head_dim;
    with_type(p.query_type, [&](auto type) {
      auto* target = static_cast<decltype(type)*>(p.output) + at;
      int c = 0;
      for (; c + kLanes <= p.head_dim; c += kLanes) store(target + c, load(weighted + c) / sum);
      if (c < p.head_dim) store_some(target + c, load(weighted + c) / sum, p.head_dim - c);
    });
  }
}

// ---- who computes what ----------------------------------------------------------------------------------------------

struct Plan {
  std::vector<Unit> units;
  std::vector<Task> tasks;
  std::vector<int> split;           // units whose spans are computed apart
  std::vector<float> partials;      // per split unit and span: [rows][maximum, sum, weighted values]

  static int64_t row_floats(const Problem& p) { return 2 + p.padded_dim(); }
  static int64_t span_floats(const Problem& p, const Unit& u) { return u.num_tokens * p.group() * row_floats(p); }

  void build(const Problem& p, int threads) {
    units.clear(), tasks.clear(), split.clear();
    const int num_tokens = p.query_starts[p.num_rows];
    // Blocks as large as leave every thread several of them, so that threads end together.
    const int wanted = std::max(1, int64_t(num_tokens) * p.num_kv_heads > 4 * threads
                                       ? int(int64_t(num_tokens) * p.num_kv_heads / (4 * threads)) : 1);
    const int block = std::clamp(wanted, 1, std::max(1, kBlockRows / p.group()));
    int64_t total = 0;
    for (int row = 0; row < p.num_rows; ++row)
      for (int token = p.query_starts[row]; token < p.query_starts[row + 1]; token += block)
        for (int kv_head = 0; kv_head < p.num_kv_heads; ++kv_head) {
          const int end = p.query_starts[row + 1], count = std::min(block, end - token);
          const int position = p.context_lens[row] - (end - token);
          const int last_span = (position + count - 1) / kSpan;
          units.push_back({row, kv_head, token, count, position, p.first_visible(position) / kSpan, last_span + 1, -1});
          total += cost(p, units.back());
        }
    int64_t floats = 0;
    for (int u = 0; u < int(units.size()); ++u) {
      Unit& unit = units[u];
      const int spans = unit.end_span - unit.first_span;
      if (threads == 1 || spans == 1 || cost(p, unit) * 4 * threads <= total) {
        tasks.push_back({u, unit.first_span, unit.end_span, cost(p, unit)});
        continue;
      }
      unit.partials = floats;
      floats += spans * span_floats(p, unit);
      split.push_back(u);
      for (int span = unit.first_span; span < unit.end_span; ++span)
        tasks.push_back({u, span, span + 1, cost(p, unit) / spans});
    }
    if (int64_t(partials.size()) < floats) partials.resize(floats);
    // The longest first: what is left at the end is small.
    std::stable_sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) { return a.cost > b.cost; });
  }

  static int64_t cost(const Problem& p, const Unit& unit) {
    const int keys = unit.last_position() + 1 - p.first_visible(unit.first_position);
    return int64_t(keys + kTile) * (unit.num_tokens * p.group() + 2);
  }
};

// A thread's own, kept from call to call.
Workspace& workspace(const Problem& p, int rows) {
  static thread_local Workspace work;
  work.prepare(p, rows);
  return work;
}

void run_task(const Problem& p, Plan& plan, const Task& task) {
  const Unit& unit = plan.units[task.unit];
  const int rows = unit.num_tokens * p.group(), padded = p.padded_dim();
  Workspace& work = workspace(p, rows);
  load_queries(p, unit, work);
  for (int span = task.first_span; span < task.end_span; ++span) attend_span(p, unit, span, work);
  if (unit.partials < 0) return write_output(p, unit, work);
  float* partial = plan.partials.data() + unit.partials + (task.first_span - unit.first_span) * Plan::span_floats(p, unit);
  for (int i = 0; i < rows; ++i, partial += Plan::row_floats(p)) {
    partial[0] = work.states[i].maximum;
    partial[1] = work.states[i].sum;
    std::copy_n(work.weighted.data() + int64_t(i) * padded, padded, partial + 2);
  }
}

void merge_spans(const Problem& p, const Plan& plan, const Unit& unit) {
  const int rows = unit.num_tokens * p.group(), padded = p.padded_dim();
  Workspace& work = workspace(p, rows);
  const float* partial = plan.partials.data() + unit.partials;
  for (int span = unit.first_span; span < unit.end_span; ++span)
    for (int i = 0; i < rows; ++i, partial += Plan::row_floats(p)) {
      Softmax later;
      later.maximum = partial[0];
      later.sum = partial[1];
      merge(work.states[i], work.weighted.data() + int64_t(i) * padded, later, partial + 2, padded);
    }
  write_output(p, unit, work);
}

}  // namespace
}  // namespace ifb

extern "C" void ifb_paged_attention(void* output, const void* queries, int64_t query_stride, const void* keys,
                                    const void* values, const void* key_scales, const void* value_scales,
                                    const int32_t* query_starts, const int32_t* context_lens,
                                    const int32_t* block_tables, int64_t table_stride, int num_rows, int num_heads,
                                    int num_kv_heads, int head_dim, int block_size, int window, float scale,
                                    int query_type, int page_type, int threads) {
  using namespace ifb;
  const Problem p{output, queries, query_stride, keys, values, static_cast<const Bfloat16*>(key_scales),
                  static_cast<const Bfloat16*>(value_scales), query_starts, context_lens, block_tables, table_stride,
                  num_rows, num_heads, num_kv_heads, head_dim, block_size, window, scale,
                  DataType(query_type), DataType(page_type)};
  static thread_local Plan own_plan;
  Plan& plan = own_plan;  // the calling thread's, also where helpers see it
  plan.build(p, threads);
  const int num_tasks = int(plan.tasks.size()), num_split = int(plan.split.size());
  // A prefill's tasks, which are long, are bound by arithmetic, and those of decode rows by memory: half the threads
  // begin at the short end, so that the two run side by side.
  std::atomic<int> num_taken{0}, num_from_the_front{0}, num_from_the_back{0};
  with_helpers(std::min(threads, num_tasks), [&](int thread) {
    const bool from_the_back = thread % 2;
    while (num_taken++ < num_tasks)
      run_task(p, plan, plan.tasks[from_the_back ? num_tasks - ++num_from_the_back : num_from_the_front++]);
  });
  share_out(num_split, threads, [&](int64_t s) { merge_spans(p, plan, plan.units[plan.split[s]]); });
}
