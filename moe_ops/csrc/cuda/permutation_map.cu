// The permutation map of one batch: where a stable sort by expert puts every slot, and how many slots each expert has.
//
// Slots without an expert form a last bucket, so that they get the rows behind the routed ones: those rows are
// zero-filled. A warp owns consecutive slots. Its lanes set their bits in a word per bucket in shared memory, whose
// population is the count and whose lower bits are the rank (nine votes or the match instruction take several times as
// long); a prefix over warps and buckets turns counts into rows. What the slots of other blocks contribute, a block
// counts by itself for small batches; for large ones a first kernel
// leaves the counts of each block. Nothing depends on the order of execution.
//
// NOTE: at decode sizes a launch, one load from memory and fetching the instructions are most of the time: the kernel
// loads everything at its start, and what runs once is not unrolled (a form of 17 KB was slower by 1 to 2 us).

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
constexpr int kItems = 4;  // slots of a lane where a kernel counts in front
constexpr int kBatch = 8;  // independent loads in flight; warps are counted in multiples of it
constexpr int kAhead = 4;  // slots of others that a thread loads beside its own, one by one

struct MapArguments {
  const void* topk_ids;
  const int32_t* expert_map;  // or null
  const float* topk_weights;  // or null: slots of weight exactly 0 count as slots without an expert
  int64_t expert_map_size;
  int32_t num_slots;
  int32_t num_experts;
  int32_t warps;               // that own slots
  int32_t stride;              // words of a row of counters: E + 1, rounded up to 16 bytes
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

// Where a block learns what the slots of other blocks contribute.
enum class Form {
  kAlone,    // it counts all slots itself
  kCounted,  // from count_blocks, launched in front
};

template <typename Id>
struct Slot {
  Id id;
  float weight;
};

// kPlain: neither map nor weights.
template <typename Id, bool kPlain>
__device__ __forceinline__ Slot<Id> load_slot(const MapArguments& a, unsigned slot) {
  Slot<Id> result = {static_cast<Id>(-1), 1.0f};
  if (slot < static_cast<unsigned>(a.num_slots)) {
    result.id = static_cast<const Id*>(a.topk_ids)[slot];
    if (!kPlain && a.topk_weights != nullptr) result.weight = a.topk_weights[slot];
  }
  return result;
}

// Of a slot past the end: the bucket behind the last, which nobody counts.
template <typename Id, bool kPlain>
__device__ __forceinline__ unsigned bucket_of(const MapArguments& a, unsigned slot, const Slot<Id>& loaded) {
  const unsigned experts = static_cast<unsigned>(a.num_experts);
  if (slot >= static_cast<unsigned>(a.num_slots)) return experts + 1;
  int64_t id = static_cast<int64_t>(loaded.id);
  if (kPlain) {
    const bool narrow = sizeof(Id) == sizeof(int32_t) || static_cast<uint64_t>(id) >> 32 == 0;
    return narrow ? min(static_cast<unsigned>(id), experts) : experts;
  }
  if (a.expert_map != nullptr) {
    const bool known = id >= 0 && id < a.expert_map_size;
    id = known ? static_cast<int64_t>(a.expert_map[known ? id : 0]) : -1;
  }
  if (loaded.weight == 0.0f) id = -1;
  return id >= 0 && id < a.num_experts ? static_cast<unsigned>(id) : experts;
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
  const uint32_t sum = __reduce_add_sync(kAllLanes, value);  // sooner there than the end of the scan
  if (lane == 0) warp_sums[warp] = sum;
  const uint32_t inclusive = warp_inclusive_sum(value);
  __syncthreads();
  const uint32_t other = lane < warps ? warp_sums[lane] : 0;
  *total = __reduce_add_sync(kAllLanes, other);
  return inclusive - value + __reduce_add_sync(kAllLanes, lane < warp ? other : 0);
}

// Counts of this block's slots per bucket.
template <typename Id, bool kPlain>
__global__ void __launch_bounds__(kMaxThreads, 1) count_blocks(MapArguments a) {
  extern __shared__ __align__(16) uint32_t words[];
  release_successor();
  const unsigned buckets = a.num_experts + 1;
  const unsigned owners = a.warps * kWarp;
  const unsigned first = blockIdx.x * owners * kItems + threadIdx.x;
  Slot<Id> loaded[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    loaded[i] = load_slot<Id, kPlain>(a, threadIdx.x < owners ? first + i * owners : 0xffffffffu);
  }
#pragma unroll 1
  for (unsigned b = threadIdx.x; b < buckets; b += blockDim.x) words[b] = 0;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const unsigned slot = threadIdx.x < owners ? first + i * owners : 0xffffffffu;
    const unsigned bucket = bucket_of<Id, kPlain>(a, slot, loaded[i]);
    if (bucket < buckets) atomicAdd(&words[bucket], 1u);
  }
  __syncthreads();
  uint32_t* out = a.block_counts + static_cast<int64_t>(blockIdx.x) * buckets;
#pragma unroll 1
  for (unsigned b = threadIdx.x; b < buckets; b += blockDim.x) out[b] = words[b];
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

// Shared memory, in rows of `stride` words, a word per bucket: the row of its first slot in this block; for kAlone, the
// slots of the batch in the high half and those in front of the block in the low half; counts, a row per warp that owns
// slots, rounded up to kBatch, later the slots in the warps in front; masks, a row per warp: the lanes of a bucket.
// Where a lane has one slot, the mask is in the place of the count, which is its population.
constexpr int64_t place_rows(Form form, int64_t warps) {
  const int64_t counters = (warps + kBatch - 1) / kBatch * kBatch;
  return form == Form::kAlone ? 2 + counters : 1 + 2 * counters;
}

// kVectors: 16-byte vectors of ids that a thread loads of all slots, for the counts of kAlone; 0: slots one by one.
template <typename Id, bool kPlain, Form kForm, int kVectors>
__global__ void __launch_bounds__(kMaxThreads, 1) place_slots(MapArguments a) {
  extern __shared__ __align__(16) uint32_t words[];
  __shared__ uint32_t warp_sums[kMaxWarps];
  constexpr bool kAlone = kForm == Form::kAlone, kMasks = !kAlone;
  constexpr int kLaneItems = kAlone ? 1 : kItems;
  release_successor();
  const unsigned buckets = a.num_experts + 1;
  const int stride = a.stride;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const unsigned block_first = blockIdx.x * (a.warps * kWarp * kLaneItems);
  const unsigned first = block_first + warp * (kWarp * kLaneItems) + lane;
  const int counters = (a.warps + kBatch - 1) / kBatch * kBatch;
  uint32_t* others = words + stride;
  uint32_t* counts = others + (kAlone ? stride : 0);
  uint32_t* masks = kMasks ? counts + counters * stride : counts;

  // All loads are in flight while the counters are zeroed.
  Slot<Id> loaded[kLaneItems], ahead[kAhead];
#pragma unroll
  for (int i = 0; i < kLaneItems; ++i) {
    loaded[i] = load_slot<Id, kPlain>(a, warp < a.warps ? first + i * kWarp : 0xffffffffu);
  }
  const bool count_others = kAlone && gridDim.x > 1;
  constexpr unsigned kPerVector = sizeof(uint4) / sizeof(Id);
  union {
    uint4 vector;
    Id ids[kPerVector];
  } vectors_ahead[kVectors > 0 ? kVectors : 1];
  if (count_others && kVectors > 0) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const unsigned vector = threadIdx.x + i * blockDim.x;
      if (vector * kPerVector < static_cast<unsigned>(a.num_slots)) {
        vectors_ahead[i].vector = static_cast<const uint4*>(a.topk_ids)[vector];
      }
    }
  } else if (count_others) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) ahead[i] = load_slot<Id, kPlain>(a, threadIdx.x + i * blockDim.x);
  }
  uint4* zero = reinterpret_cast<uint4*>(kAlone ? others : counts);
  const int vectors = (counters * (kMasks ? 2 : 1) + (kAlone ? 1 : 0)) * stride / 4;
