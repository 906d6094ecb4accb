// The helpers of native_threads.h: threads that wait for jobs, first spinning, then asleep.

#include "native_threads.h"

#include <pthread.h>
#include <signal.h>

#include <climits>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace ifb {
namespace {

// Some fifty microseconds, about what a thread that sleeps takes to wake: they bridge the gaps between a step's jobs. With
// more, torch's own operations, which have threads of their own, find the cores taken where they come between.
constexpr int kSpins = 2000;
// A helper that is not done by then has been put aside, perhaps for the caller's sake.
constexpr int kSpinsAtTheEnd = 2000;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // takes as long as x86's pause; `yield` is over at once
#endif
}

class Team {
 public:
  // False, and nothing is done, where the team has another caller.
  bool run(int threads, void (*body)(void*, int), void* context) {
    const std::unique_lock<std::mutex> caller(caller_, std::try_to_lock);
    if (!caller) return false;
    hire(threads - 1);
    body_ = body, context_ = context, threads_ = threads;
    inside_.store(0, std::memory_order_release);  // open
    jobs_.fetch_add(1);
    if (num_asleep_.load()) {
      std::lock_guard<std::mutex> lock(sleep_);
      another_job_.notify_all();
    }
    body(context, 0);
    if (inside_.fetch_or(kClosed, std::memory_order_acq_rel)) wait_for_those_inside();
    return true;
  }

 private:
  static constexpr int kClosed = 1 << 30, kAwaited = 1 << 29;

  void hire(int num_helpers) {
    num_helpers = std::min(num_helpers, most_helpers_);
    if (num_helpers <= num_helpers_) return;
    // Signals are for the threads that know what to do with them.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      for (; num_helpers_ < num_helpers; ++num_helpers_) {
        std::thread helper([this, thread = num_helpers_ + 1, seen = jobs_.load()] { help(thread, seen); });
#if defined(__linux__)
        pthread_setname_np(helper.native_handle(), "ifb-helper");  // for top -H
#endif
        helper.detach();
      }
    } catch (const std::system_error&) {  // a limit on threads: those there are will do from now on
      most_helpers_ = num_helpers_;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  [[noreturn]] void help(int thread, uint32_t seen) {
    for (;;) {
      seen = another_job(seen);
      if (!enter()) continue;
      if (thread < threads_) body_(context_, thread);
      if (inside_.fetch_sub(1, std::memory_order_acq_rel) == (kClosed | kAwaited) + 1) {
        std::lock_guard<std::mutex> lock(sleep_);
        all_left_.notify_one();
      }
    }
  }

  uint32_t another_job(uint32_t seen) {
    for (int i = 0; i < kSpins; ++i, pause())
      if (const uint32_t now = jobs_.load(std::memory_order_acquire); now != seen) return now;
    std::unique_lock<std::mutex> lock(sleep_);
    ++num_asleep_;  // before jobs_ is read again, as the caller writes jobs_ before it reads this
    another_job_.wait(lock, [&] { return jobs_.load() != seen; });
    --num_asleep_;
    return jobs_.load();
  }

  // Whoever is inside sees one job until it leaves: a job is written only while nobody is.
  bool enter() {
    int inside = inside_.load(std::memory_order_relaxed);
    while (!(inside & kClosed))
      if (inside_.compare_exchange_weak(inside, inside + 1, std::memory_order_acquire, std::memory_order_relaxed))
        return true;
    return false;
  }

  void wait_for_those_inside() {
    for (int i = 0; i < kSpinsAtTheEnd; ++i, pause())
      if (inside_.load(std::memory_order_acquire) == kClosed) return;
    std::unique_lock<std::mutex> lock(sleep_);
    if (inside_.fetch_or(kAwaited, std::memory_order_acq_rel) != kClosed)
      all_left_.wait(lock, [&] { return inside_.load(std::memory_order_acquire) == (kClosed | kAwaited); });
    inside_.store(kClosed, std::memory_order_relaxed);
  }

  std::mutex caller_;  // held by the one whose job it is
  int num_helpers_ = 0, most_helpers_ = INT_MAX;
  void (*body_)(void*, int) = nullptr;
  void* context_ = nullptr;
  int threads_ = 0;

  alignas(64) std::atomic<uint32_t> jobs_{0};   // counted, so that a helper sees that there is another
  alignas(64) std::atomic<int> inside_{kClosed};  // helpers at the job, and whether more may join them
  alignas(64) std::atomic<int> num_asleep_{0};
  std::mutex sleep_;
  std::condition_variable another_job_, all_left_;
};

// Never destroyed: helpers wait in it until the process ends.
Team* team = [] {
  // A forked process has its parent's memory and none of its threads.
  pthread_atfork(nullptr, nullptr, [] { team = new Team; });
  return new Team;
}();

}  // namespace

void call_with_helpers(int threads, void (*body)(void*, int), void* context) {
  if (!team->run(threads, body, context)) body(context, 0);
}

}  // namespace ifb
