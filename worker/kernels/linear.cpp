// y = x Wᵀ + b with a packed weight, for one row or for thousands.
//
// The weight is cut into panels of PANEL outputs; word w of a panel's outputs lies side by side, so
// a panel is read from front to back. Rows of x are taken some at a time against each panel. A
// number of y is one sum over the inner index, term after term in order: its bits do not depend on
// how many rows there are, nor on the threads.

#include "kernels.h"
#include "scratch.h"
#include "team.h"
#include "tiles.h"

namespace antiphon {
namespace {

constexpr int PANEL_VECTORS = 2;
constexpr int PANEL = PANEL_VECTORS * LANES;
#ifdef ANTIPHON_AVX512
constexpr int MOST_ROWS = 12;  // 24 sums of 32 registers
#else
constexpr int MOST_ROWS = 6;  // 12 of 16
#endif
constexpr int64_t BLOCK_CHUNKS = 4;  // chunks of rows that meet a panel while it is in the cache
constexpr int64_t TASKS = 12;        // for each thread
constexpr int64_t SERIAL_WORDS = 8 * 1024;
constexpr int AHEAD = 24 * PANEL;  // words of the panel that are fetched before they are needed

int64_t quotient(int64_t n, int64_t unit) { return (n + unit - 1) / unit; }
int64_t panels(int64_t outer) { return quotient(outer, PANEL); }

template <class T>
int64_t words_of(int64_t inner) { return inner / T::PER_WORD; }

// Rows [0, R) of x, word by word: to[w * R + r].
void pack_rows(const uint32_t* const* rows, int R, int64_t words, uint32_t* to) {
  for (int64_t w = 0; w < words; w += LANES) {
    const int some = std::min<int64_t>(LANES, words - w);
    Words in[LANES], out[LANES];
    for (int r = 0; r < LANES; ++r) in[r] = r < R ? load_some(rows[r] + w, some) : Words{};
    transpose(in, out);
    // what a store writes beyond R the next one overwrites; the last ones have room behind them
    for (int i = 0; i < some; ++i) store_words(to + (w + i) * R, out[i]);
  }
}

template <class T, int R>
void multiply(const uint32_t* x, const uint32_t* panel, int64_t words, Floats (*out)[PANEL_VECTORS]) {
  Floats sums[R][PANEL_VECTORS] = {};
  for (int64_t w = 0; w < words; ++w, x += R, panel += PANEL) {
    Words b[PANEL_VECTORS];
    for (int v = 0; v < PANEL_VECTORS; ++v) {
      b[v] = load_words(panel + v * LANES);
      __builtin_prefetch(panel + AHEAD + v * LANES);
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < PANEL_VECTORS; ++v) sums[r][v] = T::multiply_add(sums[r][v], x[r], b[v]);
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < PANEL_VECTORS; ++v) out[r][v] = sums[r][v];
}

// Calls f with `rows` as a constant.
template <int R = MOST_ROWS, class F>
void with_count(int rows, F f) {
  if constexpr (R > 1) {
    if (rows < R) return with_count<R - 1>(rows, f);
  }
  f(std::integral_constant<int, R>{});
}

template <class To>
void put(typename To::Element* to, const Floats* from, int64_t count) {
  for (int v = 0; v < PANEL_VECTORS; ++v, to += LANES, count -= LANES) {
    if (count >= LANES)
      To::narrow(to, from[v]);
    else
      for (int64_t i = 0; i < count; ++i) to[i] = To::narrow_one(from[v][i]);
  }
}

template <class T, class To>
class Product {
 public:
  explicit Product(const Linear& call)
      : call_(call),
        words_(words_of<T>(call.inner)),
        per_(quotient(call.rows, quotient(call.rows, MOST_ROWS))),
        chunks_(quotient(call.rows, per_)),
        blocks_(quotient(chunks_, BLOCK_CHUNKS)),
        panels_(panels(call.outer)) {}

