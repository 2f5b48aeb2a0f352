// Loops on torch's threads, and on the calling thread alone in a forked child: OpenMP's threads do not survive a fork,
// and waiting for them would never end.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>

#include "cpu/kernels/thread_team.h"

namespace moe_ops {

template <class Function>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Function& function) {
  if (begin >= end) return;
  if (in_forked_child()) return function(begin, end);
  torch::stable::parallel_for(begin, end, grain, function);
}

}  // namespace moe_ops
