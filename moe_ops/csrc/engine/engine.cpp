// Engines: their life, their FIFO and their dispatcher.
#include <pthread.h>

#include <algorithm>
#include <stdexcept>

#include "engine/doorbells.h"
#include "engine/pools.h"
#include "engine/state.h"

namespace moe_ops::engine {
namespace {

constexpr size_t kTraceEvents = 1024;

std::shared_ptr<Engine> engine_locked(int64_t id) {
  auto found = state().engines.find(id);
  if (found == state().engines.end()) throw std::runtime_error("CpuMoeEngine: the engine is closed");
  if (stale(*found->second))
    throw std::runtime_error("CpuMoeEngine: engine '" + found->second->name +
                             "' was created before fork(); create it again in the child process");
  return found->second;
}

struct PoolRun {
  Engine* engine;
  Experts* experts;
  Batch batch;
};

// One pool writes into the job's output, the others into buffers of the dispatcher, which are then added in pool order:
// the same bits whichever pool finishes first.
void run_batch(Engine& engine, Experts& experts, const Batch& batch) {
  size_t elements = static_cast<size_t>(batch.num_tokens) * batch.hidden_size;
  size_t others = engine.pools->size() - 1;
  engine.partials.resize(others);
  for (auto& partial : engine.partials)
    if (partial.size() < elements) partial.resize(elements);
  PoolRun run{&engine, &experts, batch};
  engine.pools->run(
      [](void* context, int pool, ThreadTeam& team) {
        auto& run = *static_cast<PoolRun*>(context);
        Batch part = run.batch;
        if (pool > 0) part.output = run.engine->partials[pool - 1].data();
        run.experts->run(pool, part, team);
      },
      &run);
  for (auto& partial : engine.partials)
    for (size_t i = 0; i < elements; ++i) batch.output[i] += partial[i];
}

void copy_text(char* to, size_t size, const char* from) {
  size_t length = strnlen(from, size - 1);
  std::memcpy(to, from, length);
  to[length] = 0;
}

bool inject_failure(Experts& experts) {
  int left = experts.failures_to_inject.load();
  while (left > 0 && !experts.failures_to_inject.compare_exchange_weak(left, left - 1)) {
  }
  return left > 0;
}

// Runs one job without the lock. Returns whether it succeeded.
bool run_job(Engine& engine, Job& job) {
  Submission& submission = *job.owner;
  const Geometry& g = submission.geometry;
  Batch batch{g.num_tokens,
              g.top_k,
              g.hidden_size,
              g.element,
              submission.hidden_states,
              job.deferred ? submission.deferred_ids : submission.topk_ids,
              submission.topk_weights,
              job.deferred ? submission.deferred_output : submission.output};
  auto push = state().range_push.load();
  if (push) push(submission.name);
  bool ok = true;
  try {
    if (inject_failure(*submission.experts)) throw std::runtime_error("injected failure");
    submission.experts->check(batch);
    run_batch(engine, *submission.experts, batch);
  } catch (const std::exception& error) {
    ok = false;
    copy_text(job.error, sizeof(job.error), error.what());
  } catch (...) {
    ok = false;
    copy_text(job.error, sizeof(job.error), "unknown exception");
  }
  if (auto pop = state().range_pop.load()) pop();
  return ok;
}

void record(Engine& engine, Job& job) {
  job.trace_index = engine.traced++;
  TraceEvent& event = engine.trace[job.trace_index % kTraceEvents];
  event = TraceEvent{};
  event.ticket = job.ticket;
  event.submit_ns = job.owner->submit_ns;
  event.queued_ns = job.queued_ns;
  event.start_ns = job.start_ns;
  event.end_ns = job.end_ns;
  event.num_tokens = job.owner->geometry.num_tokens;
  event.deferred = job.deferred;
  copy_text(event.name, sizeof(event.name), job.owner->name);
}

void finish_job(Engine& engine, Job* job, bool ok) {
  job->end_ns = now_ns();
  engine.stats.busy_ns += job->end_ns - job->start_ns;
  engine.stats.queue_wait_ns += job->start_ns - job->queued_ns;
  ++(ok ? engine.stats.completed : engine.stats.failed);
  record(engine, *job);
  job->state = ok ? Job::kDone : Job::kFailed;
  if (job->abandoned) release_locked(job);
}

void dispatch(const std::shared_ptr<Engine>& self) {
  Engine& engine = *self;
  State& s = state();
  pthread_setname_np(pthread_self(), kThreadName);  // its team inherits the name
  engine.pools->adopt_caller();
  std::unique_lock<std::mutex> lock(s.mutex);
  for (;;) {
    engine.work.wait(lock, [&] { return engine.stop || (engine.head && !engine.held); });
    if (engine.stop && !engine.head) break;
    Item* item = engine.head;
    engine.head = item->next;
    if (!engine.head) engine.tail = nullptr;
    item->next = nullptr;
    --engine.depth;
    engine.busy = true;
    if (item->is_task) {
      auto* task = static_cast<Task*>(item);
      lock.unlock();
      try {
        (*task->run)();
      } catch (...) {
        task->error = std::current_exception();
      }
      lock.lock();
      task->done = true;
    } else {
      auto* job = static_cast<Job*>(item);
      job->state = Job::kRunning;
      job->start_ns = now_ns();
      // The last job of a submission hands its experts back here, so that no callback ever frees weights.
      std::shared_ptr<Experts> experts = job->owner->experts;
      bool last = job->deferred || !job->owner->later.ticket || job->owner->later.empty;
      lock.unlock();
      bool ok = run_job(engine, *job);
      lock.lock();
      if (last) job->owner->experts.reset();
      finish_job(engine, job, ok);
      lock.unlock();
      experts.reset();
      lock.lock();
    }
    engine.busy = false;
    s.done.notify_all();
  }
}

void cancel_queue_locked(Engine& engine) {
  while (Item* item = engine.head) {
    engine.head = item->next;
    --engine.depth;
    if (item->is_task) {
      auto* task = static_cast<Task*>(item);
      task->done = task->cancelled = true;
      continue;
    }
    auto* job = static_cast<Job*>(item);
    job->state = Job::kFailed;
    copy_text(job->error, sizeof(job->error), "the engine was closed before the job ran");
    ++engine.stats.cancelled;
    if (job->abandoned) release_locked(job);
  }
  engine.tail = nullptr;
}

}  // namespace

int64_t create_engine(const EngineOptions& options) {
  if (options.name.empty() || options.name.find('/') != std::string::npos || options.name.size() > 40)
    throw std::invalid_argument("CpuMoeEngine: name must be 1 to 40 characters without '/', got '" + options.name +
                                "'");
  if (options.max_jobs < 1)
    throw std::invalid_argument("CpuMoeEngine: max_jobs must be at least 1, got " + std::to_string(options.max_jobs));
  auto engine = std::make_shared<Engine>();
  engine->name = options.name;
  engine->plan = make_plan(options.plan);
  engine->max_jobs = options.max_jobs;
  engine->trace.resize(kTraceEvents);
  State& s = state();
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    engine->generation = s.generation.load();
    for (auto it = s.engines.begin(); it != s.engines.end(); ++it) {
      if (it->second->name != options.name) continue;
      if (!stale(*it->second))
        throw std::invalid_argument("CpuMoeEngine: name must be unused, got '" + options.name +
                                    "', which names a living engine");
      new std::shared_ptr<Engine>(it->second);  // its threads live in the parent process: it can only be left alone
      s.engines.erase(it);
      break;
    }
    engine->id = s.next_engine++;
    s.engines[engine->id] = engine;
  }
  try {
    engine->pools = std::make_unique<Pools>(engine->plan);
    engine->dispatcher = std::thread([engine] { dispatch(engine); });
  } catch (...) {
    std::lock_guard<std::mutex> lock(s.mutex);
    s.engines.erase(engine->id);
    throw;
  }
  return engine->id;
}

