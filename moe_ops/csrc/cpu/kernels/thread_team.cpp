#include "cpu/kernels/thread_team.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cmath>
#include <exception>
#include <fstream>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

namespace moe_ops {
namespace {

// About 20 us: long enough to catch the next phase of the same call, short against a scheduler slice.
constexpr int kSpins = 400;

std::atomic<unsigned> fork_generation{0};
const int register_atfork = pthread_atfork(nullptr, nullptr, [] { fork_generation.fetch_add(1); });

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t value) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0); }

// CPUs that the quota of the process's cgroup (version 2, then version 1) is worth; 0 where there is none.
double cgroup_cpus() {
  std::string line, path = "/";
  for (std::ifstream file("/proc/self/cgroup"); std::getline(file, line);) {
    if (line.rfind("0::", 0) == 0) path = line.substr(3);
  }
  double cpus = 0;
  // A limit of any ancestor binds.
  for (;;) {
    std::ifstream file("/sys/fs/cgroup" + (path == "/" ? "" : path) + "/cpu.max");
    std::string quota;
    double period = 0;
    if (file >> quota >> period && quota != "max" && period > 0) {
      const double here = std::stod(quota) / period;
      cpus = cpus > 0 ? std::min(cpus, here) : here;
    }
    if (path == "/" || path.empty()) break;
    path = path.substr(0, path.rfind('/'));
    if (path.empty()) path = "/";
  }
  double quota = 0, period = 0;
  std::ifstream quota_file("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), period_file("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
  if (quota_file >> quota && period_file >> period && quota > 0 && period > 0) {
    cpus = cpus > 0 ? std::min(cpus, quota / period) : quota / period;
  }
  return cpus;
}

}  // namespace

std::vector<int> usable_cpus() {
  std::vector<int> cpus;
  for (int capacity = 1024; capacity <= 1 << 16; capacity *= 2) {
    cpu_set_t* set = CPU_ALLOC(capacity);
    const size_t bytes = CPU_ALLOC_SIZE(capacity);
    CPU_ZERO_S(bytes, set);
    const bool ok = sched_getaffinity(0, bytes, set) == 0;
    for (int cpu = 0; ok && cpu < capacity; ++cpu) {
      if (CPU_ISSET_S(cpu, bytes, set)) cpus.push_back(cpu);
    }
    CPU_FREE(set);
    if (ok) break;
  }
  if (cpus.empty()) cpus.push_back(0);
  const double quota = cgroup_cpus();
  if (quota > 0) cpus.resize(std::min<size_t>(cpus.size(), std::max<size_t>(1, static_cast<size_t>(quota))));
  return cpus;
}

bool in_forked_child() { return fork_generation.load() != 0; }

// One worker sits on each CPU; a run leaves out the worker of the CPU that the caller is on, which works itself.
struct ThreadTeam::Pool {
  struct alignas(64) Worker {
    std::atomic<uint32_t> round{0};
    std::atomic<bool> asleep{false};
    int thread = 0;
    std::thread handle;
  };

  explicit Pool(const std::vector<int>& cpus) : cpus(cpus), workers(cpus.size()), generation(fork_generation.load()) {}

  void start() {
    for (size_t i = 0; i < workers.size(); ++i) {
      workers[i].handle = std::thread([this, i] { loop(workers[i], cpus[i]); });
    }
    started = true;
  }

  void stop() {
    stopping = true;
    if (!started) return;
    for (Worker& worker : workers) {
      worker.round.fetch_add(1);
      futex_wake(worker.round);
    }
    for (Worker& worker : workers) worker.handle.join();
  }

  void loop(Worker& worker, int cpu) {
    // Not granted in some sandboxes: the thread then floats, which is slower but right.
    if (cpu < CPU_SETSIZE) {
      cpu_set_t set;
      CPU_ZERO(&set);
      CPU_SET(cpu, &set);
      sched_setaffinity(0, sizeof set, &set);
    }
    uint32_t seen = 0;
    for (;;) {
      for (int spin = 0; spin < kSpins && worker.round.load(std::memory_order_acquire) == seen; ++spin) pause();
      worker.asleep.store(true);
      while (worker.round.load() == seen) futex_wait(worker.round, seen);
      worker.asleep.store(false);
      seen = worker.round.load();
      if (stopping) return;
      call(worker.thread);
      if (remaining.fetch_sub(1) == 1 && caller_asleep.load()) futex_wake(remaining);
    }
  }

  void call(int thread) {
    try {
      function(ctx, thread, num_threads);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(error_mutex);
      if (!error) error = std::current_exception();
    }
  }

  void run(int size, Function f, void* c) {
    const std::lock_guard<std::mutex> lock(turn);
    if (!started) start();
    function = f;
    ctx = c;
    num_threads = size;
    error = nullptr;
    const auto here = std::find(cpus.begin(), cpus.end(), sched_getcpu());
    const size_t left_out = here == cpus.end() ? workers.size() - 1 : here - cpus.begin();
    remaining.store(size - 1);
    caller_asleep.store(false);
    int thread = 1;
    for (size_t i = 0; i < workers.size() && thread < size; ++i) {
      if (i == left_out) continue;
      workers[i].thread = thread++;
      workers[i].round.fetch_add(1);
      if (workers[i].asleep.load()) futex_wake(workers[i].round);
    }
    call(0);
    for (int spin = 0; spin < kSpins && remaining.load(std::memory_order_acquire); ++spin) pause();
    caller_asleep.store(true);
    for (uint32_t left; (left = remaining.load()) != 0;) futex_wait(remaining, left);
    if (error) std::rethrow_exception(error);
  }

  std::vector<int> cpus;
  std::vector<Worker> workers;
  unsigned generation;
  bool started = false;
  std::atomic<bool> stopping{false};
  std::mutex turn, error_mutex;
  Function function = nullptr;
  void* ctx = nullptr;
  int num_threads = 0;
  std::exception_ptr error;
  std::atomic<uint32_t> remaining{0};
  std::atomic<bool> caller_asleep{false};
};

ThreadTeam::ThreadTeam(int max_threads) : ThreadTeam(usable_cpus()) {
  if (max_threads < 0) throw std::invalid_argument("ThreadTeam: max_threads must be 0 or more");
  if (max_threads > 0) size_ = std::min(size_, max_threads);
}

ThreadTeam::ThreadTeam(const std::vector<int>& cpus) : size_(static_cast<int>(cpus.size())), cpus_(cpus) {
  if (cpus.empty()) throw std::invalid_argument("ThreadTeam: cpus must hold at least one CPU");
  pool_ = std::make_unique<Pool>(cpus_);
}

ThreadTeam::ThreadTeam(int num_threads, Runner runner) : size_(std::max(1, num_threads)), runner_(runner) {}

ThreadTeam::~ThreadTeam() {
  if (!pool_) return;
  // Threads of the parent do not exist in a forked child, and its locks may be held for ever.
  if (pool_->generation != fork_generation.load()) {
    (void)pool_.release();
  } else {
    pool_->stop();
  }
}

int ThreadTeam::size() const { return size_; }

void ThreadTeam::run(Function function, void* ctx) {
  if (size_ == 1) return function(ctx, 0, 1);
  if (runner_) return runner_(size_, function, ctx);
  if (pool_->generation != fork_generation.load()) {
    (void)pool_.release();
    pool_ = std::make_unique<Pool>(cpus_);
  }
  pool_->run(size_, function, ctx);
}

}  // namespace moe_ops
