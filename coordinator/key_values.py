"""Define the requests to a store, the table that answers them, and where a store between hosts is.

Every question is answered at once: whoever waits for a key asks again and again.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec


class StoreAddress(msgspec.Struct, frozen=True):
    """Names a store to its members. Holds no secret.

    Attributes:
        address: where it listens, ``tcp://host:port``.
        nonce: random bytes from which, with the secret, the connections' keys are derived.
    """

    address: str
    nonce: bytes


MAX_BYTES: Final = 64 << 10
"""Bytes of a value at most, and of all values in one answer, so that every answer fits into a
socket's buffer: the host must not wait for a slow asker."""


_LEAST: Final = -(1 << 63)
_MOST: Final = (1 << 63) - 1


class NumberedRequest(msgspec.Struct, frozen=True, tag=True):
    """The base of all questions.

    Attributes:
        number: chosen by the asker; the answer has the same.
    """

    number: int


class Set(NumberedRequest, frozen=True):
    """Set ``key`` to ``value``."""

    key: str
    value: bytes


class Append(NumberedRequest, frozen=True):
    """Append ``value`` to the value of ``key``; a key that does not exist counts as empty."""

    key: str
    value: bytes


class Add(NumberedRequest, frozen=True):
    """Add ``amount`` to the number in ``key``, 0 if it does not exist; answers the sum.

    Sums are those of torch's stores: signed, of 64 bits.
    """

    key: str
    amount: int


class CompareSet(NumberedRequest, frozen=True):
    """Set ``key`` to ``desired`` if its value is ``expected``; answers its value then.

    A key that does not exist counts as empty.
    """

    key: str
    expected: bytes
    desired: bytes


class Delete(NumberedRequest, frozen=True):
    """Delete ``key``; answers whether it existed."""

    key: str


class Check(NumberedRequest, frozen=True):
    """Answers whether all of ``keys`` exist."""

    keys: list[str]


class Get(NumberedRequest, frozen=True):
    """Answers the values of ``keys``, or of as many of the first of them as fit one answer."""

    keys: list[str]


StoreRequest: TypeAlias = Set | Append | Add | CompareSet | Delete | Check | Get


class StoreResponse(msgspec.Struct, frozen=True):
    """The answer to one question.

    Attributes:
        number: the question's number.
        count: a sum, or 1 for yes and 0 for no.
        values: the values that were asked for.
        error: why the question was refused; ``""`` if it was not.
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
        """Carry out ``question``; a refused one changes nothing, and the answer says why."""
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
        found: list[bytes] = []
        size = 0
        for key in keys:
            if key not in self._values:
                raise ValueError(f"there is no {key}")
            size += len(self._values[key])
            if found and size > MAX_BYTES:
                break
            found.append(self._values[key])
        return found