void close_engine(int64_t id, bool drain) {
  settle_rung();
  State& s = state();
  std::vector<std::shared_ptr<Experts>> dropped;
  std::shared_ptr<Engine> engine;
  {
    std::unique_lock<std::mutex> lock(s.mutex);
    auto found = s.engines.find(id);
    if (found == s.engines.end()) return;
    engine = found->second;
    if (stale(*engine)) {
      new std::shared_ptr<Engine>(engine);
      s.engines.erase(found);
      return;
    }
    if (engine->closed) return;
    engine->closed = true;  // no new work from here on
    if (drain) {
      engine->held = false;
      engine->work.notify_all();
      s.done.wait(lock, [&] { return !engine->head && !engine->busy; });
    }
    cancel_queue_locked(*engine);
    engine->stop = true;
    engine->work.notify_all();
    s.done.notify_all();
  }
  engine->dispatcher.join();  // the job that is running finishes first
  engine->pools.reset();
  std::lock_guard<std::mutex> lock(s.mutex);
  for (Job*& first : s.jobs) {
    for (Job* job = first; job;) {
      Job* following = job->chain;
      if (job->owner->engine == engine && !job->claimed) forget_locked(job);
      job = following;
    }
  }
  for (auto it = s.experts.begin(); it != s.experts.end();) {
    if (it->second.engine == engine) {
      dropped.push_back(it->second.experts);
      it = s.experts.erase(it);
    } else {
      ++it;
    }
  }
  s.engines.erase(id);
  s.done.notify_all();
}

void close_all_engines() {
  std::vector<int64_t> ids;
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    for (auto& entry : state().engines) ids.push_back(entry.first);
  }
  for (int64_t id : ids) close_engine(id, false);
}

void run_on_pools(int64_t id, const std::function<void(int)>& part) {
  std::shared_ptr<Engine> engine;
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    engine = engine_locked(id);
  }
  run_task(id, [&] {
    engine->pools->run(
        [](void* context, int pool, ThreadTeam&) { (*static_cast<const std::function<void(int)>*>(context))(pool); },
        const_cast<std::function<void(int)>*>(&part));
  });
}

