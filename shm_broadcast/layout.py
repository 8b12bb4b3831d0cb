"""Every offset in this package's shared memory, drawn once; writers and readers both import it.

All words are little-endian and naturally aligned. Lines of 64 bytes (one cache line) separate
what different processes write.

Segment header, at 0 of every segment
-------------------------------------
::

     0                4                8                               16
    +----------------+----------------+-------------------------------+
    | magic          | version        | size of the segment, bytes    |
    +----------------+----------------+-------------------------------+
    | nonce, 16 random bytes: names this segment among all            |
    +-----------------------------------------------------------------+

Board: abort word, member slots, failure slots, outward slots, histories, tallies
--------------------------------------------------------------------------------
::

    32   +----------------+----------------+
         | key, 32 random bytes: only those know it who have attached the board
    64   +----------------+----------------+
         | abort          | n_members      |   abort: 0, or 1 + the member whose failure is first
    72   +----------------+----------------+
         | name, 48 bytes, NUL-padded      |
    120  +----------------+----------------+
         | entries u32    | -              |   of each history: `HISTORY_ENTRIES`, or 0: none
    128  +----------------+----------------+
         | member slot 0   (128 bytes)     |
         | member slot 1 ...               |
         | failure slot 0  (512 bytes) ... |
         | outward slot 0 (1088 bytes) ... |
         | history 0   (entries * 64),     |
         |   its totals ...                |
         | tallies 0   (32 * 64 bytes) ... |   where there are histories
         +---------------------------------+

    Member slot
     0   | doorbell u32   | sleepers u32   |   written by anyone (atomic add)
     8   | state u32      | pid u32        |   written by the member
    16   | start time of the process u64   |
    24   | joining u64                     |   process that takes the slot: pid, and its start time
                                               in the upper half; 0: none
    32   | collective u64                  |   the number of the group's collective that it is in
    40   | as of u64                       |   the sequence that the number above belongs to
    48   | rank i32       | -              |
    64   | sequence u64                    |   a line of its own: stamped by every operation
    72   | progress, monotonic ns u64      |
    80   | operation, 48 bytes, NUL-padded |

    Failure slot
     0   | claimed u32    | culprit u32    |
     8   | kind, 56 bytes | message, 448 bytes (UTF-8, NUL-padded)

    Outward slot, written by the member for whoever looks on: no member reads it
     0   | stacks u32     | -              |   1 + the descriptor that it writes its stacks to, or 0
     8   | place, 56 bytes: its ranks in its groups, as "tp 0, pp 1"
     64  | wait 0 (128 bytes), 1, 2, 3     |   what its threads wait for
     576 | membership 0 (32 bytes) ... 15  |   the groups that it is in

    Wait, once it has lasted for a tenth of a second
     0   | since, monotonic ns u64         |   0: the entry is free
     8   | members u32    | -              |   how many it waits for
     16  | operation, 48 bytes             |
     64  | the first 32 of them, u16 each  |

    Membership
     0   | size u16 | rank u16 | first i32 |   of the group, its rank there, what rank 0 is called
     8   | name, 23 bytes      | open u8   |   size 0: the entry is free; how many such groups are
         |                                 |   open: 0 when the member has closed them

    History: the last operations of a member, written by it only; number k, counted as its sequence,
    is entry (k - 1) % entries
     0   | begin, monotonic ns u64         |
     8   | end u64                         |   0: under way; stored last
     16  | sequence u64                    |
     24  | bytes u64                       |   of this member's input or message, as far as known
     32  | number u32     | peer u16 | verb u8 | dtype u8 |
     40  | outcome u8     | group, 23 bytes            |   verb 0: what the operation is called

    Totals, behind the entries, by group and verb: what all operations came to that have ended, also
    those whose entries were used again
     0   | group 0 (24 bytes): "", for what has none | group 1 ... | group 15: all further groups |
     384 | group 0, verb 0 (32 bytes), verb 1 ...    | group 1, verb 0 ...                        |

    Total
     0   | ended u64                       |
     8   | failed u64                      |   how many of them were not done
     16  | ns u64                          |   from begin to end
     24  | bytes u64                       |

    Tally, of a member's collectives in a group, where its members compare them
     0   | group u64                       |   names the group, in 63 bits; 0: the entry is free;
         |                                 |   with `FINGERPRINT_CLOSED` likewise, and that was its
         group
     8   | digest u32     | count u32      |   one word: they belong together
     16  | last, 48 bytes                  |   what the last collective was

An entry is written before the member's ``sequence``. Whoever reads ``sequence``, the history, and
``sequence`` again, knows which entries were whole, and not overwritten meanwhile. Numbers count, in
each group, a rank's collectives, its sends to each rank, and its receipts from each rank; messages
of a queue have the number that they have in the ring. ``peer`` is a rank of the group.

Ring: one writer, N readers, a byte stream of records
-----------------------------------------------------
::

    64   | capacity u64                    |
    72   | n_readers u32  | closed u32     |
    80   | nonce of the board, 16 bytes    |   it and the member numbers are for who looks on
    96   | writer u32     |                    member number
    128  | published u64  | sequence u64   | gate u64 |     written by the writer only
    192  | consumed u64   | sequence u64   | member u32 | - | joined u64 |
    224  | reads u32 x 2                   | reader 0's line, written by it only
    256  | reader 1's line ...
    data_offset(n_readers): `capacity` bytes

``published`` and ``consumed`` are positions: bytes since the ring began, never reduced; byte p
lives at ``data_offset + p % capacity``. ``gate`` is the writer's cache of the smallest
``consumed``. A reader that has left sets ``consumed`` to `LEFT` and gates nobody. ``joined`` is
where its process began to read, or the end of a message that it dropped as it cannot map a block:
no block of before that is still to be mapped. ``reads``: the time that fetching takes, in ticks for
a MiB, of data that was written through the caches, and past them; 0: not known yet (native/way.h).

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
`PLACED` bit is that of a descriptor: the buffer itself lies in a block of its own. A message is
one MESSAGE record, followed by FRAGMENT records until ``total`` bytes are there. PADDING fills the
space before the wrap when a record must not be split. CANCEL ends a message whose writer gave up;
the writer always keeps room for it.

The ordering rule
-----------------
1. The writer writes a record, then stores ``published`` with release. A reader loads ``published``
   with acquire, then reads the record. So no reader sees a torn record.
2. A reader copies a record out, then stores ``consumed`` with release; the writer loads it with
   acquire before it reuses the bytes. So nothing unread is overwritten.
3. Whoever may have to wake a sleeper: store, full fence, load ``sleepers``; if not zero, add to the
   doorbell and wake. Whoever sleeps: add to ``sleepers`` (full fence), load the doorbell, check
   what it waits for, sleep if the doorbell still holds that value. So no wake-up is lost.

Run on x86-64. Written for aarch64 (every rule above is an explicit order, none relies on TSO), run
emulated only there. ``models/doorbell_ring.pml`` checks rules 1-3 with store buffers.
"""

