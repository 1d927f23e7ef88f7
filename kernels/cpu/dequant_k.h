// Decoders of the k-quants (256 weights under a float16 super-scale) and of the i-quants (codes into a grid).
#pragma once

#include "dequant.h"

namespace inferax {
namespace {

// Scales are made for a whole block at once and read back one by one.

struct Q2_K {
  static constexpr int kId = 10, kBlock = 256, kBytes = 84;
  template <typename F>
  INLINE void Decode(const uint8_t* b, const int8_t*, F&& emit) {
    float scale[16], minimum[16];
    Store(scale, Splat(HalfAt(b + 80)) * FromBytes(LoadBytes(b) & 15));
    Store(minimum, Splat(-HalfAt(b + 82)) * FromBytes(LoadBytes(b) >> 4));
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; ++i) {
      const B16 q = LoadBytes(b + 16 + 32 * (i / 8) + 16 * (i % 2)) >> (2 * (i / 2 % 4)) & 3;
      emit(i, Fma(Splat(scale[i]), FromBytes(q), Splat(minimum[i])));
    }
  }
};

struct Q3_K {
  static constexpr int kId = 11, kBlock = 256, kBytes = 110;
  template <typename F>
  INLINE void Decode(const uint8_t* b, const int8_t*, F&& emit) {
    const uint64_t low = QWord(b + 96), high = DWord(b + 104), nibble = 0x0f0f0f0f0f0f0f0f, pair = 0x03030303;
    const B16 top = (B16)U2{(high & pair) | (high >> 2 & pair) << 32, (high >> 4 & pair) | (high >> 6 & pair) << 32};
    float scale[16];
    Store(scale, Splat(HalfAt(b + 108)) * FromSigned((S16)(((B16)U2{low & nibble, low >> 4 & nibble} | top << 4) - 32)));
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; ++i) {
      const B16 q = LoadBytes(b + 32 + 32 * (i / 8) + 16 * (i % 2)) >> (2 * (i / 2 % 4)) & 3;
      const B16 third = LoadBytes(b + 16 * (i % 2)) >> (i / 2) & 1;
      emit(i, Splat(scale[i]) * FromSigned((S16)((q | third << 2) - 4)));
    }
  }
};

// Eight scales, then eight minimums of Q4_K and Q5_K: two float16 over 6-bit numbers packed in 12 bytes.
INLINE void ScalesAndMinimums(const uint8_t* b, float (&to)[16]) {
  const uint64_t low = DWord(b + 4), mid = DWord(b + 8), mixed = DWord(b + 12);
  const uint64_t six = 0x3f3f3f3f, four = 0x0f0f0f0f, two = 0x03030303;
  const uint64_t scales = (low & six) | ((mixed & four) | (low >> 6 & two) << 4) << 32;
  const uint64_t minimums = (mid & six) | ((mixed >> 4 & four) | (mid >> 6 & two) << 4) << 32;
  const V unit = Select(FirstEight(), Splat(HalfAt(b)), Splat(-HalfAt(b + 2)));
  Store(to, unit * FromBytes((B16)U2{scales, minimums}));
}

struct Q4_K {
  static constexpr int kId = 12, kBlock = 256, kBytes = 144;
  template <typename F>
  INLINE void Decode(const uint8_t* b, const int8_t*, F&& emit) {
    float s[16];
    ScalesAndMinimums(b, s);
    for (int i = 0; i < 4; ++i) {
      const B16 q0 = LoadBytes(b + 16 + 32 * i), q1 = LoadBytes(b + 32 + 32 * i);
      const V scale0 = Splat(s[2 * i]), minimum0 = Splat(s[8 + 2 * i]);
      emit(4 * i, Fma(scale0, FromBytes(q0 & 15), minimum0));
      emit(4 * i + 1, Fma(scale0, FromBytes(q1 & 15), minimum0));
      const V scale1 = Splat(s[2 * i + 1]), minimum1 = Splat(s[9 + 2 * i]);
      emit(4 * i + 2, Fma(scale1, FromBytes(q0 >> 4), minimum1));
      emit(4 * i + 3, Fma(scale1, FromBytes(q1 >> 4), minimum1));
    }
  }
};

struct Q5_K {
  static constexpr int kId = 13, kBlock = 256, kBytes = 176;
  template <typename F>
  INLINE void Decode(const uint8_t* b, const int8_t*, F&& emit) {
    float s[16];
    ScalesAndMinimums(b, s);
    const B16 high0 = LoadBytes(b + 16), high1 = LoadBytes(b + 32);
    _Pragma("GCC unroll 8") for (int i = 0; i < 8; ++i) {
      const int shift = 4 * (i % 2);
      const B16 q0 = LoadBytes(b + 48 + 32 * (i / 2)) >> shift & 15, q1 = LoadBytes(b + 64 + 32 * (i / 2)) >> shift & 15;
      const V scale = Splat(s[i]), minimum = Splat(s[8 + i]);
      emit(2 * i, Fma(scale, FromBytes(q0 | (high0 >> i & 1) << 4), minimum));
      emit(2 * i + 1, Fma(scale, FromBytes(q1 | (high1 >> i & 1) << 4), minimum));
    }
  }
};

