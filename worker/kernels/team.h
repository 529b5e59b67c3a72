// A team of threads that is quick to gather: kernels of a few microseconds are worth sharing.
//
// libgomp's threads either spin for long, which ruins whoever else needs the processor, or sleep at
// once, which makes each of a step's few hundred kernels wait for a wake-up. Here helpers spin for
// a moment and then sleep, and nobody waits for one that comes late: the caller does what is left.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

namespace antiphon {

// Calls `item(context, i)` once for each i in [0, n) and returns after the last. Items are handed
// out one by one, in order. A second caller at the same time does all of its items itself. Items
// must not throw: where several threads share them, that ends the process.
void run_team(int threads, int64_t n, void (*item)(void*, int64_t), void* context);

// f(i) for each i in [0, n), on up to `threads` threads, the caller's among them.
template <class F>
void parallel_for(int threads, int64_t n, F&& f) {
  if (threads <= 1 || n <= 1) {
    for (int64_t i = 0; i < n; ++i) f(i);
    return;
  }
  using Function = std::remove_reference_t<F>;
  run_team(
      threads, n, [](void* context, int64_t i) { (*static_cast<Function*>(context))(i); },
      const_cast<void*>(static_cast<const void*>(std::addressof(f))));
}

}  // namespace antiphon
