// Weights of the decode kernel: a warp's stream of them, and the multiplication. See sm90_decode.cu.
#pragma once

#include "sm90_decode_tiles.cuh"

namespace moe_ops::sm90 {
namespace {

// A warp's own stream of weights: every stage of every unit of both phases, in the order in which it will use them.
struct Stream {
  const Params& p;
  Shared& s;
  uint32_t ring, bars;
  int warp;
  uint64_t policy;
  int phase = 0, tile = 0, unit = 0, block = 0, block_end = 0, slot = 0, left = 0;
  uint64_t codes = 0, scales = 0;

  MOE_OPS_DEVICE void enter() {
    const Phase& ph = p.phase[phase];
    const int strip = unit >> ph.parts_log2, part = unit & ((1 << ph.parts_log2) - 1);
    const int expert = s.tile[tile].x & 0xFFFFFF;
    block = part * ph.part_blocks;
    block_end = min(block + ph.part_blocks, ph.blocks);
    codes = uniform(reinterpret_cast<uint64_t>(ph.codes) + expert * ph.expert_codes +
                    static_cast<int64_t>(strip) * ph.strip_codes + block * kBlockBytes);
    scales = uniform(reinterpret_cast<uint64_t>(ph.scales) + expert * ph.expert_scales +
                     static_cast<int64_t>(strip) * ph.strip_scales + block * kBlockScales);
  }
  MOE_OPS_DEVICE void start_phase() {
    for (; phase < 2; ++phase) {
      const uint32_t units = p.phase[phase].units;
      const Range range = range_of(s, phase);
      const uint32_t first = range.begin + warp;
      if (first < range.end) {
        left = (range.end - first + kWarps - 1) / kWarps;
        tile = first / units;
        unit = first % units;
        enter();
        return;
      }
    }
  }
  // The next stage into the ring's next slot.
  MOE_OPS_DEVICE void issue() {
    if (phase == 2) return;
    const Phase& ph = p.phase[phase];
    const int end = min(block + kStageBlocks, block_end);
    const int full = min(end, ph.full_blocks) - block, tail = end > ph.full_blocks ? ph.tail_words : 0;
    const uint32_t code_bytes = full * kBlockBytes + tail * 256, scale_bytes = full * kBlockScales + tail * 16;
    const uint32_t bar = bars + slot * 8, dst = ring + slot * kStageBytes;
    if (elect_one()) {
      barrier_expect(bar, code_bytes + scale_bytes);
      bulk_load(dst, codes, code_bytes, bar, policy);
      bulk_load(dst + kStageBlocks * kBlockBytes, scales, scale_bytes, bar, policy);
    }
    codes += code_bytes, scales += scale_bytes;
    slot = slot + 1 == p.stages ? 0 : slot + 1;
    block = end;
    if (block == block_end) {
      if (--left == 0) {
        ++phase;
        start_phase();
      } else {
        unit += kWarps;
        while (unit >= ph.units) unit -= ph.units, ++tile;
        enter();
      }
    }
  }
};

// A lane's share of one block: codes of rows g and g + 8.
struct Block {
  uint4 low, high;
};
MOE_OPS_DEVICE void load_codes(Block& b, uint32_t at, bool full, int words, int lane) {
  if (full) {
    b.low = shared_load4(at + lane * 16);
    b.high = shared_load4(at + 512 + lane * 16);
    return;
  }
  // the last block of a strip, of fewer than 128 k: `words` groups
  b.low = b.high = make_uint4(0, 0, 0, 0);
  const uint32_t low = at + lane * 4, high = low + words * 128;
  b.low.x = shared_load1(low), b.high.x = shared_load1(high);
  if (words > 1) b.low.y = shared_load1(low + 128), b.high.y = shared_load1(high + 128);
  if (words > 2) b.low.z = shared_load1(low + 256), b.high.z = shared_load1(high + 256);
}

// d += 16 rows x 32 k of codes times activations.
MOE_OPS_DEVICE void multiply_group(float (&d)[4], uint32_t low, uint32_t high, uint4 x) {
  uint32_t a[4], b[4];
  dequantize(low, a);
  dequantize(high, b);
  mma_f16(d, d, a[0], b[0], a[1], b[1], x.x, x.y);
  mma_f16(d, d, a[2], b[2], a[3], b[3], x.z, x.w);
}

// Few tokens leave columns of the tensor-core tile free. They take the token's next groups of 32 k: with kGroups = 4,
// column 2j + n is token n's group j, zero elsewhere, so that four groups are summed before scales are applied, once.
// kGroups = 4 for 2 tokens, 2 for 4, 1 for 8. Every group's own sum is the same in all three.
template <int kGroups>
struct Columns {
  static constexpr int kTokens = 8 / kGroups;
  static MOE_OPS_DEVICE int token(int column) { return column % kTokens; }
  static MOE_OPS_DEVICE int group(int column) { return column / kTokens; }
};

// c += one block. x: this lane's column's fragments (of its own group if kGroups > 1), zero: 16 zero bytes, scales: the
// block's, [row 8][group 4][row half 2], or fewer groups (`words`) in a partial block.
template <int kGroups>
MOE_OPS_DEVICE void multiply_block(float (&c)[4], const Block& b, uint32_t x, uint32_t zero, uint32_t scales, int words,
                                   float back0, float back1, int g, int t) {
  const uint32_t low[4] = {b.low.x, b.low.y, b.low.z, b.low.w}, high[4] = {b.high.x, b.high.y, b.high.z, b.high.w};
  const int mine = Columns<kGroups>::group(g);
  float sum[4] = {0, 0, 0, 0};
#pragma unroll
  for (int first = 0; first < 4; first += kGroups) {
    const int j = first + Columns<kGroups>::group(2 * t);
    uint32_t pair = 0;
    if (j < words) pair = shared_load_half(scales + (g * words + j) * 2);
    float d[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < kGroups; ++i)
      multiply_group(d, low[first + i], high[first + i],
                     shared_load4(kGroups == 1 || mine == i ? x + (first + i) * 64 : zero));
    const float s0 = __uint_as_float((pair << 23) & 0x7F800000u), s1 = __uint_as_float((pair << 15) & 0x7F800000u);
    sum[0] = fmaf(d[0], s0, sum[0]), sum[1] = fmaf(d[1], s0, sum[1]);
    sum[2] = fmaf(d[2], s1, sum[2]), sum[3] = fmaf(d[3], s1, sum[3]);
  }
  c[0] = fmaf(sum[0], back0, c[0]), c[1] = fmaf(sum[1], back1, c[1]);
  c[2] = fmaf(sum[2], back0, c[2]), c[3] = fmaf(sum[3], back1, c[3]);
}

struct Consumer {
  const Params& p;
  Shared& s;
  Stream& stream;
  uint32_t activations;
  int warp, lane;
  int slot = 0;
  uint32_t parity = 0;

