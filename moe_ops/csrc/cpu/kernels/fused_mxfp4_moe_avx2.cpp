// AVX2 and FMA. The 16-bit integer products are those of AVX-512, bit for bit.
#include "cpu/kernels/fused_mxfp4_moe_generic.h"
#include "cpu/kernels/fused_mxfp4_moe_x86.h"

namespace moe_ops::mxfp4 {
namespace {

constexpr int kPrefetchBytes = 2048;

// Magnitudes by the low three bits; bit 3 is the sign.
inline void decode_block(const uint8_t* codes, const uint8_t* scales, F16* weights) {
  const F16 scale = widen_scales(scales);
  const __m256 low = _mm256_loadu_ps(reinterpret_cast<const float*>(&scale));
  const __m256 high = _mm256_loadu_ps(reinterpret_cast<const float*>(&scale) + 8);
  const __m256 table = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
  const __m256 sign_bit = _mm256_set1_ps(-0.0f);
  for (int j = 0; j < 4; ++j) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + 64 * j));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + 64 * j + 32));
#pragma GCC unroll 8
    for (int n = 0; n < 8; ++n) {
      const auto value = [&](__m256i dwords, __m256 s) {
        const __m256 magnitude = _mm256_permutevar8x32_ps(table, _mm256_srli_epi32(dwords, 4 * n));
        const __m256 sign = _mm256_and_ps(_mm256_castsi256_ps(_mm256_slli_epi32(dwords, 28 - 4 * n)), sign_bit);
        return _mm256_mul_ps(_mm256_or_ps(magnitude, sign), s);
      };
      float* out = reinterpret_cast<float*>(weights + 8 * j + n);
      _mm256_storeu_ps(out, value(a, low));
      _mm256_storeu_ps(out + 8, value(b, high));
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

inline __m256i dot4(__m256i unsigned_weights, const int8_t* digits) {
  int32_t x;
  std::memcpy(&x, digits, 4);
  // At most 2 * 24 * 128: the 16-bit sums do not saturate.
  const __m256i pairs = _mm256_maddubs_epi16(unsigned_weights, _mm256_set1_epi32(x));
  return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

// Eight of the sixteen rows of a tile at a time: for M activation rows 3 M sums.
template <int M>
unsigned gemm_q16_half(const Tile& tile, int half, int64_t num_blocks, const QuantRow* rows, float* out,
                       int64_t out_stride) {
  const __m256i table =
      _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kUnsignedWeights)));
  const __m256i nibble = _mm256_set1_epi8(15);
  __m256 sum[M];
  for (int m = 0; m < M; ++m) sum[m] = _mm256_setzero_ps();
  __m128i smallest = _mm_set1_epi8(-1), largest = _mm_setzero_si128();
  const uint8_t* codes = tile.codes + 32 * half;
  const uint8_t* scales = tile.scales;
  for (int64_t b = 0; b < num_blocks; ++b, codes += kTileBlockBytes, scales += kTileRows) {
    if (half == 0) {
      for (int j = 0; j < 4; ++j)
        _mm_prefetch(reinterpret_cast<const char*>(codes) + kPrefetchBytes + 64 * j, _MM_HINT_T0);
    }
    const __m128i s = _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales));
    smallest = _mm_min_epu8(smallest, s);
    largest = _mm_max_epu8(largest, s);
    const __m256i wide = _mm256_cvtepu8_epi32(half ? _mm_srli_si128(s, 8) : s);
    const __m256 scale = _mm256_castsi256_ps(_mm256_slli_epi32(wide, 23));
    __m256i high[M], low[M];
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      high[m] = _mm256_setzero_si256();
      low[m] = _mm256_set1_epi32(rows[m].offset[b]);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m256i dwords = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + 64 * j));
      const __m256i even = _mm256_shuffle_epi8(table, _mm256_and_si256(dwords, nibble));
      const __m256i odd = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(dwords, 4), nibble));
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        const int8_t* digits = rows[m].digits + 64 * b + 8 * j;
        high[m] = _mm256_add_epi32(high[m], _mm256_add_epi32(dot4(even, digits), dot4(odd, digits + 4)));
        low[m] = _mm256_add_epi32(low[m], _mm256_add_epi32(dot4(even, digits + 32), dot4(odd, digits + 36)));
      }
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const __m256 dot = _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_slli_epi32(high[m], 8), low[m]));
      sum[m] = _mm256_fmadd_ps(_mm256_mul_ps(dot, scale), _mm256_set1_ps(rows[m].scale[b]), sum[m]);
    }
  }
  for (int m = 0; m < M; ++m) _mm256_storeu_ps(out + m * out_stride + 8 * half, sum[m]);
  return scales_out_of_range(smallest, largest);
}

unsigned gemm_q16(const Tile* tiles, int num_tiles, int64_t num_blocks, const QuantRow* rows, int num_rows, float* out,
                  int64_t out_stride) {
  constexpr decltype(&gemm_q16_half<1>) kByRows[] = {gemm_q16_half<1>, gemm_q16_half<2>, gemm_q16_half<3>};
  constexpr int kMost = 3;
  unsigned bad = 0;
  for (int t = 0; t < num_tiles; ++t) {
    for (int half = 0; half < 2; ++half) {
      for (int m = 0; m < num_rows; m += kMost) {
        const int count = num_rows - m < kMost ? num_rows - m : kMost;
        float* to = out + m * out_stride + t * kTileRows;
        bad |= kByRows[count - 1](tiles[t], half, num_blocks, rows + m, to, out_stride) << t;
      }
    }
  }
  return bad;
}

}  // namespace

const Kernels& avx2_kernels() {
  static const Kernels kernels = [] {
    Kernels k{};
    k.widen = widen;
    k.narrow = narrow;
    k.swiglu = swiglu;
    k.accumulate = accumulate;
    k.pack_tile = pack_tile_x86;
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
