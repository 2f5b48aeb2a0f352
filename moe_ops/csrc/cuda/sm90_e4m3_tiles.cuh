// A tile of the grouped matmul over e4m3 activations. See sm90_e4m3.cu; what it shares with the bf16 one is there.
#pragma once

#include "sm90_grouped_tiles.cuh"

namespace moe_ops::sm90 {
namespace {

// kGroups warpgroups compute kParts times 64 weight rows each, for up to kTokens tokens; one more fetches.
template <int kGroups_, int kParts_, int kTokens_, int kRegisters_, int kFetchRegisters_>
struct E4m3Config {
  static constexpr int kGroups = kGroups_, kParts = kParts_, kTokens = kTokens_;
  static constexpr int kRegisters = kRegisters_, kFetchRegisters = kFetchRegisters_;
  static_assert(kGroups * kParts * 4 == kStrips && kTokens % 8 == 0, "shape of a tile");
  static constexpr int kThreads = (kGroups + 1) * 128;
  static constexpr int kTokenBytes = kTokens * 128;  // of 128 k
  static constexpr int kStageBytes = kTokenBytes + kWeightBytes;
  static constexpr int kRoom = kSharedLimit - 2048 - 256;  // aligned, beside a table of 256 bytes and barriers
  static constexpr int kScaleBytes = kTokens * 4;          // of the tokens, of a tile
  static constexpr int kMost = (kRoom - kScaleBytes) / (kStageBytes + kScaleBytes);
  static constexpr int kStages = kMost < 8 ? kMost : 8;
  // The producer is at most kStages tiles ahead of the tile whose sums are being stored.
  static constexpr int kScaleSets = kStages + 1;
  static constexpr int kShared = 1024 + kStages * kStageBytes + kScaleSets * kScaleBytes + kStages * 16;
  static_assert(kStages >= 3 && kStageBytes % 1024 == 0, "stages");
};

struct E4m3Params {
  Params p;
  const float* row_scale;
};

// [tokens, 128 k][codes of kStrips strips][their scales]. Rows of tokens as in Ring.
template <class C>
struct E4m3Ring {
  uint32_t start;
  int slot = 0;
  uint32_t phase = 0;
  int set = 0;  // of the tokens' scales

  MOE_OPS_DEVICE uint32_t tokens() const { return start + slot * C::kStageBytes; }
  MOE_OPS_DEVICE uint32_t codes(int strip) const { return tokens() + C::kTokenBytes + strip * kBlockBytes; }
  MOE_OPS_DEVICE uint32_t scales(int strip) const { return codes(kStrips) + strip * kBlockScales; }
  MOE_OPS_DEVICE uint32_t token_scales() const { return start + C::kStages * C::kStageBytes + set * C::kScaleBytes; }
  MOE_OPS_DEVICE uint32_t full(int which) const {
    return start + C::kStages * C::kStageBytes + C::kScaleSets * C::kScaleBytes + which * 16;
  }
  MOE_OPS_DEVICE uint32_t empty(int which) const { return full(which) + 8; }
  MOE_OPS_DEVICE void advance() {
    if (++slot == C::kStages) slot = 0, phase ^= 1;
  }
  MOE_OPS_DEVICE void next_tile() {
    if (++set == C::kScaleSets) set = 0;
  }
};

MOE_OPS_DEVICE void copy4(uint32_t dst, const void* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(dst), "l"(src) : "memory");
}

template <class C, bool kFirst>
struct E4m3Producer {
  static constexpr int kCopies = (C::kTokens + 15) / 16;
  const Params& p;
  const float* row_scale;
  E4m3Ring<C> ring;
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
      const char* activations = static_cast<const char*>(p.m.activations) + column * 16;
      int rows[kCopies];
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int row = token + i * 16;
        rows[i] = -1;
        if (row < tile.rows)
          rows[i] = kFirst ? __ldg(p.m.row_slot + tile.first_row + row) / p.m.top_k : tile.first_row + row;
      }
#pragma unroll 1
      for (int block = 0; block < p.blocks; ++block) {
        const int words = block < p.full_blocks ? 4 : p.tail_words;
        barrier_wait(ring.empty(ring.slot), ring.phase ^ 1);
        if (block == 0) {
          for (int row = tid; row < tile.rows; row += 128)
            copy4(ring.token_scales() + row * 4, row_scale + tile.first_row + row);
        }
        if (piece < words * 16) {
#pragma unroll
          for (int i = 0; i < kStrips / 2; ++i)
            if (strip + 2 * i < count)
              copy16(ring.codes(strip + 2 * i) + piece * 16, codes + static_cast<int64_t>(2 * i) * p.strip_codes);
        }
        if (tid / 4 < count && tid % 4 < words) copy16(ring.scales(tid / 4) + tid % 4 * 16, scales);
        codes += kBlockBytes, scales += kBlockScales;
        if (column < words * 2) {
#pragma unroll
          for (int i = 0; i < kCopies; ++i)
            if (rows[i] >= 0)
              copy16(ring.tokens() + token_at + i * 2048, activations + static_cast<int64_t>(rows[i]) * p.m.k);
        }
        activations += 128;
        arrive_with_copies(ring.full(ring.slot));
        ring.advance();
      }
      ring.next_tile();
    }
  }
};

