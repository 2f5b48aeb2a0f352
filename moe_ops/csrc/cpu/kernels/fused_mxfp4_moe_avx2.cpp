// AVX2 and FMA. The 16-bit integer products are those of AVX-512, bit for bit.
#include <algorithm>

#include "cpu/kernels/fused_mxfp4_moe_generic.h"
#include "cpu/kernels/fused_mxfp4_moe_x86.h"

namespace moe_ops::mxfp4 {
namespace {

constexpr int kPrefetchBytes = 2048;

// Magnitudes by the low three bits; bit 3 is the sign.
inline void decode_block(const uint8_t* codes, const uint8_t* scales, float (*weights)[kTileRows]) {
  const __m256 table = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
  const __m256 sign_bit = _mm256_set1_ps(-0.0f);
  for (int half = 0; half < 2; ++half) {
    const __m256 scale = bits<__m256>(widen_scales(scales + 8 * half));
    for (int j = 0; j < 4; ++j) {
      const __m256i dwords = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + 64 * j + 32 * half));
#pragma GCC unroll 8
      for (int n = 0; n < 8; ++n) {
        const __m256 magnitude = _mm256_permutevar8x32_ps(table, _mm256_srli_epi32(dwords, 4 * n));
        const __m256 sign = _mm256_and_ps(_mm256_castsi256_ps(_mm256_slli_epi32(dwords, 28 - 4 * n)), sign_bit);
        _mm256_store_ps(weights[8 * j + n] + 8 * half, _mm256_mul_ps(_mm256_or_ps(magnitude, sign), scale));
      }
    }
  }
}

// float32 weights of a few blocks of a tile, decoded once for all rows.
constexpr int kFloatChunkBlocks = 4;
constexpr int kFloatRowsAtOnce = 3;
constexpr int kMostRows = 48;  // of activations that share decoded weights; their sums and copies are on the stack
using FloatChunk = float[kFloatChunkBlocks * kBlock][kTileRows];

// Even and odd k in sums of their own, whatever M is.
template <int M>
void multiply_float_chunk(const FloatChunk& weights, int64_t first_k, int size, const float* const* rows,
                          __m256 (*sums)[4]) {
  __m256 sum[M][4];
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) sum[m][i] = sums[m][i];
  }
  for (int k = 0; k < size; k += 2) {
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      const float* w = weights[k + odd];
      const __m256 low = _mm256_load_ps(w), high = _mm256_load_ps(w + 8);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        const __m256 x = _mm256_broadcast_ss(rows[m] + first_k + k + odd);
        sum[m][2 * odd] = _mm256_fmadd_ps(low, x, sum[m][2 * odd]);
        sum[m][2 * odd + 1] = _mm256_fmadd_ps(high, x, sum[m][2 * odd + 1]);
      }
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) sums[m][i] = sum[m][i];
  }
}

void gemm_f32(const Tile* tiles, int num_tiles, int64_t num_blocks, const float* const* rows, int num_rows, float* out,
              int64_t out_stride) {
  constexpr decltype(&multiply_float_chunk<1>) kByRows[kFloatRowsAtOnce] = {
      multiply_float_chunk<1>, multiply_float_chunk<2>, multiply_float_chunk<3>};
  alignas(64) FloatChunk weights;
  for (int begin = 0; begin < num_rows; begin += kMostRows) {
    const int count = std::min(kMostRows, num_rows - begin);
    for (int t = 0; t < num_tiles; ++t) {
      alignas(32) __m256 sums[kMostRows][4] = {};
      for (int64_t first = 0; first < num_blocks; first += kFloatChunkBlocks) {
        const int blocks = static_cast<int>(std::min<int64_t>(kFloatChunkBlocks, num_blocks - first));
        for (int b = 0; b < blocks; ++b) {
          decode_block(tiles[t].codes + (first + b) * kTileBlockBytes, tiles[t].scales + (first + b) * kTileRows,
                       weights + b * kBlock);
        }
        for (int m = 0; m < count; m += kFloatRowsAtOnce) {
          const int n = std::min(kFloatRowsAtOnce, count - m);
          kByRows[n - 1](weights, first * kBlock, blocks * kBlock, rows + begin + m, sums + m);
        }
      }
      for (int m = 0; m < count; ++m) {
        float* to = out + (begin + m) * out_stride + t * kTileRows;
        _mm256_storeu_ps(to, _mm256_add_ps(sums[m][0], sums[m][2]));
        _mm256_storeu_ps(to + 8, _mm256_add_ps(sums[m][1], sums[m][3]));
      }
    }
  }
}

