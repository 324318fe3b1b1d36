// The element types of a mask. Torch-free.
#pragma once

namespace seqkern {

enum class MaskType : int { none, boolean, f64, f32, bf16, f16 };

}  // namespace seqkern
