// Three threads share out jobs of random sizes at once, then forked processes do: every task is done, and once.
// Compiled and run by test_native_threads.py. Prints "ok".

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "native_threads.h"

void call(unsigned seed, int rounds) {
  std::mt19937 random(seed);
  std::vector<int64_t> times;  // plain memory: what helpers wrote has to be visible to the caller
  for (int round = 0; round < rounds; ++round) {
    const int threads = 1 + int(random() % 6);
    times.assign(random() % 500, round);
    ifb::share_out(int64_t(times.size()), threads, [&](int64_t i) { times[i] += i; });
    for (size_t i = 0; i < times.size(); ++i)
      if (times[i] != round + int64_t(i)) {
        std::printf("task %zu of %zu, %d threads: done %s\n", i, times.size(), threads,
                    times[i] == round ? "by nobody" : "more than once");
        std::exit(1);
      }
    if (random() % 64 == 0) usleep(random() % 400);  // so that helpers fall asleep, too
  }
}

int main(int, char** arguments) {
  const int rounds = std::atoi(arguments[1]), processes = std::atoi(arguments[2]);
  std::thread second(call, 2, rounds), third(call, 3, rounds);
  call(1, rounds);
  second.join();
  third.join();
  for (int i = 0; i < processes; ++i) {
    const pid_t child = fork();
    if (!child) {
      call(unsigned(i), rounds / 10);
      _exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    if (status) return 1;
  }
  std::puts("ok");
}
