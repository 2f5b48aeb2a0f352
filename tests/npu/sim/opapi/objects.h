// The objects that torch_npu creates through libopapi.so, and what an operator keeps of them.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <vector>

#include "../simulation.h"

struct aclTensor {
  std::vector<int64_t> shape, stride, storage;
  int64_t offset;  // in elements
  aclDataType dtype;
  aclFormat format;
  void* data;
};
struct aclScalar {
  char bytes[16];
  aclDataType dtype;
};
struct aclIntArray {
  std::vector<int64_t> values;
};
struct aclFloatArray {
  std::vector<float> values;
};
struct aclBoolArray {
  std::vector<bool> values;
};
struct aclTensorList {
  std::vector<const aclTensor*> tensors;
};
struct aclScalarList {
  std::vector<const aclScalar*> scalars;
};
struct aclOpExecutor {
  const char* name;
  std::function<void()> run;
};

namespace cann_sim {

at::ScalarType scalar_type(aclDataType dtype);

// Whether elements lie where shape and stride say. Private (fractal) formats have an order of their own.
bool is_base_format(aclFormat format);

// A tensor argument after the first phase: torch_npu destroys the aclTensor as soon as the second phase returns, and
// the address may only be followed when the task runs.
struct View {
  std::vector<int64_t> shape, stride;
  int64_t offset = 0;
  at::ScalarType dtype = at::kFloat;
  void* data = nullptr;
  bool defined = false;
  aclFormat format = ACL_FORMAT_ND;
  std::vector<int64_t> storage;  // of a private format: the shape in memory

  int64_t numel() const;
  // Over the shadow of device memory. Both throw where the range is not one live allocation; open() also for a private
  // format, whose elements only the operators that take it can find.
  at::Tensor open() const;
  at::Tensor open_storage() const;  // contiguous, of the shape `storage`
};

// The output of an operator whose output shape depends on values; the caller reads it back from the object.
struct DynamicOutput {
  aclTensor* object;
  View view;
};

}  // namespace cann_sim
