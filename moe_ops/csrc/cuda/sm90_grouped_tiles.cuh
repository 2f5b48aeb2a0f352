// A tile of the grouped matmul: the warps that fetch it and the warpgroups that compute it. See sm90_grouped.cu.
#pragma once

#include "sm90_wgmma.cuh"

namespace moe_ops::sm90 {
namespace {

constexpr int kStrips = 16;                           // of 16 weight rows each, of a tile
constexpr int kBlockBytes = 1024, kBlockScales = 64;  // of a strip and 128 k
constexpr int kWeightBytes = kStrips * (kBlockBytes + kBlockScales);
constexpr int kSharedLimit = 232448;

struct Params {
  GroupedMatmul m;
  int full_blocks, blocks, tail_words, strips, row_tiles;
  int64_t expert_codes, expert_scales;
  int strip_codes, strip_scales;
};

inline Params params_of(const GroupedMatmul& m) {
  Params p{};
  p.m = m;
  p.full_blocks = m.k / 128, p.tail_words = m.k % 128 / 32;
  p.blocks = p.full_blocks + (p.tail_words > 0);
  p.strips = m.rows_out / 16;
  p.strip_codes = m.k * 8, p.strip_scales = m.k / 2;
  p.expert_codes = static_cast<int64_t>(p.strip_codes) * p.strips;
  p.expert_scales = static_cast<int64_t>(p.strip_scales) * p.strips;
  return p;
}

// kGroups warpgroups compute kParts times 64 weight rows each, for up to kTokens tokens; one more fetches.
template <int kGroups_, int kParts_, int kTokens_, int kRegisters_, int kFetchRegisters_>
struct Config {
  static constexpr int kGroups = kGroups_, kParts = kParts_, kTokens = kTokens_, kRegisters = kRegisters_;
  static constexpr int kFetchRegisters = kFetchRegisters_;
  static_assert(kGroups * kParts * 4 == kStrips && kTokens % 8 == 0, "shape of a tile");
  static constexpr int kThreads = (kGroups + 1) * 128;
  static constexpr int kHalfBytes = kTokens * 128;  // of 64 k of the tokens' activations
  static constexpr int kStageBytes = 2 * kHalfBytes + kWeightBytes;
  static constexpr int kRoom = kSharedLimit - 1024 - 256;
  static constexpr int kStages = kRoom / kStageBytes < 8 ? kRoom / kStageBytes : 8;
  static constexpr int kShared = 1024 + kStages * kStageBytes + kStages * 16;
  static_assert(kStages >= 3 && kStageBytes % 1024 == 0, "stages");
};

struct Tile {
  int expert, first_row, rows, row_tile;
};

MOE_OPS_DEVICE Tile tile_at(const Params& p, int index) {
  const int4 entry = __ldg(static_cast<const int4*>(p.m.tiles) + index / p.row_tiles);
  return {entry.x, entry.y, entry.z, index % p.row_tiles};
}

// The stages of shared memory: [tokens, first 64 k][tokens, last 64 k][codes of 16 strips][their scales]. Rows of
// tokens lie as wgmma reads them with a 128-byte swizzle: 16-byte piece c of row r at c ^ (r % 8).
template <class C>
struct Ring {
  uint32_t start;
  int slot = 0;
  uint32_t phase = 0;

