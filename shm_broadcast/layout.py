"""Every offset in this package's shared memory, drawn once; writers and readers both import it.

All words are little-endian and naturally aligned. Lines of 64 bytes (one cache line) separate
fields that different processes write.

Segment header, at 0 of every segment
-------------------------------------
::

     0                4                8                               16
    +----------------+----------------+-------------------------------+
    | magic          | version        | size of the segment, bytes    |
    +----------------+----------------+-------------------------------+
    | nonce, 16 random bytes: names this segment among all            |
    +-----------------------------------------------------------------+

Board: abort word, then slots per member
----------------------------------------
::

    32   +----------------+----------------+
         | key, 32 random bytes: only processes that attached the board have them
    64   +----------------+----------------+
         | abort          | n_members      |   abort: 0, or 1 + the member of the first failure
    72   +----------------+----------------+
         | name, 48 bytes, NUL-padded      |
    120  +----------------+----------------+
         | entries u32    | -              |   per history: `HISTORY_ENTRIES`, or 0: no histories
    128  +----------------+----------------+
         | member slot 0   (128 bytes)     |
         | member slot 1 ...               |
         | failure slot 0  (512 bytes) ... |
         | status slot 0  (2048 bytes) ... |
         | history 0   (entries * 64),     |
         |   its totals ...                |
         | fingerprints 0 (32 * 320 bytes) |   only with histories
         +---------------------------------+

    Member slot
     0   | eventcount u32 | waiters u32    |   written by any process (atomic add)
     8   | state u32      | pid u32        |   written by the member
    16   | start time of the process u64   |
    24   | joining u64                     |   process that takes the slot: pid, and its start time
                                               in the upper half; 0: none
    48   | rank i32       | -              |
    64   | sequence u64                    |   a line of its own: stamped by every operation
    72   | progress, monotonic ns u64      |
    80   | operation, 48 bytes, NUL-padded |

    Failure slot
     0   | claimed u32    | culprit u32    |
     8   | kind, 56 bytes | message, 448 bytes (UTF-8, NUL-padded)

    Status slot, written by the member for inspection only
     0   | bytes u32      | CRC-32 u32     |   of the record
     8   | record: `PublishedStatus`, MessagePack

    History: the last operations of a member, written by it only; number k, counted as its sequence,
    is entry (k - 1) % entries
     0   | begin, monotonic ns u64         |
     8   | end u64                         |   0: under way; stored last
     16  | sequence u64                    |
     24  | bytes u64                       |   of this member's input or message; 0: unknown
     32  | number u32     | peer u16 | verb u8 | dtype u8 |
     40  | outcome u8     | group, 23 bytes            |   verb 0: here the operation's name

    Totals, behind the entries, by group and verb: sums over all ended operations, also those whose
    entries were overwritten
     0   | group 0 (24 bytes): "", for no group | group 1 ... | group 15: all further groups |
     384 | group 0, verb 0 (32 bytes), verb 1 ...    | group 1, verb 0 ...                        |

    Total
     0   | ended u64                       |
     8   | failed u64                      |   how many of them were not done
     16  | ns u64                          |   from begin to end
     24  | bytes u64                       |

    Fingerprint of a member's collectives in a group, where its members compare them: a log
     0   | count u64                       |   of collectives
     8   | group u64                       |   names the group, in 63 bits; 0: the entry is free;
         |                                 |   with `FINGERPRINT_CLOSED`: free, and the last group
     64  | entry 0, entry 1 ...            |   collective k is entry k % `FINGERPRINT_ENTRIES`

    Entry of a log
     0   | digest u32     | number u32     |   one word: the checksum of the first ``number``
     8   | signature, 56 bytes             |   of collective ``number``; may be torn

An entry is written before the member's ``sequence``. A process that reads ``sequence``, the
history, and ``sequence`` again can tell which entries are complete and were not overwritten.
Numbers count, in each group, a rank's collectives, its sends to each rank, and its receives from
each rank; messages of a queue have their number in the ring. ``peer`` is a rank of the group.

Ring: one writer, N readers, a byte stream of records
-----------------------------------------------------
::

    64   | capacity u64                    |
    72   | n_readers u32  | closed u32     |
    80   | nonce of the board, 16 bytes    |   this and the member numbers are for inspection
    96   | writer u32     |                    member number
    128  | published u64  | sequence u64   | gate u64 |     written by the writer only
    192  | consumed u64   | sequence u64   | member u32 | - | joined u64 |
    224  | reads u32 x 2                   | reader 0's line, written by it only
    256  | reader 1's line ...
    data_offset(n_readers): `capacity` bytes

``published`` and ``consumed`` are positions: bytes since the ring began, never reduced; byte p is
at ``data_offset + p % capacity``. ``gate`` is the writer's cache of the smallest ``consumed``. A
reader that closes sets ``consumed`` to `LEFT` and no longer limits the gate. ``joined`` is the
position where its process began to read, or the end of a message that it dropped because it cannot
map a block: no earlier block is still to be mapped. ``reads``: the time to fetch data that was
written through the caches, and past them, in ticks per MiB; 0: unknown (native/way.h).

Record, at a multiple of 64
---------------------------
::

     0                4        5        6        8               16              24              32
    +----------------+--------+--------+--------+---------------+---------------+---------------+
    | size u32       | kind   | codec  |buffers | total u64     | sequence u64  | offset u64    |
    +----------------+--------+--------+--------+---------------+---------------+---------------+
    | `size` bytes: body[offset : offset + size] of message `sequence`, which has `total` bytes   |
    +---------------------------------------------------------------------------------------------+

A body is ``buffers`` sizes (u64 each), the main part, then the out-of-band buffers. A size with the
`PLACED` bit is the size of a descriptor; the buffer itself is in a block of its own. A message is
one MESSAGE record, followed by FRAGMENT records up to ``total`` bytes. PADDING fills the space
before the wrap when a record must not be split. CANCEL ends a message whose writer gave up; the
writer always keeps room for it.

The ordering rule
-----------------
1. The writer writes a record, then stores ``published`` with release. A reader loads ``published``
with acquire, then reads the record. So no reader sees a torn record.
2. A reader copies a record out, then stores ``consumed`` with release; the writer loads it with
acquire before it reuses the bytes. So nothing unread is overwritten.
3. Notify: store, full fence, load ``waiters``; if not zero, add to the eventcount and wake. Wait:
add to ``waiters`` (full fence), load the eventcount, check the condition, sleep if the eventcount
still holds that value. So no wake-up is lost.
4. Inspection. A member stores an entry of its history between two sequences: with a release fence
before the entry, a release store of ``sequence`` after it; a reader copies entries between two
loads of ``sequence``, with full fences. A total's ``ended`` is stored with release after the rest,
and loaded with acquire before it. A fingerprint's group is 0, with a full fence, while its log is
cleared; a reader copies the log between two loads of the group, with a full fence. A status has a
checksum, and needs no order.

Tested on x86-64; on aarch64 emulated only. Every order above is explicit, none relies on TSO.
``models/doorbell_ring.pml`` checks rules 1-3 with store buffers.
"""

