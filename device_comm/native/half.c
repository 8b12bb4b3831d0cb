#include "half.h"

#include "versions.h"

typedef union {
    uint32_t bits;
    float value;
} word;

/* Two adjacent halves in one word, aligned like a half. */
typedef uint32_t __attribute__((aligned(2), may_alias)) two_halves;

static inline uint32_t round_bfloat16(float value) {
    uint32_t bits = (word){.value = value}.bits;
    return value != value ? 0x7fc00000u : bits + 0x7fffu + ((bits >> 16) & 1u);
}

/* Stores the even elements first, then the odd ones: vector code then needs no shuffles. */
VERSIONED void load_bfloat16(const uint16_t *from, float *to, size_t n) {
    const two_halves *pairs = (const two_halves *)from;
    float *odd = to + n / 2;
    INDEPENDENT
    for (size_t i = 0; i < n / 2; i++) {
        to[i] = (word){.bits = pairs[i] << 16}.value;
        odd[i] = (word){.bits = pairs[i] & 0xffff0000u}.value;
    }
    if (n % 2) to[n - 1] = (word){.bits = (uint32_t)from[n - 1] << 16}.value;
}

VERSIONED void store_bfloat16(const float *from, uint16_t *to, size_t n) {
    two_halves *pairs = (two_halves *)to;
    const float *odd = from + n / 2;
    INDEPENDENT
    for (size_t i = 0; i < n / 2; i++)
        pairs[i] = round_bfloat16(from[i]) >> 16 | (round_bfloat16(odd[i]) & 0xffff0000u);
    if (n % 2) to[n - 1] = (uint16_t)(round_bfloat16(from[n - 1]) >> 16);
}

/* Equals load, add and store, without intermediate results in memory. */
VERSIONED void add_bfloat16(const uint16_t *a, const uint16_t *b, uint16_t *to, size_t n) {
    const two_halves *left = (const two_halves *)a, *right = (const two_halves *)b;
    two_halves *pairs = (two_halves *)to;
    INDEPENDENT
    for (size_t i = 0; i < n / 2; i++) {
        word low = {.bits = left[i] << 16}, high = {.bits = left[i] & 0xffff0000u};
        low.value += (word){.bits = right[i] << 16}.value;
        high.value += (word){.bits = right[i] & 0xffff0000u}.value;
        pairs[i] = round_bfloat16(low.value) >> 16 | (round_bfloat16(high.value) & 0xffff0000u);
    }
    if (n % 2) {
        word last = {.bits = (uint32_t)a[n - 1] << 16};
        last.value += (word){.bits = (uint32_t)b[n - 1] << 16}.value;
        to[n - 1] = (uint16_t)(round_bfloat16(last.value) >> 16);
    }
}

/* Subnormal halves are converted as integers: a thread may flush subnormal floats to zero, so no
 * intermediate value may be one; otherwise the result would differ from the vector instructions'. */
static inline float from_float16(uint16_t half) {
    uint32_t magnitude = half & 0x7fffu;
    uint32_t subnormal = (word){.value = (float)(int32_t)magnitude * 0x1p-24f}.bits;
    uint32_t special = 0x7f800000u | (magnitude << 13);
    uint32_t normal = (magnitude << 13) + (112u << 23);
    uint32_t finite = magnitude < 0x400u ? subnormal : normal;
    uint32_t bits = magnitude >= 0x7c00u ? special : finite;
    return (word){.bits = bits | ((uint32_t)(half & 0x8000u) << 16)}.value;
}

/* Rounds a subnormal half by adding a number whose last bit has the weight of the half's last bit. A
 * NaN keeps the upper bits of its payload, as in the vector instructions. */
static inline uint16_t to_float16(float value) {
    uint32_t bits = (word){.value = value}.bits;
    uint32_t sign = bits >> 31;
    bits &= 0x7fffffffu;
    uint32_t normal = (bits - (112u << 23) + 0xfffu + ((bits >> 13) & 1u)) >> 13;
    word shifted = {.bits = bits};
    shifted.value += 0.5f;
    uint32_t subnormal = shifted.bits - 0x3f000000u;
    uint32_t special = bits > 0x7f800000u ? 0x7e00u | (bits >> 13 & 0x3ffu) : 0x7c00u;
    uint32_t finite = bits < 0x38800000u ? subnormal : normal;
    return (uint16_t)((bits >= 0x47800000u ? special : finite) | (sign << 15));
}

#if defined(__x86_64__)
#include <immintrin.h>

__attribute__((target("avx,f16c"))) static size_t load_with_f16c(const uint16_t *from, float *to,
                                                                 size_t n) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
    return i;
}

__attribute__((target("avx,f16c"))) static size_t store_with_f16c(const float *from, uint16_t *to,
                                                                  size_t n) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i),
                                                              _MM_FROUND_TO_NEAREST_INT));
    return i;
}

__attribute__((target("avx,f16c"))) static size_t add_with_f16c(const uint16_t *a,
                                                                const uint16_t *b, uint16_t *to,
                                                                size_t n) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 left = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(a + i)));
        __m256 right = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(b + i)));
        __m128i sum = _mm256_cvtps_ph(_mm256_add_ps(left, right), _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128((__m128i *)(to + i), sum);
    }
    return i;
}

#define FAST(converted) (__builtin_cpu_supports("f16c") ? (converted) : 0)
#else
#define FAST(converted) 0
#endif

void load_float16(const uint16_t *from, float *to, size_t n) {
    for (size_t i = FAST(load_with_f16c(from, to, n)); i < n; i++) to[i] = from_float16(from[i]);
}

void store_float16(const float *from, uint16_t *to, size_t n) {
    for (size_t i = FAST(store_with_f16c(from, to, n)); i < n; i++) to[i] = to_float16(from[i]);
}

void add_float16(const uint16_t *a, const uint16_t *b, uint16_t *to, size_t n) {
    for (size_t i = FAST(add_with_f16c(a, b, to, n)); i < n; i++)
        to[i] = to_float16(from_float16(a[i]) + from_float16(b[i]));
}
