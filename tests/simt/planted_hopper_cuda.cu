// The kernels of planted_hopper.cuh as torch ops.
#include "common/cuda/hopper/launch.h"
#include "planted_hopper.cuh"

namespace seqkern {
namespace {

// Boxes of 64 x 64 of a tensor (outer, batches, rows, columns), with any strides.
TensorMap map_of(const Tensor& t, Dtype dtype) {
  const int64_t sizes[4] = {t.size(3), t.size(2), t.size(1), t.size(0)};
  const int64_t strides[4] = {t.stride(3), t.stride(2), t.stride(1), t.stride(0)};
  return tensor_map("hopper_product", dtype, t.const_data_ptr(), sizes, strides, {64, 64, 1, 1});
}

template <class T, int kN, bool kRegisters, bool kTransposeA, bool kTransposeB, bool kPlanted>
void product_of(const Tensor& a, const Tensor& b, const Tensor& out, Dtype dtype, float* sums,
                HopperFault fault = HopperFault::none) {
  const int rows = static_cast<int>(a.size(kTransposeA ? 3 : 2)), depth = static_cast<int>(a.size(kTransposeA ? 2 : 3));
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>((rows + 127) / 128), static_cast<unsigned>(a.size(0) * a.size(1)));
  shape.block = dim3(384);
  shape.shared_bytes = HopperShared<kN>::kBytes;
  launch<TensorMap, TensorMap, TensorMap, float*, int, int, int, HopperFault>(
      "hopper_product", hopper_product<T, kN, kRegisters, kTransposeA, kTransposeB, kPlanted>, shape, current_stream(a),
      map_of(a, dtype), map_of(b, dtype), map_of(sums == nullptr ? out : b, dtype), sums, rows, depth,
      static_cast<int>(a.size(1)), fault);
}

// a (outer, batches, rows, depth), b (outer, batches, columns, depth), or transposed the last two exchanged; out
// (outer, batches, rows, columns), in their dtype or, to be added to, float32. Faults: of products of 128 columns.
void product_op(const Tensor& a, const Tensor& b, Tensor out, bool registers, bool transpose_a, bool transpose_b,
                int64_t fault) {
  const Dtype dtype = dtype_of(a, "hopper_product", "a");
  const int64_t columns = b.size(transpose_b ? 3 : 2);
  float* sums = out.scalar_type() == ScalarType::Float ? static_cast<float*>(out.mutable_data_ptr()) : nullptr;
  bool found = false;
  const auto variant = [&](auto type, auto n, auto r, auto ta, auto tb) {
    using T = decltype(type);
    if (found || fault != 0 || dtype != (std::is_same_v<T, Half> ? Dtype::f16 : Dtype::bf16) || columns != n() ||
        registers != r() || transpose_a != ta() || transpose_b != tb()) {
      return;
    }
    found = true;
    product_of<T, n(), r(), ta(), tb(), false>(a, b, out, dtype, sums);
  };
  using Yes = std::true_type;
  using No = std::false_type;
  using N80 = std::integral_constant<int, 80>;
  using N128 = std::integral_constant<int, 128>;
  variant(BFloat16(), N128(), No(), No(), No());
  variant(BFloat16(), N128(), No(), No(), Yes());
  variant(BFloat16(), N128(), No(), Yes(), Yes());
  variant(BFloat16(), N128(), Yes(), No(), No());
  variant(BFloat16(), N128(), Yes(), No(), Yes());
  variant(Half(), N80(), No(), No(), No());
  variant(Half(), N80(), No(), Yes(), Yes());
  variant(Half(), N80(), Yes(), No(), Yes());
  if (fault != 0 && dtype == Dtype::bf16 && columns == 128 && !registers && !transpose_a && !transpose_b) {
    found = true;
    product_of<BFloat16, 128, false, false, false, true>(a, b, out, dtype, sums, static_cast<HopperFault>(fault));
  }
  SK_CHECK(found, "hopper_product: no such variant");
}

Tensor handover_op(const Tensor& like, int64_t rounds, int64_t fault) {
  Tensor out = empty(like, {rounds, 64}, ScalarType::Int);
  LaunchShape shape;
  shape.block = dim3(96);
  shape.shared_bytes = 128;
  auto* kernel = fault == 0 ? hopper_handover<HopperFault::none> : hopper_handover<HopperFault::early_release>;
  launch<int*, int>("hopper_handover", kernel, shape, current_stream(like), static_cast<int*>(out.mutable_data_ptr()),
                    static_cast<int>(rounds));
  return out;
}

}  // namespace
}  // namespace seqkern

#if defined(SIMT_RACE)
#define SK_PLANTED seqkern_planted_hopper_race
#else
#define SK_PLANTED seqkern_planted_hopper
#endif
#define SK_LIBRARY(name, m) STABLE_TORCH_LIBRARY(name, m)

SK_LIBRARY(SK_PLANTED, m) {
  m.def(
      "product(Tensor a, Tensor b, Tensor(a!) out, bool registers, bool transpose_a, bool transpose_b, int fault) -> "
      "()");
  m.def("handover(Tensor like, int rounds, int fault) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(SK_PLANTED, SK_CUDA_KEY, m) {
  m.impl("product", TORCH_BOX(&seqkern::product_op));
  m.impl("handover", TORCH_BOX(&seqkern::handover_op));
}
