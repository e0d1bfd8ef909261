"""What the results should be: the plain formula in float64, differentiated by autograd.

    y = x W^T + b + sum_a s_a ((x A_a^T) B_a^T + c_a)        a: the active adapters, c: the bias of lora_B

Nothing here is shared with the package, the dequantisation included: a reference that calls the code under test proves
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

# Largest error, relative to the norm of the reference, of a result that is computed and stored in this dtype. A sum of
# k <= 128 products of random signs is off by about sqrt(k) / 2 units of roundoff at most, and no result here goes
# through more than three such sums: 20 units leave a margin, and a wrong term would be off by thousands.
NEAR_EXACT = {torch.float32: 20 * 2**-24, torch.float64: 20 * 2**-53}


def plain(x: Tensor, weight: Tensor, bias: Tensor | None, adapters: Iterable[tuple[Any, ...]]) -> Tensor:
    """The formula above. Each adapter is (A, B, c or None, s)."""
    y = x @ weight.t()
    if bias is not None:
        y = y + bias
    for A, B, c, s in adapters:
        branch = (x @ A.t()) @ B.t()
        y = y + s * (branch if c is None else branch + c)
    return y


def base_weight(base_layer: nn.Module) -> Tensor:
    """The weight [out, in] that a base layer stands for, dequantised if it is a 4-bit layer, in float64."""
    state = getattr(base_layer.weight, "quant_state", None)
    if state is None:
        return base_layer.weight.detach().double()
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(base_layer.weight.data, state).double()


def reference_step(
    model: nn.Module, x: Tensor, grad: Tensor, prefix: str = "base_model.model.proj"
) -> dict[str, Tensor]:
    """y, dX and the gradient of each trainable parameter of a one-projection PEFT model, by the parameter's name."""
    layer: Any = model.get_submodule(prefix)
    values = {
        name: p.detach().to(torch.float64, copy=True).requires_grad_(p.requires_grad)
        for name, p in layer.named_parameters()
        if name != "base_layer.weight"
    }
    x64 = x.detach().to(torch.float64, copy=True).requires_grad_()
    adapters = [
        (values[f"lora_A.{a}.weight"], values[f"lora_B.{a}.weight"], values.get(f"lora_B.{a}.bias"), layer.scaling[a])
        for a in layer.active_adapters
        if a in layer.lora_A
    ]
    y = plain(x64, base_weight(layer.base_layer), values.get("base_layer.bias"), adapters)
    y.backward(grad.double())
    found = {"y": y.detach(), "dX": x64.grad} if x.requires_grad else {"y": y.detach()}
    return found | {f"{prefix}.{name}": value.grad for name, value in values.items() if value.grad is not None}


def error(actual: Tensor, reference: Tensor) -> float:
    """|actual - reference| / |reference| over all elements; a reference of zeros is met exactly or not at all."""
    distance = (actual.double() - reference.double()).norm().item()
    size = reference.double().norm().item()
    return distance / size if size > 0 else (0.0 if distance == 0 else float("inf"))


def assert_near_exact(actual: dict[str, Tensor], reference: dict[str, Tensor]) -> None:
    """The same results, each within NEAR_EXACT of the dtype it is stored in."""
    assert actual.keys() == reference.keys()
    errors = {name: error(actual[name], reference[name]) for name in reference}
    wrong = {name: e for name, e in errors.items() if not e <= NEAR_EXACT[actual[name].dtype]}
    assert not wrong


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same results in every bit and in dtype."""
    assert actual.keys() == expected.keys()
    for name in expected:
        assert actual[name].dtype == expected[name].dtype, name
        assert torch.equal(actual[name], expected[name]), name
