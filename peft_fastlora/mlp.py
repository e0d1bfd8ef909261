"""The arithmetic of an MLP block: a group of projections, an elementwise function of them, and one projection.

    hidden = activation(gate) * up          gate, up: outputs of the group that reads x, [tokens, f]
    y      = down(hidden)

Two-dimensional and without autograd, as `core`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .activations import Activation, multiply_into
from .core import (
    group_backward,
    group_forward,
    joined_lora_B_gradients,
    lora_B_gradients,
    no_gradients,
    to_rank,
)
from .projection import Projection, cast


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
        multiply_into(d_gate, d_hidden, up)
        self.activation.backward(d_gate, gate, d_gate)
        return joined


@dataclass(frozen=True)
class MLP:
    """The projections of a block, or what stands in their places, and the elementwise function between them."""

    inputs: tuple[Projection, ...]  # read x
    down: Projection
    combine: Combine

    @property
    def keeps_input_ranks(self) -> bool:
        """Whether the rank-space tensors of the inputs are kept rather than computed again.

        Computing them again costs a product, which is saved by one product for all dB. That reads the gradients of all
        outputs side by side, and where the adapters are in another dtype, in a copy: then the few bytes are cheaper.
        """
        return any(a.dtype is not projection.out_dtype for projection in self.inputs for a in projection.adapters)


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


class MLPState(NamedTuple):
    """What backward needs of a forward, besides x and the projections."""

    outputs: Sequence[Tensor]  # of the projections that read x
    input_ranks: Sequence[Tensor] | None  # rank-space tensors of those; None: compute them again
    ranks: Sequence[Tensor]  # of down


def mlp_forward(rows: Tensor, mlp: MLP) -> tuple[Tensor, MLPState]:
    """Output [tokens, out], and what backward needs."""
    outputs, input_ranks = group_forward(rows, mlp.inputs)
    hidden, _ = mlp.combine.forward(outputs)
    (out,), ranks = group_forward(hidden, [mlp.down])
    return out, MLPState(outputs, input_ranks if mlp.keeps_input_ranks else None, ranks)


def mlp_backward(
    grad: Tensor, rows: Any, state: MLPState, mlp: MLP, needs: MLPNeeds
) -> tuple[Tensor | None, list[Projection]]:
    """dX [tokens, in], and the gradients of inputs and down in the places of their parameters.

    Args:
        grad: dY [tokens, out].
        rows: [tokens, in], None where neither lora_A nor lora_B of the inputs needs a gradient.
    """
    hidden, activated = mlp.combine.forward(state.outputs)
    dBs = lora_B_gradients([grad], [mlp.down], [needs.down], state.ranks)
    d_hidden, down = group_backward([grad], hidden, [mlp.down], [needs.down], needs.hidden, dBs)
    if d_hidden is None:
        return None, [no_gradients(projection) for projection in mlp.inputs] + down
    d_hidden = cast(d_hidden, hidden.dtype)
    del hidden  # of [tokens, f] nothing stays alive longer than it must
    joined = mlp.combine.backward(d_hidden, activated, state.outputs)
    del activated, d_hidden
    grads = torch.split(joined, [output.shape[1] for output in state.outputs], dim=1)
    if state.input_ranks is not None:
        input_dBs = lora_B_gradients(grads, mlp.inputs, needs.inputs, state.input_ranks)
    else:
        input_dBs = _input_lora_B_gradients(joined, grads, rows, mlp, needs)
    dx, inputs = group_backward(grads, rows, mlp.inputs, needs.inputs, needs.x, input_dBs)
    return dx, inputs + down


def _input_lora_B_gradients(
    joined: Tensor, grads: Sequence[Tensor], rows: Any, mlp: MLP, needs: MLPNeeds
) -> list[Tensor | None]:
    """dB of the projections that read x. Their rank-space tensors are computed again: one skinny product for all."""
    adapters = [adapter for projection in mlp.inputs for adapter in projection.adapters]
    wanted = [adapter.lora_B for need in needs.inputs for adapter in need.adapters]
    if not any(wanted):
        return [None] * len(adapters)
    ranks = to_rank(rows, adapters, [adapter.lora_A for adapter in adapters])
    if all(wanted) and all(len(projection.adapters) == 1 for projection in mlp.inputs):
        return [*joined_lora_B_gradients(joined, mlp.inputs, ranks)]
    return lora_B_gradients(grads, mlp.inputs, needs.inputs, ranks)