void gemm_f32_transposed(const Tile& block, const float* const* coefficients, int num_rows, float* out,
                         int64_t out_stride) {
  gemm_f32_transposed_with(block, coefficients, num_rows, out, out_stride, decode_block);
}

inline __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

inline __m256i broadcast_dword(const void* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return _mm256_set1_epi32(x);
}

// Codes 0 2 4 6 and 1 3 5 7 of eight rows as unsigned weights.
struct EvenOdd {
  __m256i even, odd;
};

inline EvenOdd decode_dwords(const uint8_t* codes, __m256i table) {
  const __m256i nibble = _mm256_set1_epi8(15), dwords = load(codes);
  return {_mm256_shuffle_epi8(table, _mm256_and_si256(dwords, nibble)),
          _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(dwords, 4), nibble))};
}

inline __m256i unsigned_weights() {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kUnsignedWeights)));
}

// Of rows [8 half, 8 half + 8) of a tile.
inline __m256 block_scale(const uint8_t* scales, int half) {
  const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(scales + 8 * half));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(eight), 23));
}

// In a pass of its own: the products have no registers left.
inline bool has_scales_out_of_range(const Tile& tile, int64_t num_blocks) {
  __m128i smallest = _mm_set1_epi8(-1), largest = _mm_setzero_si128();
  for (int64_t b = 0; b < num_blocks; ++b) {
    const __m128i s = _mm_loadu_si128(reinterpret_cast<const __m128i*>(tile.scales + kTileRows * b));
    smallest = _mm_min_epu8(smallest, s);
    largest = _mm_max_epu8(largest, s);
  }
  return scales_out_of_range(smallest, largest);
}

// What a block adds to a sum: the same operations for any number of rows.
inline __m256 add_block(__m256 sum, __m256i dot, __m256 scale, float row_scale) {
  return _mm256_fmadd_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(dot), scale), _mm256_set1_ps(row_scale), sum);
}

// Few rows, M of them: eight of the sixteen rows of a tile at a time, decoded into registers, by the digits.
template <int M, int half>
void gemm_q16_half(const Tile& tile, int64_t num_blocks, const QuantRow* rows, float* out, int64_t out_stride) {
  const __m256i table = unsigned_weights(), ones = _mm256_set1_epi16(1);
  __m256 sum[M];
  for (int m = 0; m < M; ++m) sum[m] = _mm256_setzero_ps();
  const uint8_t* codes = tile.codes + 32 * half;
  const uint8_t* scales = tile.scales;
  for (int64_t b = 0; b < num_blocks; ++b, codes += kTileBlockBytes, scales += kTileRows) {
    if (half == 0) {
      for (int j = 0; j < 4; ++j)
        _mm_prefetch(reinterpret_cast<const char*>(codes) + kPrefetchBytes + 64 * j, _MM_HINT_T0);
    }
    __m256i high[M], low[M];
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      high[m] = _mm256_setzero_si256();
      low[m] = _mm256_set1_epi32(rows[m].offset[b]);
    }
#pragma GCC unroll 2
    for (int j = 0; j < 4; j += 2) {
      const EvenOdd w0 = decode_dwords(codes + 64 * j, table), w1 = decode_dwords(codes + 64 * j + 64, table);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        // A product is at most 2 * 24 * 128, so four of them do not leave 16 bits.
        const auto dot16 = [&](const int8_t* digits) {
          const auto products = [&](__m256i w, int at) {
            return _mm256_maddubs_epi16(w, broadcast_dword(digits + at));
          };
          const __m256i first = _mm256_add_epi16(products(w0.even, 0), products(w0.odd, 4));
          const __m256i second = _mm256_add_epi16(products(w1.even, 8), products(w1.odd, 12));
          return _mm256_madd_epi16(_mm256_add_epi16(first, second), ones);
        };
        const int8_t* digits = rows[m].digits + 64 * b + 8 * j;
        high[m] = _mm256_add_epi32(high[m], dot16(digits));
        low[m] = _mm256_add_epi32(low[m], dot16(digits + 32));
      }
    }
    const __m256 scale = block_scale(scales, half);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const __m256i dot = _mm256_add_epi32(_mm256_slli_epi32(high[m], 8), low[m]);
      sum[m] = add_block(sum[m], dot, scale, rows[m].scale[b]);
    }
  }
  for (int m = 0; m < M; ++m) _mm256_storeu_ps(out + m * out_stride + 8 * half, sum[m]);
}