struct Q6_K {
  static constexpr int kId = 14, kBlock = 256, kBytes = 210;
  template <typename F>
  INLINE void Decode(const uint8_t* b, const int8_t*, F&& emit) {
    float scale[16];
    Store(scale, Splat(HalfAt(b + 208)) * FromSigned((S16)LoadBytes(b + 192)));
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; ++i) {
      const B16 low = LoadBytes(b + 64 * (i / 8) + 16 * (i % 4)) >> (4 * (i / 4 % 2)) & 15;
      const B16 high = LoadBytes(b + 128 + 32 * (i / 8) + 16 * (i % 2)) >> (2 * (i / 2 % 4)) & 3;
      emit(i, Splat(scale[i]) * FromSigned((S16)((low | high << 4) - 32)));
    }
  }
};

// 16 values of a grid whose rows hold 8 or 4.
INLINE S16 Grid8(const int8_t* grid, uint32_t first, uint32_t second) {
  return (S16)U2{QWord(grid + 8 * first), QWord(grid + 8 * second)};
}
INLINE S16 Grid4(const int8_t* grid, const uint32_t (&index)[4]) {
  I4 r = {};
  for (int i = 0; i < 4; ++i) {
    int32_t four;
    std::memcpy(&four, grid + 4 * index[i], 4);
    r[i] = four;
  }
  return (S16)r;
}

// Minus where a bit is set.
INLINE S16 Signed(S16 q, uint32_t bits) {
  const S16 mask = (S16)BitMask(bits);
  return (q ^ mask) - mask;
}
// 7 stored signs, and an eighth that makes the number of minus signs even.
INLINE uint32_t EighthSign(uint32_t seven) {
  return seven | static_cast<uint32_t>(__builtin_parity(seven)) << 7;
}
INLINE float Odd(float d, uint32_t scale, float unit) { return d * (static_cast<float>(2 * scale + 1) * unit); }

struct IQ2_XXS {
  static constexpr int kId = 16, kBlock = 256, kBytes = 66, kGrid = 256 * 8;
  template <typename F>
  INLINE void Decode(const uint8_t* b, const int8_t* grid, F&& emit) {
    const float d = HalfAt(b);
    for (int i = 0; i < 8; ++i) {
      const uint8_t* index = b + 2 + 8 * i;
      const uint32_t word = DWord(index + 4);
      const V scale = Splat(Odd(d, word >> 28, 0.125f));
      for (int j = 0; j < 2; ++j) {
        const uint32_t signs = EighthSign(word >> (14 * j) & 127) | EighthSign(word >> (14 * j + 7) & 127) << 8;
        emit(2 * i + j, scale * FromSigned(Signed(Grid8(grid, index[2 * j], index[2 * j + 1]), signs)));
      }
    }
  }
};

struct IQ2_XS {
  static constexpr int kId = 17, kBlock = 256, kBytes = 74, kGrid = 512 * 8;
  template <typename F>
  INLINE void Decode(const uint8_t* b, const int8_t* grid, F&& emit) {
    const float d = HalfAt(b);
    for (int i = 0; i < 16; ++i) {
      const uint32_t first = Word(b + 2 + 4 * i), second = Word(b + 4 + 4 * i);
      const V scale = Splat(Odd(d, b[66 + i / 2] >> (4 * (i % 2)) & 15, 0.125f));
      const uint32_t signs = EighthSign(first >> 9) | EighthSign(second >> 9) << 8;
      emit(i, scale * FromSigned(Signed(Grid8(grid, first & 511, second & 511), signs)));
    }
  }
};

struct IQ2_S {
  static constexpr int kId = 22, kBlock = 256, kBytes = 82, kGrid = 1024 * 8;
  template <typename F>
  INLINE void Decode(const uint8_t* b, const int8_t* grid, F&& emit) {
    const float d = HalfAt(b);
    for (int i = 0; i < 16; ++i) {
      const uint32_t high = b[66 + i / 2] >> (4 * (i % 2));
      const uint32_t first = b[2 + 2 * i] | (high & 3) << 8, second = b[3 + 2 * i] | (high >> 2 & 3) << 8;
      const V scale = Splat(Odd(d, b[74 + i / 2] >> (4 * (i % 2)) & 15, 0.125f));
      emit(i, scale * FromSigned(Signed(Grid8(grid, first, second), Word(b + 34 + 2 * i))));
    }
  }
};

