// Global to local expert ids. A group of lanes owns a row of slots and finds its smallest local id by shuffles.
//
// Rows without a local expert need the smallest local id of the batch. A small batch is one block's, which knows the
// minimum itself; a larger one leaves the minimum of each block, and a second kernel fills the rows that still miss it.
// At decode sizes starting threads, fetching instructions and parameters, and one load from memory are the time:
// kernels of one block have no loops, and that for dense rows of 4, 8, 16 or 32 slots has parameters of 48 bytes.

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "launch.h"

namespace moe_ops::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kThreads = 1024;
constexpr int kMaxWarps = kThreads / kWarp;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int32_t kNone = 0x7fffffff;
constexpr int64_t kMaxFillBlocks = 1024;

struct RemapArguments {
  const void* topk_ids;
  const float* topk_weights;
  int64_t id_strides[2];
  int64_t weight_strides[2];
  const int32_t* expert_map;  // or null: a range
  int64_t expert_map_size;
  int64_t expert_offset;
  int64_t num_local_experts;
  int64_t num_tokens;
  int32_t top_k;
  int32_t lane_bits;  // of a row's lanes: up to 32
  bool reuse;         // else foreign slots get -1
  int32_t* local_ids;
  float* local_weights;
  int32_t* minima;  // [blocks], for the second kernel
};

// The same of one block.
struct BlockArguments {
  const void* topk_ids;
  const float* topk_weights;
  int32_t* local_ids;
  float* local_weights;
  const int32_t* expert_map;
  int64_t expert_map_size;
  int64_t expert_offset;
  int64_t num_local_experts;
  int32_t id_strides[2];
  int32_t weight_strides[2];
  int32_t num_tokens;
  int32_t top_k;
  int32_t lane_bits;
};

// -1 where the expert is foreign, or none.
template <typename Arguments>
__device__ __forceinline__ int32_t local_id(const Arguments& a, bool by_map, int64_t id) {
  if (by_map) {
    const bool known = id >= 0 && id < a.expert_map_size;
    const int32_t mapped = known ? a.expert_map[id] : -1;
    return mapped >= 0 ? mapped : -1;
  }
  const bool owned = id >= a.expert_offset && id - a.expert_offset < a.num_local_experts;
  return owned ? static_cast<int32_t>(id - a.expert_offset) : -1;
}

__device__ __forceinline__ int32_t block_minimum(int32_t value, int32_t* shared) {
  value = __reduce_min_sync(kAllLanes, value);
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = value;
  __syncthreads();
  const int warps = blockDim.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  value = __reduce_min_sync(kAllLanes, lane < warps ? shared[lane] : kNone);
  __syncthreads();
  return value;
}

template <int kSlots, typename T>
struct alignas(kSlots * sizeof(T) < 16 ? kSlots * sizeof(T) : 16) Slots {
  T of[kSlots];
};

// Of dense rows of 4 to 32 slots, a power of two: four slots a thread, at addresses of 16 bytes.
struct PackedArguments {
  const void* topk_ids;
  const float* topk_weights;
  int32_t* local_ids;
  float* local_weights;
  int32_t expert_offset;
  int32_t num_local_experts;  // offset + number fit 31 bits
  int32_t vectors;            // of four slots
  int32_t lane_bits;          // of a row's vectors
  const int32_t* expert_map;
  int32_t expert_map_size;
};

constexpr uint32_t kForeign = 0xffffffffu;

// Of memory that the kernel does not write. Where warps wait for each other's ids, these must be asked for before
// weights, which the compiler would do the other way round.
template <typename T>
__device__ __forceinline__ void load_in_order(const Slots<4, T>* from, Slots<4, T>& to) {
  if constexpr (sizeof(T) == sizeof(uint32_t)) {
    uint32_t of[4];
    asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(of[0]), "=r"(of[1]), "=r"(of[2]), "=r"(of[3])
                 : "l"(from));
    memcpy(&to, of, sizeof(to));
  } else {
    uint64_t of[4];
    asm volatile("ld.global.nc.v2.b64 {%0, %1}, [%2];" : "=l"(of[0]), "=l"(of[1]) : "l"(from));
    asm volatile("ld.global.nc.v2.b64 {%0, %1}, [%2 + 16];" : "=l"(of[2]), "=l"(of[3]) : "l"(from));
    memcpy(&to, of, sizeof(to));
  }
}

