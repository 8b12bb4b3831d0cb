#include "pipe.h"

#include <string.h>

#include "atomics.h"
#include "stream.h"

/* The receiver copies messages of this size or more past the caches; smaller ones are still cached
 * when the caller reads them. */
#define LARGE_BYTES (32 << 20)

typedef struct {
    uint8_t kind, dtype, kept, unused;
    uint32_t fd;
    uint64_t total, offset, used;
    uint8_t spill[24];
    uint32_t call, rest;
} chunk;

typedef void (*copier)(void *to, const void *from, size_t size);

static void plain_copy(void *to, const void *from, size_t size) { memcpy(to, from, size); }

static uint64_t smaller(uint64_t a, uint64_t b) { return a < b ? a : b; }

static uint64_t size_of_chunk(uint64_t used) {
    uint64_t lines = (used + PIPE_HEADER_BYTES - 1) / PIPE_HEADER_BYTES;
    return PIPE_HEADER_BYTES + lines * PIPE_HEADER_BYTES;
}

static char *at(const shm_pipe *m, uint64_t position) {
    return m->memory + PIPE_RING + position % PIPE_RING_BYTES;
}

/* Returns the bytes from `position` to the wrap of the ring. */
static uint64_t before_end(uint64_t position) {
    return PIPE_RING_BYTES - position % PIPE_RING_BYTES;
}

static void ring(const shm_pipe *m) {
    gc_fence();
    gc_notify_after_fence(m->board, m->eventcount);
}

/* Returns how the chunk at `position` is timed (way.h), alike at both ends. */
static way_kind tried(uint64_t position, uint64_t used) {
    return way_tried(position / PIPE_HEADER_BYTES, used);
}

static void write_chunk(shm_pipe *m, uint64_t posted, const message *x, uint64_t sent,
                         uint64_t used) {
    chunk said = {.kind = PIPE_INSIDE,
                   .dtype = (uint8_t)x->dtype,
                   .total = x->total,
                   .offset = sent,
                   .used = used,
                   .call = x->call};
    uint64_t data = posted + PIPE_HEADER_BYTES, first = smaller(used, before_end(data));
    way_kind kind = tried(posted, used);
    memcpy(at(m, posted), &said, sizeof said);
    way_copy(&m->way, kind, at(m, data), x->data + sent, first);
    way_copy(&m->way, kind, at(m, data + first), x->data + sent + first, used - first);
    if (kind != WAYS) way_wrote(&m->way, kind, m->memory + PIPE_READS, 0, 1);
    stream_end();
}

uint64_t pipe_push(shm_pipe *m, message x, uint64_t sent, uint64_t patience_ns) {
    uint64_t posted = gc_load64(m->memory, PIPE_POSTED), taken = gc_load64(m->memory, PIPE_TAKEN);
    uint64_t until = smaller(x.total, sent + PIPE_AT_ONCE_BYTES);
    gc_spin spin = gc_spin_for(patience_ns, false);
    while (sent < until) {
        uint64_t left = x.total - sent, used = smaller(left, PIPE_PIECE_BYTES);
        uint64_t reserved = left <= PIPE_SMALL_BYTES ? 0 : PIPE_RESERVED_BYTES;
        if (PIPE_RING_BYTES - (posted - taken) < size_of_chunk(used) + reserved) {
            uint64_t before = taken;
            taken = gc_load64(m->memory, PIPE_TAKEN);
            if (taken != before)
                spin = gc_spin_for(patience_ns, false);
            else if (!gc_spin_again(&spin))
                break;
            continue;
        }
        write_chunk(m, posted, &x, sent, used);
        posted += size_of_chunk(used);
        sent += used;
        gc_store64(m->memory, PIPE_POSTED, posted);
        ring(m);
    }
    return sent;
}

/* Returns the bytes in the chunk at `taken`; 0 if it does not continue the message inside the ring. */
static uint64_t read_chunk(const shm_pipe *m, uint64_t taken, const message *x, uint64_t received) {
    chunk said;
    memcpy(&said, at(m, taken), sizeof said);
    bool next = said.kind == PIPE_INSIDE && said.dtype == x->dtype && said.total == x->total &&
                said.call == x->call && said.offset == received &&
                said.used <= x->total - received;
    return next ? said.used : 0;
}

uint64_t pipe_pull(shm_pipe *m, message x, uint64_t received, uint64_t spin_ns) {
    uint64_t taken = gc_load64(m->memory, PIPE_TAKEN), posted = taken;
    copier copy = x.total >= LARGE_BYTES ? stream_copy : plain_copy;
    uint64_t until = smaller(x.total, received + PIPE_AT_ONCE_BYTES);
    gc_spin spin = gc_spin_for(spin_ns, false);
    while (received < until) {
        if (taken == posted) {
            posted = gc_load64(m->memory, PIPE_POSTED);
            if (taken != posted)
                spin = gc_spin_for(spin_ns, false);
            else if (!gc_spin_again(&spin))
                break;
            continue;
        }
        uint64_t used = read_chunk(m, taken, &x, received);
        if (used == 0) break;
        uint64_t data = taken + PIPE_HEADER_BYTES, first = smaller(used, before_end(data));
        way_kind kind = tried(taken, used);
        if (kind != WAYS) {
            way_fetch(&m->way, at(m, data), first);
            way_fetch(&m->way, at(m, data + first), used - first);
            way_fetched(&m->way, kind, m->memory + PIPE_READS);
        }
        copy(x.data + received, at(m, data), first);
        copy(x.data + received + first, at(m, data + first), used - first);
        taken += size_of_chunk(used);
        received += used;
        gc_store64(m->memory, PIPE_TAKEN, taken);
        ring(m);
    }
    stream_end();
    return received;
}
