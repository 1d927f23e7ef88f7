// What the XLA handlers (compiled once) and the arithmetic (compiled once per instruction-set tier) know of each other.
#pragma once

#include <cstdint>

namespace inferax {

// Every sum over a row is split over 16 lanes (element i goes to lane i % 16), accumulated in ascending order, and the
// lanes are added as a fixed tree: a result depends on its own row alone, whatever the other rows, tiles or threads are.
inline constexpr int64_t kLanes = 16;
inline int64_t Padded(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// Online softmax works on blocks of kKvBlock positions, and restarts every kKvPartition positions; both count from
// absolute position 0. Partial results of the partitions are merged in ascending order.
inline constexpr int64_t kKvBlock = 64;
inline constexpr int64_t kKvPartition = 512;

// Numbers of ggml's types, which stand for dense weights and the cache too; ggml has none for e4m3.
enum : int32_t { kF32 = 0, kF16 = 1, kI8 = 24, kBF16 = 30, kE4M3 = 256 };

enum Activation : int32_t { kNone = 0, kSilu = 1, kGelu = 2, kGeluTanh = 3, kRelu = 4 };

// Rows of one type and `row_bytes` bytes each; `grid` is the code book of the types that need one.
struct Rows {
  const uint8_t* data;
  int64_t row_bytes;
  int64_t count;
  int32_t type;
  const int8_t* grid;
  bool tiled;  // in the form x16: 16 rows side by side
  bool int8;   // to be multiplied with quantized rows; it is tiled then
};

// Quantized rows stand in panels of 16; k is a multiple of 32.
inline constexpr int64_t kPanelRows = 16;
inline constexpr int64_t kPanelBytes = 1024;  // for 32 elements
inline int64_t PanelBytes(int64_t k) { return k / 32 * kPanelBytes; }
inline int64_t QuantizedBytes(int64_t m, int64_t k) { return (m + kPanelRows - 1) / kPanelRows * PanelBytes(k); }

// What one block of a type holds, and the bytes of the type's code book. Zero weights: no such type.
struct BlockSize {
  int64_t weights, bytes, grid;
};

struct NormSpec {
  const float* weight;
  const float* bias;  // may be null
  float eps;
  bool layer;
};

// One run of query rows (tokens x heads of one KV head) against a range of positions of one sequence.
struct Attend {
  const float* q;  // [rows, Padded(width)]
  int64_t rows;
  int64_t width;            // of a head
  const int32_t* low;       // [rows]: a row sees positions [low, high)
  const int32_t* high;      // [rows]
  const uint8_t* keys;      // of this KV head, at slot 0; where the type has scales, one follows each head
  const uint8_t* values;
  int64_t slot_bytes;       // from one position of a page to the next
  int32_t cache_type;
  const int32_t* pages;     // of this sequence
  int64_t page_size;
  float scale;
  float softcap;            // 0: none
};

// State of an online softmax: per row the maximum, the sum of weights, and the weighted values [rows, Padded(width)].
struct Softmax {
  float* top;
  float* total;
  float* out;
};

// The stages of `sample`; the names and the order are those of STAGES in ops/sampler_rows.py.
enum : int32_t { kPenalties, kDry, kTopNSigma, kTemperature, kTypicalP, kMinP, kTopK, kTopP, kXtc, kNumStages };
inline constexpr char kSamplerStages[] = "penalties,dry,top_n_sigma,temperature,typical_p,min_p,top_k,top_p,xtc";

// What a row of `sample` is told, as INTS and FLOATS of ops/sampler_rows.py have it.
struct SamplerRow {
  int32_t slot, position;
  uint32_t seed_low, seed_high, sample_index;
  int32_t top_k, penalty_last_n, dry_allowed_length, dry_penalty_last_n;
  int32_t stages[kNumStages];
  float temperature, dynatemp_range, dynatemp_exponent, top_p, min_p, typical_p, top_n_sigma, xtc_probability;
  float xtc_threshold, mirostat_tau, mirostat_eta, presence_penalty, frequency_penalty, repetition_penalty;
  float dry_multiplier, dry_base;
};
inline constexpr char kSamplerFields[] =
    "slot,position,seed_low,seed_high,sample_index,top_k,penalty_last_n,dry_allowed_length,dry_penalty_last_n,"
    "stage_0,stage_1,stage_2,stage_3,stage_4,stage_5,stage_6,stage_7,stage_8,"
    "temperature,dynatemp_range,dynatemp_exponent,top_p,min_p,typical_p,top_n_sigma,xtc_probability,"
    "xtc_threshold,mirostat_tau,mirostat_eta,presence_penalty,frequency_penalty,repetition_penalty,"
    "dry_multiplier,dry_base";
inline constexpr int32_t kOwnContext = -2;

// What one row reads of the tokens before; `history` is null where there is no memory.
struct SamplerMemory {
  const int32_t* history;
  int64_t length;
  const int16_t* counts;      // [V]
  const uint32_t* in_prompt;  // a bit for each token
  const uint32_t* breaks;
};

struct Kernels {
  const char* name;
  BlockSize (*block_size)(int32_t type);
  // How many weight rows are expanded to float32 at once for m rows of x.
  int64_t (*tile_rows)(int64_t m, int64_t k);
  // Floats of scratch that `matmul` takes.
  int64_t (*matmul_scratch)(int64_t m, int64_t k);
  // out[m, n - first] = x[m] . w[n] for n in [first, last). Rows of x are zero from k to Padded(k).
  void (*matmul)(const float* x, int64_t m, int64_t ldx, int64_t k, const Rows& w, int64_t first, int64_t last,
                 float* scratch, float* out, int64_t ldo);
  // Weights under one scale in the form x16: 32 or 16; 0 for a type that has no such form.
  int64_t (*tile_group)(int32_t type);
  // A row as int8 codes with what the products below need besides, in a lane of a panel. halves: whether a group of 16
  // will be multiplied.
  void (*quantize)(const float* x, int64_t k, uint8_t* panel, int64_t lane, bool halves);
  // As `matmul`, for quantized rows of x and tiled rows of w; `first` and `last` are multiples of 16.
  void (*multiply_tiles)(const uint8_t* panels, int64_t m, int64_t k, const Rows& w, int64_t first, int64_t last,
                         float* scratch, float* out, int64_t ldo);
  int64_t tiles_scratch;  // floats of scratch that it takes
  // Row `row` of w as float32, without padding.
  void (*expand)(const Rows& w, int64_t row, int64_t k, float* out);
  void (*norm)(const float* x, int64_t width, const NormSpec& norm, float* out);
  // y = residual + scale * activation(y + bias); bias and residual may be null.
  void (*finish)(float* y, int64_t n, const float* bias, int32_t activation, float scale, const float* residual);
  // gate = activation(gate + gate_bias) * (up + up_bias)
  void (*gate)(float* gate, const float* up, int64_t n, const float* gate_bias, const float* up_bias,
               int32_t activation);
  // x = softcap * tanh(scale * x / softcap), then its maximum and the sum of exp(x - maximum).
  void (*log_sum)(float* x, int64_t n, float scale, float softcap, float* top, float* total);
  // Floats of scratch that `attend` takes.
  int64_t (*attend_scratch)(int64_t rows, int64_t width);
  // Softmax state of the positions [first, last), which lie in one partition.
  void (*attend)(const Attend& a, int64_t first, int64_t last, float* scratch, const Softmax& state);
  // Adds a partition's state to what came before it.
  void (*merge)(const Softmax& state, const Softmax& part, int64_t rows, int64_t width);
  // out = state.out / state.total, without padding.
  void (*normalize)(const Softmax& state, int64_t row, int64_t width, float* out);
  // Floats of scratch that `sample` takes.
  int64_t (*sample_scratch)(int64_t vocab, int64_t context);
  // The token of one row. Moves mirostat's mu; writes what the stages make of the logits to `scores` unless it is null.
  int32_t (*sample)(const float* logits, int64_t vocab, const SamplerRow& row, const SamplerMemory& memory,
                    float* scratch, float* mu, float* scores);
};

extern const Kernels kBaseline;
#if defined(__x86_64__)
extern const Kernels kAvx2;
extern const Kernels kAvx512;
extern const Kernels kAvx512Vnni;
#if defined(INFERAX_AMX)
extern const Kernels kAmx;
#endif
#endif

}  // namespace inferax
