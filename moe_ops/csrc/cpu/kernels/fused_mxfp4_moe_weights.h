// Weight rows of an expert as the kernels want them, whatever layout they are stored in.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/kernels/fused_mxfp4_moe_kernels.h"

namespace moe_ops::mxfp4 {

// Up to kGroupTiles tiles: MXFP4 ones, or the rows of bfloat16 weights.
struct TileGroup {
  int num_tiles;
  Tile tiles[kGroupTiles];
  const uint16_t* rows[kGroupRows];
};

// Bytes that tiles of `num_blocks` blocks take when checkpoint rows have to be transposed.
inline int64_t tile_group_bytes(int64_t num_blocks) { return kGroupTiles * num_blocks * (kTileBlockBytes + kTileRows); }

class WeightView {
 public:
  WeightView(const ExpertWeights& weights, const Kernels& kernels) : weights_(weights), kernels_(kernels) {}

  bool is_mxfp4() const { return weights_.layout != WeightLayout::kBFloat16; }

  // Elements 32 g + 0..31 of gate and up, as the tiles gate, up, gate, up.
  void w13_group(int64_t expert, int64_t g, uint8_t* scratch, TileGroup* group) const {
    const int64_t hidden = weights_.hidden_size, inter = weights_.intermediate_size, blocks = hidden / kBlock;
    group->num_tiles = 4;
    for (int t = 0; t < 4; ++t) {
      const int64_t i = 32 * g + 16 * (t / 2);
      if (weights_.layout == WeightLayout::kX86V1) {
        const int64_t tile = (expert * (inter / kTileRows) + i / kTileRows) * 2 + t % 2;
        group->tiles[t] = {weights_.w13 + tile * blocks * kTileBlockBytes,
                           weights_.w13_scale + tile * blocks * kTileRows};
        continue;
      }
      const int64_t row = expert * 2 * inter + w13_row(i, t % 2 == 1), step = w13_step();
      load_rows(weights_.w13, weights_.w13_scale, row, step, hidden, scratch, t, group);
    }
  }

  // Output elements 16 first .. 16 (first + num_tiles) - 1.
  void w2_group(int64_t expert, int64_t first, int num_tiles, uint8_t* scratch, TileGroup* group) const {
    const int64_t hidden = weights_.hidden_size, inter = weights_.intermediate_size, blocks = inter / kBlock;
    group->num_tiles = num_tiles;
    for (int t = 0; t < num_tiles; ++t) {
      if (weights_.layout == WeightLayout::kX86V1) {
        const int64_t tile = expert * (hidden / kTileRows) + first + t;
        group->tiles[t] = {weights_.w2 + tile * blocks * kTileBlockBytes,
                           weights_.w2_scale + tile * blocks * kTileRows};
        continue;
      }
      const int64_t row = expert * hidden + kTileRows * (first + t);
      load_rows(weights_.w2, weights_.w2_scale, row, 1, inter, scratch, t, group);
    }
  }

  // Brings the beginnings of a group's tiles into the cache, as far as kernels do not prefetch them themselves.
  void prefetch_w13_group(int64_t expert, int64_t g) const {
    if (weights_.layout != WeightLayout::kX86V1) return;
    const int64_t blocks = weights_.hidden_size / kBlock;
    prefetch(weights_.w13, weights_.w13_scale, expert * (weights_.intermediate_size / kTileRows) * 2 + 4 * g, 4, blocks,
             kHeadBytes);
  }

  void prefetch_w2_group(int64_t expert, int64_t first, int num_tiles, int64_t bytes) const {
    if (weights_.layout != WeightLayout::kX86V1) return;
    const int64_t blocks = weights_.intermediate_size / kBlock;
    prefetch(weights_.w2, weights_.w2_scale, expert * (weights_.hidden_size / kTileRows) + first, num_tiles, blocks,
             bytes > 0 ? bytes : kHeadBytes);
  }

  // Block b of the tile of gate or up elements 16 i .. 16 i + 15, and of the tile of output elements 16 h .. 16 h + 15;
  // MXFP4 only. `scratch` has room for one block.
  Tile w13_block(int64_t expert, int64_t i, bool up, int64_t b, uint8_t* scratch) const {
    const int64_t inter = weights_.intermediate_size, blocks = weights_.hidden_size / kBlock;
    if (weights_.layout == WeightLayout::kX86V1) {
      const int64_t at = ((expert * (inter / kTileRows) + i) * 2 + up) * blocks + b;
      return {weights_.w13 + at * kTileBlockBytes, weights_.w13_scale + at * kTileRows};
    }
    return pack_one(weights_.w13, weights_.w13_scale, expert * 2 * inter + w13_row(i * kTileRows, up), w13_step(),
                    blocks, b, scratch);
  }

