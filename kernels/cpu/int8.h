// Products of int8 rows with packed weights in the form x16: 16 rows of a weight side by side, in words of four bytes.
#pragma once

#include <algorithm>
#include <type_traits>

#include "gemm.h"

namespace inferax {
namespace {

// Four bytes of each of 16 rows. A word's bytes are consecutive elements of its row.
typedef uint8_t NB __attribute__((vector_size(4 * kNative)));
typedef uint16_t NW __attribute__((vector_size(4 * kNative)));
typedef uint32_t NU __attribute__((vector_size(4 * kNative)));
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

// Sixteen rows of activations side by side, 32 elements of each: int8 codes under one scale, and what sums of them are
// needed below. Rows that there are not hold anything.
struct alignas(64) Panel16 {
  int8_t codes[16][32];
  float scale[16];
  int32_t sum[16];  // of 32 codes
  float weighted[16];  // sum * scale
  int32_t sum16[2][16];
  float weighted16[2][16];
  int32_t unused[16];
};
static_assert(sizeof(Panel16) == kPanelBytes);

// The low byte of each lane.
INLINE void StoreLowBytes(int8_t* to, VI x) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)x.p[0]));
#elif defined(__SSE2__) || defined(__AVX2__)
  int32_t lanes[16];
  std::memcpy(lanes, &x, sizeof lanes);
  const auto four = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(lanes + 4 * i)); };
  const __m128i low = _mm_packs_epi32(four(0), four(1)), high = _mm_packs_epi32(four(2), four(3));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(low, high));
#else
  int32_t lanes[16];
  std::memcpy(lanes, &x, sizeof lanes);
  for (int i = 0; i < 16; ++i) to[i] = static_cast<int8_t>(lanes[i]);
#endif
}

// Row `lane` of a panel; the sums of 16 where `halves` says that a product will need them.
inline void QuantizeRow(const float* x, int64_t k, uint8_t* panel, int64_t lane, bool halves) {
  Panel16* to = reinterpret_cast<Panel16*>(panel);
  const V magic = Splat(12582912.0f);  // 1.5 * 2**23: adding it rounds to an integer, half to even
  V infinite = Splat(0.0f);
  for (int64_t i = 0; i < k; i += 32, ++to) {
    const V a = Load(x + i), b = Load(x + i + 16);
    const float largest = Largest(Max(Abs(a), Abs(b)));
    const float scale = largest / 127.0f;
    const V inverse = Splat(largest > 0.0f ? 127.0f / largest : 0.0f);
    infinite = infinite + (a * Splat(0.0f) + b * Splat(0.0f));
    const V lower = a * inverse + magic, upper = b * inverse + magic;
    StoreLowBytes(to->codes[lane], Bits(lower) - 0x4b400000);
    StoreLowBytes(to->codes[lane] + 16, Bits(upper) - 0x4b400000);
    // Sums of a few small whole numbers, which float32 holds.
    const V zero = Splat(0.0f);
    const F4 sums = Sum4(lower - magic, upper - magic, zero, zero);
    to->scale[lane] = scale;
    to->sum[lane] = static_cast<int32_t>(sums[0]) + static_cast<int32_t>(sums[1]);
    to->weighted[lane] = scale * (sums[0] + sums[1]);
    for (int h = 0; halves && h < 2; ++h) {
      to->sum16[h][lane] = static_cast<int32_t>(sums[h]);
      to->weighted16[h][lane] = scale * sums[h];
    }
  }
  const float bad = Sum(infinite);
  // What is not finite makes a scale NaN, so that the result shows it.
  if (k > 0 && !(bad == 0.0f)) reinterpret_cast<Panel16*>(panel)->scale[lane] = bad;
}

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

// What one group adds to a row's sums: whole numbers first, which no order changes, then two roundings. `half` says
// which half of the panel's 32 elements a group of 16 is.
template <typename Type>
INLINE V AddGroup(V acc, const B64* codes, V scale, V minimum, const Panel16& x, int row, int half) {
  constexpr int kBase = Type::kSigned ? kWide : Type::kOffset;
  constexpr bool kWhole = Type::kGroup == 32;
  VI sum = SplatI(0);
  if constexpr (kBase != 0) sum = SplatI(-kBase * (kWhole ? x.sum[row] : x.sum16[half][row]));
  _Pragma("GCC unroll 8") for (int w = 0; w < Type::kGroup / 4; ++w) {
    const int8_t* at = x.codes[row] + (kWhole ? 0 : 16 * half) + 4 * w;
    sum = Type::kSigned ? DotWide(sum, codes[w], at) : Dot(sum, codes[w], at);
  }
  acc = Fma(ToFloat(sum), scale * Splat(x.scale[row]), acc);
  if constexpr (Type::kMinimum) {
    acc = Fma(minimum, Splat(kWhole ? x.weighted[row] : x.weighted16[half][row]), acc);
  }
  return acc;
}

