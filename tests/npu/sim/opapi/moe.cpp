// The mixture-of-experts operators of CANN, with the rules that their documentation states: arguments outside the
// contract are refused, ids outside it fail the task, and what the device leaves unwritten is poisoned.
#include "rules.h"

namespace cann_sim {
namespace {

void check_init_routing(const View& x, const View& ids, int64_t active, int64_t experts, int64_t drop,
                        int64_t count_type, bool count_flag, int64_t quant, const std::vector<int64_t>& range,
                        int64_t index_type) {
  TORCH_CHECK(x.shape.size() == 2 && ids.shape.size() == 2, "x and expertIdx must have two dimensions");
  TORCH_CHECK(ids.dtype == at::kInt, "expertIdx must be int32");
  TORCH_CHECK(drop == 0 && quant == -1, "only the dropless form without quantisation is simulated");
  TORCH_CHECK(count_type == 0 || count_type == 1, "only cumulative and plain counts are simulated");
  TORCH_CHECK(index_type == 0 || index_type == 1, "rowIdxType must be 0 or 1");
  TORCH_CHECK(range.size() == 2 && 0 <= range[0] && range[0] < range[1] && range[1] <= experts,
              "activeExpertRange must be [low, high) within expertNum");
  if (is_950()) {
    TORCH_CHECK(active == ids.numel() && count_type == 1 && count_flag,
                "Ascend950 takes activeNum = T * K and plain counts only");
  }
}

void init_routing(const at::Tensor& x, const at::Tensor& expert_ids, int64_t experts, int64_t count_type,
                  const std::vector<int64_t>& range, int64_t index_type, at::Tensor expanded, at::Tensor row_index,
                  at::Tensor counts) {
  const at::Tensor ids = expert_ids.to(at::kLong).flatten();
  TORCH_CHECK(!ids.numel() || (ids.min().item<int64_t>() >= 0 && ids.max().item<int64_t>() < experts),
              "expertIdx holds an id outside [0, expertNum): undefined on the device");
  const int64_t low = range[0], high = range[1], top_k = expert_ids.size(1);
  const at::Tensor active = ids.ge(low).logical_and(ids.lt(high));
  const int64_t rows = active.sum().item<int64_t>();
  const at::Tensor key = at::where(active, ids, at::full_like(ids, std::numeric_limits<int64_t>::max()));
  const at::Tensor order = std::get<1>(at::sort(key, /*stable=*/true, 0, false)).slice(0, 0, rows);
  if (index_type == 1) {
    row_index.slice(0, 0, rows).copy_(order);
    poison(row_index.slice(0, rows));
  } else {
    row_index.fill_(-1);
    row_index.index_put_({order}, at::arange(rows, row_index.options()));
  }
  const int64_t written = std::min(rows, expanded.size(0));
  expanded.slice(0, 0, written).copy_(x.index_select(0, at::floor_divide(order.slice(0, 0, written), top_k)));
  poison(expanded.slice(0, written));
  if (counts.defined() && counts.numel() > 0) {
    const at::Tensor count = at::bincount(ids.index({active}) - low, std::nullopt, high - low);
    counts.copy_(count_type == 0 ? count.cumsum(0) : count);
  }
}

std::pair<at::Tensor, at::Tensor> halves(const at::Tensor& x, bool interleaved) {
  const at::Tensor wide = x.to(at::kFloat);
  const int64_t half = wide.size(-1) / 2;
  if (interleaved) return {wide.slice(-1, 0, 2 * half, 2), wide.slice(-1, 1, 2 * half, 2)};
  return {wide.slice(-1, 0, half), wide.slice(-1, half)};
}

at::Tensor clipped_swiglu(const at::Tensor& x, double alpha, double limit, double bias, bool interleaved) {
  auto [gate, up] = halves(x, interleaved);
  gate = gate.clamp_max(limit);
  return gate * at::sigmoid(gate * alpha) * (up.clamp(-limit, limit) + bias);
}

at::Tensor swiglu(const at::Tensor& x) {
  auto [gate, up] = halves(x, false);
  return at::silu(gate) * up;
}

at::Tensor swiglu_grad(const at::Tensor& grad, const at::Tensor& x) {
  auto [gate, up] = halves(x, false);
  const at::Tensor wide = grad.to(at::kFloat);
  return at::cat({at::silu_backward(wide * up, gate), wide * at::silu(gate)}, -1);
}

void token_permute(const at::Tensor& tokens, const at::Tensor& indices, at::Tensor permuted, at::Tensor sorted) {
  const int64_t top_k = indices.dim() == 1 ? 1 : indices.size(1);
  const at::Tensor order = std::get<1>(at::sort(indices.to(at::kLong).flatten(), /*stable=*/true, 0, false));
  sorted.index_put_({order}, at::arange(order.numel(), sorted.options()));
  permuted.copy_(tokens.index_select(0, at::floor_divide(order.slice(0, 0, permuted.size(0)), top_k)));
}

void token_unpermute(const at::Tensor& permuted, const at::Tensor& sorted, const at::Tensor& probs, at::Tensor out) {
  const int64_t tokens = out.size(0), top_k = sorted.numel() / std::max<int64_t>(tokens, 1);
  const at::Tensor rows = permuted.index_select(0, sorted.to(at::kLong)).to(at::kFloat).view({tokens, top_k, -1});
  out.copy_((probs.defined() ? rows * probs.to(at::kFloat).view({tokens, top_k, 1}) : rows).sum(1));
}

}  // namespace
}  // namespace cann_sim

using namespace cann_sim;

OPERATOR_CHECKED(aclnnMoeInitRoutingV3,
                 (Tensor x, Tensor ids, Tensor scale, Tensor offset, int64_t active, int64_t capacity, int64_t experts,
                  int64_t drop, int64_t count_type, bool count_flag, int64_t quant, IntArray range, int64_t index_type,
                  Tensor expanded, Tensor row_index, Tensor counts, Tensor expanded_scale),
                 (x, ids, scale, offset, active, capacity, experts, drop, count_type, count_flag, quant, range,
                  index_type, expanded, row_index, counts, expanded_scale),
                 check_init_routing(x, ids, active, experts, drop, count_type, count_flag, quant, range, index_type),
                 init_routing(x, ids, experts, count_type, range, index_type, expanded, row_index, counts))
OPERATOR(aclnnMoeTokenPermute,
         (Tensor tokens, Tensor indices, int64_t rows, bool padded, Tensor permuted, Tensor sorted),
         (tokens, indices, rows, padded, permuted, sorted), token_permute(tokens, indices, permuted, sorted))
OPERATOR(aclnnMoeTokenUnpermute,
         (Tensor permuted, Tensor sorted, Tensor probs, bool padded, IntArray restore_shape, Tensor out),
         (permuted, sorted, probs, padded, restore_shape, out), token_unpermute(permuted, sorted, probs, out))

OPERATOR(aclnnClippedSwiglu,
         (Tensor x, Tensor groups, int64_t dim, double alpha, double limit, double bias, bool interleaved, Tensor out),
         (x, groups, dim, alpha, limit, bias, interleaved, out),
         out.copy_(clipped_swiglu(x, alpha, limit, bias, interleaved)))
OPERATOR(aclnnSwiGlu, (Tensor x, int64_t dim, Tensor out), (x, dim, out), out.copy_(swiglu(x)))
OPERATOR(aclnnSwiGluGrad, (Tensor grad, Tensor x, int64_t dim, Tensor out), (grad, x, dim, out),
         out.copy_(swiglu_grad(grad, x)))
