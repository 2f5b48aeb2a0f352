// What the driver of fused_mxfp4_moe needs from an instruction set: a table of functions on tiles of weights.
//
// Layout x86_v1. A tile is 16 rows of a weight matrix, over all of K:
//   codes  [K/32][4][16] dwords; dword (b, j, r) holds the eight codes k = 32 b + 8 j + 0..7 of row r, low nibble
//   first,
//          that is, the bytes of the checkpoint, transposed in units of four;
//   scales [K/32][16] bytes.
// w13 is [E, I/16, 2, K/32, 256] bytes, gate tile before up tile; w2 is [E, H/16, K/32, 256]; the scales end in 16.
#pragma once

#include <cstdint>

#include "cpu/kernels/fused_mxfp4_moe.h"

namespace moe_ops::mxfp4 {

constexpr int kTileRows = 16;
constexpr int kBlock = 32;            // elements that share a scale
constexpr int kTileBlockBytes = 256;  // codes of kTileRows x kBlock elements
constexpr int kGroupTiles = 4;        // the most tiles a kernel is given at once
constexpr int kGroupRows = kGroupTiles * kTileRows;
constexpr int kMaxRows = 192;  // the most activation rows a kernel is given at once; a multiple of 16

// The integer and bfloat16 kernels hold scale codes in this range exactly; tiles with others go to gemm_f32. The upper
// end: a block's integer sum, up to 2 * 6 * 32 * 32639, times its scale must stay below 2^128.
constexpr int kMinFastScale = 24, kMaxFastScale = 231;

struct Tile {
  const uint8_t* codes;
  const uint8_t* scales;
};

// Tiles of MXFP4 weights or, where `tiles` is null, 16 rows of bfloat16 weights for each tile.
struct WeightTiles {
  const Tile* tiles;
  const uint16_t* const* rows;

  WeightTiles from(int t) const { return {tiles ? tiles + t : nullptr, rows ? rows + t * kTileRows : nullptr}; }
};

// A row of activations as 16-bit integers q with one power-of-two scale per block: q = 256 * high + low.
// digits [K/32][2][32] int8: high, then low, each with its groups of eight in the order 0 2 4 6 1 3 5 7;
// offset = -12 * sum of q, since the kernels use the unsigned weight 2 * w + 12; scale includes the factor 1/2.
struct QuantRow {
  const int8_t* digits;
  const float* scale;
  const int32_t* offset;
};

// Activations for the bfloat16 kernel: [tiles][K/32][16][32], of which the first tile_rows of 16 are used and the last
// tile's are zero-padded. Each group of eight is in the order
// 0 4 1 5 2 6 3 7 for MXFP4 weights and in its own for bfloat16 ones. `low`, the rounding error of `high`, is null for
// bfloat16 activations.
struct PackedRows {
  const uint16_t* high;
  const uint16_t* low;
  int tile_rows;
};

struct Kernels {
  void (*widen)(const void* row, DType dtype, int64_t size, float* out);
  void (*narrow)(const float* row, int64_t size, DType dtype, void* out);
  // out[32] = act(gate + bias, up + bias); values of 16 rows of gate, 16 of up, 16 of gate, 16 of up.
  void (*swiglu)(const float* gate_up, const float* bias, const ActivationParams& params, float* out);
  // sum[i] += weight * (y[i] + bias[i]); bias may be null.
  void (*accumulate)(float* sum, const float* y, const float* bias, float weight, int size);
  // Transposes raw rows (row_stride bytes apart, scale_stride for their scales) into a tile.
  void (*pack_tile)(const uint8_t* codes, int64_t row_stride, const uint8_t* scales, int64_t scale_stride,
                    int64_t num_blocks, uint8_t* tile_codes, uint8_t* tile_scales);

  // out[m][16 t + r] = row r of tile t times activation row m. Exact weights, float32 sums, any scale.
  void (*gemm_f32)(const Tile* tiles, int num_tiles, int64_t num_blocks, const float* const* rows, int num_rows,
                   float* out, int64_t out_stride);
  // out[m][k] += sum over r of coefficients[m][r] * row r of the tile's block at k, for its 32 k; gradients.
  void (*gemm_f32_transposed)(const Tile& block, const float* const* coefficients, int num_rows, float* out,
                              int64_t out_stride);
  // As gemm_f32, with bfloat16 weight rows.
  void (*gemm_w16)(const uint16_t* const* weight_rows, int num_weight_rows, int64_t size, const float* const* rows,
                   int num_rows, float* out, int64_t out_stride);

  // False where 16 bits cannot hold the block's elements well (not finite, or small ones beside a large one).
  bool (*quantize)(const float* block, int8_t* digits, float* scale, int32_t* offset);
  // As gemm_f32; the result has bit t set where tile t has scales out of range and its values are void.
  unsigned (*gemm_q16)(const Tile* tiles, int num_tiles, int64_t num_blocks, const QuantRow* rows, int num_rows,
                       float* out, int64_t out_stride);

  // A bfloat16 row to its place in PackedRows::high, for MXFP4 weights.
  void (*pack_row)(const uint16_t* row, int64_t num_blocks, uint16_t* high);
  // 32 elements of a row to their place in PackedRows; `low` may be null.
  void (*pack_block)(const float* block, bool permute, uint16_t* high, uint16_t* low);
  // As gemm_q16, for up to kMaxRows rows, rounded up to whole tiles of them in `out`. Leaves a thread's tile unit
  // configured; finish() is for the end of its work.
  unsigned (*gemm_bf16)(const WeightTiles& weights, int num_tiles, int64_t num_blocks, const PackedRows& rows,
                        int num_rows, float* out, int64_t out_stride);
  void (*finish)();
};

// A set of kernels. The file that defines one is compiled for its instructions throughout, so `kernels` runs only where
// `supported` is true.
struct KernelSet {
  const char* name;
  bool (*supported)();
  const Kernels& (*kernels)();
};

// The best set that this processor and MOE_OPS_CPU_ISA allow.
const KernelSet& select_kernels();
// Every set compiled in, best first; for tests.
const KernelSet* all_kernels(int* count);

const Kernels& scalar_kernels();
#if defined(__x86_64__)
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
const Kernels& amx_kernels();
#elif defined(__aarch64__)
const Kernels& neon_kernels();
#endif

}  // namespace moe_ops::mxfp4
