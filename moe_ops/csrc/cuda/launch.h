// Launch helpers of the native CUDA kernels: stream, checks and programmatic dependent launch.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <mutex>

namespace moe_ops::cuda {

using torch::stable::Tensor;

inline cudaStream_t current_stream(const Tensor& tensor) {
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

// What launches depend on, read once per device.
struct DeviceTraits {
  int multiprocessors = 0;
  int shared_bytes = 0;  // of one block, opted in
  bool hopper = false;   // compute capability 9.0 or later: bulk copies, dependent launch
};

inline DeviceTraits read_device_traits(int device) {
  DeviceTraits traits;
  int major = 0;
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&traits.multiprocessors, cudaDevAttrMultiProcessorCount, device));
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&traits.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  traits.hopper = major >= 9;
  return traits;
}

inline DeviceTraits device_traits(const Tensor& tensor) {
  constexpr int kMaxDevices = 64;
  static DeviceTraits cache[kMaxDevices];
  static std::once_flag once[kMaxDevices];
  const int device = tensor.get_device_index();
  if (device >= kMaxDevices) return read_device_traits(device);
  std::call_once(once[device], [&] { cache[device] = read_device_traits(device); });
  return cache[device];
}

struct LaunchShape {
  int64_t blocks = 1;
  int threads = 1;
  int64_t shared_bytes = 0;
  // The kernel may start before the one in front of it has finished; it calls wait_for_predecessor() before it reads
  // that kernel's results. Only for kernels launched right behind one of our own.
  bool overlap = false;
};

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), const LaunchShape& shape, const Tensor& on, Arguments... arguments) {
  constexpr int64_t kSharedWithoutOptIn = 48 << 10;
  if (shape.shared_bytes > kSharedWithoutOptIn) {
    STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(shape.shared_bytes)));
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = current_stream(on);
  cudaLaunchAttribute attribute = {};
  if (shape.overlap && device_traits(on).hopper) {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  STD_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
}

#ifdef __CUDACC__
// The next kernel of the stream, if launched with `overlap`, may start once every block has called this or ended.
__device__ __forceinline__ void release_successor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Everything that the kernels in front have written is visible afterwards.
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
#endif

}  // namespace moe_ops::cuda
