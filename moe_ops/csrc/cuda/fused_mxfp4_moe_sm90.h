// The sm_90a kernels of fused_mxfp4_moe: plain C++ structures, no torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace moe_ops::sm90 {

enum class OutType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// One routed-experts call. Weights are in layout sm90_v1 (see moe_ops/cuda/layout.py), everything is on one device.
struct Problem {
  const void* hidden_states;  // [T, H] bf16 or fp16, 16-byte aligned
  int64_t hidden_stride;      // elements between rows, a multiple of 8
  bool hidden_is_fp16;
  const void* topk_ids;  // contiguous [T, K]
  bool ids_are_int64;
  const float* topk_weights;  // contiguous [T, K]
  const int32_t* expert_map;  // nullable: global id -> local id
  int64_t expert_map_size;
  int num_tokens, top_k, num_experts, hidden_size, intermediate_size;
  const uint8_t *w13, *w13_scale, *w2, *w2_scale;
  const float *w13_bias, *w2_bias;  // nullable; rows of w13_bias: gate row c is gate_offset + c * row_step
  int gate_offset, up_offset, row_step;
  bool oai;     // swiglu_oai: alpha and up + 1
  float limit;  // infinity: none
  float alpha;
  void* output;  // contiguous [T, H]
  OutType output_type;
};

// Decode: one persistent cooperative kernel for at most kDecodeSlots routed slots and kDecodeMaxExperts experts.
constexpr int kDecodeSlots = 512;
constexpr int kDecodeMaxExperts = 6144;
constexpr int kDecodeCounters = 4 + kDecodeSlots;
struct DecodeScratch {
  void* words;         // decode_scratch_words() of 4 bytes
  unsigned* counters;  // kDecodeCounters words, zero before the first call; every call leaves them zero
  bool one_order;      // the same bits for a row in every batch
  bool all_scales;     // scale codes outside 1..128 occur
};
size_t decode_scratch_words(const Problem& problem);
// False where an activation row does not fit in shared memory.
bool decode_supports(const Problem& problem);
cudaError_t decode(const Problem& problem, const DecodeScratch& scratch, int num_sms, cudaStream_t stream);
// The same for at most 8 tokens and 64 slots, which decode() calls where it can: neither one_order nor all_scales,
// top-k 2 to 32, at most 4096 experts, matrices of more than 128 k and intermediate sizes up to 16384, and activations
// that leave room for three stages of weights. Its bits are its own.
bool decode_few_supports(const Problem& problem, const DecodeScratch& scratch, int num_sms);
cudaError_t decode_few(const Problem& problem, const DecodeScratch& scratch, int num_sms, cudaStream_t stream);

// Larger batches: one matrix at a time, over rows sorted by expert.
constexpr int kNarrowTokens = 64, kMiddleTokens = 96, kWideTokens = 152;  // most tokens of a tile
struct GroupedMatmul {
  // First matrix: gathers bf16 rows, 16-byte aligned, multiplies by gate and up pairs, activates; `output` is then
  // `activations` of the second one, whose output is float32 [num_rows, rows_out]. Between them lies bf16
  // [ceil(intermediate_size / 64)][num_rows][64], in an order of the kernels' own.
  bool first;
  const void* activations;
  int64_t activations_stride;  // elements, of the first matrix
  const int32_t* row_slot;     // slot of a sorted row, whose token is slot / top_k; of the first matrix
  int top_k;
  int64_t num_rows;
  const uint8_t *codes, *scales;
  const float* bias;  // nullable
  int k, rows_out;
  const void* tiles;  // int4 {expert, first row, rows, 0}; the same for both matrices
  const int* num_tiles;
  int gate_offset, up_offset, row_step;
  bool oai;
  float limit, alpha;
  void* output;
};
cudaError_t list_tiles(const int* counts, int num_experts, int most, void* tiles, int* num_tiles, cudaStream_t stream);
// output [num_tokens, width] = sums over k of weights * rows [num_rows, width], in order; row_map and weights are
// [num_tokens, top_k].
// `rows_are_bf16`: else float32.
cudaError_t combine(const void* rows, bool rows_are_bf16, const int* row_map, const float* weights, int num_tokens,
                    int top_k, int width, int64_t num_rows, void* output, OutType type, cudaStream_t stream);
cudaError_t grouped(const GroupedMatmul& matmul, int most, int num_sms, cudaStream_t stream);

// The same over e4m3 activations, whose rows quantize_rows makes: `activations` is e4m3 [.., k], with scale exponents
// by sorted row; both matrices write bf16, [num_rows, intermediate_size] and [num_rows, hidden_size]. Of a row of
// weights no scale code is more than kE4m3Below under or kE4m3Above over its first one.
constexpr int kE4m3Below = 8, kE4m3Above = 6;
constexpr int kE4m3Tokens = 152;  // most tokens of a tile
cudaError_t grouped_e4m3(const GroupedMatmul& matmul, const float* row_scale, int num_sms, cudaStream_t stream);
// bf16 rows of `width` (a multiple of 32) -> e4m3 rows in the kernels' order of k, and their scales: to scale[row] or,
// where row_map [num_rows, top_k] is given, to scale[row_map[row][i]] for each that is a row.
cudaError_t quantize_rows(const void* rows, int64_t stride, int64_t num_rows, int width, const int* row_map, int top_k,
                          void* quantized, float* scale, cudaStream_t stream);

}  // namespace moe_ops::sm90
