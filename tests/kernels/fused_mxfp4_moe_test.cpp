// Torch-free test of the CPU kernels: every instruction set of this machine against double precision, and against
// itself for other thread counts and layouts. Prints one line per check that fails; exit status 1 if there was any.
#include "cpu/kernels/fused_mxfp4_moe.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cpu/kernels/fused_mxfp4_moe_kernels.h"
#include "double_precision.h"

using namespace moe_ops;
using namespace moe_ops::test;

namespace {

int failures = 0, checks = 0;

void expect(bool ok, const std::string& what, double got = 0, double bound = 0) {
  ++checks;
  if (ok) return;
  ++failures;
  std::printf("FAILED %s (got %g, bound %g)\n", what.c_str(), got, bound);
}

std::vector<float> run(const ExpertWeights& w, const ActivationParams& a, const Input& in, bool invariant,
                       ThreadTeam& team, DType out_dtype = DType::kFloat32) {
  std::vector<float> out(in.T * in.H, NAN);
  std::vector<uint16_t> half(in.T * in.H, 0x7FC0);
  MoeBatch b{in.T, in.K, in.data(), in.dtype, in.H, in.ids.data(), in.router.data(), nullptr, out_dtype, in.H};
  b.output = out_dtype == DType::kFloat32 ? static_cast<void*>(out.data()) : half.data();
  fused_mxfp4_moe(w, a, b, invariant, team);
  for (size_t i = 0; out_dtype != DType::kFloat32 && i < out.size(); ++i) {
    out[i] = out_dtype == DType::kBFloat16 ? from_bf16(half[i]) : from_f16(half[i]);
  }
  return out;
}

// Worst error over the reference's RMS, and relative error in the 2-norm.
void compare(const std::vector<float>& got, const std::vector<double>& want, double worst_bound, double rms_bound,
             const std::string& what) {
  double worst = 0, error = 0, norm = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::isnan(want[i]) || std::isinf(want[i])) {
      expect(std::isnan(want[i]) ? std::isnan(got[i]) : got[i] == want[i], what + " special value");
      continue;
    }
    const double d = std::fabs(got[i] - want[i]);
    worst = std::isnan(d) ? INFINITY : std::max(worst, d);
    error += d * d;
    norm += want[i] * want[i];
  }
  const double rms = std::sqrt(norm / static_cast<double>(std::max<size_t>(1, got.size())));
  if (rms == 0) return expect(worst == 0, what + " must be zero", worst, 0);
  expect(worst <= worst_bound * rms, what + " worst", worst / rms, worst_bound);
  expect(std::sqrt(error / norm) <= rms_bound, what + " rms", std::sqrt(error / norm), rms_bound);
  if (std::getenv("VERBOSE"))
    std::printf("%s worst %.2e rms %.2e\n", what.c_str(), worst / rms, std::sqrt(error / norm));
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * 4) == 0;
}

const char* name(DType d) { return d == DType::kFloat32 ? "f32" : d == DType::kBFloat16 ? "bf16" : "f16"; }

