/* All-reduce by packets, fused with the residual and the RMS norm of each row.
 *
 *   takes[1] = puts[1] + the sum of all puts[0], the new residual
 *   takes[0] = the rows of takes[1] over the roots of their mean squares, times the row puts[2]
 *
 * takes[1] may be puts[1], and takes[0] may be puts[0]. A row has whole cells and one block, whose
 * threads synchronise for the sum of its squares. All ranks add in the same order, so results are
 * bitwise equal. The norm reads the residual after rounding, so both results equal those of two
 * kernels. */
#ifndef GC_NORM_CUH
#define GC_NORM_CUH

#include <packets.cuh>

constexpr u32 FEW = 32;

struct Sums {
    float of_threads[MAX_THREADS];
    float few[FEW];
};

/* Returns the sum over the block's threads, which have synchronised after their writes. */
DEVICE float total_of_block(Sums &sums) {
    if (thread() < FEW) {
        float sum = 0;
        for (u32 t = thread(); t < threads(); t += FEW) sum = sum_of(sum, sums.of_threads[t]);
        sums.few[thread()] = sum;
    }
    sync_block();
    const u32 count = threads() < FEW ? threads() : FEW;
    float total = 0;
    for (u32 k = 0; k < count; k++) total = sum_of(total, sums.few[k]);
    return total;
}

template <typename Number>
DEVICE void all_reduce_norm(const Job &job) {
    const Group &group = job.group;
    if (is_idle(group)) return;
    SHARED(Sums, sums);
    Packets packets(group);
    const Span from = job.puts[0], weight = job.puts[2];
    const char *residual = job.puts[1].address;
    char *to = job.takes[0].address, *kept = job.takes[1].address;
    const u64 row_cells = weight.size / CELL, rows = from.size / weight.size;
    const float row_numbers = static_cast<float>(weight.size / sizeof(typename Number::Bits));
    for (u64 row = block(); row < rows; row += blocks()) {
        const u64 begin = row * row_cells;
        push_cells<Number>(group, packets, from, begin + row_cells,
                           {begin + thread(), threads()});
    }
    packets.wipe(from.size);
    for (u64 row = block(); row < rows; row += blocks()) {
        const u64 begin = row * row_cells, end = begin + row_cells;
        float squares = 0;
        bool whole = true;
        for (u64 cell = begin + thread(); whole && cell < end; cell += threads()) {
            const u64 at = cell * CELL;
            const Vector own = load_cell<Number>(from.address + at, CELL);
            Total<Number> total(own);
            whole = pull_total(job, packets, cell, own, total);
            total.add(OP_SUM, load_cell<Number>(residual + at, CELL));
            const Vector sum = total.result(OP_SUM, group.world_size);
            if (whole) store_cell<Number>(kept + at, sum, CELL);
            squares = Total<Number>(sum).add_squares(squares);
        }
        sums.of_threads[thread()] = squares;
        if (!all_of_block(whole)) {
            poison(job, share_of_block());
            break;
        }
        const float mean = quotient_of(total_of_block(sums), row_numbers);
        const float factor = quotient_of(1, root_of(sum_of(mean, job.epsilon)));
        for (u64 cell = begin + thread(); cell < end; cell += threads()) {
            const u64 at = cell * CELL;
            Total<Number> normed(load_cell<Number>(kept + at, CELL));
            normed.scale(factor);
            normed.add(OP_PRODUCT, load_cell<Number>(weight.address + (at - begin * CELL), CELL));
            store_cell<Number>(to + at, normed.result(OP_SUM, group.world_size), CELL);
        }
    }
    packets.finish();
}

#endif
