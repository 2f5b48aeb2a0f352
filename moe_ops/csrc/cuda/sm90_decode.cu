// Decode on Hopper: ids in, rows out, in one persistent cooperative kernel of one block per SM.
//
// Everything is bound by reading each chosen expert's weights once, so the kernel is a stream. Weights are the M side of
// the tensor-core tile, up to eight tokens of one expert the N side:
//
//   strip   16 weight rows x all of k; w13: 8 gate rows and their 8 up rows; contiguous in memory
//   block   a strip's 128 k: one 16-byte vector per lane and row half; the last block of a strip may hold 32 to 96 k
//   unit    one part of a strip's k; the parts' sums meet in memory, in their order
//   tile    up to 8 tokens of one expert (fewer where a token's activations are very long)
//
// Each block of the grid takes the same number of consecutive units, and its 12 consumer warps take them in turn. A
// warp feeds itself: bulk copies into a ring of its own, which runs ahead over units, tiles and from w13 to w2, so that
// memory never waits for a barrier. Four helper warps turn the tokens of the coming tiles into fp16 fragments in shared
// memory. Sums over a row's k are split at fixed places, whatever the batch, the grid or the timing: a row's result
// depends on that row alone.
#include "sm90_common.cuh"

namespace moe_ops::sm90 {
namespace {

constexpr int kWarps = 12, kHelperWarps = 4;
constexpr int kConsumers = kWarps * 32, kHelpers = kHelperWarps * 32, kThreads = kConsumers + kHelpers;
constexpr int kTileTokens = 8;
constexpr int kStageBlocks = 4;  // blocks that arrive together
constexpr int kMaxStages = 8;    // of one warp
constexpr int kTileSlots = 4;    // tiles whose activations may be in shared memory
constexpr int kBlockBytes = 1024, kBlockScales = 64, kStageBytes = kStageBlocks * (kBlockBytes + kBlockScales);
constexpr int kSharedLimit = 232448;

struct Phase {
  const uint8_t *codes, *scales;
  int64_t expert_codes, expert_scales;  // bytes of one expert
  int strip_codes, strip_scales;        // bytes of one strip
  int units;                            // of one tile
  int parts_log2, part_blocks;
  int k, full_blocks, blocks, tail_words;  // tail_words: 32-k groups of the last, partial block
  int row_bytes, rows;                     // activations of a token in shared memory, and room for how many
};

struct Params {
  Problem problem;
  Phase phase[2];
  float *gate_up, *down;
  unsigned* counters;
  int stages, tile_tokens;
  bool one_order;  // the same order of sums for every number of tokens
};

struct alignas(128) Shared {
  uint64_t arrived[kWarps][kMaxStages];  // weights
  uint64_t tile_ready[kTileSlots], tile_done[kTileSlots];
  uint64_t first_ready[2];         // the first tile of a phase, which all warps load
  uint64_t phase_done, next_phase;
  int tile_row[kTileSlots];
  int tiles;
  uint32_t bound[4];             // this block's units: first and end of both phases
  uint32_t cost[kDecodeSlots];   // of the tiles before
  float weight[kDecodeSlots];    // 0: the slot takes no part
  uint2 tile[kDecodeSlots];      // x: expert | tokens << 24, y: first place in `order`
  uint16_t order[kDecodeSlots];  // slots by expert
  uint16_t expert[kDecodeSlots];
  alignas(16) uint8_t zero[16];
};

// What a unit of a tile takes, roughly: more tokens mean more instructions.
MOE_OPS_DEVICE uint32_t cost_of(uint2 tile) {
  const int tokens = tile.x >> 24;
  return tokens <= 2 ? 16 : tokens <= 4 ? 17 : 19;
}

// One warp: this block's share of both phases, consecutive units of the same cost as every other block's.
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
    const uint32_t units = p.phase[lane >> 1].units, edge = blockIdx.x + (lane & 1);
    const uint64_t target = static_cast<uint64_t>(before) * units * edge / gridDim.x;
    uint32_t at = tiles * units;
    if (edge < gridDim.x && tiles > 0) {
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
    s.bound[lane] = at;
  }
}

// The routing of the batch, by every block for itself; the same in every block.
__device__ void route(const Params& p, Shared& s, int* scratch) {
  const Problem& q = p.problem;
  const int slots = q.num_tokens * q.top_k;
  const int tid = threadIdx.x, lane = tid & 31;
  int* count = scratch;                    // [num_experts], then first places
  int* entry = count + kDecodeMaxExperts;  // [slots]: expert, then expert | rank << 16
  const int most = p.tile_tokens;
  const bool small = slots <= 32;
  if (!small)
    for (int i = tid; i < q.num_experts; i += kThreads) count[i] = 0;
  for (int i = tid; i < slots; i += kThreads) {
    int64_t id = q.ids_are_int64 ? static_cast<const int64_t*>(q.topk_ids)[i] : static_cast<const int*>(q.topk_ids)[i];
    const float w = q.topk_weights[i];
    if (q.expert_map != nullptr) id = id >= 0 && id < q.expert_map_size ? q.expert_map[id] : -1;
    const bool valid = id >= 0 && id < q.num_experts && w != 0.0f;
    entry[i] = valid ? static_cast<int>(id) : -1;
    s.expert[i] = static_cast<uint16_t>(id);
    s.weight[i] = valid ? w : 0.0f;
  }
  __syncthreads();
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
      const int expert = lane < slots ? entry[lane] : -1;
      const unsigned same = __match_any_sync(~0u, expert);
      const int rank = __popc(same & below), n = __popc(same);
      const int mine = expert >= 0 && rank == 0 ? n | (n + most - 1) / most << 16 : 0;
      const int sum = scan(mine), before = sum - mine;
      const int first = __shfl_sync(~0u, before & 0xFFFF, __ffs(same) - 1);
      if (expert >= 0) s.order[first + rank] = static_cast<uint16_t>(lane);
      if (mine != 0) add_tiles(expert, n, first, before >> 16);
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
      int mine = 0;
#pragma unroll 4
      for (int e = e0; e < e1; ++e) mine += count[e] | (count[e] + most - 1) / most << 16;
      const int sum = scan(mine);
      if (lane == 31) s.tiles = sum >> 16;
      int first = (sum - mine) & 0xFFFF, tile = (sum - mine) >> 16;
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
  __syncthreads();
  if (!small) {
    for (int i = tid; i < slots; i += kThreads) {
      const int e = entry[i];
      if (e >= 0) s.order[count[e & 0xFFFF] + (e >> 16)] = static_cast<uint16_t>(i);
    }
    __syncthreads();
  }
}

struct Range {
  uint32_t begin, end;  // tile * units + unit
};
MOE_OPS_DEVICE Range range_of(const Shared& s, int which) { return {s.bound[2 * which], s.bound[2 * which + 1]}; }
template <class T>
MOE_OPS_DEVICE T uniform(T value) {
  return __shfl_sync(~0u, value, 0);
}

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

// One thread of the block: all blocks of the grid have come here, and what they wrote before is visible.
MOE_OPS_DEVICE void grid_barrier(unsigned* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
  unsigned seen;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
  } while (seen < gridDim.x);
}

