"""Fast LoRA layers: PEFT's own classes with one method in front.

A stock layer becomes fast by changing its class (see `install`), so `super().forward` is the stock path itself and
every attribute, parameter name, hook and method of the layer stays what it was.
"""

from __future__ import annotations

from typing import Any

from peft.tuners.lora.layer import Linear
from torch import Tensor

from .call import read_call, read_projection
from .config import FastLoraOptions
from .functions import lora_group
from .guards import Refusal, why_not
from .scope import scope_of


class FastLoraLayer:
    """Mixin in front of a PEFT LoRA layer class: fused where that is exact, else the stock forward with a reason.

    No subclass of `LoraLayer` and without `__slots__`, since `__class__` assignment needs equal object layouts.
    """

    fast_lora_options: FastLoraOptions  # in the instance, set by `install` and deleted by `remove`
    fast_lora_4bit = False  # the layer's base is a bitsandbytes Linear4bit

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[..., in] -> [..., out], equal to the stock layer's result in value, shape and dtype."""
        scope = None if args or kwargs else scope_of(self)
        if scope is None:
            return self._forward_alone(x, *args, **kwargs)
        y = scope.call(self, x)
        if y is None:
            y = self._forward_alone(x)
        scope.watch(y)
        return y

    def _forward_alone(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        call = read_call(self, x, args, kwargs)
        refusal = why_not(call)
        if refusal is None:
            return lora_group(x, [read_projection(call)])[0]
        if self.fast_lora_options.strict and not refusal.intended:
            raise strict_error(self, refusal)
        return super().forward(x, *args, **kwargs)  # type: ignore[misc, no-any-return]

    def delete_adapter(self, adapter_name: str) -> None:
        """As PEFT's; a layer that lost its last adapter gets its stock class back."""
        from .install import remove_from

        super().delete_adapter(adapter_name)  # type: ignore[misc]
        if not self.lora_A:  # type: ignore[attr-defined]
            remove_from(self)


class FastLoraLinear(FastLoraLayer, Linear):
    """`peft.tuners.lora.Linear` over an `nn.Linear`, fused."""

    fast_lora_stock = Linear


def strict_error(layer: Any, refusal: Refusal) -> RuntimeError:
    shape = f"{layer.in_features} -> {layer.out_features}"
    return RuntimeError(f"strict=True: {refusal} (layer {type(layer).__name__}, {shape})")


def __getattr__(name: str) -> Any:
    """Build `FastLoraLinear4bit` when it is first asked for: its stock class exists only with bitsandbytes."""
    if name != "FastLoraLinear4bit":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from peft.tuners.lora.bnb import Linear4bit

    class FastLoraLinear4bit(FastLoraLayer, Linear4bit):
        """`peft.tuners.lora.Linear4bit` over a bitsandbytes `Linear4bit` (NF4, FP4), fused."""

        fast_lora_stock = Linear4bit
        fast_lora_4bit = True

    FastLoraLinear4bit.__qualname__ = FastLoraLinear4bit.__name__  # importable by name, so it pickles
    globals()[name] = FastLoraLinear4bit
    return FastLoraLinear4bit
