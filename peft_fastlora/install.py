"""Making a model fast and stock again by changing the classes of its modules. The tree of modules stays as it is."""

from __future__ import annotations

import sys
from types import MethodType
from typing import Any

from peft.tuners.lora.layer import Linear, LoraLayer
from torch import nn

from . import layer as fast_layers
from .config import FastLoraOptions
from .layer import FastLoraLayer, FastLoraLinear


def lora_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """All LoRA layers with their names, fast or not."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]


def install(model: nn.Module, options: FastLoraOptions) -> None:
    """Give every stock layer that has a fast class that class; fast layers get the new options. Idempotent."""
    for module in model.modules():
        if isinstance(module, FastLoraLayer):
            _set_options(module, options)
        elif why_not_installed(module) is None:
            _change_class(module, _fast_class(type(module)))
            _set_options(module, options)


def remove(model: nn.Module) -> None:
    """Give every fast layer its stock class back. Idempotent; leaves nothing of ours in any module."""
    for module in model.modules():
        remove_from(module)


def remove_from(module: Any) -> None:
    """Give one layer its stock class back. A class that somebody put over ours (FSDP2) is left alone."""
    stock = _stock_class(type(module))
    if stock is not None:
        _change_class(module, stock)
        del module.fast_lora_options


def why_not_installed(module: nn.Module) -> str | None:
    """Why `install` leaves a LoRA layer stock, or None where it gives it a fast class."""
    if _fast_class(type(module)) is None:
        return f"there is no fast version of {type(module).__module__}.{type(module).__qualname__}"
    if "forward" in module.__dict__ and "_old_forward" not in module.__dict__:
        return "the forward of the layer was replaced on the instance"
    return None


def _fast_class(stock: type) -> Any:
    """The fast class for exactly this class: a subclass that somebody else wrote computes something else."""
    if stock is Linear:
        return FastLoraLinear
    bnb = sys.modules.get("peft.tuners.lora.bnb")  # not imported: then no layer of it exists
    if bnb is not None and stock is getattr(bnb, "Linear4bit", None):
        return fast_layers.FastLoraLinear4bit
    return None


def _stock_class(fast: type) -> Any:
    """The class from which `install` made this one, or None if it is not one of ours."""
    is_ours = fast.__module__ == fast_layers.__name__ and issubclass(fast, FastLoraLayer)
    return fast.__mro__[2] if is_ours else None  # fast class, mixin, stock class


def _set_options(module: Any, options: FastLoraOptions) -> None:
    module.fast_lora_options = options


def _change_class(module: nn.Module, new: type) -> None:
    old_forward = module.__dict__.get("_old_forward")
    if isinstance(old_forward, MethodType) and old_forward.__func__ is type(module).forward:
        # accelerate's hooks call the forward that was bound when they were added
        module.__dict__["_old_forward"] = MethodType(new.forward, module)  # type: ignore[attr-defined]
    module.__class__ = new