// The whole batch in one block of kWarps warps, or of up to as many: kFew says that they are exactly as many.
template <typename Id, bool kByMap, bool kReuse, int kWarps, bool kFew>
__global__ void __launch_bounds__(kWarps* kWarp) remap_packed(PackedArguments a) {
  __shared__ __align__(16) uint32_t shared[kWarps];
  release_successor();
  const bool inside = threadIdx.x < static_cast<unsigned>(a.vectors);
  Slots<4, Id> ids = {};
  Slots<4, float> weights = {};
  if (inside) {
    const auto* id = static_cast<const Slots<4, Id>*>(a.topk_ids) + threadIdx.x;
    const auto* weight = reinterpret_cast<const Slots<4, float>*>(a.topk_weights) + threadIdx.x;
    if constexpr (kWarps == 1) {
      ids = *id;
      weights = *weight;
    } else {
      load_in_order(id, ids);
      load_in_order(weight, weights);
    }
  }
  uint32_t local[4], minimum = kForeign;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    bool owned = inside;
    if (sizeof(Id) == sizeof(int64_t)) owned = owned && static_cast<uint64_t>(ids.of[j]) >> 32 == 0;
    const uint32_t id = static_cast<uint32_t>(ids.of[j]);
    if (kByMap) {
      owned = owned && id < static_cast<uint32_t>(a.expert_map_size);
      const int32_t mapped = owned ? a.expert_map[id] : -1;
      local[j] = mapped >= 0 ? mapped : kForeign;
    } else {
      const uint32_t from = id - static_cast<uint32_t>(a.expert_offset);  // negative ids and smaller ones wrap around
      local[j] = owned && from < static_cast<uint32_t>(a.num_local_experts) ? from : kForeign;
    }
    if (local[j] == kForeign) weights.of[j] = 0.0f;
    minimum = min(minimum, local[j]);
  }
  uint32_t smallest = kForeign;
  if constexpr (kReuse && kWarps > 1) {
    smallest = __reduce_min_sync(kAllLanes, minimum);
    if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = smallest;
    __syncthreads();
  }
  if (inside) reinterpret_cast<Slots<4, float>*>(a.local_weights)[threadIdx.x] = weights;
  uint32_t filler = kForeign;  // which is -1
  if constexpr (kReuse) {
    if constexpr (kWarps == 1) {
      smallest = __reduce_min_sync(kAllLanes, minimum);
    } else if constexpr (kFew) {
#pragma unroll
      for (int warp = 0; warp < kWarps; warp += 4) {
        const uint4 four = *reinterpret_cast<const uint4*>(shared + warp);
        smallest = min(smallest, min(min(four.x, four.y), min(four.z, four.w)));
      }
    } else {
      const unsigned lane = threadIdx.x % kWarp;
      smallest = __reduce_min_sync(kAllLanes, lane < blockDim.x / kWarp ? shared[lane] : kForeign);
    }
#pragma unroll 1
    for (int step = (1 << a.lane_bits) / 2; step > 0; step /= 2) {
      minimum = min(minimum, __shfl_xor_sync(kAllLanes, minimum, step));
    }
    filler = minimum != kForeign ? minimum : smallest == kForeign ? 0 : smallest;
  }
  if (!inside) return;
  Slots<4, uint32_t> result;
#pragma unroll
  for (int j = 0; j < 4; ++j) result.of[j] = local[j] == kForeign ? filler : local[j];
  reinterpret_cast<Slots<4, uint32_t>*>(a.local_ids)[threadIdx.x] = result;
}

