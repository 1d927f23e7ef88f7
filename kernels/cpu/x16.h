// The form x16: 16 rows of a packed weight side by side, in words of four bytes; how each type is read in it, and the
// whole-number products of such words.
#pragma once

#include "gemm.h"

namespace inferax {
namespace {

// Four bytes of each of 16 rows. A word's bytes are consecutive elements of its row.
typedef uint8_t NB __attribute__((vector_size(4 * kNative)));
typedef uint16_t NW __attribute__((vector_size(4 * kNative)));
struct B64 {
  NB p[kParts];
};

INLINE B64 Load64(const uint8_t* x) {
  B64 r;
  EACH_PART std::memcpy(&r.p[i], x + i * 4 * kNative, 4 * kNative);
  return r;
}
INLINE void Store64(uint8_t* to, B64 x) { EACH_PART std::memcpy(to + i * 4 * kNative, &x.p[i], 4 * kNative); }
INLINE B64 operator&(B64 x, uint8_t mask) {
  B64 r;
  EACH_PART r.p[i] = x.p[i] & mask;
  return r;
}
INLINE B64 operator|(B64 x, B64 y) {
  B64 r;
  EACH_PART r.p[i] = x.p[i] | y.p[i];
  return r;
}
// The bytes' bits from `n` up; what comes in from the neighbouring byte is for the caller to mask.
INLINE B64 Right(B64 x, int n) {
  B64 r;
  EACH_PART r.p[i] = (NB)((NW)x.p[i] >> n);
  return r;
}
INLINE B64 Left(B64 x, int n) {
  B64 r;
  EACH_PART r.p[i] = (NB)((NW)x.p[i] << n);
  return r;
}
INLINE VI Lanes(B64 x) {
  VI r;
  EACH_PART r.p[i] = (NI)x.p[i];
  return r;
}
INLINE B64 FromLanes(VI x) {
  B64 r;
  EACH_PART r.p[i] = (NB)x.p[i];
  return r;
}
INLINE VI ShiftRight(VI x, int n) {  // of unsigned lanes
  VI r;
  EACH_PART r.p[i] = (NI)((NU)x.p[i] >> n);
  return r;
}
INLINE VI ShiftLeft(VI x, int n) {
  VI r;
  EACH_PART r.p[i] = x.p[i] << n;
  return r;
}
INLINE VI ShiftSigned(VI x, int n) {
  VI r;
  EACH_PART r.p[i] = x.p[i] >> n;
  return r;
}
INLINE VI operator|(VI a, VI b) {
  VI r;
  EACH_PART r.p[i] = a.p[i] | b.p[i];
  return r;
}
INLINE VI operator+(VI a, VI b) {
  VI r;
  EACH_PART r.p[i] = a.p[i] + b.p[i];
  return r;
}
INLINE VI operator*(VI a, int32_t b) {
  VI r;
  EACH_PART r.p[i] = a.p[i] * b;
  return r;
}
INLINE VI operator-(VI a, int32_t b) {
  VI r;
  EACH_PART r.p[i] = a.p[i] - b;
  return r;
}
INLINE V ToFloat(VI x) {
  V r;
  EACH_PART r.p[i] = __builtin_convertvector(x.p[i], N);
  return r;
}
// Sixteen float16 numbers, at every second place from `x` on.
INLINE V HalvesOfWords(B64 x, bool upper) {
#if defined(__AVX512F__)
  const __m512i w = upper ? _mm512_srli_epi32((__m512i)x.p[0], 16) : (__m512i)x.p[0];
  return {{(N)_mm512_cvtph_ps(_mm512_cvtepi32_epi16(w))}};
#else
  uint8_t bytes[64];
  float r[16];
  Store64(bytes, x);
  for (int i = 0; i < 16; ++i) r[i] = HalfAt(bytes + 4 * i + (upper ? 2 : 0));
  return Load(r);
#endif
}

// acc[r] += sum of codes[4 r + j] * x[j] for codes below 128, and for signed codes in `Wide` form.
// Where the machine multiplies unsigned by signed bytes only, signed codes are moved up by kWide, which the sum of x
// takes back.
#if defined(__AVX512VNNI__)
inline constexpr int kWide = 128;
INLINE B64 Wide(B64 codes) {
  codes.p[0] = codes.p[0] ^ 128;
  return codes;
}
INLINE VI Dot(VI acc, B64 codes, const int8_t* x) {
  // The compiler would broadcast to a register first, in an instruction of its own.
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc.p[0]) : "v"(codes.p[0]), "m"(*reinterpret_cast<const int32_t(*)[1]>(x)));
  return acc;
}
INLINE VI DotWide(VI acc, B64 codes, const int8_t* x) { return Dot(acc, codes, x); }
#else
inline constexpr int kWide = 0;
INLINE B64 Wide(B64 codes) { return codes; }
#if defined(__AVX512BW__)
INLINE VI Dot(VI acc, B64 codes, const int8_t* x) {
  int32_t word;
  std::memcpy(&word, x, 4);
  const __m512i pairs = _mm512_maddubs_epi16((__m512i)codes.p[0], _mm512_set1_epi32(word));
  acc.p[0] = acc.p[0] + (NI)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
  return acc;
}
INLINE VI DotWide(VI acc, B64 codes, const int8_t* x) {
  int32_t word;
  std::memcpy(&word, x, 4);
  const __m512i c = (__m512i)codes.p[0], v = _mm512_set1_epi32(word);
  const __m512i turned = _mm512_mask_sub_epi8(v, _mm512_movepi8_mask(c), _mm512_setzero_si512(), v);
  const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(c), turned);
  acc.p[0] = acc.p[0] + (NI)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
  return acc;
}
#elif defined(__AVX2__)
INLINE VI Dot(VI acc, B64 codes, const int8_t* x) {
  int32_t word;
  std::memcpy(&word, x, 4);
  EACH_PART {
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)codes.p[i], _mm256_set1_epi32(word));
    acc.p[i] = acc.p[i] + (NI)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  }
  return acc;
}
INLINE VI DotWide(VI acc, B64 codes, const int8_t* x) {
  int32_t word;
  std::memcpy(&word, x, 4);
  EACH_PART {
    const __m256i c = (__m256i)codes.p[i];
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(c), _mm256_sign_epi8(_mm256_set1_epi32(word), c));
    acc.p[i] = acc.p[i] + (NI)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  }
  return acc;
}
#elif defined(__ARM_FEATURE_DOTPROD)
INLINE VI Dot(VI acc, B64 codes, const int8_t* x) {
  int32_t word;
  std::memcpy(&word, x, 4);
  EACH_PART acc.p[i] = (NI)vdotq_s32((int32x4_t)acc.p[i], (int8x16_t)codes.p[i], vreinterpretq_s8_s32(vdupq_n_s32(word)));
  return acc;
}
INLINE VI DotWide(VI acc, B64 codes, const int8_t* x) { return Dot(acc, codes, x); }
#else
INLINE VI DotWide(VI acc, B64 codes, const int8_t* x) {
  EACH_PART {
    const NI c = (NI)codes.p[i];
    acc.p[i] = acc.p[i] + (c << 24 >> 24) * x[0] + (c << 16 >> 24) * x[1] + (c << 8 >> 24) * x[2] + (c >> 24) * x[3];
  }
  return acc;
}
INLINE VI Dot(VI acc, B64 codes, const int8_t* x) { return DotWide(acc, codes, x); }
#endif
#endif

