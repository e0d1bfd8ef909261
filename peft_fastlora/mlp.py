"""The arithmetic of an MLP block: a group of projections, an elementwise function of them, and one projection.

    hidden = activation(gate) * up          gate, up: outputs of the group that reads x, [tokens, f]
    y      = down(hidden)

Two-dimensional and without autograd, as `core`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .activations import Activation, multiply_into
from .core import (
    RankSpace,
    group_backward,
    group_forward,
    joined_lora_B_gradients,
    lora_B_gradients,
    no_gradients,
    to_rank,
)
from .projection import Projection


@dataclass(frozen=True)
class Combine:
    """The elementwise middle of an MLP block: hidden = activation(gate) * up, or activation(gate) alone."""

    form: str  # "gated": two outputs; "packed": two halves of one output; "plain": no up
    gate: int  # which output, or which half, goes through the activation
    activation: Activation

    def split(self, outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """(gate, up), each [tokens, f], from the outputs of the projections that read x."""
        if self.form == "plain":
            return outputs[0], None
        first, second = outputs if self.form == "gated" else outputs[0].chunk(2, dim=-1)
        return (first, second) if self.gate == 0 else (second, first)

    def forward(self, outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """(hidden, activation(gate)), each [tokens, f]."""
        gate, up = self.split(outputs)
        activated = self.activation.forward(gate)
        return (activated if up is None else activated * up), activated

    def backward(self, d_hidden: Tensor, activated: Tensor, outputs: Sequence[Tensor]) -> Tensor:
        """The gradients of the outputs side by side: [tokens, f] for a plain block, else [tokens, 2 f]."""
        gate, up = self.split(outputs)
        if up is None:
            joined = torch.empty_like(gate)
            self.activation.backward(d_hidden, gate, joined)
            return joined
        joined = gate.new_empty(gate.shape[0], 2 * gate.shape[1])
        d_gate, d_up = Combine("packed", self.gate, self.activation).split([joined])
        assert d_up is not None
        multiply_into(d_up, d_hidden, activated)
        self.activation.backward(d_hidden * up, gate, d_gate)
        return joined


@dataclass(frozen=True)
class MLP:
    """The projections of a block, or what stands in their places, and the elementwise function between them."""

    inputs: tuple[Projection, ...]  # read x
    down: Projection
    combine: Combine


@dataclass(frozen=True)
class MLPNeeds:
    """Which gradients of a block are asked for."""

    x: bool
    inputs: tuple[Projection, ...]
    down: Projection

    @property
    def hidden(self) -> bool:
        """Whether anything before the down projection needs a gradient."""
        return self.x or any(any(projection.tensors()) for projection in self.inputs)


def mlp_forward(rows: Tensor, mlp: MLP) -> tuple[Tensor, list[Tensor], RankSpace]:
    """(output [tokens, out], outputs of the projections that read x, rank-space tensors of down)."""
    outputs, _ = group_forward(rows, mlp.inputs)
    hidden, _ = mlp.combine.forward(outputs)
    (out,), ranks = group_forward(hidden, [mlp.down])
    return out, outputs, ranks


def mlp_backward(
    grad: Tensor, rows: Any, outputs: Sequence[Tensor], ranks: Sequence[Tensor | None], mlp: MLP, needs: MLPNeeds
) -> tuple[Tensor | None, list[Projection]]:
    """dX [tokens, in], and the gradients of inputs and down in the places of their parameters.

    Args:
        grad: dY [tokens, out].
        rows: [tokens, in], None where neither lora_A nor lora_B of the inputs needs a gradient.
        outputs: of the projections that read x, as `mlp_forward` computed them.
        ranks: of down.
    """
    hidden, activated = mlp.combine.forward(outputs)
    dBs = lora_B_gradients([grad], [mlp.down], [needs.down], ranks)
    d_hidden, down = group_backward([grad], hidden, [mlp.down], [needs.down], needs.hidden, dBs)
    if d_hidden is None:
        return None, [no_gradients(projection) for projection in mlp.inputs] + down
    joined = mlp.combine.backward(d_hidden.to(hidden.dtype), activated, outputs)
    del hidden, activated, d_hidden  # [tokens, f] each: not needed for the rest
    grads = torch.split(joined, [output.shape[1] for output in outputs], dim=1)
    input_dBs = _input_lora_B_gradients(joined, grads, rows, mlp, needs)
    dx, inputs = group_backward(grads, rows, mlp.inputs, needs.inputs, needs.x, input_dBs)
    return dx, inputs + down


def _input_lora_B_gradients(
    joined: Tensor, grads: Sequence[Tensor], rows: Any, mlp: MLP, needs: MLPNeeds
) -> Sequence[Tensor | None]:
    """dB of the projections that read x. Their rank-space tensors are computed again: one skinny product for all."""
    adapters = [adapter for projection in mlp.inputs for adapter in projection.adapters]
    wanted = [adapter.lora_B for need in needs.inputs for adapter in need.adapters]
    if not any(wanted):
        return [None] * len(adapters)
    ranks = to_rank(rows, adapters, [adapter.lora_A for adapter in adapters])
    one_dtype = len({adapter.dtype for adapter in adapters}) == 1
    if all(wanted) and one_dtype and all(len(projection.adapters) == 1 for projection in mlp.inputs):
        return joined_lora_B_gradients(joined, mlp.inputs, ranks)
    return lora_B_gradients(grads, mlp.inputs, needs.inputs, ranks)
