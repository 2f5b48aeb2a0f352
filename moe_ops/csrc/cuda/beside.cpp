#include "cuda/beside.h"

#include <map>
#include <mutex>
#include <stdexcept>

#include "cuda/launch.h"

namespace moe_ops::cuda {
namespace {

// Beside one stream of the caller. Never destroyed: a stream that is made later may get the same handle.
struct Side {
  cudaStream_t stream = nullptr;
  cudaEvent_t reached = nullptr;
};

// The lock is held across launches: two threads that use one stream must not take each other's event.
struct Sides {
  std::mutex mutex;
  std::map<std::pair<int, cudaStream_t>, Side> sides;
};

Sides& sides() {
  static auto* s = new Sides;
  return *s;
}

void create(Side& side) {
  const RelaxedCapture relaxed;
  STD_CUDA_CHECK(cudaEventCreateWithFlags(&side.reached, cudaEventDisableTiming));
  STD_CUDA_CHECK(cudaStreamCreateWithFlags(&side.stream, cudaStreamNonBlocking));
}

}  // namespace

void launch_beside(cudaHostFn_t run, void* call, int device, cudaStream_t stream, CapturedGraph* graph) {
  if (!graph) {
    Sides& s = sides();
    const std::lock_guard<std::mutex> lock(s.mutex);
    Side& side = s.sides[{device, stream}];
    if (!side.stream) create(side);
    STD_CUDA_CHECK(cudaEventRecord(side.reached, stream));
    STD_CUDA_CHECK(cudaStreamWaitEvent(side.stream, side.reached, 0));
    STD_CUDA_CHECK(cudaLaunchHostFunc(side.stream, run, call));
    return;
  }
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaGraph_t handle = nullptr;
  const cudaGraphNode_t* before = nullptr;
  size_t count = 0;
#if CUDART_VERSION >= 13000
  STD_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, nullptr, &handle, &before, nullptr, &count));
#else
  STD_CUDA_CHECK(cudaStreamGetCaptureInfo_v2(stream, &status, nullptr, &handle, &before, &count));
#endif
  if (status != cudaStreamCaptureStatusActive) throw std::runtime_error("cpu_moe: the stream is not capturing");
  cudaHostNodeParams parameters{};
  parameters.fn = run;
  parameters.userData = call;
  STD_CUDA_CHECK(cudaGraphAddHostNode(&graph->of(stream).beside, handle, before, count, &parameters));
}

void wait_for_beside(cudaStream_t stream, CapturedGraph* graph) {
  cudaGraphNode_t& node = graph->of(stream).beside;
  if (!node) return;
#if CUDART_VERSION >= 13000
  STD_CUDA_CHECK(cudaStreamUpdateCaptureDependencies(stream, &node, nullptr, 1, cudaStreamAddCaptureDependencies));
#else
  STD_CUDA_CHECK(cudaStreamUpdateCaptureDependencies(stream, &node, 1, cudaStreamAddCaptureDependencies));
#endif
  node = nullptr;
}

}  // namespace moe_ops::cuda
