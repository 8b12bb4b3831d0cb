/* The barrier between ranks, and the rule for writes to a staging.
 *
 * Guarantees
 *   1. Block b of a rank passes a barrier after block b of every rank has entered it. Writes of that
 *      block before a barrier with `release` are then visible, as are writes of earlier kernels of
 *      that rank to the memory of its own device.
 *   2. Kernels with barriers alternate between two stagings. A rank writes that of epoch e after it
 *      has passed the kernel of epoch e - 1. Every rank had entered that kernel, so it had finished
 *      the kernel of epoch e - 2, the last reader of this staging.
 *
 * Assumptions
 *   - All ranks launch the same kernels with the same grids and blocks, in the same order, and a
 *     rank's kernels run one after the other.
 *   - Only blocks b read the data that blocks b write for other ranks (see cells.cuh). */
#ifndef GC_MEETING_CUH
#define GC_MEETING_CUH

#include <patience.cuh>

class Meeting {
  public:
    DEVICE explicit Meeting(const Group &group)
        : group_(group),
          epoch_(own64(group, REGION_EPOCH).load(memory_order_relaxed) + 1),
          begins_(!is_given_up(group, {group.rank, PHASE_START, epoch_})) {}

    /* True if this thread may write to the staging. */
    DEVICE bool begins() const { return begins_; }

    DEVICE char *staging(u32 rank) const {
        return group_.regions[rank] + REGION_STAGING + (epoch_ & 1) * group_.staging_bytes;
    }

    /* All threads of the block call this, and all get the same result. `release` false: no prior
     * writes of this kernel need to be visible, so a relaxed store suffices. Writes of earlier
     * kernels were complete at their ends, in the memory of this device, where peers read them.
     * torch's symmetric memory begins its kernels in the same way. */
    DEVICE bool meet(Phase phase, bool release = true) const {
        u64 number = 2 * epoch_ + phase;
        if (!all_of_block(begins_)) return false;
        for (u32 r = thread(); r < group_.world_size; r += threads())
            if (r != group_.rank) {
                Shared<u64> own_flag = flag(group_.regions[r], group_.rank);
                if (release)
                    own_flag.store(number, memory_order_release);
                else
                    own_flag.store(number, memory_order_relaxed);
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

    /* A flag only increases: a rank that is ahead has also entered this barrier. */
    DEVICE bool await(u32 rank, u64 number, const Cause &cause) const {
        Shared<u64> theirs = flag(own_region(group_), rank);
        return wait_until(group_, cause,
                          [=] { return theirs.load(memory_order_acquire) >= number; });
    }
};

#endif
