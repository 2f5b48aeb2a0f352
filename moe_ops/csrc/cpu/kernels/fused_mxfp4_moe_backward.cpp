// Gradients of fused_mxfp4_moe in float32, the weights being constants.
//
// With y = down(h), h = act(gate, up): grad_topk_weights = <grad_output, y> = <down^T grad_output, h> (+ the bias), so
// that y is not needed, and grad_hidden_states = sum of weight * (gate^T dgate + up^T dup).
#include <algorithm>
#include <atomic>
#include <cmath>
#include <stdexcept>

#include "cpu/kernels/fused_mxfp4_moe_plan.h"
#include "cpu/kernels/fused_mxfp4_moe_weights.h"

namespace moe_ops {
namespace mxfp4 {
namespace {

constexpr int kRows = 32;  // activation rows at a time

class Backward {
 public:
  Backward(const ExpertWeights& w, const ActivationParams& params, const MoeBatch& batch, const MoeGradients& gradients,
           ThreadTeam& team)
      : w_(w),
        params_(params),
        batch_(batch),
        grad_(gradients),
        k_(select_kernels().kernels()),
        view_(w, k_),
        team_(team) {}

  void run() {
    plan_ = make_plan(w_, batch_, 0, batch_.num_tokens, k_, false, false);
    const int64_t rows = static_cast<int64_t>(plan_.slots.size()), hidden = w_.hidden_size,
                  inter = w_.intermediate_size;
    Arena arena;
    x_ = arena.take<float>(batch_.num_tokens * hidden);
    gate_up_ = arena.take<float>(rows * 2 * inter);
    dots_ = arena.take<float>(rows * (inter / kBlock));
    const size_t size = batch_.dtype == DType::kFloat32 ? 4 : 2;
    for_items(batch_.num_tokens, [&](int64_t t) {
      const uint8_t* row = static_cast<const uint8_t*>(batch_.hidden_states) + t * batch_.hidden_stride * size;
      k_.widen(row, batch_.dtype, hidden, x_ + t * hidden);
    });
    const int64_t jobs = static_cast<int64_t>(plan_.jobs.size()), groups = inter / kBlock;
    for_items(jobs * groups, [&](int64_t i) { first_product(plan_.jobs[i / groups], i % groups); });
    for_items(jobs * groups, [&](int64_t i) { intermediate(plan_.jobs[i / groups], i % groups); });
    for_items(hidden / kBlock, [&](int64_t b) { input_gradient(b); });
    router_gradient();
  }

 private:
  template <class Function>
  void for_items(int64_t count, const Function& function) {
    std::atomic<int64_t> next{0};
    team_.parallel([&](int, int) {
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) function(i);
    });
  }

  int64_t row_of(const Job& job, int r) const { return job.slots - plan_.slots.data() + r; }
  float* gate_up(const Job& job, int r, int64_t g) const {
    return gate_up_ + row_of(job, r) * 2 * w_.intermediate_size + g * kGroupRows;
  }

  // gate_up_[row][g][gate 16, up 16, gate 16, up 16], before the activation, with the bias.
  void first_product(const Job& job, int64_t g) {
    thread_local ThreadBuffer buffer;
    const int64_t blocks = w_.hidden_size / kBlock;
    TileGroup group;
    view_.w13_group(job.expert, g, static_cast<uint8_t*>(buffer.get(tile_group_bytes(blocks))), &group);
    alignas(64) float bias_values[kGroupRows];
    const float* bias = view_.w13_bias(job.expert, g, bias_values);
    for (int r = 0; r < job.num_rows; r += kRows) {
      const int n = std::min(kRows, job.num_rows - r);
      const float* rows[kRows];
      for (int i = 0; i < n; ++i) rows[i] = x_ + job.slots[r + i].token * w_.hidden_size;
      k_.gemm_f32(group.tiles, group.num_tiles, blocks, rows, n, gate_up(job, r, g), 2 * w_.intermediate_size);
      for (int i = 0; bias != nullptr && i < n; ++i) {
        for (int c = 0; c < kGroupRows; ++c) gate_up(job, r + i, g)[c] += bias[c];
      }
    }
  }

  // Replaces gate and up by their gradients; dots_ gets <down^T grad_output, h> of the block.
  void intermediate(const Job& job, int64_t g) {
    alignas(64) uint8_t scratch[kTileBlockBytes + kTileRows];
    for (int r = 0; r < job.num_rows; r += kRows) {
      const int n = std::min(kRows, job.num_rows - r);
      alignas(64) float grad_h[kRows * kBlock] = {};
      for (int64_t h = 0; h < w_.hidden_size / kTileRows; ++h) {
        const float* rows[kRows];
        for (int i = 0; i < n; ++i)
          rows[i] = grad_.grad_output + job.slots[r + i].token * w_.hidden_size + h * kTileRows;
        k_.gemm_f32_transposed(view_.w2_block(job.expert, h, g, scratch), rows, n, grad_h, kBlock);
      }
      for (int i = 0; i < n; ++i) {
        float dot = 0;
        float* values = gate_up(job, r + i, g);
        for (int c = 0; c < kBlock; ++c) {
          float* pair = values + 32 * (c / 16) + c % 16;
          dot += grad_h[i * kBlock + c] * activate(pair, pair + 16, job.slots[r + i].weight * grad_h[i * kBlock + c]);
        }
        dots_[row_of(job, r + i) * (w_.intermediate_size / kBlock) + g] = dot;
      }
    }
  }

