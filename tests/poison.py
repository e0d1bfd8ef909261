"""Overwriting everything that a forward has read, before its backward runs.

With layer streaming and offloading a weight's buffer holds another layer by the time of backward. A node that reads
anything but its saved tensors then computes with the wrong numbers, silently. `poisoned` makes that visible.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def cloned_saves() -> saved_tensors_hooks:
    """Saved tensors become clones, as if they had been offloaded and brought back."""
    return saved_tensors_hooks(lambda tensor: tensor.detach().as_subclass(Tensor).clone(), lambda tensor: tensor)


def originals(layer: Any) -> list[Tensor]:
    """Every tensor that an adapted layer reads: weights, biases, adapters, the statistics of a 4-bit weight."""
    found: list[Tensor] = list(layer.parameters())
    state = getattr(layer.base_layer.weight, "quant_state", None)
    if state is not None:
        found += [state.absmax, state.code]
        if state.nested:
            found += [state.offset, state.state2.absmax, state.state2.code]
    return found


@contextmanager
def poisoned(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Inside, the tensors hold NaN (integers: other values). `.data` hides that from autograd's version check."""
    contents = [(tensor, tensor.data.clone()) for tensor in tensors]
    try:
        with torch.no_grad():
            for tensor, _ in contents:
                if tensor.data.is_floating_point():
                    tensor.data.fill_(float("nan"))
                else:
                    tensor.data.bitwise_not_()
        yield
    finally:
        # bitsandbytes shares some statistics between all layers of a process
        for tensor, content in contents:
            tensor.data.copy_(content)
