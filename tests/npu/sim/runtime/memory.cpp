#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>

#include "capture.h"
#include "common.h"
#include "stream.h"

namespace cann_sim {
namespace {

constexpr size_t kAlignment = 512;
// Fresh memory holds 0x7F bytes: 3.4e38 as float32 or bfloat16, an index far out of range as an integer.
constexpr int kFreshByte = 0x7F;
constexpr size_t kFreshLimit = size_t{64} << 20;

}  // namespace

DeviceMemory::DeviceMemory() {
  capacity_ = static_cast<size_t>(number_setting("CANN_SIM_HBM_MB", 16384)) << 20;
  file_ = memfd_create("cann_sim_hbm", 0);
  if (file_ < 0 || ftruncate(file_, static_cast<off_t>(capacity_)) != 0) std::abort();
  const int flags = MAP_SHARED | MAP_NORESERVE;
  shadow_ = static_cast<char*>(mmap(nullptr, capacity_, PROT_READ | PROT_WRITE, flags, file_, 0));
  if (shadow_ == MAP_FAILED) std::abort();
  device_ = shadow_;
  if (number_setting("CANN_SIM_GUARD", 1) != 0) {
    device_ = static_cast<char*>(mmap(nullptr, capacity_, PROT_NONE, flags, file_, 0));
    if (device_ == MAP_FAILED) std::abort();
  }
  free_[0] = capacity_;
}

void* DeviceMemory::allocate(size_t bytes) {
  bytes = std::max(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto block = free_.begin(); block != free_.end(); ++block) {
    if (block->second < bytes) continue;
    const size_t offset = block->first, left = block->second - bytes;
    free_.erase(block);
    if (left > 0) free_[offset + bytes] = left;
    used_[offset] = bytes;
    in_use_ += bytes;
    std::memset(shadow_ + offset, kFreshByte, std::min(bytes, kFreshLimit));
    return device_ + offset;
  }
  return nullptr;
}

bool DeviceMemory::release(void* address) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!contains(address)) return false;
  size_t offset = static_cast<size_t>(static_cast<char*>(address) - device_);
  auto block = used_.find(offset);
  if (block == used_.end()) return false;
  size_t bytes = block->second;
  used_.erase(block);
  in_use_ -= bytes;
  // Give the pages back, so that resident memory follows what is in use.
  if (fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                static_cast<off_t>(bytes)) != 0) {
    std::memset(shadow_ + offset, kFreshByte, std::min(bytes, kFreshLimit));
  }
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && offset + bytes == next->first) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      previous->second += bytes;
      return true;
    }
  }
  free_[offset] = bytes;
  return true;
}

bool DeviceMemory::contains(const void* address) const {
  const char* p = static_cast<const char*>(address);
  return p >= device_ && p < device_ + capacity_;
}

void* DeviceMemory::translate(const void* address, size_t bytes) {
  const size_t offset = static_cast<size_t>(static_cast<const char*>(address) - device_);
  std::lock_guard<std::mutex> lock(mutex_);
  auto block = used_.upper_bound(offset);
  if (block == used_.begin()) return nullptr;
  --block;
  return offset + bytes <= block->first + block->second ? shadow_ + offset : nullptr;
}

size_t DeviceMemory::in_use() {
  std::lock_guard<std::mutex> lock(mutex_);
  return in_use_;
}

DeviceMemory& device_memory() {
  static DeviceMemory* memory = new DeviceMemory;  // outlives every worker thread
  return *memory;
}

bool PinnedMemory::add(void* address, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  return ranges_.emplace(static_cast<char*>(address), bytes).second;
}

bool PinnedMemory::remove(void* address) {
  std::lock_guard<std::mutex> lock(mutex_);
  return ranges_.erase(static_cast<char*>(address)) != 0;
}

bool PinnedMemory::contains(const void* address) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto range = ranges_.upper_bound(static_cast<char*>(const_cast<void*>(address)));
  if (range == ranges_.begin()) return false;
  --range;
  return static_cast<const char*>(address) < range->first + range->second;
}

