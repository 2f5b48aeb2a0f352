// The ordered table of kernels and the choice from it.
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "cpu/kernels/cpu_features.h"
#include "cpu/kernels/fused_mxfp4_moe_kernels.h"

namespace moe_ops {
namespace mxfp4 {

const KernelSet* all_kernels(int* count) {
  static constexpr KernelSet kTable[] = {
#if defined(__x86_64__)
      {"amx", cpu_has_amx_bf16, amx_kernels},
      {"avx512", cpu_has_avx512, avx512_kernels},
      {"avx2", cpu_has_avx2, avx2_kernels},
#elif defined(__aarch64__)
      {"neon", cpu_has_neon_dotprod, neon_kernels},
#endif
      {"scalar", [] { return true; }, scalar_kernels},
  };
  *count = static_cast<int>(sizeof kTable / sizeof kTable[0]);
  return kTable;
}

const KernelSet& select_kernels() {
  int count;
  const KernelSet* table = all_kernels(&count);
  int first = 0;
  const char* wanted = std::getenv("MOE_OPS_CPU_ISA");
  if (wanted != nullptr && *wanted != '\0') {
    std::string known;
    for (first = 0; first < count && std::strcmp(table[first].name, wanted) != 0; ++first) {
      known += (first ? ", '" : "'") + std::string(table[first].name) + "'";
    }
    if (first == count) {
      throw std::runtime_error("MOE_OPS_CPU_ISA must be one of " + known + ", got '" + wanted + "'");
    }
  }
  while (!table[first].supported()) ++first;
  return table[first];
}

}  // namespace mxfp4

const char* fused_mxfp4_moe_isa() { return mxfp4::select_kernels().name; }

}  // namespace moe_ops
