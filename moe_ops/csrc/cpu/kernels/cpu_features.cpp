#include "cpu/kernels/cpu_features.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace moe_ops {

#if defined(__x86_64__)

namespace {

unsigned long long xcr0() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return 0;
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<unsigned long long>(high) << 32) | low;
}

bool detect_amx_bf16() {
  if (!cpu_has_avx512()) return false;
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  if ((d & kAmxBf16) == 0 || (d & kAmxTile) == 0) return false;
  constexpr unsigned long long kTileState = 3ull << 17;
  if ((xcr0() & kTileState) != kTileState) return false;
  // Linux grants the tile data register set per process, on request only; the instruction traps without it.
  constexpr int kArchReqXcompPerm = 0x1023, kXfeatureXtiledata = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureXtiledata) == 0;
}

}  // namespace

bool cpu_has_avx2() {
  unsigned a, b, c, d;
  constexpr unsigned kF16c = 1u << 29;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
         __get_cpuid(1, &a, &b, &c, &d) && (c & kF16c);
}

bool cpu_has_avx512() {
  return cpu_has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512vnni") &&
         __builtin_cpu_supports("avx512vbmi");
}

bool cpu_has_amx_bf16() {
  static const bool value = detect_amx_bf16();
  return value;
}

bool cpu_has_neon_dotprod() { return false; }

#else

bool cpu_has_avx2() { return false; }
bool cpu_has_avx512() { return false; }
bool cpu_has_amx_bf16() { return false; }

bool cpu_has_neon_dotprod() {
#if defined(__aarch64__)
  constexpr unsigned long kNeeded = HWCAP_ASIMD | HWCAP_ASIMDDP;
  return (getauxval(AT_HWCAP) & kNeeded) == kNeeded;
#else
  return false;
#endif
}

#endif

}  // namespace moe_ops
