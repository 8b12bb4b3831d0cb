/* Turns one rank's part in a collective into the plan of its steps. */
#include "plan.h"

#include <string.h>

#include "atomics.h"

/* Lays out the parts of all ranks in a row. */
static void lay_out(span *parts, size_t n, span whole, const uint64_t *sizes, uint64_t itemsize) {
    char *at = whole.address;
    uint64_t equal = whole.size / n;
    if (whole.size == 0) return; /* it may have no address */
    for (size_t rank = 0; rank < n; rank++) {
        uint64_t size = sizes ? sizes[rank] * itemsize : equal;
        parts[rank] = (span){at, size};
        at += size;
    }
}

static int kind_of(const steps *s, const collective *c, bool at_root) {
    switch (c->verb) {
    case VERB_ALL_REDUCE:
        return c->source.size <= gc_load64(s->group, GROUP_WHOLE_BYTES) ? KIND_REDUCE : KIND_ALL_REDUCE;
    case VERB_REDUCE_SCATTER:
    case VERB_REDUCE_SCATTERV: return KIND_REDUCE;
    case VERB_REDUCE: return at_root ? KIND_REDUCE : KIND_MOVE;
    default: return KIND_MOVE;
    }
}

void plan_sources(steps *s, const collective *c) {
    plan *p = &s->plan;
    int verb = c->verb;
    bool at_root = c->root == s->rank;
    bool from_root = verb == VERB_BROADCAST || verb == VERB_SCATTER;
    bool to_root = verb == VERB_REDUCE || verb == VERB_GATHER;
    p->dtype = p->signature[SIGNATURE_DTYPE];
    p->op = p->signature[SIGNATURE_OP];
    p->kind = kind_of(s, c, at_root);
    p->puts = verb != VERB_BARRIER && (from_root ? at_root : !(to_root && at_root));
    p->addressed = verb == VERB_REDUCE_SCATTER || verb == VERB_REDUCE_SCATTERV ||
                   verb == VERB_ALL_TO_ALL || verb == VERB_SCATTER;
    if (c->source_sizes || c->output_sizes)
        p->length = c->longest * c->itemsize;
    else if (from_root && !at_root)
        p->length = c->output.size;
    else
        p->length = p->addressed ? c->source.size / s->n : c->source.size;
    memset(p->awaits, from_root || (to_root && !at_root) ? 0 : 1, s->n);
    if (from_root) p->awaits[c->root] = 1;
    p->awaits[s->rank] = 0;
    memset(p->gives, 0, s->n * sizeof(span));
    memset(p->takes, 0, s->n * sizeof(span));
    p->own = c->source.address;
    if (p->puts && p->addressed) {
        lay_out(p->gives, s->n, c->source, c->source_sizes, c->itemsize);
        p->own = p->gives[s->rank].address;
    } else if (p->puts) {
        p->gives[0] = c->source;
    }
}

void plan_results(steps *s, const collective *c) {
    plan *p = &s->plan;
    bool from_root = c->verb == VERB_BROADCAST || c->verb == VERB_SCATTER;
    if (p->kind != KIND_MOVE)
        p->takes[0] = c->output;
    else if (!from_root)
        lay_out(p->takes, s->n, c->output, c->output_sizes, c->itemsize);
    else if (c->output.address != p->own) /* the root broadcasts in place */
        p->takes[c->root] = c->output;
}
