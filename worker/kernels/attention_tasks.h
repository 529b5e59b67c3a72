// What attention's threads do, and in which order.
#pragma once

#include <vector>

#include "kernels.h"

namespace antiphon {

// A query of the step. Queries lie in the order of a PrefixTree, so a node's are side by side.
struct Query {
  int64_t token, sequence;
  int64_t seen;  // how many keys of its sequence
};

// Queries [first, last), side by side, with one KV head, over blocks [from, to) of their keys. These
// are the same slots for all of them, those of the last one.
struct Task {
  int64_t kv_head;
  int64_t first, last;
  int64_t from, to;
  bool ends;        // with these blocks the result is complete
  int64_t partial;  // where the blocks' sums go, unmerged; -1: merge them
};

// Tasks that wait for nothing but the stages before.
struct Stage {
  std::vector<Task> runs;
  std::vector<Task> finishes;  // of tasks whose blocks are runs of their own: after all runs
};

struct Schedule {
  std::vector<Query> queries;
  std::vector<Stage> stages;
  int64_t kept = 0;          // so many of the queries have sums that outlive a stage
  int64_t partial_rows = 0;  // of the largest stage
  int threads = 1;
};

Schedule schedule(const Attention& call);

// attend() in a schedule that was made for the same sequences and shapes.
void attend(const Attention& call, const Schedule& plan);

// How much memory the sums of so many rows take: whole vectors.
int64_t sum_numbers(const Attention& call, int64_t rows);

}  // namespace antiphon
