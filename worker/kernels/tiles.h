// The two small matrix products of attention and the packing they want.
//
// A *key tile* holds rows of a matrix with lanes along the rows: word w of row i lies at
// [i / TILE_KEYS][w][i % TILE_KEYS]. A *value tile* holds rows with lanes along the columns, the PER_WORD rows
// of a word side by side: [row / PER_WORD][column]. Both products add up their terms one after the
// other, in the order of the inner index: a result does not depend on how many others are computed.
#pragma once

#include <algorithm>
#include <utility>

#include "vec.h"

namespace antiphon {

constexpr int TILE_KEYS = VECTORS * LANES;
constexpr int TILE_ROWS = 6;  // 6 rows of 4 vectors are 24 of 32 registers; of 2, 12 of 16

#ifdef ANTIPHON_AVX512
constexpr int MOST_ROWS = 12;  // of a linear's tile: with 2 vectors each 24 of 32 registers
#else
constexpr int MOST_ROWS = 6;  // 12 of 16
#endif

constexpr int64_t quotient(int64_t n, int64_t unit) { return (n + unit - 1) / unit; }
constexpr int64_t round_up(int64_t n, int64_t unit) { return quotient(n, unit) * unit; }

// The first `count` of LANES words, the rest 0.
inline Words load_some(const uint32_t* p, int count) {
  if (count >= LANES) return load_words(p);
#ifdef ANTIPHON_AVX512
  return (Words)_mm512_maskz_loadu_epi32(__mmask16((1u << count) - 1), p);
#else
  uint32_t some[LANES] = {};
  std::memcpy(some, p, 4 * count);
  return load_words(some);
#endif
}

// LANES words of each of LANES rows, turned: out[i] takes word i of all rows.
inline void transpose(const Words (&rows)[LANES], Words (&out)[LANES]) {
#ifdef ANTIPHON_AVX512
  __m512i a[LANES], b[LANES];
  for (int i = 0; i < LANES; i += 2) {
    a[i] = _mm512_unpacklo_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
  }
  for (int i = 0; i < LANES; i += 4) {
    b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  // b[4 r + i]: rows 4 r .. 4 r + 3, words i, 4 + i, 8 + i, 12 + i in the four 128-bit lanes
  for (int i = 0; i < 4; ++i) {
    const __m512i low01 = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x88);  // words i, 8 + i
    const __m512i low23 = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x88);
    const __m512i high01 = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xdd);  // words 4 + i, 12 + i
    const __m512i high23 = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xdd);
    out[i] = (Words)_mm512_shuffle_i32x4(low01, low23, 0x88);
    out[8 + i] = (Words)_mm512_shuffle_i32x4(low01, low23, 0xdd);
    out[4 + i] = (Words)_mm512_shuffle_i32x4(high01, high23, 0x88);
    out[12 + i] = (Words)_mm512_shuffle_i32x4(high01, high23, 0xdd);
  }
#else
  for (int i = 0; i < LANES; ++i)
    for (int r = 0; r < LANES; ++r) out[i][r] = rows[r][i];
#endif
}

// `row(i)` is where row i begins, of `words` words. Lanes beyond n rows are left as they are: what
// the products make of them is not to be used.
template <class Row>
void pack_keys(Row row, int n, int words, uint32_t* tile) {
  for (int first = 0; first < n; first += LANES) {
    uint32_t* to = tile + (first / TILE_KEYS) * int64_t(words) * TILE_KEYS + first % TILE_KEYS;
    const int here = std::min(LANES, n - first);
    const uint32_t* from[LANES];
    for (int i = 0; i < here; ++i) from[i] = row(first + i);
    for (int w = 0; w < words; w += LANES) {
      Words in[LANES], out[LANES];
      for (int i = 0; i < LANES; ++i)
        in[i] = i < here ? load_some(from[i] + w, words - w) : Words{};
      transpose(in, out);
      const int some = std::min(LANES, words - w);
      for (int i = 0; i < some; ++i) store_words(to + int64_t(w + i) * TILE_KEYS, out[i]);
    }
  }
}