  MOE_OPS_DEVICE uint32_t tokens(int half) const { return start + slot * C::kStageBytes + half * C::kHalfBytes; }
  MOE_OPS_DEVICE uint32_t codes(int strip) const { return tokens(2) + strip * kBlockBytes; }
  MOE_OPS_DEVICE uint32_t scales(int strip) const { return codes(kStrips) + strip * kBlockScales; }
  MOE_OPS_DEVICE uint32_t full(int which) const { return start + C::kStages * C::kStageBytes + which * 16; }
  MOE_OPS_DEVICE uint32_t empty(int which) const { return full(which) + 8; }
  MOE_OPS_DEVICE void advance() {
    if (++slot == C::kStages) slot = 0, phase ^= 1;
  }
};

MOE_OPS_DEVICE void copy16(uint32_t dst, const void* src) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}
// The barrier's phase waits for this thread's copies; the arrival is one of those it was initialised with.
MOE_OPS_DEVICE void arrive_with_copies(uint32_t bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

// ---------------------------------------------------------------- fetching

// Small bulk copies cost more instructions than copies of 16 bytes by all threads: weights come in pieces of 1024 and
// 64 bytes, and only the tokens of the second matrix are contiguous.
template <class C, bool kFirst>
struct Producer {
  static constexpr int kArrivals = 128 + (kFirst ? 0 : 1);  // per stage
  static constexpr int kCopies = (C::kTokens + 15) / 16;
  const Params& p;
  Ring<C> ring;
  int tid;

  MOE_OPS_DEVICE void run(int total) {
    // A thread copies the same 16-byte piece of every second strip, and of every 16th token.
    const int strip = tid / 64, piece = tid % 64, token = tid / 8, column = tid % 8;
    const uint32_t token_at = token * 128 + (column ^ (token % 8)) * 16;
#pragma unroll 1
    for (int index = blockIdx.x; index < total; index += gridDim.x) {
      const Tile tile = tile_at(p, index);
      const int first = tile.row_tile * kStrips, count = min(kStrips, p.strips - first);
      const uint8_t* codes =
          p.m.codes + tile.expert * p.expert_codes + static_cast<int64_t>(first + strip) * p.strip_codes + piece * 16;
      const uint8_t* scales = p.m.scales + tile.expert * p.expert_scales +
                              static_cast<int64_t>(first + tid / 4) * p.strip_scales + tid % 4 * 16;
      const char* activations = static_cast<const char*>(p.m.activations);
      int rows[kCopies];
      if (kFirst) {
        activations += column * 16;
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
          const int row = token + i * 16;
          rows[i] = row < tile.rows ? __ldg(p.m.row_slot + tile.first_row + row) / p.m.top_k : -1;
        }
      } else {
        activations += static_cast<int64_t>(tile.first_row) * 128;
      }
#pragma unroll 1
      for (int block = 0; block < p.blocks; ++block) {
        const int words = block < p.full_blocks ? 4 : p.tail_words;
        const uint32_t full = ring.full(ring.slot);
        barrier_wait(ring.empty(ring.slot), ring.phase ^ 1);
        if (!kFirst && tid == 0) {
          barrier_expect(full, (words + 1) / 2 * tile.rows * 128);
          bulk_load(ring.tokens(0), reinterpret_cast<uint64_t>(activations), tile.rows * 128, full);
          activations += p.m.num_rows * 128;
          if (words > 2) {
            bulk_load(ring.tokens(1), reinterpret_cast<uint64_t>(activations), tile.rows * 128, full);
            activations += p.m.num_rows * 128;
          }
        }
        if (piece < words * 16) {
#pragma unroll
          for (int i = 0; i < kStrips / 2; ++i)
            if (strip + 2 * i < count)
              copy16(ring.codes(strip + 2 * i) + piece * 16, codes + static_cast<int64_t>(2 * i) * p.strip_codes);
        }
        if (tid / 4 < count && tid % 4 < words) copy16(ring.scales(tid / 4) + tid % 4 * 16, scales);
        codes += kBlockBytes, scales += kBlockScales;
        if (kFirst) {
#pragma unroll
          for (int i = 0; i < kCopies; ++i) {
            if (rows[i] >= 0) {
              const char* row = activations + rows[i] * p.m.activations_stride * 2;
              const uint32_t to = ring.tokens(0) + token_at + i * 2048;
              if (column < words * 4) copy16(to, row);
              if (column + 8 < words * 4) copy16(to + C::kHalfBytes, row + 128);
            }
          }
          activations += 256;
        }
        arrive_with_copies(full);
        ring.advance();
      }
    }
  }
};

// ---------------------------------------------------------------- computing

// Eight codes -> four bf16 pairs, exact for scale codes 1 to 128: the code's bits at bits 8..6 of a bf16 are its value
// times 2^-126, and `multiplier` is 2^(scale - 1), twice.
MOE_OPS_DEVICE void dequantize_bf16(uint32_t codes, uint32_t multiplier, uint32_t (&out)[4]) {
  constexpr uint32_t kMagnitude = 0x01C001C0u, kSign = 0x80008000u;
  out[0] = ((codes >> 3) & kMagnitude) | (codes & kSign);
  out[1] = (codes & kMagnitude) | ((codes << 3) & kSign);
  out[2] = ((codes << 3) & kMagnitude) | ((codes << 1) & kSign);
  out[3] = ((codes << 6) & kMagnitude) | ((codes << 2) & kSign);
#pragma unroll
  for (int i = 0; i < 4; ++i) asm volatile("mul.bf16x2 %0, %0, %1;" : "+r"(out[i]) : "r"(multiplier));
}

template <class C, bool kFirst>
struct Consumer {
  const Params& p;
  Ring<C> ring;
  int group, warp, lane;
  float c[C::kParts][C::kTokens / 2];

  // Two warpgroups that start a tile together also end it together, and neither computes while both store. So the
  // second one starts a tile some blocks after the first. Only where the ring keeps them less than a tile apart, and
  // where stores take long: those of the second matrix.
  static constexpr bool kTakeTurns = C::kGroups == 2 && !kFirst;
  static constexpr int kLead = 2;
  MOE_OPS_DEVICE void let_follow() const {
    if (p.full_blocks >= C::kStages) asm volatile("bar.arrive 1, 256;" ::: "memory");
  }
  MOE_OPS_DEVICE void follow() const {
    if (p.full_blocks >= C::kStages) named_barrier(1, 256);
  }

