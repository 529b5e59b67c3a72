// y = x Wᵀ + b with a packed weight, for one row or for thousands, one matrix or many: experts with
// some rows each, heads with a part of every row each.
//
// The weight is cut into panels of PANEL outputs; word w of a panel's outputs lies side by side, so
// a panel is read from front to back. Rows of x are taken some at a time against each panel. A
// number of y is one sum over the inner index, term after term in order: its bits do not depend on
// how many rows there are, nor on the threads.

#include <vector>

#include "kernels.h"
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

int64_t panels(int64_t outer) { return quotient(outer, PANEL); }

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
  Floats sums[R][PANEL_VECTORS];
  clear(sums);
  for (int64_t w = 0; w < words; ++w, x += R, panel += PANEL, ahead.from += ahead.step) {
    Words b[PANEL_VECTORS];
    for (int v = 0; v < PANEL_VECTORS; ++v) {
      b[v] = load_words(panel + v * LANES);
      __builtin_prefetch(ahead.from + v * LANES, 0, 2);  // to the L2 cache
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

template <class T, class To>
class Product {
 public:
  Product(const Linear& call, Memory& memory)
      : call_(call), words_(words_of<T>(call.inner)), panels_(panels(call.outer)), memory_(memory) {}

  void run() {
    x_ = memory_.x.reserve(cut());
    const auto& blocks = memory_.blocks;
    const int64_t count = blocks.size();
    const bool alone = panels_ * PANEL * words_ * count < SERIAL_WORDS;
    const int threads = alone ? 1 : call_.threads;
    parallel_for(rows_ * words_ < SERIAL_WORDS ? 1 : threads, count, [&](int64_t block) {
      for (int64_t c = blocks[block].first; c < blocks[block].last; ++c) pack(memory_.chunks[c]);
    });
    const int64_t group = std::max<int64_t>(1, panels_ * count / (threads * TASKS));
    const int64_t groups = quotient(panels_, group);
    parallel_for(threads, count * groups, [&](int64_t task) {
      const Block& block = blocks[task / groups];
      const int64_t first = task % groups * group;
      for (int64_t p = first; p < std::min(first + group, panels_); ++p)
        for (int64_t c = block.first; c < block.last; ++c) piece(block, c, p);
    });
  }

 private:
  // Chunks of about equal size; how many words they take.
  int64_t cut() {
    int64_t words = 0;
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
        memory_.chunks.push_back({part, first, std::min(most, rows - first), words});
        words += most * words_ + LANES;  // packing writes up to a vector beyond the end
      }
      rows_ += rows;
    }
    return words;
  }

  void pack(const Chunk& chunk) const {
    const auto* x = static_cast<const typename T::Element*>(call_.x) + call_.part[chunk.part].x;
    const uint32_t* rows[MOST_ROWS];
    for (int r = 0; r < chunk.rows; ++r)
      rows[r] = reinterpret_cast<const uint32_t*>(x + (chunk.first + r) * call_.x_stride);
    pack_rows(rows, chunk.rows, words_, x_ + chunk.at);
  }

  void piece(const Block& block, int64_t index, int64_t panel) const {
    const Chunk& chunk = memory_.chunks[index];
    const int64_t column = panel * PANEL, count = std::min<int64_t>(PANEL, call_.outer - column);
    const uint32_t* weight = call_.weight + (chunk.part * panels_ + panel) * words_ * PANEL;
    const int64_t chunks = block.last - block.first, mine = words_ / chunks * PANEL;
    const Ahead ahead = {weight + words_ * PANEL + (index - block.first) * mine,
                         int(PANEL / chunks)};
    Floats bias[PANEL_VECTORS] = {};
    if (call_.bias) {
      const auto* from = static_cast<const typename T::Element*>(call_.bias) + column;
      for (int64_t i = 0; i < count; ++i) bias[i / LANES][i % LANES] = T::widen_one(from[i]);
    }
    auto* to = static_cast<typename To::Element*>(call_.out) + call_.part[chunk.part].out +
               chunk.first * call_.out_stride + column;
    with_count(chunk.rows, [&](auto rows) {
      constexpr int R = decltype(rows)::value;
      Floats y[R][PANEL_VECTORS];
      multiply<T, R>(x_ + chunk.at, weight, words_, ahead, y);
      for (int r = 0; r < R; ++r, to += call_.out_stride) {
        if (call_.bias)
          for (int v = 0; v < PANEL_VECTORS; ++v) y[r][v] += bias[v];
        put<To>(to, y[r], count);
      }
    });
  }

  const Linear& call_;
  const int64_t words_, panels_;
  Memory& memory_;
  int64_t rows_ = 0;
  uint32_t* x_ = nullptr;
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
      const int64_t row = panel * PANEL + i;
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
