#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "cuda/cpu_moe_copy.h"

namespace moe_ops::cuda {
namespace {

constexpr int kThreads = 256;
// Enough loads in flight to fill the bus to the host; more blocks only take multiprocessors from the device experts.
constexpr int64_t kMaxBlocks = 64;

int blocks_for(int64_t items) {
  return static_cast<int>(std::max<int64_t>(1, std::min(kMaxBlocks, (items + kThreads - 1) / kThreads)));
}

__device__ float to_float(const void* data, int type, int64_t i) {
  switch (type) {
    case 0:
      return static_cast<const float*>(data)[i];
    case 1:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
    case 2:
      return __half2float(static_cast<const __half*>(data)[i]);
    default:
      return static_cast<float>(static_cast<const double*>(data)[i]);
  }
}

__device__ int64_t id_at(const SubmitCopy& c, int64_t i) {
  const int64_t at = i / c.top_k * c.id_strides[0] + i % c.top_k * c.id_strides[1];
  return c.wide_ids ? static_cast<const int64_t*>(c.topk_ids)[at]
                    : int64_t(static_cast<const int32_t*>(c.topk_ids)[at]);
}

// Sets *word, which the host reads, once all blocks are here and what they wrote can be seen.
__device__ void set_by_last_block(unsigned* arrivals, int64_t* word) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence_system();
  if (atomicAdd(arrivals, 1u) + 1 != gridDim.x) return;
  *arrivals = 0;
  __threadfence_system();
  *static_cast<volatile int64_t*>(word) = 1;
}

// By one block.
__device__ void mint_tickets(const SubmitCopy& c) {
  bool any = false;
  if (c.may_defer)
    for (int64_t i = threadIdx.x; i < c.num_tokens * c.top_k && !any; i += blockDim.x) any = id_at(c, i) >= 0;
  any = __syncthreads_or(any);
  if (threadIdx.x != 0) return;
  const unsigned run = c.run ? (*c.run)++ % c.runs : 0;
  const int64_t ticket = c.first_ticket + 2 * int64_t(run), deferred = any ? ticket + 1 : 0;
  *c.ticket = c.staged_tickets[0] = ticket;
  *c.deferred_ticket = c.staged_tickets[1] = deferred;
}

template <typename Unit>
__global__ void copy_inputs_kernel(SubmitCopy c) {
  const int64_t start = blockIdx.x * int64_t(blockDim.x) + threadIdx.x, step = gridDim.x * int64_t(blockDim.x);
  const int64_t units = c.row_bytes / sizeof(Unit);
  for (int64_t i = start; i < c.num_tokens * units; i += step) {
    const int64_t row = i / units, unit = i % units;
    reinterpret_cast<Unit*>(c.staged_hidden_states)[i] =
        reinterpret_cast<const Unit*>(c.hidden_states + row * c.row_stride_bytes)[unit];
  }
  for (int64_t i = start; i < c.num_tokens * c.top_k; i += step) {
    const int64_t row = i / c.top_k, slot = i % c.top_k;
    c.staged_ids[i] = id_at(c, i);
    c.staged_weights[i] =
        to_float(c.topk_weights, c.weight_type, row * c.weight_strides[0] + slot * c.weight_strides[1]);
  }
  if (start == 0) *c.staged_handle = c.device_handle ? *c.device_handle : c.handle;
  if (blockIdx.x == 0 && c.first_ticket != 0) mint_tickets(c);
  if (c.rung) set_by_last_block(c.arrivals, c.rung);
}

// volatile: the words were written by the host while this stream waited, or will be read by it.
__global__ void copy_tickets_out_kernel(const volatile int64_t* staged, int64_t* ticket, int64_t* deferred,
                                        volatile int64_t* done) {
  *ticket = staged[0];
  *deferred = staged[1];
  __threadfence_system();
  *done = 1;
}

__global__ void copy_tickets_in_kernel(const int64_t* ticket, const int64_t* deferred, volatile int64_t* staged) {
  staged[0] = *ticket;
  staged[1] = deferred ? *deferred : 0;
}

__global__ void ask_for_rows_kernel(const int64_t* ticket, const int64_t* deferred, volatile int64_t* staged,
                                    volatile int64_t* rung, const volatile int64_t* answered) {
  staged[0] = *ticket;
  staged[1] = deferred ? *deferred : 0;
  __threadfence_system();
  *rung = 1;
  // What is waited for needs nothing of the device: an engine's threads, and one that looks at the word above.
  while (*answered == 0) __nanosleep(500);
  __threadfence_system();
}

template <typename T>
__device__ float load(const T* data, int64_t i);
template <>
__device__ float load(const float* data, int64_t i) {
  return data[i];
}
template <>
__device__ float load(const __nv_bfloat16* data, int64_t i) {
  return __bfloat162float(data[i]);
}
template <>
__device__ float load(const __half* data, int64_t i) {
  return __half2float(data[i]);
}
__device__ void store(float* data, int64_t i, float value) { data[i] = value; }
__device__ void store(__nv_bfloat16* data, int64_t i, float value) { data[i] = __float2bfloat16_rn(value); }
__device__ void store(__half* data, int64_t i, float value) { data[i] = __float2half_rn(value); }

template <typename In, typename Out>
__global__ void add_staged_kernel(SyncCopy c) {
  const In* in = static_cast<const In*>(c.device_out);
  Out* out = static_cast<Out*>(c.out);
  const int64_t start = blockIdx.x * int64_t(blockDim.x) + threadIdx.x, step = gridDim.x * int64_t(blockDim.x);
  if (c.hidden_size % 4 == 0) {  // staged is 64-byte aligned: one 16-byte load over the bus per four elements
    const int64_t quads = c.num_tokens * c.hidden_size / 4;
    // The bus takes a microsecond to answer: several loads of a thread are under way at once.
    constexpr int kLoads = 4;
    for (int64_t first = start; first < quads; first += kLoads * step) {
      float4 parts[kLoads];
#pragma unroll
      for (int n = 0; n < kLoads; ++n)
        if (first + n * step < quads) parts[n] = __ldcs(reinterpret_cast<const float4*>(c.staged) + first + n * step);
#pragma unroll
      for (int n = 0; n < kLoads; ++n) {
        const int64_t i = (first + n * step) * 4;
        if (i >= quads * 4) break;
        const int64_t row = i / c.hidden_size, from = row * c.in_stride + i % c.hidden_size;
        store(out, i, load(in, from) + parts[n].x);
        store(out, i + 1, load(in, from + 1) + parts[n].y);
        store(out, i + 2, load(in, from + 2) + parts[n].z);
        store(out, i + 3, load(in, from + 3) + parts[n].w);
      }
    }
  } else {
    for (int64_t i = start; i < c.num_tokens * c.hidden_size; i += step)
      store(out, i, load(in, i / c.hidden_size * c.in_stride + i % c.hidden_size) + __ldcs(c.staged + i));
  }
  set_by_last_block(c.arrivals, c.done);
}

template <typename In>
void add_staged_from(const SyncCopy& c, int blocks, cudaStream_t stream) {
  switch (c.out_type) {
    case 0:
      return add_staged_kernel<In, float><<<blocks, kThreads, 0, stream>>>(c);
    case 1:
      return add_staged_kernel<In, __nv_bfloat16><<<blocks, kThreads, 0, stream>>>(c);
    default:
      return add_staged_kernel<In, __half><<<blocks, kThreads, 0, stream>>>(c);
  }
}

}  // namespace

