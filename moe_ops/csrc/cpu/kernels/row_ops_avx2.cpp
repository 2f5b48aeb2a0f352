#include <cstdint>
#include <cstring>

#include "cpu/kernels/row_ops.h"

namespace moe_ops {
namespace {
#include "cpu/kernels/row_ops_impl.h"
}  // namespace

extern const RowOps kRowOps_avx2;
const RowOps kRowOps_avx2 = {"avx2", weighted_sum, scale, dot};

}  // namespace moe_ops
