"""The parameters of a module by name, those that were never registered included."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterator


def named_parameters(
    module: nn.Module, prefix: str = "", recurse: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Every parameter once, under its first name.

    What counts is registered parameters, and leaf tensors that require a gradient and are plain
    attributes: a DTensor that was put in the place of a deleted parameter.

    Args:
        module: whose parameters; modules come before their children.
        prefix: in front of every name, with a dot.
        recurse: also those of the modules in it.

    Collective: no.
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
