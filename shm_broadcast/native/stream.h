/* Copying into memory that this core does not need soon, but another one may. */
#ifndef GC_STREAM_H
#define GC_STREAM_H

#include <stddef.h>

/* Copies past the caches where that pays: it spares fetching lines that the reader's cache holds,
 * and the reader does not have to fetch them out of this core's. What is copied becomes visible to
 * others by a release store that follows `stream_end`. */
void stream_copy(void *to, const void *from, size_t size);

/* Orders what was streamed before all later stores. */
void stream_end(void);

#endif
