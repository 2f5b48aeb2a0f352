#include <string>

#include "cpu/kernels/fused_mxfp4_moe.h"
#include "cpu/kernels/row_ops.h"

namespace moe_ops {

extern const RowOps kRowOps_scalar;
#if defined(__x86_64__)
extern const RowOps kRowOps_avx2;
extern const RowOps kRowOps_avx512;
#endif

namespace {

// As the experts' table says, whose names MOE_OPS_CPU_ISA has.
const RowOps& choose() {
  const std::string isa = fused_mxfp4_moe_isa();  // refuses a name that it does not have
#if defined(__x86_64__)
  if (isa == "amx" || isa == kRowOps_avx512.isa) return kRowOps_avx512;
  if (isa == kRowOps_avx2.isa) return kRowOps_avx2;
#endif
  return kRowOps_scalar;
}

}  // namespace

const RowOps& row_ops() {
  static const RowOps& ops = choose();
  return ops;
}

}  // namespace moe_ops
