// The permutation map of one batch: where a stable sort by expert puts every slot, and how many slots each expert has.
//
// Slots without an expert form a last bucket, so that they get the rows behind the routed ones: those rows are
// zero-filled. A warp owns consecutive slots. It finds the lanes of equal bucket with one vote per bit of the bucket
// (the match instruction takes a turn per distinct value) and leaves its counts in shared memory; a prefix over warps
// and buckets turns counts into rows. What the slots of other blocks contribute, a block counts by itself up to 16,384
// slots; above, a first kernel leaves the counts of each block. Nothing depends on the order of execution.
//
// NOTE: the kernels are short on purpose. At decode sizes fetching their instructions is what they spend most time on:
// an unrolled form of 17 KB took 5 to 6 us where its work takes 1.5.

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <optional>
#include <stdexcept>

#include "launch.h"

namespace moe_ops::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kMaxThreads = 1024;
constexpr int kMaxWarps = kMaxThreads / kWarp;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kItems = 4;                 // slots of a lane where a kernel counts in front
constexpr int64_t kCountedByAll = 16384;  // slots up to which every block counts all of them; fits 16 bits
constexpr int64_t kScanInPlace = 64;      // up to this many blocks, each adds up the counts in front of it by itself
constexpr int64_t kStaticShared = 1024;
constexpr int kBatch = 8;  // independent loads in flight; warps are counted in multiples of it

struct MapArguments {
  const void* topk_ids;
  const int32_t* expert_map;  // or null
  const float* topk_weights;  // or null: slots of weight exactly 0 count as slots without an expert
  int64_t expert_map_size;
  int32_t num_slots;
  int32_t num_experts;
  int32_t warps;               // that own slots
  int32_t bucket_bits;         // of the largest bucket number
  int32_t num_rows;            // of the permuted buffer
  int32_t num_row_slots;       // of row_slot
  int32_t* row_map;            // [slots] row, or -1
  int32_t* tokens_per_expert;  // [E]
  int32_t* placement;          // [slots] row, or ~row for a slot without an expert; or null
  int32_t* row_slot;           // [num_row_slots] slot of a row, or -1; or null
  uint32_t* block_counts;      // [blocks, E + 1], with `scanned` the rows of a block before it
  uint32_t* totals;            // [E + 1], used with `scanned`
  bool scanned;
};

// A slot past the end is in the bucket behind the last, which nobody counts. kPlain: neither map nor weights.
template <typename Id, bool kPlain>
__device__ __forceinline__ int bucket_of(const MapArguments& a, unsigned slot) {
  if (slot >= static_cast<unsigned>(a.num_slots)) return a.num_experts + 1;
  int64_t id = static_cast<int64_t>(static_cast<const Id*>(a.topk_ids)[slot]);
  if (!kPlain) {
    if (a.expert_map != nullptr) {
      const bool known = id >= 0 && id < a.expert_map_size;
      id = known ? static_cast<int64_t>(a.expert_map[known ? id : 0]) : -1;
    }
    if (a.topk_weights != nullptr && a.topk_weights[slot] == 0.0f) id = -1;
  }
  return id >= 0 && id < a.num_experts ? static_cast<int>(id) : a.num_experts;
}

// Lanes of the same bucket.
__device__ __forceinline__ unsigned peers_of(int bucket, int bits) {
  unsigned peers = kAllLanes;
#pragma unroll 1
  for (int bit = 0; bit < bits; ++bit) {
    const bool set = (bucket >> bit) & 1;
    const unsigned votes = __ballot_sync(kAllLanes, set);
    peers &= set ? votes : ~votes;
  }
  return peers;
}

__device__ __forceinline__ uint32_t warp_inclusive_sum(uint32_t value) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const uint32_t other = __shfl_up_sync(kAllLanes, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

// Exclusive sum over the block of one value per thread; *total gets the sum. All threads call it; it is one barrier.
__device__ __forceinline__ uint32_t block_exclusive_sum(uint32_t value, uint32_t* warp_sums, uint32_t* total) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  const uint32_t inclusive = warp_inclusive_sum(value);
  if (lane == kWarp - 1) warp_sums[warp] = inclusive;
  __syncthreads();
  const uint32_t sums = warp_inclusive_sum(lane < warps ? warp_sums[lane] : 0);
  const uint32_t before = __shfl_sync(kAllLanes, sums, warp > 0 ? warp - 1 : 0);
  *total = __shfl_sync(kAllLanes, sums, kWarp - 1);
  return inclusive - value + (warp > 0 ? before : 0);
}

// Counts of this block's slots per bucket.
template <typename Id, bool kPlain>
__global__ void __launch_bounds__(kMaxThreads, 1) count_blocks(MapArguments a) {
  extern __shared__ uint32_t counts[];  // [E + 2]
  release_successor();
  const int buckets = a.num_experts + 1;
  const unsigned block_slots = a.warps * kWarp * kItems;
  const unsigned first = blockIdx.x * block_slots + threadIdx.x;
  const unsigned owners = a.warps * kWarp;
  int bucket[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    bucket[i] = threadIdx.x < owners ? bucket_of<Id, kPlain>(a, first + i * owners) : buckets;
  }
#pragma unroll 1
  for (int b = threadIdx.x; b <= buckets; b += blockDim.x) counts[b] = 0;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kItems; ++i) atomicAdd(&counts[bucket[i]], 1u);
  __syncthreads();
  uint32_t* out = a.block_counts + static_cast<int64_t>(blockIdx.x) * buckets;
