// Argument errors of the bindings: `<op>: <argument> must be <expected>, got <actual>`, a ValueError in Python. The
// texts are those of moe_ops/meta.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>

namespace moe_ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// "bfloat16", the name that Python prints.
std::string dtype_name(ScalarType dtype);
// "[5, 3] int64".
std::string describe(const Tensor& tensor);
std::string device_name(const Tensor& tensor);

[[noreturn]] void argument_error(const char* op, const std::string& argument, const std::string& expected,
                                 const std::string& actual);

// The texts are only built when the condition fails: they are off the hot path.
#define MOE_REQUIRE(condition, op, argument, expected, actual)                       \
  do {                                                                               \
    if (!(condition)) ::moe_ops::argument_error(op, argument, (expected), (actual)); \
  } while (false)

inline bool is_float(ScalarType dtype) {
  return dtype == ScalarType::BFloat16 || dtype == ScalarType::Half || dtype == ScalarType::Float;
}
inline bool is_id(ScalarType dtype) { return dtype == ScalarType::Int || dtype == ScalarType::Long; }

// The shared checks of moe_ops/meta/_checks.py.
void check_rows(const char* op, const char* argument, const Tensor& rows,
                const char* expected = "[num_tokens, hidden_size]");
void check_ids(const char* op, const Tensor& topk_ids, int64_t num_tokens, const Tensor* topk_weights = nullptr);
void check_weights(const char* op, const Tensor& topk_weights, int64_t num_tokens, int64_t top_k);
void check_device(const char* op, const Tensor& like, const char* argument, const Tensor& tensor);
void check_device(const char* op, const Tensor& like, const char* argument, const std::optional<Tensor>& tensor);
void check_ticket(const char* op, const char* argument, const std::optional<Tensor>& ticket);
void check_no_overlap(const char* op, const Tensor& out, const char* argument, const Tensor& input);

// A contiguous copy in `dtype`, or the tensor itself where it is that already.
Tensor converted(const Tensor& tensor, ScalarType dtype);
// The one dtype that kernels read.
Tensor as_int64(const Tensor& ids);
Tensor as_float32(const Tensor& values);
// Rows whose last dimension is dense; the row stride may be anything.
Tensor dense_rows(const Tensor& rows);

}  // namespace moe_ops
