// Memory that a thread keeps from call to call: fresh pages would cost more than the kernels.
#pragma once

#include <cstdlib>
#include <memory>
#include <new>

namespace antiphon {

template <class X>
class Scratch {
 public:
  // At least n elements, aligned to a cache line; what they held is lost when it grows.
  X* reserve(int64_t n) {
    if (n > size_) {
      memory_.reset(static_cast<X*>(std::aligned_alloc(64, (n * sizeof(X) + 63) / 64 * 64)));
      if (!memory_) throw std::bad_alloc();
      size_ = n;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(X* p) const { std::free(p); }
  };
  std::unique_ptr<X, Free> memory_;
  int64_t size_ = 0;
};

}  // namespace antiphon
