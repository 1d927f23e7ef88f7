#include "parallel.h"

#include <algorithm>
#include <new>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace inferax {
namespace {

// Sets rounding to nearest and keeps subnormal numbers. XLA's threads differ in this, and results must not.
class FloatMode {
 public:
#if defined(__x86_64__)
  FloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~FloatMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FloatMode() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~FloatMode() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#endif
};

void Pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

struct Free {
  void operator()(float* p) const { ::operator delete[](p, std::align_val_t{64}); }
};

}  // namespace

void Phases::Add(int64_t chunks, std::function<void(int64_t)> run) {
  phases_->push_back(std::make_unique<Phase>(chunks, std::move(run)));
}

void Phases::Work(Shared& phases, bool to_the_end) {
  [[maybe_unused]] const FloatMode mode;
  for (const auto& phase : phases) {
    for (int64_t i; (i = phase->next.fetch_add(1, std::memory_order_relaxed)) < phase->chunks;) {
      phase->run(i);
      phase->done.fetch_add(1, std::memory_order_release);
    }
    if (!to_the_end && phase == phases.back()) return;
    for (int spins = 0; phase->done.load(std::memory_order_acquire) < phase->chunks; ++spins) {
      if (spins < 1000) {
        Pause();
      } else {
        std::this_thread::yield();
      }
    }
  }
}

void Phases::Run(xla::ffi::ThreadPool& pool, int64_t work, int threads) {
  constexpr int64_t kWorthWaking = 100'000;
  int64_t widest = 0;
  for (const auto& phase : *phases_) widest = std::max(widest, phase->chunks);
  const int64_t most = std::min(NumThreads(pool, threads), widest);
  const int64_t helpers = threads > 0 ? most - 1 : std::min(most - 1, work / kWorthWaking);
  for (int64_t i = 0; i < helpers; ++i) {
    // What a late helper touches lives as long as it does: by then every counter has run out, and no chunk is left.
    pool.Schedule(std::function<void()>([phases = phases_] { Work(*phases, false); }));
  }
  Work(*phases_, true);
}

float* Scratch(int64_t count) {
  thread_local std::unique_ptr<float[], Free> data;
  thread_local int64_t size = 0;
  if (count > size) {
    data.reset();
    data.reset(new (std::align_val_t{64}) float[static_cast<size_t>(count)]);
    size = count;
  }
  return data.get();
}

}  // namespace inferax
