#include "cpu/kernels/fused_mxfp4_moe_plan.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <new>

namespace moe_ops::mxfp4 {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kMostKept = size_t{256} << 20;
constexpr size_t kMostBlocks = 64;

void* allocate(size_t bytes) {
  const size_t alignment = bytes >= kHugePage ? kHugePage : kAlignment;
  void* p = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (p == nullptr) throw std::bad_alloc();
  if (alignment == kHugePage) madvise(p, bytes, MADV_HUGEPAGE);
  return p;
}

// Calls of about the same size, whose routing differs, ask for the same.
size_t rounded(size_t bytes) {
  size_t step = kAlignment;
  while (step * 16 <= bytes) step *= 2;
  return (bytes + step - 1) / step * step;
}

// Blocks of finished calls, the last ones at the end: a call of a new size takes the place of old ones.
struct Kept {
  std::mutex mutex;
  std::vector<std::pair<void*, size_t>> blocks;
  size_t total = 0;
};

Kept& kept() {
  static Kept* instance = new Kept;  // outlives threads that end after static destructors have begun
  return *instance;
}

}  // namespace

void* Arena::take_bytes(size_t bytes) {
  bytes = rounded(std::max<size_t>(bytes, kAlignment));
  Kept& pool = kept();
  // A lock that a forked child inherits held is not waited for.
  if (std::unique_lock<std::mutex> lock(pool.mutex, std::try_to_lock); lock) {
    size_t best = pool.blocks.size();
    for (size_t i = 0; i < pool.blocks.size(); ++i) {
      const size_t size = pool.blocks[i].second;
      if (size < bytes || size > 4 * bytes + (1 << 16)) continue;
      if (best == pool.blocks.size() || size < pool.blocks[best].second) best = i;
    }
    if (best < pool.blocks.size()) {
      blocks_.push_back(pool.blocks[best]);
      pool.total -= pool.blocks[best].second;
      pool.blocks.erase(pool.blocks.begin() + static_cast<std::ptrdiff_t>(best));
      return blocks_.back().first;
    }
  }
  blocks_.emplace_back(allocate(bytes), bytes);
  return blocks_.back().first;
}

Arena::~Arena() {
  Kept& pool = kept();
  std::unique_lock<std::mutex> lock(pool.mutex, std::try_to_lock);
  if (!lock) {
    for (const auto& block : blocks_) std::free(block.first);
    return;
  }
  for (const auto& block : blocks_) {
    pool.blocks.push_back(block);
    pool.total += block.second;
  }
  size_t old = 0;
  for (; pool.total > kMostKept || pool.blocks.size() - old > kMostBlocks; ++old) {
    std::free(pool.blocks[old].first);
    pool.total -= pool.blocks[old].second;
  }
  pool.blocks.erase(pool.blocks.begin(), pool.blocks.begin() + static_cast<std::ptrdiff_t>(old));
}

ThreadBuffer::~ThreadBuffer() { std::free(data_); }

void* ThreadBuffer::get(size_t bytes) {
  if (bytes > size_) {
    std::free(data_);
    data_ = nullptr;
    size_ = 0;
    data_ = allocate(bytes);
    size_ = bytes;
  }
  return data_;
}

Plan make_plan(const ExpertWeights& weights, const MoeBatch& batch, int64_t first, int64_t count,
               const Kernels& kernels, bool batch_invariant, bool skip_zero_weights) {
  Plan plan;
  const int64_t top_k = batch.top_k, experts = weights.num_experts;
  const int64_t* ids = batch.topk_ids + first * top_k;
  const float* router = batch.topk_weights + first * top_k;
  const auto valid = [&](int64_t i) {
    return ids[i] >= 0 && ids[i] < experts && !(skip_zero_weights && router[i] == 0.0f);
  };
  std::vector<int64_t> next(static_cast<size_t>(experts) + 1, 0);
  for (int64_t i = 0; i < count * top_k; ++i) {
    if (valid(i)) ++next[static_cast<size_t>(ids[i]) + 1];
  }
  for (int64_t e = 0; e < experts; ++e) next[static_cast<size_t>(e) + 1] += next[static_cast<size_t>(e)];
  plan.slots.resize(static_cast<size_t>(next.back()));
  const std::vector<int64_t> begin = next;
  for (int64_t t = 0; t < count; ++t) {
    for (int64_t k = 0; k < top_k; ++k) {
      const int64_t i = t * top_k + k;
      if (!valid(i)) continue;
      plan.slots[static_cast<size_t>(next[static_cast<size_t>(ids[i])]++)] = {static_cast<int32_t>(first + t),
                                                                              static_cast<int32_t>(k), router[i]};
    }
  }
  const bool is_float = batch.dtype == DType::kFloat32;
  const bool is_mxfp4 = weights.layout != WeightLayout::kBFloat16;
  for (int64_t e = 0; e < experts; ++e) {
    const int rows = static_cast<int>(begin[static_cast<size_t>(e) + 1] - begin[static_cast<size_t>(e)]);
    if (rows == 0) continue;
    Path path = Path::kFloat;
    if (!is_float && kernels.gemm_bf16 != nullptr && (batch_invariant || rows > kMostQuantRows)) {
      path = Path::kPacked;
    } else if (!is_float && is_mxfp4 && kernels.gemm_q16 != nullptr) {
      path = Path::kQuant;
    }
    int64_t& total = path == Path::kPacked ? plan.packed_rows : plan.other_rows;
    plan.jobs.push_back({e, plan.slots.data() + begin[static_cast<size_t>(e)], rows, path, total});
    total += path == Path::kPacked ? plan.jobs.back().row_tiles() * 16 : rows;
    plan.any_quant |= path == Path::kQuant;
  }
  return plan;
}

}  // namespace moe_ops::mxfp4
