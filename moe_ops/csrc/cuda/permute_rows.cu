// Copies token rows to their places in the permuted buffer: each source row is read once and written top_k times.
//
// Hopper and later: one warp per block drives the bulk copy engine. Rows are loaded into a ring in shared memory; each
// lane then stores the row to one slot's place. Slots without an expert are zero rows, stored from a zeroed buffer.
// Elsewhere, and for rows that are no multiple of 16 bytes, threads copy vectors.

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstdint>

#include "launch.h"

namespace moe_ops::cuda {
namespace {

constexpr int kWarp = 32;

struct CopyArguments {
  const uint8_t* source;     // [T] rows, source_stride bytes apart
  uint8_t* out;              // [num_rows] rows of row_bytes, contiguous
  const int32_t* placement;  // [T, K] row, or ~row for a zero row
  int64_t source_stride;
  int64_t row_bytes;
  int64_t num_tokens;
  int64_t top_k;
  int64_t num_rows;
  int64_t chunk_bytes;  // a work item is one chunk of one token's row, or of one row past the last slot
  int64_t chunks;
};

// ---------------------------------------------------------------------------------------------- bulk copies, sm_90

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void bulk_load(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

__device__ __forceinline__ void bulk_store(void* to, const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
               "r"(bytes)
               : "memory");
}
#endif

constexpr int kBarrierBytes = 128;

template <int kStages>
__global__ void __launch_bounds__(kWarp) copy_rows_bulk(CopyArguments a) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t shared[];
  constexpr int kLag = kStages / 2;  // stages whose stores may still be reading
  uint64_t* full = reinterpret_cast<uint64_t*>(shared);
  uint8_t* zeros = shared + kBarrierBytes;
  uint8_t* ring = zeros + a.chunk_bytes;
  const int lane = threadIdx.x;
  const int64_t token_items = a.num_tokens * a.chunks;
  const int64_t count = blockIdx.x < token_items ? (token_items - blockIdx.x + gridDim.x - 1) / gridDim.x : 0;

  if (lane == 0) {
    for (int stage = 0; stage < kStages; ++stage) barrier_init(&full[stage]);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  for (int64_t i = lane * 16; i < a.chunk_bytes; i += kWarp * 16)
    *reinterpret_cast<uint4*>(zeros + i) = uint4{0, 0, 0, 0};
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();

  const auto load = [&](int64_t n) {
    const int64_t item = blockIdx.x + n * gridDim.x;
    const int64_t token = item / a.chunks, offset = (item - token * a.chunks) * a.chunk_bytes;
    const int stage = static_cast<int>(n % kStages);
    bulk_load(ring + stage * a.chunk_bytes, a.source + token * a.source_stride + offset,
              static_cast<uint32_t>(min(a.chunk_bytes, a.row_bytes - offset)), &full[stage]);
  };
  if (lane == 0) {
    for (int64_t n = 0; n < min(count, static_cast<int64_t>(kStages)); ++n) load(n);
  }
  wait_for_predecessor();  // source is older than the map; placement is the map

  for (int64_t n = 0; n < count; ++n) {
    const int64_t item = blockIdx.x + n * gridDim.x;
    const int64_t token = item / a.chunks, offset = (item - token * a.chunks) * a.chunk_bytes;
    const uint32_t bytes = static_cast<uint32_t>(min(a.chunk_bytes, a.row_bytes - offset));
    const int stage = static_cast<int>(n % kStages);
    int32_t place = lane < a.top_k ? a.placement[token * a.top_k + lane] : 0;
    barrier_wait(&full[stage], static_cast<uint32_t>(n / kStages) & 1);
    for (int64_t k = lane; k < a.top_k; k += kWarp) {
      if (k >= kWarp) place = a.placement[token * a.top_k + k];
      const int64_t row = place >= 0 ? place : ~place;
      if (row < a.num_rows) {
        bulk_store(a.out + row * a.row_bytes + offset, place >= 0 ? ring + stage * a.chunk_bytes : zeros, bytes);
      }
    }
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    const int64_t refill = n - kLag;
    if (refill >= 0 && refill + kStages < count) {
      asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLag) : "memory");
      __syncwarp();
      if (lane == 0) load(refill + kStages);
    }
  }
  // Rows past the last slot, where the buffer has more rows than there are slots.
  const int64_t slots = a.num_tokens * a.top_k;
  const int64_t tail_items = (a.num_rows - slots) * a.chunks;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * kWarp + lane; item < tail_items;
       item += static_cast<int64_t>(gridDim.x) * kWarp) {
    const int64_t row = item / a.chunks, offset = (item - row * a.chunks) * a.chunk_bytes;
    bulk_store(a.out + (slots + row) * a.row_bytes + offset, zeros,
               static_cast<uint32_t>(min(a.chunk_bytes, a.row_bytes - offset)));
  }
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}

