// fused_mxfp4_moe: the phases of a call, for any instruction set.
//
// 1. prepare: activations to the form that the path of their expert wants;
// 2. first product: items of 32 elements of the intermediate row of an expert, gate and up with the activation;
// 3. second product: items of output columns. An item adds up all experts in ascending order, so that no two threads
//    write one element and the order of the sum depends on nothing.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "cpu/kernels/fused_mxfp4_moe_plan.h"
#include "cpu/kernels/fused_mxfp4_moe_weights.h"

namespace moe_ops {
namespace mxfp4 {
namespace {

constexpr int kFloatRows = 8;                       // rows widened at once for gemm_f32
constexpr int64_t kMostBytes = int64_t{256} << 20;  // intermediate results of one round of tokens
constexpr int64_t kInlineElements = 16384;          // less preparation than this is not worth waking threads for

size_t element_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Buffers of a thread, sized for the longer of the two products.
struct Scratch {
  explicit Scratch(const ExpertWeights& w) {
    const int64_t size = std::max(w.hidden_size, w.intermediate_size), blocks = size / kBlock;
    const int64_t tiles_bytes = w.layout == WeightLayout::kCheckpoint ? tile_group_bytes(blocks) : 0;
    constexpr int64_t kOutBytes = kMaxRows * kGroupRows * 4;
    thread_local ThreadBuffer buffer;
    uint8_t* p = static_cast<uint8_t*>(buffer.get(tiles_bytes + 2 * kOutBytes + kFloatRows * size * 4));
    tiles = p;
    out = reinterpret_cast<float*>(tiles + tiles_bytes);
    compact = reinterpret_cast<float*>(tiles + tiles_bytes + kOutBytes);
    rows = reinterpret_cast<float*>(tiles + tiles_bytes + 2 * kOutBytes);
  }
  uint8_t* tiles;
  float *out, *compact, *rows;
};

// The activations of all jobs for one of the two products, [rows][K] in several forms.
struct Activations {
  int64_t num_blocks = 0;
  uint16_t *high = nullptr, *low = nullptr;  // kPacked
  float* values = nullptr;                   // float32 rows of the other paths; null: hidden_states
  int8_t* digits = nullptr;                  // kQuant
  float* scales = nullptr;
  int32_t* offsets = nullptr;
  std::atomic<uint8_t>* inexact = nullptr;  // rows that kQuant cannot hold

  void take_packed(Arena& arena, int64_t rows, bool two_parts) {
    high = arena.take<uint16_t>(rows * num_blocks * kBlock);
    if (two_parts) low = arena.take<uint16_t>(rows * num_blocks * kBlock);
  }
  void take_quant(Arena& arena, int64_t rows) {
    digits = arena.take<int8_t>(rows * num_blocks * 2 * kBlock);
    scales = arena.take<float>(rows * num_blocks);
    offsets = arena.take<int32_t>(rows * num_blocks);
    inexact = arena.take<std::atomic<uint8_t>>(rows);
    for (int64_t i = 0; i < rows; ++i) inexact[i].store(0, std::memory_order_relaxed);
  }
  int64_t packed_offset(int64_t row, int64_t block) const {
    return ((row / 16) * num_blocks + block) * 512 + (row % 16) * kBlock;
  }
};

class Forward {
 public:
  Forward(const ExpertWeights& w, const ActivationParams& params, const MoeBatch& batch, const Kernels& kernels,
          bool invariant, ThreadTeam& team)
      : w_(w), params_(params), batch_(batch), k_(kernels), view_(w, kernels), invariant_(invariant), team_(team) {}

