// Vectors of floats and of 32-bit words, as wide as the processor's registers.
//
// Written with the compiler's vector extension, which becomes AVX-512, AVX2, NEON or SSE; intrinsics
// stand only where the extension has no word for an instruction.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define ANTIPHON_AVX512 1
#include <immintrin.h>
#endif

namespace antiphon {

// VECTORS: how many of them are the columns of a tile of products, see tiles.h.
#if defined(ANTIPHON_AVX512)
constexpr int LANES = 16, VECTORS = 4;
#elif defined(__AVX__)
constexpr int LANES = 8, VECTORS = 2;
#else
constexpr int LANES = 4, VECTORS = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * LANES), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * LANES), may_alias));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), may_alias));
typedef float LooseFloats __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
typedef uint32_t LooseWords __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
typedef uint16_t LooseHalves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

constexpr float INF = std::numeric_limits<float>::infinity();

inline Floats splat(float x) { return x - Floats{}; }
inline Words splat_word(uint32_t x) { return x - Words{}; }
inline Floats load(const float* p) { return *reinterpret_cast<const LooseFloats*>(p); }
inline void store(float* p, Floats x) { *reinterpret_cast<LooseFloats*>(p) = x; }
inline Words load_words(const uint32_t* p) { return *reinterpret_cast<const LooseWords*>(p); }
inline void store_words(uint32_t* p, Words x) { *reinterpret_cast<LooseWords*>(p) = x; }

inline float as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t as_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

// NaNs in b are ignored.
inline Floats larger(Floats a, Floats b) { return b > a ? b : a; }

// In a fixed order, halves upon halves, so that a sum never depends on who computes it.
inline float sum_lanes(Floats x) {
#ifdef ANTIPHON_AVX512
  return _mm512_reduce_add_ps((__m512)x);
#else
  float s[LANES];
  store(s, x);
  for (int step = LANES / 2; step > 0; step /= 2)
    for (int i = 0; i < step; ++i) s[i] += s[i + step];
  return s[0];
#endif
}
inline float max_lanes(Floats x) {
#ifdef ANTIPHON_AVX512
  return _mm512_reduce_max_ps((__m512)x);
#else
  float s[LANES];
  store(s, x);
  for (int step = LANES / 2; step > 0; step /= 2)
    for (int i = 0; i < step; ++i) s[i] = s[i + step] > s[i] ? s[i + step] : s[i];
  return s[0];
#endif
}

// 2^x to about two units in the last place; 0 below -126, NaN stays NaN, x above 126 saturates.
inline Floats exp2(Floats x) {
#ifdef ANTIPHON_AVX512
  const Floats clamped = (Floats)_mm512_max_ps(_mm512_set1_ps(-150.f), (__m512)x);  // keeps NaN
  const Floats whole = (Floats)_mm512_roundscale_ps((__m512)clamped, 8);
#else
  const Floats low = x < splat(-127.f) ? splat(-127.f) : x;
  const Floats clamped = low > splat(126.f) ? splat(126.f) : low;
  const Floats magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to a whole number
  const Floats moved = clamped + magic;
  const Floats whole = moved - magic;
#endif
  const Floats f = clamped - whole;  // in [-0.5, 0.5]
  Floats y = splat(1.5404e-4f);
  y = y * f + splat(1.33336e-3f);
  y = y * f + splat(9.618129e-3f);
  y = y * f + splat(5.5504109e-2f);
  y = y * f + splat(2.402265e-1f);
  y = y * f + splat(6.9314718e-1f);
  y = y * f + splat(1.f);
#ifdef ANTIPHON_AVX512
  return (Floats)_mm512_scalef_ps((__m512)y, (__m512)whole);
#else
  const Words exponent = ((Words)moved - (Words)magic) << 23;
  const Floats scaled = (Floats)((Words)y + exponent);
  const Floats flushed = x < splat(-126.f) ? Floats{} : scaled;
  return x == x ? flushed : x;
#endif
}

inline Floats silu(Floats x) {
  return x / (splat(1.f) + exp2(x * splat(-1.4426950408889634f)));
}

// What the kernels need to know of an element type. A word holds one fp32 or two bf16 numbers.
struct Fp32 {
  using Element = float;
  static constexpr int PER_WORD = 1;

  static Floats widen(const float* p) { return load(p); }
  static void narrow(float* p, Floats x) { store(p, x); }
  static float widen_one(float x) { return x; }
  static float narrow_one(float x) { return x; }

  // acc + a * b, lane by lane; a is one word for all lanes.
  static Floats multiply_add(Floats acc, uint32_t a, Words b) {
    return acc + splat(as_float(a)) * (Floats)b;
  }
};

struct Bf16 {
  using Element = uint16_t;
  static constexpr int PER_WORD = 2;

  static Floats widen(const uint16_t* p) {
    const Halves x = *reinterpret_cast<const LooseHalves*>(p);
    return (Floats)(__builtin_convertvector(x, Words) << 16);
  }
  static void narrow(uint16_t* p, Floats x) {
    *reinterpret_cast<LooseHalves*>(p) = rounded(x);
  }
  static float widen_one(uint16_t x) { return as_float(uint32_t(x) << 16); }
  static uint16_t narrow_one(float x) {
    if (x != x) return 0x7fc0;
    const uint32_t bits = as_bits(x);
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  }

  // acc + a0 * b0 + a1 * b1, lane by lane.
  static Floats multiply_add(Floats acc, uint32_t a, Words b) {
#if defined(ANTIPHON_AVX512) && defined(__AVX512BF16__)
    return (Floats)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32(a), (__m512bh)b);
#else
    acc += splat(as_float(a << 16)) * (Floats)(b << 16);
    return acc + splat(as_float(a & 0xffff0000u)) * (Floats)(b & splat_word(0xffff0000u));
#endif
  }

 private:
  static Halves rounded(Floats x) {
#if defined(ANTIPHON_AVX512) && defined(__AVX512BF16__)
    return (Halves)_mm512_cvtneps_pbh((__m512)x);
#else
    const Words bits = (Words)x;
    const Words near = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return __builtin_convertvector(x == x ? near : splat_word(0x7fc0u), Halves);
#endif
  }
};

}  // namespace antiphon