void test_isa(const std::string& isa) {
  setenv("MOE_OPS_CPU_ISA", isa.c_str(), 1);
  ThreadTeam one(1), two(std::vector<int>{usable_cpus()[0], usable_cpus().back(), usable_cpus()[0]});
  const ActivationParams silu{Activation::kSilu, false, 0, 1}, limited{Activation::kSilu, true, 1.0f, 1};
  const ActivationParams oai{Activation::kSwigluOai, true, 2.0f, 1.702f};
  struct Shape {
    int64_t E, H, I, T, K;
  };
  const W13Layout layouts[] = {W13Layout::kGateUp, W13Layout::kUpGate, W13Layout::kInterleaved};
  int n = 0;
  // T and K so that experts get from 1 to 400 rows, on both sides of each change of kernel and in several items of rows
  // for short and for long ones.
  for (const Shape& s :
       {Shape{4, 96, 32, 1, 2}, Shape{3, 192, 96, 9, 2}, Shape{2, 64, 192, 33, 1}, Shape{1, 128, 64, 40, 1},
        Shape{2, 288, 64, 150, 2}, Shape{1, 64, 32, 400, 1}, Shape{1, 7168, 32, 110, 1}}) {
    if (s.H > 1024 && isa != "amx") continue;  // slow, and the items are the same for all
    const W13Layout layout = layouts[n++ % 3];
    Layer l(s.E, s.H, s.I, layout, 7 + n);
    for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      const ActivationParams& a = n % 3 == 0 ? limited : n % 3 == 1 ? silu : oai;
      Input in(s.T, s.K, s.H, s.E, dtype, 11 + n);
      if (s.T > 4) {
        in.ids[0] = -1;
        in.ids[3] = s.E;
        in.router[5] = 0;
        for (int64_t k = 0; k < s.K; ++k) in.ids[2 * s.K + k] = -1;
      }
      const bool bias = n % 2 == 0;
      const std::string what = isa + " T" + std::to_string(s.T) + " H" + std::to_string(s.H) + " " + name(dtype);
      const auto want = reference(l, bias, a, in);
      const auto raw = run(l.weights(false, bias), a, in, false, one);
      // bfloat16: the intermediate row is rounded to 8 bits on the tile path; the others keep 15 bits or more.
      const bool coarse = isa == "amx" && dtype == DType::kBFloat16;
      // The worst of many elements of long sums lies further out.
      compare(raw, want, (coarse ? 2e-2 : 8e-4) * (s.H > 1024 ? 2 : 1), coarse ? 3e-3 : 1.2e-4, what);
      expect(same_bits(raw, run(l.weights(true, bias), a, in, false, one)), what + " prepared");
      expect(same_bits(raw, run(l.weights(true, bias), a, in, false, two)), what + " threads");
      const auto invariant = run(l.weights(true, bias), a, in, true, two);
      Input single = in;
      single.T = 1;
      for (int64_t t : {int64_t{0}, s.T / 2, s.T - 1}) {
        single.x.assign(&in.x[t * s.H], &in.x[t * s.H] + s.H);
        single.half.assign(&in.half[t * s.H], &in.half[t * s.H] + s.H);
        single.ids.assign(&in.ids[t * s.K], &in.ids[t * s.K] + s.K);
        single.router.assign(&in.router[t * s.K], &in.router[t * s.K] + s.K);
        const auto row = run(l.weights(true, bias), a, single, true, one);
        expect(std::memcmp(row.data(), &invariant[t * s.H], s.H * 4) == 0, what + " batch invariance");
      }
      const auto rounded = run(l.weights(true, bias), a, in, false, one, DType::kBFloat16);
      const auto rounded16 = run(l.weights(true, bias), a, in, false, one, DType::kFloat16);
      bool exact = true;
      for (size_t i = 0; i < raw.size(); ++i) {
        exact &= rounded[i] == from_bf16(to_bf16(raw[i])) && rounded16[i] == from_f16(to_f16(raw[i]));
      }
      expect(exact, what + " one rounding");
    }
  }

  // Scale bytes: one row of each code, activations whose products are exact.
  for (int64_t T : {1, 6}) {
    Layer l(1, 32, 256, W13Layout::kGateUp, 3);
    for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      Input in(T, 1, 32, 1, dtype, 5);
      for (size_t i = 0; i < in.x.size(); ++i) in.set(static_cast<int64_t>(i), i % 32 == 7 ? 1.0f : 0.0f);
      for (int64_t r = 0; r < 2 * l.I; ++r) l.s13[r] = r < l.I ? static_cast<uint8_t>(r) : 127;
      std::fill(l.s2.begin(), l.s2.end(), 127);
      // Row i of the intermediate is one: gate saturates, and down picks it.
      for (int64_t code : {1, 7, 9, 15}) {
        std::fill(l.w13.begin(), l.w13.end(), static_cast<uint8_t>(code | code << 4));
        const auto want = reference(l, false, silu, in);
        compare(run(l.weights(false, false), silu, in, false, one), want, 1e-6, 1e-6, isa + " scales w13");
      }
    }
  }
  for (int64_t T : {1, 6}) {
    Layer l(1, 256, 32, W13Layout::kGateUp, 3);
    for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      Input in(T, 1, 256, 1, dtype, 5);
      for (int64_t r = 0; r < l.H; ++r) l.s2[r] = static_cast<uint8_t>(r);
      const auto want = reference(l, false, silu, in);
      const auto got = run(l.weights(false, false), silu, in, false, one);
      bool ok = true;
      for (int64_t t = 0; t < T; ++t) {
        for (int64_t c = 0; c < 256; ++c) {
          const double w = want[t * 256 + c], g = got[t * 256 + c];
          // Near the ends float32 sums overflow or lose bits; the reference in double does not.
          if (std::isnan(w)) ok &= std::isnan(g);
          if (c > 30 && c < 240)
            ok &= std::fabs(g - w) <= 0.05 * std::fabs(w) + 0.08 * std::ldexp(10, static_cast<int>(c) - 127);
          if (c <= 30) ok &= std::fabs(g - w) <= 0.05 * std::ldexp(10, static_cast<int>(c) - 127) && (c == 0 || g != 0);
        }
      }
      expect(ok, isa + " scales w2 T" + std::to_string(T) + " " + name(dtype));
    }
  }

  // Rows that are not finite, and rows with one large element, leave the others alone.
  for (int64_t T : {3, 20}) {
    for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      Layer l(1, 96, 64, W13Layout::kUpGate, 21);
      Input in(T, 1, 96, 1, dtype, 22, 0);
      const auto clean = run(l.weights(true, false), silu, in, false, one);
      Input dirty = in;
      dirty.set(96 + 5, INFINITY);
      dirty.set(2 * 96 + 40, NAN);
      const auto got = run(l.weights(true, false), silu, dirty, false, two);
      bool same = true, special = true;
      for (int64_t i = 0; i < T * 96; ++i) {
        if (i / 96 == 1 || i / 96 == 2) {
          special &= !std::isfinite(got[i]);
        } else {
          same &= std::memcmp(&got[i], &clean[i], 4) == 0;
        }
      }
      expect(same, isa + " rows beside NaN " + name(dtype));
      expect(special, isa + " NaN rows " + name(dtype));
      Input spiky = in;
      for (int64_t t = 0; t < T; ++t) spiky.set(t * 96 + 3, 3e4f);
      for (auto& v : l.w13) v &= 0xFF;
      for (int64_t r = 0; r < 2 * l.I; ++r) l.w13[r * 48 + 1] &= 0x0F;  // weight of element 3
      l.packed13.clear();
      const auto want = reference(l, false, silu, spiky);
      compare(run(l.weights(false, false), silu, spiky, false, one), want, 1.5e-2, 4e-3,
              isa + " spikes " + name(dtype));
    }
  }
}

