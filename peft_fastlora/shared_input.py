"""`FastLoraSharedInput`: projections that read one tensor (q/k/v and their like) as one autograd node.

The module that owns them gets a subclass of its own class with this mixin in front. It opens a scope around its
forward; `scope` says what happens inside.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from .config import FastLoraOptions
from .layer import FastLoraLayer
from .scope import Pattern, Scope, next_pattern, open_scopes


class FastLoraSharedInput:
    """Mixin in front of the class of a module that owns fast layers.

    No `BaseTunerLayer`: PEFT must go on to the layers inside.
    """

    fast_lora_stock: ClassVar[type]  # the class that the module had
    fast_lora_options: FastLoraOptions  # in the instance
    fast_lora_pattern: Pattern = Pattern()  # the one in use; in the instance once observed
    fast_lora_upcoming: Pattern | None = None  # what the last forward taught, if that is something else

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own forward, with a scope open around it."""
        if torch.compiler.is_compiling() or not self.fast_lora_options.fuse_qkv:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        if self.fast_lora_upcoming is not None:
            self.fast_lora_pattern = next_pattern(self)
        scope = Scope(self, {id(layer): name for name, layer in fast_children(self)}, self.fast_lora_pattern)
        open_scopes().append(scope)
        try:
            result = super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            open_scopes().pop()
        learned = scope.learned()
        if learned is not None:
            self.fast_lora_upcoming = learned
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy by the stock class: ours is made at run time and has no name to import."""
        reduced: Any = super().__reduce_ex__(protocol)
        _, (fast, *args), *state = reduced
        return (rebuild_module, (*_classes_made[fast], *args), *state)


def fast_children(module: Any) -> list[tuple[str, FastLoraLayer]]:
    """The fast layers that the module owns directly, with their names."""
    return [(name, child) for name, child in module._modules.items() if isinstance(child, FastLoraLayer)]


_classes: dict[tuple[Any, ...], Any] = {}
_classes_made: dict[Any, tuple[Any, ...]] = {}


def owner_class(mixin: type, stock: type, block: Any = None) -> Any:
    """The subclass of `stock` with a mixin in front, one for each (mixin, stock, block of a gated MLP)."""
    key = (mixin, stock, block)
    if key not in _classes:
        names = {"fast_lora_stock": stock, "fast_lora_block": block, "__module__": __name__}
        _classes[key] = type(f"FastLora{stock.__name__}", (mixin, stock), names)
        _classes_made[_classes[key]] = key
    return _classes[key]


def rebuild_module(mixin: type, stock: type, block: Any, *args: Any) -> Any:
    """What pickle calls: an empty module of the fast class."""
    fast = owner_class(mixin, stock, block)
    return fast.__new__(fast, *args)
