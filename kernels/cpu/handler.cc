#include "handler.h"

#include <cstring>

#if defined(INFERAX_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace inferax {
namespace {

#if defined(INFERAX_AMX)
// Whether there are tile registers for int8, and Linux gives leave to use them (it does not without being asked).
bool MayUseTiles() {
  constexpr unsigned kTile = 1u << 24, kInt8Tiles = 1u << 25;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kTile) == 0 || (d & kInt8Tiles) == 0) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

std::vector<const Kernels*> Tiers() {
  std::vector<const Kernels*> tiers = {&kBaseline};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
    tiers.push_back(&kAvx2);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
      tiers.push_back(&kAvx512);
      if (__builtin_cpu_supports("avx512vnni")) {
        tiers.push_back(&kAvx512Vnni);
#if defined(INFERAX_AMX)
        if (MayUseTiles()) tiers.push_back(&kAmx);
#endif
      }
    }
  }
#endif
  return tiers;
}

}  // namespace

const Kernels* Tier(int32_t index) {
  static const std::vector<const Kernels*> tiers = Tiers();
  if (index < 0) return tiers.back();
  return index < static_cast<int32_t>(tiers.size()) ? tiers[static_cast<size_t>(index)] : nullptr;
}

std::vector<std::string> TierNames() {
  std::vector<std::string> names;
  for (int32_t i = 0; Tier(i) != nullptr; ++i) names.emplace_back(Tier(i)->name);
  return names;
}

void Operands::Fail(std::string message) {
  if (error_.success()) error_ = ffi::Error::InvalidArgument(std::move(message));
}

ffi::AnyBuffer Operands::Next() {
  static const XLA_FFI_Buffer nothing = {};
  auto buffer = args_.get<ffi::AnyBuffer>(at_++);
  if (buffer.has_value()) return *buffer;
  Fail("operand " + std::to_string(at_ - 1) + " is missing");
  return ffi::AnyBuffer(&nothing);
}

const float* Operands::Floats(bool present, int64_t count, const char* name) {
  if (!present) return nullptr;
  const ffi::AnyBuffer b = Next();
  if (!error_.success()) return nullptr;
  if (b.element_type() != ffi::F32 || static_cast<int64_t>(b.element_count()) != count) {
    Fail(std::string(name) + " must be " + std::to_string(count) + " float32 numbers");
  }
  return static_cast<const float*>(b.untyped_data());
}

const int32_t* Operands::Ints(int64_t count, const char* name) {
  const ffi::AnyBuffer b = Next();
  if (!error_.success()) return nullptr;
  if (b.element_type() != ffi::S32 || static_cast<int64_t>(b.element_count()) != count) {
    Fail(std::string(name) + " must be " + std::to_string(count) + " int32 numbers");
  }
  return static_cast<const int32_t*>(b.untyped_data());
}

std::vector<Rows> Operands::Weight(ffi::Span<const int32_t> types, int64_t k) {
  std::vector<Rows> parts;
  for (const int32_t number : types) {
    const ffi::AnyBuffer b = Next();
    if (!error_.success()) return {};
    const auto dims = b.dimensions();
    const bool tiled = (number & kTiled) != 0, int8 = (number & kInt8) != 0;
    const int32_t type = number & (kTiled - 1);
    const BlockSize block = kBaseline.block_size(type);
    const int64_t side = tiled ? 16 : 1;  // rows that stand side by side
    const bool dense = type == kF32 || type == kF16 || type == kBF16;
    if (block.weights == 0 || dims.size() != (dense ? 2 : 3) || (!dense && dims[2] != side * block.bytes) ||
        (tiled && kBaseline.tile_group(type) == 0) || (int8 && !tiled)) {
      Fail("a weight of ggml type " + std::to_string(type) + " has the wrong shape");
      return {};
    }
    const int64_t columns = dense ? dims[1] : dims[1] * block.weights;
    const int64_t row_bytes = dense ? dims[1] * block.bytes / block.weights : dims[1] * block.bytes;
    if (columns != k) Fail("a weight has " + std::to_string(columns) + " columns, not " + std::to_string(k));
    parts.push_back({static_cast<const uint8_t*>(b.untyped_data()), row_bytes, side * dims[0], type, nullptr, tiled, int8});
  }
  for (Rows& part : parts) {
    const int64_t bytes = kBaseline.block_size(part.type).grid;
    if (bytes == 0) continue;
    const ffi::AnyBuffer grid = Next();
    if (!error_.success()) return {};
    if (static_cast<int64_t>(grid.size_bytes()) != bytes) Fail("a code book has the wrong size");
    part.grid = static_cast<const int8_t*>(grid.untyped_data());
  }
  return parts;
}

