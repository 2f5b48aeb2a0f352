// Experts in host memory over the kernels of csrc/cpu/kernels: the intermediate dimension is split over the engine's
// NUMA pools, each of which holds its slice in memory of its own node.
#pragma once
#include <vector>

#include "cpu/kernels/fused_mxfp4_moe.h"
#include "engine/engine.h"

namespace moe_ops::engine {

struct WeightsFormat {
  int64_t num_experts, hidden_size, intermediate_size;
  bool bfloat16;  // else MXFP4
  W13Layout w13_layout;
  ActivationParams activation;
  bool w13_bias, w2_bias;
  bool batch_invariant;
};

// One expert in checkpoint layout: w13 [2I, H/2], w13_scale [2I, H/32], w2 [H, I/2], w2_scale [H, I/32], biases [2I],
// [H]; or bfloat16 w13 [2I, H], w2 [H, I] and null scales.
struct ExpertTensors {
  const uint8_t *w13, *w13_scale, *w2, *w2_scale;
  const float *w13_bias, *w2_bias;
};
struct MutableExpertTensors {
  uint8_t *w13, *w13_scale, *w2, *w2_scale;
  float *w13_bias, *w2_bias;
};

class ExpertStore : public Experts {
 public:
  ExpertStore(const WeightsFormat& format, int num_pools);
  ~ExpertStore() override;
  void check(const Batch& batch) const override;
  void run(int pool, const Batch& batch, ThreadTeam& team) override;

  // Of one pool, on a thread of that pool, between jobs (run_on_pools): memory is placed where it is first touched.
  void load(int pool, int64_t expert, const ExpertTensors& tensors);
  void unload(int pool, int64_t expert);
  void read(int pool, int64_t expert, const MutableExpertTensors& tensors);
  // Bookkeeping of the two above, between jobs.
  void set_present(int64_t expert, bool present) { present_[expert] = present; }
  bool present(int64_t expert) const { return present_[expert]; }
  int64_t bytes_per_expert() const;
  const WeightsFormat& format() const { return format_; }

 private:
  // A reservation of address space for all experts; only loaded experts have pages.
  struct Array {
    uint8_t* data = nullptr;
    int64_t stride = 0;  // bytes of one expert
    void reserve(int64_t experts, int64_t bytes);
    void release(int64_t expert);
    void destroy(int64_t experts);
    uint8_t* at(int64_t expert) const { return data + expert * stride; }
  };
  struct Slice {
    int64_t first, width;  // of the intermediate dimension
    Array w13, w13_scale, w2, w2_scale;
    std::vector<float> w13_bias, w2_bias;
  };
  ExpertWeights view(const Slice& slice, int pool) const;
  // Row of the checkpoint's w13 that holds local row `row` of the slice.
  int64_t source_row(const Slice& slice, int64_t row) const;
  int64_t source_row(const Slice& slice, int part, int64_t i) const;
  template <bool kLoad>
  void transfer(int pool, int64_t expert, const MutableExpertTensors& checkpoint);
  template <bool kLoad>
  static void move_row(uint8_t* codes, uint8_t* scales, uint8_t* tile_codes, uint8_t* tile_scales, int64_t r,
                       int64_t num_blocks);

  const WeightsFormat format_;
  const WeightLayout layout_;
  std::vector<Slice> slices_;
  std::vector<uint8_t> present_;
};

}  // namespace moe_ops::engine
