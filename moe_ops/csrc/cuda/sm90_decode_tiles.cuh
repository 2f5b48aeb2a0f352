// Activations of the decode kernel: from memory to fp16 fragments. See sm90_decode.cu.
#pragma once

#include "sm90_decode_route.cuh"

namespace moe_ops::sm90 {
namespace {

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
// A warp takes 128 k of one token, a lane 4 of them. kPhase 0: from hidden_states; 1: from the sums of the first
// matrix, which are activated on the way.
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
    return load_volatile2(static_cast<const char*>(q.hidden_states) + (row * q.hidden_stride + k) * 2);
  }

  // The first matrix's rows of piece `index`, summed over the parts, with biases, activated.
  MOE_OPS_DEVICE void activated(int index, float (&f)[4]) {
    const Problem& q = p.problem;
    const Phase& ph = p.phase[1];
    const int token = index / ph.blocks, k = (index - token * ph.blocks) * 128 + (threadIdx.x & 31) * 4;
    if (k >= ph.k) return;
    const int64_t step = static_cast<int64_t>(q.num_tokens) * q.top_k * q.intermediate_size * 2;
    const float* from = p.gate_up + (static_cast<int64_t>(s.order[entry.y + token]) * q.intermediate_size + k) * 2;
    float4 sum[2] = {load_l2_float4(from), load_l2_float4(from + 4)};
#pragma unroll 1
    for (int part = 1; part < 1 << p.phase[0].parts_log2; ++part) {
      from += step;
      const float4 v[2] = {load_l2_float4(from), load_l2_float4(from + 4)};
#pragma unroll
      for (int i = 0; i < 2; ++i) sum[i].x += v[i].x, sum[i].y += v[i].y, sum[i].z += v[i].z, sum[i].w += v[i].w;
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
    const int lane = threadIdx.x & 31, token = index / ph.blocks, block = index - token * ph.blocks;
    int row = first_row + token;
    if (row >= ph.rows) row -= ph.rows;
    const uint32_t at = activations + row * ph.row_bytes;
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) largest = max(largest, __float_as_uint(f[i]) & 0x7FFFFFFFu);
    largest = __reduce_max_sync(~0u, largest);
    const uint32_t e = min(max(largest >> 23, 15u), 254u);
    const float factor = __uint_as_float((268 - e) << 23);
    // k = 4 * lane: group lane / 8, elements 8i + 2t with i = lane / 2 % 4 and t = 2 * (lane % 2)
    const uint32_t to = at + block * 256 + (lane >> 3) * 64 + (lane & 1) * 32 + (lane >> 1 & 3) * 4;
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      uint32_t pair;
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(f[2 * t + 1] * factor), "f"(f[2 * t] * factor));
      shared_store1(to + t * 16, pair);
    }
    if (lane == 0) shared_store1(at + ph.blocks * 256 + block * 4, e << 23);
  }

  // The share of one of `warps` warps. `meanwhile` is called when the first loads are on their way.
  template <class Meanwhile>
  MOE_OPS_DEVICE void run(int warp, int warps, Meanwhile&& meanwhile) {
    const int total = (entry.x >> 24) * p.phase[kPhase].blocks;
    if (kPhase == 1) meanwhile();
    int i = warp;
    bool begun = kPhase == 1;
    while (i < total || !begun) {
      if (kPhase == 0) {
        constexpr int kAhead = 4;
        uint2 raw[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; ++j) raw[j] = read(i + j * warps);
        if (!begun) meanwhile();
        begun = true;
#pragma unroll 1
        for (int j = 0; j < kAhead && i < total; ++j, i += warps) {
          float f[4];
          if (p.problem.hidden_is_fp16) {
            const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&raw[0].x));
            const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&raw[0].y));
            f[0] = low.x, f[1] = low.y, f[2] = high.x, f[3] = high.y;
          } else {
            f[0] = __uint_as_float(raw[0].x << 16), f[1] = __uint_as_float(raw[0].x & 0xFFFF0000u);
            f[2] = __uint_as_float(raw[0].y << 16), f[3] = __uint_as_float(raw[0].y & 0xFFFF0000u);
          }
          place(i, f);
#pragma unroll
          for (int n = 0; n + 1 < kAhead; ++n) raw[n] = raw[n + 1];
        }
      } else {
        float f[4] = {0, 0, 0, 0};
        activated(i, f);
        place(i, f);
        i += warps;
      }
    }
  }
};

// The first tile of a phase, by all warps of the block.
template <int kPhase, class Meanwhile>
MOE_OPS_DEVICE void load_first(const Params& p, Shared& s, uint32_t activations, Meanwhile&& meanwhile) {
  const uint32_t units = p.phase[kPhase].units;
  const Range range = range_of(s, kPhase);
  if (range.begin == range.end) return meanwhile();
  TileLoader<kPhase>{p, s, s.tile[range.begin / units], 0, activations}.run(threadIdx.x >> 5, kThreads / 32, meanwhile);
  __syncwarp();
  if ((threadIdx.x & 31) == 0) barrier_arrive(smem_address(&s.first_ready[kPhase]));
}

}  // namespace
}  // namespace moe_ops::sm90
