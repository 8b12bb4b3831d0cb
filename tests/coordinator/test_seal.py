"""Nothing is unpickled that does not prove who sent it: seals, and what travels without them."""

from __future__ import annotations

import os
import pickle
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store

    from coordinator.rendezvous import Rendezvous

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


def test_what_was_sealed_is_opened_once_and_in_order() -> None:
    sender, receiver = ends()
    sealed = [sender.close(1, text, 1) for text in (b"first", b"", b"third")]
    for text, each in zip((b"first", b"", b"third"), sealed, strict=True):
        assert receiver.open(1, memoryview(each), 0, 1) == text
    assert "message 0 where message 3 is due" in str(refused(receiver, sealed[0]))


def test_one_that_is_left_out_or_overtaken_is_missed() -> None:
    sender, receiver = ends()
    sender.close(1, b"left out", 1)
    error = refused(receiver, sender.close(1, b"next", 1))
    assert (error.rank, error.detail) == (0, "it is message 1 where message 0 is due")


@pytest.mark.parametrize(
    "options",
    [{"kind": 2}, {"src": 1}, {"dst": EVERYONE}, {"dst": 0}, {"tag": 1}],
    ids=["kind", "sender", "receivers", "receiver", "tag"],
)
def test_a_seal_is_for_one_kind_sender_and_receiver(options: dict[str, int]) -> None:
    sender, receiver = ends()
    assert "its seal does not fit" in str(refused(receiver, sender.close(1, b"x", 1), **options))


@pytest.mark.parametrize(
    "options",
    [{"secret": b"another secret, long"}, {"group": "pp"}, {"nonces": [b"a" * 16, b"c" * 16]}],
    ids=["secret", "group", "earlier group of that name"],
)
def test_a_seal_is_of_one_group(options: dict[str, Any]) -> None:
    sender, receiver = ends(**options)
    assert "its seal does not fit" in str(refused(receiver, sender.close(1, b"x", 1)))


@given(st.binary(max_size=40), st.data())
def test_any_change_is_seen(payload: bytes, data: st.DataObject) -> None:
    sender, receiver = ends()
    sealed = bytearray(sender.close(1, payload, 1))
    place = data.draw(st.integers(0, len(sealed) - 1))
    sealed[place] ^= data.draw(st.integers(1, 255))
    refused(receiver, bytes(sealed))
    refused(receiver, bytes(sealed[:place]))


# --- in a group over torch's sockets, on one host -----------------------------------------


def attacked(rank: int, n: int, store: Store, folder: str) -> list[str]:
    """Rank 0 plays who sits between the two: it writes frames of its own into the socket."""
    told = []
    for attack in ("forged", "changed", "repeated", "forged dict", "forged broadcast"):
        bomb = Path(folder) / attack.replace(" ", "-")
        with coordinator.init(
            tp=n, rank=rank, world_size=n, store=store, timeout=30, torch_only=True
        ) as groups:
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
    with coordinator.init(
        tp=n, rank=rank, world_size=n, store=store, timeout=30, torch_only=True
    ) as groups:
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


def test_a_call_that_is_refused_is_no_message() -> None:
    run_ranks(2, refused_before_it_is_counted, SharedStore())


# --- between hosts ------------------------------------------------------------------------

PLAIN: list[Any] = [
    None, True, -(1 << 63), 1 << 90, -(1 << 90), 2.5, "ü", b"\xff", [], (), {}, [1, (2, [3])],
    {"a": {1: (None,), (1, "b"): b""}}, torch.bfloat16, torch.Size([2, 3]), "x" * 5000,
]  # fmt: skip


def plainly(group: GroupCoordinator, me: int, other: int) -> None:
    """What needs no pickle goes over any socket."""
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
    """What does."""
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
    """Both ends hear why, and the cure; the next message is right."""
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
    """Whoever can write to the socket can send plain data: no code of his runs."""
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


def test_a_secret_is_for_all_or_for_none() -> None:
    """Whoever strips the nonces of others of their mark does not get plain messages."""
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
    assert repr(found) == repr(value)  # tells 1 from True, and lists from tuples, at any depth


@pytest.mark.parametrize("value", [{1}, Pair(1, 2), range(2), bytearray(), [object()], {1: 1j}])
def test_what_is_not_plain(value: Any) -> None:
    with pytest.raises(TypeError, match=r"a [\w.]+"):
        encode_plain(value)


@pytest.mark.parametrize("value", ["\ud83d", ["a", ("\udcff",)], {"\udcff": 1}])
def test_text_that_utf_8_cannot_write_is_not_plain(value: Any) -> None:
    with pytest.raises(TypeError, match="a text with a lone surrogate, which UTF-8 cannot write"):
        encode_plain(value)


def test_what_contains_itself_is_not_plain() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(TypeError, match="nested too deeply, or contains itself"):
        encode_plain(loop)


@given(st.binary(max_size=60))
def test_no_bytes_do_more_than_be_refused(data: bytes) -> None:
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
def test_bytes_that_are_not_plain_data(data: bytes) -> None:
    with pytest.raises(MessageDecodeError, match="not plain data"):
        decode_plain(data)
