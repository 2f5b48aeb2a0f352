// Copies token rows to their places in the permuted buffer: each source row is read once and written top_k times. Slots
// without an expert are zero rows. The kernels start while the map is still computed, and read their first rows
// meanwhile.
//
// Two ways: threads that hold a piece of a row and store it top_k times; and, for batches that the memory has not long
// to do with, bulk copies through shared memory, which is full of rows when the map is there. Stores are streaming:
// they must not drive the rows out of the L2 cache. Rows are not drawn into that cache ahead: memory that reads and
// writes in turns loses more than the early rows gain.

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstdint>

#include "launch.h"

namespace moe_ops::cuda {
namespace {

constexpr int kWarp = 32;
// Rows in all, between which threads take four vectors each: 3 % faster than one vector in twice as many threads there,
// slower for few tokens and for outputs of several gigabytes.
constexpr int64_t kLeastVectorBytes = 48 << 20;
constexpr int64_t kMostVectorBytes = 512 << 20;

// Of bulk copies.
constexpr int kBulkWarps = 4;
constexpr int kMaxStages = 32;
constexpr int64_t kMaxUnit = 7168;  // bytes of a copy: pieces of a row are as equal as possible
constexpr int64_t kMinUnit = 2048;  // smaller ones are issued too slowly
constexpr int64_t kLeastBulkTokens = 1024;
constexpr int64_t kMostBulkBytes = 60 << 20;  // of rows; above, stores of threads are faster
constexpr int64_t kStaticShared = 4096;

struct CopyArguments {
  const uint8_t* source;     // [T] rows, source_stride bytes apart
  uint8_t* out;              // [num_rows] rows of row_bytes, contiguous
  const int32_t* placement;  // [T, K] row, or ~row for a zero row
  int64_t source_stride;
  int64_t row_bytes;
  int64_t num_tokens;
  int64_t top_k;
  int64_t num_rows;
  int64_t chunks;  // a block copies one chunk of one token's row, or zeroes that of one row past the last slot
};

template <typename Vector>
__device__ __forceinline__ void store_streaming(uint8_t* to, Vector value) {
  if constexpr (sizeof(Vector) >= sizeof(uint32_t)) {
    __stcs(reinterpret_cast<Vector*>(to), value);
  } else {
    *reinterpret_cast<Vector*>(to) = value;
  }
}

// kVectors of a thread, all in flight at once.
template <typename Vector, int kThreads, int kVectors>
__global__ void __launch_bounds__(kThreads) copy_rows(CopyArguments a) {
  constexpr int64_t kStep = kThreads * sizeof(Vector);
  const int64_t token = blockIdx.x / a.chunks;
  const int64_t offset = (blockIdx.x - token * a.chunks) * kVectors * kStep + threadIdx.x * sizeof(Vector);
  const bool routed_token = token < a.num_tokens;
  Vector value[kVectors] = {};
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int64_t at = offset + i * kStep;
    if (at < a.row_bytes && routed_token) {
      value[i] = *reinterpret_cast<const Vector*>(a.source + token * a.source_stride + at);
    }
  }
  wait_for_predecessor();  // the source is older than the map, placement is the map
  if (!routed_token) {
    const int64_t row = a.num_tokens * a.top_k + token - a.num_tokens;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int64_t at = offset + i * kStep;
      if (at < a.row_bytes) store_streaming(a.out + row * a.row_bytes + at, value[i]);
    }
    return;
  }
  const int32_t* places = a.placement + token * a.top_k;
#pragma unroll 4
  for (int64_t k = 0; k < a.top_k; ++k) {
    const int32_t place = places[k];
    const int64_t row = place >= 0 ? place : ~place;
    if (row >= a.num_rows) continue;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int64_t at = offset + i * kStep;
      if (at < a.row_bytes) store_streaming(a.out + row * a.row_bytes + at, place >= 0 ? value[i] : Vector{});
    }
  }
}

template <typename Vector, int kThreads, int kVectors>
void copy(CopyArguments a, const Tensor& on) {
  constexpr int64_t kChunk = kThreads * kVectors * sizeof(Vector);
  a.chunks = (a.row_bytes + kChunk - 1) / kChunk;
  LaunchShape shape;
  shape.threads = kThreads;
  shape.blocks = (a.num_tokens + std::max<int64_t>(0, a.num_rows - a.num_tokens * a.top_k)) * a.chunks;
  shape.overlap = true;
  if (shape.blocks > 0) launch(copy_rows<Vector, kThreads, kVectors>, shape, on, a);
}

struct BulkArguments {
  const uint8_t* source;
  uint8_t* out;
  const int32_t* placement;
  int64_t source_stride;
  int64_t row_bytes;
  int64_t num_rows;
  int64_t items;  // tokens * pieces
  int32_t top_k;  // at most the lanes of a warp
  int32_t pieces;
  int32_t unit;  // bytes of a piece but the last
  int32_t stages;
};

