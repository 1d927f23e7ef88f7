// `sample` for one row: the stages of ops/sample.py on arrays that shrink to what the filters leave.
#pragma once

#include "vmath.h"

namespace inferax {
namespace {

INLINE int64_t Smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t Larger(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE bool Bit(const uint32_t* words, int64_t i) { return (words[i / 32] >> (i % 32) & 1) != 0; }

// Sum of f(i, count) over [first, last): vectors within runs of 256 elements, float64 from run to run.
template <typename F>
INLINE double SumOver(int64_t first, int64_t last, F&& f) {
  double total = 0;
  for (; first < last; first += 256) {
    V sum = Splat(0.0f);
    Runs(Smaller(last - first, 256), [&](int64_t i, int count) {
      V v = f(first + i, count);
      if (count < 16) {
        float lanes[16] = {};
        StoreSome(lanes, v, count);
        v = Load(lanes);
      }
      sum = sum + v;
    });
    total += Sum(sum);
  }
  return total;
}

INLINE double SumOf(const float* x, int64_t first, int64_t last) {
  return SumOver(first, last, [&](int64_t i, int count) { return LoadSome(x + i, count); });
}

// The largest number, -inf where there is none.
INLINE float Highest(const float* x, int64_t n) {
  V high[4];
  for (V& v : high) v = Splat(-__builtin_inff());
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    _Pragma("GCC unroll 4") for (int k = 0; k < 4; ++k) high[k] = Max(Load(x + i + 16 * k), high[k]);
  }
  float top = Largest(Max(Max(high[0], high[1]), Max(high[2], high[3])));
  for (; i < n; ++i) top = x[i] > top ? x[i] : top;
  return top;
}

// Where the first of the largest numbers is, 0 where there is none.
INLINE int64_t FirstHighest(const float* x, int64_t n) {
  float best = -__builtin_inff();
  int64_t at = 0;
  for (int64_t block = 0; block < n; block += 1024) {
    const float top = Highest(x + block, Smaller(n - block, 1024));
    if (top > best) {
      best = top;
      at = block;
    }
  }
  if (best == -__builtin_inff()) return 0;
  while (x[at] != best) ++at;
  return at;
}

// Writes where x >= floor and not x >= ceiling, ascending, and at most 15 numbers more; returns how many there are.
INLINE int64_t Collect(const float* x, int64_t n, float floor, int32_t* out, float ceiling = __builtin_nanf("")) {
  int64_t found = 0;
  Runs(n, [&](int64_t i, int count) {
    const V v = LoadSome(x + i, count);
    uint32_t mask = Mask(v >= Splat(floor)) & ~Mask(v >= Splat(ceiling)) & ((1u << count) - 1);
    if (mask == 0) return;
#if defined(__AVX512F__)
    const __m512i each = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i at = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int32_t>(i)), each);
    _mm512_storeu_si512(out + found, _mm512_maskz_compress_epi32(static_cast<__mmask16>(mask), at));
    found += __builtin_popcount(mask);
#else
    for (; mask != 0; mask &= mask - 1) out[found++] = static_cast<int32_t>(i) + __builtin_ctz(mask);
#endif
  });
  return found;
}

// Unsigned integers in the same order as the floats.
INLINE uint32_t Key(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits ^ (bits >> 31 != 0 ? 0xffffffffu : 0x80000000u);
}

// Two uniforms in [0, 1) by Threefry-2x32 with 20 rounds, as in ops/random.py.
INLINE void Uniforms(const SamplerRow& row, uint32_t stream, double* out) {
  const uint32_t key[3] = {row.seed_low, row.seed_high, row.seed_low ^ row.seed_high ^ 0x1bd11bda};
  constexpr int kRotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  uint32_t x = (row.sample_index ^ stream << 28) + key[0], y = static_cast<uint32_t>(row.position) + key[1];
  for (uint32_t group = 0; group < 5; ++group) {
    for (const int bits : kRotations[group % 2]) {
      x += y;
      y = (y << bits | y >> (32 - bits)) ^ x;
    }
    x += key[(group + 1) % 3];
    y += key[(group + 2) % 3] + group + 1;
  }
  out[0] = (x >> 8) * 0x1p-24;
  out[1] = (y >> 8) * 0x1p-24;
}