// How each type's tile of 16 blocks is read. `Each` hands over groups of codes in ascending order: emit(group, codes,
// scale, minimum), where a weight is scale * (code - kOffset) + minimum. Groups have kGroup elements, kGroup / 4 words.

template <int id, int at, int bytes, bool minimum>
struct Tile4 {  // Q4_0, Q4_1
  static constexpr int kId = id, kBlock = 32, kBytes = bytes, kGroup = 32, kOffset = minimum ? 0 : 8;
  static constexpr bool kMinimum = minimum, kSigned = false;
  template <typename F>
  INLINE void Each(const uint8_t* t, F&& emit) {
    V scale, low = Splat(0.0f);
    if constexpr (minimum) {
      const B64 head = Load64(t);
      scale = HalvesOfWords(head, false);
      low = HalvesOfWords(head, true);
    } else {
      scale = LoadHalf(t);
    }
    B64 codes[8];
    _Pragma("GCC unroll 4") for (int w = 0; w < 4; ++w) {
      const B64 q = Load64(t + 16 * at + 64 * w);
      codes[w] = q & 15;
      codes[4 + w] = Right(q, 4) & 15;
    }
    emit(0, codes, scale, low);
  }
};

template <int id, int at, int bytes, bool minimum>
struct Tile5 {  // Q5_0, Q5_1
  static constexpr int kId = id, kBlock = 32, kBytes = bytes, kGroup = 32, kOffset = minimum ? 0 : 16;
  static constexpr bool kMinimum = minimum, kSigned = false;
  template <typename F>
  INLINE void Each(const uint8_t* t, F&& emit) {
    V scale, low = Splat(0.0f);
    if constexpr (minimum) {
      const B64 head = Load64(t);
      scale = HalvesOfWords(head, false);
      low = HalvesOfWords(head, true);
    } else {
      scale = LoadHalf(t);
    }
    const VI high = Lanes(Load64(t + 16 * at - 64));
    B64 codes[8];
    _Pragma("GCC unroll 4") for (int w = 0; w < 4; ++w) {
      const B64 q = Load64(t + 16 * at + 64 * w);
      codes[w] = (q & 15) | Fifth(high, 4 * w);
      codes[4 + w] = (Right(q, 4) & 15) | Fifth(high, 16 + 4 * w);
    }
    emit(0, codes, scale, low);
  }
  // Bits [from, from + 4) of each lane, as bit 4 of four bytes.
  INLINE B64 Fifth(VI high, int from) {
    const VI four = ShiftRight(high, from) & SplatI(15);
    return FromLanes(ShiftLeft((four * 0x00204081) & SplatI(0x01010101), 4));
  }
};

