// Vectors of 16 floats. Only the tiers' translation units include this: each compiles it for its own instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))

#ifdef __has_builtin
#if __has_builtin(__builtin_shufflevector)
#define SHUFFLE(type, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif
#ifndef SHUFFLE
#define SHUFFLE(type, a, b, ...) __builtin_shuffle(a, b, (type){__VA_ARGS__})
#endif

namespace inferax {
namespace {

#if defined(__AVX512F__)
inline constexpr int kNative = 16;  // lanes of a register
#elif defined(__AVX2__)
inline constexpr int kNative = 8;
#else
inline constexpr int kNative = 4;
#endif
inline constexpr int kParts = 16 / kNative;

typedef float N __attribute__((vector_size(4 * kNative)));
typedef int32_t NI __attribute__((vector_size(4 * kNative)));
typedef uint32_t NU __attribute__((vector_size(4 * kNative)));
typedef float F4 __attribute__((vector_size(16)));
typedef int32_t I4 __attribute__((vector_size(16)));
typedef uint8_t B16 __attribute__((vector_size(16)));
typedef int8_t S16 __attribute__((vector_size(16)));
typedef uint64_t U2 __attribute__((vector_size(16)));

struct V {
  N p[kParts];
};
struct VI {
  NI p[kParts];
};

#define EACH_PART _Pragma("GCC unroll 4") for (int i = 0; i < kParts; ++i)

INLINE N SplatN(float x) { return x - N{}; }
INLINE N LoadN(const float* x) {
  N r;
  std::memcpy(&r, x, sizeof r);
  return r;
}
INLINE void StoreN(float* to, N x) { std::memcpy(to, &x, sizeof x); }

// Keeps x in a register where it is used more than once: GCC would rather load it again.
INLINE void Hold(N& x) {
#if defined(__x86_64__)
  asm("" : "+v"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#else
  (void)x;
#endif
}

// a * b + c: in one rounding where the tier has the instruction, and in two everywhere on a tier that has not.
INLINE N FmaN(N a, N b, N c) {
#if defined(__AVX512F__)
  return (N)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (N)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (N)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

INLINE V Splat(float x) {
  V r;
  EACH_PART r.p[i] = SplatN(x);
  return r;
}
INLINE V Load(const float* x) {
  V r;
  EACH_PART r.p[i] = LoadN(x + i * kNative);
  return r;
}
INLINE void Store(float* to, V x) { EACH_PART StoreN(to + i * kNative, x.p[i]); }
INLINE V Fma(V a, V b, V c) {
  V r;
  EACH_PART r.p[i] = FmaN(a.p[i], b.p[i], c.p[i]);
  return r;
}

#define BINARY(op)                                 \
  INLINE V operator op(V a, V b) {                 \
    V r;                                           \
    EACH_PART r.p[i] = a.p[i] op b.p[i];           \
    return r;                                      \
  }
BINARY(+)
BINARY(-)
BINARY(*)
BINARY(/)
#undef BINARY

#define COMPARE(op)                                \
  INLINE VI operator op(V a, V b) {                \
    VI r;                                          \
    EACH_PART r.p[i] = (NI)(a.p[i] op b.p[i]);     \
    return r;                                      \
  }
COMPARE(<)
COMPARE(>)
COMPARE(>=)
#undef COMPARE

INLINE VI Bits(V x) {
  VI r;
  EACH_PART r.p[i] = (NI)x.p[i];
  return r;
}
INLINE V FromBits(VI x) {
  V r;
  EACH_PART r.p[i] = (N)x.p[i];
  return r;
}
INLINE VI operator&(VI a, VI b) {
  VI r;
  EACH_PART r.p[i] = a.p[i] & b.p[i];
  return r;
}
INLINE VI SplatI(int32_t x) {
  VI r;
  EACH_PART r.p[i] = x - NI{};
  return r;
}
// One bit for each lane of a mask.
INLINE uint32_t Mask(VI x) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)x.p[0]);
#elif defined(__AVX2__)
  const auto part = [&](int i) { return static_cast<uint32_t>(_mm256_movemask_ps((__m256)x.p[i])); };
  return part(0) | part(1) << 8;
#else
  uint32_t bits = 0;
  EACH_PART {
#if defined(__x86_64__)
    bits |= static_cast<uint32_t>(_mm_movemask_ps((__m128)x.p[i])) << 4 * i;
#else
    const NI lane = x.p[i] & NI{1, 2, 4, 8};
    bits |= static_cast<uint32_t>(lane[0] | lane[1] | lane[2] | lane[3]) << 4 * i;
#endif
  }
  return bits;
#endif
}
// Where the mask is all ones a, else b.
INLINE V Select(VI mask, V a, V b) {
  V r;
  EACH_PART r.p[i] = (N)((mask.p[i] & (NI)a.p[i]) | (~mask.p[i] & (NI)b.p[i]));
  return r;
}
// All ones in the first eight lanes.
INLINE VI FirstEight() {
  VI r;
  _Pragma("GCC unroll 16") for (int i = 0; i < 16; ++i) r.p[i / kNative][i % kNative] = i < 8 ? -1 : 0;
  return r;
}
INLINE N MaxN(N a, N b) {
  const NI mask = (NI)(a > b);
  return (N)((mask & (NI)a) | (~mask & (NI)b));
}
INLINE V Max(V a, V b) { return Select(a > b, a, b); }
INLINE V Abs(V x) { return FromBits(Bits(x) & SplatI(0x7fffffff)); }

// The sums of four vectors, each as the same tree: lanes 8 apart, then 4, 2 and 1.
INLINE F4 Sum4(V a, V b, V c, V d) {
#if defined(__AVX512F__)
  const N x = a.p[0], y = b.p[0], z = c.p[0], w = d.p[0];
  const N xy = SHUFFLE(NI, x, y, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               SHUFFLE(NI, x, y, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  const N zw = SHUFFLE(NI, z, w, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               SHUFFLE(NI, z, w, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  N s = SHUFFLE(NI, xy, zw, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
        SHUFFLE(NI, xy, zw, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  s = s + SHUFFLE(NI, s, s, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  s = s + SHUFFLE(NI, s, s, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
  return F4{s[0], s[4], s[8], s[12]};
#elif defined(__AVX2__)
  const N x = a.p[0] + a.p[1], y = b.p[0] + b.p[1], z = c.p[0] + c.p[1], w = d.p[0] + d.p[1];
  const N xy = SHUFFLE(NI, x, y, 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(NI, x, y, 4, 5, 6, 7, 12, 13, 14, 15);
  const N zw = SHUFFLE(NI, z, w, 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(NI, z, w, 4, 5, 6, 7, 12, 13, 14, 15);
  N s = SHUFFLE(NI, xy, zw, 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE(NI, xy, zw, 2, 3, 10, 11, 6, 7, 14, 15);
  s = s + SHUFFLE(NI, s, s, 1, 0, 3, 2, 5, 4, 7, 6);
  return F4{s[0], s[4], s[2], s[6]};
#else
  const N x = (a.p[0] + a.p[2]) + (a.p[1] + a.p[3]), y = (b.p[0] + b.p[2]) + (b.p[1] + b.p[3]);
  const N z = (c.p[0] + c.p[2]) + (c.p[1] + c.p[3]), w = (d.p[0] + d.p[2]) + (d.p[1] + d.p[3]);
  const N xy = SHUFFLE(NI, x, y, 0, 1, 4, 5) + SHUFFLE(NI, x, y, 2, 3, 6, 7);
  const N zw = SHUFFLE(NI, z, w, 0, 1, 4, 5) + SHUFFLE(NI, z, w, 2, 3, 6, 7);
  return SHUFFLE(NI, xy, zw, 0, 2, 4, 6) + SHUFFLE(NI, xy, zw, 1, 3, 5, 7);
#endif
}

INLINE float Sum(V x) { return Sum4(x, x, x, x)[0]; }

INLINE float Largest(V x) {
  N m = x.p[0];
  _Pragma("GCC unroll 4") for (int i = 1; i < kParts; ++i) m = MaxN(x.p[i], m);
#if defined(__AVX512F__)
  m = MaxN(SHUFFLE(NI, m, m, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7), m);
  m = MaxN(SHUFFLE(NI, m, m, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11), m);
  m = MaxN(SHUFFLE(NI, m, m, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13), m);
  m = MaxN(SHUFFLE(NI, m, m, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14), m);
#elif defined(__AVX2__)
  m = MaxN(SHUFFLE(NI, m, m, 4, 5, 6, 7, 0, 1, 2, 3), m);
  m = MaxN(SHUFFLE(NI, m, m, 2, 3, 0, 1, 6, 7, 4, 5), m);
  m = MaxN(SHUFFLE(NI, m, m, 1, 0, 3, 2, 5, 4, 7, 6), m);
#else
  m = MaxN(SHUFFLE(NI, m, m, 2, 3, 0, 1), m);
  m = MaxN(SHUFFLE(NI, m, m, 1, 0, 3, 2), m);
#endif
  return m[0];
}

// Conversions.

INLINE float FromHalf(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  uint32_t bits = static_cast<uint32_t>(h & 0x7fff) << 13;
  float x;
  std::memcpy(&x, &bits, 4);
  x *= 0x1p112f;  // moves the exponent's bias; exact, for subnormal numbers too
  std::memcpy(&bits, &x, 4);
  if ((h & 0x7c00) == 0x7c00) bits |= 0x7f800000;
  bits |= static_cast<uint32_t>(h & 0x8000) << 16;
  std::memcpy(&x, &bits, 4);
  return x;
#endif
}

INLINE float HalfAt(const uint8_t* x) {
  uint16_t bits;
  std::memcpy(&bits, x, 2);
  return FromHalf(bits);
}

INLINE V LoadHalf(const uint8_t* x) {
#if defined(__AVX512F__)
  return {{(N)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)))}};
#elif defined(__F16C__)
  return {{(N)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))),
           (N)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + 16)))}};
#else
  float r[16];
  for (int i = 0; i < 16; ++i) r[i] = HalfAt(x + 2 * i);
  return Load(r);
#endif
}

INLINE V LoadBFloat(const uint8_t* x) {
#if defined(__AVX512F__)
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  return {{(N)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16)}};
#elif defined(__AVX2__)
  const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
  const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x + 16));
  return {{(N)_mm256_slli_epi32(_mm256_cvtepu16_epi32(low), 16), (N)_mm256_slli_epi32(_mm256_cvtepu16_epi32(high), 16)}};
#else
  uint16_t half[16];
  uint32_t whole[16];
  std::memcpy(half, x, sizeof half);
  for (int i = 0; i < 16; ++i) whole[i] = static_cast<uint32_t>(half[i]) << 16;
  V r;
  std::memcpy(&r, whole, sizeof r);
  return r;
#endif
}

