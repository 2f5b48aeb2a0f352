#include <cstdlib>
#include <cstring>

#include "cpu/kernels/cpu_features.h"
#include "cpu/kernels/row_ops.h"

namespace moe_ops {

extern const RowOps kRowOps_scalar;
#if defined(__x86_64__)
extern const RowOps kRowOps_avx2;
extern const RowOps kRowOps_avx512;
#endif

namespace {

struct Choice {
  const RowOps* ops;
  bool usable;
};

const RowOps& choose() {
  const char* wanted = std::getenv("MOE_OPS_CPU_ISA");
#if defined(__x86_64__)
  // Best first. MOE_OPS_CPU_ISA names the best that may be used; names that this table does not have (amx) allow all.
  const Choice choices[] = {
      {&kRowOps_avx512, cpu_has_avx512()},
      {&kRowOps_avx2, cpu_has_avx2()},
  };
  bool allowed = true;
  for (const Choice& choice : choices) allowed &= !(wanted && std::strcmp(wanted, choice.ops->isa) == 0);
  allowed &= !(wanted && std::strcmp(wanted, "scalar") == 0);
  for (const Choice& choice : choices) {
    allowed |= wanted && std::strcmp(wanted, choice.ops->isa) == 0;
    if (allowed && choice.usable) return *choice.ops;
  }
#else
  (void)wanted;
#endif
  return kRowOps_scalar;
}

}  // namespace

const RowOps& row_ops() {
  static const RowOps& ops = choose();
  return ops;
}

}  // namespace moe_ops
