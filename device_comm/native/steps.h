/* Collectives in steps over the memory of a group: the protocol of device_comm/shm/layout.py. */
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

/* What this rank does in one collective; device_comm/shm/collectives.py says it in full. */
typedef struct {
    unsigned char signature[SIGNATURE_BYTES];
    int kind, dtype, op;
    bool puts;             /* this rank puts something */
    bool addressed;        /* one piece for each rank, instead of one for all */
    uint64_t length;       /* bytes of the longest piece of any rank */
    unsigned char *awaits; /* by rank: whether this rank needs what that one puts */
    span *gives;           /* by rank, or only the first one: what this rank puts */
    span *takes;           /* by rank, or only the first one: where what comes is put */
    const char *own;       /* what this rank would put for itself */
} plan;

typedef enum { STEPS_DONE, STEPS_BLOCKED, STEPS_DIVERGED } steps_status;

typedef struct {
    char *group, *board;
    size_t rank, n;
    size_t *eventcounts; /* by rank, in the board */
    bool oversubscribed;      /* the ranks share cores: who waits gives its core up at once */
    uint64_t inside_bytes, step_bytes, ring_bytes, slots, rings;

    uint64_t begun;    /* the last step that this rank has taken on */
    uint64_t all_done; /* every rank is known to be done with this step */

    plan plan;
    uint64_t first;        /* the step of chunk 0 */
    uint64_t chunks;       /* of the data */
    uint64_t piece;        /* bytes of a piece in a step */
    uint64_t stride;       /* bytes of a step's payload */
    uint64_t place;        /* of the first step's payload, if it is in the rings */
    uint64_t straight;     /* steps before the plan begins its rings anew */
    uint64_t lap;          /* steps until it does so again */
    uint64_t put, taken;   /* chunks so far */
    uint64_t moved;        /* bytes that were copied or reduced in this call of steps_run */
    size_t met;            /* ranks below this one have arrived at the step that is met */
    bool at_gate;          /* blocked before writing, not before reading */
    uint64_t blocked_step; /* that cannot be written, or has not arrived */
    bool large;            /* the result does not fit the caches */
    const char **parts;    /* room for n pointers */
    char *scratch;         /* room for SCRATCH_BYTES */

    gc_way way;            /* how payloads are written */
    way_kind tried;        /* of the step that is written */
} steps;

/* Bytes that are reduced before they are copied on, while they are in the cache. */
#define SCRATCH_BYTES 16384

/* Takes on the plan that has been filled in. */
void steps_begin(steps *s);

/* Puts the first chunk if that needs no waiting. */
void steps_put_first(steps *s);

/* Goes on until done, until nothing has come for `spin_ns`, or until AT_ONCE bytes are moved: then
 * it is blocked in name only, and `steps_ready` at once. Without the GIL, if need be. */
steps_status steps_run(steps *s, uint64_t spin_ns);

/* As steps_run, for about a microsecond of looking; for one look where ranks share cores. */
steps_status steps_run_briefly(steps *s);

/* Whether steps_run would get further, or find that ranks diverge. */
bool steps_ready(steps *s);

/* Whether `rank` is one of those that a blocked plan waits for. */
bool steps_waits_for(const steps *s, size_t rank);

/* The first rank that has arrived with another signature, and where that lies; n if there is none. */
size_t steps_divergent(const steps *s, const unsigned char **signature);

#endif
