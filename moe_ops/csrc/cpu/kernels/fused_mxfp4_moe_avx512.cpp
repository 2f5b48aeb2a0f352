// AVX-512 with VNNI and VBMI.
#include "cpu/kernels/fused_mxfp4_moe_generic.h"
#include "cpu/kernels/fused_mxfp4_moe_x86.h"

namespace moe_ops::mxfp4 {
namespace {

constexpr int kPrefetchBytes = 4096;

alignas(64) const float kE2m1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                     -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

inline void decode_block(const uint8_t* codes, const uint8_t* scales, float (*weights)[kTileRows]) {
  const __m512 scale = bits<__m512>(widen_scales(scales)), table = _mm512_load_ps(kE2m1);
  for (int j = 0; j < 4; ++j) {
    const __m512i dwords = _mm512_loadu_si512(codes + 64 * j);
#pragma GCC unroll 8
    for (int n = 0; n < 8; ++n) {
      // The permutation reads the low four bits of its index only.
      const __m512 value = _mm512_permutexvar_ps(_mm512_srli_epi32(dwords, 4 * n), table);
      _mm512_store_ps(weights[8 * j + n], _mm512_mul_ps(value, scale));
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

// Registers for M rows: 3 M sums, 2 of weights, 1 of scales, the table.
template <int M>
unsigned gemm_q16_tile(const Tile& tile, int64_t num_blocks, const QuantRow* rows, float* out, int64_t out_stride) {
  const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kUnsignedWeights)));
  __m512 sum[M];
  for (int m = 0; m < M; ++m) sum[m] = _mm512_setzero_ps();
  __m128i smallest = _mm_set1_epi8(-1), largest = _mm_setzero_si128();
  const uint8_t* codes = tile.codes;
  const uint8_t* scales = tile.scales;
  for (int64_t b = 0; b < num_blocks; ++b, codes += kTileBlockBytes, scales += kTileRows) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j)
      _mm_prefetch(reinterpret_cast<const char*>(codes) + kPrefetchBytes + 64 * j, _MM_HINT_T1);
    if ((b & 3) == 0) _mm_prefetch(reinterpret_cast<const char*>(scales) + kPrefetchBytes / 16, _MM_HINT_T0);
    const __m128i s = _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales));
    smallest = _mm_min_epu8(smallest, s);
    largest = _mm_max_epu8(largest, s);
    const __m512 scale = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(s), 23));
    __m512i high[M], low[M];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      high[m] = _mm512_setzero_si512();
      low[m] = _mm512_set1_epi32(rows[m].offset[b]);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m512i dwords = _mm512_loadu_si512(codes + 64 * j);
      // The byte permutation reads the low six bits of its index, and the table repeats every 16.
      const __m512i even = _mm512_permutexvar_epi8(dwords, table);
      const __m512i odd = _mm512_permutexvar_epi8(_mm512_srli_epi16(dwords, 4), table);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        int32_t x[4];
        const int8_t* digits = rows[m].digits + 64 * b + 8 * j;
        std::memcpy(x, digits, 8);
        std::memcpy(x + 2, digits + 32, 8);
        high[m] = _mm512_dpbusd_epi32(high[m], even, _mm512_set1_epi32(x[0]));
        low[m] = _mm512_dpbusd_epi32(low[m], even, _mm512_set1_epi32(x[2]));
        high[m] = _mm512_dpbusd_epi32(high[m], odd, _mm512_set1_epi32(x[1]));
        low[m] = _mm512_dpbusd_epi32(low[m], odd, _mm512_set1_epi32(x[3]));
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const __m512 dot = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high[m], 8), low[m]));
      sum[m] = _mm512_fmadd_ps(_mm512_mul_ps(dot, scale), _mm512_set1_ps(rows[m].scale[b]), sum[m]);
    }
  }
  for (int m = 0; m < M; ++m) _mm512_storeu_ps(out + m * out_stride, sum[m]);
  return scales_out_of_range(smallest, largest);
}

template <int M>
unsigned gemm_q16_rows(const Tile* tiles, int num_tiles, int64_t num_blocks, const QuantRow* rows, float* out,
                       int64_t out_stride) {
  unsigned bad = 0;
  for (int t = 0; t < num_tiles; ++t) {
    bad |= gemm_q16_tile<M>(tiles[t], num_blocks, rows, out + t * kTileRows, out_stride) << t;
  }
  return bad;
}

unsigned gemm_q16(const Tile* tiles, int num_tiles, int64_t num_blocks, const QuantRow* rows, int num_rows, float* out,
                  int64_t out_stride) {
  constexpr decltype(&gemm_q16_rows<1>) kByRows[] = {gemm_q16_rows<1>, gemm_q16_rows<2>, gemm_q16_rows<3>,
                                                     gemm_q16_rows<4>, gemm_q16_rows<5>, gemm_q16_rows<6>};
  constexpr int kMost = 6;
  unsigned bad = 0;
  for (int m = 0; m < num_rows; m += kMost) {
    const int count = num_rows - m < kMost ? num_rows - m : kMost;
    bad |= kByRows[count - 1](tiles, num_tiles, num_blocks, rows + m, out + m * out_stride, out_stride);
  }
  return bad;
}

}  // namespace

const Kernels& avx512_kernels() {
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
