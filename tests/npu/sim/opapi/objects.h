// The objects that torch_npu creates through libopapi.so, and what an operator keeps of them.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <vector>

#include "../simulation.h"

struct aclTensor {
  std::vector<int64_t> shape, stride;
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

// A tensor argument after the first phase: torch_npu destroys the aclTensor as soon as the second phase returns, and
// the address may only be followed when the task runs.
struct View {
  std::vector<int64_t> shape, stride;
  int64_t offset = 0;
  at::ScalarType dtype = at::kFloat;
  void* data = nullptr;
  bool defined = false;

  int64_t numel() const;
  at::Tensor open() const;  // over the shadow of device memory; throws where the range is not one live allocation
};

// The output of an operator whose output shape depends on values; the caller reads it back from the object.
struct DynamicOutput {
  aclTensor* object;
  View view;
};

}  // namespace cann_sim
