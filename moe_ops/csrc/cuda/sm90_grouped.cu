// Larger batches on Hopper: a grouped matmul over rows sorted by expert, one matrix at a time.
//
// A tile of work is 256 weight rows (16 strips) by up to 64, 96 or 152 tokens of one expert. One warpgroup of a
// block fetches tiles into a ring of stages of 128 k and runs ahead of the others, which compute: packed weights come
// from shared memory to registers, become exact bf16 there (scale included), and are operand A of wgmma; operand B, the
// tokens' activations, is read from shared memory by the tensor cores. Warpgroups wait for stages alone, not for each
// other, so that one stores its part of a tile while another is still at work on its own or already at the next tile.
//
// Tokens of the first matrix are gathered by row. It leaves its results in the order in which the second matrix's tiles
// need them: [64 columns][row][128 bytes], each row swizzled by its place in the tile, so that a stage's tokens are two
// contiguous pieces.
#include "sm90_grouped_tiles.cuh"

namespace moe_ops::sm90 {
namespace {

using Narrow = Config<4, 1, kNarrowTokens, 0, 0>;
using Middle = Config<4, 1, kMiddleTokens, 104, 64>;
using Wide = Config<2, 2, kWideTokens, 216, 72>;

template <class C, bool kFirst>
__global__ void __launch_bounds__(C::kThreads, 1) grouped_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  Ring<C> ring{(smem_address(shared_memory) + 1023) / 1024 * 1024};
  const int tid = threadIdx.x, group = __shfl_sync(~0u, tid >> 7, 0), warp = __shfl_sync(~0u, (tid >> 5) & 3, 0);
  if (tid == 0) {
    for (int i = 0; i < C::kStages; ++i) {
      barrier_init(ring.full(i), Producer<C, kFirst>::kArrivals);
      barrier_init(ring.empty(i), C::kGroups * 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  const int total = *p.m.num_tiles * p.row_tiles;
  __syncthreads();
  if (group == C::kGroups) {
    if constexpr (C::kRegisters > 0) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(C::kFetchRegisters));
    Producer<C, kFirst>{p, ring, tid & 127}.run(total);
  } else {
    if constexpr (C::kRegisters > 0) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(C::kRegisters));
    Consumer<C, kFirst>{p, ring, group, warp, tid & 31}.run(total);
  }
}

// One block: the tiles of every expert, in order; an expert's rows are divided evenly.
__global__ void __launch_bounds__(1024)
    list_tiles_kernel(const int* counts, int num_experts, int most, int4* tiles, int* num_tiles) {
  __shared__ int sums[2][32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int row_base = 0, tile_base = 0;
  for (int first = 0; first < num_experts; first += 1024) {
    const int expert = first + threadIdx.x;
    const int count = expert < num_experts ? counts[expert] : 0, number = (count + most - 1) / most;
    int rows = count, tile_count = number;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int r = __shfl_up_sync(~0u, rows, d), n = __shfl_up_sync(~0u, tile_count, d);
      if (lane >= d) rows += r, tile_count += n;
    }
    if (lane == 31) sums[0][warp] = rows, sums[1][warp] = tile_count;
    __syncthreads();
    int row = row_base + rows - count, tile = tile_base + tile_count - number;
    for (int w = 0; w < 32; ++w) {
      if (w < warp) row += sums[0][w], tile += sums[1][w];
      row_base += sums[0][w], tile_base += sums[1][w];
    }
    for (int i = 0; i < number; ++i) {
      const int begin = static_cast<int>(static_cast<int64_t>(count) * i / number);
      const int end = static_cast<int>(static_cast<int64_t>(count) * (i + 1) / number);
      tiles[tile + i] = make_int4(expert, row + begin, end - begin, 0);
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) *num_tiles = tile_base;
}

template <class C, bool kFirst>
cudaError_t launch_one(const Params& p, int num_sms, cudaStream_t stream) {
  const cudaError_t allowed = allow_shared<grouped_kernel<C, kFirst>>(C::kShared);
  if (allowed != cudaSuccess) return allowed;
  grouped_kernel<C, kFirst><<<num_sms, C::kThreads, C::kShared, stream>>>(p);
  return cudaGetLastError();
}

template <class C>
cudaError_t launch(const Params& p, int num_sms, cudaStream_t stream) {
  return p.m.first ? launch_one<C, true>(p, num_sms, stream) : launch_one<C, false>(p, num_sms, stream);
}

}  // namespace

cudaError_t list_tiles(const int* counts, int num_experts, int most, void* tiles, int* num_tiles, cudaStream_t stream) {
  list_tiles_kernel<<<1, 1024, 0, stream>>>(counts, num_experts, most, static_cast<int4*>(tiles), num_tiles);
  return cudaGetLastError();
}

cudaError_t grouped(const GroupedMatmul& m, int most, int num_sms, cudaStream_t stream) {
  Params p = params_of(m);
  p.row_tiles = (p.strips + kStrips - 1) / kStrips;
  if (most == kNarrowTokens) return launch<Narrow>(p, num_sms, stream);
  if (most == kMiddleTokens) return launch<Middle>(p, num_sms, stream);
  return launch<Wide>(p, num_sms, stream);
}

}  // namespace moe_ops::sm90