// The selection by Floor: how many pivots are tried in one pass, up to how many numbers need none, and the buckets of
// a histogram, of which there are two as neighbours often fall into one bucket.
inline constexpr int kPivots = 8;
inline constexpr int64_t kMany = 2048, kBuckets = 2048;

INLINE int64_t SamplerArray(int64_t vocab, int64_t context) { return Padded(Larger(vocab, context)) + kLanes; }
inline int64_t SampleScratch(int64_t vocab, int64_t context) {
  return 4 * kBuckets + 5 * SamplerArray(vocab, context);
}

class Sampler {
 public:
  Sampler(const float* logits, int64_t vocab, const SamplerRow& row, const SamplerMemory& memory, float* scratch)
      : row_(row), memory_(memory), vocab_(vocab), s_(logits), n_(vocab) {
    const int64_t array = SamplerArray(vocab, memory.length);
    histogram_ = reinterpret_cast<double*>(scratch);
    scores_ = scratch + 4 * kBuckets;
    weights_ = scores_ + array;
    other_ = weights_ + array;
    ids_ = reinterpret_cast<int32_t*>(other_ + array);
    list_ = ids_ + array;
  }

  int32_t Token(float* mu, float* scores) {
    const bool drawn = row_.temperature > 0, typical = row_.typical_p < 1, xtc = row_.xtc_probability > 0;
    // The other filters keep the best token, so that they do nothing for a greedy row.
    const bool filtered = drawn || typical || xtc, remembers = memory_.history != nullptr;
    const bool penalties = row_.presence_penalty != 0 || row_.frequency_penalty != 0 || row_.repetition_penalty != 1;
    for (const int32_t stage : row_.stages) {
      switch (stage) {
        case kPenalties: if (remembers && penalties && row_.penalty_last_n != 0) Penalties(); break;
        case kDry: if (remembers && row_.dry_multiplier != 0 && row_.dry_penalty_last_n != 0) Dry(); break;
        case kTopNSigma: if (filtered && row_.top_n_sigma > 0) TopNSigma(); break;
        case kTemperature: if (drawn) Temperature(); break;
        case kTypicalP: if (typical) TypicalP(); break;
        case kMinP: if (filtered && row_.min_p > 0) Keep(s_, Top() + __builtin_logf(row_.min_p)); break;
        case kTopK: if (filtered && row_.top_k > 0) TopK(); break;
        case kTopP: if (filtered && row_.top_p < 1) TopP(); break;
        case kXtc: if (xtc) Xtc(); break;
        default: break;
      }
    }
    if (scores != nullptr) {
      for (int64_t i = 0; i < vocab_; ++i) scores[i] = -__builtin_inff();
      for (int64_t j = 0; j < n_; ++j) scores[Id(j)] = s_[j];
    }
    if (!drawn) return n_ > 0 ? static_cast<int32_t>(Id(FirstHighest(s_, n_))) : 0;
    return row_.mirostat_tau > 0 ? Mirostat(mu) : Draw();
  }

 private:
  int64_t Id(int64_t j) const { return dense_ ? j : ids_[j]; }

  // Where a token's score is, or -1.
  int64_t Find(int64_t token) const {
    if (token < 0 || token >= vocab_) return -1;
    if (dense_) return token;
    int64_t low = 0, high = n_;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (ids_[middle] < token) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low < n_ && ids_[low] == token ? low : -1;
  }

  float Top() {
    if (!topped_) top_ = Highest(s_, n_);
    topped_ = true;
    return top_;
  }

  // Where all is masked, no number minus infinity is one.
  float Base() { return Top() > -__builtin_inff() ? Top() : 0.0f; }

  // weights_[j] = exp(s[j] - top), and their sum.
  void Weigh() {
    const V base = Splat(Base());
    if (weighed_) {
      total_ = SumOf(weights_, 0, n_);
    } else {
      total_ = SumOver(0, n_, [&](int64_t i, int count) {
        const V w = Exp(LoadSome(s_ + i, count) - base);
        StoreSome(weights_ + i, w, count);
        return w;
      });
    }
    weighed_ = true;
  }

  // The mean of s[j] - top, by the weights; entropy is log(total) less that.
  double MeanScore() {
    const V base = Splat(Base()), zero = Splat(0.0f);
    return SumOver(0, n_, [&](int64_t i, int count) {
      const V w = LoadSome(weights_ + i, count);
      return Select(w > zero, w * (LoadSome(s_ + i, count) - base), zero);
    }) / total_;
  }

