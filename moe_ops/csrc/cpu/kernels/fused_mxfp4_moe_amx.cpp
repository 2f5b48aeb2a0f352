// AMX bfloat16 tiles over the AVX-512 kernels.
//
// The vector units dequantise two blocks ahead of the tile unit, a part between any two products, so that both work at
// once. Tile registers: up to 6 sums, then rows, and 7 for weights. Sums and rows have the height of the call's tiles
// of rows, since products and loads take time by it.
#include <type_traits>

#include "cpu/kernels/cpu_features.h"
#include "cpu/kernels/fused_mxfp4_moe_generic.h"
#include "cpu/kernels/fused_mxfp4_moe_x86.h"

namespace moe_ops::mxfp4 {
namespace {

constexpr int kTileElements = 512;  // of bfloat16: 16 rows of 32, or 16 pairs of rows of 16
constexpr int kAhead = 2;           // blocks that dequantisation is ahead of the tile unit
constexpr int kRing = 4;            // blocks that are kept for it; a power of two above kAhead
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
};

// By height of the tiles of rows; in memory of its own: the compiler takes the instruction to read eight bytes and
// would drop the other stores.
struct TileConfigs {
  TileConfig of_height[17];
  constexpr TileConfigs() {
    for (int height = 1; height <= 16; ++height) {
      for (int i = 0; i < 8; ++i) {
        of_height[height].bytes_per_row[i] = 64;
        of_height[height].rows[i] = static_cast<uint8_t>(i < 7 ? height : 16);
      }
    }
  }
};
constexpr TileConfigs kTileConfigs;

// Loading a configuration takes 160 cycles.
thread_local const TileConfig* configured = nullptr;

void configure(int height) {
  const TileConfig* wanted = &kTileConfigs.of_height[height];
  if (wanted == configured) return;
  _tile_loadconfig(wanted);
  configured = wanted;
}

void finish() {
  if (configured == nullptr) return;
  _tile_release();
  configured = nullptr;
}

// The tile instructions are opaque to the compiler: what they read must be in memory before them.
inline void fence() { asm volatile("" ::: "memory"); }

// Keeps an address in one register with constant offsets: the copies that the compiler would make of it pass through
// the port of the vector unit that dequantisation waits for.
template <class T>
inline T* one_register(T* p) {
  asm("" : "+r"(p));
  return p;
}

// A block of a weight tile becomes the operand of the tile unit: row 4 j + s holds the pairs k = 8 j + s, 8 j + s + 4.
// What limits this is the port that byte and word permutations, shifts and saturating subtractions share; the codes are
// therefore shifted by vpmultishiftqb, which has the other one.
//
// Where the operands of N weight tiles come from. A block is made in 4 N parts: begin(b), then part<i>(out) in order;
// `out` is [N][kTileElements].
template <int N>
struct Mxfp4Weights {
  const uint8_t* codes[N];
  const uint8_t* scales[N];
  __m128i smallest[N], largest[N];
  __m512i table, shift4, shift8, shift12, below;
  int64_t block;

  explicit Mxfp4Weights(const WeightTiles& weights) : table(_mm512_load_si512(kTable)) {
    for (int t = 0; t < N; ++t) {
      codes[t] = weights.tiles[t].codes;
      scales[t] = weights.tiles[t].scales;
      smallest[t] = _mm_set1_epi8(-1);
      largest[t] = _mm_setzero_si128();
    }
    shift4 = _mm512_set1_epi64(0x0034002400140004);
    shift8 = _mm512_set1_epi64(0x0038002800180008);
    shift12 = _mm512_set1_epi64(0x003C002C001C000C);
  }

  inline __attribute__((always_inline)) void begin(int64_t b) { block = b; }