#pragma unroll 1
  for (int b = threadIdx.x; b < buckets; b += blockDim.x) out[b] = counts[b];
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
  constexpr int kBlocks = 16;
  for (int64_t block = 0; block < blocks; block += kBlocks) {
    uint32_t count[kBlocks];
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) count[i] = block + i < blocks ? column[(block + i) * buckets] : 0;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      if (block + i < blocks) column[(block + i) * buckets] = running;
      running += count[i];
    }
  }
  a.totals[bucket] = running;
}

// Shared memory, in words: all [E + 2], the slots of the batch in the high half and those in front of the block in the
// low half, then the row of a bucket's first slot in this block; counts [warps rounded up, E + 1] of a warp, then the
// slots of the bucket in the warps before it. kLaneItems is 1 where the block counts all slots itself.
template <typename Id, bool kPlain, int kLaneItems>
__global__ void __launch_bounds__(kMaxThreads, 1) place_slots(MapArguments a) {
  extern __shared__ uint32_t all[];
  __shared__ uint32_t warp_sums[kMaxWarps];
  constexpr bool kCounted = kLaneItems > 1;
  release_successor();
  const int buckets = a.num_experts + 1;
  uint32_t* counts = all + buckets + 1;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const unsigned block_first = blockIdx.x * (a.warps * kWarp * kLaneItems);
  const unsigned first = block_first + warp * (kWarp * kLaneItems) + lane;
  const int rows_of_counts = (a.warps + kBatch - 1) / kBatch * kBatch;

  int bucket[kLaneItems];
  uint32_t rank[kLaneItems];
#pragma unroll
  for (int i = 0; i < kLaneItems; ++i) {
    bucket[i] = warp < a.warps ? bucket_of<Id, kPlain>(a, first + i * kWarp) : buckets;
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < (rows_of_counts + 1) * buckets + 1; i += blockDim.x) all[i] = 0;
  __syncthreads();
  if (!kCounted) {
#pragma unroll 1
    for (unsigned slot = threadIdx.x; slot < static_cast<unsigned>(a.num_slots); slot += 4 * blockDim.x) {
      int other[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) other[i] = bucket_of<Id, kPlain>(a, slot + i * blockDim.x);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        atomicAdd(&all[other[i]], slot + i * blockDim.x < block_first ? 0x10001u : 0x10000u);
      }
    }
  }
  if (warp < a.warps) {
    uint32_t* mine = counts + warp * buckets;
#pragma unroll
    for (int i = 0; i < kLaneItems; ++i) {
      const unsigned peers = peers_of(bucket[i], a.bucket_bits);
      const int before = __popc(peers & ((1u << lane) - 1));
      const bool inside = bucket[i] < buckets;
      const uint32_t so_far = kCounted && inside ? mine[bucket[i]] : 0;
      rank[i] = so_far + before;
      if (kCounted) __syncwarp();
      if (inside && before == 0) mine[bucket[i]] = so_far + __popc(peers);
      if (kCounted) __syncwarp();
    }
  }
  __syncthreads();
  if (kCounted) wait_for_predecessor();

  uint32_t carry = 0;  // rows of the buckets in front of this round
#pragma unroll 1
  for (int round = 0; round < buckets; round += blockDim.x) {
    const int b = round + threadIdx.x;
    uint32_t in_front = 0, total = 0;
    if (b < buckets) {
      if (!kCounted) {
        in_front = all[b] & 0xffffu;
        total = all[b] >> 16;
      } else if (a.scanned) {
        in_front = a.block_counts[static_cast<int64_t>(blockIdx.x) * buckets + b];
        total = a.totals[b];
      } else {
        const uint32_t* column = a.block_counts + b;
#pragma unroll 4
        for (unsigned block = 0; block < gridDim.x; ++block, column += buckets) {
          const uint32_t count = *column;
          total += count;
          in_front += block < blockIdx.x ? count : 0;
        }
      }
      uint32_t running = 0;
      uint32_t* column = counts + b;
#pragma unroll 1
      for (int w = 0; w < a.warps; w += kBatch) {
        uint32_t count[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) count[i] = column[i * buckets];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          column[i * buckets] = running;
          running += count[i];
        }
        column += kBatch * buckets;
      }
      if (blockIdx.x == 0 && b < a.num_experts) a.tokens_per_expert[b] = static_cast<int32_t>(total);
    }
    uint32_t round_total = 0;
    const uint32_t row = carry + in_front + block_exclusive_sum(total, warp_sums, &round_total);
    carry += round_total;
    if (b < buckets) all[b] = row;
    __syncthreads();
  }

  if (warp < a.warps) {
    const uint32_t* mine = counts + warp * buckets;
#pragma unroll
    for (int i = 0; i < kLaneItems; ++i) {
      if (bucket[i] >= buckets) continue;
      const unsigned slot = first + i * kWarp;
      const int32_t row = static_cast<int32_t>(all[bucket[i]] + mine[bucket[i]] + rank[i]);
      const bool routed = bucket[i] < a.num_experts;
      a.row_map[slot] = routed && row < a.num_rows ? row : -1;
      if (a.placement != nullptr) a.placement[slot] = routed ? row : ~row;
      if (a.row_slot != nullptr && row < a.num_row_slots) a.row_slot[row] = routed ? static_cast<int32_t>(slot) : -1;
    }
  }
}

constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

int64_t place_bytes(int64_t warps, int64_t buckets) {
  return ((round_up(warps, kBatch) + 1) * buckets + 1) * static_cast<int64_t>(sizeof(uint32_t));
}

template <typename Id, bool kPlain>
void place_counting_all(MapArguments a, int64_t max_warps, const Tensor& on) {
  const int64_t buckets = static_cast<int64_t>(a.num_experts) + 1;
  a.warps = static_cast<int32_t>(std::min<int64_t>(max_warps, (a.num_slots + kWarp - 1) / kWarp));
  // At least a thread for every bucket, where that is one round of the scan.
  const int64_t warps = std::max<int64_t>(a.warps, (buckets + kWarp - 1) / kWarp);
  LaunchShape shape;
  shape.threads = static_cast<int>(std::min<int64_t>(kMaxWarps, warps) * kWarp);
  shape.blocks = (a.num_slots + a.warps * kWarp - 1) / (a.warps * kWarp);
  shape.shared_bytes = place_bytes(a.warps, buckets);
  launch(place_slots<Id, kPlain, 1>, shape, on, a);
}

template <typename Id, bool kPlain>
void place_counted(MapArguments a, int64_t max_warps, const Tensor& on) {
  const int64_t buckets = static_cast<int64_t>(a.num_experts) + 1;
  a.warps = static_cast<int32_t>(max_warps);
  const int64_t block_slots = max_warps * kWarp * kItems;
  const int64_t blocks = (a.num_slots + block_slots - 1) / block_slots;
  Tensor workspace = torch::stable::new_empty(on, {(blocks + 1) * buckets}, torch::headeronly::ScalarType::Int);
  a.block_counts = static_cast<uint32_t*>(workspace.data_ptr());
  a.totals = a.block_counts + blocks * buckets;
  a.scanned = blocks > kScanInPlace;

  LaunchShape shape;
  shape.blocks = blocks;
  shape.threads = kMaxThreads;
  shape.shared_bytes = (buckets + 1) * static_cast<int64_t>(sizeof(uint32_t));
  launch(count_blocks<Id, kPlain>, shape, on, a);
  shape.overlap = true;
  if (a.scanned) {
    LaunchShape scan;
    scan.threads = 64;
    scan.blocks = (buckets + scan.threads - 1) / scan.threads;
    scan.overlap = true;
    launch(scan_blocks, scan, on, a, blocks);
  }
  shape.shared_bytes = place_bytes(max_warps, buckets);
  launch(place_slots<Id, kPlain, kItems>, shape, on, a);
}

template <typename Id>
void place(MapArguments a, const Tensor& on) {
  const int64_t buckets = static_cast<int64_t>(a.num_experts) + 1;
  const int64_t usable = device_traits(on).shared_bytes - kStaticShared;
  int64_t max_warps = kMaxWarps;
  while (max_warps > 0 && place_bytes(max_warps, buckets) > usable) max_warps -= kBatch;
  if (max_warps == 0) {
    throw std::runtime_error("_permutation_map: too many experts for the shared memory of a multiprocessor");
  }
  while ((int64_t{1} << a.bucket_bits) <= buckets) ++a.bucket_bits;
  const bool plain = a.expert_map == nullptr && a.topk_weights == nullptr;
  if (a.num_slots <= kCountedByAll) {
    return plain ? place_counting_all<Id, true>(a, max_warps, on) : place_counting_all<Id, false>(a, max_warps, on);
  }
  return plain ? place_counted<Id, true>(a, max_warps, on) : place_counted<Id, false>(a, max_warps, on);
}

// row_slot has at most as many rows as there are slots. Shapes and dtypes are those of the callers in moe_ops/triton:
// contiguous, on one device, allocated by them.
void permutation_map(const Tensor& topk_ids, std::optional<Tensor> expert_map, std::optional<Tensor> topk_weights,
                     int64_t num_rows, Tensor row_map, Tensor tokens_per_expert, std::optional<Tensor> placement,
                     std::optional<Tensor> row_slot) {
  const torch::stable::accelerator::DeviceGuard guard(topk_ids.get_device_index());
  MapArguments a = {};
  a.topk_ids = topk_ids.const_data_ptr();
  a.num_slots = static_cast<int32_t>(topk_ids.numel());
  a.num_experts = static_cast<int32_t>(tokens_per_expert.numel());
  a.num_rows = static_cast<int32_t>(std::min<int64_t>(num_rows, a.num_slots));
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
    a.num_row_slots = static_cast<int32_t>(row_slot->numel());
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
