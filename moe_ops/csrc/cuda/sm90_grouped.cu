// Larger batches on Hopper: a grouped matmul over rows sorted by expert, one matrix at a time.
//
// A tile of work is 256 weight rows (16 strips) by up to 128 tokens of one expert. Two warpgroups each hold 128 of the
// rows: packed weights come from shared memory to registers, become exact bf16 there (scale included), and are operand
// A of wgmma; operand B, the tokens' activations, is read from shared memory by the tensor cores. Everything arrives by
// cp.async, gathered by row, in a ring of stages of 128 k; a block of the grid begins to load its next tile before it
// stores the one it has finished.
#include "sm90_wgmma.cuh"

namespace moe_ops::sm90 {
namespace {

constexpr int kThreads = 256, kStrips = 16, kBlockBytes = 1024, kBlockScales = 64;
constexpr int kWeightBytes = kStrips * (kBlockBytes + kBlockScales);  // of a stage
constexpr int kSharedLimit = 232448;

struct Params {
  GroupedMatmul m;
  int full_blocks, blocks, tail_words, strips, row_tiles;
  int64_t expert_codes, expert_scales;
  int strip_codes, strip_scales;
};

template <int kMaxTokens>
struct Config {
  static constexpr int kBlocksPerSm = kMaxTokens <= 32 ? 2 : 1;
  static constexpr int kStageBytes = (kWeightBytes + kMaxTokens * 256 + 1023) / 1024 * 1024;
  static constexpr int kRoom = (kBlocksPerSm == 2 ? 113 * 1024 : kSharedLimit) - 2 * kMaxTokens * 8 - 1024;
  static constexpr int kStages = kRoom / kStageBytes < 8 ? kRoom / kStageBytes : 8;
  static constexpr int kShared = kStages * kStageBytes + 2 * kMaxTokens * 8 + 1024;
};

MOE_OPS_DEVICE void copy16(uint32_t dst, const void* src, bool present) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(present ? 16 : 0) : "memory");
}
MOE_OPS_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
MOE_OPS_DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
MOE_OPS_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
MOE_OPS_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
MOE_OPS_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Eight codes -> four bf16 pairs, exact for scale codes 1 to 128: the code's bits at bits 8..6 of a bf16 are its value
// times 2^-126, and `multiplier` is 2^(scale - 1), twice.
MOE_OPS_DEVICE void dequantize_bf16(uint32_t codes, uint32_t multiplier, uint32_t (&out)[4]) {
  constexpr uint32_t kMagnitude = 0x01C001C0u, kSign = 0x80008000u;
  out[0] = ((codes >> 3) & kMagnitude) | (codes & kSign);
  out[1] = (codes & kMagnitude) | ((codes << 3) & kSign);
  out[2] = ((codes << 3) & kMagnitude) | ((codes << 1) & kSign);
  out[3] = ((codes << 6) & kMagnitude) | ((codes << 2) & kSign);
#pragma unroll
  for (int i = 0; i < 4; ++i) asm("mul.bf16x2 %0, %0, %1;" : "+r"(out[i]) : "r"(multiplier));
}

struct Tile {
  int expert, first_row, rows, row_tile;
};

template <int kMaxTokens>
struct Worker {
  using C = Config<kMaxTokens>;
  const Params& p;
  uint32_t ring;
  uint64_t* rows;  // [2][kMaxTokens] addresses of the tokens' activations, of this tile and the next
  int tid, warp, lane;

  MOE_OPS_DEVICE Tile tile_at(int index) const {
    const int4 entry = __ldg(static_cast<const int4*>(p.m.tiles) + index / p.row_tiles);
    return {entry.x, entry.y, entry.z, index % p.row_tiles};
  }

  // Threads of the block together; followed by a barrier before copy_stage().
  MOE_OPS_DEVICE void find_rows(const Tile& tile, int which) const {
    for (int i = tid; i < kMaxTokens; i += kThreads) {
      int64_t row = tile.first_row + (i < tile.rows ? i : 0);
      if (p.m.row_slot != nullptr) row = p.m.row_slot[row] / p.m.top_k;
      rows[which * kMaxTokens + i] =
          reinterpret_cast<uint64_t>(static_cast<const char*>(p.m.activations) + row * p.m.activations_stride * 2);
    }
  }