  // Tokens [first, first + count).
  void run(int64_t first, int64_t count) {
    first_ = first;
    count_ = count;
    plan_ = make_plan(w_, batch_, first, count, k_, invariant_, true);
    Arena arena;
    const bool two_parts = batch_.dtype == DType::kFloat16;
    x_ = Activations{};
    h_ = Activations{};
    x_.num_blocks = w_.hidden_size / kBlock;
    h_.num_blocks = w_.intermediate_size / kBlock;
    if (plan_.packed_rows > 0) {
      x_.take_packed(arena, plan_.packed_rows, two_parts);
      h_.take_packed(arena, plan_.packed_rows, two_parts);
    }
    if (plan_.other_rows > 0) h_.values = arena.take<float>(plan_.other_rows * w_.intermediate_size);
    if (plan_.any_quant) {
      x_.take_quant(arena, count);
      h_.take_quant(arena, plan_.other_rows);
    }
    sum_is_output_ = batch_.output_dtype == DType::kFloat32;
    sum_ = sum_is_output_ ? nullptr : arena.take<float>(count * w_.hidden_size);
    prepare();
    first_product();
    second_product();
  }

 private:
  const uint8_t* hidden_row(int64_t token) const {
    return static_cast<const uint8_t*>(batch_.hidden_states) +
           token * batch_.hidden_stride * element_size(batch_.dtype);
  }

  float* sum_row(int64_t token) const {
    if (sum_is_output_) return static_cast<float*>(batch_.output) + token * batch_.output_stride;
    return sum_ + (token - first_) * w_.hidden_size;
  }

  // Calls function(scratch, i) for i in [0, count), shared out in runs so that uneven threads even out.
  template <class Function>
  void for_items(int64_t count, int64_t elements, const Function& function) {
    std::atomic<int64_t> next{0};
    const auto work = [&](int, int num_threads) {
      Scratch scratch(w_);
      const int64_t step = std::max<int64_t>(1, count / (8 * num_threads));
      for (int64_t i; (i = next.fetch_add(step, std::memory_order_relaxed)) < count;) {
        for (const int64_t end = std::min(count, i + step); i < end; ++i) function(scratch, i);
      }
    };
    if (count <= 1 || elements <= kInlineElements) return work(0, 1);
    team_.parallel(work);
  }

  void quantize_row(const float* row, int64_t slot, const Activations& to) {
    for (int64_t b = 0; b < to.num_blocks; ++b) quantize_block(row + b * kBlock, slot, b, to);
  }

  void quantize_block(const float* block, int64_t slot, int64_t b, const Activations& to) {
    const int64_t i = slot * to.num_blocks + b;
    if (!k_.quantize(block, to.digits + i * 2 * kBlock, to.scales + i, to.offsets + i)) {
      to.inexact[slot].store(1, std::memory_order_relaxed);
    }
  }

  void prepare() {
    const int64_t hidden = w_.hidden_size;
    const bool permute = view_.is_mxfp4();
    if (plan_.any_quant) {
      for_items(count_, count_ * hidden, [&](Scratch& scratch, int64_t i) {
        k_.widen(hidden_row(first_ + i), batch_.dtype, hidden, scratch.rows);
        quantize_row(scratch.rows, i, x_);
      });
    }
    if (plan_.packed_rows == 0) return;
    std::vector<std::pair<const Job*, int>> tiles;
    for (const Job& job : plan_.jobs) {
      for (int r = 0; job.path == Path::kPacked && r < job.num_rows; r += 16) tiles.emplace_back(&job, r);
    }
    for_items(static_cast<int64_t>(tiles.size()), plan_.packed_rows * hidden, [&](Scratch& scratch, int64_t i) {
      const Job& job = *tiles[static_cast<size_t>(i)].first;
      for (int r = tiles[static_cast<size_t>(i)].second, end = r + 16; r < end; ++r) {
        const int64_t row = job.first_row + r;
        if (r < job.num_rows) {
          k_.widen(hidden_row(job.slots[r].token), batch_.dtype, hidden, scratch.rows);
        } else {
          std::memset(scratch.rows, 0, hidden * sizeof(float));
        }
        for (int64_t b = 0; b < x_.num_blocks; ++b) {
          const int64_t at = x_.packed_offset(row, b);
          k_.pack_block(scratch.rows + b * kBlock, permute, x_.high + at, x_.low ? x_.low + at : nullptr);
        }
      }
    });
  }