  template <int I>
  inline __attribute__((always_inline)) void part(uint16_t* out) {
    constexpr int t = I / 4, j = I % 4;
    const uint8_t* c = codes[t] + block * kTileBlockBytes + 64 * j;
    if constexpr (j == 0) {
      const uint8_t* of_block = scales[t] + block * kTileRows;
      _mm_prefetch(reinterpret_cast<const char*>(of_block) + kPrefetchBytes / 16, _MM_HINT_T0);
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(of_block));
      smallest[t] = _mm_min_epu8(smallest[t], bytes);
      largest[t] = _mm_max_epu8(largest[t], bytes);
      const __m512i s = _mm512_cvtepu8_epi32(bytes);
      const __m512i one = _mm512_slli_epi32(_mm512_sub_epi32(_mm512_set1_epi32(kTableScale), s), 7);
      below = _mm512_or_si512(one, _mm512_slli_epi32(one, 16));
    }
    _mm_prefetch(reinterpret_cast<const char*>(c) + kPrefetchBytes, _MM_HINT_T0);
    const __m512i dwords = _mm512_loadu_si512(c);
    const __m512i index[4] = {dwords, _mm512_multishift_epi64_epi8(shift4, dwords),
                              _mm512_multishift_epi64_epi8(shift8, dwords),
                              _mm512_multishift_epi64_epi8(shift12, dwords)};
    uint16_t* to = out + t * kTileElements + j * 128;
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n) {
      _mm512_store_si512(to + n * 32, _mm512_subs_epu16(_mm512_permutexvar_epi16(index[n], table), below));
    }
  }

  unsigned bad() const {
    unsigned result = 0;
    for (int t = 0; t < N; ++t) result |= scales_out_of_range(smallest[t], largest[t]) << t;
    return result;
  }
};

// Rows of bfloat16 weights to pairs of rows: a transposition of 16 x 16 dwords.
template <int N>
struct Bf16Weights {
  const uint16_t* const* rows;
  int64_t block;

  explicit Bf16Weights(const WeightTiles& weights) : rows(weights.rows) {}
  inline __attribute__((always_inline)) void begin(int64_t b) { block = b; }

  template <int I>
  inline __attribute__((always_inline)) void part(uint16_t* out) {
    constexpr int t = I / 4, r = I % 4 * 4;
    uint8_t* to = reinterpret_cast<uint8_t*>(out + t * kTileElements);
    const uint16_t* const* from = rows + t * kTileRows + r;
    for (int c = 0; c < 4; ++c) {
      __m128i v[4];
      for (int i = 0; i < 4; ++i)
        v[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from[i] + block * kBlock + 8 * c));
      transpose4(v[0], v[1], v[2], v[3]);
      for (int i = 0; i < 4; ++i) _mm_store_si128(reinterpret_cast<__m128i*>(to + (4 * c + i) * 64 + r * 4), v[i]);
    }
  }

  unsigned bad() const { return 0; }
};

template <int Begin, int End, class Weights>
inline __attribute__((always_inline)) void parts(Weights& weights, uint16_t* out) {
  if constexpr (Begin < End) {
    weights.template part<Begin>(out);
    parts<Begin + 1, End>(weights, out);
  }
}

struct NoWeights {};

