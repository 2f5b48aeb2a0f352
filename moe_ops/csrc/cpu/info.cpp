// What the kernels of this library chose at run time, for `python -m moe_ops info` (called through ctypes).
#include "cpu/kernels/fused_mxfp4_moe.h"
#include "cpu/kernels/row_ops.h"
#include "cpu/kernels/thread_team.h"

extern "C" {

// Instruction set of permute and unpermute.
__attribute__((visibility("default"))) const char* moe_ops_row_isa() { return moe_ops::row_ops().isa; }

// Instruction set of fused_mxfp4_moe; "" where MOE_OPS_CPU_ISA names none.
__attribute__((visibility("default"))) const char* moe_ops_expert_isa() {
  try {
    return moe_ops::fused_mxfp4_moe_isa();
  } catch (...) {
    return "";
  }
}

// CPUs that the affinity mask and the cgroup's quota leave to this process.
__attribute__((visibility("default"))) int moe_ops_usable_cpus() {
  return static_cast<int>(moe_ops::usable_cpus().size());
}

}  // extern "C"