// Loads a tile's activations as fp16 fragments. Each token's 128 k are scaled by a power of two that brings the largest
// to 2^14..2^15: nothing is lost above 2^-29 of it. What undoes that, and the 2^-14 of the codes, lies behind the row.
// A half warp takes 128 k of one token, a lane 8 of them: word `lane % 4` of group `lane / 4` for the four lanes t of a
// fragment. kPhase 0: from hidden_states; 1: from the sums of the first matrix, which are activated on the way.
template <int kPhase>
struct TileLoader {
  const Params& p;
  const Shared& s;
  uint2 entry;
  int first_row;
  uint32_t activations;

  struct Piece {
    float f[8];
    uint4 raw;
    uint32_t at;  // 0: none
    int block;
  };

  MOE_OPS_DEVICE void read(Piece& piece, int index) {
    const Phase& ph = p.phase[kPhase];
    const Problem& q = p.problem;
    const int tokens = entry.x >> 24, token = index / ph.blocks, lane = threadIdx.x & 15;
    piece.at = 0;
    if (token >= tokens) return;
    piece.block = index - token * ph.blocks;
    int row = first_row + token;
    if (row >= ph.rows) row -= ph.rows;
    piece.at = activations + row * ph.row_bytes;
    const int slot = s.order[entry.y + token], k = piece.block * 128 + lane * 8;
    if (kPhase == 0) {
      piece.raw = make_uint4(0, 0, 0, 0);
      if (k < ph.k)
        piece.raw = load_volatile4(static_cast<const char*>(q.hidden_states) + (slot / q.top_k * q.hidden_stride + k) * 2);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) piece.f[i] = 0;
      if (k < ph.k) activated(piece, slot, k);
    }
  }

  MOE_OPS_DEVICE void activated(Piece& piece, int slot, int k) {
    const Problem& q = p.problem;
    const int64_t step = static_cast<int64_t>(q.num_tokens) * q.top_k * q.intermediate_size * 2;
    const float* from = p.gate_up + (static_cast<int64_t>(slot) * q.intermediate_size + k) * 2;
    const int parts = 1 << p.phase[0].parts_log2;
    float4 sum[4] = {};
    for (int part = 0; part < parts; part += 2) {
      float4 v[2][4];
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          v[j][i] = part + j < parts ? load_l2_float4(from + (part + j) * step + i * 4) : make_float4(0, 0, 0, 0);
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          sum[i].x += v[j][i].x, sum[i].y += v[j][i].y, sum[i].z += v[j][i].z, sum[i].w += v[j][i].w;
    }
    const int expert = entry.x & 0xFFFFFF;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float gate = i & 1 ? sum[i / 2].z : sum[i / 2].x, up = i & 1 ? sum[i / 2].w : sum[i / 2].y;
      if (q.w13_bias != nullptr) {
        const float* bias = q.w13_bias + static_cast<int64_t>(expert) * 2 * q.intermediate_size + (k + i) * q.row_step;
        gate += __ldg(bias + q.gate_offset), up += __ldg(bias + q.up_offset);
      }
      piece.f[i] = activate(gate, up, q.oai, q.limit, q.alpha);
    }
  }

  MOE_OPS_DEVICE void place(Piece& piece) {
    if (piece.at == 0) return;
    const int lane = threadIdx.x & 15;
    const unsigned mask = 0xFFFFu << (threadIdx.x & 16);
    if (kPhase == 0) {
      const uint32_t words[4] = {piece.raw.x, piece.raw.y, piece.raw.z, piece.raw.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (p.problem.hidden_is_fp16) {
          const float2 v = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
          piece.f[2 * i] = v.x, piece.f[2 * i + 1] = v.y;
        } else {
          piece.f[2 * i] = __uint_as_float(words[i] << 16);
          piece.f[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
        }
      }
    }
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = max(largest, __float_as_uint(piece.f[i]) & 0x7FFFFFFFu);
#pragma unroll
    for (int d = 1; d < 16; d *= 2) largest = max(largest, __shfl_xor_sync(mask, largest, d));
    const uint32_t e = min(max(largest >> 23, 15u), 254u);
    const float factor = __uint_as_float((268 - e) << 23);
    const uint32_t to = piece.at + piece.block * 256 + (lane >> 2) * 64 + (lane & 3) * 4;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      uint32_t pair;
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(piece.f[2 * t + 1] * factor), "f"(piece.f[2 * t] * factor));
      shared_store1(to + t * 16, pair);
    }
    if (lane == 0) shared_store1(piece.at + p.phase[kPhase].blocks * 256 + piece.block * 4, e << 23);
  }

  // The share of half warp `half` of `halves`. `meanwhile` is called when the first loads are on their way.
  template <class Meanwhile>
  MOE_OPS_DEVICE void run(int half, int halves, Meanwhile&& meanwhile) {
    const int total = (entry.x >> 24) * p.phase[kPhase].blocks;
    Piece a, b;
    read(a, half);
    if (kPhase == 0) read(b, half + halves);
    meanwhile();
    place(a);
    if (kPhase == 0) place(b);
    for (int i = half + (kPhase == 0 ? 2 : 1) * halves; i < total; i += (kPhase == 0 ? 2 : 1) * halves) {
      read(a, i);
      if (kPhase == 0) read(b, i + halves);
      place(a);
      if (kPhase == 0) place(b);
    }
  }
};

