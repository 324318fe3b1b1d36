// Attention in bfloat16 on AMX. Other types, and the decoding of few queries, run the AVX-512 kernels.
#include "attention_amx.h"
#include "attention_amx_backward.h"
#include "attention_amx_forward.h"
#include "attention_few.h"

namespace seqkern {
namespace SK_TIER {
namespace {

int64_t padded(Dtype, int64_t dim) { return 32 * tiles32(dim); }

int64_t pack_bytes(const AttentionShape& s, int64_t keys, bool backward) {
  return PackedKeys(s, keys, backward, nullptr).bytes;
}
void pack(const AttentionShape& s, int64_t keys, bool backward, Rows key, Rows value, int64_t key_block,
          void* memory) {
  const PackedKeys to(s, keys, backward, memory);
  const int64_t k0 = key_block * kAmxKeys, count = min(kAmxKeys, keys - k0), group = k0 / kGroup;
  const int64_t nk = tiles32(s.head_dim), nv = tiles32(s.value_dim);
  pack_rows(key, k0, count, s.head_dim, nk, to.key + group * 2 * nk * kTile);
  if (backward) {
    pack_transposed(key, k0, count, s.head_dim, nk, to.key_t + group * 2 * nk * kTile);
    pack_rows(value, k0, count, s.value_dim, nv, to.value + group * 2 * nv * kTile);
  } else {
    pack_transposed(value, k0, count, s.value_dim, nv, to.value_t + group * 2 * nv * kTile, to.bad + group);
  }
}

int64_t forward_scratch(const AttentionShape& s) { return AmxForwardScratch(s, nullptr).bytes; }
int64_t backward_scratch(const AttentionShape& s) { return AmxBackwardScratch(s, nullptr).bytes; }

void forward(const AttentionForward& p, int64_t query_block, void* memory) {
  with_tiles(p.shape, [&](auto nk, auto nv) {
    AmxForward<decltype(nk), decltype(nv)>(p, query_block, nk, nv, memory).run();
  });
}

template <template <class> class Memory>
int64_t bytes_of(const AttentionShape& s) {
  return Memory<float>(s, nullptr).elements * 4;
}

bool backward_scores(const AttentionBackward& p, int64_t query_block, int64_t key_block, void* memory) {
  bool visible = false;
  with_tiles(p.shape, [&](auto nk, auto nv) {
    visible = AmxBackward<decltype(nk), decltype(nv)>(p, query_block, key_block, nk, nv, memory).scores();
  });
  return visible;
}
void backward_keys(const AttentionBackward& p, int64_t query_block, int64_t key_block, bool visible, bool first,
                   bool last, void* memory) {
  with_tiles(p.shape, [&](auto nk, auto nv) {
    AmxBackward<decltype(nk), decltype(nv)>(p, query_block, key_block, nk, nv, memory).keys(visible, first, last);
  });
}

}  // namespace

const AttentionKernels attention_kernels = {kAmxQueries,
                                            kAmxKeys,
                                            padded,
                                            pack_bytes,
                                            pack,
                                            forward_scratch,
                                            backward_scratch,
                                            forward,
                                            kFewRows,
                                            kFewKeys,
                                            bytes_of<FewScratch>,
                                            bytes_of<FewPartial>,
                                            few_chunk<BFloat16>,
                                            few_combine_rows<BFloat16>,
                                            amx_begin,
                                            backward_scores,
                                            backward_keys,
                                            amx_end,
                                            nullptr,
                                            nullptr};

}  // namespace SK_TIER
}  // namespace seqkern
