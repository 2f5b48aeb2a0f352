// Weights of the decode kernel: a warp's stream of them, and the multiplication. See sm90_decode.cu.
#pragma once

#include "sm90_decode_tiles.cuh"

namespace moe_ops::sm90 {
namespace {

// Most blocks of a warp's n-th stage. The first ones of a small batch are small, so that all warps soon have work.
MOE_OPS_DEVICE int stage_limit(const Params& p, const Phase& ph, int n) {
  return n < 3 ? min(p.first_blocks << n, ph.stage_blocks) : ph.stage_blocks;
}

// A warp's own stream of weights: every stage of its shares of both phases, in the order in which it will use them.
// Strips of an expert follow one another in memory, so that a share of a tile is one run of bytes.
struct Stream {
  const Params& p;
  Shared& s;
  uint32_t ring, bars;
  int warp;
  uint64_t policy;
  uint32_t tile = 0;
  int phase = 2, block = 0, left = 0, slot = 0, issued = 0;  // left: blocks of the tile's share to come
  uint64_t codes = 0, scales = 0;

  // The next share that is not empty, from `tile` on.
  MOE_OPS_DEVICE void enter() {
    for (; phase < 2; ++phase, begin_phase()) {
      const Phase& ph = p.phase[phase];
      const Range range = range_of(s, phase);
      for (; tile * ph.units < range.end; ++tile) {
        const Range part = range.of_tile(tile, ph.units);
        const uint32_t begin = part.cut(p, ph, warp);
        left = part.cut(p, ph, warp + 1) - begin;
        if (left == 0) continue;
        const int expert = s.tile[tile].x & 0xFFFFFF, strip = begin / ph.blocks;
        block = begin - strip * ph.blocks;
        codes = uniform(reinterpret_cast<uint64_t>(ph.codes) + expert * ph.expert_codes +
                        static_cast<int64_t>(strip) * ph.strip_codes + block * kBlockBytes);
        scales = uniform(reinterpret_cast<uint64_t>(ph.scales) + expert * ph.expert_scales +
                         static_cast<int64_t>(strip) * ph.strip_scales + block * kBlockScales);
        return;
      }
    }
  }
  MOE_OPS_DEVICE void begin_phase() {
    if (phase < 2) tile = range_of(s, phase).begin / p.phase[phase].units;
  }
  MOE_OPS_DEVICE void start() {
    phase = 0;
    begin_phase();
    enter();
  }
  // The next stage into the ring's next slot.
  MOE_OPS_DEVICE void issue() {
    if (phase == 2) return;
    const Phase& ph = p.phase[phase];
    const int end = block + min(min(stage_limit(p, ph, issued), left), ph.blocks - block);
    ++issued;
    const int full = min(end, ph.full_blocks) - block, tail = end > ph.full_blocks ? ph.tail_words : 0;
    const uint32_t code_bytes = full * kBlockBytes + tail * 256, scale_bytes = full * kBlockScales + tail * 16;
    const uint32_t bar = bars + slot * 8, dst = ring + slot * p.stage_bytes();
    if (elect_one()) {
      barrier_expect(bar, code_bytes + scale_bytes);
      bulk_load(dst, codes, code_bytes, bar, policy);
      bulk_load(dst + p.stage_room * kBlockBytes, scales, scale_bytes, bar, policy);
    }
    codes += code_bytes, scales += scale_bytes;
    slot = slot + 1 == p.stages ? 0 : slot + 1;
    left -= end - block;
    block = end == ph.blocks ? 0 : end;
    if (left == 0) {
      ++tile;
      enter();
    }
  }
};

// The same where scale codes are 0 to 255: 2^-127 to 2^127 and NaN. Sums meet their scales in two exact steps, neither
// of which leaves float32 unless the result does; a weight past float32 is infinite, as it is there.
MOE_OPS_DEVICE void to_infinity(uint32_t (&pairs)[4], uint32_t scale) {
  if (scale < 253) return;
#pragma unroll
  for (uint32_t& pair : pairs) {
    uint32_t past = pair & 0x08000800u;                 // 2 and more, which 2^127 takes to 2^128
    if (scale == 253) past &= pair << 1 & 0x08000800u;  // 4 and more
    past >>= 11;
    pair = (pair & ~(past * 0x7FFFu)) | past * 0x7C00u;
  }
}
MOE_OPS_DEVICE float scaled(float v, uint32_t scale, uint32_t back) {
  if (scale == 255) return __uint_as_float(0x7FC00000u);
  const int exponent = static_cast<int>(scale + back) - 254, half = exponent >> 1;
  return v * __int_as_float((half + 127) << 23) * __int_as_float((exponent - half + 127) << 23);
}
MOE_OPS_DEVICE void multiply_block_all_scales(float (&c)[4], const Block& b, uint32_t x, uint32_t scales, int words,
                                              uint32_t back0, uint32_t back1, int g) {
  const uint32_t low[4] = {b.low.x, b.low.y, b.low.z, b.low.w}, high[4] = {b.high.x, b.high.y, b.high.z, b.high.w};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (j >= words) break;
    const uint32_t pair = shared_load_half(scales + (g * words + j) * 2), first = pair & 255, second = pair >> 8;
    const uint4 v = shared_load4(x + j * 64);
    uint32_t a[4], z[4];
    dequantize(low[j], a);
    dequantize(high[j], z);
    to_infinity(a, first);
    to_infinity(z, second);
    float d[4] = {0, 0, 0, 0};
    mma_f16(d, d, a[0], z[0], a[1], z[1], v.x, v.y);
    mma_f16(d, d, a[2], z[2], a[3], z[3], v.z, v.w);
    c[0] += scaled(d[0], first, back0 >> 23), c[1] += scaled(d[1], first, back1 >> 23);
    c[2] += scaled(d[2], second, back0 >> 23), c[3] += scaled(d[3], second, back1 >> 23);
  }
}

template <bool kAllScales>
struct Consumer {
  const Params& p;
  Shared& s;
  Stream& stream;
  uint32_t activations;
  int warp, lane;
  int slot = 0;
  uint32_t parity = 0;
  int tile_count = 0, ready_count = 0, taken = 0;

