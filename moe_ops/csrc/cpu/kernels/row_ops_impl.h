// The one source of every row_ops_<isa>.cpp: plain loops that the compiler vectorises for the file's instruction set.
// Included inside an anonymous namespace, so that no two instruction sets share a symbol.

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

struct Float32 {
  using Storage = float;
  static float load(float value) { return value; }
  static float store(float value) { return value; }
};

struct BFloat16 {
  using Storage = uint16_t;
  static float load(uint16_t value) { return bits_to_float(uint32_t(value) << 16); }
  static uint16_t store(float value) {
    const uint32_t bits = float_to_bits(value);
    const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
    const uint32_t nan = (bits >> 16) | 0x40;
    return uint16_t((bits & 0x7FFFFFFF) > 0x7F800000 ? nan : rounded);
  }
};

struct Float16 {
  using Storage = uint16_t;
  static float load(uint16_t value) {
    const uint32_t magnitude = uint32_t(value & 0x7FFF) << 13;
    const float scaled = bits_to_float(magnitude) * 0x1p112f;  // exact, also for subnormals
    const uint32_t bits = magnitude >= 0x0F800000 ? magnitude | 0x7F800000 : float_to_bits(scaled);
    return bits_to_float(bits | uint32_t(value & 0x8000) << 16);
  }
  static uint16_t store(float value) {
    const uint32_t sign = (float_to_bits(value) >> 16) & 0x8000;
    const uint32_t magnitude = float_to_bits(value) & 0x7FFFFFFF;
    // Adding 2^k aligns a subnormal result's last bit with the float's, so that the addition rounds it.
    const uint32_t subnormal = float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3F000000;
    const uint32_t normal = (magnitude - 0x38000000 + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
    uint32_t result = magnitude < 0x38800000 ? subnormal : normal;
    result = magnitude >= 0x477FF000 ? 0x7C00 : result;  // 65520 and above round to infinity
    result = magnitude > 0x7F800000 ? 0x7E00 : result;
    return uint16_t(result | sign);
  }
};

constexpr int64_t kChunk = 512;  // floats of the accumulator: stays in L1

template <typename Type>
void weighted_sum_of(const void* const* rows, const float* weights, int64_t count, int64_t width, void* out) {
  using Storage = typename Type::Storage;
  float sum[kChunk];
  for (int64_t start = 0; start < width; start += kChunk) {
    const int64_t size = width - start < kChunk ? width - start : kChunk;
    for (int64_t i = 0; i < size; i++) sum[i] = 0.0f;
    for (int64_t j = 0; j < count; j++) {
      const Storage* row = static_cast<const Storage*>(rows[j]) + start;
      const float weight = weights ? weights[j] : 1.0f;
      for (int64_t i = 0; i < size; i++) sum[i] += weight * Type::load(row[i]);
    }
    Storage* result = static_cast<Storage*>(out) + start;
    for (int64_t i = 0; i < size; i++) result[i] = Type::store(sum[i]);
  }
}

template <typename Type>
void scale_of(const void* row, float weight, int64_t width, void* out) {
  using Storage = typename Type::Storage;
  const Storage* values = static_cast<const Storage*>(row);
  Storage* result = static_cast<Storage*>(out);
  for (int64_t i = 0; i < width; i++) result[i] = Type::store(weight * Type::load(values[i]));
}

template <typename Type>
float dot_of(const void* a, const void* b, int64_t width) {
  using Storage = typename Type::Storage;
  constexpr int64_t kLanes = 16;
  const Storage* left = static_cast<const Storage*>(a);
  const Storage* right = static_cast<const Storage*>(b);
  float partial[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; lane++) {
      partial[lane] += Type::load(left[i + lane]) * Type::load(right[i + lane]);
    }
  }
  for (int64_t lane = 0; i + lane < width; lane++)
    partial[lane] += Type::load(left[i + lane]) * Type::load(right[i + lane]);
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t lane = 0; lane < half; lane++) partial[lane] += partial[lane + half];
  }
  return partial[0];
}

void weighted_sum(RowType type, const void* const* rows, const float* weights, int64_t count, int64_t width,
                  void* out) {
  switch (type) {
    case RowType::kFloat32:
      return weighted_sum_of<Float32>(rows, weights, count, width, out);
    case RowType::kBFloat16:
      return weighted_sum_of<BFloat16>(rows, weights, count, width, out);
    case RowType::kFloat16:
      return weighted_sum_of<Float16>(rows, weights, count, width, out);
  }
}

void scale(RowType type, const void* row, float weight, int64_t width, void* out) {
  switch (type) {
    case RowType::kFloat32:
      return scale_of<Float32>(row, weight, width, out);
    case RowType::kBFloat16:
      return scale_of<BFloat16>(row, weight, width, out);
    case RowType::kFloat16:
      return scale_of<Float16>(row, weight, width, out);
  }
}

float dot(RowType type, const void* a, const void* b, int64_t width) {
  switch (type) {
    case RowType::kFloat32:
      return dot_of<Float32>(a, b, width);
    case RowType::kBFloat16:
      return dot_of<BFloat16>(a, b, width);
    default:
      return dot_of<Float16>(a, b, width);
  }
}
