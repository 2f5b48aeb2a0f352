#include "cpu/check.h"

#include <algorithm>
#include <limits>
#include <sstream>
#include <stdexcept>

#include "cpu/parallel.h"

namespace moe_ops {

std::string dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::UInt16:
      return "uint16";
    case ScalarType::UInt32:
      return "uint32";
    case ScalarType::UInt64:
      return "uint64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::ComplexHalf:
      return "complex32";
    case ScalarType::ComplexFloat:
      return "complex64";
    case ScalarType::ComplexDouble:
      return "complex128";
    case ScalarType::Float8_e4m3fn:
      return "float8_e4m3fn";
    case ScalarType::Float8_e5m2:
      return "float8_e5m2";
    case ScalarType::Float8_e4m3fnuz:
      return "float8_e4m3fnuz";
    case ScalarType::Float8_e5m2fnuz:
      return "float8_e5m2fnuz";
    case ScalarType::Float8_e8m0fnu:
      return "float8_e8m0fnu";
    case ScalarType::Float4_e2m1fn_x2:
      return "float4_e2m1fn_x2";
    default:
      return torch::headeronly::toString(dtype);
  }
}

std::string describe(const Tensor& tensor) {
  if (!tensor.defined()) return "None";
  std::ostringstream text;
  text << '[';
  for (int64_t i = 0; i < tensor.dim(); i++) text << (i ? ", " : "") << tensor.size(i);
  text << "] " << dtype_name(tensor.scalar_type());
  return text.str();
}

std::string device_name(const Tensor& tensor) {
  using torch::headeronly::DeviceType;
  const DeviceType type = tensor.device().type();
  if (type == DeviceType::CPU) return "cpu";
  const char* name = type == DeviceType::CUDA          ? "cuda"
                     : type == DeviceType::PrivateUse1 ? "npu"
                     : type == DeviceType::Meta        ? "meta"
                                                       : "another device";
  const int index = tensor.device().index();
  return index < 0 ? name : std::string(name) + ":" + std::to_string(index);
}

void argument_error(const char* op, const std::string& argument, const std::string& expected,
                    const std::string& actual) {
  throw std::invalid_argument(std::string(op) + ": " + argument + " must be " + expected + ", got " + actual);
}

void check_rows(const char* op, const char* argument, const Tensor& rows, const char* expected) {
  MOE_REQUIRE(rows.defined() && rows.dim() == 2 && is_float(rows.scalar_type()), op, argument,
              std::string(expected) + " bfloat16, float16 or float32", describe(rows));
}

void check_ids(const char* op, const Tensor& topk_ids, int64_t num_tokens, const Tensor* topk_weights) {
  const auto is_floating = [](const Tensor& tensor) {
    return tensor.defined() && (is_float(tensor.scalar_type()) || tensor.scalar_type() == ScalarType::Double);
  };
  const auto expected = [&] { return "[" + std::to_string(num_tokens) + ", top_k] int32 or int64"; };
  MOE_REQUIRE(!(topk_weights && is_floating(topk_ids) && !is_floating(*topk_weights)), op, "topk_ids", expected(),
              describe(topk_ids) + ": topk_ids and topk_weights are swapped");
  MOE_REQUIRE(
      topk_ids.defined() && topk_ids.dim() == 2 && is_id(topk_ids.scalar_type()) && topk_ids.size(0) == num_tokens, op,
      "topk_ids", expected(), describe(topk_ids));
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  MOE_REQUIRE(topk_ids.size(0) * topk_ids.size(1) <= kMax, op, "topk_ids", "at most " + std::to_string(kMax) + " slots",
              describe(topk_ids));
}

void check_weights(const char* op, const Tensor& topk_weights, int64_t num_tokens, int64_t top_k) {
  const bool ok = topk_weights.defined() && topk_weights.dim() == 2 &&
                  (is_float(topk_weights.scalar_type()) || topk_weights.scalar_type() == ScalarType::Double) &&
                  topk_weights.size(0) == num_tokens && topk_weights.size(1) == top_k;
  MOE_REQUIRE(ok, op, "topk_weights", "[" + std::to_string(num_tokens) + ", " + std::to_string(top_k) + "] float",
              describe(topk_weights));
}

void check_device(const char* op, const Tensor& like, const char* argument, const Tensor& tensor) {
  if (!tensor.defined()) return;  // None: refused where its shape is checked
  const auto expected = like.device(), actual = tensor.device();
  MOE_REQUIRE(expected.type() == actual.type() && expected.index() == actual.index(), op, argument,
              "on " + device_name(like), device_name(tensor));
}

void check_device(const char* op, const Tensor& like, const char* argument, const std::optional<Tensor>& tensor) {
  if (tensor) check_device(op, like, argument, *tensor);
}

void check_ticket(const char* op, const char* argument, const std::optional<Tensor>& ticket) {
  if (!ticket) return;
  MOE_REQUIRE(
      ticket->defined() && ticket->scalar_type() == ScalarType::Long && ticket->dim() == 1 && ticket->size(0) == 1, op,
      argument, "[1] int64", describe(*ticket));
}

namespace {
// [first, last) bytes that a tensor can touch.
std::pair<const char*, const char*> extent(const Tensor& tensor) {
  const char* first = static_cast<const char*>(tensor.const_data_ptr());
  int64_t span = 1;
  for (int64_t i = 0; i < tensor.dim(); i++) span += (tensor.size(i) - 1) * tensor.stride(i);
  return {first, first + span * int64_t(tensor.element_size())};
}
}  // namespace

void check_no_overlap(const char* op, const Tensor& out, const char* argument, const Tensor& input) {
  if (out.numel() == 0 || input.numel() == 0) return;
  const auto a = extent(out), b = extent(input);
  MOE_REQUIRE(!(a.first < b.second && b.first < a.second), op, "out",
              std::string("memory of its own, apart from ") + argument, "an overlapping tensor");
}

Tensor converted(const Tensor& tensor, ScalarType dtype) {
  constexpr int64_t kMostSerial = 32767;  // elements up to which torch copies on the calling thread
  if (!in_forked_child() || tensor.dim() != 2 || tensor.numel() <= kMostSerial) {
    return torch::stable::contiguous(tensor.scalar_type() == dtype ? tensor : torch::stable::to(tensor, dtype));
  }
  if (tensor.scalar_type() == dtype && tensor.is_contiguous()) return tensor;
  const int64_t rows = tensor.size(0), step = std::max<int64_t>(1, kMostSerial / tensor.size(1));
  Tensor result = torch::stable::new_empty(tensor, {rows, tensor.size(1)}, dtype);
  for (int64_t row = 0; row < rows; row += step) {
    const int64_t count = std::min(step, rows - row);
    Tensor source = tensor;  // narrow takes no const tensor
    Tensor target = torch::stable::narrow(result, 0, row, count);
    torch::stable::copy_(target, torch::stable::narrow(source, 0, row, count));
  }
  return result;
}

Tensor as_int64(const Tensor& ids) { return converted(ids, ScalarType::Long); }

Tensor as_float32(const Tensor& values) { return converted(values, ScalarType::Float); }

Tensor dense_rows(const Tensor& rows) {
  return rows.size(1) <= 1 || rows.stride(1) == 1 ? rows : converted(rows, rows.scalar_type());
}

}  // namespace moe_ops
