// fused_mxfp4_moe, its _out form and its backward: check, translate, call the kernels.
#include "cpu/kernels/fused_mxfp4_moe.h"

#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <tuple>
#include <vector>

#include "cpu/check.h"

namespace moe_ops {
namespace {

constexpr int64_t kBlock = 32, kTileRows = 16, kTileBlockBytes = 256;

// repr() of a Python float.
std::string float_text(double value) {
  char text[32];
  for (int digits = 1; digits <= 17; digits++) {
    std::snprintf(text, sizeof text, "%.*g", digits, value);
    if (std::strtod(text, nullptr) == value) break;
  }
  std::string result = text;
  if (std::isfinite(value) && result.find_first_of(".e") == std::string::npos) result += ".0";
  return std::isnan(value) ? "nan" : result;
}

std::string quoted(const std::string& text) { return "'" + text + "'"; }

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text;
  for (const int64_t size : shape) text += (text.empty() ? "[" : ", ") + std::to_string(size);
  return text + "]";
}

// The arguments that the three ops share.
struct Arguments {
  const Tensor &hidden_states, &topk_ids, &topk_weights, &w13, &w13_scale, &w2, &w2_scale;
  const std::string& w13_layout;
  const std::optional<Tensor>&w13_bias, &w2_bias;
  const std::string& activation;
  const std::optional<double>&swiglu_limit, &swiglu_alpha;
  const std::optional<Tensor>& expert_map;
  const std::string& weight_layout;
};

bool has_shape(const Tensor& tensor, const std::vector<int64_t>& shape) {
  if (!tensor.defined() || tensor.dim() != static_cast<int64_t>(shape.size())) return false;
  for (size_t i = 0; i < shape.size(); i++) {
    if (tensor.size(static_cast<int64_t>(i)) != shape[i]) return false;
  }
  return true;
}

void check_u8(const char* op, const char* name, const Tensor& tensor, const std::vector<int64_t>& shape) {
  const bool contiguous = tensor.defined() && tensor.is_contiguous();
  MOE_REQUIRE(contiguous && tensor.scalar_type() == ScalarType::Byte && has_shape(tensor, shape), op, name,
              "a contiguous " + shape_text(shape) + " uint8",
              contiguous || !tensor.defined() ? describe(tensor) : "a tensor that is not contiguous");
}

ActivationParams activation_params(const char* op, const Arguments& a) {
  const bool oai = a.activation == "swiglu_oai";
  MOE_REQUIRE(oai || a.activation == "silu", op, "activation", "'silu' or 'swiglu_oai'", quoted(a.activation));
  if (a.swiglu_limit) {
    MOE_REQUIRE(std::isfinite(*a.swiglu_limit) && *a.swiglu_limit > 0, op, "swiglu_limit",
                "None or a finite number above 0", float_text(*a.swiglu_limit));
  }
  if (!oai) {
    MOE_REQUIRE(!a.swiglu_alpha, op, "swiglu_alpha", "None for activation 'silu'", float_text(*a.swiglu_alpha));
    return {Activation::kSilu, a.swiglu_limit.has_value(), static_cast<float>(a.swiglu_limit.value_or(0)), 1.0f};
  }
  if (a.swiglu_alpha) {
    MOE_REQUIRE(std::isfinite(*a.swiglu_alpha), op, "swiglu_alpha", "a finite number", float_text(*a.swiglu_alpha));
  }
  return {Activation::kSwigluOai, true, static_cast<float>(a.swiglu_limit.value_or(7.0)),
          static_cast<float>(a.swiglu_alpha.value_or(1.702))};
}

void check_sizes(const char* op, int64_t hidden, int64_t inter, int64_t experts, const Tensor& w13) {
  const std::string multiple = "a multiple of " + std::to_string(kBlock);
  MOE_REQUIRE(hidden > 0 && hidden % kBlock == 0, op, "hidden_size", multiple, std::to_string(hidden));
  MOE_REQUIRE(inter > 0 && inter % kBlock == 0, op, "intermediate_size", multiple, std::to_string(inter));
  MOE_REQUIRE(experts > 0, op, "w13", "of at least one expert", describe(w13));
}

void checkpoint_geometry(const char* op, const Arguments& a, ExpertWeights* weights) {
  const int64_t hidden = a.hidden_states.size(1);
  MOE_REQUIRE(hidden > 0 && hidden % kBlock == 0, op, "hidden_size", "a multiple of " + std::to_string(kBlock),
              std::to_string(hidden));
  MOE_REQUIRE(a.w13.defined() && a.w13.dim() == 3 && a.w13.scalar_type() == ScalarType::Byte && a.w13.size(1) % 2 == 0,
              op, "w13", "[num_experts, 2 * intermediate_size, hidden_size / 2] uint8 for weight_layout 'checkpoint'",
              describe(a.w13));
  const int64_t experts = a.w13.size(0), inter = a.w13.size(1) / 2;
  check_sizes(op, hidden, inter, experts, a.w13);
  check_u8(op, "w13", a.w13, {experts, 2 * inter, hidden / 2});
  check_u8(op, "w13_scale", a.w13_scale, {experts, 2 * inter, hidden / kBlock});
  check_u8(op, "w2", a.w2, {experts, hidden, inter / 2});
  check_u8(op, "w2_scale", a.w2_scale, {experts, hidden, inter / kBlock});
  weights->layout = WeightLayout::kCheckpoint;
  weights->num_experts = experts;
  weights->intermediate_size = inter;
}

// The checks of moe_ops.experts.x86_v1_geometry.
void x86_v1_geometry(const char* op, const Arguments& a, ExpertWeights* weights) {
  const int64_t hidden = a.hidden_states.size(1);
  MOE_REQUIRE(a.w13.defined() && a.w13.dim() == 5 && a.w13.scalar_type() == ScalarType::Byte, op, "w13",
              "[num_experts, intermediate_size / 16, 2, hidden_size / 32, 256] uint8 for weight_layout 'x86_v1'",
              describe(a.w13));
  const int64_t experts = a.w13.size(0), inter = a.w13.size(1) * kTileRows;
  check_sizes(op, hidden, inter, experts, a.w13);
  check_u8(op, "w13", a.w13, {experts, inter / kTileRows, 2, hidden / kBlock, kTileBlockBytes});
  check_u8(op, "w13_scale", a.w13_scale, {experts, inter / kTileRows, 2, hidden / kBlock, kTileRows});
  check_u8(op, "w2", a.w2, {experts, hidden / kTileRows, inter / kBlock, kTileBlockBytes});
  check_u8(op, "w2_scale", a.w2_scale, {experts, hidden / kTileRows, inter / kBlock, kTileRows});
  weights->layout = WeightLayout::kX86V1;
  weights->num_experts = experts;
  weights->intermediate_size = inter;
}

void check_bias(const char* op, const char* name, const std::optional<Tensor>& bias, int64_t experts, int64_t width) {
  if (!bias) return;
  MOE_REQUIRE(is_float(bias->scalar_type()) && has_shape(*bias, {experts, width}), op, name,
              shape_text({experts, width}) + " bfloat16, float16 or float32", describe(*bias));
}

DType kernel_dtype(ScalarType dtype) {
  return dtype == ScalarType::BFloat16 ? DType::kBFloat16
         : dtype == ScalarType::Half   ? DType::kFloat16
                                       : DType::kFloat32;
}

// What the kernels read, with the copies that it points into.
struct Call {
  ExpertWeights weights{};
  ActivationParams activation{};
  MoeBatch batch{};
  std::vector<Tensor> kept;

