// ldmatrix, mma.sync and the warp's shuffles: what the last lane to come computes for all of them.
//
// The layouts are those of the PTX documentation, "Matrix Fragments for mma.m16n8k16 with floating point type" and
// "mma.m16n8k8"; with group = lane / 4 and q = lane % 4 they are written out where they are used. Sums are cut as
// tensor cores of 8.0 cut them (simt_product.h).
#include <cmath>
#include <cstring>

#include "common/cuda/device.cuh"
#include "simt_product.h"

namespace simt {

namespace {

float of_bf16(uint32_t bits) { return seqkern::widen(seqkern::BFloat16{static_cast<uint16_t>(bits)}); }
float of_f16(uint32_t bits) { return seqkern::widen(seqkern::Half{static_cast<uint16_t>(bits)}); }
float of_tf32(uint32_t bits) { return bits_to<float>(bits & 0xFFFFE000u); }  // the low bits are not looked at

const Mma& operands_of(const Warp& warp, int lane) { return *static_cast<const Mma*>(warp.lane[lane]->payload); }

// c0, c1: row group, columns 2 q and 2 q + 1. c2, c3: row group + 8.
void load_sums(const Warp& warp, float (&d)[16][8]) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) d[lane / 4 + (i >= 2 ? 8 : 0)][lane % 4 * 2 + (i & 1)] = operands_of(warp, lane).d[i];
  }
}
void store_sums(const Warp& warp, const float (&d)[16][8]) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) operands_of(warp, lane).d[i] = d[lane / 4 + (i >= 2 ? 8 : 0)][lane % 4 * 2 + (i & 1)];
  }
}

// The sums of all lanes += a b, in blocks of half of k.
template <int K>
void multiply_all(const Warp& warp, Operand<16, K>& a, Operand<K, 8>& b, int least_exponent) {
  float d[16][8];
  load_sums(warp, d);
  a.find_powers(least_exponent);
  b.find_powers(least_exponent);
  multiply<K / 2, 24>(a, b, 8, d[0]);
  store_sums(warp, d);
}

// Elements a0 ... a7, two in a register: row = group for a0 a1 a4 a5, group + 8 for the others; column = 2 q + (i & 1)
// for i < 4, and 8 more from there on. b0 ... b3: row = 2 q + (i & 1), and 8 more for i >= 2; column = group.
template <float (*of)(uint32_t), int kLeast>
void mma_16816(Warp& warp, unsigned) {
  Operand<16, 16> a;
  Operand<16, 8> b;
  for (int lane = 0; lane < 32; ++lane) {
    const Mma& in = operands_of(warp, lane);
    const int group = lane / 4, q = lane % 4;
    for (int i = 0; i < 8; ++i) {
      const bool upper = i < 2 || (i >= 4 && i < 6);
      a.value[upper ? group : group + 8][q * 2 + (i & 1) + (i >= 4 ? 8 : 0)] = of(in.a[i / 2] >> (i & 1) * 16 & 0xFFFF);
    }
    for (int i = 0; i < 4; ++i)
      b.value[q * 2 + (i & 1) + (i >= 2 ? 8 : 0)][group] = of(in.b[i / 2] >> (i & 1) * 16 & 0xFFFF);
  }
  multiply_all(warp, a, b, kLeast);
}

// a0 ... a3: row = group for a0 and a2, group + 8 for a1 and a3; column = q for a0 and a1, q + 4 for a2 and a3.
// b0, b1: row = q and q + 4, column = group.
void mma_1688(Warp& warp, unsigned) {
  Operand<16, 8> a;
  Operand<8, 8> b;
  for (int lane = 0; lane < 32; ++lane) {
    const Mma& in = operands_of(warp, lane);
    const int group = lane / 4, q = lane % 4;
    for (int i = 0; i < 4; ++i) a.value[i % 2 == 0 ? group : group + 8][i < 2 ? q : q + 4] = of_tf32(in.a[i]);
    for (int i = 0; i < 2; ++i) b.value[i == 0 ? q : q + 4][group] = of_tf32(in.b[i]);
  }
  multiply_all(warp, a, b, kLeastExponent);
}

