// route_metadata: prefix sums over the gathered counts. The formulas and names are those of
// moe_ops/reference/route_metadata.py.
#include <tuple>
#include <vector>

#include "cpu/check.h"

namespace moe_ops {
namespace {

using Metadata = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Metadata route_metadata(const Tensor& tokens_per_source, int64_t ep_rank, std::string mode) {
  constexpr const char* kOp = "route_metadata";
  MOE_REQUIRE(
      tokens_per_source.defined() && tokens_per_source.dim() == 2 && tokens_per_source.scalar_type() == ScalarType::Int,
      kOp, "tokens_per_source", "[ep_size, num_experts] int32", describe(tokens_per_source));
  const int64_t ep_size = tokens_per_source.size(0), num_experts = tokens_per_source.size(1);
  MOE_REQUIRE(ep_size > 0 && num_experts > 0, kOp, "tokens_per_source", "not empty", describe(tokens_per_source));
  MOE_REQUIRE(ep_rank >= 0 && ep_rank < ep_size, kOp, "ep_rank", "in [0, " + std::to_string(ep_size) + ")",
              std::to_string(ep_rank));
  MOE_REQUIRE(mode == "push" || mode == "pull", kOp, "mode", "'push' or 'pull'", "'" + mode + "'");

  const int64_t local = (num_experts + ep_size - 1) / ep_size;
  const int64_t larger = num_experts - ep_size * (local - 1);  // ranks that own `local` experts; the others one fewer
  const Tensor counts_tensor = torch::stable::contiguous(tokens_per_source);
  const int32_t* given = counts_tensor.const_data_ptr<int32_t>();

  // counts and source: [source, owner, local expert], with an empty virtual expert at the end of the smaller owners.
  std::vector<int64_t> counts(ep_size * ep_size * local, 0), source(counts.size());
  for (int64_t s = 0; s < ep_size; s++) {
    int64_t expert = 0, offset = 0;
    for (int64_t t = 0; t < ep_size; t++) {
      const int64_t owned = t < larger ? local : local - 1;
      for (int64_t j = 0; j < local; j++) {
        const int64_t at = (s * ep_size + t) * local + j;
        counts[at] = j < owned ? given[s * num_experts + expert++] : 0;
        source[at] = offset;
        offset += counts[at];
      }
    }
  }

  const auto empty = [&](int64_t length, ScalarType dtype) {
    return torch::stable::new_empty(tokens_per_source, {length}, dtype);
  };
  const int64_t slots = ep_size * local;
  Tensor dispatch_src = empty(slots, ScalarType::Long), dispatch_dst = empty(slots, ScalarType::Long);
  Tensor dispatch_size = empty(slots, ScalarType::Int);
  Tensor combine_src = empty(slots, ScalarType::Long), combine_dst = empty(slots, ScalarType::Long);
  Tensor combine_size = empty(slots, ScalarType::Int);
  Tensor group_ends = empty(local, ScalarType::Long), loads = empty(ep_size, ScalarType::Long);

  const bool push = mode == "push";
  for (int64_t t = 0; t < ep_size; t++) {
    int64_t offset = 0;  // in owner t's receive buffer
    for (int64_t j = 0; j < local; j++) {
      for (int64_t s = 0; s < ep_size; s++) {
        const int64_t at = (s * ep_size + t) * local + j;
        if (t == ep_rank) {
          const int64_t entry = s * local + j;
          combine_src.mutable_data_ptr<int64_t>()[entry] = offset;
          combine_dst.mutable_data_ptr<int64_t>()[entry] = source[at];
          combine_size.mutable_data_ptr<int32_t>()[entry] = int32_t(counts[at]);
          if (!push) {
            dispatch_src.mutable_data_ptr<int64_t>()[entry] = source[at];
            dispatch_dst.mutable_data_ptr<int64_t>()[entry] = offset;
            dispatch_size.mutable_data_ptr<int32_t>()[entry] = int32_t(counts[at]);
          }
        }
        if (push && s == ep_rank) {
          const int64_t entry = t * local + j;
          dispatch_src.mutable_data_ptr<int64_t>()[entry] = source[at];
          dispatch_dst.mutable_data_ptr<int64_t>()[entry] = offset;
          dispatch_size.mutable_data_ptr<int32_t>()[entry] = int32_t(counts[at]);
        }
        offset += counts[at];
      }
      if (t == ep_rank) group_ends.mutable_data_ptr<int64_t>()[j] = offset;
    }
    loads.mutable_data_ptr<int64_t>()[t] = offset;
  }
  return {dispatch_src, dispatch_dst, dispatch_size, combine_src, combine_dst, combine_size, group_ends, loads};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ops, CPU, m) { m.impl("route_metadata", TORCH_BOX(&route_metadata)); }

}  // namespace moe_ops
