// Arithmetic on rows of activations: float32 inside, one rounding at the end, in the order of the arguments.
// Torch-free.
#pragma once

#include <cstdint>

namespace moe_ops {

enum class RowType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

struct RowOps {
  const char* isa;
  // out[i] = sum over j < count of weights[j] * rows[j][i]; weights null: a plain sum.
  void (*weighted_sum)(RowType type, const void* const* rows, const float* weights, int64_t count, int64_t width,
                       void* out);
  // out[i] = weight * row[i].
  void (*scale)(RowType type, const void* row, float weight, int64_t width, void* out);
  // sum over i of a[i] * b[i], in 16 fixed partial sums, so that every instruction set gives the same bits.
  float (*dot)(RowType type, const void* a, const void* b, int64_t width);
};

// The implementation for this processor, chosen once.
const RowOps& row_ops();

}  // namespace moe_ops
