"""What an all-reduce costs: alpha for each meeting of the ranks, beta for each byte that one reads.

The model is Hockney's (The communication challenge for MPP, Parallel Computing 20, 1994): a message
of m bytes takes ``alpha + m beta``. What the ring between hosts takes is by Thakur, Rabenseifner
and Gropp (Optimization of collective communication operations in MPICH, IJHPCA 19, 2005). How often
ranks of a host meet, and what each reads of others, is by `device_comm.shm.layout` and
``device_comm/native/steps.c``:

    in one step     1 meeting, a rank reads (n - 1) S
    shared out      one meeting for each chunk and one more, a rank reads 2 (n - 1) / n S
    to a root       one meeting for each chunk, the root reads (n - 1) S
    from a root     one meeting for each chunk, a rank reads S

Between hosts a rank sends n - 1 times a part to the next one in the ring, and as often a result.
What that costs is the transport's own at both ends, and the link's.

Where ranks share cores, a meeting takes a turn of each of them.

Seconds and bytes everywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from device_comm.shm.layout import LARGEST_STEP, GroupLayout

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


@dataclass(frozen=True)
class Level:
    """What it costs where ranks are so far from each other.

    Attributes:
        alpha: seconds for two ranks to meet.
        beta: seconds for a byte that a rank reads of another.
        line: seconds for each further rank that has to be seen to have arrived.
        bandwidth: bytes a second that all ranks together can read.
    """

    alpha: float
    beta: float
    line: float = 0.0
    bandwidth: float = math.inf

    def meeting(self, n: int) -> float:
        """Seconds for ``n`` ranks to meet, of which each looks at all others in turn."""
        return self.alpha + (n - 2) * self.line

    def reading(self, size: float, readers: int) -> float:
        """Seconds for each of ``readers`` ranks to read ``size`` bytes."""
        return size * max(self.beta, readers / self.bandwidth)


@dataclass(frozen=True)
class Link:
    """What joins hosts.

    Attributes:
        name: what it is called.
        latency: seconds for a message that is small.
        bandwidth: bytes a second, in each direction.
    """

    name: str
    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Measured:
    """One all-reduce of two ranks."""

    size: int
    seconds: float


def chunks(n: int, size: int) -> int:
    """In how many steps the ranks put it all."""
    return max(math.ceil(size / GroupLayout.for_ranks(n).step_bytes), 1)


def meetings(n: int, size: int) -> int:
    """How often the ranks of a host meet in an all-reduce."""
    return 1 if size <= GroupLayout.for_ranks(n).whole_bytes else chunks(n, size) + 1


def read(n: int, size: int) -> float:
    """Bytes that a rank reads of others in it."""
    whole = size <= GroupLayout.for_ranks(n).whole_bytes
    return (n - 1) * size if whole else 2 * (n - 1) / n * size


def all_reduce(level: Level, n: int, size: int) -> float:
    """Seconds of an all-reduce on one host."""
    return meetings(n, size) * level.meeting(n) + level.reading(read(n, size), n)


def reduce_and_broadcast(level: Level, n: int, size: int) -> float:
    """Seconds for a root to reduce what all have, and for all to read it."""
    meeting = 2 * chunks(n, size) * level.meeting(n)
    return meeting + level.reading((n - 1) * size, 1) + level.reading(size, n)


def shared_out(level: Level, n: int, size: float) -> float:
    """Seconds of a reduce-scatter and an all-gather, in steps of 128 KiB however many ranks."""
    steps = max(math.ceil(size / LARGEST_STEP), 1) + 1
    return steps * level.meeting(n) + level.reading(2 * (n - 1) / n * size, n)


def sockets_first(near: Level, far: Level, sockets: int, n: int, size: int) -> float:
    """Seconds where ranks of a socket share out, and each its part with one of every other socket.

    Args:
        near: within a socket.
        far: between them; its bandwidth is that of all sockets together.
        sockets: how many.
        n: ranks on all of them.
        size: bytes.
    """
    each = n // sockets
    part_of_it = replace(far, bandwidth=far.bandwidth / each)
    return shared_out(near, each, size) + shared_out(part_of_it, sockets, size / each)


def ring(level: Level, n: int, size: float) -> float:
    """Seconds of an all-reduce in a ring: each rank sends 2 (n - 1) times a part to the next."""
    return 2 * (n - 1) * level.alpha + 2 * (n - 1) / n * size * level.beta


def over(transport: Level, link: Link, rings: int = 1) -> Level:
    """The level between hosts: the link's latency comes on top, the lower of both rates counts.

    Args:
        transport: what sending and receiving cost without a link.
        link: between the hosts.
        rings: how many ranks of a host send at once, each on a core of its own, and each a part.
    """
    beta = max(transport.beta / rings, 1 / link.bandwidth)
    return Level(transport.alpha + link.latency, beta)


def flat(transport: Level, link: Link, hosts: int, n: int, size: int) -> float:
    """Seconds of one ring through all ``n`` ranks of each host: all wait for who is at the link."""
    return ring(over(transport, link), hosts * n, size)


def hierarchical(
    inner: Level, transport: Level, link: Link, hosts: int, n: int, size: int
) -> float:
    """Seconds where a rank of each host reduces what all there have, in a ring of these."""
    return reduce_and_broadcast(inner, n, size) + ring(over(transport, link), hosts, size)


def many_rings(inner: Level, transport: Level, link: Link, hosts: int, n: int, size: int) -> float:
    """Seconds where the ranks of a host share out, and each has a ring for its part."""
    return shared_out(inner, n, size) + ring(over(transport, link, rings=n), hosts, size)


def fit_ring(measured: Iterable[Measured]) -> Level:
    """As `fit`, of two ranks on two hosts: each sends twice, and its tensor once in all."""
    return Level(*_least([(2 / each.seconds, each.size / each.seconds) for each in measured]))


def fit(measured: Iterable[Measured], alpha: float | None = None) -> Level:
    """The level that comes closest to what two ranks took, by least squares of relative errors.

    Args:
        measured: of two ranks.
        alpha: given where it is known; else two sizes are needed.
    """
    rates = [
        (meetings(2, each.size) / each.seconds, read(2, each.size) / each.seconds)
        for each in measured
    ]
    if alpha is not None:
        known = sum((1 - alpha * m) * s for m, s in rates)
        return Level(alpha, known / sum(s * s for _, s in rates))
    return Level(*_least(rates))


def _least(rates: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The alpha and beta by which ``alpha m + beta s`` comes closest to 1 for all of them."""
    mm, sm, ss = (
        sum(m * m for m, _ in rates),
        sum(m * s for m, s in rates),
        sum(s * s for _, s in rates),
    )
    m1, s1 = sum(m for m, _ in rates), sum(s for _, s in rates)
    determinant = mm * ss - sm * sm
    return (m1 * ss - s1 * sm) / determinant, (mm * s1 - sm * m1) / determinant


def turn(barriers: Mapping[int, float]) -> float:
    """Seconds of each rank's turn in a meeting, where ranks share cores; as `fit`.

    Args:
        barriers: seconds by the number of ranks.
    """
    shares = [n / seconds for n, seconds in barriers.items()]
    return sum(shares) / sum(share * share for share in shares)


def taking_turns(turn: float, n: int, size: int) -> float:
    """Seconds of an all-reduce of ``n`` ranks that share cores; its bytes hardly count."""
    return meetings(n, size) * n * turn


def error(said: float, measured: float) -> float:
    """By how much more than measured the model says, as a share."""
    return said / measured - 1
