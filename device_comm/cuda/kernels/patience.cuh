/* Waits that end: at the deadline, after a peer has given up, or after an abort by the host.
 *
 * The first thread to give up writes its rank's error record and all ranks' abort words. The output
 * is then undefined. Every waiting kernel of the group ends soon, and no kernel with barriers begins:
 * a late rank still reads unchanged stagings. */
#ifndef GC_PATIENCE_CUH
#define GC_PATIENCE_CUH

#include <group.cuh>

/* The event that a thread waits for. */
struct Cause {
    u32 culprit;
    Phase phase;
    u64 epoch;
};

RARELY void give_up(const Group &group, ErrorCode code, u32 reporter, Cause cause) {
    if (own32(group, REGION_CLAIMED).exchange(1, memory_order_relaxed)) return;
    if (code != ERROR_PEER) {
        u64 word = code | reporter << 8 | cause.culprit << 16;
        for (u32 r = 0; r < group.world_size; r++)
            word64(group.regions[r], REGION_ABORT).store(word, memory_order_relaxed);
    }
    word32(group.control, CONTROL_CULPRIT).store(cause.culprit, memory_order_relaxed);
    word32(group.control, CONTROL_REPORTER).store(reporter, memory_order_relaxed);
    word32(group.control, CONTROL_PHASE).store(cause.phase, memory_order_relaxed);
    word64(group.control, CONTROL_EPOCH).store(cause.epoch, memory_order_relaxed);
    word32(group.control, CONTROL_CODE).store(code, memory_order_release);
}

/* True if this rank or a peer has given up; the error record is then written. */
DEVICE bool is_given_up(const Group &group, Cause cause) {
    u64 word = word64(own_region(group), REGION_ABORT).load(memory_order_relaxed);
    if (word == 0) return false;
    cause.culprit = word >> 16 & 0xff;
    give_up(group, ERROR_PEER, word >> 8 & 0xff, cause);
    return true;
}

class Patience {
  public:
    /* Call once per poll. Returns false on a timeout or an abort. */
    DEVICE bool lasts(const Group &group, const Cause &cause) {
        relax(polls_);
        return ++polls_ % POLLS || check(group, cause);
    }

  private:
    static constexpr u32 POLLS = 64;               /* per load of the abort word */
    static constexpr u64 CONTROL_NS = 1000 * 1000; /* host memory is slow to load */

    u32 polls_ = 0;
    u64 began_ = 0, asked_ = 0;

    DEVICE bool check(const Group &group, Cause cause) {
        if (is_given_up(group, cause)) return false;
        u64 now = now_ns();
        if (began_ == 0) began_ = asked_ = now;
        if (now - asked_ >= CONTROL_NS) {
            asked_ = now;
            if (word32(group.control, CONTROL_ABORT).load(memory_order_relaxed)) {
                cause.culprit = group.rank;
                give_up(group, ERROR_ABORTED, group.rank, cause);
                return false;
            }
        }
        if (group.timeout_ns == 0 || now - began_ < group.timeout_ns) return true;
        give_up(group, ERROR_TIMEOUT, group.rank, cause);
        return false;
    }
};

/* Polls until `ready()`. Returns false on a timeout or an abort. */
template <typename Ready>
DEVICE bool wait_until(const Group &group, const Cause &cause, Ready ready) {
    Patience patience;
    while (!ready())
        if (!patience.lasts(group, cause)) return false;
    return true;
}

#endif