struct IQ3_XXS {
  static constexpr int kId = 18, kBlock = 256, kBytes = 98, kGrid = 256 * 4;
  template <typename F>
  INLINE void Decode(const uint8_t* b, const int8_t* grid, F&& emit) {
    const float d = HalfAt(b);
    for (int i = 0; i < 16; ++i) {
      const uint8_t* q = b + 2 + 4 * i;
      const uint32_t word = DWord(b + 66 + 4 * (i / 2)), fields = word >> (14 * (i % 2));
      const uint32_t signs = EighthSign(fields & 127) | EighthSign(fields >> 7 & 127) << 8;
      const uint32_t index[4] = {q[0], q[1], q[2], q[3]};
      emit(i, Splat(Odd(d, word >> 28, 0.25f)) * FromSigned(Signed(Grid4(grid, index), signs)));
    }
  }
};

struct IQ3_S {
  static constexpr int kId = 21, kBlock = 256, kBytes = 110, kGrid = 512 * 4;
  template <typename F>
  INLINE void Decode(const uint8_t* b, const int8_t* grid, F&& emit) {
    const float d = HalfAt(b);
    for (int i = 0; i < 16; ++i) {
      const uint8_t* q = b + 2 + 4 * i;
      const uint32_t high = b[66 + i / 2] >> (4 * (i % 2));
      uint32_t index[4];
      for (int j = 0; j < 4; ++j) index[j] = q[j] | (high >> j & 1) << 8;
      const V scale = Splat(Odd(d, b[106 + i / 4] >> (4 * (i / 2 % 2)) & 15, 1.0f));
      emit(i, scale * FromSigned(Signed(Grid4(grid, index), Word(b + 74 + 2 * i))));
    }
  }
};

// Eighths: 8 * grid value + 1, or - 1 where the bit is set; the eight weights of a grid row share it.
INLINE V Eighths(const int8_t* grid, uint32_t first, uint32_t second, uint32_t minus) {
  const S16 shift = (S16)(BitMask((minus & 1 ? 0xff : 0) | (minus & 2 ? 0xff00 : 0)) | 1);
  return FromSigned(Grid8(grid, first, second) * 8 + shift);
}

struct IQ1_S {
  static constexpr int kId = 19, kBlock = 256, kBytes = 50, kGrid = 2048 * 8;
  template <typename F>
  INLINE void Decode(const uint8_t* b, const int8_t* grid, F&& emit) {
    const float d = HalfAt(b);
    for (int i = 0; i < 16; ++i) {
      const uint32_t head = Word(b + 34 + 2 * (i / 2)), fields = head >> (6 * (i % 2));
      const uint32_t first = b[2 + 2 * i] | (fields & 7) << 8, second = b[3 + 2 * i] | (fields >> 3 & 7) << 8;
      emit(i, Splat(Odd(d, head >> 12 & 7, 0.125f)) * Eighths(grid, first, second, head >> 15 ? 3 : 0));
    }
  }
};

struct IQ1_M {
  static constexpr int kId = 29, kBlock = 256, kBytes = 56, kGrid = 2048 * 8;
  template <typename F>
  INLINE void Decode(const uint8_t* b, const int8_t* grid, F&& emit) {
    uint32_t half = 0;  // the float16 super-scale, a nibble in each word of scales
    for (int i = 0; i < 4; ++i) half |= static_cast<uint32_t>(Word(b + 48 + 2 * i) >> 12) << (4 * i);
    const float d = FromHalf(static_cast<uint16_t>(half));
    for (int i = 0; i < 16; ++i) {
      const uint32_t high = b[32 + i], scale = Word(b + 48 + 2 * (i / 4)) >> (3 * (i % 4)) & 7;
      const uint32_t first = b[2 * i] | (high & 7) << 8, second = b[2 * i + 1] | (high >> 4 & 7) << 8;
      const uint32_t minus = (high >> 3 & 1) | (high >> 7 & 1) << 1;
      emit(i, Splat(Odd(d, scale, 0.125f)) * Eighths(grid, first, second, minus));
    }
  }
};

#define EACH_TYPE(do)                                                                                       \
  do(DenseF32) do(DenseF16) do(DenseBF16) do(Q4_0) do(Q4_1) do(Q5_0) do(Q5_1) do(Q8_0) do(Q8_1) do(Q8_K)     \
  do(Q1_0) do(Q2_0) do(IQ4_NL) do(IQ4_XS) do(MXFP4) do(NVFP4) do(TQ1_0) do(TQ2_0) do(Q2_K) do(Q3_K) do(Q4_K) \
  do(Q5_K) do(Q6_K) do(IQ2_XXS) do(IQ2_XS) do(IQ2_S) do(IQ3_XXS) do(IQ3_S) do(IQ1_S) do(IQ1_M)

}  // namespace
}  // namespace inferax
