// Attention, host side: what a mask does to each of its cells, once a call.
//
// Masks are handed over as matrices that mostly say the same in large regions: causal, windowed, padded. What
// is one band in all becomes the sequence's band (mask_bands.cpp). Of others, the kernels skip cells that are hidden
// and take those that are all seen without the mask. Cells are looked at row by row until all of a line are mixed: a
// dense bias costs its first rows.
#include <algorithm>
#include <cstring>

#include "parallel.h"
#include "problem.h"

namespace seqkern {
namespace {

constexpr int64_t kFewQueries = 16;  // up to here queries may go to the decode kernels, which do not ask for cells

// One row of a cell: hidden, seen or mixed. Loops without branches, for the compiler's vectors.
template <class Unsigned>
MaskCell row_of(const char* first, int64_t columns, Unsigned infinity) {  // infinity: the bits of minus it
  Unsigned any = 0, differs = 0;
  for (int64_t c = 0; c < columns; ++c) {
    Unsigned bits;
    std::memcpy(&bits, first + c * static_cast<int64_t>(sizeof(bits)), sizeof(bits));
    any = static_cast<Unsigned>(any | static_cast<Unsigned>(bits << 1));  // -0 is 0
    differs = static_cast<Unsigned>(differs | (bits ^ infinity));
  }
  return any == 0 ? MaskCell::seen : differs == 0 ? MaskCell::hidden : MaskCell::mixed;
}
MaskCell boolean_row(const char* first, int64_t columns) {
  unsigned char any = 0, differs = 0;
  for (int64_t c = 0; c < columns; ++c) {
    const auto byte = static_cast<unsigned char>(first[c]);
    any |= byte;
    differs |= byte ^ 1;
  }
  return any == 0 ? MaskCell::hidden : differs == 0 ? MaskCell::seen : MaskCell::mixed;
}

MaskCell look(MaskType type, const char* first, int64_t columns) {
  switch (type) {
    case MaskType::boolean: return columns == kMaskCell ? boolean_row(first, kMaskCell) : boolean_row(first, columns);
    case MaskType::f64: return row_of<uint64_t>(first, columns, 0xfff0000000000000);
    case MaskType::f32: return row_of<uint32_t>(first, columns, 0xff800000);
    case MaskType::bf16: return row_of<uint16_t>(first, columns, 0xff80);
    default: return row_of<uint16_t>(first, columns, 0xfc00);
  }
}

// A line of cells, row by row as they lie in memory, until all cells are mixed.
void look_at_line(const AttentionProblem& p, const char* first, int64_t row_bytes, int64_t rows, int64_t keys,
                  MaskCell* cells) {
  const auto size = static_cast<int64_t>(p.mask->element_size());
  int64_t open = p.cell_columns;  // cells that are not mixed yet
  for (int64_t r = 0; r < rows && open > 0; ++r) {
    for (int64_t column = 0; column < p.cell_columns; ++column) {
      MaskCell& cell = cells[column];
      if (r > 0 && cell == MaskCell::mixed) continue;
      const int64_t k = column * kMaskCell;
      const MaskCell found =
          look(p.mask_type, first + r * row_bytes + k * size, std::min<int64_t>(kMaskCell, keys - k));
      cell = r == 0 || found == cell ? found : MaskCell::mixed;
      open -= cell == MaskCell::mixed;
    }
  }
}

// The mask with contiguous rows. Read once and in the order of memory, if keys lie outside of heads: T5's bias.
template <class Unsigned>
void copy_rows(const Tensor& from, const Tensor& to) {
  const auto* source = static_cast<const Unsigned*>(from.const_data_ptr());
  auto* target = static_cast<Unsigned*>(to.mutable_data_ptr());
  const int64_t heads = from.size(1), rows = from.size(2), keys = from.size(3);
  const int64_t strides[4] = {from.stride(0), from.stride(1), from.stride(2), from.stride(3)};
  constexpr int64_t kBlock = 64;
  for_items(from.size(0) * rows, static_cast<double>(from.numel()), 0, [&](int64_t item, void*) {
    const int64_t batch = item / rows, row = item % rows;
    for (int64_t k = 0; k < keys; k += kBlock) {
      const int64_t count = std::min(kBlock, keys - k);
      for (int64_t head = 0; head < heads; ++head) {
        const Unsigned* in = source + batch * strides[0] + head * strides[1] + row * strides[2] + k * strides[3];
        Unsigned* out = target + ((batch * heads + head) * rows + row) * keys + k;
        for (int64_t i = 0; i < count; ++i) out[i] = in[i * strides[3]];
      }
    }
  });
}
Tensor in_rows(const Tensor& mask) {
  Tensor rows = empty(mask, {mask.size(0), mask.size(1), mask.size(2), mask.size(3)}, mask.scalar_type());
  switch (mask.element_size()) {
    case 1: copy_rows<uint8_t>(mask, rows); break;
    case 2: copy_rows<uint16_t>(mask, rows); break;
    case 4: copy_rows<uint32_t>(mask, rows); break;
    default: copy_rows<uint64_t>(mask, rows);
  }
  return rows;
}

}  // namespace

void look_at_mask(AttentionProblem& p, int64_t queries, int64_t keys) {
  if (queries <= kFewQueries || keys < kMaskCell || p.mask->numel() == 0 || p.heads == 0) return;
  if (p.mask_strides[3] != 1) {
    if (p.mask_strides[3] == 0) return;  // one element for all keys
    p.mask = in_rows(*p.mask);
    for (int64_t dim = 0; dim < 4; ++dim) p.mask_strides[dim] = p.mask->size(dim) == 1 ? 0 : p.mask->stride(dim);
  }
  find_bands(p, queries, keys);
  if (!p.mask) return;
  const int64_t matrices[2] = {p.mask_strides[0] ? p.mask->size(0) : 1, p.mask_strides[1] ? p.mask->size(1) : 1};
  const int64_t rows = p.mask_strides[2] ? queries : 1;
  p.cell_rows = blocks(rows, kMaskCell);
  p.cell_columns = blocks(keys, kMaskCell);
  p.cells.resize(static_cast<size_t>(matrices[0] * matrices[1] * p.cell_rows * p.cell_columns));
  const char* data = static_cast<const char*>(p.mask->const_data_ptr());
  const auto size = static_cast<int64_t>(p.mask->element_size());
  const int64_t row_bytes = p.mask_strides[2] * size, lines = matrices[0] * matrices[1] * p.cell_rows;
  for_items(lines, static_cast<double>(lines) * kMaskCell * static_cast<double>(keys), 0, [&](int64_t line, void*) {
    const int64_t cell_row = line % p.cell_rows, head = line / p.cell_rows % matrices[1];
    const int64_t batch = line / p.cell_rows / matrices[1], first = cell_row * kMaskCell;
    const char* at = data + (batch * p.mask_strides[0] + head * p.mask_strides[1]) * size + first * row_bytes;
    look_at_line(p, at, row_bytes, std::min<int64_t>(kMaskCell, rows - first), keys,
                 p.cells.data() + line * p.cell_columns);
  });
}

}  // namespace seqkern
