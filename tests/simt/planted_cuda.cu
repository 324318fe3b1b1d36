// The kernels of planted.cuh as torch ops, launched as the project's own are.
#include <string>
#include <tuple>

#include "common/cuda/launch.h"
#include "planted.cuh"

namespace seqkern {
namespace {

template <Fault fault>
using Planted = std::integral_constant<Fault, fault>;

// Calls `f` with the fault as a constant: the one of `faults` that is meant.
template <Fault... faults, class F>
void with_fault(int64_t fault, const char* op, F f) {
  bool found = false;
  ((static_cast<int64_t>(faults) == fault ? (found = true, f(Planted<faults>())) : void()), ...);
  SK_CHECK(found, op, ": fault ", fault, " is not planted here");
}

template <class T>
T* data(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

Tensor row_sums_op(const Tensor& x, int64_t fault) {
  Tensor y = empty(x, {x.size(0)}, ScalarType::Float);
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(x.size(0)));
  shape.block = dim3(128);
  shape.shared_bytes = 4 * sizeof(float);
  with_fault<Fault::none, Fault::no_barrier, Fault::outside_shared, Fault::outside_global>(
      fault, "row_sums", [&](auto planted) {
        launch<const float*, float*, int64_t>("row_sums", row_sums<planted()>, shape, current_stream(x),
                                              data<const float>(x), data<float>(y), x.size(1));
      });
  return y;
}

template <class T>
Tensor matmul_of(const Tensor& a, const Tensor& b, int64_t fault) {
  const int64_t m = a.size(0), k = a.size(1), n = b.size(1);
  Tensor c = empty(a, {m, n}, ScalarType::Float);
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(n / kTileN), static_cast<unsigned>(m / kTileM));
  shape.block = dim3(128);
  shape.shared_bytes = 2 * (kTileM + kTileK) * (kTileK * sizeof(T) + kPad);
  with_fault<Fault::none, Fault::no_barrier, Fault::no_last_barrier, Fault::no_wait, Fault::early_wait, Fault::swapped>(
      fault, "matmul", [&](auto planted) {
        launch<const T*, const T*, float*, int, int>("matmul", matmul<T, planted()>, shape, current_stream(a),
                                                     data<const T>(a), data<const T>(b), data<float>(c),
                                                     static_cast<int>(n), static_cast<int>(k));
      });
  return c;
}

Tensor matmul_op(const Tensor& a, const Tensor& b, int64_t fault) {
  switch (dtype_of(a, "matmul", "a")) {
    case Dtype::bf16: return matmul_of<BFloat16>(a, b, fault);
    case Dtype::f16: return matmul_of<Half>(a, b, fault);
    default: return matmul_of<float>(a, b, fault);
  }
}

Tensor cluster_steps_op(const Tensor& x, int64_t steps, int64_t fault) {
  const int64_t size = x.size(1) / kWidth;
  Tensor y = empty(x, {x.size(0), x.size(1)}, ScalarType::Float);
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(x.size(0) * size));
  shape.block = dim3(kWidth);
  shape.shared_bytes = static_cast<size_t>(128 + 2 * size * kWidth * 4);
  shape.cluster = static_cast<int>(size);
  with_fault<Fault::none, Fault::no_wait, Fault::no_barrier, Fault::leaves, Fault::too_many_arrivals,
             Fault::too_few_bytes, Fault::narrow_wait>(fault, "cluster_steps", [&](auto planted) {
    launch<const float*, float*, int>("cluster_steps", cluster_steps<planted()>, shape, current_stream(x),
                                      data<const float>(x), data<float>(y), static_cast<int>(steps));
  });
  return y;
}

Tensor grid_steps_op(const Tensor& x, const Tensor& packets, int64_t steps, bool resident, int64_t fault) {
  const int64_t blocks = x.size(0);
  Tensor y = empty(x, {blocks * 3 + 1}, ScalarType::Float);
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(blocks));
  shape.block = dim3(32);
  shape.all_resident = resident;
  auto* words = data<uint4>(packets);
  with_fault<Fault::none, Fault::no_wait, Fault::one_tag>(fault, "grid_steps", [&](auto planted) {
    launch<const float*, float*, uint4*, uint32_t*, int>("grid_steps", grid_steps<planted()>, shape, current_stream(x),
                                                         data<const float>(x), data<float>(y), words,
                                                         &words[3 * blocks].x, static_cast<int>(steps));
  });
  return y;
}

