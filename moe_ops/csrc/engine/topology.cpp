#include "engine/topology.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <thread>

namespace moe_ops::engine {
namespace {

std::string read_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// CPUs granted by one group directory, rounded up; 0 if it sets no limit.
int group_quota(const std::string& directory) {
  std::istringstream v2(read_line(directory + "/cpu.max"));
  double quota = 0, period = 0;
  if (std::string first; v2 >> first && first != "max" && v2 >> period) {
    quota = std::atof(first.c_str());
  } else {
    quota = std::atof(read_line(directory + "/cpu.cfs_quota_us").c_str());
    period = std::atof(read_line(directory + "/cpu.cfs_period_us").c_str());
  }
  if (quota <= 0 || period <= 0) return 0;
  return std::max(1, static_cast<int>(quota / period + 0.999));
}

std::string list_text(const std::vector<int>& values) {
  std::string text = "[";
  for (size_t i = 0; i < values.size(); ++i) text += (i ? ", " : "") + std::to_string(values[i]);
  return text + "]";
}

// The calling thread and the device runtime's callback thread work while jobs run. Without a CPU of their own they take
// turns with a pinned thread, for which its whole team then waits (docs/engine.md#threads).
int cpus_left_free(int usable) { return usable >= 16 ? 2 : usable >= 4 ? 1 : 0; }

[[noreturn]] void refuse(const std::string& argument, const std::string& expected, const std::string& actual) {
  throw std::invalid_argument("CpuMoeEngine: " + argument + " must be " + expected + ", got " + actual);
}

}  // namespace

std::vector<int> parse_cpu_list(const std::string& text) {
  std::vector<int> cpus;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    if (part.find_first_of("0123456789") == std::string::npos) continue;
    size_t dash = part.find('-');
    int low = std::atoi(part.c_str());
    int high = dash == std::string::npos ? low : std::atoi(part.c_str() + dash + 1);
    for (int cpu = low; cpu <= high; ++cpu) cpus.push_back(cpu);
  }
  return cpus;
}

std::vector<int> affinity_cpus() {
  std::vector<int> cpus;
  // Machines with more CPUs than the default mask holds make the call fail: grow the mask until it fits.
  for (int capacity = 1024; capacity <= (1 << 18); capacity *= 2) {
    cpu_set_t* mask = CPU_ALLOC(capacity);
    size_t bytes = CPU_ALLOC_SIZE(capacity);
    bool fits = sched_getaffinity(0, bytes, mask) == 0;
    for (int cpu = 0; fits && cpu < capacity; ++cpu)
      if (CPU_ISSET_S(cpu, bytes, mask)) cpus.push_back(cpu);
    CPU_FREE(mask);
    if (fits) break;
  }
  if (cpus.empty()) {
    cpus.resize(std::max(1u, std::thread::hardware_concurrency()));
    std::iota(cpus.begin(), cpus.end(), 0);
  }
  return cpus;
}

int cgroup_quota(const std::string& root) {
  int quota = 0;
  auto tighten = [&quota](int other) {
    if (other > 0) quota = quota == 0 ? other : std::min(quota, other);
  };
  std::ifstream groups(root + "proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    std::string controllers = line.substr(first + 1, second - first - 1), group = line.substr(second + 1);
    if (!controllers.empty() && ("," + controllers + ",").find(",cpu,") == std::string::npos) continue;
    std::string mount = root + "sys/fs/cgroup" + (controllers.empty() ? "" : "/cpu");
    // Every ancestor limits its children; inside a container the named group may not be mounted, so missing ones are
    // skipped.
    for (; group.size() > 1; group = group.substr(0, group.rfind('/'))) tighten(group_quota(mount + group));
    tighten(group_quota(mount));
  }
  return quota;
}

std::vector<std::pair<int, std::vector<int>>> numa_nodes(const std::string& root) {
  std::vector<std::pair<int, std::vector<int>>> nodes;
  for (int node : parse_cpu_list(read_line(root + "sys/devices/system/node/online")))
    nodes.emplace_back(
        node, parse_cpu_list(read_line(root + "sys/devices/system/node/node" + std::to_string(node) + "/cpulist")));
  if (nodes.empty()) nodes.emplace_back(0, affinity_cpus());
  return nodes;
}

ThreadPlan make_plan(const PlanRequest& request) {
  std::vector<int> allowed = affinity_cpus();
  int quota = cgroup_quota(request.sysfs);
  int usable = static_cast<int>(allowed.size());
  if (quota > 0) usable = std::min(usable, quota);

  // Nodes with at least one CPU of the affinity mask.
  std::vector<std::pair<int, std::vector<int>>> nodes;
  for (auto& [node, cpus] : numa_nodes(request.sysfs)) {
    std::vector<int> mine;
    std::set_intersection(cpus.begin(), cpus.end(), allowed.begin(), allowed.end(), std::back_inserter(mine));
    if (!mine.empty()) nodes.emplace_back(node, mine);
  }
  std::vector<int> known;
  for (auto& entry : nodes) known.push_back(entry.first);

  std::vector<std::pair<int, std::vector<int>>> pools;
  if (!request.nodes.empty()) {
    for (size_t i = 0; i < request.nodes.size(); ++i) {
      int node = request.nodes[i];
      auto found = std::find(known.begin(), known.end(), node);
      if (found == known.end())
        refuse("numa_nodes", "among the usable nodes " + list_text(known), list_text(request.nodes));
      if (std::count(request.nodes.begin(), request.nodes.end(), node) > 1)
        refuse("numa_nodes", "distinct", list_text(request.nodes));
      pools.push_back(nodes[found - known.begin()]);
    }
  } else if (request.node_count == 0 || nodes.empty()) {
    pools.emplace_back(-1, allowed);
  } else {
    int count = request.node_count < 0 ? static_cast<int>(nodes.size()) : request.node_count;
    if (count > static_cast<int>(nodes.size()))
      refuse("numa_nodes", "at most " + std::to_string(nodes.size()) + " (usable nodes " + list_text(known) + ")",
             std::to_string(count));
    pools.assign(nodes.begin(), nodes.begin() + count);
    // Where the quota grants fewer CPUs than there are nodes, the default keeps as many nodes as it can feed.
    if (request.node_count < 0 && request.threads == 0 && usable < count) pools.resize(usable);
  }

  int total = 0;
  for (auto& pool : pools) total += static_cast<int>(pool.second.size());
  int limit = std::min(total, usable);
  const int count = static_cast<int>(pools.size());
  int threads = request.threads == 0 ? std::max(count, limit - cpus_left_free(limit)) : request.threads;
  if (threads < 0 || threads > limit)
    refuse("threads", "in [1, " + std::to_string(limit) + "] (CPUs that this process may use)",
           std::to_string(threads));
  if (threads < count)
    refuse("threads", "at least one per pool (" + std::to_string(count) + " pools)", std::to_string(threads));

  ThreadPlan plan{{}, usable, quota};
  for (int i = 0; i < count; ++i) {
    int share = threads / count + (i < threads % count ? 1 : 0);
    std::vector<int> cpus = pools[i].second;
    if (share > static_cast<int>(cpus.size())) {
      // Only the default may be cut to what a small node has; an explicit number is an error.
      if (request.threads != 0)
        refuse("threads", "at most " + std::to_string(cpus.size()) + " on node " + std::to_string(pools[i].first),
               std::to_string(share));
      share = static_cast<int>(cpus.size());
    }
    cpus.resize(share);
    plan.pools.push_back({pools[i].first, share, cpus});
  }
  return plan;
}

}  // namespace moe_ops::engine