  // A strip's sums over the k that this block of the grid has of it, to memory: the first of two pieces, or the second.
  MOE_OPS_DEVICE void store(int which, uint2 entry, int strip, bool second, bool cut, const float (&c)[4]) {
    const Phase& ph = p.phase[which];
    const int g = lane >> 2, t = lane & 3, tokens = entry.x >> 24, slots = p.problem.num_tokens * p.problem.top_k;
    // Rows g and g + 8 of the strip for tokens 2t and 2t + 1.
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (2 * t + h >= tokens) break;
      const int at = s.order[entry.y + 2 * t + h];
      const int64_t row = second ? slots + at : at;
      if (which == 0) {
        reinterpret_cast<float2*>(p.gate_up)[row * p.problem.intermediate_size + strip * 8 + g] =
            make_float2(c[h], c[2 + h]);
      } else {
        float* out = p.down + row * p.problem.hidden_size + strip * 16 + g;
        out[0] = c[h];
        out[8] = c[2 + h];
      }
      if (g == 0 && !second) p.cut[which][at * ph.strips + strip] = cut;
    }
  }

  // This warp's share of one tile: `left` blocks from `begin` on. `all`: the block's part of the tile. `give`: the
  // first strip was begun by a warp before, which adds what this one finds.
  template <int kGroups>
  MOE_OPS_DEVICE void run_tile(int which, uint2 entry, int first_row, Range all, uint32_t begin, int left, bool give) {
    using Cols = Columns<kGroups>;
    const Phase& ph = p.phase[which];
    const int g = lane >> 2, t = lane & 3, tokens = entry.x >> 24;
    const uint32_t parts = smem_address(&s.part_ready[tile_count & 1][0]);
    int strip = begin / ph.blocks, block = begin - strip * ph.blocks;
    // Columns beyond the tile's tokens repeat the last one and are not stored.
    auto row_of = [&](int token) {
      int row = first_row + min(token, tokens - 1);
      if (row >= ph.rows) row -= ph.rows;
      return activations + row * ph.row_bytes;
    };
    const uint32_t x_row = row_of(Cols::token(g)) + t * 16;
    const uint32_t back0 = row_of(Cols::token(2 * t)) + ph.blocks * 256;
    const uint32_t back1 = row_of(Cols::token(2 * t + 1)) + ph.blocks * 256;
    int from = block;
    float c[4] = {0, 0, 0, 0};
    uint4 v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = make_uint4(0, 0, 0, 0);
    while (true) {
      const int end = block + min(min(stage_limit(p, ph, taken), left), ph.blocks - block);
      ++taken;
      barrier_wait(stream.bars + slot * 8, parity);
      uint32_t codes = stream.ring + slot * p.stage_bytes(), scales = codes + p.stage_room * kBlockBytes;
      const int full = min(end, ph.full_blocks) - block;
      Block raw[2];
      if (kAllScales) {
#pragma unroll 1
        for (int at = block; at < end; ++at, codes += kBlockBytes, scales += kBlockScales) {
          const int words = at < ph.full_blocks ? 4 : ph.tail_words;
          if (words == 4)
            load_full(raw[0], codes, lane);
          else
            load_partial(raw[0], codes, words, lane);
          multiply_block_all_scales(c, raw[0], x_row + at * 256, scales, words, shared_load1(back0 + at * 4),
                                    shared_load1(back1 + at * 4), g);
        }
      } else {
#pragma unroll
        for (int i = 0; i < kStageBlocks; ++i) {
          if (i >= full) break;
          if (i % 2 == 0) {
            load_full(raw[0], codes + i * kBlockBytes, lane);
            if (i + 1 < full) load_full(raw[1], codes + (i + 1) * kBlockBytes, lane);
          }
          const int at = block + i;
          multiply_block<kGroups, true>(c, raw[i % 2], x_row + at * 256, scales + i * kBlockScales, 4,
                                        shared_load_float(back0 + at * 4), shared_load_float(back1 + at * 4), g, t, v);
        }
        if (end > ph.full_blocks) {
          const int at = ph.full_blocks;
          load_partial(raw[0], codes + full * kBlockBytes, ph.tail_words, lane);
          multiply_block<kGroups, false>(c, raw[0], x_row + at * 256, scales + full * kBlockScales, ph.tail_words,
                                         shared_load_float(back0 + at * 4), shared_load_float(back1 + at * 4), g, t, v);
        }
      }
      __syncwarp();
      stream.issue();
      if (++slot == p.stages) slot = 0, parity ^= 1;
      left -= end - block;
      block = end;
      if (block < ph.blocks && left > 0) continue;

      add_groups<kGroups>(c);
      if (give) {
        s.part[tile_count & 1][warp][lane] = make_float4(c[0], c[1], c[2], c[3]);
        __syncwarp();
        if (lane == 0) barrier_arrive(parts + warp * 8);
        give = false;
      } else {
        const uint32_t strip_end = (strip + 1) * ph.blocks, mine = min(strip_end, all.end);
        uint32_t at = strip * ph.blocks + block;
        for (int other = warp + 1; at < mine; ++other) {
          const uint32_t next = all.cut(p, ph, other + 1);
          if (next == at) continue;
          at = next;
          barrier_wait(parts + other * 8, tile_count >> 1 & 1);
          const float4 more = s.part[tile_count & 1][other][lane];
          c[0] += more.x, c[1] += more.y, c[2] += more.z, c[3] += more.w;
        }
        if (Cols::group(2 * t) == 0) store(which, entry, strip, from != 0, strip_end > all.end, c);
      }
      if (left == 0) return;
      ++strip;
      block = from = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) c[i] = 0;
    }
  }

  // One tile of phase `which`.
  MOE_OPS_DEVICE void tile(int which, uint2 entry, int first_row, Range all, uint32_t begin, int left, bool give) {
    const int tokens = entry.x >> 24;
    if (!kAllScales && tokens <= 2 && !p.one_order)
      run_tile<4>(which, entry, first_row, all, begin, left, give);
    else if (!kAllScales && tokens <= 4 && !p.one_order)
      run_tile<2>(which, entry, first_row, all, begin, left, give);
    else
      run_tile<1>(which, entry, first_row, all, begin, left, give);
  }

  // All of this warp's work of a phase.
  MOE_OPS_DEVICE void run(int which) {
    const Phase& ph = p.phase[which];
    const Range range = range_of(s, which);
    const uint32_t first = range.begin / ph.units;
#pragma unroll 1
    for (uint32_t at = first; range.begin < range.end && at * ph.units < range.end; ++at, ++tile_count) {
      const uint2 entry = s.tile[at];
      int first_row = 0;
      if (at == first) {
        barrier_wait(smem_address(&s.first_ready[which]), 0);
      } else {
        first_row = which == 0 ? finish_tile<0>(p, s, entry, activations, ready_count)
                               : finish_tile<1>(p, s, entry, activations, ready_count);
        ++ready_count;
      }
      // `part` is used again: everybody is through with the tile before the last.
      const int before = tile_count - 2;
      if (before >= 0) barrier_wait(smem_address(&s.tile_done[before % kTileSlots]), before / kTileSlots & 1);
      const Range all = range.of_tile(at, ph.units);
      const uint32_t begin = all.cut(p, ph, warp);
      const int left = all.cut(p, ph, warp + 1) - begin;
      const bool give = left > 0 && begin % ph.blocks != 0 && begin != all.begin;
      if (!give && lane == 0) barrier_arrive(smem_address(&s.part_ready[tile_count & 1][warp]));
      if (left > 0) tile(which, entry, first_row, all, begin, left, give);
      __syncwarp();
      if (lane == 0) barrier_arrive(smem_address(&s.tile_done[tile_count % kTileSlots]));
    }
  }
};

}  // namespace
}  // namespace moe_ops::sm90
