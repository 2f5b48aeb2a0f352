// OPERATOR(name, (parameters), (their names), body) defines one aclnn operator: both phases, and a body over CPU
// tensors.
//
// The parameters are those of the first phase without the trailing workspace size and executor. Inside the body the
// same names are ATen values: tensors (undefined where the caller passed none), tensor lists, scalars, vectors,
// numbers. OPERATOR_CHECKED has a further expression before the body, evaluated in the first phase over View arguments;
// it throws where the real operator refuses its arguments.
#pragma once

#include <c10/core/InferenceMode.h>

#include <cstdio>
#include <cstring>
#include <exception>
#include <optional>
#include <tuple>

#include "objects.h"

namespace cann_sim {

using Tensor = const aclTensor*;
using TensorList = const aclTensorList*;
using Scalar = const aclScalar*;
using IntArray = const aclIntArray*;
struct PossibleScalar : aclScalar {};
using OptionalScalar = const PossibleScalar*;  // a scalar that the caller may leave out
struct UnopenedTensor : aclTensor {};
struct UnopenedTensorList : aclTensorList {};
using RawTensor = const UnopenedTensor*;  // for operators that look at private formats: a Raw, which the body opens
using RawTensorList = const UnopenedTensorList*;

constexpr int kParameterInvalid = 161002;

inline View keep(const aclTensor* tensor) {
  if (tensor == nullptr) return {};
  return {tensor->shape, tensor->stride, tensor->offset, scalar_type(tensor->dtype),
          tensor->data,  true,           tensor->format, tensor->storage};
}
inline DynamicOutput keep(aclTensor* tensor) { return {tensor, keep(static_cast<const aclTensor*>(tensor))}; }
inline std::vector<View> keep(const aclTensorList* list) {
  std::vector<View> views;
  if (list != nullptr) {
    for (const aclTensor* tensor : list->tensors) views.push_back(keep(tensor));
  }
  return views;
}
struct Raw {
  View view;
};
inline Raw keep(const UnopenedTensor* tensor) { return {keep(static_cast<const aclTensor*>(tensor))}; }
inline std::vector<Raw> keep(const UnopenedTensorList* list) {
  std::vector<Raw> raw;
  for (const View& view : keep(static_cast<const aclTensorList*>(list))) raw.push_back({view});
  return raw;
}
inline std::vector<int64_t> keep(const aclIntArray* array) {
  return array != nullptr ? array->values : std::vector<int64_t>{};
}
inline std::string keep(const char* text) { return text != nullptr ? text : ""; }
inline at::Scalar keep(const aclScalar* scalar) {
  auto read = [&](auto zero) {
    std::memcpy(&zero, scalar->bytes, sizeof zero);
    return zero;
  };
  switch (scalar->dtype) {
    case ACL_FLOAT:
      return read(0.0f);
    case ACL_DOUBLE:
      return read(0.0);
    case ACL_FLOAT16:
      return static_cast<float>(read(at::Half()));
    case ACL_BF16:
      return static_cast<float>(read(at::BFloat16()));
    case ACL_BOOL:
      return read(false);
    case ACL_INT8:
      return static_cast<int64_t>(read(int8_t{0}));
    case ACL_UINT8:
      return static_cast<int64_t>(read(uint8_t{0}));
    case ACL_INT16:
      return static_cast<int64_t>(read(int16_t{0}));
    case ACL_INT32:
      return static_cast<int64_t>(read(int32_t{0}));
    case ACL_INT64:
      return read(int64_t{0});
    default:
      TORCH_CHECK(false, "cann_sim: a scalar of aclDataType ", static_cast<int>(scalar->dtype), " is not simulated");
  }
}
inline std::optional<at::Scalar> keep(const PossibleScalar* scalar) {
  return scalar != nullptr ? std::optional<at::Scalar>(keep(static_cast<const aclScalar*>(scalar))) : std::nullopt;
}
template <class Number, class = std::enable_if_t<std::is_arithmetic_v<Number> || std::is_enum_v<Number>>>
Number keep(Number value) {
  return value;
}

inline at::Tensor open(const View& view) { return view.open(); }
inline std::vector<at::Tensor> open(const std::vector<View>& views) {
  std::vector<at::Tensor> tensors;
  for (const View& view : views) tensors.push_back(view.open());
  return tensors;
}
template <class Value>
const Value& open(const Value& value) {
  return value;
}

template <class Check, class Body, class... Arguments>
int plan(const char* name, uint64_t* workspace_bytes, aclOpExecutor** executor, Check check, Body body,
         Arguments... arguments) {
  try {
    auto kept = std::make_tuple(keep(arguments)...);
    check(kept);
    *workspace_bytes = 0;
    *executor = new aclOpExecutor{name, [kept, body] {
                                    auto opened = std::apply(
                                        [](const auto&... value) { return std::make_tuple(open(value)...); }, kept);
                                    body(opened);
                                  }};
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "[cann_sim] %s refused its arguments: %s\n", name, error.what());
    fail(kParameterInvalid, "%s: %s", name, error.what());
    return kParameterInvalid;
  }
}

inline int launch(aclOpExecutor* executor, aclrtStream stream) {
  auto run = std::move(executor->run);
  const char* name = executor->name;
  delete executor;
  return submit(stream, "AICORE", name, [run, name]() -> aclError {
    try {
      c10::InferenceMode guard;
      run();
      return ACL_SUCCESS;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "[cann_sim] %s failed: %s\n", name, error.what());
      return fail(ACL_ERROR_RT_AICORE_EXCEPTION, "%s: %s", name, error.what());
    }
  });
}

}  // namespace cann_sim

#define SIM_LIST(...) __VA_ARGS__
#define OPERATOR_CHECKED(NAME, PARAMETERS, NAMES, CHECK, ...)                                      \
  extern "C" SIM_EXPORT int NAME##GetWorkspaceSize(SIM_LIST PARAMETERS, uint64_t* workspace_bytes, \
                                                   aclOpExecutor** executor) {                     \
    auto check = []([[maybe_unused]] auto& arguments) {                                            \
      [[maybe_unused]] auto& [SIM_LIST NAMES] = arguments;                                         \
      CHECK;                                                                                       \
    };                                                                                             \
    auto body = [](auto& arguments) {                                                              \
      auto& [SIM_LIST NAMES] = arguments;                                                          \
      __VA_ARGS__;                                                                                 \
    };                                                                                             \
    return cann_sim::plan(#NAME, workspace_bytes, executor, check, body, SIM_LIST NAMES);          \
  }                                                                                                \
  extern "C" SIM_EXPORT int NAME(void*, uint64_t, aclOpExecutor* executor, aclrtStream stream) {   \
    return cann_sim::launch(executor, stream);                                                     \
  }
#define OPERATOR(NAME, PARAMETERS, NAMES, ...) OPERATOR_CHECKED(NAME, PARAMETERS, NAMES, , __VA_ARGS__)
