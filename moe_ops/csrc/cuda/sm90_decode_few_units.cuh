// Weights of the decode kernel for few tokens: a warp's stream of them, and the multiplication. See sm90_decode_few.cu.
#pragma once

#include "sm90_decode_few_route.cuh"

namespace moe_ops::sm90 {
namespace {

// The biases of hidden value k of an expert: of its gate row and of its up row.
MOE_OPS_DEVICE float2 hidden_bias(const Problem& q, int expert, int k) {
  if (q.w13_bias == nullptr) return make_float2(0, 0);
  const float* bias = q.w13_bias + static_cast<int64_t>(expert) * 2 * q.intermediate_size + k * q.row_step;
  return make_float2(__ldg(bias + q.gate_offset), __ldg(bias + q.up_offset));
}

struct Warp {
  const Params& p;
  Shared& s;
  uint32_t activations;
  int warp, lane, stages;
  uint32_t ring, bars;
  uint64_t policy;
  // The stream: the segment that is being fetched, what is left of it, and the ring's next slot.
  uint64_t codes = 0, scales = 0;
  uint32_t left = 0, next_block = 0;
  int segment = -1, next_slot = 0;
  // What is multiplied.
  int slot = 0;
  uint32_t parity = 0;

  // The warp's share of the block's units of both matrices: all four segments at once, a lane each.
  MOE_OPS_DEVICE void find_segments() {
    if (lane < 4) {
      const Matrix& m = s.matrix[lane >> 1];
      const uint32_t low = s.bound[lane & 2], share = s.bound[(lane & 2) + 1] - low;
      uint32_t begin = low + share * warp / kWarps, end = low + share * (warp + 1) / kWarps;
      uint32_t tile = m.by_units.of(begin);
      const uint32_t next = (tile + 1) * m.units;
      if (lane & 1)
        begin = max(begin, next), ++tile;
      else
        end = min(end, next);
      Segment d{};
      if (begin < end) {
        d.begin = begin - tile * m.units;
        d.count = end - begin;
        d.tile = tile;
        const uint32_t strip = m.by_blocks.of(d.begin), expert = s.tile_expert[tile];
        d.block = d.begin - strip * m.blocks;
        d.codes = reinterpret_cast<uint64_t>(m.codes) + expert * m.expert_codes + strip * m.strip_codes +
                  d.block * kBlockBytes;
        d.scales = reinterpret_cast<uint64_t>(m.scales) + expert * m.expert_scales + strip * m.strip_scales +
                   d.block * kBlockScales;
      }
      s.segment[warp][lane] = d;
    }
    __syncwarp();
  }

  // The next stage into the ring's next slot. Strips of an expert follow one another in memory.
  MOE_OPS_DEVICE void issue() {
    while (left == 0) {
      if (segment == 3) return;
      const Segment& d = s.segment[warp][++segment];
      left = d.count, next_block = d.block, codes = d.codes, scales = d.scales;
    }
    const Matrix& m = s.matrix[segment >> 1];
    const uint32_t n = min(static_cast<uint32_t>(p.stage_blocks), left);
    uint32_t words = n * 4;
    left -= n;
    next_block += n;
    if (next_block >= m.blocks) {
      next_block -= m.blocks;
      if (m.tail_words != 0) words -= 4 - m.tail_words;
    }
    const uint32_t bar = bars + next_slot * 8, to = ring + next_slot * p.stage_bytes;
    if (elect_one()) {
      barrier_expect(bar, words * (256 + 16));
      bulk_load(to, codes, words * 256, bar, policy);
      bulk_load(to + p.stage_blocks * kBlockBytes, scales, words * 16, bar, policy);
    }
    codes += words * 256, scales += words * 16;
    next_slot = next_slot + 1 == stages ? 0 : next_slot + 1;
  }

  // A strip's sums over the k that this block of the grid has of it, to memory: the first of two pieces, or the second.
  MOE_OPS_DEVICE void store(int which, uint32_t tile, uint32_t strip, bool second, bool cut, const float (&c)[4]) {
    const Problem& q = p.problem;
    const int g = lane >> 2, t = lane & 3, slots = q.num_tokens * q.top_k, tokens = s.count[tile];
    const int k = strip * 8 + g;
    float2 bias = make_float2(0, 0);
    if (which == 0 && !second && !cut) bias = hidden_bias(q, s.tile_expert[tile], k);
    // Rows g and g + 8 of the strip for tokens 2t and 2t + 1.
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (2 * t + h >= tokens) break;
      const int at = s.order[tile * kTokens + 2 * t + h];
      const int64_t row = second ? slots + at : at;
      if (which == 1) {
        float* out = p.down + row * q.hidden_size + strip * 16 + g;
        out[0] = c[h];
        out[8] = c[2 + h];
        if (g == 0 && !second) p.cut[at * p.matrix[1].strips + strip] = cut;
      } else if (second || cut) {
        reinterpret_cast<float2*>(p.pieces)[row * q.intermediate_size + k] = make_float2(c[h], c[2 + h]);
      } else {
        p.hidden[row * q.intermediate_size + k] = activate(c[h] + bias.x, c[2 + h] + bias.y, q.oai, q.limit, q.alpha);
      }
    }
  }