void test_across_isas(const std::vector<std::string>& isas) {
  const ActivationParams silu{Activation::kSilu, false, 0, 1};
  Layer l(2, 160, 96, W13Layout::kInterleaved, 5);
  ThreadTeam one(1);
  Input in(3, 2, 160, 2, DType::kBFloat16, 6);
  std::vector<float> first;
  for (const std::string& isa : isas) {
    if (isa == "scalar" || isa == "amx") continue;
    setenv("MOE_OPS_CPU_ISA", isa.c_str(), 1);
    const auto got = run(l.weights(true, false), silu, in, false, one);
    if (!first.empty()) expect(same_bits(first, got), isa + " has the bits of the other integer kernels");
    first = got;
  }
}

// A row does not depend on how many others its expert has: the rows of smaller batches are those of the largest. Both
// products are longer than the blocks that any kernel decodes at once, and end within them.
void test_row_counts(const std::string& isa) {
  setenv("MOE_OPS_CPU_ISA", isa.c_str(), 1);
  ThreadTeam one(1);
  const ActivationParams silu{Activation::kSilu, false, 0, 1};
  const int64_t H = 320, most = 70;
  Layer l(1, H, 288, W13Layout::kGateUp, 41);
  for (DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    Input in(most, 1, H, 1, dtype, 42);
    const auto all = run(l.weights(true, true), silu, in, true, one);
    compare(all, reference(l, true, silu, in), dtype == DType::kBFloat16 ? 2e-2 : 8e-4,
            dtype == DType::kBFloat16 ? 3e-3 : 1.2e-4, isa + " row counts " + name(dtype));
    bool same = true;
    for (int64_t t : {1, 2, 3, 4, 5, 6, 7, 8, 15, 16, 17, 33, 48, 49, 50, 52, 69}) {
      in.T = t;
      const auto some = run(l.weights(true, true), silu, in, true, one);
      same &= std::memcmp(some.data(), all.data(), t * H * sizeof(float)) == 0;
    }
    expect(same, isa + " row counts, bits " + name(dtype));
  }
}

