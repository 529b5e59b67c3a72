// Memory for weights on huge pages: they are read from front to back at every step, and with small
// pages the processor would stop at each of their ends to look up the next.
#pragma once

#include <cstddef>
#include <memory>

namespace antiphon {

// At least `bytes`, aligned to a cache line, untouched, from a chunk that lives as long as any of
// its pieces. Throws std::bad_alloc.
std::shared_ptr<void> huge_piece(size_t bytes);

}  // namespace antiphon
