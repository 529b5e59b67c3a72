// What the operators ask of their tensors: a kernel would read and write anywhere.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "kernels.h"

namespace antiphon {

Type type_of(const at::Tensor& t);

// So many dimensions, the dtype of `like`, the last dimension contiguous.
void check(const at::Tensor& t, const at::Tensor& like, int64_t dims);

// The same, and a bfloat16 tensor can be read in words of two.
void check_words(const at::Tensor& t, const at::Tensor& like, int64_t dims);

// One-dimensional and within [0, limit).
const int64_t* indices(const at::Tensor& t, int64_t limit);

// Sequences within so many queries and keys.
const Span* spans_of(const at::Tensor& t, int64_t queries, int64_t keys);

// The PrefixTree of a call whose sequences are set, or none. Whether slots are really the same is
// not looked at.
void set_tree(Attention& call, const std::optional<at::Tensor>& order,
              const std::optional<at::Tensor>& nodes);

}  // namespace antiphon
