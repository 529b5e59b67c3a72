// Attention over pages, decode rows and prompt chunks alike.
//
// The query heads that share a KV head are rows of the same products. Keys are taken in blocks of a
// fixed size from the start of the sequence; a block gives each row its largest score, the sum of
// its weights and their mix of values, and blocks are merged in order. So a row's result is the same
// bits whatever else is in the step, whoever shares its keys, however the prompt was cut and however
// many threads there are.

#include "ahead.h"
#include "attention_tasks.h"
#include "kernels.h"
#include "scratch.h"
#include "team.h"
#include "tiles.h"

namespace antiphon {
namespace {

constexpr float LOG2_E = 1.4426950408889634f;
constexpr int AHEAD = 64;  // keys that are fetched before they are needed
constexpr int LINES = 2;   // between two products: with four they wait for each other

// What one block or several say about a row: exp2-domain maximum, sum of weights, mix of values.
struct Sums {
  float* top;
  float* weight;
  float* mix;  // [rows, width]
};

struct Buffers {
  Ahead ahead;
  Scratch<uint32_t> queries, keys, values;
  Scratch<int64_t> seen;
  Scratch<float> sums;
};

// Sums that more than one task sees. `kept` has all rows of a KV head side by side, `partials` those
// of a task's block.
struct Shared {
  float* kept;
  float* partials;
};

template <class T>
class Worker {
 public:
  Worker(const Attention& call, const Schedule& plan, Shared shared, Buffers& buffers)
      : call_(call),
        plan_(plan),
        shared_(shared),
        group_(call.heads / call.kv_heads),
        words_(call.dim / T::PER_WORD),
        width_(round_up(call.v_dim, LANES)),
        block_(block_keys(call.dim)),
        buffers_(buffers) {}

  // `next`: what this thread is likely to do after it, or null.
  void run(const Task& task, const Task* next) {
    const int64_t rows = rows_of(task);
    // tiles of about the same size: one of a single row takes as long as one of three
    tile_ = quotient(rows, quotient(rows, TILE_ROWS));
    in_place_ = rows <= 2 * TILE_ROWS && call_.v_dim % TILE_KEYS == 0;
    pack_queries(task, rows);
    float* memory = buffers_.sums.reserve(numbers(rows) + numbers(TILE_ROWS));
    const Sums tile = sums(memory, TILE_ROWS);
    const bool merged = task.partial < 0;
    const Sums total = merged ? running(task, memory + numbers(TILE_ROWS)) : Sums{};
    for (int64_t block = task.from; block < task.to; ++block) {
      pack_block(task, block);
      if (block + 1 < task.to)
        aim(task, block + 1);
      else if (next)
        aim(*next, next->from);
      else
        buffers_.ahead.stop();  // in the next call these slots may be gone
      const bool fresh = block == 0 || !merged;
      const Sums into = merged ? total : partial(task, block - task.from);
      for (int64_t row = 0; row < rows; row += tile_) {
        const int here = std::min(tile_, rows - row);
        const Sums at = from_row(into, row);
        attend_tile(task, block, row, here, fresh ? at : tile);
        if (!fresh) merge(at, tile, here);
      }
    }
    if (merged && task.ends) write(task, total, rows);
  }

  // The second half of a task whose blocks were runs of their own: merge them in order.
  void finish(const Task& task) {
    const int64_t rows = rows_of(task);
    const Sums total = running(task, buffers_.sums.reserve(numbers(rows)));
    for (int64_t block = task.from; block < task.to; ++block) {
      const Sums next = partial(task, block - task.from);
      block == 0 ? copy(total, next, rows) : merge(total, next, rows);
    }
    if (task.ends) write(task, total, rows);
  }

 private:
  int64_t rows_of(const Task& task) const { return (task.last - task.first) * group_; }
  int64_t numbers(int64_t rows) const { return sum_numbers(call_, rows); }

  Sums sums(float* memory, int64_t rows) const {
    float* tops = memory + rows * width_;
    return {tops, tops + rows, memory};
  }
  Sums from_row(Sums all, int64_t row) const {
    return {all.top + row, all.weight + row, all.mix + row * width_};
  }

  // The running sums of the task's rows; `own` is used where no other task needs them.
  Sums running(const Task& task, float* own) const {
    if (task.from == 0 && task.ends) return sums(own, rows_of(task));
    const int64_t all = plan_.kept * group_;
    return from_row(sums(shared_.kept + task.kv_head * numbers(all), all), task.first * group_);
  }

  Sums partial(const Task& task, int64_t index) const {
    const int64_t rows = rows_of(task);
    return sums(shared_.partials + numbers(task.partial + index * rows), rows);
  }

  const uint32_t* words(const void* base, int64_t offset) const {
    using Element = typename T::Element;
    return reinterpret_cast<const uint32_t*>(static_cast<const Element*>(base) + offset);
  }

