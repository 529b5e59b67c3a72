// Kernels that are written down while they run, to run again without all that stood around them:
// what a CUDA graph is on a GPU. Python and torch take a few milliseconds of a step for several
// hundred kernels; a recording takes none.
//
// Pointers, shapes and order are those of the recorded run. What differs from run to run is copied
// to where the recorded kernels read it, and which sequences there are is given anew.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "attention_tasks.h"
#include "kernels.h"

namespace antiphon {

class Recording : public torch::CustomClassHolder {
 public:
  // What a run reads: copies of these are its inputs, and `x` is also where its result will be.
  Recording(const at::Tensor& x, const at::Tensor& rotations, const at::Tensor& write_slots);

  // The copies, for the run that is recorded.
  at::Tensor x() const { return x_; }
  at::Tensor rotations() const { return rotations_; }
  at::Tensor write_slots() const { return write_slots_; }

  int64_t head_dim() const { return attention_ ? attention_->dim : 0; }

  // This thread's kernels are recorded from `begin` to `end`, as they run.
  void begin();
  void end();
  static Recording* current();

  void add(std::function<void()> kernel) { kernels_.push_back(std::move(kernel)); }
  void add_attention(const Attention& call, int64_t pool_slots);
  // Memory for a result; that of results which no tensor holds any more is used again.
  at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options);

  // Everything again, for other numbers and sequences. The result is overwritten by the next run.
  at::Tensor run(const at::Tensor& x, const at::Tensor& rotations, const at::Tensor& write_slots,
                 const at::Tensor& spans, const at::Tensor& slots,
                 const std::optional<at::Tensor>& order, const std::optional<at::Tensor>& nodes);

 private:
  struct Piece {
    std::shared_ptr<void> memory;
    size_t bytes;
  };

  at::Tensor x_, rotations_, write_slots_;
  std::vector<std::function<void()>> kernels_;
  std::vector<Piece> pieces_;
  std::optional<Attention> attention_;  // the first one: all layers have its shape
  int64_t pool_slots_ = 0;
  Schedule schedule_;
};

// Runs a kernel, which is a copyable function object, and records it where that is wanted.
template <class Kernel>
void perform(Kernel kernel) {
  if (Recording* recording = Recording::current()) recording->add(kernel);
  kernel();
}

// Memory for a kernel's result.
at::Tensor result(at::IntArrayRef sizes, const at::TensorOptions& options);

}  // namespace antiphon
