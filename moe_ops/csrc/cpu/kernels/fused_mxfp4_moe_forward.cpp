// fused_mxfp4_moe: the phases of a call, for any instruction set.
//
// 1. prepare: activations to the form that the path of their expert wants;
// 2. first product: items of 32 elements of the intermediate row of an expert, gate and up with the activation;
// 3. second product: items of output columns of an expert, in rows of their own;
// 4. sum: items of tokens and columns. An item adds up all experts in ascending order, so that no two threads write one
//    element and the order of the sum depends on nothing.
// Steps 3 and 4 go through the experts in waves, which bounds the rows that wait to be added up.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>

#include "cpu/kernels/fused_mxfp4_moe_activations.h"
#include "cpu/kernels/fused_mxfp4_moe_queue.h"

namespace moe_ops {
namespace mxfp4 {
namespace {

constexpr int64_t kMostBytes = int64_t{256} << 20;     // intermediate results of one round of tokens
constexpr int64_t kInlineElements = int64_t{1} << 19;  // products of fewer are not worth waking threads for
constexpr int64_t kInlineTokens = 16384;               // nor is the quantisation of fewer
constexpr int64_t kWaveBytes = int64_t{32} << 20;      // rows of the second product in a wave
constexpr int64_t kSumColumns = 1024;

size_t element_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

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
    make_items(arena);
    run_items();
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

  // Rows [rows_before, rows_before + num_rows) of the experts' outputs belong to a job. A wave is jobs [first, last).
  struct Wave {
    size_t first, last;
    int64_t rows_before;
  };

  enum class Step { kQuantize, kPack, kFirst, kSecond, kSum };

  // Counters: quantised tokens; packed row tiles, first and second products of a job; items of a wave and its sum.
  size_t tokens_counter() const { return 0; }
  size_t packed_counter(size_t job) const { return 1 + job; }
  size_t first_counter(size_t job) const { return 1 + plan_.jobs.size() + job; }
  size_t second_counter(size_t wave) const { return 1 + 2 * plan_.jobs.size() + wave; }
  size_t sum_counter(size_t wave) const { return 1 + 2 * plan_.jobs.size() + waves_.size() + wave; }

  void make_items(Arena& arena) {
    const int64_t hidden = w_.hidden_size, tiles = hidden / kTileRows;
    first_groups_ = w_.intermediate_size / kBlock;
    first_ends_.clear();
    second_ends_.clear();
    pack_tiles_.clear();
    waves_.clear();
    int64_t chunks = 0;
    for (const Job& job : plan_.jobs) chunks += num_chunks(job, h_);
    // Few columns are shared out in halves; an element's result does not depend on its neighbours.
    group_tiles_ = chunks * (tiles / kGroupTiles) >= 8 * team_.size() ? kGroupTiles : kGroupTiles / 2;
    second_groups_ = (tiles + group_tiles_ - 1) / group_tiles_;
    int64_t first_items = 0, second_items = 0, rows = 0, most_rows = 0;
    const int64_t wave_rows = kWaveBytes / (hidden * static_cast<int64_t>(sizeof(float)));
    waves_.push_back({0, 0, 0});
    rows_before_.clear();
    for (size_t j = 0; j < plan_.jobs.size(); ++j) {
      const Job& job = plan_.jobs[j];
      for (int t = 0; job.path == Path::kPacked && t < job.row_tiles(); ++t) pack_tiles_.emplace_back(j, t);
      first_ends_.push_back(first_items += num_chunks(job, x_) * first_groups_);
      second_ends_.push_back(second_items += num_chunks(job, h_) * second_groups_);
      if (waves_.back().last > waves_.back().first && rows + y_rows(job) - waves_.back().rows_before > wave_rows) {
        waves_.push_back({j, j, rows});
      }
      rows_before_.push_back(rows);
      rows += y_rows(job);
      waves_.back().last = j + 1;
      most_rows = std::max(most_rows, rows - waves_.back().rows_before);
    }
    for (size_t i = 0; i < 2; ++i) y_[i] = i < waves_.size() ? arena.take<float>(most_rows * hidden) : nullptr;

    left_.emplace(1 + 2 * plan_.jobs.size() + 2 * waves_.size());
    queue_.emplace();
    const int64_t tokens = plan_.any_quant ? count_ : 0;
    left_->set(tokens_counter(), tokens);
    for (size_t j = 0; j < plan_.jobs.size(); ++j) {
      const Job& job = plan_.jobs[j];
      left_->set(packed_counter(j), job.path == Path::kPacked ? job.row_tiles() : 0);
      left_->set(first_counter(j), first_ends_[j] - (j ? first_ends_[j - 1] : 0));
    }
    // An item of the sum: tokens of about an eighth of a thread's share, and columns.
    sum_tokens_ = std::max<int64_t>(1, count_ / (8 * team_.size()));
    sum_blocks_ = (hidden + kSumColumns - 1) / kSumColumns;
    const int64_t sums = (count_ + sum_tokens_ - 1) / sum_tokens_ * sum_blocks_;
    stages_.clear();
    add_stage(Step::kQuantize, 0, tokens);
    add_stage(Step::kPack, 0, static_cast<int64_t>(pack_tiles_.size()));
    add_stage(Step::kFirst, 0, first_items);
    // The sum of a wave comes after the products of the next one, which threads do meanwhile.
    for (size_t w = 0; w < waves_.size(); ++w) {
      const int64_t items = second_begin(waves_[w].last) - second_begin(waves_[w].first);
      left_->set(second_counter(w), items);
      left_->set(sum_counter(w), sums);
      add_stage(Step::kSecond, w, items);
      if (w > 0) add_stage(Step::kSum, w - 1, sums);
    }
    add_stage(Step::kSum, waves_.size() - 1, sums);
  }

