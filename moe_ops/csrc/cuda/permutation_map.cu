// The permutation map of one batch: where a stable sort by expert puts every slot, and how many slots each expert has.
//
// Slots without an expert form a last bucket, so that they get the rows behind the routed ones: those rows are
// zero-filled. A slot's rank is found with warp matches: a warp owns consecutive slots and counts them per bucket in
// shared memory, a prefix over warps and buckets turns counts into rows. One block does up to 8,192 slots; above that a
// first kernel leaves the counts of each block, and the second adds those of the blocks in front. Nothing depends on
// the order of execution.

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <optional>
#include <stdexcept>

#include "launch.h"

namespace moe_ops::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kThreads = 1024;
constexpr int kMaxWarps = kThreads / kWarp;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kOutside = -1;          // bucket of a lane past the last slot
constexpr int kItemsLarge = 4;        // slots of a lane in the two-kernel form
constexpr int64_t kScanInPlace = 64;  // up to this many blocks, each adds up the counts in front of it by itself
constexpr int64_t kStaticShared = 1024;

struct MapArguments {
  const void* topk_ids;
  const int32_t* expert_map;  // or null
  const float* topk_weights;  // or null: slots of weight exactly 0 count as slots without an expert
  int64_t num_slots;
  int64_t expert_map_size;
  int32_t num_experts;
  int32_t warps;               // that own slots
  int64_t num_rows;            // of the permuted buffer
  int64_t num_row_slots;       // of row_slot
  int32_t* row_map;            // [slots] row, or -1
  int32_t* tokens_per_expert;  // [E]
  int32_t* placement;          // [slots] row, or ~row for a slot without an expert; or null
  int32_t* row_slot;           // [num_row_slots] slot of a row, or -1; or null
  uint32_t* block_counts;      // [blocks, E + 1], with `scanned` the rows of a block before it
  uint32_t* totals;            // [E + 1], used with `scanned`
  bool scanned;
};

template <typename Id>
__device__ __forceinline__ int bucket_of(const MapArguments& a, int64_t slot) {
  if (slot >= a.num_slots) return kOutside;
  int64_t id = static_cast<int64_t>(static_cast<const Id*>(a.topk_ids)[slot]);
  if (a.expert_map != nullptr) {
    const bool known = id >= 0 && id < a.expert_map_size;
    id = known ? static_cast<int64_t>(a.expert_map[known ? id : 0]) : -1;
  }
  if (a.topk_weights != nullptr && a.topk_weights[slot] == 0.0f) id = -1;
  return id >= 0 && id < a.num_experts ? static_cast<int>(id) : a.num_experts;
}

// Exclusive sum over the block of one value per thread; *total gets the sum. All threads call it.
__device__ __forceinline__ uint32_t block_exclusive_sum(uint32_t value, uint32_t* warp_sums, uint32_t* total) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  uint32_t inclusive = value;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const uint32_t other = __shfl_up_sync(kAllLanes, inclusive, step);
    if (lane >= step) inclusive += other;
  }
  if (lane == kWarp - 1) warp_sums[warp] = inclusive;
  __syncthreads();
  uint32_t sums = warp_sums[lane];
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const uint32_t other = __shfl_up_sync(kAllLanes, sums, step);
    if (lane >= step) sums += other;
  }
  const uint32_t before = __shfl_sync(kAllLanes, sums, warp > 0 ? warp - 1 : 0);
  *total = __shfl_sync(kAllLanes, sums, kWarp - 1);
  __syncthreads();
  return inclusive - value + (warp > 0 ? before : 0);
}

// Counts of this block's slots per bucket.
template <typename Id, int kItems>
__global__ void __launch_bounds__(kThreads) count_blocks(MapArguments a) {
  extern __shared__ uint32_t counts[];  // [E + 1]
  release_successor();
  const int buckets = a.num_experts + 1;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  for (int b = threadIdx.x; b < buckets; b += kThreads) counts[b] = 0;
  int bucket[kItems];
  if (warp < a.warps) {
    const int64_t first = (static_cast<int64_t>(blockIdx.x) * a.warps + warp) * (kWarp * kItems) + lane;
#pragma unroll
    for (int i = 0; i < kItems; ++i) bucket[i] = bucket_of<Id>(a, first + i * kWarp);
  }
  __syncthreads();
  if (warp < a.warps) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const unsigned same = __match_any_sync(kAllLanes, bucket[i]);
      const bool leader = (same & ((1u << lane) - 1)) == 0;
      if (leader && bucket[i] != kOutside) atomicAdd(&counts[bucket[i]], static_cast<uint32_t>(__popc(same)));
    }
  }
  __syncthreads();
  uint32_t* out = a.block_counts + static_cast<int64_t>(blockIdx.x) * buckets;
  for (int b = threadIdx.x; b < buckets; b += kThreads) out[b] = counts[b];
}

