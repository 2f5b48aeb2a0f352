// The asynchronous CPU-expert engine: torch-free and device-free.
//
// An engine is a FIFO, one dispatcher thread and a team of threads per NUMA pool. Experts are registered with it under
// a name, which gives them their handle. A submission is a block of memory that holds a copy of one call's inputs and
// room for its results; it carries one job, or two where slots are deferred. A job is named by its ticket, a plain
// number that travels through device memory.
//
//   acquire (host, may allocate) -> fill the block -> submit (any thread) -> [engine thread runs it] -> take -> add
//   rows -> release
//
// Everything marked noexcept is legal inside a host function of a device stream: no allocation, no device call, no GIL.
// One mutex guards all states; it is held for microseconds and never while an expert runs.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/topology.h"

namespace moe_ops {
class ThreadTeam;
}

namespace moe_ops::engine {

// Element types of activations, numbered as in c_api.h.
enum class Element : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };
inline int64_t element_size(Element element) { return element == Element::kFloat32 ? 4 : 2; }

struct Batch {
  int64_t num_tokens, top_k, hidden_size;
  Element element;
  const void* hidden_states;  // [T, H] contiguous
  const int64_t* topk_ids;    // [T, K] -1: no expert
  const float* topk_weights;  // [T, K]
  float* output;              // [T, H]
};

// What a job runs. The engine knows nothing else of a kernel or of weights.
class Experts {
 public:
  Experts(int64_t num_experts, int64_t hidden_size) : num_experts(num_experts), hidden_size(hidden_size) {}
  virtual ~Experts() = default;
  // Throws if this batch cannot be run (an id whose expert is not here). Called once per job, before run.
  virtual void check(const Batch&) const {}
  // Writes every row of batch.output, the part of pool `pool`; the parts are added in pool order. Called on every pool
  // at once. May throw.
  virtual void run(int pool, const Batch& batch, ThreadTeam& team) = 0;
  const int64_t num_experts, hidden_size;
  std::atomic<int> failures_to_inject{0};  // tests: that many jobs throw instead of running
};

struct EngineOptions {
  std::string name;
  PlanRequest plan;
  int64_t max_jobs = 256;  // submissions of CPU tensors whose tickets nobody has synced
};

struct Stats {
  int64_t submitted, completed, failed,
      cancelled;         // jobs; cancelled ones were still queued when discarded or when the engine closed
  int64_t never_synced;  // jobs freed without a sync
  int64_t deferred, deferred_untaken;  // deferred jobs so far, and those that no sync has taken yet
  int64_t queue_depth, max_queue_depth, outstanding;
  int64_t busy_ns, sync_wait_ns, queue_wait_ns;
  int64_t bytes_in, bytes_out;
};

// Times of the steady clock. The last three are 0 while no sync has taken the job.
struct TraceEvent {
  int64_t ticket;
  int64_t submit_ns, queued_ns;          // the host's part of submit began; the job was in the queue
  int64_t start_ns, end_ns;              // it ran
  int64_t sync_ns, woken_ns, synced_ns;  // the host's part of sync began to wait, had the job, had passed its rows on
  int64_t num_tokens;
  bool deferred;
  char name[48];
};

// Engines and experts. These run on host threads, may throw std::invalid_argument (arguments) and std::runtime_error
// (state).
int64_t create_engine(const EngineOptions& options);  // id > 0
void close_engine(int64_t engine, bool drain);        // idempotent; cancels what is queued unless drain
void close_all_engines();
ThreadPlan engine_plan(int64_t engine);
int64_t add_experts(int64_t engine, const std::string& name, std::shared_ptr<Experts> experts);
void remove_experts(int64_t handle, int64_t engine);  // does nothing if the handle has become another engine's
std::shared_ptr<Experts> find_experts(int64_t handle, const char* op);
int64_t find_engine(int64_t handle);                   // 0 if unknown
int64_t handle_of(const std::string& qualified_name);  // of "engine/experts", whether or not it exists
// Runs in FIFO order on the dispatcher, waits, and rethrows. For changes of weights between jobs.
void run_task(int64_t engine, const std::function<void()>& task);
void run_on_pools(int64_t engine, const std::function<void(int pool)>& part);  // run_task, once on each pool
void wait_idle(int64_t engine);
// Tickets of the engine become two constants, each good for any number of syncs until the next submit replaces its job:
// for checkers that call an op several times with the same arguments and compare (opcheck).
void set_repeatable(int64_t engine, bool on);
void hold_engine(int64_t engine, bool held);  // a held engine queues jobs and starts none
Stats engine_stats(int64_t engine);
std::vector<TraceEvent> engine_trace(int64_t engine);
int64_t discard_unsynced(int64_t engine);  // number of jobs freed
void discard(int64_t ticket);
int64_t now_ns();                         // the clock of all times here
bool is_done(int64_t ticket);             // also where the ticket names nothing
void wait_done(int64_t ticket) noexcept;  // without taking it

bool synchronous();
void set_synchronous(bool on);
// Called around each job on the dispatcher with the job's name (profiler ranges). Null to remove.
void set_range_hooks(void (*push)(const char*), void (*pop)());

// Submissions.
struct Submission;
class Arena;
struct Geometry {
  int64_t num_tokens, top_k, hidden_size;
  Element element;
  int64_t max_deferred;
};
enum class Origin { kHost, kStream };

// Host: reserves a submission, growing the pool where needed.
Submission* acquire(const Geometry& geometry);
void* hidden_states_of(Submission*);
int64_t* topk_ids_of(Submission*);
float* topk_weights_of(Submission*);
void began(Submission*, int64_t submit_ns) noexcept;  // for the trace; else submit() notes its own start
void give_back(Submission*) noexcept;                 // one that was never submitted

struct Tickets {
  int64_t ticket, deferred;
};
// Enqueues. For kHost the caller has checked the handle and the limit (check_submit); a handle that is bad at this
// point makes a job that fails.
// With `given`, the tickets are those (deferred 0: nothing may be deferred); else submit mints them.
Tickets submit(Submission*, int64_t handle, Origin, const Tickets* given = nullptr) noexcept;
void check_submit(int64_t handle,
                  int64_t hidden_size);  // throws: unknown handle, wrong width, closed, forked, too many outstanding

// Takes the job of a ticket, waiting for it; a ticket can be taken once. On failure `job` is null, or failed with its
// text in `error`.
struct Job;
struct Taken {
  Job* job = nullptr;           // release() it
  const float* rows = nullptr;  // [T, H]; null where no expert was left (all rows 0)
  bool failed = false;
  char error[320] = "";
};
// A look before taking: throws std::invalid_argument / std::runtime_error if the ticket is bad or the shape differs.
void check_ticket(int64_t ticket, int64_t num_tokens, int64_t hidden_size, const char* argument);
Taken take(int64_t ticket, int64_t num_tokens, int64_t hidden_size) noexcept;
void release(Job*) noexcept;

// Errors of jobs on streams, kept until somebody asks. handle 0: any engine's.
void report_stream_error(int64_t engine, const char* text) noexcept;
int64_t take_stream_error(int64_t engine, char* text, int64_t size) noexcept;
int64_t engine_of_job(const Job*) noexcept;
void throw_stream_errors(int64_t engine, const char* op);  // engine 0: any

}  // namespace moe_ops::engine
