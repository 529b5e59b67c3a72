// The kernels as torch operators, torch.ops.antiphon.*: checks, then pointers and strides.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "checks.h"
#include "huge.h"
#include "kernels.h"
#include "recording.h"

namespace antiphon {
namespace {

using at::Tensor;

// For what would not be done again when a recording runs.
void not_recorded() { TORCH_CHECK(!Recording::current(), "this operator cannot be recorded"); }

// Which sequences share which blocks of keys, for heads of `dim` numbers: see PrefixTree.
std::tuple<Tensor, Tensor> prefix_tree_of(const Tensor& spans, const Tensor& slots, int64_t dim) {
  const Span* sequences = spans_of(spans, std::numeric_limits<int64_t>::max(), slots.size(0));
  TORCH_CHECK(slots.dim() == 1 && slots.scalar_type() == at::kLong && slots.is_contiguous(),
              "slots must be contiguous int64");
  const PrefixTree tree =
      prefix_tree(sequences, spans.size(0), slots.const_data_ptr<int64_t>(), block_keys(dim));
  Tensor order = at::empty({int64_t(tree.order.size())}, spans.options());
  Tensor nodes = at::empty({int64_t(tree.nodes.size()), 4}, spans.options());
  std::copy(tree.order.begin(), tree.order.end(), order.mutable_data_ptr<int64_t>());
  std::copy(tree.nodes.begin(), tree.nodes.end(),
            static_cast<PrefixNode*>(nodes.mutable_data_ptr()));
  return {order, nodes};
}

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& spans,
                 const Tensor& slots, double scale, const std::optional<Tensor>& order,
                 const std::optional<Tensor>& nodes) {
  check_words(q, q, 3);
  check_words(k, q, 3);
  check_words(v, q, 3);
  TORCH_CHECK(q.size(2) == k.size(2) && k.size(1) == v.size(1) && q.size(1) % k.size(1) == 0,
              "queries, keys and values do not fit together");
  TORCH_CHECK(scale > 0, "scale must be positive");
  const int64_t pool_slots = std::min(k.size(0), v.size(0));
  Tensor out = result({q.size(0), q.size(1), v.size(2)}, q.options());
  Attention call = {
      type_of(q), q.const_data_ptr(), k.const_data_ptr(), v.const_data_ptr(),
      out.mutable_data_ptr(),
      {q.stride(0), q.stride(1)}, {k.stride(0), k.stride(1)}, {v.stride(0), v.stride(1)},
      spans_of(spans, q.size(0), slots.size(0)), indices(slots, pool_slots),
      spans.size(0), q.size(1), k.size(1), q.size(2), v.size(2),
      static_cast<float>(scale), at::get_num_threads(), nullptr, nullptr, 0};
  set_tree(call, order, nodes);
  if (Recording* recording = Recording::current()) recording->add_attention(call, pool_slots);
  attend(call);
  return out;
}

// Elements of one row of t, which must lie side by side.
int64_t row_numbers(const Tensor& t) {
  int64_t numbers = 1;
  for (int64_t d = t.dim() - 1; d > 0; --d) {
    TORCH_CHECK(t.size(d) == 1 || t.stride(d) == numbers, "rows must be contiguous");
    numbers *= t.size(d);
  }
  return numbers;
}

// to[slots[i]] = from[i], row by row.
void scatter_rows(Tensor& to, const Tensor& slots, const Tensor& from) {
  TORCH_CHECK(to.scalar_type() == from.scalar_type() && slots.size(0) == from.size(0) &&
                  row_numbers(to) == row_numbers(from),
              "rows do not fit");
  const int64_t size = from.element_size();
  const Scatter call = {
      static_cast<const char*>(from.const_data_ptr()), static_cast<char*>(to.mutable_data_ptr()),
      from.stride(0) * size, to.stride(0) * size, row_numbers(to) * size,
      indices(slots, to.size(0)), from.size(0)};
  perform([call] { scatter(call); });
}

// What the linear operators read: [outer, inner], or [matrices, outer, inner] with any strides. Its
// words stand in as many rows as there are matrices.
Tensor pack_weight(const Tensor& weight, bool gated) {
  const Tensor all = weight.dim() == 2 ? weight.unsqueeze(0) : weight;
  TORCH_CHECK(all.dim() == 3, "one matrix, or several of a shape, are needed");
  const int64_t matrices = all.size(0), outer = all.size(1), inner = all.size(2);
  const Type type = type_of(all);
  TORCH_CHECK(type == Type::FP32 || inner % 2 == 0, "a bfloat16 row must have an even length");
  TORCH_CHECK(!gated || outer % 2 == 0, "two halves are needed");
  const int64_t words = packed_words(type, outer, inner);
  const std::shared_ptr<void> piece = huge_piece(4 * matrices * words);
  Tensor out = at::from_blob(
      piece.get(), {matrices, words}, [piece](void*) {}, all.options().dtype(at::kInt));
  pack_linear({type, all.const_data_ptr(), static_cast<uint32_t*>(out.mutable_data_ptr()),
               {all.stride(0), all.stride(1), all.stride(2)}, matrices, outer, inner, gated,
               at::get_num_threads()});
  return out;
}

// What a linear operator has besides rows, weight and result.
struct Extras {
  Into into = Into::WRITE;
  std::optional<Tensor> bias, norm;
  double eps = 0;
};

void check_fit(const Tensor& x, const std::optional<Tensor>& t, int64_t size, const char* name) {
  if (!t) return;
  check(*t, x, 1);
  TORCH_CHECK(t->size(0) == size, "the ", name, " does not fit");
}

void multiply(const Tensor& x, const Tensor& weight, Tensor& out, int64_t outer,
              const std::vector<Part>& parts, const Extras& extras) {
  const int64_t inner = x.size(-1);
  TORCH_CHECK(weight.scalar_type() == at::kInt && weight.dim() == 2 && weight.is_contiguous() &&
                  weight.size(0) == int64_t(parts.size()) &&
                  weight.size(1) == packed_words(type_of(x), outer, inner),
              "the packed weight does not fit");
  TORCH_CHECK(extras.into != Into::GATE || outer % 2 == 0, "two halves are needed");
  check_fit(x, extras.bias, outer, "bias");
  check_fit(x, extras.norm, inner, "norm");
  const auto data = [](const std::optional<Tensor>& t) {
    return t ? t->const_data_ptr() : nullptr;
  };
  Linear call = {
      type_of(x), type_of(out), extras.into, x.const_data_ptr(), data(extras.norm),
      static_cast<float>(extras.eps), static_cast<const uint32_t*>(weight.const_data_ptr()),
      data(extras.bias), out.mutable_data_ptr(), x.stride(0), out.stride(0), inner, outer, nullptr,
      int64_t(parts.size()), at::get_num_threads()};
  perform([call, parts]() mutable {
    call.part = parts.data();
    linear(call);
  });
}

// x weightᵀ + bias, in fp32 where `wide`, else in x's dtype. `norm`: of x / rms(x) * norm. `gated`:
// silu(first half) * second half, of a weight that was packed so.
Tensor linear_rows(const Tensor& x, const Tensor& weight, int64_t outer,
                   const std::optional<Tensor>& bias, bool wide, const std::optional<Tensor>& norm,
                   double eps, bool gated) {
  check(x, x, 2);
  TORCH_CHECK(!(wide && gated), "what is gated is not wide");
  Tensor out = result({x.size(0), gated ? outer / 2 : outer},
                      wide ? x.options().dtype(at::kFloat) : x.options());
  multiply(x, weight, out, outer, {{0, 0, x.size(0)}},
           {gated ? Into::GATE : Into::WRITE, bias, norm, eps});
  return out;
}

// onto += x weightᵀ + bias. `x` must be other memory: it is still read when the first sums are there.
void linear_onto(Tensor& onto, const Tensor& x, const Tensor& weight,
                 const std::optional<Tensor>& bias, const std::optional<Tensor>& norm, double eps) {
  check(x, x, 2);
  check(onto, x, 2);
  TORCH_CHECK(onto.size(0) == x.size(0), "rows do not fit");
  TORCH_CHECK(!onto.is_alias_of(x), "a product cannot be added to the rows that it is made of");
  multiply(x, weight, onto, onto.size(1), {{0, 0, x.size(0)}}, {Into::ADD, bias, norm, eps});
}

// The first counts[0] rows of x times the first matrix, the next counts[1] times the second, ..
Tensor linear_groups(const Tensor& x, const Tensor& weight, int64_t outer, at::IntArrayRef counts,
                     bool gated) {
  check(x, x, 2);
  not_recorded();  // the counts are this step's
  const int64_t width = gated ? outer / 2 : outer;
  std::vector<Part> parts;
  int64_t row = 0;
  for (const int64_t rows : counts) {
    TORCH_CHECK(rows >= 0, "a count is negative");
    parts.push_back({row * x.stride(0), row * width, rows});
    row += rows;
  }
  TORCH_CHECK(row == x.size(0), "the counts are not those of the rows");
  Tensor out = at::empty({x.size(0), width}, x.options());
  multiply(x, weight, out, outer, parts, {gated ? Into::GATE : Into::WRITE, {}, {}});
  return out;
}

// out[t, h] = weight[h] @ x[t, h].
void linear_heads(Tensor& out, const Tensor& x, const Tensor& weight) {
  check(x, x, 3);
  check(out, x, 3);
  TORCH_CHECK(out.size(0) == x.size(0) && out.size(1) == x.size(1), "out does not fit");
  std::vector<Part> parts;
  for (int64_t h = 0; h < x.size(1); ++h)
    parts.push_back({h * x.stride(1), h * out.stride(1), x.size(0)});
  multiply(x, weight, out, out.size(2), parts, {});
}

RmsNorm norm_of(const Tensor& x, const Tensor& weight, const Tensor& out, double eps) {
  check(x, x, x.dim());
  check(weight, x, 1);
  TORCH_CHECK((x.dim() == 2 || x.dim() == 3) && weight.size(0) == x.size(-1), "shapes do not fit");
  const bool heads = x.dim() == 3;
  return {type_of(x), x.const_data_ptr(), weight.const_data_ptr(), out.data_ptr(),
          {x.stride(0), heads ? x.stride(1) : 0},
          {out.stride(0), heads ? out.stride(1) : 0},
          x.size(0), heads ? x.size(1) : 1, x.size(-1), static_cast<float>(eps),
          at::get_num_threads()};
}

Tensor rms_norm_new(const Tensor& x, const Tensor& weight, double eps) {
  Tensor out = result(x.sizes(), x.options());
  perform([call = norm_of(x, weight, out, eps)] { rms_norm(call); });
  return out;
}

void rms_norm_in_place(Tensor& x, const Tensor& weight, double eps) {
  perform([call = norm_of(x, weight, x, eps)] { rms_norm(call); });
}

void rotate_in_place(Tensor& x, const Tensor& rotations) {
  check(x, x, 3);
  TORCH_CHECK(rotations.scalar_type() == at::kComplexFloat && rotations.is_contiguous() &&
                  rotations.numel() * 2 == x.size(0) * x.size(2),
              "one rotation a pair is needed");
  const Rotate call = {
      type_of(x), x.mutable_data_ptr(), {x.stride(0), x.stride(1)},
      static_cast<const float*>(rotations.const_data_ptr()), x.size(0), x.size(1),
      x.size(2) / 2, at::get_num_threads()};
  perform([call] { rotate(call); });
}

// x += delta.
void add_in_place(Tensor& x, const Tensor& delta) {
  check(x, x, 2);
  check(delta, x, 2);
  TORCH_CHECK(x.sizes() == delta.sizes(), "shapes differ");
  const Add call = {type_of(x), x.mutable_data_ptr(), delta.const_data_ptr(), x.stride(0),
                    delta.stride(0), x.size(0), x.size(1), at::get_num_threads()};
  perform([call] { add(call); });
}

Tensor argmax_rows(const Tensor& x) {
  check(x, x, 2);
  not_recorded();
  TORCH_CHECK(x.scalar_type() == at::kFloat && x.size(1) > 0, "fp32 rows are needed");
  Tensor out = at::empty({x.size(0)}, x.options().dtype(at::kLong));
  argmax({x.const_data_ptr<float>(), out.mutable_data_ptr<int64_t>(), x.stride(0), x.size(0),
          x.size(1), at::get_num_threads()});
  return out;
}

// `shares` is [rows, 3]: temperature, min_p, top_p. `numbers` is [rows, 3]: top_k, seed, position.
std::tuple<Tensor, Tensor> sample_rows(const Tensor& logits, const Tensor& shares,
                                       const Tensor& numbers) {
  check(logits, logits, 2);
  not_recorded();
  const int64_t rows = logits.size(0);
  TORCH_CHECK(logits.scalar_type() == at::kFloat && logits.size(1) > 0, "fp32 rows are needed");
  TORCH_CHECK(shares.scalar_type() == at::kDouble && numbers.scalar_type() == at::kLong &&
                  shares.is_contiguous() && numbers.is_contiguous() &&
                  shares.sizes() == at::IntArrayRef({rows, 3}) && numbers.sizes() == shares.sizes(),
              "three shares and three numbers a row are needed");
  const double* share = shares.const_data_ptr<double>();
  const int64_t* number = numbers.const_data_ptr<int64_t>();
  std::vector<Draw> draws(rows);
  for (int64_t i = 0; i < rows; ++i, share += 3, number += 3)
    draws[i] = {share[0], share[1], share[2], number[0], number[1], number[2]};
  Tensor tokens = at::empty({rows}, logits.options().dtype(at::kLong));
  Tensor limits = at::empty({rows}, logits.options());
  sample({logits.const_data_ptr<float>(), draws.data(), tokens.mutable_data_ptr<int64_t>(),
          limits.mutable_data_ptr<float>(), logits.stride(0), rows, logits.size(1),
          at::get_num_threads()});
  return {tokens, limits};
}

}  // namespace