from __future__ import annotations

from typing import Final

LINE: Final = 64
MAGIC: Final = 0x47435348
VERSION: Final = 8

SEGMENT_MAGIC: Final = 0
SEGMENT_VERSION: Final = 4
SEGMENT_SIZE: Final = 8
SEGMENT_NONCE: Final = 16
SEGMENT_NONCE_BYTES: Final = 16

BOARD_LABEL: Final = "group-board"
BOARD_KEY: Final = 32
BOARD_KEY_BYTES: Final = 32
BOARD_ABORT: Final = 64
BOARD_MEMBERS: Final = 68
BOARD_NAME: Final = 72
BOARD_NAME_BYTES: Final = 48
BOARD_HISTORY: Final = 120
BOARD_SLOTS: Final = 128

MEMBER_STRIDE: Final = 128
MEMBER_EVENTCOUNT: Final = 0
EVENTCOUNT_WAITERS: Final = 4
MEMBER_STATE: Final = 8
MEMBER_PID: Final = 12
MEMBER_START_TIME: Final = 16
MEMBER_JOINING: Final = 24
MEMBER_RANK: Final = 48
MEMBER_SEQUENCE: Final = 64
MEMBER_PROGRESS: Final = 72
MEMBER_OPERATION: Final = 80
OPERATION_BYTES: Final = 48