struct TileQ8_0 {
  static constexpr int kId = 8, kBlock = 32, kBytes = 34, kGroup = 32, kOffset = 0;
  static constexpr bool kMinimum = false, kSigned = true;
  template <typename F>
  INLINE void Each(const uint8_t* t, F&& emit) {
    B64 codes[8];
    _Pragma("GCC unroll 8") for (int w = 0; w < 8; ++w) codes[w] = Wide(Load64(t + 32 + 64 * w));
    emit(0, codes, LoadHalf(t), Splat(0.0f));
  }
};

// Values of a 16-entry table by 4-bit codes.
struct Book {
  int8_t value[16];
};
INLINE B64 Values(const Book& book, B64 codes) {
  B64 r;
#if defined(__AVX512BW__)
  const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(book.value)));
  r.p[0] = (NB)_mm512_shuffle_epi8(table, (__m512i)codes.p[0]);
#elif defined(__AVX2__)
  const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(book.value)));
  EACH_PART r.p[i] = (NB)_mm256_shuffle_epi8(table, (__m256i)codes.p[i]);
#else
  S16 table;
  std::memcpy(&table, book.value, 16);
  EACH_PART r.p[i] = (NB)Lookup(table, (B16)codes.p[i]);
#endif
  return r;
}
inline constexpr Book kIq4 = {{-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}};

struct TileIQ4_NL {
  static constexpr int kId = 20, kBlock = 32, kBytes = 18, kGroup = 32, kOffset = 0;
  static constexpr bool kMinimum = false, kSigned = true;
  template <typename F>
  INLINE void Each(const uint8_t* t, F&& emit) {
    B64 codes[8];
    _Pragma("GCC unroll 4") for (int w = 0; w < 4; ++w) {
      const B64 q = Load64(t + 32 + 64 * w);
      codes[w] = Wide(Values(kIq4, q & 15));
      codes[4 + w] = Wide(Values(kIq4, Right(q, 4) & 15));
    }
    emit(0, codes, LoadHalf(t), Splat(0.0f));
  }
};

