"""The arithmetic of a group of LoRA projections that read one tensor: two pure functions, forward and backward.

    y_i  = x W_i^T + b_i + sum_a s_a (x A_a^T) B_a^T        a: the active adapters of projection i
    h_a  = s_a x A_a^T          rank space, forward         [tokens, r]
    u_a  = s_a dY_i B_a         rank space, backward        [tokens, r]
    dX   = sum_i dY_i W_i + sum_a u_a A_a
    dA_a = u_a^T x              dB_a = dY_i^T h_a

Everything here is two-dimensional, runs without autograd and without autocast, and takes its dtypes from the
projections: a base product runs in `projection.dtype`, the products of an adapter in `adapter.dtype`, a sum in the
wider dtype of its terms, and a result is rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, compress, groupby, repeat
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from . import quant
from .projection import Adapter, Projection, cast

RankSpace = list[Tensor]  # one [tokens, r] per adapter, in the order of projections and their adapters


def dense_weight(projection: Projection) -> Tensor:
    """The base weight [out, in] in the dtype of the base product."""
    weight: Tensor = projection.weight
    if projection.form is not None:
        weight = quant.dequantize(weight, projection.form, projection.statistics)
    return cast(weight, projection.dtype)


def base_product(rows: Tensor, projection: Projection) -> Tensor:
    """x W^T + b, [tokens, out], in the dtype that the stock base layer returns."""
    bias = None if projection.bias is None else cast(projection.bias, projection.dtype)
    rows = cast(rows, projection.dtype)
    if projection.form is None:
        return F.linear(rows, cast(projection.weight, projection.dtype), bias)
    y = quant.linear_4bit(rows, projection.weight, bias, projection.form, projection.statistics)
    return cast(y, projection.out_dtype)


def add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total + left @ right in the wider of the two dtypes. `total` was born in this call and may be overwritten."""
    if total is None:
        return left @ right
    if total.dtype is not left.dtype:
        total = cast(total, torch.promote_types(total.dtype, left.dtype))
    if total.dtype is left.dtype:
        return total.addmm_(left, right)
    return total.add_(left @ right)


def to_rank(rows: Tensor, adapters: Sequence[Adapter], maps: Sequence[Tensor]) -> RankSpace:
    """Scaled rank-space tensors s_a rows maps_a^T, each [tokens, r_a]. One product for neighbours of one dtype.

    Args:
        rows: [tokens, d]: x in forward, dY in backward.
        maps: one [r_a, d] per adapter: A in forward, B^T in backward.
    """
    scaled: RankSpace = []
    for dtype, members in _runs(adapters):
        joined = F.linear(cast(rows, dtype), _join([cast(maps[i], dtype) for i in members]))
        parts = (joined,) if len(members) == 1 else torch.split(joined, [maps[i].shape[0] for i in members], dim=1)
        scaled += [part * _scale(adapters[i]) for part, i in zip(parts, members, strict=True)]
    return scaled


def from_rank(total: Any, ranks: RankSpace, adapters: Sequence[Adapter], maps: Sequence[Tensor]) -> Any:
    """total + sum_a ranks_a maps_a. One product for neighbours of one dtype.

    Args:
        maps: one [r_a, d] per adapter: B^T in forward, A in backward.
    """
    for dtype, members in _runs(adapters):
        left = _join([ranks[i] for i in members], dim=1)
        total = add_product(total, left, _join([cast(maps[i], dtype) for i in members]))
    return total


def group_forward(rows: Tensor, projections: Sequence[Projection]) -> tuple[list[Tensor], RankSpace]:
    """Outputs [tokens, out_i] in each projection's `out_dtype`, and the rank-space tensors that backward needs.

    Args:
        rows: [tokens, in], the tensor that all projections read.
    """
    adapters = [adapter for projection in projections for adapter in projection.adapters]
    ranks = to_rank(rows, adapters, [adapter.lora_A for adapter in adapters])
    remaining = iter(ranks)
    outputs = []
    for projection in projections:
        own = [next(remaining) for _ in projection.adapters]
        y = base_product(rows, projection)
        y = from_rank(y, own, projection.adapters, [adapter.lora_B.t() for adapter in projection.adapters])
        outputs.append(cast(_add_biases(y, projection), projection.out_dtype))
    return outputs, ranks


def group_backward(
    grads: Sequence[Tensor | None],
    rows: Tensor | None,
    projections: Sequence[Projection],
    needs: Sequence[Projection],
    needs_x: bool,
    dBs: Sequence[Tensor | None],
) -> tuple[Tensor | None, list[Projection]]:
    """dX [tokens, in], and the gradients of the parameters in the places of the parameters.

    What nobody asked for is None. Each gradient comes in the dtype of its products; autograd rounds it to the dtype of
    its input.

    Args:
        grads: dY_i [tokens, out_i], or None for an output nobody used.
        rows: [tokens, in]; None where no lora_A needs a gradient.
        needs: which gradients are asked for.
        dBs: what `lora_B_gradients` returned for them.
    """
    triples = list(zip(grads, projections, needs, strict=True))
    us = [u for grad, projection, need in triples for u in _gradient_ranks(grad, projection, need, needs_x)]
    dx = _input_gradient(grads, projections, us) if needs_x else None
    wanted = [bool(adapter.lora_A) for need in needs for adapter in need.adapters]
    dAs = iter(_lora_A_gradients([u if want else None for u, want in zip(us, wanted, strict=True)], rows))
    left = iter(dBs)
    return dx, [_parameter_gradients(grad, projection, need, dAs, left) for grad, projection, need in triples]