// One block of weights `w` times RowTiles tiles of activations, `row_tile` elements apart, into sums N m + n. Between
// products the vector units make a part of the block `next` each, so that both kinds of units are always fed.
template <int RowTiles, int N, class Weights>
inline __attribute__((always_inline)) void multiply(const uint16_t* a, int64_t row_tile, const uint16_t* w,
                                                    Weights& next, uint16_t* to) {
  constexpr int kSteps = RowTiles * N;
#define MAKE(i)                                                    \
  if constexpr (!std::is_same_v<Weights, NoWeights>) {             \
    parts<4 * N*(i) / kSteps, 4 * N*((i) + 1) / kSteps>(next, to); \
    fence();                                                       \
  }
  if constexpr (RowTiles == 1) {
    _tile_loadd(4, a, 64);
    _tile_loadd(7, w, 64);
    _tile_dpbf16ps(0, 4, 7);
    MAKE(0)
    _tile_loadd(7, w + kTileElements, 64);
    _tile_dpbf16ps(1, 4, 7);
    MAKE(1)
    if constexpr (N == 4) {
      _tile_loadd(7, w + 2 * kTileElements, 64);
      _tile_dpbf16ps(2, 4, 7);
      MAKE(2)
      _tile_loadd(7, w + 3 * kTileElements, 64);
      _tile_dpbf16ps(3, 4, 7);
      MAKE(3)
    }
  } else if constexpr (RowTiles == 2) {
    _tile_loadd(4, a, 64);
    _tile_loadd(7, w, 64);
    _tile_dpbf16ps(0, 4, 7);
    MAKE(0)
    _tile_loadd(5, a + row_tile, 64);
    _tile_dpbf16ps(2, 5, 7);
    MAKE(1)
    _tile_loadd(7, w + kTileElements, 64);
    _tile_dpbf16ps(1, 4, 7);
    MAKE(2)
    _tile_dpbf16ps(3, 5, 7);
    MAKE(3)
  } else {
    _tile_loadd(7, w, 64);
    _tile_loadd(6, a, 64);
    _tile_dpbf16ps(0, 6, 7);
    MAKE(0)
    _tile_loadd(6, a + row_tile, 64);
    _tile_dpbf16ps(2, 6, 7);
    MAKE(1)
    _tile_loadd(6, a + 2 * row_tile, 64);
    _tile_dpbf16ps(4, 6, 7);
    MAKE(2)
    _tile_loadd(7, w + kTileElements, 64);
    _tile_dpbf16ps(5, 6, 7);
    MAKE(3)
    _tile_loadd(6, a + row_tile, 64);
    _tile_dpbf16ps(3, 6, 7);
    MAKE(4)
    _tile_loadd(6, a, 64);
    _tile_dpbf16ps(1, 6, 7);
    MAKE(5)
  }
#undef MAKE
}

template <int RowTiles, int N>
inline void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (RowTiles * N >= 4) {
    _tile_zero(2);
    _tile_zero(3);
  }
  if constexpr (RowTiles * N == 6) {
    _tile_zero(4);
    _tile_zero(5);
  }
}

template <int RowTiles, int N>
inline void store_sums(float* out, int64_t out_stride, int height) {
  const int64_t bytes = out_stride * 4, down = height * out_stride;
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
}

// The sums stay in registers over all of K.
//
// About 2,200 cycles after the last tile was stored, products or not, a core has put the store path of the tile unit to
// sleep, and the next store takes 800 to 1,300 cycles longer: as long as ten blocks. A tile is therefore stored every
// few blocks for nothing (docs/measured.md).
template <int RowTiles, int N, bool TwoParts, template <int> class Weights>
unsigned run_in_registers(const WeightTiles& tiles, int64_t num_blocks, const PackedRows& rows, float* out,
                          int64_t out_stride) {
  constexpr int kBlocksAwake = N == 2 && RowTiles < 3 && !TwoParts ? 8 : 4;
  alignas(64) uint16_t ring[kRing * N * kTileElements], nothing[kTileElements];
  const int64_t row_tile = num_blocks * kTileElements;
  const uint16_t *high = rows.high, *low = rows.low;
  NoWeights none;
  Weights<N> weights(tiles);
  zero_sums<RowTiles, N>();
  for (int64_t b = 0; b < kAhead && b < num_blocks; ++b) {
    weights.begin(b);
    parts<0, 4 * N>(weights, ring + b * N * kTileElements);
  }
  fence();
  const auto at = [&](int64_t b) { return one_register(ring + (b & (kRing - 1)) * N * kTileElements); };
  int64_t b = 0;
  for (; b + kAhead < num_blocks; ++b) {
    weights.begin(b + kAhead);
    multiply<RowTiles, N>(high + b * kTileElements, row_tile, at(b), weights, at(b + kAhead));
    if constexpr (TwoParts) multiply<RowTiles, N>(low + b * kTileElements, row_tile, at(b), none, nullptr);
    if (b % kBlocksAwake == kBlocksAwake - 1) _tile_stored(6, nothing, 64);
  }
  for (; b < num_blocks; ++b) {
    multiply<RowTiles, N>(high + b * kTileElements, row_tile, at(b), none, nullptr);
    if constexpr (TwoParts) multiply<RowTiles, N>(low + b * kTileElements, row_tile, at(b), none, nullptr);
  }
  store_sums<RowTiles, N>(out, out_stride, rows.tile_rows);
  fence();
  return weights.bad();
}