INLINE V FromBytes(B16 x) {
#if defined(__AVX512F__)
  return {{(N)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32((__m128i)x))}};
#elif defined(__AVX2__)
  return {{(N)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32((__m128i)x)),
           (N)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_unpackhi_epi64((__m128i)x, (__m128i)x)))}};
#else
  float r[16];
  for (int i = 0; i < 16; ++i) r[i] = static_cast<float>(static_cast<int32_t>(x[i]));
  return Load(r);
#endif
}

INLINE V FromSigned(S16 x) {
#if defined(__AVX512F__)
  return {{(N)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)x))}};
#elif defined(__AVX2__)
  return {{(N)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32((__m128i)x)),
           (N)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64((__m128i)x, (__m128i)x)))}};
#else
  float r[16];
  for (int i = 0; i < 16; ++i) r[i] = static_cast<float>(static_cast<int32_t>(x[i]));
  return Load(r);
#endif
}

// 1/256 of what 16 numbers of float8 e4m3 are. Its code of NaN is read as 480.
INLINE V LoadE4M3(const uint8_t* x) {
#if defined(__AVX512F__)
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
  const __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
  return {{(N)_mm512_cvtph_ps(half)}};
#elif defined(__F16C__)
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
  const __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
  return {{(N)_mm256_cvtph_ps(_mm256_castsi256_si128(half)), (N)_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1))}};
