// The argument checks and their texts are those of the CPU library, which exports no C++.
#include "cpu/check.cpp"

namespace moe_ops {
// The checks ask before they convert large tensors on several threads. A forked child has no CUDA tensors.
bool in_forked_child() { return false; }
}  // namespace moe_ops
