/* The monotonic clock from the processor's time stamp counter (TSC), in half the time of
 * clock_gettime. The counter's rate is measured repeatedly, and the result is set to clock_gettime
 * every millisecond, so it stays close to it. It never goes back. */
#ifndef GC_PACE_H
#define GC_PACE_H

#include "atomics.h"

#if defined(__x86_64__)

#define PACE_MEASURED_NS 10000000u
#define PACE_FORGOTTEN_NS 2000000000u
#define PACE_TRUSTED_NS 1000000u
#define PACE_MOST_TICKS 10u /* per ns; above, the counter has jumped, as after a suspension */
#define PACE_CLOSE_TICKS 1000u /* at most, between two reads of the counter around clock_gettime */
#define PACE_LOOKS 3 /* the first read after a context switch is slow */

typedef struct {
    uint64_t ns, ticks;           /* the clock and the counter at one moment */
    uint64_t base_ns, base_ticks; /* the same, at the begin of the rate measurement */
    uint64_t scale;               /* ns per 2^32 ticks; 0: not measured yet */
    uint64_t trusted;             /* ticks after `ticks` for which the scale is used */
    uint64_t latest;              /* the last returned value */
} gc_pace;

static inline uint64_t gc_pace_look(gc_pace *pace) {
    uint64_t closest = PACE_CLOSE_TICKS, last = 0;
    for (int look = 0; look < PACE_LOOKS; look++) {
        uint64_t before = __builtin_ia32_rdtsc();
        last = gc_now_ns();
        uint64_t between = __builtin_ia32_rdtsc() - before;
        if (between >= PACE_CLOSE_TICKS) break; /* this thread was preempted */
        if (between >= closest) continue;
        closest = between;
        pace->ns = last;
        pace->ticks = before + between / 2;
    }
    bool close = closest < PACE_CLOSE_TICKS;
    uint64_t passed = pace->ns - pace->base_ns, ticks = pace->ticks - pace->base_ticks;
    if (close && passed >= PACE_MEASURED_NS) {
        bool usable = passed < PACE_FORGOTTEN_NS && ticks > 0 && ticks / passed < PACE_MOST_TICKS;
        pace->scale = usable ? (passed << 32) / ticks : 0;
        pace->base_ns = pace->ns;
        pace->base_ticks = pace->ticks;
    }
    pace->trusted = close && pace->scale ? ((uint64_t)PACE_TRUSTED_NS << 32) / pace->scale : 0;
    if (last > pace->latest) pace->latest = last;
    return pace->latest;
}

static inline uint64_t gc_pace_now(gc_pace *pace) {
    uint64_t passed = __builtin_ia32_rdtsc() - pace->ticks;
    if (passed >= pace->trusted) return gc_pace_look(pace);
    uint64_t now = pace->ns + (passed * pace->scale >> 32);
    if (now > pace->latest) pace->latest = now;
    return pace->latest;
}

#else

typedef struct {
    char unused;
} gc_pace;

static inline uint64_t gc_pace_now(gc_pace *pace) {
    (void)pace;
    return gc_now_ns();
}

#endif

#endif
