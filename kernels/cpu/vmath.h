// Elementary functions on vectors, to one or two units in the last place.
#pragma once

#include "simd.h"
#include "tier.h"

namespace inferax {
namespace {

// Cody and Waite's reduction by multiples of ln 2, and the polynomial of Cephes' expf. Below the normal numbers it is 0.
INLINE V Exp(V x) {
  const V magic = Splat(12582912.0f);  // 1.5 * 2**23: adding it rounds to an integer, in the low bits
  const V shifted = Fma(x, Splat(1.44269504f), magic);
  const V n = shifted - magic;
  V r = Fma(n, Splat(-0.693359375f), x);
  r = Fma(n, Splat(2.12194440e-4f), r);
  V p = Splat(1.9875691500e-4f);
  p = Fma(p, r, Splat(1.3981999507e-3f));
  p = Fma(p, r, Splat(8.3334519073e-3f));
  p = Fma(p, r, Splat(4.1665795894e-2f));
  p = Fma(p, r, Splat(1.6666665459e-1f));
  p = Fma(p, r, Splat(5.0000001201e-1f));
  p = Fma(p, r * r, r) + Splat(1.0f);
  VI power;
  const VI bits = Bits(shifted);
  // Unsigned, since far outside its range this overflows; what it gives there is replaced below.
  EACH_PART power.p[i] = (NI)(((NU)bits.p[i] - 0x4b400000u + 127u) << 23);
  V y = p * FromBits(power);
  y = Select(x > Splat(88.37f), Splat(__builtin_inff()), y);
  return Select(x < Splat(-87.33f), Splat(0.0f), y);
}

// Near zero the polynomial of Cephes' tanhf, elsewhere by the exponential.
INLINE V Tanh(V x) {
  const V z = x * x;
  V p = Splat(-5.70498872745e-3f);
  p = Fma(p, z, Splat(2.06390887954e-2f));
  p = Fma(p, z, Splat(-5.37397155531e-2f));
  p = Fma(p, z, Splat(1.33314422036e-1f));
  p = Fma(p, z, Splat(-3.33332819422e-1f));
  const V near = Fma(p * z, x, x);
  const V size = Abs(x);
  const V far = Splat(1.0f) - Splat(2.0f) / (Exp(size + size) + Splat(1.0f));
  const V negative = Splat(0.0f) - far;
  return Select(size < Splat(0.625f), near, Select(x < Splat(0.0f), negative, far));
}

// The complementary error function for z >= 0, to a relative 1e-6, small values too (Press et al., Numerical Recipes,
// section 6.2: a Chebyshev fit of its logarithm).
INLINE V Erfc(V z) {
  const V t = Splat(1.0f) / Fma(z, Splat(0.5f), Splat(1.0f));
  V p = Splat(0.17087277f);
  p = Fma(p, t, Splat(-0.82215223f));
  p = Fma(p, t, Splat(1.48851587f));
  p = Fma(p, t, Splat(-1.13520398f));
  p = Fma(p, t, Splat(0.27886807f));
  p = Fma(p, t, Splat(-0.18628806f));
  p = Fma(p, t, Splat(0.09678418f));
  p = Fma(p, t, Splat(0.37409196f));
  p = Fma(p, t, Splat(1.00002368f));
  p = Fma(p, t, Splat(-1.26551223f));
  return t * Exp(Fma(Splat(0.0f) - z, z, p));
}

INLINE V Activate(V x, int32_t activation) {
  const V one = Splat(1.0f);
  switch (activation) {
    case kSilu:
      return x / (one + Exp(Splat(0.0f) - x));
    case kGelu: {
      const V tail = Splat(0.5f) * Erfc(Abs(x) * Splat(0.70710678f));  // of the normal distribution beyond |x|
      return x * Select(x < Splat(0.0f), tail, one - tail);
    }
    case kGeluTanh: {
      // x * (1 + tanh(u)) / 2, without the cancellation.
      const V u = Splat(0.79788456f) * Fma(x * x * x, Splat(0.044715f), x);
      return x / (one + Exp(Splat(-2.0f) * u));
    }
    case kRelu:
      return Select(x < Splat(0.0f), Splat(0.0f), x);  // NaN stays
    default:
      return x;
  }
}

// Calls f(i, count) for each run of 16 elements of [0, n); the last may be shorter.
template <typename F>
INLINE void Runs(int64_t n, F&& f) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) f(i, 16);
  if (i < n) f(i, static_cast<int>(n - i));
}

INLINE V LoadSome(const float* x, int count) {
  if (count == 16) return Load(x);
  float a[16] = {};
  for (int i = 0; i < count; ++i) a[i] = x[i];
  return Load(a);
}

INLINE void StoreSome(float* to, V x, int count) {
  if (count == 16) return Store(to, x);
  float a[16];
  Store(a, x);
  for (int i = 0; i < count; ++i) to[i] = a[i];
}

}  // namespace
}  // namespace inferax
