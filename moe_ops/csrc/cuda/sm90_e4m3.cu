// Larger batches on Hopper with e4m3 activations: the grouped matmul of sm90_grouped.cu at twice the rate of the tensor
// cores. Weights become e4m3 exactly: a code has two significant bits, and a table holds the codes' magnitudes times
// each of the powers of two from 2^-8 to 2^6 that a scale may be of its row's first scale, by which sums are
// multiplied. An activation row has one scale, a power of two as well, so that rounding to e4m3 and the tensor cores'
// sums are all that is not exact.
#include <cuda_fp8.h>

#include "sm90_e4m3_tiles.cuh"

namespace moe_ops::sm90 {
namespace {

using Tiles = E4m3Config<2, 2, kE4m3Tokens, 208, 88>;

template <class C, bool kFirst>
__global__ void __launch_bounds__(C::kThreads, 1) e4m3_kernel(const __grid_constant__ E4m3Params q) {
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  __shared__ __align__(16) uint8_t table[32 * 8];
  E4m3Ring<C> ring{(smem_address(shared_memory) + 1023) / 1024 * 1024};
  const int tid = threadIdx.x, group = __shfl_sync(~0u, tid >> 7, 0), warp = __shfl_sync(~0u, (tid >> 5) & 3, 0);
  if (tid == 0) {
    for (int i = 0; i < C::kStages; ++i) {
      barrier_init(ring.full(i), 128);
      barrier_init(ring.empty(i), C::kGroups * 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (tid < 256) {
    constexpr uint64_t kTwiceTheMagnitudes = 0x0C08060403020100;
    const float magnitude = static_cast<float>(kTwiceTheMagnitudes >> tid % 8 * 8 & 255);
    const int power = tid / 8 - kE4m3Below - 1;
    table[tid] = power < kE4m3Above ? __nv_cvt_float_to_fp8(ldexpf(magnitude, power), __NV_SATFINITE, __NV_E4M3) : 0;
  }
  const int total = *q.p.m.num_tiles * q.p.row_tiles;
  __syncthreads();
  if (group == C::kGroups) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(C::kFetchRegisters));
    E4m3Producer<C, kFirst>{q.p, q.row_scale, ring, tid & 127}.run(total);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(C::kRegisters));
    E4m3Consumer<C, kFirst>{q.p, reinterpret_cast<const char*>(table), ring, group, warp, tid & 31}.run(total);
  }
}

template <class C, bool kFirst>
cudaError_t launch_one(const E4m3Params& q, int num_sms, cudaStream_t stream) {
  static const cudaError_t prepared =
      cudaFuncSetAttribute(e4m3_kernel<C, kFirst>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kShared);
  if (prepared != cudaSuccess) return prepared;
  e4m3_kernel<C, kFirst><<<num_sms, C::kThreads, C::kShared, stream>>>(q);
  return cudaGetLastError();
}

constexpr int kQuantizeThreads = 256;

// A block takes a row. The scale is the least power of two that leaves nothing above 448, as in the MXFP8 quantiser,
// but one for the row: 2^ceil(log2(amax / 448)), by exponent bits; 0 for a row of zeros, NaN where the row is not
// finite.
__global__ void __launch_bounds__(kQuantizeThreads)
    quantize_rows_kernel(const __nv_bfloat16* rows, int64_t stride, int64_t num_rows, int width, const int* row_map,
                         int top_k, uint8_t* quantized, float* scale) {
  __shared__ uint32_t largest[kQuantizeThreads / 32];
  const int64_t row = blockIdx.x;
  rows += row * stride, quantized += row * width;
  // Of 16 elements a thread; magnitudes of bf16 compare like integers, NaN above all.
  uint32_t most = 0;
  for (int at = threadIdx.x * 16; at < width; at += kQuantizeThreads * 16) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint4 v = *reinterpret_cast<const uint4*>(rows + at + h * 8);
      most = __vmaxu2(__vmaxu2(most, v.x & 0x7FFF7FFFu),
                      __vmaxu2(v.y & 0x7FFF7FFFu, __vmaxu2(v.z & 0x7FFF7FFFu, v.w & 0x7FFF7FFFu)));
    }
  }
  most = __reduce_max_sync(~0u, max(most & 0xFFFFu, most >> 16));
  if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = most;
  __syncthreads();
  for (int i = 0; i < kQuantizeThreads / 32; ++i) most = max(most, largest[i]);
  // A bf16 has 7 bits of mantissa; 448 is 1.75 * 2^8.
  const int exponent = max(static_cast<int>(most >> 7) - 8 + ((most & 127) > 96), 1);
  const bool finite = most < 0x7F80;
  const float power = finite ? (most == 0 ? 0.0f : __uint_as_float(exponent << 23)) : __uint_as_float(0x7FC00000u);
  const float inverse = __uint_as_float((254 - exponent) << 23);
  if (row_map == nullptr) {
    if (threadIdx.x == 0) scale[row] = power;
  } else if (threadIdx.x < top_k) {
    const int to = row_map[row * top_k + threadIdx.x];
    if (to >= 0) scale[to] = power;
  }
  for (int at = threadIdx.x * 16; at < width; at += kQuantizeThreads * 16) {
    // Elements 16 to 31 of a group of 32 come first, interleaved by eights; see dequantize_e4m3.
    const uint4 v = *reinterpret_cast<const uint4*>(rows + at), w = *reinterpret_cast<const uint4*>(rows + at + 8);
    const uint32_t low[4] = {w.x, w.y, w.z, w.w}, high[4] = {v.x, v.y, v.z, v.w};
    uint32_t out[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t pair[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float x = __uint_as_float(h ? low[i] & 0xFFFF0000u : low[i] << 16) * inverse;
        const float y = __uint_as_float(h ? high[i] & 0xFFFF0000u : high[i] << 16) * inverse;
        pair[h] = __nv_cvt_float2_to_fp8x2(make_float2(x, y), __NV_SATFINITE, __NV_E4M3);
      }
      out[i] = pair[0] | pair[1] << 16;
    }
    *reinterpret_cast<uint4*>(quantized + (at ^ 16)) = make_uint4(out[0], out[1], out[2], out[3]);
  }
}

}  // namespace

cudaError_t quantize_rows(const void* rows, int64_t stride, int64_t num_rows, int width, const int* row_map, int top_k,
                          void* quantized, float* scale, cudaStream_t stream) {
  if (num_rows == 0) return cudaSuccess;
  quantize_rows_kernel<<<static_cast<unsigned>(num_rows), kQuantizeThreads, 0, stream>>>(
      static_cast<const __nv_bfloat16*>(rows), stride, num_rows, width, row_map, top_k,
      static_cast<uint8_t*>(quantized), scale);
  return cudaGetLastError();
}

cudaError_t grouped_e4m3(const GroupedMatmul& m, const float* row_scale, int num_sms, cudaStream_t stream) {
  E4m3Params q{params_of(m), row_scale};
  q.p.row_tiles = (q.p.strips + kStrips - 1) / kStrips;
  return m.first ? launch_one<Tiles, true>(q, num_sms, stream) : launch_one<Tiles, false>(q, num_sms, stream);
}

}  // namespace moe_ops::sm90
