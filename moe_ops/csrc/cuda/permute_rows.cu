// Copies token rows to their places in the permuted buffer: each source row is read once and written top_k times. Slots
// without an expert are zero rows.
//
// The kernel starts while the map is still computed. Until the map is there, its first blocks read their rows, and draw
// a part of the others into the L2 cache, so that later the memory has little to do but to write. Stores are streaming:
// they must not drive the rows out again.

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstdint>

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
  int64_t source_stride;
  int64_t row_bytes;
  int64_t num_tokens;
  int64_t top_k;
  int64_t num_rows;
  int64_t chunks;          // a block copies one chunk of one token's row, or zeroes that of one row past the last slot
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

template <typename Vector>
__global__ void __launch_bounds__(kCopyThreads) copy_rows(CopyArguments a) {
  constexpr int64_t kWidth = sizeof(Vector);
  const int64_t token = blockIdx.x / a.chunks;
  const int64_t offset = ((blockIdx.x - token * a.chunks) * kCopyThreads + threadIdx.x) * kWidth;
  if (a.prefetch_bytes > 0 && threadIdx.x == 0) {
    const int64_t start = a.prefetch_start + blockIdx.x * a.prefetch_bytes;
    const int64_t bytes = min(a.prefetch_bytes, a.prefetch_end - start);
    if (bytes > 0) prefetch_l2(a.source + start, bytes);
  }
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
void copy(CopyArguments a, const Tensor& on) {
  constexpr int64_t kChunk = kCopyThreads * sizeof(Vector);
  a.chunks = (a.row_bytes + kChunk - 1) / kChunk;
  const DeviceTraits traits = device_traits(on);
  LaunchShape shape;
  shape.threads = kCopyThreads;
  shape.blocks = (a.num_tokens + std::max<int64_t>(0, a.num_rows - a.num_tokens * a.top_k)) * a.chunks;
  shape.overlap = true;
  // The first blocks read the rows in front of prefetch_start themselves.
  const int64_t early = kPrefetchBlocks * traits.multiprocessors;
  a.prefetch_start = early / a.chunks * a.row_bytes;
  a.prefetch_end = std::min(a.num_tokens * a.row_bytes, a.prefetch_start + kPrefetchBytes);
  const bool dense = a.source_stride == a.row_bytes && sizeof(Vector) == 16;
  if (traits.hopper && dense && a.prefetch_end > a.prefetch_start) {
    a.prefetch_bytes = ((a.prefetch_end - a.prefetch_start + early - 1) / early + 15) / 16 * 16;
  }
  if (shape.blocks > 0) launch(copy_rows<Vector>, shape, on, a);
}

bool aligned(const CopyArguments& a, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(a.source) % bytes == 0 && reinterpret_cast<uintptr_t>(a.out) % bytes == 0 &&
         a.source_stride % bytes == 0 && a.row_bytes % bytes == 0;
}

// Launched right behind the kernel that wrote `placement`. Rows of hidden_states are dense; rows may be strided.
void permute_rows(const Tensor& hidden_states, const Tensor& placement, Tensor out) {
  const torch::stable::accelerator::DeviceGuard guard(hidden_states.get_device_index());
  const int64_t element = hidden_states.element_size();
  CopyArguments a = {};
  a.source = static_cast<const uint8_t*>(hidden_states.const_data_ptr());
  a.out = static_cast<uint8_t*>(out.data_ptr());
  a.placement = static_cast<const int32_t*>(placement.const_data_ptr());
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
