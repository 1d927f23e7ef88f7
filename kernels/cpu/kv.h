// How the cache holds a head's numbers; ops/cache.py states it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "tier.h"

namespace inferax {
namespace {

inline bool HasScale(int32_t type) { return type == kI8 || type == kE4M3; }

inline int64_t HeadBytes(int32_t type, int64_t width) {
  return HasScale(type) ? width + 4 : width * (type == kF32 ? 4 : 2);
}

inline uint32_t BitsOf(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

// All of these round to nearest even, and a NaN stays one.
inline uint16_t ToBFloat(float x) {
  const uint32_t bits = BitsOf(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 64);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline uint16_t ToHalf(float x) {
  uint32_t bits = BitsOf(x);
  const uint32_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (bits >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // 65520 and more round to infinity
  if (bits < 0x38800000) {  // subnormal: adding 1/2 leaves the float16's bits, rounded, in the low end
    float y;
    std::memcpy(&y, &bits, 4);
    return static_cast<uint16_t>(sign | (BitsOf(y + 0.5f) - 0x3f000000));
  }
  bits += 0xfff + (bits >> 13 & 1);
  return static_cast<uint16_t>(sign | ((bits - 0x38000000) >> 13));
}

// The two below take numbers within the limit only.
inline uint8_t ToInt8(float x) { return static_cast<uint8_t>(BitsOf(x + 12582912.0f)); }  // 1.5 * 2**23

inline uint8_t ToE4M3(float x) {
  const uint32_t sign = BitsOf(x) >> 24 & 0x80, bits = BitsOf(x) & 0x7fffffff;
  float size;
  std::memcpy(&size, &bits, 4);
  const uint32_t normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
  const uint32_t subnormal = BitsOf(size + 0x1p14f) - 0x46800000;  // in units of 2**-9
  return static_cast<uint8_t>(sign | (bits < 0x3c800000 ? subnormal : normal));
}

template <typename Encode>
void StoreCodes(const float* x, int64_t width, float limit, float inverse_limit, Encode encode, uint8_t* to) {
  uint32_t top = 0;  // as bits, an infinity is above all numbers and a NaN above that
  for (int64_t i = 0; i < width; ++i) top = std::max(top, BitsOf(x[i]) & 0x7fffffff);
  float largest;
  std::memcpy(&largest, &top, 4);
  float scale = largest * inverse_limit;
  const bool finite = top < 0x7f800000;
  if (finite && scale >= 0x1p-100f) {
    const float factor = limit / largest;
    for (int64_t i = 0; i < width; ++i) to[i] = encode(x[i] * factor);
  } else {
    std::memset(to, 0, static_cast<size_t>(width));
    scale = finite ? 0.0f : NAN;
  }
  std::memcpy(to + width, &scale, 4);
}

inline void StoreHead(int32_t type, const float* x, int64_t width, uint8_t* to) {
  switch (type) {
    case kI8: return StoreCodes(x, width, 127.0f, 1 / 127.0f, ToInt8, to);
    case kE4M3: return StoreCodes(x, width, 448.0f, 1 / 448.0f, ToE4M3, to);
    case kF32: std::memcpy(to, x, static_cast<size_t>(width) * 4); return;
    default:
      for (int64_t i = 0; i < width; ++i) {
        const uint16_t bits = type == kBF16 ? ToBFloat(x[i]) : ToHalf(x[i]);
        std::memcpy(to + 2 * i, &bits, 2);
      }
  }
}

}  // namespace
}  // namespace inferax
