// Structures of the decode kernel, and how every block finds out what it has to do. See sm90_decode.cu.
#pragma once

#include "sm90_decode_common.cuh"

namespace moe_ops::sm90 {
namespace {

constexpr int kWarps = 12, kHelperWarps = 4;
constexpr int kConsumers = kWarps * 32, kHelpers = kHelperWarps * 32, kThreads = kConsumers + kHelpers;
constexpr int kTileTokens = 8;
constexpr int kStageBlocks = 5;  // most blocks that arrive together
constexpr int kMaxStages = 8;    // of one warp
constexpr int kTileSlots = 4;    // tiles whose activations may be in shared memory
constexpr int kSmallSlots = 16;  // batches whose launch begins with short stages

struct Phase {
  const uint8_t *codes, *scales;
  int64_t expert_codes, expert_scales;     // bytes of one expert
  int strip_codes, strip_scales;           // bytes of one strip
  int strips, units;                       // of one tile; units = strips * blocks
  int k, full_blocks, blocks, tail_words;  // tail_words: 32-k groups of the last, partial block
  int stage_blocks;                        // of this phase's stages
  int row_bytes, rows;                     // activations of a token in shared memory, and room for how many
};

struct Params {
  Problem problem;
  Phase phase[2];
  float *gate_up, *down;  // sums over k: [piece 2][slot][...]
  int* cut[2];            // [slot][strip]: whether the strip's sum has a second piece
  unsigned* counters;
  int stages, stage_room;  // of a ring, and the blocks that a stage has room for
  int first_blocks;        // of a launch's first stage
  int tile_tokens;
  bool one_order;  // the same order of sums for every number of tokens: no strip is cut

  // Per tile: how much of the first matrix is there.
  MOE_OPS_DEVICE unsigned* tile_counters() const { return counters + 4; }
  MOE_OPS_DEVICE int stage_bytes() const { return stage_room * (kBlockBytes + kBlockScales); }
};

struct alignas(128) Shared {
  uint64_t arrived[kWarps][kMaxStages];  // weights
  uint64_t tile_open[kTileSlots], tile_done[kTileSlots];
  uint64_t first_ready[2];  // the first tile of a phase, which all warps load
  uint64_t part_ready[2][kWarps];
  uint64_t phase_done, next_phase;
  int tile_row[kTileSlots];
  int next_piece[kTileSlots], pieces_done[kTileSlots];  // of a tile's activations
  int tiles;
  uint32_t bound[4];             // this block's units: first and end of both phases
  uint32_t cost[kDecodeSlots];   // of the tiles before
  float weight[kDecodeSlots];    // 0: the slot takes no part
  uint2 tile[kDecodeSlots];      // x: expert | tokens << 24, y: first place in `order`
  uint16_t order[kDecodeSlots];  // slots by expert
  uint16_t expert[kDecodeSlots];
  float4 part[2][kWarps][32];  // sums of a warp's first strip, begun by a warp before it
};

// What a unit of a tile takes, roughly: more tokens mean more instructions.
MOE_OPS_DEVICE uint32_t cost_of(uint2 tile) {
  const int tokens = tile.x >> 24;
  return tokens <= 2 ? 16 : tokens <= 4 ? 17 : 19;
}

// One warp: this block's share of both phases, consecutive units of about the same cost as every other block's.
__device__ void divide(const Params& p, Shared& s, int lane) {
  const int tiles = s.tiles;
  uint32_t before = 0;
  for (int base = 0; base < tiles; base += 32) {
    const int i = base + lane;
    const uint32_t mine = i < tiles ? cost_of(s.tile[i]) : 0;
    uint32_t sum = mine;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += other;
    }
    if (i < tiles) s.cost[i] = before + sum - mine;
    before += __shfl_sync(~0u, sum, 31);
  }
  __syncwarp();
  if (lane < 4) {
    const Phase& ph = p.phase[lane >> 1];
    const uint32_t units = ph.units, edge = blockIdx.x + (lane & 1);
    uint32_t at = tiles * units;
    if (before == 16 * tiles) {
      at = at * edge / gridDim.x;
    } else if (edge < gridDim.x && tiles > 0) {
      const uint64_t target = static_cast<uint64_t>(before) * units * edge / gridDim.x;
      int low = 0, high = tiles - 1;  // the last tile that begins at or before the target
      while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (static_cast<uint64_t>(s.cost[middle]) * units <= target)
          low = middle;
        else
          high = middle - 1;
      }
      const uint32_t inside = static_cast<uint32_t>(target - static_cast<uint64_t>(s.cost[low]) * units);
      at = low * units + inside / cost_of(s.tile[low]);
    }
    // A strip has at most one cut: where a share could be shorter than a strip there is none.
    if (p.one_order || tiles * ph.strips < 2 * gridDim.x) at -= at % ph.blocks;
    s.bound[lane] = at;
  }
}

