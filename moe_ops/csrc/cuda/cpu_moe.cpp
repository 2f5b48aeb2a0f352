// cpu_moe_submit and cpu_moe_sync on CUDA streams, eager and captured.
//
//   submit: [kernel: inputs -> staging, mints the tickets]  beside the stream: [host function: enqueue]
//   sync:   [kernel: tickets -> staging]  [host function: wait]  [kernel: device_out + staging -> out]
//
// Outside of captures a thread of the library takes the place of the driver's: it looks at a word that the first kernel
// sets, and the kernel of sync waits for its answer (engine/doorbells.h). MOE_OPS_HOST_FUNCTIONS=1 leaves that to the
// driver.
//
// What follows a submit does not wait for its host function, which the driver starts 50 to 200 us after it may run. A
// sync whose ticket has not become a job yet does that host function's work. In synchronous mode, and with the
// repeatable tickets of the tests, tickets come from the host function, in the stream.
#include <nvtx3/nvToolsExt.h>

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>

#include "cpu/check.h"
#include "cuda/beside.h"
#include "cuda/cpu_moe_copy.h"
#include "cuda/launch.h"
#include "cuda/staging.h"
#include "engine/c_api.h"

namespace moe_ops::cuda {
namespace {

int element_type(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return MOE_OPS_FLOAT32;
    case ScalarType::BFloat16:
      return MOE_OPS_BFLOAT16;
    case ScalarType::Half:
      return MOE_OPS_FLOAT16;
    default:
      return 3;  // float64: weights only
  }
}

// A job on a stream that failed can only be reported by a later call.
void raise_stream_errors(const char* op) {
  char text[400];
  const int64_t found = moe_ops_take_error(0, text, sizeof(text));
  if (found == 0) return;
  const std::string more = found > 1 ? " (and " + std::to_string(found - 1) + " more)" : "";
  throw std::runtime_error(std::string(op) + ": an earlier call on a stream failed: " + text + more);
}

void refuse_synchronous_capture(const char* op, const CapturedGraph* graph) {
  if (graph && moe_ops_synchronous())
    throw std::runtime_error(std::string(op) +
                             ": synchronous mode (MOE_OPS_SYNC) cannot be captured: the CPU experts would run now, and "
                             "not in the graph");
}

// Runs `run(call)` in stream order: as a host function, or, in synchronous mode, on this thread behind the stream.
void run_on_stream(cudaHostFn_t run, void* call, cudaStream_t stream) {
  if (moe_ops_synchronous()) {
    STD_CUDA_CHECK(cudaStreamSynchronize(stream));
    return run(call);
  }
  STD_CUDA_CHECK(cudaLaunchHostFunc(stream, run, call));
}

bool wants_host_functions() {
  static const bool wanted = [] {
    const char* value = std::getenv("MOE_OPS_HOST_FUNCTIONS");
    return value && *value && std::strcmp(value, "0") != 0;
  }();
  return wanted;
}

void watch_words() {
  if (!moe_ops_watch_words()) throw std::runtime_error(moe_ops_last_error());
}

// Frees a call and its slot if anything throws before the host function owns them.
struct Pending {
  Pending(void* call, Slot* slot, const CapturedGraph* graph) : call(call), slot(slot), graph(graph) {}
  ~Pending() {
    if (graph) return;
    if (call) moe_ops_call_destroy(call);
    if (slot) give_back(slot);
  }
  Pending(const Pending&) = delete;
  void* call;
  Slot* slot;
  const CapturedGraph* graph;
};

std::string size_text(int64_t num_tokens, int64_t hidden_size) {
  return "[" + std::to_string(num_tokens) + ", " + std::to_string(hidden_size) + "] rows";
}

// Names a stream among those of all devices (the default stream has the same handle on each); never read through.
const void* stream_key(int device, cudaStream_t stream) {
  return reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(stream) << 8 | (device + 1));
}

int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

