// cpu_moe_submit and cpu_moe_sync on CPU tensors: the same engine as for device streams, with the same overlap with the
// calling thread.
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstring>
#include <tuple>

#include "cpu/check.h"
#include "cpu/parallel.h"
#include "engine/engine.h"

namespace moe_ops {
namespace {

using engine::Element;
using engine::Geometry;
using torch::headeronly::BFloat16;
using torch::headeronly::Half;

Element element_of(const Tensor& rows) {
  switch (rows.scalar_type()) {
    case ScalarType::Float:
      return Element::kFloat32;
    case ScalarType::BFloat16:
      return Element::kBFloat16;
    default:
      return Element::kFloat16;
  }
}

Tensor new_ticket(const Tensor& like, int64_t value) {
  Tensor ticket = torch::stable::new_empty(like, {1}, ScalarType::Long);
  *ticket.mutable_data_ptr<int64_t>() = value;
  return ticket;
}

std::tuple<Tensor, Tensor> cpu_moe_submit(const Tensor& hidden_states, const Tensor& topk_ids,
                                          const Tensor& topk_weights, const Tensor& engine_handle,
                                          std::optional<int64_t> deferred_limit) {
  constexpr const char* kOp = "cpu_moe_submit";
  check_rows(kOp, "hidden_states", hidden_states);
  const int64_t num_tokens = hidden_states.size(0), hidden_size = hidden_states.size(1);
  check_ids(kOp, topk_ids, num_tokens, &topk_weights);
  const int64_t top_k = topk_ids.size(1);
  check_weights(kOp, topk_weights, num_tokens, top_k);
  check_ticket(kOp, "engine", engine_handle);
  const int64_t max_deferred = deferred_limit.value_or(0);
  MOE_REQUIRE(max_deferred >= 0, kOp, "max_deferred", "at least 0", std::to_string(max_deferred));
  check_device(kOp, hidden_states, "topk_ids", topk_ids);
  check_device(kOp, hidden_states, "topk_weights", topk_weights);
  check_device(kOp, hidden_states, "engine", engine_handle);

  const int64_t handle = *engine_handle.const_data_ptr<int64_t>();
  engine::check_submit(handle, hidden_size);
  engine::throw_stream_errors(engine::find_engine(handle), kOp);
  engine::Submission* submission =
      engine::acquire({num_tokens, top_k, hidden_size, element_of(hidden_states), max_deferred});
  const Tensor rows = dense_rows(hidden_states), ids = as_int64(topk_ids), weights = as_float32(topk_weights);
  const size_t row_bytes = hidden_size * rows.element_size();
  const char* from = static_cast<const char*>(rows.const_data_ptr());
  char* to = static_cast<char*>(engine::hidden_states_of(submission));
  if (num_tokens == 1 || rows.stride(0) == hidden_size) {
    if (num_tokens > 0) std::memcpy(to, from, num_tokens * row_bytes);
  } else {
    const int64_t stride = rows.stride(0) * int64_t(rows.element_size());
    for (int64_t t = 0; t < num_tokens; ++t) std::memcpy(to + t * row_bytes, from + t * stride, row_bytes);
  }
  if (ids.numel() > 0) {
    std::memcpy(engine::topk_ids_of(submission), ids.const_data_ptr(), ids.numel() * sizeof(int64_t));
    std::memcpy(engine::topk_weights_of(submission), weights.const_data_ptr(), weights.numel() * sizeof(float));
  }

  const engine::Tickets tickets = engine::submit(submission, handle, engine::Origin::kHost);
  if (engine::synchronous()) {
    engine::wait_done(tickets.ticket);
    if (tickets.deferred) engine::wait_done(tickets.deferred);
  }
  return {new_ticket(hidden_states, tickets.ticket), new_ticket(hidden_states, tickets.deferred)};
}

// out = device_out + (part + deferred), in float32, rounded once. The order is the same on every device.
template <class In, class Out>
void add_rows(const In* device_out, int64_t stride, const float* part, const float* deferred, Out* out, int64_t width,
              int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    const In* row = device_out + t * stride;
    const float* first = part ? part + t * width : nullptr;
    const float* second = deferred ? deferred + t * width : nullptr;
    Out* result = out + t * width;
    for (int64_t i = 0; i < width; ++i) {
      float cpu = first ? first[i] : 0.0f;
      if (second) cpu += second[i];
      result[i] = static_cast<Out>(static_cast<float>(row[i]) + cpu);
    }
  }
}

template <class In>
void add_rows(const Tensor& device_out, const float* part, const float* deferred, const Tensor& out) {
  const int64_t num_tokens = out.size(0), width = out.size(1);
  const Tensor rows = dense_rows(device_out);
  const auto* from = static_cast<const In*>(rows.const_data_ptr());
  const int64_t stride = rows.stride(0), grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(1, width));
  parallel_for(0, num_tokens, grain, [&](int64_t begin, int64_t end) {
    void* to = out.mutable_data_ptr();
    switch (out.scalar_type()) {
      case ScalarType::Float:
        return add_rows(from, stride, part, deferred, static_cast<float*>(to), width, begin, end);
      case ScalarType::BFloat16:
        return add_rows(from, stride, part, deferred, static_cast<BFloat16*>(to), width, begin, end);
      default:
        return add_rows(from, stride, part, deferred, static_cast<Half*>(to), width, begin, end);
    }
  });
}

