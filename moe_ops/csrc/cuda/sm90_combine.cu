// Weighted sum of the rows of each token, in slot order, rounded once: a block takes a token's whole rows, so
// that every read from memory is a long one.
#include "sm90_common.cuh"

namespace moe_ops::sm90 {
namespace {

constexpr int kThreads = 256, kAtOnce = 8;  // rows whose loads are in flight together

struct Float32Rows {
  static constexpr int kColumns = 4;
  MOE_OPS_DEVICE static void widen(uint4 v, float (&out)[4]) {
    out[0] = __uint_as_float(v.x), out[1] = __uint_as_float(v.y);
    out[2] = __uint_as_float(v.z), out[3] = __uint_as_float(v.w);
  }
};
struct BFloat16Rows {
  static constexpr int kColumns = 8;
  MOE_OPS_DEVICE static void widen(uint4 v, float (&out)[8]) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      out[2 * i] = __uint_as_float(words[i] << 16), out[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
  }
};

// A slot without a row, or of weight 0, is left out. Products are rounded before they are added, as on other backends.
template <typename Rows>
__global__ void __launch_bounds__(kThreads)
    combine_kernel(const void* rows, const int* row_map, const float* weights, int top_k, int width, int64_t num_rows,
                   void* output, OutType type) {
  constexpr int kColumns = Rows::kColumns;
  const int64_t token = blockIdx.x;
  row_map += token * top_k, weights += token * top_k;
  for (int column = threadIdx.x * kColumns; column < width; column += kThreads * kColumns) {
    float total[kColumns] = {};
    for (int first = 0; first < top_k; first += kAtOnce) {
      uint4 row[kAtOnce];
      float weight[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        weight[k] = 0;
        if (first + k >= top_k) continue;
        const int index = __ldg(row_map + first + k);
        if (index < 0 || index >= num_rows) continue;
        weight[k] = __ldg(weights + first + k);
        if (weight[k] != 0)
          row[k] = __ldcs(static_cast<const uint4*>(rows) + (index * static_cast<int64_t>(width) + column) / kColumns);
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (weight[k] == 0) continue;
        float value[kColumns];
        Rows::widen(row[k], value);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) total[i] = __fadd_rn(total[i], __fmul_rn(value[i], weight[k]));
      }
    }
#pragma unroll
    for (int i = 0; i < kColumns; i += 4)
      store_output(output, type, token * width + column + i,
                   make_float4(total[i], total[i + 1], total[i + 2], total[i + 3]));
  }
}

}  // namespace

cudaError_t combine(const void* rows, bool rows_are_bf16, const int* row_map, const float* weights, int num_tokens,
                    int top_k, int width, int64_t num_rows, void* output, OutType type, cudaStream_t stream) {
  if (rows_are_bf16) {
    combine_kernel<BFloat16Rows>
        <<<num_tokens, kThreads, 0, stream>>>(rows, row_map, weights, top_k, width, num_rows, output, type);
  } else {
    combine_kernel<Float32Rows>
        <<<num_tokens, kThreads, 0, stream>>>(rows, row_map, weights, top_k, width, num_rows, output, type);
  }
  return cudaGetLastError();
}

}  // namespace moe_ops::sm90