template <bool TwoParts, template <int> class Weights>
unsigned run(const WeightTiles& all, int num_tiles, int64_t num_blocks, const PackedRows& rows, int row_tiles,
             float* out, int64_t out_stride) {
  if (row_tiles == 1 && num_tiles == 4) {
    return run_in_registers<1, 4, TwoParts, Weights>(all, num_blocks, rows, out, out_stride);
  }
  const auto shape = row_tiles == 1   ? run_in_registers<1, 2, TwoParts, Weights>
                     : row_tiles == 2 ? run_in_registers<2, 2, TwoParts, Weights>
                                      : run_in_registers<3, 2, TwoParts, Weights>;
  unsigned bad = 0;
  for (int t = 0; t < num_tiles; t += 2) {
    bad |= shape(all.from(t), num_blocks, rows, out + t * kTileRows, out_stride) << t;
  }
  return bad;
}

unsigned gemm_bf16(const WeightTiles& weights, int num_tiles, int64_t num_blocks, const PackedRows& rows, int num_rows,
                   float* out, int64_t out_stride) {
  configure(rows.tile_rows);
  const bool two = rows.low != nullptr;
  const auto function = weights.tiles != nullptr ? (two ? run<true, Mxfp4Weights> : run<false, Mxfp4Weights>)
                                                 : (two ? run<true, Bf16Weights> : run<false, Bf16Weights>);
  // Blocks of up to three tiles of rows, as even as possible. Making the weights again for each block is cheaper than
  // keeping them: see docs/measured.md.
  const int height = rows.tile_rows, tiles = (num_rows + height - 1) / height, parts = (tiles + 2) / 3,
            step = (tiles + parts - 1) / parts;
  const int64_t row_tile = num_blocks * kTileElements;
  unsigned bad = 0;
  for (int r = 0; r < tiles; r += step) {
    const PackedRows part{rows.high + r * row_tile, two ? rows.low + r * row_tile : nullptr, height};
    const int count = tiles - r < step ? tiles - r : step;
    bad |= function(weights, num_tiles, num_blocks, part, count, out + r * height * out_stride, out_stride);
  }
  return bad;
}

void pack_row(const uint16_t* row, int64_t num_blocks, uint16_t* high) {
  const __m512i group = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
  for (int64_t b = 0; b < num_blocks; ++b) {
    _mm512_store_si512(high + b * kTileElements, _mm512_shuffle_epi8(_mm512_loadu_si512(row + b * kBlock), group));
  }
}

void pack_block(const float* block, bool permute, uint16_t* high, uint16_t* low) {
  const auto order = [permute](const Floats& x, const Floats& y) {
    const __m512i joined =
        _mm512_inserti64x4(_mm512_castsi256_si512(bits<__m256i>(narrow_bf16(x))), bits<__m256i>(narrow_bf16(y)), 1);
    const __m128i group = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    return permute ? _mm512_shuffle_epi8(joined, _mm512_broadcast_i32x4(group)) : joined;
  };
  const Floats x = load<Floats>(block), y = load<Floats>(block + 16);
  _mm512_storeu_si512(high, order(x, y));
  if (low == nullptr) return;
  // What is not finite has no error to keep: inf - inf would be NaN.
  const auto error = [](const Floats& v) {
    const Floats rounded = bits<Floats>(__builtin_convertvector(narrow_bf16(v), Words) << 16);
    const Ints finite = (bits<Ints>(v) & 0x7F800000) != 0x7F800000;
    return bits<Floats>(bits<Ints>(v - rounded) & finite);
  };
  _mm512_storeu_si512(low, order(error(x), error(y)));
}

}  // namespace

const Kernels& amx_kernels() {
  static const Kernels kernels = [] {
    Kernels k = avx512_kernels();
    k.pack_row = pack_row;
    k.pack_block = pack_block;
    k.gemm_bf16 = gemm_bf16;
    k.finish = finish;
    return k;
  }();
  return kernels;
}

}  // namespace moe_ops::mxfp4
