#include "recording.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <new>

#include "checks.h"

namespace antiphon {
namespace {

using at::Tensor;

thread_local Recording* recording_now = nullptr;

bool same_shape(const Attention& a, const Attention& b) {
  return a.type == b.type && a.heads == b.heads && a.kv_heads == b.kv_heads && a.dim == b.dim &&
         a.v_dim == b.v_dim && a.threads == b.threads;
}

void set_sequences(Attention& call, const Attention& like) {
  call.spans = like.spans;
  call.slots = like.slots;
  call.sequences = like.sequences;
  call.order = like.order;
  call.nodes = like.nodes;
  call.node_count = like.node_count;
}

std::shared_ptr<void> memory_of(size_t bytes) {
  constexpr size_t LINE = 64;
  void* memory = std::aligned_alloc(LINE, (bytes + LINE) / LINE * LINE);
  if (!memory) throw std::bad_alloc();
  return {memory, std::free};
}

}  // namespace

Recording* Recording::current() { return recording_now; }

Recording::Recording(const Tensor& x, const Tensor& rotations, const Tensor& write_slots)
    : x_(x.clone()), rotations_(rotations.clone()), write_slots_(write_slots.clone()) {}

void Recording::begin() {
  TORCH_CHECK(!recording_now && kernels_.empty(), "this thread, or this recording, has begun one");
  recording_now = this;
}

void Recording::end() {
  if (recording_now == this) recording_now = nullptr;
}

void Recording::add_attention(const Attention& call, int64_t pool_slots) {
  if (!attention_) {
    attention_ = call;
    pool_slots_ = pool_slots;
  }
  TORCH_CHECK(same_shape(call, *attention_), "the layers' heads differ");
  pool_slots_ = std::min(pool_slots_, pool_slots);
  add([this, call = Attention(call)]() mutable {
    set_sequences(call, *attention_);
    attend(call, schedule_);
  });
}

Tensor Recording::empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
  size_t bytes = c10::typeMetaToScalarType(options.dtype()) == at::kFloat ? 4 : 2;
  for (const int64_t size : sizes) bytes *= size;
  const Piece* best = nullptr;
  for (const Piece& piece : pieces_)
    if (piece.memory.use_count() == 1 && piece.bytes >= bytes &&
        (!best || piece.bytes < best->bytes))
      best = &piece;
  if (!best) {
    pieces_.push_back({memory_of(bytes), bytes});
    best = &pieces_.back();
  }
  const std::shared_ptr<void> memory = best->memory;
  return at::from_blob(memory.get(), sizes, [memory](void*) {}, options);
}

Tensor Recording::run(const Tensor& x, const Tensor& rotations, const Tensor& write_slots,
                      const Tensor& spans, const Tensor& slots, const std::optional<Tensor>& order,
                      const std::optional<Tensor>& nodes) {
  TORCH_CHECK(x.sizes() == x_.sizes() && rotations.sizes() == rotations_.sizes() &&
                  write_slots.sizes() == write_slots_.sizes(),
              "this was recorded for other shapes");
  TORCH_CHECK(attention_ && recording_now != this, "nothing was recorded");
  indices(write_slots, pool_slots_);
  attention_->spans = spans_of(spans, x.size(0), slots.size(0));
  attention_->slots = indices(slots, pool_slots_);
  attention_->sequences = spans.size(0);
  attention_->order = nullptr;
  attention_->nodes = nullptr;
  attention_->node_count = 0;
  set_tree(*attention_, order, nodes);
  schedule_ = schedule(*attention_);
  x_.copy_(x);
  rotations_.copy_(rotations);
  write_slots_.copy_(write_slots);
  for (const std::function<void()>& kernel : kernels_) kernel();
  return x_;
}

Tensor result(at::IntArrayRef sizes, const at::TensorOptions& options) {
  Recording* recording = Recording::current();
  return recording ? recording->empty(sizes, options) : at::empty(sizes, options);
}

TORCH_LIBRARY_FRAGMENT(antiphon, library) {
  library.class_<Recording>("Recording")
      .def(torch::init<const Tensor&, const Tensor&, const Tensor&>())
      .def("x", &Recording::x)
      .def("rotations", &Recording::rotations)
      .def("write_slots", &Recording::write_slots)
      .def("head_dim", &Recording::head_dim)
      .def("begin", &Recording::begin)
      .def("end", &Recording::end)
      .def("run", &Recording::run);
}

}  // namespace antiphon
