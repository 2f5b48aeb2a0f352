// Pinned staging memory of the CPU-expert coupling: a pool per device, a slot per copy in flight.
//
// Outside captures a slot is taken for one call and is free again once the device has set its `done` word; nothing
// needs a CUDA call to find that out, so that slots can be recycled while another thread captures. At most kEagerSlots
// of a kind are in flight, then the host waits. In a capture every stream takes one slot of each kind, which all its
// calls share, since they are ordered on the stream; the graph owns these slots and gives them back when it dies.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cuda/launch.h"

namespace moe_ops::cuda {

// Allocation is legal for this thread although it, or another one, captures.
class RelaxedCapture {
 public:
  RelaxedCapture() { STD_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

enum class SlotKind { kSubmit = 0, kSync = 1 };

struct Slot {
  SlotKind kind;
  int device;
  char* memory = nullptr;        // pinned; starts with the header
  int64_t capacity = 0;          // bytes after the header
  unsigned* arrivals = nullptr;  // device memory

  static constexpr int64_t kHeader = 64;
  int64_t* words() const { return reinterpret_cast<int64_t*>(memory); }
  int64_t* handle() const { return words(); }
  int64_t* tickets() const { return words() + 1; }  // {ticket, deferred}
  int64_t* rung() const { return words() + 3; }     // by the device, in calls that have no host function
  int64_t* done() const { return words() + 4; }
  int64_t* answered() const { return words() + 5; }
  char* payload() const { return memory + kHeader; }
};

// What the calls of one captured graph share. Owned by the graph.
struct CapturedGraph {
  unsigned long long id;
  void* arena;  // of the engine's C interface
  struct Stream {
    cudaStream_t stream;
    std::vector<Slot*> slots;
    cudaGraphNode_t beside = nullptr;  // the last host function of beside.h that nothing waits for yet
  };
  std::vector<Stream> streams;
  std::vector<std::pair<int, unsigned*>> counters;  // device, counter
  Stream& of(cudaStream_t stream);
};

// Null where the stream is not capturing. Creates the graph's record, and hands it to the graph, at its first call.
CapturedGraph* captured_graph(cudaStream_t stream);

// `op` and `size` are for messages. Throws std::runtime_error with the missing warm-up if a capture needs a slot of a
// size that no call outside captures has used on this device.
Slot* take_slot(SlotKind kind, int device, int64_t bytes, CapturedGraph* graph, cudaStream_t stream, const char* op,
                const std::string& size);
// A slot whose launches failed.
void give_back(Slot* slot);

// A word of device memory that no kernel uses, of any value; it is the graph's while that lives.
unsigned* take_counter(int device, CapturedGraph* graph);

// {slots, pinned bytes} of a device.
std::pair<int64_t, int64_t> staging_size(int device);

}  // namespace moe_ops::cuda