MOE_OPS_DEVICE uint32_t permute(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t v;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(v) : "r"(low), "r"(high), "r"(selector));
  return v;
}

// value | (bits & mask), left as it is: written in C++ the masked ones are put together first, by one more instruction.
template <uint32_t kMask>
MOE_OPS_DEVICE void take(uint32_t& value, uint32_t bits) {
  asm("lop3.b32 %0, %0, %1, %2, 0xF8;" : "+r"(value) : "r"(bits), "n"(kMask));
}

// Eight codes -> e4m3, by a table of the eight magnitudes times a power of two. `first`: codes 3 and 2 of the even and
// of the odd half, `second`: codes 1 and 0 (see layout.py); quantize_rows puts activations in the same order.
MOE_OPS_DEVICE void dequantize_e4m3(uint32_t codes, uint2 table, uint32_t& first, uint32_t& second) {
  const uint32_t shifted = codes >> 6, magnitudes = permute(codes, shifted, 0x6420);
  uint32_t selector = magnitudes & 0x07070707u;
  take<0x70707070u>(selector, magnitudes * 2);
  first = permute(table.x, table.y, selector);
  take<0x00800080u>(first, shifted), take<0x80008000u>(first, codes * 2);
  second = permute(table.x, table.y, selector >> 16);
  take<0x00800080u>(second, codes >> 5), take<0x80008000u>(second, codes);
}

template <class C, bool kFirst>
struct E4m3Consumer {
  const Params& p;
  const char* table;  // [16] magnitudes of all codes times 2^-8, 2^-7, ... in e4m3
  E4m3Ring<C> ring;
  int group, warp, lane;
  float c[C::kParts][C::kTokens / 2];
  uint32_t base[C::kParts];  // first scale codes of rows g and g + 8

  // As in Consumer.
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

  // Bytes of the table's entries for four scale codes that are at most kE4m3Below under and kE4m3Above over their base.
  MOE_OPS_DEVICE static uint32_t entries(uint32_t scales, uint32_t base) {
    return scales * 8 + (kE4m3Below * 8 * 0x01010101u - base * 8);
  }
  MOE_OPS_DEVICE uint2 entry(uint32_t at) const { return *reinterpret_cast<const uint2*>(table + (at & 0x78)); }

  // Weights of 32 k of one strip as operand A. `at`: entries of the strip's rows g and g + 8, the lower 16 bits.
  MOE_OPS_DEVICE void convert(uint32_t low, uint32_t high, uint32_t at, uint32_t (&a)[4]) const {
    dequantize_e4m3(low, entry(at), a[0], a[2]);
    dequantize_e4m3(high, entry(at >> 8), a[1], a[3]);
  }
  template <int kTokens>
  MOE_OPS_DEVICE void product(float* sums, const uint32_t (&a)[4], int j) const {
    const uint64_t tokens = (static_cast<uint64_t>(1) << 62) | (static_cast<uint64_t>(64) << 32) |
                            (static_cast<uint64_t>(1) << 16) | ((ring.tokens() & 0x3FFFF) >> 4);
    WgmmaE4m3<kTokens>::run(sums, a, tokens + j * 2);
  }

