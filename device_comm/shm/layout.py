"""Define the layout of a group's segment, and the protocol of every access to it.

Group segment, after the header of every segment (`shm_broadcast.layout`)::

    64   | n_ranks u32    | -              | inside_bytes u64                |
    80   | whole_bytes u64                 | step_bytes u64                  |
    96   | ring_bytes u64                  | slots u64: offset of the slots  |
    112  | rings u64: offset of the rings  | left u32       | -              |
    128  | rank 0: done u64 | present u32 | - | reads u32 x 2 | ...          |   64 bytes a rank,
         | rank 1 ...                                                        |   written by it only
         | channel from rank 0 to 0, 0 to 1, ..., N-1 to N-1                 |   64 bytes each
    slots| buffer 0: slot of rank 0, of rank 1, ...                          |
         | buffer 1: slot of rank 0, of rank 1, ...                          |
    rings| ring_bytes of rank 0 | ring_bytes of rank 1 | ...                 |

    Slot, written by its rank only
     0   | arrived u64 | signature, 56 bytes |   one cache line
     64  | inside_bytes bytes of payload     |

    Channel, written by its sender only: the handle of the channel's segment
     0   | open u32 | fd u32 | pid u32 | -  | start time u64 | size u64 | nonce, 16 bytes |

``present`` is 0 before the rank joins, then 1, and 2 once it has closed the group and stores
nothing more; then ``left`` is 1. ``reads``: ticks per MiB to fetch data written through the caches,
and past them (shm_broadcast/native/way.h).

A collective consists of steps, alike at all ranks, numbered from 1 through all collectives of the
group. In a step every rank writes its slot of buffer ``step % 2``, with or without a payload, and
arrives; then it may read the other ranks' payloads.

1. A rank writes slot and payload for step k only when every rank's ``done`` is k - 2 or more.
2. A rank writes payload and signature, then stores ``arrived`` = k with release.
3. A rank reads another rank's payload of step k only after it has loaded ``arrived`` = k with
   acquire, and that rank's signature equals its own: verb, operation, dtype, shape, root, number of
   the step within the collective, call number. Otherwise the ranks diverge, and no data is used. A
   rank compares the signatures of all ranks that have arrived, not only of those it awaits.
4. A rank that reads nothing more of step k stores ``done`` = k with release.
5. After a store of 2 or 4: a full fence, then a notification of the other ranks' eventcounts.

The rules prevent overwriting payloads in use (1, 4), torn reads (2, 3), and lost wake-ups (5). If
two ranks call a verb with themselves as root, neither awaits the other; the second one to arrive
finds the first one's signature, with another root (2, 3, 5). A rank that has arrived at the first
step of a collective is done with all steps before it, so if all ranks await each other, rule 1
holds without loading ``done``.

A payload of up to ``inside_bytes`` lies in the slot, a longer one in the ring: after the previous
payload there, or at 0 if fewer than ``step_bytes`` follow that. All payloads of a collective have
the same size, from the longest piece of any rank, or ``step_bytes`` in a two-phase all-reduce: so
all ranks compute the same offsets.

Rings are long because a core writes slowly into lines that another core has in its own caches; when
a ring wraps, its lines have moved to the shared cache. (AMD EPYC 9004, two cores: 64 KiB at 7 GB/s
through two slots, at 19 through rings of 2 MiB; 1 KiB at 7 and at 4.5.) A rank's slots and ring lie
on its NUMA node: it touches them first, then joins; no rank uses a slot before all have joined.

Runs on x86-64; written for aarch64 and not tested there.
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
"""The longest payloads that a ring holds at least: after a wrap, two steps' do not overlap."""
SLOT_HEADER: Final = 64
SLOT_ARRIVED: Final = 0
SLOT_SIGNATURE: Final = 8
PIECE_ALIGN: Final = 64

