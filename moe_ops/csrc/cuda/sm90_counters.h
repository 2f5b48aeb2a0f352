// Words that are zero between calls of the decode kernel, which leaves them so.
#pragma once

#include <cuda_runtime_api.h>

namespace moe_ops::sm90 {

// kDecodeCounters words on `device`, the current one, for calls on `stream`. Calls that may run at the same time have
// words of their own: one set per stream, and for captured calls one per graph and stream, which the graph zeroes
// whenever it is replayed and gives back when it is gone.
unsigned* decode_counters(int device, cudaStream_t stream);

}  // namespace moe_ops::sm90
