// Decode on Hopper: ids in, rows out, in one persistent cooperative kernel of one block per SM.
//
// Everything is bound by reading each chosen expert's weights once, so the kernel is a stream. Weights are the M side
// of the tensor-core tile, up to eight tokens of one expert the N side:
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
#include "sm90_decode_units.cuh"

namespace moe_ops::sm90 {
namespace {

// The helpers: the activations of the tiles to come, and the wait between the phases.
__device__ void help(const Params& p, Shared& s, uint32_t activations) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x - kConsumers) >> 5;
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
        TileLoader<0>{p, s, entry, row, activations}.run(warp, kHelperWarps, [] {});
      else
        TileLoader<1>{p, s, entry, row, activations}.run(warp, kHelperWarps, [] {});
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
    Stream stream{p,
                  s,
                  smem_address(shared_memory) + warp * p.stages * kStageBytes,
                  smem_address(&s.arrived[warp][0]),
                  warp,
                  policy_evict_first()};
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

Phase plan_phase(const uint8_t* codes, const uint8_t* scales, int k, int rows_out) {
  Phase ph{};
  ph.codes = codes, ph.scales = scales;
  ph.k = k, ph.full_blocks = k / 128, ph.tail_words = k % 128 / 32;
  ph.blocks = ph.full_blocks + (ph.tail_words > 0);
  ph.strip_codes = k * 8, ph.strip_scales = k / 2;
  const int strips = rows_out / 16;
  ph.expert_codes = static_cast<int64_t>(ph.strip_codes) * strips;
  ph.expert_scales = static_cast<int64_t>(ph.strip_scales) * strips;
  // Parts of 8 to 16 blocks keep the warps busy with few strips. Their places depend on k alone.
  while (ph.parts_log2 < 3 && ph.blocks >> ph.parts_log2 > 16) ++ph.parts_log2;
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
Plan plan(const Problem& q) {
  Plan plan{};
  plan.phase[0] = plan_phase(q.w13, q.w13_scale, q.hidden_size, 2 * q.intermediate_size);
  plan.phase[1] = plan_phase(q.w2, q.w2_scale, q.intermediate_size, q.hidden_size);
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
  const Plan pl = plan(q);
  const int64_t units = pl.phase[0].units > pl.phase[1].units ? pl.phase[0].units : pl.phase[1].units;
  return pl.tile_tokens > 0 && units * q.num_tokens * q.top_k < (int64_t{1} << 32) / 256 &&
         q.num_experts <= kDecodeMaxExperts && q.num_tokens * q.top_k <= kDecodeSlots;
}
size_t decode_gate_up_floats(const Problem& q) {
  return (static_cast<size_t>(q.num_tokens) * q.top_k * q.intermediate_size * 2) << plan(q).phase[0].parts_log2;
}
size_t decode_down_floats(const Problem& q) {
  return (static_cast<size_t>(q.num_tokens) * q.top_k * q.hidden_size) << plan(q).phase[1].parts_log2;
}

cudaError_t decode(const Problem& problem, const DecodeScratch& scratch, int num_sms, cudaStream_t stream) {
  if (!decode_supports(problem)) return cudaErrorInvalidValue;
  static const cudaError_t prepared =
      cudaFuncSetAttribute(decode_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedLimit);
  if (prepared != cudaSuccess) return prepared;
  const Plan pl = plan(problem);
  const Params p{problem,        {pl.phase[0], pl.phase[1]}, scratch.gate_up, scratch.down, scratch.counters, pl.stages,
                 pl.tile_tokens, scratch.one_order};
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
