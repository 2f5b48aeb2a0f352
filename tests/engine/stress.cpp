// Stress of the engine without torch, for ThreadSanitizer and AddressSanitizer: random submits, syncs, cancels,
// shutdowns, injected failures, and simulated device streams with captured graphs. Every result is checked. Usage:
// stress SECONDS SEED; prints its counts, exit status 0 if all is well.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cpu/kernels/thread_team.h"
#include "engine/c_api.h"
#include "engine/doorbells.h"
#include "engine/engine.h"

using namespace moe_ops;
using namespace moe_ops::engine;

namespace {

std::atomic<long> synced{0}, failed{0}, cancelled{0}, closed{0}, replays{0}, moved{0};

#define CHECK(condition, ...)                                            \
  do {                                                                   \
    if (!(condition)) {                                                  \
      std::fprintf(stderr, "stress.cpp:%d: %s: ", __LINE__, #condition); \
      std::fprintf(stderr, __VA_ARGS__);                                 \
      std::fprintf(stderr, "\n");                                        \
      std::abort();                                                      \
    }                                                                    \
  } while (false)

// Expert e multiplies a row by (e + 1) * scale: sums are exact in float32 for the small integers used here.
class ScaleExperts : public Experts {
 public:
  ScaleExperts(int64_t num_experts, int64_t hidden_size, float scale)
      : Experts(num_experts, hidden_size), scale_(num_experts, scale) {}
  void run(int pool, const Batch& b, ThreadTeam& team) override {
    team.parallel([&](int thread, int num_threads) {
      for (int64_t t = thread; t < b.num_tokens; t += num_threads) {
        for (int64_t i = 0; i < b.hidden_size; ++i) {
          float sum = 0;
          for (int64_t k = 0; k < b.top_k; ++k) {
            int64_t e = b.topk_ids[t * b.top_k + k];
            if (e >= 0) sum += b.topk_weights[t * b.top_k + k] * (e + 1) * scale_[e];
          }
          // The pools share the work: pool 0 takes all of it, the others add 0, so that a lost part shows.
          b.output[t * b.hidden_size + i] =
              pool == 0 ? sum * static_cast<const float*>(b.hidden_states)[t * b.hidden_size + i] : 0.0f;
        }
      }
    });
  }
  void set_scale(int64_t expert, float scale) { scale_[expert] = scale; }

 private:
  std::vector<float> scale_;
};

struct Model {
  int64_t engine, handle;
  int64_t num_experts, hidden_size;
  float scale;
};

struct Inputs {
  int64_t num_tokens, top_k;
  std::vector<float> hidden, weights;
  std::vector<int64_t> ids;
  std::vector<float> expected;  // [T, H]
};

Inputs make_inputs(const Model& model, int64_t num_tokens, int64_t top_k, std::mt19937& random) {
  Inputs in{num_tokens, top_k, {}, {}, {}, {}};
  for (int64_t i = 0; i < num_tokens * model.hidden_size; ++i) in.hidden.push_back(static_cast<int>(random() % 9) - 4);
  for (int64_t i = 0; i < num_tokens * top_k; ++i) {
    in.weights.push_back(static_cast<float>(random() % 4));
    in.ids.push_back(static_cast<int64_t>(random() % (model.num_experts + 3)) - 1);  // -1, valid, and past the end
  }
  for (int64_t t = 0; t < num_tokens; ++t) {
    float sum = 0;
    for (int64_t k = 0; k < top_k; ++k) {
      int64_t e = in.ids[t * top_k + k];
      if (e >= 0 && e < model.num_experts) sum += in.weights[t * top_k + k] * (e + 1) * model.scale;
    }
    for (int64_t i = 0; i < model.hidden_size; ++i) in.expected.push_back(sum * in.hidden[t * model.hidden_size + i]);
  }
  return in;
}

struct Open {
  Tickets tickets;
  Inputs in;
};

// Takes both tickets and compares the sum. A failure is legal only where the caller injected one or closed the engine.
void finish(const Model& model, const Open& open, bool may_fail) {
  std::vector<float> sum(open.in.expected.size());
  bool bad = false;
  for (int64_t ticket : {open.tickets.ticket, open.tickets.deferred}) {
    if (!ticket) continue;
    Taken taken = take(ticket, open.in.num_tokens, model.hidden_size);
    if (taken.failed) {
      CHECK(may_fail, "%s", taken.error);
      bad = true;
    } else if (taken.rows) {
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += taken.rows[i];
    }
    if (taken.job) release(taken.job);
    Taken again = take(ticket, open.in.num_tokens, model.hidden_size);
    CHECK(again.failed && !again.job, "a ticket was good for two syncs");
  }
  ++(bad ? failed : synced);
  if (bad) return;
  for (size_t i = 0; i < sum.size(); ++i) CHECK(sum[i] == open.in.expected[i], "%f != %f", sum[i], open.in.expected[i]);
}

template <class T>
void fill(void* to, const std::vector<T>& from) {
  if (!from.empty()) std::memcpy(to, from.data(), from.size() * sizeof(T));
}

Open submit_host(const Model& model, Inputs in, int64_t max_deferred) {
  check_submit(model.handle, model.hidden_size);
  Submission* s = acquire({in.num_tokens, in.top_k, model.hidden_size, Element::kFloat32, max_deferred});
  fill(hidden_states_of(s), in.hidden);
  fill(topk_ids_of(s), in.ids);
  fill(topk_weights_of(s), in.weights);
  return {submit(s, model.handle, Origin::kHost), std::move(in)};
}

// A device stream: a thread that runs what is queued, in order.
class Stream {
 public:
  Stream() : thread_([this] { loop(); }) {}
  ~Stream() {
    push(nullptr);
    thread_.join();
  }
  void push(std::function<void()> work) {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(work));
    ready_.notify_one();
  }
  void synchronize() {
    std::mutex mutex;
    std::condition_variable done;
    bool finished = false;
    push([&] {
      std::lock_guard<std::mutex> lock(mutex);
      finished = true;
      done.notify_one();
    });
    std::unique_lock<std::mutex> lock(mutex);
    done.wait(lock, [&] { return finished; });
  }

 private:
  void loop() {
    for (;;) {
      std::function<void()> work;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        ready_.wait(lock, [&] { return !queue_.empty(); });
        work = std::move(queue_.front());
        queue_.pop_front();
      }
      if (!work) return;
      work();
    }
  }
  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<std::function<void()>> queue_;
  std::thread thread_;
};

