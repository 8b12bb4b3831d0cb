/* The monotonic clock in half of what clock_gettime takes: by the processor's time stamp counter,
 * whose pace is measured now and then. It is compared with the clock itself every millisecond, so it
 * is never far from it, and never goes back. */
#ifndef GC_PACE_H
#define GC_PACE_H

#include "atomics.h"

#if defined(__x86_64__)

#define PACE_MEASURED_NS 10000000u
#define PACE_FORGOTTEN_NS 2000000000u
#define PACE_TRUSTED_NS 1000000u
#define PACE_MOST_TICKS 10u /* in a ns: the counter has jumped, as after a machine's suspension */
#define PACE_CLOSE_TICKS 1000u /* between two looks at the counter, with the clock in the middle */
#define PACE_LOOKS 3 /* the first one after a switch of processes is slow before or after the clock */

typedef struct {
    uint64_t ns, ticks;           /* the clock and the counter at one moment */
    uint64_t base_ns, base_ticks; /* the same, where the measuring of the pace began */
    uint64_t scale;               /* ns in 2^32 ticks; 0 before it is known */
    uint64_t trusted;             /* ticks after that moment */
    uint64_t latest;              /* what was told last */
} gc_pace;

static inline uint64_t gc_pace_look(gc_pace *pace) {
    uint64_t closest = PACE_CLOSE_TICKS, last = 0;
    for (int look = 0; look < PACE_LOOKS; look++) {
        uint64_t before = __builtin_ia32_rdtsc();
        last = gc_now_ns();
        uint64_t between = __builtin_ia32_rdtsc() - before;
        if (between >= PACE_CLOSE_TICKS) break; /* another process ran meanwhile */
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
