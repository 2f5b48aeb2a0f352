// Jobs: minted by submit, named by their ticket, taken once by a sync.
#include <cstdio>
#include <stdexcept>

#include "engine/deferral.h"
#include "engine/doorbells.h"
#include "engine/state.h"

namespace moe_ops::engine {
namespace {

std::string hex(int64_t value) {
  char text[32];
  std::snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

void enqueue_locked(Engine& engine, Job* job) {
  job->state = Job::kQueued;
  job->queued_ns = now_ns();
  (engine.tail ? engine.tail->next : engine.head) = job;
  engine.tail = job;
  ++engine.depth;
  if (engine.depth > engine.stats.max_queue_depth) engine.stats.max_queue_depth = engine.depth;
  engine.work.notify_one();
}

void reset(Job& job, Submission* owner, bool deferred) {
  job.next = job.chain = nullptr;
  job.is_task = false;
  job.state = Job::kIdle;
  job.deferred = deferred;
  job.empty = job.claimed = job.abandoned = false;
  job.ticket = 0;
  job.owner = owner;
  job.queued_ns = job.start_ns = job.end_ns = job.sync_ns = job.woken_ns = 0;
  job.error[0] = 0;
}

constexpr int64_t kRepeatable = int64_t{1} << 47;  // numbers that next_ticket never reaches

void mint_locked(Job& job, int64_t given) {
  Engine* engine = job.owner->engine.get();
  int64_t number = 0;
  if (!given && engine && engine->repeatable) {
    number = kRepeatable + 2 * engine->id + job.deferred;
    Job* replaced = find_job((kTicketMagic << 48) | number);
    if (replaced && !replaced->claimed && !replaced->abandoned) {
      if (replaced->state == Job::kRunning) number = 0;  // abandoned: it keeps its number until it has run
      forget_locked(replaced);
    }
  }
  job.ticket = given ? given : (kTicketMagic << 48) | (number ? number : state().next_ticket++);
  ++job.owner->live_jobs;
  insert_job(&job);
}

// Why no job has this ticket. Writes into a fixed buffer: callbacks use it.
void explain_missing(int64_t ticket, char* text, size_t size) {
  if ((ticket >> 48) != kTicketMagic)
    std::snprintf(text, size, "a ticket of cpu_moe_submit, got 0x%llx", static_cast<unsigned long long>(ticket));
  else if ((ticket & 0xFFFFFFFFFFFF) >= state().next_ticket)
    std::snprintf(text, size, "a ticket of this process, got 0x%llx", static_cast<unsigned long long>(ticket));
  else
    std::snprintf(text, size, "a ticket that no sync has taken, got 0x%llx, which was taken, discarded or freed",
                  static_cast<unsigned long long>(ticket));
}

// "engine/experts job 0x..." for messages.
void describe(const Job& job, char* text, size_t size) {
  std::snprintf(text, size, "job 0x%llx of '%s'", static_cast<unsigned long long>(job.ticket), job.owner->name);
}

}  // namespace

std::shared_ptr<Experts> find_experts(int64_t handle, const char* op) {
  std::lock_guard<std::mutex> lock(state().mutex);
  auto found = state().experts.find(handle);
  if (found == state().experts.end())
    throw std::invalid_argument(std::string(op) +
                                ": engine must be the handle of experts in a living CpuMoeEngine, got " + hex(handle));
  if (stale(*found->second.engine))
    throw std::runtime_error(std::string(op) + ": engine '" + found->second.engine->name +
                             "' was created before fork(); create it again in the child process");
  return found->second.experts;
}

void check_submit(int64_t handle, int64_t hidden_size) {
  std::shared_ptr<Experts> experts = find_experts(handle, "cpu_moe_submit");
  std::lock_guard<std::mutex> lock(state().mutex);
  auto found = state().experts.find(handle);
  if (found == state().experts.end() || found->second.engine->closed)
    throw std::runtime_error("cpu_moe_submit: the engine is closed");
  Engine& engine = *found->second.engine;
  if (experts->hidden_size != hidden_size)
    throw std::invalid_argument("cpu_moe_submit: hidden_states must be [num_tokens, " +
                                std::to_string(experts->hidden_size) + "] for '" + found->second.name +
                                "', got a width of " + std::to_string(hidden_size));
  if (engine.stats.outstanding >= engine.max_jobs)
    throw std::runtime_error("cpu_moe_submit: engine '" + engine.name + "' has " +
                             std::to_string(engine.stats.outstanding) +
                             " jobs whose tickets were never synced (max_jobs); sync them, or free them with "
                             "CpuMoeEngine.discard_unsynced()");
}

Tickets submit(Submission* submission, int64_t handle, Origin origin, const Tickets* given) noexcept {
  State& s = state();
  const Geometry& g = submission->geometry;
  if (submission->submit_ns == 0) submission->submit_ns = now_ns();
  reset(submission->now, submission, false);
  reset(submission->later, submission, true);
  submission->live_jobs = 0;
  submission->origin = origin;
  const char* failure = nullptr;
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    auto found = s.experts.find(handle);
    if (found == s.experts.end()) {
      failure = "engine is not the handle of experts in a living CpuMoeEngine";
      std::snprintf(submission->name, sizeof(submission->name), "handle 0x%llx",
                    static_cast<unsigned long long>(handle));
    } else {
      submission->experts = found->second.experts;
      submission->engine = found->second.engine;
      std::snprintf(submission->name, sizeof(submission->name), "%s", found->second.name.c_str());
      if (stale(*submission->engine)) failure = "the engine was created before fork()";
      if (submission->experts->hidden_size != g.hidden_size) failure = "hidden_states has not the width of the experts";
    }
  }
  Split split{false, false};
  if (!failure)
    split = split_deferred(submission->topk_ids, submission->topk_weights, g.num_tokens, g.top_k,
                           submission->experts->num_experts, given && !given->deferred ? 0 : g.max_deferred,
                           submission->topk_ids, submission->deferred_ids);