// The first tile of a phase, by all warps of the block.
template <int kPhase, class Meanwhile>
MOE_OPS_DEVICE void load_first(const Params& p, Shared& s, uint32_t activations, Meanwhile&& meanwhile) {
  const uint32_t units = p.phase[kPhase].units;
  const Range range = range_of(s, kPhase);
  if (range.begin == range.end) return meanwhile();
  TileLoader<kPhase>{p, s, s.tile[range.begin / units], 0, activations}.run(threadIdx.x >> 4, kThreads / 16, meanwhile);
  __syncwarp();
  if ((threadIdx.x & 31) == 0) barrier_arrive(smem_address(&s.first_ready[kPhase]));
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
          const int words = block + i < ph.full_blocks ? 4 : ph.tail_words;
          multiply_block<kGroups>(c, raw[i % 2], x_row + (block + i) * 256, zero, scales + i * kBlockScales, words,
                                  shared_load_float(back0 + (block + i) * 4),
                                  shared_load_float(back1 + (block + i) * 4), g, t);
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

// The helpers: the activations of the tiles to come, and the wait between the phases.
__device__ void help(const Params& p, Shared& s, uint32_t activations) {
  const int lane = threadIdx.x & 31, half = (threadIdx.x - kConsumers) >> 4;
  int tile_count = 0, ready_count = 0, oldest = 0;
  for (int which = 0; which < 2; ++which) {
    const Phase& ph = p.phase[which];
    const Range range = range_of(s, which);
    if (which == 1) {
      if (threadIdx.x == kConsumers) {
        barrier_wait(smem_address(&s.phase_done), 0);
        grid_barrier(p.counters);
        barrier_arrive(smem_address(&s.next_phase));
      }
      barrier_wait(smem_address(&s.next_phase), 0);
      load_first<1>(p, s, activations, [] {});
    }
    if (range.begin == range.end) continue;
    const uint32_t first = range.begin / ph.units, last = (range.end - 1) / ph.units;
    uint32_t oldest_tile = first;
    // All of the other phase's tiles are done with by now, but their barriers still count.
    for (; oldest < tile_count; ++oldest)
      barrier_wait(smem_address(&s.tile_done[oldest % kTileSlots]), oldest / kTileSlots & 1);
    ++tile_count;  // the first tile is everybody's
    int used = s.tile[first].x >> 24, row = used == ph.rows ? 0 : used;
    for (uint32_t tile = first + 1; tile <= last; ++tile, ++tile_count, ++ready_count) {
      const uint2 entry = s.tile[tile];
      const int tokens = entry.x >> 24;
      while (used + tokens > ph.rows || tile_count - oldest >= kTileSlots) {
        barrier_wait(smem_address(&s.tile_done[oldest % kTileSlots]), oldest / kTileSlots & 1);
        used -= s.tile[oldest_tile++].x >> 24;
        ++oldest;
      }
      if (threadIdx.x == kConsumers) s.tile_row[ready_count % kTileSlots] = row;
      if (which == 0)
        TileLoader<0>{p, s, entry, row, activations}.run(half, kHelpers / 16, [] {});
      else
        TileLoader<1>{p, s, entry, row, activations}.run(half, kHelpers / 16, [] {});
      __syncwarp();
      if (lane == 0) barrier_arrive(smem_address(&s.tile_ready[ready_count % kTileSlots]));
      used += tokens;
      row += tokens;
      if (row >= ph.rows) row -= ph.rows;
    }
  }
}

// out[t] = sum over k, in slot order, of weight * row; one rounding.
__device__ void combine(const Params& p, const Shared& s) {
  const Problem& q = p.problem;
  const int columns = q.hidden_size / 4;
  const int total = q.num_tokens * columns;
  const int64_t step = static_cast<int64_t>(q.num_tokens) * q.top_k * q.hidden_size;
  const int parts = 1 << p.phase[1].parts_log2;
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < total; i += gridDim.x * kThreads) {
    const int token = i / columns, column = (i - token * columns) * 4;
    float4 sum = make_float4(0, 0, 0, 0);
    const float* from = p.down + static_cast<int64_t>(token) * q.top_k * q.hidden_size + column;
#pragma unroll 4
    for (int k = 0; k < q.top_k; ++k) {
      const int slot = token * q.top_k + k;
      const float w = s.weight[slot];
      if (w != 0.0f) {
        float4 v = load_l2_float4(from + static_cast<int64_t>(k) * q.hidden_size);
        for (int part = 1; part < parts; ++part) {
          const float4 more = load_l2_float4(from + part * step + static_cast<int64_t>(k) * q.hidden_size);
          v.x += more.x, v.y += more.y, v.z += more.z, v.w += more.w;
        }
        if (q.w2_bias != nullptr) {
          const float* bias = q.w2_bias + static_cast<int64_t>(s.expert[slot]) * q.hidden_size + column;
          v.x += __ldg(bias), v.y += __ldg(bias + 1), v.z += __ldg(bias + 2), v.w += __ldg(bias + 3);
        }
        sum.x = fmaf(w, v.x, sum.x), sum.y = fmaf(w, v.y, sum.y);
        sum.z = fmaf(w, v.z, sum.z), sum.w = fmaf(w, v.w, sum.w);
      }
    }
    store_output(q.output, q.output_type, static_cast<int64_t>(token) * q.hidden_size + column, sum);
  }
}

