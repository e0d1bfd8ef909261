"""The autograd nodes. They only move data: what is saved, which gradients were asked for, which shape comes out.

The arithmetic is in `core`. Every tensor that backward reads goes through `save_for_backward`, the packed 4-bit weight
and its statistics included: a weight's buffer may hold another layer by the time of backward, and hooks on saved
tensors (offloading, compression) must see all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from .core import RankSpace, group_backward, group_forward
from .projection import Layout, Projection, flatten


def lora_group(x: Tensor, projections: Sequence[Projection]) -> tuple[Tensor, ...]:
    """Outputs [..., out_i] of projections that read x [..., in]: one autograd node, or none if nothing needs grad."""
    layout, tensors = flatten(projections)
    needs_grad = x.requires_grad or any(t is not None and t.requires_grad for t in tensors)
    if needs_grad and torch.is_grad_enabled():
        return LoraGroupFunction.apply(layout, x, *tensors)  # type: ignore[no-untyped-call, no-any-return]
    with torch.no_grad(), without_autocast(x):
        outputs, _ = group_forward(_rows(x), projections)
    return tuple(_shaped(out, x.shape[:-1]) for out in outputs)


class LoraGroupFunction(Function):
    """1..n LoRA projections of one input as one node. It saves x, one [tokens, r] per adapter, and the weights."""

    @staticmethod
    def forward(ctx: Any, layout: Layout, x: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        projections: tuple[Projection, ...] = layout.rebuild(tensors)
        needs: tuple[Projection, ...] = layout.rebuild(ctx.needs_input_grad[2:])
        with without_autocast(x):
            outputs, ranks = group_forward(_rows(x), projections)
        ctx.layout = layout
        ctx.set_materialize_grads(False)
        _save_group(ctx, x, projections, needs, ranks)
        return tuple(_shaped(out, x.shape[:-1]) for out in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *saved = ctx.saved_tensors
        projections: tuple[Projection, ...] = ctx.layout.rebuild(saved)
        ranks = saved[len(flatten(projections)[1]) :]
        needs: tuple[Projection, ...] = ctx.layout.rebuild(ctx.needs_input_grad[2:])
        needs_x = ctx.needs_input_grad[1]
        given = next((grad for grad in grads if grad is not None), None)
        if given is None:
            return (None,) * len(ctx.needs_input_grad)
        flat = [None if grad is None else _rows(grad) for grad in grads]
        with without_autocast(given):
            rows = None if x is None else _rows(x)
            dx, results = group_backward(flat, rows, projections, ranks, needs, needs_x)
        if dx is not None:
            dx = _shaped(dx, given.shape[:-1])
        return (None, dx, *flatten(results)[1])


def _save_group(
    ctx: Any,
    x: Tensor,
    projections: Sequence[Projection],
    needs: Sequence[Projection],
    ranks: RankSpace,
) -> None:
    """Save what the gradients that are asked for will read, and nothing else."""
    needs_x = ctx.needs_input_grad[1]
    wanted = [adapter for projection in needs for adapter in projection.adapters]
    kept = flatten([_without_unread(p, n, needs_x) for p, n in zip(projections, needs, strict=True)])[1]
    kept_ranks = [h if need.lora_B else None for h, need in zip(ranks, wanted, strict=True)]
    kept_x = _narrowest(x, projections) if any(need.lora_A for need in wanted) else None
    ctx.save_for_backward(kept_x, *kept, *kept_ranks)


def _without_unread(projection: Projection, need: Projection, needs_x: bool) -> Projection:
    """The projection without the tensors that its backward does not read."""
    adapters = tuple(
        replace(
            adapter,
            lora_A=adapter.lora_A if needs_x else None,
            lora_B=adapter.lora_B if needs_x or wanted.lora_A else None,
            bias=None,
        )
        for adapter, wanted in zip(projection.adapters, need.adapters, strict=True)
    )
    if needs_x:
        return replace(projection, bias=None, adapters=adapters)
    statistics = (None,) * len(projection.statistics)
    return replace(projection, weight=None, bias=None, statistics=statistics, adapters=adapters)


def _narrowest(x: Tensor, projections: Sequence[Projection]) -> Tensor:
    """x as backward reads it (only dA does): rounded to the adapters' dtype already if that is the narrower one."""
    dtypes = {adapter.dtype for projection in projections for adapter in projection.adapters}
    if len(dtypes) == 1:
        (dtype,) = dtypes
        if dtype.itemsize < x.dtype.itemsize:
            return x.to(dtype)
    return x


def without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """Autocast off for the device of `tensor`: the dtypes were settled when the projections were read."""
    device_type = tensor.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def _rows(tensor: Tensor) -> Tensor:
    """[..., d] as [tokens, d]; `reshape`, since what comes from outside may have any strides."""
    return tensor.reshape(-1, tensor.shape[-1])


def _shaped(rows: Tensor, batch: torch.Size) -> Tensor:
    """[tokens, d] as [*batch, d]. Not `view`: autograd would then refuse to let users change the output in place."""
    return torch.ops.aten._unsafe_view.default(rows, [*batch, rows.shape[-1]])  # type: ignore[no-any-return]
