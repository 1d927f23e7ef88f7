// Work shared by XLA's own thread pool and the calling thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace inferax {

// Phases of independent chunks, one after the other: no chunk of a phase starts before all of the one before are done.
// Threads take chunks from a counter, so which thread does what is left to chance, and results must not depend on it.
// The caller works too: the phases end even if the pool never gives us another thread.
class Phases {
 public:
  void Add(int64_t chunks, std::function<void(int64_t)> run);

  // work: about how many multiply-adds there are, so that little work wakes nobody. threads: 0 for all of the pool.
  void Run(xla::ffi::ThreadPool& pool, int64_t work, int threads);

 private:
  struct Phase {
    explicit Phase(int64_t chunks, std::function<void(int64_t)> run) : chunks(chunks), run(std::move(run)) {}
    const int64_t chunks;
    const std::function<void(int64_t)> run;
    std::atomic<int64_t> next{0}, done{0};
  };
  using Shared = std::vector<std::unique_ptr<Phase>>;
  static void Work(Shared& phases, bool to_the_end);

  std::shared_ptr<Shared> phases_ = std::make_shared<Shared>();
};

// This thread's scratch, 64-byte aligned, of at least `count` floats; the next call may move it.
float* Scratch(int64_t count);

// How many threads a handler may count on.
inline int64_t NumThreads(const xla::ffi::ThreadPool& pool, int threads) {
  const int64_t all = pool.num_threads() > 1 ? pool.num_threads() : 1;
  return threads > 0 ? threads : all;
}

}  // namespace inferax