PinnedMemory& pinned_memory() {
  static PinnedMemory* memory = new PinnedMemory;
  return *memory;
}

void* translate(const void* address, size_t bytes) {
  DeviceMemory& memory = device_memory();
  return memory.contains(address) ? memory.translate(address, bytes) : const_cast<void*>(address);
}

namespace {

aclError copy_now(void* to, size_t limit, const void* from, size_t bytes) {
  if (bytes > limit) return fail(ACL_ERROR_RT_PARAM_INVALID, "memcpy: count exceeds the destination");
  void* target = translate(to, bytes);
  void* source = translate(from, bytes);
  if (target == nullptr || source == nullptr) {
    return fail(ACL_ERROR_RT_AICORE_EXCEPTION, "memcpy: a device address is outside every allocation");
  }
  std::memmove(target, source, bytes);
  return ACL_SUCCESS;
}

bool kind_matches(const void* to, const void* from, aclrtMemcpyKind kind) {
  const bool to_device = device_memory().contains(to), from_device = device_memory().contains(from);
  switch (kind) {
    case ACL_MEMCPY_HOST_TO_HOST:
      return !to_device && !from_device;
    case ACL_MEMCPY_HOST_TO_DEVICE:
      return to_device && !from_device;
    case ACL_MEMCPY_DEVICE_TO_HOST:
      return !to_device && from_device;
    case ACL_MEMCPY_DEVICE_TO_DEVICE:
      return to_device && from_device;
    default:
      return true;
  }
}

bool pageable(const void* address) { return !device_memory().contains(address) && !pinned_memory().contains(address); }

aclError fill_now(void* to, size_t limit, int32_t value, size_t bytes) {
  void* target = bytes <= limit ? translate(to, bytes) : nullptr;
  if (target == nullptr) return fail(ACL_ERROR_RT_PARAM_INVALID, "memset: range is outside the allocation");
  std::memset(target, value, bytes);
  return ACL_SUCCESS;
}

}  // namespace
}  // namespace cann_sim

using namespace cann_sim;

ACL_API aclError aclrtMalloc(void** address, size_t bytes, aclrtMemMallocPolicy) {
  SIM_NOT_IN_CALLBACK("aclrtMalloc");
  if (bytes == 0) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMalloc: size 0");
  *address = device_memory().allocate(bytes);
  return *address != nullptr ? ACL_SUCCESS : fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "out of device memory");
}

ACL_API aclError aclrtMallocAlign32(void** address, size_t bytes, aclrtMemMallocPolicy policy) {
  return aclrtMalloc(address, bytes, policy);
}

ACL_API aclError aclrtFree(void* address) {
  SIM_NOT_IN_CALLBACK("aclrtFree");
  if (device_memory().release(address)) return ACL_SUCCESS;
  return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtFree: not a device allocation");
}

ACL_API aclError aclrtMallocHost(void** address, size_t bytes) {
  SIM_NOT_IN_CALLBACK("aclrtMallocHost");
  constexpr size_t kPage = 4096;
  *address = std::aligned_alloc(kPage, std::max(kPage, (bytes + kPage - 1) / kPage * kPage));
  if (*address == nullptr) return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "out of host memory");
  pinned_memory().add(*address, bytes);
  return ACL_SUCCESS;
}

ACL_API aclError aclrtFreeHost(void* address) {
  SIM_NOT_IN_CALLBACK("aclrtFreeHost");
  if (!pinned_memory().remove(address)) return ACL_ERROR_RT_PARAM_INVALID;
  std::free(address);
  return ACL_SUCCESS;
}

ACL_API aclError aclrtHostRegister(void* address, uint64_t bytes, aclrtHostRegisterType, void** device) {
  if (!pinned_memory().add(address, bytes)) return ACL_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  if (device != nullptr) *device = address;
  return ACL_SUCCESS;
}