def lora_B_gradients(
    grads: Sequence[Tensor | None],
    projections: Sequence[Projection],
    needs: Sequence[Projection],
    ranks: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """dB = dY^T h of each adapter, or None where nobody asked. `ranks`: h_a, None where lora_B needs no gradient."""
    hs: Iterator[Any] = iter(ranks)
    gradients: list[Tensor | None] = []
    for grad, projection, need in zip(grads, projections, needs, strict=True):
        for adapter, wanted in zip(projection.adapters, need.adapters, strict=True):
            h = next(hs)
            used = grad is not None and h is not None and wanted.lora_B
            gradients.append(grad.to(adapter.dtype).t() @ h if used else None)  # type: ignore[union-attr]
    return gradients


def joined_lora_B_gradients(joined: Tensor, projections: Sequence[Projection], ranks: RankSpace) -> list[Tensor]:
    """dB of projections with one adapter each, whose output gradients lie side by side: [tokens, sum of out_i].

    One product with all h side by side gives every dB as a block. It computes blocks that nobody reads, but skinny
    products are bound by reading dY, and that is read once.
    """
    product = joined.to(ranks[0].dtype).t() @ _join(ranks, dim=1)
    outs = [projection.adapters[0].lora_B.shape[0] for projection in projections]
    blocks = zip(torch.split(product, outs), ranks, accumulate([0, *(h.shape[1] for h in ranks)]), strict=False)
    return [block[:, column : column + h.shape[1]] for block, h, column in blocks]


def _gradient_ranks(grad: Any, projection: Projection, need: Projection, needs_x: bool) -> list[Tensor | None]:
    """u = s dY B of each adapter, or None where neither dX nor dA reads it."""
    used = [grad is not None and (needs_x or bool(wanted.lora_A)) for wanted in need.adapters]
    adapters = list(compress(projection.adapters, used))
    us = iter(to_rank(grad, adapters, [adapter.lora_B.t() for adapter in adapters]) if adapters else ())
    return [next(us) if use else None for use in used]


def _input_gradient(
    grads: Sequence[Tensor | None], projections: Sequence[Projection], us: Sequence[Tensor | None]
) -> Tensor | None:
    """dX = sum_i dY_i W_i + sum_a u_a A_a, over the outputs that were used."""
    dx: Tensor | None = None
    for grad, projection in zip(grads, projections, strict=True):
        if grad is not None:
            first = dx is None
            dx = add_product(dx, cast(grad, projection.dtype), dense_weight(projection))
            if first:  # x may be wider than what a 4-bit base computes in; then stock adds up in x's dtype
                dx = cast(dx, projection.out_dtype)
    adapters = [adapter for projection in projections for adapter in projection.adapters]
    used = [(adapter, u) for adapter, u in zip(adapters, us, strict=True) if u is not None]
    maps = [adapter.lora_A for adapter, _ in used]
    dx = from_rank(dx, [u for _, u in used], [adapter for adapter, _ in used], maps)
    return dx


def _lora_A_gradients(us: Sequence[Tensor | None], rows: Any) -> list[Tensor | None]:
    """dA = u^T x of each adapter. One product for all whose dtype is the same."""
    gradients: list[Tensor | None] = [None] * len(us)
    used = [(i, u) for i, u in enumerate(us) if u is not None]
    for dtype, members in groupby(used, key=lambda item: item[1].dtype):
        group = list(members)
        joined = _join([u for _, u in group], dim=1).t() @ rows.to(dtype)
        parts = torch.split(joined, [u.shape[1] for _, u in group])
        for (i, _), part in zip(group, parts, strict=True):
            gradients[i] = part
    return gradients


def _parameter_gradients(
    grad: Tensor | None,
    projection: Projection,
    need: Projection,
    dAs: Iterator[Any],
    dBs: Iterator[Any],
) -> Projection:
    """The gradients of one projection's parameters in their places; those of biases are sums over tokens."""
    adapters = []
    for adapter, wanted in zip(projection.adapters, need.adapters, strict=True):
        dbias = _sum_tokens(grad) * _scale(adapter) if grad is not None and wanted.bias else None
        adapters.append(adapter._replace(lora_A=next(dAs), lora_B=next(dBs), bias=dbias, scale=None))
    dbias = _sum_tokens(grad) if grad is not None and need.bias else None
    return no_gradients(projection)._replace(bias=dbias, adapters=tuple(adapters))


def no_gradients(projection: Projection) -> Projection:
    """Nothing in the places of a projection's parameters."""
    return projection.rebuild(repeat(None))


def _add_biases(out: Tensor, projection: Projection) -> Tensor:
    """Add s * bias of lora_B, in the wider dtype."""
    for adapter in projection.adapters:
        if adapter.bias is not None:
            out = out + adapter.bias.to(adapter.dtype) * _scale(adapter)
    return out


def _runs(adapters: Sequence[Adapter]) -> Iterator[tuple[torch.dtype, list[int]]]:
    """Positions of neighbouring adapters whose products run in one dtype and so can be one product."""
    if len(adapters) == 1:  # by far the most frequent case
        yield adapters[0].dtype, [0]
        return
    for dtype, members in groupby(range(len(adapters)), key=lambda i: adapters[i].dtype):
        yield dtype, list(members)


def _join(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=dim)


def _scale(adapter: Adapter) -> float | Tensor:
    return adapter.scaling if adapter.scale is None else adapter.scale


def _sum_tokens(grad: Tensor) -> Tensor:
    """[tokens, out] -> [out]. Thousands of rows add up: in float32 at least."""
    return grad.sum(0, dtype=torch.promote_types(grad.dtype, torch.float32))
