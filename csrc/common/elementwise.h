// Host side of elementwise ops: tensors of one shape as rows, and the elements divided among threads.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <vector>

#include "tensor.h"

namespace seqkern {

// The row stride of a tensor (rows are its last dimension), if all rows have the same one and each row is contiguous.
inline std::optional<int64_t> row_stride(const Tensor& t) {
  if (!unit_last_stride(t)) return std::nullopt;
  int64_t stride = t.dim() ? t.size(t.dim() - 1) : 1, rows = 1;
  for (int64_t dim = t.dim() - 2; dim >= 0; --dim) {
    if (t.size(dim) == 1) continue;
    if (rows == 1) stride = t.stride(dim);
    else if (t.stride(dim) != stride * rows) return std::nullopt;
    rows *= t.size(dim);
  }
  return stride;
}

// Tensors of one shape, dtype and device as rows, each tensor with a row stride of its own. A tensor that has none is
// copied. Tensors that are all contiguous become a single row.
class ElementRows {
 public:
  ElementRows(std::initializer_list<const Tensor*> tensors, std::initializer_list<const char*> names, const char* op) {
    const Tensor& first = **tensors.begin();
    const Dtype dtype = dtype_of(first, op, *names.begin());
    auto name = names.begin();
    bool contiguous = true;
    for (const Tensor* t : tensors) {
      check_cpu(*t, op, *name);
      check_dim(*t, first.dim(), op, *name);
      check_type(*t, first.scalar_type(), op, *name);
      for (int64_t dim = 0; dim < first.dim(); ++dim) check_size(*t, dim, first.size(dim), op, *name);
      const auto stride = row_stride(*t);
      kept_.push_back(stride ? *t : torch::stable::contiguous(*t));
      strides_.push_back(stride ? *stride : first.dim() ? first.size(first.dim() - 1) : 1);
      contiguous &= !stride || t->is_contiguous();
      ++name;
    }
    this->dtype = dtype;
    elements = first.numel();
    columns = contiguous || first.dim() == 0 ? elements : first.size(first.dim() - 1);
    sizes_.assign(first.sizes().begin(), first.sizes().end());
  }
  const void* data(size_t i) const { return kept_[i].const_data_ptr(); }
  int64_t stride(size_t i) const { return strides_[i]; }
  // An output: the tensors' shape, contiguous.
  Tensor result() const { return empty(kept_[0], sizes_, kept_[0].scalar_type()); }

  Dtype dtype;
  int64_t elements, columns;

 private:
  std::vector<Tensor> kept_;
  std::vector<int64_t> strides_, sizes_;
};

// Elements below which a second thread costs more than it saves, at some tens of instructions an element.
constexpr int64_t kElementwiseGrain = 8192;

// Calls kernel(begin, end) for all elements, counted row by row.
template <class Kernel>
void for_elements(int64_t elements, const Kernel& kernel) {
  torch::stable::parallel_for(0, elements, kElementwiseGrain, kernel);
}

}  // namespace seqkern