// Lane l names row l % 8 of matrix l / 8; register m of lane l receives the elements 2 (l % 4) and the next of row
// l / 4 of matrix m, or, transposed, of its column l / 4.
template <int Matrices, bool Transposed>
void load_matrices(Warp& warp, unsigned) {
  const auto payload = [&](int lane) -> Ldmatrix& { return *static_cast<Ldmatrix*>(warp.lane[lane]->payload); };
  uint16_t rows[8];
  for (int m = 0; m < Matrices; ++m) {
    uint16_t elements[8][8];
    for (int row = 0; row < 8; ++row) {
      memcpy(rows, payload(m * 8 + row).row, 16);
      memcpy(elements[row], rows, 16);
    }
    for (int lane = 0; lane < 32; ++lane) {
      const int i = lane / 4, j = lane % 4 * 2;
      const uint32_t low = Transposed ? elements[j][i] : elements[i][j];
      const uint32_t high = Transposed ? elements[j + 1][i] : elements[i][j + 1];
      payload(lane).r[m] = low | high << 16;
    }
  }
}

void shuffle_all(Warp& warp, unsigned mask) {
  for (int lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1) == 0) continue;
    auto& own = *static_cast<Shuffle*>(warp.lane[lane]->payload);
    if ((mask >> own.source & 1) == 0) {
      fail("shuffle: lane %d reads lane %d, which the mask %08x does not name", lane, own.source, mask);
    }
    own.result = static_cast<const Shuffle*>(warp.lane[own.source]->payload)->value;
  }
}

void ballot_all(Warp& warp, unsigned mask) {
  unsigned votes = 0;
  for (int lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1) && *static_cast<const unsigned*>(warp.lane[lane]->payload)) votes |= 1u << lane;
  }
  for (int lane = 0; lane < 32; ++lane) {
    if (mask >> lane & 1) *static_cast<unsigned*>(warp.lane[lane]->payload) = votes;
  }
}

}  // namespace

void warp_mma(MmaKind kind, float* d, const uint32_t* a, const uint32_t* b, const Place& at) {
  Mma payload = {d, a, b};
  switch (kind) {
    case MmaKind::bf16: return collective("mma_16816<BFloat16>", ~0u, mma_16816<of_bf16, kLeastExponent>, &payload, at);
    case MmaKind::f16: return collective("mma_16816<Half>", ~0u, mma_16816<of_f16, kLeastHalfExponent>, &payload, at);
    case MmaKind::tf32: return collective("mma_1688_tf32", ~0u, mma_1688, &payload, at);
  }
}

void warp_ldmatrix(int matrices, bool transposed, uint32_t* r, const void* row, const Place& at) {
  // x2 looks at the addresses of lanes 0 to 15 only.
  if (static_cast<int>(running->lane) < matrices * 8) {
    check_shared("ldmatrix", *running->block, row, 16, 16);
    check_read(row, 16);
    race_read(row, 16, __builtin_return_address(0));
  }
  Ldmatrix payload = {r, row};
  if (matrices == 4) {
    collective(transposed ? "ldmatrix_x4_trans" : "ldmatrix_x4", ~0u,
               transposed ? load_matrices<4, true> : load_matrices<4, false>, &payload, at);
  } else {
    collective(transposed ? "ldmatrix_x2_trans" : "ldmatrix_x2", ~0u,
               transposed ? load_matrices<2, true> : load_matrices<2, false>, &payload, at);
  }
}

uint64_t warp_shuffle(const char* name, unsigned mask, uint64_t value, int source, const Place& at) {
  Shuffle payload = {value, 0, source};
  collective(name, mask, shuffle_all, &payload, at);
  return payload.result;
}

unsigned warp_ballot(const char* name, unsigned mask, bool vote, const Place& at) {
  unsigned payload = vote;
  collective(name, mask, ballot_all, &payload, at);
  return payload;
}

}  // namespace simt
