// wgmma with weights in registers (64 rows) and tokens in shared memory (N, a multiple of 8), float32 out. Wgmma: 16 k
// of bf16; WgmmaE4m3: 32 k of e4m3. The number of accumulators is part of the instruction; they are the first N / 2 of
// `d`.
#pragma once

#include "sm90_common.cuh"

namespace moe_ops::sm90 {

MOE_OPS_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
MOE_OPS_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
MOE_OPS_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

template <int kTokens>
struct Wgmma;
template <int kTokens>
struct WgmmaE4m3;

// Operand lists for 1, 2, ... groups of 8 tokens.
#define MOE_OPS_D(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MOE_OPS_D1 MOE_OPS_D(0)
#define MOE_OPS_D2 MOE_OPS_D1, MOE_OPS_D(4)
#define MOE_OPS_D3 MOE_OPS_D2, MOE_OPS_D(8)
#define MOE_OPS_D4 MOE_OPS_D3, MOE_OPS_D(12)
#define MOE_OPS_D5 MOE_OPS_D4, MOE_OPS_D(16)
#define MOE_OPS_D6 MOE_OPS_D5, MOE_OPS_D(20)
#define MOE_OPS_D7 MOE_OPS_D6, MOE_OPS_D(24)
#define MOE_OPS_D8 MOE_OPS_D7, MOE_OPS_D(28)
#define MOE_OPS_D9 MOE_OPS_D8, MOE_OPS_D(32)
#define MOE_OPS_D10 MOE_OPS_D9, MOE_OPS_D(36)
#define MOE_OPS_D11 MOE_OPS_D10, MOE_OPS_D(40)
#define MOE_OPS_D12 MOE_OPS_D11, MOE_OPS_D(44)
#define MOE_OPS_D13 MOE_OPS_D12, MOE_OPS_D(48)
#define MOE_OPS_D14 MOE_OPS_D13, MOE_OPS_D(52)
#define MOE_OPS_D15 MOE_OPS_D14, MOE_OPS_D(56)
#define MOE_OPS_D16 MOE_OPS_D15, MOE_OPS_D(60)
#define MOE_OPS_D17 MOE_OPS_D16, MOE_OPS_D(64)
#define MOE_OPS_D18 MOE_OPS_D17, MOE_OPS_D(68)
#define MOE_OPS_D19 MOE_OPS_D18, MOE_OPS_D(72)
#define MOE_OPS_R1 "%0, %1, %2, %3"
#define MOE_OPS_R2 MOE_OPS_R1 ", %4, %5, %6, %7"
#define MOE_OPS_R3 MOE_OPS_R2 ", %8, %9, %10, %11"
#define MOE_OPS_R4 MOE_OPS_R3 ", %12, %13, %14, %15"
#define MOE_OPS_R5 MOE_OPS_R4 ", %16, %17, %18, %19"
#define MOE_OPS_R6 MOE_OPS_R5 ", %20, %21, %22, %23"
#define MOE_OPS_R7 MOE_OPS_R6 ", %24, %25, %26, %27"
#define MOE_OPS_R8 MOE_OPS_R7 ", %28, %29, %30, %31"
#define MOE_OPS_R9 MOE_OPS_R8 ", %32, %33, %34, %35"
#define MOE_OPS_R10 MOE_OPS_R9 ", %36, %37, %38, %39"
#define MOE_OPS_R11 MOE_OPS_R10 ", %40, %41, %42, %43"
#define MOE_OPS_R12 MOE_OPS_R11 ", %44, %45, %46, %47"
#define MOE_OPS_R13 MOE_OPS_R12 ", %48, %49, %50, %51"
#define MOE_OPS_R14 MOE_OPS_R13 ", %52, %53, %54, %55"
#define MOE_OPS_R15 MOE_OPS_R14 ", %56, %57, %58, %59"
#define MOE_OPS_R16 MOE_OPS_R15 ", %60, %61, %62, %63"
#define MOE_OPS_R17 MOE_OPS_R16 ", %64, %65, %66, %67"
#define MOE_OPS_R18 MOE_OPS_R17 ", %68, %69, %70, %71"
#define MOE_OPS_R19 MOE_OPS_R18 ", %72, %73, %74, %75"
#define MOE_OPS_WGMMA(TOKENS, GROUPS, A, B)                                                            \
  template <>                                                                                          \
  struct Wgmma<TOKENS> {                                                                               \
    static_assert(TOKENS == 8 * GROUPS, "groups");                                                     \
    static MOE_OPS_DEVICE void run(float* d, const uint32_t (&a)[4], uint64_t b) {                     \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #TOKENS "k16.f32.bf16.bf16 {" MOE_OPS_R##GROUPS \
                   "}, {" A "}, " B ", 1, 1, 1, 0;"                                                    \
                   : MOE_OPS_D##GROUPS                                                                 \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                              \
    }                                                                                                  \
  };                                                                                                   \
  template <>                                                                                          \
  struct WgmmaE4m3<TOKENS> {                                                                           \
    static MOE_OPS_DEVICE void run(float* d, const uint32_t (&a)[4], uint64_t b) {                     \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #TOKENS "k32.f32.e4m3.e4m3 {" MOE_OPS_R##GROUPS \
                   "}, {" A "}, " B ", 1, 1, 1;"                                                       \
                   : MOE_OPS_D##GROUPS                                                                 \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                              \
    }                                                                                                  \
  };
MOE_OPS_WGMMA(8, 1, "%4, %5, %6, %7", "%8")
MOE_OPS_WGMMA(16, 2, "%8, %9, %10, %11", "%12")
MOE_OPS_WGMMA(24, 3, "%12, %13, %14, %15", "%16")
MOE_OPS_WGMMA(32, 4, "%16, %17, %18, %19", "%20")
MOE_OPS_WGMMA(40, 5, "%20, %21, %22, %23", "%24")
MOE_OPS_WGMMA(48, 6, "%24, %25, %26, %27", "%28")
MOE_OPS_WGMMA(56, 7, "%28, %29, %30, %31", "%32")
MOE_OPS_WGMMA(64, 8, "%32, %33, %34, %35", "%36")
MOE_OPS_WGMMA(72, 9, "%36, %37, %38, %39", "%40")
MOE_OPS_WGMMA(80, 10, "%40, %41, %42, %43", "%44")
MOE_OPS_WGMMA(88, 11, "%44, %45, %46, %47", "%48")
MOE_OPS_WGMMA(96, 12, "%48, %49, %50, %51", "%52")
MOE_OPS_WGMMA(104, 13, "%52, %53, %54, %55", "%56")
MOE_OPS_WGMMA(112, 14, "%56, %57, %58, %59", "%60")
MOE_OPS_WGMMA(120, 15, "%60, %61, %62, %63", "%64")
MOE_OPS_WGMMA(128, 16, "%64, %65, %66, %67", "%68")
MOE_OPS_WGMMA(136, 17, "%68, %69, %70, %71", "%72")
MOE_OPS_WGMMA(144, 18, "%72, %73, %74, %75", "%76")
MOE_OPS_WGMMA(152, 19, "%76, %77, %78, %79", "%80")

}  // namespace moe_ops::sm90
