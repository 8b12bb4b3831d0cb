/* Copying into shared memory what another core reads next. */
#ifndef GC_SHARE_H
#define GC_SHARE_H

#include <stdbool.h>
#include <stddef.h>

/* Whether copies go past the caches, for all of this process. Cores that share their last cache
 * fetch from there what was just written; other cores fetch it from memory as fast, and the writer
 * is then spared to fetch the lines that it overwrites. */
void share_past_caches(bool past);

/* `stream_end` must come before the store that publishes the copy. */
void share_copy(void *to, const void *from, size_t size);

#endif
