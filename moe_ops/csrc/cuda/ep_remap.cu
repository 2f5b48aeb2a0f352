// Global to local expert ids. A group of lanes owns a row of slots and finds its smallest local id by shuffles.
//
// Rows without a local expert need the smallest local id of the batch. A batch of one block's rows is finished by that
// block, which knows the minimum itself; a larger one leaves the minimum of each block, and a second kernel fills the
// rows that still miss it. The kernels are short: at decode sizes fetching instructions is most of their time.

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

// -1 where the expert is foreign, or none.
__device__ __forceinline__ int32_t local_id(const RemapArguments& a, int64_t id) {
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
    local = local_id(a, static_cast<int64_t>(id[k * a.id_strides[1]]));
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

template <typename Id, bool kWide>
void remap(RemapArguments a, const Tensor& on) {
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
