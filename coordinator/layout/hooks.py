"""Calling back around every operation on parameters: for offloading, counting, checking.

    with use_param_hooks(MyHook()):
        loss = model(x).sum()       # pre_forward, post_forward around each operation
    loss.backward()                 # pre_backward, post_backward around its gradient

The hooks in force are those of the context (a `contextvars.ContextVar`: threads and tasks have
their own) in which the operation ran forward; its backward calls the same ones, wherever and
whenever it runs.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from coordinator.tree import flatten, unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Parameters = tuple[nn.Parameter, ...]


class ParamOpHook:
    """What to do around an operation; override what is needed. Each gets its parameters."""

    def pre_forward(self, params: Parameters) -> None:
        """Before the operation."""

    def post_forward(self, params: Parameters) -> None:
        """After it."""

    def pre_backward(self, params: Parameters) -> None:
        """Before its gradients are computed: once one of its result is there."""

    def post_backward(self, params: Parameters) -> None:
        """Once the gradients of all its inputs are computed."""


@contextmanager
def use_param_hooks(*hooks: ParamOpHook) -> Iterator[None]:
    """Call ``hooks`` around every operation that has a parameter among its arguments.

    Hooks of an outer ``with`` stay in force, and come first. What a composite operation is made
    of is not seen by itself. Without gradients only the forward hooks are called. Hooks may use
    parameters freely: what they do is not seen.

    Collective: no.
    """
    outer = _active.get()
    mode = _Mode()
    token = _active.set(_Active((*(outer.hooks if outer else ()), *hooks), mode))
    try:
        with mode:
            yield
    finally:
        _active.reset(token)


@dataclass(frozen=True, slots=True)
class _Active:
    hooks: tuple[ParamOpHook, ...]
    mode: _Mode


class _Mode(TorchFunctionMode):
    """Sees every torch function that runs in its thread."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        active = _active.get()
        # the mode of an outer `with`, or of another task of this thread
        if active is None or active.mode is not self or _name(func) in _NO_OPERATIONS:
            return func(*args, **kwargs)
        leaves, _ = flatten((args, kwargs))
        params = tuple(
            {id(leaf): leaf for leaf in leaves if isinstance(leaf, nn.Parameter)}.values()
        )
        if not params:
            return func(*args, **kwargs)
        return _Operation(active.hooks, params).run(func, args, kwargs)


class _Operation:
    """One operation on parameters, and the hooks that were in force when it ran."""

    def __init__(self, hooks: tuple[ParamOpHook, ...], params: Parameters) -> None:
        self._hooks = hooks
        self._params = params
        self._is_in_backward = False

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        self._call("pre_forward")
        if torch.is_grad_enabled():
            args, kwargs = self._watch_inputs(func, args, kwargs)
        result = func(*args, **kwargs)
        for each in flatten(result)[0]:
            if isinstance(each, Tensor) and each.requires_grad and not each.is_leaf:
                each.register_hook(self._before_backward)  # type: ignore[no-untyped-call]
        self._call("post_forward")
        return result

    def _watch_inputs(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """The arguments, with tensors that tell when all their gradients are computed."""
        changed = {id(kwargs.get("out"))}
        if _name(func).endswith("_") and args:
            changed.add(id(args[0]))
        leaves, structure = flatten((args, kwargs))
        inputs = {
            id(leaf): leaf
            for leaf in leaves
            if isinstance(leaf, Tensor) and leaf.requires_grad and id(leaf) not in changed
        }
        if not inputs:
            return args, kwargs
        outputs = _Watched.apply(self, *inputs.values())  # type: ignore[no-untyped-call]
        watched = dict(zip(inputs, outputs, strict=True))
        replaced: tuple[Sequence[Any], dict[str, Any]] = unflatten(
            structure, [watched.get(id(leaf), leaf) for leaf in leaves]
        )
        return replaced

    def _before_backward(self, _grad: Tensor) -> None:
        if not self._is_in_backward:
            self._is_in_backward = True
            self._call("pre_backward")

    def after_backward(self) -> None:
        self._is_in_backward = False
        self._call("post_backward")

    def _call(self, name: str) -> None:
        token = _active.set(None)
        try:
            for hook in self._hooks:
                getattr(hook, name)(self._params)
        finally:
            _active.reset(token)


class _Watched(torch.autograd.Function):
    """Tensors as they are; their gradients have passed once all are computed."""

    @staticmethod
    def forward(ctx: Any, operation: _Operation, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.operation = operation
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.operation.after_backward()
        return (None, *grads)


_active: ContextVar[_Active | None] = ContextVar("param_hooks", default=None)

_NO_OPERATIONS = frozenset(
    {
        *("__get__", "__set__", "__delete__", "__repr__", "__format__", "__hash__", "__len__"),
        *("__deepcopy__", "__reduce_ex__", "size", "dim", "ndimension", "numel", "nelement"),
        *("stride", "storage_offset", "element_size", "data_ptr", "get_device"),
        *("untyped_storage", "is_contiguous", "is_floating_point", "is_complex", "is_signed"),
        *("is_same_size", "requires_grad_", "retain_grad", "register_hook", "backward"),
    }
)
"""What only looks at a tensor, or sets a flag."""


def _name(func: Callable[..., Any]) -> str:
    return str(func.__name__)
