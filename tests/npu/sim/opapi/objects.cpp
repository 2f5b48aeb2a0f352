#include "objects.h"

#include <algorithm>
#include <cstring>

namespace cann_sim {

at::ScalarType scalar_type(aclDataType dtype) {
  switch (dtype) {
    case ACL_FLOAT:
      return at::kFloat;
    case ACL_FLOAT16:
      return at::kHalf;
    case ACL_BF16:
      return at::kBFloat16;
    case ACL_DOUBLE:
      return at::kDouble;
    case ACL_BOOL:
      return at::kBool;
    case ACL_INT8:
      return at::kChar;
    case ACL_UINT8:
      return at::kByte;
    case ACL_INT16:
      return at::kShort;
    case ACL_INT32:
      return at::kInt;
    case ACL_INT64:
      return at::kLong;
    case ACL_UINT16:
      return at::kUInt16;
    case ACL_UINT32:
      return at::kUInt32;
    case ACL_UINT64:
      return at::kUInt64;
    case ACL_FLOAT8_E4M3FN:
      return at::kFloat8_e4m3fn;
    case ACL_FLOAT8_E5M2:
      return at::kFloat8_e5m2;
    case ACL_FLOAT8_E8M0:
      return at::kFloat8_e8m0fnu;
    default:
      TORCH_CHECK(false, "cann_sim: aclDataType ", static_cast<int>(dtype), " is not simulated");
  }
}

int64_t View::numel() const {
  int64_t count = 1;
  for (int64_t size : shape) count *= size;
  return count;
}

bool is_base_format(aclFormat format) {
  switch (format) {
    case ACL_FORMAT_ND:
    case ACL_FORMAT_NCL:
    case ACL_FORMAT_NCHW:
    case ACL_FORMAT_NCDHW:
      return true;
    default:
      return false;
  }
}

namespace {

void* shadow(void* data, int64_t offset, int64_t elements, at::ScalarType dtype) {
  const auto element = static_cast<int64_t>(c10::elementSize(dtype));
  void* host = translate(static_cast<char*>(data) + offset * element, static_cast<size_t>(elements * element));
  TORCH_CHECK(host != nullptr, "cann_sim: a tensor of ", elements * element,
              " bytes lies outside every device allocation (freed or overrun)");
  return host;
}

}  // namespace

at::Tensor View::open() const {
  if (!defined) return {};
  TORCH_CHECK(is_base_format(format), "cann_sim: this operator does not take a tensor of the private format ",
              static_cast<int>(format));
  const auto options = at::TensorOptions().dtype(dtype);
  if (numel() == 0) return at::empty(shape, options);
  int64_t span = 1;
  for (size_t i = 0; i < shape.size(); i++) span += (shape[i] - 1) * stride[i];
  return at::from_blob(shadow(data, offset, span, dtype), shape, stride, options);
}

at::Tensor View::open_storage() const {
  int64_t elements = 1;
  for (int64_t size : storage) elements *= size;
  return at::from_blob(shadow(data, 0, elements, dtype), storage, at::TensorOptions().dtype(dtype));
}

}  // namespace cann_sim

#define ACL_API extern "C" SIM_EXPORT

ACL_API aclTensor* aclCreateTensor(const int64_t* shape, uint64_t dims, aclDataType dtype, const int64_t* stride,
                                   int64_t offset, aclFormat format, const int64_t* storage, uint64_t storage_dims,
                                   void* data) {
  aclTensor* tensor =
      new aclTensor{{shape, shape + dims}, {}, {storage, storage + storage_dims}, offset, dtype, format, data};
  if (stride != nullptr) {
    tensor->stride.assign(stride, stride + dims);
  } else {
    tensor->stride.resize(dims);
    int64_t step = 1;
    for (size_t i = dims; i-- > 0; step *= shape[i]) tensor->stride[i] = step;
  }
  return tensor;
}

ACL_API aclScalar* aclCreateScalar(void* value, aclDataType dtype) {
  aclScalar* scalar = new aclScalar{{}, dtype};
  size_t bytes = 4;
  switch (dtype) {
    case ACL_BOOL:
    case ACL_INT8:
    case ACL_UINT8:
      bytes = 1;
      break;
    case ACL_FLOAT16:
    case ACL_BF16:
    case ACL_INT16:
    case ACL_UINT16:
      bytes = 2;
      break;
    case ACL_DOUBLE:
    case ACL_INT64:
    case ACL_UINT64:
    case ACL_COMPLEX64:
      bytes = 8;
      break;
    case ACL_COMPLEX128:
      bytes = 16;
      break;
    default:
      break;
  }
  std::memcpy(scalar->bytes, value, bytes);
  return scalar;
}

ACL_API aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t count) {
  return new aclIntArray{std::vector<int64_t>(values, values + count)};
}
ACL_API aclFloatArray* aclCreateFloatArray(const float* values, uint64_t count) {
  return new aclFloatArray{std::vector<float>(values, values + count)};
}
ACL_API aclBoolArray* aclCreateBoolArray(const bool* values, uint64_t count) {
  return new aclBoolArray{std::vector<bool>(values, values + count)};
}
ACL_API aclTensorList* aclCreateTensorList(const aclTensor* const* tensors, uint64_t count) {
  return new aclTensorList{{tensors, tensors + count}};
}
ACL_API aclScalarList* aclCreateScalarList(const aclScalar* const* scalars, uint64_t count) {
  return new aclScalarList{{scalars, scalars + count}};
}

namespace {

template <class Object>
int destroy(const Object* object) {
  delete object;
  return 0;
}

}  // namespace

ACL_API int aclDestroyTensor(const aclTensor* object) { return destroy(object); }
ACL_API int aclDestroyScalar(const aclScalar* object) { return destroy(object); }
ACL_API int aclDestroyIntArray(const aclIntArray* object) { return destroy(object); }
ACL_API int aclDestroyFloatArray(const aclFloatArray* object) { return destroy(object); }
ACL_API int aclDestroyBoolArray(const aclBoolArray* object) { return destroy(object); }
ACL_API int aclDestroyAclOpExecutor(aclOpExecutor* object) { return destroy(object); }
ACL_API int aclDestroyTensorList(const aclTensorList* list) {  // a list owns its elements
  if (list != nullptr) std::for_each(list->tensors.begin(), list->tensors.end(), destroy<aclTensor>);
  return destroy(list);
}
ACL_API int aclDestroyScalarList(const aclScalarList* list) {
  if (list != nullptr) std::for_each(list->scalars.begin(), list->scalars.end(), destroy<aclScalar>);
  return destroy(list);
}

ACL_API int aclGetViewShape(const aclTensor* tensor, int64_t** shape, uint64_t* dims) {
  *dims = tensor->shape.size();
  *shape = new int64_t[*dims];  // released by the caller
  std::copy(tensor->shape.begin(), tensor->shape.end(), *shape);
  return 0;
}
