/* Offsets in shared memory, the same as in shm_broadcast/layout.py, which draws and explains them.
 * A test compares the two. */
#ifndef GC_LAYOUT_H
#define GC_LAYOUT_H

#define RING_CAPACITY 64
#define RING_CLOSED 76
#define RING_PUBLISHED 128
#define RING_SEQUENCE 136
#define RING_GATE 144
#define RING_READERS 192
#define READER_STRIDE 64
#define READER_CONSUMED 0
#define READER_SEQUENCE 8

#define RECORD_ALIGN 64
#define RECORD_HEADER 32
#define RECORD_SIZE 0
#define RECORD_KIND 4
#define RECORD_CODEC 5
#define RECORD_BUFFERS 6
#define RECORD_TOTAL 8
#define RECORD_SEQUENCE 16
#define RECORD_OFFSET 24

#define KIND_MESSAGE 1
#define KIND_FRAGMENT 2
#define KIND_PADDING 3
#define KIND_CANCEL 4

#define BOARD_ABORT 64

#define STATE_BUSY 2

#define DOORBELL_SLEEPERS 4
#define MEMBER_STATE 8
#define MEMBER_SEQUENCE 64
#define MEMBER_PROGRESS 72
#define MEMBER_OPERATION 80
#define OPERATION_BYTES 48

#define HISTORY_ENTRIES 2048
#define ENTRY_STRIDE 64
#define ENTRY_BEGIN 0
#define ENTRY_END 8
#define ENTRY_SEQUENCE 16
#define ENTRY_BYTES 24
#define ENTRY_NUMBER 32
#define ENTRY_PEER 36
#define ENTRY_VERB 38
#define ENTRY_DTYPE 39
#define ENTRY_OUTCOME 40
#define ENTRY_GROUP 41
#define ENTRY_GROUP_BYTES 23
#define NO_PEER 65535
#define TOTAL_GROUPS 16
#define TOTAL_NAME_STRIDE 24
#define TOTAL_VERBS 17
#define TOTAL_STRIDE 32
#define TOTAL_ENDED 0
#define TOTAL_FAILED 8
#define TOTAL_NS 16
#define TOTAL_BYTES 24
#define TOTALS 131072
#define TOTALS_ROWS 131456
#define HISTORY_STRIDE 140160
#define DID_ENQUEUE 14
#define DID_DEQUEUE 15
#define DID_ACQUIRE_READ 16
#define OUTCOME_DONE 1

#endif
