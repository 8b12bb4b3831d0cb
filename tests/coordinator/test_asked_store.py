"""A store that is asked for its values, and what its host answers."""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

import msgspec
import pytest
import torch
from torch.distributed import DistStoreError, PrefixStore, ProcessGroup

from coordinator.key_values import MAX_BYTES, Get, InMemoryStore, Set, StoreRequest, StoreResponse
from coordinator.rendezvous import Rendezvous
from coordinator.store_client import ProxyStore
from coordinator.torch_groups import SocketChoice, connect_process_group, destroy
from shm_broadcast import Deadline, GroupClosedError, GroupTimeoutError

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def values() -> InMemoryStore:
    return InMemoryStore()


@pytest.fixture
def store(values: InMemoryStore) -> Iterator[ProxyStore]:
    store = ProxyStore(lambda question, _: values.answer(question), 10.0)
    yield store
    store.close()


def test_values(store: ProxyStore) -> None:
    store.set("bytes", b"\x00\xff")
    store.set("text", "é")
    assert store.multi_get(["bytes", "text"]) == [b"\x00\xff", "é".encode()]
    assert (store.add("n", 2), store.add("n", -5), store.get("n")) == (2, -3, b"-3")
    assert store.check(["bytes", "n"])
    assert not store.check(["bytes", "none"])
    store.append("text", b"!")
    assert store.get("text") == "é!".encode()
    assert store.compare_set("text", "other", "new") == "é!".encode()
    assert store.compare_set("fresh", "", "new") == b"new"
    assert (store.delete_key("n"), store.delete_key("n")) == (True, False)
    store.multi_set(["a", "b"], [b"1", "2"])
    assert store.multi_get(["a", "b"]) == [b"1", b"2"]


def test_a_wrong_question_changes_nothing(store: ProxyStore) -> None:
    store.set("key", b"x" * MAX_BYTES)
    for wrong in (
        lambda: store.set("key", b"y" * (MAX_BYTES + 1)),
        lambda: store.append("key", b"y"),
        lambda: store.add("key", 1),
        lambda: store.multi_get(["none"]),
    ):
        with pytest.raises(
            ValueError, match=r"key may have 65536|invalid literal|there is no none"
        ):
            wrong()
    assert store.get("key") == b"x" * MAX_BYTES


def test_many_keys_are_asked_in_questions_that_fit_a_frame(values: InMemoryStore) -> None:
    longest = 0

    def answer(question: StoreRequest, _: Deadline) -> StoreResponse:
        nonlocal longest
        longest = max(longest, len(msgspec.msgpack.encode(question)))
        return values.answer(question)

    store = ProxyStore(answer, 10.0)
    keys = [f"{number:04}" + "\N{EURO SIGN}" * 700 for number in range(300)]
    store.multi_set(keys, [str(number) for number in range(300)])
    assert store.check(keys)
    assert store.multi_get(keys) == [b"%d" % number for number in range(300)]
    assert not store.check([*keys, "none"])
    assert store.check([])
    assert 40 << 10 < longest < 2 * MAX_BYTES
    store.close()


def test_sums_are_those_of_torch(store: ProxyStore) -> None:
    assert store.add("n", (1 << 63) - 1) == (1 << 63) - 1
    with pytest.raises(ValueError, match=r"n may be -9223372036854775808 to .*; it would be 922"):
        store.add("n", 1)
    assert store.add("n", -(1 << 63)) == -1


