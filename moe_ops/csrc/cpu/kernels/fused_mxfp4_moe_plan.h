// Routing and memory of one call of fused_mxfp4_moe: which rows go to which expert, by which kernels, and where the
// intermediate results live.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/kernels/fused_mxfp4_moe_kernels.h"

namespace moe_ops::mxfp4 {

// Which kernels compute the rows of an expert.
enum class Path {
  kFloat,   // gemm_f32 or gemm_w16
  kQuant,   // gemm_q16, with gemm_f32 for rows and tiles that 16 bits cannot hold
  kPacked,  // gemm_bf16, with gemm_f32 for tiles that bfloat16 cannot hold
};

// Up to this many rows of an expert the 16-bit integer kernels are faster than tiles, see docs/measured.md.
constexpr int kMostQuantRows = 2;

struct Slot {
  int32_t token;
  int32_t k;
  float weight;
};

// The rows of one expert, in the order of their tokens.
struct Job {
  int64_t expert;
  const Slot* slots;
  int num_rows;
  Path path;
  int64_t first_row;  // in the buffers of its path; a multiple of 16 for kPacked

  // kPacked: tiles of activation rows, all of the same height, which is what they cost; the last one may be padded.
  int row_tiles() const { return (num_rows + 15) / 16; }
  int tile_rows() const { return (num_rows + row_tiles() - 1) / row_tiles(); }
};

struct Plan {
  std::vector<Slot> slots;
  std::vector<Job> jobs;  // by expert
  int64_t packed_rows = 0, other_rows = 0;
  bool any_quant = false;
};

// Slots of tokens [first, first + count) whose id is an expert and, with skip_zero_weights, whose weight is not exactly
// 0.
Plan make_plan(const ExpertWeights& weights, const MoeBatch& batch, int64_t first, int64_t count,
               const Kernels& kernels, bool batch_invariant, bool skip_zero_weights);

// Memory of one call, handed out in aligned pieces. Blocks are kept for later calls, up to a limit.
class Arena {
 public:
  Arena() = default;
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  template <class T>
  T* take(int64_t count) {
    return static_cast<T*>(take_bytes(static_cast<size_t>(count) * sizeof(T)));
  }

 private:
  void* take_bytes(size_t bytes);
  std::vector<std::pair<void*, size_t>> blocks_;
};

// A buffer of the calling thread that grows to the largest size asked for.
class ThreadBuffer {
 public:
  ~ThreadBuffer();
  void* get(size_t bytes);

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace moe_ops::mxfp4
