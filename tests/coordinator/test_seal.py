"""Messages are unpickled only with a seal of their sender; others are plain data."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import Store

import coordinator
from coordinator import GroupCoordinator
from coordinator.messages.wire import (
    EVERYONE,
    Kind,
    Message,
    Seal,
    decode_plain,
    encode_plain,
    negotiate_codec,
)
from coordinator.pipeline import Stage
from coordinator.rendezvous import Rendezvous
from coordinator.secret import SecretError
from shm_broadcast import (
    GroupAbortedError,
    MessageDecodeError,
    MessageRefusedError,
    MessageSealError,
)
from tests.coordinator.hosts import groups_over
from tests.netns import Host, two_hosts
from tests.ranks import run_ranks
from tests.shared_store import SharedStore

SECRET = b"sixteen bytes or more"
NONCES = [b"a" * 16, b"b" * 16]


class Pair(NamedTuple):
    left: Any
    right: Any


class Bomb:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


# --- the seal itself ----------------------------------------------------------------------


def ends(secret: bytes = SECRET, group: str = "tp", nonces: Any = NONCES) -> tuple[Seal, Seal]:
    return Seal(secret, group, nonces, 0), Seal(SECRET, "tp", NONCES, 1)


def refused(
    receiver: Seal, sealed: bytes, *, kind: int = 1, src: int = 0, dst: int = 1, tag: int = 0
) -> MessageSealError:
    with pytest.raises(MessageSealError) as caught:
        receiver.open(kind, memoryview(sealed), src, dst, tag)
    return caught.value


@pytest.mark.quick
def test_messages_are_opened_once_and_in_order() -> None:
    sender, receiver = ends()
    sealed = [sender.close(1, text, 1) for text in (b"first", b"", b"third")]
    for text, each in zip((b"first", b"", b"third"), sealed, strict=True):
        assert receiver.open(1, memoryview(each), 0, 1) == text
    assert "message 0 where message 3 is due" in str(refused(receiver, sealed[0]))
    sender, receiver = ends()
    sender.close(1, b"left out", 1)
    error = refused(receiver, sender.close(1, b"next", 1))
    assert (error.rank, error.detail) == (0, "it is message 1 where message 0 is due")


@pytest.mark.parametrize(
    ("of", "options"),
    [
        ({}, {"kind": 2}),
        ({}, {"src": 1}),
        ({}, {"dst": EVERYONE}),
        ({}, {"dst": 0}),
        ({}, {"tag": 1}),
        ({"secret": b"another secret, long"}, {}),
        ({"group": "pp"}, {}),
        ({"nonces": [b"a" * 16, b"c" * 16]}, {}),  # an earlier group of that name
    ],
)
@pytest.mark.quick
def test_a_seal_is_for_one_kind_sender_receiver_and_group(
    of: dict[str, Any], options: dict[str, int]
) -> None:
    sender, receiver = ends(**of)
    assert "its seal does not fit" in str(refused(receiver, sender.close(1, b"x", 1), **options))


@given(st.binary(max_size=40), st.data())
@pytest.mark.quick
def test_any_change_is_refused(payload: bytes, data: st.DataObject) -> None:
    sender, receiver = ends()
    sealed = bytearray(sender.close(1, payload, 1))
    place = data.draw(st.integers(0, len(sealed) - 1))
    sealed[place] ^= data.draw(st.integers(1, 255))
    refused(receiver, bytes(sealed))
    refused(receiver, bytes(sealed[:place]))


# --- in a group over torch's sockets, on one host -----------------------------------------


def join(rank: int, n: int, store: Store) -> coordinator.ParallelGroups:
    return coordinator.init(tp=n, rank=rank, store=store, timeout=30, torch_only=True)


def attacked(rank: int, n: int, store: Store, folder: str) -> list[str]:
    """Rank 0 writes frames of its own into the socket."""
    told = []
    for attack in ("forged", "changed", "repeated", "forged dict", "forged broadcast"):
        bomb = Path(folder) / attack.replace(" ", "-")
        with join(rank, n, store) as groups:
            group = groups.tp
            if rank == 0:
                attack_with(group, attack, bomb)
            else:
                with pytest.raises(MessageSealError) as caught:
                    receive_under(group, attack)
                told.append(f"{attack}: {caught.value.detail}")
                with pytest.raises(GroupAbortedError, match="MessageSealError"):
                    group.recv_object(0)
            assert not bomb.exists()
    return told


def attack_with(group: GroupCoordinator, attack: str, bomb: Path) -> None:
    mail = group._messenger
    frames: list[Message] = []
    if attack == "forged":
        frames = [Message(Kind.OBJECT, pickle.dumps(Bomb(bomb)))]
    elif attack == "forged dict":
        frames = [Message(Kind.TENSOR_DICT, b"x" * 40 + pickle.dumps(Bomb(bomb)))]
    elif attack == "changed":
        frames = [mail.wire.message(Kind.OBJECT, pickle.dumps({"a": 1}), 1)]
        frames[0].first[60] ^= 1
    elif attack == "repeated":
        frames = [mail.wire.message(Kind.OBJECT, pickle.dumps("once"), 1)] * 2
    else:
        forged = Message(Kind.BROADCAST_OBJECT, pickle.dumps(Bomb(bomb)))
        group._context.cpu.broadcast_(forged.first, src=0)
    for frame in frames:
        mail.cpu.send(frame.first, 1)
    with pytest.raises(GroupAbortedError, match="MessageSealError"):
        group.recv_object(1)


def receive_under(group: GroupCoordinator, attack: str) -> None:
    if attack == "forged dict":
        group.recv_tensor_dict(0)
    elif attack == "forged broadcast":
        group.broadcast_object(None)
    elif attack == "repeated":
        assert group.recv_object(0) == "once"
        group.recv_object(0)
    else:
        group.irecv_object(0).wait()


def test_forged_changed_and_repeated_frames_are_refused(tmp_path: Path) -> None:
    not_fitting = "its seal does not fit: it was changed, or another process sent it"
    assert run_ranks(2, attacked, SharedStore(), str(tmp_path))[1] == [
        f"forged: {not_fitting}",
        f"changed: {not_fitting}",
        "repeated: it is message 0 where message 1 is due",
        f"forged dict: {not_fitting}",
        f"forged broadcast: {not_fitting}",
    ]


def refused_before_it_is_counted(rank: int, n: int, store: Store) -> None:
    with join(rank, n, store) as groups:
        group, other = groups.tp, 1 - rank
        wrong: list[Callable[[], Any]] = [
            lambda: group.send_object("lost", other, timeout=-1),
            lambda: group.send_tensor_dict({}, other, timeout=-1),
            lambda: group.recv_object(other, timeout=-1),
            lambda: group.recv_tensor_dict(other, timeout=-1),
            lambda: group.recv_object(rank),
            lambda: group.irecv_object(n),
            lambda: group.broadcast_object(1, 1, timeout=-1),
            lambda: Stage(group).exchange(send_next=torch.ones(1), timeout=-1),
        ]
        for call in wrong:
            with pytest.raises(ValueError, match=r"timeout|rank"):
                call()
            group.isend_object("right", other)
            assert group.recv_object(other) == "right"
            assert group.broadcast_object("all", 1) == "all"


def test_a_refused_call_sends_no_message() -> None:
    run_ranks(2, refused_before_it_is_counted, SharedStore())


# --- between hosts ------------------------------------------------------------------------

PLAIN: list[Any] = [
    None, True, -(1 << 63), 1 << 90, -(1 << 90), 2.5, "ü", b"\xff", [], (), {}, [1, (2, [3])],
    {"a": {1: (None,), (1, "b"): b""}}, torch.bfloat16, torch.Size([2, 3]), "x" * 5000,
]  # fmt: skip


def plainly(group: GroupCoordinator, me: int, other: int) -> None:
    for value in PLAIN:
        group.isend_object(value, other)
        found = group.recv_object(other)
        assert found == value
        assert type(found) is type(value)
        assert group.broadcast_object(value if me == 0 else None) == value
    assert group.all_gather_object({"me": me}) == [{"me": 0}, {"me": 1}]
    values = {"x": torch.ones(3), 1: [1, (2,)], "dtype": torch.int8, (2,): None}
    group.isend_tensor_dict(values, other)
    found = group.recv_tensor_dict(other)
    assert found.pop("x").tolist() == [1, 1, 1]
    assert found == {1: [1, (2,)], "dtype": torch.int8, (2,): None}
    end = Stage(group)
    tree = {"h": torch.ones(2), "more": [(torch.zeros(1), "text")]}
    got = end.exchange(send_next=tree, recv_prev=True).from_prev
    assert got["h"].tolist() == [1, 1]
    assert got["more"][0][1] == "text"


def pickled(group: GroupCoordinator, me: int, other: int) -> None:
    for value in ({1, 2}, Pair(1, 2), range(3), torch.ones(2).numpy().dtype):
        group.isend_object(value, other)
        assert group.recv_object(other) == value
        assert group.broadcast_object(value if me == 1 else None, 1) == value
        assert group.all_gather_object(value, async_op=True).wait() == [value, value]
        group.isend_tensor_dict({"v": value}, other)
        assert group.recv_tensor_dict(other) == {"v": value}
    group.isend_object(torch.arange(2000), other)
    assert group.recv_object(other).sum() == 1999 * 1000
    got = Stage(group).exchange(send_next=Pair(torch.ones(1), {3}), recv_prev=True)
    assert got.from_prev == Pair(torch.ones(1), {3})


def not_pickled(group: GroupCoordinator, me: int, other: int) -> None:
    """Both ends get an error with the cure; the next message is right."""
    why = r"a builtins\.set would have to be pickled.*GROUP_COORDINATOR_SECRET_FILE"
    sends: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
        (lambda: group.send_object({1}, other), lambda: group.recv_object(other)),
        (lambda: group.isend_object([{1}], other), lambda: group.irecv_object(other).wait()),
        (
            lambda: group.send_tensor_dict({"x": torch.ones(1), "s": {1}}, other),
            lambda: group.recv_tensor_dict(other),
        ),
    ]
    for send, receive in sends:
        with pytest.raises(MessageRefusedError, match=why) as ours:
            send()
        with pytest.raises(MessageRefusedError, match=why) as theirs:
            receive()
        assert (ours.value.rank, theirs.value.rank) == (me, other)
    for src in (0, 1):
        value = {1} if me == src else 1
        for collective in (
            lambda: group.broadcast_object(value, src),  # noqa: B023 - called at once
            lambda: group.all_gather_object(value),  # noqa: B023
            lambda: group.broadcast_tensor_dict({"v": value}, src),  # noqa: B023
        ):
            with pytest.raises(MessageRefusedError, match=why) as caught:
                collective()
            assert caught.value.rank == src
    assert group.all_gather_object(me) == [0, 1]


def forged_without_a_secret(group: GroupCoordinator, me: int, folder: str) -> None:
    bomb = Path(folder) / "bomb"
    if me == 0:
        group._messenger.cpu.send(Message(Kind.OBJECT, pickle.dumps(Bomb(bomb))).first, 1)
    else:
        with pytest.raises(MessageDecodeError, match="not plain data"):
            group.recv_object(0)
    group.barrier()
    assert not bomb.exists()


def over_hosts(
    rank: int, n: int, folder: str, hosts: tuple[Host, Host], secret: bytes | None
) -> None:
    with groups_over(rank, n, folder, hosts, timeout=30, secret=secret) as groups:
        group = groups.tp
        assert len(group.nodes) == 2
        plainly(group, rank, 1 - rank)
        if secret is None:
            not_pickled(group, rank, 1 - rank)
            forged_without_a_secret(group, rank, folder)
        else:
            pickled(group, rank, 1 - rank)
        group.barrier()


@pytest.mark.namespaces
@pytest.mark.parametrize("secret", [SECRET, None], ids=["with a secret", "without"])
def test_what_travels_between_hosts(secret: bytes | None, tmp_path: Path) -> None:
    with two_hosts("IPv4") as hosts:
        run_ranks(2, over_hosts, str(tmp_path), hosts, secret)


@pytest.mark.quick
def test_all_have_a_secret_or_none() -> None:
    """A forged nonce without the mark of a secret turns sealing off nowhere."""
    told = mock.Mock(rank=0, called=(0, 1), global_rank=lambda rank: rank)
    told.name = "tp"
    told.all_gather.side_effect = lambda _, payload: [payload, b"\0" + b"n" * 16]
    exchange = cast("Rendezvous", told)
    with pytest.raises(SecretError, match=r"tp: ranks \[1\] have no secret"):
        negotiate_codec(exchange, SECRET, only_members_write=False)
    assert not negotiate_codec(exchange, None, only_members_write=False).pickles
    assert negotiate_codec(exchange, None, only_members_write=True).pickles


# --- plain data ---------------------------------------------------------------------------

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = st.recursive(
    scalars | st.binary(), lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4
)
values = st.recursive(
    scalars | st.binary() | st.just(torch.Size([1])) | st.just(torch.float16),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=8,
)


@given(values)
def test_plain_data_arrives_as_it_was(value: Any) -> None:
    found = decode_plain(encode_plain(value))
    assert found == value
    assert repr(found) == repr(value)  # distinguishes 1 from True and lists from tuples


LOOP: list[Any] = []
LOOP.append(LOOP)
SURROGATE = "a text with a lone surrogate, which UTF-8 cannot write"


@pytest.mark.parametrize(
    ("value", "why"),
    [(each, r"a [\w.]+") for each in ({1}, Pair(1, 2), range(2), bytearray(), [...], {1: 1j})]
    + [(each, SURROGATE) for each in ("\ud83d", ["a", ("\udcff",)], {"\udcff": 1})]
    + [(LOOP, "nested too deeply, or contains itself")],
    ids=ascii,
)
@pytest.mark.quick
def test_other_values_are_not_plain(value: Any, why: str) -> None:
    with pytest.raises(TypeError, match=why):
        encode_plain(value)


@given(st.binary(max_size=60))
@pytest.mark.quick
def test_any_bytes_are_decoded_or_refused(data: bytes) -> None:
    with suppress(MessageDecodeError):
        decode_plain(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x91\x01",
        b"\x80",
        b"\x92\xa4evil\x90",
        b"\x92\xa4dict\x91\x92\x92\xa4list\x90\x01",
        b"\x92\xa5dtype\xa2os",
        b"\x92\xa4size\x91\xcf" + (1 << 63).to_bytes(8, "big"),
        b"\x91" * 100_000,
        b"\x92\xa4list" * 100_000,
    ],
)
@pytest.mark.quick
def test_bytes_that_are_not_plain_data(data: bytes) -> None:
    with pytest.raises(MessageDecodeError, match="not plain data"):
        decode_plain(data)
