/* Bytes through a box between two ranks: the protocol of device_comm/shm/mailbox.py. */
#ifndef GC_MAILBOX_H
#define GC_MAILBOX_H

#include <stddef.h>
#include <stdint.h>

/* As in device_comm/shm/mailbox.py. A test compares the two. */
#define MAILBOX_POSTED 64
#define MAILBOX_TAKEN 128
#define MAILBOX_RING 192
#define MAILBOX_RING_BYTES (256 << 10)
#define MAILBOX_PIECE_BYTES (64 << 10)
#define MAILBOX_RESERVED_BYTES (16 << 10)
#define MAILBOX_SMALL_BYTES 192
#define MAILBOX_LETTER_BYTES 64
#define MAILBOX_INSIDE 1

/* One end of a box, and the doorbell of the other. */
typedef struct {
    char *box, *board;
    size_t doorbell;
} mailbox;

typedef struct {
    char *data;
    uint64_t total;
    int dtype; /* as in reduce.h, or the code of one that is only moved */
} message;

/* Posts what there is room for, from byte `sent` on; gives up when there is none and the receiver
 * has taken nothing for `patience_ns`. Returns how many bytes are sent. */
uint64_t mailbox_push(const mailbox *m, message x, uint64_t sent, uint64_t patience_ns);

/* Takes what has come, from byte `received` on; gives up when nothing has for `spin_ns`, or what
 * has is of another message or in a parcel. Returns how many bytes are received. */
uint64_t mailbox_pull(const mailbox *m, message x, uint64_t received, uint64_t spin_ns);

#endif
