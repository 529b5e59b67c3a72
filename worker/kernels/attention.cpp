// Attention over pages, decode rows and prompt chunks alike.
//
// The query heads that share a KV head are rows of the same products. Keys are taken in blocks of a
// fixed size from the start of the sequence; a block gives each row its largest score, the sum of
// its weights and their mix of values, and blocks are merged in order. So a row's result is the same
// bits whatever else is in the step, however the prompt was cut and however many threads there are.

#include <vector>

#include "kernels.h"
#include "scratch.h"
#include "tiles.h"

namespace antiphon {
namespace {

constexpr int BLOCK_KEYS = 256;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr int AHEAD = 64;  // keys that are fetched before they are needed
constexpr int64_t SERIAL_NUMBERS = 512 * 1024;
constexpr int64_t TASK_NUMBERS = 96 * 1024;  // sums that one task keeps: they stay in the L2 cache

// A wide head's block is smaller, so that its tiles stay in the L2 cache.
int block_keys(int64_t dim) { return dim <= 256 ? BLOCK_KEYS : BLOCK_KEYS / 2; }

// Queries [first, last) of one sequence with one KV head, over blocks [from, to) of its keys.
struct Task {
  int64_t sequence, kv_head;
  int64_t first, last;
  int64_t from, to;
  int64_t partial;  // where the blocks' sums go, unmerged; -1: merge them and write the result
};

// What a block says about a row: exp2-domain maximum, sum of weights, mix of values.
struct Sums {
  float* top;
  float* weight;
  float* mix;  // [rows, width]
};

struct Buffers {
  Scratch<uint32_t> queries, keys, values;
  Scratch<float> sums;
};

template <class T>
class Worker {
 public:
  Worker(const Attention& call, Buffers& buffers)
      : call_(call),
        group_(call.heads / call.kv_heads),
        words_(call.dim / T::PER_WORD),
        width_(round_up(call.v_dim, LANES)),
        block_(block_keys(call.dim)),
        buffers_(buffers) {}

  int64_t row_numbers() const { return width_ + 2; }

  Sums sums(float* memory, int64_t rows) const {
    return {memory, memory + rows, memory + 2 * rows};
  }

  // `partials` keeps `rows` rows of sums for each block of a split task.
  void run(const Task& task, float* partials) {
    const int64_t rows = (task.last - task.first) * group_;
    pack_queries(task, rows);
    float* memory = buffers_.sums.reserve((rows + TILE_ROWS) * row_numbers());
    const Sums total = sums(memory, rows);
    const Sums tile = sums(memory + rows * row_numbers(), TILE_ROWS);
    for (int64_t block = task.from; block < task.to; ++block) {
      pack_block(task, block);
      const bool fresh = block == 0 || task.partial >= 0;
      const Sums into =
          task.partial < 0
              ? total
              : sums(partials + task.partial + (block - task.from) * rows * row_numbers(), rows);
      for (int64_t row = 0; row < rows; row += TILE_ROWS) {
        const int here = std::min<int64_t>(TILE_ROWS, rows - row);
        const Sums at = {into.top + row, into.weight + row, into.mix + row * width_};
        attend_tile(task, block, row, here, fresh ? at : tile);
        if (!fresh)
          for (int r = 0; r < here; ++r) merge(at, tile, r);
      }
    }
    if (task.partial < 0) write(task, total, rows);
  }

  // The second half of a split task: merge its blocks in order.
  void finish(const Task& task, float* partials) {
    const int64_t rows = (task.last - task.first) * group_;
    const Sums total = sums(partials + task.partial, rows);
    for (int64_t block = 1; block < task.to; ++block) {
      const Sums next = sums(partials + task.partial + block * rows * row_numbers(), rows);
      for (int64_t row = 0; row < rows; ++row) merge(total, next, row);
    }
    write(task, total, rows);
  }

 private:
  const uint32_t* words(const void* base, int64_t offset) const {
    using Element = typename T::Element;
    return reinterpret_cast<const uint32_t*>(static_cast<const Element*>(base) + offset);
  }

  // Rows are token by token, within a token head by head; packed [words][rows of a tile].
  void pack_queries(const Task& task, int64_t rows) {
    uint32_t* to = buffers_.queries.reserve(rows * words_);
    for (int64_t row = 0; row < rows; row += TILE_ROWS) {
      const int here = std::min<int64_t>(TILE_ROWS, rows - row);
      for (int r = 0; r < here; ++r) {
        const int64_t token = task.first + (row + r) / group_;
        const int64_t head = task.kv_head * group_ + (row + r) % group_;
        const uint32_t* from =
            words(call_.q, token * call_.q_strides[0] + head * call_.q_strides[1]);
        for (int64_t w = 0; w < words_; ++w) std::memcpy(to + w * here + r, from + w, 4);
      }
      to += here * words_;
    }
  }

  // How many keys a query of the task's sequence sees.
  int64_t seen(const Task& task, int64_t token) const {
    const Span& span = call_.spans[task.sequence];
    return span.end_key - span.first_key - (span.end_query - 1 - token);
  }

