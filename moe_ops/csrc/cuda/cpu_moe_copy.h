// Device side of cpu_moe_submit and cpu_moe_sync: kernels that read and write pinned staging memory directly, so that
// submit is one kernel and sync one of a few words and one of rows, whatever the strides and dtypes of the tensors.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace moe_ops::cuda {

// Element types: 0 float32, 1 bfloat16, 2 float16, 3 float64 (weights only).
struct SubmitCopy {
  int64_t num_tokens, top_k;
  const char* hidden_states;  // rows are dense
  int64_t row_bytes, row_stride_bytes;
  const void* topk_ids;
  bool wide_ids;  // int64, else int32
  int64_t id_strides[2];
  const void* topk_weights;
  int weight_type;
  int64_t weight_strides[2];
  const int64_t* device_handle;  // null: handle is used
  int64_t handle;
  // Tickets. With first_ticket, the kernel mints them: first_ticket + 2 n and the one after it, where n is what *run
  // counts (null: 0), modulo `runs`. The deferred one is 0 without may_defer, and where no id is >= 0.
  int64_t first_ticket;
  unsigned* run;
  unsigned runs;
  bool may_defer;
  int64_t *ticket, *deferred_ticket;
  // staging
  int64_t* staged_tickets;
  int64_t* staged_handle;
  char* staged_hidden_states;
  int64_t* staged_ids;
  float* staged_weights;
  // Not null: *rung = 1 once everything is staged.
  int64_t* rung;
  unsigned* arrivals;  // device memory, 0 between launches
};
void copy_inputs(const SubmitCopy& copy, cudaStream_t stream);

// Where the host function of submit mints the tickets, after it: staged {ticket, deferred} to the two ticket tensors;
// then *done = 1.
void copy_tickets_out(const int64_t* staged, int64_t* ticket, int64_t* deferred, int64_t* done, cudaStream_t stream);

// Before the host function of sync: the tickets to staging; deferred may be null.
void copy_tickets_in(const int64_t* ticket, const int64_t* deferred, int64_t* staged, cudaStream_t stream);

// The same in place of that host function: then *rung = 1, and the stream waits until the host has set *answered.
void ask_for_rows(const int64_t* ticket, const int64_t* deferred, int64_t* staged, int64_t* rung,
                  const int64_t* answered, cudaStream_t stream);

struct SyncCopy {
  int64_t num_tokens, hidden_size;
  const void* device_out;  // rows are dense
  int in_type;
  int64_t in_stride;    // elements
  const float* staged;  // [T, H] pinned
  void* out;            // [T, H] contiguous
  int out_type;
  unsigned* arrivals;  // device memory, 0 between launches
  int64_t* done;       // pinned; set to 1 once everything staged has been read
};
// out = device_out + staged, in float32, rounded once.
void add_staged(const SyncCopy& copy, cudaStream_t stream);

}  // namespace moe_ops::cuda
