// Structures of the decode kernel for few tokens, and how a block finds out what it has to do. See sm90_decode_few.cu.
#pragma once

#include "sm90_decode_common.cuh"

namespace moe_ops::sm90 {
namespace {

constexpr int kWarps = 16, kConsumers = kWarps * 32, kThreads = kConsumers + 32;
constexpr int kSlots = 64, kTokens = 8;
constexpr int kMaxStages = 6;     // of one warp
constexpr int kMaxStrips = 2048;  // of the first matrix
constexpr int kFewMaxExperts = 4096;

// n / d for n below 2^31, d at least 2.
struct Divisor {
  uint32_t multiplier;
  int shift;
  MOE_OPS_DEVICE uint32_t of(uint32_t n) const { return __umulhi(n, multiplier) >> shift; }
};

// One of an expert's two matrices.
struct Matrix {
  const uint8_t *codes, *scales;
  int64_t expert_codes, expert_scales;  // bytes of one expert
  uint32_t strip_codes, strip_scales;   // bytes of one strip
  uint32_t strips, blocks, units;       // units = strips * blocks
  uint32_t full_blocks, tail_words;     // tail_words: 32-k groups of the last, partial block of a strip
  Divisor by_blocks, by_units;
  int k, row_bytes;  // row_bytes: of a token's activations in shared memory
};

struct Params {
  Problem problem;
  Matrix matrix[2];
  // Of the first matrix: hidden values [slot][..]; of a strip that two blocks of the grid share, the sums of each in
  // `pieces` [2][slot][..][gate, up] instead. Of the second: sums [2][slot][..], and [slot][strip] whether there is a
  // second piece.
  float *hidden, *pieces, *down;
  int* cut;
  unsigned* counters;
  Divisor by_grid, by_top_k, by_columns;
  int columns_of_warp;                        // groups of four columns that a warp sums over experts at once
  int stage_blocks, stage_bytes, max_stages;  // stage_blocks: most blocks that arrive together
  int stages[2 * kTokens + 1];                // of a ring, by a block's rows of hidden activations
  uint32_t ring[2 * kTokens + 1];             // where rings begin, likewise

