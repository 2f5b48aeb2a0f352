// Conversions between plain and fractal formats, as aclnnNpuFormatCast of Ascend950 does them for 4-byte elements: ND
// to FRACTAL_NZ with 16 or 32 elements in a row of memory, and back.
#include <cstring>

#include "rules.h"

namespace cann_sim {
namespace {

constexpr int64_t kRows = 16;
constexpr int kNotSupported = 361001;

// Elements in a row of memory, 0 for a format that is not simulated.
int64_t row_elements(aclFormat format) {
  switch (format) {
    case ACL_FORMAT_FRACTAL_NZ_C0_2:
      return 2;
    case ACL_FORMAT_FRACTAL_NZ_C0_4:
      return 4;
    case ACL_FORMAT_FRACTAL_NZ_C0_16:
      return 16;
    case ACL_FORMAT_FRACTAL_NZ_C0_32:
      return 32;
    default:
      return 0;
  }
}

int64_t blocks(int64_t size, int64_t block) { return (size + block - 1) / block; }

// [..., K, N] -> [..., N / C0, K / 16, 16, C0].
std::vector<int64_t> storage_of(const std::vector<int64_t>& shape, int64_t elements) {
  std::vector<int64_t> storage(shape.begin(), shape.end() - 2);
  const int64_t inner = shape[shape.size() - 2], columns = shape.back();
  for (int64_t size : {blocks(columns, elements), blocks(inner, kRows), kRows, elements}) storage.push_back(size);
  return storage;
}

void check_format_cast(const View& from, const View& to) {
  TORCH_CHECK(is_950() && from.dtype == to.dtype && c10::elementSize(from.dtype) == 4,
              "only conversions of 4-byte elements on Ascend950 are simulated");
  const View& packed = is_base_format(from.format) ? to : from;
  TORCH_CHECK(is_base_format(from.format) != is_base_format(to.format) && row_elements(packed.format) != 0,
              "only conversions between ND and FRACTAL_NZ are simulated");
  TORCH_CHECK(from.shape == to.shape && from.shape.size() >= 2, "both tensors must have one shape");
  TORCH_CHECK(packed.storage == storage_of(packed.shape, row_elements(packed.format)),
              "the storage is not that of the format");
}

void format_cast(const View& from, const View& to) {
  const bool packs = is_base_format(from.format);
  const View &plain_view = packs ? from : to, &packed_view = packs ? to : from;
  const int64_t inner = plain_view.shape[plain_view.shape.size() - 2], columns = plain_view.shape.back();
  // Bit patterns: codes of 4 bits travel in these elements.
  const at::Tensor plain = plain_view.open().view(at::kInt).view({-1, inner, columns});
  const at::Tensor packed = packed_view.open_storage().view(at::kInt);
  const int64_t elements = row_elements(packed_view.format);
  const int64_t outer = blocks(columns, elements), rows = blocks(inner, kRows);
  const at::Tensor ordered =
      packed.view({-1, outer, rows * kRows, elements}).permute({0, 2, 1, 3});  // [B, K, N / C0, C0]
  if (packs) {
    at::Tensor padded = at::zeros({plain.size(0), rows * kRows, outer * elements}, plain.options());
    padded.slice(1, 0, inner).slice(2, 0, columns).copy_(plain);
    ordered.copy_(padded.view(ordered.sizes()));
  } else {
    const at::Tensor whole = ordered.reshape({plain.size(0), rows * kRows, outer * elements});
    plain.copy_(whole.slice(1, 0, inner).slice(2, 0, columns));
  }
}

}  // namespace
}  // namespace cann_sim

using namespace cann_sim;

OPERATOR_CHECKED(aclnnNpuFormatCast, (RawTensor from, RawTensor to), (from, to), check_format_cast(from.view, to.view),
                 format_cast(from.view, to.view))

extern "C" SIM_EXPORT int aclnnNpuFormatCastCalculateSizeAndFormat(const aclTensor* tensor, int format, int dtype,
                                                                   int64_t** shape, uint64_t* dims, int* actual) {
  const bool four_bytes = tensor->dtype == ACL_FLOAT || tensor->dtype == ACL_INT32;
  const bool half = dtype == ACL_FLOAT16 || dtype == ACL_BF16;
  const bool wide = dtype == ACL_FLOAT8_E4M3FN && tensor->dtype == ACL_FLOAT;
  std::vector<int64_t> result;
  if (is_950() && four_bytes && is_base_format(tensor->format) && format == ACL_FORMAT_FRACTAL_NZ && (half || wide)) {
    *actual = half ? ACL_FORMAT_FRACTAL_NZ_C0_16 : ACL_FORMAT_FRACTAL_NZ_C0_32;
    result = storage_of(tensor->shape, half ? 16 : 32);
  } else if (is_950() && four_bytes && row_elements(tensor->format) != 0 && format == ACL_FORMAT_ND) {
    *actual = ACL_FORMAT_ND;
    result = tensor->shape;
  } else {
    return fail(kNotSupported, "aclnnNpuFormatCastCalculateSizeAndFormat: this conversion is not simulated");
  }
  *dims = result.size();
  *shape = new int64_t[result.size()];  // released by the caller
  std::memcpy(*shape, result.data(), result.size() * sizeof(int64_t));
  return 0;
}
