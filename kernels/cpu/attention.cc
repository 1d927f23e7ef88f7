// Ragged paged attention that also writes KV in place.
#include <atomic>
#include <cstring>
#include <tuple>

#include "handlers.h"
#include "kv.h"

namespace inferax {
namespace {

enum : int32_t { kRotary = 1, kQNormWeight = 2, kQNormBias = 4, kKNormWeight = 8, kKNormBias = 16, kSinks = 32 };

struct HeadNorm {
  NormSpec norm;
  int64_t width;
};

void Rotate(float* head, const float* cos, const float* sin, int64_t half, bool interleaved) {
  for (int64_t i = 0; i < half; ++i) {
    float& a = head[interleaved ? 2 * i : i];
    float& b = head[interleaved ? 2 * i + 1 : i + half];
    const float turned = a * cos[i] - b * sin[i];
    b = b * cos[i] + a * sin[i];
    a = turned;
  }
}

// Everything about one call, with the sizes of the ops' docstrings.
struct Call {
  const Kernels* kernels;
  int64_t tokens, seqs, pages_per_seq, pages, page_size, heads, kv_heads, width;
  const float* qkv;
  uint8_t* cache;
  int32_t cache_type;
  const int32_t *positions, *query_start, *context, *page_table, *slots;
  int64_t num_tokens, num_seqs;
  const float *cos, *sin;
  int64_t half;
  bool interleaved;
  HeadNorm q_norm, k_norm;
  const float* sinks;
  float scale, softcap;
  int64_t window;
  float* out;
  float* q;  // [K, T, G, Padded(E)]: the rows of a task stand together

