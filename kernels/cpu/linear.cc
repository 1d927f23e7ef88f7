// linear, gated_mlp and embed: norm, product and everything after it in one call each.
#include "handlers.h"

namespace inferax {
namespace {

// Bits of the attribute `has`, in operand order.
enum : int32_t { kNormWeight = 1, kNormBias = 2, kBias = 4, kDownBias = 8, kResidual = 16, kPostWeight = 32, kPostBias = 64, kCount = 128 };

// What follows a product, from its raw sums in y [m, n] on.
struct Epilogue {
  const float* bias;
  const float* residual;
  NormSpec post;  // weight is null where there is none
  int32_t activation;
  float scale;

  // Columns [first, last) of every row.
  void Columns(const Kernels& kernels, float* y, int64_t m, int64_t n, int64_t first, int64_t last) const {
    const bool whole = post.weight == nullptr;
    if (bias == nullptr && activation == kNone && (!whole || (scale == 1.0f && residual == nullptr))) return;
    for (int64_t r = 0; r < m; ++r) {
      const int64_t at = r * n + first;
      kernels.finish(y + at, last - first, bias == nullptr ? nullptr : bias + first, activation, whole ? scale : 1.0f,
                     whole && residual != nullptr ? residual + at : nullptr);
    }
  }

  // The phase of whole rows that a norm after the product needs.
  void AddRows(Phases& phases, const Kernels& kernels, float* y, int64_t m, int64_t n) const {
    if (post.weight == nullptr) return;
    const int64_t rows = std::max(16384 / (n + 1), int64_t{1});
    phases.Add((m + rows - 1) / rows, [=, this, &kernels](int64_t chunk) {
      for (int64_t r = chunk * rows; r < std::min(m, (chunk + 1) * rows); ++r) {
        float* row = y + r * n;
        kernels.norm(row, n, post, row);
        kernels.finish(row, n, nullptr, kNone, scale, residual == nullptr ? nullptr : residual + r * n);
      }
    });
  }
};

void AddProduct(Phases& phases, const Kernels& kernels, const Input& x, int64_t m, int64_t k,
                const std::vector<Rows>& w, const Epilogue& epilogue, float* y, int64_t threads) {
  const int64_t n = RowsOf(w), rows = RowsPerChunk(kernels, m, n, k, AnyInt8(w), threads);
  phases.Add((n + rows - 1) / rows, [=, &kernels, &w, &epilogue](int64_t chunk) {
    const int64_t first = chunk * rows, last = std::min(n, first + rows);
    float* scratch = Scratch(ProductScratch(kernels, m, k));
    MultiplyParts(kernels, x, m, k, w, first, last, scratch, y + first, n);
    epilogue.Columns(kernels, y, m, n, first, last);
  });
  epilogue.AddRows(phases, kernels, y, m, n);
}

// How many of the m rows are wanted; the others become zero.
int64_t Wanted(Operands& in, int32_t has, int64_t m, const char* name) {
  const int32_t* count = (has & kCount) != 0 ? in.Ints(1, name) : nullptr;
  return count == nullptr ? m : std::clamp<int64_t>(*count, 0, m);
}

// Results that are scratch, in the order that ops/cpu.py gives them. Null where one is not wanted; an error where it is
// missing or too small.
class Spare {
 public:
  Spare(const ffi::RemainingRets& rets, Operands& in, size_t first) : rets_(rets), in_(in), at_(first) {}
  template <typename T>
  T* Next(bool wanted, int64_t count) {
    if (!wanted) return nullptr;
    const auto ret = rets_.get<ffi::AnyBuffer>(at_++);
    if (ret.has_value()) {
      ffi::Result<ffi::AnyBuffer> buffer = *ret;
      if (static_cast<int64_t>(buffer->size_bytes()) >= count * static_cast<int64_t>(sizeof(T))) {
        return static_cast<T*>(buffer->untyped_data());
      }
    }
    in_.Fail("a result is missing or too small");
    return nullptr;
  }