#pragma unroll 1
  for (int i = threadIdx.x; i < vectors; i += blockDim.x) zero[i] = make_uint4(0, 0, 0, 0);
  __syncthreads();

  unsigned bucket[kLaneItems];
  uint32_t rank[kLaneItems];
  if (warp < a.warps) {
    uint32_t* mine = counts + warp * stride;
    uint32_t* lanes = masks + warp * stride;
#pragma unroll
    for (int i = 0; i < kLaneItems; ++i) {
      bucket[i] = bucket_of<Id, kPlain>(a, first + i * kWarp, loaded[i]);
      const bool inside = bucket[i] < buckets;
      if (inside) atomicOr(&lanes[bucket[i]], 1u << lane);
      __syncwarp();
      const unsigned peers = inside ? lanes[bucket[i]] : 0;
      const uint32_t so_far = kMasks && inside ? mine[bucket[i]] : 0;
      const int before = __popc(peers & ((1u << lane) - 1));
      rank[i] = so_far + before;
      if (!kMasks) continue;
      __syncwarp();
      if (inside && before == 0) {
        lanes[bucket[i]] = 0;
        mine[bucket[i]] = so_far + __popc(peers);
      }
      __syncwarp();
    }
  }
  if (count_others && kVectors > 0) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const unsigned slot = (threadIdx.x + i * blockDim.x) * kPerVector;
      if (slot >= static_cast<unsigned>(a.num_slots)) continue;
      const uint32_t one = slot < block_first ? 0x10001u : 0x10000u;  // a block begins with a vector