def test_an_answer_fits_a_sockets_buffer(values: InMemoryStore, store: ProxyStore) -> None:
    long = b"x" * MAX_BYTES
    keys = [f"key {n}" for n in range(5)]
    for number, key in enumerate(keys):
        values.answer(Set(number, key, long if number == 2 else long[: MAX_BYTES // 2]))
    answers = [values.answer(Get(0, keys[first:])).values for first in range(5)]
    assert [len(each) for each in answers] == [2, 1, 1, 2, 1]
    assert [len(value) for value in store.multi_get(keys)] == [len(long) // 2] * 2 + [
        len(long),
        len(long) // 2,
        len(long) // 2,
    ]


def test_a_key_that_does_not_come_is_named(store: ProxyStore) -> None:
    store.set("there", b"")
    with pytest.raises(DistStoreError, match=r"after 0.01 s, keys: none"):
        store.wait(["there", "none"], timedelta(seconds=0.01))


def test_nothing_is_asked_after_the_end(store: ProxyStore) -> None:
    store.close()
    store.close()
    with pytest.raises(GroupClosedError):
        store.set("key", b"")


def test_a_silent_host_ends_a_wait() -> None:
    def silent(question: StoreRequest, deadline: Deadline) -> StoreResponse:
        assert deadline.remaining() <= 3.0
        raise TimeoutError

    store = ProxyStore(silent, 3.0)
    with pytest.raises(TimeoutError):
        store.add("n", 1)
    store.close()


def test_a_silent_host_does_not_outlast_the_timeout_of_a_wait() -> None:
    given: list[float | None] = []

    def silent(question: StoreRequest, deadline: Deadline) -> StoreResponse:
        given.append(deadline.timeout)
        time.sleep(deadline.remaining(at_most=1))
        raise GroupTimeoutError("store", deadline.timeout)

    store = ProxyStore(silent, 60.0)
    with pytest.raises(DistStoreError, match=r"after 0\.2 s, keys: a, b.*does not answer"):
        store.wait(["a", "b"], timedelta(seconds=0.2))
    with pytest.raises(GroupTimeoutError):
        store.check(["a"])
    assert given == [0.2, 60.0]
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(GroupTimeoutError):
        store.wait(["a"], timedelta(seconds=60))
    assert given == [0.2, 60.0, 0.1]
    store.close()


def test_another_thread_s_question_does_not_outlast_the_timeout_of_a_wait(
    values: InMemoryStore,
) -> None:
    asked, answered = threading.Event(), threading.Event()

    def slow(question: StoreRequest, _: Deadline) -> StoreResponse:
        asked.set()
        assert answered.wait(60)
        return values.answer(question)

    store = ProxyStore(slow, 60.0)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(store.add, "n", 1)
        assert asked.wait(60)
        ending = threading.Timer(5, answered.set)
        ending.start()
        try:
            with pytest.raises(DistStoreError, match="keys: n"):
                store.wait(["n"], timedelta(seconds=0.1))
            assert not answered.is_set()
        finally:
            ending.cancel()
            answered.set()
        assert first.result() == 1
    store.wait(["n"], timedelta(seconds=0))
    store.close()


def test_a_key_that_comes_at_the_last_moment(values: InMemoryStore) -> None:
    def late(question: StoreRequest, deadline: Deadline) -> StoreResponse:
        answer = values.answer(question)
        time.sleep(deadline.remaining(at_most=0.1))
        values.answer(Set(0, "key", b""))
        return answer

    store = ProxyStore(late, 10.0)
    store.wait(["key"], timedelta(seconds=0.05))
    store.close()


def test_torch_meets_in_it(values: InMemoryStore) -> None:
    """Also where nobody here holds more than a prefix of the store."""

    def meet(rank: int) -> ProcessGroup:
        store = PrefixStore("p", ProxyStore(lambda question, _: values.answer(question), 10.0))
        gc.collect()
        exchange = Rendezvous(store, rank, 2, "pair", Deadline.after(10)).begin_round("here")
        assert exchange.all_gather("ranks", b"%d" % rank) == [b"0", b"1"]
        loopback = SocketChoice(address="127.0.0.1")
        return connect_process_group(exchange.store, "pair", [0, 1], rank, "gloo", loopback, None)

    with ThreadPoolExecutor(2) as threads:
        groups = list(threads.map(meet, range(2)))
        sums = [torch.ones(2), torch.ones(2)]
        list(threads.map(lambda group, x: group.allreduce([x]).wait(), groups, sums))
    assert [float(x[0]) for x in sums] == [2.0, 2.0]
    for group in groups:
        destroy(group)


def test_a_signal_handler_cannot_ask_in_the_question_that_it_interrupts() -> None:
    def answer(_: StoreRequest, __: Deadline) -> NoReturn:
        asking.set("key", "within")
        raise AssertionError

    asking = ProxyStore(answer, None)
    with closing(asking), pytest.raises(RuntimeError, match="it would wait for itself"):
        asking.set("key", "value")
