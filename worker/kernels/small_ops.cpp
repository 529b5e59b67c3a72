// What stands between the large products: each reads its rows once and rounds once.

#include "kernels.h"
#include "rows.h"
#include "team.h"

namespace antiphon {
namespace {

constexpr int64_t SERIAL_NUMBERS = 8 * 1024;  // below, sharing costs more than it saves

template <class Row>
void for_rows(int64_t rows, int64_t numbers, int threads, Row row) {
  // a few pieces a thread: handing one out costs as much as a short row
  const int64_t piece = std::max<int64_t>(1, rows / (4 * threads));
  parallel_for(numbers > SERIAL_NUMBERS ? threads : 1, (rows + piece - 1) / piece, [&](int64_t p) {
    for (int64_t i = p * piece; i < std::min(rows, (p + 1) * piece); ++i) row(i);
  });
}

template <class T>
void add_rows(const Add& call) {
  using Element = typename T::Element;
  const int64_t n = call.size;
  for_rows(call.rows, call.rows * n, call.threads, [&](int64_t i) {
    Element* x = static_cast<Element*>(call.x) + i * call.x_stride;
    const Element* delta = static_cast<const Element*>(call.delta) + i * call.delta_stride;
    for (int64_t c = 0; c < n; c += LANES)
      narrow_some<T>(x + c, widen_some<T>(x + c, n - c) + widen_some<T>(delta + c, n - c), n - c);
  });
}

template <class T>
void rms_norm_rows(const RmsNorm& call) {
  using Element = typename T::Element;
  const auto* weight = static_cast<const Element*>(call.weight);
  for_rows(call.outer, call.outer * call.inner * call.size, call.threads, [&](int64_t i) {
    for (int64_t j = 0; j < call.inner; ++j)
      normalise<T>(
          static_cast<const Element*>(call.x) + i * call.x_strides[0] + j * call.x_strides[1],
          weight, call.eps, call.size,
          static_cast<Element*>(call.out) + i * call.out_strides[0] + j * call.out_strides[1]);
  });
}

template <class T>
void rotate_rows(const Rotate& call) {
  using Element = typename T::Element;
  for_rows(call.tokens, call.tokens * call.heads * call.pairs, call.threads, [&](int64_t t) {
    const float* turn = call.rotations + t * 2 * call.pairs;
    for (int64_t h = 0; h < call.heads; ++h) {
      Element* x = static_cast<Element*>(call.x) + t * call.x_strides[0] + h * call.x_strides[1];
      for (int64_t p = 0; p < call.pairs; ++p) {
        const float a = T::widen_one(x[2 * p]), b = T::widen_one(x[2 * p + 1]);
        const float cos = turn[2 * p], sin = turn[2 * p + 1];
        x[2 * p] = T::narrow_one(a * cos - b * sin);
        x[2 * p + 1] = T::narrow_one(a * sin + b * cos);
      }
    }
  });
}

int64_t first_largest(const float* x, int64_t n) {
  Floats largest = splat(-INF);
  Ints nan = {};
  int64_t c = 0;
  for (; c + LANES <= n; c += LANES) {
    const Floats part = load(x + c);
    largest = larger(largest, part);
    nan |= part != part;
  }
  float top = max_lanes(largest);
  bool any_nan = false;
  for (int i = 0; i < LANES; ++i) any_nan |= nan[i] != 0;
  for (; c < n; ++c) {
    top = x[c] > top ? x[c] : top;
    any_nan |= x[c] != x[c];
  }
  for (c = 0; c < n; ++c)
    if (any_nan ? x[c] != x[c] : x[c] == top) break;
  return c;
}

}  // namespace

void rms_norm(const RmsNorm& call) {
  if (call.type == Type::BF16)
    rms_norm_rows<Bf16>(call);
  else
    rms_norm_rows<Fp32>(call);
}

void add(const Add& call) {
  if (call.type == Type::BF16)
    add_rows<Bf16>(call);
  else
    add_rows<Fp32>(call);
}

void rotate(const Rotate& call) {
  if (call.type == Type::BF16)
    rotate_rows<Bf16>(call);
  else
    rotate_rows<Fp32>(call);
}

void argmax(const Argmax& call) {
  for_rows(call.rows, call.rows * call.size, call.threads, [&](int64_t i) {
    call.out[i] = first_largest(call.x + i * call.x_stride, call.size);
  });
}

}  // namespace antiphon
