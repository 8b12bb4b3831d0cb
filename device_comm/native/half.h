/* Converts blocks of half-precision numbers to single precision and back, rounding to nearest even.
 *
 * The single-precision numbers may be permuted, alike for all blocks of one length and type:
 * elementwise operations on them are valid, others are not. */
#ifndef GC_HALF_H
#define GC_HALF_H

#include <stddef.h>
#include <stdint.h>

void load_bfloat16(const uint16_t *from, float *to, size_t n);
void store_bfloat16(const float *from, uint16_t *to, size_t n);
void load_float16(const uint16_t *from, float *to, size_t n);
void store_float16(const float *from, uint16_t *to, size_t n);

/* Add two blocks, the common case of groups of two; `to` may be `a` or `b`. */
void add_bfloat16(const uint16_t *a, const uint16_t *b, uint16_t *to, size_t n);
void add_float16(const uint16_t *a, const uint16_t *b, uint16_t *to, size_t n);

#endif
