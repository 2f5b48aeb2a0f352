// Armv8.2 with the dot product instructions. The 16-bit integer products are those of AVX-512, bit for bit.
#include <arm_neon.h>

#include "cpu/kernels/fused_mxfp4_moe_generic.h"

namespace moe_ops::mxfp4 {
namespace {

constexpr int8_t kTwice[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Magnitudes through the byte table; the sign of -0 is lost, which no sum sees but that of a row of zeros.
inline void decode_block(const uint8_t* codes, const uint8_t* scales, float (*weights)[kTileRows]) {
  float32x4_t scale[4];
  for (int i = 0; i < 4; ++i) scale[i] = bits<float32x4_t>(widen_scales(scales + 4 * i));
  const int8x16_t table = vld1q_s8(kTwice);
  for (int j = 0; j < 4; ++j) {
    for (int i = 0; i < 4; ++i) {  // four rows: bytes 4 r + b
      const uint8x16_t bytes = vld1q_u8(codes + 64 * j + 16 * i);
      const int8x16_t low = vqtbl1q_s8(table, vandq_u8(bytes, vdupq_n_u8(15)));
      const int8x16_t high = vqtbl1q_s8(table, vshrq_n_u8(bytes, 4));
      for (int b = 0; b < 4; ++b) {
        const auto put = [&](int8x16_t values, int k) {
          // Byte b of each dword, sign-extended.
          const int32x4_t shifted = vshlq_s32(vreinterpretq_s32_s8(values), vdupq_n_s32(24 - 8 * b));
          const float32x4_t value = vmulq_n_f32(vcvtq_f32_s32(vshrq_n_s32(shifted, 24)), 0.5f);
          vst1q_f32(&weights[8 * j + k][4 * i], vmulq_f32(value, scale[i]));
        };
        put(low, 2 * b);
        put(high, 2 * b + 1);
      }
    }
  }
}

void gemm_f32(const Tile* tiles, int num_tiles, int64_t num_blocks, const float* const* rows, int num_rows, float* out,
              int64_t out_stride) {
  gemm_f32_with(tiles, num_tiles, num_blocks, rows, num_rows, out, out_stride, decode_block);
}

void gemm_f32_transposed(const Tile& block, const float* const* coefficients, int num_rows, float* out,
                         int64_t out_stride) {
  gemm_f32_transposed_with(block, coefficients, num_rows, out, out_stride, decode_block);
}

// offset counts the unsigned weights of x86; here weights are signed, so that it is left out.
template <int M>
void gemm_q16_tile(const Tile& tile, int64_t num_blocks, const QuantRow* rows, float* out, int64_t out_stride) {
  const int8x16_t table = vld1q_s8(kTwice);
  // Two of the four quarters of a tile at a time: 4 M sums and 2 M float sums.
  for (int half = 0; half < 2; ++half) {
    float32x4_t sum[M][2];
    for (int m = 0; m < M; ++m) sum[m][0] = sum[m][1] = vdupq_n_f32(0);
    for (int64_t b = 0; b < num_blocks; ++b) {
      const uint8_t* codes = tile.codes + b * kTileBlockBytes + 32 * half;
      __builtin_prefetch(codes + 2048);
      const uint8x8_t s = vld1_u8(tile.scales + b * kTileRows + 8 * half);
      const uint16x8_t s16 = vmovl_u8(s);
      const float32x4_t scale[2] = {vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vget_low_u16(s16)), 23)),
                                    vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vget_high_u16(s16)), 23))};
      int32x4_t high[M][2], low[M][2];
      for (int m = 0; m < M; ++m) high[m][0] = high[m][1] = low[m][0] = low[m][1] = vdupq_n_s32(0);
      for (int j = 0; j < 4; ++j) {
        for (int q = 0; q < 2; ++q) {
          const uint8x16_t bytes = vld1q_u8(codes + 64 * j + 16 * q);
          const int8x16_t even = vqtbl1q_s8(table, vandq_u8(bytes, vdupq_n_u8(15)));
          const int8x16_t odd = vqtbl1q_s8(table, vshrq_n_u8(bytes, 4));
          for (int m = 0; m < M; ++m) {
            const int8x8_t x = vld1_s8(rows[m].digits + 64 * b + 8 * j),
                           y = vld1_s8(rows[m].digits + 64 * b + 32 + 8 * j);
            high[m][q] = vdotq_lane_s32(vdotq_lane_s32(high[m][q], even, x, 0), odd, x, 1);
            low[m][q] = vdotq_lane_s32(vdotq_lane_s32(low[m][q], even, y, 0), odd, y, 1);
          }
        }
      }
      for (int m = 0; m < M; ++m) {
        for (int q = 0; q < 2; ++q) {
          const float32x4_t dot = vcvtq_f32_s32(vaddq_s32(vshlq_n_s32(high[m][q], 8), low[m][q]));
          sum[m][q] = vfmaq_n_f32(sum[m][q], vmulq_f32(dot, scale[q]), rows[m].scale[b]);
        }
      }
    }
    for (int m = 0; m < M; ++m) {
      vst1q_f32(out + m * out_stride + 8 * half, sum[m][0]);
      vst1q_f32(out + m * out_stride + 8 * half + 4, sum[m][1]);
    }
  }
}

bool scales_out_of_range(const Tile& tile, int64_t num_blocks) {
  uint8x16_t smallest = vdupq_n_u8(255), largest = vdupq_n_u8(0);
  for (int64_t b = 0; b < num_blocks; ++b) {
    const uint8x16_t s = vld1q_u8(tile.scales + b * kTileRows);
    smallest = vminq_u8(smallest, s);
    largest = vmaxq_u8(largest, s);
  }
  return vminvq_u8(smallest) < kMinFastScale || vmaxvq_u8(largest) > kMaxFastScale;
}

unsigned gemm_q16(const Tile* tiles, int num_tiles, int64_t num_blocks, const QuantRow* rows, int num_rows, float* out,
                  int64_t out_stride) {
  unsigned bad = 0;
  for (int t = 0; t < num_tiles; ++t) {
    if (scales_out_of_range(tiles[t], num_blocks)) {
      bad |= 1u << t;
      continue;
    }
    int m = 0;
    for (; m + 3 <= num_rows; m += 3) {
      gemm_q16_tile<3>(tiles[t], num_blocks, rows + m, out + m * out_stride + t * kTileRows, out_stride);
    }
    for (; m < num_rows; ++m) {
      gemm_q16_tile<1>(tiles[t], num_blocks, rows + m, out + m * out_stride + t * kTileRows, out_stride);
    }
  }
  return bad;
}

}  // namespace

const Kernels& neon_kernels() {
  static const Kernels kernels = [] {
    Kernels k{};
    k.widen = widen;
    k.narrow = narrow;
    k.swiglu = swiglu;
    k.accumulate = accumulate;
    k.pack_tile = pack_tile;
    k.gemm_f32 = gemm_f32;
    k.gemm_f32_transposed = gemm_f32_transposed;
    k.gemm_w16 = gemm_w16;
    k.quantize = quantize;
    k.gemm_q16 = gemm_q16;
    return k;
  }();
  return kernels;
}

}  // namespace moe_ops::mxfp4
