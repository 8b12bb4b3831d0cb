/* Bytes through a pipe between two ranks: the protocol of device_comm/shm/channel.py. */
#ifndef GC_PIPE_H
#define GC_PIPE_H

#include <stddef.h>
#include <stdint.h>

#include "way.h"

/* As in device_comm/shm/channel.py. A test compares the two. */
#define PIPE_POSTED 64
#define PIPE_TAKEN 128
#define PIPE_READS 136
#define PIPE_RING 192
#define PIPE_RING_BYTES (1 << 20)
#define PIPE_PIECE_BYTES (64 << 10)
#define PIPE_RESERVED_BYTES (16 << 10)
#define PIPE_SMALL_BYTES 192
#define PIPE_AT_ONCE_BYTES (16 << 20)
#define PIPE_HEADER_BYTES 64
#define PIPE_INSIDE 1

/* One end of a pipe, and the eventcount of the other. */
typedef struct {
    char *memory, *board;
    size_t eventcount;
    gc_way way; /* how data is written */
} shm_pipe;

typedef struct {
    char *data;
    uint64_t total;
    int dtype; /* as in reduce.h, or the code of one that is only moved */
    uint32_t call; /* of the sender and of the receiver, which agree */
} message;

/* One of the two below. */
typedef uint64_t (*mover)(shm_pipe *m, message x, uint64_t done, uint64_t wait_ns);

/* Both below return after PIPE_AT_ONCE_BYTES: between two calls Python looks at deadlines and aborts,
 * and runs signal handlers. */

/* Posts what there is room for, from byte `sent` on; gives up when there is none and the receiver
 * has taken nothing for `patience_ns`. Returns how many bytes are sent. */
uint64_t pipe_push(shm_pipe *m, message x, uint64_t sent, uint64_t patience_ns);

/* Takes what has come, from byte `received` on; gives up when nothing has for `spin_ns`, or what
 * has is of another message or in a spill. Returns how many bytes are received. */
uint64_t pipe_pull(shm_pipe *m, message x, uint64_t received, uint64_t spin_ns);

#endif
