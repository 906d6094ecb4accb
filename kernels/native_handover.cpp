// How long a value is on its way from one core to another. It is some 25 ns between cores that share a cache, and six
// times that between cores that do not; a virtual machine's cores may be of the one kind now and of the other later.

#include <omp.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>

// `seconds`: of one handover, the mean over `rounds` there and back; no number where there is only one thread.
extern "C" void ifb_handover(double* seconds, int64_t rounds) {
  alignas(64) std::atomic<int64_t> turn{0};
  *seconds = NAN;
#pragma omp parallel num_threads(2)
  if (omp_get_num_threads() == 2) {
    const int me = omp_get_thread_num();
#pragma omp barrier
    const auto started = std::chrono::steady_clock::now();
    for (int64_t i = me; i < 2 * rounds; i += 2) {
      while (turn.load(std::memory_order_acquire) != i) {}
      turn.store(i + 1, std::memory_order_release);
    }
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - started;
    if (me == 0) *seconds = taken.count() / (2 * rounds);
  }
}