int64_t new_engine(const std::string& name, int threads) {
  EngineOptions options;
  options.name = name;
  options.plan.threads = threads;
  options.plan.node_count = 0;
  return create_engine(options);
}

Model add_model(int64_t engine, const std::string& name, int64_t hidden_size, float scale) {
  Model model{engine, 0, 6, hidden_size, scale};
  model.handle = add_experts(engine, name, std::make_shared<ScaleExperts>(model.num_experts, hidden_size, scale));
  return model;
}

using Clock = std::chrono::steady_clock;

// Two models of different widths on shared engines; tickets are held for a while, some cancelled, some never synced.
void host_worker(std::vector<Model> models, unsigned seed, Clock::time_point end) {
  std::mt19937 random(seed);
  std::vector<std::pair<Model, Open>> open;
  while (Clock::now() < end) {
    const Model& model = models[random() % models.size()];
    switch (random() % 8) {
      case 0:
        if (!open.empty()) {  // out of order on purpose
          size_t i = random() % open.size();
          finish(open[i].first, open[i].second, false);
          open.erase(open.begin() + i);
        }
        break;
      case 1:
        if (!open.empty()) {
          auto& tickets = open.back().second.tickets;
          discard(tickets.ticket);
          if (tickets.deferred) discard(tickets.deferred);
          open.pop_back();
          ++cancelled;
        }
        break;
      default: {
        int64_t tokens = random() % 4 == 0 ? random() % 40 : 4;  // batch size changes while work is in flight
        Inputs in = make_inputs(model, tokens, 1 + random() % 4, random);
        int64_t max_deferred = random() % 4;
        open.emplace_back(model, submit_host(model, std::move(in), max_deferred));
      }
    }
    if (open.size() > 12) {
      finish(open.front().first, open.front().second, false);
      open.erase(open.begin());
    }
  }
  for (auto& entry : open) finish(entry.first, entry.second, false);
}