  MOE_OPS_DEVICE void release(int slot) const {
    if (lane == 0) barrier_arrive(ring.empty(slot));
  }

  // 32 k, two steps of the tensor cores, of one strip. `scales`: of the strip's rows g and g + 8, the lower 16 bits.
  template <int kTokens>
  MOE_OPS_DEVICE void step(float* sums, uint32_t low, uint32_t high, uint32_t scales, int j) const {
    // Start address, 1024 bytes from one group of eight rows to the next, 128-byte swizzle.
    const uint64_t tokens = (static_cast<uint64_t>(1) << 62) | (static_cast<uint64_t>(64) << 32) |
                            (static_cast<uint64_t>(1) << 16) | ((ring.tokens(0) & 0x3FFFF) >> 4);
    const uint64_t at = tokens + j / 2 * (C::kHalfBytes / 16) + j % 2 * 4;
    uint32_t x[4], y[4];
    dequantize_bf16(low, __byte_perm(scales, 0, 0x4440) * 0x00800080u + 0x3F003F00u, x);
    dequantize_bf16(high, __byte_perm(scales, 0, 0x4441) * 0x00800080u + 0x3F003F00u, y);
    const uint32_t first[4] = {x[0], y[0], x[1], y[1]}, second[4] = {x[2], y[2], x[3], y[3]};
    wgmma_fence();
    Wgmma<kTokens>::run(sums, first, at);
    Wgmma<kTokens>::run(sums, second, at + 2);
    wgmma_commit();
  }