  void pack_block(const Task& task, int64_t block) {
    const int64_t* slots = call_.slots + call_.spans[task.sequence].first_key + block * block_;
    const int64_t keys = seen(task, task.last - 1) - block * block_;  // of this block and after
    const int64_t n = std::min<int64_t>(block_, keys);
    const auto key = [&](int64_t i) {
      return words(call_.k, slots[i] * call_.k_strides[0] + task.kv_head * call_.k_strides[1]);
    };
    const auto value = [&](int64_t i) {
      return words(call_.v, slots[i] * call_.v_strides[0] + task.kv_head * call_.v_strides[1]);
    };
    keys_ = buffers_.keys.reserve(block_ * words_);
    values_ = buffers_.values.reserve(block_ * width_);
    for (int64_t i = 0; i < n; i += LANES) {
      const int64_t end = std::min(i + LANES, n);
      // pages are scattered, so the processor cannot guess the next ones
      for (int64_t r = i; r < end; ++r) fetch(value(r), call_.v_dim);
      for (int64_t r = i + AHEAD; r < std::min(end + AHEAD, keys); ++r) fetch(key(r), call_.dim);
      uint32_t* tile = keys_ + i / TILE_KEYS * TILE_KEYS * words_ + i % TILE_KEYS;
      pack_keys([&](int r) { return key(i + r); }, end - i, words_, tile);
    }
    pack_values<T>(value, n, call_.v_dim, values_);
  }

  static void fetch(const uint32_t* row, int64_t numbers) {
    const char* from = reinterpret_cast<const char*>(row);
    for (int64_t at = 0; at < numbers * int64_t(sizeof(typename T::Element)); at += 64)
      __builtin_prefetch(from + at, 0, 2);  // to the L2 cache
  }

  void attend_tile(const Task& task, int64_t block, int64_t row, int rows, Sums out) {
    int64_t visible[TILE_ROWS];
    for (int r = 0; r < rows; ++r) {
      const int64_t keys = seen(task, task.first + (row + r) / group_) - block * block_;
      visible[r] = std::clamp<int64_t>(keys, 0, block_);
    }
    const int64_t most = visible[rows - 1];  // rows are in the order of their tokens
    const uint32_t* q = buffers_.queries.reserve(0) + row * words_;
    with_rows(rows, [&](auto count) {
      constexpr int R = decltype(count)::value;
      for (int64_t key = 0; key < most; key += TILE_KEYS)
        dot_tile<T, R>(q, keys_ + key * words_, words_, scores_ + key, BLOCK_KEYS);
      for (int r = 0; r < R; ++r)
        soften(scores_ + r * BLOCK_KEYS, visible[r], most, out.top[r], out.weight[r]);
      const int pairs = (most + T::PER_WORD - 1) / T::PER_WORD;
      mix<T, R>(reinterpret_cast<const uint32_t*>(scores_), BLOCK_KEYS, values_, width_, pairs,
                out.mix, width_);
    });
  }

  // Scores become weights exp(score - top), in the values' type and in the same place. Only the
  // first `visible` count; the others get weight 0, up to the vector of `most`.
  void soften(float* scores, int64_t visible, int64_t most, float& top, float& weight) const {
    const int64_t end = round_up(most, LANES);
    for (int64_t i = visible; i < end; ++i) scores[i] = -INF;
    Floats largest = splat(-INF);
    for (int64_t i = 0; i < end; i += LANES) largest = larger(largest, load(scores + i));
    const float factor = call_.scale * LOG2_E;
    top = visible > 0 ? max_lanes(largest) * factor : -INF;
    const Floats shift = splat(visible > 0 ? -top : 0.f);
    Floats sum = {};
    auto* weights = reinterpret_cast<typename T::Element*>(scores);
    for (int64_t i = 0; i < end; i += LANES) {
      const Floats x = exp2(load(scores + i) * splat(factor) + shift);
      sum += x;
      T::narrow(weights + i, x);
    }
    weight = sum_lanes(sum);
  }

  void merge(Sums into, Sums from, int64_t row) const {
    const float top = from.top[row];
    if (top == -INF) return;  // the row sees nothing of this block
    const float whole = top > into.top[row] ? top : into.top[row];
    const float keep = exp2(splat(into.top[row] - whole))[0];
    const float add = exp2(splat(top - whole))[0];
    into.top[row] = whole;
    into.weight[row] = into.weight[row] * keep + from.weight[row] * add;
    float* a = into.mix + row * width_;
    const float* b = from.mix + row * width_;
    for (int64_t c = 0; c < width_; c += LANES)
      store(a + c, load(a + c) * splat(keep) + load(b + c) * splat(add));
  }

