// Which CPUs and NUMA nodes an engine may use, and how its threads are divided over them.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace moe_ops::engine {

// What the user asked for. `nodes` empty and `node_count` < 0: one pool per NUMA node that this process may use.
struct PlanRequest {
  int threads = 0;          // 0: one per usable CPU, less one or two for the caller where there are many
  int node_count = -1;      // 0: one pool that ignores NUMA; n: the first n usable nodes
  std::vector<int> nodes;   // explicit node list, one pool each
  std::string sysfs = "/";  // root of /sys and /proc, so that tests can describe a machine
};

struct PoolPlan {
  int node;               // -1: not bound to a node
  int threads;            // first pools take the remainder of an uneven division
  std::vector<int> cpus;  // one per thread, pinned
};

struct ThreadPlan {
  std::vector<PoolPlan> pools;
  int usable_cpus;  // affinity mask and cgroup quota taken together
  int quota;        // CPUs that the cgroup grants, 0 if it sets no limit
};

// Parses "0-3,8,10-11".
std::vector<int> parse_cpu_list(const std::string& text);

// CPUs of the affinity mask of this process, ascending.
std::vector<int> affinity_cpus();

// CPUs granted by cgroup v2 cpu.max or v1 cfs quota of this process or of a parent group, rounded up; 0 if unlimited.
int cgroup_quota(const std::string& root);

// NUMA nodes as (node, cpus), ascending; one node 0 with every CPU where the system describes none.
std::vector<std::pair<int, std::vector<int>>> numa_nodes(const std::string& root);

// Throws std::invalid_argument that names the value at fault.
ThreadPlan make_plan(const PlanRequest& request);

}  // namespace moe_ops::engine