  std::lock_guard<std::mutex> lock(s.mutex);
  Job &now = submission->now, &later = submission->later;
  // The device counts an id past the last expert as work to defer: then the deferred job is one of no work.
  const bool has_later = split.any_deferred || (given && given->deferred);
  mint_locked(now, given ? given->ticket : 0);
  if (has_later) mint_locked(later, given ? given->deferred : 0);
  if (has_later && !split.any_deferred) {
    later.state = Job::kDone;
    later.empty = true;
  }
  Tickets tickets{now.ticket, later.ticket};
  if (failure) {
    now.state = Job::kFailed;
    std::snprintf(now.error, sizeof(now.error), "%s", failure);
    submission->experts.reset();
    submission->engine.reset();
    s.done.notify_all();
    return tickets;
  }
  Engine& engine = *submission->engine;
  engine.stats.submitted += has_later ? 2 : 1;
  engine.stats.outstanding += 1;
  engine.stats.bytes_in += g.num_tokens * (g.hidden_size * element_size(g.element) + g.top_k * 12);
  if (has_later) {
    ++engine.stats.deferred;
    ++engine.stats.deferred_untaken;
    if (later.empty) ++engine.stats.completed;
  }
  if (engine.closed) {
    for (Job* job : {&now, &later}) {
      if (!job->ticket || job->empty) continue;
      job->state = Job::kFailed;
      std::snprintf(job->error, sizeof(job->error), "the engine is closed");
      ++engine.stats.cancelled;
    }
    submission->experts.reset();
    return tickets;
  }
  if (split.any_immediate) {
    enqueue_locked(engine, &now);
  } else {
    // Nothing to compute: the part is 0 and need not wait for its turn.
    now.state = Job::kDone;
    now.empty = true;
    ++engine.stats.completed;
    if (!split.any_deferred) submission->experts.reset();
    s.done.notify_all();
  }
  if (split.any_deferred) enqueue_locked(engine, &later);
  return tickets;
}

void check_ticket(int64_t ticket, int64_t num_tokens, int64_t hidden_size, const char* argument) {
  std::lock_guard<std::mutex> lock(state().mutex);
  Job* job = find_job(ticket);
  if (!job || job->claimed || job->abandoned) {
    char text[200];
    explain_missing(ticket, text, sizeof(text));
    throw std::runtime_error(std::string("cpu_moe_sync: ") + argument + " must be " + text);
  }
  if (job->owner->engine && stale(*job->owner->engine))
    throw std::runtime_error("cpu_moe_sync: the job was submitted before fork()");
  const Geometry& g = job->owner->geometry;
  if (g.num_tokens != num_tokens || g.hidden_size != hidden_size)
    throw std::invalid_argument("cpu_moe_sync: device_out must be [" + std::to_string(g.num_tokens) + ", " +
                                std::to_string(g.hidden_size) + "] as the submit of " + argument + ", got [" +
                                std::to_string(num_tokens) + ", " + std::to_string(hidden_size) + "]");
}

Taken take(int64_t ticket, int64_t num_tokens, int64_t hidden_size) noexcept {
  State& s = state();
  Taken taken;
  std::unique_lock<std::mutex> lock(s.mutex);
  Job* job = find_or_register(ticket, lock);
  if (!job || job->claimed || job->abandoned) {
    char text[200];
    explain_missing(ticket, text, sizeof(text));
    std::snprintf(taken.error, sizeof(taken.error), "ticket must be %s", text);
    taken.failed = true;
    return taken;
  }
  job->claimed = true;  // a second sync of the same ticket fails from here on
  const Geometry& g = job->owner->geometry;
  std::shared_ptr<Engine> engine = job->owner->engine;
  job->sync_ns = now_ns();
  s.done.wait(lock, [&] { return job->state == Job::kDone || job->state == Job::kFailed; });
  job->woken_ns = now_ns();
  taken.job = job;
  if (engine) {
    engine->stats.sync_wait_ns += job->woken_ns - job->sync_ns;
    engine->stats.bytes_out += job->empty ? 0 : g.num_tokens * g.hidden_size * 4;
    if (job->deferred) --engine->stats.deferred_untaken;
  }
  char name[120];
  describe(*job, name, sizeof(name));
  if (g.num_tokens != num_tokens || g.hidden_size != hidden_size) {
    taken.failed = true;
    std::snprintf(taken.error, sizeof(taken.error),
                  "%s has other sizes than device_out: [%lld, %lld], not [%lld, %lld]", name,
                  static_cast<long long>(g.num_tokens), static_cast<long long>(g.hidden_size),
                  static_cast<long long>(num_tokens), static_cast<long long>(hidden_size));
  } else if (job->state == Job::kFailed) {
    taken.failed = true;
    std::snprintf(taken.error, sizeof(taken.error), "%s failed: %.180s", name, job->error);
  } else if (!job->empty) {
    taken.rows = job->deferred ? job->owner->deferred_output : job->owner->output;
  }
  return taken;
}

void release_locked(Job* job) noexcept {
  Submission* submission = job->owner;
  if (job->woken_ns && job->end_ns && submission->engine) {
    auto& trace = submission->engine->trace;
    TraceEvent& event = trace[job->trace_index % trace.size()];
    if (event.ticket == job->ticket) {  // not yet overwritten
      event.sync_ns = job->sync_ns;
      event.woken_ns = job->woken_ns;
      event.synced_ns = now_ns();
    }
  }
  erase_job(job);
  job->ticket = 0;
  job->state = Job::kIdle;
  if (--submission->live_jobs > 0) return;
  if (submission->engine) --submission->engine->stats.outstanding;
  recycle_locked(submission);
}

void release(Job* job) noexcept {
  std::lock_guard<std::mutex> lock(state().mutex);
  Engine* engine = job->owner->engine.get();
  if (engine && engine->repeatable && !engine->closed) {
    job->claimed = false;
    if (job->deferred) ++engine->stats.deferred_untaken;
    return;
  }
  release_locked(job);
}

void forget_locked(Job* job) noexcept {
  Engine* engine = job->owner->engine.get();
  if (engine) {
    ++engine->stats.never_synced;
    if (job->deferred) --engine->stats.deferred_untaken;
  }
  if (job->state == Job::kQueued && engine) {
    Item* before = nullptr;
    for (Item** link = &engine->head; *link; before = *link, link = &(*link)->next) {
      if (*link != job) continue;
      *link = job->next;
      if (engine->tail == job) engine->tail = before;
      job->next = nullptr;
      --engine->depth;
      ++engine->stats.cancelled;
      break;
    }
  } else if (job->state == Job::kRunning) {
    job->abandoned = true;  // freed by the dispatcher
    return;
  }
  release_locked(job);
}

int64_t discard_unsynced(int64_t id) {
  settle_rung();
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  int64_t freed = 0;
  for (Job*& first : s.jobs) {
    for (Job* job = first; job;) {
      Job* following = job->chain;
      bool mine = job->owner->engine && job->owner->engine->id == id;
      if (mine && !job->claimed && !job->abandoned) {
        forget_locked(job);
        ++freed;
      }
      job = following;
    }
  }
  s.done.notify_all();
  return freed;
}

void discard(int64_t ticket) {
  std::unique_lock<std::mutex> lock(state().mutex);
  Job* job = find_or_register(ticket, lock);
  if (!job || job->claimed || job->abandoned) {
    char text[200];
    explain_missing(ticket, text, sizeof(text));
    throw std::runtime_error(std::string("CpuMoeEngine.discard: ticket must be ") + text);
  }
  forget_locked(job);
  state().done.notify_all();
}

bool is_done(int64_t ticket) {
  std::lock_guard<std::mutex> lock(state().mutex);
  Job* job = find_job(ticket);
  return !job || job->state == Job::kDone || job->state == Job::kFailed;
}

void wait_done(int64_t ticket) noexcept {
  State& s = state();
  std::unique_lock<std::mutex> lock(s.mutex);
  s.done.wait(lock, [&] {
    Job* job = find_job(ticket);
    return !job || job->state == Job::kDone || job->state == Job::kFailed;
  });
}

int64_t engine_of_job(const Job* job) noexcept {
  std::lock_guard<std::mutex> lock(state().mutex);
  return job->owner->engine ? job->owner->engine->id : 0;
}

void throw_stream_errors(int64_t engine, const char* op) {
  char text[400];
  int64_t found = take_stream_error(engine, text, sizeof(text));
  if (found == 0) return;
  std::string more = found > 1 ? " (and " + std::to_string(found - 1) + " more)" : "";
  throw std::runtime_error(std::string(op) + ": an earlier call on a stream failed: " + text + more);
}

}  // namespace moe_ops::engine