__global__ void __launch_bounds__(kThreads, 1) decode_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  const int ring_bytes = kWarps * p.stages * kStageBytes;
  Shared& s = *reinterpret_cast<Shared*>(shared_memory + ring_bytes);
  uint8_t* activations = shared_memory + ring_bytes + sizeof(Shared);
  const int tid = threadIdx.x, warp = uniform(tid >> 5), lane = tid & 31;
  {
    // hidden_states on its way to L2 before the weights fill the memory's queues
    const Problem& q = p.problem;
    const int lines = (q.hidden_size * 2 + 127) / 128;
    for (int i = blockIdx.x * kThreads + tid; i < q.num_tokens * lines; i += gridDim.x * kThreads) {
      const char* at = static_cast<const char*>(q.hidden_states) + i / lines * q.hidden_stride * 2 + i % lines * 128;
      asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
    }
  }
  if (tid < kWarps * kMaxStages) barrier_init(smem_address(&s.arrived[0][0] + tid), 1);
  if (tid < kTileSlots) {
    barrier_init(smem_address(&s.tile_ready[tid]), kHelperWarps);
    barrier_init(smem_address(&s.tile_done[tid]), kWarps);
  }
  if (tid < 2) barrier_init(smem_address(&s.first_ready[tid]), kWarps + kHelperWarps);
  if (tid == 0) {
    barrier_init(smem_address(&s.phase_done), kWarps);
    barrier_init(smem_address(&s.next_phase), 1);
  }
  if (tid < 4) reinterpret_cast<uint32_t*>(s.zero)[tid] = 0;
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  route(p, s, reinterpret_cast<int*>(activations));
  if (warp < kWarps) {
    Stream stream{p, s, smem_address(shared_memory) + warp * p.stages * kStageBytes, smem_address(&s.arrived[warp][0]),
                  warp, policy_evict_first()};
    load_first<0>(p, s, smem_address(activations), [&] {
      stream.start_phase();
      for (int i = 0; i < p.stages; ++i) stream.issue();
    });
    Consumer{p, s, stream, smem_address(activations), warp, lane}.run();
  } else {
    load_first<0>(p, s, smem_address(activations), [] {});
    help(p, s, smem_address(activations));
  }
  __threadfence();
  __syncthreads();
  if (tid == 0) grid_barrier(p.counters + 1);
  __syncthreads();
  combine(p, s);
  // The last block to leave makes the counters ready for the next call: nobody waits on them any more.
  if (tid == 0 && atomicAdd(p.counters + 2, 1u) == gridDim.x - 1) p.counters[0] = p.counters[1] = p.counters[2] = 0;
}

