/* Offsets and codes. device_comm/shm/layout.py and signature.py draw and explain them; a test
 * compares both. */
#ifndef GC_GROUP_LAYOUT_H
#define GC_GROUP_LAYOUT_H

#define GROUP_RANKS 64
#define GROUP_INSIDE_BYTES 72
#define GROUP_WHOLE_BYTES 80
#define GROUP_STEP_BYTES 88
#define GROUP_RING_BYTES 96
#define GROUP_SLOTS 104
#define GROUP_RINGS 112

#define RANK_LINES 128
#define RANK_STRIDE 64
#define RANK_DONE 0
#define RANK_READS 16

#define BUFFERS 2
#define RING_STEPS 3
#define SLOT_HEADER 64
#define SLOT_ARRIVED 0
#define SLOT_SIGNATURE 8
#define PIECE_ALIGN 64

#define SIGNATURE_VERB 0
#define SIGNATURE_OP 1
#define SIGNATURE_DTYPE 2
#define SIGNATURE_DIMS 3
#define SIGNATURE_PLACE 4
#define SIGNATURE_SHAPE 8
#define SHAPE_DIMS 5
#define SIGNATURE_COMPARED 48
#define SIGNATURE_CHUNK 48
#define SIGNATURE_CALL 52
#define SIGNATURE_BYTES 56

#define NO_OP 255

/* A log of a call's collectives: shm_broadcast/layout.py. */
#define LOG_COUNT 0
#define LOG_ENTRIES 64
#define COLLECTIVE_STRIDE 64
#define COLLECTIVE_WORD 0
#define COLLECTIVE_SIGNATURE 8
#define CALL_ENTRIES 8

#define STATE_IDLE 1
#define STATE_BUSY 2

enum {
    VERB_BARRIER, VERB_ALL_REDUCE, VERB_ALL_GATHER, VERB_ALL_GATHERV, VERB_REDUCE_SCATTER,
    VERB_REDUCE_SCATTERV, VERB_ALL_TO_ALL, VERB_BROADCAST, VERB_REDUCE, VERB_GATHER, VERB_SCATTER,
    VERBS,
};

enum { KIND_MOVE, KIND_REDUCE, KIND_ALL_REDUCE };

#endif
