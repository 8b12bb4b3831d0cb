// A libnccl for tests: the entry points that are bound, over a file that all ranks map.
//
// Addresses are the host's. Each process has one stream, a thread that carries out what was
// issued in order; fakeMark and fakePassed look at it. A communicator is made non-blocking, and
// only split: nothing of it is done before ncclCommGetAsyncError was asked often enough. What is
// split from it is blocking, and does the rest. Stricter than NCCL: ranks that issue different
// collectives get an error, and so does a receive of another size than its send, and whoever frees
// memory that has a window, or ends a communicator or a window too early.

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#ifdef BEFORE_WINDOWS
enum { VERSION = 22605 };
#else
enum { VERSION = 22809 };
#endif
enum { MAX_RANKS = 8, CHUNK = 1 << 16, MAX_OPS = 64, POLLS = 2, NAME = 128 };
enum { SUCCESS = 0, INTERNAL_ERROR = 3, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, IN_PROGRESS = 7 };
enum { COLL_SYMMETRIC = 1, WINDOW_ALIGN = 4096, MAX_MEMORIES = 16 };
enum { ALL_REDUCE = 1, REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, SEND, RECV };

typedef struct { char internal[NAME]; } ncclUniqueId;
typedef struct { size_t size; unsigned magic, version; int blocking; } ncclConfig;
typedef struct { int kind, dtype, op, root; size_t count; } What;

typedef struct {
    _Atomic uint64_t posted, done;
    What what;
    char data[CHUNK];
} Slot;

typedef struct {
    _Atomic uint64_t posted, taken;
    size_t total, filled;
    char data[CHUNK];
} Channel;

typedef struct {
    _Atomic uint32_t attached;
    _Atomic uint64_t registering[MAX_RANKS];
    size_t window_sizes[MAX_RANKS];
    Slot slots[MAX_RANKS];
    Channel channels[MAX_RANKS][MAX_RANKS];
} Shared;

typedef struct {
    What what;
    const char *source;
    char *output;
    size_t at;
} Job;

typedef struct Comm {
    int size, rank, polls, finalized, blocking;
    struct Comm **split;
    char path[NAME];
    Shared *shared;
    uint64_t step;
    _Atomic int error, behind, ready, aborted, pending;
    Job jobs[MAX_OPS];
    int n_jobs;
    uint64_t registered;
} Comm;

// Memory of ncclMemAlloc, of which a communicator may have a window.
typedef struct {
    char *address;
    size_t size, window_size;
    Comm *comm;
} Memory;

typedef struct Batch {
    Comm *comm;
    Job jobs[MAX_OPS];
    int n_jobs;
    struct Batch *next;
} Batch;

