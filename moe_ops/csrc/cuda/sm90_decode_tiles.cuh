// Activations of the decode kernel: from memory to fp16 fragments. See sm90_decode.cu.
#pragma once

#include "sm90_decode_route.cuh"

namespace moe_ops::sm90 {
namespace {

// One thread of the block: all blocks of the grid have come here, and what they wrote before is visible.
MOE_OPS_DEVICE void grid_barrier(unsigned* counter) {
  publish(counter, 1);
  wait_for(counter, gridDim.x);
}

// Loads a tile's activations as fp16 fragments, see place_fragments. A warp takes 128 k of one token, a lane 4 of them.
// kPhase 0: from hidden_states; 1: from the sums of the first matrix, which are activated on the way.
template <int kPhase>
struct TileLoader {
  const Params& p;
  const Shared& s;
  uint2 entry;
  int first_row;
  uint32_t activations;

  // hidden_states of piece `index` (token, block).
  MOE_OPS_DEVICE uint2 read(int index) {
    const Phase& ph = p.phase[0];
    const Problem& q = p.problem;
    const int token = index / ph.blocks, k = (index - token * ph.blocks) * 128 + (threadIdx.x & 31) * 4;
    if (token >= static_cast<int>(entry.x >> 24) || k >= ph.k) return make_uint2(0, 0);
    const int row = s.order[entry.y + token] / q.top_k;
    return load_constant2(static_cast<const char*>(q.hidden_states) + (row * q.hidden_stride + k) * 2);
  }

  // The first matrix's sums of piece `index`: both pieces of a sum, and whether there is a second one. All loads begin
  // at once; memory of a piece that does not exist is read and not used.
  struct Sums {
    float4 piece[2][2];
    int cut;
  };
  MOE_OPS_DEVICE Sums sums(int index) {
    const Problem& q = p.problem;
    const Phase& ph = p.phase[1];
    const int token = index / ph.blocks, k = (index - token * ph.blocks) * 128 + (threadIdx.x & 31) * 4;
    Sums v{};
    if (token >= static_cast<int>(entry.x >> 24) || k >= ph.k) return v;
    const int slot = s.order[entry.y + token];
    const float* from = p.gate_up + (static_cast<int64_t>(slot) * q.intermediate_size + k) * 2;
    const float* second = from + static_cast<int64_t>(q.num_tokens) * q.top_k * q.intermediate_size * 2;
    v.cut = load_l2_int(p.cut[0] + slot * p.phase[0].strips + k / 8);
    v.piece[0][0] = load_l2_float4(from), v.piece[0][1] = load_l2_float4(from + 4);
    v.piece[1][0] = load_l2_float4(second), v.piece[1][1] = load_l2_float4(second + 4);
    return v;
  }
  // Added, with biases, activated.
  MOE_OPS_DEVICE void activated(int index, const Sums& v, float (&f)[4]) {
    const Problem& q = p.problem;
    const Phase& ph = p.phase[1];
    const int token = index / ph.blocks, k = (index - token * ph.blocks) * 128 + (threadIdx.x & 31) * 4;
    if (k >= ph.k) return;
    float4 sum[2] = {v.piece[0][0], v.piece[0][1]};
    if (v.cut != 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float4 more = v.piece[1][i];
        sum[i].x += more.x, sum[i].y += more.y, sum[i].z += more.z, sum[i].w += more.w;
      }
    }
    if (q.w13_bias != nullptr) {
      const float* bias =
          q.w13_bias + static_cast<int64_t>(entry.x & 0xFFFFFF) * 2 * q.intermediate_size + k * q.row_step;
      const float *gate = bias + q.gate_offset, *up = bias + q.up_offset;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sum[i].x += __ldg(gate), sum[i].y += __ldg(up), gate += q.row_step, up += q.row_step;
        sum[i].z += __ldg(gate), sum[i].w += __ldg(up), gate += q.row_step, up += q.row_step;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      f[i] =
          activate(i & 1 ? sum[i / 2].z : sum[i / 2].x, i & 1 ? sum[i / 2].w : sum[i / 2].y, q.oai, q.limit, q.alpha);
  }

  MOE_OPS_DEVICE void place(int index, const float (&f)[4]) {
    const Phase& ph = p.phase[kPhase];
    const int token = index / ph.blocks, block = index - token * ph.blocks;
    int row = first_row + token;
    if (row >= ph.rows) row -= ph.rows;
    place_fragments(activations + row * ph.row_bytes, ph.blocks, block, threadIdx.x & 31, f);
  }