  // Stage `block` of a tile: 128 k of 16 strips and of the tokens, whose rows lie in the order that wgmma reads with a
  // 128-byte swizzle: two halves of 64 k, 16-byte piece c of row r at c ^ (r % 8).
  template <int kTokens>
  MOE_OPS_DEVICE void copy_stage(const Tile& tile, int which, int block, int slot) const {
    const uint32_t at = ring + slot * C::kStageBytes, tokens_at = at, codes_at = at + kTokens * 256,
                   scales_at = codes_at + kStrips * kBlockBytes;
    const int words = block < p.full_blocks ? 4 : p.tail_words;
    const int first_strip = tile.row_tile * kStrips;
    const uint8_t* codes = p.m.codes + tile.expert * p.expert_codes + static_cast<int64_t>(block) * kBlockBytes;
    const uint8_t* scales = p.m.scales + tile.expert * p.expert_scales + static_cast<int64_t>(block) * kBlockScales;
#pragma unroll
    for (int i = 0; i < kStrips * 64 / kThreads; ++i) {
      const int strip = i * (kThreads / 64) + tid / 64, piece = tid % 64;
      if (first_strip + strip < p.strips && piece < words * 16)
        copy16(codes_at + strip * kBlockBytes + piece * 16,
               codes + static_cast<int64_t>(first_strip + strip) * p.strip_codes + piece * 16, true);
    }
    if (tid < kStrips * 4) {
      const int strip = tid / 4, piece = tid % 4;
      if (first_strip + strip < p.strips && piece < words)
        copy16(scales_at + strip * kBlockScales + piece * 16,
               scales + static_cast<int64_t>(first_strip + strip) * p.strip_scales + piece * 16, true);
    }
    const int piece = tid % 16, half = piece / 8, column = piece % 8;
    if (piece < words * 4) {
#pragma unroll
      for (int i = 0; i < (kTokens + 15) / 16; ++i) {
        const int row = i * 16 + tid / 16;
        if (kTokens % 16 == 0 || row < kTokens)
          copy16(tokens_at + half * kTokens * 128 + row * 128 + ((column ^ (row & 7)) * 16),
                 reinterpret_cast<const char*>(rows[which * kMaxTokens + row]) + block * 256 + piece * 16,
                 row < tile.rows);
      }
    }
  }

  template <int kTokens>
  MOE_OPS_DEVICE void begin(const Tile& tile, int which) const {
#pragma unroll
    for (int i = 0; i < C::kStages - 2; ++i) {
      if (i < p.blocks) copy_stage<kTokens>(tile, which, i, i);
      commit_copies();
    }
  }
  MOE_OPS_DEVICE void begin_any(const Tile& tile, int which) const {
    with_tokens(tile, [&](auto tokens) { begin<decltype(tokens)::kValue>(tile, which); });
  }

  template <int kValueOf>
  struct Int {
    static constexpr int kValue = kValueOf;
  };
  // Calls f with the narrowest width of the tensor-core tile that holds the tile's rows.
  template <class F>
  MOE_OPS_DEVICE void with_tokens(const Tile& tile, F&& f) const {
    if constexpr (kMaxTokens <= 32) {
      if (tile.rows <= 8) return f(Int<8>{});
      if (tile.rows <= 16) return f(Int<16>{});
      return f(Int<32>{});
    } else {
      if (tile.rows <= 32) return f(Int<32>{});
      if (tile.rows <= 64) return f(Int<64>{});
      if (tile.rows <= 96) return f(Int<96>{});
      return f(Int<128>{});
    }
  }

