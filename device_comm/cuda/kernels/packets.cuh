/* All-reduce of small tensors, as NCCL's LL protocol: every rank stores its numbers in the regions
 * of all others, 4 data bytes and 4 bytes of the epoch per 8-byte word, and waits for words of this
 * epoch. There is no barrier.
 *
 * A cell becomes two vectors in two planes: the first halves of all cells, then the second halves.
 * So simultaneous stores of a warp are adjacent, and fill whole sectors.
 *
 * Guarantees
 *   1. A word is written and read atomically, so its data belongs to its epoch.
 *   2. Epochs alternate between two areas. A rank writes that of epoch e after it has received the
 *      packets of epoch e - 1 of every rank. Each rank had then finished its kernel of epoch e - 2,
 *      the last reader of this area.
 *   3. A word holds the low 32 bits of the epoch. Stale words of a larger message would match 2^32
 *      epochs later, so each kernel wipes one cell that it does not use.
 *
 * Kernels of one rank run one after the other. That orders the load of a word before the stores that
 * permit a peer to overwrite it. */
#ifndef GC_PACKETS_CUH
#define GC_PACKETS_CUH

#include <numbers.cuh>
#include <patience.cuh>

constexpr u32 AT_A_TIME = 4; /* more would spill registers */

/* A cell with epochs. */
struct Packed {
    Vector first, second;
};

class Packets {
  public:
    DEVICE explicit Packets(const Group &group)
        : group_(group),
          epoch_(own64(group, REGION_PACKET_EPOCH).load(memory_order_relaxed) + 1),
          /* Not 0, with which regions are filled. */
          tag_(static_cast<u32>(epoch_) ? static_cast<u32>(epoch_) : 1u << 31) {}

    DEVICE void push(u32 to, u64 cell, Vector data) const {
        store(to, group_.rank, cell, {tagged(data.low), tagged(data.high)});
    }

    /* Waits for a cell of AT_A_TIME ranks from `first` on, polled together; this rank's is `own`.
     * Returns false on a timeout or an abort. */
    DEVICE bool pull(u64 cell, u32 first, Vector own, Vector (&data)[AT_A_TIME]) const {
        Patience patience;
        Packed cells[AT_A_TIME];
        for (;;) {
            UNROLL for (u32 k = 0; k < AT_A_TIME; k++)
                if (is_peer(first + k)) cells[k] = load(first + k, cell);
            u32 missing = MAX_RANKS;
            UNROLL for (u32 k = 0; k < AT_A_TIME; k++)
                if (is_peer(first + k) && !is_tagged(cells[k])) missing = first + k;
            if (missing == MAX_RANKS) break;
            if (!patience.lasts(group_, {missing, PHASE_PACKET, epoch_})) return false;
        }
        UNROLL for (u32 k = 0; k < AT_A_TIME; k++) {
            data[k].low = is_peer(first + k) ? untagged(cells[k].first) : own.low;
            data[k].high = is_peer(first + k) ? untagged(cells[k].second) : own.high;
        }
        return true;
    }

    /* The epochs of one area wipe its cells round-robin. */
    DEVICE void wipe(u64 used_bytes) const {
        if (block() != 0) return;
        for (u32 r = thread(); r < group_.world_size; r += threads()) {
            u32 cells = static_cast<u32>(group_.packet_bytes / CELL);
            u64 cell = static_cast<u32>(epoch_ >> 1) % cells;
            if (cell * CELL < used_bytes) return;
            store(group_.rank, r, cell, {});
        }
    }

    DEVICE void finish() const { finish_epoch(group_, REGION_PACKET_EPOCH, epoch_); }

  private:
    const Group &group_;
    u64 epoch_;
    u32 tag_;

    DEVICE bool is_peer(u32 rank) const {
        return rank < group_.world_size && rank != group_.rank;
    }

    /* The address of a cell's first half; the second half is in the next plane. */
    DEVICE char *place(u32 at, u32 from, u64 cell) const {
        u64 area = (epoch_ & 1) * group_.world_size + from;
        return group_.regions[at] + group_.packets + area * 2 * group_.packet_bytes + cell * CELL;
    }

    DEVICE void store(u32 at, u32 from, u64 cell, Packed packed) const {
        char *first = place(at, from, cell);
        store_relaxed(first, packed.first);
        store_relaxed(first + group_.packet_bytes, packed.second);
    }

    DEVICE Packed load(u32 from, u64 cell) const {
        const char *first = place(group_.rank, from, cell);
        return {load_relaxed(first), load_relaxed(first + group_.packet_bytes)};
    }

    DEVICE Vector tagged(u64 data) const {
        u64 tag = static_cast<u64>(tag_) << 32;
        return {tag | static_cast<u32>(data), tag | data >> 32};
    }

    DEVICE static u64 untagged(Vector words) {
        return static_cast<u32>(words.low) | words.high << 32;
    }

    DEVICE bool is_tagged(Packed packed) const {
        return packed.first.low >> 32 == tag_ && packed.first.high >> 32 == tag_ &&
               packed.second.low >> 32 == tag_ && packed.second.high >> 32 == tag_;
    }
};

/* Pushes this thread's cells of `from`, up to `end`, to all other ranks. */
template <typename Number>
DEVICE void push_cells(const Group &group, const Packets &packets, Span from, u64 end, Share share) {
    for (u64 cell = share.first; cell < end; cell += share.step) {
        u64 at = cell * CELL;
        Vector own = load_cell<Number>(from.address + at, least(from.size - at, CELL));
        for (u32 r = 0; r < group.world_size; r++)
            if (r != group.rank) packets.push(r, cell, own);
    }
}

/* Reduces a cell over all ranks; this rank's is `own`. Returns false on a timeout or an abort. */
template <typename Number>
DEVICE bool pull_total(const Job &job, const Packets &packets, u64 cell, Vector own,
                       Total<Number> &total) {
    const u32 ranks = job.group.world_size;
    ROLLED for (u32 first = 0; first < ranks; first += AT_A_TIME) {
        Vector cells[AT_A_TIME];
        if (!packets.pull(cell, first, own, cells)) return false;
        if (first == 0)
            total = Total<Number>(cells[0]);
        else
            total.add(job.op, cells[0]);
        UNROLL for (u32 k = 1; k < AT_A_TIME; k++)
            if (first + k < ranks) total.add(job.op, cells[k]);
    }
    return true;
}

/* takes[0] = the reduction of all puts[0]; in place if they are equal. */
template <typename Number>
DEVICE void all_reduce_packets(const Job &job) {
    const Group &group = job.group;
    if (is_idle(group)) return;
    Packets packets(group);
    const Span from = job.puts[0], to = job.takes[0];
    const Share share = share_of_grid();
    push_cells<Number>(group, packets, from, (from.size + CELL - 1) / CELL, share);
    packets.wipe(from.size);
    for (u64 cell = share.first; cell * CELL < from.size; cell += share.step) {
        const u64 at = cell * CELL, size = least(from.size - at, CELL);
        const Vector own = load_cell<Number>(from.address + at, size);
        Total<Number> total(own);
        if (!pull_total(job, packets, cell, own, total)) {
            poison(job, share);
            break;
        }
        store_cell<Number>(to.address + at, total.result(job.op, group.world_size), size);
    }
    packets.finish();
}

#endif
