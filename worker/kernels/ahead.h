// Fetching rows that are scattered, while others are worked on.
#pragma once

#include <cstdint>

namespace antiphon {

// The keys and values of the next block, on their way into the L2 cache while this one is worked
// on: pages are scattered, so the processor cannot guess them. A line at a time, because many misses
// at once keep the products from their own operands, which are in the cache.
class Ahead {
 public:
  struct Rows {
    const char* base = nullptr;
    int64_t stride = 0, bytes = 0;
  };

  void aim(Rows keys, Rows values, const int64_t* slots, int64_t n) {
    parts_[0] = keys;
    parts_[1] = values;
    slots_ = first_ = slots;
    end_ = slots + n;
    part_ = 0;
    turn();
  }

  void stop() { slots_ = first_ = end_ = nullptr; }

  // How many of these rows were fetched.
  int64_t fetched(const char* keys, const int64_t* slots) const {
    return keys == parts_[0].base && slots == first_ ? slots_ - first_ : 0;
  }

  [[gnu::always_inline]] void operator()() {
    if (slots_ == end_) return;
    __builtin_prefetch(row_, 0, 2);
    row_ += 64;  // a cache line
    if (row_ < row_end_) return;
    if (++part_ == 2 || parts_[part_].bytes == 0) {
      part_ = 0;
      ++slots_;
    }
    turn();
  }

 private:
  void turn() {
    if (slots_ == end_) return;
    row_ = parts_[part_].base + *slots_ * parts_[part_].stride;
    row_end_ = row_ + parts_[part_].bytes;
  }

  Rows parts_[2];
  const int64_t *first_ = nullptr, *slots_ = nullptr, *end_ = nullptr;
  int part_ = 0;
  const char *row_ = nullptr, *row_end_ = nullptr;
};

}  // namespace antiphon
