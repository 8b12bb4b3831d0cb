/* A CUDA driver without a device: it notes the last launch, and does nothing. */
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#define NOT_READY 600
#define PATIENCE 20000 /* milliseconds */

typedef struct {
    uint64_t function, stream, context, count;
    uint32_t grid[3], block[3], shared_bytes, fails;
    volatile uint32_t full;
    char job[440];
} launch;

launch fake_launch;
static _Thread_local uintptr_t current;

int cuCtxGetCurrent(uintptr_t *context) {
    *context = current;
    return 0;
}

int cuCtxSetCurrent(uintptr_t context) {
    current = context;
    return 0;
}

int cuLaunchKernel(uintptr_t function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                   unsigned by, unsigned bz, unsigned shared_bytes, uintptr_t stream,
                   void **arguments, void **extra) {
    if (fake_launch.fails || extra) return (int)fake_launch.fails;
    for (int looks = 0; fake_launch.full; looks++) {
        if (looks == PATIENCE) return NOT_READY;
        usleep(1000);
    }
    fake_launch = (launch){.function = function, .stream = stream, .context = current,
                           .count = fake_launch.count + 1, .grid = {gx, gy, gz},
                           .block = {bx, by, bz}, .shared_bytes = shared_bytes};
    memcpy(fake_launch.job, arguments[0], sizeof fake_launch.job);
    return 0;
}

int cuStreamIsCapturing(uintptr_t stream, int *status) {
    if (fake_launch.fails) return (int)fake_launch.fails;
    *status = stream % 16; /* as the test numbers its streams */
    return 0;
}

int cuGetErrorName(int result, const char **name) {
    *name = result == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : NULL;
    return result == 700 ? 0 : 1;
}
