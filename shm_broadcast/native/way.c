#include "way.h"

#include <string.h>

#include "atomics.h"
#include "stream.h"

#define MIB (1u << 20)
#define LINE 64

/* The way changes only if the other one costs less than 19/20. */
#define CLEARLY_NEW 20u
#define CLEARLY_OLD 19u

/* The measured cost of writing past the caches is multiplied by 7/5. The samples underestimate it: a
 * reader usually follows at once, while the data is in flight to memory, whereas plain stores
 * overlap with the writer's next work. With 7/5 the estimates per piece rank the two ways as whole
 * operations do, also at medium distances between cores (benchmarks/results/README.md). */
#define PAST_TIMES 7u
#define PAST_PARTS 5u

static bool begins_past = true, is_fixed;

void way_begin_with(bool past, bool always) {
    begins_past = past;
    is_fixed = always;
}

gc_way way_new(void) { return (gc_way){.past = begins_past}; }

/* Mixes the number with the finalizer of MurmurHash3: numbers follow each other in any stride, and
 * without mixing a periodic program could have the same piece timed every time. */
way_kind way_tried(uint64_t number, uint64_t size) {
    if (is_fixed || size < WAY_LEAST_BYTES) return WAYS;
    number = (number ^ number >> 33) * 0xff51afd7ed558ccdu;
    number = (number ^ number >> 33) * 0xc4ceb9fe1a85ec53u;
    uint64_t left = (number ^ number >> 33) % WAY_TRIED_OF;
    return left < WAYS ? (way_kind)left : WAYS;
}

/* Reads a counter of constant rate, after all earlier loads and stores are complete. */
static uint64_t ticks(void) {
#if defined(__x86_64__)
    __builtin_ia32_mfence();
    __builtin_ia32_lfence();
    uint64_t now = __builtin_ia32_rdtsc();
    __builtin_ia32_lfence();
    return now;
#elif defined(__aarch64__)
    uint64_t now;
    __asm__ __volatile__("dsb sy\n\tisb\n\tmrs %0, cntvct_el0" : "=r"(now)::"memory");
    return now;
#else
    gc_fence();
    return gc_now_ns();
#endif
}

static void count(way_tally *tally, uint64_t begin, size_t size) {
    tally->ticks += ticks() - begin;
    tally->bytes += size;
}

static void touch(const void *from, size_t size) {
    const volatile char *bytes = from;
    for (size_t at = 0; at < size; at += LINE) (void)bytes[at];
}

static void copy(bool past, void *to, const void *from, size_t size) {
    if (size == 0) return; /* an empty tensor's address may be NULL; memcpy(NULL) is undefined */
    if (past)
        stream_copy(to, from, size);
    else
        memcpy(to, from, size);
}

void way_copy(gc_way *way, way_kind tried, void *to, const void *from, size_t size) {
    bool past = is_fixed ? begins_past : way->past;
    if (tried == WAYS) {
        copy(past, to, from, size);
        return;
    }
    touch(from, size); /* fetch the source first: its cost is the same either way */
    uint64_t begin = ticks();
    copy(tried == WAY_PAST, to, from, size);
    count(&way->written, begin, size);
}

void way_fetch(gc_way *way, const void *from, size_t size) {
    uint64_t begin = ticks();
    touch(from, size);
    count(&way->fetched, begin, size);
}

static void add(way_samples *samples, uint32_t sample) {
    if (samples->n == 0) samples->last[1] = samples->last[2] = sample;
    samples->last[samples->n++ % 3] = sample;
}

static uint32_t median(const way_samples *samples) {
    uint32_t a = samples->last[0], b = samples->last[1], c = samples->last[2];
    uint32_t low = a < b ? a : b, high = a < b ? b : a;
    return c < low ? low : c > high ? high : c;
}

/* Returns the ticks per MiB of a piece and resets its tally; 0 if the piece was too small. */
static uint32_t pace(way_tally *tally) {
    uint64_t pace = 0;
    if (tally->bytes >= WAY_LEAST_BYTES / 2) pace = tally->ticks * MIB / tally->bytes + 1;
    *tally = (way_tally){0};
    return pace < UINT32_MAX ? (uint32_t)pace : UINT32_MAX;
}

void way_fetched(gc_way *way, way_kind tried, char *words) {
    uint32_t sample = pace(&way->fetched);
    if (sample == 0) return;
    add(&way->reads[tried], sample);
    gc_store32(words, tried * sizeof sample, median(&way->reads[tried]));
}

void way_weigh(gc_way *way, way_kind tried, uint32_t write, const uint32_t *reads) {
    add(&way->writes[tried], write);
    for (int kind = 0; kind < WAYS; kind++) {
        uint64_t cost = (uint64_t)median(&way->writes[kind]) + reads[kind];
        if (kind == WAY_PAST) cost = cost * PAST_TIMES / PAST_PARTS;
        bool known = way->writes[kind].n > 0 && reads[kind] > 0;
        way->costs[kind] = !known ? 0 : cost < UINT32_MAX ? (uint32_t)cost : UINT32_MAX;
    }
    uint64_t taken = way->costs[way->past], other = way->costs[!way->past];
    if (taken && other && other * CLEARLY_NEW < taken * CLEARLY_OLD) way->past = !way->past;
}

void way_wrote(gc_way *way, way_kind tried, const char *words, size_t stride, size_t readers) {
    uint32_t sample = pace(&way->written), reads[WAYS];
    if (sample == 0) return;
    for (int kind = 0; kind < WAYS; kind++) {
        uint64_t sum = 0, known = 0;
        for (size_t reader = 0; reader < readers; reader++) {
            uint32_t said = gc_load32(words + reader * stride, kind * sizeof said);
            sum += said;
            known += said > 0;
        }
        reads[kind] = known ? (uint32_t)(sum / known) : 0;
    }
    way_weigh(way, tried, sample, reads);
}
