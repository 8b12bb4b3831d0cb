/* Guarantees and assumptions are those of device_comm/shm/layout.py, whose rules are quoted by
 * number. */
#include "steps.h"

#include <string.h>

#include "atomics.h"
#include "reduce.h"
#include "stream.h"

/* steps_run returns after this many bytes: between its calls Python checks deadlines and aborts, and
 * runs signal handlers. */
#define AT_ONCE (16 << 20)

static uint64_t smaller(uint64_t a, uint64_t b) { return a < b ? a : b; }

static bool moved_enough(const steps *s) { return s->moved >= AT_ONCE; }

static char *slot(const steps *s, uint64_t step, size_t rank) {
    uint64_t index = step % BUFFERS * s->n + rank;
    return s->group + s->slots + index * (SLOT_HEADER + s->inside_bytes);
}

static bool in_rings(const steps *s) { return s->stride > s->inside_bytes; }

/* Returns the offset in each ring of the payload of a step of this plan, or of the next plan that
 * uses the rings. */
static uint64_t place_of(const steps *s, uint64_t step) {
    uint64_t index = step - s->first;
    if (index < s->straight) return s->place + index * s->stride;
    return (index - s->straight) % s->lap * s->stride;
}

static char *payload(const steps *s, uint64_t step, size_t rank) {
    if (!in_rings(s)) return slot(s, step, rank) + SLOT_HEADER;
    return s->group + s->rings + rank * s->ring_bytes + place_of(s, step);
}

static size_t done_word(size_t rank) { return RANK_LINES + rank * RANK_STRIDE + RANK_DONE; }

static bool arrived(const steps *s, uint64_t step, size_t rank) {
    return gc_load64(slot(s, step, rank), SLOT_ARRIVED) == step;
}

static void ring_others(const steps *s) {
    gc_fence();
    for (size_t rank = 0; rank < s->n; rank++)
        if (rank != s->rank) gc_notify_after_fence(s->board, s->eventcounts[rank]);
}

/* Rule 1: returns true if all other ranks are done with the slot that `step` overwrites. */
static bool may_write(steps *s, uint64_t step) {
    if (s->all_done + BUFFERS >= step) return true;
    uint64_t least = UINT64_MAX;
    for (size_t rank = 0; rank < s->n; rank++)
        if (rank != s->rank) least = smaller(least, gc_load64(s->group, done_word(rank)));
    s->all_done = least;
    return least + BUFFERS >= step;
}

/* Rule 2: the release store of `arrived` publishes payload and signature. */
static void publish(steps *s, uint64_t step, uint64_t chunk) {
    char *header = slot(s, step, s->rank);
    if (s->tried != WAYS)
        way_wrote(&s->way, s->tried, s->group + RANK_LINES + RANK_READS, RANK_STRIDE, s->n);
    uint32_t number = (uint32_t)chunk;
    memcpy(header + SLOT_SIGNATURE, s->plan.signature, SIGNATURE_BYTES);
    memcpy(header + SLOT_SIGNATURE + SIGNATURE_CHUNK, &number, sizeof number);
    stream_end();
    gc_store64(header, SLOT_ARRIVED, step);
    ring_others(s);
}

/* Rule 4: this rank reads nothing more of `step`. */
static void finish(steps *s, uint64_t step) {
    gc_store64(s->group, done_word(s->rank), step);
    ring_others(s);
}

static bool same_signature(const steps *s, uint64_t step, size_t rank) {
    const char *theirs = slot(s, step, rank) + SLOT_SIGNATURE;
    uint32_t chunk = (uint32_t)(step - s->first);
    return memcmp(theirs, s->plan.signature, SIGNATURE_COMPARED) == 0 &&
           memcmp(theirs + SIGNATURE_CHUNK, &chunk, sizeof chunk) == 0 &&
           memcmp(theirs + SIGNATURE_CALL, s->plan.signature + SIGNATURE_CALL, 4) == 0;
}

static steps_status block(steps *s, uint64_t step, bool at_gate) {
    s->blocked_step = step;
    s->at_gate = at_gate;
    return STEPS_BLOCKED;
}