#pragma unroll
      for (unsigned j = 0; j < kPerVector; ++j) {
        atomicAdd(&others[bucket_of<Id, kPlain>(a, slot, {vectors_ahead[i].ids[j], 1.0f})], one);
      }
    }
  } else if (count_others) {
#pragma unroll 1
    for (unsigned slot = threadIdx.x; slot < static_cast<unsigned>(a.num_slots);) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i, slot += blockDim.x) {
        const unsigned other = bucket_of<Id, kPlain>(a, slot, ahead[i]);
        if (other < buckets) atomicAdd(&others[other], slot < block_first ? 0x10001u : 0x10000u);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) ahead[i] = load_slot<Id, kPlain>(a, slot + i * blockDim.x);
    }
  }
  __syncthreads();
  if (!kAlone) wait_for_predecessor();

  uint32_t carry = 0;  // rows of the buckets in front of this round
#pragma unroll 1
  for (unsigned round = 0; round < buckets; round += blockDim.x) {
    const unsigned b = round + threadIdx.x;
    uint32_t in_front = 0, total = 0;
    if (b < buckets) {
      uint32_t running = 0;
      uint32_t* column = counts + b;
#pragma unroll 1
      for (int w = 0; w < a.warps; w += kBatch) {
        uint32_t count[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) count[i] = kMasks ? column[i * stride] : __popc(column[i * stride]);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          column[i * stride] = running;
          running += count[i];
        }
        column += kBatch * stride;
      }
      total = running;
      if (count_others) {
        in_front = others[b] & 0xffffu;
        total = others[b] >> 16;
      }
      if (!kAlone && a.scanned) {
        in_front = a.block_counts[static_cast<int64_t>(blockIdx.x) * buckets + b];
        total = a.totals[b];
      } else if (!kAlone) {
        total = 0;
        const uint32_t* column = a.block_counts + b;
#pragma unroll 16
        for (unsigned block = 0; block < gridDim.x; ++block, column += buckets) {
          const uint32_t count = *column;
          total += count;
          in_front += block < blockIdx.x ? count : 0;
        }
      }
      if (blockIdx.x == 0 && b + 1 < buckets) a.tokens_per_expert[b] = static_cast<int32_t>(total);
    }
    uint32_t round_total = 0;
    const uint32_t row = carry + in_front + block_exclusive_sum(total, warp_sums, &round_total);
    carry += round_total;
    if (b < buckets) words[b] = row;
    __syncthreads();
  }

  if (warp < a.warps) {
    const uint32_t* mine = counts + warp * stride;
#pragma unroll
    for (int i = 0; i < kLaneItems; ++i) {
      if (bucket[i] >= buckets) continue;
      const unsigned slot = first + i * kWarp;
      const int32_t row = static_cast<int32_t>(words[bucket[i]] + mine[bucket[i]] + rank[i]);
      const bool routed = bucket[i] + 1 < buckets;
      a.row_map[slot] = routed && row < a.num_rows ? row : -1;
      if (a.placement != nullptr) a.placement[slot] = routed ? row : ~row;
      if (a.row_slot != nullptr && row < a.num_row_slots) a.row_slot[row] = routed ? static_cast<int32_t>(slot) : -1;
    }
  }
}