  template <int kTokens, int kParts>
  MOE_OPS_DEVICE void multiply(int strip) {
#pragma unroll
    for (int m = 0; m < kParts; ++m)
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i) c[m][i] = 0;
#pragma unroll 1
    for (int block = 0; block < p.full_blocks; ++block) {
      barrier_wait(ring.full(ring.slot), ring.phase);
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      uint32_t low[kParts][4], high[kParts][4], at[kParts][2];
#pragma unroll
      for (int m = 0; m < kParts; ++m) {
        const uint32_t codes = ring.codes(strip + m) + lane * 16;
        const uint4 v = shared_load4(codes), w = shared_load4(codes + 512);
        low[m][0] = v.x, low[m][1] = v.y, low[m][2] = v.z, low[m][3] = v.w;
        high[m][0] = w.x, high[m][1] = w.y, high[m][2] = w.z, high[m][3] = w.w;
        const uint2 s = shared_load2(ring.scales(strip + m) + (lane >> 2) * 8);
        if (block == 0) base[m] = permute(s.x, 0, 0x1010);
        at[m][0] = entries(s.x, base[m]), at[m][1] = entries(s.y, base[m]);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t a[kParts][4];
#pragma unroll
        for (int m = 0; m < kParts; ++m) convert(low[m][j], high[m][j], at[m][j / 2] >> j % 2 * 16, a[m]);
        wgmma_fence();
#pragma unroll
        for (int m = 0; m < kParts; ++m) product<kTokens>(c[m], a[m], j);
        wgmma_commit();
        if (j < 3) wgmma_wait<1>();
      }
      wgmma_wait<0>();
      release(ring.slot);
      ring.advance();
      if (kTakeTurns && group == 0 && block == kLead - 1) let_follow();
    }
    if (p.tail_words > 0) {
      barrier_wait(ring.full(ring.slot), ring.phase);
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#pragma unroll
      for (int j = 0; j < 3; ++j) {
        if (j < p.tail_words) {
#pragma unroll
          for (int m = 0; m < kParts; ++m) {
            const uint32_t codes = ring.codes(strip + m) + j * 128 + lane * 4;
            const uint32_t s = shared_load_half(ring.scales(strip + m) + ((lane >> 2) * p.tail_words + j) * 2);
            if (j == 0 && p.full_blocks == 0) base[m] = s * 0x00010001u;
            uint32_t a[4];
            convert(shared_load1(codes), shared_load1(codes + p.tail_words * 128),
                    entries(s | (base[m] & 0xFFFF0000u), base[m]), a);
            wgmma_fence();
            product<kTokens>(c[m], a, j);
            wgmma_commit();
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

  // Two tokens of one column in, two columns of one token out, as bf16.
  MOE_OPS_DEVICE static uint32_t exchange(float x, float y) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
    uint32_t bits = *reinterpret_cast<const uint32_t*>(&pair);
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(bits));
    return bits;
  }

  // The sums of C::kParts strips, from `strip` of the matrix on.
  MOE_OPS_DEVICE void store(const Tile& tile, int strip) const {
    const int g = lane >> 2, t = lane & 3;
    const int64_t width = p.strips * (kFirst ? 8 : 16);
    float low_bias[C::kParts], high_bias[C::kParts], low_power[C::kParts], high_power[C::kParts];
    bool present[C::kParts];
#pragma unroll
    for (int m = 0; m < C::kParts; ++m) {
      present[m] = strip + m < p.strips;
      low_power[m] = __uint_as_float((base[m] & 255) << 23),
      high_power[m] = __uint_as_float((base[m] >> 8 & 255) << 23);
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
    }
    // After the exchange a thread holds two columns of token g.
    const int64_t row = tile.first_row + g;
    char* to = static_cast<char*>(p.m.output) + (row * width + strip * (kFirst ? 8 : 16) + t * 2) * 2;
#pragma unroll
    for (int i = 0; i < C::kTokens / 8; ++i) {
      if (i * 8 >= tile.rows) break;
      const uint2 scales = shared_load2(ring.token_scales() + (i * 8 + t * 2) * 4);
      const float x = __uint_as_float(scales.x), y = __uint_as_float(scales.y);
#pragma unroll
      for (int m = 0; m < C::kParts; ++m) {
        const float* d = c[m] + 4 * i;
        const float low[2] = {d[0] * low_power[m] * x + low_bias[m], d[1] * low_power[m] * y + low_bias[m]};
        const float high[2] = {d[2] * high_power[m] * x + high_bias[m], d[3] * high_power[m] * y + high_bias[m]};
        const bool here = present[m] && i * 8 + g < tile.rows;
        if (kFirst) {
          const uint32_t bits = exchange(activate(low[0], high[0], p.m.oai, p.m.limit, p.m.alpha),
                                         activate(low[1], high[1], p.m.oai, p.m.limit, p.m.alpha));
          if (here) *reinterpret_cast<uint32_t*>(to + m * 16) = bits;
        } else {
          const uint32_t left = exchange(low[0], low[1]), right = exchange(high[0], high[1]);
          if (here) *reinterpret_cast<uint32_t*>(to + m * 32) = left;
          if (here) *reinterpret_cast<uint32_t*>(to + m * 32 + 16) = right;
        }
      }
      to += width * 16;
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
      const int strip = (group * 4 + warp) * C::kParts;
      if (group * 4 * C::kParts >= left) {
        pass();
        ring.next_tile();
        continue;
      }
      multiply_any<C::kParts, 32, 48, 64, 80, 96, 104, 112, 120, 128, 136, 144, 152>(tile.rows, strip);
      store(tile, first + strip);
      ring.next_tile();
    }
  }
};

}  // namespace
}  // namespace moe_ops::sm90