  const Tensor& keep(const Tensor& tensor) { return kept.emplace_back(tensor); }
};

// Global ids to rows of the weights; what has none becomes -1.
Tensor map_ids(const Tensor& topk_ids, const Tensor& expert_map) {
  const Tensor ids = as_int64(topk_ids), map = torch::stable::contiguous(expert_map);
  Tensor local = torch::stable::new_empty(ids, {ids.size(0), ids.size(1)});
  const int64_t* from = ids.const_data_ptr<int64_t>();
  const int32_t* table = map.const_data_ptr<int32_t>();
  int64_t* to = local.mutable_data_ptr<int64_t>();
  const int64_t size = map.size(0);
  for (int64_t i = 0; i < ids.numel(); i++) to[i] = from[i] >= 0 && from[i] < size ? table[from[i]] : -1;
  return local;
}

Call make_call(const char* op, const Arguments& a) {
  Call call;
  call.kept.reserve(8);
  check_rows(op, "hidden_states", a.hidden_states);
  const int64_t num_tokens = a.hidden_states.size(0), hidden = a.hidden_states.size(1);
  check_ids(op, a.topk_ids, num_tokens, &a.topk_weights);
  check_weights(op, a.topk_weights, num_tokens, a.topk_ids.size(1));
  const bool gate_up = a.w13_layout == "gate_up", up_gate = a.w13_layout == "up_gate";
  MOE_REQUIRE(gate_up || up_gate || a.w13_layout == "interleaved", op, "w13_layout",
              "'gate_up', 'up_gate' or 'interleaved'", quoted(a.w13_layout));
  call.activation = activation_params(op, a);
  ExpertWeights& w = call.weights;
  if (a.weight_layout == "checkpoint") {
    checkpoint_geometry(op, a, &w);
  } else {
    MOE_REQUIRE(a.weight_layout == "x86_v1", op, "weight_layout", "'checkpoint' or a prepared layout of cpu",
                quoted(a.weight_layout));
    x86_v1_geometry(op, a, &w);
  }
  w.hidden_size = hidden;
  w.w13_layout = gate_up ? W13Layout::kGateUp : up_gate ? W13Layout::kUpGate : W13Layout::kInterleaved;
  check_bias(op, "w13_bias", a.w13_bias, w.num_experts, 2 * w.intermediate_size);
  check_bias(op, "w2_bias", a.w2_bias, w.num_experts, hidden);
  if (a.expert_map) {
    MOE_REQUIRE(a.expert_map->dim() == 1 && a.expert_map->scalar_type() == ScalarType::Int, op, "expert_map",
                "[num_experts] int32", describe(*a.expert_map));
  }
  check_device(op, a.hidden_states, "topk_ids", a.topk_ids);
  check_device(op, a.hidden_states, "topk_weights", a.topk_weights);
  check_device(op, a.hidden_states, "w13", a.w13);
  check_device(op, a.hidden_states, "w13_scale", a.w13_scale);
  check_device(op, a.hidden_states, "w2", a.w2);
  check_device(op, a.hidden_states, "w2_scale", a.w2_scale);
  check_device(op, a.hidden_states, "w13_bias", a.w13_bias);
  check_device(op, a.hidden_states, "w2_bias", a.w2_bias);
  check_device(op, a.hidden_states, "expert_map", a.expert_map);

  w.w13 = a.w13.const_data_ptr<uint8_t>();
  w.w13_scale = a.w13_scale.const_data_ptr<uint8_t>();
  w.w2 = a.w2.const_data_ptr<uint8_t>();
  w.w2_scale = a.w2_scale.const_data_ptr<uint8_t>();
  w.w13_bias = a.w13_bias ? call.keep(as_float32(*a.w13_bias)).const_data_ptr<float>() : nullptr;
  w.w2_bias = a.w2_bias ? call.keep(as_float32(*a.w2_bias)).const_data_ptr<float>() : nullptr;
  MoeBatch& b = call.batch;
  b.num_tokens = num_tokens;
  b.top_k = a.topk_ids.size(1);
  const Tensor& rows = call.keep(dense_rows(a.hidden_states));
  b.hidden_states = rows.const_data_ptr();
  b.dtype = kernel_dtype(rows.scalar_type());
  b.hidden_stride = rows.stride(0);
  const Tensor& ids = call.keep(a.expert_map ? map_ids(a.topk_ids, *a.expert_map) : as_int64(a.topk_ids));
  b.topk_ids = ids.const_data_ptr<int64_t>();
  b.topk_weights = call.keep(as_float32(a.topk_weights)).const_data_ptr<float>();
  return call;
}

// The op runs on torch's own threads: workers of our own would share their cores with torch's, which spin for
// milliseconds after each of torch's parallel regions (docs/measured.md). OpenMP's threads do not survive a fork.
ThreadTeam& team() {
  if (in_forked_child()) {
    thread_local ThreadTeam own(static_cast<int>(torch::stable::get_num_threads()));
    return own;
  }
  const auto runner = [](int num_threads, ThreadTeam::Function function, void* ctx) {
    torch::stable::parallel_for(0, num_threads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) function(ctx, static_cast<int>(i), num_threads);
    });
  };
  thread_local std::unique_ptr<ThreadTeam> borrowed;
  const int threads = static_cast<int>(torch::stable::get_num_threads());
  if (!borrowed || borrowed->size() != threads) borrowed = std::make_unique<ThreadTeam>(threads, runner);
  return *borrowed;
}

