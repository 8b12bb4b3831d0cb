"""The shared memory of one group, drawn once, and the protocol that every access keeps.

Group segment (after the header that every segment has, see `shm_broadcast.layout`)
-----------------------------------------------------------------------------------
::

    64   | n_ranks u32    | -              | slot_bytes u64                  |
    80   | whole_bytes u64                 | slots u64: where the slots begin|
    128  | rank 0: done u64 | present u32 | ...                              |   64 bytes a rank,
         | rank 1 ...                                                        |   written by it only
         | pipe from rank 0 to 0, 0 to 1, ..., N-1 to N-1                    |   64 bytes each
    slots| buffer 0: slot of rank 0, of rank 1, ...                          |
         | buffer 1: slot of rank 0, of rank 1, ...                          |

    Slot, written by its rank only
     0   | arrived u64 | signature, 56 bytes |   one cache line
     64  | slot_bytes bytes of payload       |

    Pipe, written by its sender only: where the ring of what it sends to one receiver is
     0   | open u32 | fd u32 | pid u32 | -  | start time u64 | size u64 | nonce, 16 bytes |

Steps
-----
A collective is a number of steps, the same for all ranks; steps are counted from 1, through all
collectives of the group. In a step every rank writes its slot of buffer ``step % 2``, with or
without a payload, and arrives; then it may read the slots of others.

1. A rank writes its slot for step k only when every rank's ``done`` is k - 2 or more.
2. It writes payload and signature, then stores ``arrived`` = k with release.
3. A rank reads another's slot of step k only after it has loaded ``arrived`` = k with acquire, and
   has found there the signature that it has put itself: verb, operation, dtype, shape, root, the
   number of the step within the collective, and that of the call. Otherwise the ranks diverge, and
   nothing is used. It compares the signatures of all that have arrived, also of those that it
   needs nothing from.
4. A rank that will read nothing more of step k stores ``done`` = k with release.
5. After each of these stores: a full fence, then the doorbells of all other ranks.

A rank's slots lie on the node (NUMA) where it runs: it settles there before it says that it is
present, and uses no slot before all are.

So no slot is overwritten that somebody still reads (1, 4), nothing is read that is not whole (2,
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
    from shm_broadcast.atomics import WordsLike

GROUP_RANKS: Final = 64
GROUP_SLOT_BYTES: Final = 72
GROUP_WHOLE_BYTES: Final = 80
GROUP_SLOTS: Final = 88

RANK_LINES: Final = 128
RANK_STRIDE: Final = 64
RANK_DONE: Final = 0
RANK_PRESENT: Final = 8

PIPE_STRIDE: Final = 64
PIPE_OPEN: Final = 0
PIPE_HANDLE: Final = 4

BUFFERS: Final = 2
SLOT_HEADER: Final = 64
SLOT_ARRIVED: Final = 0
SLOT_SIGNATURE: Final = 8
PIECE_ALIGN: Final = 64

LARGEST_SLOT: Final = 128 << 10
LARGEST_SLOTS: Final = 4 << 20
WHOLE_BYTES: Final = 48 << 10
WHOLE_ALWAYS: Final = (1 << 63) - 1
"""No all-reduce is shared out: said by a rank without the C extension before it joins."""


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Where everything lies in the segment of a group.

    Attributes:
        n_ranks: of the group.
        slot_bytes: payload of a slot. Larger collectives go through the slots in chunks.
        whole_bytes: up to this size, an all-reduce is one step in which every rank reads all of
            every other; larger ones are shared out, unless a rank has no C extension.
    """

    n_ranks: int
    slot_bytes: int
    whole_bytes: int

    @classmethod
    def for_ranks(cls, n_ranks: int) -> GroupLayout:
        """The layout that a group of ``n_ranks`` gets: slots of 128 KiB, of 4 MiB together."""
        slot = min(LARGEST_SLOT, LARGEST_SLOTS // (BUFFERS * n_ranks))
        slot = max(slot // (n_ranks * PIECE_ALIGN), 1) * n_ranks * PIECE_ALIGN
        # Of two ranks each reads as much either way, and one step is faster than two.
        whole = slot if n_ranks <= 2 else WHOLE_BYTES // (n_ranks - 1)
        return cls(n_ranks, slot, min(whole, slot))

    @classmethod
    def read(cls, words: WordsLike) -> GroupLayout:
        """The layout that the segment of ``words`` was made with."""
        return cls(
            words.load32(GROUP_RANKS),
            words.load64(GROUP_SLOT_BYTES),
            words.load64(GROUP_WHOLE_BYTES),
        )

    def write(self, words: WordsLike) -> None:
        """Say in a new segment what its layout is."""
        words.store32(GROUP_RANKS, self.n_ranks)
        words.store64(GROUP_SLOT_BYTES, self.slot_bytes)
        words.store64(GROUP_WHOLE_BYTES, self.whole_bytes)
        words.store64(GROUP_SLOTS, self.slots)

    @property
    def piece_bytes(self) -> int:
        """The largest piece where a slot holds one for each rank."""
        return self.slot_bytes // self.n_ranks // PIECE_ALIGN * PIECE_ALIGN

    @property
    def slots(self) -> int:
        """Where the slots begin."""
        return align(self.pipe(self.n_ranks, 0), mmap.PAGESIZE)

    @property
    def size(self) -> int:
        """Bytes of the segment: ``2 n_ranks (slot_bytes + 64) + 64 n_ranks (n_ranks + 1)``, and
        what rounds it up to whole pages.
        """
        return align(self.slot(BUFFERS, 0), mmap.PAGESIZE)

    def rank_line(self, rank: int) -> int:
        """Where a rank's own line begins."""
        return RANK_LINES + rank * RANK_STRIDE

    def pipe(self, sender: int, receiver: int) -> int:
        """Where the pipe from one rank to another begins."""
        index = sender * self.n_ranks + receiver
        return self.rank_line(self.n_ranks) + index * PIPE_STRIDE

    def slot(self, buffer: int, rank: int) -> int:
        """Where a rank's slot in a buffer begins."""
        return self.slots + (buffer * self.n_ranks + rank) * (SLOT_HEADER + self.slot_bytes)

    def slots_of(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Where the slots of a rank begin and end."""
        return tuple((self.slot(at, rank), self.slot(at, rank + 1)) for at in range(BUFFERS))
