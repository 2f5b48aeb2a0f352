// Decode on Hopper: ids in, rows out, in one persistent cooperative kernel of one block per SM.
//
// Everything is bound by reading each chosen expert's weights once, so the kernel is a stream. Weights are the M side
// of the tensor-core tile, up to eight tokens of one expert the N side:
//
//   strip   16 weight rows x all of k; w13: 8 gate rows and their 8 up rows; contiguous in memory
//   block   a strip's 128 k: one 16-byte vector per lane and row half; the last block of a strip may hold 32 to 96 k
//   tile    up to 8 tokens of one expert (fewer where a token's activations are very long)
//
// Each block of the grid takes the same number of consecutive blocks of weights, and of each tile in its range its 12
// consumer warps take equal runs. A strip may be cut: the warp that began it adds what the next ones find, in order,
// through shared memory; where a range ends inside a strip, the two sums meet in memory. A warp feeds itself: bulk
// copies into a ring of its own, which runs ahead over strips, tiles and from w13 to w2, so that memory never waits for
// a barrier. Four helper warps turn the tokens of the coming tiles into fp16 fragments in shared memory. Cuts depend on
// the batch's routing, not on timing; with `one_order` there are none, and a row's result depends on that row alone.
#include <algorithm>

#include "sm90_decode_units.cuh"

namespace moe_ops::sm90 {
namespace {

// One thread: the block's part of the first matrix is in memory; returns when all of its first tile of w2 is.
MOE_OPS_DEVICE void exchange(const Params& p, const Shared& s) {
  const Range mine = range_of(s, 0), next = range_of(s, 1);
  const uint32_t units = p.phase[0].units;
  for (uint32_t tile = mine.begin / units; mine.begin < mine.end && tile * units < mine.end; ++tile) {
    const Range part = mine.of_tile(tile, units);
    publish(p.tile_counters() + tile, part.end - part.begin);
  }
  if (next.begin < next.end) wait_for(p.tile_counters() + next.begin / p.phase[1].units, units);
}

// out[t] = sum over k, in slot order, of weight * row; one rounding.
__device__ void combine(const Params& p, const Shared& s) {
  const Problem& q = p.problem;
  const int columns = q.hidden_size / 4;
  const int total = q.num_tokens * columns;
  const int64_t step = static_cast<int64_t>(q.num_tokens) * q.top_k * q.hidden_size;
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < total; i += gridDim.x * kThreads) {
    const int token = i / columns, column = (i - token * columns) * 4;
    float4 sum = make_float4(0, 0, 0, 0);
    const float* from = p.down + static_cast<int64_t>(token) * q.top_k * q.hidden_size + column;
    constexpr int kAhead = 4;
#pragma unroll 1
    for (int k = 0; k < q.top_k; k += kAhead) {
      // All loads begin at once. Memory of a second piece that does not exist, or of a slot that takes no part, is read
      // and not used.
      float4 v[kAhead], more[kAhead];
      int cut[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const int at = min(k + j, q.top_k - 1);
        cut[j] = load_l2_int(p.cut[1] + (token * q.top_k + at) * p.phase[1].strips + column / 16);
        v[j] = load_l2_float4(from + static_cast<int64_t>(at) * q.hidden_size);
        more[j] = load_l2_float4(from + step + static_cast<int64_t>(at) * q.hidden_size);
      }
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const int slot = token * q.top_k + k + j;
        const float w = k + j < q.top_k ? s.weight[slot] : 0.0f;
        if (w == 0.0f) continue;
        if (cut[j] != 0) v[j].x += more[j].x, v[j].y += more[j].y, v[j].z += more[j].z, v[j].w += more[j].w;
        if (q.w2_bias != nullptr) {
          const float* bias = q.w2_bias + static_cast<int64_t>(s.expert[slot]) * q.hidden_size + column;
          v[j].x += __ldg(bias), v[j].y += __ldg(bias + 1), v[j].z += __ldg(bias + 2), v[j].w += __ldg(bias + 3);
        }
        sum.x = fmaf(w, v[j].x, sum.x), sum.y = fmaf(w, v[j].y, sum.y);
        sum.z = fmaf(w, v[j].z, sum.z), sum.w = fmaf(w, v[j].w, sum.w);
      }
    }
    store_output(q.output, q.output_type, static_cast<int64_t>(token) * q.hidden_size + column, sum);
  }
}