  // This warp's units of one tile, the first being `unit` (which moves on to the next tile's first).
  template <int kGroups>
  MOE_OPS_DEVICE void run_tile(int which, uint2 entry, int first_row, int& unit, int units) {
    using Cols = Columns<kGroups>;
    const Phase& ph = p.phase[which];
    const int g = lane >> 2, t = lane & 3, tokens = entry.x >> 24;
    // Columns beyond the tile's tokens repeat the last one and are not stored.
    auto row_of = [&](int token) {
      int row = first_row + min(token, tokens - 1);
      if (row >= ph.rows) row -= ph.rows;
      return activations + row * ph.row_bytes;
    };
    const uint32_t x_row = row_of(Cols::token(g)) + t * 16, zero = smem_address(s.zero);
    const uint32_t back0 = row_of(Cols::token(2 * t)) + ph.blocks * 256;
    const uint32_t back1 = row_of(Cols::token(2 * t + 1)) + ph.blocks * 256;
    for (; unit < units; unit += kWarps) {
      const int strip = unit >> ph.parts_log2, part = unit & ((1 << ph.parts_log2) - 1);
      int block = part * ph.part_blocks;
      const int block_end = min(block + ph.part_blocks, ph.blocks);
      float c[4] = {0, 0, 0, 0};
      for (; block < block_end; block += kStageBlocks) {
        barrier_wait(stream.bars + slot * 8, parity);
        const uint32_t codes = stream.ring + slot * kStageBytes, scales = codes + kStageBlocks * kBlockBytes;
        Block raw[2];
#pragma unroll
        for (int i = 0; i < kStageBlocks; ++i) {
          if (block + i >= block_end) break;
          if (i % 2 == 0) {
            load_codes(raw[0], codes + i * kBlockBytes, block + i < ph.full_blocks, ph.tail_words, lane);
            if (block + i + 1 < block_end)
              load_codes(raw[1], codes + (i + 1) * kBlockBytes, block + i + 1 < ph.full_blocks, ph.tail_words, lane);
          }
          const int at = block + i, words = at < ph.full_blocks ? 4 : ph.tail_words;
          multiply_block<kGroups>(c, raw[i % 2], x_row + at * 256, zero, scales + i * kBlockScales, words,
                                  shared_load_float(back0 + at * 4), shared_load_float(back1 + at * 4), g, t);
        }
        __syncwarp();
        stream.issue();
        if (++slot == p.stages) slot = 0, parity ^= 1;
      }
      if (kGroups == 4) {
#pragma unroll
        for (int i = 0; i < 4; ++i) c[i] += __shfl_xor_sync(~0u, c[i], 1);
      }
      if (kGroups >= 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) c[i] += __shfl_xor_sync(~0u, c[i], 2);
      }
      if (Cols::group(2 * t) != 0) continue;
      // Rows g and g + 8 of the strip for tokens 2t and 2t + 1.
      const int slots = p.problem.num_tokens * p.problem.top_k;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (2 * t + h >= tokens) break;
        const int64_t row = part * slots + s.order[entry.y + 2 * t + h];
        if (which == 0) {
          reinterpret_cast<float2*>(p.gate_up)[row * p.problem.intermediate_size + strip * 8 + g] =
              make_float2(c[h], c[2 + h]);
        } else {
          float* out = p.down + row * p.problem.hidden_size + strip * 16 + g;
          out[0] = c[h];
          out[8] = c[2 + h];
        }
      }
    }
    unit -= units;
  }

