// Vectors of floats as wide as the machine's registers, their loads and stores from the page types, and exp2.
// GCC/Clang vector extensions: one source serves AVX-512, AVX2, SSE and NEON. Intrinsics only to widen integers, which GCC
// does by halves, at six shuffles or more for the one instruction that x86 has.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace ifb {

// kLanes: floats in a register. kAccumulators: how many registers a matrix product may hold its sums in, leaving some
// for the operands.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kAccumulators = 24;
#elif defined(__AVX__)
constexpr int kLanes = 8, kAccumulators = 12;
#elif defined(__aarch64__)
constexpr int kLanes = 4, kAccumulators = 24;
#else
constexpr int kLanes = 4, kAccumulators = 12;
#endif

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t VecInt __attribute__((vector_size(4 * kLanes)));
typedef uint32_t VecBits __attribute__((vector_size(4 * kLanes)));
typedef uint16_t VecHalf __attribute__((vector_size(2 * kLanes)));
typedef int16_t VecShort __attribute__((vector_size(2 * kLanes)));
typedef int8_t VecByte __attribute__((vector_size(kLanes)));

struct Bfloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };

// Codes of quantized pages (kv_quantization.py): a value is its code times the scale of its token and head.
struct Int8 { int8_t code; };
struct Float8 { uint8_t bits; };  // E4M3

enum DataType { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2, kInt8 = 3, kFloat8 = 4 };  // as in native.py

// Calls `f` with a value of the C++ type that `type` names, which is no type of codes.
template <typename F>
inline void with_type(DataType type, F f) {
  switch (type) {
    case kBfloat16: return f(Bfloat16{});
    case kFloat16: return f(Float16{});
    default: return f(0.0f);
  }
}

// The same, codes included.
template <typename F>
inline void with_page_type(DataType type, F f) {
  switch (type) {
    case kInt8: return f(Int8{});
    case kFloat8: return f(Float8{});
    default: return with_type(type, f);
  }
}

inline int64_t bytes_of(DataType type) { return type == kFloat32 ? 4 : type == kInt8 || type == kFloat8 ? 1 : 2; }

inline Vec splat(float x) { return x - Vec{}; }  // x + 0 would be a sum to compute: it turns -0 into 0

// A splat for several products: read once into a register. Left to itself, GCC reads memory anew for each of them.
inline Vec splat_at(const float* p) {
  Vec v = splat(*p);
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#endif
  return v;
}

inline VecBits splat_bits(uint32_t x) { return VecBits{} + x; }
inline Vec as_float(VecBits x) { return (Vec)x; }
inline VecBits as_bits(Vec x) { return (VecBits)x; }
inline Vec maximum(Vec a, Vec b) { return a > b ? a : b; }
inline Vec minimum(Vec a, Vec b) { return a < b ? a : b; }