// kAllScales: for weights with scale codes outside 1..128.
template <bool kAllScales>
__global__ void __launch_bounds__(kThreads, 1) decode_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) uint8_t shared_memory[];
  const Slot slot = load_slot(p.problem);
  const int ring_bytes = kWarps * p.stages * p.stage_bytes();
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
  // A barrier takes some 50 cycles to make, one after the other in a warp: every warp makes its own.
  if (elect_one()) {
    if (warp < kWarps) {
#pragma unroll 1
      for (int i = 0; i < p.stages; ++i) barrier_init(smem_address(&s.arrived[warp][i]), 1);
      barrier_init(smem_address(&s.part_ready[0][warp]), 1);
      barrier_init(smem_address(&s.part_ready[1][warp]), 1);
    } else if (warp == kWarps) {
#pragma unroll 1
      for (int i = 0; i < kTileSlots; ++i) barrier_init(smem_address(&s.tile_open[i]), 1);
    } else if (warp == kWarps + 1) {
#pragma unroll 1
      for (int i = 0; i < kTileSlots; ++i) barrier_init(smem_address(&s.tile_done[i]), kWarps);
    } else if (warp == kWarps + 2) {
      barrier_init(smem_address(&s.first_ready[0]), kWarps + kHelperWarps);
      barrier_init(smem_address(&s.first_ready[1]), kWarps + kHelperWarps);
      barrier_init(smem_address(&s.phase_done), kWarps);
      barrier_init(smem_address(&s.next_phase), 1);
    }
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  Stream stream{p,
                s,
                smem_address(shared_memory) + warp * p.stages * p.stage_bytes(),
                smem_address(&s.arrived[warp < kWarps ? warp : 0][0]),
                warp,
                policy_evict_first()};
  __syncwarp();
  const bool small = p.problem.num_tokens * p.problem.top_k <= 32;
  const uint32_t fragments = smem_address(activations);
  if (warp == 0 || !small) route(p, s, reinterpret_cast<int*>(activations), slot);
  __syncthreads();
  // Every warp's first stage comes before anybody's second.
  load_first<0>(p, s, fragments, [&] {
    if (warp < kWarps) {
      stream.start();
      stream.issue();
    }
  });
  __syncwarp();
  if (lane == 0) barrier_arrive(smem_address(&s.first_ready[0]));
  Consumer<kAllScales> consumer{p, s, stream, fragments, warp, lane};
  Helper helper{p, s, fragments};
  if (warp < kWarps) {
#pragma unroll 1
    for (int i = 1; i < p.stages; ++i) stream.issue();
  }
#pragma unroll 1
  for (int which = 0; which < 2; ++which) {
    if (which == 1) {
      barrier_wait(smem_address(&s.next_phase), 0);
      load_first<1>(p, s, fragments, [] {});
      __syncwarp();
      if (lane == 0) barrier_arrive(smem_address(&s.first_ready[1]));
    }
    if (warp < kWarps)
      consumer.run(which);
    else if (which == 0)
      helper.run<0>();
    else
      helper.run<1>();
    if (which == 1) break;
    if (warp < kWarps) {
      __syncwarp();
      if (lane == 0) barrier_arrive(smem_address(&s.phase_done));
    } else if (tid == kConsumers) {
      barrier_wait(smem_address(&s.phase_done), 0);
      exchange(p, s);
      barrier_arrive(smem_address(&s.next_phase));
    }
    __syncwarp();
  }
  __syncthreads();
  if (tid == 0) grid_barrier(p.counters + 1);
  __syncthreads();
  // The last block to come here makes the counters ready for the next call: nobody waits on them any more.
  unsigned here = 0;
  if (tid == kThreads - 32) here = atomicAdd(p.counters + 2, 1u) + 1;
  combine(p, s);
  if (warp == kThreads / 32 - 1 && uniform(here) == gridDim.x) {
    for (int i = lane; i < s.tiles; i += 32) p.tile_counters()[i] = 0;
    if (lane < 3) p.counters[lane] = 0;
  }
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
  ph.strips = strips;
  ph.units = strips * ph.blocks;
  const int stages = (ph.blocks + kStageBlocks - 1) / kStageBlocks;
  ph.stage_blocks = ph.blocks % kStageBlocks == 0 ? kStageBlocks : (ph.blocks + stages - 1) / stages;
  if (ph.blocks % 4 == 0 && ph.blocks % kStageBlocks != 0) ph.stage_blocks = 4;
  ph.row_bytes = ph.blocks * 256 + (ph.blocks * 4 + 63) / 64 * 64;
  if (ph.row_bytes % 128 == 0) ph.row_bytes += 64;  // two tokens' fragments in different banks
  return ph;
}

