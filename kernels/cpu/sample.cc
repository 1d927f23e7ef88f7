// sample: each row on its own, by the stages and in the order that it names.
#include <cstring>

#include "handlers.h"

namespace inferax {
namespace {

constexpr size_t Names(std::string_view list) {
  size_t count = 1;
  for (const char c : list) count += c == ',';
  return count;
}
static_assert(sizeof(SamplerRow) == Names(kSamplerFields) * 4 && Names(kSamplerStages) == kNumStages);

}  // namespace

// Operands: logits, rows, and the five arrays of the memory where there is one. Results: tokens, mu, and where it is
// asked for what the stages make of the logits.
ffi::Error Sample(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, std::string_view fields,
                  std::string_view stages, int32_t threads, int32_t tier) {
  const Kernels* kernels = Tier(tier);
  if (kernels == nullptr) return ffi::Error::InvalidArgument("sample: this machine has no such tier");
  if (fields != kSamplerFields || stages != kSamplerStages) {
    return ffi::Error::InvalidArgument("sample: the kernels were built for other rows than these; build them anew");
  }
  Operands in(args);
  // The next operand, whose shape must be [rows, columns]; -1 takes what is there.
  const auto take = [&in](const char* name, ffi::DataType type, int64_t& rows, int64_t& columns) -> const void* {
    const ffi::AnyBuffer b = in.Next();
    if (!in.error().success()) return nullptr;
    const auto shape = b.dimensions();
    if (b.element_type() != type || shape.size() != 2 || (rows >= 0 && rows != shape[0]) ||
        (columns >= 0 && columns != shape[1])) {
      in.Fail(std::string("sample: wrong type or shape of ") + name);
      return nullptr;
    }
    rows = shape[0];
    columns = shape[1];
    return b.untyped_data();
  };
  int64_t count = -1, vocab = -1, width = sizeof(SamplerRow) / 4;
  const auto* logits = static_cast<const float*>(take("logits", ffi::F32, count, vocab));
  const auto* packed = static_cast<const int32_t*>(take("rows", ffi::S32, count, width));
  int64_t slots = -1, context = -1, words = (vocab + 31) / 32;
  SamplerMemory memory{};
  const float* mu = nullptr;
  if (args.size() > 2) {
    memory.history = static_cast<const int32_t*>(take("history", ffi::S32, slots, context));
    memory.length = context;
    memory.counts = static_cast<const int16_t*>(take("counts", ffi::S16, slots, vocab));
    memory.in_prompt = static_cast<const uint32_t*>(take("in_prompt", ffi::U32, slots, words));
    memory.breaks = static_cast<const uint32_t*>(take("breaks", ffi::U32, slots, words));
    mu = in.Floats(true, slots, "mu");
    if (slots == 0) in.Fail("sample: the memory has no slot");
  }
  auto tokens = rets.get<ffi::Buffer<ffi::S32>>(0);
  auto moved = rets.get<ffi::Buffer<ffi::F32>>(1), scores = rets.get<ffi::Buffer<ffi::F32>>(2);
  const auto holds = [](auto& result, int64_t n) {
    return result.has_value() && static_cast<int64_t>((*result)->element_count()) == n;
  };
  if (vocab == 0) in.Fail("sample: there is no token to choose from");
  if (!holds(tokens, count) || !holds(moved, count) || (rets.size() > 2 && !holds(scores, count * vocab))) {
    in.Fail("sample: wrong results");
  }
  if (!in.error().success()) return in.error();

  int32_t* token = (*tokens)->typed_data();
  float *new_mu = (*moved)->typed_data(), *left = rets.size() > 2 ? (*scores)->typed_data() : nullptr;
  int64_t work = 0;
  for (int64_t r = 0; r < count; ++r) {
    SamplerRow row;
    std::memcpy(&row, packed + r * width, sizeof row);
    work += row.temperature > 0 ? 16 * vocab : vocab;
  }
  Phases phases;
  phases.Add(count, [=](int64_t r) {
    SamplerRow row;
    std::memcpy(&row, packed + r * width, sizeof row);
    SamplerMemory mine = memory;
    new_mu[r] = 0.0f;
    if (memory.history != nullptr) {
      // As jax.numpy indexes: negative slots count from the end, and what lies outside is clamped.
      const int64_t slot = std::clamp<int64_t>(row.slot < 0 ? row.slot + slots : row.slot, 0, slots - 1);
      mine = {memory.history + slot * context, context, memory.counts + slot * vocab, memory.in_prompt + slot * words,
              memory.breaks + slot * words};
      new_mu[r] = mu[slot];
    }
    token[r] = kernels->sample(logits + r * vocab, vocab, row, mine, Scratch(kernels->sample_scratch(vocab, context)),
                               new_mu + r, left == nullptr ? nullptr : left + r * vocab);
  });
  phases.Run(pool, work, threads);
  return ffi::Error::Success();
}

}  // namespace inferax
