// The C interface: calls that stream host functions run.
#include "engine/c_api.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <new>

#include "engine/arena.h"
#include "engine/doorbells.h"
#include "engine/state.h"

namespace moe_ops::engine {
namespace {

thread_local std::string last_error;

// `kind` comes first so that moe_ops_call_destroy can tell the two apart.
enum class Kind { kSubmit, kSync };

struct Call {
  Kind kind;
  Call* next;  // calls of an arena, freed with it
};

// Calls and blocks of one graph.
struct Graph {
  Arena* arena;
  Call* calls;
};

struct Submit : Call {
  Graph* graph;
  Geometry geometry;
  const int64_t* handle;
  const void* hidden_states;
  const int64_t* topk_ids;
  const float* topk_weights;
  int64_t* tickets;
  Submission* submission;  // reserved for a one-shot call
  int64_t previous[2];     // tickets of the last replay
  int64_t first;           // number of the first ticket; 0: minted here
  int64_t registered;      // the last ticket that has become a job
  bool running;            // one thread is registering it
  int64_t* done;
};

struct Sync : Call {
  Graph* graph;
  int64_t num_tokens, hidden_size;
  const int64_t* tickets;
  float* output;
};

// The last replay's job whose ticket nobody took: its ticket tensor is about to be overwritten, so nobody will.
void forget_previous(Submit& call) noexcept {
  std::lock_guard<std::mutex> lock(state().mutex);
  for (int64_t& ticket : call.previous) {
    Job* job = ticket ? find_job(ticket) : nullptr;
    if (job && !job->claimed && !job->abandoned) forget_locked(job);
    ticket = 0;
  }
}

Submission* pop_for_replay(Submit& call) noexcept {
  forget_previous(call);
  State& s = state();
  std::unique_lock<std::mutex> lock(s.mutex);
  // A block is only ever missing while an unsynced job of the last replay still runs, which needs no callback to end.
  Submission* submission = nullptr;
  s.released.wait(lock, [&] { return (submission = call.graph->arena->pop_locked(call.geometry)) != nullptr; });
  return submission;
}

// Copies the staged inputs and enqueues the job.
void enqueue(Submit& call) noexcept {
  const Geometry& g = call.geometry;
  const int64_t begin = now_ns();
  Submission* submission = call.graph ? pop_for_replay(call) : call.submission;
  began(submission, begin);
  if (g.num_tokens > 0) {  // staging of no tokens may be a null pointer
    const int64_t slots = g.num_tokens * g.top_k;
    std::memcpy(hidden_states_of(submission), call.hidden_states,
                g.num_tokens * g.hidden_size * element_size(g.element));
    std::memcpy(topk_ids_of(submission), call.topk_ids, slots * sizeof(int64_t));
    std::memcpy(topk_weights_of(submission), call.topk_weights, slots * sizeof(float));
  }
  Tickets tickets{call.tickets[0], call.tickets[1]};
  tickets = submit(submission, *call.handle, Origin::kStream, call.first ? &tickets : nullptr);
  call.previous[0] = tickets.ticket;
  call.previous[1] = tickets.deferred;
}

// For tickets that the device has minted: makes jobs of the staged ones. Expects that no thread is at it.
void register_locked(Submit& call, std::unique_lock<std::mutex>& lock) noexcept {
  State& s = state();
  call.running = true;
  lock.unlock();
  enqueue(call);
  lock.lock();
  call.registered = call.tickets[0];
  call.running = false;
  if (!call.graph) s.announced.erase(call.first);
  s.done.notify_all();
}

// Whether a sync of this ticket would not wait: its job has ended, or there is none and will be none.
bool ended_locked(int64_t ticket) noexcept {
  State& s = state();
  if (const Job* job = find_job(ticket)) return job->state == Job::kDone || job->state == Job::kFailed;
  auto entry = s.announced.upper_bound(ticket & 0xFFFFFFFFFFFF);
  if ((ticket >> 48) != kTicketMagic || entry == s.announced.begin()) return true;
  const auto& call = *static_cast<const Submit*>((--entry)->second.call);
  const bool staged = call.tickets[0] == ticket || call.tickets[1] == ticket;
  return !staged || call.registered == call.tickets[0];  // its submit has yet to be looked at
}

// The rows of up to two jobs. Rows that are wrong must show, even if nobody asks for the error: NaN.
void deliver(const Sync& call) noexcept {
  Taken taken[2];
  bool failed = false;
  for (int i = 0; i < 2; ++i) {
    if (i == 1 && call.tickets[1] == 0) break;
    taken[i] = take(call.tickets[i], call.num_tokens, call.hidden_size);
    if (!taken[i].failed) continue;
    failed = true;
    report_stream_error(taken[i].job ? engine_of_job(taken[i].job) : 0, taken[i].error);
  }
  const int64_t elements = call.num_tokens * call.hidden_size;
  const float *first = taken[0].rows, *second = taken[1].rows;
  if (failed) {
    for (int64_t i = 0; i < elements; ++i) call.output[i] = std::numeric_limits<float>::quiet_NaN();
  } else if (first && second) {
    for (int64_t i = 0; i < elements; ++i) call.output[i] = first[i] + second[i];
  } else if (first) {
    std::memcpy(call.output, first, elements * sizeof(float));
  } else if (second) {
    for (int64_t i = 0; i < elements; ++i) call.output[i] = 0.0f + second[i];  // -0 becomes 0, as on the CPU
  } else if (elements > 0) {
    std::memset(call.output, 0, elements * sizeof(float));
  }
  for (Taken& one : taken)
    if (one.job) release(one.job);
}

template <class T>
T* keep(T* call, Graph* graph) {
  call->graph = graph;
  if (graph) {
    call->next = graph->calls;
    graph->calls = call;
  }
  return call;
}

}  // namespace

Job* find_or_register(int64_t ticket, std::unique_lock<std::mutex>& lock) noexcept {
  State& s = state();
  for (;;) {
    if (Job* job = find_job(ticket)) return job;
    if ((ticket >> 48) != kTicketMagic) return nullptr;
    const int64_t number = ticket & 0xFFFFFFFFFFFF;
    auto entry = s.announced.upper_bound(number);
    if (entry == s.announced.begin()) return nullptr;
    --entry;
    if (number >= entry->first + entry->second.count) return nullptr;
    auto* call = static_cast<Submit*>(entry->second.call);
    const bool staged =
        call->tickets[0] == ticket || call->tickets[1] == ticket;  // else of an earlier replay, or made up
    if (!call->running && (!staged || call->registered == call->tickets[0])) return nullptr;
    // Those in front of it on its stream are staged as well; they keep their places in the queue.
    if (const void* line = entry->second.line) {
      for (auto other = s.announced.begin(); other != entry; ++other) {
        if (other->second.line != line) continue;
        auto* earlier = static_cast<Submit*>(other->second.call);
        const bool filled = (earlier->tickets[0] & 0xFFFFFFFFFFFF) == other->first;  // not of a stream that is no more
        if (!filled && !earlier->running) continue;
        call = earlier;
        break;
      }
    }
    if (call->running) {
      s.done.wait(lock);  // and look again: the call may be gone
      continue;
    }
    register_locked(*call, lock);
  }
}

}  // namespace moe_ops::engine