INSIDE_BYTES: Final = (4 << 10) - SLOT_HEADER
"""A slot is a page of 4 KiB: ranks that shared one could not both have it on their NUMA node."""
LARGEST_STEP: Final = 128 << 10
LARGEST_RING: Final = 2 << 20
LARGEST_RINGS: Final = 16 << 20
WHOLE_BYTES: Final = 48 << 10


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """The offsets and sizes in the segment of a group.

    Attributes:
        inside_bytes: payloads up to this size lie in the slots.
        step_bytes: the longest payload; larger collectives take several steps.
        ring_bytes: bytes of one rank's ring.
        whole_bytes: the largest all-reduce in one phase, in which every rank reads all of every
            other's; larger ones have two phases.
    """

    n_ranks: int
    inside_bytes: int
    step_bytes: int
    ring_bytes: int
    whole_bytes: int

    @classmethod
    def for_ranks(cls, n_ranks: int) -> GroupLayout:
        """Return the layout for ``n_ranks``: rings of 2 MiB, shorter for more than 8 ranks."""
        ring = min(LARGEST_RING, LARGEST_RINGS // n_ranks)
        step = min(LARGEST_STEP, ring // (RING_STEPS + 1))
        step = max(step // (n_ranks * PIECE_ALIGN), 1) * n_ranks * PIECE_ALIGN
        ring = align(max(ring, RING_STEPS * step), mmap.PAGESIZE)
        # Two ranks read as many bytes in one phase as in two, and one is faster.
        whole = step if n_ranks <= 2 else WHOLE_BYTES // (n_ranks - 1)
        return cls(n_ranks, INSIDE_BYTES, step, ring, min(whole, step))

    @classmethod
    def read(cls, words: Words) -> GroupLayout:
        """Read the layout from the group's segment."""
        return cls(
            words.load32(GROUP_RANKS),
            words.load64(GROUP_INSIDE_BYTES),
            words.load64(GROUP_STEP_BYTES),
            words.load64(GROUP_RING_BYTES),
            words.load64(GROUP_WHOLE_BYTES),
        )

    def write(self, words: Words) -> None:
        """Write the layout into a new segment."""
        words.store32(GROUP_RANKS, self.n_ranks)
        words.store64(GROUP_INSIDE_BYTES, self.inside_bytes)
        words.store64(GROUP_WHOLE_BYTES, self.whole_bytes)
        words.store64(GROUP_STEP_BYTES, self.step_bytes)
        words.store64(GROUP_RING_BYTES, self.ring_bytes)
        words.store64(GROUP_SLOTS, self.slots)
        words.store64(GROUP_RINGS, self.ring(0))

    @property
    def slots(self) -> int:
        """Return the offset of the slots."""
        return align(self.pipe(self.n_ranks, 0), mmap.PAGESIZE)

    @property
    def size(self) -> int:
        """Return the bytes of the segment."""
        return self.ring(self.n_ranks)

    def rank_line(self, rank: int) -> int:
        """Return the offset of a rank's line."""
        return RANK_LINES + rank * RANK_STRIDE

    def pipe(self, sender: int, receiver: int) -> int:
        """Return the offset of the channel's handle from ``sender`` to ``receiver``."""
        index = sender * self.n_ranks + receiver
        return self.rank_line(self.n_ranks) + index * PIPE_STRIDE

    def slot(self, buffer: int, rank: int) -> int:
        """Return the offset of a rank's slot in a buffer."""
        return self.slots + (buffer * self.n_ranks + rank) * (SLOT_HEADER + self.inside_bytes)

    def ring(self, rank: int) -> int:
        """Return the offset of a rank's ring."""
        return align(self.slot(BUFFERS, 0), mmap.PAGESIZE) + rank * self.ring_bytes

    def written_by(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return (begin, end) of a rank's slots and of its ring."""
        slots = [(self.slot(at, rank), self.slot(at, rank + 1)) for at in range(BUFFERS)]
        return *slots, (self.ring(rank), self.ring(rank + 1))