  // Per tile: how much of the first matrix is there.
  MOE_OPS_DEVICE unsigned* tile_counters() const { return counters + 4; }
};

// A warp's run of weights of one expert: `count` units from unit `begin` of the tile on; `block` is the first one's
// place in its strip.
struct Segment {
  uint64_t codes, scales;
  uint32_t begin, count, block, tile;
};

struct alignas(128) Shared {
  uint64_t arrived[kWarps][kMaxStages];  // weights
  uint64_t part_ready[2][kWarps];
  uint64_t phase_done, next_phase;
  Segment segment[kWarps][4];  // of the first matrix two, of the second two
  Matrix matrix[2];            // from Params, where the lanes of a warp index it: 100 cycles for a constant
  uint32_t bound[4];           // this block's units, tile * units + unit: first and end of both matrices
  uint32_t shared_strips[2][kMaxStrips / 32];  // of the first matrix, of this block's two tiles of the second
  int tiles, rows;                             // rows: of this block's hidden activations
  float weight[kSlots];                        // 0: the slot takes no part
  uint16_t expert[kSlots];                     // of a slot
  uint16_t tile_expert[kSlots];                // of a tile
  uint8_t count[kSlots];                       // tokens of a tile
  uint8_t order[kSlots * kTokens];             // slots of a tile
  float4 part[2][kWarps][32];                  // sums of a warp's first strip, begun by a warp before it
};

// One warp: the experts of the batch, a tile each, in the order in which slots name them. expert: of slots `lane` and
// lane + 32, -1 for none. tile_of: room for a byte per expert. Returns the number of tiles.
MOE_OPS_DEVICE int find_tiles(const Params& p, Shared& s, uint8_t* tile_of, int lane, const int (&expert)[2]) {
  const unsigned below = (1u << lane) - 1;
  unsigned same = __match_any_sync(~0u, expert[0]);
  int rank = __popc(same & below);
  bool first = expert[0] >= 0 && rank == 0;
  unsigned leaders = __ballot_sync(~0u, first);
  int tile = __shfl_sync(~0u, __popc(leaders & below), __ffs(same) - 1), tiles = __popc(leaders);
  if (first) s.tile_expert[tile] = static_cast<uint16_t>(expert[0]), s.count[tile] = __popc(same);
  if (expert[0] >= 0 && rank < kTokens) s.order[tile * kTokens + rank] = lane;
  if (p.problem.num_tokens * p.problem.top_k > 32) {
    if (first) tile_of[expert[0]] = tile;
    __syncwarp();
    // tile_of is not cleared: the entry of an expert that has no tile yet does not lead to a tile of that expert.
    int known = expert[1] >= 0 ? tile_of[expert[1]] : kSlots, before = 0;
    if (known < tiles && s.tile_expert[known] == expert[1])
      before = s.count[known];
    else
      known = -1;
    __syncwarp();
    same = __match_any_sync(~0u, expert[1]);
    rank = before + __popc(same & below);
    first = expert[1] >= 0 && (same & below) == 0;
    leaders = __ballot_sync(~0u, first && known < 0);
    tile = __shfl_sync(~0u, known >= 0 ? known : tiles + __popc(leaders & below), __ffs(same) - 1);
    tiles += __popc(leaders);
    if (first) s.tile_expert[tile] = static_cast<uint16_t>(expert[1]), s.count[tile] = before + __popc(same);
    if (expert[1] >= 0 && rank < kTokens) s.order[tile * kTokens + rank] = lane + 32;
    // Weights will come into this memory by another way.
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncwarp();
  // More slots of an expert than there are tokens, since tokens have chosen it twice: each slot has a tile of its own.
  const int most = p.problem.num_tokens;
  if (__any_sync(~0u, (lane < tiles && s.count[lane] > most) || (lane + 32 < tiles && s.count[lane + 32] > most))) {
    tiles = 0;
    for (int h = 0; h < 2; ++h) {
      const int mine = h == 0 ? expert[0] : expert[1];
      const unsigned valid = __ballot_sync(~0u, mine >= 0);
      if (mine >= 0) {
        tile = tiles + __popc(valid & below);
        s.tile_expert[tile] = static_cast<uint16_t>(mine), s.count[tile] = 1;
        s.order[tile * kTokens] = lane + 32 * h;
      }
      tiles += __popc(valid);
    }
    __syncwarp();
  }
  return tiles;
}

// One warp: what this block has of both matrices, the same number of units as every other block.
MOE_OPS_DEVICE void divide(const Params& p, Shared& s, int tiles, int lane) {
  uint32_t at = 0;
  if (lane < 4) {
    const Matrix& m = p.matrix[lane >> 1];
    at = p.by_grid.of(tiles * m.units * (blockIdx.x + (lane & 1)));
    // A strip has at most one cut between blocks: where a share could be shorter than a strip there is none.
    if (tiles * m.strips < 2 * gridDim.x) at = m.by_blocks.of(at) * m.blocks;
    s.bound[lane] = at;
  }
  const uint32_t end = __shfl_down_sync(~0u, at, 1);
  if (lane == 2) {
    int rows = 0;
    if (at < end) {
      const uint32_t first = p.matrix[1].by_units.of(at), last = p.matrix[1].by_units.of(end - 1);
      rows = s.count[first] + (last > first ? s.count[last] : 0);
    }
    s.rows = rows;
    s.tiles = tiles;
  }
}

// One warp, all slots: ids and weights to what the block has to do. Loads begin with the kernel; `meanwhile` is called
// when they are on their way.
template <class Meanwhile>
MOE_OPS_DEVICE void route(const Params& p, Shared& s, uint8_t* tile_of, int lane, Meanwhile&& meanwhile) {
  const Problem& q = p.problem;
  const int slots = q.num_tokens * q.top_k;
  int64_t id[2] = {-1, -1};
  float weight[2] = {0, 0};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int i = lane + 32 * h;
    if (i < slots) {
      id[h] = q.ids_are_int64 ? static_cast<const int64_t*>(q.topk_ids)[i] : static_cast<const int*>(q.topk_ids)[i];
      weight[h] = q.topk_weights[i];
    }
  }
  meanwhile();
  int expert[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (q.expert_map != nullptr) id[h] = id[h] >= 0 && id[h] < q.expert_map_size ? q.expert_map[id[h]] : -1;
    const bool valid = id[h] >= 0 && id[h] < q.num_experts && weight[h] != 0.0f;
    expert[h] = valid ? static_cast<int>(id[h]) : -1;
    const int i = lane + 32 * h;
    if (i < slots) s.weight[i] = valid ? weight[h] : 0.0f, s.expert[i] = static_cast<uint16_t>(expert[h]);
  }
  divide(p, s, find_tiles(p, s, tile_of, lane, expert), lane);
}

// One warp, while others multiply: which strips of the first matrix two blocks share, of the experts whose hidden
// values this block will need.
MOE_OPS_DEVICE void find_shared_strips(const Params& p, Shared& s, int lane) {
  const Matrix& m = s.matrix[0];
  for (int i = lane; i < kMaxStrips / 32; i += 32) s.shared_strips[0][i] = s.shared_strips[1][i] = 0;
  __syncwarp();
  if (s.tiles * m.strips < 2 * gridDim.x) return;  // none, see divide
  const uint32_t total = s.tiles * m.units, first = s.matrix[1].by_units.of(s.bound[2]);
#pragma unroll 1
  for (uint32_t i = lane + 1; i < gridDim.x; i += 32) {
    const uint32_t at = p.by_grid.of(total * i), strip = m.by_blocks.of(at), tile = m.by_units.of(at);
    if (at == strip * m.blocks || tile < first || tile > first + 1) continue;
    const uint32_t in_tile = strip - tile * m.strips;
    atomicOr(&s.shared_strips[tile - first][in_tile / 32], 1u << in_tile % 32);
  }
}

}  // namespace
}  // namespace moe_ops::sm90
