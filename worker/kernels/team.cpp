#include "team.h"

#include <sched.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <system_error>
#include <thread>

namespace antiphon {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto IDLE_SPIN = std::chrono::microseconds(100);  // the gap between two kernels of a step
constexpr int PAUSES = 32;

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

// Looks at `done` again and again, and lets others run in between; false after `limit`.
template <class Done>
bool spin(Done done, Clock::duration limit) {
  const auto start = Clock::now();
  do {
    for (int i = 0; i < PAUSES; ++i) {
      if (done()) return true;
      pause();
    }
    sched_yield();
  } while (Clock::now() - start < limit);
  return done();
}

class Team {
 public:
  void run(int threads, int64_t n, void (*item)(void*, int64_t), void* context) {
    const std::unique_lock<std::mutex> mine(one_caller_, std::try_to_lock);
    if (!mine) {
      for (int64_t i = 0; i < n; ++i) item(context, i);
      return;
    }
    hire(threads - 1);
    item_ = item;
    context_ = context;
    n_ = n;
    helpers_ = threads - 1;
    next_.store(0, std::memory_order_relaxed);
    gate_.store((gate_.load(std::memory_order_relaxed) / EPOCH + 1) * EPOCH | OPEN);
    if (asleep_.load() > 0) {
      bell_.fetch_add(1);
      bell_.notify_all();
    }
    work();
    gate_.fetch_and(~OPEN);
    const auto empty = [&] { return gate_.load(std::memory_order_acquire) % OPEN == 0; };
    while (!spin(empty, IDLE_SPIN)) {
    }
  }

 private:
  // The gate: which job (EPOCH and up), whether helpers may still join it, how many have.
  static constexpr uint64_t OPEN = 1u << 15, EPOCH = 1u << 16;

  void hire(int wanted) {
    try {
      for (; hired_ < wanted; ++hired_)
        std::thread([this, index = hired_] { help(index); }).detach();
    } catch (const std::system_error&) {
      // no more threads to be had: fewer do the work
    }
  }

  void help(int index) {
    uint64_t last = 0;
    for (;;) {
      uint64_t gate = await_job(last);
      while ((gate & OPEN) && gate / EPOCH != last)
        if (gate_.compare_exchange_weak(gate, gate + 1)) {
          last = gate / EPOCH;
          if (index < helpers_) work();
          gate_.fetch_sub(1, std::memory_order_release);
        }
    }
  }

  uint64_t await_job(uint64_t last) {
    uint64_t gate = 0;
    const auto called = [&] {
      gate = gate_.load();
      return (gate & OPEN) && gate / EPOCH != last;
    };
    if (spin(called, IDLE_SPIN)) return gate;
    asleep_.fetch_add(1);
    for (uint32_t heard = bell_.load(); !called(); heard = bell_.load()) {
      // a bell after this look changes `heard`, and one before it has opened the gate
      bell_.wait(heard);
    }
    asleep_.fetch_sub(1);
    return gate;
  }

  // noexcept: an item that throws ends the process, with the words of what it threw, on whichever
  // thread it ran. On a helper it would do so in any case; thrown by the caller it would unwind the
  // frame that `context_` points into while helpers still work on it.
  void work() noexcept {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < n_;) item_(context_, i);
  }

  std::mutex one_caller_;
  int hired_ = 0;
  // The job: written while no helper has joined, published by the gate.
  void (*item_)(void*, int64_t) = nullptr;
  void* context_ = nullptr;
  int64_t n_ = 0;
  int helpers_ = 0;
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<uint64_t> gate_{0};
  alignas(64) std::atomic<int> asleep_{0};
  std::atomic<uint32_t> bell_{0};
};

}  // namespace

void run_team(int threads, int64_t n, void (*item)(void*, int64_t), void* context) {
  static Team& team = *new Team;  // never destroyed: its threads may outlive main
  team.run(threads, n, item, context);
}

}  // namespace antiphon