STATE_ABSENT: Final = 0
STATE_IDLE: Final = 1
STATE_BUSY: Final = 2
STATE_CLOSED: Final = 3
STATE_LOST: Final = 4
STATE_NAMES: Final = ("absent", "idle", "busy", "closed", "lost")

FAILURE_STRIDE: Final = 512
FAILURE_CLAIMED: Final = 0
FAILURE_CULPRIT: Final = 4
FAILURE_KIND: Final = 8
FAILURE_KIND_BYTES: Final = 56
FAILURE_MESSAGE: Final = 64
FAILURE_MESSAGE_BYTES: Final = 448

STATUS_STRIDE: Final = 2048

HISTORY_ENTRIES: Final = 2048
ENTRY_STRIDE: Final = 64
ENTRY_BEGIN: Final = 0
ENTRY_END: Final = 8
ENTRY_SEQUENCE: Final = 16
ENTRY_BYTES: Final = 24
ENTRY_NUMBER: Final = 32
ENTRY_PEER: Final = 36
ENTRY_VERB: Final = 38
ENTRY_DTYPE: Final = 39
ENTRY_OUTCOME: Final = 40
ENTRY_GROUP: Final = 41
ENTRY_GROUP_BYTES: Final = 23
ENTRY_FORMAT: Final = "<QQQQIHBBB23s"
NO_PEER: Final = 0xFFFF

DID_NAMES: Final = (
    "",
    *("barrier", "all_reduce", "all_gather", "all_gatherv", "reduce_scatter", "reduce_scatterv"),
    *("all_to_all", "broadcast", "reduce", "gather", "scatter", "send", "recv"),
    *("enqueue", "dequeue", "acquire_read"),
)
"""The verbs of entries by code: collectives first, those with a root last among them."""
DID_ENQUEUE: Final = DID_NAMES.index("enqueue")
DID_DEQUEUE: Final = DID_NAMES.index("dequeue")
DID_ACQUIRE_READ: Final = DID_NAMES.index("acquire_read")

TOTAL_GROUPS: Final = 16
TOTAL_NAME_STRIDE: Final = 24
TOTAL_VERBS: Final = len(DID_NAMES)
TOTAL_STRIDE: Final = 32
TOTAL_ENDED: Final = 0
TOTAL_FAILED: Final = 8
TOTAL_NS: Final = 16
TOTAL_BYTES: Final = 24
TOTALS: Final = HISTORY_ENTRIES * ENTRY_STRIDE
TOTALS_ROWS: Final = TOTALS + TOTAL_GROUPS * TOTAL_NAME_STRIDE
HISTORY_STRIDE: Final = TOTALS_ROWS + TOTAL_GROUPS * TOTAL_VERBS * TOTAL_STRIDE

LOG_COUNT: Final = 0
LOG_ENTRIES: Final = 64
COLLECTIVE_STRIDE: Final = 64
COLLECTIVE_WORD: Final = 0
COLLECTIVE_SIGNATURE: Final = 8

FINGERPRINTS: Final = 32
FINGERPRINT_ENTRIES: Final = 4
FINGERPRINT_STRIDE: Final = LOG_ENTRIES + FINGERPRINT_ENTRIES * COLLECTIVE_STRIDE
FINGERPRINT_GROUP: Final = 8
FINGERPRINT_CLOSED: Final = 1 << 63
FINGERPRINTS_STRIDE: Final = FINGERPRINTS * FINGERPRINT_STRIDE

