// The layer that the kernels are tested against, in double precision and the plainest way.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "cpu/kernels/fused_mxfp4_moe.h"

namespace moe_ops::test {

inline double weight_value(int code, int scale) {
  static const double kValues[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  if (scale == 255) return std::numeric_limits<double>::quiet_NaN();
  const double value = static_cast<float>(std::ldexp(kValues[code & 7], scale - 127));
  return code & 8 ? -value : value;
}

inline uint16_t to_bf16(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  if (std::isnan(x)) return static_cast<uint16_t>(u >> 16 | 0x40);
  return static_cast<uint16_t>((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}

inline float from_bf16(uint16_t h) {
  const uint32_t u = static_cast<uint32_t>(h) << 16;
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

// Small magnitudes only, which the test uses: nearest even among the 2^-24 multiples or 11-bit numbers.
inline uint16_t to_f16(float x) {
  if (std::isnan(x)) return 0x7E00;
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const double a = std::fabs(static_cast<double>(x));
  if (a >= 65520) return sign | 0x7C00;
  if (a < std::ldexp(1, -14)) return sign | static_cast<uint16_t>(std::nearbyint(std::ldexp(a, 24)));
  int e;
  std::frexp(a, &e);
  return sign | static_cast<uint16_t>(std::nearbyint(std::ldexp(a, 11 - e)) - 1024 + ((e - 1 + 15) << 10));
}

inline float from_f16(uint16_t h) {
  const int e = h >> 10 & 31, m = h & 1023;
  const double a = e == 31 ? (m ? NAN : INFINITY) : e ? std::ldexp(1024 + m, e - 25) : std::ldexp(m, -24);
  return static_cast<float>(h & 0x8000 ? -a : a);
}

struct Layer {
  int64_t E, H, I;
  W13Layout layout = W13Layout::kGateUp;
  std::vector<uint8_t> w13, s13, w2, s2, packed13, packed_s13, packed2, packed_s2;
  std::vector<float> b13, b2;

  Layer(int64_t e, int64_t h, int64_t i, W13Layout l, unsigned seed) : E(e), H(h), I(i), layout(l) {
    std::mt19937 rng(seed);
    w13.resize(E * 2 * I * H / 2);
    s13.resize(E * 2 * I * H / 32);
    w2.resize(E * H * I / 2);
    s2.resize(E * H * I / 32);
    b13.resize(E * 2 * I);
    b2.resize(E * H);
    for (auto& v : w13) v = static_cast<uint8_t>(rng());
    for (auto& v : w2) v = static_cast<uint8_t>(rng());
    // Sums of about one: the codes have a variance near 6.
    const int base13 = 127 - static_cast<int>(std::lround(std::log2(2.5 * std::sqrt(double(H)))));
    const int base2 = 127 - static_cast<int>(std::lround(std::log2(2.5 * std::sqrt(double(I)))));
    for (auto& v : s13) v = static_cast<uint8_t>(base13 + static_cast<int>(rng() % 3));
    for (auto& v : s2) v = static_cast<uint8_t>(base2 + static_cast<int>(rng() % 3));
    std::normal_distribution<float> normal(0, 0.5f);
    for (auto& v : b13) v = normal(rng);
    for (auto& v : b2) v = normal(rng);
  }

  int64_t row(int64_t i, bool up) const {
    if (layout == W13Layout::kInterleaved) return 2 * i + up;
    return (layout == W13Layout::kGateUp) == up ? I + i : i;
  }

  double at13(int64_t e, int64_t row, int64_t k) const {
    const int64_t r = e * 2 * I + row;
    const int byte = w13[(r * H + k) / 2];
    return weight_value(k % 2 ? byte >> 4 : byte & 15, s13[(r * H + k) / 32]);
  }

  double at2(int64_t e, int64_t row, int64_t k) const {
    const int64_t r = e * H + row;
    const int byte = w2[(r * I + k) / 2];
    return weight_value(k % 2 ? byte >> 4 : byte & 15, s2[(r * I + k) / 32]);
  }

  // Checkpoint order to tiles, in the plainest way.
  void pack() {
    packed13.resize(w13.size());
    packed_s13.resize(s13.size());
    packed2.resize(w2.size());
    packed_s2.resize(s2.size());
    const auto tile = [](const uint8_t* codes, const uint8_t* scales, int64_t row_bytes, int64_t r, uint8_t* out,
                         uint8_t* out_scales) {
      for (int64_t b = 0; b < row_bytes / 16; ++b) {
        for (int j = 0; j < 4; ++j) std::memcpy(out + b * 256 + j * 64 + r * 4, codes + b * 16 + j * 4, 4);
        out_scales[b * 16 + r] = scales[b];
      }
    };
    for (int64_t e = 0; e < E; ++e) {
      for (int64_t i = 0; i < I; ++i) {
        for (int up = 0; up < 2; ++up) {
          const int64_t from = e * 2 * I + row(i, up), to = (e * (I / 16) + i / 16) * 2 + up;
          tile(&w13[from * H / 2], &s13[from * H / 32], H / 2, i % 16, &packed13[to * 8 * H], &packed_s13[to * H / 2]);
        }
      }
      for (int64_t h = 0; h < H; ++h) {
        const int64_t from = e * H + h, to = e * (H / 16) + h / 16;
        tile(&w2[from * I / 2], &s2[from * I / 32], I / 2, h % 16, &packed2[to * 8 * I], &packed_s2[to * I / 2]);
      }
    }
  }

  ExpertWeights weights(bool prepared, bool bias) {
    if (prepared && packed13.empty()) pack();
    ExpertWeights w{};
    w.num_experts = E;
    w.hidden_size = H;
    w.intermediate_size = I;
    w.layout = prepared ? WeightLayout::kX86V1 : WeightLayout::kCheckpoint;
    w.w13_layout = layout;
    w.w13 = prepared ? packed13.data() : w13.data();
    w.w13_scale = prepared ? packed_s13.data() : s13.data();
    w.w2 = prepared ? packed2.data() : w2.data();
    w.w2_scale = prepared ? packed_s2.data() : s2.data();
    w.w13_bias = bias ? b13.data() : nullptr;
    w.w2_bias = bias ? b2.data() : nullptr;
    return w;
  }
};

struct Input {
  int64_t T, K, H;
  std::vector<float> x;
  std::vector<uint16_t> half;
  std::vector<int64_t> ids;
  std::vector<float> router;
  DType dtype;

  Input(int64_t t, int64_t k, int64_t h, int64_t experts, DType d, unsigned seed, int only_expert = -1)
      : T(t), K(k), H(h), dtype(d) {
    std::mt19937 rng(seed);
    std::normal_distribution<float> normal;
    x.resize(T * H);
    half.resize(T * H);
    for (int64_t i = 0; i < T * H; ++i) set(i, normal(rng));
    for (int64_t i = 0; i < T * K; ++i) {
      ids.push_back(only_expert >= 0 ? only_expert : static_cast<int64_t>(rng() % experts));
      router.push_back(std::uniform_real_distribution<float>(0.1f, 1)(rng));
    }
  }

  void set(int64_t i, float value) {
    if (dtype == DType::kBFloat16) half[i] = to_bf16(value), value = from_bf16(half[i]);
    if (dtype == DType::kFloat16) half[i] = to_f16(value), value = from_f16(half[i]);
    x[i] = value;
  }

  const void* data() const { return dtype == DType::kFloat32 ? static_cast<const void*>(x.data()) : half.data(); }
};

inline double activate(double g, double u, const ActivationParams& a) {
  if (a.has_limit) {
    g = std::min<double>(g, a.limit);
    u = std::max<double>(std::min<double>(u, a.limit), -a.limit);
  }
  const bool oai = a.kind == Activation::kSwigluOai;
  return g / (1 + std::exp(-(oai ? a.alpha : 1.0) * g)) * (oai ? u + 1 : u);
}

inline std::vector<double> reference(const Layer& l, bool bias, const ActivationParams& a, const Input& in) {
  std::vector<double> out(in.T * in.H, 0.0);
  for (int64_t s = 0; s < in.T * in.K; ++s) {
    const int64_t e = in.ids[s], t = s / in.K;
    if (e < 0 || e >= l.E || in.router[s] == 0) continue;
    std::vector<double> h(l.I);
    for (int64_t i = 0; i < l.I; ++i) {
      double gu[2];
      for (int up = 0; up < 2; ++up) {
        const int64_t r = l.row(i, up);
        double sum = bias ? l.b13[e * 2 * l.I + r] : 0;
        for (int64_t k = 0; k < l.H; ++k) sum += l.at13(e, r, k) * in.x[t * l.H + k];
        gu[up] = sum;
      }
      h[i] = activate(gu[0], gu[1], a);
    }
    for (int64_t c = 0; c < l.H; ++c) {
      double sum = bias ? l.b2[e * l.H + c] : 0;
      for (int64_t i = 0; i < l.I; ++i) sum += l.at2(e, c, i) * h[i];
      out[t * l.H + c] += in.router[s] * sum;
    }
  }
  return out;
}

}  // namespace moe_ops::test