ThreadPlan engine_plan(int64_t id) {
  std::lock_guard<std::mutex> lock(state().mutex);
  return engine_locked(id)->plan;
}

int64_t handle_of(const std::string& qualified_name) {
  uint64_t hash = 1469598103934665603ull;  // FNV-1a: ids must be the same in every process and build
  for (unsigned char c : qualified_name) hash = (hash ^ c) * 1099511628211ull;
  return (kHandleMagic << 48) | static_cast<int64_t>(hash & 0xFFFFFFFFFFFFull);
}

int64_t add_experts(int64_t id, const std::string& name, std::shared_ptr<Experts> experts) {
  std::lock_guard<std::mutex> lock(state().mutex);
  std::shared_ptr<Engine> engine = engine_locked(id);
  if (name.empty()) throw std::invalid_argument("CpuMoeEngine: experts name must not be empty, got ''");
  std::string qualified = engine->name + "/" + name;
  int64_t handle = handle_of(qualified);
  auto found = state().experts.find(handle);
  if (found != state().experts.end()) {
    if (!stale(*found->second.engine))
      throw std::invalid_argument("CpuMoeEngine: experts name must be unused, got '" + qualified +
                                  "', whose handle belongs to '" + found->second.name + "'");
    new Named(found->second);
  }
  state().experts[handle] = {qualified, std::move(experts), engine};
  return handle;
}

void remove_experts(int64_t handle, int64_t engine) {
  settle_rung();
  std::shared_ptr<Experts> dropped;  // destroyed after the lock is gone
  std::lock_guard<std::mutex> lock(state().mutex);
  auto found = state().experts.find(handle);
  if (found == state().experts.end() || stale(*found->second.engine) || found->second.engine->id != engine) return;
  dropped = std::move(found->second.experts);
  state().experts.erase(found);
}

int64_t find_engine(int64_t handle) {
  std::lock_guard<std::mutex> lock(state().mutex);
  auto found = state().experts.find(handle);
  return found == state().experts.end() ? 0 : found->second.engine->id;
}

void run_task(int64_t id, const std::function<void()>& task) {
  settle_rung();
  State& s = state();
  Task item;
  item.is_task = true;
  item.run = &task;
  std::unique_lock<std::mutex> lock(s.mutex);
  std::shared_ptr<Engine> engine = engine_locked(id);
  if (engine->closed) throw std::runtime_error("CpuMoeEngine: engine '" + engine->name + "' is closed");
  if (engine->held && std::this_thread::get_id() != engine->dispatcher.get_id())
    throw std::runtime_error("CpuMoeEngine: engine '" + engine->name + "' is held, so its weights cannot change");
  (engine->tail ? engine->tail->next : engine->head) = &item;
  engine->tail = &item;
  ++engine->depth;
  engine->work.notify_one();
  s.done.wait(lock, [&] { return item.done; });
  if (item.cancelled) throw std::runtime_error("CpuMoeEngine: engine '" + engine->name + "' is closed");
  if (item.error) std::rethrow_exception(item.error);
}

void wait_idle(int64_t id) {
  settle_rung();
  State& s = state();
  std::unique_lock<std::mutex> lock(s.mutex);
  std::shared_ptr<Engine> engine = engine_locked(id);
  if (engine->held && engine->head)
    throw std::runtime_error("CpuMoeEngine: engine '" + engine->name + "' is held with work queued");
  s.done.wait(lock, [&] { return engine->closed || (!engine->head && !engine->busy); });
}

void set_repeatable(int64_t id, bool on) {
  std::lock_guard<std::mutex> lock(state().mutex);
  bool& repeatable = engine_locked(id)->repeatable;
  state().repeatable_engines += on - repeatable;
  repeatable = on;
}

void hold_engine(int64_t id, bool held) {
  std::lock_guard<std::mutex> lock(state().mutex);
  std::shared_ptr<Engine> engine = engine_locked(id);
  engine->held = held;
  engine->work.notify_all();
}

Stats engine_stats(int64_t id) {
  settle_rung();
  std::lock_guard<std::mutex> lock(state().mutex);
  std::shared_ptr<Engine> engine = engine_locked(id);
  Stats stats = engine->stats;
  stats.queue_depth = engine->depth;
  return stats;
}

std::vector<TraceEvent> engine_trace(int64_t id) {
  settle_rung();
  std::lock_guard<std::mutex> lock(state().mutex);
  std::shared_ptr<Engine> engine = engine_locked(id);
  std::vector<TraceEvent> events;
  uint64_t first = engine->traced > kTraceEvents ? engine->traced - kTraceEvents : 0;
  for (uint64_t i = first; i < engine->traced; ++i) events.push_back(engine->trace[i % kTraceEvents]);
  return events;
}

}  // namespace moe_ops::engine