void copy_inputs(const SubmitCopy& c, cudaStream_t stream) {
  constexpr int64_t kVector = sizeof(uint4);
  const bool aligned = c.row_bytes % kVector == 0 && c.row_stride_bytes % kVector == 0 &&
                       reinterpret_cast<uintptr_t>(c.hidden_states) % kVector == 0;
  const int64_t unit = aligned ? kVector : int64_t(sizeof(uint16_t));
  const int blocks = blocks_for(std::max(c.num_tokens * c.row_bytes / unit, c.num_tokens * c.top_k));
  if (aligned)
    copy_inputs_kernel<uint4><<<blocks, kThreads, 0, stream>>>(c);
  else
    copy_inputs_kernel<uint16_t><<<blocks, kThreads, 0, stream>>>(c);
}

void copy_tickets_out(const int64_t* staged, int64_t* ticket, int64_t* deferred, int64_t* done, cudaStream_t stream) {
  copy_tickets_out_kernel<<<1, 1, 0, stream>>>(staged, ticket, deferred, done);
}

void copy_tickets_in(const int64_t* ticket, const int64_t* deferred, int64_t* staged, cudaStream_t stream) {
  copy_tickets_in_kernel<<<1, 1, 0, stream>>>(ticket, deferred, staged);
}

void ask_for_rows(const int64_t* ticket, const int64_t* deferred, int64_t* staged, int64_t* rung,
                  const int64_t* answered, cudaStream_t stream) {
  ask_for_rows_kernel<<<1, 1, 0, stream>>>(ticket, deferred, staged, rung, answered);
}

void add_staged(const SyncCopy& c, cudaStream_t stream) {
  const int64_t items = c.num_tokens * c.hidden_size;
  const int blocks = blocks_for(c.hidden_size % 4 == 0 ? items / 4 : items);
  switch (c.in_type) {
    case 0:
      return add_staged_from<float>(c, blocks, stream);
    case 1:
      return add_staged_from<__nv_bfloat16>(c, blocks, stream);
    default:
      return add_staged_from<__half>(c, blocks, stream);
  }
}

}  // namespace moe_ops::cuda