// The whole batch in one block, of any shape: kItems slots of a lane, each of another row. Code that is not there need
// not be fetched: hence kByMap and kReuse.
template <typename Id, int kItems, bool kByMap, bool kReuse>
__global__ void __launch_bounds__(kThreads) remap_block(BlockArguments a) {
  __shared__ int32_t shared[kMaxWarps];
  release_successor();
  const int lane = threadIdx.x % kWarp;
  const int k = threadIdx.x & ((1 << a.lane_bits) - 1);
  const int first = threadIdx.x >> a.lane_bits, rows = blockDim.x >> a.lane_bits;
  Id ids[kItems];
  float weights[kItems];
  bool inside[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int token = first + i * rows;
    inside[i] = token < a.num_tokens && k < a.top_k;
    if (!inside[i]) continue;
    ids[i] = static_cast<const Id*>(a.topk_ids)[token * a.id_strides[0] + k * a.id_strides[1]];
    weights[i] = a.topk_weights[token * a.weight_strides[0] + k * a.weight_strides[1]];
  }
  int32_t local[kItems], minimum[kItems], smallest = kNone;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    local[i] = inside[i] ? local_id(a, kByMap, static_cast<int64_t>(ids[i])) : -1;
    minimum[i] = local[i] >= 0 ? local[i] : kNone;
    smallest = min(smallest, minimum[i]);
    if (inside[i]) a.local_weights[(first + i * rows) * a.top_k + k] = local[i] >= 0 ? weights[i] : 0.0f;
  }
  int32_t filler = -1;
  if constexpr (kReuse) {
    smallest = __reduce_min_sync(kAllLanes, smallest);
    if (blockDim.x > kWarp && lane == 0) shared[threadIdx.x / kWarp] = smallest;
#pragma unroll 1
    for (int step = (1 << a.lane_bits) / 2; step > 0; step /= 2) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) minimum[i] = min(minimum[i], __shfl_xor_sync(kAllLanes, minimum[i], step));
    }
    if (blockDim.x > kWarp) {
      __syncthreads();
      smallest = __reduce_min_sync(kAllLanes, lane < blockDim.x / kWarp ? shared[lane] : kNone);
    }
    filler = smallest == kNone ? 0 : smallest;
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int32_t fill = kReuse && minimum[i] != kNone ? minimum[i] : filler;
    if (inside[i]) a.local_ids[(first + i * rows) * a.top_k + k] = local[i] >= 0 ? local[i] : fill;
  }
}

// Foreign slots get their row's minimum, or -1 where the row has no local expert. kWide: rows of more slots than a warp
// has lanes, which go over a row twice.
template <typename Id, bool kWide>
__global__ void __launch_bounds__(kThreads) remap_rows(RemapArguments a) {
  __shared__ int32_t shared[kMaxWarps];
  release_successor();
  const int lane = threadIdx.x & ((1 << a.lane_bits) - 1);
  const int64_t token = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) >> a.lane_bits;
  const bool inside = token < a.num_tokens;
  int32_t* ids = a.local_ids + token * a.top_k;
  const Id* id = static_cast<const Id*>(a.topk_ids) + token * a.id_strides[0];
  const float* weights = a.topk_weights + token * a.weight_strides[0];
  int32_t local = -1, minimum = kNone;
#pragma unroll 1
  for (int k = lane; inside && k < a.top_k; k += kWarp) {
    const float weight = weights[k * a.weight_strides[1]];  // in flight beside the id
    local = local_id(a, a.expert_map != nullptr, static_cast<int64_t>(id[k * a.id_strides[1]]));
    a.local_weights[token * a.top_k + k] = local >= 0 ? weight : 0.0f;
    if (local >= 0) minimum = min(minimum, local);
    if (kWide) ids[k] = local;
  }
#pragma unroll 1
  for (int step = (1 << a.lane_bits) / 2; step > 0; step /= 2) {
    minimum = min(minimum, __shfl_xor_sync(kAllLanes, minimum, step));
  }
  int32_t filler = a.reuse && minimum != kNone ? minimum : -1;
  if (a.reuse) {
    const int32_t smallest = block_minimum(minimum, shared);
    if (gridDim.x > 1) {
      if (threadIdx.x == 0) a.minima[blockIdx.x] = smallest;
    } else if (minimum == kNone) {
      filler = smallest == kNone ? 0 : smallest;
    }
  }
#pragma unroll 1
  for (int k = lane; inside && k < a.top_k; k += kWarp) {
    if (kWide) local = ids[k];
    ids[k] = local >= 0 ? local : filler;
  }
}