// Released on every way out; a failed job is released before its error is thrown.
struct Hold {
  explicit Hold(engine::Taken taken) : taken(taken) {}
  ~Hold() {
    if (taken.job) engine::release(taken.job);
  }
  Hold(const Hold&) = delete;
  engine::Taken taken;
};

Tensor cpu_moe_sync(const Tensor& ticket, const Tensor& device_out, std::optional<Tensor> deferred_ticket,
                    std::optional<ScalarType> out_dtype) {
  constexpr const char* kOp = "cpu_moe_sync";
  check_ticket(kOp, "ticket", ticket);
  check_rows(kOp, "device_out", device_out);
  check_ticket(kOp, "deferred_ticket", deferred_ticket);
  check_device(kOp, ticket, "device_out", device_out);
  check_device(kOp, ticket, "deferred_ticket", deferred_ticket);
  const ScalarType dtype = out_dtype.value_or(device_out.scalar_type());
  MOE_REQUIRE(is_float(dtype), kOp, "out_dtype", "None, bfloat16, float16 or float32", dtype_name(dtype));

  const int64_t num_tokens = device_out.size(0), hidden_size = device_out.size(1);
  const int64_t now = *ticket.const_data_ptr<int64_t>();
  const int64_t later = deferred_ticket ? *deferred_ticket->const_data_ptr<int64_t>() : 0;
  // Both are looked at before either is taken: an argument error leaves them good for the next call.
  engine::check_ticket(now, num_tokens, hidden_size, "ticket");
  if (later) engine::check_ticket(later, num_tokens, hidden_size, "deferred_ticket");
  if (later == now)
    throw std::invalid_argument("cpu_moe_sync: deferred_ticket must be another ticket, got the same one");

  Hold first(engine::take(now, num_tokens, hidden_size));
  Hold second(later ? engine::take(later, num_tokens, hidden_size) : engine::Taken());
  for (const Hold* hold : {&first, &second})
    if (hold->taken.failed) throw std::runtime_error(std::string(kOp) + ": " + hold->taken.error);

  Tensor out = torch::stable::new_empty(device_out, {num_tokens, hidden_size}, dtype);
  switch (device_out.scalar_type()) {
    case ScalarType::Float:
      add_rows<float>(device_out, first.taken.rows, second.taken.rows, out);
      break;
    case ScalarType::BFloat16:
      add_rows<BFloat16>(device_out, first.taken.rows, second.taken.rows, out);
      break;
    default:
      add_rows<Half>(device_out, first.taken.rows, second.taken.rows, out);
  }
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ops, CPU, m) {
  m.impl("cpu_moe_submit", TORCH_BOX(&cpu_moe_submit));
  m.impl("cpu_moe_sync", TORCH_BOX(&cpu_moe_sync));
}

}  // namespace moe_ops
