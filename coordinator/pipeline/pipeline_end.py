"""Exchange trees of tensors with the neighbours in a pipeline, by one operation.

A tree is a tensor dict:

    "tree"    the nesting, as plain data; itself if named tuples or keys are not plain
    "0" …     the leaves, in order

The header of the dict describes everything that a receiver needs: the nesting, and shape, dtype,
device and requires_grad of every tensor.

In a ring of two stages the next stage is also the previous stage: activations and gradients come
from one peer, in its order of sending, which may differ from the order of receives. So the tag of a
message is its direction.

Only the result of a receive communicates with other peers (it gathers slices); the caller decides
that order. One thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack, overload

from coordinator.messages.incoming import Receive
from coordinator.messages.tensor_dict import WHOLE, Slicing
from coordinator.messages.transport import AnotherThreadError
from coordinator.messages.wire import Kind, decode_plain, encode_plain
from coordinator.tree import Node, Structure, flatten, places, unflatten
from device_comm import AllPending, Work
from device_comm.verbs.checks import Later, Maybe, Now, Timeout, check_rank
from shm_broadcast import Deadline, MessageDecodeError

if TYPE_CHECKING:
    from coordinator.group import GroupCoordinator
    from coordinator.messages.messenger import Packed


NEXT, PREV = 1, 2
"""Directions, as tags: to the next stage (activations), or to the previous one (gradients)."""


def to_dict(tree: Any) -> dict[str, Any]:
    """Return the tensor dict of a tree."""
    leaves, structure = flatten(tree)
    numbered = {str(number): leaf for number, leaf in enumerate(leaves)}
    return {"tree": _describe(structure), **numbered}


def by_place(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree, by their places in it."""
    leaves, structure = flatten(tree)
    return dict(zip(places(structure, "tree"), leaves, strict=True))


def from_dict(values: dict[str, Any]) -> Any:
    """Return the tree of a tensor dict, or raise MessageDecodeError."""
    leaves = [values[str(number)] for number in range(len(values) - 1)]
    return unflatten(_restore(values["tree"]), leaves)


def _describe(structure: Structure) -> bytes | Structure:
    return _cached_encode(structure) if _has_text_keys(structure) else _encode(structure)


def _has_text_keys(structure: Structure) -> bool:
    """Return whether equal keys are identical, unlike 1 and True: such structures are cached."""
    return structure is None or (
        _TEXT.issuperset(map(type, structure.keys)) and all(map(_has_text_keys, structure.children))
    )


_TEXT = frozenset({str})


def _encode(structure: Structure) -> bytes | Structure:
    try:
        return encode_plain(_to_plain(structure))
    except TypeError:
        return structure


_cached_encode = lru_cache(maxsize=256)(_encode)


def _restore(described: bytes | Structure) -> Structure:
    if isinstance(described, bytes):
        return _decode(described)
    if described is None or isinstance(described, Node):
        return described
    raise MessageDecodeError(f"the nesting of a message is a {type(described).__name__}")


@lru_cache(maxsize=256)
def _decode(data: bytes) -> Structure:
    try:
        return _from_plain(decode_plain(data))
    except (TypeError, ValueError, KeyError) as error:
        raise MessageDecodeError(f"cannot restore the nesting of a message: {error}") from error


_KINDS: dict[str, type] = {"dict": dict, "list": list, "tuple": tuple}


def _to_plain(structure: Structure) -> Any:
    if structure is None:
        return None
    if structure.kind not in _KINDS.values():
        raise TypeError(f"a {structure.kind.__name__}")
    children = [_to_plain(child) for child in structure.children]
    return structure.kind.__name__, structure.keys, children


def _from_plain(value: Any) -> Structure:
    if value is None:
        return None
    kind, keys, children = value
    return Node(_KINDS[kind], tuple(keys), tuple(_from_plain(child) for child in children))


if TYPE_CHECKING:
    Send = tuple[Any, int, int]
    """A tree, its direction, and the receiving rank."""


class Exchanged(NamedTuple):
    """The received trees of an exchange; None where none was requested."""

    from_prev: Any
    from_next: Any


