/* Copies bytes through a channel between two ranks: the protocol of device_comm/shm/channel.py. */
#ifndef GC_PIPE_H
#define GC_PIPE_H

#include <stddef.h>
#include <stdint.h>

#include "way.h"

/* As in device_comm/shm/channel.py; a test compares both. */
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

/* One end of a channel, and the eventcount of the other. */
typedef struct {
    char *memory, *board;
    size_t eventcount;
    gc_way way; /* how data is written */
} shm_pipe;

typedef struct {
    char *data;
    uint64_t total;
    int dtype; /* as in reduce.h, or the code of a dtype that is not reduced */
    uint32_t call; /* call number; sender's and receiver's must be equal */
} message;

/* pipe_push or pipe_pull. Both return after PIPE_AT_ONCE_BYTES: between two calls Python checks
 * deadlines and aborts, and runs signal handlers. */
typedef uint64_t (*mover)(shm_pipe *m, message x, uint64_t done, uint64_t wait_ns);

/* Posts chunks from byte `sent` on, until the receiver has freed no room for `patience_ns`. Returns
 * the number of bytes sent so far. */
uint64_t pipe_push(shm_pipe *m, message x, uint64_t sent, uint64_t patience_ns);

/* Takes chunks from byte `received` on, until none has arrived for `spin_ns`, or the next one belongs
 * to another message or lies in an overflow buffer. Returns the number of bytes received so far. */
uint64_t pipe_pull(shm_pipe *m, message x, uint64_t received, uint64_t spin_ns);

#endif