using namespace moe_ops::engine;

int64_t moe_ops_engine_abi(void) { return MOE_OPS_ENGINE_ABI; }

const char* moe_ops_last_error(void) { return last_error.c_str(); }

void* moe_ops_arena_create(void) {
  try {
    return new Graph{new Arena, nullptr};
  } catch (const std::exception& error) {
    last_error = error.what();
    return nullptr;
  }
}

void moe_ops_arena_set_parallel(void* arena) {
  std::lock_guard<std::mutex> lock(state().mutex);
  static_cast<Graph*>(arena)->arena->set_parallel();
}

void moe_ops_arena_destroy(void* arena) {
  if (!arena) return;
  auto* graph = static_cast<Graph*>(arena);
  while (Call* call = graph->calls) {
    graph->calls = call->next;
    if (call->kind == Kind::kSubmit) {
      forget_previous(*static_cast<Submit*>(call));
      std::lock_guard<std::mutex> lock(state().mutex);
      state().announced.erase(static_cast<Submit*>(call)->first);
      delete static_cast<Submit*>(call);
    } else {
      delete static_cast<Sync*>(call);
    }
  }
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    graph->arena->kill_locked();
  }
  delete graph;
}

void moe_ops_set_flag(int64_t* flag) { *flag = 1; }

void* moe_ops_submit_call_create(void* arena, int64_t num_tokens, int64_t top_k, int64_t hidden_size, int64_t dtype,
                                 int64_t max_deferred, const int64_t* handle, const void* hidden_states,
                                 const int64_t* topk_ids, const float* topk_weights, int64_t* tickets) {
  try {
    last_error.clear();
    auto* graph = static_cast<Graph*>(arena);
    Geometry geometry{num_tokens, top_k, hidden_size, static_cast<Element>(dtype), max_deferred};
    auto call = std::make_unique<Submit>();
    call->kind = Kind::kSubmit;
    call->geometry = geometry;
    call->handle = handle;
    call->hidden_states = hidden_states;
    call->topk_ids = topk_ids;
    call->topk_weights = topk_weights;
    call->tickets = tickets;
    if (graph) {
      std::lock_guard<std::mutex> lock(state().mutex);
      graph->arena->reserve_locked(geometry);
    } else {
      call->submission = acquire_eager(geometry);
    }
    return static_cast<Call*>(keep(call.release(), graph));
  } catch (const std::exception& error) {
    last_error = error.what();
    return nullptr;
  }
}