struct TileIQ4_XS {
  static constexpr int kId = 23, kBlock = 256, kBytes = 136, kGroup = 32, kOffset = 0;
  static constexpr bool kMinimum = false, kSigned = true;
  template <typename F>
  INLINE void Each(const uint8_t* t, F&& emit) {
    const B64 head = Load64(t);
    const V unit = HalvesOfWords(head, false);
    const VI high = ShiftRight(Lanes(head), 16), low = Lanes(Load64(t + 64));
    for (int g = 0; g < 8; ++g) {
      const VI bits = (ShiftRight(low, 4 * g) & SplatI(15)) | ShiftLeft(ShiftRight(high, 2 * g) & SplatI(3), 4);
      B64 codes[8];
      _Pragma("GCC unroll 4") for (int w = 0; w < 4; ++w) {
        const B64 q = Load64(t + 128 + 64 * (4 * g + w));
        codes[w] = Wide(Values(kIq4, q & 15));
        codes[4 + w] = Wide(Values(kIq4, Right(q, 4) & 15));
      }
      emit(g, codes, unit * ToFloat(bits - 32), Splat(0.0f));
    }
  }
};

// Scales and minimums of Q4_K and Q5_K, eight of each.
struct SixBits {
  V unit, least;
  VI low, mid, mixed;
};
INLINE SixBits SixBitsAt(const uint8_t* t) {
  const B64 head = Load64(t);
  return {HalvesOfWords(head, false), Splat(0.0f) - HalvesOfWords(head, true), Lanes(Load64(t + 64)),
          Lanes(Load64(t + 128)), Lanes(Load64(t + 192))};
}
INLINE V Scale(const SixBits& s, int g) {
  const int at = 8 * (g % 4);
  if (g < 4) return s.unit * ToFloat(ShiftRight(s.low, at) & SplatI(63));
  return s.unit * ToFloat((ShiftRight(s.mixed, at) & SplatI(15)) | ShiftLeft(ShiftRight(s.low, at + 6) & SplatI(3), 4));
}
INLINE V Minimum(const SixBits& s, int g) {
  const int at = 8 * (g % 4);
  if (g < 4) return s.least * ToFloat(ShiftRight(s.mid, at) & SplatI(63));
  return s.least *
         ToFloat((ShiftRight(s.mixed, at + 4) & SplatI(15)) | ShiftLeft(ShiftRight(s.mid, at + 6) & SplatI(3), 4));
}

template <int id, int bytes, bool fifth>
struct TileK45 {  // Q4_K, Q5_K
  static constexpr int kId = id, kBlock = 256, kBytes = bytes, kGroup = 32, kOffset = 0;
  static constexpr bool kMinimum = true, kSigned = false;
  template <typename F>
  INLINE void Each(const uint8_t* t, F&& emit) {
    const SixBits scales = SixBitsAt(t);
    const uint8_t *high = t + 256, *low = fifth ? t + 768 : t + 256;
    for (int pair = 0; pair < 4; ++pair) {
      B64 first[8], second[8];
      _Pragma("GCC unroll 8") for (int w = 0; w < 8; ++w) {
        const B64 q = Load64(low + 64 * (8 * pair + w));
        first[w] = q & 15;
        second[w] = Right(q, 4) & 15;
        if constexpr (fifth) {
          const B64 h = Right(Load64(high + 64 * w), 2 * pair);
          first[w] = first[w] | Left(h & 1, 4);
          second[w] = second[w] | Left(h & 2, 3);
        }
      }
      emit(2 * pair, first, Scale(scales, 2 * pair), Minimum(scales, 2 * pair));
      emit(2 * pair + 1, second, Scale(scales, 2 * pair + 1), Minimum(scales, 2 * pair + 1));
    }
  }
};

struct TileQ6_K {
  static constexpr int kId = 14, kBlock = 256, kBytes = 210, kGroup = 16, kOffset = 32;
  static constexpr bool kMinimum = false, kSigned = false;
  template <typename F>
  INLINE void Each(const uint8_t* t, F&& emit) {
    const uint8_t *low = t, *high = t + 2048, *scales = t + 3072;
    const V unit = LoadHalf(t + 3328);
    for (int g = 0; g < 16; ++g) {  // of 16 elements
      const int half = g / 8, quarter = g % 8 / 2, odd = g % 2;  // elements 128 half + 32 quarter + 16 odd
      B64 codes[4];
      _Pragma("GCC unroll 4") for (int w = 0; w < 4; ++w) {
        const B64 l = Load64(low + 64 * (16 * half + 8 * (quarter % 2) + 4 * odd + w));
        const B64 h = Load64(high + 64 * (8 * half + 4 * odd + w));
        codes[w] = (quarter < 2 ? l & 15 : Right(l, 4) & 15) | Left(Right(h, 2 * quarter) & 3, 4);
      }
      const VI signs = Lanes(Load64(scales + 64 * (g / 4)));
      emit(g, codes, unit * ToFloat(ShiftSigned(ShiftLeft(signs, 24 - 8 * (g % 4)), 24)), Splat(0.0f));
    }
  }
};

