#include "stream.h"

#include <string.h>

#if defined(__x86_64__)
#include <emmintrin.h>
#include <stdint.h>

/* Smaller copies go through the caches: the next reader gets the lines faster from this core's cache
 * than from memory. */
#define STREAMED_BYTES 4096

#define LINE 64

void stream_copy(void *to, const void *from, size_t size) {
    if (size < STREAMED_BYTES) {
        memcpy(to, from, size);
        return;
    }
    char *target = to;
    const char *source = from;
    size_t head = -(uintptr_t)to % LINE, done = head + (size - head) / LINE * LINE;
    memcpy(target, source, head);
    for (size_t at = head; at < done; at += LINE) {
        const __m128i *line = (const __m128i *)(source + at);
        __m128i a = _mm_loadu_si128(line), b = _mm_loadu_si128(line + 1);
        __m128i c = _mm_loadu_si128(line + 2), d = _mm_loadu_si128(line + 3);
        __m128i *place = (__m128i *)(target + at);
        _mm_stream_si128(place, a);
        _mm_stream_si128(place + 1, b);
        _mm_stream_si128(place + 2, c);
        _mm_stream_si128(place + 3, d);
    }
    memcpy(target + done, source + done, size - done);
}

void stream_end(void) { _mm_sfence(); }

#else

void stream_copy(void *to, const void *from, size_t size) { memcpy(to, from, size); }

void stream_end(void) {}

#endif
