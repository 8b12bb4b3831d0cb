"""Exchange trees of tensors with the neighbours in a pipeline: one operation that all others use.

    "way"     which way the message goes: "next" or "previous"
    "tree"    the nesting, as plain data; where named tuples or keys are not plain, itself
    "0" …     the leaves, in order

or, where it cannot be sent, "way" and

    "refused"   why

The header of the dict therefore says everything that a receiver has to know: the nesting, and
shape, dtype, device and requires_grad of every tensor.

In a ring of two stages the next stage is the previous one: activations and gradients come from
the same peer, in the order in which it sent them, which need not be the order in which they are
asked for. A message therefore says which way it goes, and is kept until that way is asked for.

    want(NEXT) ──┐   ┌── coming: receives that were begun, not there or not looked at yet
    want(PREV) ──┤   ├── arrived[way]: there, and nobody asked for it yet
                 └───┴── a `Request` has its message once one of its way is there

Only `Request.finish` communicates with other peers (it gathers slices), so that order is the
caller's. One thread at a time.
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
"""Which way a message goes: to the next stage (activations) or to the previous one (gradients)."""

DIRECTION = "way"
"""The key at which a message says that."""


def to_dict(tree: Any, way: str) -> dict[str, Any]:
    """The tensor dict of a tree."""
    leaves, structure = flatten(tree)
    numbered = {str(number): leaf for number, leaf in enumerate(leaves)}
    return {DIRECTION: way, "tree": _describe(structure), **numbered}


def refused_tree(error: Exception, way: str) -> dict[str, Any]:
    """The tensor dict in the place of a tree that cannot be sent for ``error``."""
    return {DIRECTION: way, "refused": why_refused(error)}


def by_place(tree: Any) -> dict[str, Any]:
    """The leaves of a tree, by their places in it."""
    leaves, structure = flatten(tree)
    return dict(zip(places(structure, "tree"), leaves, strict=True))


def from_dict(values: dict[str, Any], refused: Callable[[str], MessageRefusedError]) -> Any:
    """The tree of a tensor dict; ``refused`` makes the error of one in the place of a tree.

    Raises:
        MessageRefusedError: its sender could not send it.
        MessageDecodeError: it cannot be restored here.
    """
    if "refused" in values:
        raise refused(values["refused"])
    leaves = [values[str(number)] for number in range(len(values) - 2)]
    return unflatten(_restore(values["tree"]), leaves)


def direction_of(header: Header) -> str:
    """Which way the message of a header goes.

    Raises:
        MessageDecodeError: a `Stage` did not send it.
    """
    way = header.scalars.get(DIRECTION)
    if way not in (NEXT, PREV):
        raise MessageDecodeError("a message arrived that no pipeline stage sent")
    return str(way)


def _describe(structure: Structure) -> bytes | Structure:
    return _remembered(structure) if _has_text_keys(structure) else _encode(structure)


def _has_text_keys(structure: Structure) -> bool:
    """Whether equal structures are the same: other keys may be equal and differ, as 1 and True."""
    return structure is None or (
        _TEXT.issuperset(map(type, structure.keys)) and all(map(_has_text_keys, structure.children))
    )


_TEXT = frozenset({str})


def _encode(structure: Structure) -> bytes | Structure:
    try:
        return encode_plain(_to_plain(structure))
    except TypeError:
        return structure


_remembered = lru_cache(maxsize=256)(_encode)


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
    """A message that was asked for; a `device_comm.Pending`. Made by `TaggedReceive.request`."""

    def __init__(self, inflow: TaggedReceive) -> None:
        """Wait for a message of ``inflow``."""
        self._inflow = inflow
        self.message: TensorDictReceiver | None = None

    def ready(self) -> bool:
        """Whether `wait` would return or raise at once. Never blocks."""
        try:
            while self.message is None and self._inflow.has_arrived():
                self._inflow.settle(Deadline.after(0))
        except CoordinatorError:  # a receive has failed, as `wait` says
            return True
        return self.message is not None

    def wait(self, deadline: Deadline) -> None:
        """Return once the message is there.

        Raises:
            GroupTimeoutError: not yet; it is still under way.
        """
        while self.message is None:
            self._inflow.settle(deadline)

    def finish(self, timeout: Timeout) -> Any:
        """The tree. Collective: yes over the peers' group, if it came in slices.

        Raises:
            MessageRefusedError: its sender could not send it.
        """
        if self.message is None:
            raise RuntimeError("a message is finished once it is ready, not before")
        direction_of(self.message.header())
        return from_dict(self.message.result(timeout), self.message.refused)

    def leave(self, error: BaseException) -> None:
        """As `Incoming.leave`, of a message that is there."""
        if self.message is not None:
            self.message.leave(error)


class TaggedReceive:
    """What one peer sends to this stage.

    Attributes:
        src: the peer, a rank in the pipeline group.
    """

    def __init__(self, messenger: Messenger, src: int, peers: Messenger | None) -> None:
        """Sort the messages of ``src``.

        Args:
            messenger: the pipeline group's.
            src: a rank in it.
            peers: of the group that receives the other slices.
        """
        self._messenger = messenger
        self.src = src
        self._peers = peers
        self._coming: deque[tuple[TensorDictReceiver, Pending]] = deque()
        self._arrived: dict[str, deque[TensorDictReceiver]] = {NEXT: deque(), PREV: deque()}
        self._wanting: list[tuple[str, Request]] = []

    def request(self, way: str) -> Request:
        """Ask for the next message that goes ``way``. Never blocks."""
        request = Request(self)
        if self._arrived[way]:
            request.message = self._arrived[way].popleft()
        else:
            self._begin(len(self._wanting) + 1)
            self._wanting.append((way, request))
        return request

    def has_arrived(self) -> bool:
        """Whether a message is there that was not sorted, or failed. Never blocks."""
        return bool(self._coming) and self._coming[0][1].ready()

    def settle(self, deadline: Deadline) -> None:
        """Wait until one more message is there, and sort it.

        Raises:
            GroupTimeoutError: none is; it is still under way.
        """
        if not self._coming:  # a signal handler has raised while it was sorted
            self._messenger.cpu.check()
        self._coming[0][1].wait(deadline)
        try:
            message, _ = self._coming.popleft()
            self._sort(message)
        except BaseException as error:  # a signal handler's
            self._messenger.cpu.abort(error)
            raise

    def _sort(self, message: TensorDictReceiver) -> None:
        try:
            way = direction_of(message.header())
            wanted = [each for each in self._wanting if each[0] == way]
        except CoordinatorError:  # who has waited longest gets it, and the error
            wanted = self._wanting
        if wanted:
            first = wanted[0]
            self._wanting.remove(first)
            first[1].message = message
        else:
            self._arrived[way].append(message)
            self._begin(len(self._wanting))

    def _begin(self, n_wanted: int) -> None:
        """Have so many receives begun, one for every request without a message. Never blocks."""
        while len(self._coming) < n_wanted:
            message = self._messenger.incoming_dict(self.src, self._peers, DIRECTION)
            self._coming.append((message, self._messenger.begin(message, self.src)))


if TYPE_CHECKING:
    Send = tuple[Any, str, int]
    """A tree, the way that it goes, and the rank that gets it."""


class Exchanged(NamedTuple):
    """What an exchange received; None where nothing was asked for."""

    from_prev: Any
    from_next: Any


class PipelineEnd:
    """One stage of a pipeline.

    Attributes:
        pp: the stages, in order; those of one tensor-parallel rank.
        tp: the ranks of this stage that hold the same activations; None: nothing is sliced.
    """

    def __init__(self, pp: GroupCoordinator, tp: GroupCoordinator | None = None) -> None:
        """Be a stage. Collective: no.

        Args:
            pp: the stages, in order.
            tp: the ranks of this stage, which all hold the same activations and gradients: of
                each tensor that divides they send a slice each, and the next stage's gather them.
        """
        self.pp = pp
        self.tp = tp
        self._messenger = pp._messenger
        self._peers = None if tp is None else tp._messenger
        self._inflows: dict[int, TaggedReceive] = {}

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
        **how: Unpack[Maybe],
    ) -> Exchanged | Work[Exchanged]: ...
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
        """Send and receive at once, in a ring: after the last stage comes the first.

        Whatever is sent is a tensor, or dicts, lists and tuples of tensors and picklable values,
        nested. Tensors may have any dtype, shape and layout in memory, and need not be the same
        every time. Two stages that send to each other first do not wait for each other.

        Args:
            send_next: goes to the next stage; None: nothing does.
            send_prev: goes to the previous stage; None: nothing does.
            recv_prev: receive what the previous stage sends to its next one.
            recv_next: receive what the next stage sends to its previous one.
            next_rank: instead of the next stage, a rank in ``pp``.
            prev_rank: instead of the previous stage, a rank in ``pp``.
            scatter_gather_tensors: whether tensors that divide are sent in slices; None: if there
                is a ``tp``. The sender alone decides.
            async_op: return a `Work`. Tensors that are sent must not change until it is done.
            timeout: seconds; None: what ``pp`` allows.

        Returns:
            `Exchanged`: new tensors; those that required a gradient do, where gradients are
            enabled.

        Collective: no, with the neighbours; yes over ``tp`` if slices are received, in ``wait()``
        if asynchronous.

        Raises:
            ValueError: a rank is this one or not in ``pp``, or slices are wanted without ``tp``:
                nothing was sent. Or a tensor is on another device: as `MessageRefusedError`.
            MessageRefusedError: something cannot be sent, or is no dense tensor; names its place in
                the tree. Nothing of the call is sent, and who was to receive it is told so in its
                place; what the call was to receive is dropped. It is a `TypeError`. Or a peer
                cannot send what it was given.
            GroupTimeoutError: it took too long; without ``async_op`` the group is aborted.
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
        """`exchange`, of which ``pick`` chooses the result: it is given both trees."""
        to_next, to_prev = self._neighbour(next_rank, 1), self._neighbour(prev_rank, -1)
        trees = ((send_next, NEXT, to_next), (send_prev, PREV, to_prev))
        sends = [each for each in trees if each[0] is not None]
        # what the previous stage sends goes to its next one
        inflows = [
            (NEXT, self._inflow_of(to_prev)) if recv_prev else None,
            (PREV, self._inflow_of(to_next)) if recv_next else None,
        ]
        return self._carry_out(pick, sends, inflows, self._slicing(scatter_gather_tensors), **how)

    def _carry_out(
        self,
        pick: Callable[[list[Any]], Any],
        sends: Sequence[Send],
        inflows: Sequence[tuple[str, TaggedReceive] | None],
        slicing: Slicing,
        *,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        allowed = self.pp.device_communicator.timeout if timeout is None else timeout
        if not async_op:
            allowed = Deadline.after(allowed)
        packed, refused = self._packed(sends, slicing)
        sends_only = not (async_op or refused or any(inflows))
        sending: list[Work[None]] = []
        requests: list[Request | None] = []
        n_sent = 0
        try:
            for (_, _, dst), each in zip(sends, packed, strict=True):
                kind, make = Kind.TENSOR_DICT, _giving(each)
                if sends_only:
                    self._messenger.send(kind, dst, make, allowed)
                else:
                    sending.append(self._messenger.isend(kind, (dst,), make, None, allowed))
                n_sent += 1
            requests += (each and each[1].request(each[0]) for each in inflows)
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
            is_message = len(sends) <= 1 and not any(inflows)  # whole, or the messenger's affair
            begun = n_sent or any(requests) or not isinstance(error, AnotherThreadError)
            if begun and not is_message:
                self._abort_if_partial(error, requests)
            raise
        return self._messenger.refused(refused)

    def _abort_if_partial(self, error: BaseException, requests: Sequence[Request | None]) -> None:
        """End the groups if ``error``, maybe a signal handler's, leaves an exchange half done: the
        next one would get its trees, or gather their slices.
        """
        asked = [request for request in requests if request is not None]
        if len(requests) == len(Exchanged._fields) and all(each.message for each in asked):
            for each in asked:
                each.leave(error)
            return
        self._messenger.cpu.abort(error)
        if self._peers is not None:
            self._peers.cpu.abort(error)

    def _packed(
        self, sends: Sequence[Send], slicing: Slicing
    ) -> tuple[list[Packed], Exception | None]:
        """What is sent; if a tree cannot be, refusals in the place of all, and why."""
        pack = self._messenger.payload
        for _, _, dst in sends:
            self._check_peer(dst)
        try:
            return [pack(to_dict(tree, way), slicing) for tree, way, _ in sends], None
        except Exception as error:  # noqa: BLE001 - `_carry_out` raises it
            refused = self._naming_the_leaf([tree for tree, _, _ in sends], slicing) or error
            return [pack(refused_tree(refused, way), WHOLE) for _, way, _ in sends], refused

    def _naming_the_leaf(self, trees: Sequence[Any], slicing: Slicing) -> Exception | None:
        """What sending the leaves raises, which names the first one's place; None: nothing."""
        try:
            for tree in trees:
                self._messenger.payload(by_place(tree), slicing)
        except Exception as error:  # noqa: BLE001 - it is what was asked for
            return error
        return None

    def _slicing(self, wanted: bool | None) -> Slicing:
        if self._peers is None:
            if wanted:
                raise ValueError("tensors are sent in slices only where the stage has a tp group")
            return WHOLE
        return WHOLE if wanted is False else self._peers.slicing(None)

    def _inflow_of(self, src: int) -> TaggedReceive:
        self._check_peer(src)
        if src not in self._inflows:
            self._inflows[src] = TaggedReceive(self._messenger, src, self._peers)
        return self._inflows[src]

    def _neighbour(self, rank: int | None, step: int) -> int:
        """``rank`` itself, or the one ``step`` further, in a ring."""
        return (self.pp.rank_in_group + step) % self.pp.world_size if rank is None else rank

    def _check_peer(self, rank: int) -> None:
        check_rank("the peer's rank", rank, self.pp.world_size)
        if rank == self.pp.rank_in_group:
            raise ValueError(f"rank {rank} is this stage itself")


def _giving(packed: Packed) -> Make:
    return lambda: packed
