/* Runs the kernels on threads of the host; a library for tests/device_comm/cuda/emulator.py. */
#include <collectives.cu>

#include <memory>
#include <system_error>
#include <vector>

enum { DONE = 0, UNKNOWN_KERNEL = 1, NO_THREADS = 2 };

/* Returns when all threads of all blocks are done. */
extern "C" int emulate(const char *kernel, u32 grid, u32 block, const void *job) {
    auto found = emulation::kernels().find(kernel);
    if (found == emulation::kernels().end()) return UNKNOWN_KERNEL;
    std::vector<std::unique_ptr<emulation::Block>> blocks;
    for (u32 b = 0; b < grid; b++) blocks.push_back(std::make_unique<emulation::Block>(block));
    std::vector<std::jthread> threads;
    auto run = [&](u32 index) {
        emulation::here = {index % block, index / block, grid, blocks[index / block].get(), 0};
        found->second(job);
    };
    try {
        for (u32 index = 0; index < grid * block; index++) threads.emplace_back(run, index);
    } catch (const std::system_error &) {
        std::_Exit(NO_THREADS); /* those that run wait for ever for the others */
    }
    return DONE;
}

/* What abi.py says as well, in the order that its test knows. */
extern "C" const u64 *layout() {
    static const u64 numbers[] = {
        MAX_RANKS,
        MAX_BLOCKS,
        MAX_THREADS,
        MAX_LINES,
        MAX_LANES,
        CHANNEL_SETS,
        CELL,
        REGION_ABORT,
        REGION_CLAIMED,
        REGION_EPOCH,
        REGION_PACKET_EPOCH,
        REGION_TICKETS,
        REGION_FLAGS,
        REGION_CHANNELS,
        REGION_STAGING,
        CONTROL_ABORT,
        CONTROL_CODE,
        sizeof(Group),
        sizeof(Job),
        ERROR_TIMEOUT,
        ERROR_PEER,
        ERROR_ABORTED,
        PHASE_START,
        PHASE_END,
        PHASE_PACKET,
        PHASE_PUT,
        PHASE_TAKE,
        OP_SUM,
        OP_PRODUCT,
        OP_MIN,
        OP_MAX,
        OP_AVG,
    };
    return numbers;
}