  template <int kTokens>
  MOE_OPS_DEVICE void store(const Tile& tile, const float (&c)[2][kTokens / 2]) const {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int strip = tile.row_tile * kStrips + (warp / 4 * 2 + m) * 4 + warp % 4;
      if (strip >= p.strips) continue;
      float low_bias = 0, high_bias = 0;
      if (p.m.bias != nullptr) {
        const float* bias = p.m.bias + static_cast<int64_t>(tile.expert) * p.strips * 16;
        if (p.m.activate) {
          bias += (strip * 8 + g) * p.m.row_step;
          low_bias = __ldg(bias + p.m.gate_offset), high_bias = __ldg(bias + p.m.up_offset);
        } else {
          bias += strip * 16 + g;
          low_bias = __ldg(bias), high_bias = __ldg(bias + 8);
        }
      }
#pragma unroll
      for (int i = 0; i < kTokens / 8; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int token = i * 8 + 2 * t + h;
          if (token >= tile.rows) continue;
          const int64_t row = tile.first_row + token;
          const float low = c[m][4 * i + h] + low_bias, high = c[m][4 * i + 2 + h] + high_bias;
          if (p.m.activate) {
            static_cast<__nv_bfloat16*>(p.m.output)[row * (p.strips * 8) + strip * 8 + g] =
                __float2bfloat16_rn(activate(low, high, p.m.oai, p.m.limit, p.m.alpha));
          } else {
            float* out = static_cast<float*>(p.m.output) + row * (p.strips * 16) + strip * 16 + g;
            out[0] = low;
            out[8] = high;
          }
        }
      }
    }
  }

  // The tile, whose first stages are on their way; `next` starts the following tile's as soon as the ring is free.
  template <int kTokens, class Next>
  MOE_OPS_DEVICE void run(const Tile& tile, int which, Next&& next) const {
    float c[2][kTokens / 2];
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i) c[m][i] = 0;
    int slot = 0, ahead = C::kStages - 2;
#pragma unroll 1
    for (int block = 0; block < p.blocks; ++block) {
      wait_copies<C::kStages - 3>();
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncthreads();
      // At most the last block's wgmmas are still at work: the slot of the block before it is free.
      if (block + C::kStages - 2 < p.blocks) copy_stage<kTokens>(tile, which, block + C::kStages - 2, ahead);
      commit_copies();
      ahead = ahead + 1 == C::kStages ? 0 : ahead + 1;
      const uint32_t at = ring + slot * C::kStageBytes, codes_at = at + kTokens * 256,
                     scales_at = codes_at + kStrips * kBlockBytes;
      slot = slot + 1 == C::kStages ? 0 : slot + 1;
      const int words = block < p.full_blocks ? 4 : p.tail_words;
      // Start address, 1024 bytes from one group of eight rows to the next, 128-byte swizzle.
      const uint64_t descriptor = (static_cast<uint64_t>(1) << 62) | (static_cast<uint64_t>(64) << 32) |
                                  (static_cast<uint64_t>(1) << 16) | ((at & 0x3FFFF) >> 4);
      uint32_t low[2][4], high[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const uint32_t from = codes_at + ((warp / 4 * 2 + m) * 4 + warp % 4) * kBlockBytes;
        if (words == 4) {
          const uint4 v = shared_load4(from + lane * 16), w = shared_load4(from + 512 + lane * 16);
          low[m][0] = v.x, low[m][1] = v.y, low[m][2] = v.z, low[m][3] = v.w;
          high[m][0] = w.x, high[m][1] = w.y, high[m][2] = w.z, high[m][3] = w.w;
        } else {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            low[m][j] = j < words ? shared_load1(from + j * 128 + lane * 4) : 0;
            high[m][j] = j < words ? shared_load1(from + (words + j) * 128 + lane * 4) : 0;
          }
        }
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j >= words) break;
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const uint32_t from = scales_at + ((warp / 4 * 2 + m) * 4 + warp % 4) * kBlockScales;
          const uint32_t pair = shared_load_half(from + ((lane >> 2) * words + j) * 2);
          uint32_t x[4], y[4];
          dequantize_bf16(low[m][j], (pair & 0xFF) * 0x00800080u + 0x3F003F00u, x);
          dequantize_bf16(high[m][j], (pair >> 8) * 0x00800080u + 0x3F003F00u, y);
          const uint32_t first[4] = {x[0], y[0], x[1], y[1]}, second[4] = {x[2], y[2], x[3], y[3]};
          wgmma_fence();
          const uint64_t at_group = descriptor + (j / 2) * (kTokens * 8) + j % 2 * 4;
          Wgmma<kTokens>::run(c[m], first, at_group);
          Wgmma<kTokens>::run(c[m], second, at_group + 2);
          wgmma_commit();
          wgmma_wait<1>();
        }
      }
    }
    wgmma_wait<0>();
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i) asm volatile("" : "+f"(c[m][i])::"memory");
    next();
    store<kTokens>(tile, c);
  }
};