/* Rule 3: all awaited ranks have arrived, and all arrived ranks have the same signature. */
static steps_status meet(steps *s, uint64_t step) {
    size_t others = 0;
    for (; s->met < s->n; s->met++) {
        if (s->met == s->rank) continue;
        if (!arrived(s, step, s->met)) {
            if (s->plan.awaits[s->met]) return block(s, step, false);
        } else if (!same_signature(s, step, s->met)) {
            block(s, step, false);
            return STEPS_DIVERGED;
        }
    }
    s->met = 0;
    if (step != s->first) return STEPS_DONE;
    for (size_t rank = 0; rank < s->n; rank++) others += s->plan.awaits[rank];
    /* A rank that has begun this operation is done with all steps before it. */
    if (others == s->n - 1 && s->all_done + 1 < step) s->all_done = step - 1;
    return STEPS_DONE;
}

static uint64_t part_of(uint64_t size, uint64_t begin, uint64_t piece) {
    return begin < size ? smaller(size - begin, piece) : 0;
}

/* Returns how the payloads of a step are timed (way.h), alike at all ranks. */
static way_kind tried(const steps *s, uint64_t step) { return way_tried(step, s->piece); }

static void put(steps *s, uint64_t chunk) {
    uint64_t step = s->first + chunk, begin = chunk * s->piece;
    char *to = payload(s, step, s->rank);
    s->tried = tried(s, step);
    for (size_t rank = 0; s->plan.puts && rank < (s->plan.addressed ? s->n : 1); rank++) {
        if (s->plan.addressed && rank == s->rank) continue;
        span give = s->plan.gives[rank];
        way_copy(&s->way, s->tried, to + rank * s->piece, give.address + begin,
                 part_of(give.size, begin, s->piece));
    }
    s->moved += s->stride;
    publish(s, step, chunk);
}

/* Returns the address of the piece of `rank` for this rank in a chunk. */
static const char *piece_from(const steps *s, uint64_t chunk, size_t rank) {
    if (rank == s->rank) return s->plan.own + chunk * s->piece;
    return payload(s, s->first + chunk, rank) + (s->plan.addressed ? s->rank * s->piece : 0);
}

static void deliver(const steps *s, char *to, const char *from, uint64_t size) {
    if (s->large)
        stream_copy(to, from, size);
    else
        memcpy(to, from, size);
}

/* Reduces `size` bytes of the parts into the output; at most SCRATCH_BYTES if the result is large.
 * Returns the address of the result where it is still cached: the scratch memory, or the output. */
static const char *reduce_parts(steps *s, char *output, uint64_t size) {
    char *reduced = s->large ? s->scratch : output;
    reduce(s->parts, s->n, s->plan.dtype, s->plan.op, size / reduce_itemsize(s->plan.dtype), reduced);
    if (s->large) stream_copy(output, reduced, size);
    return reduced;
}

static void take_reduced(steps *s, uint64_t chunk) {
    span whole = s->plan.takes[0];
    uint64_t begin = chunk * s->piece, size = part_of(whole.size, begin, s->piece);
    uint64_t most = s->large ? SCRATCH_BYTES : size;
    for (uint64_t at = 0; at < size; at += most) {
        for (size_t rank = 0; rank < s->n; rank++) s->parts[rank] = piece_from(s, chunk, rank) + at;
        reduce_parts(s, whole.address + begin + at, smaller(size - at, most));
    }
}

static void take_copied(steps *s, uint64_t chunk) {
    uint64_t begin = chunk * s->piece;
    for (size_t rank = 0; rank < s->n; rank++) {
        span whole = s->plan.takes[rank];
        uint64_t size = part_of(whole.size, begin, s->piece);
        if (size > 0) deliver(s, whole.address + begin, piece_from(s, chunk, rank), size);
    }
}

static char *own_words(const steps *s) {
    return s->group + RANK_LINES + s->rank * RANK_STRIDE + RANK_READS;
}

/* Fetches the other ranks' pieces for this rank, if the step is timed. */
static void fetch(steps *s, uint64_t chunk) {
    way_kind kind = tried(s, s->first + chunk);
    uint64_t begin = chunk * s->piece;
    if (kind == WAYS) return;
    for (size_t rank = 0; rank < s->n; rank++) {
        span whole = s->plan.takes[s->plan.kind == KIND_MOVE ? rank : 0];
        if (rank != s->rank)
            way_fetch(&s->way, piece_from(s, chunk, rank), part_of(whole.size, begin, s->piece));
    }
    way_fetched(&s->way, kind, own_words(s));
}

static void take(steps *s, uint64_t chunk) {
    fetch(s, chunk);
    if (s->plan.kind == KIND_REDUCE)
        take_reduced(s, chunk);
    else
        take_copied(s, chunk);
    s->moved += s->n * s->piece;
    finish(s, s->first + chunk);
}

