// Cutting a step's attention into tasks.
//
// Queries whose sequences share blocks of keys take them together, a stage for each level of the
// tree; the running sums of a stage's queries wait for the next. What is left of a sequence's keys
// is its own.

#include "attention_tasks.h"

#include <algorithm>

#include "tiles.h"

namespace antiphon {
namespace {

constexpr int64_t SERIAL_NUMBERS = 512 * 1024;
constexpr int64_t TASK_NUMBERS = 96 * 1024;  // sums that one task keeps: they stay in the L2 cache
constexpr int64_t WAITING_NUMBERS = 32 * 1024 * 1024;  // sums that may wait for other tasks
constexpr int64_t LEAST_QUERIES = 16;  // of a task: fewer are not worth packing the keys again

class Cutter {
 public:
  explicit Cutter(const Attention& call)
      : call_(call),
        group_(call.heads / call.kv_heads),
        block_(block_keys(call.dim)),
        begins_(call.sequences + 1),
        blocks_(call.sequences),
        stages_(call.sequences) {
    for (int64_t place = 0; place < call.sequences; ++place) {
      begins_[place] = plan_.queries.size();
      const int64_t sequence = sequence_at(place);
      const Span& span = call.spans[sequence];
      for (int64_t token = span.first_query; token < span.end_query; ++token)
        plan_.queries.push_back(
            {token, sequence, span.end_key - span.first_key - (span.end_query - 1 - token)});
    }
    const int64_t queries = begins_.back() = plan_.queries.size();
    // so many rows are prompts, which are worth packing a block for alone
    nodes_ = fits(queries * call.heads) ? call.node_count : 0;
    plan_.threads = useful_threads();
    wanted_ = 4 * plan_.threads;
    const int64_t share = std::max(LEAST_QUERIES, queries * call.kv_heads / wanted_);
    const int64_t sums = group_ * round_up(call.v_dim, LANES);  // of a query
    step_ = std::min(share, std::max<int64_t>(1, TASK_NUMBERS / sums));
  }

  Schedule cut() {
    plan_.stages.resize(1);
    for (int64_t i = 0; i < nodes_; ++i) add_node(call_.nodes[i]);
    for (int64_t place = 0; place < call_.sequences; ++place) add_rest(place);
    if (plan_.threads > 1)
      for (Stage& stage : plan_.stages) spread(stage);
    return std::move(plan_);
  }

 private:
  int64_t sequence_at(int64_t place) const { return call_.order ? call_.order[place] : place; }

  bool fits(int64_t rows) const { return sum_numbers(call_, rows) <= WAITING_NUMBERS; }

  // More threads pay only where the work takes longer than waking them.
  int useful_threads() const {
    int64_t keys_read = 0, products = 0;
    for (int64_t b = 0; b < call_.sequences; ++b) {
      const Span& span = call_.spans[b];
      const int64_t keys = span.end_key - span.first_key;
      keys_read += keys;
      products += keys * (span.end_query - span.first_query);
    }
    for (int64_t i = 0; i < nodes_; ++i) {
      const PrefixNode& node = call_.nodes[i];
      keys_read -= (node.end - node.first - 1) * (node.to - node.from) * block_;
    }
    const int64_t numbers =
        (keys_read * call_.kv_heads + products * call_.heads / 8) * (call_.dim + call_.v_dim);
    return numbers < SERIAL_NUMBERS ? 1 : call_.threads;
  }

  void add_node(const PrefixNode& node) {
    size_t stage = 0;
    for (int64_t place = node.first; place < node.end; ++place)
      stage = std::max(stage, stages_[place]);
    for (int64_t place = node.first; place < node.end; ++place) {
      stages_[place] = stage + 1;
      blocks_[place] = node.to;
    }
    const int64_t first = begins_[node.first], last = begins_[node.end];
    plan_.kept = std::max(plan_.kept, last);
    add(stage, first, last, node.from, [&](int64_t) { return node.to; }, false);
  }

  // The blocks of the sequence that are in no node.
  void add_rest(int64_t place) {
    const auto end = [&](int64_t last) {
      return (plan_.queries[last - 1].seen + block_ - 1) / block_;
    };
    add(stages_[place], begins_[place], begins_[place + 1], blocks_[place], end, true);
  }

  // Cut by query, in even pieces, and by KV head; the queries that see most come first.
  template <class End>
  void add(size_t stage, int64_t first, int64_t last, int64_t from, End end, bool ends) {
    if (plan_.stages.size() <= stage) plan_.stages.resize(stage + 1);
    std::vector<Task>& runs = plan_.stages[stage].runs;
    for (int64_t left = (last - first + step_ - 1) / step_; left > 0; --left) {
      const int64_t cut = last - (last - first + left - 1) / left;
      for (int64_t head = 0; head < call_.kv_heads; ++head)
        runs.push_back({head, cut, last, from, end(last), ends, -1});
      last = cut;
    }
  }

  // Where a stage has too few tasks for the threads, they are cut by blocks of keys, too.
  void spread(Stage& stage) {
    int64_t rows = 0;
    for (const Task& task : stage.runs)
      rows += (task.last - task.first) * group_ * (task.to - task.from);
    if (int64_t(stage.runs.size()) >= wanted_ || !fits(rows)) return;
    std::vector<Task> parts;
    rows = 0;
    for (Task task : stage.runs) {
      if (task.to - task.from <= 1) {
        parts.push_back(task);
        continue;
      }
      task.partial = rows;
      stage.finishes.push_back(task);
      for (int64_t at = task.from; at < task.to; ++at) {
        parts.push_back({task.kv_head, task.first, task.last, at, at + 1, task.ends, rows});
        rows += (task.last - task.first) * group_;
      }
    }
    stage.runs = std::move(parts);
    plan_.partial_rows = std::max(plan_.partial_rows, rows);
  }

  const Attention& call_;
  const int64_t group_, block_;
  int64_t nodes_ = 0, wanted_ = 0, step_ = 0;
  std::vector<int64_t> begins_;  // place -> its first query
  std::vector<int64_t> blocks_;  // place -> how many blocks are in nodes
  std::vector<size_t> stages_;   // place -> the first stage after its nodes
  Schedule plan_;
};

}  // namespace

Schedule schedule(const Attention& call) { return Cutter(call).cut(); }

int64_t sum_numbers(const Attention& call, int64_t rows) {
  return rows * (round_up(call.v_dim, LANES) + LANES);
}

}  // namespace antiphon
