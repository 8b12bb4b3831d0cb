/* Collectives with a barrier, after which ranks read each other's data.
 *
 * The kernel copies data to a staging first; or, with a table, peers read the source directly, and
 * the kernel ends after their last read.
 *
 *   move         takes[r] = rank r's data at `offset`
 *   reduce       takes[0] = the reduction of all ranks' data at `offset`
 *   all_reduce   puts[r] and takes[r] are part r of the tensor. Each rank reduces its own part, at
 *                `offset`; after another barrier all read the other parts.
 *
 * In a staging, puts[r] is at r * piece. Sizes are equal on all ranks, if not 0. */
#ifndef GC_STAGED_CUH
#define GC_STAGED_CUH

#include <meeting.cuh>
#include <numbers.cuh>

DEVICE void stage(const Job &job, const Meeting &meeting) {
    if (job.table || !meeting.begins()) return;
    char *staging = meeting.staging(job.group.rank);
    copy_all(MAX_RANKS, share_of_grid(), [&](u32 r) -> Copy {
        return {staging + r * job.piece, job.puts[r].address, job.puts[r].size};
    });
}

DEVICE const char *source(const Job &job, const Meeting &meeting, u32 rank) {
    return (job.table ? job.table[rank] : meeting.staging(rank)) + job.offset;
}

/* The k-th rank after this one: ranks begin with different peers, to balance the links. */
DEVICE u32 rank_after(const Group &group, u32 k) {
    u32 rank = group.rank + k;
    return rank < group.world_size ? rank : rank - group.world_size;
}

/* Reduces into `to`, and for peers into `shared` unless that is null. In place is allowed: a cell is
 * read from all ranks before it is written.
 *
 * A thread issues up to MAX_RANKS loads, to hide the latency of other devices: of WIDTH ranks, for
 * each of several cells. */
template <typename Number, u32 WIDTH>
DEVICE u64 reduce_whole_cells(const Job &job, const Meeting &meeting, Span to, char *shared) {
    constexpr u32 CELLS = MAX_RANKS / WIDTH;
    const u32 n = job.group.world_size;
    const Share share = share_of_grid();
    const char *sources[WIDTH];
    u64 all = address_of(to.address);
    UNROLL for (u32 r = 0; r < WIDTH; r++) {
        sources[r] = source(job, meeting, r < n ? r : 0);
        all |= address_of(sources[r]);
    }
    const u64 whole = fits(all, CELL) ? to.size / CELL : 0;
    u64 i = share.first;
    while (i < whole) {
        Vector cells[CELLS][WIDTH];
        UNROLL for (u32 c = 0; c < CELLS; c++)
            UNROLL for (u32 r = 0; r < WIDTH; r++)
                if (r < n && i + c * share.step < whole)
                    cells[c][r] =
                        *reinterpret_cast<const Vector *>(sources[r] + (i + c * share.step) * CELL);
        UNROLL for (u32 c = 0; c < CELLS; c++) {
            if (i >= whole) break;
            Total<Number> total(cells[c][0]);
            UNROLL for (u32 r = 1; r < WIDTH; r++)
                if (r < n) total.add(job.op, cells[c][r]);
            const Vector result = total.result(job.op, n);
            *reinterpret_cast<Vector *>(to.address + i * CELL) = result;
            if (shared) *reinterpret_cast<Vector *>(shared + i * CELL) = result;
            i += share.step;
        }
    }
    return i;
}

template <typename Number>
DEVICE void reduce_cells(const Job &job, const Meeting &meeting, Span to, char *shared) {
    const u32 n = job.group.world_size;
    u64 i = n <= 2   ? reduce_whole_cells<Number, 2>(job, meeting, to, shared)
            : n <= 4 ? reduce_whole_cells<Number, 4>(job, meeting, to, shared)
                     : reduce_whole_cells<Number, MAX_RANKS>(job, meeting, to, shared);
    const u64 step = share_of_grid().step;
    ROLLED for (; i * CELL < to.size; i += step) {
        const u64 at = i * CELL, size = least(to.size - at, CELL);
        Total<Number> total(load_cell<Number>(source(job, meeting, 0) + at, size));
        ROLLED for (u32 r = 1; r < n; r++)
            total.add(job.op, load_cell<Number>(source(job, meeting, r) + at, size));
        const Vector result = total.result(job.op, n);
        store_cell<Number>(to.address + at, result, size);
        if (shared) store_cell<Number>(shared + at, result, size);
    }
}

DEVICE void move(const Job &job) {
    if (is_idle(job.group)) return;
    Meeting meeting(job.group);
    stage(job, meeting);
    bool whole = meeting.meet(PHASE_START, !job.table);
    if (whole) {
        copy_all(job.group.world_size, share_of_grid(), [&](u32 k) -> Copy {
            u32 r = rank_after(job.group, k + 1);
            return {job.takes[r].address, source(job, meeting, r), job.takes[r].size};
        });
        if (job.table) whole = meeting.meet(PHASE_END);
    }
    if (!whole) poison(job, share_of_grid());
    meeting.finish();
}

template <typename Number>
DEVICE void reduce(const Job &job) {
    if (is_idle(job.group)) return;
    Meeting meeting(job.group);
    stage(job, meeting);
    bool whole = meeting.meet(PHASE_START, !job.table);
    if (whole) {
        reduce_cells<Number>(job, meeting, job.takes[0], nullptr);
        if (job.table) whole = meeting.meet(PHASE_END);
    }
    if (!whole) poison(job, share_of_grid());
    meeting.finish();
}

/* Only this rank reads its part of its own staging, so the result is written there. A source in a
 * table needs no final barrier: no peer reads it after the second barrier. */
template <typename Number>
DEVICE void all_reduce(const Job &job) {
    if (is_idle(job.group)) return;
    const u32 rank = job.group.rank;
    Meeting meeting(job.group);
    stage(job, meeting);
    bool whole = meeting.meet(PHASE_START, !job.table);
    if (whole) {
        char *shared = meeting.staging(rank) + rank * job.piece;
        reduce_cells<Number>(job, meeting, job.takes[rank], shared);
        whole = meeting.meet(PHASE_END);
        if (whole)
            copy_all(job.group.world_size - 1, share_of_grid(), [&](u32 k) -> Copy {
                u32 r = rank_after(job.group, k + 1);
                const char *part = meeting.staging(r) + r * job.piece;
                return {job.takes[r].address, part, job.takes[r].size};
            });
    }
    if (!whole) poison(job, share_of_grid());
    meeting.finish();
}

#endif
