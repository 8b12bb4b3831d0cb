"""Run hooks around every operation on parameters: for offloading, counting, checking.

    with use_param_hooks(MyHook()):
        loss = model(x).sum()       # pre_forward, post_forward around each operation
    loss.backward()                 # pre_backward, post_backward around its gradient

An operation calls the hooks that are active in its context (`contextvars.ContextVar`) when it runs
forward. Its backward calls the same hooks, in any thread or context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from coordinator.tree import flatten, unflatten


def named_parameters(
    module: nn.Module, prefix: str = "", recurse: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter of a module once, under its first name.

    Includes plain attributes that are leaf tensors and require a gradient, such as a DTensor that
    replaces a deleted parameter. A module's own parameters precede those of its children.
    ``prefix`` precedes every name, with a dot.
    """
    modules = module.named_modules(prefix=prefix) if recurse else [(prefix, module)]
    seen: set[int] = set()
    for path, each in modules:
        attributes = [
            (name, value)
            for name, value in vars(each).items()
            if isinstance(value, Tensor) and value.is_leaf and value.requires_grad
        ]
        for name, tensor in (*each.named_parameters(recurse=False), *attributes):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{path}.{name}" if path else name, tensor


Parameters = tuple[nn.Parameter, ...]


class ParamOpHook:
    """Base class of hooks. Each method receives the operation's parameters."""

    def pre_forward(self, params: Parameters) -> None:
        """Run before the operation."""

    def post_forward(self, params: Parameters) -> None:
        """Run after the operation."""

    def pre_backward(self, params: Parameters) -> None:
        """Run before the operation's backward, when the first gradient of a result arrives."""

    def post_backward(self, params: Parameters) -> None:
        """Run when the gradients of all the operation's inputs are computed."""


@contextmanager
def use_param_hooks(*hooks: ParamOpHook) -> Iterator[None]:
    """Call ``hooks`` around every operation that has a parameter among its arguments.

    Hooks of an outer ``with`` stay active, and run first. A composite operation counts as one.
    Without gradients only the forward hooks run. Operations on parameters inside a hook call no
    hooks.
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
    """Intercepts every torch function that runs in its thread."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        active = _active.get()
        # This may be the mode of an outer `with`, or of another task of this thread.
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
    def __init__(self, hooks: tuple[ParamOpHook, ...], params: Parameters) -> None:
        self._hooks = hooks
        self._params = params
        self._is_in_backward = False

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        self._call("pre_forward")
        if torch.is_grad_enabled():
            args, kwargs = self._watch_inputs(func, args, kwargs)
        result = func(*args, **kwargs)
        # The named tuples of torch, as from torch.max, are not namedtuples.
        results = tuple(result) if isinstance(result, tuple) else result
        for each in flatten(results)[0]:
            if isinstance(each, Tensor) and each.requires_grad and not each.is_leaf:
                each.register_hook(self._before_backward)  # type: ignore[no-untyped-call]
        self._call("post_forward")
        return result

    def _watch_inputs(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """Return the arguments with each input replaced by a `_Watched` view of it.

        Inputs that the operation writes (``out=``, or ``self`` of ``op_``) stay the same.
        """
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
    """The identity on several tensors: its backward runs when all their gradients are computed."""

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
"""Torch functions that only inspect a tensor or set a flag: they call no hooks."""


def _name(func: Callable[..., Any]) -> str:
    return str(func.__name__)
