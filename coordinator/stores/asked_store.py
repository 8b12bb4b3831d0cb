"""A torch store that another process keeps: every method sends it a question.

The caller chooses how questions travel: over an inherited socket, or encrypted between hosts
(`coordinator.stores.curve_store`). To torch it is a store like any other, so process groups can be
made with it.
"""

from __future__ import annotations

import itertools
import time
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar

from torch.distributed import DistStoreError, PrefixStore, Store, TCPStore

from coordinator.setup.addresses import own_address
from coordinator.stores import key_values as kv
from coordinator.stores.store_asker import naps
from shm_broadcast import NEVER, Deadline, GroupClosedError
from shm_broadcast.timed_lock import TimedLock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


_FOR_EVER = timedelta(days=365)

_BYTES_PER_CHARACTER = 4
"""Of UTF-8, at most."""

_LAST_LOOK_SECONDS = 1.0
"""How long a wait whose time is over may still ask which keys are there."""


class AskedStore(Store):
    """A store that is asked by messages. Any thread may use it; close it.

    Args:
        ask: sends a question and returns its answer, before the deadline; called by one thread at a
            time. The store's methods raise what it raises.
        timeout: seconds to wait for an answer, and in `wait` for keys; None: for ever.
        address: this host's address on the way to the store; ``""`` if no network leads there.
    """

    _open: ClassVar[list[AskedStore]] = []
    """References to all open stores. torch keeps only the C++ half of a store alive; the Python
    half, with the methods that it calls, would go with the caller's last reference."""

    def __init__(
        self,
        ask: Callable[[kv.Question, Deadline], kv.Answer],
        timeout: float | None,
        address: str = "",
    ) -> None:
        super().__init__()
        self.address = address
        self._ask = ask
        longest = _FOR_EVER.total_seconds()
        self.set_timeout(timedelta(seconds=longest if timeout is None else min(timeout, longest)))
        self._numbers = itertools.count(1)
        self._asking = TimedLock()
        self._closed = False
        self._open.append(self)

    def close(self) -> None:
        """Refuse further calls; idempotent."""
        if not self._closed:
            self._closed = True
            self._open.remove(self)

    # --- what torch calls; values are bytes, or text in UTF-8 ------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        """Set ``key`` to a value of at most `coordinator.stores.key_values.MAX_BYTES` bytes."""
        self._answer(kv.Set(self._number(), key, _bytes(value)))

    def get(self, key: str) -> bytes:
        """Wait until ``key`` exists; return its value."""
        self.wait([key])
        return self.multi_get([key])[0]

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to the number in ``key``, 0 if it does not exist; return the sum."""
        return self._answer(kv.Add(self._number(), key, amount)).count

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of ``key``."""
        self._answer(kv.Append(self._number(), key, _bytes(value)))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set ``key`` to ``desired`` if its value is ``expected``; return its value then."""
        question = kv.CompareSet(self._number(), key, _bytes(expected), _bytes(desired))
        return self._answer(question).values[0]

    def delete_key(self, key: str) -> bool:
        """Delete ``key``; return whether it existed."""
        return bool(self._answer(kv.Delete(self._number(), key)).count)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of ``keys`` exist."""
        return self._exist(keys, self._deadline())

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of ``keys``, which must all exist."""
        values: list[bytes] = []
        while len(values) < len(keys):
            asked = next(_askable(keys[len(values) :]))
            values += self._answer(kv.Get(self._number(), asked)).values
        return values

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set each of ``keys`` to its value."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all of ``keys`` exist.

        Raises:
            DistStoreError: some do not exist after the timeout, or the store does not answer until
                then.
        """
        deadline = self._deadline() if timeout is None else Deadline.after(timeout.total_seconds())
        late = f"wait timeout after {deadline.timeout:g} s, keys: "
        try:
            for nap in naps():
                if deadline.expired:
                    break
                if self._exist(keys, deadline):
                    return
                time.sleep(deadline.remaining(at_most=nap))
        except TimeoutError as error:
            if not deadline.expired:
                raise
            raise DistStoreError(f"{late}{', '.join(keys)}; the store does not answer") from error
        last_look = Deadline.after(_LAST_LOOK_SECONDS)
        absent = [key for key in keys if not self._exist([key], last_look)]
        if absent:
            raise DistStoreError(late + ", ".join(absent))

    def has_extended_api(self) -> bool:
        """Whether `multi_get` and the like are offered: yes."""
        return True

    # --------------------------------------------------------------------------------------

    def _number(self) -> int:
        return next(self._numbers)

    def _deadline(self) -> Deadline:
        return Deadline.after(self.timeout.total_seconds())  # type: ignore[attr-defined]

    def _exist(self, keys: Sequence[str], deadline: Deadline) -> bool:
        parts = (kv.Check(self._number(), part) for part in _askable(keys))
        return all(self._answer(part, deadline).count for part in parts)

    def _answer(self, question: kv.Question, latest: Deadline = NEVER) -> kv.Answer:
        deadline = min(latest, self._deadline(), key=lambda each: each.at)
        with self._asking.turn as mine:
            if not mine:
                self._asking.take(deadline, "store", self._require_open)
            self._require_open("store")
            answer = self._ask(question, deadline)
        if answer.error:
            raise ValueError(answer.error)
        return answer

    def _require_open(self, _: str) -> None:
        if self._closed:
            raise GroupClosedError("the store where the group met is closed in this process")


def behind_prefixes(store: Store) -> Store:
    """The store under all `PrefixStore` layers of ``store``."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def address_towards(store: Store) -> str:
    """This host's address on the route to a store; ``""`` if no network leads there."""
    base = behind_prefixes(store)
    if isinstance(base, TCPStore):
        return own_address(base.host, base.port)
    return base.address if isinstance(base, AskedStore) else ""


def _askable(keys: Sequence[str]) -> Iterator[list[str]]:
    """``keys`` in parts that one question may have."""
    part: list[str] = []
    size = 0
    for key in keys:
        size += len(key)
        if part and size > kv.MAX_BYTES // _BYTES_PER_CHARACTER:
            yield part
            part, size = [], len(key)
        part.append(key)
    if part:
        yield part


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