void run_into(Call& call, Tensor& out, bool batch_invariant) {
  call.batch.output = out.mutable_data_ptr();
  call.batch.output_dtype = kernel_dtype(out.scalar_type());
  call.batch.output_stride = out.stride(0);
  fused_mxfp4_moe(call.weights, call.activation, call.batch, batch_invariant, team());
}

Tensor fused_mxfp4_moe_op(const Tensor& hidden_states, const Tensor& topk_ids, const Tensor& topk_weights,
                          const Tensor& w13, const Tensor& w13_scale, const Tensor& w2, const Tensor& w2_scale,
                          std::string w13_layout, std::optional<Tensor> w13_bias, std::optional<Tensor> w2_bias,
                          std::string activation, std::optional<double> swiglu_limit,
                          std::optional<double> swiglu_alpha, std::optional<Tensor> expert_map,
                          std::optional<ScalarType> out_dtype, bool batch_invariant, std::string weight_layout,
                          std::optional<Tensor> after) {
  constexpr const char* kOp = "fused_mxfp4_moe";
  Call call = make_call(kOp, {hidden_states, topk_ids, topk_weights, w13, w13_scale, w2, w2_scale, w13_layout, w13_bias,
                              w2_bias, activation, swiglu_limit, swiglu_alpha, expert_map, weight_layout});
  check_ticket(kOp, "after", after);
  check_device(kOp, hidden_states, "after", after);
  const ScalarType dtype = out_dtype.value_or(hidden_states.scalar_type());
  MOE_REQUIRE(is_float(dtype), kOp, "out_dtype", "None, bfloat16, float16 or float32", dtype_name(dtype));
  Tensor out = torch::stable::new_empty(hidden_states, {hidden_states.size(0), hidden_states.size(1)}, dtype);
  run_into(call, out, batch_invariant);
  return out;
}

