// linear, gated_mlp and embed: norm, product and everything after it in one call each.
#include "handlers.h"

namespace inferax {
namespace {

// Bits of the attribute `has`, in operand order.
enum : int32_t { kNormWeight = 1, kNormBias = 2, kBias = 4, kDownBias = 8, kResidual = 16, kPostWeight = 32, kPostBias = 64 };

float* Data(ffi::Result<ffi::AnyBuffer> result) { return static_cast<float*>(result->untyped_data()); }

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

void AddProduct(Phases& phases, const Kernels& kernels, const float* x, int64_t m, int64_t ldx, int64_t k,
                const std::vector<Rows>& w, const Epilogue& epilogue, float* y, int64_t threads) {
  const int64_t n = RowsOf(w), rows = RowsPerChunk(kernels, m, n, k, threads);
  phases.Add((n + rows - 1) / rows, [=, &kernels, &w, &epilogue](int64_t chunk) {
    const int64_t first = chunk * rows, last = std::min(n, first + rows);
    float* scratch = Scratch(kernels.matmul_scratch(m, k));
    MultiplyParts(kernels, x, m, ldx, k, w, first, last, scratch, y + first, n);
    epilogue.Columns(kernels, y, m, n, first, last);
  });
  epilogue.AddRows(phases, kernels, y, m, n);
}

// The rows that a product reads: those of x itself, or normalized or padded copies in xn.
struct Input {
  const float* rows;
  int64_t stride;
};
Input AddInputOf(Phases& phases, const Kernels& kernels, const float* x, int64_t m, int64_t k, const NormSpec& norm,
                 float* xn) {
  if (norm.weight == nullptr && k % kLanes == 0) return {x, k};
  AddInput(phases, kernels, x, m, k, norm.weight == nullptr ? nullptr : &norm, xn);
  return {xn, Padded(k)};
}

bool Holds(const ffi::RemainingRets& rets, size_t index, int64_t count) {
  const auto ret = rets.get<ffi::AnyBuffer>(index);
  if (!ret.has_value()) return false;
  ffi::Result<ffi::AnyBuffer> buffer = *ret;
  return buffer->element_type() == ffi::F32 && static_cast<int64_t>(buffer->element_count()) >= count;
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
  const bool copies = norm.weight != nullptr || k % kLanes != 0;
  if (!Holds(rets, 0, m * n) || (copies && !Holds(rets, 1, m * Padded(k)))) in.Fail("linear: wrong results");
  if (!in.error().success()) return in.error();
  if (m == 0 || n == 0) return ffi::Error::Success();

  float* y = Data(*rets.get<ffi::AnyBuffer>(0));
  Phases phases;
  const Input input = AddInputOf(phases, *kernels, static_cast<const float*>(x.untyped_data()), m, k, norm,
                                 copies ? Data(*rets.get<ffi::AnyBuffer>(1)) : nullptr);
  AddProduct(phases, *kernels, input.rows, m, input.stride, k, w, epilogue, y, NumThreads(pool, threads));
  phases.Run(pool, m * n * k, threads);
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
  const auto hidden = rets.get<ffi::AnyBuffer>(1);
  if (!in.error().success() || x.dimensions().size() != 2 || x.element_type() != ffi::F32 || !hidden.has_value()) {
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
  const bool copies = norm.weight != nullptr || d % kLanes != 0;
  const int64_t ldh = Padded(f);
  if (!Holds(rets, 0, m * n) || !Holds(rets, 1, m * ldh) || (copies && !Holds(rets, 2, m * Padded(d)))) {
    in.Fail("gated_mlp: wrong results");
  }
  if (!in.error().success()) return in.error();
  if (m == 0 || n == 0) return ffi::Error::Success();

  float* y = Data(*rets.get<ffi::AnyBuffer>(0));
  float* h = Data(*hidden);
  const int64_t workers = NumThreads(pool, threads);
  Phases phases;
  const Input input = AddInputOf(phases, kernels, static_cast<const float*>(x.untyped_data()), m, d, norm,
                                 copies ? Data(*rets.get<ffi::AnyBuffer>(2)) : nullptr);
  const int64_t rows = RowsPerChunk(kernels, m, f, d, workers), tile = kernels.matmul_scratch(m, d);
  phases.Add((f + rows - 1) / rows, [=, &kernels, &gate_up](int64_t chunk) {
    const int64_t first = chunk * rows, last = std::min(f, first + rows), count = last - first;
    float* scratch = Scratch(tile + m * count);
    float* up = scratch + tile;
    MultiplyParts(kernels, input.rows, m, input.stride, d, gate_up, first, last, scratch, h + first, ldh);
    MultiplyParts(kernels, input.rows, m, input.stride, d, gate_up, f + first, f + last, scratch, up, count);
    for (int64_t r = 0; r < m; ++r) {
      kernels.gate(h + r * ldh + first, up + r * count, count, bias == nullptr ? nullptr : bias + first,
                   bias == nullptr ? nullptr : bias + f + first, activation);
      if (last == f) std::fill(h + r * ldh + f, h + (r + 1) * ldh, 0.0f);
    }
  });
  AddProduct(phases, kernels, h, m, ldh, f, down, epilogue, y, workers);
  phases.Run(pool, m * (2 * f * d + n * f), threads);
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