  void write(const Task& task, Sums total, int64_t rows) const {
    using Element = typename T::Element;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t token = task.first + row / group_;
      const int64_t head = task.kv_head * group_ + row % group_;
      Element* to = static_cast<Element*>(call_.out) + (token * call_.heads + head) * call_.v_dim;
      const float* from = total.mix + row * width_;
      const float part = 1.f / total.weight[row];
      int64_t c = 0;
      for (; c + LANES <= call_.v_dim; c += LANES) T::narrow(to + c, load(from + c) * splat(part));
      for (; c < call_.v_dim; ++c) to[c] = T::narrow_one(from[c] * part);
    }
  }

  const Attention& call_;
  const int64_t group_, words_, width_, block_;
  Buffers& buffers_;
  uint32_t* keys_ = nullptr;
  uint32_t* values_ = nullptr;
  alignas(64) float scores_[TILE_ROWS * BLOCK_KEYS];
};

struct Tasks {
  std::vector<Task> runs;      // independent of each other
  std::vector<Task> finishes;  // after all runs
  int64_t partials = 0;        // numbers
  int threads = 1;
};

// More threads pay only where the work takes longer than waking them.
int useful_threads(const Attention& call) {
  int64_t read = 0, multiplied = 0;  // numbers
  for (int64_t b = 0; b < call.sequences; ++b) {
    const Span& span = call.spans[b];
    const int64_t numbers = (span.end_key - span.first_key) * (call.dim + call.v_dim);
    read += numbers * call.kv_heads;
    multiplied += numbers * call.heads * (span.end_query - span.first_query);
  }
  return read + multiplied / 8 < SERIAL_NUMBERS ? 1 : call.threads;
}

// Sequences are cut by query and by KV head, as many pieces as keep the threads busy.
std::vector<Task> pieces(const Attention& call, int64_t wanted) {
  const int64_t group = call.heads / call.kv_heads;
  const int64_t block = block_keys(call.dim);
  int64_t queries = 0;
  for (int64_t b = 0; b < call.sequences; ++b)
    queries += call.spans[b].end_query - call.spans[b].first_query;
  const int64_t share = std::max<int64_t>(16, queries * call.kv_heads / wanted);
  const int64_t fits = std::max<int64_t>(1, TASK_NUMBERS / (group * round_up(call.v_dim, LANES)));
  const int64_t step = std::min(share, fits);
  std::vector<Task> tasks;
  for (int64_t b = 0; b < call.sequences; ++b) {
    const Span& span = call.spans[b];
    for (int64_t last = span.end_query; last > span.first_query; last -= step) {  // longest first
      const int64_t keys = span.end_key - span.first_key - (span.end_query - last);
      const int64_t first = std::max(span.first_query, last - step);
      for (int64_t head = 0; head < call.kv_heads; ++head)
        tasks.push_back({b, head, first, last, 0, (keys + block - 1) / block, -1});
    }
  }
  return tasks;
}

// Where there are too few pieces (a few decode rows), they are cut by blocks of keys, too.
Tasks cut(const Attention& call) {
  const int64_t row = (round_up(call.v_dim, LANES) + 2) * (call.heads / call.kv_heads);
  Tasks tasks;
  tasks.threads = useful_threads(call);
  const int64_t wanted = 4 * tasks.threads;
  tasks.runs = pieces(call, wanted);
  if (tasks.threads == 1 || int64_t(tasks.runs.size()) >= wanted) return tasks;
  std::vector<Task> parts;
  for (Task task : tasks.runs) {
    if (task.to == 1) {
      parts.push_back(task);
      continue;
    }
    task.partial = tasks.partials;
    tasks.finishes.push_back(task);
    for (int64_t at = 0; at < task.to; ++at) {
      parts.push_back(
          {task.sequence, task.kv_head, task.first, task.last, at, at + 1, tasks.partials});
      tasks.partials += (task.last - task.first) * row;
    }
  }
  tasks.runs = std::move(parts);
  return tasks;
}

template <class T>
void attend_all(const Attention& call) {
  static thread_local Scratch<float> shared;  // the caller's, for all threads of this call
  const Tasks tasks = cut(call);
  float* partials = shared.reserve(std::max<int64_t>(tasks.partials, 1));
#pragma omp parallel num_threads(tasks.threads) if (tasks.threads > 1)
  {
    static thread_local Buffers buffers;
    Worker<T> worker(call, buffers);
#pragma omp for schedule(dynamic, 1)
    for (size_t i = 0; i < tasks.runs.size(); ++i) {
      worker.run(tasks.runs[i], partials);
    }
#pragma omp for schedule(dynamic, 1)
    for (size_t i = 0; i < tasks.finishes.size(); ++i)
      worker.finish(tasks.finishes[i], partials);
  }
}

}  // namespace

void attend(const Attention& call) {
  if (call.type == Type::BF16)
    attend_all<Bf16>(call);
  else
    attend_all<Fp32>(call);
}

void scatter(const Scatter& call) {
  for (int64_t i = 0; i < call.rows; ++i)
    std::memcpy(call.to + call.slots[i] * call.to_stride, call.from + i * call.from_stride,
                call.bytes);
}

}  // namespace antiphon
