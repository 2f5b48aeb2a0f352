// The kernels that every processor runs: float32 throughout.
#include "cpu/kernels/fused_mxfp4_moe_generic.h"

namespace moe_ops::mxfp4 {

const Kernels& scalar_kernels() {
  static const Kernels kernels = [] {
    Kernels k{};
    k.widen = widen;
    k.narrow = narrow;
    k.swiglu = swiglu;
    k.accumulate = accumulate;
    k.pack_tile = pack_tile;
    k.gemm_f32 = gemm_f32_generic;
    k.gemm_f32_transposed = gemm_f32_transposed_generic;
    k.gemm_w16 = gemm_w16;
    return k;
  }();
  return kernels;
}

}  // namespace moe_ops::mxfp4
