/* Common parts of the fast path: see direct.c. */
#ifndef GC_DIRECT_H
#define GC_DIRECT_H

#include "comm.h"

/* Nanoseconds of polling before a verb returns Ellipsis and the caller sleeps. */
#define SPIN_NS 50000

/* Returns true if the group has a fast path and is not aborted. */
bool direct_open(const Comm *self);

/* Reads a rank; returns the number of ranks, without an error set, for any other object. */
size_t direct_read_rank(const Comm *self, PyObject *object);

/* Publishes an operation (a verb or an OPERATION) of so many bytes on the board; `end` is 0 if it is
 * not done. Returns its sequence number. */
uint64_t direct_stamp(Comm *self, int operation, uint64_t bytes, uint64_t begin, uint64_t end);

/* Returns the checksum of a rank's collectives after one more, from the one before: a bijection of
 * `digest` for each signature, so ranks that differ once differ from there on. */
uint32_t direct_digest(uint32_t digest, const void *signature);

#endif
