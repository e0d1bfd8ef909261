"""Making a model fast and stock again by changing the classes of its modules. The tree of modules stays as it is."""

from __future__ import annotations

import sys
from types import MethodType
from typing import Any

from peft.tuners.lora.layer import Linear, LoraLayer
from torch import nn
from transformers import PreTrainedModel

from . import layer as fast_layers
from .config import FastLoraOptions
from .detect import Block, block_of
from .gated_mlp import FastLoraGatedMLP
from .layer import FastLoraLayer, FastLoraLinear
from .shared_input import FastLoraSharedInput, fast_children, owner_class

FORWARD_REPLACED = "the forward of the layer was replaced on the instance"


def lora_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """All LoRA layers with their names, fast or not."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]


def install(model: nn.Module, options: FastLoraOptions) -> None:
    """Give every stock layer and block that has a fast class that class. Idempotent; all get the options."""
    for module in model.modules():
        if not _is_fast(module) and why_not_installed(module) is None:
            _change_class(module, _fast_class(type(module)))
        if isinstance(module, FastLoraLayer):
            _set_options(module, options)
    for module in model.modules():  # owners second: a module is one if layers inside are fast
        if not _is_fast(module):
            owner = _owner_class(module)
            if owner is not None:
                _change_class(module, owner)
        if isinstance(module, FastLoraSharedInput):
            _set_options(module, options)


def _owner_class(module: nn.Module) -> Any:
    """The fast class for a module that owns fast layers: an MLP block, or two or more that may share a tensor."""
    layers = fast_children(module)
    block = block_of(module) if layers else None
    if isinstance(block, Block):
        return owner_class(FastLoraGatedMLP, type(module), block)
    # `nn.Sequential` chains its children, a container calls none, and transformers writes the class names of its
    # models into files.
    may_share = not isinstance(module, (nn.Sequential, PreTrainedModel)) and not forward_replaced(module)
    if len(layers) < 2 or not may_share or type(module).forward is nn.Module.forward:
        return None
    return owner_class(FastLoraSharedInput, type(module))


def remove(model: nn.Module) -> None:
    """Give every fast layer its stock class back. Idempotent; leaves nothing of ours in any module."""
    for module in model.modules():
        remove_from(module)


def remove_idle_owners(model: nn.Module) -> None:
    """Give modules whose layers all became stock their stock class back."""
    for module in model.modules():
        if isinstance(module, FastLoraSharedInput) and not fast_children(module):
            remove_from(module)


def remove_from(module: Any) -> None:
    """Give one module its stock class back. A class that somebody put over ours (FSDP2) is left alone."""
    stock = _stock_class(type(module))
    if stock is not None:
        _change_class(module, stock)
        for name in ("fast_lora_options", "fast_lora_pattern", "fast_lora_upcoming"):
            module.__dict__.pop(name, None)


def why_not_installed(module: nn.Module) -> str | None:
    """Why `install` leaves a LoRA layer stock, or None where it gives it a fast class."""
    if _fast_class(type(module)) is None:
        return f"there is no fast version of {type(module).__module__}.{type(module).__qualname__}"
    return FORWARD_REPLACED if forward_replaced(module) else None


def forward_replaced(module: Any) -> bool:
    """Whether somebody set another forward on the instance; accelerate's hooks still call ours (`_change_class`)."""
    return "forward" in module.__dict__ and "_old_forward" not in module.__dict__


def _fast_class(stock: type) -> Any:
    """The fast class for exactly this class: a subclass that somebody else wrote computes something else."""
    if stock is Linear:
        return FastLoraLinear
    bnb = sys.modules.get("peft.tuners.lora.bnb")  # not imported: then no layer of it exists
    if bnb is not None and stock is getattr(bnb, "Linear4bit", None):
        return fast_layers.FastLoraLinear4bit
    return None


def _stock_class(fast: type) -> Any:
    """The class that `install` replaced by this one, or None if it is not one of ours (but maybe a subclass)."""
    return fast.__dict__.get("fast_lora_stock")


def _is_fast(module: nn.Module) -> bool:
    return isinstance(module, (FastLoraLayer, FastLoraSharedInput))


def _set_options(module: Any, options: FastLoraOptions) -> None:
    module.fast_lora_options = options


def _change_class(module: nn.Module, new: type) -> None:
    old_forward = module.__dict__.get("_old_forward")
    if isinstance(old_forward, MethodType) and old_forward.__func__ is type(module).forward:
        # accelerate's hooks call the forward that was bound when they were added
        module.__dict__["_old_forward"] = MethodType(new.forward, module)  # type: ignore[attr-defined]
    module.__class__ = new
