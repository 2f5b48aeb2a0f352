// What compute-sanitizer racecheck makes of the ways in which the Hopper kernels hand shared memory over: each in a
// kernel that does nothing else. All are right by PTX's memory model but for `raced`. Which of them are reported:
// docs/cuda.md.
//   nvcc -arch=sm_90a -lineinfo -o patterns scripts/_racecheck_patterns.cu
//   for i in $(seq 0 10); do compute-sanitizer --tool racecheck ./patterns $i; done
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace {

constexpr int kRounds = 8, kWarp = 32;

__device__ uint32_t address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
__device__ void init(uint64_t* bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(bar)), "r"(count) : "memory");
}
__device__ void arrive(uint64_t* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(bar)) : "memory");
}
// One lane of the warp for all of them: __syncwarp orders theirs before its own, and the arrival releases both.
__device__ void arrive_for_warp(uint64_t* bar) {
  __syncwarp();
  if (threadIdx.x % kWarp == 0) arrive(bar);
}
__device__ void wait(uint64_t* bar, int parity) {
  const uint32_t at = address(bar);
  asm volatile(
      "{\n.reg .pred done;\nwait:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra wait;\n}\n"
      :
      : "r"(at), "r"(parity)
      : "memory");
}

// Warp 0 fills `data`, warp 1 adds it up; then the place is free again.
struct alignas(128) Exchange {
  int data[kWarp];
  uint64_t full, empty;
};
template <class Fill, class Free>
__device__ void exchange(int fill_arrivals, int free_arrivals, int* out, Fill fill, Free free) {
  __shared__ Exchange e;
  if (threadIdx.x == 0) init(&e.full, fill_arrivals), init(&e.empty, free_arrivals);
  __syncthreads();
  int sum = 0;
  for (int round = 0; round < kRounds; ++round) {
    if (threadIdx.x < kWarp) {
      if (round > 0) wait(&e.empty, (round - 1) & 1);
      fill(e, round);
    } else {
      wait(&e.full, round & 1);
      sum += e.data[(threadIdx.x + 1) % kWarp];
      free(e);
    }
  }
  if (threadIdx.x >= kWarp) out[threadIdx.x - kWarp] = sum;
}
__device__ void store(Exchange& e, int round) { e.data[threadIdx.x] = round; }

__global__ void each_arrives(int* out) {
  exchange(
      kWarp, kWarp, out, [](Exchange& e, int round) { store(e, round), arrive(&e.full); },
      [](Exchange& e) { arrive(&e.empty); });
}
__global__ void one_arrives_for_writers(int* out) {
  exchange(
      1, kWarp, out, [](Exchange& e, int round) { store(e, round), arrive_for_warp(&e.full); },
      [](Exchange& e) { arrive(&e.empty); });
}
__global__ void one_arrives_for_readers(int* out) {
  exchange(
      kWarp, 1, out, [](Exchange& e, int round) { store(e, round), arrive(&e.full); },
      [](Exchange& e) { arrive_for_warp(&e.empty); });
}
// A bulk copy, which completes the barrier itself.
__global__ void bulk_copy(const int* in, int* out) {
  exchange(
      1, kWarp, out,
      [=](Exchange& e, int round) {
        if (threadIdx.x != 0) return;
        const uint32_t to = address(e.data), bar = address(&e.full), bytes = sizeof(e.data);
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     :
                     : "r"(to), "l"(in + round * kWarp), "r"(bytes), "r"(bar)
                     : "memory");
      },
      [](Exchange& e) { arrive(&e.empty); });
}
// Copies of 16 bytes by lanes, whose completion arrives for them.
__global__ void async_copies(const int* in, int* out) {
  exchange(
      kWarp, kWarp, out,
      [=](Exchange& e, int round) {
        const uint32_t to = address(e.data + 4 * threadIdx.x), bar = address(&e.full);
        const int* from = in + round * kWarp + 4 * threadIdx.x;
        if (threadIdx.x < kWarp / 4) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
      },
      [](Exchange& e) { arrive(&e.empty); });
}
// A counter in shared memory: released by an addition, acquired by a load.
__global__ void counter(int* out) {
  __shared__ int ready, data[kWarp];
  if (threadIdx.x == 0) ready = 0;
  __syncthreads();
  if (threadIdx.x < kWarp) {
    data[threadIdx.x] = threadIdx.x;
    __syncwarp();
    const uint32_t at = address(&ready);
    if (threadIdx.x == 0) asm volatile("red.release.cta.shared::cta.add.u32 [%0], 1;" ::"r"(at) : "memory");
  } else {
    const uint32_t at = address(&ready);
    int seen = 0;
    while (seen == 0) asm volatile("ld.acquire.cta.shared::cta.s32 %0, [%1];" : "=r"(seen) : "r"(at) : "memory");
    out[threadIdx.x - kWarp] = data[(threadIdx.x + 1) % kWarp];
  }
}
// A barrier has 8 bytes. What another warp writes kBytes behind its begin is no part of it.
template <int kBytes>
__global__ void init_beside(int* out) {
  __shared__ alignas(128) uint64_t memory[32];
  int* word = reinterpret_cast<int*>(memory) + kBytes / 4;
  if (threadIdx.x == 0) init(memory, 1);
  if (threadIdx.x == kWarp) *word = 1;
  __syncthreads();
  out[threadIdx.x] = *word;
}
__global__ void with_syncthreads(int* out) {
  __shared__ int data[2 * kWarp];
  data[threadIdx.x] = threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = data[threadIdx.x ^ kWarp];
}
__global__ void raced(int* out) {
  __shared__ int data[2 * kWarp];
  data[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = data[threadIdx.x ^ kWarp];
}

}  // namespace

int main(int count, char** values) {
  int *in, *out, number = 0;
  cudaMalloc(&in, kRounds * kWarp * sizeof(int));
  cudaMalloc(&out, 2 * kWarp * sizeof(int));
  cudaMemset(in, 0, kRounds * kWarp * sizeof(int));
  const int only = count > 1 ? std::atoi(values[1]) : -1;
  auto run = [&](const char* name, auto kernel, auto... arguments) {
    if (only < 0 || only == number) {
      kernel<<<1, 2 * kWarp>>>(arguments...);
      std::printf("%s: %s\n", name, cudaGetErrorString(cudaDeviceSynchronize()));
    }
    ++number;
  };
  run("each_arrives", each_arrives, out);
  run("one_arrives_for_writers", one_arrives_for_writers, out);
  run("one_arrives_for_readers", one_arrives_for_readers, out);
  run("bulk_copy", bulk_copy, in, out);
  run("async_copies", async_copies, in, out);
  run("counter", counter, out);
  run("init_beside 16", init_beside<16>, out);
  run("init_beside 56", init_beside<56>, out);
  run("init_beside 64", init_beside<64>, out);
  run("with_syncthreads", with_syncthreads, out);
  run("raced", raced, out);
}
