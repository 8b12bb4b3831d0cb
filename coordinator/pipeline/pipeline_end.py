"""Exchange trees of tensors with the neighbours in a pipeline, by one operation.

The tensor dict of a message:

    "way"     the direction: "next" or "previous"
    "tree"    the nesting, as plain data; itself if named tuples or keys are not plain
    "0" …     the leaves, in order

or, for a tree that cannot be sent, "way" and

    "refused"   the reason

The header of the dict describes everything that a receiver needs: the nesting, and shape, dtype,
device and requires_grad of every tensor.

In a ring of two stages the next stage is also the previous stage: activations and gradients come
from one peer, in its order of sending, which may differ from the order of requests. A message
therefore has a direction, and is stored until a request for that direction.

    request(NEXT) ──┐   ┌── pending: begun receives, not completed or not sorted
    request(PREV) ──┤   ├── arrived[way]: completed messages without a request
                    └───┴── a `Request` gets its message when one of its direction arrives

Only `Request.finish` communicates with other peers (it gathers slices); the caller decides that
order. One thread at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack, overload

from coordinator.messages.incoming import TensorDictReceiver
from coordinator.messages.tensor_dict import WHOLE, Header, Slicing
from coordinator.messages.transport import AnotherThreadError
from coordinator.messages.wire import Kind, decode_plain, encode_plain, why_refused
from coordinator.tree import Node, Structure, flatten, places, unflatten
from device_comm import AllPending, Pending, Work
from device_comm.verbs.checks import Later, Maybe, Now, Timeout, check_rank
from shm_broadcast import CoordinatorError, Deadline, MessageDecodeError, MessageRefusedError

if TYPE_CHECKING:
    from coordinator.group import GroupCoordinator
    from coordinator.messages.messenger import Messenger
    from coordinator.messages.transport import Make, Packed


NEXT, PREV = "next", "previous"
"""Directions: to the next stage (activations) or to the previous stage (gradients)."""

DIRECTION = "way"
"""The key of a message's direction."""


def to_dict(tree: Any, way: str) -> dict[str, Any]:
    """Return the tensor dict of a tree."""
    leaves, structure = flatten(tree)
    numbered = {str(number): leaf for number, leaf in enumerate(leaves)}
    return {DIRECTION: way, "tree": _describe(structure), **numbered}


def refused_tree(error: Exception, way: str) -> dict[str, Any]:
    """Return the tensor dict that replaces a tree that cannot be sent because of ``error``."""
    return {DIRECTION: way, "refused": why_refused(error)}


