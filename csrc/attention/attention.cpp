// Attention, host side: checks, allocation, division of the work, registration under the CPU key.
#include "attention.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <thread>
#include <tuple>

#include "parallel.h"
#include "tensor.h"

namespace seqkern {
namespace {

// A (batch, heads, rows, columns) tensor whose last dimension is contiguous.
struct Heads {
  Tensor tensor;
  const char* data;
  int64_t batch_stride, head_stride, row_stride, element;

  explicit Heads(const Tensor& t)
      : tensor(with_unit_last_stride(t)),
        data(static_cast<const char*>(tensor.const_data_ptr())),
        batch_stride(tensor.stride(0)),
        head_stride(tensor.stride(1)),
        row_stride(tensor.stride(2)),
        element(tensor.element_size()) {}

  Rows at(int64_t batch, int64_t head) const {
    return {data + (batch * batch_stride + head * head_stride) * element, row_stride};
  }
};

char* offset(const Tensor& t, int64_t elements) {
  return static_cast<char*>(t.mutable_data_ptr()) + elements * t.element_size();
}

int64_t blocks(int64_t length, int64_t block) { return (length + block - 1) / block; }

struct Problem {
  AttentionShape shape;
  int64_t batch, heads, kv_heads, group;  // group: query heads per key head
  int64_t query_blocks, key_blocks;
  ScalarType type, acc;
};

Problem check(const char* op, const Tensor& query, const Tensor& key, const Tensor& value, bool causal,
              int64_t diagonal, double scale) {
  Problem p;
  check_dim(query, 4, op, "query");
  p.shape.dtype = dtype_of(query, op, "query");
  p.type = query.scalar_type();
  p.acc = acc_type(p.shape.dtype);
  for (const auto& [name, t] : {std::pair{"key", &key}, std::pair{"value", &value}}) {
    check_cpu(*t, op, name);
    check_dim(*t, 4, op, name);
    check_type(*t, p.type, op, name);
    check_size(*t, 0, query.size(0), op, name);
  }
  p.batch = query.size(0);
  p.heads = query.size(1);
  p.kv_heads = key.size(1);
  check_size(value, 1, p.kv_heads, op, "value");
  check_size(value, 2, key.size(2), op, "value");
  check_size(key, 3, query.size(3), op, "key");
  SK_CHECK(p.kv_heads > 0 ? p.heads % p.kv_heads == 0 : p.heads == 0, op, ": the ", p.heads,
           " heads of query must be a multiple of the ", p.kv_heads, " heads of key");
  p.group = p.kv_heads > 0 ? p.heads / p.kv_heads : 0;
  p.shape.queries = query.size(2);
  p.shape.keys = key.size(2);
  p.shape.head_dim = query.size(3);
  p.shape.value_dim = value.size(3);
  p.shape.causal = causal;
  p.shape.diagonal = std::clamp(diagonal, -p.shape.queries, p.shape.keys);
  p.shape.scale = scale;
  p.query_blocks = blocks(p.shape.queries, kBlockQ);
  p.key_blocks = blocks(p.shape.keys, kBlockK);
  return p;
}

// One worker's scratch memory after the other.
Tensor scratch_memory(const Tensor& like, int64_t bytes, int64_t workers, const char* op) {
  return empty(like, {checked_product({bytes / 4, workers}, op)}, ScalarType::Float);
}

std::tuple<Tensor, Tensor> attention_fwd(const Tensor& query, const Tensor& key, const Tensor& value, bool causal,
                                         int64_t diagonal, double scale) {
  const char* op = "attention_fwd";
  const Problem p = check(op, query, key, value, causal, diagonal, scale);
  const AttentionShape& s = p.shape;
  Tensor out = empty(query, {p.batch, p.heads, s.queries, s.value_dim}, p.type);
  Tensor lse = empty(query, {p.batch, p.heads, s.queries}, p.acc);
  const int64_t items = checked_product({p.batch, p.heads, p.query_blocks}, op);
  if (items == 0) return {out, lse};

  const Heads q(query), k(key), v(value);
  const AttentionKernels& kernels = attention_kernels();
  const int64_t bytes = kernels.forward_scratch(s);
  const Tensor scratch = scratch_memory(query, bytes, worker_count(items), op);
  // A head's keys and values stay in cache while its blocks of queries, the longest first, are done.
  parallel_workers(items, [&](WorkQueue& queue, int64_t worker) {
    for (int64_t item; queue.take(item);) {
      const int64_t block = p.query_blocks - 1 - item % p.query_blocks;
      const int64_t head = item / p.query_blocks % p.heads, batch = item / p.query_blocks / p.heads;
      const int64_t row = (batch * p.heads + head) * s.queries;
      const AttentionForward args{s,
                                  q.at(batch, head),
                                  k.at(batch, head / p.group),
                                  v.at(batch, head / p.group),
                                  offset(out, row * s.value_dim),
                                  offset(lse, row)};
      kernels.forward(args, block, offset(scratch, worker * bytes / 4));
    }
  });
  return {out, lse};
}

// Lets the blocks of queries reach a key block's gradients one after the other, in an order that the shape alone
// decides: the sums have the same bits on any number of threads. The queue hands out the blocks in that order too, so
// whoever waits, waits for one that is running.
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

std::tuple<Tensor, Tensor, Tensor> attention_bwd(const Tensor& grad_out, const std::optional<Tensor>& grad_lse,
                                                 const Tensor& query, const Tensor& key, const Tensor& value,
                                                 const Tensor& out, const Tensor& lse, bool causal, int64_t diagonal,
                                                 double scale) {
  const char* op = "attention_bwd";
  const Problem p = check(op, query, key, value, causal, diagonal, scale);
  const AttentionShape& s = p.shape;
  for (const auto& [name, t] : {std::pair{"grad_out", &grad_out}, std::pair{"out", &out}}) {
    check_cpu(*t, op, name);
    check_dim(*t, 4, op, name);
    check_type(*t, p.type, op, name);
    check_size(*t, 0, p.batch, op, name);
    check_size(*t, 1, p.heads, op, name);
    check_size(*t, 2, s.queries, op, name);
    check_size(*t, 3, s.value_dim, op, name);
  }
  for (const auto& [name, t] : {std::pair{"lse", &lse}, std::pair{"grad_lse", grad_lse ? &*grad_lse : &lse}}) {
    check_cpu(*t, op, name);
    check_dim(*t, 3, op, name);
    check_type(*t, p.acc, op, name);
    check_size(*t, 0, p.batch, op, name);
    check_size(*t, 1, p.heads, op, name);
    check_size(*t, 2, s.queries, op, name);
  }
  Tensor grad_query = empty(query, {p.batch, p.heads, s.queries, s.head_dim}, p.type);
  Tensor grad_key = empty(query, {p.batch, p.kv_heads, s.keys, s.head_dim}, p.type);
  Tensor grad_value = empty(query, {p.batch, p.kv_heads, s.keys, s.value_dim}, p.type);

  // The first block of queries that sees key block j.
  const auto first_query_block = [&](int64_t j) {
    return s.causal ? std::clamp<int64_t>(j * kBlockK - s.diagonal, 0, s.queries) / kBlockQ : 0;
  };
  const auto visible_key_blocks = [&](int64_t query_block) {
    const int64_t last = std::min(s.queries, (query_block + 1) * kBlockQ) - 1;
    return blocks(s.causal ? std::clamp<int64_t>(last + s.diagonal + 1, 0, s.keys) : s.keys, kBlockK);
  };
  const int64_t seen = p.query_blocks > 0 ? visible_key_blocks(p.query_blocks - 1) : 0;
  // Keys that no query sees.
  const int64_t chains = checked_product({p.batch, p.kv_heads}, op), unseen = std::min(seen * kBlockK, s.keys);
  for (int64_t chain = 0; chain < chains && unseen < s.keys; ++chain) {
    for (const Tensor* grad : {&grad_key, &grad_value}) {
      const int64_t row = grad->size(3);
      std::memset(offset(*grad, (chain * s.keys + unseen) * row), 0, (s.keys - unseen) * row * grad->element_size());
    }
  }
  const int64_t items = checked_product({p.batch, p.heads, p.query_blocks}, op);
  if (items == 0) return {grad_query, grad_key, grad_value};

  const Heads dout(grad_out), q(query), k(key), v(value), o(out);
  const Tensor lse_rows = as_contiguous(lse);
  const std::optional<Tensor> grad_lse_rows = grad_lse ? std::optional(as_contiguous(*grad_lse)) : std::nullopt;
  const AttentionKernels& kernels = attention_kernels();
  const auto sum_memory = [&](const Tensor& grad, int64_t dim) {
    const int64_t width = kernels.padded(s.dtype, dim);
    return p.type == p.acc && width == dim ? grad : empty(query, {p.batch, p.kv_heads, s.keys, width}, p.acc);
  };
  const Tensor key_sum = sum_memory(grad_key, s.head_dim), value_sum = sum_memory(grad_value, s.value_dim);
  const int64_t bytes = kernels.backward_scratch(s);
  const Tensor scratch = scratch_memory(query, bytes, worker_count(items), op);
  Turns turns(checked_product({chains, std::max<int64_t>(1, seen)}, op));

  // All blocks of queries that share a key head form a chain; the chains go side by side, the longest blocks first.
  parallel_workers(items, [&](WorkQueue& queue, int64_t worker) {
    void* memory = offset(scratch, worker * bytes / 4);
    for (int64_t item; queue.take(item);) {
      const int64_t chain = item % chains, position = item / chains;
      const int64_t group = position / p.query_blocks, block = p.query_blocks - 1 - position % p.query_blocks;
      const int64_t batch = chain / p.kv_heads, kv_head = chain % p.kv_heads, head = kv_head * p.group + group;
      const int64_t row = (batch * p.heads + head) * s.queries, kv_row = chain * s.keys;
      const AttentionBackward args{s,
                                   dout.at(batch, head),
                                   q.at(batch, head),
                                   k.at(batch, kv_head),
                                   v.at(batch, kv_head),
                                   o.at(batch, head),
                                   offset(lse_rows, row),
                                   grad_lse_rows ? offset(*grad_lse_rows, row) : nullptr,
                                   offset(grad_query, row * s.head_dim),
                                   offset(grad_key, kv_row * s.head_dim),
                                   offset(grad_value, kv_row * s.value_dim),
                                   offset(key_sum, kv_row * key_sum.size(3)),
                                   offset(value_sum, kv_row * value_sum.size(3))};
      kernels.backward_begin(args, block, memory);
      for (int64_t j = 0, count = visible_key_blocks(block); j < count; ++j) {
        kernels.backward_scores(args, block, j, memory);
        const int64_t visitors = p.query_blocks - first_query_block(j);
        const int64_t turn = group * visitors + p.query_blocks - 1 - block;
        turns.wait(chain * seen + j, turn);
        kernels.backward_keys(args, block, j, turn == 0, turn == p.group * visitors - 1, memory);
        turns.finish(chain * seen + j, turn);
      }
      kernels.backward_end(args, block, memory);
    }
  });
  return {grad_query, grad_key, grad_value};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(seqkern, CPU, m) {
  m.impl("attention_fwd", TORCH_BOX(&attention_fwd));
  m.impl("attention_bwd", TORCH_BOX(&attention_bwd));
}

}  // namespace seqkern
