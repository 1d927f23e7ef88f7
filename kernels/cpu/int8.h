// Products of int8 rows with packed weights in the form x16.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "x16.h"

namespace inferax {
namespace {

// Sixteen rows of activations side by side, 32 elements of each: int8 codes under one scale, and what sums of them are
// needed below. Rows that there are not hold anything. An element that is much larger than the other 31 would leave
// them few codes: it is kept apart as a whole number of any size, its own code is 0, and the sums hold the number.
struct alignas(64) Panel16 {
  int8_t codes[16][32];
  float scale[16];
  int32_t sum[16];  // of 32 elements
  float weighted[16];  // sum * scale
  int32_t sum16[2][16];
  float weighted16[2][16];
  int32_t apart[16];  // number * 32 + its place among the 32; 0 for none
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

// An element so many times as large as the next is kept apart. Its number is below 2**21, so that a product with a code
// fits int32 and sums of numbers are whole in float32.
inline constexpr float kApart = 3.0f, kFarthest = 16384.0f;

// Row `lane` of a panel; the sums of 16 where `halves` says that a product will need them.
inline void QuantizeRow(const float* x, int64_t k, uint8_t* panel, int64_t lane, bool halves) {
  Panel16* to = reinterpret_cast<Panel16*>(panel);
  const V magic = Splat(12582912.0f);  // 1.5 * 2**23: adding it rounds to an integer, half to even
  V infinite = Splat(0.0f);
  for (int64_t i = 0; i < k; i += 32, ++to) {
    V a = Load(x + i), b = Load(x + i + 16);
    infinite = infinite + (a * Splat(0.0f) + b * Splat(0.0f));
    float largest = Largest(Max(Abs(a), Abs(b)));
    float alone = 0.0f;
    int place = 0;
    if (largest > 1e-30f && largest <= 3e38f) {
      const VI in_a = Abs(a) >= Splat(largest), in_b = Abs(b) >= Splat(largest);
      const uint32_t at = Mask(in_a) | Mask(in_b) << 16;
      const V rest_a = Select(in_a, Splat(0.0f), a), rest_b = Select(in_b, Splat(0.0f), b);
      const float second = Largest(Max(Abs(rest_a), Abs(rest_b)));
      if (largest > kApart * second && (at & (at - 1)) == 0) {
        place = __builtin_ctz(at);
        alone = x[i + place];
        largest = std::max(second, largest / kFarthest);
        a = rest_a, b = rest_b;
      }
    }
    const float scale = largest / 127.0f, inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    const V lower = a * Splat(inverse) + magic, upper = b * Splat(inverse) + magic;
    StoreLowBytes(to->codes[lane], Bits(lower) - 0x4b400000);
    StoreLowBytes(to->codes[lane] + 16, Bits(upper) - 0x4b400000);
    // Sums of a few whole numbers, which float32 holds.
    const V zero = Splat(0.0f);
    F4 sums = Sum4(lower - magic, upper - magic, zero, zero);
    const float number = std::nearbyintf(alone * inverse);
    sums[place / 16] += number;
    to->apart[lane] = static_cast<int32_t>(number) * 32 + place;
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

// Element `place` of each of a group's 16 rows. `is_signed`: bytes stand for [-128, 127], else for [0, 255].
template <int kWords, bool is_signed>
INLINE VI CodesAt(const B64* codes, int place) {
  B64 word = codes[0];
  _Pragma("GCC unroll 8") for (int w = 1; w < kWords; ++w) {  // no array in memory for the sake of a rare case
    if (w == place / 4) word = codes[w];
  }
  const VI up = ShiftLeft(Lanes(word), 24 - place % 4 * 8);
  return is_signed ? ShiftSigned(up, 24) : ShiftRight(up, 24);
}

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
  if (const int32_t apart = x.apart[row]; __builtin_expect(apart != 0, 0)) {
    const int place = apart & 31;
    if (kWhole || place / 16 == half) {
      constexpr bool kAsSigned = Type::kSigned && kWide == 0;
      sum = sum + CodesAt<Type::kGroup / 4, kAsSigned>(codes, kWhole ? place : place % 16) * (apart >> 5);
    }
  }
  acc = Fma(ToFloat(sum), scale * Splat(x.scale[row]), acc);
  if constexpr (Type::kMinimum) {
    acc = Fma(minimum, Splat(kWhole ? x.weighted[row] : x.weighted16[half][row]), acc);
  }
  return acc;
}

// Up to so many rows of x a weight is read straight from its packed bytes.
inline constexpr int64_t kFewRows = 8;
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

// Unpacks a run of a tile, its codes in the form that `form` gives them.
template <typename Type, typename F>
INLINE void Unpack(const uint8_t* tile, int64_t elements, Group<Type>* to, F&& form) {
  for (int64_t i = 0; i < elements; i += Type::kBlock, tile += 16 * Type::kBytes, to += Type::kBlock / Type::kGroup) {
    for (int at = 0; at < 16 * Type::kBytes; at += 64) __builtin_prefetch(tile + kAhead16 + at);
    Type::Each(tile, [&](int g, const B64* codes, V scale, V minimum) __attribute__((always_inline)) {
      _Pragma("GCC unroll 8") for (int w = 0; w < Type::kGroup / 4; ++w) Store64(to[g].codes[w], form(codes[w]));
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
// Tile registers: 16 rows of x against a group of 16 weight rows in one instruction. A group's codes are a tile as
// they stand, once they are signed. The sums are whole numbers, and what follows is AddGroup's, so that no bit differs.

// The codes as signed numbers that need no correction.
template <typename Type>
INLINE B64 Signed(B64 codes) {
  codes.p[0] = Type::kSigned ? codes.p[0] ^ kWide : codes.p[0] - Type::kOffset;
  return codes;
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

// Adds what a panel's rows have apart in group `g` of those that share its 32 elements.
template <typename Type>
INLINE void AddApart(const Group<Type>& group, const Panel16& x, int64_t g, Sums* to) {
  const __m512i apart = _mm512_load_si512(x.apart);
  for (uint32_t left = _mm512_test_epi32_mask(apart, apart); left != 0; left &= left - 1) {
    const int row = __builtin_ctz(left), place = x.apart[row] & 31;
    if (place / Type::kGroup != g) continue;
    const B64 word = Load64(group.codes[place % Type::kGroup / 4]);
    VI sum;
    std::memcpy(&sum, to->at[row], 64);
    sum = sum + CodesAt<1, true>(&word, place % 4) * (x.apart[row] >> 5);
    std::memcpy(to->at[row], &sum, 64);
  }
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
    Sums& now = sums[g % (kUnderWay + 1)];
    AddApart<Type>(group[g], at, g % kHalves, &now);
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
        Unpack(tile, count, groups + t * kGroups, Signed<Type>);
      }
      for (int64_t r = 0; r < m; r += kPanelRows) {
        const Panel16* x = reinterpret_cast<const Panel16*>(panels + r / kPanelRows * PanelBytes(k)) + i / 32;
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
      const int64_t lane = r % kPanelRows, take = std::min<int64_t>({kRowsAtOnce, m - r, kPanelRows - lane});
      const Panel16* x = reinterpret_cast<const Panel16*>(panels + r / kPanelRows * PanelBytes(k)) + element / 32;
      WithRows(take, [&](auto rows) { f(rows, x, static_cast<int>(lane), out + r * ldo + column); });
      r += take;
    }
  };
#if defined(__AMX_INT8__)
  if (m > kFewRows) return MultiplyPanels<Type>(panels, m, k, w, first, last, scratch, out, ldo);
#endif
  for (int64_t n = first; n < last; n += 16) {
    const uint8_t* tile = w.data + n * w.row_bytes;
    if (m <= kFewRows) {
      each(0, n - first, [&](auto rows, const Panel16* x, int lane, float* to) {
        FewRows<Type, decltype(rows)::value>(tile, k, x, lane, to, ldo);
      });
      continue;
    }
    Group<Type>* groups = reinterpret_cast<Group<Type>*>(scratch);
    for (int64_t i = 0; i < k; i += kRun) {
      const int64_t count = std::min(kRun, k - i);
      Unpack(tile + i / Type::kBlock * 16 * Type::kBytes, count, groups, [](B64 codes) { return codes; });
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