  void add_stage(Step step, size_t wave, int64_t count) {
    stages_.push_back({step, wave});
    queue_->add_stage(count);
  }

  int64_t second_begin(size_t job) const { return job ? second_ends_[job - 1] : 0; }

  void run_items() {
    const auto work = [&](int, int num_threads) {
      Scratch scratch(w_);
      for (Run run; queue_->take(num_threads, &run);) run_items(run, scratch);
      if (k_.finish != nullptr) k_.finish();
    };
    const int64_t slots = static_cast<int64_t>(plan_.slots.size());
    if (slots * w_.hidden_size * w_.intermediate_size <= kInlineElements) return work(0, 1);
    if (plan_.any_quant && count_ * w_.hidden_size <= kInlineTokens) {
      // Less work than waking threads.
      Scratch scratch(w_);
      for (Run run; !left_->finished(tokens_counter()) && queue_->take(1, &run);) run_items(run, scratch);
    }
    team_.parallel(work);
  }

  void run_items(const Run& run, Scratch& scratch) {
    const auto [step, wave] = stages_[static_cast<size_t>(run.stage)];
    for (int64_t i = run.begin; i < run.end; ++i) {
      const bool more = i + 1 < run.end;
      switch (step) {
        case Step::kQuantize:
          quantize_token(i, scratch);
          break;
        case Step::kPack:
          pack_tile(i, scratch);
          break;
        case Step::kFirst:
          first_item(i, more, scratch);
          break;
        case Step::kSecond:
          second_item(wave, i, more, scratch);
          break;
        case Step::kSum:
          sum_item(wave, i);
          break;
      }
    }
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

  void quantize_token(int64_t i, Scratch& scratch) {
    k_.widen(hidden_row(first_ + i), batch_.dtype, w_.hidden_size, scratch.rows);
    quantize_row(scratch.rows, i, x_);
    left_->finish(tokens_counter());
  }

  void pack_tile(int64_t i, Scratch& scratch) {
    const auto [j, tile] = pack_tiles_[static_cast<size_t>(i)];
    const Job& job = plan_.jobs[j];
    const int height = job.tile_rows();
    const int64_t hidden = w_.hidden_size;
    const bool permute = view_.is_mxfp4();
    const bool copy = permute && batch_.dtype == DType::kBFloat16;
    for (int r = tile * height; r < (tile + 1) * height; ++r) {
      if (copy && r < job.num_rows) {
        const uint8_t* from = hidden_row(job.slots[r].token);
        k_.pack_row(reinterpret_cast<const uint16_t*>(from), x_.num_blocks, x_.high + x_.packed_offset(job, r, 0));
        continue;
      }
      if (r < job.num_rows) {
        k_.widen(hidden_row(job.slots[r].token), batch_.dtype, hidden, scratch.rows);
      } else {
        std::memset(scratch.rows, 0, hidden * sizeof(float));
      }
      for (int64_t b = 0; b < x_.num_blocks; ++b) {
        const int64_t at = x_.packed_offset(job, r, b);
        k_.pack_block(scratch.rows + b * kBlock, permute, x_.high + at, x_.low ? x_.low + at : nullptr);
      }
    }
    left_->finish(packed_counter(j));
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
        unpack_row(from, job, which[i], row);
      }
    }
  }