from __future__ import annotations

from typing import Final

LINE: Final = 64
MAGIC: Final = 0x47435348
VERSION: Final = 7

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
MEMBER_COLLECTIVE: Final = 32
MEMBER_COLLECTIVE_AS_OF: Final = 40
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

STATUS_STRIDE: Final = 1088
STATUS_STACKS: Final = 0
STATUS_PLACE: Final = 8
STATUS_PLACE_BYTES: Final = 56
STATUS_WAITS: Final = 64
WAITS: Final = 4
WAIT_STRIDE: Final = 128
WAIT_SINCE: Final = 0
WAIT_COUNT: Final = 8
WAIT_OPERATION: Final = 16
WAIT_MEMBERS: Final = 64
WAIT_NAMED: Final = 32
STATUS_MEMBERSHIPS: Final = 576
MEMBERSHIPS: Final = 16
MEMBERSHIP_STRIDE: Final = 32
MEMBERSHIP_FORMAT: Final = "<HHi23sB"

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

FINGERPRINTS: Final = 32
FINGERPRINT_STRIDE: Final = 64
FINGERPRINT_GROUP: Final = 0
FINGERPRINT_CLOSED: Final = 1 << 63
FINGERPRINT_WORD: Final = 8
FINGERPRINT_LAST: Final = 16
FINGERPRINT_LAST_BYTES: Final = 48
FINGERPRINTS_STRIDE: Final = FINGERPRINTS * FINGERPRINT_STRIDE

OUTCOME_DONE: Final = 1
OUTCOME_NAMES: Final = (
    *("under way", "done", "timed out", "peer lost", "aborted", "diverged", "closed", "failed"),
)
"""How operations ended, by code."""

DTYPE_NAMES: Final = (
    "other",
    *("float16", "bfloat16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64"),
    *("uint16", "uint32", "bool", "complex64", "complex128", "uint64", "complex32"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
"""The dtypes of entries and of what ranks compare, by code."""

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
    """``size`` rounded up to a multiple of ``alignment``."""
    return -(-size // alignment) * alignment


def member_slot(member: int) -> int:
    """Where a member's slot begins in its board."""
    return BOARD_SLOTS + member * MEMBER_STRIDE


def failure_slot(member: int, n_members: int) -> int:
    """Where a member's failure slot begins in its board."""
    return BOARD_SLOTS + n_members * MEMBER_STRIDE + member * FAILURE_STRIDE


def status_slot(member: int, n_members: int) -> int:
    """Where a member's outward slot begins in its board."""
    return failure_slot(n_members, n_members) + member * STATUS_STRIDE


def history_slot(member: int, n_members: int) -> int:
    """Where a member's history begins in its board."""
    return status_slot(n_members, n_members) + member * HISTORY_STRIDE


def fingerprints_slot(member: int, n_members: int) -> int:
    """Where a member's tallies begin in its board, if that has histories."""
    return history_slot(n_members, n_members) + member * FINGERPRINTS_STRIDE


def board_size(n_members: int, *, histories: bool = True) -> int:
    """Bytes of a board, with or without histories."""
    return (fingerprints_slot if histories else status_slot)(n_members, n_members)


def reader_line(reader: int) -> int:
    """Where a reader's line begins in its ring."""
    return RING_READERS + reader * READER_STRIDE


def data_offset(n_readers: int) -> int:
    """Where a ring's records begin."""
    return align(reader_line(n_readers))


def ring_size(n_readers: int, capacity: int) -> int:
    """Bytes of a ring's segment."""
    return data_offset(n_readers) + capacity


def record_stride(size: int) -> int:
    """Bytes that a record of ``size`` payload bytes takes in the ring."""
    return align(RECORD_HEADER + size, RECORD_ALIGN)