/* Puts each chunk one step ahead of taking it, so that ranks need not run in lockstep. */
static steps_status run_exchange(steps *s) {
    while (s->taken < s->chunks) {
        if (s->put < s->chunks && s->put <= s->taken + 1 && may_write(s, s->first + s->put)) {
            if (moved_enough(s)) return block(s, s->first + s->put, true);
            put(s, s->put++);
            continue;
        }
        if (s->put == s->taken) return block(s, s->first + s->put, true);
        if (moved_enough(s)) return block(s, s->first + s->taken, false);
        steps_status status = meet(s, s->first + s->taken);
        if (status != STEPS_DONE) return status;
        take(s, s->taken++);
    }
    return STEPS_DONE;
}

typedef struct {
    uint64_t begin, size;
} range;

/* Returns the part of a chunk of an all-reduce that `rank` reduces, within the whole. */
static range part_of_chunk(const steps *s, uint64_t chunk, size_t rank) {
    uint64_t most = s->piece * s->n, begin = chunk * most;
    uint64_t size = part_of(s->plan.length, begin, most);
    uint64_t share = (size + s->n * PIECE_ALIGN - 1) / (s->n * PIECE_ALIGN) * PIECE_ALIGN;
    return (range){.begin = begin + rank * share, .size = part_of(size, rank * share, share)};
}

static void put_parts(steps *s, uint64_t chunk) {
    char *to = payload(s, s->first + chunk, s->rank);
    for (size_t rank = 0; rank < s->n; rank++) {
        range part = part_of_chunk(s, chunk, rank);
        if (rank != s->rank)
            way_copy(&s->way, s->tried, to + rank * s->piece, s->plan.own + part.begin, part.size);
    }
}

static void fetch_parts(steps *s, uint64_t chunk, uint64_t size) {
    way_kind kind = tried(s, s->first + chunk);
    if (kind == WAYS) return;
    for (size_t rank = 0; rank < s->n; rank++)
        if (rank != s->rank)
            way_fetch(&s->way, payload(s, s->first + chunk, rank) + s->rank * s->piece, size);
    way_fetched(&s->way, kind, own_words(s));
}

/* Reduces this rank's part into the output, and into the next step's payload. */
static void reduce_part(steps *s, uint64_t chunk) {
    range part = part_of_chunk(s, chunk, s->rank);
    size_t place = s->rank * s->piece;
    char *shared = payload(s, s->first + chunk + 1, s->rank) + place;
    fetch_parts(s, chunk, part.size);
    for (uint64_t at = 0; at < part.size; at += SCRATCH_BYTES) {
        uint64_t size = smaller(part.size - at, SCRATCH_BYTES);
        for (size_t rank = 0; rank < s->n; rank++)
            s->parts[rank] = payload(s, s->first + chunk, rank) + place + at;
        s->parts[s->rank] = s->plan.own + part.begin + at;
        way_copy(&s->way, s->tried, shared + at,
                 reduce_parts(s, s->plan.takes[0].address + part.begin + at, size), size);
    }
}

static void collect_parts(steps *s, uint64_t chunk) {
    for (size_t rank = 0; rank < s->n; rank++) {
        range part = part_of_chunk(s, chunk, rank);
        if (rank != s->rank)
            deliver(s, s->plan.takes[0].address + part.begin,
                    payload(s, s->first + chunk + 1, rank) + rank * s->piece, part.size);
    }
}

/* In step i, a rank puts its parts of chunk i, reduces its own part of chunk i - 1, and collects the
 * reduced parts of chunk i - 2. The last step puts no new parts. */
static steps_status run_all_reduce(steps *s) {
    for (; s->put <= s->chunks + 1; s->put++, s->taken = 0) {
        uint64_t i = s->put, step = s->first + i;
        if (i > 0 && s->taken == 0) {
            if (moved_enough(s)) return block(s, step - 1, false);
            steps_status status = meet(s, step - 1);
            if (status != STEPS_DONE) return status;
            s->taken = 1; /* met: the rest of this step waits for no arrival */
        }
        if (i <= s->chunks) {
            if (!may_write(s, step)) return block(s, step, true);
            s->tried = tried(s, step);
            if (i < s->chunks) put_parts(s, i);
            if (i > 0) reduce_part(s, i - 1);
            publish(s, step, i);
        }
        if (i > 1) collect_parts(s, i - 2);
        if (i > 0) finish(s, step - 1);
        s->moved += 2 * s->stride;
    }
    return STEPS_DONE;
}

