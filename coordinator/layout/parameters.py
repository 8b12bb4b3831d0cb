"""The parameters of a module by name, including ones that are not registered as parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterator


def named_parameters(
    module: nn.Module, prefix: str = "", recurse: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of a module once, under the first name that it has.

    Besides registered parameters these are plain attributes that are leaf tensors and require a
    gradient, such as a DTensor that has replaced a deleted parameter.

    Args:
        module: the module; a module's own parameters come before those of its children.
        prefix: put before every name, with a dot.
        recurse: whether to include the parameters of child modules.

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
