// y = x Wᵀ + b with a packed weight, for one row or for thousands, one matrix or many: experts with
// some rows each, heads with a part of every row each.
//
// The weight is cut into panels of PANEL outputs; word w of a panel's outputs lies side by side, so
// a panel is read from front to back. Rows of x are taken some at a time against each panel. A
// number of y is one sum over the inner index, term after term in order: its bits do not depend on
// how many rows there are, nor on the threads.
//
// What stands before and behind a product in a model is done here while the numbers are at hand:
// rows are normalised while they are packed, and sums are gated, or added to the residual stream,
// before they are first written. A decode step's products take 10 to 100 µs each, so that what
// costs is less the arithmetic than another gathering of the threads, and reading what the other
// processor has just written. For the same reason few rows are packed by each thread for itself.

#include <atomic>
#include <vector>

#include "kernels.h"
#include "rows.h"
#include "scratch.h"
#include "team.h"
#include "tiles.h"

namespace antiphon {
namespace {

constexpr int PANEL_VECTORS = 2;
constexpr int PANEL = PANEL_VECTORS * LANES;
constexpr int64_t BLOCK_CHUNKS = 4;  // chunks of rows that meet a panel while it is in the cache
constexpr int64_t TASKS = 12;        // for each thread
constexpr int64_t SERIAL_WORDS = 8 * 1024;
constexpr int64_t OWN_WORDS = 16 * 1024;  // at most, of rows that each thread packs for itself

int64_t panels(int64_t outer) { return quotient(outer, PANEL); }

// Which output stands at place i of a panel; `outer`: none. Gated, a panel has as many of both
// halves, those that belong together in the same lane.
int64_t output_at(int64_t panel, int64_t i, int64_t outer, bool gated) {
  if (!gated) return std::min(panel * PANEL + i, outer);
  const int64_t half = outer / 2, column = panel * LANES + i % LANES;
  return column < half ? i / LANES * half + column : outer;
}

template <class T>
int64_t words_of(int64_t inner) { return inner / T::PER_WORD; }

// Some words of the next panel, which are fetched while this one is multiplied: all chunks of a
// block fetch a part each, so that memory is read all the time and not during the first one alone.
// Beside the last panel of a weight they are words beyond its end, on purpose: a prefetch of an
// address that is not mapped does nothing, and is cheaper than a test for each panel. Nobody reads
// through `from`.
struct Ahead {
  const uint32_t* from;
  int step;  // words, for each word of the inner index
};

template <class T, int R>
void multiply(const uint32_t* x, const uint32_t* panel, int64_t words, Ahead ahead,
              Floats (*out)[PANEL_VECTORS]) {
  Accumulator<T, R, PANEL_VECTORS> sums;
  for (int64_t w = 0; w < words; ++w, x += R, panel += PANEL, ahead.from += ahead.step) {
    Words b[PANEL_VECTORS];
    for (int v = 0; v < PANEL_VECTORS; ++v) {
      b[v] = load_words(panel + v * LANES);
      __builtin_prefetch(ahead.from + v * LANES, 0, 2);  // to the L2 cache
    }
    sums.add(x, 1, b);
  }
  sums.each([&](int r, int v, Floats sum) __attribute__((always_inline)) { out[r][v] = sum; });
}

// Calls f with `rows` as a constant.
template <int R = MOST_ROWS, class F>
void with_count(int rows, F f) {
  if constexpr (R > 1) {
    if (rows < R) return with_count<R - 1>(rows, f);
  }
  f(std::integral_constant<int, R>{});
}

// Some rows of a part, at most MOST_ROWS, and where they lie packed.
struct Chunk {
  int64_t part, first, rows, at;
};

// Chunks [first, last) of one part: they meet a panel while it is in the cache.
struct Block {
  int64_t first, last;
};

struct Memory {
  Scratch<uint32_t> x;
  std::vector<Chunk> chunks;
  std::vector<Block> blocks;
};

// Rows that a thread has packed for itself, and for which call.
struct Own {
  Scratch<uint32_t> x;
  uint64_t call = 0;
};

template <class T, class To>
class Product {
 public:
  Product(const Linear& call, Memory& memory)
      : call_(call), words_(words_of<T>(call.inner)), panels_(panels(call.outer)), memory_(memory) {
    cut();
  }

