// Which sequences of a step share which blocks of keys: the radix tree, as far as it can be seen
// in their slots.

#include <algorithm>
#include <cstring>
#include <numeric>

#include "kernels.h"

namespace antiphon {
namespace {

class Builder {
 public:
  Builder(const Span* spans, const int64_t* slots, int64_t block, PrefixTree& tree)
      : spans_(spans), slots_(slots), block_(block), tree_(tree) {}

  // Sorts sequences that agree on all blocks before `from` into the tree: first those who share
  // block `from` with another one, group by group, then the others.
  void place(std::vector<int64_t> sequences, int64_t from) {
    std::vector<int64_t> alone;
    std::vector<std::vector<int64_t>> groups;
    for (std::vector<int64_t>& group : equal_blocks(sequences, from, alone)) {
      if (group.size() > 1)
        groups.push_back(std::move(group));
      else
        alone.push_back(group[0]);
    }
    for (const std::vector<int64_t>& group : groups) {
      int64_t to = from + 1;
      while (all_share(group, to)) ++to;
      const size_t node = tree_.nodes.size();
      const int64_t first = tree_.order.size();
      tree_.nodes.push_back({first, first + int64_t(group.size()), from, to});
      place(group, to);
    }
    std::sort(alone.begin(), alone.end());
    tree_.order.insert(tree_.order.end(), alone.begin(), alone.end());
  }

 private:
  const int64_t* slots_of(int64_t sequence, int64_t block) const {
    return slots_ + spans_[sequence].first_key + block * block_;
  }

  // Whether all queries of the sequence see the whole block.
  bool covers(int64_t sequence, int64_t block) const {
    const Span& span = spans_[sequence];
    const int64_t own = span.end_query - span.first_query;
    return own > 0 && (block + 1) * block_ <= span.end_key - span.first_key - (own - 1);
  }

  bool same(int64_t a, int64_t b, int64_t block) const {
    return std::memcmp(slots_of(a, block), slots_of(b, block), block_ * sizeof(int64_t)) == 0;
  }

  bool all_share(const std::vector<int64_t>& group, int64_t block) const {
    for (int64_t sequence : group)
      if (!covers(sequence, block) || !same(group[0], sequence, block)) return false;
    return true;
  }

  // Sequences that do not cover the block go to `alone`.
  std::vector<std::vector<int64_t>> equal_blocks(const std::vector<int64_t>& sequences,
                                                 int64_t block,
                                                 std::vector<int64_t>& alone) const {
    // prefixes that part within the block differ in its last slot: few blocks are compared whole
    std::vector<std::pair<int64_t, int64_t>> keyed;
    for (int64_t sequence : sequences) {
      if (covers(sequence, block))
        keyed.emplace_back(slots_of(sequence, block)[block_ - 1], sequence);
      else
        alone.push_back(sequence);
    }
    std::sort(keyed.begin(), keyed.end());
    std::vector<std::vector<int64_t>> groups;
    size_t begin = 0;  // of the groups with the same last slot
    for (size_t i = 0; i < keyed.size(); ++i) {
      if (i == 0 || keyed[i].first != keyed[i - 1].first) begin = groups.size();
      const auto fits = [&](const auto& group) { return same(group[0], keyed[i].second, block); };
      const auto group = std::find_if(groups.begin() + begin, groups.end(), fits);
      if (group == groups.end())
        groups.push_back({keyed[i].second});
      else
        group->push_back(keyed[i].second);
    }
    return groups;
  }

  const Span* spans_;
  const int64_t* slots_;
  const int64_t block_;
  PrefixTree& tree_;
};

}  // namespace

int64_t block_keys(int64_t dim) { return dim <= 256 ? BLOCK_KEYS : BLOCK_KEYS / 2; }

PrefixTree prefix_tree(const Span* spans, int64_t sequences, const int64_t* slots, int64_t block) {
  PrefixTree tree;
  std::vector<int64_t> all(sequences);
  std::iota(all.begin(), all.end(), 0);
  Builder(spans, slots, block, tree).place(std::move(all), 0);
  return tree;
}

}  // namespace antiphon