  // Rows are token by token, within a token head by head; packed [words][rows of a tile].
  void pack_queries(const Task& task, int64_t rows) {
    uint32_t* to = buffers_.queries.reserve(rows * words_ + LANES);
    seen_ = buffers_.seen.reserve(rows);
    const uint32_t* from[TILE_ROWS];
    int64_t row = 0;
    for (int64_t query = task.first; query < task.last; ++query)
      for (int64_t g = 0; g < group_; ++g) {
        const int64_t head = task.kv_head * group_ + g;
        seen_[row] = plan_.queries[query].seen;
        from[row % tile_] = words(
            call_.q, plan_.queries[query].token * call_.q_strides[0] + head * call_.q_strides[1]);
        ++row;
        if (const int here = row % tile_ == 0 ? tile_ : row == rows ? row % tile_ : 0) {
          pack_rows(from, here, words_, to);
          to += here * words_;
        }
      }
  }

  const int64_t* slots_of(const Task& task, int64_t block) const {
    const Query& last = plan_.queries[task.last - 1];
    return call_.slots + call_.spans[last.sequence].first_key + block * block_;
  }

  int64_t keys_of(const Task& task, int64_t block) const {
    return std::min<int64_t>(block_, plan_.queries[task.last - 1].seen - block * block_);
  }

  static Ahead::Rows rows(const void* base, const int64_t* strides, int64_t head, int64_t n) {
    constexpr int64_t SIZE = sizeof(typename T::Element);
    return {static_cast<const char*>(base) + head * strides[1] * SIZE, strides[0] * SIZE, n * SIZE};
  }
  Ahead::Rows key_rows(const Task& task) const {
    return rows(call_.k, call_.k_strides, task.kv_head, call_.dim);
  }

  void aim(const Task& task, int64_t block) {
    Ahead::Rows values = rows(call_.v, call_.v_strides, task.kv_head, call_.v_dim);
    const Ahead::Rows keys = key_rows(task);
    if (values.base == keys.base) values.bytes = 0;  // MLA: they are a part of the keys
    buffers_.ahead.aim(keys, values, slots_of(task, block), keys_of(task, block));
  }

  const uint32_t* value(const Task& task, int64_t slot) const {
    return words(call_.v, slot * call_.v_strides[0] + task.kv_head * call_.v_strides[1]);
  }

  // Keys always; values where so many tiles of rows need them that it pays.
  void pack_block(const Task& task, int64_t block) {
    const int64_t* slots = slots_of(task, block);
    const int64_t n = keys_of(task, block);
    const auto key = [&](int64_t i) {
      return words(call_.k, slots[i] * call_.k_strides[0] + task.kv_head * call_.k_strides[1]);
    };
    keys_ = buffers_.keys.reserve(block_ * words_);
    const int64_t here = buffers_.ahead.fetched(key_rows(task).base, slots);
    for (int64_t r = std::max<int64_t>(LANES, here); r < std::min<int64_t>(AHEAD, n); ++r)
      fetch(key(r), call_.dim);
    for (int64_t i = 0; i < n; i += LANES) {
      const int64_t end = std::min(i + LANES, n);
      for (int64_t r = std::max(i, here); r < end; ++r) fetch(value(task, slots[r]), call_.v_dim);
      for (int64_t r = std::max(i + AHEAD, here); r < std::min(end + AHEAD, n); ++r)
        fetch(key(r), call_.dim);
      uint32_t* tile = keys_ + i / TILE_KEYS * TILE_KEYS * words_ + i % TILE_KEYS;
      pack_keys([&](int r) { return key(i + r); }, end - i, words_, tile);
    }
    values_ = in_place_ ? nullptr : buffers_.values.reserve(block_ * width_);
    if (values_)
      pack_values<T>([&](int64_t i) { return value(task, slots[i]); }, n, call_.v_dim, values_);
  }

  static void fetch(const uint32_t* row, int64_t numbers) {
    const char* from = reinterpret_cast<const char*>(row);
    for (int64_t at = 0; at < numbers * int64_t(sizeof(typename T::Element)); at += 64)
      __builtin_prefetch(from + at, 0, 2);  // to the L2 cache
  }

