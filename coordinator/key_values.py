"""Define the requests to a store, the table that executes them, and the address of a store.

The table answers every request at once: a client that waits for a key polls.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec


class StoreAddress(msgspec.Struct, frozen=True):
    """The address of a store between hosts, ``tcp://host:port``. Contains no secret.

    The secret and ``nonce``, random bytes, yield the keys of the connections.
    """

    address: str
    nonce: bytes


MAX_BYTES: Final = 64 << 10
"""The most bytes of a value, and of all values in one response. Each response fits into a socket's
buffer, so the host never blocks on a slow client."""


_LEAST: Final = -(1 << 63)
_MOST: Final = (1 << 63) - 1


class NumberedRequest(msgspec.Struct, frozen=True, tag=True):
    """The base of all requests; the response has the same ``number``."""

    number: int


class Set(NumberedRequest, frozen=True):
    """Set ``key`` to ``value``."""

    key: str
    value: bytes


class Append(NumberedRequest, frozen=True):
    """Append ``value`` to the value of ``key``; a missing key counts as empty."""

    key: str
    value: bytes


class Add(NumberedRequest, frozen=True):
    """Add ``amount`` to the integer in ``key``, 0 if it is missing; the response has the sum.

    Sums are signed 64-bit integers, as in torch's stores.
    """

    key: str
    amount: int


class CompareSet(NumberedRequest, frozen=True):
    """Set ``key`` to ``desired`` if its value is ``expected``; a missing key counts as empty.

    The response has the value of ``key`` afterwards.
    """

    key: str
    expected: bytes
    desired: bytes


class Delete(NumberedRequest, frozen=True):
    """Delete ``key``; the response says whether it existed."""

    key: str


class Check(NumberedRequest, frozen=True):
    """The response says whether all of ``keys`` exist."""

    keys: list[str]


class Get(NumberedRequest, frozen=True):
    """The response has the values of ``keys``, or of as many leading keys as fit."""

    keys: list[str]


StoreRequest: TypeAlias = Set | Append | Add | CompareSet | Delete | Check | Get


class StoreResponse(msgspec.Struct, frozen=True):
    """The response to the request with the same number.

    Attributes:
        count: a sum, or 1 for yes and 0 for no.
        values: the requested values.
        error: why the request was refused; ``""``: it was not.
    """

    number: int
    count: int = 0
    values: list[bytes] = []
    error: str = ""


class InMemoryStore:
    """The keys and values of one store. Not thread-safe."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def answer(self, question: StoreRequest) -> StoreResponse:
        """Execute a request; a refused one changes nothing, and the response has the reason."""
        try:
            count, values = self._follow(question)
        except ValueError as error:
            return StoreResponse(question.number, error=str(error))
        return StoreResponse(question.number, count, values)

    def _follow(self, question: StoreRequest) -> tuple[int, list[bytes]]:
        match question:
            case Set(_, key, value):
                self._put(key, value)
            case Append(_, key, value):
                self._put(key, self._values.get(key, b"") + value)
            case Add(_, key, amount):
                total = int(self._values.get(key, b"0")) + amount
                if not _LEAST <= total <= _MOST:
                    raise ValueError(f"{key} may be {_LEAST} to {_MOST}; it would be {total}")
                self._put(key, b"%d" % total)
                return total, []
            case CompareSet(_, key, expected, desired):
                if self._values.get(key, b"") == expected:
                    self._put(key, desired)
                return 0, [self._values.get(key, b"")]
            case Delete(_, key):
                return int(self._values.pop(key, None) is not None), []
            case Check(_, keys):
                return int(all(key in self._values for key in keys)), []
            case Get(_, keys):
                return 0, self._some(keys)
        return 0, []

    def _put(self, key: str, value: bytes) -> None:
        if len(value) > MAX_BYTES:
            raise ValueError(f"{key} may have {MAX_BYTES} bytes; got {len(value)}")
        self._values[key] = value

    def _some(self, keys: list[str]) -> list[bytes]:
        values: list[bytes] = []
        size = 0
        for key in keys:
            if key not in self._values:
                raise ValueError(f"there is no {key}")
            size += len(self._values[key])
            if values and size > MAX_BYTES:
                break
            values.append(self._values[key])
        return values