void fused_mxfp4_moe_out_op(const Tensor& hidden_states, const Tensor& topk_ids, const Tensor& topk_weights,
                            const Tensor& w13, const Tensor& w13_scale, const Tensor& w2, const Tensor& w2_scale,
                            std::string w13_layout, std::optional<Tensor> w13_bias, std::optional<Tensor> w2_bias,
                            std::string activation, std::optional<double> swiglu_limit,
                            std::optional<double> swiglu_alpha, std::optional<Tensor> expert_map, bool batch_invariant,
                            std::string weight_layout, std::optional<Tensor> after, Tensor out) {
  constexpr const char* kOp = "fused_mxfp4_moe_out";
  Call call = make_call(kOp, {hidden_states, topk_ids, topk_weights, w13, w13_scale, w2, w2_scale, w13_layout, w13_bias,
                              w2_bias, activation, swiglu_limit, swiglu_alpha, expert_map, weight_layout});
  check_ticket(kOp, "after", after);
  check_device(kOp, hidden_states, "after", after);
  check_device(kOp, hidden_states, "out", out);
  const int64_t num_tokens = hidden_states.size(0), hidden = hidden_states.size(1);
  MOE_REQUIRE(has_shape(out, {num_tokens, hidden}) && is_float(out.scalar_type()) && out.is_contiguous(), kOp, "out",
              "a contiguous " + shape_text({num_tokens, hidden}) + " bfloat16, float16 or float32", describe(out));
  check_no_overlap(kOp, out, "hidden_states", hidden_states);
  check_no_overlap(kOp, out, "topk_ids", topk_ids);
  check_no_overlap(kOp, out, "topk_weights", topk_weights);
  check_no_overlap(kOp, out, "w13", w13);
  check_no_overlap(kOp, out, "w13_scale", w13_scale);
  check_no_overlap(kOp, out, "w2", w2);
  check_no_overlap(kOp, out, "w2_scale", w2_scale);
  if (w13_bias) check_no_overlap(kOp, out, "w13_bias", *w13_bias);
  if (w2_bias) check_no_overlap(kOp, out, "w2_bias", *w2_bias);
  if (expert_map) check_no_overlap(kOp, out, "expert_map", *expert_map);
  run_into(call, out, batch_invariant);
}