  // float32 rows of a job; `scratch` holds kFloatRows of them where they are not stored.
  void float_rows(const Job& job, const Activations& from, const int* which, int count, Scratch& scratch,
                  const float** rows) const {
    const int64_t size = from.num_blocks * kBlock;
    for (int i = 0; i < count; ++i) {
      const int r = which[i];
      const bool first = from.num_blocks == x_.num_blocks && &from == &x_;
      if (first && batch_.dtype == DType::kFloat32) {
        rows[i] = reinterpret_cast<const float*>(hidden_row(job.slots[r].token));
        continue;
      }
      if (!first && job.path != Path::kPacked) {
        rows[i] = from.values + (job.first_row + r) * size;
        continue;
      }
      float* row = scratch.rows + i * size;
      rows[i] = row;
      if (first) {
        k_.widen(hidden_row(job.slots[r].token), batch_.dtype, size, row);
      } else {
        unpack_row(from, job.first_row + r, row);
      }
    }
  }

  void unpack_row(const Activations& from, int64_t r, float* row) const {
    static constexpr int kOrder[8] = {0, 4, 1, 5, 2, 6, 3, 7};
    for (int64_t b = 0; b < from.num_blocks; ++b) {
      const int64_t at = from.packed_offset(r, b);
      alignas(64) float part[2][kBlock] = {};
      k_.widen(from.high + at, DType::kBFloat16, kBlock, part[0]);
      if (from.low) k_.widen(from.low + at, DType::kBFloat16, kBlock, part[1]);
      for (int i = 0; i < kBlock; ++i) {
        const int to = view_.is_mxfp4() ? (i & ~7) + kOrder[i & 7] : i;
        row[b * kBlock + to] = part[0][i] + part[1][i];
      }
    }
  }

  // Rows `which` by the float32 kernels, for the tiles in `mask`, into out[i].
  void float_product(const Job& job, const Activations& from, const TileGroup& group, unsigned mask, const int* which,
                     int count, Scratch& scratch, float* out) const {
    for (int i = 0; i < count; i += kFloatRows) {
      const int n = std::min(kFloatRows, count - i);
      const float* rows[kFloatRows];
      float_rows(job, from, which + i, n, scratch, rows);
      if (!view_.is_mxfp4()) {
        k_.gemm_w16(group.rows, group.num_tiles * kTileRows, from.num_blocks * kBlock, rows, n, out + i * kGroupRows,
                    kGroupRows);
        continue;
      }
      for (int t = 0; t < group.num_tiles; ++t) {
        if ((mask >> t & 1) == 0) continue;
        k_.gemm_f32(group.tiles + t, 1, from.num_blocks, rows, n, out + i * kGroupRows + t * kTileRows, kGroupRows);
      }
    }
  }

  void quant_product(const Job& job, const Activations& from, const TileGroup& group, const int* which, int count,
                     Scratch& scratch, float* out) const {
    const auto slot_of = [&](int r) -> int64_t {
      return &from == &x_ ? job.slots[r].token - first_ : job.first_row + r;
    };
    QuantRow rows[kMaxRows];
    int exact[kMaxRows], place[kMaxRows], num_exact = 0;
    int odd[kMaxRows], odd_place[kMaxRows], num_odd = 0;
    for (int i = 0; i < count; ++i) {
      const int64_t slot = slot_of(which[i]);
      if (from.inexact[slot].load(std::memory_order_relaxed)) {
        odd[num_odd] = which[i];
        odd_place[num_odd++] = i;
        continue;
      }
      const int64_t at = slot * from.num_blocks;
      rows[num_exact] = {from.digits + at * 2 * kBlock, from.scales + at, from.offsets + at};
      exact[num_exact] = which[i];
      place[num_exact++] = i;
    }
    const bool direct = num_odd == 0;
    float* to = direct ? out : scratch.compact;
    if (num_exact > 0) {
      const unsigned bad = k_.gemm_q16(group.tiles, group.num_tiles, from.num_blocks, rows, num_exact, to, kGroupRows);
      if (bad) float_product(job, from, group, bad, exact, num_exact, scratch, to);
    }
    if (direct) return;
    for (int i = 0; i < num_exact; ++i) std::memcpy(out + place[i] * kGroupRows, to + i * kGroupRows, kGroupRows * 4);
    float_product(job, from, group, ~0u, odd, num_odd, scratch, scratch.compact);
    for (int i = 0; i < num_odd; ++i) {
      std::memcpy(out + odd_place[i] * kGroupRows, scratch.compact + i * kGroupRows, kGroupRows * 4);
    }
  }