template <int M>
void gemm_q16_few(const Tile* tiles, int num_tiles, int64_t num_blocks, const QuantRow* rows, float* out,
                  int64_t out_stride) {
  for (int t = 0; t < num_tiles; ++t) {
    gemm_q16_half<M, 0>(tiles[t], num_blocks, rows, out + t * kTileRows, out_stride);
    gemm_q16_half<M, 1>(tiles[t], num_blocks, rows, out + t * kTileRows, out_stride);
  }
}

// More rows: a chunk of K at a time, decoded once to pairs of 16-bit integers, for four rows of activations at once.
// The pairs of a group of eight are elements 0 4, 2 6, 1 5 and 3 7.
constexpr int kFewRows = 3, kRowsAtOnce = 4;
constexpr int kPairs = kBlock / 2;
constexpr int kChunkBlocks = 8;

struct Chunk {
  alignas(64) __m256i weights[kChunkBlocks][kPairs][2];  // of 16 rows
  alignas(64) __m256 scales[kChunkBlocks][2];
  alignas(64) int16_t rows[kMostRows][kChunkBlocks][kBlock];
};

inline void decode_pairs(const uint8_t* codes, __m256i (*pairs)[2]) {
  const __m256i table = unsigned_weights(), low_bytes = _mm256_set1_epi16(255);
  for (int j = 0; j < 4; ++j) {
    for (int half = 0; half < 2; ++half) {
      const EvenOdd w = decode_dwords(codes + 64 * j + 32 * half, table);
      pairs[4 * j][half] = _mm256_and_si256(w.even, low_bytes);
      pairs[4 * j + 1][half] = _mm256_srli_epi16(w.even, 8);
      pairs[4 * j + 2][half] = _mm256_and_si256(w.odd, low_bytes);
      pairs[4 * j + 3][half] = _mm256_srli_epi16(w.odd, 8);
    }
  }
}

// Digits 0 2 4 6 1 3 5 7 of each group to integers 0 4 2 6 1 5 3 7.
inline void join_digits(const int8_t* digits, int16_t* out) {
  const __m256i order =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
  for (int i = 0; i < kBlock; i += 16) {
    const auto widened = [&](const int8_t* p) {
      return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    };
    const __m256i q = _mm256_add_epi16(_mm256_slli_epi16(widened(digits + i), 8), widened(digits + kBlock + i));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm256_shuffle_epi8(q, order));
  }
}

