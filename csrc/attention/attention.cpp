// Attention, host side: allocates results, divides the work, registers the ops under the CPU key.
#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <thread>
#include <tuple>

#include "ops.h"
#include "parallel.h"
#include "problem.h"
#include "scratch.h"

namespace seqkern {
namespace {

// Key blocks that a work item of the shared mask's gradient goes over.
constexpr int64_t kMaskBlocks = 8;

// The kernels of the active tier: for bfloat16 the tier's own, where it has them.
const AttentionKernels& kernels_for(const AttentionShape& shape) {
  const AttentionKernels* bf16 = shape.dtype == Dtype::bf16 ? attention_bf16_kernels() : nullptr;
  return bf16 ? *bf16 : attention_kernels();
}

// The dtype of lse: lse_t of the kernels.
ScalarType lse_type(const AttentionProblem& p) { return p.dtype == Dtype::f32 ? ScalarType::Double : p.acc; }

// Whether a sequence's queries, over all heads of a group, go to the decode kernels.
bool is_decode(const AttentionProblem& p, const AttentionKernels& kernels, const AttentionSequence& s, const char* op) {
  return s.queries > 0 && s.queries <= kernels.decode_queries &&
         checked_product({p.group, s.queries}, op) <= kernels.decode_rows;
}

char* offset(const Tensor& t, int64_t elements) {
  return static_cast<char*>(t.mutable_data_ptr()) + elements * t.element_size();
}

// A work item: a block of query head `head`, or of all query heads of key head `head`.
struct Item {
  int32_t sequence, head;
  int64_t block;
};

// The sequences, those with the longest items first. An item's cost may not depend on other sequences, but its start
// may.
template <class Cost>
std::vector<int32_t> longest_first(const AttentionProblem& p, const Cost& cost) {
  std::vector<int32_t> order(p.sequences.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return cost(p.sequences[static_cast<size_t>(a)].band) > cost(p.sequences[static_cast<size_t>(b)].band);
  });
  return order;
}

// Keys and values in the layout of `pack`, made once for all query heads that share them.
class Packed {
 public:
  template <class Wanted>
  Packed(const AttentionProblem& p, const AttentionKernels& kernels, const Heads& key, const Heads& value,
         bool backward, const Wanted& wanted, const char* op) {
    if (!kernels.pack) return;
    int64_t total = 0;
    std::vector<Item> items;
    for (size_t i = 0; i < p.sequences.size(); ++i) {
      const AttentionSequence& band = p.sequences[i].band;
      offsets_.push_back(total);
      bytes_.push_back(wanted(band) ? kernels.pack_bytes(p.shape, band.keys, backward) : 0);
      if (bytes_.back() == 0) continue;
      total += checked_product({bytes_.back(), p.kv_heads}, op);
      const Range seen = visible_range(band, 0, band.queries);
      for (int32_t head = 0; head < p.kv_heads; ++head)
        for (int64_t j = seen.begin / kernels.block_k; j < blocks(seen.end, kernels.block_k); ++j)
          items.push_back({static_cast<int32_t>(i), head, j});
    }
    memory_.emplace(total);
    parallel_workers(static_cast<int64_t>(items.size()), [&](WorkQueue& queue, int64_t) {
      for (int64_t at; queue.take(at);) {
        const Item& item = items[static_cast<size_t>(at)];
        const Sequence& s = p.sequences[static_cast<size_t>(item.sequence)];
        kernels.pack(p.shape, s.band.keys, backward, key.rows(s.batch, item.head, s.key_row),
                     value.rows(s.batch, item.head, s.key_row), item.block, address(item.sequence, item.head));
      }
    });
  }
  void* address(int32_t sequence, int64_t kv_head) const {
    if (!memory_ || bytes_[static_cast<size_t>(sequence)] == 0) return nullptr;
    const auto i = static_cast<size_t>(sequence);
    return static_cast<char*>(memory_->data()) + offsets_[i] + kv_head * bytes_[i];
  }