  // Pieces that a warp takes at once: their loads are in flight together.
  static constexpr int kAhead = kPhase == 0 ? 4 : 2;
  // Pieces first, first + step, ... before end, at most kAhead. `meanwhile` is called when loads are on their way.
  template <class Meanwhile>
  MOE_OPS_DEVICE void some(int first, int step, int end, Meanwhile&& meanwhile) {
    if (kPhase == 0) {
      uint2 raw[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) raw[j] = read(first + j * step);
      meanwhile();
#pragma unroll 1
      for (int j = 0; j < kAhead && first < end; ++j, first += step) {
        float f[4];
        widen(f, raw[0], p.problem.hidden_is_fp16);
        place(first, f);
#pragma unroll
        for (int n = 0; n + 1 < kAhead; ++n) raw[n] = raw[n + 1];
      }
    } else {
      Sums raw[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) raw[j] = sums(first + j * step);
#pragma unroll 1
      for (int j = 0; j < kAhead && first < end; ++j, first += step) {
        float f[4] = {0, 0, 0, 0};
        activated(first, raw[0], f);
        place(first, f);
#pragma unroll
        for (int n = 0; n + 1 < kAhead; ++n) raw[n] = raw[n + 1];
      }
    }
  }
  MOE_OPS_DEVICE int pieces() const { return (entry.x >> 24) * p.phase[kPhase].blocks; }

  // A fixed share: that of one of `warps` warps.
  template <class Meanwhile>
  MOE_OPS_DEVICE void run(int warp, int warps, Meanwhile&& meanwhile) {
    some(warp, warps, pieces(), meanwhile);
#pragma unroll 1
    for (int i = warp + kAhead * warps; i < pieces(); i += kAhead * warps) some(i, warps, pieces(), [] {});
  }
  // What no other warp has taken yet.
  MOE_OPS_DEVICE void share(int* next, int* done) {
    while (true) {
      int first = 0;
      if ((threadIdx.x & 31) == 0) first = atomicAdd(next, kAhead);
      first = uniform(first);
      const int end = min(first + kAhead, pieces());
      if (first >= end) return;
      some(first, 1, end, [] {});
      __syncwarp();
      if ((threadIdx.x & 31) == 0) add_release(done, end - first);
    }
  }
};

// The first tile of a phase, by all warps of the block.
template <int kPhase, class Meanwhile>
MOE_OPS_DEVICE void load_first(const Params& p, Shared& s, uint32_t activations, Meanwhile&& meanwhile) {
  const Range range = range_of(s, kPhase);
  if (range.begin == range.end) return meanwhile();
  const uint2 entry = s.tile[range.begin / p.phase[kPhase].units];
  TileLoader<kPhase>{p, s, entry, 0, activations}.run(threadIdx.x >> 5, kThreads / 32, meanwhile);
}

// A helper warp: the activations of the tiles that follow the first, as soon as there is room for them.
struct Helper {
  const Params& p;
  Shared& s;
  uint32_t activations;
  int tile_count = 0, ready_count = 0, oldest = 0;

  template <int which>
  MOE_OPS_DEVICE void run() {
    const Phase& ph = p.phase[which];
    const Range range = range_of(s, which);
    if (range.begin == range.end) return;
    const uint32_t first = range.begin / ph.units, last = (range.end - 1) / ph.units;
    uint32_t oldest_tile = first;
    ++tile_count;  // the first tile is everybody's
    int used = s.tile[first].x >> 24, row = used == ph.rows ? 0 : used;
#pragma unroll 1
    for (uint32_t tile = first + 1; tile <= last; ++tile, ++tile_count, ++ready_count) {
      const uint2 entry = s.tile[tile];
      const int tokens = entry.x >> 24, at = ready_count % kTileSlots;
      while (used + tokens > ph.rows || tile_count - oldest >= kTileSlots) {
        barrier_wait(smem_address(&s.tile_done[oldest % kTileSlots]), oldest / kTileSlots & 1);
        used -= s.tile[oldest_tile++].x >> 24;
        ++oldest;
      }
      named_barrier(1, kHelpers);  // nobody takes pieces of earlier tiles any more
      if (threadIdx.x == kConsumers) {
        if (which == 1) wait_for(p.tile_counters() + tile, p.phase[0].units);
        s.tile_row[at] = row;
        s.next_piece[at] = s.pieces_done[at] = 0;
        barrier_arrive(smem_address(&s.tile_open[at]));
      }
      barrier_wait(smem_address(&s.tile_open[at]), ready_count / kTileSlots & 1);
      TileLoader<which>{p, s, entry, row, activations}.share(&s.next_piece[at], &s.pieces_done[at]);
      used += tokens;
      row += tokens;
      if (row >= ph.rows) row -= ph.rows;
    }
    // Every use of a barrier is waited for before the next phase can come round to it.
    if (which == 0)
      for (; oldest < tile_count; ++oldest)
        barrier_wait(smem_address(&s.tile_done[oldest % kTileSlots]), oldest / kTileSlots & 1);
  }
};

// A consumer warp at a tile that is not the first: helps with what is left of its activations; when it returns they are
// there. Returns their row.
template <int kPhase>
MOE_OPS_DEVICE int finish_tile(const Params& p, Shared& s, uint2 entry, uint32_t activations, int ready_count) {
  const int at = ready_count % kTileSlots;
  barrier_wait(smem_address(&s.tile_open[at]), ready_count / kTileSlots & 1);
  const int row = s.tile_row[at];
  TileLoader<kPhase> loader{p, s, entry, row, activations};
  loader.share(&s.next_piece[at], &s.pieces_done[at]);
  while (load_acquire(&s.pieces_done[at]) < loader.pieces()) {
  }
  __syncwarp();
  return row;
}

}  // namespace
}  // namespace moe_ops::sm90