std::tuple<Tensor, Tensor> cpu_moe_submit(const Tensor& hidden_states, const Tensor& topk_ids,
                                          const Tensor& topk_weights, const Tensor& engine,
                                          std::optional<int64_t> deferred_limit) {
  constexpr const char* kOp = "cpu_moe_submit";
  check_rows(kOp, "hidden_states", hidden_states);
  const int64_t num_tokens = hidden_states.size(0), hidden_size = hidden_states.size(1);
  check_ids(kOp, topk_ids, num_tokens, &topk_weights);
  const int64_t top_k = topk_ids.size(1);
  check_weights(kOp, topk_weights, num_tokens, top_k);
  check_ticket(kOp, "engine", engine);
  const int64_t max_deferred = deferred_limit.value_or(0);
  MOE_REQUIRE(max_deferred >= 0, kOp, "max_deferred", "at least 0", std::to_string(max_deferred));
  check_device(kOp, hidden_states, "topk_ids", topk_ids);
  check_device(kOp, hidden_states, "topk_weights", topk_weights);
  const bool baked = engine.device().type() == torch::headeronly::DeviceType::CPU;
  if (!baked) check_device(kOp, hidden_states, "engine", engine);
  const int64_t handle = baked ? *engine.const_data_ptr<int64_t>() : 0;
  if (baked) {
    const int64_t known = moe_ops_check_handle(handle, hidden_size);
    char hex[32];
    std::snprintf(hex, sizeof(hex), "0x%llx", static_cast<unsigned long long>(handle));
    MOE_REQUIRE(known != 0, kOp, "engine", "the handle of experts in a living CpuMoeEngine", hex);
    MOE_REQUIRE(known > 0, kOp, "hidden_states", "as wide as the experts", describe(hidden_states));
  }

  const int device = hidden_states.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  cudaStream_t stream = current_stream(hidden_states);
  CapturedGraph* graph = captured_graph(stream);
  refuse_synchronous_capture(kOp, graph);
  raise_stream_errors(kOp);

  const Tensor rows = dense_rows(hidden_states);
  SubmitCopy copy{};
  copy.num_tokens = num_tokens;
  copy.top_k = top_k;
  copy.hidden_states = static_cast<const char*>(rows.const_data_ptr());
  copy.row_bytes = hidden_size * int64_t(rows.element_size());
  copy.row_stride_bytes = rows.stride(0) * int64_t(rows.element_size());
  copy.topk_ids = topk_ids.const_data_ptr();
  copy.wide_ids = topk_ids.scalar_type() == ScalarType::Long;
  copy.topk_weights = topk_weights.const_data_ptr();
  copy.weight_type = element_type(topk_weights);
  for (int dim = 0; dim < 2; ++dim) {
    copy.id_strides[dim] = topk_ids.stride(dim);
    copy.weight_strides[dim] = topk_weights.stride(dim);
  }
  copy.device_handle = baked ? nullptr : engine.const_data_ptr<int64_t>();
  copy.handle = handle;

  const int64_t hidden_bytes = aligned(num_tokens * copy.row_bytes), id_bytes = aligned(num_tokens * top_k * 8);
  Slot* slot = take_slot(SlotKind::kSubmit, device, hidden_bytes + id_bytes + num_tokens * top_k * 4, graph, stream,
                         kOp, size_text(num_tokens, hidden_size));
  Pending pending(nullptr, slot, graph);
  copy.staged_handle = slot->handle();
  copy.staged_hidden_states = slot->payload();
  copy.staged_ids = reinterpret_cast<int64_t*>(slot->payload() + hidden_bytes);
  copy.staged_weights = reinterpret_cast<float*>(slot->payload() + hidden_bytes + id_bytes);
  pending.call = moe_ops_submit_call_create(
      graph ? graph->arena : nullptr, num_tokens, top_k, hidden_size, element_type(rows), max_deferred,
      copy.staged_handle, copy.staged_hidden_states, copy.staged_ids, copy.staged_weights, slot->tickets());
  if (!pending.call) throw std::runtime_error(moe_ops_last_error());

  Tensor ticket = torch::stable::new_empty(hidden_states, {1}, ScalarType::Long);
  Tensor deferred = torch::stable::new_empty(hidden_states, {1}, ScalarType::Long);
  copy.ticket = ticket.mutable_data_ptr<int64_t>();
  copy.deferred_ticket = deferred.mutable_data_ptr<int64_t>();
  copy.staged_tickets = slot->tickets();
  copy.may_defer = max_deferred > 0;
  copy.runs = MOE_OPS_TICKET_RUNS;
  if (!moe_ops_synchronous())
    copy.first_ticket = moe_ops_submit_call_mint(pending.call, graph ? nullptr : stream_key(device, stream),
                                                 graph ? nullptr : slot->done());
  if (graph) {
    if (copy.first_ticket) copy.run = take_counter(device, graph);
    wait_for_beside(stream, graph);  // it reads the staging that this call fills
  }
  const bool by_word = copy.first_ticket && !graph && !wants_host_functions();
  if (by_word) {
    watch_words();
    *slot->rung() = 0;
    copy.rung = slot->rung();
    copy.arrivals = slot->arrivals;
  }
  copy_inputs(copy, stream);
  STD_CUDA_CHECK(cudaGetLastError());
  if (by_word) {
    moe_ops_call_when_rung(pending.call, slot->rung(), nullptr);
    pending.call = nullptr;
    pending.slot = nullptr;
    return {ticket, deferred};
  }
  if (copy.first_ticket) {
    launch_beside(moe_ops_submit_call_run, pending.call, device, stream, graph);
    pending.call = nullptr;
    pending.slot = nullptr;
    return {ticket, deferred};
  }
  run_on_stream(moe_ops_submit_call_run, pending.call, stream);
  pending.call = nullptr;
  if (moe_ops_synchronous()) {
    moe_ops_wait_ticket(slot->tickets()[0]);
    if (slot->tickets()[1]) moe_ops_wait_ticket(slot->tickets()[1]);
  }
  copy_tickets_out(slot->tickets(), copy.ticket, copy.deferred_ticket, slot->done(), stream);
  STD_CUDA_CHECK(cudaGetLastError());
  pending.slot = nullptr;
  return {ticket, deferred};
}

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

  const int device = ticket.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  cudaStream_t stream = current_stream(ticket);
  CapturedGraph* graph = captured_graph(stream);
  refuse_synchronous_capture(kOp, graph);
  raise_stream_errors(kOp);

  const int64_t num_tokens = device_out.size(0), hidden_size = device_out.size(1);
  const Tensor rows = dense_rows(device_out);
  Tensor out = torch::stable::new_empty(device_out, {num_tokens, hidden_size}, dtype);
  Slot* slot = take_slot(SlotKind::kSync, device, num_tokens * hidden_size * int64_t(sizeof(float)), graph, stream, kOp,
                         size_text(num_tokens, hidden_size));
  Pending pending(nullptr, slot, graph);
  SyncCopy copy{};
  copy.num_tokens = num_tokens;
  copy.hidden_size = hidden_size;
  copy.device_out = rows.const_data_ptr();
  copy.in_type = element_type(rows);
  copy.in_stride = rows.stride(0);
  copy.staged = reinterpret_cast<const float*>(slot->payload());
  copy.out = out.mutable_data_ptr();
  copy.out_type = element_type(out);
  copy.arrivals = slot->arrivals;
  copy.done = slot->done();
  pending.call = moe_ops_sync_call_create(graph ? graph->arena : nullptr, num_tokens, hidden_size, slot->tickets(),
                                          deferred_ticket.has_value(), reinterpret_cast<float*>(slot->payload()));
  if (!pending.call) throw std::runtime_error(moe_ops_last_error());

  const int64_t* ticket_data = ticket.const_data_ptr<int64_t>();
  const int64_t* deferred_data = deferred_ticket ? deferred_ticket->const_data_ptr<int64_t>() : nullptr;
  if (graph || moe_ops_synchronous() || wants_host_functions()) {
    copy_tickets_in(ticket_data, deferred_data, slot->tickets(), stream);
    STD_CUDA_CHECK(cudaGetLastError());
    run_on_stream(moe_ops_sync_call_run, pending.call, stream);
    pending.call = nullptr;
  } else {
    watch_words();
    *slot->rung() = *slot->answered() = 0;
    slot->tickets()[0] = slot->tickets()[1] = 0;
    // Before the launch, which may itself wait for the kernel (CUDA_LAUNCH_BLOCKING).
    moe_ops_call_when_rung(pending.call, slot->rung(), slot->answered());
    pending.call = nullptr;
    ask_for_rows(ticket_data, deferred_data, slot->tickets(), slot->rung(), slot->answered(), stream);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) {
      // Nobody will ring. The call ends with an error of its own, of no ticket, and then lets go of the slot.
      __atomic_store_n(slot->rung(), int64_t{1}, __ATOMIC_RELEASE);
      while (!__atomic_load_n(slot->answered(), __ATOMIC_ACQUIRE)) std::this_thread::yield();
      STD_CUDA_CHECK(error);
    }
  }
  add_staged(copy, stream);
  STD_CUDA_CHECK(cudaGetLastError());
  pending.slot = nullptr;
  if (moe_ops_synchronous()) raise_stream_errors(kOp);
  return out;
}

