// Decode of few tokens: what the kernel of sm90_decode.cu does, where a call's weights are there after 7 to 100 us and
// everything else counts. Differences: 16 warps that multiply, for shorter chains of instructions; every token's
// activations are loaded while the routing is computed; a warp's whole share of both matrices, at most two experts of
// each, is worked out by four lanes at once; loops are not unrolled, since code is fetched anew by every launch; hidden
// values are activated by the warp that has their sums, unless two blocks of the grid share them; each block sums a few
// columns of the output over experts, a lane for each slot.
#include <algorithm>

#include "sm90_decode_few_units.cuh"

namespace moe_ops::sm90 {
namespace {

// One warp of kWarps: its share of all tokens' hidden_states. `meanwhile` is called when the first loads are on their
// way.
template <class Meanwhile>
MOE_OPS_DEVICE void load_tokens(const Params& p, uint32_t activations, int warp, int lane, Meanwhile&& meanwhile) {
  constexpr int kAhead = 4;  // pieces of 128 k whose loads are in flight together
  const Problem& q = p.problem;
  const Matrix& m = p.matrix[0];
  const int pieces = q.num_tokens * m.blocks;
  bool first = true;
#pragma unroll 1
  for (int begin = warp; begin < pieces || first; begin += kAhead * kWarps) {
    uint2 raw[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int at = begin + j * kWarps, token = m.by_blocks.of(at), k = (at - token * m.blocks) * 128 + lane * 4;
      raw[j] = make_uint2(0, 0);
      if (at < pieces && k < m.k)
        raw[j] = load_constant2(static_cast<const char*>(q.hidden_states) + (token * q.hidden_stride + k) * 2);
    }
    if (first) meanwhile();
    first = false;
#pragma unroll 1
    for (int at = begin, j = 0; j < kAhead && at < pieces; ++j, at += kWarps) {
      float f[4];
      widen(f, raw[0], q.hidden_is_fp16);
      const int token = m.by_blocks.of(at);
      place_fragments(activations + token * m.row_bytes, m.blocks, at - token * m.blocks, lane, f);
#pragma unroll
      for (int n = 0; n + 1 < kAhead; ++n) raw[n] = raw[n + 1];
    }
  }
}

// One warp of kWarps: its share of the hidden activations of this block's tiles.
MOE_OPS_DEVICE void load_hidden(const Params& p, const Shared& s, uint32_t activations, int warp, int lane) {
  constexpr int kAhead = 2;
  const Problem& q = p.problem;
  const Matrix& m = s.matrix[1];
  const uint32_t pieces = s.rows * m.blocks, first = m.by_units.of(s.bound[2]);
  const int64_t second = static_cast<int64_t>(q.num_tokens) * q.top_k * q.intermediate_size * 2;
#pragma unroll 1
  for (uint32_t begin = warp; begin < pieces; begin += kAhead * kWarps) {
    const uint32_t in_first = s.count[first];
    float4 sum[kAhead], more[kAhead][3];
    uint32_t row[kAhead], block[kAhead];
    int expert[kAhead];
    bool shared[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const uint32_t at = min(begin + j * kWarps, pieces - 1);
      row[j] = m.by_blocks.of(at), block[j] = at - row[j] * m.blocks;
      const uint32_t other = row[j] < in_first ? 0 : 1, k = block[j] * 128 + lane * 4;
      const int slot = s.order[(first + other) * kTokens + row[j] - (other ? in_first : 0)];
      expert[j] = s.tile_expert[first + other];
      sum[j] = make_float4(0, 0, 0, 0);
      shared[j] = k < m.k && (s.shared_strips[other][k / 256] >> k / 8 % 32 & 1);
      const int64_t of = static_cast<int64_t>(slot) * q.intermediate_size + k;
      if (shared[j]) {
        const float* from = p.pieces + of * 2;
        sum[j] = load_l2_float4(from), more[j][0] = load_l2_float4(from + 4);
        more[j][1] = load_l2_float4(from + second), more[j][2] = load_l2_float4(from + second + 4);
      } else if (k < m.k) {
        sum[j] = load_l2_float4(p.hidden + of);
      }
    }
#pragma unroll 1
    for (int j = 0; j < kAhead && begin + j * kWarps < pieces; ++j) {
      float f[4] = {sum[0].x, sum[0].y, sum[0].z, sum[0].w};
      if (shared[0]) {
        const float4(&b)[3] = more[0];
        const float gate[4] = {f[0] + b[1].x, f[2] + b[1].z, b[0].x + b[2].x, b[0].z + b[2].z};
        const float up[4] = {f[1] + b[1].y, f[3] + b[1].w, b[0].y + b[2].y, b[0].w + b[2].w};
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const float2 bias = hidden_bias(q, expert[0], block[0] * 128 + lane * 4 + n);
          f[n] = activate(gate[n] + bias.x, up[n] + bias.y, q.oai, q.limit, q.alpha);
        }
      }
      __syncwarp();
      place_fragments(activations + row[0] * m.row_bytes, m.blocks, block[0], lane, f);
      sum[0] = sum[1], row[0] = row[1], block[0] = block[1], expert[0] = expert[1], shared[0] = shared[1];
#pragma unroll
      for (int n = 0; n < 3; ++n) more[0][n] = more[1][n];
    }
  }
}

// One thread: the block's part of the first matrix is in memory; returns when all of its tiles of the second are.
MOE_OPS_DEVICE void exchange(const Params& p, const Shared& s) {
  const Matrix &m = p.matrix[0], &next = p.matrix[1];
  if (s.bound[0] < s.bound[1]) {
    const uint32_t tile = m.by_units.of(s.bound[0]), edge = min((tile + 1) * m.units, s.bound[1]);
    publish(p.tile_counters() + tile, edge - s.bound[0]);
    if (edge < s.bound[1]) publish(p.tile_counters() + tile + 1, s.bound[1] - edge);
  }
  if (s.rows > 0) {
    const uint32_t tile = next.by_units.of(s.bound[2]), last = next.by_units.of(s.bound[3] - 1);
    wait_for(p.tile_counters() + tile, m.units);
    if (last > tile) wait_for(p.tile_counters() + last, m.units);
  }
}

// out[t] = sum over k, in slot order, of weight * row; one rounding. A lane takes four columns of one slot; they meet
// in the lane of the first.
MOE_OPS_DEVICE void combine(const Params& p, const Shared& s, int warp, int lane) {
  const Problem& q = p.problem;
  const int total = q.num_tokens * q.hidden_size / 4;
  const int sub = p.by_top_k.of(lane), first = sub * q.top_k, k = lane - first;
#pragma unroll 1
  for (int task = warp * gridDim.x + blockIdx.x; task * p.columns_of_warp < total; task += (kWarps + 1) * gridDim.x) {
    const int at = task * p.columns_of_warp + sub, i = min(at, total - 1);
    const int token = p.by_columns.of(i), column = i * 4 - token * q.hidden_size, slot = token * q.top_k + k;
    // Memory of a second piece that does not exist, or of a slot that takes no part, is read and not used.
    const int cut = load_l2_int(p.cut + slot * p.matrix[1].strips + column / 16);
    const float* from = p.down + static_cast<int64_t>(slot) * q.hidden_size + column;
    float4 v = load_l2_float4(from);
    const float4 more = load_l2_float4(from + static_cast<int64_t>(q.num_tokens) * q.top_k * q.hidden_size);
    const float weight = s.weight[slot];
    float4 bias = make_float4(0, 0, 0, 0);
    if (q.w2_bias != nullptr && weight != 0.0f) {
      const float* of = q.w2_bias + static_cast<int64_t>(s.expert[slot]) * q.hidden_size + column;
      bias = make_float4(__ldg(of), __ldg(of + 1), __ldg(of + 2), __ldg(of + 3));
    }
    if (cut != 0) v.x += more.x, v.y += more.y, v.z += more.z, v.w += more.w;
    if (q.w2_bias != nullptr) v.x += bias.x, v.y += bias.y, v.z += bias.z, v.w += bias.w;
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 1
    for (int j = first; j < first + q.top_k; ++j) {
      const float w = __shfl_sync(~0u, weight, j);
      const float4 x = make_float4(__shfl_sync(~0u, v.x, j), __shfl_sync(~0u, v.y, j), __shfl_sync(~0u, v.z, j),
                                   __shfl_sync(~0u, v.w, j));
      if (w != 0.0f) {
        sum.x = fmaf(w, x.x, sum.x), sum.y = fmaf(w, x.y, sum.y);
        sum.z = fmaf(w, x.z, sum.z), sum.w = fmaf(w, x.w, sum.w);
      }
    }
    if (k == 0 && sub < p.columns_of_warp && at < total)
      store_output(q.output, q.output_type, static_cast<int64_t>(token) * q.hidden_size + column, sum);
  }
}

template <bool kMany>
__global__ void __launch_bounds__(kThreads, 1) decode_few_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) uint8_t shared_memory[];
  Shared& s = *reinterpret_cast<Shared*>(shared_memory);
  const int tid = threadIdx.x, warp = uniform(tid >> 5), lane = tid & 31;
  const uint32_t activations = smem_address(shared_memory + sizeof(Shared));
  // A barrier takes some 50 cycles to make: every warp makes its own, while its first loads are on their way.
  const auto prepare = [&] {
    if (elect_one()) {
      if (warp < kWarps) {
#pragma unroll 1
        for (int i = 0; i < p.max_stages; ++i) barrier_init(smem_address(&s.arrived[warp][i]), 1);
        barrier_init(smem_address(&s.part_ready[0][warp]), 1);
        barrier_init(smem_address(&s.part_ready[1][warp]), 1);
      } else {
        barrier_init(smem_address(&s.phase_done), kWarps);
        barrier_init(smem_address(&s.next_phase), 1);
      }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    if (warp == kWarps) {
#pragma unroll 1
      for (int i = lane; i < static_cast<int>(sizeof(p.matrix) / 4); i += 32)
        reinterpret_cast<uint32_t*>(s.matrix)[i] = reinterpret_cast<const uint32_t*>(p.matrix)[i];
    }
  };
  if (warp == 0)
    route(p, s, shared_memory + kSharedLimit - p.problem.num_experts, lane, prepare);
  else
    load_tokens(p, activations, warp - 1, lane, prepare);
  __syncthreads();
  if (warp < kWarps) {
    const int stages = p.stages[s.rows];
    const uint32_t ring = smem_address(shared_memory) + p.ring[s.rows] + warp * stages * p.stage_bytes;
    Warp w{p, s, activations, warp, lane, stages, ring, smem_address(&s.arrived[warp][0]), policy_evict_first()};
    w.find_segments();
#pragma unroll 1
    for (int i = 0; i < stages; ++i) w.issue();
#pragma unroll 1
    for (int which = 0; which < 2; ++which) {
      if (which == 1) {
        __syncwarp();
        if (lane == 0) barrier_arrive(smem_address(&s.phase_done));
        barrier_wait(smem_address(&s.next_phase), 0);
        load_hidden(p, s, activations, warp, lane);
        named_barrier(1, kConsumers);
      }
      w.run<kMany>(which);
    }
  } else {
    find_shared_strips(p, s, lane);
    __syncwarp();
    if (lane == 0) {
      barrier_wait(smem_address(&s.phase_done), 0);
      exchange(p, s);
      barrier_arrive(smem_address(&s.next_phase));
    }
  }
  __syncthreads();
  if (tid == 0) {
    publish(p.counters + 1, 1);
    wait_for(p.counters + 1, gridDim.x);
  }
  __syncthreads();
  // The last block to come here makes the counters ready for the next call: nobody waits on them any more.
  unsigned here = 0;
  if (tid == kConsumers) here = atomicAdd(p.counters + 2, 1u) + 1;
  combine(p, s, warp, lane);
  if (warp == kWarps && uniform(here) == gridDim.x) {
    for (int i = lane; i < s.tiles; i += 32) p.tile_counters()[i] = 0;
    if (lane < 3) p.counters[lane] = 0;
  }
}

