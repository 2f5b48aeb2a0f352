// Buffers of a call of fused_mxfp4_moe: those of a thread, the activations for a product in the forms of all
// paths, and the shares of their rows.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "cpu/kernels/fused_mxfp4_moe_plan.h"
#include "cpu/kernels/fused_mxfp4_moe_weights.h"

namespace moe_ops::mxfp4 {

constexpr int kFloatRows = 8;  // rows widened at once for gemm_f32

// Buffers of a thread, sized for the longer of the two products.
struct Scratch {
  explicit Scratch(const ExpertWeights& w) {
    const int64_t size = std::max(w.hidden_size, w.intermediate_size), blocks = size / kBlock;
    const int64_t tiles_bytes = w.layout == WeightLayout::kCheckpoint ? tile_group_bytes(blocks) : 0;
    constexpr int64_t kOutBytes = kMaxRows * kGroupRows * 4;
    thread_local ThreadBuffer buffer;
    uint8_t* p = static_cast<uint8_t*>(buffer.get(tiles_bytes + 2 * kOutBytes + kFloatRows * size * 4));
    tiles = p;
    out = reinterpret_cast<float*>(tiles + tiles_bytes);
    compact = reinterpret_cast<float*>(tiles + tiles_bytes + kOutBytes);
    rows = reinterpret_cast<float*>(tiles + tiles_bytes + 2 * kOutBytes);
  }
  uint8_t* tiles;
  float *out, *compact, *rows;
};

// The activations of all jobs for one of the two products, [rows][K] in several forms.
struct Activations {
  int64_t num_blocks = 0;
  uint16_t *high = nullptr, *low = nullptr;  // kPacked
  float* values = nullptr;                   // float32 rows of the other paths; null: hidden_states
  int8_t* digits = nullptr;                  // kQuant
  float* scales = nullptr;
  int32_t* offsets = nullptr;
  std::atomic<uint8_t>* inexact = nullptr;  // rows that kQuant cannot hold

  void take_packed(Arena& arena, int64_t rows, bool two_parts) {
    high = arena.take<uint16_t>(rows * num_blocks * kBlock);
    if (two_parts) low = arena.take<uint16_t>(rows * num_blocks * kBlock);
  }
  void take_quant(Arena& arena, int64_t rows) {
    digits = arena.take<int8_t>(rows * num_blocks * 2 * kBlock);
    scales = arena.take<float>(rows * num_blocks);
    offsets = arena.take<int32_t>(rows * num_blocks);
    inexact = arena.take<std::atomic<uint8_t>>(rows);
    for (int64_t i = 0; i < rows; ++i) inexact[i].store(0, std::memory_order_relaxed);
  }
  int64_t packed_offset(const Job& job, int row, int64_t block) const {
    const int height = job.tile_rows();
    return ((job.first_row / 16 + row / height) * num_blocks + block) * 512 + row % height * kBlock;
  }
};

constexpr int kPartRows = 48;  // rows for which AMX makes the tiles of weights once

// Rows of an expert in one item: their activations are read again for each group of tiles and must stay in the
// second-level cache (docs/measured.md).
inline int parts_in_chunk(const Activations& from) {
  const int64_t part = from.num_blocks * kBlock * 2 * kPartRows;
  return static_cast<int>(std::clamp<int64_t>(int64_t{1500} * 1000 / part, 1, kMaxRows / kPartRows));
}

inline int num_parts(const Job& job) { return (job.num_rows + kPartRows - 1) / kPartRows; }

inline int num_chunks(const Job& job, const Activations& from) {
  const int most = parts_in_chunk(from);
  return (num_parts(job) + most - 1) / most;
}

// Item `item` of a job: a chunk of its parts, which are as even as tiles of rows allow, and a group of columns.
struct Item {
  int begin, end;
  int64_t group;
};

inline Item item_of(const Job& job, const Activations& from, int64_t item, int64_t groups) {
  const int parts = num_parts(job), tiles = job.row_tiles(), height = job.tile_rows(), most = parts_in_chunk(from);
  const int first = static_cast<int>(item / groups) * most, last = std::min(parts, first + most);
  return {first * tiles / parts * height, std::min(last * tiles / parts * height, job.num_rows), item % groups};
}

}  // namespace moe_ops::mxfp4
