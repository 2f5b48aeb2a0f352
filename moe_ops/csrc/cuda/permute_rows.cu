// Copies token rows to their places in the permuted buffer. Slots without an expert are zero rows.
//
// A small batch: each row is read once and written top_k times. A large one: a block per row of the result, in an order
// that goes through the tokens in groups of a few hundred and through the experts within a group. So writes run through
// memory in stretches of many rows (scattered rows cost 3 to 6 %), and a row is read from memory once and then from the
// L2 cache.
//
// The kernels start while the map is still computed and draw rows into the L2 cache until it is there. Stores are
// streaming: they must not drive those rows out.

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstdint>
#include <optional>

#include "launch.h"

namespace moe_ops::cuda {
namespace {

constexpr int kCopyThreads = 256;
constexpr int64_t kPrefetchBytes =
    24 << 20;                           // of rows in all: what memory delivers while a map is made; fits every L2 here
constexpr int64_t kPrefetchBlocks = 8;  // of a multiprocessor, which are there before the map is

struct CopyArguments {
  const uint8_t* source;     // [T] rows, source_stride bytes apart
  uint8_t* out;              // [num_rows] rows of row_bytes, contiguous
  const int32_t* placement;  // [T, K] row, or ~row for a zero row
  const int2* work;          // [T * K] (slot, placement) in the order of the blocks, or null
  int64_t source_stride;
  int64_t row_bytes;
  int64_t num_tokens;
  int64_t top_k;
  int64_t num_rows;
  int64_t chunks;          // of a token's row, where `work` is null: a block copies one
  int64_t prefetch_bytes;  // of one block, from prefetch_start + blockIdx.x times that on; 0: none
  int64_t prefetch_start;
  int64_t prefetch_end;
};

template <typename Vector>
__device__ __forceinline__ void store_streaming(uint8_t* to, Vector value) {
  if constexpr (sizeof(Vector) >= sizeof(uint32_t)) {
    __stcs(reinterpret_cast<Vector*>(to), value);
  } else {
    *reinterpret_cast<Vector*>(to) = value;
  }
}

__device__ __forceinline__ void prefetch_l2(const uint8_t* from, int64_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(static_cast<uint32_t>(bytes)) : "memory");
#endif
}

__device__ __forceinline__ void prefetch_share(const CopyArguments& a) {
  if (a.prefetch_bytes == 0 || threadIdx.x != 0) return;
  const int64_t start = a.prefetch_start + blockIdx.x * a.prefetch_bytes;
  const int64_t bytes = min(a.prefetch_bytes, a.prefetch_end - start);
  if (bytes > 0) prefetch_l2(a.source + start, bytes);
}

template <typename Vector>
__global__ void __launch_bounds__(kCopyThreads) copy_rows(CopyArguments a) {
  constexpr int64_t kWidth = sizeof(Vector);
  const int64_t token = blockIdx.x / a.chunks;
  const int64_t offset = ((blockIdx.x - token * a.chunks) * kCopyThreads + threadIdx.x) * kWidth;
  prefetch_share(a);
  const bool inside = offset < a.row_bytes, routed_token = token < a.num_tokens;
  Vector value = {};
  if (inside && routed_token) value = *reinterpret_cast<const Vector*>(a.source + token * a.source_stride + offset);
  wait_for_predecessor();  // the source is older than the map, placement is the map
  if (!inside) return;
  if (!routed_token) {
    const int64_t row = a.num_tokens * a.top_k + token - a.num_tokens;
    store_streaming(a.out + row * a.row_bytes + offset, value);
    return;
  }
  const int32_t* places = a.placement + token * a.top_k;
#pragma unroll 4
  for (int64_t k = 0; k < a.top_k; ++k) {
    const int32_t place = places[k];
    const int64_t row = place >= 0 ? place : ~place;
    if (row < a.num_rows) store_streaming(a.out + row * a.row_bytes + offset, place >= 0 ? value : Vector{});
  }
}

template <typename Vector>
__global__ void __launch_bounds__(kCopyThreads) copy_rows_in_order(CopyArguments a) {
  constexpr int64_t kWidth = sizeof(Vector), kStep = 2 * kCopyThreads * kWidth;
  prefetch_share(a);
  wait_for_predecessor();
  const int64_t slots = a.num_tokens * a.top_k;
  const int2 item = blockIdx.x < slots ? a.work[blockIdx.x] : make_int2(0, ~static_cast<int>(blockIdx.x));
  const bool zero = item.y < 0;
  const int64_t row = zero ? ~item.y : item.y;
  if (row >= a.num_rows) return;
  const uint8_t* from =
      a.source + static_cast<int64_t>(static_cast<unsigned>(item.x) / static_cast<unsigned>(a.top_k)) * a.source_stride;
  uint8_t* to = a.out + row * a.row_bytes;
  for (int64_t offset = threadIdx.x * kWidth; offset < a.row_bytes; offset += kStep) {
    const int64_t second = offset + kStep / 2;
    const bool two = second < a.row_bytes;
    Vector left = {}, right = {};
    if (!zero) {
      left = __ldg(reinterpret_cast<const Vector*>(from + offset));
      if (two) right = __ldg(reinterpret_cast<const Vector*>(from + second));
    }
    store_streaming(to + offset, left);
    if (two) store_streaming(to + second, right);
  }
}

// Blocks that are there before the map is read, between them, up to kPrefetchBytes from `start` on.
void share_prefetch(CopyArguments& a, int64_t start, int64_t early_blocks) {
  a.prefetch_start = start;
  a.prefetch_end = std::min(a.num_tokens * a.row_bytes, start + kPrefetchBytes);
  if (a.source_stride != a.row_bytes || a.prefetch_end <= start || early_blocks == 0) return;
  constexpr int64_t kUnit = 16;
  const int64_t share = (a.prefetch_end - start + early_blocks - 1) / early_blocks;
  a.prefetch_bytes = (share + kUnit - 1) / kUnit * kUnit;
}

template <typename Vector>
void copy(CopyArguments a, const Tensor& on) {
  const DeviceTraits traits = device_traits(on);
  const int64_t early = traits.hopper && sizeof(Vector) == 16 ? kPrefetchBlocks * traits.multiprocessors : 0;
  const int64_t slots = a.num_tokens * a.top_k;
  LaunchShape shape;
  shape.threads = kCopyThreads;
  shape.overlap = true;
  if (a.work != nullptr) {
    share_prefetch(a, 0, early);
    shape.blocks = std::max(slots, a.num_rows);
    if (shape.blocks > 0) launch(copy_rows_in_order<Vector>, shape, on, a);
    return;
  }
  constexpr int64_t kChunk = kCopyThreads * sizeof(Vector);
  a.chunks = (a.row_bytes + kChunk - 1) / kChunk;
  share_prefetch(a, early / a.chunks * a.row_bytes, early);  // the first blocks read the rows in front themselves
  shape.blocks = (a.num_tokens + std::max<int64_t>(0, a.num_rows - slots)) * a.chunks;
  if (shape.blocks > 0) launch(copy_rows<Vector>, shape, on, a);
}

bool aligned(const CopyArguments& a, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(a.source) % bytes == 0 && reinterpret_cast<uintptr_t>(a.out) % bytes == 0 &&
         a.source_stride % bytes == 0 && a.row_bytes % bytes == 0;
}

// Launched right behind the kernel that wrote `placement`. Rows of hidden_states are dense; rows may be strided.
void permute_rows(const Tensor& hidden_states, const Tensor& placement, std::optional<Tensor> work, Tensor out) {
  const torch::stable::accelerator::DeviceGuard guard(hidden_states.get_device_index());
  const int64_t element = hidden_states.element_size();
  CopyArguments a = {};
  a.source = static_cast<const uint8_t*>(hidden_states.const_data_ptr());
  a.out = static_cast<uint8_t*>(out.data_ptr());
  a.placement = static_cast<const int32_t*>(placement.const_data_ptr());
  if (work.has_value()) a.work = static_cast<const int2*>(work->const_data_ptr());
  a.num_tokens = hidden_states.size(0);
  a.source_stride = hidden_states.stride(0) * element;
  a.row_bytes = hidden_states.size(1) * element;
  a.top_k = placement.size(1);
  a.num_rows = out.size(0);
  if (a.num_rows == 0 || a.row_bytes == 0) return;
  if (aligned(a, sizeof(uint4))) return copy<uint4>(a, hidden_states);
  if (aligned(a, sizeof(uint32_t))) return copy<uint32_t>(a, hidden_states);
  copy<uint16_t>(a, hidden_states);
}

}  // namespace
}  // namespace moe_ops::cuda

STABLE_TORCH_LIBRARY_IMPL(moe_ops, CUDA, m) { m.impl("_permute_rows", TORCH_BOX(&moe_ops::cuda::permute_rows)); }
