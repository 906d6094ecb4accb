// Sums of products of 8-bit codes in 32-bit integers: exact, so their order does not matter.
//
// Channels go in groups of kGroup, as many as fill 32 bits of activations: four int8 where the processor has VNNI
// instructions, which take four products and three additions in one; two int16 elsewhere.
#pragma once

#include "native_vector.h"

namespace ifb {

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)

// VNNI multiplies unsigned by signed: weights are stored with kShift added, and kShift times the sum of a row's
// activations is what every sum of the row has too much.
constexpr int kGroup = 4, kShift = 128;
typedef int8_t Activation;
typedef uint8_t PackedCode;

inline VecInt load_codes(const PackedCode* p) {
  VecInt codes;
  std::memcpy(&codes, p, sizeof codes);
  return codes;
}

inline VecInt add_dot(VecInt sum, VecInt codes, int32_t activations) {
  const VecInt all = VecInt{} + activations;
#if defined(__AVX512VNNI__)
  return (VecInt)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)all);
#else
  return (VecInt)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)all);
#endif
}

#else

constexpr int kGroup = 2, kShift = 0;
typedef int16_t Activation;
typedef int8_t PackedCode;

inline VecInt load_codes(const PackedCode* p) {
#if defined(__AVX512BW__)
  return (VecInt)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  return (VecInt)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  typedef int8_t Bytes __attribute__((vector_size(2 * kLanes)));
  typedef int16_t Shorts __attribute__((vector_size(4 * kLanes)));
  Bytes bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return (VecInt)__builtin_convertvector(bytes, Shorts);
#endif
}

inline VecInt add_dot(VecInt sum, VecInt codes, int32_t activations) {
  const VecInt all = VecInt{} + activations;
#if defined(__AVX512BW__)
  return sum + (VecInt)_mm512_madd_epi16((__m512i)codes, (__m512i)all);
#elif defined(__AVX2__)
  return sum + (VecInt)_mm256_madd_epi16((__m256i)codes, (__m256i)all);
#else
  return sum + (codes << 16 >> 16) * (all << 16 >> 16) + (codes >> 16) * (all >> 16);
#endif
}

#endif

inline void store_activations(int8_t* p, VecInt codes) { store_bytes(p, (VecBits)codes); }
inline void store_activations(int16_t* p, VecInt codes) { store_halves(p, (VecBits)codes); }

}  // namespace ifb
