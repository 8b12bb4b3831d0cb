"""Provide a group's verbs: collectives over tensors, messages, objects, tensor dicts, experts.

    dispatch    all_gatherv: every member gets the rows of all
    combine     reduce_scatterv: the experts' results are summed, each member gets its own rows

Members may hold different numbers of rows. ``sizes`` lists the rows per member. Without it each
`dispatch` gathers the sizes in one small exchange, and `combine` uses the sizes of the `dispatch`
with the same total. If two dispatches in flight have the same total and different sizes, `combine`
needs ``sizes``. A `dispatch` not combined before `UNDER_WAY` later ones counts as abandoned.

Tensor-parallel members hold the same rows, unless they are sequence-parallel. So rows are exchanged
within `token_group`, if the group has one; with ``is_sequence_parallel`` within the whole group.
Within `token_group`, `combine` sums the results of its members' experts only: the caller sums over
the tensor-parallel group.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, Unpack, overload

import torch
from torch import Tensor

from coordinator.compile_ops import OpsOfGraph
from coordinator.member import Hierarchy, Member
from coordinator.messages.tensor_dict import WHOLE
from coordinator.messages.wire import Kind
from device_comm import Work
from device_comm.verbs.checks import Later, Now, Shape, Timeout, check_shape
from device_comm.verbs.collectives import Collectives
from device_comm.verbs.rooted import RootedCollectives
from shm_broadcast.deadline import Deadline

if TYPE_CHECKING:
    from coordinator.context import GroupContext
    from coordinator.messages.messenger import Make


UNDER_WAY: Final = 8
"""The most dispatches in flight whose sizes `combine` can derive."""


class DispatchSizes:
    """The sizes of a member's dispatches not yet combined. Pure logic."""

    def __init__(self) -> None:
        self._count = 0
        self._under_way: deque[tuple[int, tuple[int, ...]]] = deque()
        self._combined: tuple[int, ...] = ()

    def add(self, sizes: Sequence[int]) -> None:
        """Record a dispatch with so many rows of each member."""
        self._count += 1
        self._under_way.append((self._count, tuple(sizes)))
        while self._under_way[0][0] <= self._count - UNDER_WAY:
            self._under_way.popleft()

    def combined(self, sizes: Sequence[int]) -> None:
        """Remove the oldest dispatch with these sizes."""
        self._combined = tuple(sizes)
        oldest = next((each for each in self._under_way if each[1] == self._combined), None)
        if oldest is not None:
            self._under_way.remove(oldest)

    def sizes_of(self, rows: int) -> tuple[int, ...]:
        """Return the sizes of the dispatch with ``rows`` rows in all, else of the last combine.

        Raises ValueError if no dispatch has as many rows, or several with different sizes.
        """
        under_way = [sizes for _, sizes in self._under_way if sum(sizes) == rows]
        distinct = list(dict.fromkeys(under_way))
        if not distinct and self._combined and sum(self._combined) == rows:
            return self._combined
        if not distinct:
            raise ValueError(f"combine needs sizes: no {rows} rows were dispatched before")
        if len(distinct) > 1:
            several = " and as ".join(str(list(sizes)) for sizes in distinct)
            raise ValueError(
                f"combine needs sizes: {rows} rows were dispatched as {several}, before the first "
                "of these was combined"
            )
        return distinct[0]


T = TypeVar("T")


