#include "checks.h"

#include <algorithm>
#include <vector>

namespace antiphon {

using at::Tensor;

Type type_of(const Tensor& t) {
  TORCH_CHECK(t.scalar_type() == at::kFloat || t.scalar_type() == at::kBFloat16,
              "float32 or bfloat16 is needed, not ", t.scalar_type());
  return t.scalar_type() == at::kFloat ? Type::FP32 : Type::BF16;
}

void check(const Tensor& t, const Tensor& like, int64_t dims) {
  TORCH_CHECK(t.dim() == dims, "expected ", dims, " dimensions, not ", t.dim());
  TORCH_CHECK(t.scalar_type() == like.scalar_type(), "tensors differ in dtype");
  TORCH_CHECK(t.size(-1) <= 1 || t.stride(-1) == 1, "the last dimension must be contiguous");
}
void check_words(const Tensor& t, const Tensor& like, int64_t dims) {
  check(t, like, dims);
  if (type_of(t) == Type::FP32) return;
  TORCH_CHECK(t.size(-1) % 2 == 0, "a bfloat16 head must have an even dimension");
  for (int64_t d = 0; d + 1 < dims; ++d)
    TORCH_CHECK(t.size(d) <= 1 || t.stride(d) % 2 == 0, "strides must be even");
  TORCH_CHECK(reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 4 == 0, "unaligned tensor");
}
const int64_t* indices(const Tensor& t, int64_t limit) {
  TORCH_CHECK(t.dim() == 1 && t.scalar_type() == at::kLong && t.is_contiguous(),
              "slots must be contiguous int64");
  const int64_t* slots = t.const_data_ptr<int64_t>();
  const int64_t count = t.size(0);
  bool outside = false;
  for (int64_t i = 0; i < count; ++i) outside |= slots[i] < 0 || slots[i] >= limit;
  TORCH_CHECK(!outside, "a slot lies outside the pool");
  return slots;
}
const Span* spans_of(const Tensor& t, int64_t queries, int64_t keys) {
  TORCH_CHECK(t.dim() == 2 && t.size(1) == 4 && t.scalar_type() == at::kLong && t.is_contiguous(),
              "four numbers a sequence are needed");
  const Span* spans = static_cast<const Span*>(t.const_data_ptr());
  for (int64_t b = 0; b < t.size(0); ++b) {
    const Span& s = spans[b];
    const int64_t own = s.end_query - s.first_query;
    TORCH_CHECK(s.first_query >= 0 && own >= 0 && s.end_query <= queries && s.first_key >= 0 &&
                    s.end_key <= keys && s.end_key - s.first_key >= own,
                "a sequence lies outside the step");
  }
  return spans;
}

void set_tree(Attention& call, const std::optional<Tensor>& order,
              const std::optional<Tensor>& nodes) {
  if (!order || !nodes) return;
  TORCH_CHECK(order->dim() == 1 && order->size(0) == call.sequences && nodes->dim() == 2 &&
                  nodes->size(1) == 4 && order->scalar_type() == at::kLong &&
                  nodes->scalar_type() == at::kLong && order->is_contiguous() &&
                  nodes->is_contiguous(),
              "a tree of this step is needed");
  call.order = indices(*order, call.sequences);
  call.nodes = static_cast<const PrefixNode*>(nodes->const_data_ptr());
  call.node_count = nodes->size(0);
  const int64_t block = block_keys(call.dim);
  std::vector<int64_t> done(call.sequences, -1);
  for (int64_t i = 0; i < call.sequences; ++i) ++done[call.order[i]];
  bool fits = std::all_of(done.begin(), done.end(), [](int64_t n) { return n == 0; });
  for (int64_t i = 0; fits && i < call.node_count; ++i) {
    const PrefixNode& node = call.nodes[i];
    fits = node.first >= 0 && node.first < node.end && node.end <= call.sequences &&
           node.from < node.to;
    for (int64_t place = node.first; fits && place < node.end; ++place) {
      const Span& span = call.spans[call.order[place]];
      const int64_t own = span.end_query - span.first_query;
      fits = done[call.order[place]] == node.from &&
             node.to <= (span.end_key - span.first_key - own + 1) / block;
      done[call.order[place]] = node.to;
    }
  }
  TORCH_CHECK(fits, "the tree does not fit to the step");
}

}  // namespace antiphon