  // The scores in an array of our own, to be written to; their largest and the weights are not known after that.
  float* Writable() {
    if (s_ != scores_) std::memcpy(scores_, s_, static_cast<size_t>(n_) * sizeof(float));
    s_ = scores_;
    topped_ = weighed_ = false;
    return scores_;
  }

  // Keeps the tokens whose x is at least `floor`: few as a list, many as what is not -inf.
  void Keep(const float* x, float floor) {
    const int64_t left = Collect(x, n_, floor, list_);
    if (left == n_) return;
    if (left > n_ / 4) {
      const V zero = Splat(0.0f), none = Splat(-__builtin_inff()), least = Splat(floor);
      Runs(n_, [&](int64_t i, int count) {
        const VI stays = LoadSome(x + i, count) >= least;
        if (weighed_) StoreSome(weights_ + i, Select(stays, LoadSome(weights_ + i, count), zero), count);
        StoreSome(scores_ + i, Select(stays, LoadSome(s_ + i, count), none), count);
      });
      s_ = scores_;
      return;
    }
    for (int64_t i = 0; i < left; ++i) {
      const int64_t j = list_[i];
      ids_[i] = static_cast<int32_t>(Id(j));
      scores_[i] = s_[j];
      if (weighed_) weights_[i] = weights_[j];
    }
    s_ = scores_;
    n_ = left;
    dense_ = false;
  }

  // The largest number among x from which on the weights (1 where w is null) add up to `wanted`.
  float Floor(const float* x, const float* w, double wanted) {
    // It is in [low, high), and the numbers from high on weigh `above`. No number is >= NaN: there is no end. Each pass
    // narrows that to what is between two of the pivots: steps that double with the distance from the largest, then even
    // ones.
    float low = -__builtin_inff(), high = __builtin_nanf("");
    double above = 0;
    if (n_ > kMany) {
      const float top = Highest(x, n_);
      for (int pass = 0; pass < 3; ++pass) {
        const float step = ((high == high ? high : top) - low) / (kPivots + 1);
        float pivots[kPivots];
        for (int k = 0; k < kPivots; ++k) {
          pivots[k] = pass == 0 ? top - static_cast<float>(1 << (kPivots - 1 - k)) * 0.25f : low + step * (k + 1);
        }
        double weights[kPivots];
        WeightsFrom(x, w, pivots, weights);
        int k = kPivots;
        while (k > 0 && !(weights[k - 1] >= wanted)) --k;
        if (k < kPivots) {
          high = pivots[k];
          above = weights[k];
        }
        if (k == 0 && pass == 0) break;
        if (k > 0) low = pivots[k - 1];
        if (w == nullptr && k > 0 && weights[k - 1] - above <= kMany) break;
      }
    }
    return Floor(x, w, Collect(x, n_, low, list_, high), wanted - above);
  }

