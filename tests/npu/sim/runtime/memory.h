// Device memory that the host cannot read, and the register of page-locked host memory.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>

namespace cann_sim {

// One sparse memory file, mapped twice. The addresses handed out point into a mapping without access rights, so host
// code that follows a device pointer faults, as on hardware; tasks reach the same bytes through the second mapping.
class DeviceMemory {
 public:
  DeviceMemory();
  void* allocate(size_t bytes);
  bool release(void* address);
  bool contains(const void* address) const;
  void* translate(const void* address, size_t bytes);
  size_t capacity() const { return capacity_; }
  size_t in_use();

 private:
  char* device_ = nullptr;
  char* shadow_ = nullptr;
  size_t capacity_ = 0;
  size_t in_use_ = 0;
  int file_ = -1;
  std::mutex mutex_;
  std::map<size_t, size_t> free_;  // offset -> bytes
  std::map<size_t, size_t> used_;
};

DeviceMemory& device_memory();

// Page-locked host memory: only copies from and to it are asynchronous and may be captured.
class PinnedMemory {
 public:
  bool add(void* address, size_t bytes);
  bool remove(void* address);
  bool contains(const void* address);

 private:
  std::mutex mutex_;
  std::map<char*, size_t> ranges_;
};

PinnedMemory& pinned_memory();

}  // namespace cann_sim
