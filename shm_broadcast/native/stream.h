/* Copies with non-temporal stores, for large targets that this core does not read soon. */
#ifndef GC_STREAM_H
#define GC_STREAM_H

#include <stddef.h>

/* Copies past the caches if `size` is large. A plain store first fetches the target's cache line,
 * and keeps it in this core's cache, from where the next reader has to fetch it. Non-temporal
 * stores are weakly ordered: call `stream_end` before the release store that publishes the copy. */
void stream_copy(void *to, const void *from, size_t size);

/* Orders all non-temporal stores before all later stores (sfence). */
void stream_end(void);

#endif
