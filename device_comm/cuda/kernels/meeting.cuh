/* How ranks meet, and when a staging may be written.
 *
 * Guarantees
 *   1. Block b of a rank leaves a meeting when block b of every rank has come to it, and sees what
 *      that block has written before, if it brings anything; and what earlier kernels of that rank
 *      have written into the memory of its own device.
 *   2. Kernels that meet alternate between two stagings. A rank writes the one of epoch e after it
 *      has been through the kernel of epoch e - 1; every rank had come to that, so it was done with
 *      the kernel of epoch e - 2, the last one to read this staging.
 *
 * Assumptions
 *   - All ranks launch the same kernels with the same grids and blocks, in the same order, and a
 *     rank's kernels run one after the other.
 *   - What block b writes for others is read by blocks b only (see cells.cuh). */
#ifndef GC_MEETING_CUH
#define GC_MEETING_CUH

#include <patience.cuh>

class Meeting {
  public:
    DEVICE explicit Meeting(const Group &group)
        : group_(group),
          epoch_(own64(group, REGION_EPOCH).load(memory_order_relaxed) + 1),
          begins_(!is_given_up(group, {group.rank, PHASE_START, epoch_})) {}

    /* Whether this thread may write into the staging. */
    DEVICE bool begins() const { return begins_; }

    DEVICE char *staging(u32 rank) const {
        return group_.regions[rank] + REGION_STAGING + (epoch_ & 1) * group_.staging_bytes;
    }

    /* Of all threads of the block; all of them get the same answer. Who `brings` nothing, since
     * this kernel has written nothing yet that others read, has no writes to wait for: those of
     * earlier kernels were done when these ended, and whoever reads them reads them there. torch's
     * symmetric memory begins its kernels in the same way. */
    DEVICE bool meet(Phase phase, bool brings = true) const {
        u64 number = 2 * epoch_ + phase;
        if (!all_of_block(begins_)) return false;
        for (u32 r = thread(); r < group_.world_size; r += threads())
            if (r != group_.rank) {
                Shared<u64> mine = flag(group_.regions[r], group_.rank);
                if (brings)
                    mine.store(number, memory_order_release);
                else
                    mine.store(number, memory_order_relaxed);
            }
        bool met = true;
        for (u32 r = thread(); r < group_.world_size; r += threads())
            if (r != group_.rank) met = met && await(r, number, {r, phase, epoch_});
        return all_of_block(met);
    }

    DEVICE void finish() const { finish_epoch(group_, REGION_EPOCH, epoch_); }

  private:
    const Group &group_;
    const u64 epoch_;
    const bool begins_;

    DEVICE Shared<u64> flag(char *region, u32 from) const {
        return word64(region, REGION_FLAGS + (block() * MAX_RANKS + from) * sizeof(u64));
    }

    /* Whoever is ahead has come, too: a flag only ever grows. */
    DEVICE bool await(u32 rank, u64 number, const Cause &cause) const {
        Shared<u64> theirs = flag(own_region(group_), rank);
        return wait_until(group_, cause,
                          [=] { return theirs.load(memory_order_acquire) >= number; });
    }
};

#endif
