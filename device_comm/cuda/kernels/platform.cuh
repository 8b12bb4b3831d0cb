/* The device's primitives. The tests have a version for host threads, selected by the include path
 * of <platform.cuh>. */
#ifndef GC_PLATFORM_CUH
#define GC_PLATFORM_CUH

#include <cuda/atomic>
#include <cuda/std/cstdint>

using u16 = cuda::std::uint16_t;
using u32 = cuda::std::uint32_t;
using u64 = cuda::std::uint64_t;
using cuda::memory_order_acq_rel;
using cuda::memory_order_acquire;
using cuda::memory_order_relaxed;
using cuda::memory_order_release;

#define DEVICE __device__ __forceinline__
#define RARELY __device__ __noinline__
#define SHARED(Type, name) __shared__ Type name
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")

/* A kernel with one parameter, which is not copied; at most `threads` threads in a block, and at
 * least `blocks` resident blocks on a multiprocessor, if the grid has as many. */
#define KERNEL(name, Parameter, threads, blocks)                                                   \
    extern "C" __global__ void __launch_bounds__(threads, blocks)                                  \
        name(const __grid_constant__ Parameter job)

/* A word that all devices and the host access concurrently. */
template <typename Word>
using Shared = cuda::atomic_ref<Word, cuda::thread_scope_system>;

/* A word that only the kernels of one rank access, on one device. */
template <typename Word>
using Own = cuda::atomic_ref<Word, cuda::thread_scope_device>;

DEVICE u32 thread() { return threadIdx.x; }
DEVICE u32 threads() { return blockDim.x; }
DEVICE u32 block() { return blockIdx.x; }
DEVICE u32 blocks() { return gridDim.x; }

/* A barrier of the block's threads, which also makes their writes visible to each other. */
DEVICE void sync_block() { __syncthreads(); }
/* The same; return the conjunction, or disjunction, of all threads' `yes`. */
DEVICE bool all_of_block(bool yes) { return __syncthreads_and(yes); }
DEVICE bool any_of_block(bool yes) { return __syncthreads_or(yes); }

/* One clock for the whole device; its resolution may be a microsecond. */
DEVICE u64 now_ns() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

/* Call between polls of a word. Long waits back off, to reduce memory traffic. */
DEVICE void relax(u32 polls) {
    if (polls > 4096) __nanosleep(100);
}

/* The unit of memory accesses. */
struct alignas(16) Vector {
    u64 low, high;
};

/* Each half of a vector is atomic; the halves are unordered. */
DEVICE void store_relaxed(char *to, Vector halves) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};"
                 :: "l"(to), "l"(halves.low), "l"(halves.high) : "memory");
}

DEVICE Vector load_relaxed(const char *from) {
    Vector halves;
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(halves.low), "=l"(halves.high) : "l"(from) : "memory");
    return halves;
}

DEVICE float float_of_bits(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 bits_of_float(float value) { return __float_as_uint(value); }

/* Single precision with subnormals, which operators would flush to zero: CuPy compiles with
 * -ftz=true. */
DEVICE float sum_of(float a, float b) {
    float sum;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
    return sum;
}

DEVICE float product_of(float a, float b) {
    float product;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
    return product;
}

DEVICE float quotient_of(float a, float b) {
    float quotient;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(quotient) : "f"(a), "f"(b));
    return quotient;
}

DEVICE float root_of(float value) {
    float root;
    asm("sqrt.rn.f32 %0, %1;" : "=f"(root) : "f"(value));
    return root;
}

DEVICE bool is_less(float a, float b) {
    u32 yes;
    asm("{.reg .pred less; setp.lt.f32 less, %1, %2; selp.u32 %0, 1, 0, less;}"
        : "=r"(yes) : "f"(a), "f"(b));
    return yes;
}

/* Half precision, rounded to nearest, ties to even. */
DEVICE float float_of_float16(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

DEVICE u16 float16_of_float(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

DEVICE u16 bfloat16_of_float(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

#endif
