// Weighted sum of the float32 rows of each token, in slot order, rounded once: a block takes a token's whole rows, so
// that every read from memory is a long one.
#include "sm90_common.cuh"

namespace moe_ops::sm90 {
namespace {

constexpr int kThreads = 256, kAtOnce = 8;  // rows whose loads are in flight together

// A slot without a row, or of weight 0, is left out. Products are rounded before they are added, as on other backends.
__global__ void __launch_bounds__(kThreads)
    combine_kernel(const float* rows, const int* row_map, const float* weights, int top_k, int width, int64_t num_rows,
                   void* output, OutType type) {
  const int64_t token = blockIdx.x;
  row_map += token * top_k, weights += token * top_k;
  for (int column = threadIdx.x * 4; column < width; column += kThreads * 4) {
    float4 total = make_float4(0, 0, 0, 0);
    for (int first = 0; first < top_k; first += kAtOnce) {
      float4 row[kAtOnce];
      float weight[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        weight[k] = 0;
        if (first + k >= top_k) continue;
        const int index = __ldg(row_map + first + k);
        if (index < 0 || index >= num_rows) continue;
        weight[k] = __ldg(weights + first + k);
        if (weight[k] != 0)
          row[k] = __ldcs(reinterpret_cast<const float4*>(rows + index * static_cast<int64_t>(width) + column));
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (weight[k] == 0) continue;
        total.x = __fadd_rn(total.x, __fmul_rn(row[k].x, weight[k]));
        total.y = __fadd_rn(total.y, __fmul_rn(row[k].y, weight[k]));
        total.z = __fadd_rn(total.z, __fmul_rn(row[k].z, weight[k]));
        total.w = __fadd_rn(total.w, __fmul_rn(row[k].w, weight[k]));
      }
    }
    store_output(output, type, token * width + column, total);
  }
}

}  // namespace

cudaError_t combine(const float* rows, const int* row_map, const float* weights, int num_tokens, int top_k, int width,
                    int64_t num_rows, void* output, OutType type, cudaStream_t stream) {
  combine_kernel<<<num_tokens, kThreads, 0, stream>>>(rows, row_map, weights, top_k, width, num_rows, output, type);
  return cudaGetLastError();
}

}  // namespace moe_ops::sm90
