// The internal ops by which moe_ops/engine.py manages engines and their experts. Numbers and small host tensors only.
#include <cstring>
#include <stdexcept>
#include <vector>

#include "cpu/check.h"
#include "engine/weights.h"

namespace moe_ops {
namespace {

using engine::ExpertStore;

constexpr const char* kOp = "CpuMoeEngine";

Tensor int64_tensor(const std::vector<int64_t>& values) {
  Tensor tensor = torch::stable::empty({int64_t(values.size())}, ScalarType::Long);
  if (!values.empty()) std::memcpy(tensor.mutable_data_ptr(), values.data(), values.size() * sizeof(int64_t));
  return tensor;
}

std::shared_ptr<ExpertStore> store_of(int64_t handle) {
  return std::static_pointer_cast<ExpertStore>(engine::find_experts(handle, kOp));
}

int64_t engine_create(std::string name, int64_t threads, int64_t node_count, std::vector<int64_t> nodes,
                      int64_t max_jobs, std::string sysfs) {
  engine::EngineOptions options;
  options.name = name;
  options.plan.threads = static_cast<int>(threads);
  options.plan.node_count = static_cast<int>(node_count);
  options.plan.nodes.assign(nodes.begin(), nodes.end());
  options.plan.sysfs = sysfs;
  options.max_jobs = max_jobs;
  return engine::create_engine(options);
}

// {usable CPUs, quota, pools, then per pool: node, threads, CPUs}
Tensor engine_plan(int64_t id) {
  const engine::ThreadPlan plan = engine::engine_plan(id);
  std::vector<int64_t> values{plan.usable_cpus, plan.quota, int64_t(plan.pools.size())};
  for (const engine::PoolPlan& pool : plan.pools) {
    values.push_back(pool.node);
    values.push_back(pool.threads);
    values.insert(values.end(), pool.cpus.begin(), pool.cpus.end());
  }
  return int64_tensor(values);
}

W13Layout layout_of(const std::string& name) {
  if (name == "gate_up") return W13Layout::kGateUp;
  if (name == "up_gate") return W13Layout::kUpGate;
  MOE_REQUIRE(name == "interleaved", kOp, "w13_layout", "'gate_up', 'up_gate' or 'interleaved'", "'" + name + "'");
  return W13Layout::kInterleaved;
}

int64_t engine_add_experts(int64_t id, std::string name, int64_t num_experts, int64_t hidden_size,
                           int64_t intermediate_size, bool bfloat16, std::string w13_layout, bool swiglu_oai,
                           std::optional<double> limit, double alpha, bool w13_bias, bool w2_bias,
                           bool batch_invariant) {
  engine::WeightsFormat format{};
  format.num_experts = num_experts;
  format.hidden_size = hidden_size;
  format.intermediate_size = intermediate_size;
  format.bfloat16 = bfloat16;
  format.w13_layout = layout_of(w13_layout);
  format.activation = {swiglu_oai ? Activation::kSwigluOai : Activation::kSilu, limit.has_value(),
                       static_cast<float>(limit.value_or(0)), static_cast<float>(alpha)};
  format.w13_bias = w13_bias;
  format.w2_bias = w2_bias;
  format.batch_invariant = batch_invariant;
  const int pools = static_cast<int>(engine::engine_plan(id).pools.size());
  return engine::add_experts(id, name, std::make_shared<ExpertStore>(format, pools));
}

struct Shape {
  const char* name;
  const std::optional<Tensor>* tensor;
  bool needed;
  ScalarType dtype;
  std::vector<int64_t> sizes;
};

std::vector<Shape> shapes_of(const engine::WeightsFormat& f, const std::vector<std::optional<Tensor>>& t) {
  const int64_t h = f.hidden_size, i = f.intermediate_size;
  const ScalarType weight = f.bfloat16 ? ScalarType::BFloat16 : ScalarType::Byte;
  const int64_t pack = f.bfloat16 ? 1 : 2;
  return {{"w13", &t[0], true, weight, {2 * i, h / pack}},
          {"w13_scale", &t[1], !f.bfloat16, ScalarType::Byte, {2 * i, h / 32}},
          {"w2", &t[2], true, weight, {h, i / pack}},
          {"w2_scale", &t[3], !f.bfloat16, ScalarType::Byte, {h, i / 32}},
          {"w13_bias", &t[4], f.w13_bias, ScalarType::Float, {2 * i}},
          {"w2_bias", &t[5], f.w2_bias, ScalarType::Float, {h}}};
}

std::string shape_text(const Shape& shape) {
  if (!shape.needed) return "None";
  std::string text = "a contiguous [";
  for (size_t i = 0; i < shape.sizes.size(); ++i) text += (i ? ", " : "") + std::to_string(shape.sizes[i]);
  return text + "] " + dtype_name(shape.dtype) + " on cpu";
}

bool fits(const Shape& shape) {
  const std::optional<Tensor>& tensor = *shape.tensor;
  if (tensor.has_value() != shape.needed) return false;
  if (!shape.needed) return true;
  bool ok = tensor->dim() == int64_t(shape.sizes.size()) && tensor->scalar_type() == shape.dtype &&
            tensor->is_contiguous() && tensor->device().type() == torch::headeronly::DeviceType::CPU;
  for (size_t i = 0; ok && i < shape.sizes.size(); ++i) ok = tensor->size(int64_t(i)) == shape.sizes[i];
  return ok;
}

const void* data_of(const std::optional<Tensor>& tensor) { return tensor ? tensor->const_data_ptr() : nullptr; }

void check_expert(const ExpertStore& store, int64_t expert) {
  MOE_REQUIRE(expert >= 0 && expert < store.num_experts, kOp, "expert",
              "in [0, " + std::to_string(store.num_experts) + ")", std::to_string(expert));
}

void engine_load(int64_t handle, int64_t expert, std::optional<Tensor> w13, std::optional<Tensor> w13_scale,
                 std::optional<Tensor> w2, std::optional<Tensor> w2_scale, std::optional<Tensor> w13_bias,
                 std::optional<Tensor> w2_bias) {
  auto store = store_of(handle);
  check_expert(*store, expert);
  const std::vector<std::optional<Tensor>> tensors{w13, w13_scale, w2, w2_scale, w13_bias, w2_bias};
  for (const Shape& shape : shapes_of(store->format(), tensors))
    MOE_REQUIRE(fits(shape), kOp, shape.name, shape_text(shape), *shape.tensor ? describe(**shape.tensor) : "None");
  engine::ExpertTensors from{
      static_cast<const uint8_t*>(data_of(w13)),    static_cast<const uint8_t*>(data_of(w13_scale)),
      static_cast<const uint8_t*>(data_of(w2)),     static_cast<const uint8_t*>(data_of(w2_scale)),
      static_cast<const float*>(data_of(w13_bias)), static_cast<const float*>(data_of(w2_bias))};
  const int64_t id = engine::find_engine(handle);
  engine::run_on_pools(id, [&](int pool) {
    store->load(pool, expert, from);
    if (pool == 0) store->set_present(expert, true);
  });
}

void engine_unload(int64_t handle, int64_t expert) {
  auto store = store_of(handle);
  check_expert(*store, expert);
  engine::run_on_pools(engine::find_engine(handle), [&](int pool) {
    if (pool == 0) store->set_present(expert, false);
    store->unload(pool, expert);
  });
}

// {w13, w13_scale, w2, w2_scale, w13_bias, w2_bias} of one expert in checkpoint layout; empty tensors where the format
// has none.
std::vector<Tensor> engine_read(int64_t handle, int64_t expert) {
  auto store = store_of(handle);
  check_expert(*store, expert);
  if (!store->present(expert))
    throw std::runtime_error(std::string(kOp) + ": expert " + std::to_string(expert) + " is not on the CPU");
  std::vector<Tensor> tensors;
  const std::vector<std::optional<Tensor>> none(6);
  for (const Shape& shape : shapes_of(store->format(), none)) {
    const std::vector<int64_t> sizes = shape.needed ? shape.sizes : std::vector<int64_t>{0};
    tensors.push_back(torch::stable::empty(sizes, shape.dtype));
  }
  engine::MutableExpertTensors to{
      static_cast<uint8_t*>(tensors[0].mutable_data_ptr()), static_cast<uint8_t*>(tensors[1].mutable_data_ptr()),
      static_cast<uint8_t*>(tensors[2].mutable_data_ptr()), static_cast<uint8_t*>(tensors[3].mutable_data_ptr()),
      static_cast<float*>(tensors[4].mutable_data_ptr()),   static_cast<float*>(tensors[5].mutable_data_ptr())};
  engine::run_on_pools(engine::find_engine(handle), [&](int pool) { store->read(pool, expert, to); });
  return tensors;
}

Tensor engine_present(int64_t handle) {
  auto store = store_of(handle);
  Tensor tensor = torch::stable::empty({store->num_experts}, ScalarType::Bool);
  auto* present = static_cast<bool*>(tensor.mutable_data_ptr());
  engine::run_task(engine::find_engine(handle), [&] {
    for (int64_t expert = 0; expert < store->num_experts; ++expert) present[expert] = store->present(expert);
  });
  return tensor;
}

// In the order of moe_ops/engine.py STATISTICS.
Tensor engine_stats(int64_t id) {
  const engine::Stats s = engine::engine_stats(id);
  return int64_tensor({s.submitted, s.completed, s.failed, s.cancelled, s.never_synced, s.deferred, s.deferred_untaken,
                       s.queue_depth, s.max_queue_depth, s.outstanding, s.busy_ns, s.sync_wait_ns, s.queue_wait_ns,
                       s.bytes_in, s.bytes_out});
}

// ([events, 10] int64: ticket, the seven times, tokens, deferred; [events, 48] uint8 names)
std::tuple<Tensor, Tensor> engine_trace(int64_t id) {
  const auto events = engine::engine_trace(id);
  const int64_t count = int64_t(events.size());
  Tensor numbers = torch::stable::empty({count, 10}, ScalarType::Long);
  Tensor names = torch::stable::empty({count, int64_t(sizeof(engine::TraceEvent::name))}, ScalarType::Byte);
  auto* number = numbers.mutable_data_ptr<int64_t>();
  auto* name = static_cast<char*>(names.mutable_data_ptr());
  for (const auto& e : events) {
    for (int64_t value : {e.ticket, e.submit_ns, e.queued_ns, e.start_ns, e.end_ns, e.sync_ns, e.woken_ns, e.synced_ns,
                          e.num_tokens, int64_t(e.deferred)})
      *number++ = value;
    std::memcpy(name, e.name, sizeof(e.name));
    name += sizeof(e.name);
  }
  return {numbers, names};
}

int64_t engine_bytes_per_expert(int64_t handle) { return store_of(handle)->bytes_per_expert(); }
void engine_inject_failures(int64_t handle, int64_t count) {
  engine::find_experts(handle, kOp)->failures_to_inject = static_cast<int>(count);
}
void engine_check(int64_t id) { engine::throw_stream_errors(id, "CpuMoeEngine.check"); }
int64_t engine_handle(std::string qualified_name) { return engine::handle_of(qualified_name); }
void engine_close(int64_t id, bool drain) { engine::close_engine(id, drain); }
void engine_close_all() { engine::close_all_engines(); }
void engine_remove_experts(int64_t handle, int64_t id) { engine::remove_experts(handle, id); }
void engine_set_repeatable(int64_t id, bool on) { engine::set_repeatable(id, on); }
void engine_hold(int64_t id, bool held) { engine::hold_engine(id, held); }
void engine_wait_idle(int64_t id) { engine::wait_idle(id); }
void engine_discard(int64_t ticket) { engine::discard(ticket); }
int64_t engine_discard_unsynced(int64_t id) { return engine::discard_unsynced(id); }
bool engine_is_done(int64_t ticket) { return engine::is_done(ticket); }
void engine_set_synchronous(bool on) { engine::set_synchronous(on); }
bool engine_synchronous() { return engine::synchronous(); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ops, CompositeExplicitAutograd, m) {
  m.impl("_engine_create", TORCH_BOX(&engine_create));
  m.impl("_engine_close", TORCH_BOX(&engine_close));
  m.impl("_engine_close_all", TORCH_BOX(&engine_close_all));
  m.impl("_engine_plan", TORCH_BOX(&engine_plan));
  m.impl("_engine_add_experts", TORCH_BOX(&engine_add_experts));
  m.impl("_engine_remove_experts", TORCH_BOX(&engine_remove_experts));
  m.impl("_engine_load", TORCH_BOX(&engine_load));
  m.impl("_engine_unload", TORCH_BOX(&engine_unload));
  m.impl("_engine_read", TORCH_BOX(&engine_read));
  m.impl("_engine_present", TORCH_BOX(&engine_present));
  m.impl("_engine_bytes_per_expert", TORCH_BOX(&engine_bytes_per_expert));
  m.impl("_engine_stats", TORCH_BOX(&engine_stats));
  m.impl("_engine_trace", TORCH_BOX(&engine_trace));
  m.impl("_engine_set_repeatable", TORCH_BOX(&engine_set_repeatable));
  m.impl("_engine_hold", TORCH_BOX(&engine_hold));
  m.impl("_engine_wait_idle", TORCH_BOX(&engine_wait_idle));
  m.impl("_engine_discard", TORCH_BOX(&engine_discard));
  m.impl("_engine_discard_unsynced", TORCH_BOX(&engine_discard_unsynced));
  m.impl("_engine_is_done", TORCH_BOX(&engine_is_done));
  m.impl("_engine_check", TORCH_BOX(&engine_check));
  m.impl("_engine_handle", TORCH_BOX(&engine_handle));
  m.impl("_engine_inject_failures", TORCH_BOX(&engine_inject_failures));
  m.impl("_engine_set_synchronous", TORCH_BOX(&engine_set_synchronous));
  m.impl("_engine_synchronous", TORCH_BOX(&engine_synchronous));
}

}  // namespace moe_ops