  // Rows of an expert in one item: their activations are read again for each group of tiles and must stay in the
  // second-level cache. At K = 7168, 96 rows are a fifth slower than 48 (docs/measured.md).
  static int chunk_rows(const Activations& from) {
    constexpr int64_t kBytes = int64_t{1} << 20;
    return from.num_blocks * kBlock * 2 * kMaxRows > kBytes ? kMaxRows / 2 : kMaxRows;
  }

  // Rows [begin, begin + count) of a job times the tiles of a group, into scratch.out [count][kGroupRows].
  void product(const Job& job, const Activations& from, const TileGroup& group, int begin, int count,
               Scratch& scratch) const {
    int which[kMaxRows];
    for (int i = 0; i < count; ++i) which[i] = begin + i;
    if (job.path == Path::kQuant) return quant_product(job, from, group, which, count, scratch, scratch.out);
    if (job.path == Path::kFloat) return float_product(job, from, group, ~0u, which, count, scratch, scratch.out);
    const int64_t at = from.packed_offset(job.first_row + begin, 0);
    const PackedRows rows{from.high + at, from.low ? from.low + at : nullptr};
    const WeightTiles weights{view_.is_mxfp4() ? group.tiles : nullptr, view_.is_mxfp4() ? nullptr : group.rows};
    const unsigned bad = k_.gemm_bf16(weights, group.num_tiles, from.num_blocks, rows, count, scratch.out, kGroupRows);
    if (bad) float_product(job, from, group, bad, which, count, scratch, scratch.out);
  }

  void first_product() {
    const int64_t groups = w_.intermediate_size / kBlock;
    // Item -> job: items of a job are its chunks of rows, and in each all groups.
    std::vector<int64_t> ends;
    int64_t items = 0;
    const int most = chunk_rows(x_);
    for (const Job& job : plan_.jobs) ends.push_back(items += (job.num_rows + most - 1) / most * groups);
    const bool permute = view_.is_mxfp4();
    for_items(items, items * w_.hidden_size * kGroupRows, [&](Scratch& scratch, int64_t item) {
      const size_t j = std::upper_bound(ends.begin(), ends.end(), item) - ends.begin();
      const Job& job = plan_.jobs[j];
      const int64_t local = item - (j ? ends[j - 1] : 0), g = local % groups;
      const int begin = static_cast<int>(local / groups) * most, end = std::min(job.num_rows, begin + most);
      TileGroup group;
      alignas(64) float bias_values[kGroupRows];
      view_.w13_group(job.expert, g, scratch.tiles, &group);
      const float* bias = view_.w13_bias(job.expert, g, bias_values);
      product(job, x_, group, begin, end - begin, scratch);
      for (int r = begin; r < end; ++r) {
        alignas(64) float block[kBlock];
        const int64_t row = job.first_row + r;
        float* to = job.path == Path::kPacked ? block : h_.values + row * w_.intermediate_size + g * kBlock;
        k_.swiglu(scratch.out + (r - begin) * kGroupRows, bias, params_, to);
        if (job.path == Path::kPacked) {
          const int64_t at = h_.packed_offset(row, g);
          k_.pack_block(block, permute, h_.high + at, h_.low ? h_.low + at : nullptr);
        } else if (job.path == Path::kQuant) {
          quantize_block(to, row, g, h_);
        }
      }
    });
  }