// Rows of a panel that there are registers for, and elements of a tile that fit the first-level cache unpacked.
inline constexpr int kRowsAtOnce = kParts == 1 ? 8 : kParts == 2 ? 2 : 1;
inline constexpr int64_t kRun = 768;
inline constexpr int64_t kTilesAtOnce = 2;  // weight tiles whose runs are unpacked together

// One tile against rows [lane, lane + M) of a panel, straight from the packed bytes.
template <typename Type, int M>
void FewRows(const uint8_t* tile, int64_t k, const Panel16* x, int lane, float* out, int64_t ldo) {
  V acc[M] = {};
  for (int64_t i = 0; i < k; i += Type::kBlock, tile += 16 * Type::kBytes) {
    for (int at = 0; at < 16 * Type::kBytes; at += 64) __builtin_prefetch(tile + kAhead16 + at);
    Type::Each(tile, [&](int g, const B64* codes, V scale, V minimum) __attribute__((always_inline)) {
      const Panel16& at = x[(i + g * Type::kGroup) / 32];
      _Pragma("GCC unroll 8") for (int m = 0; m < M; ++m) {
        acc[m] = AddGroup<Type>(acc[m], codes, scale, minimum, at, lane + m, g % 2);
      }
    });
  }
  for (int m = 0; m < M; ++m) Store(out + m * ldo, acc[m]);
}

// A group of a tile in a form that costs no more decoding.
template <typename Type>
struct alignas(64) Group {
  uint8_t codes[Type::kGroup / 4][64];
  float scale[16], minimum[16];
};

template <typename Type>
void Unpack(const uint8_t* tile, int64_t elements, Group<Type>* to) {
  for (int64_t i = 0; i < elements; i += Type::kBlock, tile += 16 * Type::kBytes, to += Type::kBlock / Type::kGroup) {
    Type::Each(tile, [&](int g, const B64* codes, V scale, V minimum) __attribute__((always_inline)) {
      _Pragma("GCC unroll 8") for (int w = 0; w < Type::kGroup / 4; ++w) Store64(to[g].codes[w], codes[w]);
      Store(to[g].scale, scale);
      Store(to[g].minimum, minimum);
    });
  }
}

// Groups of a run of elements against M rows of a panel. Unless the run is the first, the sums go on from `out`.
template <typename Type, int M>
void ManyRows(const Group<Type>* group, int64_t elements, const Panel16* x, int lane, bool first, float* out,
              int64_t ldo) {
  V acc[M] = {};
  if (!first) {
    for (int m = 0; m < M; ++m) acc[m] = Load(out + m * ldo);
  }
  for (int64_t g = 0; g < elements / Type::kGroup; ++g, ++group) {
    B64 codes[Type::kGroup / 4];
    _Pragma("GCC unroll 8") for (int w = 0; w < Type::kGroup / 4; ++w) codes[w] = Load64(group->codes[w]);
    const V scale = Load(group->scale), minimum = Load(group->minimum);
    const Panel16& at = x[g * Type::kGroup / 32];
    _Pragma("GCC unroll 8") for (int m = 0; m < M; ++m) {
      acc[m] = AddGroup<Type>(acc[m], codes, scale, minimum, at, lane + m, static_cast<int>(g % 2));
    }
  }
  for (int m = 0; m < M; ++m) Store(out + m * ldo, acc[m]);
}

#if defined(__AMX_INT8__)
// Tile registers: eight rows of x against a group of 16 weight rows in one instruction. A group's codes are a tile as
// they stand, once they are signed. The sums are whole numbers, and what follows is AddGroup's, so that no bit differs.

// The codes as signed numbers that need no correction.
template <typename Type>
INLINE B64 Signed(B64 codes) {
  codes.p[0] = Type::kSigned ? codes.p[0] ^ kWide : codes.p[0] - Type::kOffset;
  return codes;
}

template <typename Type>
void UnpackSigned(const uint8_t* tile, int64_t elements, Group<Type>* to) {
  for (int64_t i = 0; i < elements; i += Type::kBlock, tile += 16 * Type::kBytes, to += Type::kBlock / Type::kGroup) {
    for (int at = 0; at < 16 * Type::kBytes; at += 64) __builtin_prefetch(tile + kAhead16 + at);
    Type::Each(tile, [&](int g, const B64* codes, V scale, V minimum) __attribute__((always_inline)) {
      _Pragma("GCC unroll 8") for (int w = 0; w < Type::kGroup / 4; ++w) Store64(to[g].codes[w], Signed<Type>(codes[w]));
      Store(to[g].scale, scale);
      Store(to[g].minimum, minimum);
    });
  }
}

