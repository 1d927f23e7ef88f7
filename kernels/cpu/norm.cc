// norm, rotary and logprobs.
#include <cmath>

#include "handlers.h"

namespace inferax {

ffi::Error Norm(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::ResultBuffer<ffi::F32> y, int32_t has_bias,
                float eps, int32_t layer, int32_t threads, int32_t tier) {
  const Kernels* kernels = Tier(tier);
  if (kernels == nullptr) return ffi::Error::InvalidArgument("norm: this machine has no such tier");
  const auto dims = y->dimensions();
  const int64_t d = dims.size() == 0 ? 1 : dims.back();
  const int64_t m = d == 0 ? 0 : static_cast<int64_t>(y->element_count()) / d;
  Operands in(args);
  const float* x = in.Floats(true, m * d, "x");
  const float* weight = in.Floats(true, d, "weight");
  const NormSpec norm = {weight, in.Floats(has_bias != 0, d, "bias"), eps, layer != 0};
  if (!in.error().success()) return in.error();
  float* out = y->typed_data();
  const int64_t rows = std::max(16384 / (d + 1), int64_t{1});
  Phases phases;
  phases.Add((m + rows - 1) / rows, [=](int64_t chunk) {
    for (int64_t r = chunk * rows; r < std::min(m, (chunk + 1) * rows); ++r) {
      kernels->norm(x + r * d, d, norm, out + r * d);
    }
  });
  phases.Run(pool, m * d, threads);
  return ffi::Error::Success();
}

// The angles' frequencies are rows of `frequencies`: one, or a short and a long one (longrope), chosen where a sequence
// is longer than `original_length`. With dynamic_dim they are made anew for each length from theta and factor.
ffi::Error Rotary(ffi::ThreadPool pool, ffi::Buffer<ffi::S32> positions, ffi::Buffer<ffi::S32> lengths,
                  ffi::Buffer<ffi::F32> frequencies, ffi::ResultBuffer<ffi::F32> cos, ffi::ResultBuffer<ffi::F32> sin,
                  int64_t original_length, float attention_factor, int64_t dynamic_dim, float theta, float factor,
                  int32_t threads) {
  const auto shape = frequencies.dimensions();
  const int64_t m = static_cast<int64_t>(positions.element_count());
  if (shape.size() != 2 || shape[0] < 1 || shape[0] > 2 || static_cast<int64_t>(lengths.element_count()) != m ||
      static_cast<int64_t>(cos->element_count()) != m * shape[1]) {
    return ffi::Error::InvalidArgument("rotary: operands of the wrong shape");
  }
  const int64_t half = shape[1];
  const bool two = shape[0] == 2;
  const float* table = frequencies.typed_data();
  const int32_t *at = positions.typed_data(), *length = lengths.typed_data();
  float *c = cos->typed_data(), *s = sin->typed_data();
  constexpr int64_t kRows = 16;
  Phases phases;
  phases.Add((m + kRows - 1) / kRows, [=](int64_t chunk) {
    for (int64_t r = chunk * kRows; r < std::min(m, (chunk + 1) * kRows); ++r) {
      const float* row = two && length[r] > original_length ? table + half : table;
      float grown = 0.0f;
      if (dynamic_dim != 0) {
        const float ratio = factor * static_cast<float>(length[r]) / static_cast<float>(original_length) - (factor - 1.0f);
        const float power = static_cast<float>(static_cast<double>(dynamic_dim) / static_cast<double>(dynamic_dim - 2));
        grown = theta * std::pow(std::max(ratio, 1.0f), power);
      }
      for (int64_t i = 0; i < half; ++i) {
        // With dynamic_dim the table holds exponents.
        const float frequency = dynamic_dim != 0 ? 1.0f / std::pow(grown, row[i]) : row[i];
        const float angle = static_cast<float>(at[r]) * frequency;
        c[r * half + i] = std::cos(angle) * attention_factor;
        s[r * half + i] = std::sin(angle) * attention_factor;
      }
    }
  });
  phases.Run(pool, m * half * 32, threads);
  return ffi::Error::Success();
}

// Each tile of the vocabulary gives a row's maximum and sum of exponentials, which are merged in ascending order.
ffi::Error LogProbs(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    ffi::Span<const int32_t> types, int32_t has, float norm_eps, int32_t layer, float softcap,
                    float scale, int64_t tile, int32_t threads, int32_t tier) {
  const Kernels* found = Tier(tier);
  if (found == nullptr) return ffi::Error::InvalidArgument("logprobs: this machine has no such tier");
  const Kernels& kernels = *found;
  Operands in(args);
  const ffi::AnyBuffer x = in.Next(), chosen_ids = in.Next();
  if (!in.error().success() || x.dimensions().size() != 2 || chosen_ids.dimensions().size() != 2 ||
      x.element_type() != ffi::F32 || chosen_ids.element_type() != ffi::S32 || rets.size() < 3 ||
      chosen_ids.dimensions()[0] != x.dimensions()[0] || tile <= 0) {
    return ffi::Error::InvalidArgument("logprobs: x must be float32 [T, D] and ids int32 [T, J]");
  }
  const int64_t m = x.dimensions()[0], d = x.dimensions()[1], count = chosen_ids.dimensions()[1];
  const std::vector<Rows> w = in.Weight(types, d);
  const int64_t vocab = RowsOf(w), tiles = (vocab + tile - 1) / tile;
  const NormSpec norm = {in.Floats(has & 1, d, "norm"), in.Floats(has & 2, d, "norm bias"), norm_eps, layer != 0};
  const auto floats = [&rets](size_t i, int64_t wanted) -> float* {
    const auto ret = rets.get<ffi::AnyBuffer>(i);
    if (!ret.has_value()) return nullptr;
    ffi::Result<ffi::AnyBuffer> buffer = *ret;
    return static_cast<int64_t>(buffer->element_count()) < wanted ? nullptr : static_cast<float*>(buffer->untyped_data());
  };
  if (!in.error().success()) return in.error();
  float *chosen = floats(0, m * count), *lse = floats(1, m), *parts = floats(2, m * tiles * 2);
  const bool copies = AnyFloat(w) && (norm.weight != nullptr || d % kLanes != 0);
  float* xn = copies ? floats(3, m * Padded(d)) : nullptr;
  float* quantized = AnyInt8(w) ? floats(copies ? 4 : 3, QuantizedBytes(m, d) / 4) : nullptr;
  if (chosen == nullptr || lse == nullptr || parts == nullptr || (copies && xn == nullptr) ||
      (AnyInt8(w) && (quantized == nullptr || tile % 16 != 0 || vocab % 16 != 0))) {
    return ffi::Error::InvalidArgument("logprobs: wrong results");
  }
  if (m == 0) return ffi::Error::Success();

  const int32_t* ids = static_cast<const int32_t*>(chosen_ids.untyped_data());
  Phases phases;
  const Input input = AddInput(phases, kernels, static_cast<const float*>(x.untyped_data()), m, d, norm, xn,
                               reinterpret_cast<uint8_t*>(quantized), AnyHalves(w));
  constexpr int64_t kRows = 256;  // of x at a time, which bounds the scratch
  phases.Add(tiles, [=, &kernels, &w](int64_t t) {
    const int64_t first = t * tile, last = std::min(vocab, first + tile), width = last - first;
    const int64_t expanded = ProductScratch(kernels, m, d);
    float* scratch = Scratch(expanded + std::min(m, kRows) * width);
    float* logits = scratch + expanded;
    for (int64_t start = 0; start < m; start += kRows) {
      const int64_t some = std::min(m - start, kRows);
      MultiplyParts(kernels, input.From(start, d), some, d, w, first, last, scratch, logits, width);
      for (int64_t i = 0; i < some; ++i) {
        const int64_t r = start + i;
        float* part = parts + (r * tiles + t) * 2;
        kernels.log_sum(logits + i * width, width, scale, softcap, part, part + 1);
        for (int64_t j = 0; j < count; ++j) {
          const int64_t id = ids[r * count + j] < 0 ? ids[r * count + j] + vocab : ids[r * count + j];
          if (id >= first && id < last) chosen[r * count + j] = logits[i * width + id - first];
        }
      }
    }
  });
  phases.Add((m + 15) / 16, [=](int64_t chunk) {
    for (int64_t r = chunk * 16; r < std::min(m, chunk * 16 + 16); ++r) {
      float top = -INFINITY, total = 0.0f;
      for (int64_t t = 0; t < tiles; ++t) top = std::max(top, parts[(r * tiles + t) * 2]);
      for (int64_t t = 0; t < tiles; ++t) {
        const float* part = parts + (r * tiles + t) * 2;
        total += part[1] * std::exp(part[0] - top);
      }
      lse[r] = top + std::log(total);
      for (int64_t j = 0; j < count; ++j) {
        const int64_t id = ids[r * count + j] < 0 ? ids[r * count + j] + vocab : ids[r * count + j];
        float& value = chosen[r * count + j];
        value = id >= 0 && id < vocab ? value - lse[r] : NAN;
      }
    }
  });
  phases.Run(pool, m * vocab * d, threads);
  return ffi::Error::Success();
}

}  // namespace inferax
