"""Small values swapped by the members of a group while they set up, over a torch store.

It needs nothing but the store, so it is what everything else is built with: process
groups, boards, queues. Each swap has a name, and keys below that name:

    NAME/RANK   what that member put there
    NAME/count  how many members have put theirs
    NAME/all    set by the last of them: everything is there

Members look for one key only, however many they are, and never block inside the store:
a wait of torch's cannot be interrupted, and complains on stderr when it ends.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.distributed import PrefixStore, Store

from shm_broadcast.errors import GroupTimeoutError, MemberStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shm_broadcast.deadline import Deadline

_FIRST_NAP = 0.0005
_LONGEST_NAP = 0.05


@dataclass(frozen=True, slots=True)
class Exchange:
    """Swaps bytes between the members of one group, over a store.

    Attributes:
        store: where the members meet, with a prefix that nothing else uses.
        rank: this member's rank in the group.
        size: how many members.
        name: the group's name, for errors.
        deadline: when set-up has to be done.
        host: where the store is, for errors.
    """

    store: Store
    rank: int
    size: int
    name: str
    deadline: Deadline
    host: str = ""

    @classmethod
    def visit(
        cls,
        store: Store,
        place: str,
        rank: int,
        size: int,
        name: str,
        deadline: Deadline,
        host: str = "",
    ) -> Exchange:
        """An exchange at a place in a store that may have been used before.

        Each member counts how often it has come there, and what belongs to its n-th visit
        stands under keys of its own. Members that come there in the same order meet.

        Collective: no.
        """
        place = f"group-coordinator/{place}"
        count = store.add(f"{place}/visits/{rank}", 1)
        return cls(PrefixStore(f"{place}/{count}", store), rank, size, name, deadline, host)

    def all_gather(self, what: str, payload: bytes = b"") -> list[bytes]:
        """Put ``payload`` and return everyone's, by rank.

        Args:
            what: the swap's name, for keys and errors. It can be used once.
            payload: any bytes; kilobytes, not megabytes.

        Collective: yes, every member.

        Raises:
            GroupTimeoutError: the deadline passed; ``waiting_for`` lists the absent members.
        """
        keys = [f"{what}/{rank}" for rank in range(self.size)]
        self._put(keys[self.rank], payload)
        if self.store.add(f"{what}/count", 1) == self.size:
            self._put(f"{what}/all", b"")
        self._wait_for(f"{what}/all", what, lambda: self._absent(keys))
        if self.store.has_extended_api():  # type: ignore[attr-defined]
            return self.store.multi_get(keys)
        return [self.store.get(key) for key in keys]

    def broadcast(self, what: str, payload: bytes | None, src: int = 0) -> bytes:
        """Return what member ``src`` put; the others pass ``None``.

        Args:
            what: the swap's name, for keys and errors. It can be used once.
            payload: any bytes; kilobytes, not megabytes.
            src: rank in the group of the member that gives it.

        Collective: yes, every member; ``src`` does not wait for the others.

        Raises:
            GroupTimeoutError: ``src`` did not put it in time.
        """
        key = f"{what}/{src}"
        if self.rank == src:
            if payload is None:
                raise ValueError(f"{self.name}: member {src} has to give what it broadcasts")
            self._put(key, payload)
            return payload
        self._wait_for(key, what, lambda: [src])
        return self.store.get(key)

    def sub(self, name: str, ranks: Sequence[int], deadline: Deadline | None = None) -> Exchange:
        """The exchange of some members among themselves, for use by these only.

        Args:
            name: the subgroup's name. The same name and ranks may be used again: see `visit`.
            ranks: ranks in this group, this member's among them.
            deadline: None: this group's.

        Collective: no.
        """
        return Exchange.visit(
            self.store,
            f"{name}:{'.'.join(map(str, ranks))}",
            ranks.index(self.rank),
            len(ranks),
            name,
            deadline or self.deadline,
            self.host,
        )

    def _put(self, key: str, value: bytes) -> None:
        self.store.set(key, value)  # type: ignore[arg-type] # the stub knows text only

    def _absent(self, keys: Sequence[str]) -> list[int]:
        return [rank for rank, key in enumerate(keys) if not self.store.check([key])]

    def _wait_for(self, key: str, what: str, absent: Callable[[], list[int]]) -> None:
        nap = _FIRST_NAP
        while not self.store.check([key]):
            if self.deadline.expired:
                raise GroupTimeoutError(
                    f"{self.name} {what}",
                    self.deadline.timeout,
                    tuple(MemberStatus(rank, 0, "absent") for rank in absent()),
                    self.host and f"over the store at {self.host}",
                )
            time.sleep(self.deadline.remaining(at_most=nap))
            nap = min(nap * 2, _LONGEST_NAP)