  // out[k] = what the numbers among x that are at least pivots[k] weigh.
  void WeightsFrom(const float* x, const float* w, const float* pivots, double* out) {
    static constexpr float kOnes[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    for (int k = 0; k < kPivots; ++k) out[k] = 0;
    for (int64_t first = 0; first < n_; first += 1024) {
      V sums[kPivots];
      for (V& sum : sums) sum = Splat(0.0f);
      Runs(Smaller(n_ - first, 1024), [&](int64_t i, int count) {
        const V v = LoadSome(x + first + i, count), weight = LoadSome(w == nullptr ? kOnes : w + first + i, count);
        _Pragma("GCC unroll 8") for (int k = 0; k < kPivots; ++k) {
          sums[k] = sums[k] + FromBits(Bits(weight) & (v >= Splat(pivots[k])));
        }
      });
      for (int k = 0; k < kPivots; ++k) out[k] += Sum(sums[k]);
    }
  }

  // The same among the n numbers that list_ names. Each histogram of the numbers' bits leaves one bucket of them, and
  // the last nothing but equal numbers.
  float Floor(const float* x, const float* w, int64_t n, double wanted) {
    constexpr int64_t kFew = 32;
    double above = 0;
    for (int shift = 21; shift >= 0 && n > kFew; shift = shift == 21 ? 10 : shift - 10) {
      n = Narrow(x, w, n, shift, wanted, above);
    }
    for (int64_t i = 1; i < n; ++i) {
      const int32_t j = list_[i];
      int64_t at = i;
      for (; at > 0 && x[list_[at - 1]] < x[j]; --at) list_[at] = list_[at - 1];
      list_[at] = j;
    }
    int64_t i = 0;
    while (i + 1 < n && (above += w == nullptr ? 1.0 : w[list_[i]]) < wanted) ++i;
    return n == 0 ? -__builtin_inff() : x[list_[i]];
  }

  // Leaves of list_ the one bucket in which the weights from the last bucket down get to `wanted`, or the first bucket
  // where by rounding they do not, and adds what is in the buckets after it to `above`. Returns how many are left.
  int64_t Narrow(const float* x, const float* w, int64_t n, int shift, double wanted, double& above) {
    const auto bucket_of = [=](int64_t j) { return static_cast<int64_t>(Key(x[j]) >> shift & (kBuckets - 1)); };
    std::memset(histogram_, 0, 2 * kBuckets * sizeof(double));
    for (int64_t i = 0; i < n; ++i) {
      const int64_t j = list_[i];
      histogram_[2 * bucket_of(j) + i % 2] += w == nullptr ? 1.0 : w[j];
    }
    int64_t lowest = 0;
    double up_to = above;
    for (int64_t bucket = kBuckets - 1; bucket >= 0; --bucket) {
      const double here = histogram_[2 * bucket] + histogram_[2 * bucket + 1];
      if (here == 0) continue;
      above = up_to;
      up_to += here;
      lowest = bucket;
      if (up_to >= wanted) break;
    }
    int64_t left = 0;
    for (int64_t i = 0; i < n; ++i) {
      const int32_t j = list_[i];
      list_[left] = j;
      left += bucket_of(j) == lowest;
    }
    return left;
  }

  void Penalize(float& score, int32_t count, bool seen) {
    if (seen) score = score > 0 ? score / row_.repetition_penalty : score * row_.repetition_penalty;
    score -= row_.frequency_penalty * static_cast<float>(count);
    if (count > 0) score -= row_.presence_penalty;
  }

  // The positions of the history that count; `length` is how many of the last, or negative.
  struct Window {
    int64_t first, stop;
  };
  Window Last(int32_t length) const {
    const int64_t stop = Larger(0, Smaller(row_.position, memory_.length));
    return {length < 0 ? 0 : Larger(0, stop - length), stop};
  }

  // A number for each token, 0 at first. Who uses it looks up what the window's tokens have, and never the whole.
  int32_t* Table() {
    std::memset(other_, 0, static_cast<size_t>(vocab_) * sizeof(int32_t));
    return reinterpret_cast<int32_t*>(other_);
  }

  void Penalties() {
    float* s = Writable();
    if (row_.penalty_last_n != kOwnContext) {
      int32_t* counts = Table();
      const Window window = Last(row_.penalty_last_n);
      const int32_t* history = memory_.history;
      for (int64_t at = window.first; at < window.stop; ++at) {
        if (history[at] >= 0 && history[at] < vocab_) ++counts[history[at]];
      }
      for (int64_t at = window.first; at < window.stop; ++at) {
        const int64_t j = Find(history[at]);
        if (j < 0 || counts[history[at]] == 0) continue;
        Penalize(s[j], counts[history[at]], true);
        counts[history[at]] = 0;
      }
      return;
    }
    for (int64_t j = 0; j < n_; ++j) {
      if (dense_ && j % 32 == 0 && j + 32 <= n_ && memory_.in_prompt[j / 32] == 0) {
        int16_t any = 0;
        for (int64_t k = j; k < j + 32; ++k) any |= memory_.counts[k];
        if (any == 0) {
          j += 31;
          continue;
        }
      }
      const int32_t count = memory_.counts[Id(j)];
      Penalize(s[j], count, count > 0 || Bit(memory_.in_prompt, Id(j)));
    }
  }

  void Dry() {
    const Window window = Last(row_.dry_penalty_last_n);
    const int64_t total = window.stop - window.first;
    if (total < 2) return;
    const int32_t* end = memory_.history + window.stop - 1;
    // A repetition reaches back to the last breaker at most.
    int64_t limit = 0;
    while (limit < total && !(end[-limit] >= 0 && end[-limit] < vocab_ && Bit(memory_.breaks, end[-limit]))) ++limit;
    // The Z function of the window read backwards: how far what ends at end - i is what ends at `end`.
    float* s = Writable();
    int32_t* longest = Table();
    int32_t* z = list_;
    for (int64_t i = 1, from = 0, to = 0; i < total; ++i) {
      int64_t length = i < to ? Smaller(to - i, z[i - from]) : 0;
      while (i + length < total && end[-length] == end[-(i + length)]) ++length;
      z[i] = static_cast<int32_t>(length);
      if (i + length > to) {
        from = i;
        to = i + length;
      }
      const int64_t next = end[1 - i], repeated = Smaller(length, limit);
      if (next < 0 || next >= vocab_ || repeated < row_.dry_allowed_length || Bit(memory_.breaks, next)) continue;
      longest[next] = static_cast<int32_t>(Larger(longest[next], repeated));
    }
    const float base = row_.dry_base;
    const float most = base > 1.000001f ? __builtin_floorf(88.7228391f / __builtin_logf(base)) : 0.0f;
    for (int64_t i = 1; i < total; ++i) {
      const int64_t j = Find(end[1 - i]);
      if (j < 0 || longest[end[1 - i]] == 0) continue;
      float exponent = static_cast<float>(longest[end[1 - i]] - row_.dry_allowed_length);
      if (most > 0 && exponent > most) exponent = most;
      s[j] -= row_.dry_multiplier * __builtin_powf(base, exponent);
      longest[end[1 - i]] = 0;
    }
  }

  void TopNSigma() {
    const V lowest = Splat(-__builtin_inff()), zero = Splat(0.0f);
    const auto sum = [&](auto&& f) {
      return SumOver(0, n_, [&](int64_t i, int count) {
        const V v = LoadSome(s_ + i, count);
        return Select(v > lowest, f(v), zero);
      });
    };
    const double count = sum([](V) { return Splat(1.0f); });
    const V mean = Splat(static_cast<float>(sum([](V v) { return v; }) / count));
    const double variance = sum([&](V v) { return (v - mean) * (v - mean); }) / count;
    Keep(s_, Top() - row_.top_n_sigma * static_cast<float>(__builtin_sqrt(variance)));
  }

  void Temperature() {
    float value = row_.temperature;
    if (row_.dynatemp_range > 0) {
      Weigh();
      const V zero = Splat(0.0f), one = Splat(1.0f);
      const double count = SumOver(0, n_, [&](int64_t i, int some) {
        return Select(LoadSome(weights_ + i, some) > zero, one, zero);
      });
      const double entropy = __builtin_log(total_) - MeanScore();
      const float share = count > 1 ? static_cast<float>(entropy / __builtin_log(count)) : 0.0f;
      const float low = value > row_.dynatemp_range ? value - row_.dynatemp_range : 0.0f;
      value = low + (value + row_.dynatemp_range - low) * __builtin_powf(share, row_.dynatemp_exponent);
    }
    // The largest score is 0 before the division, so that no temperature overflows it.
    const V base = Splat(Base()), divisor = Splat(value > 1e-30f ? value : 1e-30f);
    Runs(n_, [&](int64_t i, int count) { StoreSome(scores_ + i, (LoadSome(s_ + i, count) - base) / divisor, count); });
    top_ = Top() > -__builtin_inff() ? 0.0f : Top();
    s_ = scores_;
    weighed_ = false;
  }

  void TypicalP() {
    Weigh();
    const V zero = Splat(0.0f), base = Splat(Base()), mean = Splat(static_cast<float>(MeanScore()));
    // How far a token's surprise is from the entropy is how far its score is from the mean score.
    Runs(n_, [&](int64_t i, int count) {
      const V far = Abs((LoadSome(s_ + i, count) - base) - mean);
      const V near = Select(LoadSome(weights_ + i, count) > zero, zero - far, Splat(-__builtin_inff()));
      StoreSome(other_ + i, near, count);
    });
    const float floor = Floor(other_, weights_, row_.typical_p * total_);
    topped_ = weighed_ = false;  // the best may go
    Keep(other_, floor);
  }

  void TopK() {
    if (row_.top_k < n_) Keep(s_, Floor(s_, nullptr, row_.top_k));
  }

  void TopP() {
    Weigh();
    const double wanted = row_.top_p * total_;
    // Tokens that weigh less than this are less than 1 - top_p all together; a peaked distribution has few others.
    const float least = static_cast<float>(0.999 * (total_ - wanted) / static_cast<double>(n_));
    const int64_t others = Collect(weights_, n_, least, list_);
    Keep(s_, others <= kMany ? Floor(s_, weights_, others, wanted) : Floor(s_, weights_, wanted));
  }

  // With some probability, removes all but the least likely of the tokens above a threshold.
  void Xtc() {
    double u[2];
    Uniforms(row_, 1, u);
    if (!(u[0] < static_cast<double>(row_.xtc_probability))) return;
    Weigh();
    const V total = Splat(static_cast<float>(total_));
    Runs(n_, [&](int64_t i, int count) { StoreSome(other_ + i, LoadSome(weights_ + i, count) / total, count); });
    const int64_t above = Collect(other_, n_, row_.xtc_threshold, list_);
    float least = __builtin_inff();
    for (int64_t i = 0; i < above; ++i) least = other_[list_[i]] < least ? other_[list_[i]] : least;
    float* s = Writable();
    for (int64_t i = 0; i < above; ++i) {
      if (other_[list_[i]] > least) s[list_[i]] = -__builtin_inff();
    }
  }

  // Inverse CDF in two levels: one uniform picks a block of 256 tokens, a second a token inside it.
  int32_t Draw() {
    double u[2];
    Uniforms(row_, 0, u);
    Weigh();
    double running = 0;
    int64_t first = 0, last = 0;
    for (int64_t from = 0, to; from < n_; from = to) {
      const int64_t end = (Id(from) / 256 + 1) * 256;
      to = dense_ ? Smaller(end, n_) : from;
      while (to < n_ && Id(to) < end) ++to;
      const double mass = SumOf(weights_, from, to);
      if (!(mass > 0)) continue;
      running += mass;
      first = from;
      last = to;
      if (running > u[0] * total_) break;
    }
    double inside = 0, up_to = 0;
    for (int64_t j = first; j < last; ++j) inside += weights_[j];
    // Logits that are all NaN or masked have no right answer, but the id must be one.
    drawn_ = -1;
    for (int64_t j = first; j < last; ++j) {
      if (!(weights_[j] > 0)) continue;
      up_to += weights_[j];
      drawn_ = j;
      if (up_to > u[1] * inside) break;
    }
    return static_cast<int32_t>(drawn_ < 0 ? vocab_ - 1 : Id(drawn_));
  }

  // Draws among the tokens whose surprise is at most mu bits, and moves mu by how far that of the drawn one is from the
  // target.
  int32_t Mirostat(float* mu) {
    Weigh();
    const double least = (__builtin_log2(total_) - *mu) * 0.6931471805599453;
    Keep(s_, Base() + static_cast<float>(least < 0 ? least : 0.0));
    const int32_t token = Draw();
    if (drawn_ < 0) return token;
    const double surprise = __builtin_log2(total_) - __builtin_log2(weights_[drawn_]);
    *mu -= row_.mirostat_eta * (static_cast<float>(surprise) - row_.mirostat_tau);
    return token;
  }

  const SamplerRow& row_;
  const SamplerMemory& memory_;
  const int64_t vocab_;
  // What is left: n scores, in the order of their ids; dense_: ids are 0, 1, … (all of the vocabulary).
  const float* s_;
  int64_t n_;
  bool dense_ = true;
  // Whether top_ is the largest score, and weights_ those of the scores.
  bool topped_ = false, weighed_ = false;
  float top_ = 0.0f;
  double total_ = 0;
  int64_t drawn_ = -1;
  double* histogram_;  // [2 * kBuckets]
  float *scores_, *weights_, *other_;
  int32_t *ids_, *list_;
};

inline int32_t SampleRow(const float* logits, int64_t vocab, const SamplerRow& row, const SamplerMemory& memory,
                         float* scratch, float* mu, float* scores) {
  return Sampler(logits, vocab, row, memory, scratch).Token(mu, scores);
}

}  // namespace
}  // namespace inferax