// Slots still -1 belong to rows without a local expert.
__global__ void __launch_bounds__(kThreads) fill_rows(RemapArguments a, int64_t blocks) {
  __shared__ int32_t shared[kMaxWarps];
  wait_for_predecessor();
  const int64_t slots = a.num_tokens * a.top_k;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  int64_t slot = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  int32_t local = slot < slots ? a.local_ids[slot] : 0;  // in flight beside the minima
  int32_t smallest = kNone;
  for (int64_t block = threadIdx.x; block < blocks; block += blockDim.x) smallest = min(smallest, a.minima[block]);
  smallest = block_minimum(smallest, shared);
  const int32_t filler = smallest == kNone ? 0 : smallest;
  while (slot < slots) {
    if (local < 0) a.local_ids[slot] = filler;
    slot += stride;
    if (slot < slots) local = a.local_ids[slot];
  }
}

template <typename Id, int kItems>
void remap_in_block(BlockArguments a, bool reuse, const Tensor& on) {
  const int64_t lanes = (static_cast<int64_t>(a.num_tokens) << a.lane_bits);
  LaunchShape shape;
  shape.threads = static_cast<int>(((lanes + kItems - 1) / kItems + kWarp - 1) / kWarp * kWarp);
  const auto kernel = a.expert_map == nullptr
                          ? (reuse ? remap_block<Id, kItems, false, true> : remap_block<Id, kItems, false, false>)
                          : (reuse ? remap_block<Id, kItems, true, true> : remap_block<Id, kItems, true, false>);
  launch(kernel, shape, on, a);
}

template <typename Id, bool kByMap, bool kReuse>
void launch_packed(const PackedArguments& a, const Tensor& on) {
  constexpr int kFewWarps = 4;
  LaunchShape shape;
  shape.threads = (a.vectors + kWarp - 1) / kWarp * kWarp;
  if (shape.threads == kWarp) return launch(remap_packed<Id, kByMap, kReuse, 1, false>, shape, on, a);
  if (shape.threads <= kFewWarps * kWarp) {
    shape.threads = kFewWarps * kWarp;
    return launch(remap_packed<Id, kByMap, kReuse, kFewWarps, true>, shape, on, a);
  }
  launch(remap_packed<Id, kByMap, kReuse, kMaxWarps, false>, shape, on, a);
}

template <typename Id>
bool remap_packed_rows(const RemapArguments& a, const Tensor& on) {
  constexpr int kSlots = 4;
  const auto packed = [&](const void* at, const int64_t* strides) {
    return reinterpret_cast<uintptr_t>(at) % 16 == 0 && strides[0] == a.top_k && strides[1] == 1;
  };
  const bool shape =
      a.top_k % kSlots == 0 && a.top_k == 1 << a.lane_bits && a.num_tokens * a.top_k <= kThreads * kSlots;
  if (!shape || !packed(a.topk_ids, a.id_strides) || !packed(a.topk_weights, a.weight_strides)) return false;
  if (a.expert_offset > kNone - a.num_local_experts || a.num_local_experts > kNone || a.expert_map_size > kNone)
    return false;
  PackedArguments b = {};
  b.topk_ids = a.topk_ids;
  b.topk_weights = a.topk_weights;
  b.local_ids = a.local_ids;
  b.local_weights = a.local_weights;
  b.expert_offset = static_cast<int32_t>(a.expert_offset);
  b.num_local_experts = static_cast<int32_t>(a.num_local_experts);
  b.vectors = static_cast<int32_t>(a.num_tokens * a.top_k / kSlots);
  b.lane_bits = a.lane_bits - 2;
  b.expert_map = a.expert_map;
  b.expert_map_size = static_cast<int32_t>(a.expert_map_size);
  if (a.expert_map == nullptr) {
    a.reuse ? launch_packed<Id, false, true>(b, on) : launch_packed<Id, false, false>(b, on);
  } else {
    a.reuse ? launch_packed<Id, true, true>(b, on) : launch_packed<Id, true, false>(b, on);
  }
  return true;
}

