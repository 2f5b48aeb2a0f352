// PTX helpers and the exact MXFP4 -> bf16 conversion shared by the sm_90a kernels.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <atomic>
#include <cstdint>

#include "fused_mxfp4_moe_sm90.h"

namespace moe_ops::sm90 {

#define MOE_OPS_DEVICE __device__ __forceinline__

MOE_OPS_DEVICE uint32_t smem_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// mbarrier
MOE_OPS_DEVICE void barrier_init(uint32_t bar, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
MOE_OPS_DEVICE void barrier_expect(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
MOE_OPS_DEVICE void barrier_arrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
MOE_OPS_DEVICE void barrier_wait(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "wait:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra ready;\n"
      "bra wait;\n"
      "ready:\n"
      "}\n" ::"r"(bar),
      "r"(parity)
      : "memory");
}
MOE_OPS_DEVICE void add_release(int* shared, int amount) {
  asm volatile("red.release.cta.shared::cta.add.u32 [%0], %1;" ::"r"(smem_address(shared)), "r"(amount) : "memory");
}
MOE_OPS_DEVICE int load_acquire(const int* shared) {
  int v;
  asm volatile("ld.acquire.cta.shared::cta.s32 %0, [%1];" : "=r"(v) : "r"(smem_address(shared)) : "memory");
  return v;
}
MOE_OPS_DEVICE bool elect_one() {
  uint32_t elected;
  asm volatile("{\n.reg .pred one;\nelect.sync _|one, 0xFFFFFFFF;\nselp.u32 %0, 1, 0, one;\n}\n" : "=r"(elected));
  return elected != 0;
}
MOE_OPS_DEVICE void bulk_load(uint32_t dst, uint64_t src, uint32_t bytes, uint32_t bar, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(dst),
      "l"(src), "r"(bytes), "r"(bar), "l"(policy)
      : "memory");
}
MOE_OPS_DEVICE void bulk_load(uint32_t dst, uint64_t src, uint32_t bytes, uint32_t bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
               "l"(src), "r"(bytes), "r"(bar)
               : "memory");
}
MOE_OPS_DEVICE uint64_t policy_evict_first() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
MOE_OPS_DEVICE void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

MOE_OPS_DEVICE uint4 shared_load4(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}
MOE_OPS_DEVICE uint2 shared_load2(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
}
MOE_OPS_DEVICE uint32_t shared_load1(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}
MOE_OPS_DEVICE void shared_store1(uint32_t address, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
MOE_OPS_DEVICE uint32_t shared_load_half(uint32_t address) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address));
  return v;
}
MOE_OPS_DEVICE float shared_load_float(uint32_t address) { return __uint_as_float(shared_load1(address)); }

// What no block of this grid writes.
MOE_OPS_DEVICE uint2 load_constant2(const void* p) {
  uint2 v;
  asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
// Loads that must see what other blocks of this grid wrote: past L1.
MOE_OPS_DEVICE float4 load_l2_float4(const void* p) {
  float4 v;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p));
  return v;
}
MOE_OPS_DEVICE int load_l2_int(const void* p) {
  int v;
  asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}

// Eight codes of one row and one scale group -> four fp16 pairs that hold their values times 2^-14, exactly: a code's
// exponent and mantissa bits are placed at bits 11..9, those of an fp16 that may be subnormal, and its sign at bit 15.
// Of the second half of the codes one multiplication moves both; what it leaves elsewhere carries into neither.
MOE_OPS_DEVICE void dequantize(uint32_t codes, uint32_t (&out)[4]) {
  constexpr uint32_t kBoth = 0x8E008E00u;
  out[0] = codes & kBoth;
  out[1] = (codes << 3) & kBoth;
  out[2] = ((codes & 0x40384038u) * ((1 << 6) + (1 << 1))) & kBoth;
  out[3] = ((codes & 0x20072007u) * ((1 << 9) + (1 << 2))) & kBoth;
}
MOE_OPS_DEVICE void mma_f16(float (&d)[4], const float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                            uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

MOE_OPS_DEVICE float activate(float gate, float up, bool oai, float limit, float alpha) {
  // min and max written so that a NaN stays a NaN.
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : (up < -limit ? -limit : up);
  float sigmoid;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(sigmoid) : "f"(1.0f + __expf(-(oai ? alpha : 1.0f) * gate)));
  return gate * sigmoid * (oai ? up + 1.0f : up);
}

MOE_OPS_DEVICE void store_output(void* output, OutType type, int64_t index, float4 v) {
  if (type == OutType::kFloat32) {
    *reinterpret_cast<float4*>(static_cast<float*>(output) + index) = v;
  } else if (type == OutType::kBFloat16) {
    __nv_bfloat162 pair[2] = {__floats2bfloat162_rn(v.x, v.y), __floats2bfloat162_rn(v.z, v.w)};
    *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(output) + index) = *reinterpret_cast<uint2*>(pair);
  } else {
    __half2 pair[2] = {__floats2half2_rn(v.x, v.y), __floats2half2_rn(v.z, v.w)};
    *reinterpret_cast<uint2*>(static_cast<__half*>(output) + index) = *reinterpret_cast<uint2*>(pair);
  }
}

// Host: a kernel may have `bytes` of shared memory on the current device. Asked for once per kernel and device.
template <auto kKernel>
cudaError_t allow_shared(int bytes) {
  constexpr int kDevices = 64;
  static std::atomic<bool> allowed[kDevices];
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess || (device < kDevices && allowed[device])) return error;
  error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess && device < kDevices) allowed[device] = true;
  return error;
}

}  // namespace moe_ops::sm90
