"""The autograd nodes. They only move data: what is saved, which gradients were asked for, which shape comes out.

The arithmetic is in `core`. Every tensor that backward reads goes through `save_for_backward`, the packed 4-bit weight
and its statistics included: a weight's buffer may hold another layer by the time of backward, and hooks on saved
tensors (offloading, compression) must see all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from .core import group_backward, group_forward, lora_B_gradients
from .mlp import MLP, Combine, MLPNeeds, MLPState, mlp_backward, mlp_forward
from .projection import Layout, Projection, autocast_dtype, flatten

_NOTHING = nullcontext()


def lora_group(x: Tensor, projections: Sequence[Projection]) -> tuple[Tensor, ...]:
    """Outputs [..., out_i] of projections that read x [..., in]: one autograd node, or none if nothing needs grad."""
    if torch.is_grad_enabled():
        layout, tensors = flatten(projections)
        if _needs_grad(x, tensors):
            return LoraGroupFunction.apply(layout, x, *tensors)  # type: ignore[no-untyped-call, no-any-return]
    with torch.no_grad(), without_autocast(x):
        outputs, _ = group_forward(_rows(x), projections)
    return tuple([_shaped(out, x.shape[:-1]) for out in outputs])


class LoraGroupFunction(Function):
    """1..n LoRA projections of one input as one node. It saves x, one [tokens, r] per adapter, and the weights."""

    @staticmethod
    def forward(ctx: Any, layout: Layout, x: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        projections = layout.rebuild(tensors)
        needs = layout.rebuild(ctx.needs_input_grad[2:])
        needs_x = ctx.needs_input_grad[1]
        with without_autocast(x):
            outputs, ranks = group_forward(_rows(x), projections)
        wanted = [adapter for need in needs for adapter in need.adapters]
        kept_x = _narrowest(x, projections) if any(adapter.lora_A for adapter in wanted) else None
        kept_ranks = [h if adapter.lora_B else None for h, adapter in zip(ranks, wanted, strict=True)]
        ctx.layout = layout
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(kept_x, *_kept(projections, needs_x), *kept_ranks)
        shaped = tuple(_shaped(out, x.shape[:-1]) for out in outputs)
        # alone, a frozen projection of an x without gradient would have no node at all
        frozen = [out for out, need in zip(shaped, needs, strict=True) if not (needs_x or any(need.tensors()))]
        ctx.mark_non_differentiable(*frozen)
        return shaped

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        given = next((grad for grad in grads if grad is not None), None)
        if given is None:
            return (None,) * len(ctx.needs_input_grad)
        x, *saved = ctx.saved_tensors
        projections = ctx.layout.rebuild(saved)
        ranks = saved[ctx.layout.slots :]
        needs = ctx.layout.rebuild(ctx.needs_input_grad[2:])
        flat = [None if grad is None else _rows(grad) for grad in grads]
        with without_autocast(given):
            rows = None if x is None else _rows(x)
            dBs = lora_B_gradients(flat, projections, needs, ranks)
            dx, results = group_backward(flat, rows, projections, needs, ctx.needs_input_grad[1], dBs)
        return (None, _shaped_or_none(dx, given.shape[:-1]), *flatten(results)[1])


@dataclass(frozen=True)
class MLPPlan:
    """All about a call of an MLP block that is no tensor. The last projection is down."""

    layout: Layout
    combine: Combine
    keep_outputs: bool  # keep the outputs of the projections that read x; False: compute them again in backward
    chunk_size: int | None  # rows handled at a time

    def rebuild(self, values: Sequence[Any]) -> MLP:
        *inputs, down = self.layout.rebuild(values)
        return MLP(tuple(inputs), down, self.combine)


def lora_mlp(
    x: Tensor, inputs: Sequence[Projection], down: Projection, combine: Combine, keep_outputs: bool, chunk: int | None
) -> Tensor:
    """Output [..., out] of an MLP block for x [..., in]: one autograd node, or none if nothing needs grad."""
    if torch.is_grad_enabled():
        layout, tensors = flatten([*inputs, down])
        if _needs_grad(x, tensors):
            plan = MLPPlan(layout, combine, keep_outputs, chunk)
            return LoraGatedMLPFunction.apply(plan, x, *tensors)  # type: ignore[no-untyped-call, no-any-return]
    mlp = MLP(tuple(inputs), down, combine)
    with torch.no_grad(), without_autocast(x):
        outs = [mlp_forward(rows, mlp)[0] for rows in _chunks(_rows(x), chunk)]
    return _shaped(_concat(outs), x.shape[:-1])


class LoraGatedMLPFunction(Function):
    """An MLP block as one node. It saves x, the outputs of the projections that read x, and [tokens, r] of down.

    The hidden tensor is computed again in backward. With `keep_outputs=False` the outputs are, too, and nothing of
    size [tokens, f] is kept.
    """

    @staticmethod
    def forward(ctx: Any, plan: MLPPlan, x: Tensor, *tensors: Tensor | None) -> Tensor:
        mlp, needs = plan.rebuild(tensors), _mlp_needs(ctx, plan)
        outs, kept = [], []
        with without_autocast(x):
            for rows in _chunks(_rows(x), plan.chunk_size):
                out, state = mlp_forward(rows, mlp)
                outs.append(out)
                if plan.keep_outputs:
                    kept += [*state.outputs, *(state.input_ranks or ())]
                kept += state.ranks
        reads_x = not plan.keep_outputs or any(a.lora_A or a.lora_B for need in needs.inputs for a in need.adapters)
        kept_x = (_narrowest(x, mlp.inputs) if plan.keep_outputs else x) if reads_x else None
        inputs = _kept(mlp.inputs, needs.x) if plan.keep_outputs else flatten(mlp.inputs)[1]
        ctx.plan = plan
        ctx.save_for_backward(kept_x, *inputs, *_kept([mlp.down], needs.hidden), *kept)
        return _shaped(_concat(outs), x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan, needs = ctx.plan, _mlp_needs(ctx, ctx.plan)
        x, *saved = ctx.saved_tensors
        mlp, kept = plan.rebuild(saved), iter(saved[plan.layout.slots :])
        grads = _chunks(_rows(grad), plan.chunk_size)
        xs: Sequence[Any] = _chunks(_rows(x), plan.chunk_size) if x is not None else (None,) * len(grads)
        dxs: list[Any] = []
        totals: Any = None
        with without_autocast(grad):
            for dy, rows in zip(grads, xs, strict=True):
                dx, results = mlp_backward(dy, rows, _state(plan, mlp, rows, kept), mlp, needs)
                dxs.append(dx)
                totals = _summed(totals, flatten(results)[1], several=len(grads) > 1)
        dx = _concat(dxs) if needs.x else None
        return (None, _shaped_or_none(dx, grad.shape[:-1]), *totals)


def _state(plan: MLPPlan, mlp: MLP, rows: Any, kept: Iterator[Any]) -> MLPState:
    """What the forward of a chunk kept, or what it computes again."""
    input_ranks: Sequence[Tensor] | None
    if plan.keep_outputs:
        n_ranks = sum(len(projection.adapters) for projection in mlp.inputs) if mlp.keeps_input_ranks else 0
        outputs, input_ranks = list(islice(kept, len(mlp.inputs))), list(islice(kept, n_ranks))
    else:
        outputs, input_ranks = group_forward(rows, mlp.inputs)
    ranks = list(islice(kept, len(mlp.down.adapters)))
    return MLPState(outputs, input_ranks if mlp.keeps_input_ranks else None, ranks)


def _chunks(rows: Tensor, size: int | None) -> tuple[Tensor, ...]:
    return (rows,) if size is None else torch.split(rows, size)


def _mlp_needs(ctx: Any, plan: MLPPlan) -> MLPNeeds:
    *inputs, down = plan.layout.rebuild(ctx.needs_input_grad[2:])
    return MLPNeeds(ctx.needs_input_grad[1], tuple(inputs), down)


def _summed(totals: Any, gradients: Sequence[Tensor | None], several: bool) -> Sequence[Tensor | None]:
    """Add the gradients of one more chunk of rows, in float32 at least so that many chunks lose nothing."""
    if several:
        gradients = [g if g is None else g.to(torch.promote_types(g.dtype, torch.float32)) for g in gradients]
    if totals is None:
        return gradients
    return [None if total is None else total.add_(g) for total, g in zip(totals, gradients, strict=True)]


def _needs_grad(x: Tensor, tensors: Sequence[Tensor | None]) -> bool:
    return x.requires_grad or any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _kept(projections: Sequence[Projection], needs_input: bool) -> tuple[Tensor | None, ...]:
    """The tensors that backward reads: biases never, base weights only for the gradient of the input."""
    kept = []
    for projection in projections:
        adapters = tuple(adapter._replace(bias=None) for adapter in projection.adapters)
        statistics = projection.statistics if needs_input else (None,) * len(projection.statistics)
        weight = projection.weight if needs_input else None
        kept.append(projection._replace(weight=weight, bias=None, statistics=statistics, adapters=adapters))
    return flatten(kept)[1]


def _narrowest(x: Tensor, projections: Sequence[Projection]) -> Tensor:
    """x as backward reads it (only the adapters do): rounded to their dtype already if that is the narrower one."""
    dtypes = {adapter.dtype for projection in projections for adapter in projection.adapters}
    if len(dtypes) == 1:
        (dtype,) = dtypes
        if dtype.itemsize < x.dtype.itemsize:
            return x.to(dtype)
    return x


def _concat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """Autocast off for the device of `tensor`: the dtypes were settled when the projections were read."""
    device_type = tensor.device.type
    return _NOTHING if autocast_dtype(device_type) is None else torch.autocast(device_type, enabled=False)


def _rows(tensor: Tensor) -> Tensor:
    """[..., d] as [tokens, d]; `reshape`, since what comes from outside may have any strides."""
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def _shaped(rows: Tensor, batch: torch.Size) -> Tensor:
    """[tokens, d] as [*batch, d]. Not `view`: autograd would then refuse to let users change the output in place."""
    if len(batch) == 1:
        return rows
    return torch.ops.aten._unsafe_view.default(rows, [*batch, rows.shape[-1]])  # type: ignore[no-any-return]


def _shaped_or_none(rows: Tensor | None, batch: torch.Size) -> Tensor | None:
    return None if rows is None else _shaped(rows, batch)
