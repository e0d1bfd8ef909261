"""Activation modules that the fused MLP knows: their forward, and their derivative rounded once.

Looked up by exact type, as an unknown activation is a reason to step aside and never a guess. PyTorch's own backward
kernels compute in float32 and round once, where autograd of a formula written out in bfloat16 rounds at every step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import activations as hf

aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """An elementwise function of the tensor before the activation, `pre`."""

    name: str
    forward: Callable[[Tensor], Tensor]  # pre -> activation(pre)
    backward: Callable[[Tensor, Tensor, Tensor], Any]  # (grad, pre, out): grad * activation'(pre) to out, maybe grad


def multiply_into(out: Tensor, left: Tensor, right: Tensor) -> None:
    """out = left * right, in one pass. `out` may be strided, which Dynamo does not take as `out=`."""
    if torch.compiler.is_compiling():
        out.copy_(left * right)
    else:
        torch.mul(left, right, out=out)


def _silu_backward(grad: Tensor, pre: Tensor, out: Tensor) -> None:
    aten.silu_backward.grad_input(grad, pre, grad_input=out)


def _gelu_backward(grad: Tensor, pre: Tensor, out: Tensor) -> None:
    aten.gelu_backward.grad_input(grad, pre, approximate="none", grad_input=out)


def _gelu_tanh(pre: Tensor) -> Tensor:
    return F.gelu(pre, approximate="tanh")


def _gelu_tanh_backward(grad: Tensor, pre: Tensor, out: Tensor) -> None:
    aten.gelu_backward.grad_input(grad, pre, approximate="tanh", grad_input=out)


def _quick_gelu(pre: Tensor) -> Tensor:
    return pre * torch.sigmoid(1.702 * pre)


def _quick_gelu_backward(grad: Tensor, pre: Tensor, out: Tensor) -> None:
    # no native kernel: d/dx x sigma(cx) = sigma (1 + c x (1 - sigma)), in float32 at least
    wide = pre.to(torch.promote_types(pre.dtype, torch.float32))
    sigma = torch.sigmoid(1.702 * wide)
    out.copy_(grad * sigma * (1 + 1.702 * wide * (1 - sigma)))


def _relu_backward(grad: Tensor, pre: Tensor, out: Tensor) -> None:
    aten.threshold_backward.grad_input(grad, pre, 0, grad_input=out)


def _relu_squared(pre: Tensor) -> Tensor:
    return torch.square(torch.relu(pre))


def _relu_squared_backward(grad: Tensor, pre: Tensor, out: Tensor) -> None:
    # through relu last, so that an infinite gradient of a negative input becomes zero as in stock
    aten.threshold_backward.grad_input(grad * (torch.relu(pre) * 2), pre, 0, grad_input=out)


def _sigmoid_backward(grad: Tensor, pre: Tensor, out: Tensor) -> None:
    aten.sigmoid_backward.grad_input(grad, torch.sigmoid(pre), grad_input=out)


def _tanh_backward(grad: Tensor, pre: Tensor, out: Tensor) -> None:
    aten.tanh_backward.grad_input(grad, torch.tanh(pre), grad_input=out)


SILU = Activation("silu", F.silu, _silu_backward)
GELU = Activation("gelu", F.gelu, _gelu_backward)
GELU_TANH = Activation("gelu_tanh", _gelu_tanh, _gelu_tanh_backward)
QUICK_GELU = Activation("quick_gelu", _quick_gelu, _quick_gelu_backward)
RELU = Activation("relu", torch.relu, _relu_backward)
RELU_SQUARED = Activation("relu_squared", _relu_squared, _relu_squared_backward)
SIGMOID = Activation("sigmoid", torch.sigmoid, _sigmoid_backward)
TANH = Activation("tanh", torch.tanh, _tanh_backward)

# Functions that a forward may call instead of a child module.
FUNCTIONS: dict[Any, Activation] = {
    F.silu: SILU,
    F.gelu: GELU,
    F.relu: RELU,
    torch.relu: RELU,
    torch.sigmoid: SIGMOID,
    torch.tanh: TANH,
}

# Exact types whose forward has no parameter of its own.
_PLAIN: dict[type, Activation] = {nn.SiLU: SILU, nn.ReLU: RELU, nn.Sigmoid: SIGMOID, nn.Tanh: TANH}
# Formulas of the tanh approximation that are the same up to rounding, and the others; names differ between versions.
_TRANSFORMERS = {
    "SiLUActivation": SILU,
    "NewGELUActivation": GELU_TANH,
    "FastGELUActivation": GELU_TANH,
    "QuickGELUActivation": QUICK_GELU,
    "ReLUSquaredActivation": RELU_SQUARED,
}
_PLAIN.update({getattr(hf, name): activation for name, activation in _TRANSFORMERS.items() if hasattr(hf, name)})


def activation_of(module: nn.Module) -> Activation | None:
    """The known activation that this module computes now, or None. It reads the object, not a configuration."""
    exact = type(module)
    if exact in _PLAIN:
        return _PLAIN[exact]
    if exact is nn.GELU:
        return {"none": GELU, "tanh": GELU_TANH}.get(str(module.approximate))
    if exact is hf.GELUActivation:
        return GELU if _is_act(module, F.gelu, "_gelu_python") else None
    if exact is hf.PytorchGELUTanh:
        tanh = getattr(module, "act", None)
        native = isinstance(tanh, partial) and tanh.func is F.gelu and tanh.keywords == {"approximate": "tanh"}
        return GELU_TANH if tanh is None or native or _is_act(module, None, "_gelu_tanh_python") else None
    return None


def _is_act(module: Any, native: Any, method: str) -> bool:
    """Whether transformers' `act` attribute is the native function or the class's own Python formula of the same."""
    act = module.act
    return act is native or getattr(act, "__func__", None) is getattr(type(module), method, act)