  void unpack_row(const Activations& from, const Job& job, int r, float* row) const {
    static constexpr int kOrder[8] = {0, 4, 1, 5, 2, 6, 3, 7};
    for (int64_t b = 0; b < from.num_blocks; ++b) {
      const int64_t at = from.packed_offset(job, r, b);
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
                     int count, Scratch& scratch, float* out, int64_t out_stride = kGroupRows) const {
    for (int i = 0; i < count; i += kFloatRows) {
      const int n = std::min(kFloatRows, count - i);
      const float* rows[kFloatRows];
      float_rows(job, from, which + i, n, scratch, rows);
      if (!view_.is_mxfp4()) {
        k_.gemm_w16(group.rows, group.num_tiles * kTileRows, from.num_blocks * kBlock, rows, n, out + i * out_stride,
                    out_stride);
        continue;
      }
      for (int t = 0; t < group.num_tiles; ++t) {
        if ((mask >> t & 1) == 0) continue;
        k_.gemm_f32(group.tiles + t, 1, from.num_blocks, rows, n, out + i * out_stride + t * kTileRows, out_stride);
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

  // Rows [begin, begin + count) of a job times the tiles of a group, into scratch.out [count][kGroupRows].
  void product(const Job& job, const Activations& from, const TileGroup& group, int begin, int count,
               Scratch& scratch) const {
    if (job.path == Path::kPacked)
      return packed_product(job, from, group, begin, count, scratch, scratch.out, kGroupRows);
    int which[kMaxRows];
    for (int i = 0; i < count; ++i) which[i] = begin + i;
    if (job.path == Path::kQuant) return quant_product(job, from, group, which, count, scratch, scratch.out);
    float_product(job, from, group, ~0u, which, count, scratch, scratch.out);
  }

  // The same for kPacked into `out`, which has room for whole tiles of rows.
  void packed_product(const Job& job, const Activations& from, const TileGroup& group, int begin, int count,
                      Scratch& scratch, float* out, int64_t out_stride) const {
    const int64_t at = from.packed_offset(job, begin, 0);
    const PackedRows rows{from.high + at, from.low ? from.low + at : nullptr, job.tile_rows()};
    const WeightTiles weights{view_.is_mxfp4() ? group.tiles : nullptr, view_.is_mxfp4() ? nullptr : group.rows};
    const unsigned bad = k_.gemm_bf16(weights, group.num_tiles, from.num_blocks, rows, count, out, out_stride);
    if (bad == 0) return;
    int which[kMaxRows];
    for (int i = 0; i < count; ++i) which[i] = begin + i;
    float_product(job, from, group, bad, which, count, scratch, out, out_stride);
  }

  // The job of an item in a list that ends at `ends`, and the item's number in it.
  static std::pair<size_t, int64_t> job_of(const std::vector<int64_t>& ends, int64_t item) {
    const size_t j = std::upper_bound(ends.begin(), ends.end(), item) - ends.begin();
    return {j, item - (j ? ends[j - 1] : 0)};
  }

  void first_item(int64_t i, bool more, Scratch& scratch) {
    const auto [j, local] = job_of(first_ends_, i);
    const Job& job = plan_.jobs[j];
    const Item item = item_of(job, x_, local, first_groups_);
    const int64_t g = item.group;
    const bool permute = view_.is_mxfp4();
    TileGroup group;
    if (more) {
      const auto [next, next_local] = job_of(first_ends_, i + 1);
      view_.prefetch_w13_group(plan_.jobs[next].expert, next_local % first_groups_);
    }
    alignas(64) float bias_values[kGroupRows];
    view_.w13_group(job.expert, g, scratch.tiles, &group);
    const float* bias = view_.w13_bias(job.expert, g, bias_values);
    left_->wait(job.path == Path::kPacked ? packed_counter(j) : tokens_counter());
    product(job, x_, group, item.begin, item.end - item.begin, scratch);
    for (int r = item.begin; r < item.end; ++r) {
      alignas(64) float block[kBlock];
      const int64_t row = job.first_row + r;
      float* to = job.path == Path::kPacked ? block : h_.values + row * w_.intermediate_size + g * kBlock;
      k_.swiglu(scratch.out + (r - item.begin) * kGroupRows, bias, params_, to);
      if (job.path == Path::kPacked) {
        const int64_t at = h_.packed_offset(job, r, g);
        k_.pack_block(block, permute, h_.high + at, h_.low ? h_.low + at : nullptr);
      } else if (job.path == Path::kQuant) {
        quantize_block(to, row, g, h_);
      }
    }
    left_->finish(first_counter(j));
  }

  // Whether the second product of a job goes to whole tiles of rows of y_: where the rows that pad the last one are
  // few.
  static bool y_tiles(const Job& job) {
    return job.path == Path::kPacked && job.row_tiles() * job.tile_rows() * 4 <= job.num_rows * 5;
  }

  static int y_rows(const Job& job) { return y_tiles(job) ? job.row_tiles() * job.tile_rows() : job.num_rows; }

  float* y_row(size_t wave, size_t job, int64_t row) const {
    return y_[wave % 2] + (rows_before_[job] - waves_[wave].rows_before + row) * w_.hidden_size;
  }

  void second_item(size_t wave, int64_t i, bool more, Scratch& scratch) {
    const int64_t first = second_begin(waves_[wave].first);
    const auto [j, local] = job_of(second_ends_, first + i);
    const Job& job = plan_.jobs[j];
    const Item item = item_of(job, h_, local, second_groups_);
    const int64_t tiles = w_.hidden_size / kTileRows, tile = item.group * group_tiles_;
    const auto count = [&](int64_t t) { return static_cast<int>(std::min<int64_t>(group_tiles_, tiles - t)); };
    if (more) {
      const auto [next, next_local] = job_of(second_ends_, first + i + 1);
      const int64_t next_tile = next_local % second_groups_ * group_tiles_;
      view_.prefetch_w2_group(plan_.jobs[next].expert, next_tile, count(next_tile), 0);
    }
    // What others still compute is waited for while the weights come in.
    if (!left_->finished(first_counter(j))) view_.prefetch_w2_group(job.expert, tile, count(tile), 1 << 20);
    TileGroup group;
    view_.w2_group(job.expert, tile, count(tile), scratch.tiles, &group);
    left_->wait(first_counter(j));
    if (wave >= 2) left_->wait(sum_counter(wave - 2));
    const int rows = item.end - item.begin;
    if (y_tiles(job)) {
      float* to = y_row(wave, j, item.begin) + tile * kTileRows;
      packed_product(job, h_, group, item.begin, rows, scratch, to, w_.hidden_size);
    } else {
      product(job, h_, group, item.begin, rows, scratch);
      const size_t bytes = static_cast<size_t>(group.num_tiles) * kTileRows * sizeof(float);
      for (int r = 0; r < rows; ++r) {
        std::memcpy(y_row(wave, j, item.begin + r) + tile * kTileRows, scratch.out + r * kGroupRows, bytes);
      }
    }
    left_->finish(second_counter(wave));
  }

  void sum_item(size_t wave, int64_t i) {
    const int64_t begin = first_ + i / sum_blocks_ * sum_tokens_, end = std::min(first_ + count_, begin + sum_tokens_);
    const int64_t column = i % sum_blocks_ * kSumColumns, width = std::min(kSumColumns, w_.hidden_size - column);
    left_->wait(second_counter(wave));
    if (wave > 0) left_->wait(sum_counter(wave - 1));
    for (int64_t t = begin; wave == 0 && t < end; ++t) std::memset(sum_row(t) + column, 0, width * sizeof(float));
    for (size_t j = waves_[wave].first; j < waves_[wave].last; ++j) {
      const Job& job = plan_.jobs[j];
      const float* bias = w_.w2_bias ? w_.w2_bias + job.expert * w_.hidden_size + column : nullptr;
      const auto before = [](const Slot& slot, int64_t token) { return slot.token < token; };
      const Slot* slot = std::lower_bound(job.slots, job.slots + job.num_rows, begin, before);
      for (; slot != job.slots + job.num_rows && slot->token < end; ++slot) {
        k_.accumulate(sum_row(slot->token) + column, y_row(wave, j, slot - job.slots) + column, bias, slot->weight,
                      static_cast<int>(width));
      }
    }
    if (wave + 1 == waves_.size() && !sum_is_output_) {
      const size_t size = element_size(batch_.output_dtype);
      for (int64_t t = begin; t < end; ++t) {
        uint8_t* out = static_cast<uint8_t*>(batch_.output) + (t * batch_.output_stride + column) * size;
        k_.narrow(sum_row(t) + column, width, batch_.output_dtype, out);
      }
    }
    left_->finish(sum_counter(wave));
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
  float* y_[2] = {};  // outputs of the experts of a wave, by its parity
  bool sum_is_output_ = false;
  std::vector<std::pair<size_t, int>> pack_tiles_;  // job, row
  std::vector<int64_t> first_ends_, second_ends_, rows_before_;
  std::vector<Wave> waves_;
  std::vector<std::pair<Step, size_t>> stages_;  // with the wave
  int64_t first_groups_ = 0, second_groups_ = 0, sum_tokens_ = 0, sum_blocks_ = 0;
  int group_tiles_ = 0;
  std::optional<ItemQueue> queue_;
  std::optional<Countdowns> left_;
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
  mxfp4::Forward forward(weights, activation, batch, mxfp4::select_kernels().kernels(), batch_invariant, team);
  for (int64_t t = 0; t < batch.num_tokens; t += step) forward.run(t, std::min(step, batch.num_tokens - t));
}

}  // namespace moe_ops
