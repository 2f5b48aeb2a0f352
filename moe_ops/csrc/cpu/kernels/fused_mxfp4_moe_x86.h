// What the x86 kernels share; each file that includes this gets its own copy.
#pragma once

// GCC 12 warns about the undefined operands inside its own intrinsics.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#include <immintrin.h>

#include "cpu/kernels/fused_mxfp4_moe_kernels.h"

namespace moe_ops::mxfp4 {
namespace {

// 1 where a byte of `smallest` or `largest` leaves [kMinFastScale, kMaxFastScale].
inline unsigned scales_out_of_range(__m128i smallest, __m128i largest) {
  const __m128i low = _mm_subs_epu8(_mm_set1_epi8(static_cast<char>(kMinFastScale)), smallest);
  const __m128i high = _mm_subs_epu8(largest, _mm_set1_epi8(static_cast<char>(kMaxFastScale)));
  const __m128i any = _mm_or_si128(low, high);
  return _mm_movemask_epi8(_mm_cmpeq_epi8(any, _mm_setzero_si128())) != 0xFFFF;
}

// 4 x 4 dwords.
inline void transpose4(__m128i& a, __m128i& b, __m128i& c, __m128i& d) {
  const __m128i ab0 = _mm_unpacklo_epi32(a, b), ab1 = _mm_unpackhi_epi32(a, b);
  const __m128i cd0 = _mm_unpacklo_epi32(c, d), cd1 = _mm_unpackhi_epi32(c, d);
  a = _mm_unpacklo_epi64(ab0, cd0);
  b = _mm_unpackhi_epi64(ab0, cd0);
  c = _mm_unpacklo_epi64(ab1, cd1);
  d = _mm_unpackhi_epi64(ab1, cd1);
}

[[maybe_unused]] inline void pack_tile_x86(const uint8_t* codes, int64_t row_stride, const uint8_t* scales,
                                           int64_t scale_stride, int64_t num_blocks, uint8_t* tile_codes,
                                           uint8_t* tile_scales) {
  for (int64_t b = 0; b < num_blocks; ++b) {
    uint8_t* out = tile_codes + b * kTileBlockBytes;
    for (int r = 0; r < kTileRows; r += 4) {
      const uint8_t* p = codes + r * row_stride + 16 * b;
      __m128i v[4];
      for (int i = 0; i < 4; ++i) v[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i * row_stride));
      transpose4(v[0], v[1], v[2], v[3]);
      for (int j = 0; j < 4; ++j) _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 64 * j + 4 * r), v[j]);
    }
  }
  int64_t b = 0;
  for (; b + 16 <= num_blocks; b += 16) {
    __m128i v[16], w[16];
    for (int r = 0; r < 16; ++r)
      v[r] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales + r * scale_stride + b));
    // Four rounds of a perfect shuffle transpose 16 x 16 bytes.
    for (int round = 0; round < 2; ++round) {
      for (int i = 0; i < 8; ++i) {
        w[2 * i] = _mm_unpacklo_epi8(v[i], v[i + 8]);
        w[2 * i + 1] = _mm_unpackhi_epi8(v[i], v[i + 8]);
      }
      for (int i = 0; i < 8; ++i) {
        v[2 * i] = _mm_unpacklo_epi8(w[i], w[i + 8]);
        v[2 * i + 1] = _mm_unpackhi_epi8(w[i], w[i + 8]);
      }
    }
    for (int i = 0; i < 16; ++i) _mm_storeu_si128(reinterpret_cast<__m128i*>(tile_scales + (b + i) * kTileRows), v[i]);
  }
  for (; b < num_blocks; ++b) {
    for (int r = 0; r < kTileRows; ++r) tile_scales[b * kTileRows + r] = scales[r * scale_stride + b];
  }
}

}  // namespace
}  // namespace moe_ops::mxfp4