int64_t moe_ops_submit_call_mint(void* pointer, const void* line, int64_t* done) {
  auto* call = static_cast<Submit*>(static_cast<Call*>(pointer));
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  if (s.repeatable_engines > 0) return 0;
  const int64_t count = call->graph ? 2 * MOE_OPS_TICKET_RUNS : 2;
  call->first = s.next_ticket;
  call->done = done;
  s.next_ticket += count;
  s.announced[call->first] = {count, line, call};
  return (kTicketMagic << 48) | call->first;
}

void* moe_ops_sync_call_create(void* arena, int64_t num_tokens, int64_t hidden_size, const int64_t* tickets,
                               int64_t with_deferred, float* output) {
  try {
    last_error.clear();
    auto* graph = static_cast<Graph*>(arena);
    auto call = std::make_unique<Sync>();
    call->kind = Kind::kSync;
    call->num_tokens = num_tokens;
    call->hidden_size = hidden_size;
    call->tickets = tickets;
    call->output = output;
    std::lock_guard<std::mutex> lock(state().mutex);
    if (graph)
      graph->arena->note_sync_locked(num_tokens, hidden_size, with_deferred != 0);
    else
      ++state().syncs_in_flight;
    return static_cast<Call*>(keep(call.release(), graph));
  } catch (const std::exception& error) {
    last_error = error.what();
    return nullptr;
  }
}

void moe_ops_submit_call_run(void* pointer) {
  auto& call = *static_cast<Submit*>(static_cast<Call*>(pointer));
  if (call.first) {
    State& s = state();
    std::unique_lock<std::mutex> lock(s.mutex);
    s.done.wait(lock, [&] { return !call.running; });
    if (call.registered != call.tickets[0]) register_locked(call, lock);
  } else {
    enqueue(call);
    call.tickets[0] = call.previous[0];
    call.tickets[1] = call.previous[1];
  }
  if (call.done) __atomic_store_n(call.done, int64_t{1}, __ATOMIC_RELEASE);
  if (!call.graph) delete &call;
}

void moe_ops_sync_call_run(void* pointer) {
  auto& call = *static_cast<Sync*>(static_cast<Call*>(pointer));
  deliver(call);
  if (call.graph) return;
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    --state().syncs_in_flight;
    state().released.notify_all();
  }
  delete &call;
}

int64_t moe_ops_watch_words(void) {
  try {
    watch_words();
    return 1;
  } catch (const std::exception& error) {
    last_error = error.what();
    return 0;
  }
}

void moe_ops_call_when_rung(void* pointer, const int64_t* rung, int64_t* answered) {
  const auto ended = [](void* call) {
    const auto& sync = *static_cast<Sync*>(static_cast<Call*>(call));
    const std::lock_guard<std::mutex> lock(state().mutex);
    return ended_locked(sync.tickets[0]) && (sync.tickets[1] == 0 || ended_locked(sync.tickets[1]));
  };
  if (static_cast<Call*>(pointer)->kind == Kind::kSubmit)
    when_rung({rung, nullptr, moe_ops_submit_call_run, pointer, answered});
  else
    when_rung({rung, ended, moe_ops_sync_call_run, pointer, answered});
}

void moe_ops_call_destroy(void* pointer) {
  if (!pointer) return;
  auto* call = static_cast<Call*>(pointer);
  if (call->kind == Kind::kSubmit) {
    auto* submit_call = static_cast<Submit*>(call);
    if (submit_call->graph) return;
    {
      std::lock_guard<std::mutex> lock(state().mutex);
      state().announced.erase(submit_call->first);
    }
    give_back(submit_call->submission);
    delete submit_call;
  } else {
    auto* sync_call = static_cast<Sync*>(call);
    if (sync_call->graph) return;
    {
      std::lock_guard<std::mutex> lock(state().mutex);
      --state().syncs_in_flight;
      state().released.notify_all();
    }
    delete sync_call;
  }
}

int64_t moe_ops_take_error(int64_t handle, char* text, int64_t size) {
  return take_stream_error(handle ? find_engine(handle) : 0, text, size);
}

int64_t moe_ops_synchronous(void) { return synchronous() ? 1 : 0; }

void moe_ops_wait_ticket(int64_t ticket) { wait_done(ticket); }

void moe_ops_set_range_hooks(void (*push)(const char*), void (*pop)(void)) { set_range_hooks(push, pop); }

int64_t moe_ops_check_handle(int64_t handle, int64_t hidden_size) {
  std::lock_guard<std::mutex> lock(state().mutex);
  auto found = state().experts.find(handle);
  if (found == state().experts.end() || stale(*found->second.engine) || found->second.engine->closed) return 0;
  return found->second.experts->hidden_size == hidden_size ? 1 : -1;
}