  // kParts strips of this warp, from `strip` of the tile on, times the tile's tokens. No wgmma is at work across a
  // branch: ptxas would make all of them wait for each other.
  template <int kTokens, int kParts>
  MOE_OPS_DEVICE void multiply(int strip) {
#pragma unroll
    for (int m = 0; m < kParts; ++m)
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i) c[m][i] = 0;
#pragma unroll 1
    for (int block = 0; block < p.full_blocks; ++block) {
      barrier_wait(ring.full(ring.slot), ring.phase);
      // The tensor cores read what came by cp.async.
      if (kFirst) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      uint32_t low[kParts][4], high[kParts][4], scales[kParts][2];
#pragma unroll
      for (int m = 0; m < kParts; ++m) {
        const uint32_t codes = ring.codes(strip + m) + lane * 16;
        const uint4 v = shared_load4(codes), w = shared_load4(codes + 512);
        low[m][0] = v.x, low[m][1] = v.y, low[m][2] = v.z, low[m][3] = v.w;
        high[m][0] = w.x, high[m][1] = w.y, high[m][2] = w.z, high[m][3] = w.w;
        const uint2 s = shared_load2(ring.scales(strip + m) + (lane >> 2) * 8);
        scales[m][0] = s.x, scales[m][1] = s.y;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int m = 0; m < kParts; ++m) {
          step<kTokens>(c[m], low[m][j], high[m][j], scales[m][j / 2] >> j % 2 * 16, j);
          if (j < 3 || m < kParts - 1) wgmma_wait<1>();
        }
      }
      wgmma_wait<0>();
      release(ring.slot);
      ring.advance();
      if (kTakeTurns && group == 0 && block == kLead - 1) let_follow();
    }
    if (p.tail_words > 0) {
      barrier_wait(ring.full(ring.slot), ring.phase);
      if (kFirst) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#pragma unroll
      for (int j = 0; j < 3; ++j) {
        if (j < p.tail_words) {
#pragma unroll
          for (int m = 0; m < kParts; ++m) {
            const uint32_t codes = ring.codes(strip + m) + j * 128 + lane * 4;
            step<kTokens>(c[m], shared_load1(codes), shared_load1(codes + p.tail_words * 128),
                          shared_load_half(ring.scales(strip + m) + ((lane >> 2) * p.tail_words + j) * 2), j);
            wgmma_wait<0>();
          }
        }
      }
      release(ring.slot);
      ring.advance();
    }
#pragma unroll
    for (int m = 0; m < kParts; ++m)
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i) asm volatile("" : "+f"(c[m][i])::"memory");
  }

  // A warpgroup without rows in the tile.
  MOE_OPS_DEVICE void pass() {
#pragma unroll 1
    for (int block = 0; block < p.blocks; ++block) {
      barrier_wait(ring.full(ring.slot), ring.phase);
      release(ring.slot);
      ring.advance();
    }
  }

  template <int kParts, int kTokens, int... kWider>
  MOE_OPS_DEVICE void multiply_any(int rows, int strip) {
    if constexpr (sizeof...(kWider) > 0) {
      if (rows > kTokens) return multiply_any<kParts, kWider...>(rows, strip);
    }
    multiply<kTokens, kParts>(strip);
  }

  // The sums of `parts` strips, from `strip` of the matrix on.
  MOE_OPS_DEVICE void store(const Tile& tile, int strip, int parts) const {
    const int g = lane >> 2, t = lane & 3;
    float low_bias[C::kParts], high_bias[C::kParts];
    bool present[C::kParts];
    char* to[C::kParts];
#pragma unroll
    for (int m = 0; m < C::kParts; ++m) {
      present[m] = m < parts && strip + m < p.strips;
      low_bias[m] = high_bias[m] = 0;
      if (present[m] && p.m.bias != nullptr) {
        const float* bias = p.m.bias + static_cast<int64_t>(tile.expert) * p.strips * 16;
        if (kFirst) {
          bias += ((strip + m) * 8 + g) * p.m.row_step;
          low_bias[m] = __ldg(bias + p.m.gate_offset), high_bias[m] = __ldg(bias + p.m.up_offset);
        } else {
          bias += (strip + m) * 16 + g;
          low_bias[m] = __ldg(bias), high_bias[m] = __ldg(bias + 8);
        }
      }
      if (kFirst) {
        // Eight columns are one 16-byte piece of a row of 64; after the exchange below a thread holds two of row g.
        const int64_t row = static_cast<int64_t>((strip + m) / 8) * p.m.num_rows + tile.first_row + g;
        to[m] = static_cast<char*>(p.m.output) + row * 128 + (((strip + m) % 8) ^ g) * 16 + t * 4;
      } else {
        const int64_t row = tile.first_row + 2 * t;
        to[m] = static_cast<char*>(p.m.output) + (row * (p.strips * 16) + (strip + m) * 16 + g) * 4;
      }
    }
    const int64_t row_bytes = kFirst ? 128 : static_cast<int64_t>(p.strips) * 64;
#pragma unroll
    for (int i = 0; i < C::kTokens / 8; ++i) {
      if (i * 8 >= tile.rows) break;
#pragma unroll
      for (int m = 0; m < C::kParts; ++m) {
        const float low[2] = {c[m][4 * i] + low_bias[m], c[m][4 * i + 1] + low_bias[m]};
        const float high[2] = {c[m][4 * i + 2] + high_bias[m], c[m][4 * i + 3] + high_bias[m]};
        if (kFirst) {
          const __nv_bfloat162 pair = __floats2bfloat162_rn(activate(low[0], high[0], p.m.oai, p.m.limit, p.m.alpha),
                                                            activate(low[1], high[1], p.m.oai, p.m.limit, p.m.alpha));
          uint32_t bits = *reinterpret_cast<const uint32_t*>(&pair);
          asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(bits));
          if (present[m] && i * 8 + g < tile.rows) *reinterpret_cast<uint32_t*>(to[m] + i * 1024) = bits;
        } else {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            if (!present[m] || i * 8 + 2 * t + h >= tile.rows) continue;
            __stcs(reinterpret_cast<float*>(to[m] + h * row_bytes), low[h]);
            __stcs(reinterpret_cast<float*>(to[m] + h * row_bytes) + 8, high[h]);
          }
          to[m] += 8 * row_bytes;
        }
      }
    }
  }

  MOE_OPS_DEVICE void run(int total) {
    int index = blockIdx.x;
    Tile next = index < total ? tile_at(p, index) : Tile{};
#pragma unroll 1
    while (index < total) {
      const Tile tile = next;
      index += gridDim.x;
      if (index < total) next = tile_at(p, index);
      if (kTakeTurns && group == 1) follow();
      const int first = tile.row_tile * kStrips, left = p.strips - first;
      if constexpr (C::kParts == 1) {
        const int strip = group * 4 + warp;
        if (group * 4 >= left) {
          pass();
          continue;
        }
        if constexpr (C::kTokens <= 64) {
          multiply_any<1, 8, 16, 24, 32, 40, 48, 56, 64>(tile.rows, strip);
        } else {
          multiply_any<1, 32, 48, 56, 64, 72, 80, 88, 96>(tile.rows, strip);
        }
        store(tile, first + strip, 1);
      } else {
        // The last tile may have so few rows that the warpgroups share one half of a full tile.
        const bool half = left <= kStrips / 2;
        const int strip = half ? group * 4 + warp : group * 8 + warp * 2;
        if (group * (half ? 4 : 8) >= left) {
          pass();
          continue;
        }
        if (half) {
          multiply_any<1, 64, 128, 152>(tile.rows, strip);
        } else {
          multiply_any<2, 32, 48, 64, 72, 80, 88, 96, 104, 112, 120, 128, 136, 144, 152>(tile.rows, strip);
        }
        store(tile, first + strip, half ? 1 : 2);
      }
    }
  }
};

}  // namespace
}  // namespace moe_ops::sm90