constexpr int64_t kOneBlock = 512;       // slots up to which one block is enough
constexpr int64_t kCountedByAll = 8192;  // up to which every block counts all slots; fits 16 bits
constexpr int64_t kFourEach = 2048;      // up to which a thread counts four of them
constexpr int64_t kEightEach = 4096;     // up to which it counts eight, else sixteen
constexpr int64_t kScanInPlace = 64;     // up to this many blocks, each adds up the counts in front of it by itself
constexpr int64_t kStaticShared = 1024;

constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }
constexpr int64_t ceil_div(int64_t value, int64_t unit) { return (value + unit - 1) / unit; }

// Of a launch of place_slots: warps that own slots, in each of the blocks.
struct Plan {
  Form form;
  int64_t warps, blocks;

  int64_t shared_bytes(int64_t stride) const {
    return place_rows(form, warps) * stride * static_cast<int64_t>(sizeof(uint32_t));
  }
};

template <typename Id, bool kPlain, Form kForm, int kVectors>
void place(MapArguments a, const Plan& plan, const Tensor& on) {
  constexpr int64_t kOfThread = kVectors > 0 ? kVectors * sizeof(uint4) / sizeof(Id) : kAhead;
  const bool counts_others = kForm == Form::kAlone && plan.blocks > 1;
  const int64_t for_counting = counts_others ? ceil_div(a.num_slots, kOfThread) : 0;
  a.warps = static_cast<int32_t>(plan.warps);
  LaunchShape shape;
  // At least a thread for every bucket, where that is one round of the scan.
  const int64_t threads = std::max<int64_t>({plan.warps * kWarp, a.num_experts + 1, for_counting});
  shape.threads = static_cast<int>(std::min<int64_t>(kMaxThreads, round_up(threads, kWarp)));
  shape.blocks = plan.blocks;
  shape.shared_bytes = plan.shared_bytes(a.stride);
  shape.overlap = kForm == Form::kCounted;
  launch(place_slots<Id, kPlain, kForm, kVectors>, shape, on, a);
}

// Eight slots a thread, in half as many threads as four of them take, start sooner where these would be 1,024; sixteen
// where eight would need as many.
template <typename Id, bool kPlain>
void place_alone(const MapArguments& a, const Plan& plan, const Tensor& on) {
  constexpr int kPerVector = sizeof(uint4) / sizeof(Id);
  const bool vectors = reinterpret_cast<uintptr_t>(a.topk_ids) % sizeof(uint4) == 0 && a.num_slots % kPerVector == 0;
  if constexpr (kPlain) {
    constexpr int kFour = 4 / kPerVector;
    if (plan.blocks > 1 && vectors) {
      if (a.num_slots <= kFourEach) return place<Id, kPlain, Form::kAlone, kFour>(a, plan, on);
      if (a.num_slots <= kEightEach) return place<Id, kPlain, Form::kAlone, 2 * kFour>(a, plan, on);
      return place<Id, kPlain, Form::kAlone, 4 * kFour>(a, plan, on);
    }
  }
  place<Id, kPlain, Form::kAlone, 0>(a, plan, on);
}