  // What this warp has found of a strip, up to unit `end` of the tile. `begun`: the strip's first unit was this warp's.
  template <int kGroups>
  MOE_OPS_DEVICE void finish(int which, uint32_t tile, uint32_t strip, uint32_t end, bool begun, float (&c)[4]) {
    const Matrix& m = s.matrix[which];
    add_groups<kGroups>(c);
    const uint32_t low = s.bound[2 * which], high = s.bound[2 * which + 1], share = high - low;
    if (!begun && low + share * warp / kWarps != low) {
      // A warp before this one has begun it, and adds what this one gives.
      s.part[which][warp][lane] = make_float4(c[0], c[1], c[2], c[3]);
      __syncwarp();
      if (lane == 0) barrier_arrive(smem_address(&s.part_ready[which][warp]));
      return;
    }
    const uint32_t strip_end = tile * m.units + (strip + 1) * m.blocks, mine = min(strip_end, high);
    uint32_t at = tile * m.units + end;
#pragma unroll 1
    for (int other = warp + 1; at < mine; ++other) {
      const uint32_t next = low + share * (other + 1) / kWarps;
      if (next == at) continue;
      at = next;
      barrier_wait(smem_address(&s.part_ready[which][other]), 0);
      const float4 more = s.part[which][other][lane];
      c[0] += more.x, c[1] += more.y, c[2] += more.z, c[3] += more.w;
    }
    if (Columns<kGroups>::group(2 * (lane & 3)) == 0) store(which, tile, strip, !begun, strip_end > high, c);
  }

  template <int kGroups>
  MOE_OPS_DEVICE void run_segment(int which, const Segment& d) {
    using Cols = Columns<kGroups>;
    const Matrix& m = s.matrix[which];
    const int g = lane >> 2, t = lane & 3;
    const uint32_t blocks = m.blocks, full_blocks = m.full_blocks, tail_words = m.tail_words, tile = d.tile;
    const uint32_t first_tile = m.by_units.of(s.bound[2 * which]);
    const int tokens = s.count[tile], before = which == 1 && tile != first_tile ? s.count[first_tile] : 0;
    uint32_t remaining = uniform(d.count), block = uniform(d.block), strip = m.by_blocks.of(uniform(d.begin));
    // Activations of the first matrix lie by token, of the second one by tile. Columns beyond the tile's tokens repeat
    // the last one and are not stored.
    auto row_of = [&](int column) {
      const int n = min(Cols::token(column), tokens - 1);
      const int row = which == 0 ? p.by_top_k.of(s.order[tile * kTokens + n]) : before + n;
      return activations + row * m.row_bytes;
    };
    uint32_t x = row_of(g) + t * 16 + block * 256;
    uint32_t back0 = row_of(2 * t) + (blocks * 64 + block) * 4, back1 = row_of(2 * t + 1) + (blocks * 64 + block) * 4;
    bool begun = block == 0;
    uint32_t in_stage = 0, from = 0, from_scales = 0;
    float c[4] = {0, 0, 0, 0};
    uint4 v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = make_uint4(0, 0, 0, 0);
#pragma unroll 1
    while (true) {
      if (in_stage == 0) {
        barrier_wait(bars + slot * 8, parity);
        in_stage = min(static_cast<uint32_t>(p.stage_blocks), remaining);
        from = ring + slot * p.stage_bytes, from_scales = from + p.stage_blocks * kBlockBytes;
      }
      uint32_t words = 4;
      Block raw;
      if (block < full_blocks)
        load_full(raw, from, lane);
      else
        load_partial(raw, from, words = tail_words, lane);
      multiply_block<kGroups, false>(c, raw, x, from_scales, words, shared_load_float(back0), shared_load_float(back1),
                                     g, t, v);
      from += words * 256, from_scales += words * 16;
      x += 256, back0 += 4, back1 += 4;
      ++block, --remaining;
      if (--in_stage == 0) {
        __syncwarp();
        issue();
        if (++slot == stages) slot = 0, parity ^= 1;
      }
      if (block == blocks || remaining == 0) {
        finish<kGroups>(which, tile, strip, d.begin + d.count - remaining, begun, c);
        if (remaining == 0) return;
        ++strip;
        x -= block * 256, back0 -= block * 4, back1 -= block * 4;
        block = 0;
        begun = true;
#pragma unroll
        for (int i = 0; i < 4; ++i) c[i] = 0;
      }
    }
  }

  // All of this warp's work of a matrix. kMany: a tile may have more than two tokens.
  template <bool kMany>
  MOE_OPS_DEVICE void run(int which) {
#pragma unroll 1
    for (int part = 0; part < 2; ++part) {
      const Segment& d = s.segment[warp][2 * which + part];
      if (uniform(d.count) == 0) continue;
      if (kMany && s.count[d.tile] > 2)
        run_segment<1>(which, d);
      else
        run_segment<4>(which, d);
    }
  }
};

}  // namespace
}  // namespace moe_ops::sm90
