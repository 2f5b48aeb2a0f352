// Elementwise, comparison, reduction, indexing and matrix operators: each is the ATen CPU operator of the same meaning.
// Signatures: the aclnn API reference of CANN 9.1.
#include <ATen/CPUGeneratorImpl.h>

#include "operator.h"

namespace cann_sim {
namespace {

// The cube unit rounds once, at the end. float64 makes a row independent of the number of rows, as on the device.
at::Tensor cube_product(const at::Tensor& a, const at::Tensor& b) {
  return at::matmul(a.to(at::kDouble), b.to(at::kDouble));
}

c10::List<std::optional<at::Tensor>> index_list(const std::vector<at::Tensor>& tensors) {
  c10::List<std::optional<at::Tensor>> list;
  for (const at::Tensor& tensor : tensors) {
    const bool given = tensor.defined() && !(tensor.dim() == 1 && tensor.numel() == 0);
    const bool mask = given && tensor.scalar_type() == at::kBool;
    list.push_back(!given ? std::nullopt : std::optional<at::Tensor>(mask ? tensor : tensor.to(at::kLong)));
  }
  return list;
}

void set_shape(const DynamicOutput& out, const at::Tensor& value) {
  View view = out.view;
  view.shape = value.sizes().vec();
  view.stride = at::empty(view.shape, at::kByte).strides().vec();
  view.open().copy_(value);
  out.object->shape = view.shape;
}

const char* const kScatterReduce[] = {"", "sum", "prod"};

at::Tensor scatter(const at::Tensor& self, int64_t dim, const at::Tensor& index, const at::Tensor& source,
                   int64_t reduce) {
  const at::Tensor where = index.to(at::kLong);
  if (reduce == 0) return at::scatter(self, dim, where, source);
  return at::scatter_reduce(self, dim, where, source, kScatterReduce[reduce], true);
}

const char* const kRounding[] = {"", "trunc", "floor"};
at::Tensor divide(const at::Tensor& a, const at::Tensor& b, int64_t mode) {
  return mode == 0 ? at::div(a, b) : at::div(a, b, kRounding[mode]);
}

}  // namespace
}  // namespace cann_sim

using namespace cann_sim;

#define UNARY(NAME, FUNCTION) OPERATOR(aclnn##NAME, (Tensor self, Tensor out), (self, out), out.copy_(FUNCTION(self)))
UNARY(Abs, at::abs)
UNARY(Neg, at::neg)
UNARY(Exp, at::exp)
UNARY(Log, at::log)
UNARY(Sqrt, at::sqrt)
UNARY(Rsqrt, at::rsqrt)
UNARY(Reciprocal, at::reciprocal)
UNARY(Floor, at::floor)
UNARY(Ceil, at::ceil)
UNARY(Round, at::round)
UNARY(Trunc, at::trunc)
UNARY(Sign, at::sign)
UNARY(Sigmoid, at::sigmoid)
UNARY(Silu, at::silu)
UNARY(Tanh, at::tanh)
UNARY(Relu, at::relu)
UNARY(IsFinite, at::isfinite)
UNARY(LogicalNot, at::logical_not)
UNARY(BitwiseNot, at::bitwise_not)
UNARY(Max, at::max)
UNARY(Min, at::min)

