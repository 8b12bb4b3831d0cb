/* How a process writes data that others read next: through the caches, with plain stores, or past
 * them (stream.h). The faster way depends on whether writer and reader share a cache, by up to five
 * times either way, and a virtual machine's host changes that at run time. So it is measured. Some
 * pieces, chosen by number at both ends alike, are written either way and timed: the writer times
 * its stores, the reader its fetching of every line. The reader publishes its median in shared
 * memory. The writer uses the way with the smaller sum. */
#ifndef GC_WAY_H
#define GC_WAY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum { WAY_PLAIN, WAY_PAST, WAYS } way_kind;

/* Of 256 pieces one is timed either way. If one way takes five times as long as the other, timing
 * costs 1.6 % of the time. */
#define WAY_TRIED_OF 256

/* Smaller pieces are not timed. */
#define WAY_LEAST_BYTES 8192

/* Bytes of a reader's published words: two u32, ticks per MiB by way; 0: not measured yet. */
#define WAY_WORDS_BYTES 8

/* The last three samples. Their median counts: one may include a time when this process lost its
 * core. */
typedef struct {
    uint32_t last[3];
    unsigned n;
} way_samples;

/* The current timed piece, so far. */
typedef struct {
    uint64_t ticks, bytes;
} way_tally;

/* One process's measurements for one memory area that it writes or reads. */
typedef struct {
    bool past;            /* the way in use */
    uint32_t costs[WAYS]; /* estimated ticks per MiB, both ends; 0: not measured yet */
    way_samples writes[WAYS], reads[WAYS];
    way_tally written, fetched;
} gc_way;

/* Sets the way of new ends before anything is measured; `always`: nothing is measured. For the whole
 * process. */
void way_begin_with(bool past, bool always);

gc_way way_new(void);

/* Returns the way in which piece `number` of `size` bytes is timed; WAYS: not timed. */
way_kind way_tried(uint64_t number, uint64_t size);

/* Writes a part of a piece. Call `stream_end` before the store that publishes it. */
void way_copy(gc_way *way, way_kind tried, void *to, const void *from, size_t size);

/* Ends a timed piece at the writer, and selects the faster way. The published words of `readers` lie
 * `stride` bytes apart. */
void way_wrote(gc_way *way, way_kind tried, const char *words, size_t stride, size_t readers);

/* Fetches a part of a timed piece before it is read. */
void way_fetch(gc_way *way, const void *from, size_t size);

/* Ends a timed piece at the reader, and publishes the median in the reader's words. */
void way_fetched(gc_way *way, way_kind tried, char *words);

/* Selects the faster way from one sample: ticks per MiB to write a piece, and to read it. */
void way_weigh(gc_way *way, way_kind tried, uint32_t write, const uint32_t *reads);

#endif
