// The thread teams of an engine, one per NUMA pool, run side by side.
#pragma once
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "engine/topology.h"

namespace moe_ops {
class ThreadTeam;
}

namespace moe_ops::engine {

// All threads of engines have this name in /proc, debuggers and profilers.
inline constexpr char kThreadName[] = "moe-engine";

class Pools {
 public:
  explicit Pools(const ThreadPlan& plan);
  ~Pools();
  int size() const { return static_cast<int>(teams_.size()); }
  // Calls fn(context, pool, team) once per pool, pool 0 on the calling thread, and waits. Rethrows the exception of the
  // lowest pool.
  void run(void (*fn)(void* context, int pool, ThreadTeam& team), void* context);
  // The thread that will call run() moves to the CPUs of pool 0.
  void adopt_caller() const;

 private:
  void lead(int pool);
  void call(int pool);
  const ThreadPlan plan_;
  std::vector<std::unique_ptr<ThreadTeam>> teams_;
  std::vector<std::thread> leaders_;  // of pools 1 and up
  std::mutex mutex_;
  std::condition_variable start_, finished_;
  uint64_t round_ = 0;
  int running_ = 0;
  bool stop_ = false;
  void (*fn_)(void*, int, ThreadTeam&) = nullptr;
  void* context_ = nullptr;
  std::vector<std::exception_ptr> errors_;
};

}  // namespace moe_ops::engine
