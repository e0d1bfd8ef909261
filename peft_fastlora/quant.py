"""4-bit weights of bitsandbytes: their quantisation state taken apart into plain numbers and tensors, and back.

The only module that names bitsandbytes, and it imports it when the first 4-bit weight is met: whoever calls these
functions holds a `bitsandbytes.nn.Linear4bit`, so the import is there already.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class QuantFormat:
    """The part of a bitsandbytes `QuantState` that is no tensor. It says how to read the statistics beside it."""

    quant_type: str  # "nf4" or "fp4"
    shape: torch.Size  # [out, in] of the weight before it was packed
    dtype: torch.dtype  # what `dequantize` returns
    blocksize: int
    nested_blocksize: int | None  # double quantisation: the statistics are quantised themselves
    nested_dtype: torch.dtype | None


def is_4bit(module: nn.Module) -> bool:
    """Whether this is a bitsandbytes `Linear4bit`."""
    bnb = sys.modules.get("bitsandbytes")  # not imported: then there is none
    return bnb is not None and isinstance(module, bnb.nn.Linear4bit)


def is_plain_4bit(module: nn.Module) -> bool:
    """Whether it is one with bitsandbytes' own forward."""
    return is_4bit(module) and type(module).forward is sys.modules["bitsandbytes"].nn.Linear4bit.forward


def quant_state(base_layer: nn.Module) -> Any:
    """The `QuantState` of a `Linear4bit`, or None. Sharding engines rebuild the parameter; then the module has it."""
    state = getattr(base_layer.weight, "quant_state", None)
    return state if state is not None else getattr(base_layer, "quant_state", None)


def why_unreadable(base_layer: nn.Module) -> str | None:
    """A reason why the packed weight of a `Linear4bit` must not be dequantised here, or None."""
    state = quant_state(base_layer)
    if state is None:
        return "the 4-bit weight has no quantisation state yet"
    if getattr(state, "packing_format_for_cpu", False):
        # bitsandbytes re-packs the weight at the first CPU inference with AVX512-BF16; `dequantize_4bit` of that
        # layout returns wrong numbers without a word.
        return "bitsandbytes re-packed the 4-bit weight for CPU inference"
    if state.quant_type not in ("nf4", "fp4"):
        return f"the quantisation type {state.quant_type!r} is not known"
    if state.nested and state.state2.blocksize != 256:
        return f"the quantisation statistics have blocks of {state.state2.blocksize}, not 256"
    return None


def read_state(state: Any) -> tuple[QuantFormat, tuple[Tensor, ...]]:
    """Take a `QuantState` apart: plain numbers, and the statistics as a flat tuple of tensors."""
    inner = state.state2
    form = QuantFormat(
        quant_type=state.quant_type,
        shape=torch.Size(state.shape),
        dtype=state.dtype,
        blocksize=state.blocksize,
        nested_blocksize=inner.blocksize if state.nested else None,
        nested_dtype=inner.dtype if state.nested else None,
    )
    nested = (state.offset, inner.absmax, inner.code) if state.nested else ()
    return form, (state.absmax, state.code, *nested)


def _build_state(form: QuantFormat, statistics: tuple[Tensor, ...]) -> Any:
    from bitsandbytes.functional import QuantState

    absmax, code, *nested = statistics
    inner = offset = None
    if nested:
        offset, inner_absmax, inner_code = nested
        inner = QuantState(inner_absmax, code=inner_code, blocksize=form.nested_blocksize, dtype=form.nested_dtype)
    return QuantState(
        absmax,
        shape=form.shape,
        code=code,
        blocksize=form.blocksize,
        quant_type=form.quant_type,
        dtype=form.dtype,
        offset=offset,
        state2=inner,
    )


def dequantize(packed: Tensor, form: QuantFormat, statistics: tuple[Tensor, ...]) -> Tensor:
    """The weight [out, in] in `form.dtype`, as the backward of bitsandbytes' own product computes it."""
    from bitsandbytes.functional import dequantize_4bit

    weight: Tensor = dequantize_4bit(packed, _build_state(form, statistics))
    return weight


def linear_4bit(
    x: Tensor, packed: Tensor, bias: Tensor | None, form: QuantFormat, statistics: tuple[Tensor, ...]
) -> Tensor:
    """x W^T + b in x's dtype by bitsandbytes' own kernel, which picks the fastest route for the number of rows.

    Must run without grad: the fused nodes bring their own backward.
    """
    from bitsandbytes.autograd._functions import matmul_4bit

    y: Tensor = matmul_4bit(x, packed.t(), quant_state=_build_state(form, statistics), bias=bias)
    return y


def settle_compute_dtype(base_layer: Any, x: Tensor) -> torch.dtype:
    """The dtype in which this `Linear4bit` computes for x, settled at its first call as `Linear4bit.forward` does."""
    if not base_layer.compute_type_is_set:
        base_layer.set_compute_type(x)
        base_layer.compute_type_is_set = True
    return base_layer.compute_dtype if base_layer.compute_dtype is not None else x.dtype
