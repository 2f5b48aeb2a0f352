#include "sm90_counters.h"

#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "fused_mxfp4_moe_sm90.h"
#include "launch.h"

namespace moe_ops::sm90 {
namespace {

constexpr size_t kSetBytes = (kDecodeCounters * sizeof(unsigned) + 255) / 256 * 256;
constexpr int kSetsAtOnce = 64;

using Capture = std::pair<unsigned long long, cudaStream_t>;  // 0: not captured

// The memory is not PyTorch's: sets outlive the calls, and torch.compile's CUDA graphs refuse memory of their pool that
// does. It is never given back to the device: sets are few and small.
struct Counters {
  std::mutex mutex;
  std::map<int, std::vector<unsigned*>> free;
  std::map<std::pair<int, Capture>, unsigned*> used;
};
Counters& counters() {
  static auto& all = *new Counters;  // never destroyed: callbacks may come late
  return all;
}

unsigned* pop_free(int device) {
  Counters& c = counters();
  const std::lock_guard<std::mutex> lock(c.mutex);
  auto& sets = c.free[device];
  if (sets.empty()) return nullptr;
  unsigned* set = sets.back();
  sets.pop_back();
  return set;
}

// No CUDA call is made under the lock: the callback below takes it.
unsigned* take(int device) {
  if (unsigned* set = pop_free(device)) return set;
  char* memory = nullptr;
  // Allocating does not disturb a capture, but has to say so.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  STD_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
  const cudaError_t error = cudaMalloc(reinterpret_cast<void**>(&memory), kSetsAtOnce * kSetBytes);
  STD_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
  STD_CUDA_CHECK(error);
  Counters& c = counters();
  const std::lock_guard<std::mutex> lock(c.mutex);
  for (int i = 1; i < kSetsAtOnce; ++i) c.free[device].push_back(reinterpret_cast<unsigned*>(memory + i * kSetBytes));
  return reinterpret_cast<unsigned*>(memory);
}

// A graph and everything made from it is gone, and so are its launches. No CUDA call is allowed here.
void CUDART_CB release(void* pointer) {
  const std::unique_ptr<std::pair<int, Capture>> key(static_cast<std::pair<int, Capture>*>(pointer));
  Counters& c = counters();
  const std::lock_guard<std::mutex> lock(c.mutex);
  const auto found = c.used.find(*key);
  if (found == c.used.end()) return;
  c.free[key->first].push_back(found->second);
  c.used.erase(found);
}

}  // namespace

unsigned* decode_counters(int device, cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  cudaGraph_t graph = nullptr;
#if CUDART_VERSION >= 13000
  STD_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &id, &graph, nullptr, nullptr, nullptr));
#else
  STD_CUDA_CHECK(cudaStreamGetCaptureInfo_v2(stream, &status, &id, &graph, nullptr, nullptr));
#endif
  const bool capturing = status == cudaStreamCaptureStatusActive;
  const std::pair<int, Capture> key{device, {capturing ? id : 0, stream}};
  Counters& c = counters();
  {
    const std::lock_guard<std::mutex> lock(c.mutex);
    const auto found = c.used.find(key);
    if (found != c.used.end()) return found->second;
  }
  unsigned* set = take(device);
  STD_CUDA_CHECK(cudaMemsetAsync(set, 0, kDecodeCounters * sizeof(unsigned), stream));
  {
    const std::lock_guard<std::mutex> lock(c.mutex);
    c.used[key] = set;
  }
  if (capturing) {
    cudaUserObject_t object;
    auto kept = std::make_unique<std::pair<int, Capture>>(key);
    STD_CUDA_CHECK(cudaUserObjectCreate(&object, kept.get(), release, 1, cudaUserObjectNoDestructorSync));
    kept.release();
    STD_CUDA_CHECK(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove));
  }
  return set;
}

}  // namespace moe_ops::sm90