ACL_API aclError aclrtHostRegisterV2(void* address, uint64_t bytes, uint32_t) {
  return pinned_memory().add(address, bytes) ? ACL_SUCCESS : ACL_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
}

ACL_API aclError aclrtHostUnregister(void* address) {
  return pinned_memory().remove(address) ? ACL_SUCCESS : ACL_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

ACL_API aclError aclrtPointerGetAttributes(const void* address, aclrtPtrAttributes* attributes) {
  *attributes = {};
  attributes->location.type = device_memory().contains(address)   ? ACL_MEM_LOCATION_TYPE_DEVICE
                              : pinned_memory().contains(address) ? ACL_MEM_LOCATION_TYPE_HOST
                                                                  : ACL_MEM_LOCATION_TYPE_UNREGISTERED;
  return ACL_SUCCESS;
}

ACL_API aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free_bytes, size_t* total_bytes) {
  *total_bytes = device_memory().capacity();
  *free_bytes = *total_bytes - device_memory().in_use();
  return ACL_SUCCESS;
}

ACL_API aclError aclrtMemcpy(void* to, size_t limit, const void* from, size_t bytes, aclrtMemcpyKind kind) {
  SIM_NOT_IN_CALLBACK("aclrtMemcpy");
  if (!synchronous_calls_allowed()) {
    return fail(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, "synchronous memory copy while a stream is capturing");
  }
  if (!kind_matches(to, from, kind)) return fail(ACL_ERROR_RT_PARAM_INVALID, "memcpy kind does not fit the addresses");
  trace("HOST", -1, "MEMCPY", "synchronous");
  return copy_now(to, limit, from, bytes);
}

ACL_API aclError aclrtMemcpyAsync(void* to, size_t limit, const void* from, size_t bytes, aclrtMemcpyKind kind,
                                  aclrtStream handle) {
  SIM_NOT_IN_CALLBACK("aclrtMemcpyAsync");
  if (!kind_matches(to, from, kind)) return fail(ACL_ERROR_RT_PARAM_INVALID, "memcpy kind does not fit the addresses");
  if (to == from) return ACL_SUCCESS;
  if (pageable(to) || pageable(from)) {
    // CANN turns this into a stream synchronisation and a synchronous copy, and refuses it inside a capture.
    Stream* stream = resolve(handle);
    if (stream->capture != nullptr) {
      return fail(ACL_ERROR_RT_PARAM_INVALID, "the pageable memory copy task does not support graph capture");
    }
    trace("HOST", stream->id, "MEMCPY", "pageable");
    if (aclError code = stream->synchronize(-1)) return code;
    if (!synchronous_calls_allowed()) {
      return fail(ACL_ERROR_RT_CAPTURE_MODE_BLOCK_ASYNC, "pageable copy became synchronous while a stream captures");
    }
    return copy_now(to, limit, from, bytes);
  }
  return submit(handle, "MEMCPY", "async", [=]() -> aclError {
    const void* host = device_memory().contains(to) ? from : to;
    if (pageable(host)) return fail(ACL_ERROR_RT_AICORE_EXCEPTION, "memcpy: the host memory was freed before the copy");
    return copy_now(to, limit, from, bytes);
  });
}

ACL_API aclError aclrtMemset(void* to, size_t limit, int32_t value, size_t bytes) {
  SIM_NOT_IN_CALLBACK("aclrtMemset");
  if (!synchronous_calls_allowed()) {
    return fail(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, "synchronous memset while a stream is capturing");
  }
  return fill_now(to, limit, value, bytes);
}

ACL_API aclError aclrtMemsetAsync(void* to, size_t limit, int32_t value, size_t bytes, aclrtStream stream) {
  SIM_NOT_IN_CALLBACK("aclrtMemsetAsync");
  return submit(stream, "MEMSET", "async", [=] { return fill_now(to, limit, value, bytes); });
}