Phase plan_phase(const uint8_t* codes, const uint8_t* scales, int k, int rows_out, int tiles) {
  Phase ph{};
  ph.codes = codes, ph.scales = scales;
  ph.k = k, ph.full_blocks = k / 128, ph.tail_words = k % 128 / 32;
  ph.blocks = ph.full_blocks + (ph.tail_words > 0);
  ph.strip_codes = k * 8, ph.strip_scales = k / 2;
  const int strips = rows_out / 16;
  ph.expert_codes = static_cast<int64_t>(ph.strip_codes) * strips;
  ph.expert_scales = static_cast<int64_t>(ph.strip_scales) * strips;
  // Enough parts to give every warp of an H200 several units, but none below 4 blocks, and none above 16. `tiles` is 0
  // where the places must depend on k alone.
  while (ph.parts_log2 < 3 && ph.blocks >> ph.parts_log2 >= 8 &&
         (ph.blocks >> ph.parts_log2 > 16 || (tiles > 0 && (tiles * strips << ph.parts_log2) < 132 * kWarps * 8)))
    ++ph.parts_log2;
  // No part may be empty.
  while ((ph.blocks + (1 << ph.parts_log2) - 1 >> ph.parts_log2) * ((1 << ph.parts_log2) - 1) >= ph.blocks) --ph.parts_log2;
  const int parts = 1 << ph.parts_log2;
  ph.part_blocks = (ph.blocks + parts - 1) / parts;
  ph.units = strips << ph.parts_log2;
  ph.row_bytes = ph.blocks * 256 + (ph.blocks * 4 + 63) / 64 * 64;
  if (ph.row_bytes % 128 == 0) ph.row_bytes += 64;  // two tokens' fragments in different banks
  return ph;
}

