// Kernels in portable C++ with vector types, compiled once per instruction set: each file that includes this gets its
// own copy (internal linkage), at the width its flags allow. They do the same arithmetic in the same order everywhere.
#pragma once

// Vector arguments never cross a translation unit here, so their ABI does not matter.
#pragma GCC diagnostic ignored "-Wpsabi"

#include <cmath>
#include <cstring>

#include "cpu/kernels/fused_mxfp4_moe_kernels.h"

namespace moe_ops::mxfp4 {
namespace {

typedef float F16 __attribute__((vector_size(64)));
typedef int32_t I16 __attribute__((vector_size(64)));
typedef uint32_t U16 __attribute__((vector_size(64)));
typedef uint16_t U16x16 __attribute__((vector_size(32)));
typedef int8_t B16 __attribute__((vector_size(16)));

template <class V>
inline V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <class V>
inline void store(void* p, const V& v) {
  std::memcpy(p, &v, sizeof v);
}

template <class To, class From>
inline To bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline F16 splat(float x) { return F16{} + x; }

inline F16 select(const I16& mask, const F16& yes, const F16& no) {
  return bits<F16>((bits<I16>(yes) & mask) | (bits<I16>(no) & ~mask));
}

// Number conversions, 16 at a time, with all special values.

inline F16 widen_bf16(const uint16_t* p) { return bits<F16>(__builtin_convertvector(load<U16x16>(p), U16) << 16); }

inline U16x16 narrow_bf16(const F16& x) {
  const U16 u = bits<U16>(x);
  const U16 rounded = (u + 0x7FFF + ((u >> 16) & 1)) >> 16;
  const U16 quiet = (u >> 16) | 0x40;
  const U16 nan = bits<U16>((u & 0x7FFFFFFF) > 0x7F800000u);
  return __builtin_convertvector((quiet & nan) | (rounded & ~nan), U16x16);
}

inline F16 widen_f16(const uint16_t* p) {
  const U16 h = __builtin_convertvector(load<U16x16>(p), U16);
  const U16 sign = (h & 0x8000) << 16, magnitude = h & 0x7FFF;
  const U16 normal = (magnitude << 13) + ((127u - 15u) << 23);
  const U16 special = (magnitude << 13) | 0x7F800000u;
  const U16 small = bits<U16>(__builtin_convertvector(bits<I16>(magnitude), F16) * splat(0x1p-24f));
  const U16 is_small = bits<U16>(magnitude < 0x400u), is_special = bits<U16>(magnitude >= 0x7C00u);
  return bits<F16>(sign | (small & is_small) | (special & is_special) | (normal & ~is_small & ~is_special));
}

inline U16x16 narrow_f16(const F16& x) {
  const U16 u = bits<U16>(x), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7FFFFFFFu;
  const U16 normal = (magnitude - ((127u - 15u) << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
  // Below 2^-14 the sum with 2^-1 has the rounded result in its low bits.
  const U16 small = bits<U16>(bits<F16>(magnitude) + splat(0.5f)) - bits<U16>(splat(0.5f));
  const U16 is_small = bits<U16>(magnitude < (113u << 23));
  const U16 overflow = bits<U16>(magnitude >= 0x477FF000u), nan = bits<U16>(magnitude > 0x7F800000u);
  U16 result = (small & is_small) | (normal & ~is_small);
  result = (result & ~overflow) | (overflow & 0x7C00u) | (nan & 0x200u);
  return __builtin_convertvector(sign | result, U16x16);
}

[[maybe_unused]] void widen(const void* row, DType dtype, int64_t size, float* out) {
  if (dtype == DType::kFloat32) {
    std::memcpy(out, row, size * sizeof(float));
    return;
  }
  const uint16_t* p = static_cast<const uint16_t*>(row);
  if (dtype == DType::kBFloat16) {
    for (int64_t i = 0; i < size; i += 16) store(out + i, widen_bf16(p + i));
  } else {
    for (int64_t i = 0; i < size; i += 16) store(out + i, widen_f16(p + i));
  }
}

[[maybe_unused]] void narrow(const float* row, int64_t size, DType dtype, void* out) {
  if (dtype == DType::kFloat32) {
    std::memcpy(out, row, size * sizeof(float));
    return;
  }
  uint16_t* p = static_cast<uint16_t*>(out);
  if (dtype == DType::kBFloat16) {
    for (int64_t i = 0; i < size; i += 16) store(p + i, narrow_bf16(load<F16>(row + i)));
  } else {
    for (int64_t i = 0; i < size; i += 16) store(p + i, narrow_f16(load<F16>(row + i)));
  }
}

// e^x within 2 ulp for x in [-87, 88]; e^-87 below and infinity above, so that what is divided by 1 + e^x vanishes
// however large it is. Callers let NaN in by other operands.
inline F16 exponential(const F16& exponent) {
  F16 x = select(exponent < splat(-87.0f), splat(-87.0f), exponent);
  x = select(x > splat(88.0f), splat(88.0f), x);
  const F16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const F16 n = (x * splat(1.44269504f) + magic) - magic;
  const F16 r = (x - n * splat(0.693359375f)) - n * splat(-2.12194440e-4f);
  F16 p = splat(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
    p = p * r + splat(c);
  }
  p = p * r * r + r + splat(1.0f);
  const F16 power = bits<F16>((bits<I16>(n + magic) - bits<I16>(magic) + 127) << 23);
  return select(exponent > splat(88.0f), splat(INFINITY), p * power);
}

[[maybe_unused]] void swiglu(const float* gate_up, const float* bias, const ActivationParams& params, float* out) {
  const bool oai = params.kind == Activation::kSwigluOai;
  const F16 alpha = splat(oai ? params.alpha : 1.0f), limit = splat(params.limit), one = splat(1.0f);
  for (int half = 0; half < 2; ++half) {
    F16 gate = load<F16>(gate_up + 32 * half), up = load<F16>(gate_up + 32 * half + 16);
    if (bias != nullptr) {
      gate += load<F16>(bias + 32 * half);
      up += load<F16>(bias + 32 * half + 16);
    }
    if (params.has_limit) {
      gate = select(gate > limit, limit, gate);
      up = select(up > limit, limit, up);
      up = select(up < -limit, -limit, up);
    }
    if (oai) up += one;
    store(out + 16 * half, gate / (one + exponential(-(alpha * gate))) * up);
  }
}

[[maybe_unused]] void accumulate(float* sum, const float* y, const float* bias, float weight, int size) {
  const F16 w = splat(weight);
  for (int i = 0; i < size; i += 16) {
    F16 value = load<F16>(y + i);
    if (bias != nullptr) value += load<F16>(bias + i);
    store(sum + i, load<F16>(sum + i) + w * value);
  }
}

[[maybe_unused]] void pack_tile(const uint8_t* codes, int64_t row_stride, const uint8_t* scales, int64_t scale_stride,
                                int64_t num_blocks, uint8_t* tile_codes, uint8_t* tile_scales) {
  for (int64_t b = 0; b < num_blocks; ++b) {
    for (int r = 0; r < kTileRows; ++r) {
      for (int j = 0; j < 4; ++j) {
        std::memcpy(tile_codes + b * kTileBlockBytes + 64 * j + 4 * r, codes + r * row_stride + 16 * b + 4 * j, 4);
      }
      tile_scales[b * kTileRows + r] = scales[r * scale_stride + b];
    }
  }
}

// float32 kernels.

// 2^(s - 127) of 16 scale bytes, with 0 as the subnormal that it is and 255 as NaN.
inline F16 widen_scales(const uint8_t* p) {
  U16 s;
  for (int r = 0; r < 16; ++r) s[r] = p[r];
  const U16 zero = bits<U16>(s == 0u), nan = bits<U16>(s == 255u);
  return bits<F16>((s << 23) | (zero & (1u << 22)) | (nan & 0x7FC00000u));
}

// weights[k][r], float32(code * 2^(s - 127)). The product with 1 before the last overflows and underflows once.
[[maybe_unused]] inline void decode_block_generic(const uint8_t* codes, const uint8_t* scales, F16* weights) {
  const F16 scale = widen_scales(scales);
  for (int j = 0; j < 4; ++j) {
    const U16 dwords = load<U16>(codes + 64 * j);
    for (int n = 0; n < 8; ++n) {
      const I16 code = bits<I16>((dwords >> (4 * n)) & 15u);
      const I16 exponent = (code >> 1) & 3, mantissa = code & 1;
      // Twice the magnitude: 0 1 2 3 4 6 8 12.
      const I16 normal = (mantissa + 2) << ((exponent - 1) & 3);
      const I16 is_normal = exponent != 0;
      const F16 magnitude = __builtin_convertvector((normal & is_normal) | (mantissa & ~is_normal), F16) * splat(0.5f);
      weights[8 * j + n] = bits<F16>(bits<I16>(magnitude) | ((code >> 3) << 31)) * scale;
    }
  }
}

template <int M, class Decode>
void gemm_f32_tile(const Tile& tile, int64_t num_blocks, const float* const* rows, float* out, int64_t out_stride,
                   Decode decode) {
  F16 even[M] = {}, odd[M] = {};
  alignas(64) F16 weights[kBlock];
  for (int64_t b = 0; b < num_blocks; ++b) {
    decode(tile.codes + b * kTileBlockBytes, tile.scales + b * kTileRows, weights);
    for (int k = 0; k < kBlock; k += 2) {
      for (int m = 0; m < M; ++m) {
        const float* x = rows[m] + b * kBlock + k;
        even[m] += x[0] * weights[k];
        odd[m] += x[1] * weights[k + 1];
      }
    }
  }
  for (int m = 0; m < M; ++m) store(out + m * out_stride, even[m] + odd[m]);
}

template <class Decode>
void gemm_f32_with(const Tile* tiles, int num_tiles, int64_t num_blocks, const float* const* rows, int num_rows,
                   float* out, int64_t out_stride, Decode decode) {
  for (int t = 0; t < num_tiles; ++t) {
    int m = 0;
    for (; m + 4 <= num_rows; m += 4) {
      gemm_f32_tile<4>(tiles[t], num_blocks, rows + m, out + m * out_stride + t * kTileRows, out_stride, decode);
    }
    for (; m < num_rows; ++m) {
      gemm_f32_tile<1>(tiles[t], num_blocks, rows + m, out + m * out_stride + t * kTileRows, out_stride, decode);
    }
  }
}

template <class Decode>
void gemm_f32_transposed_with(const Tile& block, const float* const* coefficients, int num_rows, float* out,
                              int64_t out_stride, Decode decode) {
  alignas(64) F16 weights[kBlock];
  decode(block.codes, block.scales, weights);
  alignas(64) float rows[kTileRows][kBlock];
  for (int k = 0; k < kBlock; ++k) {
    for (int r = 0; r < kTileRows; ++r) rows[r][k] = weights[k][r];
  }
  for (int m = 0; m < num_rows; ++m) {
    F16 low = load<F16>(out + m * out_stride), high = load<F16>(out + m * out_stride + 16);
    for (int r = 0; r < kTileRows; ++r) {
      const F16 c = splat(coefficients[m][r]);
      low += c * load<F16>(rows[r]);
      high += c * load<F16>(rows[r] + 16);
    }
    store(out + m * out_stride, low);
    store(out + m * out_stride + 16, high);
  }
}

[[maybe_unused]] inline void gemm_f32_generic(const Tile* tiles, int num_tiles, int64_t num_blocks,
                                              const float* const* rows, int num_rows, float* out, int64_t out_stride) {
  gemm_f32_with(tiles, num_tiles, num_blocks, rows, num_rows, out, out_stride, decode_block_generic);
}

[[maybe_unused]] inline void gemm_f32_transposed_generic(const Tile& block, const float* const* coefficients,
                                                         int num_rows, float* out, int64_t out_stride) {
  gemm_f32_transposed_with(block, coefficients, num_rows, out, out_stride, decode_block_generic);
}

[[maybe_unused]] void gemm_w16(const uint16_t* const* weight_rows, int num_weight_rows, int64_t size,
                               const float* const* rows, int num_rows, float* out, int64_t out_stride) {
  for (int r = 0; r < num_weight_rows; ++r) {
    for (int m0 = 0; m0 < num_rows; m0 += 4) {
      const int count = num_rows - m0 < 4 ? num_rows - m0 : 4;
      const float* x[4];
      for (int m = 0; m < 4; ++m) x[m] = rows[m0 + (m < count ? m : 0)];
      F16 sum[4][2] = {};
      for (int64_t k = 0; k < size; k += 32) {
        const F16 w0 = widen_bf16(weight_rows[r] + k), w1 = widen_bf16(weight_rows[r] + k + 16);
        for (int m = 0; m < 4; ++m) {
          sum[m][0] += w0 * load<F16>(x[m] + k);
          sum[m][1] += w1 * load<F16>(x[m] + k + 16);
        }
      }
      for (int m = 0; m < count; ++m) {
        const F16 lanes = sum[m][0] + sum[m][1];
        float total = 0;
        for (int i = 0; i < 16; ++i) total += lanes[i];
        out[(m0 + m) * out_stride + r] = total;
      }
    }
  }
}

// 16-bit integers.

[[maybe_unused]] bool quantize(const float* block, int8_t* digits, float* scale, int32_t* offset) {
  const F16 x[2] = {load<F16>(block), load<F16>(block + 16)};
  const I16 magnitude[2] = {bits<I16>(x[0]) & 0x7FFFFFFF, bits<I16>(x[1]) & 0x7FFFFFFF};
  int32_t largest = 0;
  for (int i = 0; i < 16; ++i) {
    const int32_t larger = magnitude[0][i] > magnitude[1][i] ? magnitude[0][i] : magnitude[1][i];
    largest = larger > largest ? larger : largest;
  }
  if (largest == 0) {
    std::memset(digits, 0, 2 * kBlock);
    *scale = 1.0f;
    *offset = 0;
    return true;
  }
  const int exponent = largest >> 23;
  if (exponent < 40 || exponent > 214) return false;
  const F16 both = bits<F16>(magnitude[0]) + bits<F16>(magnitude[1]);
  float sum = 0;
  for (int i = 0; i < 16; ++i) sum += both[i];
  const float amax = bits<float>(largest);
  const float rest = (sum - amax) * (1.0f / 31);
  // The step is at most 2^-14 of the largest element, so at most 2^-7 of the mean of the others.
  if (rest > 0 && amax > 128 * rest) return false;
  // |q| may not exceed 127 * 256 + 127.
  int shift = 14;
  if (amax > 32639.0f * bits<float>((exponent - shift) << 23)) shift = 13;
  const F16 inverse = splat(bits<float>((127 + 127 + shift - exponent) << 23)), magic = splat(12582912.0f);
  I16 total = {};
  for (int half = 0; half < 2; ++half) {
    const I16 q = bits<I16>(x[half] * inverse + magic) - bits<I16>(magic);
    const I16 high = (q + 128) >> 8, low = q - (high << 8);
    total += q;
    const auto order = [](B16 v) {
      return __builtin_shufflevector(v, v, 0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    };
    store(digits + 16 * half, order(__builtin_convertvector(high, B16)));
    store(digits + 32 + 16 * half, order(__builtin_convertvector(low, B16)));
  }
  int32_t q_sum = 0;
  for (int i = 0; i < 16; ++i) q_sum += total[i];
  *offset = -12 * q_sum;
  *scale = bits<float>((exponent - shift - 1) << 23);
  return true;
}

// 12 + twice the value of a code.
[[maybe_unused]] constexpr uint8_t kUnsignedWeights[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

}  // namespace
}  // namespace moe_ops::mxfp4