template <int kMaxTokens>
__global__ void __launch_bounds__(kThreads, Config<kMaxTokens>::kBlocksPerSm)
    grouped_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  using C = Config<kMaxTokens>;
  const uint32_t start = (smem_address(shared_memory) + 1023) / 1024 * 1024;
  uint64_t* rows =
      reinterpret_cast<uint64_t*>(shared_memory + (start - smem_address(shared_memory)) + C::kStages * C::kStageBytes);
  const int tid = threadIdx.x;
  const Worker<kMaxTokens> worker{p, start, rows, tid, __shfl_sync(~0u, tid >> 5, 0), tid & 31};
  const int total = *p.m.num_tiles * p.row_tiles, step = gridDim.x;
  int index = blockIdx.x, which = 0;
  if (index >= total) return;
  Tile tile = worker.tile_at(index);
  worker.find_rows(tile, which);
  __syncthreads();
  worker.begin_any(tile, which);
  while (true) {
    const int next_index = index + step;
    const bool more = next_index < total;
    Tile next_tile = tile;
    if (more) {
      next_tile = worker.tile_at(next_index);
      worker.find_rows(next_tile, which ^ 1);  // read after the barriers below
    }
    auto next = [&] {
      __syncthreads();  // all warps have read the last stages
      if (more) worker.begin_any(next_tile, which ^ 1);
    };
    worker.with_tokens(tile, [&](auto tokens) { worker.template run<decltype(tokens)::kValue>(tile, which, next); });
    if (!more) return;
    index = next_index, tile = next_tile, which ^= 1;
  }
}

// One block: the tiles of every expert, in order; an expert's rows are divided evenly.
__global__ void __launch_bounds__(1024)
    list_tiles_kernel(const int* counts, int num_experts, int most, int4* tiles, int* num_tiles) {
  __shared__ int sums[2][32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int row_base = 0, tile_base = 0;
  for (int first = 0; first < num_experts; first += 1024) {
    const int expert = first + threadIdx.x;
    const int count = expert < num_experts ? counts[expert] : 0, number = (count + most - 1) / most;
    int rows = count, tile_count = number;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int r = __shfl_up_sync(~0u, rows, d), n = __shfl_up_sync(~0u, tile_count, d);
      if (lane >= d) rows += r, tile_count += n;
    }
    if (lane == 31) sums[0][warp] = rows, sums[1][warp] = tile_count;
    __syncthreads();
    int row = row_base + rows - count, tile = tile_base + tile_count - number;
    for (int w = 0; w < 32; ++w) {
      if (w < warp) row += sums[0][w], tile += sums[1][w];
      row_base += sums[0][w], tile_base += sums[1][w];
    }
    for (int i = 0; i < number; ++i) {
      const int begin = static_cast<int>(static_cast<int64_t>(count) * i / number);
      const int end = static_cast<int>(static_cast<int64_t>(count) * (i + 1) / number);
      tiles[tile + i] = make_int4(expert, row + begin, end - begin, 0);
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) *num_tiles = tile_base;
}

template <int kMaxTokens>
cudaError_t launch(const Params& p, int num_sms, cudaStream_t stream) {
  using C = Config<kMaxTokens>;
  static_assert(C::kStages >= 4, "stages");
  static const cudaError_t prepared =
      cudaFuncSetAttribute(grouped_kernel<kMaxTokens>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kShared);
  if (prepared != cudaSuccess) return prepared;
  grouped_kernel<kMaxTokens><<<num_sms * C::kBlocksPerSm, kThreads, C::kShared, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t list_tiles(const int* counts, int num_experts, int most, void* tiles, int* num_tiles, cudaStream_t stream) {
  list_tiles_kernel<<<1, 1024, 0, stream>>>(counts, num_experts, most, static_cast<int4*>(tiles), num_tiles);
  return cudaGetLastError();
}

cudaError_t grouped(const GroupedMatmul& m, bool wide, int num_sms, cudaStream_t stream) {
  Params p{};
  p.m = m;
  p.full_blocks = m.k / 128, p.tail_words = m.k % 128 / 32;
  p.blocks = p.full_blocks + (p.tail_words > 0);
  p.strips = m.rows_out / 16;
  p.row_tiles = (p.strips + kStrips - 1) / kStrips;
  p.strip_codes = m.k * 8, p.strip_scales = m.k / 2;
  p.expert_codes = static_cast<int64_t>(p.strip_codes) * p.strips;
  p.expert_scales = static_cast<int64_t>(p.strip_scales) * p.strips;
  return wide ? launch<kWideTokens>(p, num_sms, stream) : launch<kNarrowTokens>(p, num_sms, stream);
}

}  // namespace moe_ops::sm90
