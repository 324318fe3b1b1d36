// Checks the tensors that say where sequences begin and end, on the host side of ops.
#pragma once

#include <algorithm>
#include <limits>
#include <optional>

#include "sequences.h"
#include "tensor.h"

namespace seqkern {

// Checked sequences, and the tensor that they are in.
class CheckedSequences {
 public:
  // rows: of a padded sequence, or of all packed ones; columns: of a row.
  CheckedSequences(const char* op, const std::optional<Tensor>& lengths, const std::optional<Tensor>& starts,
                   int64_t batch, int64_t rows, int64_t columns)
      : in{.batch = batch, .rows = rows} {
    SK_CHECK(!(lengths && starts), op, ": lengths are of padded sequences, cu_seqlens of packed ones");
    SK_CHECK(rows <= std::numeric_limits<int32_t>::max(), op, ": x must have fewer than 2^31 rows, got ", rows);
    checked_product({starts ? 1 : batch, rows, std::max<int64_t>(columns, 1), 8}, op);
    checked_product({batch, std::max<int64_t>(columns, 1), 8}, op);
    if (lengths) in.lengths = numbers(op, *lengths, "lengths", batch);
    if (starts) {
      in.starts = numbers(op, *starts, "cu_seqlens", batch + 1);
      SK_CHECK(in.starts[0] >= 0, op, ": cu_seqlens must not be negative, got ", in.starts[0]);
      for (int64_t b = 0; b < batch; ++b)
        SK_CHECK(in.starts[b] <= in.starts[b + 1], op, ": cu_seqlens must not decrease, got ", in.starts[b],
                 " and then ", in.starts[b + 1]);
      SK_CHECK(in.starts[batch] <= rows, op, ": cu_seqlens must end at or before ", rows, ", the rows of x, got ",
               in.starts[batch]);
    }
    for (int64_t b = 0; b < batch; ++b) total += in.length(b), longest = std::max(longest, in.length(b));
  }
  CheckedSequences(const CheckedSequences&) = delete;

  // How many sequences x has: padded (batch, rows, columns), or packed (rows, columns) with starts.
  static int64_t batch_of(const Tensor& x, const std::optional<Tensor>& starts) {
    return starts ? std::max<int64_t>(starts->numel() - 1, 0) : x.size(0);
  }

  Sequences in;
  int64_t total = 0, longest = 0;

 private:
  const int64_t* numbers(const char* op, const Tensor& t, const char* name, int64_t size) {
    check_cpu(t, op, name);
    check_dim(t, 1, op, name);
    check_size(t, 0, size, op, name);
    check_type(t, ScalarType::Long, op, name);
    kept_ = as_contiguous(t);
    return static_cast<const int64_t*>(kept_->const_data_ptr());
  }

  std::optional<Tensor> kept_;
};

}  // namespace seqkern