  Tile w2_block(int64_t expert, int64_t h, int64_t b, uint8_t* scratch) const {
    const int64_t hidden = weights_.hidden_size, blocks = weights_.intermediate_size / kBlock;
    if (weights_.layout == WeightLayout::kX86V1) {
      const int64_t at = (expert * (hidden / kTileRows) + h) * blocks + b;
      return {weights_.w2 + at * kTileBlockBytes, weights_.w2_scale + at * kTileRows};
    }
    return pack_one(weights_.w2, weights_.w2_scale, expert * hidden + h * kTileRows, 1, blocks, b, scratch);
  }

  // Biases of the tiles of w13_group.
  const float* w13_bias(int64_t expert, int64_t g, float* scratch) const {
    if (weights_.w13_bias == nullptr) return nullptr;
    const float* bias = weights_.w13_bias + expert * 2 * weights_.intermediate_size;
    for (int c = 0; c < kGroupRows; ++c) {
      const int64_t i = 32 * g + 16 * (c / 32) + c % 16;
      scratch[c] = bias[w13_row(i, (c / 16) % 2 == 1)];
    }
    return scratch;
  }

  // Row of w13 (and of its bias) that makes gate or up element i.
  int64_t w13_row(int64_t i, bool up) const {
    switch (weights_.w13_layout) {
      case W13Layout::kGateUp:
        return up ? weights_.intermediate_size + i : i;
      case W13Layout::kUpGate:
        return up ? i : weights_.intermediate_size + i;
      case W13Layout::kInterleaved:
        break;
    }
    return 2 * i + up;
  }

 private:
  static constexpr int64_t kHeadBytes = 2048;

  static void prefetch(const uint8_t* codes, const uint8_t* scales, int64_t tile, int count, int64_t blocks,
                       int64_t bytes) {
    const int64_t most = std::min(bytes, blocks * kTileBlockBytes);
    for (int t = 0; t < count; ++t) {
      const uint8_t* c = codes + (tile + t) * blocks * kTileBlockBytes;
      const uint8_t* s = scales + (tile + t) * blocks * kTileRows;
      for (int64_t i = 0; i < most; i += 64) __builtin_prefetch(c + i, 0, 2);
      for (int64_t i = 0; i < most / 16; i += 64) __builtin_prefetch(s + i, 0, 2);
    }
  }

  int64_t w13_step() const { return weights_.w13_layout == W13Layout::kInterleaved ? 2 : 1; }

  Tile pack_one(const uint8_t* w, const uint8_t* scales, int64_t row, int64_t step, int64_t blocks, int64_t b,
                uint8_t* scratch) const {
    kernels_.pack_tile(w + (row * blocks + b) * 16, step * blocks * 16, scales + row * blocks + b, step * blocks, 1,
                       scratch, scratch + kTileBlockBytes);
    return {scratch, scratch + kTileBlockBytes};
  }

  void load_rows(const uint8_t* w, const uint8_t* scales, int64_t row, int64_t step, int64_t size, uint8_t* scratch,
                 int t, TileGroup* group) const {
    if (!is_mxfp4()) {
      const uint16_t* base = reinterpret_cast<const uint16_t*>(w) + row * size;
      for (int r = 0; r < kTileRows; ++r) group->rows[t * kTileRows + r] = base + r * step * size;
      return;
    }
    const int64_t blocks = size / kBlock;
    uint8_t* codes = scratch + t * blocks * kTileBlockBytes;
    uint8_t* tile_scales = scratch + kGroupTiles * blocks * kTileBlockBytes + t * blocks * kTileRows;
    kernels_.pack_tile(w + row * (size / 2), step * (size / 2), scales + row * blocks, step * blocks, blocks, codes,
                       tile_scales);
    group->tiles[t] = {codes, tile_scales};
  }

  const ExpertWeights& weights_;
  const Kernels& kernels_;
};

}  // namespace moe_ops::mxfp4
