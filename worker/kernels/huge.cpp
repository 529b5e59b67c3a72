#include "huge.h"

#include <sys/mman.h>

#include <algorithm>
#include <mutex>
#include <new>

namespace antiphon {
namespace {

constexpr size_t PAGE = size_t(2) << 20;
constexpr size_t CHUNK = 16 * PAGE;
constexpr size_t LINE = 64;

size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

class Chunk {
 public:
  explicit Chunk(size_t size) : size_(size) {
    base_ = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    madvise(base_, size, MADV_HUGEPAGE);  // a wish: small pages serve as well
#endif
  }
  ~Chunk() { munmap(base_, size_); }
  Chunk(const Chunk&) = delete;
  Chunk& operator=(const Chunk&) = delete;

  // Null where it is full.
  void* take(size_t bytes) {
    if (size_ - used_ < bytes) return nullptr;
    void* piece = static_cast<char*>(base_) + used_;
    used_ += bytes;
    return piece;
  }

 private:
  void* base_;
  size_t size_, used_ = 0;
};

}  // namespace

std::shared_ptr<void> huge_piece(size_t bytes) {
  static std::mutex mutex;
  static std::weak_ptr<Chunk> open;  // the one with room left; its pieces own it
  const std::lock_guard<std::mutex> lock(mutex);
  bytes = round_up(std::max<size_t>(bytes, 1), LINE);
  std::shared_ptr<Chunk> chunk = open.lock();
  void* piece = chunk ? chunk->take(bytes) : nullptr;
  if (!piece) {
    chunk = std::make_shared<Chunk>(std::max(CHUNK, round_up(bytes, PAGE)));
    piece = chunk->take(bytes);
    open = chunk;
  }
  return {std::move(chunk), piece};
}

}  // namespace antiphon