// Engines that are closed with work in flight, with failures injected on the way.
void closing_worker(unsigned seed, Clock::time_point end) {
  std::mt19937 random(seed);
  for (int round = 0; Clock::now() < end; ++round) {
    int64_t engine = new_engine("closing" + std::to_string(seed) + "-" + std::to_string(round), 1 + random() % 2);
    auto experts = std::make_shared<ScaleExperts>(6, 8, 1.0f);
    Model model{engine, add_experts(engine, "x", experts), 6, 8, 1.0f};
    experts->failures_to_inject = random() % 3;
    std::vector<Open> open;
    for (int i = 0; i < 10; ++i) open.push_back(submit_host(model, make_inputs(model, 4, 2, random), random() % 2));
    std::thread closer([&] { close_engine(engine, random() % 2); });
    std::vector<std::thread> syncs;
    for (int i = 0; i < 3; ++i) syncs.emplace_back([&, i] { finish(model, open[i], true); });
    for (auto& sync : syncs) sync.join();
    closer.join();
    try {
      check_submit(model.handle, 8);
      CHECK(false, "a closed engine took a submit");
    } catch (const std::exception&) {
    }
    ++closed;
  }
}

// Eager calls and replays of graphs on a stream, through the C interface.
void stream_worker(Model model, unsigned seed, Clock::time_point end) {
  std::mt19937 random(seed);
  Stream stream, side;
  const int64_t kTokens = 5, kTopK = 3, kLayers = 3;
  const size_t elements = kTokens * model.hidden_size;
  struct Layer {
    std::vector<float> hidden, weights, output;
    std::vector<int64_t> ids;
    int64_t tickets[2] = {0, 0}, sync_tickets[2] = {0, 0}, handle;
    Inputs in;
    void* submit;
    void* sync;
    int64_t first = 0, staged = 0, asked = 0, answered = 0;  // the last three are words of a device
    bool late = false;
  };
  const auto set = [](int64_t& word) { __atomic_store_n(&word, int64_t{1}, __ATOMIC_RELEASE); };
  while (Clock::now() < end) {
    bool graph = random() % 2;
    void* arena = graph ? moe_ops_arena_create() : nullptr;
    // The stream mints the tickets, and the host function of a submit runs beside it.
    const bool minted = random() % 2;
    // Words take the place of both host functions, and the stream waits for an answer.
    const bool by_words = minted && !graph && random() % 2;
    std::vector<Layer> layers(kLayers);
    for (auto& layer : layers) {
      layer.handle = model.handle;
      layer.hidden.resize(elements);
      layer.output.resize(elements);
      layer.weights.resize(kTokens * kTopK);
      layer.ids.resize(kTokens * kTopK);
    }
    auto record = [&](Layer& layer) {
      layer.submit =
          moe_ops_submit_call_create(arena, kTokens, kTopK, model.hidden_size, MOE_OPS_FLOAT32, 1, &layer.handle,
                                     layer.hidden.data(), layer.ids.data(), layer.weights.data(), layer.tickets);
      CHECK(layer.submit, "%s", moe_ops_last_error());
      layer.first = minted ? moe_ops_submit_call_mint(layer.submit, arena ? nullptr : &stream, nullptr) : 0;
      CHECK(!minted || layer.first, "no tickets to mint");
      layer.sync =
          moe_ops_sync_call_create(arena, kTokens, model.hidden_size, layer.sync_tickets, 1, layer.output.data());
    };
    for (auto& layer : layers) record(layer);
    bool drop = graph && random() % 3 == 0;  // the last layer's tickets are never synced
    int rounds = graph ? 1 + random() % 20 : 1;
    for (int round = 0; round < rounds; ++round) {
      for (auto& layer : layers) layer.in = make_inputs(model, kTokens, kTopK, random);
      for (auto& layer : layers) {
        layer.late = random() % 2;
        stream.push([&] {
          layer.hidden = layer.in.hidden;
          layer.ids = layer.in.ids;
          layer.weights = layer.in.weights;
          if (!minted) return;
          const bool any = std::any_of(layer.ids.begin(), layer.ids.end(), [](int64_t id) { return id >= 0; });
          layer.tickets[0] = layer.first + 2 * round;
          layer.tickets[1] = any ? layer.tickets[0] + 1 : 0;
          if (by_words) return set(layer.staged);
          side.push([&] {
            if (layer.late) std::this_thread::sleep_for(std::chrono::microseconds(50));
            moe_ops_submit_call_run(layer.submit);
          });
        });
        if (!minted) stream.push([&] { moe_ops_submit_call_run(layer.submit); });
        if (by_words) {
          CHECK(moe_ops_watch_words(), "%s", moe_ops_last_error());
          moe_ops_call_when_rung(layer.submit, &layer.staged, nullptr);
          moe_ops_call_when_rung(layer.sync, &layer.asked, &layer.answered);
        }
        stream.push([&] { std::memcpy(layer.sync_tickets, layer.tickets, sizeof(layer.tickets)); });
        if (drop && &layer == &layers.back()) continue;
        stream.push([&] {
          if (!by_words) return moe_ops_sync_call_run(layer.sync);
          set(layer.asked);
          while (!__atomic_load_n(&layer.answered, __ATOMIC_ACQUIRE)) std::this_thread::yield();
        });
      }
      stream.synchronize();
      side.synchronize();
      if (by_words) settle_rung();  // a sync may have come before the submit's word was seen
      for (auto& layer : layers) {
        if (drop && &layer == &layers.back()) continue;
        for (size_t i = 0; i < elements; ++i)
          CHECK(layer.output[i] == layer.in.expected[i], "layer on a stream: %f != %f", layer.output[i],
                layer.in.expected[i]);
        ++synced;
      }
      ++replays;
    }
    if (graph) moe_ops_arena_destroy(arena);
  }
}