  void run() {
    static thread_local Scratch<uint32_t> scratch;
    x_ = scratch.reserve(chunks_ * chunk_words());
    const bool alone = panels_ * PANEL * words_ < SERIAL_WORDS;
    const int threads = alone ? 1 : call_.threads;
    parallel_for(call_.rows * words_ < SERIAL_WORDS ? 1 : threads, blocks_, [&](int64_t block) {
      for (int64_t c = block * BLOCK_CHUNKS; c < last_chunk(block); ++c) pack(c);
    });
    const int64_t group = std::max<int64_t>(1, panels_ * blocks_ / (threads * TASKS));
    const int64_t groups = quotient(panels_, group);
    parallel_for(threads, blocks_ * groups, [&](int64_t task) {
      const int64_t block = task / groups, first = task % groups * group;
      for (int64_t p = first; p < std::min(first + group, panels_); ++p)
        for (int64_t c = block * BLOCK_CHUNKS; c < last_chunk(block); ++c) piece(c, p);
    });
  }

 private:
  int64_t last_chunk(int64_t block) const {
    return std::min((block + 1) * BLOCK_CHUNKS, chunks_);
  }
  int rows_of(int64_t chunk) const { return std::min(per_, call_.rows - chunk * per_); }
  // Packing writes up to a vector beyond the end.
  int64_t chunk_words() const { return per_ * words_ + LANES; }
  uint32_t* packed(int64_t chunk) const { return x_ + chunk * chunk_words(); }

  void pack(int64_t chunk) const {
    const auto* x = static_cast<const typename T::Element*>(call_.x);
    const uint32_t* rows[MOST_ROWS];
    const int count = rows_of(chunk);
    for (int r = 0; r < count; ++r)
      rows[r] = reinterpret_cast<const uint32_t*>(x + (chunk * per_ + r) * call_.x_stride);
    pack_rows(rows, count, words_, packed(chunk));
  }

  void piece(int64_t chunk, int64_t panel) const {
    using Bias = typename T::Element;
    const int64_t column = panel * PANEL, count = std::min<int64_t>(PANEL, call_.outer - column);
    Floats bias[PANEL_VECTORS] = {};
    if (call_.bias) {
      const Bias* from = static_cast<const Bias*>(call_.bias) + column;
      for (int64_t i = 0; i < count; ++i) bias[i / LANES][i % LANES] = T::widen_one(from[i]);
    }
    auto* to = static_cast<typename To::Element*>(call_.out) + chunk * per_ * call_.outer + column;
    with_count(rows_of(chunk), [&](auto rows) {
      constexpr int R = decltype(rows)::value;
      Floats y[R][PANEL_VECTORS];
      multiply<T, R>(packed(chunk), call_.weight + panel * words_ * PANEL, words_, y);
      for (int r = 0; r < R; ++r, to += call_.outer) {
        if (call_.bias)
          for (int v = 0; v < PANEL_VECTORS; ++v) y[r][v] += bias[v];
        put<To>(to, y[r], count);
      }
    });
  }

  const Linear& call_;
  const int64_t words_;
  const int64_t per_, chunks_, blocks_, panels_;  // rows of a chunk, ..
  uint32_t* x_ = nullptr;
};

template <class T>
void pack_panels(const PackLinear& call) {
  const int64_t words = words_of<T>(call.inner);
  const auto* weight = static_cast<const typename T::Element*>(call.weight);
  parallel_for(call.threads, panels(call.outer), [&](int64_t p) {
    uint32_t* to = call.out + p * words * PANEL;
    for (int i = 0; i < PANEL; ++i) {
      const int64_t row = p * PANEL + i;
      const auto* from = reinterpret_cast<const char*>(weight + row * call.weight_stride);
      for (int64_t w = 0; w < words; ++w)
        if (row < call.outer)
          std::memcpy(to + w * PANEL + i, from + 4 * w, 4);
        else
          to[w * PANEL + i] = 0;
    }
  });
}

}  // namespace

int64_t packed_words(Type type, int64_t outer, int64_t inner) {
  return panels(outer) * PANEL * (type == Type::BF16 ? words_of<Bf16>(inner) : inner);
}

void pack_linear(const PackLinear& call) {
  if (call.type == Type::BF16)
    pack_panels<Bf16>(call);
  else
    pack_panels<Fp32>(call);
}

void linear(const Linear& call) {
  if (call.rows == 0) return;
  if (call.type == Type::FP32)
    Product<Fp32, Fp32>(call).run();
  else if (call.out_type == Type::FP32)
    Product<Bf16, Fp32>(call).run();
  else
    Product<Bf16, Bf16>(call).run();
}

}  // namespace antiphon
