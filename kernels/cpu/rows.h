// Work on single rows: norms, activations, and the pieces of log-sum-exp.
#pragma once

#include "vmath.h"

namespace inferax {
namespace {

// Layer norm's mean is taken first, and the squares are those of what is left.
inline void NormRow(const float* x, int64_t width, const NormSpec& norm, float* out) {
  const float count = static_cast<float>(width);
  V mean = Splat(0.0f);
  if (norm.layer) {
    V sum = Splat(0.0f);
    Runs(width, [&](int64_t i, int n) { sum = sum + LoadSome(x + i, n); });
    mean = Splat(Sum(sum) / count);
  }
  V squares = Splat(0.0f);
  Runs(width, [&](int64_t i, int n) {
    const V v = LoadSome(x + i, n) - mean;
    if (n == 16) {
      squares = Fma(v, v, squares);
      return;
    }
    float lanes[16] = {};
    StoreSome(lanes, v, n);
    squares = Fma(Load(lanes), Load(lanes), squares);
  });
  const V scale = Splat(1.0f / __builtin_sqrtf(Sum(squares) / count + norm.eps));
  Runs(width, [&](int64_t i, int n) {
    V y = (LoadSome(x + i, n) - mean) * scale * LoadSome(norm.weight + i, n);
    if (norm.bias != nullptr) y = y + LoadSome(norm.bias + i, n);
    StoreSome(out + i, y, n);
  });
}

inline void FinishRow(float* y, int64_t n, const float* bias, int32_t activation, float scale, const float* residual) {
  Runs(n, [&](int64_t i, int count) {
    V v = LoadSome(y + i, count);
    if (bias != nullptr) v = v + LoadSome(bias + i, count);
    v = Activate(v, activation);
    if (scale != 1.0f) v = v * Splat(scale);
    if (residual != nullptr) v = LoadSome(residual + i, count) + v;
    StoreSome(y + i, v, count);
  });
}

inline void GateRow(float* gate, const float* up, int64_t n, const float* gate_bias, const float* up_bias,
                    int32_t activation) {
  Runs(n, [&](int64_t i, int count) {
    V g = LoadSome(gate + i, count), u = LoadSome(up + i, count);
    if (gate_bias != nullptr) g = g + LoadSome(gate_bias + i, count);
    if (up_bias != nullptr) u = u + LoadSome(up_bias + i, count);
    StoreSome(gate + i, Activate(g, activation) * u, count);
  });
}

INLINE V Capped(V x, float softcap) {
  return softcap == 0.0f ? x : Splat(softcap) * Tanh(x / Splat(softcap));
}

inline void LogSumRow(float* x, int64_t n, float scale, float softcap, float* top, float* total) {
  const V lowest = Splat(-__builtin_inff());
  V high = lowest;
  Runs(n, [&](int64_t i, int count) {
    V v = LoadSome(x + i, count);
    if (scale != 1.0f) v = v * Splat(scale);
    v = Capped(v, softcap);
    StoreSome(x + i, v, count);
    if (count == 16) {
      high = Max(v, high);
    } else {
      float lanes[16];
      Store(lanes, lowest);
      StoreSome(lanes, v, count);
      high = Max(Load(lanes), high);
    }
  });
  const float largest = Largest(high);
  V sum = Splat(0.0f);
  Runs(n, [&](int64_t i, int count) {
    const V v = Exp(LoadSome(x + i, count) - Splat(largest));
    if (count == 16) {
      sum = sum + v;
    } else {
      float lanes[16] = {};
      StoreSome(lanes, v, count);
      sum = sum + Load(lanes);
    }
  });
  *top = largest;
  *total = Sum(sum);
}

}  // namespace
}  // namespace inferax