  // Returns act(gate, up) and replaces both by their gradients for a gradient `grad` of it. A clamped side has none,
  // nor has NaN under a limit, as in torch.clamp.
  float activate(float* gate, float* up, float grad) const {
    const bool oai = params_.kind == Activation::kSwigluOai;
    const float alpha = oai ? params_.alpha : 1.0f;
    float g = *gate, u = *up;
    const bool pass_g = !params_.has_limit || g <= params_.limit;
    const bool pass_u = !params_.has_limit || (u <= params_.limit && u >= -params_.limit);
    if (params_.has_limit) {
      if (g > params_.limit) g = params_.limit;
      if (u > params_.limit) u = params_.limit;
      if (u < -params_.limit) u = -params_.limit;
    }
    if (oai) u += 1;
    const float s = 1 / (1 + std::exp(-alpha * g)), silu = g * s;
    *gate = pass_g ? grad * u * (s + alpha * silu * (1 - s)) : 0;
    *up = pass_u ? grad * silu : 0;
    return silu * u;
  }

  void input_gradient(int64_t b) {
    const int64_t hidden = w_.hidden_size;
    alignas(64) uint8_t scratch[kTileBlockBytes + kTileRows];
    for (int64_t t = 0; t < batch_.num_tokens; ++t) {
      for (int c = 0; c < kBlock; ++c) grad_.grad_hidden_states[t * hidden + b * kBlock + c] = 0;
    }
    for (const Job& job : plan_.jobs) {
      for (int r = 0; r < job.num_rows; r += kRows) {
        const int n = std::min(kRows, job.num_rows - r);
        alignas(64) float sum[kRows * kBlock] = {};
        for (int64_t i = 0; i < w_.intermediate_size / kTileRows; ++i) {
          for (const bool up : {false, true}) {
            const float* rows[kRows];
            for (int m = 0; m < n; ++m) rows[m] = gate_up(job, r + m, i / 2) + 32 * (i % 2) + 16 * up;
            k_.gemm_f32_transposed(view_.w13_block(job.expert, i, up, b, scratch), rows, n, sum, kBlock);
          }
        }
        for (int m = 0; m < n; ++m) {
          // Selected away, not multiplied: what an expert of no weight does may be infinite.
          if (job.slots[r + m].weight == 0) continue;
          float* out = grad_.grad_hidden_states + job.slots[r + m].token * hidden + b * kBlock;
          for (int c = 0; c < kBlock; ++c) out[c] += sum[m * kBlock + c];
        }
      }
    }
  }

  void router_gradient() {
    for (int64_t i = 0; i < batch_.num_tokens * batch_.top_k; ++i) grad_.grad_topk_weights[i] = 0;
    const int64_t groups = w_.intermediate_size / kBlock;
    for (const Job& job : plan_.jobs) {
      for (int r = 0; r < job.num_rows; ++r) {
        const Slot& slot = job.slots[r];
        float total = 0;
        for (int64_t g = 0; g < groups; ++g) total += dots_[row_of(job, r) * groups + g];
        if (w_.w2_bias != nullptr) {
          const float* grad = grad_.grad_output + slot.token * w_.hidden_size;
          const float* bias = w_.w2_bias + job.expert * w_.hidden_size;
          for (int64_t c = 0; c < w_.hidden_size; ++c) total += grad[c] * bias[c];
        }
        grad_.grad_topk_weights[slot.token * batch_.top_k + slot.k] = total;
      }
    }
  }

  const ExpertWeights& w_;
  const ActivationParams& params_;
  const MoeBatch& batch_;
  const MoeGradients& grad_;
  const Kernels& k_;
  const WeightView view_;
  ThreadTeam& team_;
  Plan plan_;
  float *x_ = nullptr, *gate_up_ = nullptr, *dots_ = nullptr;
};

}  // namespace
}  // namespace mxfp4

void fused_mxfp4_moe_backward(const ExpertWeights& weights, const ActivationParams& activation, const MoeBatch& batch,
                              const MoeGradients& gradients, ThreadTeam& team) {
  if (weights.layout == WeightLayout::kBFloat16) {
    throw std::invalid_argument("fused_mxfp4_moe_backward: weights must be MXFP4, got bfloat16");
  }
  mxfp4::Backward(weights, activation, batch, gradients, team).run();
}

}  // namespace moe_ops