template <int M>
void multiply_chunk(const Chunk& chunk, int first_row, int64_t first_block, int num_blocks, const QuantRow* rows,
                    float* out, int64_t out_stride) {
  __m256 sum[M][2];
  for (int m = 0; m < M; ++m) {
    for (int half = 0; half < 2; ++half) {
      sum[m][half] = first_block ? _mm256_loadu_ps(out + m * out_stride + 8 * half) : _mm256_setzero_ps();
    }
  }
  for (int b = 0; b < num_blocks; ++b) {
    __m256i dot[M][2];
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) dot[m][0] = dot[m][1] = _mm256_set1_epi32(rows[m].offset[first_block + b]);
#pragma GCC unroll 2
    for (int p = 0; p < kPairs; ++p) {
      const __m256i w0 = chunk.weights[b][p][0], w1 = chunk.weights[b][p][1];
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        const __m256i x = broadcast_dword(&chunk.rows[first_row + m][b][2 * p]);
        // Sums in place: else the compiler runs out of registers, and a sum in memory waits for its store.
        asm("vpaddd %1, %0, %0" : "+x"(dot[m][0]) : "x"(_mm256_madd_epi16(w0, x)));
        asm("vpaddd %1, %0, %0" : "+x"(dot[m][1]) : "x"(_mm256_madd_epi16(w1, x)));
      }
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      for (int half = 0; half < 2; ++half) {
        const float row_scale = rows[m].scale[first_block + b];
        sum[m][half] = add_block(sum[m][half], dot[m][half], chunk.scales[b][half], row_scale);
      }
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int half = 0; half < 2; ++half) _mm256_storeu_ps(out + m * out_stride + 8 * half, sum[m][half]);
  }
}

void gemm_q16_many(const Tile* tiles, int num_tiles, int64_t num_blocks, const QuantRow* rows, int num_rows, float* out,
                   int64_t out_stride) {
  constexpr decltype(&multiply_chunk<1>) kByRows[] = {multiply_chunk<1>, multiply_chunk<2>, multiply_chunk<3>,
                                                      multiply_chunk<4>};
  Chunk chunk;
  for (int64_t first = 0; first < num_blocks; first += kChunkBlocks) {
    const int count = static_cast<int>(std::min<int64_t>(kChunkBlocks, num_blocks - first));
    for (int m = 0; m < num_rows; ++m) {
      for (int b = 0; b < count; ++b) join_digits(rows[m].digits + 2 * kBlock * (first + b), chunk.rows[m][b]);
    }
    for (int t = 0; t < num_tiles; ++t) {
      for (int b = 0; b < count; ++b) {
        const uint8_t* codes = tiles[t].codes + kTileBlockBytes * (first + b);
        for (int j = 0; j < 4; ++j)
          _mm_prefetch(reinterpret_cast<const char*>(codes) + kPrefetchBytes + 64 * j, _MM_HINT_T0);
        decode_pairs(codes, chunk.weights[b]);
        const uint8_t* scales = tiles[t].scales + kTileRows * (first + b);
        for (int half = 0; half < 2; ++half) chunk.scales[b][half] = block_scale(scales, half);
      }
      for (int m = 0; m < num_rows; m += kRowsAtOnce) {
        const int n = std::min(kRowsAtOnce, num_rows - m);
        float* to = out + m * out_stride + t * kTileRows;
        kByRows[n - 1](chunk, m, first, count, rows + m, to, out_stride);
      }
    }
  }
}

unsigned gemm_q16(const Tile* tiles, int num_tiles, int64_t num_blocks, const QuantRow* rows, int num_rows, float* out,
                  int64_t out_stride) {
  constexpr decltype(&gemm_q16_few<1>) kFew[kFewRows] = {gemm_q16_few<1>, gemm_q16_few<2>, gemm_q16_few<3>};
  for (int m = 0; m < num_rows; m += kMostRows) {
    const int count = std::min(num_rows - m, kMostRows);
    float* to = out + m * out_stride;
    if (count > kFewRows) {
      gemm_q16_many(tiles, num_tiles, num_blocks, rows + m, count, to, out_stride);
    } else {
      kFew[count - 1](tiles, num_tiles, num_blocks, rows + m, to, out_stride);
    }
  }
  unsigned bad = 0;
  for (int t = 0; t < num_tiles; ++t) bad |= static_cast<unsigned>(has_scales_out_of_range(tiles[t], num_blocks)) << t;
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