  void run() {
    const auto& blocks = memory_.blocks;
    const int64_t count = blocks.size();
    const bool alone = panels_ * PANEL * words_ * count < SERIAL_WORDS;
    const int threads = alone ? 1 : call_.threads;
    const bool own = count == 1 && rows_ * words_ <= OWN_WORDS;
    const uint32_t* shared = own ? nullptr : pack_all(rows_ * words_ < SERIAL_WORDS ? 1 : threads);
    static std::atomic<uint64_t> calls{0};
    const uint64_t call = ++calls;
    const int64_t group = std::max<int64_t>(1, panels_ * count / (threads * TASKS));
    const int64_t groups = quotient(panels_, group);
    parallel_for(threads, count * groups, [&](int64_t task) {
      const uint32_t* x = own ? packed_here(call) : shared;
      const Block& block = blocks[task / groups];
      const int64_t first = task % groups * group;
      for (int64_t p = first; p < std::min(first + group, panels_); ++p)
        for (int64_t c = block.first; c < block.last; ++c) piece(x, block, c, p);
    });
  }

 private:
  using In = typename T::Element;
  using Out = typename To::Element;

  // Chunks of about equal size.
  void cut() {
    memory_.chunks.clear();
    memory_.blocks.clear();
    for (int64_t part = 0; part < call_.parts; ++part) {
      const int64_t rows = call_.part[part].rows;
      const int64_t most = rows ? quotient(rows, quotient(rows, MOST_ROWS)) : 0;
      int64_t room = 0;
      for (int64_t first = 0; first < rows; first += most, --room) {
        const int64_t next = memory_.chunks.size();
        if (room == 0) {
          memory_.blocks.push_back({next, next});
          room = BLOCK_CHUNKS;
        }
        memory_.blocks.back().last = next + 1;
        memory_.chunks.push_back({part, first, std::min(most, rows - first), packed_});
        packed_ += most * words_ + LANES;  // packing writes up to a vector beyond the end
      }
      rows_ += rows;
    }
  }

  const uint32_t* pack_all(int threads) const {
    uint32_t* x = memory_.x.reserve(packed_);
    parallel_for(threads, memory_.blocks.size(), [&](int64_t block) {
      for (int64_t c = memory_.blocks[block].first; c < memory_.blocks[block].last; ++c)
        pack(memory_.chunks[c], x);
    });
    return x;
  }

  const uint32_t* packed_here(uint64_t call) const {
    static thread_local Own own;
    uint32_t* x = own.x.reserve(packed_);
    if (own.call != call)
      for (const Chunk& chunk : memory_.chunks) pack(chunk, x);
    own.call = call;
    return x;
  }

  void pack(const Chunk& chunk, uint32_t* packed) const {
    static thread_local Scratch<In> normalised;
    const auto* x = static_cast<const In*>(call_.x) + call_.part[chunk.part].x;
    const auto* norm = static_cast<const In*>(call_.norm);
    In* to = norm ? normalised.reserve(chunk.rows * call_.inner) : nullptr;
    const uint32_t* rows[MOST_ROWS];
    for (int r = 0; r < chunk.rows; ++r) {
      const In* row = x + (chunk.first + r) * call_.x_stride;
      if (norm) {
        normalise<T>(row, norm, call_.eps, call_.inner, to + r * call_.inner);
        row = to + r * call_.inner;
      }
      rows[r] = reinterpret_cast<const uint32_t*>(row);
    }
    pack_rows(rows, chunk.rows, words_, packed + chunk.at);
  }

