"""The shared memory of one group, drawn once, and the protocol that every access keeps.

Group segment (after the header that every segment has, see `shm_broadcast.layout`)
-----------------------------------------------------------------------------------
::

    64   | n_ranks u32    | -              | inside_bytes u64                |
    80   | whole_bytes u64                 | step_bytes u64                  |
    96   | ring_bytes u64                  | slots u64: where the slots begin|
    112  | rings u64: where the rings begin| left u32       | -              |
    128  | rank 0: done u64 | present u32 | - | reads u32 x 2 | ...          |   64 bytes a rank,
         | rank 1 ...                                                        |   written by it only
         | pipe from rank 0 to 0, 0 to 1, ..., N-1 to N-1                    |   64 bytes each
    slots| buffer 0: slot of rank 0, of rank 1, ...                          |
         | buffer 1: slot of rank 0, of rank 1, ...                          |
    rings| ring_bytes of rank 0 | ring_bytes of rank 1 | ...                 |

``present`` is 0 until the rank has come, 1 while it is there, and 2 once it has closed the group:
it stores nothing here after that. ``left`` is 1 once any rank has. ``reads`` is what fetching takes
the rank that was written through the caches, and past them (shm_broadcast/native/way.h).

Slot, written by its rank only
     0   | arrived u64 | signature, 56 bytes |   one cache line
     64  | inside_bytes bytes of payload     |

    Ring, written by its rank only: payloads that do not fit into slots, one after the other

    Pipe, written by its sender only: where the ring of what it sends to one receiver is
     0   | open u32 | fd u32 | pid u32 | -  | start time u64 | size u64 | nonce, 16 bytes |

Steps
-----
A collective is a number of steps, the same for all ranks; steps are counted from 1, through all
collectives of the group. In a step every rank writes its slot of buffer ``step % 2``, with or
without a payload, and arrives; then it may read the payloads of others.

1. A rank writes slot and payload for step k only when every rank's ``done`` is k - 2 or more.
2. It writes payload and signature, then stores ``arrived`` = k with release.
3. A rank reads another's payload of step k only after it has loaded ``arrived`` = k with acquire,
   and has found there the signature that it has put itself: verb, operation, dtype, shape, root,
   the number of the step within the collective, and that of the call. Otherwise the ranks diverge,
   and nothing is used. It compares the signatures of all that have arrived, also of those that it
   needs nothing from.
4. A rank that will read nothing more of step k stores ``done`` = k with release.
5. After each of these stores: a full fence, then the doorbells of all other ranks.

A payload that fits lies in the slot, any other in the rings. There it begins where that of the
step before has ended; at 0 if less than ``step_bytes`` are left behind that. All payloads of a
collective take as much room: the longest piece that any rank puts decides, and one that is shared
out takes ``step_bytes``. So all ranks know where they lie.

Rings are long because a core writes slowly into lines that another core has read and still has in
its own caches: by the time that a ring begins anew, they are in the cache that all share. Small
payloads lie in the slots, whose lines stay near. (From core to core of an AMD EPYC 9004, 64 KiB go
over at 7 GB/s through two slots and at 19 through rings of 2 MiB, 1 KiB at 7 and at 4.5.)

A rank's slots and its ring lie on the node (NUMA) where it runs: it settles there before it says
that it is present, and uses no slot before all are.

So nothing is overwritten that somebody still reads (1, 4), nothing is read that is not whole (2,
3), and no wake-up is lost (5, see `shm_broadcast.layout`). Two ranks that need nothing of each
other, for each thinks that it is the root, do not both go on: whoever arrives second finds the
first there (2, 5) and its signature, which names another root (3). Whoever has arrived at the first
step of a collective is done with all steps before it: where everybody waits for everybody, rule 1
holds without looking at ``done``. A root that waits for nobody has to look.

Run on x86-64; written for aarch64, like the ground floor, and not tested there.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shm_broadcast.layout import align

if TYPE_CHECKING:
    from shm_broadcast._native import Words

GROUP_RANKS: Final = 64
GROUP_INSIDE_BYTES: Final = 72
GROUP_WHOLE_BYTES: Final = 80
GROUP_STEP_BYTES: Final = 88
GROUP_RING_BYTES: Final = 96
GROUP_SLOTS: Final = 104
GROUP_RINGS: Final = 112
GROUP_LEFT: Final = 120

RANK_LINES: Final = 128
RANK_STRIDE: Final = 64
RANK_DONE: Final = 0
RANK_PRESENT: Final = 8
RANK_READS: Final = 16

PIPE_STRIDE: Final = 64
PIPE_OPEN: Final = 0
PIPE_HANDLE: Final = 4

BUFFERS: Final = 2
RING_STEPS: Final = 3
"""How many of the longest payloads a ring holds at least: so that none lies on that of the step
before, of which the ring began anew."""
SLOT_HEADER: Final = 64
SLOT_ARRIVED: Final = 0
SLOT_SIGNATURE: Final = 8
PIECE_ALIGN: Final = 64

INSIDE_BYTES: Final = (4 << 10) - SLOT_HEADER
"""So a slot is a page of 4 KiB: one that ranks shared would lie with one of them."""
LARGEST_STEP: Final = 128 << 10
LARGEST_RING: Final = 2 << 20
LARGEST_RINGS: Final = 16 << 20
WHOLE_BYTES: Final = 48 << 10


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Where everything lies in the segment of a group.

    Attributes:
        n_ranks: of the group.
        inside_bytes: payloads up to this size lie in the slots.
        step_bytes: the longest payload. Larger collectives take several steps.
        ring_bytes: of one rank's ring.
        whole_bytes: up to this size, an all-reduce is one step in which every rank reads all of
            every other; larger ones are shared out.
    """

    n_ranks: int
    inside_bytes: int
    step_bytes: int
    ring_bytes: int
    whole_bytes: int

    @classmethod
    def for_ranks(cls, n_ranks: int) -> GroupLayout:
        """The layout of a group of ``n_ranks``: rings of 2 MiB, shorter for more than 8 ranks."""
        ring = min(LARGEST_RING, LARGEST_RINGS // n_ranks)
        step = min(LARGEST_STEP, ring // (RING_STEPS + 1))
        step = max(step // (n_ranks * PIECE_ALIGN), 1) * n_ranks * PIECE_ALIGN
        ring = align(max(ring, RING_STEPS * step), mmap.PAGESIZE)
        # Of two ranks each reads as much either way, and one step is faster than two.
        whole = step if n_ranks <= 2 else WHOLE_BYTES // (n_ranks - 1)
        return cls(n_ranks, INSIDE_BYTES, step, ring, min(whole, step))

    @classmethod
    def read(cls, words: Words) -> GroupLayout:
        """The layout that the segment of ``words`` was made with."""
        return cls(
            words.load32(GROUP_RANKS),
            words.load64(GROUP_INSIDE_BYTES),
            words.load64(GROUP_STEP_BYTES),
            words.load64(GROUP_RING_BYTES),
            words.load64(GROUP_WHOLE_BYTES),
        )

    def write(self, words: Words) -> None:
        """Say in a new segment what its layout is."""
        words.store32(GROUP_RANKS, self.n_ranks)
        words.store64(GROUP_INSIDE_BYTES, self.inside_bytes)
        words.store64(GROUP_WHOLE_BYTES, self.whole_bytes)
        words.store64(GROUP_STEP_BYTES, self.step_bytes)
        words.store64(GROUP_RING_BYTES, self.ring_bytes)
        words.store64(GROUP_SLOTS, self.slots)
        words.store64(GROUP_RINGS, self.ring(0))

    def piece_bytes(self, longest: int, pieces: int) -> int:
        """Bytes of each of so many pieces of a payload, if ``longest`` are wanted; 64 a line."""
        most = self.step_bytes // pieces // PIECE_ALIGN * PIECE_ALIGN
        return min(most, align(longest, PIECE_ALIGN))

    def next_place(self, place: int, payload: int) -> int:
        """Where the payload behind one at ``place`` of a ring begins."""
        after = place + payload
        return after if after + self.step_bytes <= self.ring_bytes else 0

    @property
    def slots(self) -> int:
        """Where the slots begin."""
        return align(self.pipe(self.n_ranks, 0), mmap.PAGESIZE)

    @property
    def size(self) -> int:
        """Bytes of the segment: for each rank its ring, ``2 (inside_bytes + 64)``, and
        ``64 (n_ranks + 1)``; and what rounds that up to whole pages.
        """
        return self.ring(self.n_ranks)

    def rank_line(self, rank: int) -> int:
        """Where a rank's own line begins."""
        return RANK_LINES + rank * RANK_STRIDE

    def pipe(self, sender: int, receiver: int) -> int:
        """Where the pipe from one rank to another begins."""
        index = sender * self.n_ranks + receiver
        return self.rank_line(self.n_ranks) + index * PIPE_STRIDE

    def slot(self, buffer: int, rank: int) -> int:
        """Where a rank's slot in a buffer begins."""
        return self.slots + (buffer * self.n_ranks + rank) * (SLOT_HEADER + self.inside_bytes)

    def ring(self, rank: int) -> int:
        """Where a rank's ring begins."""
        return align(self.slot(BUFFERS, 0), mmap.PAGESIZE) + rank * self.ring_bytes

    def written_by(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Where the slots of a rank, and its ring, begin and end."""
        slots = [(self.slot(at, rank), self.slot(at, rank + 1)) for at in range(BUFFERS)]
        return *slots, (self.ring(rank), self.ring(rank + 1))
