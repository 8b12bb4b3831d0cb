/* How a process writes what others read next: through the caches, with plain stores, or past them
 * (stream.h). Which is quicker depends on whether writer and reader share a cache, up to five times
 * either way, and a virtual machine's host changes that while they run. So it is measured: some
 * pieces are tried either way, and both ends see by a piece's number which. Of such a piece the
 * writer times its stores, and the reader its fetching of every line; the reader says in shared
 * memory what that takes. The writer takes the way whose sum is less. */
#ifndef GC_WAY_H
#define GC_WAY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum { WAY_PLAIN, WAY_PAST, WAYS } way_kind;

/* Of 256 pieces one is tried either way: where one way takes five times as long as the other, trials
 * take 1.6 % of the time. */
#define WAY_TRIED_OF 256

/* Smaller pieces are not tried. */
#define WAY_LEAST_BYTES 8192

/* Where readers say what fetching takes: two u32, ticks for a MiB by way; 0: not known yet. */
#define WAY_WORDS_BYTES 8

/* The median of the last three: one of them may be of a moment when this process lacked the core. */
typedef struct {
    uint32_t last[3];
    unsigned n;
} way_samples;

/* Of the piece that is tried, so far. */
typedef struct {
    uint64_t ticks, bytes;
} way_tally;

/* One process's end of a place that others read, or that it reads. */
typedef struct {
    bool past;            /* what is taken */
    uint32_t costs[WAYS]; /* estimated ticks for a MiB, both ends; 0: not known yet */
    way_samples writes[WAYS], reads[WAYS];
    way_tally written, fetched;
} gc_way;

/* Where ends begin, before anything is measured; `always`: nothing is. For all of this process. */
void way_begin_with(bool past, bool always);

/* A new end. */
gc_way way_new(void);

/* How piece `number` of `size` bytes is tried; WAYS: it is not. */
way_kind way_tried(uint64_t number, uint64_t size);

/* Writes a part of a piece. `stream_end` must come before the store that publishes it. */
void way_copy(gc_way *way, way_kind tried, void *to, const void *from, size_t size);

/* After a piece was written: takes the way that is quicker by now. The words of `readers` lie
 * `stride` bytes apart. */
void way_wrote(gc_way *way, way_kind tried, const char *words, size_t stride, size_t readers);

/* Fetches a part of a piece before it is read. */
void way_fetch(gc_way *way, const void *from, size_t size);

/* After a piece was fetched: says so in this reader's words. */
void way_fetched(gc_way *way, way_kind tried, char *words);

/* What `way_wrote` does, without a clock: a piece took so many ticks for a MiB to write, and so many
 * to read. */
void way_weigh(gc_way *way, way_kind tried, uint32_t write, const uint32_t *reads);

#endif
