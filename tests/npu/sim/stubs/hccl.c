// libhccl.so: no collectives; only what torch_npu asks for when deterministic algorithms are switched on.
#include <stdint.h>

__attribute__((visibility("default"))) int HcclSetConfig(int config, int64_t value) {
  (void)config;
  (void)value;
  return 0;
}