  // A chunk's products with a panel.
  void piece(const uint32_t* x, const Block& block, int64_t index, int64_t panel) const {
    const Chunk& chunk = memory_.chunks[index];
    const uint32_t* weight = call_.weight + (chunk.part * panels_ + panel) * words_ * PANEL;
    const int64_t chunks = block.last - block.first, mine = words_ / chunks * PANEL;
    const Ahead ahead = {weight + words_ * PANEL + (index - block.first) * mine,
                         int(PANEL / chunks)};
    const int64_t columns = call_.into == Into::GATE ? LANES : PANEL;
    auto* to = static_cast<Out*>(call_.out) + call_.part[chunk.part].out +
               chunk.first * call_.out_stride + panel * columns;
    const int64_t out_columns = call_.into == Into::GATE ? call_.outer / 2 : call_.outer;
    const int64_t count = std::min(columns, out_columns - panel * columns);
    Floats bias[PANEL_VECTORS] = {};
    if (call_.bias) read_bias(panel, bias);
    with_count(chunk.rows, [&](auto rows) {
      constexpr int R = decltype(rows)::value;
      Floats y[R][PANEL_VECTORS];
      multiply<T, R>(x + chunk.at, weight, words_, ahead, y);
      for (int r = 0; r < R; ++r, to += call_.out_stride) {
        if (call_.bias)
          for (int v = 0; v < PANEL_VECTORS; ++v) y[r][v] += bias[v];
        put(to, y[r], count);
      }
    });
  }

  void read_bias(int64_t panel, Floats (&bias)[PANEL_VECTORS]) const {
    for (int64_t i = 0; i < PANEL; ++i) {
      const int64_t output = output_at(panel, i, call_.outer, call_.into == Into::GATE);
      if (output < call_.outer)
        bias[i / LANES][i % LANES] = T::widen_one(static_cast<const In*>(call_.bias)[output]);
    }
  }

  void put(Out* to, Floats (&y)[PANEL_VECTORS], int64_t count) const {
    if (call_.into == Into::GATE) return narrow_some<To>(to, silu(y[0]) * y[1], count);
    for (int v = 0; v < PANEL_VECTORS; ++v, to += LANES, count -= LANES) {
      if (call_.into == Into::ADD) y[v] += widen_some<To>(to, count);
      narrow_some<To>(to, y[v], count);
    }
  }

  const Linear& call_;
  const int64_t words_, panels_;
  Memory& memory_;
  int64_t rows_ = 0, packed_ = 0;  // rows of all parts, and the words that they take when packed
};

template <class T, class To>
void multiply_all(const Linear& call) {
  static thread_local Memory memory;
  Product<T, To>(call, memory).run();
}

template <class T>
void pack_panels(const PackLinear& call) {
  using Element = typename T::Element;
  const int64_t words = words_of<T>(call.inner), per_matrix = panels(call.outer);
  parallel_for(call.threads, call.matrices * per_matrix, [&](int64_t task) {
    const int64_t matrix = task / per_matrix, panel = task % per_matrix;
    Element* to = reinterpret_cast<Element*>(call.out + task * words * PANEL);
    for (int64_t i = 0; i < PANEL; ++i) {
      const int64_t row = output_at(panel, i, call.outer, call.gated);
      const Element* from =
          static_cast<const Element*>(call.weight) + matrix * call.strides[0] + row * call.strides[1];
      for (int64_t k = 0; k < call.inner; ++k)
        to[(k / T::PER_WORD * PANEL + i) * T::PER_WORD + k % T::PER_WORD] =
            row < call.outer ? from[k * call.strides[2]] : Element(0);
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
  if (call.type == Type::FP32)
    multiply_all<Fp32, Fp32>(call);
  else if (call.out_type == Type::FP32)
    multiply_all<Bf16, Fp32>(call);
  else
    multiply_all<Bf16, Bf16>(call);
}

}  // namespace antiphon