void test_bf16_weights(const std::string& isa) {
  setenv("MOE_OPS_CPU_ISA", isa.c_str(), 1);
  ThreadTeam one(1);
  const ActivationParams silu{Activation::kSilu, false, 0, 1};
  for (int64_t T : {2, 21, 70}) {
    Layer l(2, 96, 64, W13Layout::kGateUp, 5);
    std::vector<uint16_t> w13(l.E * 2 * l.I * l.H), w2(l.E * l.H * l.I);
    for (int64_t r = 0; r < l.E * 2 * l.I; ++r) {
      for (int64_t k = 0; k < l.H; ++k) w13[r * l.H + k] = to_bf16(static_cast<float>(l.at13(0, r, k)));
    }
    for (int64_t r = 0; r < l.E * l.H; ++r) {
      for (int64_t k = 0; k < l.I; ++k) w2[r * l.I + k] = to_bf16(static_cast<float>(l.at2(0, r, k)));
    }
    for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      Input in(T, 2, l.H, l.E, dtype, 9);
      ExpertWeights w = l.weights(false, true);
      w.layout = WeightLayout::kBFloat16;
      w.w13 = reinterpret_cast<const uint8_t*>(w13.data());
      w.w2 = reinterpret_cast<const uint8_t*>(w2.data());
      w.w13_scale = w.w2_scale = nullptr;
      const bool coarse = isa == "amx" && dtype == DType::kBFloat16;
      compare(run(w, silu, in, false, one), reference(l, true, silu, in), coarse ? 2e-2 : 8e-4, coarse ? 3e-3 : 1.2e-4,
              isa + " bf16 weights " + name(dtype) + " T" + std::to_string(T));
    }
  }
}

void test_backward() {
  ThreadTeam one(1), two(std::vector<int>{usable_cpus()[0], usable_cpus().back(), usable_cpus()[0]});
  for (const ActivationParams& a : {ActivationParams{Activation::kSilu, false, 0, 1},
                                    ActivationParams{Activation::kSwigluOai, true, 1.5f, 1.702f}}) {
    Layer l(2, 64, 32, W13Layout::kInterleaved, 31);
    Input in(5, 2, 64, 2, DType::kFloat32, 32);
    in.ids[3] = -1;
    in.router[4] = 0;
    Input grad(5, 2, 64, 2, DType::kFloat32, 33);
    for (bool prepared : {false, true}) {
      std::vector<float> gx(5 * 64, NAN), gw(10, NAN), gx2(5 * 64, NAN), gw2(10, NAN);
      const MoeBatch b{5, 2, in.data(), in.dtype, 64, in.ids.data(), in.router.data(), nullptr, DType::kFloat32, 64};
      fused_mxfp4_moe_backward(l.weights(prepared, true), a, b, {grad.x.data(), gx.data(), gw.data()}, one);
      fused_mxfp4_moe_backward(l.weights(prepared, true), a, b, {grad.x.data(), gx2.data(), gw2.data()}, two);
      expect(same_bits(gx, gx2) && same_bits(gw, gw2), "backward threads");
      const auto loss = [&](const Input& at) {
        const auto y = reference(l, true, a, at);
        double sum = 0;
        for (size_t i = 0; i < y.size(); ++i) sum += y[i] * grad.x[i];
        return sum;
      };
      for (int64_t i : {0, 70, 64 * 3 + 9, 64 * 4 + 63}) {
        Input up = in, down = in;
        up.x[i] += 0.0009765625f;
        down.x[i] -= 0.0009765625f;
        const double want = (loss(up) - loss(down)) / 0.001953125;
        expect(std::fabs(gx[i] - want) <= 2e-2 * std::max(1.0, std::fabs(want)), "backward x", gx[i], want);
      }
      for (int64_t i = 0; i < 10; ++i) {
        Input up = in, down = in;
        up.router[i] = in.router[i] + 0.125f;
        down.router[i] = in.router[i] - 0.125f;
        if (down.router[i] == 0) continue;
        const double want = (loss(up) - loss(down)) / 0.25;
        expect(std::fabs(gw[i] - want) <= 1e-4 * std::max(1.0, std::fabs(want)), "backward weights", gw[i], want);
      }
    }
  }
}

}  // namespace

// Instruction sets to test, all that this processor has if there are no arguments.
int main(int argc, char** argv) {
  const std::vector<std::string> wanted(argv + 1, argv + argc);
  std::vector<std::string> isas;
  int count;
  const mxfp4::KernelSet* table = mxfp4::all_kernels(&count);
  for (int i = 0; i < count; ++i) {
    const bool asked = wanted.empty() || std::count(wanted.begin(), wanted.end(), table[i].name) > 0;
    if (asked && table[i].supported()) isas.push_back(table[i].name);
  }
  for (const std::string& isa : isas) {
    test_isa(isa);
    test_bf16_weights(isa);
    test_row_counts(isa);
  }
  test_across_isas(isas);
  test_backward();
  std::string names;
  for (const std::string& isa : isas) names += " " + isa;
  std::printf("%d checks, %d failed, instruction sets:%s\n", checks, failures, names.c_str());
  return failures != 0 || isas.empty();
}
