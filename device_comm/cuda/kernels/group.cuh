/* The layout that host and kernels share; device_comm/cuda/ipc/abi.py documents it. */
#ifndef GC_GROUP_CUH
#define GC_GROUP_CUH

#include <platform.cuh>

constexpr u32 MAX_RANKS = 8;
constexpr u32 MAX_BLOCKS = 64;
constexpr u32 MAX_THREADS = 512;
constexpr u32 MAX_LANES = 32;
constexpr u32 CHANNEL_SETS = 3;

constexpr u64 REGION_ABORT = 0;
constexpr u64 REGION_CLAIMED = 64;
constexpr u64 REGION_EPOCH = 128;
constexpr u64 REGION_PACKET_EPOCH = 192;
constexpr u64 REGION_TICKETS = 8; /* after an epoch */
constexpr u64 REGION_FLAGS = 256;
constexpr u64 REGION_CHANNELS = REGION_FLAGS + MAX_BLOCKS * MAX_RANKS * sizeof(u64);
constexpr u64 REGION_STAGING =
    REGION_CHANNELS + CHANNEL_SETS * 4 * MAX_RANKS * MAX_LANES * sizeof(u64);

constexpr u64 CONTROL_ABORT = 0;
constexpr u64 CONTROL_CODE = 64;
constexpr u64 CONTROL_CULPRIT = 68;
constexpr u64 CONTROL_REPORTER = 72;
constexpr u64 CONTROL_PHASE = 76;
constexpr u64 CONTROL_EPOCH = 80;

enum ErrorCode : u32 { ERROR_TIMEOUT = 1, ERROR_PEER = 2, ERROR_ABORTED = 3 };
enum Phase : u32 { PHASE_START, PHASE_END, PHASE_PACKET, PHASE_PUT, PHASE_TAKE };
enum Operation : u32 { OP_SUM = 0, OP_PRODUCT = 1, OP_MIN = 2, OP_MAX = 3, OP_AVG = 10 };

struct Span {
    char *address;
    u64 size;
};

struct Group {
    char *regions[MAX_RANKS];
    char *control;
    u64 timeout_ns;
    u64 staging_bytes;
    u64 packets;
    u64 packet_bytes;
    u64 channels;
    u64 channel_bytes;
    u64 slot_bytes;
    u32 rank, world_size, lanes, unused;
};

struct Job {
    Group group;
    const char *const *table;
    u64 offset, piece;
    u32 op, channel_set;
    float epsilon;
    u32 unused;
    Span puts[MAX_RANKS];
    Span takes[MAX_RANKS];
};

static_assert(sizeof(Group) == 144 && sizeof(Job) == 440, "abi.py packs them without holes");

DEVICE Shared<u32> word32(char *base, u64 offset) {
    return Shared<u32>(*reinterpret_cast<u32 *>(base + offset));
}

DEVICE Shared<u64> word64(char *base, u64 offset) {
    return Shared<u64>(*reinterpret_cast<u64 *>(base + offset));
}

DEVICE char *own_region(const Group &group) { return group.regions[group.rank]; }

DEVICE Own<u32> own32(const Group &group, u64 offset) {
    return Own<u32>(*reinterpret_cast<u32 *>(own_region(group) + offset));
}

DEVICE Own<u64> own64(const Group &group, u64 offset) {
    return Own<u64>(*reinterpret_cast<u64 *>(own_region(group) + offset));
}

/* True if the group has no other rank: there is no work, and possibly no region. */
DEVICE bool is_idle(const Group &group) { return group.world_size < 2; }

/* Every block calls this at the end of a kernel; the last block increments the epoch. So all blocks
 * of a kernel load the same epoch, without an argument from the host.
 *
 * A ticket only orders a block's load of the epoch before the last block's store. No peer and no
 * host loads either word, peers' data was released before, and this rank's next kernel begins after
 * this one has ended. So device scope suffices; with system scope each block would wait until its
 * writes are visible to all devices. A single block needs only the sync. */
DEVICE void finish_epoch(const Group &group, u64 word, u64 epoch) {
    sync_block();
    if (thread() != 0) return;
    if (blocks() > 1) {
        Own<u32> tickets = own32(group, word + REGION_TICKETS);
        if (tickets.fetch_add(1, memory_order_acq_rel) + 1 < blocks()) return;
        tickets.store(0, memory_order_relaxed);
    }
    own64(group, word).store(epoch, memory_order_relaxed);
}

#endif
