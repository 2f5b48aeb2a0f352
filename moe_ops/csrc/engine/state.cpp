#include "engine/state.h"

#include <pthread.h>

#include <chrono>
#include <cstdlib>
#include <new>

namespace moe_ops::engine {
namespace {

// fork copies the process with one thread. The mutex is taken across it, so that the child finds consistent tables;
// engines of the parent are stale in the child (their threads do not exist there), and every use of them says so.
void before_fork() { state().mutex.lock(); }
void after_fork_in_parent() { state().mutex.unlock(); }
void after_fork_in_child() {
  State& s = state();
  s.generation.fetch_add(1);
  // Waiters of the parent are recorded inside the condition variables; the child needs clean ones.
  new (&s.done) std::condition_variable;
  new (&s.released) std::condition_variable;
  s.eager_in_flight = s.syncs_in_flight = 0;
  s.announced.clear();
  s.mutex.unlock();
}

bool environment_flag(const char* name) {
  const char* value = std::getenv(name);
  return value && *value && std::strcmp(value, "0") != 0;
}

State* make_state() {
  auto* s = new State;
  s->synchronous = environment_flag("MOE_OPS_SYNC");
  pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
  return s;
}

size_t bucket(int64_t ticket) { return static_cast<size_t>(ticket) % State::kBuckets; }

}  // namespace

State& state() {
  static State* s = make_state();
  return *s;
}

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

bool stale(const Engine& engine) { return engine.generation != state().generation.load(); }

Job* find_job(int64_t ticket) {
  for (Job* job = state().jobs[bucket(ticket)]; job; job = job->chain)
    if (job->ticket == ticket) return job;
  return nullptr;
}

void insert_job(Job* job) {
  Job*& first = state().jobs[bucket(job->ticket)];
  job->chain = first;
  first = job;
}

void erase_job(Job* job) {
  for (Job** link = &state().jobs[bucket(job->ticket)]; *link; link = &(*link)->chain) {
    if (*link != job) continue;
    *link = job->chain;
    break;
  }
  job->chain = nullptr;
}

bool synchronous() { return state().synchronous.load(); }
void set_synchronous(bool on) { state().synchronous = on; }

void set_range_hooks(void (*push)(const char*), void (*pop)()) {
  state().range_push = push;
  state().range_pop = pop;
}

void report_stream_error(int64_t engine, const char* text) noexcept {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  if (s.num_errors == State::kErrors) {
    ++s.lost_errors;
    return;
  }
  StreamError& error = s.errors[s.num_errors++];
  error.engine = engine;
  size_t length = strnlen(text, sizeof(error.text) - 1);
  std::memcpy(error.text, text, length);
  error.text[length] = 0;
  s.pending_errors = s.num_errors;
}

int64_t take_stream_error(int64_t engine, char* text, int64_t size) noexcept {
  State& s = state();
  if (s.pending_errors.load() == 0) return 0;
  std::lock_guard<std::mutex> lock(s.mutex);
  int64_t found = 0;
  int first = -1;
  for (int i = 0; i < s.num_errors; ++i) {
    if (engine != 0 && s.errors[i].engine != 0 && s.errors[i].engine != engine) continue;
    if (first < 0) first = i;
    ++found;
  }
  if (first < 0) return 0;
  if (size > 0) {
    size_t length = strnlen(s.errors[first].text, size - 1);
    std::memcpy(text, s.errors[first].text, length);
    text[length] = 0;
  }
  for (int i = first; i + 1 < s.num_errors; ++i) s.errors[i] = s.errors[i + 1];
  --s.num_errors;
  found += s.lost_errors;
  if (s.num_errors == 0) s.lost_errors = 0;
  s.pending_errors = s.num_errors;
  return found;
}

}  // namespace moe_ops::engine
