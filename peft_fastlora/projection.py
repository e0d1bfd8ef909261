"""What one call needs to know about a projection, and how it passes through an autograd Function.

A `Projection` is read from the PEFT layer at every call and forgotten afterwards. `flatten` takes a group of them
apart into tensors and a `Layout` that holds none, since autograd only tracks tensors that are arguments themselves.
`Layout.rebuild` puts the same structure together again around saved tensors, around `needs_input_grad`, or around
gradients, so that no position in a long argument list is ever counted by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor

from . import quant

# A slot holds a tensor or None; in the structures that `Layout.rebuild` makes also a flag (is its gradient wanted?) or
# a gradient. One structure for all of them is the point of this module, so the type checker is told no more than that.
Slot = Any


@dataclass(frozen=True)
class Adapter:
    """One active LoRA adapter of a projection: scaling * lora_B(lora_A(x))."""

    lora_A: Slot  # [r, in]
    lora_B: Slot  # [out, r]
    bias: Slot  # [out], of lora_B
    scale: Slot  # the scaling as 0-dim tensor, where PEFT keeps one (compiled hotswap); else None
    scaling: float
    dtype: torch.dtype  # in which the two products run

    def tensors(self) -> tuple[Slot, ...]:
        return (self.lora_A, self.lora_B, self.bias, self.scale)

    def rebuild(self, values: Iterator[Any]) -> Adapter:
        lora_A, lora_B, bias, scale = next(values), next(values), next(values), next(values)
        return Adapter(lora_A, lora_B, bias, scale, self.scaling, self.dtype)


@dataclass(frozen=True)
class Projection:
    """A base layer with its active adapters: x W^T + b + sum of the adapters."""

    weight: Slot  # [out, in], or packed 4-bit storage
    bias: Slot  # [out]
    statistics: tuple[Slot, ...]  # of the 4-bit weight, else empty
    adapters: tuple[Adapter, ...]
    form: quant.QuantFormat | None  # None: dense weight
    dtype: torch.dtype  # in which the base product runs
    out_dtype: torch.dtype  # what the stock layer returns

    def tensors(self) -> tuple[Slot, ...]:
        return (self.weight, self.bias, *self.statistics, *chain.from_iterable(a.tensors() for a in self.adapters))

    def rebuild(self, values: Iterator[Any]) -> Projection:
        weight, bias = next(values), next(values)
        statistics = tuple(next(values) for _ in self.statistics)
        adapters = tuple(adapter.rebuild(values) for adapter in self.adapters)
        return Projection(weight, bias, statistics, adapters, self.form, self.dtype, self.out_dtype)


@dataclass(frozen=True)
class Layout:
    """The structure of a group of projections, without any tensor."""

    projections: tuple[Projection, ...]

    @property
    def slots(self) -> int:
        """How many tensors, or Nones in their places, `flatten` gave."""
        return sum(len(projection.tensors()) for projection in self.projections)

    def rebuild(self, values: Iterable[Any]) -> tuple[Projection, ...]:
        """The same projections around other values, in the order in which `flatten` gave the tensors."""
        remaining = iter(values)
        return tuple(projection.rebuild(remaining) for projection in self.projections)


def flatten(projections: Sequence[Projection]) -> tuple[Layout, tuple[Slot, ...]]:
    """Take projections apart into their structure and a flat tuple with one entry (maybe None) per tensor slot."""
    layout = Layout(tuple(projection.rebuild(repeat(None)) for projection in projections))
    return layout, tuple(chain.from_iterable(projection.tensors() for projection in projections))


def product_dtype(dtype: torch.dtype, device_type: str) -> torch.dtype:
    """The dtype in which a matrix product of `dtype` operands runs now: autocast changes all but float64."""
    if dtype is not torch.float64 and autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return dtype


def autocast_enabled(device_type: str) -> bool:
    """Whether autocast is on for a kind of device; some, like meta, have none."""
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def read_base(base_layer: Any, x: Tensor) -> Projection:
    """A plain base layer (`nn.Linear` or bitsandbytes `Linear4bit`) as it would compute x now, without adapters."""
    device_type = x.device.type
    if not quant.is_4bit(base_layer):
        dtype = product_dtype(base_layer.weight.dtype, device_type)
        return Projection(base_layer.weight, base_layer.bias, (), (), None, dtype, dtype)
    form, statistics = quant.read_state(quant.quant_state(base_layer))
    dtype = product_dtype(quant.settle_compute_dtype(base_layer, x), device_type)
    return Projection(base_layer.weight, base_layer.bias, statistics, (), form, dtype, out_dtype=x.dtype)


def read_projection(layer: Any, names: Sequence[str], x: Tensor) -> Projection:
    """A PEFT LoRA layer with the adapters `names` as it would compute x now."""
    base = read_base(layer.base_layer, x)
    adapters = tuple(_read_adapter(layer, name, x.device.type) for name in names)
    if base.form is not None and torch.is_autocast_enabled():
        # `lora.Linear4bit` asks this question without a device, so only autocast on an accelerator keeps it from
        # casting the branch to the dtype of the base result.
        widest = base.out_dtype
        for adapter in adapters:
            widest = torch.promote_types(widest, adapter.dtype)
        base = replace(base, out_dtype=widest)
    return replace(base, adapters=adapters)


def _read_adapter(layer: Any, name: str, device_type: str) -> Adapter:
    lora_A, lora_B, scaling = layer.lora_A[name], layer.lora_B[name], layer.scaling[name]
    is_tensor = isinstance(scaling, Tensor)
    return Adapter(
        lora_A=lora_A.weight,
        lora_B=lora_B.weight,
        bias=lora_B.bias,
        scale=scaling if is_tensor else None,
        scaling=1.0 if is_tensor else float(scaling),
        dtype=product_dtype(lora_A.weight.dtype, device_type),
    )
