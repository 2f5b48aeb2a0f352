// The op behind moe_ops/cuda/_fused_mxfp4_moe_sm90.py: fills the kernels' structures; arguments are checked there.
#include "fused_mxfp4_moe_sm90.h"

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <stdexcept>
#include <vector>

#include "launch.h"
#include "sm90_counters.h"

namespace moe_ops::cuda {
namespace {

using torch::headeronly::ScalarType;

const float* float_or_null(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? static_cast<const float*>(tensor->const_data_ptr()) : nullptr;
}

sm90::OutType out_type(const Tensor& out) {
  switch (out.scalar_type()) {
    case ScalarType::Float:
      return sm90::OutType::kFloat32;
    case ScalarType::BFloat16:
      return sm90::OutType::kBFloat16;
    default:
      return sm90::OutType::kFloat16;
  }
}

// row_places: of the checkpoint's w13 rows, as they index w13_bias: first gate row, first up row, step. limit: infinity
// for none. `oai`: the activation multiplies by up + 1. one_order: sums in the same order for every batch.
sm90::Problem problem_of(const Tensor& hidden_states, const Tensor& topk_ids, const Tensor& topk_weights,
                         const Tensor& w13, const Tensor& w13_scale, const Tensor& w2, const Tensor& w2_scale,
                         const std::optional<Tensor>& w13_bias, const std::optional<Tensor>& w2_bias,
                         const std::optional<Tensor>& expert_map, const std::vector<int64_t>& row_places, bool oai,
                         double limit, double alpha, const Tensor& out) {
  sm90::Problem q{};
  q.hidden_states = hidden_states.const_data_ptr();
  q.hidden_stride = hidden_states.stride(0);
  q.hidden_is_fp16 = hidden_states.scalar_type() == ScalarType::Half;
  q.topk_ids = topk_ids.const_data_ptr();
  q.ids_are_int64 = topk_ids.scalar_type() == ScalarType::Long;
  q.topk_weights = static_cast<const float*>(topk_weights.const_data_ptr());
  if (expert_map.has_value()) {
    q.expert_map = static_cast<const int32_t*>(expert_map->const_data_ptr());
    q.expert_map_size = expert_map->numel();
  }
  q.num_tokens = static_cast<int>(hidden_states.size(0));
  q.top_k = static_cast<int>(topk_ids.size(1));
  q.num_experts = static_cast<int>(w13.size(0));
  q.hidden_size = static_cast<int>(hidden_states.size(1));
  q.intermediate_size = static_cast<int>(w13.size(1) * 8);
  q.w13 = static_cast<const uint8_t*>(w13.const_data_ptr());
  q.w13_scale = static_cast<const uint8_t*>(w13_scale.const_data_ptr());
  q.w2 = static_cast<const uint8_t*>(w2.const_data_ptr());
  q.w2_scale = static_cast<const uint8_t*>(w2_scale.const_data_ptr());
  q.w13_bias = float_or_null(w13_bias);
  q.w2_bias = float_or_null(w2_bias);
  q.gate_offset = static_cast<int>(row_places.at(0));
  q.up_offset = static_cast<int>(row_places.at(1));
  q.row_step = static_cast<int>(row_places.at(2));
  q.oai = oai;
  q.limit = static_cast<float>(limit);
  q.alpha = static_cast<float>(alpha);
  q.output = out.data_ptr();
  q.output_type = out_type(out);
  return q;
}

void sm90_decode(const Tensor& hidden_states, const Tensor& topk_ids, const Tensor& topk_weights, const Tensor& w13,
                 const Tensor& w13_scale, const Tensor& w2, const Tensor& w2_scale, std::optional<Tensor> w13_bias,
                 std::optional<Tensor> w2_bias, std::optional<Tensor> expert_map, std::vector<int64_t> row_places,
                 bool oai, double limit, double alpha, bool one_order, bool all_scales, Tensor out) {
  const torch::stable::accelerator::DeviceGuard guard(hidden_states.get_device_index());
  const sm90::Problem q = problem_of(hidden_states, topk_ids, topk_weights, w13, w13_scale, w2, w2_scale, w13_bias,
                                     w2_bias, expert_map, row_places, oai, limit, alpha, out);
  if (!sm90::decode_supports(q)) throw std::runtime_error("_sm90_decode: too many slots or experts");
  cudaStream_t stream = current_stream(hidden_states);
  const int64_t words = static_cast<int64_t>(sm90::decode_scratch_words(q));
  Tensor sums = torch::stable::new_empty(hidden_states, {words}, ScalarType::Float);
  const sm90::DecodeScratch scratch{sums.data_ptr(), sm90::decode_counters(hidden_states.get_device_index(), stream),
                                    one_order, all_scales};
  STD_CUDA_CHECK(sm90::decode(q, scratch, device_traits(hidden_states).multiprocessors, stream));
}

// The tiles of "narrow" follow the average rows of an expert: small ones leave room for more stages of weights.
int most_tokens(bool wide, int64_t num_slots, int64_t num_experts) {
  if (wide) return sm90::kWideTokens;
  return num_slots <= 52 * num_experts ? sm90::kNarrowTokens : sm90::kMiddleTokens;
}

// row_map, row_slot and tokens_per_expert: of the permutation map. e4m3: activations are rounded to it; `wide` is not
// looked at then.
void sm90_grouped(const Tensor& hidden_states, const Tensor& topk_weights, const Tensor& row_map,
                  const Tensor& row_slot, const Tensor& tokens_per_expert, const Tensor& w13, const Tensor& w13_scale,
                  const Tensor& w2, const Tensor& w2_scale, std::optional<Tensor> w13_bias,
                  std::optional<Tensor> w2_bias, std::vector<int64_t> row_places, bool oai, double limit, double alpha,
                  bool wide, bool e4m3, Tensor out) {
  const torch::stable::accelerator::DeviceGuard guard(hidden_states.get_device_index());
  cudaStream_t stream = current_stream(hidden_states);
  const int sms = device_traits(hidden_states).multiprocessors;
  const int64_t num_slots = row_slot.numel(), num_experts = tokens_per_expert.numel();
  const int most = e4m3 ? sm90::kE4m3Tokens : most_tokens(wide, num_slots, num_experts);
  const int64_t capacity = num_slots / most + (num_slots < num_experts ? num_slots : num_experts);
  Tensor tiles = torch::stable::new_empty(row_slot, {4 * capacity + 4}, ScalarType::Int);
  int* tile_words = static_cast<int*>(tiles.data_ptr());
  int* num_tiles = tile_words + 4 * capacity;
  STD_CUDA_CHECK(sm90::list_tiles(static_cast<const int*>(tokens_per_expert.const_data_ptr()),
                                  static_cast<int>(num_experts), most, tile_words, num_tiles, stream));
  const int intermediate = static_cast<int>(w13.size(1) * 8), hidden_size = static_cast<int>(hidden_states.size(1));
  const int64_t hidden_blocks = (intermediate + 63) / 64, num_tokens = hidden_states.size(0);
  Tensor hidden = torch::stable::new_empty(hidden_states, {num_slots * (e4m3 ? intermediate : hidden_blocks * 64)},
                                           ScalarType::BFloat16);
  Tensor rows = torch::stable::new_empty(hidden_states, {num_slots, hidden_size},
                                         e4m3 ? ScalarType::BFloat16 : ScalarType::Float);
  // One matrix's activations after the other's.
  const int64_t quantized_bytes = std::max(num_tokens * hidden_size, num_slots * intermediate);
  Tensor quantized = torch::stable::new_empty(hidden_states, {e4m3 ? quantized_bytes : 0}, ScalarType::Byte);
  Tensor row_scale = torch::stable::new_empty(hidden_states, {e4m3 ? num_slots : 0}, ScalarType::Float);
  sm90::GroupedMatmul m{};
  m.first = true;
  m.num_rows = num_slots;
  m.activations = hidden_states.const_data_ptr();
  m.activations_stride = hidden_states.stride(0);
  m.row_slot = static_cast<const int32_t*>(row_slot.const_data_ptr());
  m.top_k = static_cast<int>(row_map.size(1));
  m.codes = static_cast<const uint8_t*>(w13.const_data_ptr());
  m.scales = static_cast<const uint8_t*>(w13_scale.const_data_ptr());
  m.bias = float_or_null(w13_bias);
  m.k = hidden_size;
  m.rows_out = 2 * intermediate;
  m.tiles = tile_words;
  m.num_tiles = num_tiles;
  m.gate_offset = static_cast<int>(row_places.at(0));
  m.up_offset = static_cast<int>(row_places.at(1));
  m.row_step = static_cast<int>(row_places.at(2));
  m.oai = oai;
  m.limit = static_cast<float>(limit);
  m.alpha = static_cast<float>(alpha);
  m.output = hidden.data_ptr();
  const auto multiply = [&](int64_t num_rows, const int* row_map) {
    if (!e4m3) {
      STD_CUDA_CHECK(sm90::grouped(m, most, sms, stream));
      return;
    }
    float* scale = static_cast<float*>(row_scale.data_ptr());
    STD_CUDA_CHECK(sm90::quantize_rows(m.activations, m.activations_stride, num_rows, m.k, row_map, m.top_k,
                                       quantized.data_ptr(), scale, stream));
    m.activations = quantized.const_data_ptr();
    STD_CUDA_CHECK(sm90::grouped_e4m3(m, scale, sms, stream));
  };
  multiply(num_tokens, static_cast<const int*>(row_map.const_data_ptr()));
  m.first = false;
  m.activations = hidden.const_data_ptr();
  m.activations_stride = intermediate;
  m.codes = static_cast<const uint8_t*>(w2.const_data_ptr());
  m.scales = static_cast<const uint8_t*>(w2_scale.const_data_ptr());
  m.bias = float_or_null(w2_bias);
  m.k = intermediate;
  m.rows_out = hidden_size;
  m.output = rows.data_ptr();
  multiply(num_slots, nullptr);
  STD_CUDA_CHECK(sm90::combine(rows.const_data_ptr(), e4m3, static_cast<const int*>(row_map.const_data_ptr()),
                               static_cast<const float*>(topk_weights.const_data_ptr()),
                               static_cast<int>(row_map.size(0)), m.top_k, hidden_size, num_slots, out.data_ptr(),
                               out_type(out), stream));
}

// rows [R, width] bf16 -> quantized [R, width] and scale [R], as operands of the kernels.
void sm90_quantize_rows(const Tensor& rows, Tensor quantized, Tensor scale) {
  const torch::stable::accelerator::DeviceGuard guard(rows.get_device_index());
  STD_CUDA_CHECK(sm90::quantize_rows(rows.const_data_ptr(), rows.stride(0), rows.size(0),
                                     static_cast<int>(rows.size(1)), nullptr, 0, quantized.data_ptr(),
                                     static_cast<float*>(scale.data_ptr()), current_stream(rows)));
}

}  // namespace
}  // namespace moe_ops::cuda

STABLE_TORCH_LIBRARY_IMPL(moe_ops, CUDA, m) {
  m.impl("_sm90_decode", TORCH_BOX(&moe_ops::cuda::sm90_decode));
  m.impl("_sm90_grouped", TORCH_BOX(&moe_ops::cuda::sm90_grouped));
  m.impl("_sm90_quantize_rows", TORCH_BOX(&moe_ops::cuda::sm90_quantize_rows));
}
