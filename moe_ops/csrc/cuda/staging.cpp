#include "cuda/staging.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "cuda/launch.h"
#include "engine/c_api.h"

namespace moe_ops::cuda {
namespace {

constexpr int64_t kSmallestSlot = 64 << 10;
constexpr int kEagerSlots = 64;  // of a kind, in flight outside captures
constexpr int kCountersPerPage = 1024;

struct Pool {
  std::vector<Slot*> free, in_flight;
  int64_t warm = 0;  // largest slot that a call outside captures has asked for
  int64_t slots = 0, bytes = 0;
};

// Never destroyed: graphs may die after static destruction has begun.
struct Staging {
  std::mutex mutex;
  std::map<std::pair<int, int>, Pool> pools;  // (device, kind)
  std::map<unsigned long long, CapturedGraph*> graphs;
  std::map<int, std::vector<unsigned*>> counters, graph_counters;  // unused words by device; the first are all 0
};
Staging& staging() {
  static auto* s = new Staging;
  return *s;
}

bool is_done(const Slot* slot) {
  return reinterpret_cast<const std::atomic<int64_t>*>(slot->done())->load(std::memory_order_acquire) != 0;
}

int64_t rounded(int64_t bytes) {
  int64_t size = kSmallestSlot;
  while (size < bytes) size *= 2;
  return size;
}

// On a stream of its own: the default stream would join, or break, captures of other streams.
unsigned* new_counters() {
  unsigned* page = nullptr;
  cudaStream_t stream;
  STD_CUDA_CHECK(cudaMalloc(reinterpret_cast<void**>(&page), kCountersPerPage * sizeof(unsigned)));
  STD_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  STD_CUDA_CHECK(cudaMemsetAsync(page, 0, kCountersPerPage * sizeof(unsigned), stream));
  STD_CUDA_CHECK(cudaStreamSynchronize(stream));
  STD_CUDA_CHECK(cudaStreamDestroy(stream));
  return page;
}

unsigned* counter_locked(int device) {
  auto& unused = staging().counters[device];
  if (unused.empty()) {
    unsigned* page = new_counters();
    for (int i = 0; i < kCountersPerPage; ++i) unused.push_back(page + i);
  }
  unsigned* counter = unused.back();
  unused.pop_back();
  return counter;
}

Slot* new_slot(SlotKind kind, int device, int64_t bytes, Pool& pool) {
  const RelaxedCapture relaxed;
  auto slot = std::make_unique<Slot>();
  slot->kind = kind;
  slot->device = device;
  slot->capacity = bytes;
  STD_CUDA_CHECK(cudaHostAlloc(reinterpret_cast<void**>(&slot->memory), Slot::kHeader + bytes, cudaHostAllocPortable));
  std::fill_n(slot->words(), Slot::kHeader / sizeof(int64_t), 0);
  slot->arrivals = counter_locked(device);
  ++pool.slots;
  pool.bytes += Slot::kHeader + bytes;
  return slot.release();
}

void reclaim(Pool& pool) {
  for (size_t i = 0; i < pool.in_flight.size();) {
    if (is_done(pool.in_flight[i])) {
      pool.free.push_back(pool.in_flight[i]);
      pool.in_flight[i] = pool.in_flight.back();
      pool.in_flight.pop_back();
    } else {
      ++i;
    }
  }
}

// The smallest free slot that is large enough.
Slot* pop_free(Pool& pool, int64_t bytes) {
  size_t best = pool.free.size();
  for (size_t i = 0; i < pool.free.size(); ++i) {
    if (pool.free[i]->capacity < bytes) continue;
    if (best == pool.free.size() || pool.free[i]->capacity < pool.free[best]->capacity) best = i;
  }
  if (best == pool.free.size()) return nullptr;
  Slot* slot = pool.free[best];
  pool.free[best] = pool.free.back();
  pool.free.pop_back();
  return slot;
}

// The graph and everything made from it is gone, and so are its launches. No CUDA call is allowed here.
void CUDART_CB release_graph(void* pointer) {
  auto* graph = static_cast<CapturedGraph*>(pointer);
  moe_ops_arena_destroy(graph->arena);
  Staging& s = staging();
  const std::lock_guard<std::mutex> lock(s.mutex);
  for (const auto& stream : graph->streams)
    for (Slot* slot : stream.slots) s.pools[{slot->device, static_cast<int>(slot->kind)}].free.push_back(slot);
  for (const auto& [device, counter] : graph->counters) s.graph_counters[device].push_back(counter);
  s.graphs.erase(graph->id);
  delete graph;
}

CapturedGraph* adopt(cudaGraph_t handle, unsigned long long id) {
  auto graph = std::make_unique<CapturedGraph>();
  graph->id = id;
  graph->arena = moe_ops_arena_create();
  if (!graph->arena) throw std::runtime_error(moe_ops_last_error());
  CapturedGraph* raw = graph.release();
  cudaUserObject_t object;
  STD_CUDA_CHECK(cudaUserObjectCreate(&object, raw, release_graph, 1, cudaUserObjectNoDestructorSync));
  STD_CUDA_CHECK(cudaGraphRetainUserObject(handle, object, 1, cudaGraphUserObjectMove));
  return raw;
}

}  // namespace

CapturedGraph* captured_graph(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  cudaGraph_t handle = nullptr;
#if CUDART_VERSION >= 13000
  STD_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &id, &handle, nullptr, nullptr, nullptr));