// For very many blocks: block_counts becomes the rows of a bucket in front of each block, totals the sum.
__global__ void scan_blocks(MapArguments a, int64_t blocks) {
  release_successor();
  wait_for_predecessor();
  const int buckets = a.num_experts + 1;
  const int bucket = blockIdx.x * blockDim.x + threadIdx.x;
  if (bucket >= buckets) return;
  uint32_t* column = a.block_counts + bucket;
  uint32_t running = 0;
  constexpr int kBatch = 16;
  for (int64_t block = 0; block < blocks; block += kBatch) {
    uint32_t count[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) count[i] = block + i < blocks ? column[(block + i) * buckets] : 0;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (block + i < blocks) column[(block + i) * buckets] = running;
      running += count[i];
    }
  }
  a.totals[bucket] = running;
}

// Shared memory: [warps, E + 1] counts of a warp, then the rows of the bucket in front of that warp's first slot.
template <typename Id, int kItems, bool kOneBlock>
__global__ void __launch_bounds__(kThreads) place_slots(MapArguments a) {
  extern __shared__ uint32_t counts[];
  __shared__ uint32_t warp_sums[kMaxWarps];
  release_successor();
  const int buckets = a.num_experts + 1;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * a.warps + warp) * (kWarp * kItems) + lane;
  const bool owner = warp < a.warps;

  int bucket[kItems];
  uint32_t rank[kItems];
  if (owner) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) bucket[i] = bucket_of<Id>(a, first + i * kWarp);
  }
  for (int i = threadIdx.x; i < a.warps * buckets; i += kThreads) counts[i] = 0;
  __syncthreads();
  if (owner) {
    uint32_t* mine = counts + warp * buckets;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const unsigned same = __match_any_sync(kAllLanes, bucket[i]);
      const int before = __popc(same & ((1u << lane) - 1));
      const bool inside = bucket[i] != kOutside;
      const uint32_t so_far = inside ? mine[bucket[i]] : 0;
      rank[i] = so_far + before;
      __syncwarp();
      if (inside && before == 0) mine[bucket[i]] = so_far + __popc(same);
      __syncwarp();
    }
  }
  __syncthreads();
  if (!kOneBlock) wait_for_predecessor();

  uint32_t carry = 0;  // rows of the buckets in front of this round
  for (int round = 0; round < buckets; round += kThreads) {
    const int b = round + threadIdx.x;
    uint32_t in_front = 0, total = 0;
    if (b < buckets) {
      if (!kOneBlock) {
        if (a.scanned) {
          in_front = a.block_counts[static_cast<int64_t>(blockIdx.x) * buckets + b];
          total = a.totals[b];
        } else {
#pragma unroll 8
          for (unsigned block = 0; block < gridDim.x; ++block) {
            const uint32_t count = a.block_counts[static_cast<int64_t>(block) * buckets + b];
            total += count;
            if (block < blockIdx.x) in_front += count;
          }
        }
      } else {
#pragma unroll 8
        for (int w = 0; w < a.warps; ++w) total += counts[w * buckets + b];
      }
    }
    uint32_t round_total = 0;
    const uint32_t base = carry + block_exclusive_sum(total, warp_sums, &round_total);
    carry += round_total;
    if (b < buckets) {
      constexpr int kBatch = 8;
      uint32_t running = base + in_front;
      for (int w = 0; w < a.warps; w += kBatch) {
        uint32_t count[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) count[i] = w + i < a.warps ? counts[(w + i) * buckets + b] : 0;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (w + i < a.warps) counts[(w + i) * buckets + b] = running;
          running += count[i];
        }
      }
      if (blockIdx.x == 0 && b < a.num_experts) a.tokens_per_expert[b] = static_cast<int32_t>(total);
    }
  }
  __syncthreads();

  if (owner) {
    const uint32_t* mine = counts + warp * buckets;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (bucket[i] == kOutside) continue;
      const int64_t slot = first + i * kWarp;
      const int32_t row = static_cast<int32_t>(mine[bucket[i]] + rank[i]);
      const bool routed = bucket[i] < a.num_experts;
      a.row_map[slot] = routed && row < a.num_rows ? row : -1;
      if (a.placement != nullptr) a.placement[slot] = routed ? row : ~row;
      if (a.row_slot != nullptr && row < a.num_row_slots) a.row_slot[row] = routed ? static_cast<int32_t>(slot) : -1;
    }
  }
  if (a.row_slot != nullptr && blockIdx.x == 0) {
    for (int64_t row = a.num_slots + threadIdx.x; row < a.num_row_slots; row += kThreads) a.row_slot[row] = -1;
  }
}

