// What the files of the engine share. Nothing outside this folder includes it.
#pragma once
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "engine/engine.h"

namespace moe_ops::engine {

struct Engine;

// One entry of an engine's FIFO.
struct Item {
  Item* next = nullptr;
  bool is_task = false;
};

struct Job : Item {
  enum State { kIdle, kQueued, kRunning, kDone, kFailed };
  State state = kIdle;
  bool deferred = false, empty = false, claimed = false, abandoned = false;
  int64_t ticket = 0;
  Submission* owner = nullptr;
  Job* chain = nullptr;  // hash bucket
  int64_t queued_ns = 0, start_ns = 0, end_ns = 0, sync_ns = 0, woken_ns = 0;
  uint64_t trace_index = 0;  // of its event, once it has run
  char error[320] = "";
};

struct Task : Item {
  const std::function<void()>* run = nullptr;
  std::exception_ptr error;
  bool done = false, cancelled = false;
};

struct Submission {
  Geometry geometry{};
  Origin origin = Origin::kHost;
  unsigned char* block = nullptr;
  size_t capacity = 0;
  void* hidden_states = nullptr;
  float* topk_weights = nullptr;
  int64_t *topk_ids = nullptr, *deferred_ids = nullptr;
  float *output = nullptr, *deferred_output = nullptr;
  Job now, later;
  int64_t submit_ns = 0;
  int live_jobs = 0;
  std::shared_ptr<Engine> engine;
  std::shared_ptr<Experts> experts;
  char name[64] = "";
  Arena* arena = nullptr;        // null: the process-wide pool
  bool counts_as_eager = false;  // one of the bounded eager submissions of streams
  Submission* next = nullptr;    // free list
};

struct Named {
  std::string name;  // "engine/experts"
  std::shared_ptr<Experts> experts;
  std::shared_ptr<Engine> engine;
};

class Pools;

struct Engine {
  int64_t id = 0;
  std::string name;
  ThreadPlan plan;
  int64_t max_jobs = 0;
  uint64_t generation = 0;  // fork generation of its birth
  std::unique_ptr<Pools> pools;
  std::thread dispatcher;
  std::condition_variable work;
  Item *head = nullptr, *tail = nullptr;
  int64_t depth = 0;
  bool held = false, stop = false, closed = false, busy = false, repeatable = false;
  Stats stats{};
  std::vector<TraceEvent> trace;             // ring
  uint64_t traced = 0;                       // events so far
  std::vector<std::vector<float>> partials;  // dispatcher only
};

// A submit on a stream whose tickets the device mints: the numbers from its key in State::announced on are its own.
// A job is registered by the host function of its submit, or by whoever comes with a ticket before that has run: the
// ticket is only there once the inputs are.
struct Announced {
  int64_t count;
  const void* line;  // calls of one line are registered in the order of their numbers; null: in any
  void* call;        // of c_api.cpp
};

struct StreamError {
  int64_t engine;
  char text[400];
};

// Everything below is guarded by `mutex`, except the atomics. Never destroyed: callbacks may outlive static
// destruction.
struct State {
  std::mutex mutex;
  std::condition_variable done;      // a job, a task or an engine changed state
  std::condition_variable released;  // a submission went back
  std::atomic<uint64_t> generation{0};
  std::unordered_map<int64_t, std::shared_ptr<Engine>> engines;
  std::unordered_map<int64_t, Named> experts;
  int64_t next_engine = 1;
  int64_t next_ticket = 1;
  std::map<int64_t, Announced> announced;  // by first number
  int64_t repeatable_engines = 0;
  static constexpr size_t kBuckets = 4096;
  Job* jobs[kBuckets] = {};
  static constexpr int kClasses = 48;
  Submission* free[kClasses] = {};  // by power of two of the capacity
  size_t free_bytes = 0;
  int64_t eager_in_flight = 0, syncs_in_flight = 0;
  static constexpr int kErrors = 16;
  StreamError errors[kErrors];
  int num_errors = 0;
  int64_t lost_errors = 0;
  std::atomic<int> pending_errors{0};
  std::atomic<bool> synchronous{false};
  std::atomic<void (*)(const char*)> range_push{nullptr};
  std::atomic<void (*)()> range_pop{nullptr};
};
State& state();

constexpr int64_t kTicketMagic = 0x4D54;
constexpr int64_t kHandleMagic = 0x4D45;

// All of these expect state().mutex to be held.
Job* find_job(int64_t ticket);
Job* find_or_register(int64_t ticket, std::unique_lock<std::mutex>& lock) noexcept;  // lets go of the lock meanwhile
void insert_job(Job* job);
void erase_job(Job* job);
void release_locked(Job* job) noexcept;
void forget_locked(Job* job) noexcept;  // frees a job that nobody will sync, and counts it
bool stale(const Engine& engine);       // born before a fork
Submission* acquire_locked(const Geometry& geometry);
void recycle_locked(Submission* submission) noexcept;
void lay_out(Submission* submission, const Geometry& geometry);
size_t bytes_needed(const Geometry& geometry);

}  // namespace moe_ops::engine
