// AMX bfloat16 tiles over the AVX-512 kernels.
//
// The vector units dequantise a few blocks ahead of the tile unit, so that both work at once. Tile registers by shape
// (row tiles x weight tiles): 1x4: 4 sums, 1 of rows, 3 of weights; 2x2: 4 + 2 + 2; 3x2: 6 + 1 + 1.
#include "cpu/kernels/cpu_features.h"
#include "cpu/kernels/fused_mxfp4_moe_generic.h"
#include "cpu/kernels/fused_mxfp4_moe_x86.h"

namespace moe_ops::mxfp4 {
namespace {

constexpr int kTileElements = 512;  // of bfloat16: 16 rows of 32, or 16 pairs of rows of 16
constexpr int kAhead = 2;           // blocks that dequantisation is ahead of the tile unit
constexpr int kRing = 4;            // blocks of a panel that is not kept; a power of two above kAhead
constexpr int kPrefetchBytes = 2048;

// Bits of the bfloat16 values of the codes times 2^(252 - 127); -0 as 0. Subtracting (252 - s) from the exponent with
// saturation gives the value at scale s and leaves 0 alone.
constexpr int kTableScale = 252;
constexpr uint16_t bits_of(int exponent, int half) {
  return static_cast<uint16_t>((exponent + 127 + kTableScale - 127) << 7 | half << 6);
}
constexpr uint16_t kSign = 0x8000;
alignas(64) const uint16_t kTable[32] = {0,
                                         bits_of(-1, 0),
                                         bits_of(0, 0),
                                         bits_of(0, 1),
                                         bits_of(1, 0),
                                         bits_of(1, 1),
                                         bits_of(2, 0),
                                         bits_of(2, 1),
                                         0,
                                         bits_of(-1, 0) | kSign,
                                         bits_of(0, 0) | kSign,
                                         bits_of(0, 1) | kSign,
                                         bits_of(1, 0) | kSign,
                                         bits_of(1, 1) | kSign,
                                         bits_of(2, 0) | kSign,
                                         bits_of(2, 1) | kSign,
                                         0,
                                         bits_of(-1, 0),
                                         bits_of(0, 0),
                                         bits_of(0, 1),
                                         bits_of(1, 0),
                                         bits_of(1, 1),
                                         bits_of(2, 0),
                                         bits_of(2, 1),
                                         0,
                                         bits_of(-1, 0) | kSign,
                                         bits_of(0, 0) | kSign,
                                         bits_of(0, 1) | kSign,
                                         bits_of(1, 0) | kSign,
                                         bits_of(1, 1) | kSign,
                                         bits_of(2, 0) | kSign,
                                         bits_of(2, 1) | kSign};

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
  TileConfig() {
    for (int i = 0; i < 8; ++i) {
      bytes_per_row[i] = 64;
      rows[i] = 16;
    }
  }
};

// A block of a weight tile to the operand of the tile unit: row 4 j + s holds the pairs k = 8 j + s, 8 j + s + 4.
inline void dequantize(const uint8_t* codes, const uint8_t* scales, __m512i table, uint16_t* out) {
  const __m512i s = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(scales)));
  const __m512i below = _mm512_slli_epi32(_mm512_sub_epi32(_mm512_set1_epi32(kTableScale), s), 7);
  const __m512i both = _mm512_or_si512(below, _mm512_slli_epi32(below, 16));
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512i dwords = _mm512_loadu_si512(codes + 64 * j);
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n) {
      // The permutation reads the low five bits of its index, and the table repeats every 16.
      const __m512i value = _mm512_permutexvar_epi16(n ? _mm512_srli_epi32(dwords, 4 * n) : dwords, table);
      _mm512_store_si512(out + (4 * j + n) * 32, _mm512_subs_epu16(value, both));
    }
  }
}

struct Range {
  __m128i smallest = _mm_set1_epi8(-1), largest = _mm_setzero_si128();
};

template <int N>
struct Source {
  const Tile* tiles;
  int64_t num_blocks;
  uint16_t* panel;  // [block & mask][N][kTileElements]
  int64_t mask;
  bool ready;
  __m512i table;
  Range range[N];

  uint16_t* at(int64_t b) const { return panel + (b & mask) * N * kTileElements; }

