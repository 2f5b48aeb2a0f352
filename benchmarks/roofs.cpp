// Measured limits of this machine, as a small C library that benchmarks/harness.py builds and loads: what a benchmark's
// numbers are shares of. Each call times one pass of `num_threads` threads, pinned to the CPUs of the affinity mask.
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#define MOE_ROOF_TARGET __attribute__((target("avx512f,avx512bw,avx512vnni,amx-tile,amx-bf16"), noinline))
#endif

namespace {

using Clock = std::chrono::steady_clock;

std::vector<int> cpus() {
  cpu_set_t set;
  std::vector<int> result;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return {0};
  for (int i = 0; i < CPU_SETSIZE; ++i) {
    if (CPU_ISSET(i, &set)) result.push_back(i);
  }
  return result;
}

// Seconds from the moment when all threads are ready until the last has finished.
template <class Work>
double timed(int num_threads, const Work& work) {
  const std::vector<int> places = cpus();
  std::atomic<int> ready{0};
  std::atomic<bool> go{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < num_threads; ++i) {
    threads.emplace_back([&, i] {
      cpu_set_t set;
      CPU_ZERO(&set);
      CPU_SET(places[i % places.size()], &set);
      sched_setaffinity(0, sizeof set, &set);
      ready.fetch_add(1);
      while (!go.load()) std::this_thread::yield();
      work(i);
    });
  }
  while (ready.load() < num_threads) std::this_thread::yield();
  const auto start = Clock::now();
  go.store(true);
  for (std::thread& thread : threads) thread.join();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::atomic<uint64_t> sink{0};

#if defined(__x86_64__)

MOE_ROOF_TARGET void read_all(const char* p, const char* end) {
  __m512i sum[4] = {};
  for (; p < end; p += 256) {
    for (int i = 0; i < 4; ++i) {
      _mm_prefetch(p + 4096 + 64 * i, _MM_HINT_T0);
      sum[i] = _mm512_xor_si512(sum[i], _mm512_load_si512(p + 64 * i));
    }
  }
  const __m512i all = _mm512_xor_si512(_mm512_xor_si512(sum[0], sum[1]), _mm512_xor_si512(sum[2], sum[3]));
  sink += static_cast<uint64_t>(_mm512_reduce_add_epi64(all));
}

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// In memory of its own: the compiler takes the instruction to read eight bytes and would drop the other stores.
constexpr TileConfig kTileConfig;

// Four sums in registers, no loads.
MOE_ROOF_TARGET void amx_bf16(int64_t rounds) {
  alignas(64) static const uint8_t zeros[1024] = {};
  _tile_loadconfig(&kTileConfig);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, zeros, 64);
  _tile_loadd(5, zeros, 64);
  _tile_loadd(6, zeros, 64);
  _tile_loadd(7, zeros, 64);
  for (int64_t i = 0; i < rounds; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
}

MOE_ROOF_TARGET void vnni(int64_t rounds) {
  __m512i sum[12] = {};
  const __m512i x = _mm512_set1_epi8(1), y = _mm512_set1_epi8(3);
  for (int64_t i = 0; i < rounds; ++i) {
    for (int j = 0; j < 12; ++j) sum[j] = _mm512_dpbusd_epi32(sum[j], x, y);
    asm volatile("" ::"v"(sum[0]));
  }
  for (int j = 1; j < 12; ++j) sum[0] = _mm512_add_epi32(sum[0], sum[j]);
  sink += static_cast<uint64_t>(_mm512_reduce_add_epi32(sum[0]));
}

#define MOE_ROOF_TARGET_AVX2 __attribute__((target("avx2"), noinline))

MOE_ROOF_TARGET_AVX2 void read_all_avx2(const char* p, const char* end) {
  __m256i sum[4] = {};
  for (; p < end; p += 256) {
    for (int i = 0; i < 4; ++i) {
      _mm_prefetch(p + 2048 + 64 * i, _MM_HINT_T0);
      const __m256i* q = reinterpret_cast<const __m256i*>(p + 64 * i);
      sum[i] = _mm256_xor_si256(sum[i], _mm256_xor_si256(_mm256_load_si256(q), _mm256_load_si256(q + 1)));
    }
  }
  const __m256i all = _mm256_xor_si256(_mm256_xor_si256(sum[0], sum[1]), _mm256_xor_si256(sum[2], sum[3]));
  sink += static_cast<uint64_t>(_mm256_extract_epi64(all, 0) ^ _mm256_extract_epi64(all, 3));
}

// vpmaddwd and vpaddd on twelve sums in registers; written out, since a compiler merges sums that are equal.
MOE_ROOF_TARGET_AVX2 void multiply_add_int16(int64_t rounds) {
  // Every loop is unrolled: the sums stay in registers.
  __m256i sum[12], product;
  const __m256i x = _mm256_set1_epi16(1), y = _mm256_set1_epi16(3);
#pragma GCC unroll 12
  for (int j = 0; j < 12; ++j) sum[j] = _mm256_setzero_si256();
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < 12; ++j) {
      asm volatile("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sum[j]), "=&x"(product) : "x"(x), "x"(y));
    }
  }
#pragma GCC unroll 12
  for (int j = 1; j < 12; ++j) sum[0] = _mm256_add_epi32(sum[0], sum[j]);
  sink += static_cast<uint64_t>(_mm256_extract_epi64(sum[0], 0));
}

bool has_avx2() { return __builtin_cpu_supports("avx2"); }

bool has_avx512() { return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw"); }

bool has_amx() {
  static const bool value = has_avx512() && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
  return value;
}

#endif

void read_plain(const char* p, const char* end) {
  uint64_t sum[8] = {};
  for (; p < end; p += 64) {
    for (int i = 0; i < 8; ++i) {
      uint64_t value;
      std::memcpy(&value, p + 8 * i, 8);
      sum[i] ^= value;
    }
  }
  sink += sum[0] ^ sum[1] ^ sum[2] ^ sum[3] ^ sum[4] ^ sum[5] ^ sum[6] ^ sum[7];
}

}  // namespace

extern "C" {

// A buffer in huge pages where the system gives them, touched by all threads; kept for the life of the process.
const char* roof_buffer(int64_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return nullptr;
  madvise(p, bytes, MADV_HUGEPAGE);
  uint64_t* words = static_cast<uint64_t*>(p);
  for (int64_t i = 0; i < bytes / 8; i += 8) words[i] = static_cast<uint64_t>(i) * 0x9E3779B97F4A7C15ull;
  return static_cast<const char*>(p);
}

// GB/s of reading the buffer once.
double roof_dram_read(const char* buffer, int64_t bytes, int num_threads) {
  const int64_t part = bytes / num_threads / 4096 * 4096;
  const double seconds = timed(num_threads, [&](int i) {
    const char *begin = buffer + i * part, *end = begin + part;
#if defined(__x86_64__)
    if (has_avx512()) return read_all(begin, end);
    if (has_avx2()) return read_all_avx2(begin, end);
#endif
    read_plain(begin, end);
  });
  return static_cast<double>(part) * num_threads / seconds / 1e9;
}

// TFLOP/s of AMX bfloat16 products, 0 where there is no AMX.
double roof_amx_bf16(int64_t rounds, int num_threads) {
#if defined(__x86_64__)
  if (!has_amx()) return 0;
  const double seconds = timed(num_threads, [&](int) { amx_bf16(rounds); });
  return 4.0 * 16 * 16 * 32 * 2 * static_cast<double>(rounds) * num_threads / seconds / 1e12;
#else
  (void)rounds, (void)num_threads;
  return 0;
#endif
}

// TOP/s of products of 16-bit integers on vectors, 0 where this program knows none: with AVX-512, vpdpbusd for each of
// the two bytes of an integer; with AVX2, vpmaddwd and vpaddd.
double roof_int16(int64_t rounds, int num_threads) {
#if defined(__x86_64__)
  const double done = 2.0 * static_cast<double>(rounds) * num_threads / 1e12;
  if (has_avx512()) return 12 * 64 / 2 * done / timed(num_threads, [&](int) { vnni(rounds); });
  if (has_avx2()) return 12 * 16 * done / timed(num_threads, [&](int) { multiply_add_int16(rounds); });
#endif
  (void)rounds, (void)num_threads;
  return 0;
}
}