class PipelineEnd:
    """One stage of a pipeline.

    Attributes:
        pp: the stages, in order, with the same tensor-parallel rank.
        tp: the ranks of this stage, all with the same activations and gradients. They send one
            slice each of a tensor that divides; the next stage's ranks gather the slices. None: no
            slices.
    """

    def __init__(self, pp: GroupCoordinator, tp: GroupCoordinator | None = None) -> None:
        self.pp = pp
        self.tp = tp
        self._messenger = pp._messenger
        self._peers = None if tp is None else tp._messenger

    @overload
    def exchange(
        self,
        send_next: Any = ...,
        send_prev: Any = ...,
        recv_prev: bool = ...,
        recv_next: bool = ...,
        *,
        next_rank: int | None = ...,
        prev_rank: int | None = ...,
        scatter_gather_tensors: bool | None = ...,
        **how: Unpack[Now],
    ) -> Exchanged: ...
    @overload
    def exchange(
        self,
        send_next: Any = ...,
        send_prev: Any = ...,
        recv_prev: bool = ...,
        recv_next: bool = ...,
        *,
        next_rank: int | None = ...,
        prev_rank: int | None = ...,
        scatter_gather_tensors: bool | None = ...,
        **how: Unpack[Later],
    ) -> Work[Exchanged]: ...
    def exchange(
        self,
        send_next: Any = None,
        send_prev: Any = None,
        recv_prev: bool = False,
        recv_next: bool = False,
        *,
        next_rank: int | None = None,
        prev_rank: int | None = None,
        scatter_gather_tensors: bool | None = None,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """Send and receive at once, in a ring: the first stage follows the last.

        A tree is a tensor, or dicts, lists and tuples of tensors and picklable values, nested.
        Tensors may have any dtype, shape and memory layout, different in each call. Two stages that
        both send first do not wait for each other.

        Args:
            send_next: the tree for the next stage; None: send none.
            send_prev: the tree for the previous stage; None: send none.
            recv_prev: receive what the previous stage sends to its next one.
            recv_next: receive what the next stage sends to its previous one.
            next_rank: a rank in ``pp`` instead of the next stage.
            prev_rank: a rank in ``pp`` instead of the previous stage.
            scatter_gather_tensors: send tensors that divide in slices; None: if there is a ``tp``.
                The sender alone decides.
            async_op: return a `Work`. Sent tensors must not change until it is done.
            timeout: seconds; None: the timeout of ``pp``.

        Returns:
            `Exchanged`: new tensors, which require a gradient as those sent, where gradients are
            enabled.

        Collective: yes over ``tp`` if slices are received, in ``wait()`` if asynchronous.

        Raises:
            ValueError: a rank is this one or not in ``pp``, or slices are requested without ``tp``:
                nothing was sent. Or a tensor is on another device: as `MessageRefusedError`.
            MessageRefusedError: a leaf cannot be sent, or is not a dense tensor; names its place in
                the tree. No tree of the call is sent; its receivers get the refusal instead, and
                the call's receives are dropped. A `TypeError`. Or a peer's tree cannot be sent.
            GroupTimeoutError: the timeout passed; without ``async_op`` the group is aborted.
        """
        return self._swap(
            Exchanged._make,
            send_next,
            send_prev,
            recv_prev,
            recv_next,
            next_rank=next_rank,
            prev_rank=prev_rank,
            scatter_gather_tensors=scatter_gather_tensors,
            async_op=async_op,
            timeout=timeout,
        )

    def _swap(
        self,
        pick: Callable[[list[Any]], Any],
        send_next: Any = None,
        send_prev: Any = None,
        recv_prev: bool = False,
        recv_next: bool = False,
        *,
        next_rank: int | None = None,
        prev_rank: int | None = None,
        scatter_gather_tensors: bool | None = None,
        **how: Unpack[Maybe],
    ) -> Any:
        """As `exchange`; ``pick`` makes the result from both trees."""
        to_next, to_prev = self._neighbour(next_rank, 1), self._neighbour(prev_rank, -1)
        trees = ((send_next, NEXT, to_next), (send_prev, PREV, to_prev))
        sends = [each for each in trees if each[0] is not None]
        # A message from the previous stage has the direction NEXT.
        receives = [(NEXT, to_prev) if recv_prev else None, (PREV, to_next) if recv_next else None]
        for rank in [each[-1] for each in (*sends, *receives) if each is not None]:
            self._check_peer(rank)
        return self._carry_out(pick, sends, receives, self._slicing(scatter_gather_tensors), **how)

    def _carry_out(
        self,
        pick: Callable[[list[Any]], Any],
        sends: Sequence[Send],
        receives: Sequence[tuple[int, int] | None],
        slicing: Slicing,
        *,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        messenger, kind = self._messenger, Kind.TREE
        allowed = self.pp._context.device.timeout if timeout is None else timeout
        if not async_op:
            allowed = Deadline.after(allowed)
        packed, refused = self._packed(sends, slicing)
        sends_only = not (async_op or refused or any(receives))
        sending: list[Work[None]] = []
        posted: list[Receive | None] = []
        n_sent = 0
        try:
            for (_, way, dst), each in zip(sends, packed, strict=True):
                make = partial(_same, each)
                if refused is not None:
                    messenger.refuse(refused, (dst,), way)
                elif sends_only:
                    messenger.send(kind, dst, make, allowed, way)
                else:
                    sending.append(messenger.isend(kind, (dst,), make, None, allowed, way))
                n_sent += 1
            posted += (
                each and messenger.post(kind, each[1], each[0], self._peers) for each in receives
            )
            if sends_only:
                return pick(posted)
            work = Work(
                None,
                AllPending([*filter(None, posted), *sending]),
                lambda: pick([each and from_dict(each.result(allowed)) for each in posted]),
                allowed,
            )
            if refused is None:
                return work if async_op else messenger.finish(work)
        except BaseException as error:
            # The messenger handles errors of a single send.
            is_message = len(sends) <= 1 and not any(receives)
            begun = n_sent or any(posted) or not isinstance(error, AnotherThreadError)
            if begun and not is_message:
                self._abort_if_partial(error, posted)
            raise
        return messenger.refused(refused)

    def _abort_if_partial(self, error: BaseException, posted: Sequence[Receive | None]) -> None:
        """Abort the groups if ``error`` leaves trees or slices for the next exchange."""
        receives = [each for each in posted if each is not None]
        if len(posted) == len(Exchanged._fields) and all(each.has_arrived for each in receives):
            for each in receives:
                each.leave(error)
            return
        self._messenger.cpu.abort(error)
        if self._peers is not None:
            self._peers.cpu.abort(error)

    def _packed(
        self, sends: Sequence[Send], slicing: Slicing
    ) -> tuple[list[Packed], Exception | None]:
        """Return the packed trees, and the error if one cannot be sent."""
        trees = [tree for tree, _, _ in sends]
        pack = self._messenger.payload
        try:
            return [pack(to_dict(tree), slicing) for tree in trees], None
        except Exception as error:  # noqa: BLE001 - `_carry_out` raises it
            return [(b"", ())] * len(trees), self._leaf_error(trees, slicing) or error

    def _leaf_error(self, trees: Sequence[Any], slicing: Slicing) -> Exception | None:
        """Return the error of sending the leaves, which names the place; None if there is none."""
        try:
            for tree in trees:
                self._messenger.payload(by_place(tree), slicing)
        except Exception as error:  # noqa: BLE001 - returned
            return error
        return None

    def _slicing(self, scatter_gather: bool | None) -> Slicing:
        if self._peers is None:
            if scatter_gather:
                raise ValueError("scatter_gather_tensors=True requires a stage with a tp group")
            return WHOLE
        return WHOLE if scatter_gather is False else self._peers.slicing(None)

    def _neighbour(self, rank: int | None, step: int) -> int:
        return (self.pp.rank_in_group + step) % self.pp.world_size if rank is None else rank

    def _check_peer(self, rank: int) -> None:
        check_rank("the peer's rank", rank, self.pp.world_size)
        if rank == self.pp.rank_in_group:
            raise ValueError(f"rank {rank} is this stage")


def _same(packed: Packed) -> Packed:
    return packed