// R rows of `words` words, word by word: to[w * R + r]. Writes up to a vector beyond the end.
template <int GROUPS>
void pack_rows_in(const uint32_t* const* rows, int R, int64_t words, uint32_t* to) {
  for (int64_t w = 0; w < words; w += LANES) {
    const int some = std::min<int64_t>(LANES, words - w);
    Words out[GROUPS][LANES];
    for (int g = 0; g < GROUPS; ++g) {
      Words in[LANES];
      for (int i = 0; i < LANES; ++i) {
        const int r = g * LANES + i;
        in[i] = r < R ? load_some(rows[r] + w, some) : Words{};
      }
      transpose(in, out[g]);
    }
    // what a store writes beyond R the next one overwrites; the last ones have room behind them
    for (int i = 0; i < some; ++i)
      for (int g = 0; g < GROUPS; ++g) store_words(to + (w + i) * R + g * LANES, out[g][i]);
  }
}
inline void pack_rows(const uint32_t* const* rows, int R, int64_t words, uint32_t* to) {
  if (R <= LANES)
    pack_rows_in<1>(rows, R, words, to);
  else
    pack_rows_in<(MOST_ROWS + LANES - 1) / LANES>(rows, R, words, to);
}

#ifdef ANTIPHON_AVX512
constexpr Words HALVES_UP = {0x00000, 0x10001, 0x20002, 0x30003, 0x40004, 0x50005,
                             0x60006, 0x70007, 0x80008, 0x90009, 0xa000a, 0xb000b,
                             0xc000c, 0xd000d, 0xe000e, 0xf000f};
#endif

inline void pack_value_rows(Fp32, const uint32_t* row, const uint32_t*, int columns, uint32_t* to) {
  for (int c = 0; c < columns; c += LANES) store_words(to + c, load_some(row + c, columns - c));
}

// The halves of a's words beside those of b's: column by column.
inline void interleave(Words a, Words b, Words* out) {
#ifdef ANTIPHON_AVX512
  // halves 0 32 1 33 .. of the pair
  const __m512i low = (__m512i)(HALVES_UP + splat_word(0x00200000u));
  const __m512i high = (__m512i)(HALVES_UP + splat_word(0x00300010u));
  out[0] = (Words)_mm512_permutex2var_epi16((__m512i)a, low, (__m512i)b);
  out[1] = (Words)_mm512_permutex2var_epi16((__m512i)a, high, (__m512i)b);
#else
  const Words even = (a & 0xffffu) | (b << 16);  // columns 0 2 4 ..
  const Words odd = (a >> 16) | (b & 0xffff0000u);  // columns 1 3 5 ..
  for (int i = 0; i < 2 * LANES; ++i)
    out[i / LANES][i % LANES] = i % 2 ? odd[i / 2] : even[i / 2];
#endif
}

// Two rows side by side; `second` may be null and is 0 then.
inline void pack_value_rows(
    Bf16, const uint32_t* first, const uint32_t* second, int columns, uint32_t* to) {
  for (int c = 0; c < columns; c += 2 * LANES) {
    const int words = (columns - c) / 2;
    const Words a = load_some(first + c / 2, words);
    Words out[2];
    interleave(a, second ? load_some(second + c / 2, words) : Words{}, out);
    store_words(to + c, out[0]);
    if (c + LANES < columns) store_words(to + c + LANES, out[1]);
  }
}

// The same for TILE_KEYS columns, in registers.
inline void value_words(Fp32, const uint32_t* row, const uint32_t*, Words (&out)[VECTORS]) {
  for (int v = 0; v < VECTORS; ++v) out[v] = load_words(row + v * LANES);
}
inline void value_words(
    Bf16, const uint32_t* first, const uint32_t* second, Words (&out)[VECTORS]) {
  for (int v = 0; v < VECTORS; v += 2) {
    const int at = v / 2 * LANES;
    interleave(load_words(first + at), second ? load_words(second + at) : Words{}, out + v);
  }
}

// n rows of `columns` elements (even for bf16); a tile row is `columns` words rounded up to LANES.
template <class T, class Row>
void pack_values(Row row, int n, int columns, uint32_t* tile) {
  const int64_t width = round_up(columns, LANES);
  for (int i = 0; i < n; i += T::PER_WORD, tile += width) {
    pack_value_rows(T{}, row(i), i + 1 < n ? row(i + 1) : nullptr, columns, tile);
  }
}

// f(0), f(1), .. with constants: sums that are named by constants alone stay in registers.
template <int COUNT, class F>
[[gnu::always_inline]] inline void unrolled(F f) {
  [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
    (f(std::integral_constant<int, I>{}), ...);
  }(std::make_integer_sequence<int, COUNT>{});
}

