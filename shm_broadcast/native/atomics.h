/* Atomic words in shared memory, and futex waits on them across processes.
 *
 * The ordering rule (shm_broadcast/layout.py): data is published by a release store and read after
 * an acquire load. A process that may have to wake a sleeper puts a full fence between its own store
 * and its load of the sleepers' count. Without the fence the load may move before the store: the
 * sleeper misses the change, and the waker misses the sleeper. */
#ifndef GC_ATOMICS_H
#define GC_ATOMICS_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "layout.h"

#define GC_AT32(base, offset) ((_Atomic uint32_t *)((char *)(base) + (offset)))
#define GC_AT64(base, offset) ((_Atomic uint64_t *)((char *)(base) + (offset)))

static inline uint64_t gc_load64(const void *base, size_t offset) {
    return atomic_load_explicit(GC_AT64(base, offset), memory_order_acquire);
}

static inline void gc_store64(void *base, size_t offset, uint64_t value) {
    atomic_store_explicit(GC_AT64(base, offset), value, memory_order_release);
}

static inline uint32_t gc_load32(const void *base, size_t offset) {
    return atomic_load_explicit(GC_AT32(base, offset), memory_order_acquire);
}

static inline void gc_store32(void *base, size_t offset, uint32_t value) {
    atomic_store_explicit(GC_AT32(base, offset), value, memory_order_release);
}

static inline void gc_fence(void) { atomic_thread_fence(memory_order_seq_cst); }

static inline uint64_t gc_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static inline void gc_relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* A spin loop: GC_PAUSES polls on the core (about 2 us), then one sched_yield per poll. Where the
 * cores are `oversubscribed` (more processes than cores), every poll yields: the awaited peer may be
 * runnable and lack a core.
 *
 * Two processes that hand one core to each other by sched_yield both stay runnable, and Linux takes
 * tens of milliseconds to move one of them to a free core. A process that wakes from a sleep gets a
 * free core at once, so this one sleeps after GC_LONG_YIELDS yields in which another process ran. */
#define GC_PAUSES 64
#define GC_LONG_YIELD_NS 1200u
#define GC_LONG_YIELDS 16u
#define GC_BETWEEN_SLEEPS_NS 2000000u

typedef struct {
    uint64_t until_ns;
    unsigned looks;
    bool oversubscribed;
} gc_spin;

static inline gc_spin gc_spin_for(uint64_t spin_ns, bool oversubscribed) {
    return (gc_spin){.until_ns = spin_ns ? gc_now_ns() + spin_ns : 0,
                     .looks = oversubscribed ? GC_PAUSES : 0,
                     .oversubscribed = oversubscribed};
}

/* Yields the core, or sleeps for a nanosecond (see above); `now` is gc_now_ns(). */
static inline void gc_yield(uint64_t now) {
    static _Thread_local uint64_t slept;
    static _Thread_local unsigned long_yields;
    sched_yield();
    uint64_t after = gc_now_ns();
    long_yields = after - now > GC_LONG_YIELD_NS ? long_yields + 1 : 0;
    if (long_yields < GC_LONG_YIELDS || after - slept < GC_BETWEEN_SLEEPS_NS) return;
    long_yields = 0;
    slept = after;
    nanosleep(&(struct timespec){.tv_nsec = 1}, NULL);
}

/* Pauses or yields; returns false once the window is over. */
static inline bool gc_spin_again(gc_spin *spin) {
    if (spin->until_ns == 0) return false;
    if (spin->looks++ < GC_PAUSES) {
        gc_relax();
        return true;
    }
    uint64_t now = gc_now_ns();
    if (now >= spin->until_ns) return false;
    if (spin->oversubscribed)
        sched_yield(); /* no core is free */
    else
        gc_yield(now);
    return true;
}

/* Sleeps while the word holds `seen`, for at most `timeout_ns`; may return early. */
static inline void gc_futex_wait(void *base, size_t offset, uint32_t seen, uint64_t timeout_ns) {
    struct timespec timeout = {.tv_sec = (time_t)(timeout_ns / 1000000000u),
                               .tv_nsec = (long)(timeout_ns % 1000000000u)};
    syscall(SYS_futex, GC_AT32(base, offset), FUTEX_WAIT, seen, &timeout, NULL, 0);
}

static inline void gc_futex_wake_all(void *base, size_t offset) {
    syscall(SYS_futex, GC_AT32(base, offset), FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* An eventcount is two 32-bit words: the counter that a futex sleeps on, then the number of announced
 * sleepers. No system call is made while that number is 0. */

static inline bool gc_has_waiters(const void *base, size_t eventcount) {
    return gc_load32(base, eventcount + EVENTCOUNT_WAITERS) != 0;
}

static inline void gc_change(void *base, size_t eventcount) {
    atomic_fetch_add_explicit(GC_AT32(base, eventcount), 1, memory_order_seq_cst);
}

/* Wakes the eventcount's sleepers. The caller has stored its change, then executed a full fence. */
static inline void gc_notify_after_fence(void *base, size_t eventcount) {
    if (!gc_has_waiters(base, eventcount)) return;
    gc_change(base, eventcount);
    gc_futex_wake_all(base, eventcount);
}

/* As gc_notify_after_fence, for several eventcounts, two per system call: a woken process may preempt
 * this one when the call returns, and would delay the remaining wake-ups. FUTEX_WAKE_OP wakes the
 * second word's sleepers unless its value is -1, once in 2^32 notifications; these sleepers poll
 * again after their slice. */
static inline void gc_notify_all_after_fence(void *base, const size_t *eventcounts, size_t n) {
    const int always = FUTEX_OP(FUTEX_OP_OR, 0, FUTEX_OP_CMP_NE, 0xfff);
    const size_t *first = NULL;
    for (const size_t *each = eventcounts; each < eventcounts + n; each++) {
        if (!gc_has_waiters(base, *each)) continue;
        gc_change(base, *each);
        if (first == NULL) {
            first = each;
            continue;
        }
        syscall(SYS_futex, GC_AT32(base, *first), FUTEX_WAKE_OP, INT_MAX, INT_MAX,
                GC_AT32(base, *each), always);
        first = NULL;
    }
    if (first != NULL) gc_futex_wake_all(base, *first);
}

#endif
