#include "engine/doorbells.h"

#include <pthread.h>
#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "engine/engine.h"

namespace moe_ops::engine {
namespace {

// Between two looks, longer the longer nothing has happened: about one percent of the wait is added to it, and a stream
// that never arrives costs next to nothing.
constexpr int64_t kShortestNs = 5'000, kLongestNs = 1'000'000, kPart = 128;

// Never destroyed: the thread may outlive static destruction.
struct Watch {
  std::mutex mutex;
  std::condition_variable given, passed;
  std::vector<Doorbell> fresh;
  bool started = false, over = false;
  uint64_t asked = 0, looked = 0;  // passes over the words that somebody waits for
};

Watch& watch();

bool is_set(const int64_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE) != 0; }

void answer(const Doorbell& bell) {
  if (bell.answered) __atomic_store_n(bell.answered, int64_t{1}, __ATOMIC_RELEASE);
}

void pause_for(int64_t ns) {
  const timespec time{0, static_cast<long>(ns)};
  nanosleep(&time, nullptr);
}

void look() {
  pthread_setname_np(pthread_self(), "moe-doorbells");
  prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);  // 50 us are added to each sleep otherwise
  Watch& w = watch();
  std::vector<Doorbell> waiting;
  int64_t since = now_ns();
  uint64_t looked = 0;
  for (;;) {
    uint64_t pass;
    {
      std::unique_lock<std::mutex> lock(w.mutex);
      if (waiting.empty()) w.given.wait(lock, [&] { return !w.fresh.empty() || w.looked != w.asked; });
      pass = w.asked;
      if (!w.fresh.empty()) since = now_ns();
      waiting.insert(waiting.end(), w.fresh.begin(), w.fresh.end());
      w.fresh.clear();
      if (w.over) {  // the memory of the words is about to go; kernels that wait must not keep the device
        for (const Doorbell& bell : waiting) answer(bell);
        waiting.clear();
      }
    }
    bool any = false;
    size_t kept = 0;
    for (const Doorbell& bell : waiting) {
      if (!is_set(bell.rung) || (bell.ready && !bell.ready(bell.call))) {
        waiting[kept++] = bell;
        continue;
      }
      bell.run(bell.call);
      answer(bell);
      any = true;
    }
    waiting.resize(kept);
    const int64_t now = now_ns();
    if (any) since = now;
    if (pass != looked) {
      const std::lock_guard<std::mutex> lock(w.mutex);
      looked = pass;
      w.looked = pass;
      w.passed.notify_all();
    }
    if (!any && !waiting.empty()) pause_for(std::clamp((now - since) / kPart, kShortestNs, kLongestNs));
  }
}

void pass_locked(Watch& w, std::unique_lock<std::mutex>& lock, std::chrono::seconds most) {
  if (!w.started) return;
  const uint64_t pass = ++w.asked;
  w.given.notify_one();
  w.passed.wait_for(lock, most, [&] { return w.looked >= pass; });
}

void before_fork() { watch().mutex.lock(); }
void after_fork_in_parent() { watch().mutex.unlock(); }
// The child has no thread, and no device either.
void after_fork_in_child() { new (&watch()) Watch; }

void end_of_process() {
  Watch& w = watch();
  std::unique_lock<std::mutex> lock(w.mutex);
  w.over = true;
  pass_locked(w, lock, std::chrono::seconds(2));  // a call that is at work needs an engine's thread to end
}

Watch* make_watch() {
  pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
  return new Watch;
}

Watch& watch() {
  static Watch* w = make_watch();
  return *w;
}

}  // namespace

void watch_words() {
  Watch& w = watch();
  const std::lock_guard<std::mutex> lock(w.mutex);
  if (w.started) return;
  // Here, where the device's runtime has already been set up, so that its end comes after ours.
  std::atexit(end_of_process);
  std::thread(look).detach();
  w.started = true;
}

void when_rung(const Doorbell& bell) noexcept {
  Watch& w = watch();
  const std::lock_guard<std::mutex> lock(w.mutex);
  w.fresh.push_back(bell);
  w.given.notify_one();
}

void settle_rung() {
  Watch& w = watch();
  std::unique_lock<std::mutex> lock(w.mutex);
  pass_locked(w, lock, std::chrono::seconds(60));
}

}  // namespace moe_ops::engine