OUTCOME_DONE: Final = 1
OUTCOME_NAMES: Final = (
    *("under way", "done", "timed out", "peer lost", "aborted", "diverged", "closed", "failed"),
)
"""The outcomes of operations, by code."""

DTYPE_NAMES: Final = (
    "other",
    *("float16", "bfloat16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64"),
    *("uint16", "uint32", "bool", "complex64", "complex128", "uint64", "complex32"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
"""The dtypes of entries and signatures, by code."""

RING_LABEL: Final = "group-queue"
RING_CAPACITY: Final = 64
RING_READER_COUNT: Final = 72
RING_CLOSED: Final = 76
RING_BOARD: Final = 80
RING_WRITER: Final = 96
RING_PUBLISHED: Final = 128
RING_SEQUENCE: Final = 136
RING_GATE: Final = 144
RING_READERS: Final = 192
READER_STRIDE: Final = 64
READER_CONSUMED: Final = 0
READER_SEQUENCE: Final = 8
READER_MEMBER: Final = 16
READER_JOINED: Final = 24
READER_READS: Final = 32
LEFT: Final = 2**64 - 1
PLACED: Final = 1 << 63

RECORD_ALIGN: Final = 64
RECORD_HEADER: Final = 32
RECORD_SIZE: Final = 0
RECORD_KIND: Final = 4
RECORD_CODEC: Final = 5
RECORD_BUFFERS: Final = 6
RECORD_TOTAL: Final = 8
RECORD_SEQUENCE: Final = 16
RECORD_OFFSET: Final = 24
RECORD_FORMAT: Final = "<IBBHQQQ"

KIND_MESSAGE: Final = 1
KIND_FRAGMENT: Final = 2
KIND_PADDING: Final = 3
KIND_CANCEL: Final = 4


def align(size: int, alignment: int = LINE) -> int:
    """Return ``size`` rounded up to a multiple of ``alignment``."""
    return -(-size // alignment) * alignment


def member_slot(member: int) -> int:
    """Return the offset of a member's slot in its board."""
    return BOARD_SLOTS + member * MEMBER_STRIDE


def failure_slot(member: int, n_members: int) -> int:
    """Return the offset of a member's failure slot in its board."""
    return BOARD_SLOTS + n_members * MEMBER_STRIDE + member * FAILURE_STRIDE


def status_slot(member: int, n_members: int) -> int:
    """Return the offset of a member's status slot in its board."""
    return failure_slot(n_members, n_members) + member * STATUS_STRIDE


def history_slot(member: int, n_members: int) -> int:
    """Return the offset of a member's history in its board."""
    return status_slot(n_members, n_members) + member * HISTORY_STRIDE


def fingerprints_slot(member: int, n_members: int) -> int:
    """Return the offset of a member's fingerprints in a board with histories."""
    return history_slot(n_members, n_members) + member * FINGERPRINTS_STRIDE


def board_size(n_members: int, *, histories: bool = True) -> int:
    """Return the bytes of a board, with or without histories."""
    return (fingerprints_slot if histories else status_slot)(n_members, n_members)


def reader_line(reader: int) -> int:
    """Return the offset of a reader's line in its ring."""
    return RING_READERS + reader * READER_STRIDE


def data_offset(n_readers: int) -> int:
    """Return the offset of a ring's records."""
    return align(reader_line(n_readers))


def ring_size(n_readers: int, capacity: int) -> int:
    """Return the bytes of a ring's segment."""
    return data_offset(n_readers) + capacity


def record_stride(size: int) -> int:
    """Return the bytes that a record of ``size`` payload bytes takes in the ring."""
    return align(RECORD_HEADER + size, RECORD_ALIGN)
