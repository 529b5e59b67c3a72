// The kernels as plain functions over pointers and strides; library.cpp gives them to torch.
// Strides are in elements. The last dimension of every matrix is contiguous.
#pragma once

#include <cstdint>

namespace antiphon {

enum class Type { FP32, BF16 };

// One sequence of a step: its queries [first_query, end_query) and its keys, which lie in the slots
// slots[first_key .. end_key). Its queries belong to the last of its keys.
struct Span {
  int64_t first_query, end_query, first_key, end_key;
};

// Causal attention over pages. Queries of no span are left alone.
struct Attention {
  Type type;
  const void* q;       // [T, heads, dim]
  const void* k;       // [slots, kv_heads, dim]
  const void* v;       // [slots, kv_heads, v_dim]
  void* out;           // [T, heads, v_dim], contiguous
  int64_t q_strides[2], k_strides[2], v_strides[2];
  const Span* spans;
  const int64_t* slots;
  int64_t sequences, heads, kv_heads, dim, v_dim;
  float scale;  // > 0
  int threads;
};
void attend(const Attention& call);

// Copies row i of `from` to row slots[i] of `to`.
struct Scatter {
  const char* from;
  char* to;
  int64_t from_stride, to_stride, bytes;  // all in bytes
  const int64_t* slots;
  int64_t rows;
};
void scatter(const Scatter& call);

// out[t, h] = weight[h] x[t, h]: `outer` numbers from `inner`.
// `transposed`: weight[h] is [inner, outer] and not [outer, inner].
struct Project {
  Type type;
  const void* x;       // [T, heads, inner]
  const void* weight;  // [heads, outer, inner] or [heads, inner, outer]
  void* out;           // [T, heads, outer]
  int64_t x_strides[2], weight_strides[2], out_strides[2];
  int64_t tokens, heads, inner, outer;
  bool transposed;
  int threads;
};
void project(const Project& call);

// A weight in the order in which linear reads it; `inner` must be even for bf16.
struct PackLinear {
  Type type;
  const void* weight;  // [outer, inner]
  uint32_t* out;       // packed_words(type, outer, inner)
  int64_t weight_stride, outer, inner;
  int threads;
};
void pack_linear(const PackLinear& call);
int64_t packed_words(Type type, int64_t outer, int64_t inner);

// out = x weightᵀ + bias.
struct Linear {
  Type type, out_type;     // out is FP32 or as the rest
  const void* x;           // [rows, inner]
  const uint32_t* weight;  // packed
  const void* bias;        // [outer] or null
  void* out;               // [rows, outer], contiguous
  int64_t x_stride, rows, inner, outer;
  int threads;
};
void linear(const Linear& call);

// out = x / rms(x) * weight, row by row. With `delta`, x += delta comes first.
struct RmsNorm {
  Type type;
  void* x;            // [outer, inner, size]
  const void* delta;  // [outer, size] or null; needs inner == 1
  const void* weight;
  void* out;          // [outer, inner, size]
  int64_t x_strides[2], delta_stride, out_strides[2];
  int64_t outer, inner, size;
  float eps;
  int threads;
};
void rms_norm(const RmsNorm& call);

// Rotates neighbouring pairs in place; `rotations` is [T, pairs] of (cos, sin).
struct Rotate {
  Type type;
  void* x;  // [T, heads, 2 * pairs]
  int64_t x_strides[2];
  const float* rotations;
  int64_t tokens, heads, pairs;
  int threads;
};
void rotate(const Rotate& call);

// out = silu(first half) * second half, row by row.
struct SiluMul {
  Type type;
  const void* x;  // [rows, 2 * size]
  void* out;      // [rows, size], contiguous
  int64_t x_stride, rows, size;
  int threads;
};
void silu_mul(const SiluMul& call);

// The first place of each row's largest number; of its first NaN, where it has one.
struct Argmax {
  const float* x;  // [rows, size]
  int64_t* out;
  int64_t x_stride, rows, size;
  int threads;
};
void argmax(const Argmax& call);

}  // namespace antiphon
