// Grouped matrix products: the plain form, and MXFP4 weights on Ascend950. Rules: the aclnnGroupedMatmulV4, V5 and
// WeightNz references of CANN 9.1.
#include "rules.h"

namespace cann_sim {
namespace {

constexpr int64_t kMaxGroups = 1024;
constexpr int64_t kMaxInner = 65535;

// What every form has in common; `columns`: N.
void check_groups(const std::vector<View>& x, size_t weights, const std::vector<View>& bias, const View& groups,
                  int64_t split, int64_t group_type, int64_t list_type, const std::vector<View>& out, int64_t experts,
                  int64_t inner, int64_t columns) {
  TORCH_CHECK(x.size() == 1 && weights == 1 && out.size() == 1 && bias.size() <= 1,
              "only one tensor of each kind is simulated");
  TORCH_CHECK(group_type == 0 && (split == 2 || split == 3), "only groups along the rows of x are simulated");
  TORCH_CHECK(x[0].shape.size() == 2 && x[0].shape[1] == inner &&
                  out[0].shape == (std::vector<int64_t>{x[0].shape[0], columns}),
              "the shapes of x, weight and y do not agree");
  TORCH_CHECK(groups.defined && groups.dtype == at::kLong && groups.shape == std::vector<int64_t>{experts},
              "groupList must be int64 [E]");
  TORCH_CHECK(experts <= kMaxGroups, "groupList takes at most 1024 groups");
  TORCH_CHECK(list_type == 0 || list_type == 1, "groupListType must be 0 or 1");
  TORCH_CHECK(list_type == 0 || experts > 1, "a groupList of counts must not have the length 1");
  TORCH_CHECK(bias.empty() || bias[0].shape == (std::vector<int64_t>{experts, columns}), "bias must be [E, N]");
}

void check_grouped_matmul(const std::vector<View>& x, const std::vector<View>& weight, const std::vector<View>& bias,
                          const View& groups, int64_t split, int64_t group_type, int64_t list_type,
                          const std::vector<View>& out) {
  TORCH_CHECK(weight.size() == 1 && weight[0].shape.size() == 3, "weight must be one tensor [E, K, N]");
  TORCH_CHECK(is_base_format(weight[0].format), "weight must be ND");
  const int64_t experts = weight[0].shape[0], inner = weight[0].shape[1], columns = weight[0].shape[2];
  check_groups(x, weight.size(), bias, groups, split, group_type, list_type, out, experts, inner, columns);
  TORCH_CHECK(inner <= kMaxInner && columns <= kMaxInner, "inner dimensions must be below 65536");
  const at::ScalarType dtype = x[0].dtype;
  TORCH_CHECK(dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat, "x must be a float tensor");
  TORCH_CHECK(weight[0].dtype == dtype && out[0].dtype == dtype, "x, weight and y must have one dtype");
  if (!bias.empty()) {
    const at::ScalarType given = bias[0].dtype;
    const bool plain = given == dtype && (dtype != at::kBFloat16 || is_950());
    const bool wide = given == at::kFloat && dtype == at::kBFloat16;
    TORCH_CHECK(plain || wide, "bias must be float32 for bfloat16 x (A2, A3), else of the dtype of x");
  }
}

// `weight_of(expert)`: [K, N] float64.
template <class Weight>
void grouped_matmul(const at::Tensor& x, Weight weight_of, const std::vector<at::Tensor>& bias,
                    const at::Tensor& groups, int64_t list_type, at::Tensor out) {
  int64_t start = 0, previous = 0;
  for (int64_t expert = 0; expert < groups.size(0); expert++) {
    const int64_t value = groups[expert].item<int64_t>();
    const int64_t rows = list_type == 0 ? value - previous : value;
    previous = value;
    TORCH_CHECK(rows >= 0 && start + rows <= x.size(0), "groupList counts more rows than x has");
    if (rows == 0) continue;
    at::Tensor y = at::matmul(x.slice(0, start, start + rows).to(at::kDouble), weight_of(expert));
    if (!bias.empty()) y = y + bias[0][expert].to(at::kDouble);
    out.slice(0, start, start + rows).copy_(y);
    start += rows;
  }
  poison(out.slice(0, start));
}

void plain_grouped_matmul(const at::Tensor& x, const at::Tensor& weight, const std::vector<at::Tensor>& bias,
                          const at::Tensor& groups, int64_t list_type, at::Tensor out) {
  grouped_matmul(x, [&](int64_t expert) { return weight[expert].to(at::kDouble); }, bias, groups, list_type, out);
}

// MXFP4 weights beside 16-bit x, as aclnnGroupedMatmulWeightNz of Ascend950 takes them: 8 codes of 4 bits in a float32,
// [E, K, N / 8], in the private format with 16 codes in a row of memory; E8M0 scales [E, K / 32, N].
constexpr int64_t kCodesPerFloat = 8, kScaleBlock = 32, kAlignment = 64, kNzRows = 16, kNzFloats = 2;

void check_mx(const std::vector<View>& x, const std::vector<Raw>& weight, const std::vector<View>& bias,
              const std::vector<View>& scale, const std::vector<View>& anti_scale, const View& groups, int64_t split,
              int64_t group_type, int64_t list_type, int64_t act_type, int64_t quant_group,
              const std::vector<View>& out, size_t others) {
  TORCH_CHECK(x.size() == 1 && weight.size() == 1 && anti_scale.size() == 1,
              "only one tensor of x, weight and antiquantScale is simulated");
  const View& w = weight[0].view;
  const at::ScalarType dtype = x[0].dtype;
  TORCH_CHECK(dtype == at::kBFloat16 || dtype == at::kHalf, "only 16-bit x is simulated with a FRACTAL_NZ weight");
  TORCH_CHECK(w.dtype == at::kFloat && anti_scale[0].dtype == at::kFloat8_e8m0fnu,
              "only MXFP4 in float32 carriers, with E8M0 antiquantScale, is simulated in FRACTAL_NZ");
  TORCH_CHECK(is_950(), "weight of FLOAT and antiquantScale of FLOAT8_E8M0 are for Ascend950");
  TORCH_CHECK(scale.empty() && others == 0 && act_type == 0 && quant_group == 0,
              "scale, offsets, perTokenScale, activations and quantGroupSize do not belong to this form");
  TORCH_CHECK(w.format == ACL_FORMAT_FRACTAL_NZ_C0_2, "weight must be in the format FRACTAL_NZ_C0_2 for 16-bit x");
  TORCH_CHECK(w.shape.size() == 3, "weight must be [E, K, N / 8]");
  const int64_t experts = w.shape[0], inner = w.shape[1], columns = w.shape[2] * kCodesPerFloat;
  TORCH_CHECK(w.offset == 0 && w.stride == (std::vector<int64_t>{inner * w.shape[2], w.shape[2], 1}),
              "weight must not be transposed or cut");
  TORCH_CHECK(inner % kAlignment == 0 && columns % kAlignment == 0, "K and N of weight must be aligned to 32 bytes");
  TORCH_CHECK(w.storage == (std::vector<int64_t>{experts, w.shape[2] / kNzFloats, inner / kNzRows, kNzRows, kNzFloats}),
              "the storage of weight is not that of its format");
  TORCH_CHECK(anti_scale[0].shape == (std::vector<int64_t>{experts, inner / kScaleBlock, columns}) &&
                  anti_scale[0].stride == (std::vector<int64_t>{inner / kScaleBlock * columns, columns, 1}),
              "antiquantScale must be [E, K / 32, N], not transposed");
  check_groups(x, weight.size(), bias, groups, split, group_type, list_type, out, experts, inner, columns);
  TORCH_CHECK(out[0].dtype == dtype, "y must have the dtype of x");
  const bool wide = dtype == at::kBFloat16 && !bias.empty() && bias[0].dtype == at::kFloat;
  TORCH_CHECK(bias.empty() || bias[0].dtype == dtype || wide,
              "bias must be of the dtype of x, or float32 for bfloat16");
}

// The vector unit multiplies in the dtype of x. A scale is shifted to the exponent of a bfloat16: the byte 0 gives 0
// and the byte 255 infinity, which is not what E8M0 means.
at::Tensor mx_weight(const at::Tensor& storage, const at::Tensor& scale, at::ScalarType dtype) {
  const at::Tensor bytes = storage.view(at::kByte);  // [N / 16, K / 16, 16, 8]
  const at::Tensor codes = at::stack({bytes.bitwise_and(15), bytes.bitwise_right_shift(4)}, -1);
  const int64_t columns = bytes.size(0) * 16, inner = bytes.size(1) * kNzRows;
  const at::Tensor ordered = codes.reshape({bytes.size(0), inner, 16}).permute({1, 0, 2}).reshape({inner, columns});
  const at::Tensor values =
      at::tensor({0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0}, at::kFloat)
          .to(dtype);
  const at::Tensor factor = scale.view(at::kByte).to(at::kShort).bitwise_left_shift(7).view(at::kBFloat16).to(dtype);
  const at::Tensor value = values.index_select(0, ordered.flatten().to(at::kLong)).view({inner, columns});
  return (value * factor.repeat_interleave(kScaleBlock, 0)).to(at::kDouble);
}

void mx_grouped_matmul(const at::Tensor& x, const View& weight, const std::vector<at::Tensor>& bias,
                       const at::Tensor& scale, const at::Tensor& groups, int64_t list_type, at::Tensor out) {
  const at::Tensor storage = weight.open_storage();
  grouped_matmul(
      x, [&](int64_t expert) { return mx_weight(storage[expert], scale[expert], x.scalar_type()); }, bias, groups,
      list_type, out);
}

}  // namespace
}  // namespace cann_sim

