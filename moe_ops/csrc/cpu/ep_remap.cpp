// ep_remap: global expert ids to local ids, in int64 throughout.
#include <algorithm>
#include <limits>
#include <tuple>

#include "cpu/check.h"

namespace moe_ops {
namespace {

constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

// -1 where the expert is not local.
struct Lookup {
  int64_t operator()(int64_t id) const {
    if (map) return id >= 0 && id < size && map[id] >= 0 ? map[id] : -1;
    // Compared before subtracting: with offset >= 0 nothing wraps around.
    return id >= offset && id - offset < count ? id - offset : -1;
  }
  int64_t offset = 0, count = 0;
  const int32_t* map = nullptr;
  int64_t size = 0;
};

std::tuple<Tensor, Tensor> ep_remap(const Tensor& topk_ids, const Tensor& topk_weights,
                                    std::optional<int64_t> expert_offset, std::optional<int64_t> num_local_experts,
                                    std::optional<Tensor> expert_map, std::string fill) {
  constexpr const char* kOp = "ep_remap";
  check_ids(kOp, topk_ids, topk_ids.defined() && topk_ids.dim() ? topk_ids.size(0) : 0, &topk_weights);
  const int64_t num_tokens = topk_ids.size(0), top_k = topk_ids.size(1);
  check_weights(kOp, topk_weights, num_tokens, top_k);
  const auto shown = [](const std::optional<int64_t>& value) { return value ? std::to_string(*value) : "None"; };
  const bool ranged = expert_offset && num_local_experts && !expert_map;
  const bool mapped = !expert_offset && !num_local_experts && expert_map;
  MOE_REQUIRE(ranged || mapped, kOp, "expert_offset", "given together with num_local_experts, or expert_map alone",
              "expert_offset=" + shown(expert_offset) + ", num_local_experts=" + shown(num_local_experts) +
                  ", expert_map=" + (expert_map ? "given" : "None"));
  MOE_REQUIRE(!num_local_experts || *num_local_experts >= 0, kOp, "num_local_experts", "at least 0",
              shown(num_local_experts));
  constexpr int64_t kMostExperts = std::numeric_limits<int32_t>::max();  // local ids are int32
  MOE_REQUIRE(!num_local_experts || *num_local_experts <= kMostExperts, kOp, "num_local_experts",
              "at most " + std::to_string(kMostExperts), shown(num_local_experts));
  MOE_REQUIRE(!expert_offset || *expert_offset >= 0, kOp, "expert_offset", "at least 0", shown(expert_offset));
  MOE_REQUIRE(!expert_map || (expert_map->dim() == 1 && expert_map->scalar_type() == ScalarType::Int), kOp,
              "expert_map", "[num_experts] int32", describe(*expert_map));
  check_device(kOp, topk_ids, "topk_weights", topk_weights);
  check_device(kOp, topk_ids, "expert_map", expert_map);
  MOE_REQUIRE(fill == "reuse" || fill == "skip", kOp, "fill", "'reuse' or 'skip'", "'" + fill + "'");

  const Tensor ids_tensor = as_int64(topk_ids), weights_tensor = as_float32(topk_weights);
  const int64_t* ids = ids_tensor.const_data_ptr<int64_t>();
  const float* weights = weights_tensor.const_data_ptr<float>();
  Tensor local_ids = torch::stable::new_empty(topk_ids, {num_tokens, top_k}, ScalarType::Int);
  Tensor local_weights = torch::stable::new_empty(topk_ids, {num_tokens, top_k}, ScalarType::Float);
  int32_t* out_ids = local_ids.mutable_data_ptr<int32_t>();
  float* out_weights = local_weights.mutable_data_ptr<float>();

  Lookup lookup;
  const Tensor map = expert_map ? torch::stable::contiguous(*expert_map) : ids_tensor;
  if (expert_map) {
    lookup.map = map.const_data_ptr<int32_t>();
    lookup.size = map.numel();
    if (lookup.size == 0) lookup = {0, 0};
  } else {
    lookup = {*expert_offset, *num_local_experts};
  }

  const bool reuse = fill == "reuse";
  int64_t batch_minimum = kNone;
  bool rows_without = false;
  for (int64_t t = 0; t < num_tokens; t++) {
    int64_t row_minimum = kNone;
    for (int64_t q = t * top_k; q < (t + 1) * top_k; q++) {
      const int64_t local = lookup(ids[q]);
      out_ids[q] = int32_t(local);
      out_weights[q] = local >= 0 ? weights[q] : 0.0f;
      if (local >= 0) row_minimum = std::min(row_minimum, local);
    }
    if (!reuse) continue;
    if (row_minimum == kNone) {
      rows_without = true;
      continue;
    }
    batch_minimum = std::min(batch_minimum, row_minimum);
    for (int64_t q = t * top_k; q < (t + 1) * top_k; q++) {
      if (out_ids[q] < 0) out_ids[q] = int32_t(row_minimum);
    }
  }
  if (reuse && rows_without) {
    const int32_t filler = batch_minimum == kNone ? 0 : int32_t(batch_minimum);
    for (int64_t q = 0; q < num_tokens * top_k; q++) {
      if (out_ids[q] < 0) out_ids[q] = filler;
    }
  }
  return {local_ids, local_weights};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ops, CPU, m) { m.impl("ep_remap", TORCH_BOX(&ep_remap)); }

}  // namespace moe_ops