// Tile 0: sums, 16 x 16. Tile 1: codes of a group. Tile 2: as many columns of 16 rows of x.
template <typename Type>
INLINE void ConfigureTiles() {
  struct alignas(64) {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, Type::kGroup};
    uint8_t rows[16] = {16, Type::kGroup / 4, 16};
  } const config;
  asm volatile("ldtilecfg %0" : : "m"(config));
}

struct alignas(64) Sums {
  int32_t at[16][16];
};

// The sums of a group's products with a panel's rows.
template <typename Type>
INLINE void MultiplyGroup(const Group<Type>& group, const int8_t* x, Sums* to) {
  asm volatile(
      "tilezero %%tmm0\n\t"
      "tileloadd (%1,%3,1), %%tmm1\n\t"
      "tileloadd (%2,%4,1), %%tmm2\n\t"
      "tdpbssd %%tmm1, %%tmm2, %%tmm0\n\t"
      "tilestored %%tmm0, (%5,%3,1)"
      : "=m"(*to)
      : "r"(group.codes), "r"(x), "r"(int64_t{64}), "r"(int64_t{32}), "r"(to), "m"(group));
}

// Groups whose products are under way while the sums of an earlier one are taken up: it is long until they are there.
inline constexpr int kUnderWay = 2;

// ManyRows for a whole panel, of which `rows` rows are wanted.
template <typename Type>
void WholePanel(const Group<Type>* group, int64_t elements, const Panel16* x, int64_t rows, bool first, float* out,
                int64_t ldo) {
  V acc[16] = {};
  if (!first) {
    _Pragma("GCC unroll 16") for (int r = 0; r < 16; ++r) {
      if (r < rows) acc[r] = Load(out + r * ldo);
    }
  }
  Sums sums[kUnderWay + 1];
  constexpr int kHalves = 32 / Type::kGroup;
  const auto multiply = [&](int64_t g) __attribute__((always_inline)) {
    MultiplyGroup(group[g], x[g / kHalves].codes[0] + g % kHalves * Type::kGroup, &sums[g % (kUnderWay + 1)]);
  };
  const int64_t groups = elements / Type::kGroup;
  for (int64_t g = 0; g < std::min<int64_t>(kUnderWay, groups); ++g) multiply(g);
  for (int64_t g = 0; g < groups; ++g) {
    if (g + kUnderWay < groups) multiply(g + kUnderWay);
    const V scale = Load(group[g].scale), minimum = Load(group[g].minimum);
    const Panel16& at = x[g / kHalves];
    const float* weighted = Type::kGroup == 32 ? at.weighted : at.weighted16[g % kHalves];
    const Sums& now = sums[g % (kUnderWay + 1)];
    _Pragma("GCC unroll 16") for (int r = 0; r < 16; ++r) {
      VI sum;
      std::memcpy(&sum, now.at[r], 64);
      acc[r] = Fma(ToFloat(sum), scale * Splat(at.scale[r]), acc[r]);
      if constexpr (Type::kMinimum) acc[r] = Fma(minimum, Splat(weighted[r]), acc[r]);
    }
  }
  _Pragma("GCC unroll 16") for (int r = 0; r < 16; ++r) {
    if (r < rows) Store(out + r * ldo, acc[r]);
  }
}

// MultiplyTilesOf for more rows than a few: a run of `kTilesAtOnce` weight tiles stays in the first-level cache while it
// meets all rows of x.
template <typename Type>
void MultiplyPanels(const uint8_t* panels, int64_t m, int64_t k, const Rows& w, int64_t first, int64_t last,
                    float* scratch, float* out, int64_t ldo) {
  Group<Type>* groups = reinterpret_cast<Group<Type>*>(scratch);
  constexpr int64_t kGroups = kRun / Type::kGroup;
  ConfigureTiles<Type>();
  for (int64_t n = first; n < last; n += 16 * kTilesAtOnce) {
    const int64_t tiles = std::min(kTilesAtOnce, (last - n) / 16);
    for (int64_t i = 0; i < k; i += kRun) {
      const int64_t count = std::min(kRun, k - i);
      for (int64_t t = 0; t < tiles; ++t) {
        const uint8_t* tile = w.data + (n + 16 * t) * w.row_bytes + i / Type::kBlock * 16 * Type::kBytes;
        UnpackSigned<Type>(tile, count, groups + t * kGroups);
      }
      for (int64_t r = 0; r < m; r += 16) {
        const Panel16* x = reinterpret_cast<const Panel16*>(panels + r / 16 * PanelBytes(k)) + i / 32;
        for (int64_t t = 0; t < tiles; ++t) {
          float* to = out + r * ldo + n - first + 16 * t;
          WholePanel<Type>(groups + t * kGroups, count, x, m - r, i == 0, to, ldo);
        }
      }
    }
  }
  asm volatile("tilerelease");
}
#endif