  MOE_OPS_DEVICE void run() {
    int tile_count = 0, ready_count = 0;
    for (int which = 0; which < 2; ++which) {
      if (which == 1) {
        barrier_wait(smem_address(&s.next_phase), 0);
        load_first<1>(p, s, activations, [] {});
      }
      const uint32_t units = p.phase[which].units;
      const Range range = range_of(s, which);
      int unit = range.begin % units + warp;
      const uint32_t first = range.begin / units;
      for (uint32_t tile = first; range.begin < range.end && tile * units < range.end; ++tile, ++tile_count) {
        const uint2 entry = s.tile[tile];
        int first_row = 0;
        if (tile == first) {
          barrier_wait(smem_address(&s.first_ready[which]), 0);
        } else {
          barrier_wait(smem_address(&s.tile_ready[ready_count % kTileSlots]), ready_count / kTileSlots & 1);
          first_row = s.tile_row[ready_count % kTileSlots];
          ++ready_count;
        }
        const int tokens = entry.x >> 24, end = min(units, range.end - tile * units);
        if (tokens <= 2 && !p.one_order)
          run_tile<4>(which, entry, first_row, unit, end);
        else if (tokens <= 4 && !p.one_order)
          run_tile<2>(which, entry, first_row, unit, end);
        else
          run_tile<1>(which, entry, first_row, unit, end);
        __syncwarp();
        if (lane == 0) barrier_arrive(smem_address(&s.tile_done[tile_count % kTileSlots]));
      }
      if (which == 0) {
        __threadfence();
        __syncwarp();
        if (lane == 0) barrier_arrive(smem_address(&s.phase_done));
      }
    }
  }
};

}  // namespace
}  // namespace moe_ops::sm90
