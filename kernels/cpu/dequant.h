// Block decoders: each hands the values of one block to `emit(i, V)`, 16 at a time, in ascending order. Values are
// bitwise those of ops/ggml (every product is exact in float32; only the addition of a minimum rounds).
#pragma once

#include "simd.h"
#include "tier.h"

namespace inferax {
namespace {

struct DenseF32 {
  static constexpr int kId = kF32, kBlock = 16, kBytes = 64;
  template <typename F>
  INLINE void Decode(const uint8_t* b, const int8_t*, F&& emit) {
    emit(0, Load(reinterpret_cast<const float*>(b)));
  }
};

struct DenseF16 {
  static constexpr int kId = kF16, kBlock = 16, kBytes = 32;
  template <typename F>
  INLINE void Decode(const uint8_t* b, const int8_t*, F&& emit) {
    emit(0, LoadHalf(b));
  }
};

struct DenseBF16 {
  static constexpr int kId = kBF16, kBlock = 16, kBytes = 32;
  template <typename F>
  INLINE void Decode(const uint8_t* b, const int8_t*, F&& emit) {
    emit(0, LoadBFloat(b));
  }
};

INLINE uint16_t Word(const uint8_t* x) { return static_cast<uint16_t>(x[0] | x[1] << 8); }
INLINE uint32_t DWord(const uint8_t* x) {
  uint32_t r;
  std::memcpy(&r, x, 4);
  return __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? r : __builtin_bswap32(r);
}
INLINE uint64_t QWord(const void* x) {
  uint64_t r;
  std::memcpy(&r, x, 8);
  return r;
}

struct Q4_0 {
  static constexpr int kId = 2, kBlock = 32, kBytes = 18;
  template <typename F>
  INLINE void Decode(const uint8_t* b, const int8_t*, F&& emit) {
    const V d = Splat(HalfAt(b));
    const B16 q = LoadBytes(b + 2);
    emit(0, d * FromSigned((S16)((q & 15) - 8)));
    emit(1, d * FromSigned((S16)((q >> 4) - 8)));
  }
};

struct Q4_1 {
  static constexpr int kId = 3, kBlock = 32, kBytes = 20;
  template <typename F>
  INLINE void Decode(const uint8_t* b, const int8_t*, F&& emit) {
    const V d = Splat(HalfAt(b)), m = Splat(HalfAt(b + 2));
    const B16 q = LoadBytes(b + 4);
    emit(0, Fma(d, FromBytes(q & 15), m));
    emit(1, Fma(d, FromBytes(q >> 4), m));
  }
};

struct Q5_0 {
  static constexpr int kId = 6, kBlock = 32, kBytes = 22;
  template <typename F>
  INLINE void Decode(const uint8_t* b, const int8_t*, F&& emit) {
    const V d = Splat(HalfAt(b));
    const B16 q = LoadBytes(b + 6), high0 = BitMask(Word(b + 2)), high1 = BitMask(Word(b + 4));
    emit(0, d * FromSigned((S16)(((q & 15) | (high0 & 16)) - 16)));
    emit(1, d * FromSigned((S16)(((q >> 4) | (high1 & 16)) - 16)));
  }
};

struct Q5_1 {
  static constexpr int kId = 7, kBlock = 32, kBytes = 24;
  template <typename F>
  INLINE void Decode(const uint8_t* b, const int8_t*, F&& emit) {
    const V d = Splat(HalfAt(b)), m = Splat(HalfAt(b + 2));
    const B16 q = LoadBytes(b + 8), high0 = BitMask(Word(b + 4)), high1 = BitMask(Word(b + 6));
    emit(0, Fma(d, FromBytes((q & 15) | (high0 & 16)), m));
    emit(1, Fma(d, FromBytes((q >> 4) | (high1 & 16)), m));
  }
};

template <int id, int bytes, int at>
struct Q8 {
  static constexpr int kId = id, kBlock = 32, kBytes = bytes;
  template <typename F>
  INLINE void Decode(const uint8_t* b, const int8_t*, F&& emit) {
    const V d = Splat(HalfAt(b));
    emit(0, d * FromSigned((S16)LoadBytes(b + at)));
    emit(1, d * FromSigned((S16)LoadBytes(b + at + 16)));
  }
};
using Q8_0 = Q8<8, 34, 2>;
using Q8_1 = Q8<9, 36, 4>;

struct Q8_K {
  static constexpr int kId = 15, kBlock = 256, kBytes = 292;
  template <typename F>
  INLINE void Decode(const uint8_t* b, const int8_t*, F&& emit) {
    float scale;
    std::memcpy(&scale, b, 4);
    const V d = Splat(scale);
    for (int i = 0; i < 16; ++i) emit(i, d * FromSigned((S16)LoadBytes(b + 4 + 16 * i)));
  }
};

struct Q1_0 {
  static constexpr int kId = 41, kBlock = 128, kBytes = 18;
  template <typename F>
  INLINE void Decode(const uint8_t* b, const int8_t*, F&& emit) {
    const V d = Splat(HalfAt(b));
    // 2 * bit - 1: the mask is -1 where the bit is set.
    for (int i = 0; i < 8; ++i) emit(i, d * FromSigned((S16)(~BitMask(Word(b + 2 + 2 * i)) | 1)));
  }
};

struct Q2_0 {
  static constexpr int kId = 42, kBlock = 64, kBytes = 18;
  template <typename F>
  INLINE void Decode(const uint8_t* b, const int8_t*, F&& emit) {
    const V d = Splat(HalfAt(b));
    for (int i = 0; i < 4; ++i) {
      S16 q;
      for (int j = 0; j < 16; ++j) q[j] = static_cast<int8_t>((b[2 + 4 * i + j / 4] >> (2 * (j % 4)) & 3) - 1);
      emit(i, d * FromSigned(q));
    }
  }
};

INLINE S16 IQ4Values() { return S16{-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}; }
// Twice the numbers of FP4 E2M1; the scales are halved in turn.
INLINE S16 FP4Values() { return S16{0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}; }

struct IQ4_NL {
  static constexpr int kId = 20, kBlock = 32, kBytes = 18;
  template <typename F>
  INLINE void Decode(const uint8_t* b, const int8_t*, F&& emit) {
    const V d = Splat(HalfAt(b));
    const B16 q = LoadBytes(b + 2);
    emit(0, d * FromSigned(Lookup(IQ4Values(), q & 15)));
    emit(1, d * FromSigned(Lookup(IQ4Values(), q >> 4)));
  }
};

struct IQ4_XS {
  static constexpr int kId = 23, kBlock = 256, kBytes = 136;
  template <typename F>
  INLINE void Decode(const uint8_t* b, const int8_t*, F&& emit) {
    const float d = HalfAt(b);
    const uint32_t high = Word(b + 2);
    for (int i = 0; i < 8; ++i) {
      const int scale = (b[4 + i / 2] >> (4 * (i % 2)) & 15) | (high >> (2 * i) & 3) << 4;
      const V s = Splat(d * static_cast<float>(scale - 32));
      const B16 q = LoadBytes(b + 8 + 16 * i);
      emit(2 * i, s * FromSigned(Lookup(IQ4Values(), q & 15)));
      emit(2 * i + 1, s * FromSigned(Lookup(IQ4Values(), q >> 4)));
    }
  }
};

struct MXFP4 {
  static constexpr int kId = 39, kBlock = 32, kBytes = 17;
  template <typename F>
  INLINE void Decode(const uint8_t* b, const int8_t*, F&& emit) {
    // 2**(exponent - 128); the two smallest are subnormal.
    const uint32_t bits = b[0] < 2 ? 0x200000u << b[0] : static_cast<uint32_t>(b[0] - 1) << 23;
    float scale;
    std::memcpy(&scale, &bits, 4);
    const V d = Splat(scale);
    const B16 q = LoadBytes(b + 1);
    emit(0, d * FromSigned(Lookup(FP4Values(), q & 15)));
    emit(1, d * FromSigned(Lookup(FP4Values(), q >> 4)));
  }
};

struct NVFP4 {
  static constexpr int kId = 40, kBlock = 64, kBytes = 36;
  template <typename F>
  INLINE void Decode(const uint8_t* b, const int8_t*, F&& emit) {
    for (int i = 0; i < 4; ++i) {
      // Unsigned E4M3 with bias 7, halved; the top bit is not read, and 0x7f is zero.
      const uint32_t code = b[i], exponent = code >> 3 & 15;
      const uint32_t mantissa = code == 0x7f ? 0 : (code & 7) + (exponent > 0 ? 8 : 0);
      const uint32_t bits = ((exponent > 1 ? exponent : 1) - 11 + 127) << 23;
      float power;
      std::memcpy(&power, &bits, 4);
      const uint64_t eight = QWord(b + 4 + 8 * i), nibble = 0x0f0f0f0f0f0f0f0f;
      const B16 q = (B16)U2{eight & nibble, eight >> 4 & nibble};
      emit(i, Splat(static_cast<float>(mantissa) * power) * FromSigned(Lookup(FP4Values(), q)));
    }
  }
};

struct TQ1_0 {
  static constexpr int kId = 34, kBlock = 256, kBytes = 54;
  // Base-3 digits, highest first: a byte is ceil(number * 256 / 243), so each digit is the carry of a times 3.
  INLINE void Digits(const uint8_t* x, int count, int width, int8_t* to) {
    for (int digit = 0, power = 1; digit < count; ++digit, power *= 3) {
      for (int j = 0; j < width; ++j) {
        *to++ = static_cast<int8_t>((static_cast<uint8_t>(x[j] * power) * 3 >> 8) - 1);
      }
    }
  }
  template <typename F>
  INLINE void Decode(const uint8_t* b, const int8_t*, F&& emit) {
    int8_t q[256];
    Digits(b, 5, 32, q);
    Digits(b + 32, 5, 16, q + 160);
    Digits(b + 48, 4, 4, q + 240);
    const V d = Splat(HalfAt(b + 52));
    for (int i = 0; i < 16; ++i) {
      S16 codes;
      std::memcpy(&codes, q + 16 * i, sizeof codes);
      emit(i, d * FromSigned(codes));
    }
  }
};

struct TQ2_0 {
  static constexpr int kId = 35, kBlock = 256, kBytes = 66;
  template <typename F>
  INLINE void Decode(const uint8_t* b, const int8_t*, F&& emit) {
    const V d = Splat(HalfAt(b + 64));
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; ++i) {
      const B16 q = LoadBytes(b + 32 * (i / 8) + 16 * (i % 2)) >> (2 * (i / 2 % 4));
      emit(i, d * FromSigned((S16)((q & 3) - 1)));
    }
  }
};

}  // namespace
}  // namespace inferax