 private:
  std::optional<Scratch> memory_;
  std::vector<int64_t> offsets_, bytes_;
};

// ---- forward -------------------------------------------------------------------------------------------------------

// Of a sequence that goes to the decode kernels: its chunks, and where its partial results are.
struct DecodeChunks {
  int64_t first_chunk = 0, chunks = 0;  // chunks of a key head; 0 for other sequences
  int64_t partial = 0, counter = 0;     // indices, of the first key head's
};

// The output goes to `into` where there is one, of any strides with contiguous rows.
std::tuple<Tensor, Tensor> forward(const AttentionArguments& a, const std::optional<Tensor>& sinks,
                                   const std::optional<Tensor>& into = std::nullopt) {
  const AttentionProblem p = check(a);
  const AttentionShape& shape = p.shape;
  check_attention_sinks(a, p, sinks);
  const std::optional<Tensor> sink_row = sinks ? std::optional(as_contiguous(*sinks)) : std::nullopt;
  const Tensor out = into ? *into : p.rows_tensor(a.query, p.heads, p.query_rows, shape.value_dim);
  const Tensor lse = empty(a.query, {p.batch, p.heads, p.query_rows}, lse_type(p));
  if (p.heads == 0 || p.batch == 0 || p.query_rows == 0) return {out, lse};

  const Heads q(a.query), k(a.key), v(a.value), o(out);
  const AttentionKernels& kernels = kernels_for(shape);
  if (p.packed) {  // rows outside of all sequences
    const Sequence *first = p.sequences.empty() ? nullptr : &p.sequences.front(), *last = first;
    if (last) last = &p.sequences.back();
    const int64_t begin = first ? first->query_row : p.query_rows;
    const int64_t end = last ? last->query_row + last->band.queries : p.query_rows;
    for (int64_t head = 0; head < p.heads; ++head) {
      for (const auto& [from, to] : {std::pair{int64_t{0}, begin}, std::pair{end, p.query_rows}}) {
        o.zero(0, head, from, to);
        for (int64_t row = from; row < to; ++row) {
          const int64_t at = head * p.query_rows + row;
          if (lse_type(p) == ScalarType::Double) reinterpret_cast<double*>(offset(lse, 0))[at] = -HUGE_VAL;
          else reinterpret_cast<float*>(offset(lse, 0))[at] = -HUGE_VALF;
        }
      }
    }
  }

  // A head's query blocks follow each other, the longest first, so that its keys and values stay in cache.
  std::vector<Item> items;
  std::vector<DecodeChunks> decode(p.sequences.size());
  int64_t partials = 0, counters = 0;
  for (const int32_t index : longest_first(p, [&](const AttentionSequence& s) {
         const int64_t begin =
             is_decode(p, kernels, s, a.op) ? 0 : (blocks(s.queries, kernels.block_q) - 1) * kernels.block_q;
         const Range seen = visible_range(s, std::max<int64_t>(0, begin), s.queries);
         return std::min(s.queries, kernels.block_q) * (seen.end - seen.begin);
       })) {
    const AttentionSequence& s = p.sequences[static_cast<size_t>(index)].band;
    if (is_decode(p, kernels, s, a.op)) {
      const Range seen = visible_range(s, 0, s.queries);
      DecodeChunks& d = decode[static_cast<size_t>(index)];
      d.first_chunk = seen.begin < seen.end ? seen.begin / kernels.decode_keys : 0;
      d.chunks = seen.begin < seen.end ? blocks(seen.end, kernels.decode_keys) - d.first_chunk : 1;
      d.partial = partials;
      d.counter = counters;
      partials += checked_product({d.chunks, p.kv_heads}, a.op);
      counters += p.kv_heads;
      for (int32_t head = 0; head < p.kv_heads; ++head)
        for (int64_t chunk = 0; chunk < d.chunks; ++chunk) items.push_back({index, head, d.first_chunk + chunk});
    } else {
      for (int32_t head = 0; head < p.heads; ++head)
        for (int64_t block = blocks(s.queries, kernels.block_q); block-- > 0;) items.push_back({index, head, block});
    }
  }
  const auto count = static_cast<int64_t>(items.size());
  if (count == 0) return {out, lse};
  const Packed packed(
      p, kernels, k, v, false, [&](const AttentionSequence& s) { return !is_decode(p, kernels, s, a.op); }, a.op);

  int64_t bytes = kernels.forward_scratch(shape);
  if (counters > 0) bytes = std::max(bytes, kernels.decode_scratch(shape));
  const Scratch scratch(bytes, worker_count(count));
  const Scratch partial(counters > 0 ? kernels.decode_partial(shape) : 0, partials);
  const std::unique_ptr<std::atomic<int64_t>[]> done(new std::atomic<int64_t>[static_cast<size_t>(counters)]());

  parallel_workers(count, [&](WorkQueue& queue, int64_t worker) {
    for (int64_t at; queue.take(at);) {
      const Item& item = items[static_cast<size_t>(at)];
      const Sequence& s = p.sequences[static_cast<size_t>(item.sequence)];
      const DecodeChunks& d = decode[static_cast<size_t>(item.sequence)];
      const int64_t head = d.chunks > 0 ? item.head * p.group : item.head, kv_head = head / p.group;
      AttentionForward args{.shape = p.shape_of(s),
                            .sequence = s.band,
                            .bias = p.bias(s, head),
                            .query = q.rows(s.batch, head, s.query_row),
                            .key = k.rows(s.batch, kv_head, s.key_row),
                            .value = v.rows(s.batch, kv_head, s.key_row),
                            .out = o.mutable_rows(s.batch, head, s.query_row),
                            .lse = offset(lse, p.row(s, head)),
                            .sinks = sink_row ? offset(*sink_row, head) : nullptr,
                            .packed = packed.address(item.sequence, kv_head),
                            .heads = d.chunks > 0 ? p.group : 1,
                            .query_head_stride = q.head_stride,
                            .out_head_stride = o.head_stride,
                            .lse_head_stride = p.query_rows};
      if (d.chunks > 0) args.bias.cells = nullptr;  // its chunks do not begin at cells
      if (d.chunks == 0) {
        kernels.forward(args, item.block, scratch.piece(worker));
        continue;
      }
      const int64_t first = d.partial + kv_head * d.chunks;
      kernels.decode_forward(args, item.block, partial.piece(first + item.block - d.first_chunk),
                             scratch.piece(worker));
      // The worker that finishes last combines the chunks, in their order.
      if (done[d.counter + kv_head].fetch_add(1, std::memory_order_acq_rel) == d.chunks - 1)
        kernels.decode_combine(args, partial.piece(first), d.chunks);
    }
  });
  return {out, lse};
}

// ---- backward ------------------------------------------------------------------------------------------------------

// Makes the query blocks add to a key block's gradients one after the other, in an order that depends on the shape
// alone: the sums have the same bits on any number of threads. The queue hands out the blocks in the same order, so a
// worker waits only for running workers.
class Turns {
 public:
  explicit Turns(int64_t count) : done_(new std::atomic<int64_t>[static_cast<size_t>(count)]()) {}
  void wait(int64_t index, int64_t turn) const {
    for (int spins = 0; done_[index].load(std::memory_order_acquire) != turn; ++spins)
      if (spins > 64) std::this_thread::yield();
  }
  void finish(int64_t index, int64_t turn) { done_[index].store(turn + 1, std::memory_order_release); }

