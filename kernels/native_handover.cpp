// How long a value is on its way from one core to another. It is some 25 ns between cores that share a cache, and six
// times that between cores that do not; a virtual machine's cores may be of the one kind now and of the other later.

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <thread>

// `seconds`: of one handover, the mean over `rounds` there and back; no number where there is only one core.
extern "C" void ifb_handover(double* seconds, int64_t rounds) {
  *seconds = NAN;
  if (std::thread::hardware_concurrency() < 2) return;
  alignas(64) std::atomic<int64_t> turn{-1};
  const auto play = [&](int64_t i) {
    for (; i < 2 * rounds; i += 2) {
      while (turn.load(std::memory_order_acquire) != i) {}
      turn.store(i + 1, std::memory_order_release);
    }
  };
  std::thread other([&] {
    turn.store(0, std::memory_order_release);  // it runs
    play(1);
  });
  while (turn.load(std::memory_order_acquire) < 0) std::this_thread::yield();
  const auto started = std::chrono::steady_clock::now();
  play(0);
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - started;
  other.join();
  *seconds = taken.count() / (2 * rounds);
}
