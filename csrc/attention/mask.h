// The element types of a mask, and its cells. Torch-free.
#pragma once

namespace seqkern {

enum class MaskType : int { none, boolean, f64, f32, bf16, f16 };

// What a mask does to a cell of kMaskCell queries by kMaskCell keys: hides all of it, changes nothing, or neither.
enum class MaskCell : unsigned char { hidden, seen, mixed };
constexpr int kMaskCell = 32;

}  // namespace seqkern