// ---------------------------------------------------------------------------------------------- vectors, any device

constexpr int kCopyThreads = 256;

template <typename Vector>
__global__ void __launch_bounds__(kCopyThreads) copy_rows_vector(CopyArguments a) {
  wait_for_predecessor();
  constexpr int64_t kWidth = sizeof(Vector);
  const int64_t items = (a.num_tokens + max(int64_t{0}, a.num_rows - a.num_tokens * a.top_k)) * a.chunks;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int64_t token = item / a.chunks, start = (item - token * a.chunks) * a.chunk_bytes;
    const int64_t offset = start + threadIdx.x * kWidth;
    if (offset >= a.row_bytes || offset >= start + a.chunk_bytes) continue;
    if (token >= a.num_tokens) {
      const int64_t row = a.num_tokens * a.top_k + token - a.num_tokens;
      *reinterpret_cast<Vector*>(a.out + row * a.row_bytes + offset) = Vector{};
      continue;
    }
    const Vector value = *reinterpret_cast<const Vector*>(a.source + token * a.source_stride + offset);
    const int32_t* places = a.placement + token * a.top_k;
#pragma unroll 4
    for (int64_t k = 0; k < a.top_k; ++k) {
      const int32_t place = places[k];
      const int64_t row = place >= 0 ? place : ~place;
      if (row < a.num_rows)
        *reinterpret_cast<Vector*>(a.out + row * a.row_bytes + offset) = place >= 0 ? value : Vector{};
    }
  }
}

template <typename Vector>
void copy_vectors(CopyArguments a, int multiprocessors, const Tensor& on) {
  a.chunk_bytes = kCopyThreads * sizeof(Vector);
  a.chunks = (a.row_bytes + a.chunk_bytes - 1) / a.chunk_bytes;
  const int64_t items = (a.num_tokens + std::max<int64_t>(0, a.num_rows - a.num_tokens * a.top_k)) * a.chunks;
  LaunchShape shape;
  shape.threads = kCopyThreads;
  constexpr int64_t kWaves = 1 << 16;
  shape.blocks = std::min<int64_t>(items, static_cast<int64_t>(multiprocessors) * kWaves);
  shape.overlap = true;
  if (items > 0) launch(copy_rows_vector<Vector>, shape, on, a);
}

template <int kStages>
void copy_bulk(CopyArguments a, const DeviceTraits& traits, const Tensor& on) {
  // Large chunks make long runs in device memory; small batches are cut finer so that every multiprocessor has work.
  constexpr int64_t kLargestChunk = 16 << 10, kSmallestChunk = 2 << 10, kBlocksPerMultiprocessor = 2;
  int64_t chunk = std::min(a.row_bytes, kLargestChunk);
  while (chunk > kSmallestChunk &&
         std::max(a.num_tokens, a.num_rows - a.num_tokens * a.top_k) * ((a.row_bytes + chunk - 1) / chunk) <
             traits.multiprocessors) {
    chunk /= 2;
  }
  const int64_t pieces = (a.row_bytes + chunk - 1) / chunk;
  a.chunk_bytes = ((a.row_bytes + pieces - 1) / pieces + 15) / 16 * 16;
  a.chunks = (a.row_bytes + a.chunk_bytes - 1) / a.chunk_bytes;
  const int64_t tail = std::max<int64_t>(0, a.num_rows - a.num_tokens * a.top_k);
  const int64_t items = std::max(a.num_tokens * a.chunks, (tail * a.chunks + kWarp - 1) / kWarp);
  LaunchShape shape;
  shape.threads = kWarp;
  shape.blocks = std::min<int64_t>(items, traits.multiprocessors * kBlocksPerMultiprocessor);
  shape.shared_bytes = kBarrierBytes + (kStages + 1) * a.chunk_bytes;
  shape.overlap = true;
  if (items > 0) launch(copy_rows_bulk<kStages>, shape, on, a);
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
  const DeviceTraits traits = device_traits(hidden_states);
  if (aligned(a, 16)) {
    if (traits.hopper) return copy_bulk<6>(a, traits, hidden_states);
    return copy_vectors<uint4>(a, traits.multiprocessors, hidden_states);
  }
  if (aligned(a, 4)) return copy_vectors<uint32_t>(a, traits.multiprocessors, hidden_states);
  copy_vectors<uint16_t>(a, traits.multiprocessors, hidden_states);
}

}  // namespace
}  // namespace moe_ops::cuda

STABLE_TORCH_LIBRARY_IMPL(moe_ops, CUDA, m) { m.impl("_permute_rows", TORCH_BOX(&moe_ops::cuda::permute_rows)); }