// {slots, pinned bytes} of a device's staging.
Tensor engine_staging(int64_t device) {
  const auto size = staging_size(static_cast<int>(device));
  Tensor tensor = torch::stable::empty({2}, ScalarType::Long);
  tensor.mutable_data_ptr<int64_t>()[0] = size.first;
  tensor.mutable_data_ptr<int64_t>()[1] = size.second;
  return tensor;
}

// Each job of the engine is an NVTX range on its own thread, for Nsight Systems; it costs nanoseconds where no profiler
// is attached.
const bool ranges = [] {
  moe_ops_set_range_hooks([](const char* name) { nvtxRangePushA(name); }, [] { nvtxRangePop(); });
  return true;
}();

}  // namespace
}  // namespace moe_ops::cuda

STABLE_TORCH_LIBRARY_IMPL(moe_ops, CUDA, m) {
  m.impl("cpu_moe_submit", TORCH_BOX(&moe_ops::cuda::cpu_moe_submit));
  m.impl("cpu_moe_sync", TORCH_BOX(&moe_ops::cuda::cpu_moe_sync));
}

STABLE_TORCH_LIBRARY_IMPL(moe_ops, CompositeExplicitAutograd, m) {
  m.impl("_engine_staging", TORCH_BOX(&moe_ops::cuda::engine_staging));
}
