#include "threads.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#include "simd.h"

namespace {

using Clock = std::chrono::steady_clock;

// A thread that waits first spins, then lets others run, then sleeps.
constexpr auto SPIN = std::chrono::microseconds(20), YIELD = std::chrono::microseconds(200);

MP_INLINE void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Whether `ready` became true within the time in which a waiting thread does not sleep.
template <class F>
bool soon(F ready) {
    for (int i = 0; i < 64; i++, pause())
        if (ready()) return true;
    const auto begun = Clock::now();
    for (auto waited = Clock::duration(0); waited < YIELD; waited = Clock::now() - begun) {
        if (waited > SPIN) sched_yield();
        for (int i = 0; i < 64; i++, pause())
            if (ready()) return true;
    }
    return false;
}

class Team {
   public:
    void resize(int64_t threads) {
        const std::lock_guard<std::mutex> lock(sleeping);
        count.store(threads);
        while (workers + 1 < threads) {
            try {
                std::thread(&Team::work, this, ++workers).detach();
            } catch (const std::system_error&) {
                workers--;
                break;  // no more threads: the calls are the same, with fewer of them
            }
        }
    }

    int64_t threads() const { return count.load(std::memory_order_relaxed); }

    void run(int64_t n, void (*some_task)(void*, int64_t), void* some_context) {
        if (n <= 1 || threads() == 1 || busy.exchange(true, std::memory_order_acquire)) {
            for (int64_t i = 0; i < n; i++) some_task(some_context, i);
            return;
        }
        task.store(some_task, std::memory_order_relaxed);
        context.store(some_context, std::memory_order_relaxed);
        total.store(n, std::memory_order_relaxed);
        ended.store(0, std::memory_order_relaxed);
        const uint64_t call = (left.load(std::memory_order_relaxed) >> 32) + 1;
        left.store(call << 32 | (uint64_t)n);  // sequentially consistent, as `sleepers`
        if (sleepers.load() > 0) {
            { const std::lock_guard<std::mutex> lock(sleeping); }
            wake.notify_all();
        }
        while (take()) {
        }
        const auto all_ended = [&] { return ended.load(std::memory_order_acquire) == n; };
        while (!soon(all_ended)) std::this_thread::sleep_for(std::chrono::microseconds(50));
        busy.store(false, std::memory_order_release);
    }

   private:
    // Runs one task of the present call, if one is left. The count and the number of the call are one word: a
    // late thread cannot claim a task of another call than it has read.
    bool take() {
        uint64_t seen = left.load(std::memory_order_acquire);
        while ((uint32_t)seen != 0) {
            const auto mine = task.load(std::memory_order_relaxed);
            void* const with = context.load(std::memory_order_relaxed);
            const int64_t i = total.load(std::memory_order_relaxed) - (int64_t)(uint32_t)seen;
            if (left.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel)) {
                mine(with, i);
                ended.fetch_add(1, std::memory_order_release);
                return true;
            }
        }
        return false;
    }

    void work(int64_t number) {
        const auto some_left = [&] { return number < threads() && (uint32_t)left.load() != 0; };
        for (;;) {
            if (!soon(some_left)) {
                std::unique_lock<std::mutex> lock(sleeping);
                sleepers.fetch_add(1);
                wake.wait(lock, some_left);
                sleepers.fetch_sub(1);
            }
            while (take()) {
            }
        }
    }

    std::atomic<bool> busy{false};  // during a call
    std::atomic<int64_t> count{1};
    int64_t workers = 0;  // changed under `sleeping`
    alignas(64) std::atomic<uint64_t> left{0};  // number of the call, then of its tasks not yet claimed
    std::atomic<void (*)(void*, int64_t)> task{nullptr};
    std::atomic<void*> context{nullptr};
    std::atomic<int64_t> total{0};
    alignas(64) std::atomic<int64_t> ended{0};
    alignas(64) std::atomic<int64_t> sleepers{0};
    std::mutex sleeping;
    std::condition_variable wake;
};

// Never destroyed: its threads run until the process ends.
std::atomic<Team*> team{new Team};

// Threads do not survive a fork, and a lock may be held by one of them: the child begins anew, with one thread.
const int registered = pthread_atfork(nullptr, nullptr, [] { team.store(new Team); });

}  // namespace

int64_t num_threads() { return team.load(std::memory_order_relaxed)->threads(); }

void run_tasks(int64_t n, void (*task)(void*, int64_t), void* context) {
    team.load(std::memory_order_relaxed)->run(n, task, context);
}

MP_EXPORT void set_threads(int64_t threads) { team.load()->resize(threads); }
MP_EXPORT int64_t get_threads() { return num_threads(); }