using namespace cann_sim;

#define GROUPED_MATMUL_HEAD                                                                                      \
  TensorList x, TensorList weight, TensorList bias, TensorList scale, TensorList offset, TensorList anti_scale,  \
      TensorList anti_offset, TensorList token_scale, Tensor groups, TensorList act_input, TensorList act_scale, \
      TensorList act_offset, int64_t split, int64_t group_type, int64_t list_type, int64_t act_type
#define GROUPED_MATMUL_HEAD_NAMES                                                                                 \
  x, weight, bias, scale, offset, anti_scale, anti_offset, token_scale, groups, act_input, act_scale, act_offset, \
      split, group_type, list_type, act_type
OPERATOR_CHECKED(aclnnGroupedMatmulV4, (GROUPED_MATMUL_HEAD, TensorList out, TensorList features, TensorList dynamic),
                 (GROUPED_MATMUL_HEAD_NAMES, out, features, dynamic),
                 check_grouped_matmul(x, weight, bias, groups, split, group_type, list_type, out),
                 plain_grouped_matmul(x[0], weight[0], bias, groups, list_type, out[0]))
OPERATOR_CHECKED(aclnnGroupedMatmulV5,
                 (GROUPED_MATMUL_HEAD, IntArray tuning, TensorList out, TensorList features, TensorList dynamic),
                 (GROUPED_MATMUL_HEAD_NAMES, tuning, out, features, dynamic),
                 check_grouped_matmul(x, weight, bias, groups, split, group_type, list_type, out),
                 plain_grouped_matmul(x[0], weight[0], bias, groups, list_type, out[0]))
OPERATOR_CHECKED(aclnnGroupedMatmulWeightNz,
                 (TensorList x, RawTensorList weight, TensorList bias, TensorList scale, TensorList offset,
                  TensorList anti_scale, TensorList anti_offset, TensorList token_scale, Tensor groups,
                  TensorList act_input, TensorList act_scale, TensorList act_offset, int64_t split, int64_t group_type,
                  int64_t list_type, int64_t act_type, IntArray tuning, int64_t quant_group, TensorList out,
                  TensorList features, TensorList dynamic),
                 (x, weight, bias, scale, offset, anti_scale, anti_offset, token_scale, groups, act_input, act_scale,
                  act_offset, split, group_type, list_type, act_type, tuning, quant_group, out, features, dynamic),
                 check_mx(x, weight, bias, scale, anti_scale, groups, split, group_type, list_type, act_type,
                          quant_group, out,
                          offset.size() + anti_offset.size() + token_scale.size() + act_input.size() +
                              act_scale.size() + act_offset.size()),
                 mx_grouped_matmul(x[0], weight[0].view, bias, anti_scale[0], groups, list_type, out[0]))