Tensor warp_sums_op(const Tensor& like, int64_t fault) {
  Tensor y = empty(like, {3}, ScalarType::Float);
  LaunchShape shape;
  shape.grid = dim3(3);
  shape.block = dim3(32);
  shape.shared_bytes = 32 * sizeof(float);
  with_fault<Fault::none, Fault::no_barrier>(fault, "warp_sums", [&](auto planted) {
    launch<float*>("warp_sums", warp_sums<planted()>, shape, current_stream(like), data<float>(y));
  });
  return y;
}

Tensor last_block_sums_op(const Tensor& x, const Tensor& done, int64_t fault) {
  const int64_t blocks = x.size(0);
  Tensor parts = empty(x, {blocks}, ScalarType::Float), y = empty(x, {1}, ScalarType::Float);
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(blocks));
  shape.block = dim3(32);
  shape.all_resident = true;
  with_fault<Fault::none, Fault::no_fence, Fault::no_acquire>(fault, "last_block_sums", [&](auto planted) {
    launch<const float*, float*, uint32_t*, float*>("last_block_sums", last_block_sums<planted()>, shape,
                                                    current_stream(x), data<const float>(x), data<float>(parts),
                                                    data<uint32_t>(done), data<float>(y));
  });
  return y;
}

Tensor mma_op(const Tensor& a, const Tensor& b, const Tensor& d, int64_t kind) {
  Tensor sums = empty(d, {32, 4}, ScalarType::Float);
  memcpy(data<float>(sums), data<float>(d), 32 * 4 * sizeof(float));
  LaunchShape shape;
  shape.grid = dim3(1);
  shape.block = dim3(32);
  launch<int, const uint32_t*, const uint32_t*, float*>("mma", mma_registers, shape, current_stream(d),
                                                        static_cast<int>(kind), data<const uint32_t>(a),
                                                        data<const uint32_t>(b), data<float>(sums));
  return sums;
}

Tensor ldmatrix_op(const Tensor& rows, bool transposed) {
  const int64_t matrices = rows.size(0) / 8;
  Tensor r = empty(rows, {32, matrices}, ScalarType::Int);
  LaunchShape shape;
  shape.grid = dim3(1);
  shape.block = dim3(32);
  shape.shared_bytes = static_cast<size_t>(rows.size(0)) * 16;
  const auto kernel = matrices == 4 ? (transposed ? ldmatrix_registers<4, true> : ldmatrix_registers<4, false>)
                                    : (transposed ? ldmatrix_registers<2, true> : ldmatrix_registers<2, false>);
  launch<const uint4*, uint32_t*>("ldmatrix", kernel, shape, current_stream(rows), data<const uint4>(rows),
                                  data<uint32_t>(r));
  return r;
}

Tensor part_copies_op(const Tensor& x) {
  Tensor y = empty(x, {17, 16}, ScalarType::Byte);
  LaunchShape shape;
  shape.grid = dim3(1);
  shape.block = dim3(17);
  shape.shared_bytes = 17 * 16;
  launch<const unsigned char*, unsigned char*>("part_copies", part_copies, shape, current_stream(x),
                                               data<const unsigned char>(x), data<unsigned char>(y));
  return y;
}

Tensor exchange_op(const Tensor& x, int64_t which, int64_t argument, int64_t width) {
  Tensor y = empty(x, {32}, ScalarType::Float);
  LaunchShape shape;
  shape.grid = dim3(1);
  shape.block = dim3(32);
  launch<int, int, int, const float*, float*>("exchange", exchange_values, shape, current_stream(x),
                                              static_cast<int>(which), static_cast<int>(argument),
                                              static_cast<int>(width), data<const float>(x), data<float>(y));
  return y;
}

