"""Has a rank's operations in its group written down, numbered, in the history on its board."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

from device_comm.operation import NO_TENSOR, ROOTED
from device_comm.shm.signature import DTYPE_CODES
from shm_broadcast.layout import DID_NAMES, NO_PEER

if TYPE_CHECKING:
    from device_comm.operation import Operation
    from device_comm.watch import Watch

_CODES: Final = {verb: code for code, verb in enumerate(DID_NAMES) if code}
_TO_A_PEER: Final = frozenset({*ROOTED, "send", "recv"})
_MOST: Final = 0xFFFFFFFF


class Recorder:
    """Numbers and writes down the operations of one rank in one group. One thread at a time.

    Attributes:
        numbers: u32: of the rank's last collective, of its last sends to each rank, of its last
            receipts from each rank. The C extension counts in them, too.
    """

    def __init__(self, watch: Watch, group: str, world_size: int) -> None:
        """Write to the history of ``watch``, in the name of ``group``."""
        self._watch = watch
        self._group = group
        self._world_size = world_size
        self.numbers = array("I", [0]) * (1 + 2 * world_size)

    def begin(self, operation: Operation) -> int:
        """Stamp ``operation`` on the board and write it down; the entry, for `Watch.ended`.

        Of one in the background, ``ended`` is set.
        """
        verb, peer, place = operation.verb, operation.peer, 0
        if verb == "send":
            place = 1 + peer
        elif verb == "recv":
            place = 1 + self._world_size + peer
        number = self.numbers[place] = (self.numbers[place] + 1) & _MOST
        tensor = operation.buffer
        entry = self._watch.stamp(
            operation.name,
            self._group,
            _CODES[verb],
            tensor.nbytes,
            number,
            peer if verb in _TO_A_PEER else NO_PEER,
            0 if tensor is NO_TENSOR else DTYPE_CODES.get(tensor.dtype, 0),
        )
        if operation.background:
            operation.ended = lambda error: self._watch.ended(entry, error)
        return entry

    def begin_nothing(self, verb: str, name: str) -> int:
        """As `begin`, of an operation of one rank, or of no tensors."""
        number = self.numbers[0] = (self.numbers[0] + 1) & _MOST
        return self._watch.stamp(name, self._group, _CODES[verb], 0, number)