Divisor divisor(uint32_t d) {
  int shift = 0;
  while ((uint64_t{1} << (shift + 1)) < d) ++shift;  // 2^shift < d <= 2^(shift + 1)
  return {static_cast<uint32_t>(((uint64_t{1} << (32 + shift)) + d - 1) / d), shift};
}
Matrix matrix(const uint8_t* codes, const uint8_t* scales, int k, int rows_out) {
  Matrix m{};
  m.codes = codes, m.scales = scales, m.k = k;
  m.full_blocks = k / 128, m.tail_words = k % 128 / 32;
  m.blocks = m.full_blocks + (m.tail_words > 0);
  m.strip_codes = k * 8, m.strip_scales = k / 2, m.strips = rows_out / 16;
  m.expert_codes = static_cast<int64_t>(m.strip_codes) * m.strips;
  m.expert_scales = static_cast<int64_t>(m.strip_scales) * m.strips;
  m.units = m.strips * m.blocks;
  m.by_blocks = divisor(m.blocks), m.by_units = divisor(m.units);
  m.row_bytes = m.blocks * 256 + (m.blocks * 4 + 63) / 64 * 64;
  if (m.row_bytes % 128 == 0) m.row_bytes += 64;  // two tokens' fragments in different banks
  return m;
}

// Everything but scratch memory; false where the problem is not for this kernel.
bool plan(const Problem& q, int num_sms, Params& p) {
  const int slots = q.num_tokens * q.top_k;
  if (q.num_tokens < 1 || q.num_tokens > kTokens || slots > std::min(kSlots, num_sms) || q.top_k < 2 || q.top_k > 32 ||
      q.num_experts > kFewMaxExperts)
    return false;
  p.problem = q;
  p.matrix[0] = matrix(q.w13, q.w13_scale, q.hidden_size, 2 * q.intermediate_size);
  p.matrix[1] = matrix(q.w2, q.w2_scale, q.intermediate_size, q.hidden_size);
  const int blocks = static_cast<int>(std::min(p.matrix[0].blocks, p.matrix[1].blocks));
  if (blocks < 2 || p.matrix[0].strips > kMaxStrips) return false;
  for (const Matrix& m : p.matrix)
    if (static_cast<int64_t>(slots) * m.units * num_sms >= (int64_t{1} << 31)) return false;
  p.by_grid = divisor(num_sms), p.by_top_k = divisor(q.top_k), p.by_columns = divisor(q.hidden_size / 4);
  p.columns_of_warp = 32 / q.top_k;
  // Long stages take fewer instructions; but two must fit in any case, and three in the usual one.
  for (p.stage_blocks = std::min(4, blocks); p.stage_blocks >= 2; --p.stage_blocks) {
    p.stage_bytes = p.stage_blocks * (kBlockBytes + kBlockScales);
    for (int rows = 0; rows <= 2 * q.num_tokens; ++rows) {
      const int area = std::max(q.num_tokens * p.matrix[0].row_bytes, rows * p.matrix[1].row_bytes);
      p.ring[rows] = (static_cast<int>(sizeof(Shared)) + area + 127) / 128 * 128;
      const int stages = (kSharedLimit - static_cast<int>(p.ring[rows])) / (kWarps * p.stage_bytes);
      p.stages[rows] = std::max(std::min(stages, kMaxStages), 0);
    }
    p.max_stages = p.stages[0];
    if (p.stages[2 * q.num_tokens] >= 2 && p.stages[2] >= 3) return true;
  }
  return false;
}

}  // namespace

bool decode_few_supports(const Problem& problem, const DecodeScratch& scratch, int num_sms) {
  Params p{};
  return !scratch.one_order && !scratch.all_scales && plan(problem, num_sms, p);
}

cudaError_t decode_few(const Problem& problem, const DecodeScratch& scratch, int num_sms, cudaStream_t stream) {
  Params p{};
  if (!plan(problem, num_sms, p)) return cudaErrorInvalidValue;
  const bool many = problem.num_tokens > 2;
  const auto kernel = many ? decode_few_kernel<true> : decode_few_kernel<false>;
  const cudaError_t allowed =
      many ? allow_shared<decode_few_kernel<true>>(kSharedLimit) : allow_shared<decode_few_kernel<false>>(kSharedLimit);
  if (allowed != cudaSuccess) return allowed;
  const int64_t slots = static_cast<int64_t>(problem.num_tokens) * problem.top_k;
  p.pieces = static_cast<float*>(scratch.words);
  p.down = p.pieces + 4 * slots * problem.intermediate_size;
  p.hidden = p.down + 2 * slots * problem.hidden_size;
  p.cut = reinterpret_cast<int*>(p.hidden + slots * problem.intermediate_size);
  p.counters = scratch.counters;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(num_sms);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kSharedLimit;
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