struct TileQ3_K {
  static constexpr int kId = 11, kBlock = 256, kBytes = 110, kGroup = 16, kOffset = 4;
  static constexpr bool kMinimum = false, kSigned = false;
  template <typename F>
  INLINE void Each(const uint8_t* t, F&& emit) {
    const uint8_t *high = t, *low = t + 512, *scales = t + 1536;
    const V unit = LoadHalf(t + 1728);
    const VI top = Lanes(Load64(scales + 128));
    for (int g = 0; g < 16; ++g) {
      const int half = g / 8, pair = g % 8 / 2, odd = g % 2;
      B64 codes[4];
      _Pragma("GCC unroll 4") for (int w = 0; w < 4; ++w) {
        const B64 l = Right(Load64(low + 64 * (8 * half + 4 * odd + w)), 2 * pair) & 3;
        const B64 h = Right(Load64(high + 64 * (4 * odd + w)), 4 * half + pair) & 1;
        codes[w] = l | Left(h, 2);
      }
      const VI word = Lanes(Load64(scales + 64 * (g % 8 / 4)));
      const VI four = ShiftRight(word, 8 * (g % 4) + (g < 8 ? 0 : 4)) & SplatI(15);
      const VI two = ShiftRight(top, 8 * (g % 4) + 2 * (g / 4)) & SplatI(3);
      emit(g, codes, unit * ToFloat((four | ShiftLeft(two, 4)) - 32), Splat(0.0f));
    }
  }
};

struct TileQ2_K {
  static constexpr int kId = 10, kBlock = 256, kBytes = 84, kGroup = 16, kOffset = 0;
  static constexpr bool kMinimum = true, kSigned = false;
  template <typename F>
  INLINE void Each(const uint8_t* t, F&& emit) {
    const uint8_t* low = t + 256;
    const B64 head = Load64(t + 1280);
    const V unit = HalvesOfWords(head, false), least = Splat(0.0f) - HalvesOfWords(head, true);
    for (int g = 0; g < 16; ++g) {
      const int half = g / 8, pair = g % 8 / 2, odd = g % 2;
      B64 codes[4];
      _Pragma("GCC unroll 4") for (int w = 0; w < 4; ++w) {
        codes[w] = Right(Load64(low + 64 * (8 * half + 4 * odd + w)), 2 * pair) & 3;
      }
      const VI both = ShiftRight(Lanes(Load64(t + 64 * (g / 4))), 8 * (g % 4));
      emit(g, codes, unit * ToFloat(both & SplatI(15)), least * ToFloat(ShiftRight(both, 4) & SplatI(15)));
    }
  }
};

inline constexpr int kAhead16 = 4096;  // bytes, by measurement

using TileQ4_0 = Tile4<2, 2, 18, false>;
using TileQ4_1 = Tile4<3, 4, 20, true>;
using TileQ5_0 = Tile5<6, 6, 22, false>;
using TileQ5_1 = Tile5<7, 8, 24, true>;
using TileQ4_K = TileK45<12, 144, false>;
using TileQ5_K = TileK45<13, 176, true>;
// Where bytes are left over from words, they stand in front of them, as in the block itself, or behind.
inline bool TileRestInFront(int32_t type) { return type != TileQ6_K::kId && type != TileQ3_K::kId; }

#define EACH_TILE(X)                                                                                              \
  X(TileQ4_0) X(TileQ4_1) X(TileQ5_0) X(TileQ5_1) X(TileQ8_0) X(TileQ2_K) X(TileQ3_K) X(TileQ4_K) X(TileQ5_K)     \
  X(TileQ6_K) X(TileIQ4_NL) X(TileIQ4_XS)

}  // namespace
}  // namespace inferax