#define BINARY(NAME, FUNCTION) \
  OPERATOR(aclnn##NAME, (Tensor self, Tensor other, Tensor out), (self, other, out), out.copy_(FUNCTION(self, other)))
BINARY(Mul, at::mul)
BINARY(Div, at::div)
BINARY(FloorDivide, at::floor_divide)
BINARY(RemainderTensorTensor, at::remainder)
BINARY(PowTensorTensor, at::pow)
BINARY(Maximum, at::maximum)
BINARY(Minimum, at::minimum)
BINARY(ClampMinTensor, at::clamp_min)
BINARY(ClampMaxTensor, at::clamp_max)
BINARY(EqTensor, at::eq)
BINARY(NeTensor, at::ne)
BINARY(GtTensor, at::gt)
BINARY(GeTensor, at::ge)
BINARY(LtTensor, at::lt)
BINARY(LeTensor, at::le)
BINARY(LogicalAnd, at::logical_and)
BINARY(LogicalOr, at::logical_or)
BINARY(LogicalXor, at::logical_xor)
BINARY(BitwiseAndTensor, at::bitwise_and)
BINARY(BitwiseOrTensor, at::bitwise_or)
BINARY(BitwiseXorTensor, at::bitwise_xor)
OPERATOR(aclnnEqual, (Tensor self, Tensor other, Tensor out), (self, other, out), out.fill_(at::equal(self, other)))

#define WITH_SCALAR(NAME, FUNCTION) \
  OPERATOR(aclnn##NAME, (Tensor self, Scalar other, Tensor out), (self, other, out), out.copy_(FUNCTION(self, other)))
WITH_SCALAR(Muls, at::mul)
WITH_SCALAR(Divs, at::div)
WITH_SCALAR(FloorDivides, at::floor_divide)
WITH_SCALAR(RemainderTensorScalar, at::remainder)
WITH_SCALAR(PowTensorScalar, at::pow)
WITH_SCALAR(ClampMin, at::clamp_min)
WITH_SCALAR(ClampMax, at::clamp_max)
WITH_SCALAR(EqScalar, at::eq)
WITH_SCALAR(NeScalar, at::ne)
WITH_SCALAR(GtScalar, at::gt)
WITH_SCALAR(GeScalar, at::ge)
WITH_SCALAR(LtScalar, at::lt)
WITH_SCALAR(LeScalar, at::le)
WITH_SCALAR(BitwiseAndScalar, at::bitwise_and)
WITH_SCALAR(BitwiseOrScalar, at::bitwise_or)
WITH_SCALAR(BitwiseXorScalar, at::bitwise_xor)

#define INPLACE(NAME, METHOD) \
  OPERATOR(aclnnInplace##NAME, (Tensor self, Tensor other), (self, other), self.METHOD(other))
INPLACE(Copy, copy_)
INPLACE(Mul, mul_)
INPLACE(Div, div_)
INPLACE(FloorDivide, floor_divide_)
INPLACE(FillTensor, fill_)
INPLACE(LogicalAnd, logical_and_)
INPLACE(LogicalOr, logical_or_)
INPLACE(BitwiseAndTensor, bitwise_and_)
#define INPLACE_SCALAR(NAME, METHOD) \
  OPERATOR(aclnnInplace##NAME, (Tensor self, Scalar other), (self, other), self.METHOD(other))
INPLACE_SCALAR(Muls, mul_)
INPLACE_SCALAR(Divs, div_)
INPLACE_SCALAR(FloorDivides, floor_divide_)
INPLACE_SCALAR(FillScalar, fill_)
INPLACE_SCALAR(ClampMax, clamp_max_)
INPLACE_SCALAR(BitwiseAndScalar, bitwise_and_)
#define INPLACE_UNARY(NAME, METHOD) OPERATOR(aclnnInplace##NAME, (Tensor self), (self), self.METHOD)
INPLACE_UNARY(Zero, zero_())
INPLACE_UNARY(One, fill_(1))
INPLACE_UNARY(Sigmoid, sigmoid_())
INPLACE_UNARY(Exp, exp_())
INPLACE_UNARY(Reciprocal, reciprocal_())
INPLACE_UNARY(LogicalNot, logical_not_())

#define ALPHA(NAME, OTHER, FUNCTION)                                                                     \
  OPERATOR(aclnn##NAME, (Tensor self, OTHER other, Scalar alpha, Tensor out), (self, other, alpha, out), \
           out.copy_(FUNCTION(self, other, alpha)))
ALPHA(Add, Tensor, at::add)
ALPHA(Adds, Scalar, at::add)
ALPHA(Sub, Tensor, at::sub)
ALPHA(Subs, Scalar, at::sub)
ALPHA(Rsub, Tensor, at::rsub)
ALPHA(Rsubs, Scalar, at::rsub)
OPERATOR(aclnnAddV3, (Scalar self, Tensor other, Scalar alpha, Tensor out), (self, other, alpha, out),
         out.copy_(at::add(at::scalar_tensor(self), other, alpha)))
#define INPLACE_ALPHA(NAME, OTHER, METHOD)                                                     \
  OPERATOR(aclnnInplace##NAME, (Tensor self, OTHER other, Scalar alpha), (self, other, alpha), \
           self.METHOD(other, alpha))
INPLACE_ALPHA(Add, Tensor, add_)
INPLACE_ALPHA(Adds, Scalar, add_)
INPLACE_ALPHA(Sub, Tensor, sub_)
INPLACE_ALPHA(Subs, Scalar, sub_)
OPERATOR(aclnnAddcmul, (Tensor self, Tensor a, Tensor b, Scalar value, Tensor out), (self, a, b, value, out),
         out.copy_(at::addcmul(self, a, b, value)))
OPERATOR(aclnnInplaceAddcmul, (Tensor self, Tensor a, Tensor b, Scalar value), (self, a, b, value),
         self.addcmul_(a, b, value))
OPERATOR(aclnnDivMod, (Tensor self, Tensor other, int32_t mode, Tensor out), (self, other, mode, out),
         out.copy_(divide(self, other, mode)))
OPERATOR(aclnnDivMods, (Tensor self, Scalar other, int32_t mode, Tensor out), (self, other, mode, out),
         out.copy_(divide(self, at::scalar_tensor(other, self.options()), mode)))
OPERATOR(aclnnClamp, (Tensor self, OptionalScalar low, OptionalScalar high, Tensor out), (self, low, high, out),
         out.copy_(at::clamp(self, low, high)))
OPERATOR(aclnnCast, (Tensor self, aclDataType dtype, Tensor out), (self, dtype, out), out.copy_(self))
OPERATOR(aclnnSWhere, (Tensor condition, Tensor self, Tensor other, Tensor out), (condition, self, other, out),
         out.copy_(at::where(condition, self, other)))
OPERATOR(aclnnIsClose, (Tensor self, Tensor other, double rtol, double atol, bool equal_nan, Tensor out),
         (self, other, rtol, atol, equal_nan, out), out.copy_(at::isclose(self, other, rtol, atol, equal_nan)))
OPERATOR(aclnnSigmoidBackward, (Tensor grad, Tensor result, Tensor out), (grad, result, out),
         out.copy_(at::sigmoid_backward(grad, result)))
OPERATOR(aclnnTanhBackward, (Tensor grad, Tensor result, Tensor out), (grad, result, out),
         out.copy_(at::tanh_backward(grad, result)))
OPERATOR(aclnnSiluBackward, (Tensor grad, Tensor self, Tensor out), (grad, self, out),
         out.copy_(at::silu_backward(grad, self)))

// Random numbers: the distribution, not the sequence of the device.
OPERATOR(aclnnInplaceNormal, (Tensor self, float mean, float std, int64_t seed, int64_t offset),
         (self, mean, std, seed, offset), auto generator = at::make_generator<at::CPUGeneratorImpl>(seed + offset);
         self.copy_(at::randn(self.sizes(), generator) * std + mean))
OPERATOR(aclnnInplaceUniform, (Tensor self, double low, double high, uint64_t seed, uint64_t offset),
         (self, low, high, seed, offset), auto generator = at::make_generator<at::CPUGeneratorImpl>(seed + offset);
         self.copy_(at::rand(self.sizes(), generator) * (high - low) + low))

// Reductions and scans.
OPERATOR(aclnnReduceSum, (Tensor self, IntArray dims, bool keepdim, aclDataType dtype, Tensor out),
         (self, dims, keepdim, dtype, out), out.copy_(at::sum(self, dims, keepdim, out.scalar_type())))
OPERATOR(aclnnMean, (Tensor self, IntArray dims, bool keepdim, aclDataType dtype, Tensor out),
         (self, dims, keepdim, dtype, out), out.copy_(at::mean(self, dims, keepdim, out.scalar_type())))
OPERATOR(aclnnAll, (Tensor self, IntArray dims, bool keepdim, Tensor out), (self, dims, keepdim, out),
         out.copy_(dims.empty() ? at::all(self) : at::all(self, at::OptionalIntArrayRef(dims), keepdim)))
OPERATOR(aclnnAny, (Tensor self, IntArray dims, bool keepdim, Tensor out), (self, dims, keepdim, out),
         out.copy_(dims.empty() ? at::any(self) : at::any(self, at::OptionalIntArrayRef(dims), keepdim)))
OPERATOR(aclnnAmax, (Tensor self, IntArray dims, bool keepdim, Tensor out), (self, dims, keepdim, out),
         out.copy_(at::amax(self, dims, keepdim)))
OPERATOR(aclnnAmin, (Tensor self, IntArray dims, bool keepdim, Tensor out), (self, dims, keepdim, out),
         out.copy_(at::amin(self, dims, keepdim)))
OPERATOR(aclnnMaxDim, (Tensor self, int64_t dim, bool keepdim, Tensor out, Tensor indices),
         (self, dim, keepdim, out, indices), auto [values, where] = at::max(self, dim, keepdim);
         out.copy_(values); indices.copy_(where))
OPERATOR(aclnnMinDim, (Tensor self, int64_t dim, bool keepdim, Tensor out, Tensor indices),
         (self, dim, keepdim, out, indices), auto [values, where] = at::min(self, dim, keepdim);
         out.copy_(values); indices.copy_(where))
OPERATOR(aclnnCumsum, (Tensor self, int64_t dim, aclDataType dtype, Tensor out), (self, dim, dtype, out),
         out.copy_(at::cumsum(self, dim, out.scalar_type())))
OPERATOR(aclnnArange, (Scalar start, Scalar end, Scalar step, Tensor out), (start, end, step, out),
         out.copy_(at::arange(start, end, step, out.options())))
OPERATOR(aclnnSort, (Tensor self, bool stable, int64_t dim, bool descending, Tensor values, Tensor indices),
         (self, stable, dim, descending, values, indices),
         auto [sorted, where] = at::sort(self, stable, dim, descending);
         values.copy_(sorted); indices.copy_(where))
OPERATOR(aclnnArgsort, (Tensor self, int64_t dim, bool descending, Tensor out), (self, dim, descending, out),
         out.copy_(at::argsort(self, dim, descending)))
OPERATOR(aclnnTopk, (Tensor self, int64_t k, int64_t dim, bool largest, bool sorted, Tensor values, Tensor indices),
         (self, k, dim, largest, sorted, values, indices), auto [top, where] = at::topk(self, k, dim, largest, sorted);
         values.copy_(top); indices.copy_(where))
OPERATOR(aclnnSoftmax, (Tensor self, int64_t dim, Tensor out), (self, dim, out), out.copy_(at::softmax(self, dim)))
OPERATOR(aclnnBincount, (Tensor self, Tensor weights, int64_t minlength, Tensor out), (self, weights, minlength, out),
         out.copy_(at::bincount(self, weights.defined() ? std::optional<at::Tensor>(weights) : std::nullopt,
                                minlength)))

// Indexing and shapes. An index outside its range fails the task (on hardware it reads foreign memory or traps).
OPERATOR(aclnnIndexSelect, (Tensor self, int64_t dim, Tensor index, Tensor out), (self, dim, index, out),
         out.copy_(at::index_select(self, dim, index)))
OPERATOR(aclnnGather, (Tensor self, int64_t dim, Tensor index, Tensor out), (self, dim, index, out),
         out.copy_(at::gather(self, dim, index.to(at::kLong))))
OPERATOR(aclnnEmbedding, (Tensor weight, Tensor index, Tensor out), (weight, index, out),
         out.copy_(at::embedding(weight, index)))
OPERATOR(aclnnIndex, (Tensor self, TensorList indices, Tensor out), (self, indices, out),
         out.copy_(at::index(self, index_list(indices))))
OPERATOR(aclnnIndexPutImpl, (Tensor self, TensorList indices, Tensor values, bool accumulate, bool unsafe),
         (self, indices, values, accumulate, unsafe), self.index_put_(index_list(indices), values, accumulate))
OPERATOR(aclnnScatter, (Tensor self, int64_t dim, Tensor index, Tensor source, int64_t reduce, Tensor out),
         (self, dim, index, source, reduce, out), out.copy_(scatter(self, dim, index, source, reduce)))
OPERATOR(aclnnInplaceScatter, (Tensor self, int64_t dim, Tensor index, Tensor source, int64_t reduce),
         (self, dim, index, source, reduce), self.copy_(scatter(self, dim, index, source, reduce)))
OPERATOR(aclnnScatterValue, (Tensor self, int64_t dim, Tensor index, Scalar value, int64_t reduce, Tensor out),
         (self, dim, index, value, reduce, out),
         out.copy_(scatter(self, dim, index, at::full(index.sizes(), value, self.options()), reduce)))
OPERATOR(aclnnInplaceScatterValue, (Tensor self, int64_t dim, Tensor index, Scalar value, int64_t reduce),
         (self, dim, index, value, reduce),
         self.copy_(scatter(self, dim, index, at::full(index.sizes(), value, self.options()), reduce)))
OPERATOR(aclnnScatterAdd, (Tensor self, int64_t dim, Tensor index, Tensor source, Tensor out),
         (self, dim, index, source, out), out.copy_(at::scatter_add(self, dim, index.to(at::kLong), source)))
OPERATOR(aclnnIndexAdd, (Tensor self, int64_t dim, Tensor index, Tensor source, Scalar alpha, Tensor out),
         (self, dim, index, source, alpha, out), out.copy_(at::index_add(self, dim, index, source, alpha)))
OPERATOR(aclnnIndexCopy, (Tensor self, int64_t dim, Tensor index, Tensor source, Tensor out),
         (self, dim, index, source, out), out.copy_(at::index_copy(self, dim, index.to(at::kLong), source)))
OPERATOR(aclnnInplaceIndexCopy, (Tensor self, int64_t dim, Tensor index, Tensor source), (self, dim, index, source),
         self.index_copy_(dim, index.to(at::kLong), source))
OPERATOR(aclnnInplaceMaskedFillScalar, (Tensor self, Tensor mask, Scalar value), (self, mask, value),
         self.masked_fill_(mask, value))
OPERATOR(aclnnInplaceMaskedFillTensor, (Tensor self, Tensor mask, Tensor value), (self, mask, value),
         self.masked_fill_(mask, value.reshape({})))
OPERATOR(aclnnMaskedSelect, (Tensor self, Tensor mask, aclTensor* out), (self, mask, out),
         set_shape(out, at::masked_select(self, mask)))
OPERATOR(aclnnNonzero, (Tensor self, aclTensor* out), (self, out), set_shape(out, at::nonzero(self)))
OPERATOR(aclnnNonzeroV2, (Tensor self, aclTensor* out), (self, out), set_shape(out, at::nonzero(self).t()))
OPERATOR(aclnnCat, (TensorList tensors, int64_t dim, Tensor out), (tensors, dim, out), out.copy_(at::cat(tensors, dim)))
OPERATOR(aclnnStack, (TensorList tensors, int64_t dim, Tensor out), (tensors, dim, out),
         out.copy_(at::stack(tensors, dim)))
OPERATOR(aclnnForeachCopy, (TensorList sources, TensorList targets), (sources, targets),
         for (size_t i = 0; i < sources.size(); i++) targets[i].copy_(sources[i]))
OPERATOR(aclnnRepeat, (Tensor self, IntArray repeats, Tensor out), (self, repeats, out),
         out.copy_(self.repeat(repeats)))
OPERATOR(aclnnFlip, (Tensor self, IntArray dims, Tensor out), (self, dims, out), out.copy_(at::flip(self, dims)))
OPERATOR(aclnnConstantPadNd, (Tensor self, IntArray padding, Scalar value, Tensor out), (self, padding, value, out),
         out.copy_(at::constant_pad_nd(self, padding, value)))

// Matrix products.
OPERATOR(aclnnMatmul, (Tensor self, Tensor other, Tensor out, int8_t cube_math), (self, other, out, cube_math),
         out.copy_(cube_product(self, other)))
OPERATOR(aclnnMm, (Tensor self, Tensor other, Tensor out, int8_t cube_math), (self, other, out, cube_math),
         out.copy_(cube_product(self, other)))
OPERATOR(aclnnBatchMatMul, (Tensor self, Tensor other, Tensor out, int8_t cube_math), (self, other, out, cube_math),
         out.copy_(cube_product(self, other)))