// Weights change between jobs, in FIFO order.
void moving_worker(unsigned seed, Clock::time_point end) {
  std::mt19937 random(seed);
  int64_t engine = new_engine("moving", 2);
  auto experts = std::make_shared<ScaleExperts>(6, 16, 1.0f);
  Model model{engine, add_experts(engine, "x", experts), 6, 16, 1.0f};
  while (Clock::now() < end) {
    std::vector<Open> open;
    for (int i = 0; i < 3; ++i) open.push_back(submit_host(model, make_inputs(model, 4, 2, random), 1));
    float scale = 1 + random() % 4;
    run_task(engine, [&] {
      for (int64_t e = 0; e < 6; ++e) experts->set_scale(e, scale);
    });
    for (auto& entry : open) finish(model, entry, false);
    model.scale = scale;
    ++moved;
  }
  close_engine(engine, true);
}

}  // namespace

int main(int argc, char** argv) {
  int seconds = argc > 1 ? std::atoi(argv[1]) : 5;
  unsigned seed = argc > 2 ? std::atoi(argv[2]) : 1;
  auto end = Clock::now() + std::chrono::seconds(seconds);
  int64_t first = new_engine("first", 2), second = new_engine("second", 1);
  std::vector<Model> models{add_model(first, "wide", 64, 1), add_model(first, "narrow", 8, 2),
                            add_model(second, "wide", 64, 3)};
  std::vector<std::thread> threads;
  threads.emplace_back(host_worker, models, seed, end);
  threads.emplace_back(host_worker, models, seed + 1, end);
  threads.emplace_back(closing_worker, seed + 2, end);
  threads.emplace_back(stream_worker, models[0], seed + 3, end);
  threads.emplace_back(stream_worker, models[2], seed + 4, end);
  threads.emplace_back(moving_worker, seed + 5, end);
  while (Clock::now() < end) {
    engine_stats(first);
    engine_trace(second);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  for (auto& thread : threads) thread.join();
  Stats stats = engine_stats(first);
  CHECK(stats.outstanding == 0, "%ld submissions were lost", static_cast<long>(stats.outstanding));
  CHECK(stats.deferred_untaken == 0, "%ld deferred jobs were lost", static_cast<long>(stats.deferred_untaken));
  CHECK(stats.submitted == stats.completed + stats.failed + stats.cancelled, "jobs do not add up");
  close_all_engines();
  std::printf("synced %ld failed %ld cancelled %ld closed %ld replays %ld moved %ld\n", synced.load(), failed.load(),
              cancelled.load(), closed.load(), replays.load(), moved.load());
  return 0;
}
