// The kernels as plain functions over pointers and strides; library.cpp gives them to torch.
// Strides are in elements. The last dimension of every matrix is contiguous.
#pragma once

#include <cstdint>
#include <vector>

namespace antiphon {

enum class Type { FP32, BF16 };

// One sequence of a step: its queries [first_query, end_query) and its keys, which lie in the slots
// slots[first_key .. end_key). Its queries belong to the last of its keys.
struct Span {
  int64_t first_query, end_query, first_key, end_key;
};

// Keys are taken in blocks of a fixed size, from the start of each sequence. A wide head's block is
// smaller, so that its tiles stay in the L2 cache.
constexpr int BLOCK_KEYS = 256;  // at most
int64_t block_keys(int64_t dim);

// The sequences order[first .. end) have the same slots in their blocks [from, to), and so their
// keys there are read once for all of them. Every query of theirs sees all of these keys.
struct PrefixNode {
  int64_t first, end, from, to;
};

// A node comes after those that hold its sequences' blocks before `from`, which are complete.
struct PrefixTree {
  std::vector<int64_t> order;  // every sequence once, those of a node side by side
  std::vector<PrefixNode> nodes;
};
PrefixTree prefix_tree(const Span* spans, int64_t sequences, const int64_t* slots, int64_t block);

// Causal attention over pages. Queries of no span are left alone. Results are the same bits with
// and without nodes.
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
  const int64_t* order;  // of a PrefixTree; null: the spans' own, and no nodes
  const PrefixNode* nodes;
  int64_t node_count;
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

// Matrices in the order in which linear reads them; `inner` must be even for bf16.
struct PackLinear {
  Type type;
  const void* weight;  // [matrices, outer, inner]
  uint32_t* out;       // [matrices, packed_words(type, outer, inner)]
  int64_t strides[3], matrices, outer, inner;
  bool gated;  // for a linear that is
  int threads;
};
void pack_linear(const PackLinear& call);
int64_t packed_words(Type type, int64_t outer, int64_t inner);

// The rows that one matrix is for: where their first one begins in x and in out, in elements.
struct Part {
  int64_t x, out, rows;
};

// What becomes of a product.
enum class Into {
  WRITE,  // out = y
  ADD,    // out += y
  GATE,   // out = silu(first half of y) * second half
};

// y = x weightᵀ + bias, part by part, with a matrix for each; with `norm` of x / rms(x) * norm.
struct Linear {
  Type type, out_type;     // out is FP32 or as the rest
  Into into;
  const void* x;
  const void* norm;        // [inner] or null
  float eps;               // of the norm
  const uint32_t* weight;  // [parts, packed_words(type, outer, inner)]
  const void* bias;        // [outer] or null
  void* out;               // [rows, outer], half as wide for GATE
  int64_t x_stride, out_stride;  // from row to row
  int64_t inner, outer;
  const Part* part;
  int64_t parts;
  int threads;
};
void linear(const Linear& call);

// out = x / rms(x) * weight, row by row.
struct RmsNorm {
  Type type;
  const void* x;  // [outer, inner, size]
  const void* weight;
  void* out;      // [outer, inner, size], may be x
  int64_t x_strides[2], out_strides[2];
  int64_t outer, inner, size;
  float eps;
  int threads;
};
void rms_norm(const RmsNorm& call);

// x += delta, row by row.
struct Add {
  Type type;
  void* x;            // [rows, size]
  const void* delta;  // [rows, size]
  int64_t x_stride, delta_stride, rows, size;
  int threads;
};
void add(const Add& call);

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

// The first place of each row's largest number; of its first NaN, where it has one.
struct Argmax {
  const float* x;  // [rows, size]
  int64_t* out;
  int64_t x_stride, rows, size;
  int threads;
};
void argmax(const Argmax& call);

// How one row's token is drawn; what is off is 0, top_p 1.
struct Draw {
  double temperature, min_p, top_p;  // temperature <= 0 is greedy
  int64_t top_k, seed, position;
};

// A token for each row of logits, and the largest distance from the best one that was left to it,
// in units of the temperature.
struct Sample {
  const float* logits;  // [rows, vocab]
  const Draw* draws;    // [rows]
  int64_t* tokens;      // [rows]
  float* limits;        // [rows]
  int64_t stride, rows, vocab;
  int threads;
};
void sample(const Sample& call);

}  // namespace antiphon
