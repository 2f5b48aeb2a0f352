// A mixture-of-experts layer of ggml (llama.cpp) on its CPU backend, as a small C library that
// benchmarks/bench_fused_mxfp4_moe.py builds against the ggml that it is given: MXFP4 experts in the backend's repacked
// layout, float32 activations, which ggml quantises to 8 bits.
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

namespace {

struct ContextDeleter {
  void operator()(ggml_context* c) const { ggml_free(c); }
};
using Context = std::unique_ptr<ggml_context, ContextDeleter>;

Context new_context() { return Context(ggml_init({size_t{1} << 20, nullptr, true})); }

struct Graph {
  Context context;
  ggml_backend_buffer_t buffer;
  ggml_cgraph* graph;
  ggml_tensor *x, *ids, *weights, *out;
};

struct Layer {
  int64_t hidden, inter, experts, top_k;
  ggml_backend_t backend;
  Context context = new_context();
  ggml_backend_buffer_t buffer = nullptr;
  ggml_tensor *gate, *up, *down;
  std::map<int64_t, Graph> graphs;  // by number of tokens

  ~Layer() {
    for (auto& entry : graphs) ggml_backend_buffer_free(entry.second.buffer);
    ggml_backend_buffer_free(buffer);
    ggml_backend_free(backend);
  }

  Graph& graph_for(int64_t tokens) {
    if (const auto found = graphs.find(tokens); found != graphs.end()) return found->second;
    Graph g{new_context(), nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
    ggml_context* c = g.context.get();
    g.x = ggml_new_tensor_3d(c, GGML_TYPE_F32, hidden, 1, tokens);
    g.ids = ggml_new_tensor_2d(c, GGML_TYPE_I32, top_k, tokens);
    g.weights = ggml_new_tensor_3d(c, GGML_TYPE_F32, 1, top_k, tokens);
    ggml_tensor* h = ggml_swiglu_split(c, ggml_mul_mat_id(c, gate, g.x, g.ids), ggml_mul_mat_id(c, up, g.x, g.ids));
    ggml_tensor* y = ggml_mul(c, ggml_mul_mat_id(c, down, h, g.ids), g.weights);
    for (int64_t k = 0; k < top_k; ++k) {
      ggml_tensor* part = ggml_view_2d(c, y, hidden, tokens, y->nb[2], k * y->nb[1]);
      g.out = k == 0 ? part : ggml_add(c, g.out, part);
    }
    g.out = ggml_cont(c, g.out);
    g.graph = ggml_new_graph(c);
    ggml_build_forward_expand(g.graph, g.out);
    g.buffer = ggml_backend_alloc_ctx_tensors(c, backend);
    return graphs.emplace(tokens, std::move(g)).first->second;
  }
};

// The backend's buffer of weights in its own order, else the plain one.
ggml_backend_buffer_type_t repacked_type(ggml_backend_t backend) {
  ggml_backend_dev_t device = ggml_backend_get_device(backend);
  void* address =
      ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), "ggml_backend_dev_get_extra_bufts");
  const auto extra = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(address);
  ggml_backend_buffer_type_t* types = extra ? extra(device) : nullptr;
  for (; types != nullptr && *types != nullptr; ++types) {
    if (std::strcmp(ggml_backend_buft_name(*types), "CPU_REPACK") == 0) return *types;
  }
  return ggml_backend_get_default_buffer_type(backend);
}

}  // namespace

extern "C" {

// Blocks of 17 bytes, a scale and 32 codes in ggml's order: gate and up [experts, inter, hidden / 32], down [experts,
// hidden, inter / 32].
void* ggml_layer_new(int64_t hidden, int64_t inter, int64_t experts, int64_t top_k, const void* gate, const void* up,
                     const void* down) {
  auto* layer = new Layer{hidden, inter, experts, top_k, ggml_backend_cpu_init()};
  ggml_context* c = layer->context.get();
  layer->gate = ggml_new_tensor_3d(c, GGML_TYPE_MXFP4, hidden, inter, experts);
  layer->up = ggml_new_tensor_3d(c, GGML_TYPE_MXFP4, hidden, inter, experts);
  layer->down = ggml_new_tensor_3d(c, GGML_TYPE_MXFP4, inter, hidden, experts);
  layer->buffer = ggml_backend_alloc_ctx_tensors_from_buft(c, repacked_type(layer->backend));
  ggml_backend_buffer_set_usage(layer->buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
  ggml_backend_tensor_set(layer->gate, gate, 0, ggml_nbytes(layer->gate));
  ggml_backend_tensor_set(layer->up, up, 0, ggml_nbytes(layer->up));
  ggml_backend_tensor_set(layer->down, down, 0, ggml_nbytes(layer->down));
  return layer;
}

const char* ggml_layer_buffer_name(void* layer) { return ggml_backend_buffer_name(static_cast<Layer*>(layer)->buffer); }

void ggml_layer_call(void* handle, int64_t tokens, int num_threads, const float* x, const int32_t* ids,
                     const float* weights, float* out) {
  auto* layer = static_cast<Layer*>(handle);
  Graph& g = layer->graph_for(tokens);
  ggml_backend_cpu_set_n_threads(layer->backend, num_threads);
  ggml_backend_tensor_set(g.x, x, 0, ggml_nbytes(g.x));
  ggml_backend_tensor_set(g.ids, ids, 0, ggml_nbytes(g.ids));
  ggml_backend_tensor_set(g.weights, weights, 0, ggml_nbytes(g.weights));
  ggml_backend_graph_compute(layer->backend, g.graph);
  ggml_backend_tensor_get(g.out, out, 0, ggml_nbytes(g.out));
}

void ggml_layer_delete(void* layer) { delete static_cast<Layer*>(layer); }
}
