/* Memory in cells of 16 bytes; the last cell of a span may be partial.
 *
 * Cell i of a span belongs to the same thread on all ranks, for any address. So the reader of a
 * staging cell can derive its writer. */
#ifndef GC_CELLS_CUH
#define GC_CELLS_CUH

#include <group.cuh>

constexpr u64 CELL = sizeof(Vector);

/* The cells of one thread: of the whole grid's cells, or of its block's. */
struct Share {
    u64 first, step;
};

DEVICE Share share_of_grid() {
    return {static_cast<u64>(block()) * threads() + thread(),
            static_cast<u64>(blocks()) * threads()};
}

DEVICE Share share_of_block() { return {thread(), threads()}; }

DEVICE u64 least(u64 a, u64 b) { return a < b ? a : b; }

/* True if an access of `size` bytes is aligned; for or-ed addresses, at each of them. */
DEVICE bool fits(u64 address, u64 size) { return address % size == 0; }

DEVICE u64 address_of(const void *pointer) { return reinterpret_cast<u64>(pointer); }

struct Copy {
    char *to;
    const char *from;
    u64 size;
};

template <typename Unit>
DEVICE void copy_units(char *to, const char *from, u64 size) {
    ROLLED for (u64 at = 0; at < size; at += sizeof(Unit))
        *reinterpret_cast<Unit *>(to + at) = *reinterpret_cast<const Unit *>(from + at);
}

/* Copies a full or partial cell in the largest possible units. */
DEVICE void copy_cell(char *to, const char *from, u64 size) {
    u64 all = address_of(to) | address_of(from) | size;
    if (fits(all, sizeof(Vector)))
        copy_units<Vector>(to, from, size);
    else if (fits(all, sizeof(u64)))
        copy_units<u64>(to, from, size);
    else if (fits(all, sizeof(u32)))
        copy_units<u32>(to, from, size);
    else if (fits(all, sizeof(u16)))
        copy_units<u16>(to, from, size);
    else
        copy_units<char>(to, from, size);
}

DEVICE bool is_aligned(const Copy &c) { return fits(address_of(c.to) | address_of(c.from), CELL); }

DEVICE bool has_whole_cell(const Copy &c, u64 at) { return is_aligned(c) && at + CELL <= c.size; }

/* Batches accesses, to hide the latency of other devices. */
DEVICE void copy(const Copy &c, Share share) {
    constexpr u32 BATCH = 4;
    u64 whole = is_aligned(c) ? c.size / CELL : 0, i = share.first;
    for (; i + (BATCH - 1) * share.step < whole; i += BATCH * share.step) {
        Vector cells[BATCH];
        UNROLL for (u32 k = 0; k < BATCH; k++)
            cells[k] = reinterpret_cast<const Vector *>(c.from)[i + k * share.step];
        UNROLL for (u32 k = 0; k < BATCH; k++)
            reinterpret_cast<Vector *>(c.to)[i + k * share.step] = cells[k];
    }
    ROLLED for (; i * CELL < c.size; i += share.step)
        copy_cell(c.to + i * CELL, c.from + i * CELL, least(c.size - i * CELL, CELL));
}

/* Copies get(0) to get(count - 1) in order, or all at once if no thread has more than one cell of
 * each. */
template <typename Get>
DEVICE void copy_all(u32 count, Share share, Get get) {
    u64 longest = 0;
    ROLLED for (u32 k = 0; k < count; k++)
        if (get(k).size > longest) longest = get(k).size;
    if (longest > share.step * CELL) {
        ROLLED for (u32 k = 0; k < count; k++) copy(get(k), share);
        return;
    }
    const u64 at = share.first * CELL;
    Vector cells[MAX_RANKS];
    UNROLL for (u32 k = 0; k < MAX_RANKS; k++)
        if (k < count && has_whole_cell(get(k), at))
            cells[k] = *reinterpret_cast<const Vector *>(get(k).from + at);
    UNROLL for (u32 k = 0; k < MAX_RANKS; k++)
        if (k < count && has_whole_cell(get(k), at))
            *reinterpret_cast<Vector *>(get(k).to + at) = cells[k];
    ROLLED for (u32 k = 0; k < count; k++) {
        const Copy c = get(k);
        if (at < c.size && !has_whole_cell(c, at))
            copy_cell(c.to + at, c.from + at, least(c.size - at, CELL));
    }
}

/* Fills the results of a failed operation with bytes that are NaN in all float types, so that wrong
 * results are visible. */
RARELY void poison(const Job &job, Share share) {
    ROLLED for (u32 r = 0; r < MAX_RANKS; r++)
        ROLLED for (u64 cell = share.first; cell * CELL < job.takes[r].size; cell += share.step)
            ROLLED for (u64 at = cell * CELL; at < least((cell + 1) * CELL, job.takes[r].size); at++)
                job.takes[r].address[at] = static_cast<char>(0xff);
}

#endif