template <typename Id, int kItems>
void place_in_one_block(MapArguments a, const Tensor& on) {
  a.warps = static_cast<int32_t>(std::max<int64_t>(1, (a.num_slots + kWarp * kItems - 1) / (kWarp * kItems)));
  LaunchShape shape;
  shape.threads = kThreads;
  shape.shared_bytes = static_cast<int64_t>(a.warps) * (a.num_experts + 1) * sizeof(uint32_t);
  launch(place_slots<Id, kItems, true>, shape, on, a);
}

template <typename Id>
void place_in_blocks(MapArguments a, int64_t max_warps, const Tensor& on) {
  const int64_t buckets = a.num_experts + 1;
  a.warps = static_cast<int32_t>(max_warps);
  const int64_t block_slots = max_warps * kWarp * kItemsLarge;
  const int64_t blocks = (a.num_slots + block_slots - 1) / block_slots;
  Tensor workspace = torch::stable::new_empty(on, {(blocks + 1) * buckets}, torch::headeronly::ScalarType::Int);
  a.block_counts = static_cast<uint32_t*>(workspace.data_ptr());
  a.totals = a.block_counts + blocks * buckets;
  a.scanned = blocks > kScanInPlace;

  LaunchShape shape;
  shape.blocks = blocks;
  shape.threads = kThreads;
  shape.shared_bytes = buckets * sizeof(uint32_t);
  launch(count_blocks<Id, kItemsLarge>, shape, on, a);
  shape.overlap = true;
  if (a.scanned) {
    LaunchShape scan;
    scan.threads = 64;
    scan.blocks = (buckets + scan.threads - 1) / scan.threads;
    scan.overlap = true;
    launch(scan_blocks, scan, on, a, blocks);
  }
  shape.shared_bytes = max_warps * buckets * sizeof(uint32_t);
  launch(place_slots<Id, kItemsLarge, false>, shape, on, a);
}

template <typename Id>
void place(const MapArguments& a, const Tensor& on) {
  const int64_t buckets = static_cast<int64_t>(a.num_experts) + 1;
  const int64_t usable = device_traits(on).shared_bytes - kStaticShared;
  const int64_t max_warps = std::min<int64_t>(kMaxWarps, usable / (buckets * static_cast<int64_t>(sizeof(uint32_t))));
  if (max_warps < 1) {
    throw std::runtime_error("_permutation_map: too many experts for the shared memory of a multiprocessor");
  }
  const int64_t lanes = max_warps * kWarp;
  if (a.num_slots <= lanes) return place_in_one_block<Id, 1>(a, on);
  if (a.num_slots <= lanes * 4) return place_in_one_block<Id, 4>(a, on);
  if (a.num_slots <= lanes * 8) return place_in_one_block<Id, 8>(a, on);
  place_in_blocks<Id>(a, max_warps, on);
}

// Shapes and dtypes are those of the callers in moe_ops/triton: contiguous, on one device, allocated by them.
void permutation_map(const Tensor& topk_ids, std::optional<Tensor> expert_map, std::optional<Tensor> topk_weights,
                     int64_t num_rows, Tensor row_map, Tensor tokens_per_expert, std::optional<Tensor> placement,
                     std::optional<Tensor> row_slot) {
  const torch::stable::accelerator::DeviceGuard guard(topk_ids.get_device_index());
  MapArguments a = {};
  a.topk_ids = topk_ids.const_data_ptr();
  a.num_slots = topk_ids.numel();
  a.num_experts = static_cast<int32_t>(tokens_per_expert.numel());
  a.num_rows = num_rows;
  a.row_map = static_cast<int32_t*>(row_map.data_ptr());
  a.tokens_per_expert = static_cast<int32_t*>(tokens_per_expert.data_ptr());
  if (expert_map.has_value()) {
    a.expert_map = static_cast<const int32_t*>(expert_map->const_data_ptr());
    a.expert_map_size = expert_map->numel();
    if (a.expert_map_size == 0) throw std::runtime_error("_permutation_map: expert_map is empty");
  }
  if (topk_weights.has_value()) a.topk_weights = static_cast<const float*>(topk_weights->const_data_ptr());
  if (placement.has_value()) a.placement = static_cast<int32_t*>(placement->data_ptr());
  if (row_slot.has_value()) {
    a.row_slot = static_cast<int32_t*>(row_slot->data_ptr());
    a.num_row_slots = row_slot->numel();
  }
  if (topk_ids.scalar_type() == torch::headeronly::ScalarType::Long) {
    place<int64_t>(a, topk_ids);
  } else {
    place<int32_t>(a, topk_ids);
  }
}

}  // namespace
}  // namespace moe_ops::cuda

STABLE_TORCH_LIBRARY_IMPL(moe_ops, CUDA, m) { m.impl("_permutation_map", TORCH_BOX(&moe_ops::cuda::permutation_map)); }