int64_t ProductScratch(const Kernels& kernels, int64_t m, int64_t k) {
  return std::max(kernels.matmul_scratch(m, k), kernels.tiles_scratch);
}

bool AnyInt8(const std::vector<Rows>& parts) {
  return std::any_of(parts.begin(), parts.end(), [](const Rows& part) { return part.int8; });
}

bool AnyHalves(const std::vector<Rows>& parts) {
  return std::any_of(parts.begin(), parts.end(),
                     [](const Rows& part) { return part.int8 && kBaseline.tile_group(part.type) == 16; });
}

bool AnyFloat(const std::vector<Rows>& parts) {
  return std::any_of(parts.begin(), parts.end(), [](const Rows& part) { return !part.int8; });
}

void MultiplyParts(const Kernels& kernels, const Input& x, int64_t m, int64_t k, const std::vector<Rows>& parts,
                   int64_t first, int64_t last, float* scratch, float* out, int64_t ldo) {
  int64_t start = 0;
  for (const Rows& part : parts) {
    const int64_t from = std::max(first - start, int64_t{0}), to = std::min(last - start, part.count);
    float* at = out + (start + from - first);
    if (from < to && part.int8) kernels.multiply_tiles(x.quantized, m, k, part, from, to, scratch, at, ldo);
    if (from < to && !part.int8) kernels.matmul(x.rows, m, x.stride, k, part, from, to, scratch, at, ldo);
    start += part.count;
  }
}

int64_t RowsPerChunk(const Kernels& kernels, int64_t m, int64_t n, int64_t k, bool int8, int64_t threads) {
  const int64_t side = int8 ? 16 : 4;
  const auto round = [side](int64_t rows) { return (rows + side - 1) / side * side; };
  const int64_t fair = round(std::max(n / (threads * 4), int64_t{4}));
  if (m > 4) return std::min(fair, int8 ? int64_t{64} : kernels.tile_rows(m, k));
  // A vector's product is short work: chunks of at least some ten thousand weights.
  return std::clamp(fair, std::min(round(16384 / (k + 1) + 4), int64_t{512}), int64_t{512});
}

Input AddInput(Phases& phases, const Kernels& kernels, const float* x, int64_t m, int64_t k, const NormSpec& norm,
               float* xn, uint8_t* quantized, bool halves) {
  const bool normed = norm.weight != nullptr;
  if (xn == nullptr && quantized == nullptr) return {x, k, nullptr};
  const int64_t padded = Padded(k);
  int64_t rows = std::max(16384 / (k + 1), int64_t{1});
  // Two threads in one panel would take its cache lines from each other.
  if (quantized != nullptr && m > kPanelRows) rows = (rows + kPanelRows - 1) / kPanelRows * kPanelRows;
  phases.Add((m + rows - 1) / rows, [=, &kernels](int64_t chunk) {
    for (int64_t r = chunk * rows; r < std::min(m, (chunk + 1) * rows); ++r) {
      const float* row = x + r * k;
      if (normed || xn != nullptr) {
        float* to = xn == nullptr ? Scratch(padded) : xn + r * padded;
        if (normed) {
          kernels.norm(row, k, norm, to);
        } else {
          std::memcpy(to, row, static_cast<size_t>(k) * sizeof(float));
        }
        std::fill(to + k, to + padded, 0.0f);
        row = to;
      }
      if (quantized != nullptr) kernels.quantize(row, k, quantized + r / kPanelRows * PanelBytes(k), r % kPanelRows, halves);
    }
  });
  return {xn == nullptr ? x : xn, xn == nullptr ? k : padded, quantized};
}

}  // namespace inferax
