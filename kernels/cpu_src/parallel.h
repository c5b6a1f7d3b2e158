// `parallel_for`: items of one op spread over a few threads that claim them one by one.
//
// Not OpenMP's fork and join: there every thread must reach the end of every region, so one thread that the system has
// put aside for another process stalls all (a decode step of 5 ms took 31 on a busy machine), and idle ones spin for
// milliseconds. Here the caller does whatever nobody else has claimed and waits only for items in progress.
#pragma once
#include <cstdint>

namespace wl {

using ItemFunction = void (*)(void* context, int64_t item);

// Threads of this process's kernels: what torch.set_num_threads says (they share one OpenMP runtime).
int num_threads();

void run_items(int64_t count, ItemFunction function, void* context);

// body(item) for each item in [0, count), in any order, at once. Called from inside a body, or while another thread's
// items run, it does all of them itself.
template <typename Body>
void parallel_for(int64_t count, bool worthwhile, Body&& body) {
    if (count <= 1 || !worthwhile) {
        for (int64_t i = 0; i < count; i++) body(i);
        return;
    }
    run_items(count, [](void* context, int64_t item) { (*(Body*)context)(item); }, (void*)&body);
}

// The same over [0, count) in contiguous ranges, about eight a thread: body(begin, end).
template <typename Body>
void parallel_ranges(int64_t count, bool worthwhile, Body&& body) {
    const int64_t wanted = 8 * num_threads(), ranges = count < wanted ? count : wanted;
    if (ranges <= 1 || !worthwhile) {
        if (count > 0) body((int64_t)0, count);
        return;
    }
    parallel_for(ranges, true, [&](int64_t i) { body(count * i / ranges, count * (i + 1) / ranges); });
}

}  // namespace wl
