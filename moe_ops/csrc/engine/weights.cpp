#include "engine/weights.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <new>
#include <stdexcept>

namespace moe_ops::engine {
namespace {

constexpr int64_t kBlock =
    32;  // elements that share a scale, and the grain at which the intermediate dimension is split

constexpr int64_t kTileRows = 16, kTileBlockBytes = kTileRows * kBlock / 2;  // of layout x86_v1

// Copies into the store, or out of it.
template <bool kLoad>
void move(void* stored, void* checkpoint, int64_t bytes) {
  if (kLoad)
    std::memcpy(stored, checkpoint, bytes);
  else
    std::memcpy(checkpoint, stored, bytes);
}

// The layout that the kernels of this processor read without repacking.
WeightLayout layout_for(const WeightsFormat& format) {
  if (format.bfloat16) return WeightLayout::kBFloat16;
#if defined(__x86_64__)
  return WeightLayout::kX86V1;
#else
  return WeightLayout::kCheckpoint;
#endif
}

[[noreturn]] void refuse(const std::string& argument, const std::string& expected, int64_t actual) {
  throw std::invalid_argument("CpuMoeEngine: " + argument + " must be " + expected + ", got " + std::to_string(actual));
}

}  // namespace

void ExpertStore::Array::reserve(int64_t experts, int64_t bytes) {
  stride = bytes;
  if (bytes == 0) return;
  void* mapping =
      mmap(nullptr, experts * bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) throw std::bad_alloc();
  data = static_cast<uint8_t*>(mapping);
  // Huge pages spare the kernels TLB misses, but would give small experts the memory of their absent neighbours.
  if (bytes >= (int64_t{8} << 20)) madvise(mapping, experts * bytes, MADV_HUGEPAGE);
}

void ExpertStore::Array::release(int64_t expert) {
  if (!data) return;
  // Only whole pages of this expert: the first and last are shared with its neighbours.
  auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  uintptr_t begin = (reinterpret_cast<uintptr_t>(at(expert)) + page - 1) / page * page;
  uintptr_t end = reinterpret_cast<uintptr_t>(at(expert) + stride) / page * page;
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

void ExpertStore::Array::destroy(int64_t experts) {
  if (data) munmap(data, experts * stride);
}

ExpertStore::ExpertStore(const WeightsFormat& format, int num_pools)
    : Experts(format.num_experts, format.hidden_size),
      format_(format),
      layout_(layout_for(format)),
      present_(format.num_experts) {
  const int64_t e = format.num_experts, h = format.hidden_size, i = format.intermediate_size;
  if (e < 1) refuse("num_experts", "at least 1", e);
  if (h < kBlock || h % kBlock) refuse("hidden_size", "a multiple of 32", h);
  if (i < kBlock || i % kBlock) refuse("intermediate_size", "a multiple of 32", i);
  const int64_t blocks = i / kBlock;
  if (blocks < num_pools)
    refuse("intermediate_size", "at least 32 for each of " + std::to_string(num_pools) + " NUMA pools", i);
  slices_.resize(num_pools);
  int64_t first = 0;
  for (int pool = 0; pool < num_pools; ++pool) {
    Slice& slice = slices_[pool];
    slice.first = first;
    slice.width = kBlock * (blocks / num_pools + (pool < blocks % num_pools ? 1 : 0));
    first += slice.width;
    const int64_t w = slice.width;
    slice.w13.reserve(e, format.bfloat16 ? 2 * w * h * 2 : 2 * w * h / 2);
    slice.w13_scale.reserve(e, format.bfloat16 ? 0 : 2 * w * h / kBlock);
    slice.w2.reserve(e, format.bfloat16 ? h * w * 2 : h * w / 2);
    slice.w2_scale.reserve(e, format.bfloat16 ? 0 : h * w / kBlock);
    if (format.w13_bias) slice.w13_bias.resize(e * 2 * w);
    if (format.w2_bias && pool == 0) slice.w2_bias.resize(e * h);  // a bias is added once
  }
}

ExpertStore::~ExpertStore() {
  for (Slice& slice : slices_)
    for (Array* array : {&slice.w13, &slice.w13_scale, &slice.w2, &slice.w2_scale}) array->destroy(format_.num_experts);
}

int64_t ExpertStore::source_row(const Slice& slice, int64_t row) const {
  if (format_.w13_layout == W13Layout::kInterleaved) return 2 * slice.first + row;
  return row < slice.width ? slice.first + row : format_.intermediate_size + slice.first + row - slice.width;
}

// Row of the checkpoint's w13 with gate (0) or up (1) number i of the slice.
int64_t ExpertStore::source_row(const Slice& slice, int part, int64_t i) const {
  if (format_.w13_layout == W13Layout::kInterleaved) return 2 * (slice.first + i) + part;
  const bool second = (part == 1) == (format_.w13_layout == W13Layout::kGateUp);
  return slice.first + i + (second ? format_.intermediate_size : 0);
}

// Between a row of the checkpoint (codes, scales) and row r of a tile.
template <bool kLoad>
void ExpertStore::move_row(uint8_t* codes, uint8_t* scales, uint8_t* tile_codes, uint8_t* tile_scales, int64_t r,
                           int64_t num_blocks) {
  constexpr int64_t kWords = kBlock / 2 / 4;
  for (int64_t b = 0; b < num_blocks; ++b) {
    for (int64_t j = 0; j < kWords; ++j)
      move<kLoad>(tile_codes + b * kTileBlockBytes + (j * kTileRows + r) * 4, codes + (b * kWords + j) * 4, 4);
    move<kLoad>(tile_scales + b * kTileRows + r, scales + b, 1);
  }
}

template <bool kLoad>
void ExpertStore::transfer(int pool, int64_t expert, const MutableExpertTensors& checkpoint) {
  Slice& slice = slices_[pool];
  const int64_t h = format_.hidden_size, i = format_.intermediate_size, w = slice.width;
  if (format_.w13_bias)
    for (int64_t row = 0; row < 2 * w; ++row)
      move<kLoad>(&slice.w13_bias[expert * 2 * w + row], checkpoint.w13_bias + source_row(slice, row), sizeof(float));
  if (!slice.w2_bias.empty()) move<kLoad>(&slice.w2_bias[expert * h], checkpoint.w2_bias, h * sizeof(float));

  uint8_t *w13 = slice.w13.at(expert), *w2 = slice.w2.at(expert);
  if (layout_ == WeightLayout::kBFloat16) {
    for (int64_t row = 0; row < 2 * w; ++row)
      move<kLoad>(w13 + row * h * 2, checkpoint.w13 + source_row(slice, row) * h * 2, h * 2);
    for (int64_t row = 0; row < h; ++row)
      move<kLoad>(w2 + row * w * 2, checkpoint.w2 + (row * i + slice.first) * 2, w * 2);
    return;
  }
  uint8_t *w13_scale = slice.w13_scale.at(expert), *w2_scale = slice.w2_scale.at(expert);
  const int64_t hb = h / kBlock, ib = i / kBlock, wb = w / kBlock;
  if (layout_ == WeightLayout::kX86V1) {
    for (int64_t row = 0; row < w; ++row) {
      for (int part = 0; part < 2; ++part) {
        const int64_t tile = row / kTileRows * 2 + part, source = source_row(slice, part, row);
        move_row<kLoad>(checkpoint.w13 + source * h / 2, checkpoint.w13_scale + source * hb,
                        w13 + tile * hb * kTileBlockBytes, w13_scale + tile * hb * kTileRows, row % kTileRows, hb);
      }
    }
    for (int64_t row = 0; row < h; ++row) {
      const int64_t tile = row / kTileRows;
      move_row<kLoad>(checkpoint.w2 + (row * i + slice.first) / 2,
                      checkpoint.w2_scale + row * ib + slice.first / kBlock, w2 + tile * wb * kTileBlockBytes,
                      w2_scale + tile * wb * kTileRows, row % kTileRows, wb);
    }
    return;
  }
  for (int64_t row = 0; row < 2 * w; ++row) {
    const int64_t source = source_row(slice, row);
    move<kLoad>(w13 + row * h / 2, checkpoint.w13 + source * h / 2, h / 2);
    move<kLoad>(w13_scale + row * hb, checkpoint.w13_scale + source * hb, hb);
  }
  for (int64_t row = 0; row < h; ++row) {
    move<kLoad>(w2 + row * w / 2, checkpoint.w2 + (row * i + slice.first) / 2, w / 2);
    move<kLoad>(w2_scale + row * wb, checkpoint.w2_scale + row * ib + slice.first / kBlock, wb);
  }
}

void ExpertStore::load(int pool, int64_t expert, const ExpertTensors& from) {
  // transfer<true> only reads the checkpoint's side.
  transfer<true>(
      pool, expert,
      {const_cast<uint8_t*>(from.w13), const_cast<uint8_t*>(from.w13_scale), const_cast<uint8_t*>(from.w2),
       const_cast<uint8_t*>(from.w2_scale), const_cast<float*>(from.w13_bias), const_cast<float*>(from.w2_bias)});
}

void ExpertStore::read(int pool, int64_t expert, const MutableExpertTensors& to) { transfer<false>(pool, expert, to); }

void ExpertStore::unload(int pool, int64_t expert) {
  Slice& slice = slices_[pool];
  for (Array* array : {&slice.w13, &slice.w13_scale, &slice.w2, &slice.w2_scale}) array->release(expert);
}

int64_t ExpertStore::bytes_per_expert() const {
  int64_t bytes = 0;
  for (const Slice& slice : slices_)
    bytes += slice.w13.stride + slice.w13_scale.stride + slice.w2.stride + slice.w2_scale.stride;
  return bytes;
}

void ExpertStore::check(const Batch& batch) const {
  for (int64_t slot = 0; slot < batch.num_tokens * batch.top_k; ++slot) {
    int64_t expert = batch.topk_ids[slot];
    if (expert < 0 || expert >= num_experts || batch.topk_weights[slot] == 0 || present_[expert]) continue;
    throw std::runtime_error("expert " + std::to_string(expert) + " is not on the CPU");
  }
}

ExpertWeights ExpertStore::view(const Slice& slice, int pool) const {
  return {format_.num_experts,
          format_.hidden_size,
          slice.width,
          layout_,
          format_.w13_layout,
          slice.w13.data,
          slice.w13_scale.data,
          slice.w2.data,
          slice.w2_scale.data,
          format_.w13_bias ? slice.w13_bias.data() : nullptr,
          format_.w2_bias && pool == 0 ? slice.w2_bias.data() : nullptr};
}

void ExpertStore::run(int pool, const Batch& batch, ThreadTeam& team) {
  MoeBatch rows{batch.num_tokens,  batch.top_k,      batch.hidden_states, static_cast<DType>(batch.element),
                batch.hidden_size, batch.topk_ids,   batch.topk_weights,  batch.output,
                DType::kFloat32,   batch.hidden_size};
  fused_mxfp4_moe(view(slices_[pool], pool), format_.activation, rows, format_.batch_invariant, team);
}

}  // namespace moe_ops::engine
