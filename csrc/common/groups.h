// Numbers in groups of equal ones, on the host side of ops: what is summed by distinct number is so in a fixed order.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace seqkern {

// Of each distinct number, in ascending order, the tokens that have it, in their order.
struct Groups {
  std::vector<int64_t> keys, begins, tokens;
};

// By a radix sort of numbers in [0, most), in digits of 11 bits: stable, and for 15 bits two passes.
template <class Key>
Groups grouped(int64_t count, int64_t most, int64_t without, const Key& key) {
  constexpr int kDigit = 11;
  struct Keyed {
    int64_t key, token;
  };
  std::vector<Keyed> from, to;
  from.reserve(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i)
    if (key(i) != without) from.push_back({key(i), i});
  to.resize(from.size());
  for (int shift = 0; shift < 63 && (most - 1) >> shift > 0; shift += kDigit) {
    const auto digit = [&](const Keyed& k) { return (k.key >> shift) & ((1 << kDigit) - 1); };
    size_t ends[1 << kDigit] = {}, total = 0;
    for (const Keyed& k : from) ++ends[digit(k)];
    for (size_t& end : ends) total += std::exchange(end, total);
    for (const Keyed& k : from) to[ends[digit(k)]++] = k;
    from.swap(to);
  }
  Groups found;
  found.tokens.reserve(from.size());
  for (const Keyed& k : from) {
    if (found.keys.empty() || found.keys.back() != k.key) {
      found.keys.push_back(k.key);
      found.begins.push_back(static_cast<int64_t>(found.tokens.size()));
    }
    found.tokens.push_back(k.token);
  }
  found.begins.push_back(static_cast<int64_t>(found.tokens.size()));
  return found;
}

}  // namespace seqkern