// A thread's slot of the batch. Loads begin with the kernel, long before they are needed.
struct Slot {
  int64_t id;
  float weight;
};
MOE_OPS_DEVICE Slot load_slot(const Problem& q) {
  Slot slot{-1, 0.0f};
  const int i = threadIdx.x;
  if (i < q.num_tokens * q.top_k) {
    slot.id = q.ids_are_int64 ? static_cast<const int64_t*>(q.topk_ids)[i] : static_cast<const int*>(q.topk_ids)[i];
    slot.weight = q.topk_weights[i];
  }
  return slot;
}

// The routing of the batch, by every block for itself; the same in every block.
MOE_OPS_DEVICE void route(const Params& p, Shared& s, int* scratch, Slot slot) {
  const Problem& q = p.problem;
  const int slots = q.num_tokens * q.top_k;
  const int tid = threadIdx.x, lane = tid & 31;
  int* count = scratch;                // [num_experts], then first places
  int* entry = count + q.num_experts;  // [slots]: expert, then expert | rank << 16
  const int most = p.tile_tokens;
  const bool small = slots <= 32;
  if (!small)
    for (int i = tid; i < q.num_experts; i += kThreads) count[i] = 0;
  static_assert(kDecodeSlots <= kThreads, "a thread per slot");
  int mine = -1;
  if (tid < slots) {
    int64_t id = slot.id;
    if (q.expert_map != nullptr) id = id >= 0 && id < q.expert_map_size ? q.expert_map[id] : -1;
    const bool valid = id >= 0 && id < q.num_experts && slot.weight != 0.0f;
    mine = valid ? static_cast<int>(id) : -1;
    s.expert[tid] = static_cast<uint16_t>(id);
    s.weight[tid] = valid ? slot.weight : 0.0f;
    if (!small) entry[tid] = mine;
  }
  if (!small) __syncthreads();
  if (tid < 32) {
    const unsigned below = (1u << lane) - 1;
    auto scan = [&](int value) {
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(~0u, value, d);
        if (lane >= d) value += other;
      }
      return value;
    };
    auto add_tiles = [&](int expert, int n, int first, int tile) {
      for (int j = 0; j < n; j += most) s.tile[tile++] = make_uint2(expert | min(most, n - j) << 24, first + j);
    };
    if (small) {
      const int expert = mine;
      const unsigned same = __match_any_sync(~0u, expert);
      const int rank = __popc(same & below), n = __popc(same);
      const int counts = expert >= 0 && rank == 0 ? n | (n + most - 1) / most << 16 : 0;
      const int sum = scan(counts), before = sum - counts;
      const int first = __shfl_sync(~0u, before & 0xFFFF, __ffs(same) - 1);
      if (expert >= 0) s.order[first + rank] = static_cast<uint16_t>(lane);
      if (counts != 0) add_tiles(expert, n, first, before >> 16);
      if (lane == 31) s.tiles = sum >> 16;
    } else {
      for (int base = 0; base < slots; base += 32) {
        const int i = base + lane;
        const int expert = i < slots ? entry[i] : -1;
        const unsigned same = __match_any_sync(~0u, expert);
        const int rank = __popc(same & below);
        const int before = expert >= 0 ? count[expert] : 0;
        __syncwarp();
        if (expert >= 0) {
          if (rank == 0) count[expert] = before + __popc(same);
          entry[i] = expert | (before + rank) << 16;
        }
        __syncwarp();
      }
      const int each = (q.num_experts + 31) / 32;
      const int e0 = min(lane * each, q.num_experts), e1 = min(e0 + each, q.num_experts);
      int counts = 0;
#pragma unroll 4
      for (int e = e0; e < e1; ++e) counts += count[e] | (count[e] + most - 1) / most << 16;
      const int sum = scan(counts);
      if (lane == 31) s.tiles = sum >> 16;
      int first = (sum - counts) & 0xFFFF, tile = (sum - counts) >> 16;
      for (int e = e0; e < e1; ++e) {
        const int n = count[e];
        count[e] = first;
        if (n > 0) add_tiles(e, n, first, tile);
        first += n;
        tile += (n + most - 1) / most;
      }
    }
    __syncwarp();
    divide(p, s, lane);
  }
  if (!small) {
    __syncthreads();
    for (int i = tid; i < slots; i += kThreads) {
      const int e = entry[i];
      if (e >= 0) s.order[count[e & 0xFFFF] + (e >> 16)] = static_cast<uint16_t>(i);
    }
    __syncthreads();
  }
}

struct Range {
  uint32_t begin, end;  // tile * units + unit

  // This range's part of one tile, in that tile's units.
  MOE_OPS_DEVICE Range of_tile(uint32_t tile, uint32_t units) const {
    const uint32_t first = tile * units;
    return {max(begin, first) - first, min(end, first + units) - first};
  }
  // Where the share of the warp before `warp` ends and that of `warp` begins.
  MOE_OPS_DEVICE uint32_t cut(const Params& p, const Phase& ph, uint32_t warp) const {
    const uint32_t at = begin + (end - begin) * warp / kWarps;
    return p.one_order ? at - at % ph.blocks : at;
  }
};
MOE_OPS_DEVICE Range range_of(const Shared& s, int which) { return {s.bound[2 * which], s.bound[2 * which + 1]}; }

}  // namespace
}  // namespace moe_ops::sm90
