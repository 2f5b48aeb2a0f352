// The experts of a mixture-of-experts layer over MXFP4 (or bfloat16) weights, on the CPU and without torch.
//
// output[t] = sum over k of topk_weights[t, k] * down(act(gate(x[t]), up(x[t]))), one rounding at the end.
#pragma once

#include <cstdint>

#include "cpu/kernels/thread_team.h"

namespace moe_ops {

enum class DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };
enum class Activation : int { kSilu = 0, kSwigluOai = 1 };
enum class W13Layout : int { kGateUp = 0, kUpGate = 1, kInterleaved = 2 };

// kCheckpoint: w13 [E, 2I, H/2] codes with w13_scale [E, 2I, H/32]; w2 [E, H, I/2] with w2_scale [E, H, I/32].
// kX86V1: the same bytes as tiles of 16 rows, see fused_mxfp4_moe_kernels.h; w13 is in the order gate tile, up tile.
// kBFloat16: w13 is bfloat16 [E, 2I, H] and w2 bfloat16 [E, H, I]; no scales.
enum class WeightLayout : int { kCheckpoint = 0, kX86V1 = 1, kBFloat16 = 16 };

struct ExpertWeights {
  int64_t num_experts, hidden_size, intermediate_size;  // sizes are multiples of 32
  WeightLayout layout;
  W13Layout w13_layout;  // row order of w13 (unless kX86V1) and of w13_bias
  const uint8_t *w13, *w13_scale, *w2, *w2_scale;
  const float *w13_bias, *w2_bias;  // [E, 2I], [E, H]; may be null
};

struct ActivationParams {
  Activation kind;
  bool has_limit;
  float limit, alpha;  // alpha is read for kSwigluOai only
};

struct MoeBatch {
  int64_t num_tokens, top_k;
  const void* hidden_states;  // [T, H] of dtype
  DType dtype;
  int64_t hidden_stride;      // elements from row to row
  const int64_t* topk_ids;    // [T, K]; outside [0, E): no expert
  const float* topk_weights;  // [T, K]; exactly 0: no expert
  void* output;               // [T, H] of output_dtype; every row is written
  DType output_dtype;
  int64_t output_stride;
};

// Same bits for any team size. With batch_invariant a row does not depend on the other rows of the batch either.
void fused_mxfp4_moe(const ExpertWeights& weights, const ActivationParams& activation, const MoeBatch& batch,
                     bool batch_invariant, ThreadTeam& team);

struct MoeGradients {
  const float* grad_output;   // [T, H]
  float* grad_hidden_states;  // [T, H], every row is written
  float* grad_topk_weights;   // [T, K], every element is written; 0 where there is no expert
};

// Gradients in the activations and the router weights; the output fields of `batch` are not read. A slot of weight 0
// has a gradient of its own.
void fused_mxfp4_moe_backward(const ExpertWeights& weights, const ActivationParams& activation, const MoeBatch& batch,
                              const MoeGradients& gradients, ThreadTeam& team);

// The instruction set whose kernels are used: "amx", "avx512", "avx2", "neon" or "scalar". MOE_OPS_CPU_ISA may name a
// lower one; a name that is unknown raises std::runtime_error.
const char* fused_mxfp4_moe_isa();

}  // namespace moe_ops
