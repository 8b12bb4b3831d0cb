/* Memory in cells of 16 bytes, the last one of a span perhaps not full.
 *
 * Cell i of a span belongs to the same thread on all ranks, whatever its address and wherever its
 * span lies: so who has written a cell of a staging is known to whoever reads it. */
#ifndef GC_CELLS_CUH
#define GC_CELLS_CUH

#include <group.cuh>

constexpr u64 CELL = sizeof(Vector);

/* The cells of one thread: among those of all blocks, or of its own block alone. */
struct Share {
    u64 first, step;
};

DEVICE Share share_of_grid() {
    return {static_cast<u64>(block()) * threads() + thread(),
            static_cast<u64>(blocks()) * threads()};
}

DEVICE Share share_of_block() { return {thread(), threads()}; }

DEVICE u64 least(u64 a, u64 b) { return a < b ? a : b; }

/* Whether an access of `size` bytes at this address, or a sum of addresses and sizes, is possible. */
DEVICE bool fits(u64 address, u64 size) { return address % size == 0; }

DEVICE u64 address_of(const void *pointer) { return reinterpret_cast<u64>(pointer); }

template <typename Unit>
DEVICE void copy_units(char *to, const char *from, u64 size) {
    for (u64 at = 0; at < size; at += sizeof(Unit))
        *reinterpret_cast<Unit *>(to + at) = *reinterpret_cast<const Unit *>(from + at);
}

/* A cell, or what there is of it, in the largest units possible. */
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

/* Several accesses are under way at a time: those of other devices take long. */
DEVICE void copy(char *to, const char *from, u64 size, Share share) {
    constexpr u32 BATCH = 4;
    bool aligned = fits(address_of(to) | address_of(from), CELL);
    u64 whole = aligned ? size / CELL : 0, i = share.first;
    for (; i + (BATCH - 1) * share.step < whole; i += BATCH * share.step) {
        Vector cells[BATCH];
        UNROLL for (u32 k = 0; k < BATCH; k++)
            cells[k] = reinterpret_cast<const Vector *>(from)[i + k * share.step];
        UNROLL for (u32 k = 0; k < BATCH; k++)
            reinterpret_cast<Vector *>(to)[i + k * share.step] = cells[k];
    }
    for (; i * CELL < size; i += share.step)
        copy_cell(to + i * CELL, from + i * CELL, least(size - i * CELL, CELL));
}

#endif
