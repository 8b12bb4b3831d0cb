/* Collectives in steps over the segment of a group: the protocol of device_comm/shm/layout.py. */
#ifndef GC_STEPS_H
#define GC_STEPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "group_layout.h"
#include "way.h"

typedef struct {
    char *address;
    uint64_t size;
} span;

/* One rank's part in one collective: see plan.h. */
typedef struct {
    unsigned char signature[SIGNATURE_BYTES];
    int kind, dtype, op;
    bool puts;             /* this rank puts a payload */
    bool addressed;        /* a piece for each rank, instead of one for all */
    uint64_t length;       /* bytes of the longest piece of any rank */
    unsigned char *awaits; /* by rank: 1 if this rank needs that rank's payload */
    span *gives;           /* source of this rank's payload: by rank, or only the first */
    span *takes;           /* destination of the ranks' payloads: by rank, or only the first */
    const char *own;       /* this rank's piece for itself */
} plan;

typedef enum { STEPS_DONE, STEPS_BLOCKED, STEPS_DIVERGED } steps_status;

typedef struct {
    char *group, *board;
    size_t rank, n;
    size_t *eventcounts; /* by rank: offset in the board */
    bool oversubscribed; /* more ranks than cores: waits yield at once */
    uint64_t inside_bytes, step_bytes, ring_bytes, slots, rings;

    uint64_t begun;    /* last step of the current or last plan */
    uint64_t all_done; /* all other ranks are known to be done with this step */

    plan plan;
    uint64_t first;        /* the step of chunk 0 */
    uint64_t chunks;       /* number of chunks of the data */
    uint64_t piece;        /* bytes of a piece in a step */
    uint64_t stride;       /* bytes of a step's payload */
    uint64_t place;        /* ring offset of the first step's payload, if the rings are used */
    uint64_t straight;     /* steps before the rings first wrap */
    uint64_t lap;          /* steps between later wraps */
    uint64_t put, taken;   /* chunks so far */
    uint64_t moved;        /* bytes copied or reduced in this call of steps_run */
    size_t met;            /* lower ranks have arrived at the current step, or are not awaited */
    bool at_gate;          /* blocked before writing, not before reading */
    uint64_t blocked_step; /* the step that cannot be written, or has not arrived */
    bool large;            /* the result does not fit into the caches */
    const char **parts;    /* room for n pointers */
    char *scratch;         /* room for SCRATCH_BYTES */

    gc_way way;            /* how payloads are written */
    way_kind tried;        /* how the current step is timed */
} steps;

/* Bytes that are reduced before they are copied on, while they are cached. */
#define SCRATCH_BYTES 16384

/* Begins the plan in `s->plan`, and puts the first chunk if rule 1 allows it at once. */
void steps_begin(steps *s);

/* Runs the plan until it is done, until `spin_ns` have passed without progress, or until AT_ONCE
 * bytes are moved; then it returns STEPS_BLOCKED although `steps_ready` may be true. Needs no GIL. */
steps_status steps_run(steps *s, uint64_t spin_ns);

/* As steps_run, polling for about a microsecond; without polling if oversubscribed. */
steps_status steps_run_briefly(steps *s);

/* Returns true if steps_run would make progress, or find a divergence. */
bool steps_ready(steps *s);

/* Returns true if the blocked plan waits for `rank`. */
bool steps_waits_for(const steps *s, size_t rank);

/* Returns the first rank that has arrived with another signature, and the address of the signature;
 * n if no rank has. */
size_t steps_divergent(const steps *s, const unsigned char **signature);

#endif
