/* Messages through channels: the sender streams data into slots of the receiver's region.
 *
 * Each ordered pair of ranks has a channel, whose memory its lanes share; each lane has two slots.
 * Chunk k of a message uses lane k % lanes, and block b serves lane b of all messages concurrently.
 * Other ranks are not involved, and data that fits into the slots needs no receiver.
 *
 * Guarantees. Both ends count the chunks of a lane, through all messages.
 *   1. Chunk c is written to slot c % 2 when `drained`, in the sender's region, is at least c - 1.
 *   2. It is read when `filled`, in the receiver's region, is at least c + 1.
 *   3. Each end stores the other end's count with release after all threads of the block are done
 *      with the slot. The block accesses a slot after one of its threads has loaded its own count
 *      with acquire.
 *
 * Assumptions. Both ends of a message pass the same size. A rank's kernels that send to one rank, or
 * receive from one rank, run one after the other. Blocks have a thread for each line. */
#ifndef GC_TRANSFER_CUH
#define GC_TRANSFER_CUH

#include <cells.cuh>
#include <patience.cuh>

constexpr u32 MAX_LINES = 2 * MAX_RANKS;
constexpr u64 SLOTS = 2;

enum ChannelWord : u32 { WORD_FILLED, WORD_DRAINED, WORD_PUT, WORD_TAKEN };

DEVICE u32 lanes_for(const Group &group, u64 size) {
    u32 lanes = 1;
    while (lanes < group.lanes && lanes * group.slot_bytes < size) lanes++;
    return lanes;
}

/* The copies of all threads of a block. */
struct Copies {
    Copy items[MAX_LINES];
};

/* One end of one lane of a message, polled by one thread. */
class Line {
  public:
    /* Lines 0, 1, ... send to rank 0, 1, ...; lines from MAX_RANKS on receive. */
    DEVICE Line(const Job &job, u32 index)
        : job_(job), puts_(index < MAX_RANKS), peer_(index % MAX_RANKS) {
        const Group &group = job.group;
        if (index >= MAX_LINES || peer_ >= group.world_size || peer_ == group.rank) return;
        const Span span = puts_ ? job.puts[peer_] : job.takes[peer_];
        const u32 lanes = lanes_for(group, span.size);
        const u64 begin = block() * group.slot_bytes;
        if (block() >= lanes || begin >= span.size) return;
        next_ = span.address + begin;
        left_ = span.size - begin;
        stride_ = lanes * group.slot_bytes;
        count_ = own_count().load(memory_order_relaxed);
    }

    DEVICE bool pending() const { return left_ > 0; }

    /* True if the next chunk can be moved. */
    DEVICE bool ready() const {
        Shared<u64> theirs = word(job_.group.rank, puts_ ? WORD_DRAINED : WORD_FILLED, peer_);
        return theirs.load(memory_order_acquire) + (puts_ ? SLOTS : 0) > count_;
    }

    /* Call if not `ready`. Returns false on a timeout or an abort. */
    DEVICE bool waits_on() {
        return patience_.lasts(job_.group, {peer_, puts_ ? PHASE_PUT : PHASE_TAKE, count_});
    }

    DEVICE Copy chunk() const {
        const Group &group = job_.group;
        const u32 from = puts_ ? group.rank : peer_, to = puts_ ? peer_ : group.rank;
        const u64 channel = job_.channel_set * group.world_size + from;
        char *slot = group.regions[to] + group.channels + channel * group.channel_bytes +
                     (block() * SLOTS + count_ % SLOTS) * group.slot_bytes;
        const u64 size = least(left_, group.slot_bytes);
        return puts_ ? Copy{slot, next_, size} : Copy{next_, slot, size};
    }

    /* Call after all threads have moved the chunk. */
    DEVICE void advance() {
        count_++;
        word(peer_, puts_ ? WORD_FILLED : WORD_DRAINED, job_.group.rank)
            .store(count_, memory_order_release);
        own_count().store(count_, memory_order_relaxed);
        left_ = left_ > stride_ ? left_ - stride_ : 0;
        next_ += stride_;
        patience_ = Patience();
    }

  private:
    const Job &job_;
    const bool puts_;
    const u32 peer_;
    char *next_ = nullptr;
    u64 left_ = 0;   /* bytes from `next_` to the end of the message */
    u64 stride_ = 0; /* bytes from one chunk of this lane to the next */
    u64 count_ = 0;  /* chunks that passed this end of the lane */
    Patience patience_;

    DEVICE u64 place(ChannelWord kind, u32 other) const {
        u64 index = ((job_.channel_set * 4 + kind) * MAX_RANKS + other) * MAX_LANES + block();
        return REGION_CHANNELS + index * sizeof(u64);
    }

    DEVICE Shared<u64> word(u32 at, ChannelWord kind, u32 other) const {
        return word64(job_.group.regions[at], place(kind, other));
    }

    DEVICE Own<u64> own_count() const {
        return own64(job_.group, place(puts_ ? WORD_PUT : WORD_TAKEN, peer_));
    }
};

/* Sends puts[r] to rank r and receives takes[r] from it; copies this rank's own part at once. */
DEVICE void transfer(const Job &job) {
    if (is_idle(job.group)) return;
    SHARED(Copies, copies);
    const Span own = job.puts[job.group.rank];
    copy({job.takes[job.group.rank].address, own.address, own.size}, share_of_grid());
    Line line(job, thread());
    for (;;) {
        bool ready = line.pending() && line.ready();
        bool failed = line.pending() && !ready && !line.waits_on();
        if (thread() < MAX_LINES) copies.items[thread()] = ready ? line.chunk() : Copy{};
        if (any_of_block(failed)) return poison(job, share_of_block());
        if (!any_of_block(line.pending())) return;
        ROLLED for (u32 index = 0; index < MAX_LINES; index++)
            copy(copies.items[index], share_of_block());
        sync_block();
        if (ready) line.advance();
    }
}

#endif
