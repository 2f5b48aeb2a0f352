// What both decode kernels do with weights and activations. See sm90_decode.cu and sm90_decode_few.cu.
#pragma once

#include "sm90_common.cuh"

namespace moe_ops::sm90 {
namespace {

constexpr int kBlockBytes = 1024, kBlockScales = 64;  // of 16 weight rows x 128 k
constexpr int kSharedLimit = 232448;

template <class T>
MOE_OPS_DEVICE T uniform(T value) {
  return __shfl_sync(~0u, value, 0);
}

// What other threads of the block wrote is visible to whoever sees the counter, if a barrier of the block lies between.
MOE_OPS_DEVICE void publish(unsigned* counter, unsigned amount) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(amount) : "memory");
}
MOE_OPS_DEVICE void wait_for(const unsigned* counter, unsigned amount) {
  unsigned seen;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
  } while (seen < amount);
}

// 128 k of one token as fp16 fragments, by a warp, a lane 4 of them. They are scaled by a power of two that brings the
// largest to 2^14..2^15: nothing is lost above 2^-29 of it. What undoes that, and the 2^-14 of the codes, lies behind
// the row's `blocks` blocks.
MOE_OPS_DEVICE void place_fragments(uint32_t row, int blocks, int block, int lane, const float (&f)[4]) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) largest = max(largest, __float_as_uint(f[i]) & 0x7FFFFFFFu);
  largest = __reduce_max_sync(~0u, largest);
  const uint32_t e = min(max(largest >> 23, 15u), 254u);
  const float factor = __uint_as_float((268 - e) << 23);
  // k = 4 * lane: group lane / 8, elements 8i + 2t with i = lane / 2 % 4 and t = 2 * (lane % 2)
  const uint32_t to = row + block * 256 + (lane >> 3) * 64 + (lane & 1) * 32 + (lane >> 1 & 3) * 4;
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(f[2 * t + 1] * factor), "f"(f[2 * t] * factor));
    shared_store1(to + t * 16, pair);
  }
  if (lane == 0) shared_store1(row + blocks * 256 + block * 4, e << 23);
}
// Four elements of a bf16 or fp16 row.
MOE_OPS_DEVICE void widen(float (&f)[4], uint2 raw, bool fp16) {
  if (fp16) {
    const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&raw.x));
    const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&raw.y));
    f[0] = low.x, f[1] = low.y, f[2] = high.x, f[3] = high.y;
  } else {
    f[0] = __uint_as_float(raw.x << 16), f[1] = __uint_as_float(raw.x & 0xFFFF0000u);
    f[2] = __uint_as_float(raw.y << 16), f[3] = __uint_as_float(raw.y & 0xFFFF0000u);
  }
}

// A lane's share of one block: codes of rows g and g + 8.
struct Block {
  uint4 low, high;
};
MOE_OPS_DEVICE void load_full(Block& b, uint32_t at, int lane) {
  b.low = shared_load4(at + lane * 16);
  b.high = shared_load4(at + 512 + lane * 16);
}
// The last block of a strip, of fewer than 128 k: `words` groups.
MOE_OPS_DEVICE void load_partial(Block& b, uint32_t at, int words, int lane) {
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

// c += one block. x: this lane's column's fragments, scales: the block's, [row 8][group 4][row half 2], or fewer groups
// (`words`) in a partial block. v: the fragments; with kGroups > 1 a lane loads those of its own column's group alone,
// and what it has for the others stays zero.
template <int kGroups, bool kFull>
MOE_OPS_DEVICE void multiply_block(float (&c)[4], const Block& b, uint32_t x, uint32_t scales, int words, float back0,
                                   float back1, int g, int t, uint4 (&v)[4]) {
  const uint32_t low[4] = {b.low.x, b.low.y, b.low.z, b.low.w}, high[4] = {b.high.x, b.high.y, b.high.z, b.high.w};
  const int mine = Columns<kGroups>::group(g);
  float sum[4] = {0, 0, 0, 0};
#pragma unroll
  for (int first = 0; first < 4; first += kGroups) {
    const int j = first + Columns<kGroups>::group(2 * t);
    uint32_t pair = 0;
    if (kFull)
      pair = shared_load_half(scales + g * 8 + j * 2);
    else if (j < words)
      pair = shared_load_half(scales + (g * words + j) * 2);
    float d[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      if (kGroups == 1 || mine == i) v[i] = shared_load4(x + (first + i) * 64);
      multiply_group(d, low[first + i], high[first + i], v[i]);
    }
    const float s0 = __uint_as_float((pair << 23) & 0x7F800000u), s1 = __uint_as_float((pair << 15) & 0x7F800000u);
    sum[0] = fmaf(d[0], s0, sum[0]), sum[1] = fmaf(d[1], s0, sum[1]);
    sum[2] = fmaf(d[2], s1, sum[2]), sum[3] = fmaf(d[3], s1, sum[3]);
  }
  c[0] = fmaf(sum[0], back0, c[0]), c[1] = fmaf(sum[1], back1, c[1]);
  c[2] = fmaf(sum[2], back0, c[2]), c[3] = fmaf(sum[3], back1, c[3]);
}

// The whole row's sum, in the lanes of group 0, from the sums of each group's columns.
template <int kGroups>
MOE_OPS_DEVICE void add_groups(float (&c)[4]) {
  if (kGroups == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i] += __shfl_xor_sync(~0u, c[i], 1);
  }
  if (kGroups >= 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i] += __shfl_xor_sync(~0u, c[i], 2);
  }
}

}  // namespace
}  // namespace moe_ops::sm90