#else
  STD_CUDA_CHECK(cudaStreamGetCaptureInfo_v2(stream, &status, &id, &handle, nullptr, nullptr));
#endif
  if (status == cudaStreamCaptureStatusNone) return nullptr;
  if (status == cudaStreamCaptureStatusInvalidated)
    throw std::runtime_error("cpu_moe: the capture of this stream was invalidated by an earlier error");
  Staging& s = staging();
  CapturedGraph* graph;
  {
    const std::lock_guard<std::mutex> lock(s.mutex);
    auto found = s.graphs.find(id);
    graph = found == s.graphs.end() ? nullptr : found->second;
  }
  if (!graph) {
    graph = adopt(handle, id);  // without the lock: should this fail, the destroy callback takes it
    const std::lock_guard<std::mutex> lock(s.mutex);
    s.graphs[id] = graph;
  }
  const bool known = std::any_of(graph->streams.begin(), graph->streams.end(),
                                 [&](const CapturedGraph::Stream& entry) { return entry.stream == stream; });
  if (!known) {
    graph->streams.push_back({stream, {}});
    if (graph->streams.size() == 2) moe_ops_arena_set_parallel(graph->arena);
  }
  return graph;
}

Slot* take_slot(SlotKind kind, int device, int64_t bytes, CapturedGraph* graph, cudaStream_t stream, const char* op,
                const std::string& size) {
  bytes = rounded(bytes);
  Staging& s = staging();
  std::unique_lock<std::mutex> lock(s.mutex);
  Pool& pool = s.pools[{device, static_cast<int>(kind)}];
  if (graph) {
    CapturedGraph::Stream& entry = graph->of(stream);
    for (Slot* slot : entry.slots)
      if (slot->kind == kind && slot->capacity >= bytes) return slot;
    if (pool.warm < bytes)
      throw std::runtime_error(
          std::string(op) + ": the first call with " + size + " on cuda:" + std::to_string(device) +
          " must be outside a capture; run the model once at this size before capturing (warm-up)");
    reclaim(pool);
    Slot* slot = pop_free(pool, bytes);
    if (!slot) slot = new_slot(kind, device, bytes, pool);
    entry.slots.push_back(slot);
    return slot;
  }
  pool.warm = std::max(pool.warm, bytes);
  for (;;) {
    reclaim(pool);
    Slot* slot = pop_free(pool, bytes);
    if (!slot && pool.in_flight.size() < kEagerSlots) slot = new_slot(kind, device, bytes, pool);
    if (slot) {
      *slot->done() = 0;
      pool.in_flight.push_back(slot);
      return slot;
    }
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    lock.lock();
  }
}

CapturedGraph::Stream& CapturedGraph::of(cudaStream_t stream) {
  return *std::find_if(streams.begin(), streams.end(), [&](const Stream& entry) { return entry.stream == stream; });
}

unsigned* take_counter(int device, CapturedGraph* graph) {
  Staging& s = staging();
  const std::lock_guard<std::mutex> lock(s.mutex);
  auto& unused = s.graph_counters[device];
  if (unused.empty()) {
    const RelaxedCapture relaxed;
    unused.push_back(counter_locked(device));
  }
  graph->counters.emplace_back(device, unused.back());
  unused.pop_back();
  return graph->counters.back().second;
}

void give_back(Slot* slot) { reinterpret_cast<std::atomic<int64_t>*>(slot->done())->store(1); }

std::pair<int64_t, int64_t> staging_size(int device) {
  Staging& s = staging();
  const std::lock_guard<std::mutex> lock(s.mutex);
  std::pair<int64_t, int64_t> total{0, 0};
  for (const auto& entry : s.pools) {
    if (entry.first.first != device) continue;
    total.first += entry.second.slots;
    total.second += entry.second.bytes;
  }
  return total;
}

}  // namespace moe_ops::cuda
