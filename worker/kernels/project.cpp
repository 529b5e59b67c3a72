// Products of every token's head with that head's matrix: the up-projections of MLA.
//
// Made of attention's tiles, so that a token's result is the same bits however many others there are.

#include "kernels.h"
#include "scratch.h"
#include "team.h"
#include "tiles.h"

namespace antiphon {
namespace {

constexpr int64_t TASK_TOKENS = 96;  // against the cost of packing a head's matrix

struct Buffers {
  Scratch<uint32_t> matrix, rows;
  Scratch<float> out;
};

template <class T>
class Head {
 public:
  using Element = typename T::Element;

  Head(const Project& call, int64_t head, Buffers& buffers)
      : call_(call), head_(head), words_(call.inner / T::PER_WORD), buffers_(buffers) {
    const auto row = [&](int64_t i) {
      const Element* base = static_cast<const Element*>(call_.weight);
      return reinterpret_cast<const uint32_t*>(
          base + head_ * call_.weight_strides[0] + i * call_.weight_strides[1]);
    };
    if (call_.transposed) {
      width_ = round_up(call_.outer, LANES);
      matrix_ = buffers_.matrix.reserve(words_ * width_);
      pack_values<T>(row, call_.inner, call_.outer, matrix_);
    } else {
      width_ = round_up(call_.outer, TILE_KEYS);
      matrix_ = buffers_.matrix.reserve(words_ * width_);
      pack_keys(row, call_.outer, words_, matrix_);
    }
  }

  void run(int64_t first, int64_t last) {
    float* out = buffers_.out.reserve(TILE_ROWS * width_);
    uint32_t* rows = buffers_.rows.reserve(TILE_ROWS * words_);
    for (int64_t token = first; token < last; token += TILE_ROWS)
      with_rows(std::min<int64_t>(TILE_ROWS, last - token), [&](auto count) {
        constexpr int R = decltype(count)::value;
        if (call_.transposed) {
          for (int r = 0; r < R; ++r) std::memcpy(rows + r * words_, x(token + r), 4 * words_);
          mix<T, R>(rows, words_, matrix_, width_, words_, out, width_);
        } else {
          for (int r = 0; r < R; ++r) {
            const char* from = reinterpret_cast<const char*>(x(token + r));
            for (int64_t w = 0; w < words_; ++w) std::memcpy(rows + w * R + r, from + 4 * w, 4);
          }
          for (int64_t key = 0; key < width_; key += TILE_KEYS)
            dot_tile<T, R>(rows, matrix_ + key * words_, words_, out + key, width_);
        }
        for (int r = 0; r < R; ++r) write(token + r, out + r * width_);
      });
  }

 private:
  const Element* x(int64_t token) const {
    return static_cast<const Element*>(call_.x) + token * call_.x_strides[0] +
           head_ * call_.x_strides[1];
  }

  void write(int64_t token, const float* from) const {
    Element* to = static_cast<Element*>(call_.out) + token * call_.out_strides[0] +
                  head_ * call_.out_strides[1];
    int64_t c = 0;
    for (; c + LANES <= call_.outer; c += LANES) T::narrow(to + c, load(from + c));
    for (; c < call_.outer; ++c) to[c] = T::narrow_one(from[c]);
  }

  const Project& call_;
  const int64_t head_, words_;
  int64_t width_;
  Buffers& buffers_;
  uint32_t* matrix_;
};

template <class T>
void project_all(const Project& call) {
  const int64_t pieces = (call.tokens + TASK_TOKENS - 1) / TASK_TOKENS;
  parallel_for(call.threads, call.heads * pieces, [&](int64_t task) {
    static thread_local Buffers buffers;
    const int64_t first = task % pieces * TASK_TOKENS;
    Head<T>(call, task / pieces, buffers).run(first, std::min(first + TASK_TOKENS, call.tokens));
  });
}

}  // namespace

void project(const Project& call) {
  if (call.type == Type::BF16)
    project_all<Bf16>(call);
  else
    project_all<Fp32>(call);
}

}  // namespace antiphon
