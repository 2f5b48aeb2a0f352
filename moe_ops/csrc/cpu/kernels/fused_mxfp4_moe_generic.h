// Kernels in portable C++ with vector types, compiled once per instruction set: each file that includes this gets its
// own copy (internal linkage), at the width its flags allow. They do the same arithmetic in the same order everywhere.
#pragma once

// Vector arguments never cross a translation unit here, so their ABI does not matter.
#pragma GCC diagnostic ignored "-Wpsabi"

#include <cmath>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "cpu/kernels/fused_mxfp4_moe_kernels.h"

namespace moe_ops::mxfp4 {
namespace {

// Vectors as wide as the registers: compilers take wider ones apart badly.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kParts = kTileRows / kLanes;  // vectors of a tile's rows

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
typedef int8_t Bytes __attribute__((vector_size(kLanes)));
typedef float Floats4 __attribute__((vector_size(16)));

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

inline Floats splat(float x) { return Floats{} + x; }

inline Floats select(const Ints& mask, const Floats& yes, const Floats& no) {
  return bits<Floats>((bits<Ints>(yes) & mask) | (bits<Ints>(no) & ~mask));
}

// Number conversions, with all special values.

// The low halves of `x`, whose high halves are zero.
inline Halves low_halves(const Words& x) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i packed = _mm256_packus_epi32(bits<__m256i>(x), bits<__m256i>(x));
  return bits<Halves>(_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
#else
  return __builtin_convertvector(x, Halves);
#endif
}

inline Floats widen_bf16(const uint16_t* p) {
  return bits<Floats>(__builtin_convertvector(load<Halves>(p), Words) << 16);
}

inline Halves narrow_bf16(const Floats& x) {
  const Words u = bits<Words>(x);
  const Words rounded = (u + 0x7FFF + ((u >> 16) & 1)) >> 16;
  const Words quiet = (u >> 16) | 0x40;
  const Words nan = bits<Words>((u & 0x7FFFFFFF) > 0x7F800000u);
  return low_halves((quiet & nan) | (rounded & ~nan));
}

inline Floats widen_f16(const uint16_t* p) {
  const Words h = __builtin_convertvector(load<Halves>(p), Words);
  const Words sign = (h & 0x8000) << 16, magnitude = h & 0x7FFF;
  const Words normal = (magnitude << 13) + ((127u - 15u) << 23);
  const Words special = (magnitude << 13) | 0x7F800000u;
  const Words small = bits<Words>(__builtin_convertvector(bits<Ints>(magnitude), Floats) * splat(0x1p-24f));
  const Words is_small = bits<Words>(magnitude < 0x400u), is_special = bits<Words>(magnitude >= 0x7C00u);
  return bits<Floats>(sign | (small & is_small) | (special & is_special) | (normal & ~is_small & ~is_special));
}

inline Halves narrow_f16(const Floats& x) {
  const Words u = bits<Words>(x), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7FFFFFFFu;
  const Words normal = (magnitude - ((127u - 15u) << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
  // Below 2^-14 the sum with 2^-1 has the rounded result in its low bits.
  const Words small = bits<Words>(bits<Floats>(magnitude) + splat(0.5f)) - bits<Words>(splat(0.5f));
  const Words is_small = bits<Words>(magnitude < (113u << 23));
  const Words overflow = bits<Words>(magnitude >= 0x477FF000u), nan = bits<Words>(magnitude > 0x7F800000u);
  Words result = (small & is_small) | (normal & ~is_small);
  result = (result & ~overflow) | (overflow & 0x7C00u) | (nan & 0x200u);
  return low_halves(sign | result);
}

[[maybe_unused]] void widen(const void* row, DType dtype, int64_t size, float* out) {
  if (dtype == DType::kFloat32) {
    std::memcpy(out, row, size * sizeof(float));
    return;
  }
  const uint16_t* p = static_cast<const uint16_t*>(row);
  if (dtype == DType::kBFloat16) {
    for (int64_t i = 0; i < size; i += kLanes) store(out + i, widen_bf16(p + i));
  } else {
    for (int64_t i = 0; i < size; i += kLanes) store(out + i, widen_f16(p + i));
  }
}

[[maybe_unused]] void narrow(const float* row, int64_t size, DType dtype, void* out) {
  if (dtype == DType::kFloat32) {
    std::memcpy(out, row, size * sizeof(float));
    return;
  }
  uint16_t* p = static_cast<uint16_t*>(out);
  if (dtype == DType::kBFloat16) {
    for (int64_t i = 0; i < size; i += kLanes) store(p + i, narrow_bf16(load<Floats>(row + i)));
  } else {
    for (int64_t i = 0; i < size; i += kLanes) store(p + i, narrow_f16(load<Floats>(row + i)));
  }
}

// e^x within 2 ulp for x in [-87, 88]; e^-87 below and infinity above, so that what is divided by 1 + e^x vanishes
// however large it is. Callers let NaN in by other operands.
inline Floats exponential(const Floats& exponent) {
  Floats x = select(exponent < splat(-87.0f), splat(-87.0f), exponent);
  x = select(x > splat(88.0f), splat(88.0f), x);
  const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Floats n = (x * splat(1.44269504f) + magic) - magic;
  const Floats r = (x - n * splat(0.693359375f)) - n * splat(-2.12194440e-4f);
  Floats p = splat(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
    p = p * r + splat(c);
  }
  p = p * r * r + r + splat(1.0f);
  const Floats power = bits<Floats>((bits<Ints>(n + magic) - bits<Ints>(magic) + 127) << 23);
  return select(exponent > splat(88.0f), splat(INFINITY), p * power);
}

[[maybe_unused]] void swiglu(const float* gate_up, const float* bias, const ActivationParams& params, float* out) {
  const bool oai = params.kind == Activation::kSwigluOai;
  const Floats alpha = splat(oai ? params.alpha : 1.0f), limit = splat(params.limit), one = splat(1.0f);
  for (int i = 0; i < kBlock; i += kLanes) {
    // Tiles of gate and up alternate.
    const int at = 2 * i - i % kTileRows;
    Floats gate = load<Floats>(gate_up + at), up = load<Floats>(gate_up + at + kTileRows);
    if (bias != nullptr) {
      gate += load<Floats>(bias + at);
      up += load<Floats>(bias + at + kTileRows);
    }
    if (params.has_limit) {
      gate = select(gate > limit, limit, gate);
      up = select(up > limit, limit, up);
      up = select(up < -limit, -limit, up);
    }
    if (oai) up += one;
    store(out + i, gate / (one + exponential(-(alpha * gate))) * up);
  }
}

[[maybe_unused]] void accumulate(float* sum, const float* y, const float* bias, float weight, int size) {
  const Floats w = splat(weight);
  for (int i = 0; i < size; i += kLanes) {
    Floats value = load<Floats>(y + i);
    if (bias != nullptr) value += load<Floats>(bias + i);
    store(sum + i, load<Floats>(sum + i) + w * value);
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

// 2^(s - 127) of kLanes scale bytes, with 0 as the subnormal that it is and 255 as NaN.
inline Floats widen_scales(const uint8_t* p) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const Words s = bits<Words>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  Words s;
  for (int r = 0; r < kLanes; ++r) s[r] = p[r];
#endif
  const Words zero = bits<Words>(s == 0u), nan = bits<Words>(s == 255u);
  return bits<Floats>((s << 23) | (zero & (1u << 22)) | (nan & 0x7FC00000u));
}

// The weights of a block of a tile, [k][row].
using BlockWeights = float[kBlock][kTileRows];

// float32(code * 2^(s - 127)). The product with 1 before the last overflows and underflows once.
[[maybe_unused]] inline void decode_block_generic(const uint8_t* codes, const uint8_t* scales,
                                                  float (*weights)[kTileRows]) {
  for (int r = 0; r < kTileRows; r += kLanes) {
    const Floats scale = widen_scales(scales + r);
    for (int j = 0; j < 4; ++j) {
      const Words dwords = load<Words>(codes + 64 * j + 4 * r);
      for (int n = 0; n < 8; ++n) {
        const Ints code = bits<Ints>((dwords >> (4 * n)) & 15u);
        const Ints exponent = (code >> 1) & 3, mantissa = code & 1;
        // Twice the magnitude: 0 1 2 3 4 6 8 12.
        const Ints normal = (mantissa + 2) << ((exponent - 1) & 3);
        const Ints is_normal = exponent != 0;
        const Floats magnitude =
            __builtin_convertvector((normal & is_normal) | (mantissa & ~is_normal), Floats) * splat(0.5f);
        store(&weights[8 * j + n][r], bits<Floats>(bits<Ints>(magnitude) | ((code >> 3) << 31)) * scale);
      }
    }
  }
}

// Even and odd k in sums of their own.
template <int M, class Decode>
void gemm_f32_tile(const Tile& tile, int64_t num_blocks, const float* const* rows, float* out, int64_t out_stride,
                   Decode decode) {
  Floats even[M][kParts] = {}, odd[M][kParts] = {};
  alignas(64) BlockWeights weights;
  for (int64_t b = 0; b < num_blocks; ++b) {
    decode(tile.codes + b * kTileBlockBytes, tile.scales + b * kTileRows, weights);
    for (int k = 0; k < kBlock; k += 2) {
      for (int m = 0; m < M; ++m) {
        const float* x = rows[m] + b * kBlock + k;
        for (int i = 0; i < kParts; ++i) {
          even[m][i] += x[0] * load<Floats>(&weights[k][i * kLanes]);
          odd[m][i] += x[1] * load<Floats>(&weights[k + 1][i * kLanes]);
        }
      }
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int i = 0; i < kParts; ++i) store(out + m * out_stride + i * kLanes, even[m][i] + odd[m][i]);
  }
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
  alignas(64) BlockWeights weights;
  decode(block.codes, block.scales, weights);
  alignas(64) float rows[kTileRows][kBlock];
  for (int k = 0; k < kBlock; ++k) {
    for (int r = 0; r < kTileRows; ++r) rows[r][k] = weights[k][r];
  }
  for (int m = 0; m < num_rows; ++m) {
    Floats sum[kBlock / kLanes];
    for (int i = 0; i < kBlock / kLanes; ++i) sum[i] = load<Floats>(out + m * out_stride + i * kLanes);
    for (int r = 0; r < kTileRows; ++r) {
      const Floats c = splat(coefficients[m][r]);
      for (int i = 0; i < kBlock / kLanes; ++i) sum[i] += c * load<Floats>(rows[r] + i * kLanes);
    }
    for (int i = 0; i < kBlock / kLanes; ++i) store(out + m * out_stride + i * kLanes, sum[i]);
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
  constexpr int kAtOnce = kLanes == 16 ? 4 : kLanes / 4;
  for (int r = 0; r < num_weight_rows; ++r) {
    for (int m0 = 0; m0 < num_rows; m0 += kAtOnce) {
      const int count = num_rows - m0 < kAtOnce ? num_rows - m0 : kAtOnce;
      const float* x[kAtOnce];
      for (int m = 0; m < kAtOnce; ++m) x[m] = rows[m0 + (m < count ? m : 0)];
      Floats sum[kAtOnce][kBlock / kLanes] = {};
      for (int64_t k = 0; k < size; k += kBlock) {
        for (int i = 0; i < kBlock / kLanes; ++i) {
          const Floats w = widen_bf16(weight_rows[r] + k + i * kLanes);
          for (int m = 0; m < kAtOnce; ++m) sum[m][i] += w * load<Floats>(x[m] + k + i * kLanes);
        }
      }
      for (int m = 0; m < count; ++m) {
        float total = 0;
        for (int i = 0; i < kTileRows; ++i)
          total += sum[m][i / kLanes][i % kLanes] + sum[m][(i + 16) / kLanes][i % kLanes];
        out[(m0 + m) * out_stride + r] = total;
      }
    }
  }
}

// 16-bit integers.

// What both parts of a block's quantisation need: its largest magnitude and the exponent of its step; false where 16
// bits cannot hold it.
struct BlockRange {
  int32_t largest;
  int exponent, shift;
};

inline bool block_range(const float* block, BlockRange* range) {
  constexpr int kCount = kBlock / kLanes;
  Ints magnitude[kCount], most = {};
  for (int i = 0; i < kCount; ++i) {
    magnitude[i] = load<Ints>(block + i * kLanes) & 0x7FFFFFFF;
    const Ints larger = magnitude[i] > most;
    most = (magnitude[i] & larger) | (most & ~larger);
  }
  alignas(64) int32_t lanes[kLanes];
  store(lanes, most);
  range->largest = 0;
  for (int i = 0; i < kLanes; ++i) range->largest = lanes[i] > range->largest ? lanes[i] : range->largest;
  if (range->largest == 0) return true;
  range->exponent = range->largest >> 23;
  if (range->exponent < 40 || range->exponent > 214) return false;
  alignas(64) float absolute[kBlock];
  for (int i = 0; i < kCount; ++i) store(absolute + i * kLanes, magnitude[i]);
  Floats4 fours[4];
  for (int i = 0; i < 4; ++i) fours[i] = load<Floats4>(absolute + 4 * i) + load<Floats4>(absolute + 16 + 4 * i);
  const Floats4 four = (fours[0] + fours[2]) + (fours[1] + fours[3]);
  const float sum = (four[0] + four[2]) + (four[1] + four[3]);
  const float amax = bits<float>(range->largest);
  const float rest = (sum - amax) * (1.0f / 31);
  // The step is at most 2^-14 of the largest element, so at most 2^-7 of the mean of the others.
  if (rest > 0 && amax > 128 * rest) return false;
  // |q| may not exceed 127 * 256 + 127.
  range->shift = 14;
  if (amax > 32639.0f * bits<float>((range->exponent - range->shift) << 23)) range->shift = 13;
  return true;
}

// 32 integers as their high and low digits, each group of eight in the order 0 2 4 6 1 3 5 7; their sum.
inline int32_t store_digits(const Ints* q, int8_t* digits) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i q01 = _mm256_packs_epi32(bits<__m256i>(q[0]), bits<__m256i>(q[1]));
  const __m256i q23 = _mm256_packs_epi32(bits<__m256i>(q[2]), bits<__m256i>(q[3]));
  const auto high = [](__m256i v) { return _mm256_srai_epi16(_mm256_add_epi16(v, _mm256_set1_epi16(128)), 8); };
  const __m256i h01 = high(q01), h23 = high(q23);
  const auto low = [](__m256i v, __m256i h) { return _mm256_sub_epi16(v, _mm256_slli_epi16(h, 8)); };
  // The packs leave a quarter of each vector in each half: dwords 0 to 3 of vectors 0 to 3, then their dwords 4 to 7.
  const auto put = [](__m256i a, __m256i b, int8_t* to) {
    const __m256i bytes =
        _mm256_permutevar8x32_epi32(_mm256_packs_epi16(a, b), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    const __m256i order =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_shuffle_epi8(bytes, order));
  };
  put(h01, h23, digits);
  put(low(q01, h01), low(q23, h23), digits + kBlock);
#elif defined(__AVX512F__)
  for (int i = 0; i < 2; ++i) {
    const Ints high = (q[i] + 128) >> 8, low = q[i] - (high << 8);
    const auto order = [](const Bytes& v) {
      return __builtin_shufflevector(v, v, 0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    };
    store(digits + 16 * i, order(__builtin_convertvector(high, Bytes)));
    store(digits + kBlock + 16 * i, order(__builtin_convertvector(low, Bytes)));
  }
#else
  constexpr int kOrder[8] = {0, 2, 4, 6, 1, 3, 5, 7};
  int32_t values[kBlock];
  std::memcpy(values, q, sizeof values);
  for (int i = 0; i < kBlock; ++i) {
    const int32_t value = values[(i & ~7) + kOrder[i & 7]], high = (value + 128) >> 8;
    digits[i] = static_cast<int8_t>(high);
    digits[kBlock + i] = static_cast<int8_t>(value - (high << 8));
  }
#endif
  Ints total = {};
  for (int i = 0; i < kBlock / kLanes; ++i) total += q[i];
  int32_t sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += total[i];
  return sum;
}

[[maybe_unused]] bool quantize(const float* block, int8_t* digits, float* scale, int32_t* offset) {
  BlockRange range;
  if (!block_range(block, &range)) return false;
  if (range.largest == 0) {
    std::memset(digits, 0, 2 * kBlock);
    *scale = 1.0f;
    *offset = 0;
    return true;
  }
  const Floats inverse = splat(bits<float>((127 + 127 + range.shift - range.exponent) << 23)),
               magic = splat(12582912.0f);
  Ints q[kBlock / kLanes];
  for (int i = 0; i < kBlock / kLanes; ++i) {
    q[i] = bits<Ints>(load<Floats>(block + i * kLanes) * inverse + magic) - bits<Ints>(magic);
  }
  *offset = -12 * store_digits(q, digits);
  *scale = bits<float>((range.exponent - range.shift - 1) << 23);
  return true;
}

// 12 + twice the value of a code.
[[maybe_unused]] constexpr uint8_t kUnsignedWeights[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

}  // namespace
}  // namespace moe_ops::mxfp4