 private:
  std::unique_ptr<std::atomic<int64_t>[]> done_;
};

// The number of query blocks that see a key block, and the last of them, which is the first to add to it.
struct Visitors {
  int64_t count, last;
  Visitors(const AttentionSequence& s, const AttentionKernels& kernels, int64_t key_block) {
    const int64_t first_key = key_block * kernels.block_k;
    const Range seeing = seeing_range(s, first_key, std::min(s.keys, first_key + kernels.block_k));
    last = blocks(seeing.end, kernels.block_q) - 1;
    count = last + 1 - seeing.begin / kernels.block_q;
  }
};

struct AttentionGradients {
  Tensor query, key, value, mask, distance;
};

// All tensors of a backward pass.
struct Backward {
  const AttentionProblem& p;
  const AttentionKernels& kernels;
  const Heads grad_out, query, key, value, out;
  const Tensor lse;
  const std::optional<Tensor> grad_lse;
  const Heads grad_query, grad_key, grad_value, key_sum, value_sum;
  const Tensor grad_mask, distance;
  const char* op;
  const bool own_mask;   // each head of each sequence has its own mask
  const bool sums_mask;  // each head has its own, and a worker takes a query block of all sequences: run_backward
  const Packed packed;

  AttentionBackward arguments(int32_t index, int64_t head) const {
    const Sequence& s = p.sequences[static_cast<size_t>(index)];
    const int64_t kv_head = head / p.group, row = p.row(s, head);
    AttentionBackward args{.shape = p.shape_of(s),
                           .sequence = s.band,
                           .bias = p.bias(s, head),
                           .decode = is_decode(p, kernels, s.band, op),
                           .grad_out = grad_out.rows(s.batch, head, s.query_row),
                           .query = query.rows(s.batch, head, s.query_row),
                           .key = key.rows(s.batch, kv_head, s.key_row),
                           .value = value.rows(s.batch, kv_head, s.key_row),
                           .out = out.rows(s.batch, head, s.query_row),
                           .lse = offset(lse, row),
                           .grad_lse = grad_lse ? offset(*grad_lse, row) : nullptr,
                           .grad_query = grad_query.mutable_rows(s.batch, head, s.query_row),
                           .grad_key = grad_key.mutable_rows(s.batch, kv_head, s.key_row),
                           .grad_value = grad_value.mutable_rows(s.batch, kv_head, s.key_row),
                           .key_sum = key_sum.mutable_rows(s.batch, kv_head, s.key_row),
                           .value_sum = value_sum.mutable_rows(s.batch, kv_head, s.key_row),
                           .distance = p.shape.need_slopes ? offset(distance, row) : nullptr,
                           .grad_mask = {nullptr, 0},
                           .mask_sum = {nullptr, 0},
                           .packed = packed.address(index, kv_head)};
    if (own_mask) {
      const int64_t rows = grad_mask.size(2), columns = grad_mask.size(3);
      args.grad_mask = {offset(grad_mask, (s.index * p.heads + head) * rows * columns), columns};
    }
    return args;
  }
};

// Zeroes the rows that no query block writes.
void zero_unseen(const Backward& b) {
  const AttentionProblem& p = b.p;
  if (b.own_mask) std::memset(offset(b.grad_mask, 0), 0, b.grad_mask.numel() * b.grad_mask.element_size());
  const auto zero_keys = [&](int64_t batch, int64_t begin, int64_t end) {
    for (int64_t head = 0; head < p.kv_heads && begin < end; ++head) {
      b.grad_key.zero(batch, head, begin, end);
      b.grad_value.zero(batch, head, begin, end);
    }
  };
  const auto zero_queries = [&](int64_t begin, int64_t end) {
    for (int64_t head = 0; head < p.heads && begin < end; ++head) {
      b.grad_query.zero(0, head, begin, end);
      if (p.shape.need_slopes)
        std::memset(offset(b.distance, head * p.query_rows + begin), 0, (end - begin) * b.distance.element_size());
    }
  };
  for (const Sequence& s : p.sequences) {
    const Range seen = visible_range(s.band, 0, s.band.queries);
    const bool any = seen.begin < seen.end && s.band.queries > 0;
    const int64_t block = b.kernels.block_k, begin = any ? seen.begin / block * block : s.key_rows;
    const int64_t end = any ? std::min(s.band.keys, blocks(seen.end, block) * block) : s.key_rows;
    zero_keys(s.batch, s.key_row, s.key_row + begin);
    zero_keys(s.batch, s.key_row + end, s.key_row + s.key_rows);
  }
  if (!p.packed) return;
  if (p.sequences.empty()) {
    zero_queries(0, p.query_rows);
    zero_keys(0, 0, p.key_rows);
    return;
  }
  const Sequence &first = p.sequences.front(), &last = p.sequences.back();
  zero_queries(0, first.query_row);
  zero_queries(last.query_row + last.band.queries, p.query_rows);
  zero_keys(0, 0, first.key_row);
  zero_keys(0, last.key_row + last.key_rows, p.key_rows);
}

void run_backward(const Backward& b, const char* op) {
  const AttentionProblem& p = b.p;
  const AttentionKernels& kernels = b.kernels;
  // All query blocks that share a key head form a chain. Chains run in parallel, those with the most blocks left first,
  // and within a chain the longest blocks come first. If all sequences share the mask of a head, an item is a block of
  // each of them, and owns these rows of the mask's gradient: sums in the order of the sequences.
  const auto length = [&](const AttentionSequence& s) { return p.group * blocks(s.queries, kernels.block_q); };
  const std::vector<int32_t> order = longest_first(p, length);
  std::vector<int64_t> first_turn(p.sequences.size());
  int64_t turn_count = 0, longest = 0;
  for (size_t i = 0; i < p.sequences.size(); ++i) {
    first_turn[i] = turn_count;
    turn_count += checked_product({p.kv_heads, blocks(p.sequences[i].band.keys, kernels.block_k)}, op);
    longest = std::max(longest, length(p.sequences[i].band));
  }
  std::vector<Item> items;  // head: key head; block: position in the chain
  for (int64_t left = longest; left > 0; --left) {
    for (const int32_t index : b.sums_mask ? std::vector<int32_t>{0} : order) {
      const int64_t count = length(p.sequences[static_cast<size_t>(index)].band);
      if (count < left) break;
      for (int32_t head = 0; head < p.kv_heads; ++head) items.push_back({index, head, count - left});
    }
  }
  const auto count = static_cast<int64_t>(items.size());
  if (count == 0) return;
  const int64_t rows = b.sums_mask ? b.grad_mask.size(2) : 0, columns = b.sums_mask ? b.grad_mask.size(3) : 0;
  const int64_t width = blocks(columns, kernels.block_k) * kernels.block_k;
  const int64_t sum_bytes = checked_product({kernels.block_q, width, p.acc == ScalarType::Double ? 8 : 4}, op);
  const Scratch scratch(sum_bytes + kernels.backward_scratch(p.shape), worker_count(count));
  Turns turns(turn_count);

  // A query block of a chain of one sequence.
  const auto run_block = [&](int32_t index, const Item& item, char* sum, void* memory) {
    const AttentionSequence& s = p.sequences[static_cast<size_t>(index)].band;
    const int64_t query_blocks = blocks(s.queries, kernels.block_q);
    const int64_t group = item.block / query_blocks, block = query_blocks - 1 - item.block % query_blocks;
    AttentionBackward args = b.arguments(index, item.head * p.group + group);
    if (b.sums_mask) args.mask_sum = {sum, width};
    const int64_t first = block * kernels.block_q;
    const Range seen = visible_range(s, first, std::min(s.queries, first + kernels.block_q));
    const int64_t chain = first_turn[static_cast<size_t>(index)] + item.head * blocks(s.keys, kernels.block_k);
    kernels.backward_begin(args, block, memory);
    for (int64_t j = seen.begin / kernels.block_k; j * kernels.block_k < seen.end; ++j) {
      const bool visible = kernels.backward_scores(args, block, j, memory);
      const Visitors visitors(s, kernels, j);
      const int64_t turn = group * visitors.count + visitors.last - block;
      turns.wait(chain + j, turn);
      kernels.backward_keys(args, block, j, visible, turn == 0, turn == p.group * visitors.count - 1, memory);
      turns.finish(chain + j, turn);
    }
    kernels.backward_end(args, block, memory);
  };

  parallel_workers(count, [&](WorkQueue& queue, int64_t worker) {
    char *sum = static_cast<char*>(scratch.piece(worker)), *memory = sum + sum_bytes;
    for (int64_t at; queue.take(at);) {
      const Item& item = items[static_cast<size_t>(at)];
      if (!b.sums_mask) {
        run_block(item.sequence, item, sum, memory);
        continue;
      }
      std::memset(sum, 0, static_cast<size_t>(sum_bytes));
      for (size_t i = 0; i < p.sequences.size(); ++i) run_block(static_cast<int32_t>(i), item, sum, memory);
      const int64_t query_blocks = blocks(rows, kernels.block_q);
      const int64_t head = item.head * p.group + item.block / query_blocks;
      const int64_t row = (query_blocks - 1 - item.block % query_blocks) * kernels.block_q;
      kernels.mask_write(p.shape, sum, width, std::min(kernels.block_q, rows - row), columns,
                         {offset(b.grad_mask, (head * rows + row) * columns), columns});
    }
  });
}

// The gradient of a mask that heads or sequences share. An item owns a part of the mask, and recomputes the scores of
// all that share it, in their order: no copies of the mask, no waiting, the same bits on any number of threads.
void run_mask(const Backward& b, const char* op) {
  const AttentionProblem& p = b.p;
  const AttentionKernels& kernels = b.kernels;
  const int64_t samples = b.grad_mask.size(0), heads = b.grad_mask.size(1);
  const int64_t rows = b.grad_mask.size(2), columns = b.grad_mask.size(3);
  const int64_t width = kMaskBlocks * kernels.block_k;
  const int64_t row_blocks = blocks(rows, kernels.block_q), column_blocks = blocks(columns, width);
  const int64_t count = checked_product({samples, heads, row_blocks, column_blocks}, op);
  if (count == 0) return;
  const int64_t acc_size = p.acc == ScalarType::Double ? 8 : 4, sum_bytes = kernels.block_q * width * acc_size;
  const Scratch scratch(kernels.backward_scratch(p.shape) + sum_bytes, worker_count(count));
  const auto sequences = static_cast<int64_t>(p.sequences.size());

  parallel_workers(count, [&](WorkQueue& queue, int64_t worker) {
    char *sum = static_cast<char*>(scratch.piece(worker)), *memory = sum + sum_bytes;
    for (int64_t item; queue.take(item);) {
      const int64_t column = item % column_blocks * width, block = row_blocks - 1 - item / column_blocks % row_blocks;
      const int64_t index = item / column_blocks / row_blocks, sample = index / heads, mask_head = index % heads;
      const int64_t row = block * kernels.block_q;
      std::memset(sum, 0, static_cast<size_t>(sum_bytes));
      for (int64_t i = samples == 1 ? 0 : sample; i < (samples == 1 ? sequences : sample + 1); ++i) {
        const AttentionSequence& s = p.sequences[static_cast<size_t>(i)].band;
        const Range seen = visible_range(s, row, std::min(s.queries, row + kernels.block_q));
        const int64_t begin = std::max(seen.begin, column), end = std::min(seen.end, column + width);
        if (row >= s.queries || begin >= end) continue;
        for (int64_t head = heads == 1 ? 0 : mask_head; head < (heads == 1 ? p.heads : mask_head + 1); ++head) {
          const AttentionBackward args = b.arguments(static_cast<int32_t>(i), head);
          kernels.backward_begin(args, block, memory);
          for (int64_t j = begin / kernels.block_k; j * kernels.block_k < end; ++j)
            kernels.mask_sum(args, block, j, sum + (j * kernels.block_k - column) * acc_size, width, memory);
        }
      }
      const int64_t to = (index * rows + row) * columns + column;
      kernels.mask_write(p.shape, sum, width, std::min(kernels.block_q, rows - row), std::min(width, columns - column),
                         {offset(b.grad_mask, to), columns});
    }
  });
}

// The gradients of query, key and value go to `into` where there is one.
AttentionGradients backward(const AttentionArguments& a, const Tensor& grad_out, const std::optional<Tensor>& grad_lse,
                            const Tensor& out, const Tensor& lse, bool need_mask, bool need_slopes,
                            const Tensor* into = nullptr) {
  const char* op = a.op;
  AttentionProblem p = check(a);
  AttentionShape& shape = p.shape;
  AttentionSizes sizes = p;
  sizes.acc = lse_type(p);
  check_attention_gradients(a, sizes, grad_out, grad_lse, out, lse, need_mask, need_slopes);
  shape.need_mask = need_mask;
  shape.need_slopes = need_slopes;
  const AttentionKernels& kernels = kernels_for(shape);
  const auto sequences = static_cast<int64_t>(p.sequences.size());

  AttentionGradients g{
      .query = into ? into[0] : p.rows_tensor(a.query, p.heads, p.query_rows, shape.head_dim),
      .key = into ? into[1] : p.rows_tensor(a.query, p.kv_heads, p.key_rows, shape.head_dim),
      .value = into ? into[2] : p.rows_tensor(a.query, p.kv_heads, p.key_rows, shape.value_dim),
      .mask = need_mask ? empty(a.query, {p.mask->size(0), p.mask->size(1), p.mask->size(2), p.mask->size(3)},
                                p.mask->scalar_type())
                        : empty(a.query, {0}, p.type),
      .distance = need_slopes ? empty(a.query, {p.batch, p.heads, p.query_rows}, p.acc) : empty(a.query, {0}, p.acc)};
  const auto sum_memory = [&](const Tensor& grad, int64_t dim) {
    const int64_t width = kernels.padded(shape.dtype, dim);
    return p.type == p.acc && width == dim ? grad : empty(a.query, {p.batch, p.kv_heads, p.key_rows, width}, p.acc);
  };
  const bool own_mask = need_mask && p.mask->size(0) == sequences && p.mask->size(1) == p.heads;
  // The same bits as by run_mask, which has more items.
  const bool sums_mask = need_mask && !own_mask && p.mask->size(0) == 1 && p.mask->size(1) == p.heads && !p.packed &&
                         p.heads * blocks(a.max_queries, kernels.block_q) >= 4 * torch::stable::get_num_threads();
  const Heads key(a.key), value(a.value);
  const Backward b{
      .p = p,
      .kernels = kernels,
      .grad_out = Heads(grad_out),
      .query = Heads(a.query),
      .key = key,
      .value = value,
      .out = Heads(out),
      .lse = as_contiguous(lse),
      .grad_lse = grad_lse ? std::optional(as_contiguous(*grad_lse)) : std::nullopt,
      .grad_query = Heads(g.query),
      .grad_key = Heads(g.key),
      .grad_value = Heads(g.value),
      .key_sum = Heads(sum_memory(g.key, shape.head_dim)),
      .value_sum = Heads(sum_memory(g.value, shape.value_dim)),
      .grad_mask = g.mask,
      .distance = g.distance,
      .op = op,
      .own_mask = own_mask,
      .sums_mask = sums_mask,
      .packed = Packed(p, kernels, key, value, true, [](const AttentionSequence& s) { return s.queries > 0; }, op)};
  zero_unseen(b);
  if (p.heads > 0) run_backward(b, op);
  if (need_mask && !own_mask && !sums_mask) run_mask(b, op);
  return g;
}

// ---- the ops -------------------------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor> attention_fwd(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& attn_mask,
    const std::optional<Tensor>& query_starts, const std::optional<Tensor>& key_starts,
    const std::optional<Tensor>& key_lengths, const std::optional<Tensor>& alibi_slopes,
    const std::optional<Tensor>& sinks, const std::optional<Tensor>& seed, int64_t max_queries, int64_t max_keys,
    int64_t diagonal, bool lower_right, int64_t left, int64_t right, double scale, double softcap, double dropout_p) {
  return forward({.op = "attention_fwd",
                  .query = query,
                  .key = key,
                  .value = value,
                  .attn_mask = attn_mask,
                  .query_starts = query_starts,
                  .key_starts = key_starts,
                  .key_lengths = key_lengths,
                  .alibi_slopes = alibi_slopes,
                  .seed = seed,
                  .max_queries = max_queries,
                  .max_keys = max_keys,
                  .diagonal = diagonal,
                  .lower_right = lower_right,
                  .left = left,
                  .right = right,
                  .scale = scale,
                  .softcap = softcap,
                  .dropout_p = dropout_p},
                 sinks);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attention_bwd(
    const Tensor& grad_out, const std::optional<Tensor>& grad_lse, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& out, const Tensor& lse, const std::optional<Tensor>& attn_mask,
    const std::optional<Tensor>& query_starts, const std::optional<Tensor>& key_starts,
    const std::optional<Tensor>& key_lengths, const std::optional<Tensor>& alibi_slopes,
    const std::optional<Tensor>& seed, int64_t max_queries, int64_t max_keys, int64_t diagonal, bool lower_right,
    int64_t left, int64_t right, double scale, double softcap, double dropout_p, bool need_mask, bool need_slopes) {
  const AttentionGradients g = backward({.op = "attention_bwd",
                                         .query = query,
                                         .key = key,
                                         .value = value,
                                         .attn_mask = attn_mask,
                                         .query_starts = query_starts,
                                         .key_starts = key_starts,
                                         .key_lengths = key_lengths,
                                         .alibi_slopes = alibi_slopes,
                                         .seed = seed,
                                         .max_queries = max_queries,
                                         .max_keys = max_keys,
                                         .diagonal = diagonal,
                                         .lower_right = lower_right,
                                         .left = left,
                                         .right = right,
                                         .scale = scale,
                                         .softcap = softcap,
                                         .dropout_p = dropout_p},
                                        grad_out, grad_lse, out, lse, need_mask, need_slopes);
  return {g.query, g.key, g.value, g.mask, g.distance};
}

// Of a layer's queries, keys and values in one matrix: results go to views of one.
AttentionArguments self_attention(const char* op, const Tensor& query, const Tensor& key, const Tensor& value,
                                  const std::optional<Tensor>& none, const std::optional<Tensor>& key_lengths,
                                  int64_t left, int64_t right, double scale) {
  return {.op = op,
          .query = query,
          .key = key,
          .value = value,
          .attn_mask = none,
          .query_starts = none,
          .key_starts = none,
          .key_lengths = key_lengths,
          .alibi_slopes = none,
          .seed = none,
          .max_queries = query.size(2),
          .max_keys = key.size(2),
          .diagonal = 0,
          .lower_right = false,
          .left = left,
          .right = right,
          .scale = scale,
          .softcap = 0,
          .dropout_p = 0};
}

Tensor self_attention_fwd(const Tensor& query, const Tensor& key, const Tensor& value,
                          const std::optional<Tensor>& key_lengths, const Tensor& out, int64_t left, int64_t right,
                          double scale) {
  const std::optional<Tensor> none;
  const auto a = self_attention("attention_fwd", query, key, value, none, key_lengths, left, right, scale);
  return std::get<1>(forward(a, none, out));
}

void self_attention_bwd(const Tensor& grad_out, const Tensor& query, const Tensor& key, const Tensor& value,
                        const Tensor& out, const Tensor& lse, const std::optional<Tensor>& key_lengths,
                        const Tensor& grad_query, const Tensor& grad_key, const Tensor& grad_value, int64_t left,
                        int64_t right, double scale) {
  const std::optional<Tensor> none;
  const auto a = self_attention("attention_bwd", query, key, value, none, key_lengths, left, right, scale);
  const Tensor into[3] = {grad_query, grad_key, grad_value};
  backward(a, grad_out, none, out, lse, false, false, into);
}

SK_DIRECT_OP(attention_fwd)
SK_DIRECT_OP(attention_bwd)
SK_DIRECT_OP(self_attention_fwd)
SK_DIRECT_OP(self_attention_bwd)

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(seqkern, CPU, m) {
  m.impl("attention_fwd", TORCH_BOX(&attention_fwd));
  m.impl("attention_bwd", TORCH_BOX(&attention_bwd));
}

}  // namespace seqkern
