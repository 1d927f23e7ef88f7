// What the handlers share: reading operands, choosing a tier, and products spread over chunks of weight rows.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "parallel.h"
#include "tier.h"

namespace inferax {

namespace ffi = xla::ffi;

// The kernels of tier `index`, or the best that this machine has where it is negative. Null where it has no such tier.
const Kernels* Tier(int32_t index);
std::vector<std::string> TierNames();

inline constexpr int32_t kTiled = 256, kInt8 = 512;

// Reads operands in order, keeping the first error.
class Operands {
 public:
  explicit Operands(const ffi::RemainingArgs& args) : args_(args) {}

  ffi::AnyBuffer Next();
  // A float32 operand of `count` numbers; null where `present` is false.
  const float* Floats(bool present, int64_t count, const char* name);
  const int32_t* Ints(int64_t count, const char* name);
  // One weight operand per type (kTiled says that it is in the form x16, kInt8
  // that its products are with quantized rows), then the grids of those that have one. All have k columns.
  std::vector<Rows> Weight(ffi::Span<const int32_t> types, int64_t k);

  bool done() const { return at_ == args_.size(); }
  const ffi::Error& error() const { return error_; }
  void Fail(std::string message);

 private:
  const ffi::RemainingArgs& args_;
  size_t at_ = 0;
  ffi::Error error_ = ffi::Error::Success();
};

inline int64_t RowsOf(const std::vector<Rows>& parts) {
  int64_t n = 0;
  for (const Rows& part : parts) n += part.count;
  return n;
}

bool AnyInt8(const std::vector<Rows>& parts);
bool AnyFloat(const std::vector<Rows>& parts);
// Whether a part's groups have 16 weights, so that its products need sums of 16 quantized numbers.
bool AnyHalves(const std::vector<Rows>& parts);

// The rows that a product reads: as floats for some parts of a weight, quantized for others.
struct Input {
  const float* rows;
  int64_t stride;
  const uint8_t* quantized;

  // From a row on that is a multiple of kPanelRows.
  Input From(int64_t row, int64_t k) const {
    return {rows + row * stride, stride, quantized == nullptr ? nullptr : quantized + row / kPanelRows * PanelBytes(k)};
  }
};

// Floats of scratch that MultiplyParts takes.
int64_t ProductScratch(const Kernels& kernels, int64_t m, int64_t k);

// Rows [first, last) of a weight made of parts; see Kernels::matmul.
void MultiplyParts(const Kernels& kernels, const Input& x, int64_t m, int64_t k, const std::vector<Rows>& parts,
                   int64_t first, int64_t last, float* scratch, float* out, int64_t ldo);

// How many weight rows one chunk takes for m rows of x.
int64_t RowsPerChunk(const Kernels& kernels, int64_t m, int64_t n, int64_t k, bool int8, int64_t threads);

// A phase that normalizes the rows of x where `norm` has a weight, leaves them in xn [m, Padded(k)] unless it is null,
// and in `quantized` unless that is null; there with the sums of 16 where `halves` is set. Without any of these the input
// is x itself.
Input AddInput(Phases& phases, const Kernels& kernels, const float* x, int64_t m, int64_t k, const NormSpec& norm,
               float* xn, uint8_t* quantized, bool halves);

}  // namespace inferax