// The pieces of rows in turns over the warps of the grid. A warp has a ring of pieces in shared memory; its lanes each
// send the piece of a stage to one place. A stage is filled again when the copies of the next one have been issued.
__global__ void __launch_bounds__(kBulkWarps* kWarp) copy_bulk(BulkArguments a) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t shared[];  // a piece of zeros, then the rings
  __shared__ __align__(8) uint64_t arrived[kBulkWarps * kMaxStages];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const uint32_t zeros = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const uint32_t ring = zeros + (1 + warp * a.stages) * a.unit;
  const uint32_t barriers = static_cast<uint32_t>(__cvta_generic_to_shared(arrived + warp * kMaxStages));
  const int64_t first = blockIdx.x + static_cast<int64_t>(warp) * gridDim.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kBulkWarps;
  uint64_t evict_first;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(evict_first));
  if (lane < a.stages) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barriers + 8 * lane) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncwarp();
  const auto piece_of = [&](int64_t item) { return static_cast<int32_t>(item % a.pieces); };
  const auto bytes_of = [&](int32_t piece) {
    return static_cast<uint32_t>(min(static_cast<int64_t>(a.unit), a.row_bytes - static_cast<int64_t>(piece) * a.unit));
  };
  const auto fill = [&](int64_t item, int stage) {
    const int32_t piece = piece_of(item);
    const uint32_t barrier = barriers + 8 * stage, bytes = bytes_of(piece);
    const uint8_t* from = a.source + item / a.pieces * a.source_stride + static_cast<int64_t>(piece) * a.unit;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     ring + stage * a.unit),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
  };
  if (lane == 0) {
    for (int stage = 0; stage < a.stages && first + stage * step < a.items; ++stage) fill(first + stage * step, stage);
  }
  for (int32_t i = threadIdx.x * 16; i < a.unit; i += blockDim.x * 16) {
    *reinterpret_cast<uint4*>(shared + i) = make_uint4(0, 0, 0, 0);
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  wait_for_predecessor();  // the source is older than the map, placement is the map

  int32_t place = 0;
  if (first < a.items && lane < a.top_k) place = a.placement[first / a.pieces * a.top_k + lane];
  int stage = 0;
  uint32_t phase = 0;
#pragma unroll 1
  for (int64_t item = first; item < a.items; item += step) {
    const int64_t next = item + step;
    int32_t next_place = 0;
    if (next < a.items && lane < a.top_k) next_place = a.placement[next / a.pieces * a.top_k + lane];
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::
            "r"(barriers + 8 * stage),
        "r"(phase)
        : "memory");
    const int32_t piece = piece_of(item);
    const int64_t row = place >= 0 ? place : ~place;
    if (lane < a.top_k && row < a.num_rows) {
      uint8_t* to = a.out + row * a.row_bytes + static_cast<int64_t>(piece) * a.unit;
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(to),
                   "r"(place >= 0 ? ring + stage * a.unit : zeros), "r"(bytes_of(piece)), "l"(evict_first)
                   : "memory");
    }
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    if (item != first) {
      asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");  // the stage before has been read
      __syncwarp();
      const int64_t again = item + (a.stages - 1) * step;
      if (lane == 0 && again < a.items) fill(again, (stage == 0 ? a.stages : stage) - 1);
    }
    if (++stage == a.stages) {
      stage = 0;
      phase ^= 1;
    }
    place = next_place;
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}

// Whether bulk copies did the work; every place of `a` is then aligned to 16 bytes.
bool copy_in_bulk(const CopyArguments& a, const Tensor& on) {
  const DeviceTraits traits = device_traits(on);
  const bool fits = a.num_tokens >= kLeastBulkTokens && a.num_tokens * a.row_bytes <= kMostBulkBytes &&
                    a.top_k <= kWarp && a.num_rows <= a.num_tokens * a.top_k;
  if (!traits.hopper || !fits) return false;
  BulkArguments b = {};
  b.source = a.source;
  b.out = a.out;
  b.placement = a.placement;
  b.source_stride = a.source_stride;
  b.row_bytes = a.row_bytes;
  b.num_rows = a.num_rows;
  b.top_k = static_cast<int32_t>(a.top_k);
  b.pieces = static_cast<int32_t>((a.row_bytes + kMaxUnit - 1) / kMaxUnit);
  b.unit = static_cast<int32_t>(((a.row_bytes + b.pieces - 1) / b.pieces + 127) / 128 * 128);
  if (b.unit < kMinUnit || b.unit * (b.pieces - 1) >= a.row_bytes) return false;
  b.items = a.num_tokens * b.pieces;
  b.stages = static_cast<int32_t>(
      std::min<int64_t>(kMaxStages, ((traits.shared_bytes - kStaticShared) / b.unit - 1) / kBulkWarps));
  LaunchShape shape;
  shape.threads = kBulkWarps * kWarp;
  shape.blocks = traits.multiprocessors;
  shape.shared_bytes = (1 + static_cast<int64_t>(kBulkWarps) * b.stages) * b.unit;
  shape.overlap = true;
  launch(copy_bulk, shape, on, b);
  return true;
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
  if (aligned(a, sizeof(uint4))) {
    const int64_t bytes = a.num_tokens * a.row_bytes;
    if (copy_in_bulk(a, hidden_states)) return;
    if (bytes >= kLeastVectorBytes && bytes <= kMostVectorBytes) return copy<uint4, 128, 4>(a, hidden_states);
    return copy<uint4, 256, 1>(a, hidden_states);
  }
  if (aligned(a, sizeof(uint32_t))) return copy<uint32_t, 256, 1>(a, hidden_states);
  copy<uint16_t, 256, 1>(a, hidden_states);
}

}  // namespace
}  // namespace moe_ops::cuda

STABLE_TORCH_LIBRARY_IMPL(moe_ops, CUDA, m) { m.impl("_permute_rows", TORCH_BOX(&moe_ops::cuda::permute_rows)); }
