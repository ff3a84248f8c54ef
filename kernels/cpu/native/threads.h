// Threads that share the tasks of one call.
//
// Tasks are claimed one by one, by the caller too, so that a thread without a core delays the call by at most
// its own task. A task computes outputs of its own and never a part of a sum: results do not depend on the
// number of threads.
#pragma once

#include <algorithm>
#include <cstdint>

// Threads of a call, the caller included.
int64_t num_threads();

// Calls task(context, i) once for each i < n. Serial if there is one thread, one task, or another call's tasks.
void run_tasks(int64_t n, void (*task)(void*, int64_t), void* context);

// Calls f(i) once for each i < n, in any order and on any thread.
template <class F>
void parallel(int64_t n, F f) {
    run_tasks(n, [](void* context, int64_t i) { (*(F*)context)(i); }, &f);
}

// The least work of a task, in nanoseconds of one thread: to hand over a task costs less than a microsecond, to
// wake a sleeping thread about 50.
constexpr int64_t TASK_NS = 20000;
// Tasks of a thread: the last one to end is this fraction of the work late.
constexpr int64_t TASKS_A_THREAD = 8;

// Calls f(first, end) for parts of 0 … n - 1, where one of n takes about `ns` nanoseconds of one thread.
template <class F>
void parallel_ranges(int64_t n, double ns, F f) {
    const int64_t threads = num_threads();
    const int64_t worth = (int64_t)((double)n * ns / TASK_NS);
    const int64_t tasks = threads == 1 ? 1 : std::min({n, worth, threads * TASKS_A_THREAD});
    if (tasks <= 1) {
        if (n) f((int64_t)0, n);
        return;
    }
    parallel(tasks, [&](int64_t i) { f(n * i / tasks, n * (i + 1) / tasks); });
}