  void second_product() {
    const int64_t hidden = w_.hidden_size, tiles = hidden / kTileRows;
    // Few columns are shared out in halves; an element's result does not depend on its neighbours.
    const int group_tiles = tiles >= 4 * kGroupTiles * team_.size() ? kGroupTiles : kGroupTiles / 2;
    const int64_t groups = (tiles + group_tiles - 1) / group_tiles;
    // Small intermediate rows stay in the cache over all experts. Large ones are read once per item: few wide items.
    int64_t rows = 0;
    for (const Job& job : plan_.jobs) rows += job.num_rows;
    const int64_t per_item =
        rows * w_.intermediate_size * 2 <= (1 << 20) ? 1 : (groups + team_.size() - 1) / team_.size();
    const int64_t items = (groups + per_item - 1) / per_item;
    for_items(items, std::max<int64_t>(1, rows) * hidden * w_.intermediate_size, [&](Scratch& scratch, int64_t item) {
      const int64_t first = item * per_item, last = std::min(groups, first + per_item);
      const int64_t begin = first * group_tiles * kTileRows, end = std::min(hidden, last * group_tiles * kTileRows);
      for (int64_t t = first_; t < first_ + count_; ++t)
        std::memset(sum_row(t) + begin, 0, (end - begin) * sizeof(float));
      for (const Job& job : plan_.jobs) {
        for (int chunk = 0; chunk < job.num_rows; chunk += chunk_rows(h_)) {
          for (int64_t g = first; g < last; ++g) second_group(job, chunk, g * group_tiles, group_tiles, scratch);
        }
      }
      if (sum_is_output_) return;
      const size_t size = element_size(batch_.output_dtype);
      for (int64_t t = first_; t < first_ + count_; ++t) {
        uint8_t* out = static_cast<uint8_t*>(batch_.output) + (t * batch_.output_stride + begin) * size;
        k_.narrow(sum_row(t) + begin, end - begin, batch_.output_dtype, out);
      }
    });
  }

  void second_group(const Job& job, int chunk, int64_t first_tile, int group_tiles, Scratch& scratch) {
    const int64_t tiles = w_.hidden_size / kTileRows, column = first_tile * kTileRows;
    TileGroup group;
    view_.w2_group(job.expert, first_tile, static_cast<int>(std::min<int64_t>(group_tiles, tiles - first_tile)),
                   scratch.tiles, &group);
    const float* bias = w_.w2_bias ? w_.w2_bias + job.expert * w_.hidden_size + column : nullptr;
    const int end = std::min(job.num_rows, chunk + chunk_rows(h_));
    product(job, h_, group, chunk, end - chunk, scratch);
    for (int r = chunk; r < end; ++r) {
      const Slot& slot = job.slots[r];
      k_.accumulate(sum_row(slot.token) + column, scratch.out + (r - chunk) * kGroupRows, bias, slot.weight,
                    group.num_tiles * kTileRows);
    }
  }

  const ExpertWeights& w_;
  const ActivationParams& params_;
  const MoeBatch& batch_;
  const Kernels& k_;
  const WeightView view_;
  const bool invariant_;
  ThreadTeam& team_;
  int64_t first_ = 0, count_ = 0;
  Plan plan_;
  Activations x_, h_;
  float* sum_ = nullptr;
  bool sum_is_output_ = false;
};

}  // namespace
}  // namespace mxfp4

void fused_mxfp4_moe(const ExpertWeights& weights, const ActivationParams& activation, const MoeBatch& batch,
                     bool batch_invariant, ThreadTeam& team) {
  if (batch.num_tokens == 0) return;
  const int64_t h = weights.hidden_size, i = weights.intermediate_size;
  const int64_t token_bytes = batch.top_k * (4 * h + 8 * i) + 8 * h;
  const int64_t rounds = (batch.num_tokens * token_bytes + mxfp4::kMostBytes - 1) / mxfp4::kMostBytes;
  const int64_t step = (batch.num_tokens + rounds - 1) / rounds;
  mxfp4::Forward forward(weights, activation, batch, mxfp4::select_kernels(), batch_invariant, team);
  for (int64_t t = 0; t < batch.num_tokens; t += step) forward.run(t, std::min(step, batch.num_tokens - t));
}

}  // namespace moe_ops
