/* A member's flight recorder: its last operations with begin and end, and its totals. The layout is
 * drawn in shm_broadcast/layout.py. All functions need the GIL: one thread of the member writes at a
 * time, here and in the member's slot. */
#ifndef GC_HISTORY_H
#define GC_HISTORY_H

#include <stddef.h>

#include "atomics.h"

typedef struct {
    uint64_t begin, end, sequence, bytes;
    uint32_t number;
    uint16_t peer;
    uint8_t verb, dtype, outcome;
    char group[ENTRY_GROUP_BYTES];
} gc_entry;

_Static_assert(sizeof(gc_entry) == ENTRY_STRIDE && offsetof(gc_entry, begin) == ENTRY_BEGIN &&
                   offsetof(gc_entry, end) == ENTRY_END &&
                   offsetof(gc_entry, sequence) == ENTRY_SEQUENCE &&
                   offsetof(gc_entry, bytes) == ENTRY_BYTES &&
                   offsetof(gc_entry, number) == ENTRY_NUMBER &&
                   offsetof(gc_entry, peer) == ENTRY_PEER &&
                   offsetof(gc_entry, verb) == ENTRY_VERB &&
                   offsetof(gc_entry, dtype) == ENTRY_DTYPE &&
                   offsetof(gc_entry, outcome) == ENTRY_OUTCOME &&
                   offsetof(gc_entry, group) == ENTRY_GROUP,
               "as in layout.h");

/* Returns the entry of an operation; NULL if the board has no flight recorder. */
static inline gc_entry *gc_entry_of(char *history, uint64_t sequence) {
    if (history == NULL) return NULL;
    return (gc_entry *)history + ((sequence - 1) & (HISTORY_ENTRIES - 1));
}

typedef struct {
    uint64_t ended, failed, ns, bytes;
} gc_total;

_Static_assert(sizeof(gc_total) == TOTAL_STRIDE && offsetof(gc_total, ended) == TOTAL_ENDED &&
                   offsetof(gc_total, failed) == TOTAL_FAILED &&
                   offsetof(gc_total, ns) == TOTAL_NS && offsetof(gc_total, bytes) == TOTAL_BYTES,
               "as in layout.h");

/* Adds an ended operation to the totals of its group and verb. */
static inline void gc_count(char *history, const gc_entry *entry) {
    if (entry->verb == 0 || entry->verb >= TOTAL_VERBS) return;
    size_t group = 0;
    if (entry->group[0]) {
        for (group = 1; group < TOTAL_GROUPS - 1; group++) {
            char *name = history + TOTALS + group * TOTAL_NAME_STRIDE;
            if (name[0] == 0) memcpy(name, entry->group, ENTRY_GROUP_BYTES);
            if (memcmp(name, entry->group, ENTRY_GROUP_BYTES) == 0) break;
        }
    }
    gc_total *total =
        (gc_total *)(history + TOTALS_ROWS) + group * TOTAL_VERBS + entry->verb;
    total->failed += entry->outcome != OUTCOME_DONE;
    total->ns += entry->end - entry->begin;
    total->bytes += entry->bytes;
    gc_store64(total, TOTAL_ENDED, total->ended + 1);
}

/* Records an operation; an end of 0 means that it has not ended. If its entry's last operation has
 * not ended, the totals count that operation as done now: its end finds no entry. */
static inline void gc_enter(char *history, gc_entry about, uint64_t sequence) {
    gc_entry *entry = gc_entry_of(history, sequence);
    if (entry == NULL) return;
    /* A reader that sees a part of this entry sees the member's last sequence, too. */
    atomic_thread_fence(memory_order_release);
    bool reused = sequence > HISTORY_ENTRIES && entry->sequence == sequence - HISTORY_ENTRIES;
    if (reused && entry->end == 0) {
        entry->outcome = OUTCOME_DONE;
        entry->end = about.end ? about.end : about.begin;
        gc_count(history, entry);
    }
    about.sequence = sequence;
    about.outcome = about.end ? OUTCOME_DONE : 0;
    *entry = about;
    if (about.end) gc_count(history, &about);
}

/* Records an operation's outcome, unless its entry has an outcome or was reused. A `bytes` or
 * `number` of 0 keeps the recorded value. */
static inline void gc_leave(char *history, uint64_t sequence, uint8_t outcome, uint64_t bytes,
                            uint32_t number, uint64_t now) {
    gc_entry *entry = gc_entry_of(history, sequence);
    if (entry == NULL || sequence == 0 || entry->sequence != sequence || entry->end != 0) return;
    if (bytes) entry->bytes = bytes;
    if (number) entry->number = number;
    entry->outcome = outcome;
    gc_store64(entry, ENTRY_END, now);
    gc_count(history, entry);
}

/* Publishes the begin of an operation in a member slot: its name (NUL-padded), sequence number, time
 * and state; returns the sequence number. If about.begin is set, the operation ends now. The state
 * is stored only if it changes: it shares a cache line with the eventcount, and a store would
 * invalidate that line in the other processes' caches. */
static inline uint64_t gc_stamp(void *base, size_t slot, uint32_t state,
                                const char name[OPERATION_BYTES], char *history, gc_entry about) {
    memcpy((char *)base + slot + MEMBER_OPERATION, name, OPERATION_BYTES);
    uint64_t sequence = gc_load64(base, slot + MEMBER_SEQUENCE) + 1, now = gc_now_ns();
    *(about.begin ? &about.end : &about.begin) = now;
    gc_enter(history, about, sequence);
    gc_store64(base, slot + MEMBER_SEQUENCE, sequence);
    gc_store64(base, slot + MEMBER_PROGRESS, now);
    if (gc_load32(base, slot + MEMBER_STATE) != state) gc_store32(base, slot + MEMBER_STATE, state);
    return sequence;
}

#endif