  int64_t group() const { return heads / kv_heads; }
  int64_t head_bytes() const { return HeadBytes(cache_type, width); }
  int64_t row_width() const { return (heads + 2 * kv_heads) * width; }
  float* query(int64_t kv, int64_t token) const { return q + (kv * tokens + token) * group() * Padded(width); }
};

// Splits, normalizes and rotates one row; writes its key and value to their slot, and its queries to `q`.
void Prepare(const Call& c, int64_t t, float* row) {
  const int64_t slot = c.slots[t], e = c.width;
  const bool real = t < c.num_tokens, writes = slot >= 0 && slot < c.pages * c.page_size;
  if (!real) std::memset(c.out + t * c.heads * e, 0, static_cast<size_t>(c.heads * e) * sizeof(float));
  if (!real && !writes) return;
  std::memcpy(row, c.qkv + t * c.row_width(), static_cast<size_t>(c.row_width()) * sizeof(float));
  float* key = row + c.heads * e;
  const auto normalize = [&](float* x, int64_t n, const HeadNorm& norm) {
    for (int64_t i = 0; norm.width > 0 && i < n; i += norm.width) c.kernels->norm(x + i, norm.width, norm.norm, x + i);
  };
  normalize(row, c.heads * e, c.q_norm);
  normalize(key, c.kv_heads * e, c.k_norm);
  for (int64_t h = 0; c.half > 0 && h < c.heads + c.kv_heads; ++h) {
    Rotate(row + h * e, c.cos + t * c.half, c.sin + t * c.half, c.half, c.interleaved);
  }
  if (writes) {
    // K and V of a position stand together in both.
    uint8_t* to = c.cache + slot * 2 * c.kv_heads * c.head_bytes();
    for (int64_t i = 0; i < 2 * c.kv_heads; ++i) StoreHead(c.cache_type, key + i * e, e, to + i * c.head_bytes());
  }
  if (!real) return;
  for (int64_t h = 0; h < c.heads; ++h) {
    float* to = c.query(h / c.group(), t) + h % c.group() * Padded(e);
    std::memcpy(to, row + h * e, static_cast<size_t>(e) * sizeof(float));
    std::fill(to + e, to + Padded(e), 0.0f);
  }
}

// A run of tokens of one sequence under one KV head, and the partitions of positions that they see. Where `parts` is
// not null, each partition's state is kept there, to be merged when all are done.
struct Task {
  int64_t seq, kv, first_token, last_token, first_part, last_part;
  float* parts;
};
struct Item {
  const Task* task;
  int64_t first_part, last_part;
};

int64_t StateSize(int64_t rows, int64_t width) { return rows * (Padded(width) + 2); }

Softmax StateAt(float* at, int64_t rows, int64_t width) {
  return {at + rows * Padded(width), at + rows * (Padded(width) + 1), at};
}

void Begin(const Call& c, const Task& task, const Softmax& state) {
  const int64_t rows = (task.last_token - task.first_token) * c.group();
  std::fill(state.out, state.out + rows * Padded(c.width), 0.0f);
  for (int64_t r = 0; r < rows; ++r) {
    // A sink is one more score, whose value is zero.
    state.top[r] = c.sinks == nullptr ? -__builtin_inff() : c.sinks[task.kv * c.group() + r % c.group()];
    state.total[r] = c.sinks == nullptr ? 0.0f : 1.0f;
  }
}

void Finish(const Call& c, const Task& task, const Softmax& state) {
  for (int64_t t = task.first_token, r = 0; t < task.last_token; ++t) {
    for (int64_t g = 0; g < c.group(); ++g, ++r) {
      c.kernels->normalize(state, r, c.width, c.out + (t * c.heads + task.kv * c.group() + g) * c.width);
    }
  }
}

// Returns false where the page table points outside the cache.
bool Run(const Call& c, const Item& item) {
  const Task& task = *item.task;
  const int64_t rows = (task.last_token - task.first_token) * c.group(), state_size = StateSize(rows, c.width);
  const int64_t attend_size = c.kernels->attend_scratch(rows, c.width);
  float* scratch = Scratch(attend_size + 2 * state_size + 2 * rows);
  int32_t* low = reinterpret_cast<int32_t*>(scratch + attend_size + 2 * state_size);
  int32_t* high = low + rows;
  const int64_t context = c.context[task.seq];
  for (int64_t t = task.first_token, r = 0; t < task.last_token; ++t) {
    const int64_t position = c.positions[t];
    for (int64_t g = 0; g < c.group(); ++g, ++r) {
      low[r] = static_cast<int32_t>(c.window > 0 ? std::max(position - c.window + 1, int64_t{0}) : 0);
      high[r] = static_cast<int32_t>(std::min(position + 1, context));
    }
  }
  const int64_t head_bytes = c.head_bytes();
  const Attend attend = {
      .q = c.query(task.kv, task.first_token),
      .rows = rows,
      .width = c.width,
      .low = low,
      .high = high,
      .keys = c.cache + task.kv * head_bytes,
      .values = c.cache + (c.kv_heads + task.kv) * head_bytes,
      .slot_bytes = 2 * c.kv_heads * head_bytes,
      .cache_type = c.cache_type,
      .pages = c.page_table + task.seq * c.pages_per_seq,
      .page_size = c.page_size,
      .scale = c.scale,
      .softcap = c.softcap,
  };
  const int64_t from = *std::min_element(low, low + rows), to = *std::max_element(high, high + rows);
  const Softmax state = StateAt(scratch + attend_size, rows, c.width);
  if (task.parts == nullptr) Begin(c, task, state);
  for (int64_t p = item.first_part; p < item.last_part; ++p) {
    const int64_t first = p * kKvPartition, last = std::min(first + kKvPartition, to);
    for (int64_t i = std::max(first, from) / c.page_size; i * c.page_size < last; ++i) {
      if (attend.pages[i] < 0 || attend.pages[i] >= c.pages) return false;
    }
    float* at = task.parts == nullptr ? scratch + attend_size + state_size
                                      : task.parts + (p - task.first_part) * state_size;
    const Softmax part = StateAt(at, rows, c.width);
    c.kernels->attend(attend, first, last, scratch, part);
    if (task.parts == nullptr) c.kernels->merge(state, part, rows, c.width);
  }
  if (task.parts == nullptr) Finish(c, task, state);
  return true;
}

void Merge(const Call& c, const Task& task) {
  const int64_t rows = (task.last_token - task.first_token) * c.group(), size = StateSize(rows, c.width);
  const Softmax state = StateAt(Scratch(size), rows, c.width);
  Begin(c, task, state);
  for (int64_t p = task.first_part; p < task.last_part; ++p) {
    c.kernels->merge(state, StateAt(task.parts + (p - task.first_part) * size, rows, c.width), rows, c.width);
  }
  Finish(c, task, state);
}

std::vector<Task> Tasks(const Call& c) {
  constexpr int64_t kQueryRows = 48;  // that share what is read of the cache
  const int64_t tokens = std::max(kQueryRows / c.group(), int64_t{1});
  std::vector<Task> tasks;
  for (int64_t s = 0; s < c.num_seqs; ++s) {
    const int64_t end = std::min<int64_t>(c.query_start[s + 1], c.num_tokens);
    for (int64_t t = c.query_start[s]; t < end; t += tokens) {
      const int64_t stop = std::min(t + tokens, end);
      int64_t low = c.context[s], high = 0;
      for (int64_t i = t; i < stop; ++i) {
        low = std::min<int64_t>(low, c.window > 0 ? std::max<int64_t>(c.positions[i] - c.window + 1, 0) : 0);
        high = std::max<int64_t>(high, c.positions[i] + 1);
      }
      high = std::min<int64_t>(high, c.context[s]);
      const int64_t first = low / kKvPartition, last = std::max((high + kKvPartition - 1) / kKvPartition, first);
      for (int64_t kv = 0; kv < c.kv_heads; ++kv) tasks.push_back({s, kv, t, stop, first, last, nullptr});
    }
  }
  return tasks;
}

ffi::Error Check(const Call& c) {
  if (c.num_tokens < 0 || c.num_tokens > c.tokens || c.num_seqs < 0 || c.num_seqs > c.seqs) {
    return ffi::Error::InvalidArgument("attention: num_tokens or num_seqs exceeds the batch");
  }
  for (int64_t s = 0; s < c.num_seqs; ++s) {
    if (c.query_start[s] < 0 || c.query_start[s] > c.query_start[s + 1] || c.query_start[s + 1] > c.tokens) {
      return ffi::Error::InvalidArgument("attention: query_start of sequence " + std::to_string(s) + " is out of order");
    }
    if (c.context[s] > c.pages_per_seq * c.page_size) {
      return ffi::Error::InvalidArgument("attention: the context of sequence " + std::to_string(s) +
                                         " is longer than its page table");
    }
  }
  return ffi::Error::Success();
}

}  // namespace

ffi::Error Attention(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::ResultBuffer<ffi::F32> out,
                     ffi::Result<ffi::AnyBuffer> new_cache, ffi::ResultBuffer<ffi::F32> queries,
                     ffi::ResultBuffer<ffi::F32> partial, int64_t heads, int64_t kv_heads, int64_t width, int32_t has,
                     float q_eps, float k_eps, int32_t layer, int32_t interleaved, float scale, float softcap,
                     int64_t window, int32_t threads, int32_t tier) {
  const Kernels* kernels = Tier(tier);
  if (kernels == nullptr) return ffi::Error::InvalidArgument("attention: this machine has no such tier");
  Operands in(args);
  const ffi::AnyBuffer qkv = in.Next(), cache = in.Next();
  if (!in.error().success() || qkv.dimensions().size() != 2 || qkv.element_type() != ffi::F32 ||
      cache.dimensions().size() != 5 || heads <= 0 || kv_heads <= 0 || heads % kv_heads != 0 || width <= 0) {
    return ffi::Error::InvalidArgument("attention: qkv must be float32 [T, W], and cache [pages, page_size, 2, K, W]");
  }
  if (cache.untyped_data() != new_cache->untyped_data()) {
    return ffi::Error::Internal("attention: the cache was copied instead of written in place");
  }
  const auto shape = cache.dimensions();
  const ffi::DataType type = cache.element_type();
  Call c{};
  switch (type) {
    case ffi::F32: c.cache_type = kF32; break;
    case ffi::F16: c.cache_type = kF16; break;
    case ffi::BF16: c.cache_type = kBF16; break;
    case ffi::S8: c.cache_type = kI8; break;
    case ffi::F8E4M3FN: c.cache_type = kE4M3; break;
    default: return ffi::Error::InvalidArgument("attention: the kernels know no such dtype of the cache");
  }
  c.kernels = kernels;
  c.tokens = qkv.dimensions()[0];
  c.pages = shape[0];
  c.page_size = shape[1];
  c.heads = heads;
  c.kv_heads = kv_heads;
  c.width = width;
  if (qkv.dimensions()[1] != c.row_width() || shape[2] != 2 || shape[3] != kv_heads ||
      shape[4] != width + (HasScale(c.cache_type) ? 4 : 0)) {
    return ffi::Error::InvalidArgument("attention: the widths of qkv and cache disagree with the heads");
  }
  c.qkv = static_cast<const float*>(qkv.untyped_data());
  c.cache = static_cast<uint8_t*>(new_cache->untyped_data());
  c.positions = in.Ints(c.tokens, "positions");
  const ffi::AnyBuffer table = in.Next();
  if (!in.error().success() || table.dimensions().size() != 2 || table.element_type() != ffi::S32) {
    return ffi::Error::InvalidArgument("attention: the page table must be int32 [S, P]");
  }
  c.page_table = static_cast<const int32_t*>(table.untyped_data());
  c.seqs = table.dimensions()[0];
  c.pages_per_seq = table.dimensions()[1];
  c.slots = in.Ints(c.tokens, "slots");
  c.query_start = in.Ints(c.seqs + 1, "query_start");
  c.context = in.Ints(c.seqs, "context_len");
  const int32_t *num_tokens = in.Ints(1, "num_tokens"), *num_seqs = in.Ints(1, "num_seqs");
  if (has & kRotary) {
    const ffi::AnyBuffer cos = in.Next();
    if (in.error().success() && cos.dimensions().size() == 2) c.half = cos.dimensions()[1];
    c.cos = static_cast<const float*>(cos.untyped_data());
    c.sin = in.Floats(true, c.tokens * c.half, "sin");
    if (static_cast<int64_t>(cos.element_count()) != c.tokens * c.half || 2 * c.half > width) in.Fail("cos is misshapen");
  }
  const auto head_norm = [&](int32_t weight, int32_t bias, int64_t all, float eps, bool centered) -> HeadNorm {
    if (!(has & weight)) return {};
    const ffi::AnyBuffer w = in.Next();
    const int64_t n = in.error().success() ? static_cast<int64_t>(w.element_count()) : 0;
    if (n == 0 || all % n != 0 || w.element_type() != ffi::F32) in.Fail("a head norm's width does not divide the heads");
    return {{static_cast<const float*>(w.untyped_data()), in.Floats(has & bias, n, "head norm bias"), eps, centered}, n};
  };
  c.q_norm = head_norm(kQNormWeight, kQNormBias, heads * width, q_eps, (layer & 1) != 0);
  c.k_norm = head_norm(kKNormWeight, kKNormBias, kv_heads * width, k_eps, (layer & 2) != 0);
  c.sinks = in.Floats(has & kSinks, heads, "sinks");
  if (static_cast<int64_t>(out->element_count()) != c.tokens * heads * width ||
      static_cast<int64_t>(queries->element_count()) < c.tokens * heads * Padded(width)) {
    in.Fail("attention: wrong results");
  }
  if (!in.error().success()) return in.error();
  c.num_tokens = *num_tokens;
  c.num_seqs = *num_seqs;
  c.interleaved = interleaved != 0;
  c.scale = scale;
  c.softcap = softcap;
  c.window = window;
  c.out = out->typed_data();
  c.q = queries->typed_data();
  if (ffi::Error error = Check(c); !error.success()) return error;

  std::vector<Task> tasks = Tasks(c);
  const int64_t workers = NumThreads(pool, threads);
  // Few tasks, of long contexts: their partitions are spread too, as far as there is room for their states.
  float* free = partial->typed_data();
  float* const end = free + partial->element_count();
  const bool spread = static_cast<int64_t>(tasks.size()) < 4 * workers;
  std::vector<Item> items;
  std::vector<const Task*> merges;
  int64_t work = c.num_tokens * c.row_width() * 8;
  for (Task& task : tasks) {
    const int64_t parts = task.last_part - task.first_part, rows = (task.last_token - task.first_token) * c.group();
    work += rows * std::min<int64_t>(parts * kKvPartition, c.context[task.seq]) * width * 2;
    const int64_t size = parts * StateSize(rows, width);
    if (spread && parts > 1 && size <= end - free) {
      task.parts = free;
      free += size;
      merges.push_back(&task);
      for (int64_t p = task.first_part; p < task.last_part; ++p) items.push_back({&task, p, p + 1});
    } else {
      items.push_back({&task, task.first_part, task.last_part});
    }
  }
  // The KV heads of a position stand together, so what one item reads the next ones find in a cache.
  std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
    return std::tie(a.task->first_token, a.first_part) < std::tie(b.task->first_token, b.first_part);
  });
  constexpr int64_t kRows = 8;
  std::atomic<bool> valid{true};
  Phases phases;
  phases.Add((c.tokens + kRows - 1) / kRows, [&c](int64_t chunk) {
    float* row = Scratch(c.row_width());
    for (int64_t t = chunk * kRows; t < std::min(c.tokens, (chunk + 1) * kRows); ++t) Prepare(c, t, row);
  });
  phases.Add(static_cast<int64_t>(items.size()), [&](int64_t i) {
    if (!Run(c, items[static_cast<size_t>(i)])) valid.store(false, std::memory_order_relaxed);
  });
  phases.Add(static_cast<int64_t>(merges.size()), [&](int64_t i) { Merge(c, *merges[static_cast<size_t>(i)]); });
  phases.Run(pool, work, threads);
  if (!valid.load()) return ffi::Error::InvalidArgument("attention: the page table points outside the cache");
  return ffi::Error::Success();
}

}  // namespace inferax
