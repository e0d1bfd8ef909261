"""What one call needs to know about a projection, and how it passes through an autograd Function.

A `Projection` is read from the PEFT layer at every call (`call`) and forgotten afterwards. `flatten` takes a group of
them apart into tensors and a `Layout` that holds none, since autograd only tracks tensors that are arguments
 themselves.
`Layout.rebuild` puts the same structure together again around saved tensors, around `needs_input_grad`, or around
gradients, so that no position in a long argument list is ever counted by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import quant

# A slot holds a tensor or None; in the structures that `Layout.rebuild` makes also a flag (is its gradient wanted?) or
# a gradient. One structure for all of them is the point of this module, so the type checker is told no more than that.
Slot = Any


class Adapter(NamedTuple):
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


class Projection(NamedTuple):
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


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor.to(dtype)` without the cost of a call where there is nothing to do."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype of autocast on this kind of device, or None where it is off. Some kinds, like meta, have none."""
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


def product_dtype(dtype: torch.dtype, autocast: torch.dtype | None) -> torch.dtype:
    """The dtype in which a matrix product of `dtype` operands runs: autocast changes all but float64."""
    return dtype if autocast is None or dtype is torch.float64 else autocast