// a * b + c, rounded once where the machine can. Written as such, the compiler may round once in one place and twice in
// another, and a value would depend on which of two copies of a function computed it.
inline Vec multiply_add(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// ---- load and store kLanes values, at any address -------------------------------------------------------------------

inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

inline VecBits load_halves(const void* p) {
#if defined(__AVX512F__)
  return (VecBits)_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  return (VecBits)_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
#else
  VecHalf h;
  std::memcpy(&h, p, sizeof h);
  return __builtin_convertvector(h, VecBits);
#endif
}

inline void store_halves(void* p, VecBits v) {
  VecHalf h = __builtin_convertvector(v, VecHalf);
  std::memcpy(p, &h, sizeof h);
}

inline Vec widened(VecBits halves, Bfloat16) { return as_float(halves << 16); }

inline Vec load(const Bfloat16* p) { return widened(load_halves(p), Bfloat16{}); }

inline void store(Bfloat16* p, Vec v) {  // rounds to nearest, ties to even; NaN stays NaN
  VecBits x = as_bits(v);
  VecBits rounded = (x + 0x7fffu + ((x >> 16) & 1u)) >> 16;
  store_halves(p, v == v ? rounded : splat_bits(0x7fc0u));
}

inline Vec widened(VecBits h, Float16) {
  // Placing the half's exponent and mantissa as a float's leaves the value short by 2^112; subnormals come out right too.
  Vec magnitude = as_float((h & 0x7fffu) << 13) * 0x1p112f;
  VecBits special = (h & 0x7c00u) == 0x7c00u ? splat_bits(0x7f800000u) : splat_bits(0);
  return as_float(as_bits(magnitude) | special | ((h & 0x8000u) << 16));
}

inline Vec load(const Float16* p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__) && defined(__F16C__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  return widened(load_halves(p), Float16{});
#endif
}

inline void store(Float16* p, Vec v) {  // rounds to nearest, ties to even, over to infinity; NaN stays NaN
  VecBits sign = (as_bits(v) >> 16) & 0x8000u;
  VecBits x = as_bits(v) & 0x7fffffffu;
  VecBits normal = (x - (112u << 23) + 0xfffu + ((x >> 13) & 1u)) >> 13;
  // Adding 0.5 leaves a subnormal half's ten bits, rounded, at the end of the mantissa.
  VecBits subnormal = as_bits(as_float(x) + 0.5f) - (126u << 23);
  VecBits special = x > 0x7f800000u ? splat_bits(0x7e00u) : splat_bits(0x7c00u);
  VecBits finite = x < (113u << 23) ? subnormal : normal;
  store_halves(p, sign | (x >= (143u << 23) ? special : finite));
}

inline VecInt load_bytes(const void* p) {  // sign-extended
#if defined(__AVX512F__)
  return (VecInt)_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  return (VecInt)_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
#else
  VecByte b;
  std::memcpy(&b, p, sizeof b);
  return __builtin_convertvector(__builtin_convertvector(b, VecShort), VecInt);  // four times as wide: one byte at a time
#endif
}

inline void store_bytes(void* p, VecBits v) {
  VecByte b = __builtin_convertvector(__builtin_convertvector(v, VecShort), VecByte);
  std::memcpy(p, &b, sizeof b);
}

inline Vec load(const Int8* p) { return __builtin_convertvector(load_bytes(p), Vec); }

inline void store(Int8* p, Vec v) {  // |v| < 127.5; rounds to nearest, ties to even
  store_bytes(p, as_bits(v + 0x1.8p23f));  // leaves the integer in the low bits of the mantissa
}

inline Vec load(const Float8* p) {
  // As with halves: short by 2^120 once exponent and mantissa are a float's. The sign has been spread over the high bits.
  return as_float((VecBits)(load_bytes(p) << 20) & 0x87f00000u) * 0x1p120f;
}

inline void store(Float8* p, Vec v) {  // |v| < 464; rounds to nearest, ties to even
  VecBits x = as_bits(v) & 0x7fffffffu;
  VecBits normal = (x - (120u << 23) + 0x7ffffu + ((x >> 20) & 1u)) >> 20;
  VecBits subnormal = as_bits(as_float(x) + 0x1p14f) - (141u << 23);  // 2^14 ends in units of 2^-9
  store_bytes(p, ((as_bits(v) >> 24) & 0x80u) | (x < (121u << 23) ? subnormal : normal));
}

// ---- the first n < kLanes values, the others zero -------------------------------------------------------------------

template <typename T>
inline Vec load_some(const T* p, int n) {
  T buffer[kLanes] = {};
  std::memcpy(buffer, p, n * sizeof(T));
  return load(buffer);
}

template <typename T>
inline void store_some(T* p, Vec v, int n) {
  T buffer[kLanes];
  store(buffer, v);
  std::memcpy(p, buffer, n * sizeof(T));
}

template <typename Half>
inline float load_one(const Half* p) { return widened(splat_bits(p->bits), Half{})[0]; }
inline float load_one(const float* p) { return *p; }
inline float load_one(const Int8* p) { return p->code; }
inline float load_one(const Float8* p) { return load_some(p, 1)[0]; }

// Round to T's precision, as a store and a load would.
template <typename T>
inline Vec rounded_to(Vec v) {
  T buffer[kLanes];
  store(buffer, v);
  return load(buffer);
}
template <>
inline Vec rounded_to<float>(Vec v) { return v; }

// ---- reductions and the exponential ---------------------------------------------------------------------------------

// Lane i becomes lane i + By, around. (Two names for one instruction: GCC before 12 lacks Clang's.)
template <int By, int... I>
inline Vec rotated(Vec v, std::integer_sequence<int, I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(v, v, ((I + By) % kLanes)...);
#else
  return __builtin_shuffle(v, VecInt{((I + By) % kLanes)...});
#endif
}

// f of all lanes: of the halves, of the halves of that, and so on.
template <int Width = kLanes / 2, typename F>
inline float reduced(Vec v, F f) {
  if constexpr (Width == 0) return v[0];
  else return reduced<Width / 2>(f(v, rotated<Width>(v, std::make_integer_sequence<int, kLanes>())), f);
}

inline float sum_of(Vec v) {
  return reduced(v, [](Vec a, Vec b) { return a + b; });
}
inline float max_of(Vec v) {
  return reduced(v, [](Vec a, Vec b) { return maximum(a, b); });
}

// 2^x for x <= 126, within 2 units in the last place; exactly 0 below -126 and for -infinity.
inline Vec exp2_of(Vec x) {
  const float kRounder = 0x1.8p23f;  // adding it leaves the nearest integer in the low bits of the mantissa
  Vec clamped = maximum(x, splat(-126.0f));
  Vec shifted = clamped + kRounder;
  Vec f = clamped - (shifted - kRounder);  // in [-0.5, 0.5]
  // ln(2)^k / k!: the Taylor series, whose first term left out is below 6e-8 of the whole on this interval.
  Vec y = splat(1.5403530e-4f);
  y = y * f + 1.3333558e-3f;
  y = y * f + 9.6181291e-3f;
  y = y * f + 5.5504109e-2f;
  y = y * f + 2.4022651e-1f;
  y = y * f + 6.9314718e-1f;
  y = y * f + 1.0f;
  Vec scaled = as_float(as_bits(y) + (as_bits(shifted) << 23));
  return x < -126.0f ? Vec{} : scaled;
}

inline float exp2_of(float x) { return exp2_of(splat(x))[0]; }

}  // namespace ifb
