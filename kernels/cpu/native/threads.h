// Threads that share the tasks of one call.
//
// Tasks are claimed one by one, by the caller too, so that a thread without a core delays the call by at most
// its own task. A task computes outputs of its own and never a part of a sum: results do not depend on the
// number of threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

// Threads of a call, the caller included.
int64_t num_threads();

// Calls task(context, i) once for each i < n. Serial if there is one thread, one task, or another call's tasks.
void run_tasks(int64_t n, void (*task)(void*, int64_t), void* context);

// Calls f(i) once for each i < n, in any order and on any thread.
template <class F>
void parallel(int64_t n, F f) {
    run_tasks(n, [](void* context, int64_t i) { (*(F*)context)(i); }, &f);
}

// The least work of a call's average task, in nanoseconds of one thread: to hand over a task costs less than a
// microsecond, to wake a sleeping thread about 50. The last tasks are smaller, down to TAIL_NS.
constexpr int64_t TASK_NS = 20000, TAIL_NS = 4000;
// Tasks of a thread, but for the last ones.
constexpr int64_t TASKS_A_THREAD = 8;

// Calls f(first, end) for parts of 0 … n - 1, where one of n takes about `ns` nanoseconds of one thread. Near the end
// parts become smaller, so that the threads end together.
template <class F>
void parallel_ranges(int64_t n, double ns, F f) {
    const int64_t threads = num_threads();
    const int64_t worth = (int64_t)((double)n * ns / TASK_NS);
    const int64_t tasks = threads == 1 ? 1 : std::min({n, worth, threads * TASKS_A_THREAD});
    if (tasks <= 1) {
        if (n) f((int64_t)0, n);
        return;
    }
    const int64_t most = n / tasks, least = std::clamp((int64_t)(TAIL_NS / ns), (int64_t)1, most);
    std::vector<int64_t> ends{0};
    for (int64_t at = 0; at < n; ends.push_back(at))
        at += std::min(n - at, std::clamp((n - at) / (2 * threads), least, most));
    parallel((int64_t)ends.size() - 1, [&](int64_t i) { f(ends[i], ends[i + 1]); });
}