  void attend_tile(const Task& task, int64_t block, int64_t row, int rows, Sums out) {
    int64_t visible[TILE_ROWS];
    for (int r = 0; r < rows; ++r)
      visible[r] = std::clamp<int64_t>(seen_[row + r] - block * block_, 0, block_);
    // rows are in the order of their tokens; those of several sequences see the whole block
    const int64_t most = visible[rows - 1];
    const uint32_t* q = buffers_.queries.reserve(0) + row * words_;
    const int64_t* slots = slots_of(task, block);
    const int n = keys_of(task, block);
    const auto more = [this] {
      for (int i = 0; i < LINES; ++i) buffers_.ahead();
    };
    with_rows(rows, [&](auto count) {
      constexpr int R = decltype(count)::value;
      for (int64_t key = 0; key < most; key += TILE_KEYS)
        dot_tile<T, R>(q, keys_ + key * words_, words_, scores_ + key, BLOCK_KEYS, more);
      for (int r = 0; r < R; ++r)
        soften(scores_ + r * BLOCK_KEYS, visible[r], most, out.top[r], out.weight[r]);
      const int pairs = (most + T::PER_WORD - 1) / T::PER_WORD;
      const auto* weights = reinterpret_cast<const uint32_t*>(scores_);
      if (values_)
        return mix<T, R>(weights, BLOCK_KEYS, values_, width_, pairs, out.mix, width_, more);
      for (int64_t c = 0; c < width_; c += TILE_KEYS) {
        const auto row = [&](int i) { return value(task, slots[i]) + c / T::PER_WORD; };
        mix_rows<T, R>(weights, BLOCK_KEYS, row, n, pairs, out.mix + c, width_, more);
      }
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

  void merge(Sums into, Sums from, int64_t rows) const {
    for (int64_t row = 0; row < rows; row += LANES)
      merge_some(from_row(into, row), from_row(from, row), std::min<int64_t>(LANES, rows - row));
  }

  // Up to LANES rows, whose factors are computed side by side.
  void merge_some(Sums into, Sums from, int rows) const {
    float keep[LANES] = {}, add[LANES] = {};
    std::memcpy(keep, into.top, rows * sizeof(float));
    std::memcpy(add, from.top, rows * sizeof(float));
    const Floats old = load(keep), fresh = load(add);
    const Ints nothing = fresh == splat(-INF);  // the row sees nothing of this block
    const Floats whole = nothing ? old : larger(old, fresh);
    store(keep, nothing ? splat(1.f) : exp2(old - whole));
    store(add, nothing ? Floats{} : exp2(fresh - whole));
    for (int r = 0; r < rows; ++r) {
      if (nothing[r]) continue;
      into.top[r] = whole[r];
      into.weight[r] = into.weight[r] * keep[r] + from.weight[r] * add[r];
      float* a = into.mix + r * width_;
      const float* b = from.mix + r * width_;
      for (int64_t c = 0; c < width_; c += LANES)
        store(a + c, load(a + c) * splat(keep[r]) + load(b + c) * splat(add[r]));
    }
  }

  void copy(Sums into, Sums from, int64_t rows) const {
    std::memcpy(into.top, from.top, rows * sizeof(float));
    std::memcpy(into.weight, from.weight, rows * sizeof(float));
    std::memcpy(into.mix, from.mix, rows * width_ * sizeof(float));
  }

  void write(const Task& task, Sums total, int64_t rows) const {
    using Element = typename T::Element;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t token = plan_.queries[task.first + row / group_].token;
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
  const Schedule& plan_;
  const Shared shared_;
  const int64_t group_, words_, width_, block_;
  Buffers& buffers_;
  int64_t tile_ = 0;         // rows of a tile; the last one may have fewer
  bool in_place_ = false;    // whether values are read where they lie
  int64_t* seen_ = nullptr;  // by row, as in Query
  uint32_t* keys_ = nullptr;
  uint32_t* values_ = nullptr;
  alignas(64) float scores_[TILE_ROWS * BLOCK_KEYS];
};

template <class T>
void attend_all(const Attention& call, const Schedule& plan) {
  const int64_t kept_rows = plan.kept * (call.heads / call.kv_heads);
  // the caller's, for all threads of this call
  static thread_local Scratch<float> kept, partials;
  const Shared shared = {
      kept.reserve(call.kv_heads * sum_numbers(call, kept_rows)),
      partials.reserve(sum_numbers(call, plan.partial_rows)),
  };
  const auto worker = [&] {
    static thread_local Buffers buffers;
    return Worker<T>(call, plan, shared, buffers);
  };
  for (const Stage& stage : plan.stages) {
    parallel_for(plan.threads, stage.runs.size(), [&](int64_t i) {
      const size_t after = i + plan.threads;
      worker().run(stage.runs[i], after < stage.runs.size() ? &stage.runs[after] : nullptr);
    });
    parallel_for(plan.threads, stage.finishes.size(),
                 [&](int64_t i) { worker().finish(stage.finishes[i]); });
  }
}

}  // namespace

void attend(const Attention& call) { attend(call, schedule(call)); }

void attend(const Attention& call, const Schedule& plan) {
  if (call.type == Type::BF16)
    attend_all<Bf16>(call, plan);
  else
    attend_all<Fp32>(call, plan);
}

void scatter(const Scatter& call) {
  for (int64_t i = 0; i < call.rows; ++i)
    std::memcpy(call.to + call.slots[i] * call.to_stride, call.from + i * call.from_stride,
                call.bytes);
}

}  // namespace antiphon