  void produce(int64_t b) {
    if (ready || b >= num_blocks) return;
    uint16_t* out = at(b);
#pragma GCC unroll 4
    for (int t = 0; t < N; ++t) {
      const uint8_t* codes = tiles[t].codes + b * kTileBlockBytes;
      const uint8_t* scales = tiles[t].scales + b * kTileRows;
      for (int j = 0; j < 4; ++j)
        _mm_prefetch(reinterpret_cast<const char*>(codes) + kPrefetchBytes + 64 * j, _MM_HINT_T0);
      if ((b & 3) == 0) _mm_prefetch(reinterpret_cast<const char*>(scales) + kPrefetchBytes / 16, _MM_HINT_T0);
      const __m128i s = _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales));
      range[t].smallest = _mm_min_epu8(range[t].smallest, s);
      range[t].largest = _mm_max_epu8(range[t].largest, s);
      dequantize(codes, scales, table, out + t * kTileElements);
    }
  }

  unsigned bad() const {
    unsigned result = 0;
    for (int t = 0; t < N && !ready; ++t) result |= scales_out_of_range(range[t].smallest, range[t].largest) << t;
    return result;
  }
};

// The tile instructions are opaque to the compiler: what they read must be in memory before them.
inline void fence() { asm volatile("" ::: "memory"); }

#define MOE_OPS_DOT(sum, a, b) _tile_dpbf16ps(sum, a, b)

// Sums 0..3: one tile of rows by four of weights.
template <class S>
inline void block_1x4(const uint16_t* a, int64_t, const S& source, int64_t b) {
  const uint16_t* w = source.at(b);
  _tile_loadd(4, a, 64);
  _tile_loadd(5, w, 64);
  MOE_OPS_DOT(0, 4, 5);
  _tile_loadd(6, w + kTileElements, 64);
  MOE_OPS_DOT(1, 4, 6);
  _tile_loadd(7, w + 2 * kTileElements, 64);
  MOE_OPS_DOT(2, 4, 7);
  _tile_loadd(5, w + 3 * kTileElements, 64);
  MOE_OPS_DOT(3, 4, 5);
}

template <class S>
inline void block_1x2(const uint16_t* a, int64_t, const S& source, int64_t b) {
  const uint16_t* w = source.at(b);
  _tile_loadd(4, a, 64);
  _tile_loadd(6, w, 64);
  MOE_OPS_DOT(0, 4, 6);
  _tile_loadd(7, w + kTileElements, 64);
  MOE_OPS_DOT(1, 4, 7);
}

// Sums 2 m + n.
template <class S>
inline void block_2x2(const uint16_t* a, int64_t row_tile, const S& source, int64_t b) {
  const uint16_t* w = source.at(b);
  _tile_loadd(4, a, 64);
  _tile_loadd(6, w, 64);
  MOE_OPS_DOT(0, 4, 6);
  _tile_loadd(7, w + kTileElements, 64);
  MOE_OPS_DOT(1, 4, 7);
  _tile_loadd(5, a + row_tile, 64);
  MOE_OPS_DOT(2, 5, 6);
  MOE_OPS_DOT(3, 5, 7);
}

template <class S>
inline void block_3x2(const uint16_t* a, int64_t row_tile, const S& source, int64_t b) {
  const uint16_t* w = source.at(b);
  _tile_loadd(7, w, 64);
  _tile_loadd(6, a, 64);
  MOE_OPS_DOT(0, 6, 7);
  _tile_loadd(6, a + row_tile, 64);
  MOE_OPS_DOT(2, 6, 7);
  _tile_loadd(6, a + 2 * row_tile, 64);
  MOE_OPS_DOT(4, 6, 7);
  _tile_loadd(7, w + kTileElements, 64);
  MOE_OPS_DOT(5, 6, 7);
  _tile_loadd(6, a + row_tile, 64);
  MOE_OPS_DOT(3, 6, 7);
  _tile_loadd(6, a, 64);
  MOE_OPS_DOT(1, 6, 7);
}

template <int RowTiles, int N>
unsigned run(Source<N>& source, const PackedRows& rows, float* out, int64_t out_stride) {
  const int64_t row_tile = source.num_blocks * kTileElements;
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (RowTiles > 1 || N == 4) {
    _tile_zero(2);
    _tile_zero(3);
  }
  if constexpr (RowTiles == 3) {
    _tile_zero(4);
    _tile_zero(5);
  }
  for (int b = 0; b < kAhead; ++b) source.produce(b);
  for (int64_t b = 0; b < source.num_blocks; ++b) {
    source.produce(b + kAhead);
    fence();
    for (const uint16_t* part : {rows.high, rows.low}) {
      if (part == nullptr) continue;
      const uint16_t* a = part + b * kTileElements;
      if constexpr (RowTiles == 3) {
        block_3x2(a, row_tile, source, b);
      } else if constexpr (RowTiles == 2) {
        block_2x2(a, row_tile, source, b);
      } else if constexpr (N == 4) {
        block_1x4(a, row_tile, source, b);
      } else {
        block_1x2(a, row_tile, source, b);
      }
    }
    fence();
  }
  const int64_t bytes = out_stride * 4, down = 16 * out_stride;
  _tile_stored(0, out, bytes);
  _tile_stored(1, out + 16, bytes);
  if constexpr (N == 4) {
    _tile_stored(2, out + 32, bytes);
    _tile_stored(3, out + 48, bytes);
  } else if constexpr (RowTiles > 1) {
    _tile_stored(2, out + down, bytes);
    _tile_stored(3, out + down + 16, bytes);
  }
  if constexpr (RowTiles == 3) {
    _tile_stored(4, out + 2 * down, bytes);
    _tile_stored(5, out + 2 * down + 16, bytes);
  }
  fence();
  return source.bad();
}

