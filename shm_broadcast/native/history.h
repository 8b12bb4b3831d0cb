/* A member's history: its last operations, each with begin and end, and its totals. Its layout is drawn in
 * shm_broadcast/layout.py. One thread of the member at a time, as for its slot: the GIL sees to that. */
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

/* The entry of an operation; NULL if none are kept. */
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

/* Adds an operation that has ended to its group's and verb's totals. */
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

/* Writes down an operation, which is under way if its end is 0. */
static inline void gc_enter(char *history, gc_entry about, uint64_t sequence) {
    gc_entry *entry = gc_entry_of(history, sequence);
    if (entry == NULL) return;
    about.sequence = sequence;
    about.outcome = about.end ? OUTCOME_DONE : 0;
    *entry = about;
    if (about.end) gc_count(history, &about);
}

/* Writes down how an operation ended, unless that was done, or the entry is another one's by now.
 * `bytes` and `number` are 0 if they stand there already. */
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

/* Notes in a member slot that an operation begins: its name, NUL-padded, its number, the time and
 * the state; returns the number. The state shares a cache line with the eventcount, which other
 * processes read: it is stored only if it changes, so that their copy of the line stays valid.
 * An operation that has a begin already is done now. */
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