// The sums of R rows of products by N vectors.
template <class T, int R, int N>
class Accumulator {
 public:
  [[gnu::always_inline]] Accumulator() {
    unrolled<R * N>([&](auto i) __attribute__((always_inline)) { sums_[i] = Floats{}; });
  }
  // Row r is at a[r * stride].
  [[gnu::always_inline]] void add(const uint32_t* a, int64_t stride, const Words (&b)[N]) {
    unrolled<R * N>([&](auto i) __attribute__((always_inline)) {
      sums_[i] = T::multiply_add(sums_[i], a[i / N * stride], b[i % N]);
    });
  }
  // f(row, vector, sum) for all of them.
  template <class F>
  [[gnu::always_inline]] void each(F f) const {
    unrolled<R * N>([&](auto i) __attribute__((always_inline)) { f(i / N, i % N, sums_[i]); });
  }
  [[gnu::always_inline]] void put(float* out, int64_t stride) const {
    each([&](int r, int v, Floats sum) __attribute__((always_inline)) {
      store(out + r * stride + v * LANES, sum);
    });
  }

 private:
  Floats sums_[R * N];
};

// The three products are functions of their own: inlined into what calls them, for every number of
// rows, they would be short of registers.

// out[r][i] = a_r · key_i for the TILE_KEYS keys of a tile. `a` is packed [words][R]. `between` is
// called again and again: there is time for a load between the products.
template <class T, int R, class Between>
[[gnu::noinline]] void dot_tile(const uint32_t* a, const uint32_t* keys, int words, float* out,
                                int64_t out_stride, Between between) {
  Accumulator<T, R, VECTORS> sums;
  for (int w = 0; w < words; ++w, a += R, keys += TILE_KEYS) {
    between();
    Words b[VECTORS];
    for (int v = 0; v < VECTORS; ++v) b[v] = load_words(keys + v * LANES);
    sums.add(a, 1, b);
  }
  sums.put(out, out_stride);
}

// out[r][c] = sum over i of p[r][i] * value_i[c], for LANES * N columns and `words` words of rows.
template <class T, int R, int N, class Between>
[[gnu::noinline]] void mix_tile(const uint32_t* p, int64_t p_stride, const uint32_t* values,
                                int64_t value_stride, int words, float* out, int64_t out_stride,
                                Between between) {
  Accumulator<T, R, N> sums;
  for (int w = 0; w < words; ++w, ++p, values += value_stride) {
    between();
    Words b[N];
    for (int v = 0; v < N; ++v) b[v] = load_words(values + v * LANES);
    sums.add(p, p_stride, b);
  }
  sums.put(out, out_stride);
}

// The same over values where they lie, TILE_KEYS columns of n rows: for a few rows of weights packing
// would be a detour. `row(i)` is where row i begins.
template <class T, int R, class Row, class Between>
[[gnu::noinline]] void mix_rows(const uint32_t* p, int64_t p_stride, Row row, int n, int words,
                                float* out, int64_t out_stride, Between between) {
  Accumulator<T, R, VECTORS> sums;
  for (int w = 0; w < words; ++w, ++p) {
    between();
    const int i = w * T::PER_WORD;
    Words b[VECTORS];
    value_words(T{}, row(i), i + 1 < n ? row(i + 1) : nullptr, b);
    sums.add(p, p_stride, b);
  }
  sums.put(out, out_stride);
}

// All columns of a value tile.
template <class T, int R, class Between>
void mix(const uint32_t* p, int64_t p_stride, const uint32_t* values, int64_t width, int words,
         float* out, int64_t out_stride, Between between) {
  int64_t c = 0;
  for (; c + TILE_KEYS <= width; c += TILE_KEYS)
    mix_tile<T, R, VECTORS>(p, p_stride, values + c, width, words, out + c, out_stride,
                            between);
  for (; c < width; c += LANES)
    mix_tile<T, R, 1>(p, p_stride, values + c, width, words, out + c, out_stride,
                            between);
}

// Calls f with the number of rows as a constant.
template <class F>
void with_rows(int rows, F f) {
  switch (rows) {
    case 1: return f(std::integral_constant<int, 1>{});
    case 2: return f(std::integral_constant<int, 2>{});
    case 3: return f(std::integral_constant<int, 3>{});
    case 4: return f(std::integral_constant<int, 4>{});
    case 5: return f(std::integral_constant<int, 5>{});
    default: return f(std::integral_constant<int, TILE_ROWS>{});
  }
}

}  // namespace antiphon
