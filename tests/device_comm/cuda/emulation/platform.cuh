/* The device that kernels ask for, as threads of the host: stands in for kernels/platform.cuh. */
#ifndef GC_EMULATED_PLATFORM_CUH
#define GC_EMULATED_PLATFORM_CUH

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <thread>

#include <pthread.h>

#include <cuda/atomic>

using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using cuda::memory_order_acq_rel;
using cuda::memory_order_acquire;
using cuda::memory_order_relaxed;
using cuda::memory_order_release;

#define DEVICE inline
#define RARELY inline
#define UNROLL
#define ROLLED

template <typename Word>
using Shared = cuda::atomic_ref<Word, cuda::thread_scope_system>;

template <typename Word>
using Own = cuda::atomic_ref<Word, cuda::thread_scope_device>;

namespace emulation {

struct Here {
    u32 thread = 0, block = 0, blocks = 0;
    class Block *owner = nullptr;
    u32 votes = 0;
};

inline thread_local Here here;

/* A block of threads that meet, and count their votes when they do. Not by std::barrier, through
 * which ThreadSanitizer sees all blocks of all ranks synchronised. */
class Block {
  public:
    explicit Block(u32 threads) : threads_(threads) {
        pthread_barrier_init(&barrier_, nullptr, threads);
    }
    ~Block() { pthread_barrier_destroy(&barrier_); }

    /* How many say yes, once all have come. All have read the count before the last one when the
     * first begins the next one. */
    u32 votes(bool yes) {
        u32 turn = here.votes++;
        counts_[(turn + 1) % 3].store(0, std::memory_order_relaxed);
        counts_[turn % 3].fetch_add(yes, std::memory_order_relaxed);
        pthread_barrier_wait(&barrier_);
        return counts_[turn % 3].load(std::memory_order_relaxed);
    }

    u32 threads() const { return threads_; }
    void *shared_memory() { return shared_; }
    static constexpr std::size_t SHARED_BYTES = 4096;

  private:
    u32 threads_;
    std::atomic<u32> counts_[3] = {};
    pthread_barrier_t barrier_;
    alignas(64) char shared_[SHARED_BYTES];
};

/* The kernels, by name. `Kernel` takes the address of its parameter. */
using Kernel = void (*)(const void *);

inline std::map<std::string, Kernel> &kernels() {
    static std::map<std::string, Kernel> all;
    return all;
}

inline bool add(const char *name, Kernel kernel) { return kernels().emplace(name, kernel).second; }

}  // namespace emulation

#define KERNEL(name, Parameter, threads, blocks)                                                   \
    static void name(const Parameter &job);                                                        \
    static const bool name##_is_there = emulation::add(                                            \
        #name, [](const void *job) { name(*static_cast<const Parameter *>(job)); });               \
    static void name(const Parameter &job)

/* One for a kernel. */
#define SHARED(Type, name)                                                                         \
    static_assert(sizeof(Type) <= emulation::Block::SHARED_BYTES);                                 \
    Type &name = *static_cast<Type *>(emulation::here.owner->shared_memory())

inline u32 thread() { return emulation::here.thread; }
inline u32 threads() { return emulation::here.owner->threads(); }
inline u32 block() { return emulation::here.block; }
inline u32 blocks() { return emulation::here.blocks; }

inline bool all_of_block(bool yes) { return emulation::here.owner->votes(yes) == threads(); }
inline bool any_of_block(bool yes) { return emulation::here.owner->votes(yes) != 0; }
inline void sync_block() { emulation::here.owner->votes(false); }

inline u64 now_ns() {
    using namespace std::chrono;
    return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

/* There are more threads than cores. Now and then one comes late. */
inline void relax(u32) {
    thread_local std::minstd_rand random{std::random_device{}()};
    if (random() % 64 == 0)
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 50));
    else
        std::this_thread::yield();
}

struct alignas(16) Vector {
    u64 low, high;
};

inline void store_relaxed(char *to, Vector halves) {
    auto *words = reinterpret_cast<u64 *>(to);
    Shared<u64>(words[0]).store(halves.low, memory_order_relaxed);
    Shared<u64>(words[1]).store(halves.high, memory_order_relaxed);
}

/* The other way round than they are stored: no order is promised. */
inline Vector load_relaxed(const char *from) {
    auto *words = reinterpret_cast<u64 *>(const_cast<char *>(from));
    const u64 high = Shared<u64>(words[1]).load(memory_order_relaxed);
    return {Shared<u64>(words[0]).load(memory_order_relaxed), high};
}

inline float float_of_bits(u32 bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline u32 bits_of_float(float value) {
    u32 bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float sum_of(float a, float b) { return a + b; }
inline float product_of(float a, float b) { return a * b; }
inline float quotient_of(float a, float b) { return a / b; }
inline float root_of(float value) { return std::sqrt(value); }
inline bool is_less(float a, float b) { return a < b; }

inline float float_of_float16(u16 bits) {
    _Float16 half;
    std::memcpy(&half, &bits, sizeof half);
    return static_cast<float>(half);
}

inline u16 float16_of_float(float value) {
    u16 bits;
    _Float16 half = static_cast<_Float16>(value);
    std::memcpy(&bits, &half, sizeof bits);
    return bits;
}

inline u16 bfloat16_of_float(float value) {
    u32 bits = bits_of_float(value);
    if (std::isnan(value)) return 0x7fff;
    return static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#endif
