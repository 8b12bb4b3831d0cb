"""The verbs for messages between members: tensors, objects, and dicts of tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from coordinator.tensor_dict import WHOLE
from coordinator.verbs import TensorVerbs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import Tensor

    from coordinator.verbs import Timeout
    from device_comm import Work


class MessageVerbs(TensorVerbs):
    """Sending and receiving. Ranks are ranks in the group; the default is the ring neighbour.

    What one member sends to another arrives in the order sent, whatever its kind; the
    receiver asks for the same kinds in the same order. Sends do not wait for their
    receives, until 64 MiB to one member are under way. Objects are pickled: members trust
    each other.
    """

    # --- tensors -------------------------------------------------------------------------

    def send(self, x: Tensor, dst: int | None = None, *, timeout: Timeout = None) -> None:
        """Send a tensor; it may be changed afterwards. Collective: no, the two members.

        Args:
            x: any shape and dtype.
            dst: None: the next rank.
            timeout: seconds; None: what the group allows.
        """
        self._mail.send_tensor(x, self._next(dst), timeout)

    def isend(self, x: Tensor, dst: int | None = None, *, timeout: Timeout = None) -> Work[None]:
        """As `send`, at once; ``x`` must not change until the work is done. Collective: no."""
        return self._mail.isend_tensor(x, self._next(dst), timeout)

    def recv(
        self,
        size: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        src: int | None = None,
        *,
        out: Tensor | None = None,
        timeout: Timeout = None,
    ) -> Tensor:
        """Receive a tensor. Collective: no, the two members.

        Args:
            size: its shape; not needed with ``out``.
            dtype: its dtype; not needed with ``out``.
            src: None: the previous rank.
            out: where to put it.
            timeout: seconds; None: what the group allows.

        Returns:
            ``out``, or a new tensor on the group's device.
        """
        src = self._previous(src)
        self._mail.settle(src, timeout)
        return self.device_communicator.recv(size, dtype, src, out=out, timeout=timeout)

    def irecv(
        self,
        size: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        src: int | None = None,
        *,
        out: Tensor | None = None,
        timeout: Timeout = None,
    ) -> Work[Tensor]:
        """As `recv`, at once. Collective: no."""
        src = self._previous(src)
        return self._mail.irecv_tensor(size, dtype, src, out, timeout)

    # --- objects -------------------------------------------------------------------------

    def send_object(self, obj: Any, dst: int, *, timeout: Timeout = None) -> None:
        """Send a picklable object of any size. Collective: no, the two members."""
        self._mail.send_object(obj, dst, timeout)

    def isend_object(self, obj: Any, dst: int, *, timeout: Timeout = None) -> Work[None]:
        """As `send_object`; the object is pickled at once. Collective: no."""
        return self._mail.isend_object(obj, dst, timeout)

    def recv_object(self, src: int, *, timeout: Timeout = None) -> Any:
        """Receive an object. Collective: no, the two members."""
        return self._mail.recv_object(src, timeout)

    def irecv_object(self, src: int, *, timeout: Timeout = None) -> Work[Any]:
        """As `recv_object`, at once. Collective: no."""
        return self._mail.irecv_object(src, timeout)

    def broadcast_object(
        self, obj: Any = None, src: int = 0, *, async_op: bool = False, timeout: Timeout = None
    ) -> Any:
        """The object of ``src``; that of rank 0 goes through the group's queue, if it has one.

        Collective: yes, every member; ``src`` gets ``obj`` itself back. ``async_op`` is the same
        on all members, and goes round the queue: a `Work`, in order with the messages of ``src``.
        """
        if async_op:
            return self._mail.ibroadcast_object(obj, src, timeout)
        queue = self.mq_broadcaster
        if queue is not None and src == 0:
            return queue.broadcast_object(obj, self._mail.deadline(timeout))
        return self._mail.broadcast_object(obj, src, timeout)

    def broadcast_object_list(
        self,
        obj_list: list[Any],
        src: int = 0,
        *,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """Fill every member's list with the objects of ``src``'s. Collective: yes, every member.

        Args:
            obj_list: as long on all members; changed in place.
            src: a rank in the group.
            async_op: as `broadcast_object`.
            timeout: seconds; None: what the group allows.

        Returns:
            ``obj_list``.

        Raises:
            ValueError: ``src``'s list has another length.
        """

        def fill(found: list[Any]) -> list[Any]:
            if len(found) != len(obj_list):
                raise ValueError(f"rank {src} has {len(found)} objects, this one {len(obj_list)}")
            obj_list[:] = found
            return obj_list

        if async_op:
            return self._mail.ibroadcast_object(obj_list, src, timeout).then(fill)
        return fill(self._mail.broadcast_object(obj_list, src, timeout))

    def all_gather_object(
        self, obj: Any, *, async_op: bool = False, timeout: Timeout = None
    ) -> Any:
        """Every member's object, by rank in the group. Collective: yes, every member.

        ``async_op``: as `broadcast_object`.
        """
        if async_op:
            return self._mail.iall_gather_object(obj, timeout)
        return self._mail.all_gather_object(obj, timeout)

    # --- dicts of tensors ----------------------------------------------------------------

    def send_tensor_dict(
        self,
        tensor_dict: Mapping[str, Any],
        dst: int | None = None,
        all_gather_group: MessageVerbs | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
        *,
        timeout: Timeout = None,
    ) -> None:
        """Send tensors and picklable values by name. Collective: no, the two members.

        Args:
            tensor_dict: tensors on the group's device or on the CPU, of any dtype and layout
                in memory, and picklable values. It may be changed afterwards.
            dst: None: the next rank.
            all_gather_group: members that all hold the same tensors, of which each sends a
                slice; the receivers' group of that size gathers them. Usually the tensor-
                parallel group.
            all_gather_tensors: by name: slice this tensor, or do not. By default those are
                sliced whose elements divide. The sender alone decides.
            timeout: seconds; None: what the group allows.

        Raises:
            ValueError: a tensor is to be sliced and does not divide, or is elsewhere;
                nothing has been sent.
            TypeError: a key is not a string, or a value cannot be pickled; likewise.
        """
        slicing = all_gather_group._mail.slicing(all_gather_tensors) if all_gather_group else WHOLE
        self._mail.send_dict(tensor_dict, self._next(dst), slicing, timeout)

    def isend_tensor_dict(
        self,
        tensor_dict: Mapping[str, Any],
        dst: int | None = None,
        all_gather_group: MessageVerbs | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
        *,
        timeout: Timeout = None,
    ) -> Work[None]:
        """As `send_tensor_dict`, without a copy: tensors must not change until it is done.

        Collective: no.
        """
        slicing = all_gather_group._mail.slicing(all_gather_tensors) if all_gather_group else WHOLE
        return self._mail.isend_dict(tensor_dict, self._next(dst), slicing, timeout)

    def recv_tensor_dict(
        self,
        src: int | None = None,
        all_gather_group: MessageVerbs | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,  # noqa: ARG002 - the header says it
        *,
        timeout: Timeout = None,
    ) -> dict[str, Any]:
        """Receive a dict of tensors.

        Collective: no, the two members; yes over ``all_gather_group``, if anything is sliced.

        Args:
            src: None: the previous rank.
            all_gather_group: the group of this member that receives the other slices.
            all_gather_tensors: for vLLM's callers; what was sliced stands in the header.
            timeout: seconds; None: what the group allows.

        Returns:
            New tensors and values, in the sender's order.

        Raises:
            ValueError: a slice came and ``all_gather_group`` is not of the sender's size.
            MessageDecodeError: a value cannot be restored here.
        """
        peers = all_gather_group._mail if all_gather_group else None
        return self._mail.recv_dict(self._previous(src), peers, timeout)

    def irecv_tensor_dict(
        self,
        src: int | None = None,
        all_gather_group: MessageVerbs | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,  # noqa: ARG002 - the header says it
        *,
        timeout: Timeout = None,
    ) -> Work[dict[str, Any]]:
        """As `recv_tensor_dict`, at once. Slices are gathered by the work's ``wait()``.

        Collective: no; ``wait()`` as `recv_tensor_dict`.
        """
        peers = all_gather_group._mail if all_gather_group else None
        return self._mail.irecv_dict(self._previous(src), peers, timeout)

    def broadcast_tensor_dict(
        self,
        tensor_dict: Mapping[str, Any] | None = None,
        src: int = 0,
        *,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """The dict of ``src``, on all members. Collective: yes, every member.

        Args:
            tensor_dict: as for `send_tensor_dict`; only that of ``src`` matters.
            src: a rank in the group.
            async_op: as `broadcast_object`; tensors must not change until the work is done.
            timeout: seconds; None: what the group allows.

        Returns:
            New tensors and values in the order of ``src``; there, its own.
        """
        if async_op:
            return self._mail.ibroadcast_dict(tensor_dict, src, timeout)
        return self._mail.broadcast_dict(tensor_dict, src, timeout)

    def _next(self, dst: int | None) -> int:
        return (self.rank_in_group + 1) % self.world_size if dst is None else dst

    def _previous(self, src: int | None) -> int:
        return (self.rank_in_group - 1) % self.world_size if src is None else src
