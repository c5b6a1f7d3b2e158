#include "parallel.h"

#include <omp.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace wl {
namespace {

constexpr int kMaxThreads = 64;
// A worker without work looks for more for so long before it sleeps: the gap between two ops of a decode step is about
// 10 us, and on few cores the time spent looking is missing elsewhere.
constexpr auto kSpin = std::chrono::microseconds(60);
constexpr uint64_t kClosed = 0xffffffffu;

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#else
    std::this_thread::yield();
#endif
}

// The batch of items in hand. `ticket` holds its generation (high half) and the next unclaimed item (low half), so that
// a worker that comes late claims nothing: its compare-and-swap meets another generation. While the other fields
// change the low half is kClosed.
struct Batch {
    alignas(64) std::atomic<uint64_t> ticket{kClosed};
    alignas(64) std::atomic<int64_t> done{0};
    std::atomic<int64_t> count{0};
    std::atomic<ItemFunction> function{nullptr};
    std::atomic<void*> context{nullptr};

    // Claims and runs items until none is left; false when there was none.
    bool work() {
        bool worked = false;
        for (;;) {
            uint64_t seen = ticket.load(std::memory_order_acquire);
            const int64_t item = (int64_t)(seen & kClosed);
            if (item == (int64_t)kClosed || item >= count.load(std::memory_order_relaxed)) return worked;
            const ItemFunction run = function.load(std::memory_order_relaxed);
            void* const argument = context.load(std::memory_order_relaxed);
            if (!ticket.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) continue;
            run(argument, item);
            done.fetch_add(1, std::memory_order_release);
            worked = true;
        }
    }
};

struct Pool {
    Batch batch;
    std::mutex caller;  // held by the thread whose items run
    std::mutex sleep_lock;
    std::condition_variable wake;
    std::atomic<int> sleeping{0};
    int workers = 0;

    void worker() {
        for (;;) {
            auto last_work = std::chrono::steady_clock::now();
            for (int spins = 0;;) {
                if (batch.work()) {
                    last_work = std::chrono::steady_clock::now();
                    spins = 0;
                }
                pause();
                if (++spins % 64 == 0 && std::chrono::steady_clock::now() - last_work > kSpin) break;
            }
            std::unique_lock<std::mutex> lock(sleep_lock);
            sleeping.fetch_add(1);  // before the check: a caller that misses it has published its items already
            const uint64_t generation = batch.ticket.load() >> 32;
            if (!has_items()) wake.wait(lock, [&] { return batch.ticket.load() >> 32 != generation || has_items(); });
            sleeping.fetch_sub(1);
        }
    }

    bool has_items() const {
        const uint64_t item = batch.ticket.load() & kClosed;
        return item != kClosed && (int64_t)item < batch.count.load();
    }

    void run(int64_t count, ItemFunction function, void* context, int threads) {
        for (; workers < threads - 1; workers++) std::thread([this] { worker(); }).detach();
        const uint64_t generation = ((batch.ticket.load() >> 32) + 1) << 32;
        batch.ticket.store(generation | kClosed);
        batch.count.store(count);
        batch.function.store(function);
        batch.context.store(context);
        batch.done.store(0);
        batch.ticket.store(generation);
        if (sleeping.load() > 0) {
            std::lock_guard<std::mutex> lock(sleep_lock);
            wake.notify_all();
        }
        batch.work();
        // What is left is in progress elsewhere; on a full machine its thread may need this core to go on.
        for (int spins = 0; batch.done.load(std::memory_order_acquire) < count; spins++)
            spins < 2000 ? pause() : std::this_thread::yield();
    }
};

// Never destroyed: its threads run until the process ends. A forked child has none of them and starts its own.
Pool* pool = nullptr;
std::once_flag pool_once;

void replace_pool() { pool = new Pool; }

thread_local bool inside_item = false;

}  // namespace

int num_threads() {
    const int threads = omp_get_max_threads();
    return threads < kMaxThreads ? threads : kMaxThreads;
}

void run_items(int64_t count, ItemFunction function, void* context) {
    std::call_once(pool_once, [] {
        replace_pool();
        pthread_atfork(nullptr, nullptr, replace_pool);
    });
    const int threads = num_threads();
    if (threads > 1 && !inside_item && count < (int64_t)kClosed && pool->caller.try_lock()) {
        Pool* const mine = pool;
        inside_item = true;
        mine->run(count, function, context, threads);
        inside_item = false;
        mine->caller.unlock();
        return;
    }
    for (int64_t i = 0; i < count; i++) function(context, i);
}

}  // namespace wl
