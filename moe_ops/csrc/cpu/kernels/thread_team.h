// A fork-join team of threads.
#pragma once

#include <memory>
#include <vector>

namespace moe_ops {

// The CPUs that this process may use: the affinity mask, cut to the cgroup's quota (at least one).
std::vector<int> usable_cpus();

// True in a child of fork() whose parent had loaded this library: threads of other runtimes (OpenMP) are gone there.
bool in_forked_child();

class ThreadTeam {
 public:
  using Function = void (*)(void* ctx, int thread, int num_threads);
  // Runs function(ctx, i, n) for all i in [0, n) and returns when all have returned; the calls need not overlap.
  using Runner = void (*)(int num_threads, Function function, void* ctx);

  // Workers of its own, one pinned to each CPU of usable_cpus(), of which at most max_threads (0: all) are used.
  explicit ThreadTeam(int max_threads = 0);
  // Workers of its own on the given CPUs. Throws std::invalid_argument where the list is empty.
  explicit ThreadTeam(const std::vector<int>& cpus);
  // Threads of somebody else.
  ThreadTeam(int num_threads, Runner runner);
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  int size() const;

  // Calls function(ctx, thread, size()) once for each thread, the caller being one of them, and waits. The first
  // exception of a thread is rethrown. Callers on several threads take turns. Workers block between runs, after a
  // bounded spin.
  void run(Function function, void* ctx);

  // run() with a callable (int thread, int num_threads).
  template <class Callable>
  void parallel(Callable&& callable) {
    using Type = std::remove_reference_t<Callable>;
    run([](void* ctx, int thread, int num_threads) { (*static_cast<Type*>(ctx))(thread, num_threads); },
        const_cast<std::remove_const_t<Type>*>(&callable));
  }

 private:
  struct Pool;
  int size_;
  Runner runner_ = nullptr;
  std::vector<int> cpus_;
  std::unique_ptr<Pool> pool_;
};

}  // namespace moe_ops
