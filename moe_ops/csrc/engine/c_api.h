// C interface of the engine, for stream runtimes that are driven from outside C++ (ctypes, ACL callbacks) and for the
// CUDA coupling.
//
// A stream couples to the engine with two host functions:
//
//   submit:  [device -> staging copies]  host function moe_ops_submit_call_run(call)  [staging -> ticket tensors
//   copies] sync:    [ticket tensors -> staging copies]  host function moe_ops_sync_call_run(call)  [staging -> device
//   copy of output]
//
// One-shot calls can do without the driver's host functions: moe_ops_call_when_rung, below.
//
// `call` objects are created on the host while the operator runs. They point into staging memory of the caller (pinned,
// laid out as it likes), which must stay valid until the copies that follow the host function have completed; for a
// captured graph, as long as the graph. The host functions read and write that memory and nothing else of the caller.
// They never throw, never allocate, never take the GIL and call no device runtime, so they are legal inside
// cudaLaunchHostFunc, aclrtLaunchHostFunc and aclrtLaunchCallback. submit only enqueues. sync blocks until the job that
// the ticket names has run; it never waits for another callback.
//
// Eager and captured calls:
//   - arena == NULL: a one-shot call. Its host function frees it. A call whose launch failed is freed with
//   moe_ops_call_destroy.
//   - arena != NULL: a call of a captured graph. It may run any number of times (each run of a submit mints a fresh
//   ticket). The graph owns the
//     arena: destroy it (moe_ops_arena_destroy, legal in a destroy callback) when the graph dies; that frees its calls
//     and its jobs. Calls of one arena must be created in the order in which the graph will run them; streams that run
//     in parallel inside one graph need moe_ops_arena_set_parallel.
//
// Failure: a create function returns NULL and moe_ops_last_error() of the same thread says why. A job that fails on a
// stream gives NaN rows in its sync and leaves an error that moe_ops_take_error hands out; the next operator call must
// raise it.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MOE_OPS_ENGINE_ABI 1
#define MOE_OPS_EXPORT __attribute__((visibility("default")))

// Element types of hidden_states.
enum { MOE_OPS_FLOAT32 = 0, MOE_OPS_BFLOAT16 = 1, MOE_OPS_FLOAT16 = 2 };

// MOE_OPS_ENGINE_ABI of the library that is loaded.
MOE_OPS_EXPORT int64_t moe_ops_engine_abi(void);

// Text of this thread's last failed create call; "" if there was none.
MOE_OPS_EXPORT const char* moe_ops_last_error(void);

// What the captured calls of one graph share. set_parallel: calls may run in another order than that of their creation.
MOE_OPS_EXPORT void* moe_ops_arena_create(void);
MOE_OPS_EXPORT void moe_ops_arena_set_parallel(void* arena);
MOE_OPS_EXPORT void moe_ops_arena_destroy(void* arena);
// Writes 1 to *flag: a destroy callback for callers that cannot be called back themselves and look at the flag later.
MOE_OPS_EXPORT void moe_ops_set_flag(int64_t* flag);

// handle:        [1]     the int64 of the `engine` tensor
// hidden_states: [T, H]  contiguous, of the given element type
// topk_ids:      [T, K]  contiguous; values outside [0, E) mean no expert
// topk_weights:  [T, K]  contiguous
// tickets:       [2]     written by the host function: {ticket, deferred ticket or 0}
// Blocks while the documented number of eager jobs is in flight and syncs that will free some are under way.
MOE_OPS_EXPORT void* moe_ops_submit_call_create(void* arena, int64_t num_tokens, int64_t top_k, int64_t hidden_size,
                                                int64_t dtype, int64_t max_deferred, const int64_t* handle,
                                                const void* hidden_states, const int64_t* topk_ids,
                                                const float* topk_weights, int64_t* tickets);

// Lets the device mint the call's tickets, so that nothing on the stream has to wait for the host function. Returns the
// first ticket of the call, or 0 where tickets must come from the host (engines with repeatable ones). Run n of the
// call has the ticket first + 2 n and the deferred one after it; n is taken modulo MOE_OPS_TICKET_RUNS, and is 0 for a
// one-shot call. Whoever fills the staging memory puts both into `tickets` before any of them can reach a sync, the
// deferred one as 0 if max_deferred is 0 or no id is >= 0. The host function only reads them; it may run beside what
// follows on the stream, but staging must not be filled again before it has ended. A sync that comes with a ticket
// first does its work. *done (may be NULL) becomes 1 when staging is no longer needed. Calls of one `line` (a stream;
// NULL for calls of an arena) keep their order.
#define MOE_OPS_TICKET_RUNS (int64_t{1} << 24)
MOE_OPS_EXPORT int64_t moe_ops_submit_call_mint(void* call, const void* line, int64_t* done);

// tickets: [2]    read by the host function: {ticket, deferred ticket or 0}
// with_deferred: whether the caller passed a deferred ticket (its value may still be 0)
// output:  [T, H] written by the host function: this job's rows plus the deferred job's rows; NaN where a job failed
MOE_OPS_EXPORT void* moe_ops_sync_call_create(void* arena, int64_t num_tokens, int64_t hidden_size,
                                              const int64_t* tickets, int64_t with_deferred, float* output);

// The host functions. The signature is that of cudaHostFn_t and aclrtHostFunc / aclrtCallback.
MOE_OPS_EXPORT void moe_ops_submit_call_run(void* call);
MOE_OPS_EXPORT void moe_ops_sync_call_run(void* call);

// Instead of a host function, for one-shot calls: a thread of the library runs the call once the device has set *rung,
// and then sets *answered (may be NULL) for a kernel that waits for it. Both words are 0 before. A sync is run when its
// job has ended, so that no call waits for another one's. moe_ops_watch_words comes first: 0 where there can be no such
// thread, and moe_ops_last_error() says why.
MOE_OPS_EXPORT int64_t moe_ops_watch_words(void);
MOE_OPS_EXPORT void moe_ops_call_when_rung(void* call, const int64_t* rung, int64_t* answered);

// Frees a one-shot call that never ran. Calls of an arena are freed with it.
MOE_OPS_EXPORT void moe_ops_call_destroy(void* call);

// Copies the oldest unreported stream error (0 terminated, truncated to size) and forgets it. handle = 0 takes any
// engine's; otherwise only errors of the engine that serves this handle, and those that belong to no engine. Returns
// the number of errors found before the call, 0 if none.
MOE_OPS_EXPORT int64_t moe_ops_take_error(int64_t handle, char* text, int64_t size);

// 1 while MOE_OPS_SYNC (or moe_ops.engine.set_synchronous) forces synchronous operation: wait for the stream on the
// host, call the two run functions directly, and refuse inside a capture.
MOE_OPS_EXPORT int64_t moe_ops_synchronous(void);
// Host: waits until the job of a ticket has run, without taking it. For synchronous operation.
MOE_OPS_EXPORT void moe_ops_wait_ticket(int64_t ticket);

// Called around each job on the engine's thread with the name of its experts (profiler ranges). Null to remove.
MOE_OPS_EXPORT void moe_ops_set_range_hooks(void (*push)(const char*), void (*pop)(void));

// Raises nothing: 1 if the handle names experts of a living engine with this hidden size, 0 if it names none, -1 if the
// hidden size differs.
MOE_OPS_EXPORT int64_t moe_ops_check_handle(int64_t handle, int64_t hidden_size);

#ifdef __cplusplus
}
#endif