 private:
  const ffi::RemainingRets& rets_;
  Operands& in_;
  size_t at_;
};

// Tiles are whole where each part of a weight that has tiled ones is a multiple of 16 rows.
void CheckTiles(Operands& in, const std::vector<Rows>& w) {
  if (!AnyInt8(w)) return;
  for (const Rows& part : w) {
    if (part.count % 16 != 0) in.Fail("a part of a tiled weight has " + std::to_string(part.count) + " rows");
  }
}

}  // namespace

ffi::Error Linear(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  ffi::Span<const int32_t> types, int32_t has, float norm_eps, float post_eps, int32_t layer,
                  int32_t activation, float scale, int32_t threads, int32_t tier) {
  const Kernels* kernels = Tier(tier);
  if (kernels == nullptr) return ffi::Error::InvalidArgument("linear: this machine has no such tier");
  Operands in(args);
  const ffi::AnyBuffer x = in.Next();
  if (!in.error().success() || x.dimensions().size() != 2 || x.element_type() != ffi::F32) {
    return ffi::Error::InvalidArgument("linear: x must be float32 [T, K]");
  }
  const int64_t m = x.dimensions()[0], k = x.dimensions()[1];
  const std::vector<Rows> w = in.Weight(types, k);
  const int64_t n = RowsOf(w);
  NormSpec norm{}, post{};
  norm = {in.Floats(has & kNormWeight, k, "norm"), in.Floats(has & kNormBias, k, "norm bias"), norm_eps, (layer & 1) != 0};
  Epilogue epilogue{};
  epilogue.bias = in.Floats(has & kBias, n, "bias");
  epilogue.residual = in.Floats(has & kResidual, m * n, "residual");
  post = {in.Floats(has & kPostWeight, n, "post norm"), in.Floats(has & kPostBias, n, "post norm bias"), post_eps,
          (layer & 2) != 0};
  epilogue.post = post;
  epilogue.activation = activation;
  epilogue.scale = scale;
  const int64_t live = Wanted(in, has, m, "count");
  CheckTiles(in, w);
  Spare spare(rets, in, 0);
  float* y = spare.Next<float>(true, m * n);
  float* xn = spare.Next<float>(AnyFloat(w) && (norm.weight != nullptr || k % kLanes != 0), m * Padded(k));
  uint8_t* quantized = spare.Next<uint8_t>(AnyInt8(w), QuantizedBytes(m, k));
  if (!in.error().success()) return in.error();
  if (m == 0 || n == 0) return ffi::Error::Success();

  std::fill(y + live * n, y + m * n, 0.0f);
  if (live == 0) return ffi::Error::Success();
  Phases phases;
  const Input input =
      AddInput(phases, *kernels, static_cast<const float*>(x.untyped_data()), live, k, norm, xn, quantized, AnyHalves(w));
  AddProduct(phases, *kernels, input, live, k, w, epilogue, y, NumThreads(pool, threads));
  phases.Run(pool, live * n * k, threads);
  return ffi::Error::Success();
}

ffi::Error GatedMlp(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    ffi::Span<const int32_t> types, ffi::Span<const int32_t> down_types, int32_t has, float norm_eps,
                    float post_eps, int32_t layer, int32_t activation, float scale, int32_t threads, int32_t tier) {
  const Kernels* found = Tier(tier);
  if (found == nullptr) return ffi::Error::InvalidArgument("gated_mlp: this machine has no such tier");
  const Kernels& kernels = *found;
  Operands in(args);
  const ffi::AnyBuffer x = in.Next();
  if (!in.error().success() || x.dimensions().size() != 2 || x.element_type() != ffi::F32) {
    return ffi::Error::InvalidArgument("gated_mlp: x must be float32 [T, D]");
  }
  const int64_t m = x.dimensions()[0], d = x.dimensions()[1];
  const std::vector<Rows> gate_up = in.Weight(types, d);
  const int64_t f = RowsOf(gate_up) / 2;
  const std::vector<Rows> down = in.Weight(down_types, f);
  const int64_t n = RowsOf(down);
  const NormSpec norm = {in.Floats(has & kNormWeight, d, "norm"), in.Floats(has & kNormBias, d, "norm bias"), norm_eps,
                         (layer & 1) != 0};
  const float* bias = in.Floats(has & kBias, 2 * f, "gate and up bias");
  Epilogue epilogue{};
  epilogue.bias = in.Floats(has & kDownBias, n, "down bias");
  epilogue.residual = in.Floats(has & kResidual, m * n, "residual");
  epilogue.post = {in.Floats(has & kPostWeight, n, "post norm"), in.Floats(has & kPostBias, n, "post norm bias"),
                   post_eps, (layer & 2) != 0};
  epilogue.scale = scale;
  const int64_t live = Wanted(in, has, m, "count");
  CheckTiles(in, gate_up);
  CheckTiles(in, down);
  if (AnyInt8(gate_up) && f % 16 != 0) in.Fail("gated_mlp: the width of a tiled weight is not a multiple of 16");
  const int64_t ldh = Padded(f);
  Spare spare(rets, in, 0);
  float* y = spare.Next<float>(true, m * n);
  float* h = spare.Next<float>(true, m * ldh);
  float* xn = spare.Next<float>(AnyFloat(gate_up) && (norm.weight != nullptr || d % kLanes != 0), m * Padded(d));
  uint8_t* quantized = spare.Next<uint8_t>(AnyInt8(gate_up), QuantizedBytes(m, d));
  uint8_t* hq = spare.Next<uint8_t>(AnyInt8(down), QuantizedBytes(m, f));
  if (!in.error().success()) return in.error();
  if (m == 0 || n == 0) return ffi::Error::Success();

  std::fill(y + live * n, y + m * n, 0.0f);
  if (live == 0) return ffi::Error::Success();
  const int64_t workers = NumThreads(pool, threads);
  Phases phases;
  const Input input = AddInput(phases, kernels, static_cast<const float*>(x.untyped_data()), live, d, norm, xn, quantized,
                               AnyHalves(gate_up));
  const int64_t rows = RowsPerChunk(kernels, live, f, d, AnyInt8(gate_up), workers);
  const int64_t expanded = ProductScratch(kernels, live, d);
  phases.Add((f + rows - 1) / rows, [=, &kernels, &gate_up](int64_t chunk) {
    const int64_t first = chunk * rows, last = std::min(f, first + rows), count = last - first;
    float* scratch = Scratch(expanded + live * count);
    float* up = scratch + expanded;
    MultiplyParts(kernels, input, live, d, gate_up, first, last, scratch, h + first, ldh);
    MultiplyParts(kernels, input, live, d, gate_up, f + first, f + last, scratch, up, count);
    for (int64_t r = 0; r < live; ++r) {
      kernels.gate(h + r * ldh + first, up + r * count, count, bias == nullptr ? nullptr : bias + first,
                   bias == nullptr ? nullptr : bias + f + first, activation);
      if (last == f) std::fill(h + r * ldh + f, h + (r + 1) * ldh, 0.0f);
    }
  });
  Input hidden = {h, ldh, nullptr};
  if (hq != nullptr) {  // then f is a multiple of 32, and ldh is f
    hidden = AddInput(phases, kernels, h, live, f, NormSpec{}, nullptr, hq, AnyHalves(down));
  }
  AddProduct(phases, kernels, hidden, live, f, down, epilogue, y, workers);
  phases.Run(pool, live * (2 * f * d + n * f), threads);
  return ffi::Error::Success();
}

ffi::Error Embed(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::ResultBuffer<ffi::F32> y,
                 ffi::Span<const int32_t> types, float scale, int32_t threads, int32_t tier) {
  const Kernels* kernels = Tier(tier);
  if (kernels == nullptr) return ffi::Error::InvalidArgument("embed: this machine has no such tier");
  if (y->dimensions().size() != 2) return ffi::Error::InvalidArgument("embed: the result must be [T, D]");
  const int64_t m = y->dimensions()[0], d = y->dimensions()[1];
  Operands in(args);
  const int32_t* ids = in.Ints(m, "ids");
  const std::vector<Rows> w = in.Weight(types, d);
  if (in.error().success() && (w.size() != 1 || w[0].count == 0)) in.Fail("embed: there must be one weight, with rows");
  if (!in.error().success()) return in.error();
  const int64_t vocab = w[0].count, rows = std::max(16384 / (d + 1), int64_t{1});
  float* out = y->typed_data();
  Phases phases;
  phases.Add((m + rows - 1) / rows, [=, &w](int64_t chunk) {
    for (int64_t r = chunk * rows; r < std::min(m, (chunk + 1) * rows); ++r) {
      // As jax.numpy indexes: negative ids count from the end, and what lies outside is clamped.
      const int64_t id = ids[r] < 0 ? ids[r] + vocab : ids[r];
      kernels->expand(w[0], std::clamp(id, int64_t{0}, vocab - 1), d, out + r * d);
      if (scale != 1.0f) kernels->finish(out + r * d, d, nullptr, kNone, scale, nullptr);
    }
  });
  phases.Run(pool, m * d, threads);
  return ffi::Error::Success();
}

}  // namespace inferax