struct Plan {
  Phase phase[2];
  int stages, stage_room, tile_tokens, shared;
};
Plan plan(const Problem& q) {
  Plan plan{};
  plan.phase[0] = plan_phase(q.w13, q.w13_scale, q.hidden_size, 2 * q.intermediate_size);
  plan.phase[1] = plan_phase(q.w2, q.w2_scale, q.intermediate_size, q.hidden_size);
  const int row = plan.phase[0].row_bytes > plan.phase[1].row_bytes ? plan.phase[0].row_bytes : plan.phase[1].row_bytes;
  plan.stage_room = std::max(plan.phase[0].stage_blocks, plan.phase[1].stage_blocks);
  const int stage_of_all = kWarps * plan.stage_room * (kBlockBytes + kBlockScales);
  const int scratch = (q.num_experts + q.num_tokens * q.top_k) * 4;
  const int room = kSharedLimit - static_cast<int>(sizeof(Shared)), beside = room - 2 * stage_of_all;
  plan.tile_tokens = std::min(std::min(beside / row, kTileTokens), std::max(q.num_tokens, 1));
  // Rows for two full tiles, if two stages fit beside them, but at least for one; then as many stages as fit.
  const int area = std::max(scratch, std::max(std::min(2 * plan.tile_tokens * row, beside), plan.tile_tokens * row));
  plan.stages = std::min((room - area) / stage_of_all, kMaxStages);
  for (Phase& ph : plan.phase) ph.rows = area / ph.row_bytes;
  plan.shared = plan.stages * stage_of_all + static_cast<int>(sizeof(Shared)) + area;
  return plan;
}

}  // namespace

bool decode_supports(const Problem& q) {
  const Plan pl = plan(q);
  const int64_t units = pl.phase[0].units > pl.phase[1].units ? pl.phase[0].units : pl.phase[1].units;
  return pl.tile_tokens > 0 && units * q.num_tokens * q.top_k < (int64_t{1} << 32) / 256 && pl.stages >= 2 &&
         q.num_experts <= kDecodeMaxExperts && q.num_tokens * q.top_k <= kDecodeSlots;
}
size_t decode_scratch_words(const Problem& q) {
  const size_t slots = static_cast<size_t>(q.num_tokens) * q.top_k;
  return slots * (5 * q.intermediate_size + 2 * q.hidden_size + q.intermediate_size / 8 + q.hidden_size / 16);
}

cudaError_t decode(const Problem& problem, const DecodeScratch& scratch, int num_sms, cudaStream_t stream) {
  if (decode_few_supports(problem, scratch, num_sms)) return decode_few(problem, scratch, num_sms, stream);
  if (!decode_supports(problem)) return cudaErrorInvalidValue;
  const auto kernel = scratch.all_scales ? decode_kernel<true> : decode_kernel<false>;
  const cudaError_t allowed = scratch.all_scales ? allow_shared<decode_kernel<true>>(kSharedLimit)
                                                 : allow_shared<decode_kernel<false>>(kSharedLimit);
  if (allowed != cudaSuccess) return allowed;
  const Plan pl = plan(problem);
  const int64_t slots = static_cast<int64_t>(problem.num_tokens) * problem.top_k;
  float* gate_up = static_cast<float*>(scratch.words);
  float* down = gate_up + 4 * slots * problem.intermediate_size;
  int* cut = reinterpret_cast<int*>(down + 2 * slots * problem.hidden_size);
  const Params p{problem,
                 {pl.phase[0], pl.phase[1]},
                 gate_up,
                 down,
                 {cut, cut + slots * pl.phase[0].strips},
                 scratch.counters,
                 pl.stages,
                 pl.stage_room,
                 slots <= kSmallSlots ? 2 : pl.stage_room,
                 pl.tile_tokens,
                 scratch.one_order};
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
  return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace moe_ops::sm90