// Whether one block did the work.
template <typename Id>
bool remap_small(const RemapArguments& a, const Tensor& on) {
  constexpr int kItems = 4;
  if (remap_packed_rows<Id>(a, on)) return true;
  if (a.num_tokens << a.lane_bits > kThreads * kItems || a.top_k > kWarp) return false;
  BlockArguments b = {};
  b.topk_ids = a.topk_ids;
  b.topk_weights = a.topk_weights;
  b.local_ids = a.local_ids;
  b.local_weights = a.local_weights;
  b.expert_map = a.expert_map;
  b.expert_map_size = a.expert_map_size;
  b.expert_offset = a.expert_offset;
  b.num_local_experts = a.num_local_experts;
  for (int dim = 0; dim < 2; ++dim) {
    const int64_t widest = std::max(a.id_strides[dim], a.weight_strides[dim]);
    if (widest > kNone / (2 * kThreads * kItems)) return false;
    b.id_strides[dim] = static_cast<int32_t>(a.id_strides[dim]);
    b.weight_strides[dim] = static_cast<int32_t>(a.weight_strides[dim]);
  }
  b.num_tokens = static_cast<int32_t>(a.num_tokens);
  b.top_k = a.top_k;
  b.lane_bits = a.lane_bits;
  if (a.num_tokens << a.lane_bits <= kThreads) {
    remap_in_block<Id, 1>(b, a.reuse, on);
  } else {
    remap_in_block<Id, kItems>(b, a.reuse, on);
  }
  return true;
}

template <typename Id, bool kWide>
void remap(RemapArguments a, const Tensor& on) {
  if (remap_small<Id>(a, on)) return;
  const int64_t lanes = a.num_tokens << a.lane_bits;
  LaunchShape shape;
  shape.threads = static_cast<int>(std::min<int64_t>(kThreads, (lanes + kWarp - 1) / kWarp * kWarp));
  shape.blocks = (lanes + kThreads - 1) / kThreads;
  if (shape.blocks == 1 || !a.reuse) return launch(remap_rows<Id, kWide>, shape, on, a);
  Tensor minima = torch::stable::new_empty(on, {shape.blocks}, torch::headeronly::ScalarType::Int);
  a.minima = static_cast<int32_t*>(minima.data_ptr());
  launch(remap_rows<Id, kWide>, shape, on, a);
  LaunchShape fill;
  fill.threads = kThreads;
  fill.blocks = std::min<int64_t>(kMaxFillBlocks, (a.num_tokens * a.top_k + kThreads - 1) / kThreads);
  fill.overlap = true;
  launch(fill_rows, fill, on, a, shape.blocks);
}

// Checked and allocated by moe_ops/triton/ep_remap.py; topk_weights is float32.
void ep_remap(const Tensor& topk_ids, const Tensor& topk_weights, int64_t expert_offset, int64_t num_local_experts,
              std::optional<Tensor> expert_map, bool reuse, Tensor local_ids, Tensor local_weights) {
  const torch::stable::accelerator::DeviceGuard guard(topk_ids.get_device_index());
  RemapArguments a = {};
  a.topk_ids = topk_ids.const_data_ptr();
  a.topk_weights = static_cast<const float*>(topk_weights.const_data_ptr());
  for (int dim = 0; dim < 2; ++dim) {
    a.id_strides[dim] = topk_ids.stride(dim);
    a.weight_strides[dim] = topk_weights.stride(dim);
  }
  if (expert_map.has_value()) {
    a.expert_map = static_cast<const int32_t*>(expert_map->const_data_ptr());
    a.expert_map_size = expert_map->numel();
  }
  a.expert_offset = expert_offset;
  a.num_local_experts = num_local_experts;
  a.num_tokens = topk_ids.size(0);
  a.top_k = static_cast<int32_t>(topk_ids.size(1));
  if (a.num_tokens == 0 || a.top_k == 0) return;
  a.lane_bits = 0;
  while ((1 << a.lane_bits) < std::min<int64_t>(kWarp, a.top_k)) ++a.lane_bits;
  a.reuse = reuse;
  a.local_ids = static_cast<int32_t*>(local_ids.data_ptr());
  a.local_weights = static_cast<float*>(local_weights.data_ptr());
  const bool wide = a.top_k > kWarp;
  if (topk_ids.scalar_type() == torch::headeronly::ScalarType::Long) {
    return wide ? remap<int64_t, true>(a, topk_ids) : remap<int64_t, false>(a, topk_ids);
  }
  return wide ? remap<int32_t, true>(a, topk_ids) : remap<int32_t, false>(a, topk_ids);
}

}  // namespace
}  // namespace moe_ops::cuda

STABLE_TORCH_LIBRARY_IMPL(moe_ops, CUDA, m) { m.impl("_ep_remap", TORCH_BOX(&moe_ops::cuda::ep_remap)); }