template <typename Id, bool kPlain>
void place_counted(MapArguments a, const Plan& plan, const Tensor& on) {
  const int64_t buckets = static_cast<int64_t>(a.num_experts) + 1;
  Tensor workspace = torch::stable::new_empty(on, {(plan.blocks + 1) * buckets}, torch::headeronly::ScalarType::Int);
  a.block_counts = static_cast<uint32_t*>(workspace.data_ptr());
  a.totals = a.block_counts + plan.blocks * buckets;
  a.scanned = plan.blocks > kScanInPlace;
  a.warps = static_cast<int32_t>(plan.warps);

  LaunchShape shape;
  shape.blocks = plan.blocks;
  shape.threads = kMaxThreads;
  shape.shared_bytes = buckets * static_cast<int64_t>(sizeof(uint32_t));
  launch(count_blocks<Id, kPlain>, shape, on, a);
  if (a.scanned) {
    LaunchShape scan;
    scan.threads = 64;
    scan.blocks = ceil_div(buckets, scan.threads);
    scan.overlap = true;
    launch(scan_blocks, scan, on, a, plan.blocks);
  }
  place<Id, kPlain, Form::kCounted, 0>(a, plan, on);
}

Plan choose(int64_t num_slots, int64_t stride, const Tensor& on) {
  const int64_t usable = device_traits(on).shared_bytes - kStaticShared;
  if (num_slots <= kCountedByAll) {
    const int64_t warps = std::min<int64_t>(num_slots <= kOneBlock ? 16 : 8, ceil_div(num_slots, kWarp));
    const Plan plan = {Form::kAlone, warps, ceil_div(num_slots, warps * kWarp)};
    if (plan.shared_bytes(stride) <= usable) return plan;
  }
  // Many blocks are quick to place their slots, few to add up what is in front of them.
  const int64_t most = num_slots <= 2 * kCountedByAll ? 8 : num_slots <= 16 * kCountedByAll ? 16 : kMaxWarps;
  for (int64_t warps = most; warps > 0; warps -= kBatch) {
    const Plan plan = {Form::kCounted, warps, ceil_div(num_slots, warps * kWarp * kItems)};
    if (plan.shared_bytes(stride) <= usable) return plan;
  }
  throw std::runtime_error("_permutation_map: too many experts for the shared memory of a multiprocessor");
}

template <typename Id, bool kPlain>
void run(const MapArguments& a, const Plan& plan, const Tensor& on) {
  if (plan.form == Form::kCounted) return place_counted<Id, kPlain>(a, plan, on);
  place_alone<Id, kPlain>(a, plan, on);
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
  a.stride = static_cast<int32_t>(round_up(a.num_experts + 1, sizeof(uint4) / sizeof(uint32_t)));
  const Plan plan = choose(a.num_slots, a.stride, topk_ids);
  const bool plain = a.expert_map == nullptr && a.topk_weights == nullptr;
  if (topk_ids.scalar_type() == torch::headeronly::ScalarType::Long) {
    return plain ? run<int64_t, true>(a, plan, topk_ids) : run<int64_t, false>(a, plan, topk_ids);
  }
  return plain ? run<int32_t, true>(a, plan, topk_ids) : run<int32_t, false>(a, plan, topk_ids);
}

}  // namespace
}  // namespace moe_ops::cuda

STABLE_TORCH_LIBRARY_IMPL(moe_ops, CUDA, m) { m.impl("_permutation_map", TORCH_BOX(&moe_ops::cuda::permutation_map)); }