std::tuple<Tensor, Tensor> fused_mxfp4_moe_backward_op(const Tensor& grad_output, const Tensor& hidden_states,
                                                       const Tensor& topk_ids, const Tensor& topk_weights,
                                                       const Tensor& w13, const Tensor& w13_scale, const Tensor& w2,
                                                       const Tensor& w2_scale, std::string w13_layout,
                                                       std::optional<Tensor> w13_bias, std::optional<Tensor> w2_bias,
                                                       std::string activation, std::optional<double> swiglu_limit,
                                                       std::optional<double> swiglu_alpha,
                                                       std::optional<Tensor> expert_map, std::string weight_layout) {
  constexpr const char* kOp = "fused_mxfp4_moe_backward";
  Call call = make_call(kOp, {hidden_states, topk_ids, topk_weights, w13, w13_scale, w2, w2_scale, w13_layout, w13_bias,
                              w2_bias, activation, swiglu_limit, swiglu_alpha, expert_map, weight_layout});
  check_device(kOp, hidden_states, "grad_output", grad_output);
  const int64_t num_tokens = hidden_states.size(0), hidden = hidden_states.size(1);
  MOE_REQUIRE(has_shape(grad_output, {num_tokens, hidden}) && is_float(grad_output.scalar_type()), kOp, "grad_output",
              shape_text({num_tokens, hidden}) + " bfloat16, float16 or float32", describe(grad_output));
  Tensor grad_hidden = torch::stable::new_empty(hidden_states, {num_tokens, hidden}, ScalarType::Float);
  Tensor grad_weights = torch::stable::new_empty(hidden_states, {num_tokens, topk_ids.size(1)}, ScalarType::Float);
  const Tensor grad = as_float32(grad_output);
  const MoeGradients gradients{grad.const_data_ptr<float>(), grad_hidden.mutable_data_ptr<float>(),
                               grad_weights.mutable_data_ptr<float>()};
  fused_mxfp4_moe_backward(call.weights, call.activation, call.batch, gradients, team());
  const ScalarType dtype = hidden_states.scalar_type();
  return {converted(grad_hidden, dtype), grad_weights};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ops, CPU, m) {
  m.impl("fused_mxfp4_moe", TORCH_BOX(&fused_mxfp4_moe_op));
  m.impl("fused_mxfp4_moe_out", TORCH_BOX(&fused_mxfp4_moe_out_op));
  m.impl("fused_mxfp4_moe_backward", TORCH_BOX(&fused_mxfp4_moe_backward_op));
}

}  // namespace moe_ops
