// What the machine can give at most: bytes per second read from memory and from a core's cache, and multiply-adds per
// second of int8, bfloat16 and float32, on as many threads as the first argument says. Prints JSON.
// c++ -std=c++20 -O3 -march=native -pthread limits.cc
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Best rate of several tries; `work` does `amount` on each thread.
double Rate(int threads, double amount, const std::function<void(int)>& work) {
  double best = 0;
  for (int attempt = 0; attempt < 7; ++attempt) {
    const double start = Now();
    std::vector<std::thread> team;
    for (int t = 0; t < threads; ++t) team.emplace_back(work, t);
    for (std::thread& t : team) t.join();
    const double rate = amount * threads / (Now() - start);
    best = rate > best ? rate : best;
  }
  return best;
}

typedef float F16 __attribute__((vector_size(64)));
typedef int64_t I8 __attribute__((vector_size(64)));

volatile int64_t sink;

void Read(const char* from, size_t bytes, int times) {
  I8 sum[4] = {};
  for (int i = 0; i < times; ++i) {
    for (size_t at = 0; at < bytes; at += 256) {
      for (int j = 0; j < 4; ++j) {
        I8 x;
        std::memcpy(&x, from + at + 64 * j, 64);
        sum[j] ^= x;
      }
    }
    asm volatile("" ::: "memory");
  }
  sink = (sum[0] ^ sum[1] ^ sum[2] ^ sum[3])[0];
}

constexpr int kSteps = 1'000'000;

#if defined(__AVX512F__)
// Twelve sums in registers; in one statement, so that the compiler moves none of them.
#define TWELVE(op)                                                                                                  \
  asm volatile(op " %%zmm12, %%zmm13, %%zmm0\n" op " %%zmm12, %%zmm13, %%zmm1\n" op " %%zmm12, %%zmm13, %%zmm2\n"     \
               op " %%zmm12, %%zmm13, %%zmm3\n" op " %%zmm12, %%zmm13, %%zmm4\n" op " %%zmm12, %%zmm13, %%zmm5\n"     \
               op " %%zmm12, %%zmm13, %%zmm6\n" op " %%zmm12, %%zmm13, %%zmm7\n" op " %%zmm12, %%zmm13, %%zmm8\n"     \
               op " %%zmm12, %%zmm13, %%zmm9\n" op " %%zmm12, %%zmm13, %%zmm10\n" op " %%zmm12, %%zmm13, %%zmm11"     \
               : : : "zmm0", "zmm1", "zmm2", "zmm3", "zmm4", "zmm5", "zmm6", "zmm7", "zmm8", "zmm9", "zmm10", "zmm11")
void Clear() {
  asm volatile("vzeroall\n vpxorq %%zmm12, %%zmm12, %%zmm12\n vpxorq %%zmm13, %%zmm13, %%zmm13" : : : "zmm12", "zmm13");
}
void Fma(int) {
  Clear();
  for (int i = 0; i < kSteps * 10; ++i) TWELVE("vfmadd231ps");
}
#else
void Fma(int) {
  F16 acc[3] = {}, x = F16{} + 0.5f, y = F16{} + 0.25f;
  for (int i = 0; i < kSteps * 10; ++i) {
    for (int j = 0; j < 4; ++j) {
      for (F16& a : acc) a = a * x + y;
    }
  }
  sink = static_cast<int64_t>(acc[0][0] + acc[1][0] + acc[2][0]);
}
#endif

#if defined(__AVX512VNNI__)
void Vnni(int) {
  Clear();
  for (int i = 0; i < kSteps * 10; ++i) TWELVE("vpdpbusd");
}
#endif

#if defined(__AMX_INT8__)
bool MayUseTiles() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

template <bool bf16>
void Tiles(int) {
  alignas(64) static char zeros[1024] = {};
  alignas(64) uint8_t config[64] = {};
  config[0] = 1;
  for (int t = 0; t < 8; ++t) {
    config[16 + 2 * t] = 64;
    config[48 + t] = 16;
  }
  asm volatile("ldtilecfg %0" : : "m"(config));
  asm volatile("tileloadd (%0,%1,1), %%tmm4\n tileloadd (%0,%1,1), %%tmm5\n tileloadd (%0,%1,1), %%tmm6\n"
               "tileloadd (%0,%1,1), %%tmm7\n tilezero %%tmm0\n tilezero %%tmm1\n tilezero %%tmm2\n tilezero %%tmm3"
               : : "r"(zeros), "r"(64L) : "memory");
  for (int i = 0; i < kSteps; ++i) {
    if (bf16) {
      asm volatile("tdpbf16ps %tmm6, %tmm4, %tmm0\n tdpbf16ps %tmm7, %tmm4, %tmm1\n tdpbf16ps %tmm6, %tmm5, %tmm2\n"
                   "tdpbf16ps %tmm7, %tmm5, %tmm3");
    } else {
      asm volatile("tdpbssd %tmm6, %tmm4, %tmm0\n tdpbssd %tmm7, %tmm4, %tmm1\n tdpbssd %tmm6, %tmm5, %tmm2\n"
                   "tdpbssd %tmm7, %tmm5, %tmm3");
    }
  }
  asm volatile("tilerelease");
}
#endif

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 1;
  constexpr size_t kMemory = size_t{256} << 20, kCache = size_t{512} << 10;
  std::vector<std::vector<char>> memory;
  for (int t = 0; t < threads; ++t) memory.emplace_back(kMemory, static_cast<char>(t));
  std::printf("{\"threads\": %d", threads);
  const auto print = [](const char* name, double rate) { std::printf(", \"%s\": %.4g", name, rate); };
  print("read, memory", Rate(threads, kMemory, [&](int t) { Read(memory[t].data(), kMemory, 1); }));
  print("read, cache", Rate(threads, kCache * 400.0, [&](int t) { Read(memory[t].data(), kCache, 400); }));
  print("float32", Rate(threads, 16.0 * 12 * kSteps * 10, Fma));
#if defined(__AVX512VNNI__)
  print("int8", Rate(threads, 64.0 * 12 * kSteps * 10, Vnni));
#endif
#if defined(__AMX_INT8__)
  if (MayUseTiles()) {
    print("int8, tiles", Rate(threads, 4.0 * 16 * 16 * 64 * kSteps, Tiles<false>));
    print("bfloat16, tiles", Rate(threads, 4.0 * 16 * 16 * 32 * kSteps, Tiles<true>));
  }
#endif
  std::printf("}\n");
}
