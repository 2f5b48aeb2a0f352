// Host functions that run behind what is on a stream, beside what comes after it: the stream does not wait for them.
#pragma once

#include <cuda_runtime.h>

#include "cuda/staging.h"

namespace moe_ops::cuda {

// Outside captures on a stream of its own, in order with the others of `stream`; in a capture as a node that nothing
// depends on.
void launch_beside(cudaHostFn_t run, void* call, int device, cudaStream_t stream, CapturedGraph* graph);

// What is launched on the capturing stream from here on waits for the last function beside it.
void wait_for_beside(cudaStream_t stream, CapturedGraph* graph);

}  // namespace moe_ops::cuda