static const size_t WIDTH[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t more = PTHREAD_COND_INITIALIZER;
static Batch *first, **last = &first;
static _Atomic uint64_t issued, carried_out;
static int running;
static _Thread_local int depth;
static _Thread_local Comm *grouped;
static int refuse_init, no_windows;
static Memory memories[MAX_MEMORIES];
static _Atomic int in_windows, aborts;
static _Atomic int fail_next, stall_next;

static void nap(void) {
    struct timespec time = {0, 20000};
    nanosleep(&time, NULL);
}

// --- what the stream does ---------------------------------------------------------------

static float to_float(uint16_t bits, int dtype) {
    if (dtype == 6) {
        _Float16 half;
        memcpy(&half, &bits, 2);
        return half;
    }
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

static uint16_t from_float(float value, int dtype) {
    uint16_t bits;
    if (dtype == 6) {
        _Float16 half = value;
        memcpy(&bits, &half, 2);
        return bits;
    }
    uint32_t wide;
    memcpy(&wide, &value, 4);
    return (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
}

#define COMBINE(a, b) \
    (op == 1 ? (a) * (b) : op == 2 ? ((a) > (b) ? (a) : (b)) : op == 3 ? ((a) < (b) ? (a) : (b)) : (a) + (b))
#define REDUCE_AS(type) \
    for (size_t i = 0; i < bytes / sizeof(type); i++) { \
        type total = ((const type *)shared->slots[0].data)[i]; \
        for (int r = 1; r < n; r++) { \
            type value = ((const type *)shared->slots[r].data)[i]; \
            total = COMBINE(total, value); \
        } \
        ((type *)output)[i] = op == 4 ? total / (type)n : total; \
    } \
    break

static void reduce(Shared *shared, int n, char *output, size_t bytes, int dtype, int op) {
    switch (dtype) {
    case 0: REDUCE_AS(int8_t);
    case 1: REDUCE_AS(uint8_t);
    case 2: REDUCE_AS(int32_t);
    case 3: REDUCE_AS(uint32_t);
    case 4: REDUCE_AS(int64_t);
    case 5: REDUCE_AS(uint64_t);
    case 7: REDUCE_AS(float);
    case 8: REDUCE_AS(double);
    default:
        for (size_t i = 0; i < bytes / 2; i++) {
            float total = to_float(((uint16_t *)shared->slots[0].data)[i], dtype);
            for (int r = 1; r < n; r++) {
                float value = to_float(((uint16_t *)shared->slots[r].data)[i], dtype);
                total = COMBINE(total, value);
            }
            ((uint16_t *)output)[i] = from_float(op == 4 ? total / n : total, dtype);
        }
    }
}

// Waits until all ranks have come to `step`; whether nothing went wrong.
static int meet(Comm *comm, size_t offset, uint64_t step) {
    for (int r = 0; r < comm->size; r++) {
        _Atomic uint64_t *word = (void *)((char *)&comm->shared->slots[r] + offset);
        while (atomic_load(word) < step) {
            if (comm->aborted) return 0;
            nap();
        }
    }
    return 1;
}

// One chunk: every rank shows `mine`, then `take` is called by those who want it.
static int exchange(Comm *comm, const Job *job, const char *mine, size_t bytes) {
    Slot *slot = &comm->shared->slots[comm->rank];
    slot->what = job->what;
    if (mine) memcpy(slot->data, mine, bytes);
    atomic_store(&slot->posted, comm->step + 1);
    if (!meet(comm, offsetof(Slot, posted), comm->step + 1)) return 0;
    for (int r = 0; r < comm->size; r++)
        if (memcmp(&comm->shared->slots[r].what, &job->what, sizeof(What))) comm->error = INVALID_USAGE;
    return !comm->error;
}

static int leave(Comm *comm) {
    atomic_store(&comm->shared->slots[comm->rank].done, ++comm->step);
    return meet(comm, offsetof(Slot, done), comm->step);
}

static void collective(Comm *comm, Job *job) {
    const What *what = &job->what;
    int n = comm->size, parts = what->kind == REDUCE_SCATTER ? n : 1;
    size_t total = what->count * WIDTH[what->dtype];
    for (int part = 0; part < parts; part++) {
        for (size_t at = 0; at < total; at += CHUNK) {
            size_t bytes = total - at < CHUNK ? total - at : CHUNK;
            int gives = what->kind != BROADCAST || comm->rank == what->root;
            const char *mine = gives ? job->source + part * total + at : NULL;
            if (!exchange(comm, job, mine, bytes)) return;
            if (what->kind == ALL_GATHER) {
                for (int r = 0; r < n; r++)
                    memcpy(job->output + r * total + at, comm->shared->slots[r].data, bytes);
            } else if (what->kind == BROADCAST) {
                memcpy(job->output + at, comm->shared->slots[what->root].data, bytes);
            } else if (what->kind == ALL_REDUCE || comm->rank == (parts > 1 ? part : what->root)) {
                reduce(comm->shared, n, job->output + at, bytes, what->dtype, what->op);
            }
            if (!leave(comm)) return;
        }
    }
}

// Moves one chunk of a message, if it can; whether the message is through.
static int transfer(Comm *comm, Job *job) {
    size_t total = job->what.count * WIDTH[job->what.dtype];
    int peer = job->what.root;
    if (job->what.kind == SEND) {
        Channel *channel = &comm->shared->channels[comm->rank][peer];
        if (channel->posted != channel->taken) return 0;
        if (job->at == total) return 1;  // as NCCL's large messages: not before it was taken
        channel->total = total;
        channel->filled = total - job->at < CHUNK ? total - job->at : CHUNK;
        memcpy(channel->data, job->source + job->at, channel->filled);
        job->at += channel->filled;
        channel->posted++;
        return 0;
    }
    Channel *channel = &comm->shared->channels[peer][comm->rank];
    if (channel->posted == channel->taken) return 0;
    if (channel->total != total) {
        comm->error = INVALID_USAGE;
        return 1;
    }
    memcpy(job->output + job->at, channel->data, channel->filled);
    job->at += channel->filled;
    channel->taken++;
    return job->at == total;
}

// Whether an earlier message of the batch goes the same way and is not through.
static int behind(const Batch *batch, const int *through, int i) {
    for (int j = 0; j < i; j++)
        if (!through[j] && batch->jobs[j].what.kind == batch->jobs[i].what.kind &&
            batch->jobs[j].what.root == batch->jobs[i].what.root)
            return 1;
    return 0;
}

static void carry_out(Batch *batch) {
    Comm *comm = batch->comm;
    int left = 0, through[MAX_OPS] = {0};
    for (int i = 0; i < batch->n_jobs; i++) left += batch->jobs[i].what.kind >= SEND;
    while (left && !comm->aborted && !comm->error) {
        for (int i = 0; i < batch->n_jobs; i++) {
            if (batch->jobs[i].what.kind < SEND || through[i] || behind(batch, through, i)) continue;
            if (transfer(comm, &batch->jobs[i])) through[i] = 1, left--;
        }
        nap();
    }
    for (int i = 0; i < batch->n_jobs && !comm->aborted && !comm->error; i++)
        if (batch->jobs[i].what.kind < SEND) collective(comm, &batch->jobs[i]);
    comm->pending--;
}

static void *stream(void *unused) {
    for (;;) {
        pthread_mutex_lock(&lock);
        while (!first) pthread_cond_wait(&more, &lock);
        Batch *batch = first;
        pthread_mutex_unlock(&lock);
        carry_out(batch);
        pthread_mutex_lock(&lock);
        first = batch->next;
        if (!first) last = &first;
        pthread_mutex_unlock(&lock);
        free(batch);
        carried_out++;
    }
    return unused;
}

uint64_t fakeMark(void) { return issued; }
int fakePassed(uint64_t mark) { return carried_out >= mark; }
void fakeRefuseInit(int result) { refuse_init = result; }
void fakeFailNext(int result) { fail_next = result; }
void fakeStallNext(void) { stall_next = 1; }
void fakeNoWindows(int none) { no_windows = none; }
int fakeInWindows(void) { return in_windows; }
int fakeAborts(void) { return aborts; }
int fakeMemories(void) {
    int count = 0;
    for (int i = 0; i < MAX_MEMORIES; i++) count += memories[i].address != NULL;
    return count;
}
void fakeFailBehind(Comm *comm, int result) { comm->behind = result; }

// --- the interface ----------------------------------------------------------------------

int ncclGetVersion(int *version) {
    *version = VERSION;
    return SUCCESS;
}

const char *ncclGetErrorString(int result) { return result == SUCCESS ? "no error" : "fake error"; }

const char *ncclGetLastError(void *comm) { return comm ? "last words" : ""; }

int ncclGetUniqueId(ncclUniqueId *id) {
    memset(id, 0, sizeof *id);
    const char *folder = getenv("TMPDIR");
    snprintf(id->internal, NAME, "%s/fake-nccl-XXXXXX", folder ? folder : "/tmp");
    int fd = mkstemp(id->internal);
    if (fd < 0 || ftruncate(fd, sizeof(Shared))) return INVALID_ARGUMENT;
    close(fd);
    return SUCCESS;
}

static void *join(void *given) {
    Comm *comm = given;
    uint32_t there = atomic_fetch_add(&comm->shared->attached, 1) + 1;
    if ((int)there == comm->size) unlink(comm->path);
    while ((int)atomic_load(&comm->shared->attached) < comm->size && !comm->aborted) nap();
    comm->ready = 1;
    return NULL;
}

int ncclCommInitRankConfig(Comm **made, int size, ncclUniqueId id, int rank, ncclConfig *config) {
    if (config->magic != 0xcafebeef || config->size < sizeof(ncclConfig)) return INVALID_ARGUMENT;
    if (config->version < 21400 || config->blocking != 0) return INVALID_ARGUMENT;
    if (size < 1 || size > MAX_RANKS || rank < 0 || rank >= size) return INVALID_ARGUMENT;
    if (refuse_init) return refuse_init;
    int fd = open(id.internal, O_RDWR);
    if (fd < 0) return INVALID_ARGUMENT;
    Comm *comm = calloc(1, sizeof *comm);
    comm->size = size, comm->rank = rank;
    memcpy(comm->path, id.internal, NAME);
    comm->shared = mmap(NULL, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    pthread_t thread;
    pthread_create(&thread, NULL, join, comm);
    pthread_detach(thread);
    *made = comm;
    return IN_PROGRESS;
}

static void launch(Comm *comm) {
    Batch *batch = calloc(1, sizeof *batch);
    batch->comm = comm;
    batch->n_jobs = comm->n_jobs;
    memcpy(batch->jobs, comm->jobs, sizeof comm->jobs);
    comm->n_jobs = 0;
    comm->pending++;
    pthread_mutex_lock(&lock);
    if (!running) {
        pthread_t thread;
        pthread_create(&thread, NULL, stream, NULL);
        pthread_detach(thread);
        running = 1;
    }
    *last = batch;
    last = &batch->next;
    issued++;
    pthread_cond_signal(&more);
    pthread_mutex_unlock(&lock);
}

int ncclCommSplit(Comm *comm, int color, int key, Comm **made, ncclConfig *config) {
    if (config->magic != 0xcafebeef || config->size < sizeof(ncclConfig)) return INVALID_ARGUMENT;
    if (!comm->ready || comm->blocking || config->blocking != 1) return INVALID_USAGE;
    if (color != 0 || key != comm->rank) return INVALID_ARGUMENT;
    comm->split = made;
    comm->polls = POLLS;
    return IN_PROGRESS;
}

static void split(Comm *comm) {
    Comm *child = calloc(1, sizeof *child);
    child->size = comm->size, child->rank = comm->rank, child->shared = comm->shared;
    child->ready = child->blocking = 1;
    *comm->split = child;
}

int ncclCommGetAsyncError(Comm *comm, int *error) {
    if (comm->polls && --comm->polls == 0) split(comm);
    if (comm->behind) return *error = comm->behind, SUCCESS;
    *error = comm->error ? comm->error : comm->polls || !comm->ready ? IN_PROGRESS : SUCCESS;
    return SUCCESS;
}

int ncclCommFinalize(Comm *comm) {
    comm->finalized = 1;
    if (!comm->blocking) return IN_PROGRESS;
    while (comm->pending && !comm->aborted) nap();
    return SUCCESS;
}

static Memory *window_of(const Comm *comm) {
    for (int i = 0; i < MAX_MEMORIES; i++)
        if (memories[i].comm == comm) return &memories[i];
    return NULL;
}

int ncclCommDestroy(Comm *comm) {
    return comm->finalized && !comm->pending && !window_of(comm) ? SUCCESS : INVALID_USAGE;
}

int ncclCommAbort(Comm *comm) {
    comm->aborted = 1;
    aborts++;
    for (Memory *each; (each = window_of(comm));) each->comm = NULL;
    return SUCCESS;
}

#ifndef BEFORE_WINDOWS
int ncclMemAlloc(void **made, size_t size) {
    for (int i = 0; i < MAX_MEMORIES; i++) {
        if (memories[i].address) continue;
        if (size == 0 || posix_memalign(made, WINDOW_ALIGN, size)) return INVALID_ARGUMENT;
        memories[i] = (Memory){*made, size, 0, NULL};
        return SUCCESS;
    }
    return INTERNAL_ERROR;
}

int ncclMemFree(void *address) {
    for (int i = 0; i < MAX_MEMORIES; i++) {
        if (memories[i].address != address) continue;
        if (memories[i].comm) return INVALID_USAGE;
        free(address);
        memories[i].address = NULL;
        return SUCCESS;
    }
    return INVALID_ARGUMENT;
}

int ncclCommWindowRegister(Comm *comm, void *address, size_t size, Memory **made, int flags) {
    Memory *memory = NULL;
    for (int i = 0; i < MAX_MEMORIES; i++)
        if (memories[i].address && memories[i].address == address) memory = &memories[i];
    if (!memory || size > memory->size || flags != COLL_SYMMETRIC) return INVALID_ARGUMENT;
    if (memory->comm || !comm->blocking || comm->finalized) return INVALID_USAGE;
    Shared *shared = comm->shared;
    shared->window_sizes[comm->rank] = size;
    shared->registering[comm->rank] = ++comm->registered;
    for (int r = 0; r < comm->size; r++) {
        while (shared->registering[r] < comm->registered) {
            if (comm->aborted) return INTERNAL_ERROR;
            nap();
        }
        if (shared->window_sizes[r] != size) return INVALID_USAGE;
    }
    *made = no_windows ? NULL : memory;
    if (!no_windows) memory->comm = comm, memory->window_size = size;
    return SUCCESS;
}

int ncclCommWindowDeregister(Comm *comm, Memory *window) {
    if (!window || window->comm != comm) return INVALID_ARGUMENT;
    if (comm->pending || comm->finalized) return INVALID_USAGE;
    window->comm = NULL;
    return SUCCESS;
}
#endif

// Whether `size` bytes at `address` lie in a window of `comm`.
static int lies_in_window(Comm *comm, const char *address, size_t size) {
    Memory *window = window_of(comm);
    return window && address >= window->address && address + size <= window->address + window->window_size;
}

int ncclGroupStart(void) {
    depth++;
    return SUCCESS;
}

int ncclGroupEnd(void) {
    if (depth == 0) return INVALID_USAGE;
    if (--depth || !grouped) return SUCCESS;
    launch(grouped);
    grouped = NULL;
    return SUCCESS;
}

static int begin(Comm *comm, int kind, const void *source, void *output, size_t count, int dtype,
                 int op, int root, void *stream) {
    int failure = atomic_exchange(&fail_next, 0);
    if (failure) return failure;
    if (atomic_exchange(&stall_next, 0)) {  // as for a peer to connect with
        while (!comm->aborted) nap();
        return INTERNAL_ERROR;
    }
    if (!comm->blocking || stream != (void *)42) return INVALID_USAGE;
    if (dtype < 0 || dtype > 9 || op < 0 || op > 4 || comm->n_jobs == MAX_OPS) return INVALID_ARGUMENT;
    if (root < 0 || root >= comm->size) return INVALID_ARGUMENT;
    Job *job = &comm->jobs[comm->n_jobs++];
    memset(job, 0, sizeof *job);
    job->what.kind = kind, job->what.dtype = dtype, job->what.op = op, job->what.root = root;
    job->what.count = count;
    job->source = source, job->output = output;
    if (depth) {
        grouped = comm;
        return SUCCESS;
    }
    launch(comm);
    return SUCCESS;
}

int ncclAllReduce(const void *source, void *output, size_t count, int dtype, int op, Comm *comm, void *stream) {
    size_t size = count * WIDTH[dtype];
    if (lies_in_window(comm, source, size) && lies_in_window(comm, output, size) && source != output) in_windows++;
    return begin(comm, ALL_REDUCE, source, output, count, dtype, op, 0, stream);
}

int ncclReduce(const void *source, void *output, size_t count, int dtype, int op, int root, Comm *comm, void *stream) {
    if (comm->rank == root && !output) return INVALID_ARGUMENT;
    return begin(comm, REDUCE, source, output, count, dtype, op, root, stream);
}

int ncclReduceScatter(const void *source, void *output, size_t count, int dtype, int op, Comm *comm, void *stream) {
    return begin(comm, REDUCE_SCATTER, source, output, count, dtype, op, 0, stream);
}

int ncclAllGather(const void *source, void *output, size_t count, int dtype, Comm *comm, void *stream) {
    return begin(comm, ALL_GATHER, source, output, count, dtype, 0, 0, stream);
}

int ncclBroadcast(const void *source, void *output, size_t count, int dtype, int root, Comm *comm, void *stream) {
    return begin(comm, BROADCAST, source, output, count, dtype, 0, root, stream);
}

int ncclSend(const void *source, size_t count, int dtype, int peer, Comm *comm, void *stream) {
    if (peer == comm->rank) return INVALID_USAGE;
    return begin(comm, SEND, source, NULL, count, dtype, 0, peer, stream);
}

int ncclRecv(void *output, size_t count, int dtype, int peer, Comm *comm, void *stream) {
    if (peer == comm->rank) return INVALID_USAGE;
    return begin(comm, RECV, NULL, output, count, dtype, 0, peer, stream);
}