#else
  int32_t codes[16];
  for (int i = 0; i < 16; ++i) codes[i] = x[i];
  VI c;
  std::memcpy(&c, codes, sizeof c);
  V r;
  EACH_PART {
    const NI size = c.p[i] & 0x7f, subnormal = (NI)(size < 8);
    // A subnormal number gets a leading one, which is subtracted again.
    const N x = (N)((size << 20) + ((112 - subnormal) << 23)) - (N)(subnormal & 0x38800000);
    r.p[i] = (N)((NI)x | (c.p[i] & 0x80) << 24);
  }
  return r;
#endif
}

INLINE B16 LoadBytes(const uint8_t* x) {
  B16 r;
  std::memcpy(&r, x, sizeof r);
  return r;
}

// 0xff in lane i where bit i is set.
INLINE B16 BitMask(uint32_t bits) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  return (B16)_mm_movm_epi8(static_cast<__mmask16>(bits));
#else
  const uint64_t spread = 0x0101010101010101;
  const B16 one = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  const B16 r = (B16)U2{(bits & 0xff) * spread, (bits >> 8 & 0xff) * spread};
  return (B16)((r & one) == one);
#endif
}

// table[code] for codes below 16.
INLINE S16 Lookup(S16 table, B16 codes) {
#if defined(__AVX2__)
  return (S16)_mm_shuffle_epi8((__m128i)table, (__m128i)codes);
#elif defined(__aarch64__)
  return (S16)vqtbl1q_s8((int8x16_t)table, (uint8x16_t)codes);
#else
  S16 r = {};
  for (int i = 0; i < 16; ++i) r[i] = table[codes[i]];
  return r;
#endif
}

}  // namespace
}  // namespace inferax
