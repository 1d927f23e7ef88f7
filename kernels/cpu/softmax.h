// Attention of a run of query rows over one partition of the positions, by online softmax (Milakov and Gimelshein 2018).
#pragma once

#include "gemm.h"
#include "rows.h"

namespace inferax {
namespace {

inline constexpr int kMixRows = kParts == 1 ? 4 : kParts == 2 ? 3 : 2;
inline constexpr int kMixParts = 4;  // registers of a row's output

// out[r] += sum over j in [first, last) of weights[r][j] * values[j], in ascending order, each element on its own.
template <int R, int P>
INLINE void MixBlock(const float* weights, const float* values, int64_t ldv, int first, int last, float* out,
                     int64_t ldo) {
  N acc[R][P];
  _Pragma("GCC unroll 4") for (int r = 0; r < R; ++r) {
    _Pragma("GCC unroll 4") for (int p = 0; p < P; ++p) acc[r][p] = LoadN(out + r * ldo + p * kNative);
  }
  for (int j = first; j < last; ++j) {
    N v[P];
    _Pragma("GCC unroll 4") for (int p = 0; p < P; ++p) v[p] = LoadN(values + j * ldv + p * kNative);
    _Pragma("GCC unroll 4") for (int r = 0; r < R; ++r) {
      const N w = SplatN(weights[r * kKvBlock + j]);
      _Pragma("GCC unroll 4") for (int p = 0; p < P; ++p) acc[r][p] = FmaN(w, v[p], acc[r][p]);
    }
  }
  _Pragma("GCC unroll 4") for (int r = 0; r < R; ++r) {
    _Pragma("GCC unroll 4") for (int p = 0; p < P; ++p) StoreN(out + r * ldo + p * kNative, acc[r][p]);
  }
}

template <int R>
void MixRows(const float* weights, const float* values, int64_t width, int first, int last, float* out) {
  int64_t i = 0;
  for (; i + kMixParts * kNative <= width; i += kMixParts * kNative) {
    MixBlock<R, kMixParts>(weights, values + i, width, first, last, out + i, width);
  }
  for (; i < width; i += kNative) MixBlock<R, 1>(weights, values + i, width, first, last, out + i, width);
}

inline void Mix(const float* weights, const float* values, int64_t width, int64_t rows, int first, int last,
                float* out) {
  while (rows > 0) {
    const int64_t take = rows < kMixRows ? rows : kMixRows;
    switch (take) {
      case 1: MixRows<1>(weights, values, width, first, last, out); break;
      case 2: MixRows<2>(weights, values, width, first, last, out); break;
      case 3: MixRows<3>(weights, values, width, first, last, out); break;
      default: MixRows<4>(weights, values, width, first, last, out); break;
    }
    weights += take * kKvBlock;
    out += take * width;
    rows -= take;
  }
}

inline int64_t AttendScratch(int64_t rows, int64_t width) {
  return kKvBlock * (2 * Padded(width) + 2 + rows);
}

INLINE float Exp1(float x) {
  float lanes[16];
  Store(lanes, Exp(Splat(x)));
  return lanes[0];
}

// Turns one row's scores of a block into weights, of which those outside [low, high) are 0, and updates its state.
INLINE void Weigh(float* w, int low, int high, const Attend& a, float* top, float* total, float* out) {
  const float lowest = -__builtin_inff();
  for (int i = 0; i < kKvBlock; i += 16) Store(w + i, Capped(Load(w + i) * Splat(a.scale), a.softcap));
  for (int j = 0; j < low; ++j) w[j] = lowest;
  for (int j = high; j < kKvBlock; ++j) w[j] = lowest;
  const float block_top = Largest(Max(Max(Load(w), Load(w + 16)), Max(Load(w + 32), Load(w + 48))));
  if (!(block_top <= *top)) {
    // Where the maximum stays, the factor would be 1.
    const float shrink = Exp1(*top - block_top);
    *top = block_top;
    *total *= shrink;
    for (int64_t i = 0; i < Padded(a.width); i += 16) Store(out + i, Load(out + i) * Splat(shrink));
  }
  for (int i = 0; i < kKvBlock; i += 16) Store(w + i, Exp(Load(w + i) - Splat(*top)));
  *total += Sum((Load(w) + Load(w + 16)) + (Load(w + 32) + Load(w + 48)));
}

INLINE void Multiply(float* w, const float* by) {
  for (int i = 0; i < kKvBlock; i += 16) Store(w + i, Load(w + i) * Load(by + i));
}

// Walks the positions of a sequence through its pages.
struct Cursor {
  Cursor(const Attend& a, int64_t position) : a(a), page(position / a.page_size), offset(position % a.page_size) {}
  int64_t Next() {
    const int64_t at = (a.pages[page] * a.page_size + offset) * a.slot_bytes;
    if (++offset == a.page_size) {
      offset = 0;
      ++page;
    }
    return at;
  }
  const Attend& a;
  int64_t page, offset;
};

// Types with a scale for each head. kUnit: what one unit of a decoded code stands for.
struct CodesI8 {
  static constexpr int kBlock = 16, kBytes = 16;
  static constexpr float kUnit = 1.0f;
  template <typename F>
  INLINE void Decode(const uint8_t* b, const int8_t*, F&& emit) {
    emit(0, FromSigned((S16)LoadBytes(b)));
  }
};

struct CodesE4M3 {
  static constexpr int kBlock = 16, kBytes = 16;
  static constexpr float kUnit = 256.0f;
  template <typename F>
  INLINE void Decode(const uint8_t* b, const int8_t*, F&& emit) {
    emit(0, LoadE4M3(b));
  }
};

template <typename Type>
concept Scaled = requires { Type::kUnit; };

// Keys and values of a block, [kKvBlock, Padded(width)], and the factors to their numbers, [kKvBlock].
struct Block {
  float *keys, *values, *key_scales, *value_scales;
};

INLINE float ScaleAt(const uint8_t* x, float unit) {
  float scale;
  std::memcpy(&scale, x, 4);
  return scale * unit;
}

// Copies the keys and values of positions [from, to) of a block to float32 rows; those up to `end` may be read soon.
template <typename Type>
void Gather(const Attend& a, int64_t block, int from, int to, int64_t end, const Block& out) {
  constexpr int kAheadPositions = 8;
  const int64_t width = Padded(a.width), bytes = a.width * (Type::kBytes / 16);
  Cursor now(a, block + from), ahead(a, block + from + kAheadPositions);
  for (int j = from; j < to; ++j) {
    if (block + j + kAheadPositions < end) {
      const int64_t at = ahead.Next();
      for (int64_t i = 0; i < bytes; i += 64) {
        __builtin_prefetch(a.keys + at + i);
        __builtin_prefetch(a.values + at + i);
      }
    }
    const int64_t at = now.Next();
    float* key = out.keys + j * width;
    float* value = out.values + j * width;
    ExpandRow<Type>(a.keys + at, nullptr, a.width, key);
    ExpandRow<Type>(a.values + at, nullptr, a.width, value);
    for (int64_t i = a.width; i < width; ++i) key[i] = value[i] = 0.0f;
    if constexpr (Scaled<Type>) {
      out.key_scales[j] = ScaleAt(a.keys + at + a.width, Type::kUnit);
      out.value_scales[j] = ScaleAt(a.values + at + a.width, Type::kUnit);
    }
  }
}

inline void AttendPartition(const Attend& a, int64_t first, int64_t last, float* scratch, const Softmax& state) {
  const int64_t width = Padded(a.width), rows = a.rows;
  const Block kv = {scratch, scratch + kKvBlock * width, scratch + kKvBlock * 2 * width,
                    scratch + kKvBlock * (2 * width + 1)};
  float* weights = scratch + kKvBlock * (2 * width + 2);
  const bool scaled = a.cache_type == kI8 || a.cache_type == kE4M3;
  for (int64_t r = 0; r < rows; ++r) {
    state.top[r] = -__builtin_inff();
    state.total[r] = 0.0f;
  }
  for (int64_t i = 0; i < rows * width; ++i) state.out[i] = 0.0f;

  int64_t end = 0;
  for (int64_t r = 0; r < rows; ++r) end = a.high[r] > end ? a.high[r] : end;
  if (last < end) end = last;
  const auto gather = a.cache_type == kF32    ? Gather<DenseF32>
                      : a.cache_type == kF16  ? Gather<DenseF16>
                      : a.cache_type == kBF16 ? Gather<DenseBF16>
                      : a.cache_type == kI8   ? Gather<CodesI8>
                                              : Gather<CodesE4M3>;
  for (int64_t block = first; block < last; block += kKvBlock) {
    const auto low_of = [&](int64_t r) { return a.low[r] > block ? static_cast<int>(a.low[r] - block) : 0; };
    const auto high_of = [&](int64_t r) {
      return a.high[r] < block + kKvBlock ? static_cast<int>(a.high[r] - block) : static_cast<int>(kKvBlock);
    };
    // What any row sees of this block: the rest may be unwritten, and is not read.
    int from = kKvBlock, to = 0;
    for (int64_t r = 0; r < rows; ++r) {
      if (low_of(r) >= high_of(r)) continue;
      from = low_of(r) < from ? low_of(r) : from;
      to = high_of(r) > to ? high_of(r) : to;
    }
    if (from >= to) continue;
    gather(a, block, from, to, end, kv);
    Dots(a.q, rows, width, kv.keys + from * width, to - from, width, width, nullptr, weights + from, kKvBlock);
    for (int64_t r = 0; r < rows;) {
      // Rows that see the same positions go together.
      int64_t run = 1;
      while (r + run < rows && low_of(r + run) == low_of(r) && high_of(r + run) == high_of(r)) ++run;
      const int low = low_of(r), high = high_of(r);
      if (low < high) {
        for (int64_t s = r; s < r + run; ++s) {
          float* w = weights + s * kKvBlock;
          if (scaled) Multiply(w, kv.key_scales);
          Weigh(w, low, high, a, state.top + s, state.total + s, state.out + s * width);
          if (scaled) Multiply(w, kv.value_scales);
        }
        Mix(weights + r * kKvBlock, kv.values, width, run, low, high, state.out + r * width);
      }
      r += run;
    }
  }
}

inline void MergeState(const Softmax& state, const Softmax& part, int64_t rows, int64_t width) {
  for (int64_t r = 0; r < rows; ++r) {
    if (part.total[r] == 0.0f) continue;  // it saw nothing
    const float top = part.top[r] > state.top[r] ? part.top[r] : state.top[r];
    const float before = Exp1(state.top[r] - top), now = Exp1(part.top[r] - top);
    state.top[r] = top;
    state.total[r] = state.total[r] * before + part.total[r] * now;
    float* out = state.out + r * Padded(width);
    const float* more = part.out + r * Padded(width);
    for (int64_t i = 0; i < Padded(width); i += 16) {
      Store(out + i, Load(out + i) * Splat(before) + Load(more + i) * Splat(now));
    }
  }
}

// A row that saw nothing is zero.
inline void NormalizeRow(const Softmax& state, int64_t row, int64_t width, float* out) {
  const V total = Splat(state.total[row] == 0.0f ? 1.0f : state.total[row]);
  const float* sums = state.out + row * Padded(width);
  Runs(width, [&](int64_t i, int count) { StoreSome(out + i, Load(sums + i) / total, count); });
}

}  // namespace
}  // namespace inferax