Tensor round_trip_op(const Tensor& x, bool half) {
  Tensor y = empty(x, {x.numel()}, ScalarType::Float);
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>((x.numel() + 255) / 256));
  shape.block = dim3(256);
  launch<const float*, float*, int64_t>("round_trip", half ? round_trip<Half> : round_trip<BFloat16>, shape,
                                        current_stream(x), data<const float>(x), data<float>(y), x.numel());
  return y;
}

Tensor misuse_op(const Tensor& x, int64_t which, int64_t shared, int64_t cluster) {
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(cluster));
  shape.block = dim3(64);
  shape.shared_bytes = static_cast<size_t>(shared);
  shape.cluster = static_cast<int>(cluster);
  launch<int, float*>("misuse", misuse, shape, current_stream(x), static_cast<int>(which), data<float>(x));
  return x;
}

// Of a block of that many threads: how many fit a multiprocessor, and how many clusters the device.
std::tuple<int64_t, int64_t> residents_op(const Tensor& x, int64_t threads, int64_t shared, int64_t cluster) {
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(cluster));
  shape.block = dim3(static_cast<unsigned>(threads));
  shape.shared_bytes = static_cast<size_t>(shared);
  shape.cluster = static_cast<int>(cluster);
  const OnDevice guard(x);
  const void* kernel = reinterpret_cast<const void*>(misuse);
  return {resident_blocks("residents", kernel, shape), resident_clusters("residents", kernel, shape)};
}

}  // namespace
}  // namespace seqkern

// Two builds of this file are loaded into one process: the ops of the one that looks for races have their own name.
#if defined(SIMT_RACE)
#define SK_PLANTED seqkern_planted_race
#else
#define SK_PLANTED seqkern_planted
#endif
#define SK_LIBRARY(name, m) STABLE_TORCH_LIBRARY(name, m)

SK_LIBRARY(SK_PLANTED, m) {
  m.def("row_sums(Tensor x, int fault) -> Tensor");
  m.def("matmul(Tensor a, Tensor b, int fault) -> Tensor");
  m.def("cluster_steps(Tensor x, int steps, int fault) -> Tensor");
  m.def("grid_steps(Tensor x, Tensor(a!) packets, int steps, bool resident, int fault) -> Tensor");
  m.def("warp_sums(Tensor like, int fault) -> Tensor");
  m.def("last_block_sums(Tensor x, Tensor(a!) done, int fault) -> Tensor");
  m.def("mma(Tensor a, Tensor b, Tensor d, int kind) -> Tensor");
  m.def("ldmatrix(Tensor rows, bool transposed) -> Tensor");
  m.def("part_copies(Tensor x) -> Tensor");
  m.def("exchange(Tensor x, int which, int argument, int width) -> Tensor");
  m.def("round_trip(Tensor x, bool half) -> Tensor");
  m.def("misuse(Tensor(a!) x, int which, int shared, int cluster) -> Tensor(a!)");
  m.def("residents(Tensor x, int threads, int shared, int cluster) -> (int, int)");
}

STABLE_TORCH_LIBRARY_IMPL(SK_PLANTED, SK_CUDA_KEY, m) {
  m.impl("row_sums", TORCH_BOX(&seqkern::row_sums_op));
  m.impl("matmul", TORCH_BOX(&seqkern::matmul_op));
  m.impl("cluster_steps", TORCH_BOX(&seqkern::cluster_steps_op));
  m.impl("grid_steps", TORCH_BOX(&seqkern::grid_steps_op));
  m.impl("warp_sums", TORCH_BOX(&seqkern::warp_sums_op));
  m.impl("last_block_sums", TORCH_BOX(&seqkern::last_block_sums_op));
  m.impl("mma", TORCH_BOX(&seqkern::mma_op));
  m.impl("ldmatrix", TORCH_BOX(&seqkern::ldmatrix_op));
  m.impl("part_copies", TORCH_BOX(&seqkern::part_copies_op));
  m.impl("exchange", TORCH_BOX(&seqkern::exchange_op));
  m.impl("round_trip", TORCH_BOX(&seqkern::round_trip_op));
  m.impl("misuse", TORCH_BOX(&seqkern::misuse_op));
  m.impl("residents", TORCH_BOX(&seqkern::residents_op));
}
