/* Blocks of half-precision numbers to single precision and back, to nearest even.
 *
 * In between the numbers may stand in another order, the same for all blocks of one length and
 * type: whoever combines blocks number by number need not know. */
#ifndef GC_HALF_H
#define GC_HALF_H

#include <stddef.h>
#include <stdint.h>

void load_bfloat16(const uint16_t *from, float *to, size_t n);
void store_bfloat16(const float *from, uint16_t *to, size_t n);
void load_float16(const uint16_t *from, float *to, size_t n);
void store_float16(const float *from, uint16_t *to, size_t n);

/* Sums of two blocks, which is what groups of two do all the time; `to` may be one of them. */
void add_bfloat16(const uint16_t *a, const uint16_t *b, uint16_t *to, size_t n);
void add_float16(const uint16_t *a, const uint16_t *b, uint16_t *to, size_t n);

#endif
