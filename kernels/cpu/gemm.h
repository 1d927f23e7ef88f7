// Products of rows: x[m] . w[n] with the 16-lane accumulation of tier.h, register-blocked over m and n.
#pragma once

#include "dequant_k.h"
#include "vmath.h"

namespace inferax {
namespace {

// Rows of x and of w per register block: as many accumulators as the tier has registers for.
#if defined(__aarch64__)
inline constexpr int kBlockM = 3, kBlockN = 2;  // 32 registers of 4 lanes
#else
inline constexpr int kBlockM = kParts == 1 ? 6 : kParts == 2 ? 3 : 1;
inline constexpr int kBlockN = kParts == 1 ? 4 : 2;
#endif

template <int count>
INLINE void StoreSums(const N (&acc)[count][kParts], float* out) {
  V v[4] = {};
  _Pragma("GCC unroll 4") for (int n = 0; n < count; ++n) {
    _Pragma("GCC unroll 4") for (int p = 0; p < kParts; ++p) v[n].p[p] = acc[n][p];
  }
  const F4 sums = Sum4(v[0], v[1], v[2], v[3]);
  std::memcpy(out, &sums, count * sizeof(float));
}

// A run of elements of a longer product: the sums begin with `before` (null: zero), and go to `after` as they are or,
// where that is null, are added up in `out`.
struct Panel {
  const float* before;
  float* after;
};

// out[m * ldo + n] = x[m] . w[n] over k elements, a multiple of 16.
template <int M, int NN>
INLINE void DotBlock(const float* x, int64_t ldx, const float* w, int64_t ldw, int64_t k, Panel panel, float* out,
                     int64_t ldo) {
  N acc[M][NN][kParts] = {};
  if (panel.before != nullptr) {
    _Pragma("GCC unroll 6") for (int m = 0; m < M; ++m) {
      _Pragma("GCC unroll 4") for (int n = 0; n < NN; ++n) {
        _Pragma("GCC unroll 4") for (int p = 0; p < kParts; ++p) {
          acc[m][n][p] = LoadN(panel.before + ((m * NN + n) * kParts + p) * kNative);
        }
      }
    }
  }
  for (int64_t i = 0; i < k; i += 16) {
    _Pragma("GCC unroll 4") for (int p = 0; p < kParts; ++p) {
      N wv[NN];
      _Pragma("GCC unroll 4") for (int n = 0; n < NN; ++n) wv[n] = LoadN(w + n * ldw + i + p * kNative);
      _Pragma("GCC unroll 6") for (int m = 0; m < M; ++m) {
        N xv = LoadN(x + m * ldx + i + p * kNative);
        Hold(xv);
        _Pragma("GCC unroll 4") for (int n = 0; n < NN; ++n) acc[m][n][p] = FmaN(xv, wv[n], acc[m][n][p]);
      }
    }
  }
  if (panel.after != nullptr) {
    _Pragma("GCC unroll 6") for (int m = 0; m < M; ++m) {
      _Pragma("GCC unroll 4") for (int n = 0; n < NN; ++n) {
        _Pragma("GCC unroll 4") for (int p = 0; p < kParts; ++p) {
          StoreN(panel.after + ((m * NN + n) * kParts + p) * kNative, acc[m][n][p]);
        }
      }
    }
    return;
  }
  _Pragma("GCC unroll 6") for (int m = 0; m < M; ++m) StoreSums<NN>(acc[m], out + m * ldo);
}

// M rows of x against n of w; `state` [M, n, 16] carries the sums from one panel to the next.
template <int M>
void DotColumns(const float* x, int64_t ldx, const float* w, int64_t n, int64_t ldw, int64_t k, float* state,
                bool first, bool last, float* out, int64_t ldo) {
  const auto panel = [&](int64_t j) -> Panel {
    float* at = state + j * M * 16;
    return {first ? nullptr : at, last ? nullptr : at};
  };
  int64_t j = 0;
  for (; j + kBlockN <= n; j += kBlockN) DotBlock<M, kBlockN>(x, ldx, w + j * ldw, ldw, k, panel(j), out + j, ldo);
  for (; j < n; ++j) DotBlock<M, 1>(x, ldx, w + j * ldw, ldw, k, panel(j), out + j, ldo);
}

using Columns = void (*)(const float*, int64_t, const float*, int64_t, int64_t, int64_t, float*, bool, bool, float*,
                         int64_t);
inline constexpr Columns kColumns[] = {DotColumns<1>, DotColumns<2>, DotColumns<3>,
                                       DotColumns<4>, DotColumns<5>, DotColumns<6>};

// Elements of a panel, which is to stay in the first-level cache, and rows of x whose sums are carried.
inline constexpr int64_t kPanel = 1024, kCarriedRows = 48;
INLINE int64_t NumPanels(int64_t k) { return k <= kPanel * 3 / 2 ? 1 : (k + kPanel - 1) / kPanel; }

// All m rows of x against n rows of w over k elements. `state` holds kCarriedRows * n * 16 numbers; it is not used where
// k is one panel.
inline void Dots(const float* x, int64_t m, int64_t ldx, const float* w, int64_t n, int64_t ldw, int64_t k,
                 float* state, float* out, int64_t ldo) {
  const int64_t panels = NumPanels(k), rows = panels == 1 ? m : kCarriedRows;
  const int64_t width = Padded((k + panels - 1) / panels);
  for (int64_t start = 0; start < m; start += rows) {
    const int64_t stop = start + rows < m ? start + rows : m;
    for (int64_t at = 0; at < k; at += width) {
      const bool first = at == 0, last = at + width >= k;
      for (int64_t i = start; i < stop;) {
        const int64_t left = stop - i;
        // The last two blocks share what is left, so that none is much smaller than the others.
        const int64_t take = left <= kBlockM ? left : left < 2 * kBlockM ? (left + 1) / 2 : kBlockM;
        float* carried = panels == 1 ? nullptr : state + (i - start) * n * 16;
        kColumns[take - 1](x + i * ldx + at, ldx, w + at, n, ldw, last ? k - at : width, carried, first, last,
                           out + i * ldo, ldo);
        i += take;
      }
    }
  }
}

template <typename Type>
void ExpandRow(const uint8_t* row, const int8_t* grid, int64_t k, float* out) {
  int64_t i = 0;
  for (; i + Type::kBlock <= k; i += Type::kBlock, row += Type::kBytes) {
    Type::Decode(row, grid, [&](int j, V v) __attribute__((always_inline)) { Store(out + i + 16 * j, v); });
  }
  if constexpr (Type::kBlock == 16) {  // dense rows only; packed ones are whole blocks
    if (i < k) {
      uint8_t last[Type::kBytes] = {};
      std::memcpy(last, row, static_cast<size_t>(k - i) * (Type::kBytes / 16));
      Type::Decode(last, grid, [&](int, V v) __attribute__((always_inline)) {
        StoreSome(out + i, v, static_cast<int>(k - i));
      });
    }
  }
}

inline constexpr int kAhead = 2048;  // bytes, by measurement

// One row of x: the values go from the decoder straight into the sums, `R` rows of w side by side.
template <typename Type, int R>
INLINE void VectorRows(const float* x, int64_t k, const uint8_t* row, int64_t row_bytes, const int8_t* grid,
                       float* out) {
  V acc[R] = {};
  for (int64_t i = 0; i < k; i += Type::kBlock, row += Type::kBytes) {
    _Pragma("GCC unroll 4") for (int r = 0; r < R; ++r) {
      // Rows are read once, and a page at a time the hardware's own prefetch starts anew.
      for (int at = 0; at < Type::kBytes; at += 64) __builtin_prefetch(row + r * row_bytes + kAhead + at);
      Type::Decode(row + r * row_bytes, grid, [&](int j, V v) __attribute__((always_inline)) {
        acc[r] = Fma(Load(x + i + 16 * j), v, acc[r]);
      });
    }
  }
  _Pragma("GCC unroll 4") for (int r = 0; r < R; ++r) out[r] = Sum(acc[r]);
}

template <typename Type>
void MultiplyVector(const float* x, int64_t k, const Rows& w, int64_t first, int64_t last, float* out) {
  constexpr int kSide = 2;
  int64_t n = first;
  for (; n + kSide <= last; n += kSide) {
    VectorRows<Type, kSide>(x, k, w.data + n * w.row_bytes, w.row_bytes, w.grid, out + (n - first));
  }
  for (; n < last; ++n) VectorRows<Type, 1>(x, k, w.data + n * w.row_bytes, w.row_bytes, w.grid, out + (n - first));
}

template <typename Type>
constexpr BlockSize SizeOf() {
  if constexpr (requires { Type::kGrid; }) {
    return {Type::kBlock, Type::kBytes, Type::kGrid};
  } else {
    return {Type::kBlock, Type::kBytes, 0};
  }
}

inline BlockSize SizeOfType(int32_t type) {
#define CASE(Type) \
  case Type::kId:  \
    return SizeOf<Type>();
  switch (type) { EACH_TYPE(CASE) }
#undef CASE
  return {};
}

using Expander = void (*)(const uint8_t*, const int8_t*, int64_t, float*);
using VectorProduct = void (*)(const float*, int64_t, const Rows&, int64_t, int64_t, float*);

inline Expander ExpanderOf(int32_t type) {
#define CASE(Type) \
  case Type::kId:  \
    return ExpandRow<Type>;
  switch (type) { EACH_TYPE(CASE) }
#undef CASE
  return nullptr;
}

inline VectorProduct VectorProductOf(int32_t type) {
#define CASE(Type) \
  case Type::kId:  \
    return MultiplyVector<Type>;
  switch (type) { EACH_TYPE(CASE) }
#undef CASE
  return nullptr;
}

inline void ExpandTiled(const Rows& w, int64_t row, int64_t k, float* out);

// Few rows of x: the expanded rows of w are to stay in a near cache. Many: x is read anew for each tile, from a far one.
inline int64_t TileRows(int64_t m, int64_t k) {
  const int64_t fit = (m <= kCarriedRows ? 128 << 10 : 2 << 20) / (4 * Padded(k) + 1);
  return fit >= 32 ? 32 : fit <= 4 ? 4 : fit / 4 * 4;
}

inline int64_t MatmulScratch(int64_t m, int64_t k) {
  const int64_t carried = m > 1 && NumPanels(Padded(k)) > 1 ? kCarriedRows * 16 : 0;
  return TileRows(m, k) * (Padded(k) + carried);
}

inline void Matmul(const float* x, int64_t m, int64_t ldx, int64_t k, const Rows& w, int64_t first, int64_t last,
                   float* scratch, float* out, int64_t ldo) {
  const int64_t padded = Padded(k), tile = TileRows(m, k);
  const bool direct = w.type == kF32 && k == padded;
  if (m == 1 && k == padded && !w.tiled) return VectorProductOf(w.type)(x, k, w, first, last, out);
  const Expander expand = ExpanderOf(w.type);
  for (int64_t n = first; n < last; n += tile) {
    const int64_t rows = last - n < tile ? last - n : tile;
    const float* wide = scratch;
    for (int64_t r = 0; r < rows && !direct; ++r) {
      float* to = scratch + r * padded;
      if (w.tiled) {
        ExpandTiled(w, n + r, k, to);
      } else {
        expand(w.data + (n + r) * w.row_bytes, w.grid, k, to);
      }
      for (int64_t i = k; i < padded; ++i) to[i] = 0.0f;
    }
    if (direct) wide = reinterpret_cast<const float*>(w.data) + n * k;
    Dots(x, m, ldx, wide, rows, padded, padded, scratch + tile * padded, out + (n - first), ldo);
  }
}

inline void Expand(const Rows& w, int64_t row, int64_t k, float* out) {
  if (w.tiled) return ExpandTiled(w, row, k, out);
  ExpanderOf(w.type)(w.data + row * w.row_bytes, w.grid, k, out);
}

}  // namespace
}  // namespace inferax