TORCH_LIBRARY(antiphon, library) {
  library.def("prefix_tree(Tensor spans, Tensor slots, int dim) -> (Tensor order, Tensor nodes)");
  library.def("attention(Tensor q, Tensor k, Tensor v, Tensor spans, Tensor slots, float scale,"
              " Tensor? order=None, Tensor? nodes=None) -> Tensor");
  library.def("scatter_rows(Tensor(a!) to, Tensor slots, Tensor rows) -> ()");
  library.def("pack_linear(Tensor weight, bool gated=False) -> Tensor");
  library.def("linear(Tensor x, Tensor weight, int outer, Tensor? bias, bool wide,"
              " Tensor? norm=None, float eps=0, bool gated=False) -> Tensor");
  library.def("linear_onto(Tensor(a!) onto, Tensor x, Tensor weight, Tensor? bias,"
              " Tensor? norm=None, float eps=0) -> ()");
  library.def("linear_groups(Tensor x, Tensor weight, int outer, int[] counts, bool gated=False)"
              " -> Tensor");
  library.def("linear_heads(Tensor(a!) out, Tensor x, Tensor weight) -> ()");
  library.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  library.def("rms_norm_(Tensor(a!) x, Tensor weight, float eps) -> ()");
  library.def("add_(Tensor(a!) x, Tensor delta) -> ()");
  library.def("rotate_(Tensor(a!) x, Tensor rotations) -> ()");
  library.def("argmax(Tensor x) -> Tensor");
  library.def("sample(Tensor logits, Tensor shares, Tensor numbers) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(antiphon, CPU, library) {
  library.impl("prefix_tree", &prefix_tree_of);
  library.impl("attention", &attention);
  library.impl("scatter_rows", &scatter_rows);
  library.impl("pack_linear", &pack_weight);
  library.impl("linear", &linear_rows);
  library.impl("linear_onto", &linear_onto);
  library.impl("linear_groups", &linear_groups);
  library.impl("linear_heads", &linear_heads);
  library.impl("rms_norm", &rms_norm_new);
  library.impl("rms_norm_", &rms_norm_in_place);
  library.impl("add_", &add_in_place);
  library.impl("rotate_", &rotate_in_place);
  library.impl("argmax", &argmax_rows);
  library.impl("sample", &sample_rows);
}

}  // namespace antiphon