// Calls run(integral_constant<m>) for m in [1, kRowsAtOnce].
template <int M = kRowsAtOnce, typename F>
INLINE void WithRows(int64_t m, F&& run) {
  if constexpr (M > 1) {
    if (m < M) return WithRows<M - 1>(m, run);
  }
  run(std::integral_constant<int, M>());
}

template <typename Type>
void MultiplyTilesOf(const uint8_t* panels, int64_t m, int64_t k, const Rows& w, int64_t first, int64_t last,
                     float* scratch, float* out, int64_t ldo) {
  // Calls f(rows, panel, lane, where the first row's sums go) for all rows of x, a few at a time.
  const auto each = [&](int64_t element, int64_t column, auto&& f) {
    for (int64_t r = 0; r < m;) {
      const int64_t lane = r % 16, take = std::min<int64_t>({kRowsAtOnce, m - r, 16 - lane});
      const Panel16* x = reinterpret_cast<const Panel16*>(panels + r / 16 * PanelBytes(k)) + element / 32;
      WithRows(take, [&](auto rows) { f(rows, x, static_cast<int>(lane), out + r * ldo + column); });
      r += take;
    }
  };
#if defined(__AMX_INT8__)
  if (m > 8) return MultiplyPanels<Type>(panels, m, k, w, first, last, scratch, out, ldo);
#endif
  for (int64_t n = first; n < last; n += 16) {
    const uint8_t* tile = w.data + n * w.row_bytes;
    if (m <= 8) {
      each(0, n - first, [&](auto rows, const Panel16* x, int lane, float* to) {
        FewRows<Type, decltype(rows)::value>(tile, k, x, lane, to, ldo);
      });
      continue;
    }
    Group<Type>* groups = reinterpret_cast<Group<Type>*>(scratch);
    for (int64_t i = 0; i < k; i += kRun) {
      const int64_t count = std::min(kRun, k - i);
      Unpack<Type>(tile + i / Type::kBlock * 16 * Type::kBytes, count, groups);
      each(i, n - first, [&](auto rows, const Panel16* x, int lane, float* to) {
        ManyRows<Type, decltype(rows)::value>(groups, count, x, lane, i == 0, to, ldo);
      });
    }
  }
}

// In floats, for the type whose groups take most.
inline constexpr int64_t kTilesScratch =
    kRun * kTilesAtOnce / TileQ6_K::kGroup * static_cast<int64_t>(sizeof(Group<TileQ6_K>)) / 4;

using TilesProduct = void (*)(const uint8_t*, int64_t, int64_t, const Rows&, int64_t, int64_t, float*, float*, int64_t);
inline TilesProduct TilesProductOf(int32_t type) {
#define CASE(Type) \
  case Type::kId:  \
    return MultiplyTilesOf<Type>;
  switch (type) { EACH_TILE(CASE) }
#undef CASE
  return nullptr;
}

// Elements under one scale in the form x16, or 0 for a type that has no such form.
inline int64_t TileGroup(int32_t type) {
#define CASE(Type) \
  case Type::kId:  \
    return Type::kGroup;
  switch (type) { EACH_TILE(CASE) }
#undef CASE
  return 0;
}

inline void MultiplyTiles(const uint8_t* panels, int64_t m, int64_t k, const Rows& w, int64_t first, int64_t last,
                          float* scratch, float* out, int64_t ldo) {
  TilesProductOf(w.type)(panels, m, k, w, first, last, scratch, out, ldo);
}

// Row `row` of a tiled weight, put together again and expanded.
inline void ExpandTiled(const Rows& w, int64_t row, int64_t k, float* out) {
  const BlockSize block = SizeOfType(w.type);
  const int64_t rest = block.bytes % 4, words = block.bytes / 4, lane = row % 16;
  const bool front = TileRestInFront(w.type);
  const uint8_t* tile = w.data + (row - lane) * w.row_bytes;
  uint8_t bytes[256 + 64];
  for (int64_t i = 0; i < k; i += block.weights, tile += 16 * block.bytes, out += block.weights) {
    const uint8_t* ends = tile + (front ? 0 : 64 * words) + lane * rest;
    const uint8_t* body = tile + (front ? 16 * rest : 0) + 4 * lane;
    std::memcpy(bytes + (front ? 0 : 4 * words), ends, static_cast<size_t>(rest));
    for (int64_t j = 0; j < words; ++j) std::memcpy(bytes + (front ? rest : 0) + 4 * j, body + 64 * j, 4);
    ExpanderOf(w.type)(bytes, w.grid, block.weights, out);
  }
}

}  // namespace
}  // namespace inferax