struct Plan {
  Phase phase[2];
  int stages, tile_tokens, shared;
};
Plan plan(const Problem& q, bool one_order) {
  Plan plan{};
  const int slots = q.num_tokens * q.top_k, tiles = one_order ? 0 : (slots < q.num_experts ? slots : q.num_experts);
  plan.phase[0] = plan_phase(q.w13, q.w13_scale, q.hidden_size, 2 * q.intermediate_size, tiles);
  plan.phase[1] = plan_phase(q.w2, q.w2_scale, q.intermediate_size, q.hidden_size, tiles);
  const int row = plan.phase[0].row_bytes > plan.phase[1].row_bytes ? plan.phase[0].row_bytes : plan.phase[1].row_bytes;
  constexpr int kScratch = (kDecodeMaxExperts + kDecodeSlots) * 4, kStageOfAll = kWarps * kStageBytes;
  const int room = kSharedLimit - static_cast<int>(sizeof(Shared));
  plan.tile_tokens = (room - 2 * kStageOfAll) / row;
  if (plan.tile_tokens > kTileTokens) plan.tile_tokens = kTileTokens;
  // Rows for two full tiles, if two stages fit beside them, but at least for one; then as many stages as fit.
  int area = 2 * plan.tile_tokens * row;
  if (area > room - 2 * kStageOfAll) area = room - 2 * kStageOfAll;
  if (area < plan.tile_tokens * row) area = plan.tile_tokens * row;
  if (area < kScratch) area = kScratch;
  plan.stages = (room - area) / kStageOfAll;
  if (plan.stages > kMaxStages) plan.stages = kMaxStages;
  for (Phase& ph : plan.phase) ph.rows = area / ph.row_bytes;
  plan.shared = plan.stages * kStageOfAll + static_cast<int>(sizeof(Shared)) + area;
  return plan;
}

}  // namespace

bool decode_supports(const Problem& q) {
  const Plan pl = plan(q, true);
  const int64_t units = pl.phase[0].units > pl.phase[1].units ? pl.phase[0].units : pl.phase[1].units;
  return pl.tile_tokens > 0 && units * q.num_tokens * q.top_k < (int64_t{1} << 32) / 256 && q.num_experts <= kDecodeMaxExperts && q.num_tokens * q.top_k <= kDecodeSlots;
}
size_t decode_gate_up_floats(const Problem& q, bool one_order) {
  return (static_cast<size_t>(q.num_tokens) * q.top_k * q.intermediate_size * 2) << plan(q, one_order).phase[0].parts_log2;
}
size_t decode_down_floats(const Problem& q, bool one_order) {
  return (static_cast<size_t>(q.num_tokens) * q.top_k * q.hidden_size) << plan(q, one_order).phase[1].parts_log2;
}

cudaError_t decode(const Problem& problem, const DecodeScratch& scratch, int num_sms, cudaStream_t stream) {
  if (!decode_supports(problem)) return cudaErrorInvalidValue;
  static const cudaError_t prepared =
      cudaFuncSetAttribute(decode_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedLimit);
  if (prepared != cudaSuccess) return prepared;
  const Plan pl = plan(problem, scratch.one_order);
  const Params p{problem, {pl.phase[0], pl.phase[1]}, scratch.gate_up, scratch.down, scratch.counters,
                 pl.stages, pl.tile_tokens, scratch.one_order};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(num_sms);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = pl.shared;
  config.stream = stream;
  // All blocks must run at once: they wait for each other.
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, decode_kernel, p);
}

}  // namespace moe_ops::sm90