/* Results of this size or more are written past the caches: a plain store would first read the old
 * content of the line. In place, that was read anyway. */
#define LARGE_BYTES (8 << 20)

static bool is_large(const steps *s) {
    uint64_t size = 0;
    for (size_t rank = 0; rank < s->n; rank++) size += s->plan.takes[rank].size;
    bool in_place = s->plan.kind != KIND_MOVE && s->plan.takes[0].address == s->plan.own;
    return size >= LARGE_BYTES && !in_place;
}

static steps_status run(steps *s) {
    s->large = is_large(s);
    return s->plan.kind == KIND_ALL_REDUCE ? run_all_reduce(s) : run_exchange(s);
}

static bool unblocked(steps *s) {
    return s->at_gate ? may_write(s, s->blocked_step) : arrived(s, s->blocked_step, s->met);
}

/* Sets the bytes of a step: room for the longest piece, or step_bytes for KIND_ALL_REDUCE. */
static void cut(steps *s) {
    bool shared_out = s->plan.kind == KIND_ALL_REDUCE;
    uint64_t pieces = shared_out || s->plan.addressed ? s->n : 1;
    uint64_t longest = (s->plan.length + PIECE_ALIGN - 1) / PIECE_ALIGN * PIECE_ALIGN;
    uint64_t most = s->step_bytes / pieces / PIECE_ALIGN * PIECE_ALIGN;
    s->piece = shared_out ? most : smaller(most, longest);
    s->stride = pieces * s->piece;
    uint64_t chunk = shared_out ? s->stride : s->piece;
    s->chunks = chunk == 0 ? 1 : (s->plan.length + chunk - 1) / chunk;
}

void steps_begin(steps *s) {
    if (in_rings(s)) s->place = place_of(s, s->begun + 1);
    cut(s);
    s->first = s->begun + 1;
    if (in_rings(s)) {
        uint64_t last = s->ring_bytes - s->step_bytes;
        s->straight = (last - s->place) / s->stride + 1;
        s->lap = last / s->stride + 1;
    }
    s->begun += s->chunks + (s->plan.kind == KIND_ALL_REDUCE ? 1 : 0);
    s->put = s->taken = s->met = 0;
    if (s->plan.kind != KIND_ALL_REDUCE && may_write(s, s->first)) put(s, s->put++);
}

steps_status steps_run(steps *s, uint64_t spin_ns) {
    s->moved = 0;
    steps_status status = run(s);
    if (status != STEPS_BLOCKED || spin_ns == 0) return status;
    gc_spin spin = gc_spin_for(spin_ns, s->oversubscribed);
    do {
        if (!unblocked(s)) continue;
        status = run(s);
        if (status != STEPS_BLOCKED) return status;
        spin = gc_spin_for(spin_ns, s->oversubscribed);
    } while (!moved_enough(s) && gc_spin_again(&spin));
    return STEPS_BLOCKED;
}

steps_status steps_run_briefly(steps *s) {
    s->moved = 0;
    steps_status status = run(s);
    int looks = s->oversubscribed ? 0 : GC_PAUSES;
    for (int look = 0; status == STEPS_BLOCKED && look < looks; look++) {
        if (unblocked(s))
            status = run(s);
        else
            gc_relax();
    }
    return status;
}

bool steps_ready(steps *s) {
    if (s->at_gate) return may_write(s, s->blocked_step);
    bool all = true;
    for (size_t rank = 0; rank < s->n; rank++) {
        if (rank == s->rank) continue;
        if (!arrived(s, s->blocked_step, rank))
            all = all && !s->plan.awaits[rank];
        else if (!same_signature(s, s->blocked_step, rank))
            return true;
    }
    return all;
}

bool steps_waits_for(const steps *s, size_t rank) {
    if (rank == s->rank) return false;
    if (s->at_gate) return gc_load64(s->group, done_word(rank)) + BUFFERS < s->blocked_step;
    return s->plan.awaits[rank] && !arrived(s, s->blocked_step, rank);
}

size_t steps_divergent(const steps *s, const unsigned char **signature) {
    for (size_t rank = 0; rank < s->n && !s->at_gate; rank++) {
        if (rank == s->rank || !arrived(s, s->blocked_step, rank)) continue;
        if (same_signature(s, s->blocked_step, rank)) continue;
        *signature = (const unsigned char *)slot(s, s->blocked_step, rank) + SLOT_SIGNATURE;
        return rank;
    }
    return s->n;
}
