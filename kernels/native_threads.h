// Who computes what: a thread that calls, and helpers that take tasks beside it.
//
// Nobody is waited for who has not begun. The barriers of an OpenMP region wait for every thread of its team, and a step
// has some 150 of them: where another process wants one of the cores, each waits until the system runs the thread that
// it has put aside, for milliseconds. Here the caller does what a late helper has not taken, and the helper comes to the
// next job; one that is put aside within a task holds up that task.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace ifb {

// Calls body(context, i) on the calling thread with i = 0 and, as they come, on helpers with i in 1 .. threads - 1, each
// at most once at a time. Returns when the caller's and all that began have returned. Where another caller has the
// helpers, or a process can have none, the caller is alone: the body has to do all the work that the others leave.
void call_with_helpers(int threads, void (*body)(void* context, int thread), void* context);

// body(thread), as above.
template <typename F>
void with_helpers(int threads, F body) {
  if (threads <= 1) return body(0);
  call_with_helpers(threads, [](void* context, int thread) { (*static_cast<F*>(context))(thread); }, &body);
}

constexpr int kMostRuns = 64;

// Calls f(i) for all i < count. Each thread goes through a run of them, and then helps where others have not come to an
// end: one that the system has put aside holds up a task, not its share.
template <typename F>
void share_out(int64_t count, int threads, F f) {
  if (threads <= 1 || count <= 1) {
    for (int64_t i = 0; i < count; ++i) f(i);
    return;
  }
  struct alignas(64) Run {  // on a cache line of its own
    std::atomic<int64_t> next;
    int64_t end;
  };
  const int num_runs = int(std::min<int64_t>({threads, count, kMostRuns}));
  Run runs[kMostRuns];
  for (int r = 0; r < num_runs; ++r) {
    runs[r].next.store(count * r / num_runs, std::memory_order_relaxed);
    runs[r].end = count * (r + 1) / num_runs;
  }
  with_helpers(int(std::min<int64_t>(threads, count)), [&](int thread) {
    for (int r = 0; r < num_runs; ++r) {
      Run& run = runs[(thread + r) % num_runs];
      for (int64_t i; (i = run.next.fetch_add(1, std::memory_order_relaxed)) < run.end;) f(i);
    }
  });
}

}  // namespace ifb
