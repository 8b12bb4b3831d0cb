/* One rank's part in a collective, and its plan. */
#ifndef GC_PLAN_H
#define GC_PLAN_H

#include "steps.h"

/* As device_comm.operation.Operation. The sizes are elements by rank; NULL: equal parts. */
typedef struct {
    int verb;
    size_t root;
    span source, output;
    uint64_t itemsize;
    const uint64_t *source_sizes, *output_sizes;
    uint64_t longest; /* elements of the longest part of any rank, if there are sizes */
} collective;

/* Fills the plan after its signature, except for the destinations; of the output it uses only the
 * size. */
void plan_sources(steps *s, const collective *c);

/* Fills in the destinations, after plan_sources. */
void plan_results(steps *s, const collective *c);

#endif