def by_place(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree, by their places in it."""
    leaves, structure = flatten(tree)
    return dict(zip(places(structure, "tree"), leaves, strict=True))


def from_dict(values: dict[str, Any], refused: Callable[[str], MessageRefusedError]) -> Any:
    """Return the tree of a tensor dict; raise ``refused`` for a refused tree.

    Raises MessageDecodeError if the tree cannot be restored.
    """
    if "refused" in values:
        raise refused(values["refused"])
    leaves = [values[str(number)] for number in range(len(values) - 2)]
    return unflatten(_restore(values["tree"]), leaves)


def direction_of(header: Header) -> str:
    """Return a message's direction; raise MessageDecodeError if no `Stage` sent it."""
    way = header.scalars.get(DIRECTION)
    if way not in (NEXT, PREV):
        raise MessageDecodeError("received a message that no pipeline stage sent")
    return str(way)


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


class Request:
    """A requested message; a `device_comm.Pending`. Made by `TaggedReceive.request`."""

    def __init__(self, receive: TaggedReceive) -> None:
        self._receive = receive
        self.message: TensorDictReceiver | None = None

    def ready(self) -> bool:
        """Return whether `wait` would return or raise at once. Never blocks."""
        try:
            while self.message is None and self._receive.has_arrived():
                self._receive.settle(Deadline.after(0))
        except CoordinatorError:  # `wait` raises it
            return True
        return self.message is not None

    def wait(self, deadline: Deadline) -> None:
        """Return when the message has arrived; a receive stays pending after GroupTimeoutError."""
        while self.message is None:
            self._receive.settle(deadline)

    def finish(self, timeout: Timeout) -> Any:
        """Return the tree, or raise MessageRefusedError. Collective: yes over ``tp`` for slices."""
        if self.message is None:
            raise RuntimeError("finish() was called before the message arrived")
        direction_of(self.message.header())
        return from_dict(self.message.result(timeout), self.message.refused)

    def leave(self, error: BaseException) -> None:
        """As `Incoming.leave`, if the message has arrived."""
        if self.message is not None:
            self.message.leave(error)


class TaggedReceive:
    """The receives from one peer: ``src``, a rank in the pipeline group."""

    def __init__(self, messenger: Messenger, src: int, peers: Messenger | None) -> None:
        """Receive over ``messenger``; ``peers`` is of the group that receives the other slices."""
        self._messenger = messenger
        self.src = src
        self._peers = peers
        self._pending: deque[tuple[TensorDictReceiver, Pending]] = deque()
        self._arrived: dict[str, deque[TensorDictReceiver]] = {NEXT: deque(), PREV: deque()}
        self._requested: list[tuple[str, Request]] = []

    def request(self, way: str) -> Request:
        """Request the next message with direction ``way``. Never blocks."""
        request = Request(self)
        if self._arrived[way]:
            request.message = self._arrived[way].popleft()
        else:
            self._begin(len(self._requested) + 1)
            self._requested.append((way, request))
        return request

    def has_arrived(self) -> bool:
        """Return whether a receive has completed or failed, unsorted. Never blocks."""
        return bool(self._pending) and self._pending[0][1].ready()

    def settle(self, deadline: Deadline) -> None:
        """Wait for one more message and sort it; it stays pending after GroupTimeoutError."""
        if not self._pending:  # a signal handler raised in `_sort`, which aborted the group
            self._messenger.cpu.check()
        self._pending[0][1].wait(deadline)
        try:
            message, _ = self._pending.popleft()
            self._sort(message)
        except BaseException as error:  # raised by a signal handler
            self._messenger.cpu.abort(error)
            raise

    def _sort(self, message: TensorDictReceiver) -> None:
        try:
            way = direction_of(message.header())
            matching = [each for each in self._requested if each[0] == way]
        except CoordinatorError:  # the oldest request gets the message, and raises
            matching = self._requested
        if matching:
            first = matching[0]
            self._requested.remove(first)
            first[1].message = message
        else:
            self._arrived[way].append(message)
            self._begin(len(self._requested))

    def _begin(self, n_receives: int) -> None:
        """Begin receives up to ``n_receives``, one per open request. Never blocks."""
        while len(self._pending) < n_receives:
            message = self._messenger.incoming_dict(self.src, self._peers, DIRECTION)
            self._pending.append((message, self._messenger.begin(message, self.src)))


if TYPE_CHECKING:
    Send = tuple[Any, str, int]
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
        self._receives: dict[int, TaggedReceive] = {}

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
        receives = [
            (NEXT, self._receive_from(to_prev)) if recv_prev else None,
            (PREV, self._receive_from(to_next)) if recv_next else None,
        ]
        return self._carry_out(pick, sends, receives, self._slicing(scatter_gather_tensors), **how)

    def _carry_out(
        self,
        pick: Callable[[list[Any]], Any],
        sends: Sequence[Send],
        receives: Sequence[tuple[str, TaggedReceive] | None],
        slicing: Slicing,
        *,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        allowed = self.pp._context.device.timeout if timeout is None else timeout
        if not async_op:
            allowed = Deadline.after(allowed)
        packed, refused = self._packed(sends, slicing)
        sends_only = not (async_op or refused or any(receives))
        sending: list[Work[None]] = []
        requests: list[Request | None] = []
        n_sent = 0
        try:
            for (_, _, dst), each in zip(sends, packed, strict=True):
                kind, make = Kind.TENSOR_DICT, _constant(each)
                if sends_only:
                    self._messenger.send(kind, dst, make, allowed)
                else:
                    sending.append(self._messenger.isend(kind, (dst,), make, None, allowed))
                n_sent += 1
            requests += (each and each[1].request(each[0]) for each in receives)
            if sends_only:
                return pick(requests)
            under_way: list[Pending] = [request for request in requests if request is not None]
            work = Work(
                None,
                AllPending([*under_way, *sending]),
                lambda: pick([request and request.finish(allowed) for request in requests]),
                allowed,
            )
            if refused is None:
                return work if async_op else self._messenger.finish(work)
        except BaseException as error:
            # The messenger handles errors of a single send.
            is_message = len(sends) <= 1 and not any(receives)
            begun = n_sent or any(requests) or not isinstance(error, AnotherThreadError)
            if begun and not is_message:
                self._abort_if_partial(error, requests)
            raise
        return self._messenger.refused(refused)

    def _abort_if_partial(self, error: BaseException, requests: Sequence[Request | None]) -> None:
        """Abort the groups if ``error`` leaves trees or slices for the next exchange."""
        issued = [request for request in requests if request is not None]
        if len(requests) == len(Exchanged._fields) and all(each.message for each in issued):
            for each in issued:
                each.leave(error)
            return
        self._messenger.cpu.abort(error)
        if self._peers is not None:
            self._peers.cpu.abort(error)

    def _packed(
        self, sends: Sequence[Send], slicing: Slicing
    ) -> tuple[list[Packed], Exception | None]:
        """Return the packed trees; if one cannot be sent, refusals of all, and the error."""
        pack = self._messenger.payload
        for _, _, dst in sends:
            self._check_peer(dst)
        try:
            return [pack(to_dict(tree, way), slicing) for tree, way, _ in sends], None
        except Exception as error:  # noqa: BLE001 - `_carry_out` raises it
            refused = self._leaf_error([tree for tree, _, _ in sends], slicing) or error
            return [pack(refused_tree(refused, way), WHOLE) for _, way, _ in sends], refused

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

    def _receive_from(self, src: int) -> TaggedReceive:
        self._check_peer(src)
        if src not in self._receives:
            self._receives[src] = TaggedReceive(self._messenger, src, self._peers)
        return self._receives[src]

    def _neighbour(self, rank: int | None, step: int) -> int:
        return (self.pp.rank_in_group + step) % self.pp.world_size if rank is None else rank

    def _check_peer(self, rank: int) -> None:
        check_rank("the peer's rank", rank, self.pp.world_size)
        if rank == self.pp.rank_in_group:
            raise ValueError(f"rank {rank} is this stage")


def _constant(packed: Packed) -> Make:
    return lambda: packed