class GroupVerbs(Member, Collectives, RootedCollectives):
    """The verbs of a member. Ranks are ranks in the group.

    Timeouts are in seconds; None: the group's operation timeout. With ``async_op=True`` a verb
    returns a `device_comm.Work`; ``await`` it or call its ``wait()`` for the result. Collectives
    are over tensors on the group's device. `device_comm.communicator` lists the errors; an expired
    deadline aborts the group.

    In a group of one each verb returns its input itself, neither copied nor pickled.

    Without ``dst`` or ``src``, the peer of a message is the next or the previous rank.

    - Order: messages from one member to another arrive in the order sent. The receiver must ask for
      the same kinds in the same order.
    - Blocking sends return before their receives, up to 64 MiB in flight to one member. Beyond that
      they block; a timeout then aborts the group. Sends over NCCL block on the device: members that
      send to each other must call `irecv` directly after `isend`.
    - Objects are pickled where only members can write, or messages are sealed; other sockets carry
      plain data only (`coordinator.messages.wire`). Members trust each other.
    - One thread at a time. A second thread that sends meanwhile, or receives from the same member,
      gets `RuntimeError`; nothing is sent or received.

    Asynchronous operations progress in the background; those on GPU tensors only in ``wait()``. An
    asynchronous send

        of objects, or up to 1 MiB of CPU tensors    is done at once
        of more, through shared memory               is done before its receive, up to 64 MiB in all
        of more, over sockets                        is done with its receive

    Attributes:
        token_group: the members whose rows differ if rows are not sequence-parallel, usually those
            of the data-parallel and prefill-context-parallel groups together; None: this group.
    """

    token_group: GroupVerbs | None = None
    _dispatch_sizes: DispatchSizes

    @property
    @abstractmethod
    def hierarchy(self) -> Hierarchy[GroupVerbs]:
        """The group's members by host, as groups."""

    def _init_from(self, link: GroupContext) -> None:
        super()._init_from(link)
        self.runner = link.device.runner
        self._traced = OpsOfGraph(self.unique_name, self.world_size)
        self._dispatch_sizes = DispatchSizes()

    # --- tensors -------------------------------------------------------------------------

    def send(self, x: Tensor, dst: int | None = None, *, timeout: float | None = None) -> None:
        """Send a tensor of the group's device; the caller may change ``x`` afterwards."""
        self._messenger.send_tensor(x, self._next(dst), timeout)

    def isend(
        self, x: Tensor, dst: int | None = None, *, timeout: float | None = None
    ) -> Work[None]:
        """Begin to send a tensor; ``x`` must not change until the work is done."""
        return self._messenger.isend_tensor(x, self._next(dst), timeout)

    def recv(
        self,
        size: Shape | None = None,
        dtype: torch.dtype | None = None,
        src: int | None = None,
        *,
        out: Tensor | None = None,
        timeout: float | None = None,
    ) -> Tensor:
        """Receive a tensor into ``out``, or into a new tensor on the group's device.

        Args:
            size: its shape, or an int for one dimension; not needed with ``out``.
            dtype: its dtype; not needed with ``out``.
            src: the sender; None: the previous rank.
            out: a tensor to receive into.
            timeout: seconds; None: the group's operation timeout.
        """
        return self._messenger.recv_tensor(size, dtype, self._previous(src), out, timeout)

    def irecv(
        self,
        size: Shape | None = None,
        dtype: torch.dtype | None = None,
        src: int | None = None,
        *,
        out: Tensor | None = None,
        timeout: float | None = None,
    ) -> Work[Tensor]:
        """Begin to receive a tensor; arguments and result as for `recv`."""
        src = self._previous(src)
        return self._messenger.irecv_tensor(size, dtype, src, out, timeout)

    # --- objects -------------------------------------------------------------------------

    def send_object(self, obj: Any, dst: int, *, timeout: float | None = None) -> None:
        """Send an object of any size; see `GroupVerbs` for the types."""
        messenger = self._messenger
        messenger.send(Kind.OBJECT, dst, partial(messenger.dump, obj), timeout)

    def isend_object(self, obj: Any, dst: int, *, timeout: float | None = None) -> Work[None]:
        """As `send_object`; the object is encoded at once, and the work is done."""
        messenger = self._messenger
        return messenger.isend(Kind.OBJECT, (dst,), partial(messenger.dump, obj), None, timeout)

    def recv_object(self, src: int, *, timeout: float | None = None) -> Any:
        """Receive an object from rank ``src``."""
        return self._messenger.recv(Kind.OBJECT, src, timeout)

    def irecv_object(self, src: int, *, timeout: float | None = None) -> Work[Any]:
        """Begin to receive an object from rank ``src``."""
        return self._messenger.irecv(Kind.OBJECT, src, timeout)

    @overload
    def broadcast_object(self, obj: Any = ..., src: int = ..., **how: Unpack[Now]) -> Any: ...
    @overload
    def broadcast_object(
        self, obj: Any = ..., src: int = ..., **how: Unpack[Later]
    ) -> Work[Any]: ...
    def broadcast_object(
        self, obj: Any = None, src: int = 0, *, async_op: bool = False, timeout: Timeout = None
    ) -> Any:
        """Return the object of ``src``. Collective: yes, every member.

        An object of rank 0 goes through `mq_broadcaster`, if the group has one, except with
        ``async_op``.

        Only the ``obj`` of ``src`` counts; ``src`` and a group of one get ``obj`` itself.
        ``async_op``, the same on all members, returns a `Work`, ordered with the messages of
        ``src``. Every member must wait for it: ``wait()`` sends the rest of a large object.
        """
        queue = self.mq_broadcaster
        if queue is not None and src == 0 and not async_op:
            return self._messenger.broadcast_through(queue, obj, timeout)
        return self._messenger.broadcast_object(obj, src, timeout, async_op=async_op)

    @overload
    def broadcast_object_list(
        self, obj_list: list[Any], src: int = ..., **how: Unpack[Now]
    ) -> list[Any]: ...
    @overload
    def broadcast_object_list(
        self, obj_list: list[Any], src: int = ..., **how: Unpack[Later]
    ) -> Work[list[Any]]: ...
    def broadcast_object_list(
        self, obj_list: list[Any], src: int = 0, *, async_op: bool = False, timeout: Timeout = None
    ) -> Any:
        """Fill ``obj_list`` with the objects of ``src`` and return it.
        Collective: yes, every member.

        ``async_op`` as for `broadcast_object`. Raises ValueError if the list of ``src`` has another
        length.
        """

        def fill(objects: list[Any]) -> list[Any]:
            if len(objects) != len(obj_list):
                raise ValueError(f"rank {src} has {len(objects)} objects, this one {len(obj_list)}")
            obj_list[:] = objects
            return obj_list

        received = self._messenger.broadcast_object(obj_list, src, timeout, async_op=async_op)
        return received.then(fill) if async_op else fill(received)

    @overload
    def all_gather_object(self, obj: T, **how: Unpack[Now]) -> list[T]: ...
    @overload
    def all_gather_object(self, obj: T, **how: Unpack[Later]) -> Work[list[T]]: ...
    def all_gather_object(
        self, obj: Any, *, async_op: bool = False, timeout: Timeout = None
    ) -> Any:
        """Return all members' objects, by rank in the group. Collective: yes, every member.

        ``async_op`` as for `broadcast_object`. In a group of one the list holds ``obj`` itself.
        """
        if async_op:
            return self._messenger.iall_gather_object(obj, timeout)
        return self._messenger.all_gather_object(obj, timeout)

    # --- dicts of tensors ----------------------------------------------------------------

    def send_tensor_dict(
        self,
        tensor_dict: Mapping[Any, Any],
        dst: int | None = None,
        all_gather_group: GroupVerbs | None = None,
        all_gather_tensors: Mapping[Any, bool] | None = None,
        *,
        timeout: float | None = None,
    ) -> Mapping[Any, Any] | None:
        """Send a dict of tensors and other values.

        Args:
            tensor_dict: tensors on the group's device or the CPU, of any dtype and strides, and
                other values (`coordinator.messages.wire` lists the types). Keys are text, bytes,
                numbers, bools, None, or tuples of these. The caller may change it afterwards.
            dst: the receiver; None: the next rank.
            all_gather_group: members with the same tensors, usually the tensor-parallel group: each
                sends a slice, and the receivers' group of the same size gathers them.
            all_gather_tensors: by key: whether to slice that tensor; default: if its number of
                elements is divisible by the group's size. Only the sender's value counts.
            timeout: seconds; None: the group's operation timeout.

        Returns:
            None; in a group of one, as in vLLM, ``tensor_dict`` itself: nothing is sent.

        Raises:
            ValueError: a tensor to be sliced is not divisible, or a tensor is on another device.
                The receiver raises `MessageRefusedError` with the same text.
            MessageRefusedError: a key or value cannot be sent, or a tensor is not dense; also at
                the receiver. It is a `TypeError`.
        """
        if self.world_size == 1:
            return self._messenger.broadcast_dict(tensor_dict, 0, timeout)  # type: ignore[no-any-return]
        make = self._packing(tensor_dict, all_gather_group, all_gather_tensors)
        self._messenger.send(Kind.TENSOR_DICT, self._next(dst), make, timeout)
        return None

    def isend_tensor_dict(
        self,
        tensor_dict: Mapping[Any, Any],
        dst: int | None = None,
        all_gather_group: GroupVerbs | None = None,
        all_gather_tensors: Mapping[Any, bool] | None = None,
        *,
        timeout: float | None = None,
    ) -> Work[None]:
        """As `send_tensor_dict`; the tensors must not change until the work is done.

        In a group of one nothing is sent, and the work is done.
        """
        if self.world_size == 1:
            self._messenger.broadcast_dict(tensor_dict, 0, timeout)
            return Work(None)
        make = self._packing(tensor_dict, all_gather_group, all_gather_tensors)
        return self._messenger.isend(Kind.TENSOR_DICT, (self._next(dst),), make, None, timeout)

    def recv_tensor_dict(
        self,
        src: int | None = None,
        all_gather_group: GroupVerbs | None = None,
        all_gather_tensors: Mapping[Any, bool] | None = None,  # noqa: ARG002 - the header has it
        *,
        timeout: float | None = None,
    ) -> dict[Any, Any]:
        """Receive a dict of tensors.
        Collective: yes, over ``all_gather_group``, if the sender sliced a tensor.

        Args:
            src: the sender; None: the previous rank.
            all_gather_group: this member's group that receives the other slices.
            all_gather_tensors: not used, accepted as in vLLM; the message lists the sliced tensors.
            timeout: seconds; None: the group's operation timeout.

        Returns:
            New tensors and values, in the sender's order; in a group of one, as in vLLM, None.

        Raises:
            ValueError: a tensor is sliced, and ``all_gather_group`` is missing, or its size or this
                member's rank in it differs from the sender's.
            DivergenceError: members of ``all_gather_group`` receive different dicts; it is aborted.
            MessageRefusedError: the sender cannot send its dict; carries the reason.
            MessageDecodeError: a value cannot be restored here; or a tensor does not fit into
                memory, or its device is missing, and the group is aborted.
            MessageSealError: the message is not the sender's next; the group is aborted.
        """
        if self.world_size == 1:
            return self._messenger.broadcast_object(None, 0, timeout)  # type: ignore[no-any-return]
        src = self._previous(src)
        peers = None if all_gather_group is None else all_gather_group._messenger.routes
        return self._messenger.recv(Kind.TENSOR_DICT, src, timeout, peers=peers)  # type: ignore[no-any-return]

    def irecv_tensor_dict(
        self,
        src: int | None = None,
        all_gather_group: GroupVerbs | None = None,
        all_gather_tensors: Mapping[Any, bool] | None = None,  # noqa: ARG002 - the header has it
        *,
        timeout: float | None = None,
    ) -> Work[dict[Any, Any]]:
        """As `recv_tensor_dict`, without waiting.
        Collective: yes, ``wait()`` over ``all_gather_group``, if the sender sliced a tensor.
        """
        if self.world_size == 1:
            return Work(self._messenger.broadcast_object(None, 0, timeout))
        src = self._previous(src)
        peers = None if all_gather_group is None else all_gather_group._messenger.routes
        return self._messenger.irecv(Kind.TENSOR_DICT, src, timeout, peers=peers)

    @overload
    def broadcast_tensor_dict(
        self, tensor_dict: Mapping[Any, Any] | None = ..., src: int = ..., **how: Unpack[Now]
    ) -> dict[Any, Any]: ...
    @overload
    def broadcast_tensor_dict(
        self, tensor_dict: Mapping[Any, Any] | None = ..., src: int = ..., **how: Unpack[Later]
    ) -> Work[dict[Any, Any]]: ...
    def broadcast_tensor_dict(
        self,
        tensor_dict: Mapping[Any, Any] | None = None,
        src: int = 0,
        *,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """Return the dict of ``src``. Collective: yes, every member.

        Args:
            tensor_dict: as for `send_tensor_dict`; only that of ``src`` counts.
            src: a rank in the group.
            async_op: as for `broadcast_object`; tensors must not change until the work is done.

        Returns:
            New tensors and values in the order of ``src``; at ``src`` a new dict of its own values.
            In a group of one ``tensor_dict`` itself.
        """
        return self._messenger.broadcast_dict(tensor_dict, src, timeout, async_op=async_op)

    # --- experts -------------------------------------------------------------------------

    def exchanging_rows_in(self, token_group: GroupVerbs) -> Self:
        """Return a second name of this group with another `token_group`; both close together."""
        other = self.sharing(self)
        other.token_group = token_group
        return other

    @overload
    def dispatch(
        self,
        *rows: Tensor,
        is_sequence_parallel: bool = ...,
        sizes: Sequence[int] | None = ...,
        **how: Unpack[Now],
    ) -> tuple[Tensor, ...]: ...
    @overload
    def dispatch(
        self,
        *rows: Tensor,
        is_sequence_parallel: bool = ...,
        sizes: Sequence[int] | None = ...,
        **how: Unpack[Later],
    ) -> Work[tuple[Tensor, ...]]: ...
    def dispatch(
        self,
        *rows: Tensor,
        is_sequence_parallel: bool = False,
        sizes: Sequence[int] | None = None,
        timeout: Timeout = None,
        **how: Any,
    ) -> Any:
        """Gather the rows of all members, in rank order. Collective: yes, every member.

        Args:
            rows: one or more tensors (rows, ...), for example hidden states, weights and ids; all
                with the same number of rows.
            is_sequence_parallel: whether the members of a replica hold different rows.
            sizes: the rows of each member, the same on all; None: gather the sizes first, and wait
                for them.
            timeout: seconds; None: the group's operation timeout.
            how: ``async_op``: return a `Work` of the result.

        Returns:
            As many tensors (all rows, ...).
        """
        group = self._rows_differ_in(is_sequence_parallel)
        if timeout is not None:
            timeout = Deadline.after(timeout)
        if not rows:
            raise TypeError("dispatch needs one tensor or more")
        if sizes is None:
            count = torch.tensor([len(rows[0])], device="cpu")
            sizes = group._context.cpu.all_gather(count, timeout=timeout).tolist()
        gathered: Any = group.all_gatherv(rows, 0, sizes, timeout=timeout, **how)
        group._dispatch_sizes.add(sizes)
        return gathered.then(tuple) if isinstance(gathered, Work) else tuple(gathered)

    @overload
    def combine(
        self,
        hidden_states: Tensor,
        is_sequence_parallel: bool = ...,
        *,
        sizes: Sequence[int] | None = ...,
        out: Tensor | None = ...,
        **how: Unpack[Now],
    ) -> Tensor: ...
    @overload
    def combine(
        self,
        hidden_states: Tensor,
        is_sequence_parallel: bool = ...,
        *,
        sizes: Sequence[int] | None = ...,
        out: Tensor | None = ...,
        **how: Unpack[Later],
    ) -> Work[Tensor]: ...
    def combine(
        self,
        hidden_states: Tensor,
        is_sequence_parallel: bool = False,
        *,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
        **how: Any,
    ) -> Any:
        """Sum the experts' results and return this member's rows. Collective: yes, every member.

        Args:
            hidden_states: (all rows, ...), in the row order of `dispatch`.
            is_sequence_parallel: as for `dispatch`.
            sizes: the rows of each member; None: those of the `dispatch` with the same total.
            out: a tensor (this member's rows, ...) for the result; None: a new one.
            how: ``async_op`` and ``timeout``, as for `dispatch`.

        Raises:
            ValueError: without ``sizes``: no `dispatch` had as many rows, or several did with
                different sizes.
        """
        group = self._rows_differ_in(is_sequence_parallel)
        if sizes is None:
            sizes = group._dispatch_sizes.sizes_of(len(hidden_states))
        own_rows = group.reduce_scatterv(hidden_states, 0, sizes, out=out, **how)
        group._dispatch_sizes.combined(sizes)
        return own_rows

    def allocate_combine_input(
        self,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device | None = None,
        is_sequence_parallel: bool = False,
    ) -> Tensor:
        """Return uninitialised memory for the input of `combine`.

        ``shape``, (all rows, ...), and ``dtype`` are the same on all members. ``device`` None: the
        group's.
        """
        group = self._rows_differ_in(is_sequence_parallel)
        return torch.empty(check_shape("shape", shape), dtype=dtype, device=device or group.device)

    def _rows_differ_in(self, is_sequence_parallel: bool) -> GroupVerbs:
        return self if is_sequence_parallel or self.token_group is None else self.token_group

    def _packing(
        self,
        tensor_dict: Mapping[Any, Any],
        all_gather_group: GroupVerbs | None,
        all_gather_tensors: Mapping[Any, bool] | None,
    ) -> Make:
        slicing = (
            all_gather_group._messenger.slicing(all_gather_tensors) if all_gather_group else WHOLE
        )
        return partial(self._messenger.payload, tensor_dict, slicing)

    def _next(self, dst: int | None) -> int:
        return (self.rank_in_group + 1) % self.world_size if dst is None else dst

    def _previous(self, src: int | None) -> int:
        return (self.rank_in_group - 1) % self.world_size if src is None else src

    def _reduce_by_nodes(self, x: Tensor, *, async_op: bool = False, **how: Any) -> Any:
        result = self.hierarchy.all_reduce(x, **how)
        return Work(result) if async_op else result