template <int N>
Source<N> make_source(const Tile* tiles, int64_t num_blocks, uint16_t* panel, bool ready, bool keep) {
  return {tiles, num_blocks, panel, keep || ready ? -1 : kRing - 1, ready, _mm512_load_si512(kTable), {}};
}

unsigned gemm_bf16(const Tile* tiles, int num_tiles, int64_t num_blocks, const PackedRows& rows, int num_rows,
                   float* out, int64_t out_stride, uint16_t* panel, bool panel_ready, bool keep_panel) {
  static const TileConfig config;
  _tile_loadconfig(&config);
  unsigned bad = 0;
  const int row_tiles = (num_rows + 15) / 16;
  // A panel is laid out for the shape that fills it: pairs of tiles, whatever the number of rows, once it is kept.
  if (row_tiles == 1 && num_tiles == 4 && !panel_ready && !keep_panel) {
    auto source = make_source<4>(tiles, num_blocks, panel, false, false);
    bad = run<1>(source, rows, out, out_stride);
  } else {
    for (int t = 0; t < num_tiles; t += 2) {
      auto source =
          make_source<2>(tiles + t, num_blocks, panel + t * num_blocks * kTileElements, panel_ready, keep_panel);
      float* to = out + t * kTileRows;
      const unsigned pair = row_tiles == 1   ? run<1>(source, rows, to, out_stride)
                            : row_tiles == 2 ? run<2>(source, rows, to, out_stride)
                                             : run<3>(source, rows, to, out_stride);
      bad |= pair << t;
    }
  }
  _tile_release();
  return bad;
}

void pack_block(const float* block, bool permute, uint16_t* high, uint16_t* low) {
  const auto order = [permute](const F16& x, const F16& y) {
    const __m512i joined =
        _mm512_inserti64x4(_mm512_castsi256_si512(bits<__m256i>(narrow_bf16(x))), bits<__m256i>(narrow_bf16(y)), 1);
    const __m128i group = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    return permute ? _mm512_shuffle_epi8(joined, _mm512_broadcast_i32x4(group)) : joined;
  };
  const F16 x = load<F16>(block), y = load<F16>(block + 16);
  _mm512_storeu_si512(high, order(x, y));
  if (low == nullptr) return;
  // What is not finite has no error to keep: inf - inf would be NaN.
  const auto error = [](const F16& v) {
    const F16 rounded = bits<F16>(__builtin_convertvector(narrow_bf16(v), U16) << 16);
    const I16 finite = (bits<I16>(v) & 0x7F800000) != 0x7F800000;
    return bits<F16>(bits<I16>(v - rounded) & finite);
  };
  _mm512_storeu_si512(low, order(error(x), error(y)));
}

// Rows of bfloat16 weights to pairs of rows: a transposition of 16 x 16 dwords for each tile and block.
void fill_panel(const uint16_t* const* weight_rows, int num_tiles, int64_t num_blocks, uint16_t* panel) {
  for (int t = 0; t < num_tiles; ++t) {
    uint16_t* pair = panel + (t & ~1) * num_blocks * kTileElements + (t & 1) * kTileElements;
    for (int64_t b = 0; b < num_blocks; ++b) {
      uint8_t* out = reinterpret_cast<uint8_t*>(pair + b * 2 * kTileElements);
      for (int r = 0; r < kTileRows; r += 4) {
        const uint16_t* const* rows = weight_rows + t * kTileRows + r;
        for (int c = 0; c < 4; ++c) {
          __m128i v[4];
          for (int i = 0; i < 4; ++i)
            v[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i] + b * kBlock + 8 * c));
          transpose4(v[0], v[1], v[2], v[3]);
          for (int i = 0; i < 4; ++i) _mm_store_si128(reinterpret_cast<__m128i*>(out + (4 * c + i) * 64 + r * 4), v[i]);
        }
      }
    }
  }
}

}  // namespace

const Kernels& amx_kernels() {
  static const Kernels kernels = [] {
    Kernels k = avx512_kernels();
    k.name = "amx";
    k.supported = cpu_has_amx_bf16;
    k.pack_block = pack_block;
    k.gemm_bf16 = gemm_bf16;
    k.fill_panel = fill_panel;
    return k;
  }();
  return kernels;
}

}  // namespace moe_ops::mxfp4
