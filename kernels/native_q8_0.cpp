// Widens GGUF's Q8_0 blocks: a float16 scale and 32 codes each. Meaning: q8_0.py.

#include "native_vector.h"

namespace ifb {
namespace {

constexpr int kCodes = 32;

struct Block {
  Float16 scale;
  Int8 codes[kCodes];
};
static_assert(sizeof(Block) == 34);

}  // namespace
}  // namespace ifb

extern "C" void ifb_widen_q8_0(float* values, const void* blocks, int64_t num_blocks) {
  using namespace ifb;
  const Block* block = static_cast<const Block*>(blocks);
  for (int64_t b = 0; b < num_blocks; ++b, ++block) {
    const Vec scale = splat(load_one(&block->scale));
    for (int i = 0; i < kCodes; i += kLanes) store(values + b * kCodes + i, load(block->codes + i) * scale);
  }
}
