// Global to local expert ids. A group of lanes owns a row of slots and finds its smallest local id by shuffles.
//
// Rows without a local expert need the smallest local id of the batch. A small batch is done by one block, which knows
// that minimum itself; a large one leaves the minimum of each block, and a second kernel fills the rows that still miss
// it.

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <optional>

#include "launch.h"

namespace moe_ops::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kThreads = 1024;
constexpr int kMaxWarps = kThreads / kWarp;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int32_t kNone = 0x7fffffff;
constexpr int64_t kOneBlockSlots = 4096;
constexpr int64_t kMaxBlocks = 1024;

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
  int32_t lanes;  // of a row: a power of two up to 32
  bool reuse;     // else foreign slots get -1
  int32_t* local_ids;
  float* local_weights;
  int32_t* minima;  // [blocks], for the second kernel
};

// -1 where the expert is foreign, or none.
template <typename Id>
__device__ __forceinline__ int32_t local_id(const RemapArguments& a, int64_t token, int k) {
  const int64_t id =
      static_cast<int64_t>(static_cast<const Id*>(a.topk_ids)[token * a.id_strides[0] + k * a.id_strides[1]]);
  if (a.expert_map != nullptr) {
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

// Foreign slots get their row's minimum, or -1 where the row has no local expert; kWide: rows of more slots than a warp
// has lanes.
template <typename Id, bool kWide>
__global__ void __launch_bounds__(kThreads) remap_rows(RemapArguments a) {
  __shared__ int32_t shared[kMaxWarps];
  release_successor();
  constexpr int kBatch = kWide ? 1 : 4;  // rows of a group whose loads are in flight together
  const int lane = threadIdx.x % a.lanes;
  const int64_t group = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / a.lanes;
  const int64_t groups = static_cast<int64_t>(gridDim.x) * blockDim.x / a.lanes;
  const int64_t rounds = (a.num_tokens + groups - 1) / groups;
  const int passes = kWide ? (a.top_k + kWarp - 1) / kWarp : 1;
  int32_t smallest = kNone;
  bool incomplete = false;
  for (int64_t round = 0; round < rounds; round += kBatch) {
    int32_t local[kBatch], minimum[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) minimum[i] = kNone;
    for (int pass = 0; pass < passes; ++pass) {
      const int k = lane + pass * kWarp;
      float weight[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int64_t token = (round + i) * groups + group;
        const bool inside = token < a.num_tokens && k < a.top_k;
        local[i] = inside ? local_id<Id>(a, token, k) : -1;
        weight[i] = inside ? a.topk_weights[token * a.weight_strides[0] + k * a.weight_strides[1]] : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int64_t token = (round + i) * groups + group;
        if (local[i] >= 0) minimum[i] = min(minimum[i], local[i]);
        if (token < a.num_tokens && k < a.top_k) {
          a.local_weights[token * a.top_k + k] = local[i] >= 0 ? weight[i] : 0.0f;
          if (kWide) a.local_ids[token * a.top_k + k] = local[i];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int64_t token = (round + i) * groups + group;
      for (int step = a.lanes / 2; step > 0; step /= 2) {
        minimum[i] = min(minimum[i], __shfl_xor_sync(kAllLanes, minimum[i], step));
      }
      smallest = min(smallest, minimum[i]);
      if (token >= a.num_tokens) continue;
      incomplete |= minimum[i] == kNone;
      const int32_t filler = a.reuse && minimum[i] != kNone ? minimum[i] : -1;
      int32_t* ids = a.local_ids + token * a.top_k;
      if (!kWide) {
        if (lane < a.top_k) ids[lane] = local[i] >= 0 ? local[i] : filler;
      } else {
        for (int k = lane; k < a.top_k; k += kWarp) {
          if (ids[k] < 0) ids[k] = filler;
        }
      }
    }
  }
  if (!a.reuse) return;
  smallest = block_minimum(smallest, shared);
  if (gridDim.x > 1) {
    if (threadIdx.x == 0) a.minima[blockIdx.x] = smallest;
    return;
  }
  if (!incomplete) return;
  const int32_t filler = smallest == kNone ? 0 : smallest;
  for (int64_t token = group; token < a.num_tokens; token += groups) {
    for (int k = lane; k < a.top_k; k += a.lanes) {
      if (a.local_ids[token * a.top_k + k] < 0) a.local_ids[token * a.top_k + k] = filler;
    }
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

template <typename Id, bool kWide>
void remap(RemapArguments a, const Tensor& on) {
  const int64_t slots = a.num_tokens * a.top_k;
  const int64_t lanes_total = a.num_tokens * a.lanes;
  LaunchShape shape;
  if (slots <= kOneBlockSlots) {
    constexpr int kSmallestBlock = 128;
    shape.threads = kSmallestBlock;
    while (shape.threads < kThreads && shape.threads < lanes_total) shape.threads *= 2;
    return launch(remap_rows<Id, kWide>, shape, on, a);
  }
  shape.threads = kThreads;
  shape.blocks = std::min<int64_t>(kMaxBlocks, (lanes_total + kThreads - 1) / kThreads);
  Tensor minima = torch::stable::new_empty(on, {shape.blocks}, torch::headeronly::ScalarType::Int);
  a.minima = static_cast<int32_t*>(minima.data_ptr());
  launch(remap_rows<Id, kWide>, shape, on, a);
  if (!a.reuse) return;
  LaunchShape fill;
  fill.threads = kThreads;
  fill.blocks = std::min<int64_t>(kMaxBlocks, (slots + kThreads - 1) / kThreads);
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
  a.lanes = 1;
  while (a.lanes < kWarp && a.lanes < a.top_k) a.lanes *= 2;
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
