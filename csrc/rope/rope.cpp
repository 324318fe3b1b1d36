// Rotary position embeddings, host side: checks, allocates, registers the ops under the CPU key.
#include "rope.h"

#include <algorithm>
#include <tuple>

#include "ops.h"
#include "tensor.h"

namespace seqkern {
namespace {

constexpr int64_t kGrainElements = 16384;

// A table as the kernels read it: contiguous, in the accumulation type.
Tensor table(const Tensor& t, const Tensor& query, int64_t tokens, const char* op, const char* argument) {
  check_cpu(t, op, argument);
  check_dim(t, 3, op, argument);
  SK_CHECK(t.size(0) == 1 || t.size(0) == query.size(0), op, ": ", argument, " must have size 1 or ", query.size(0),
           " in dimension 0, got ", t.size(0));
  check_size(t, 1, tokens, op, argument);
  check_type(t, acc_type(dtype_of(query, op, "query")), op, argument);
  return as_contiguous(t);
}

std::tuple<Tensor, Tensor> rope(const Tensor& query, const std::optional<Tensor>& key, const Tensor& cos,
                                const Tensor& sin, int64_t sequence_dim, int64_t rotary_dim, bool interleaved,
                                bool inverse) {
  const char* op = "rope";
  check_dim(query, 4, op, "query");
  SK_CHECK(sequence_dim == 1 || sequence_dim == 2, op, ": sequence_dim must be 1 or 2, got ", sequence_dim);
  const int64_t head_dim = 3 - sequence_dim;
  Rope args{};
  args.dtype = dtype_of(query, op, "query");
  args.interleaved = interleaved;
  args.inverse = inverse;
  args.batch = query.size(0);
  args.tokens = query.size(sequence_dim);
  args.dim = query.size(3);
  const Tensor c = table(cos, query, args.tokens, op, "cos"), s = table(sin, query, args.tokens, op, "sin");
  SK_CHECK(s.size(0) == c.size(0) && s.size(2) == c.size(2), op, ": sin must have the shape of cos");
  args.width = c.size(2);
  args.rotary_dim = rotary_dim;
  args.cos = c.const_data_ptr();
  args.sin = s.const_data_ptr();
  args.table_batch_stride = c.size(0) == 1 ? 0 : args.tokens * args.width;
  SK_CHECK(rotary_dim >= 0 && rotary_dim % 2 == 0 && rotary_dim <= args.dim, op,
           ": rotary_dim must be even and at most query's ", args.dim, ", got ", rotary_dim);
  SK_CHECK(args.width == rotary_dim || args.width == rotary_dim / 2, op, ": cos must have rotary_dim = ", rotary_dim,
           " columns or half as many, got ", args.width);

  std::optional<Tensor> kept[2];
  Tensor outputs[2] = {query, query};
  int64_t heads = 0;
  for (int side = 0; side < 2; ++side) {
    const char* name = side == 0 ? "query" : "key";
    if (side == 1 && !key) {
      outputs[1] = empty(query, {0}, query.scalar_type());
      continue;
    }
    const Tensor& t = side == 0 ? query : *key;
    check_cpu(t, op, name);
    check_dim(t, 4, op, name);
    check_type(t, query.scalar_type(), op, name);
    for (int64_t dim : {int64_t{0}, sequence_dim, int64_t{3}}) check_size(t, dim, query.size(dim), op, name);
    kept[side] = with_unit_last_stride(t);
    const Tensor& x = *kept[side];
    outputs[side] = empty(query, {x.size(0), x.size(1), x.size(2), x.size(3)}, query.scalar_type());
    const Tensor& y = outputs[side];
    args.sides[side] = {x.const_data_ptr(),    outputs[side].mutable_data_ptr(), x.size(head_dim), x.stride(0),
                        x.stride(head_dim),    x.stride(sequence_dim),           y.stride(0),      y.stride(head_dim),
                        y.stride(sequence_dim)};
    args.side_count = side + 1;
    heads += x.size(head_dim);
  }
  const int64_t blocks = (args.tokens + kRopeTokens - 1) / kRopeTokens, items = args.batch * blocks;
  if (items == 0 || heads == 0 || args.dim == 0) return {outputs[0], outputs[1]};
  const auto rotate = rope_kernels().rotate;
  const int64_t grain = std::max<int64_t>(1, kGrainElements / (heads * args.dim * kRopeTokens));
  torch::stable::parallel_for(0, items, grain, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t first = item % blocks * kRopeTokens;
      rotate(args, item / blocks, first, std::min(args.tokens, first + kRopeTokens));
    }
  });
  return {outputs[0], outputs[1]};
}

std::tuple<Tensor, Tensor> rope_tables(const Tensor& positions, const Tensor& inv_freq, double scaling, bool wide) {
  const char* op = "rope_tables";
  check_cpu(positions, op, "positions");
  check_cpu(inv_freq, op, "inv_freq");
  check_dim(positions, 2, op, "positions");
  check_dim(inv_freq, 1, op, "inv_freq");
  check_type(positions, ScalarType::Long, op, "positions");
  check_type(inv_freq, ScalarType::Double, op, "inv_freq");
  const Tensor at = as_contiguous(positions), frequencies = as_contiguous(inv_freq);
  const int64_t rows = positions.numel(), columns = inv_freq.size(0);
  checked_product({rows, columns, 8}, op);
  const ScalarType type = wide ? ScalarType::Double : ScalarType::Float;
  Tensor cos = empty(positions, {positions.size(0), positions.size(1), columns}, type);
  Tensor sin = empty(positions, {positions.size(0), positions.size(1), columns}, type);
  const RopeTables args{
      .dtype = wide ? Dtype::f64 : Dtype::f32,
      .columns = columns,
      .positions = static_cast<const int64_t*>(at.const_data_ptr()),
      .inv_freq = static_cast<const double*>(frequencies.const_data_ptr()),
      .scaling = scaling,
      .cos = cos.mutable_data_ptr(),
      .sin = sin.mutable_data_ptr(),
  };
  const auto tables = rope_kernels().tables;
  const int64_t grain = std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, 8 * columns));
  torch::stable::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) { tables(args, begin, end); });
  return {cos, sin};
}

SK_DIRECT_OP(rope)
SK_DIRECT_OP(rope_tables)

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(seqkern, CPU, m) {
  m.impl("rope", TORCH_BOX(&rope));
  m.impl("rope_tables", TORCH_BOX(&rope_tables));
}

}  // namespace seqkern
