#include "engine/pools.h"

#include <pthread.h>
#include <sched.h>

#include "cpu/kernels/thread_team.h"

namespace moe_ops::engine {
namespace {

// A pool's leader stays on the pool's CPUs, one of which its team leaves free for it.
void stay_on(const std::vector<int>& cpus) {
  int highest = 0;
  for (int cpu : cpus) highest = cpu > highest ? cpu : highest;
  cpu_set_t* mask = CPU_ALLOC(highest + 1);
  size_t bytes = CPU_ALLOC_SIZE(highest + 1);
  CPU_ZERO_S(bytes, mask);
  for (int cpu : cpus) CPU_SET_S(cpu, bytes, mask);
  sched_setaffinity(0, bytes, mask);  // refused in some sandboxes: the thread then floats, which is slower but right
  CPU_FREE(mask);
}

}  // namespace

Pools::Pools(const ThreadPlan& plan) : plan_(plan), errors_(plan.pools.size()) {
  for (const PoolPlan& pool : plan.pools) teams_.push_back(std::make_unique<ThreadTeam>(pool.cpus));
  for (int pool = 1; pool < size(); ++pool) leaders_.emplace_back([this, pool] { lead(pool); });
}

Pools::~Pools() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  start_.notify_all();
  for (std::thread& leader : leaders_) leader.join();
}

void Pools::adopt_caller() const { stay_on(plan_.pools[0].cpus); }

void Pools::call(int pool) {
  try {
    fn_(context_, pool, *teams_[pool]);
  } catch (...) {
    errors_[pool] = std::current_exception();
  }
}

void Pools::lead(int pool) {
  pthread_setname_np(pthread_self(), kThreadName);
  stay_on(plan_.pools[pool].cpus);
  uint64_t seen = 0;
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      start_.wait(lock, [&] { return stop_ || round_ != seen; });
      if (stop_) return;
      seen = round_;
    }
    call(pool);
    std::lock_guard<std::mutex> lock(mutex_);
    if (--running_ == 0) finished_.notify_one();
  }
}

void Pools::run(void (*fn)(void*, int, ThreadTeam&), void* context) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    fn_ = fn;
    context_ = context;
    running_ = size() - 1;
    for (auto& error : errors_) error = nullptr;
    ++round_;
  }
  if (size() > 1) start_.notify_all();
  call(0);
  {
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, [&] { return running_ == 0; });
  }
  for (auto& error : errors_)
    if (error) std::rethrow_exception(error);
}

}  // namespace moe_ops::engine
