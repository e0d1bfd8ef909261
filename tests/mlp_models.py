"""MLP blocks that tests run: `M`, a block 16 -> 40 -> 16 in each of its three forms, and what it should compute.

As in `models`, each is a pair of twins, stock PEFT and ours, and lora_B is random.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from models import Setup, adapted, autocast, gradients, quantized, random_cotangent
from oracle import base_weight, error, plain
from peft import LoraConfig, PeftModel
from torch import Tensor, nn
from transformers.activations import ACT2FN

from peft_fastlora import FastLoraConfig

MLP_NODE = "LoraGatedMLPFunctionBackward"
PREFIX = "base_model.model.mlp"
GATED = ("gate_proj", "up_proj", "down_proj")
MEMBERS = {"gated": GATED, "packed": ("gate_up_proj", "down_proj"), "plain": ("fc1", "fc2")}
# Largest relative error of a result that is computed and stored in this dtype. Measured over all forms, activations
# and subsets: 11 units of roundoff at most; 40 leave a margin, and a wrong term is off by thousands.
NEAR = {torch.float32: 40 * 2**-24, torch.float64: 40 * 2**-53}


@dataclass(frozen=True)
class BlockSetup(Setup):
    """What distinguishes one MLP block from another. The defaults are `M`."""

    form: str = "gated"
    activation: str = "silu"
    quantized: tuple[str, ...] | None = None  # the members that `quant` is for; None: all

    @property
    def features(self) -> tuple[int, int]:
        """(in, intermediate). bitsandbytes packs blocks of 64."""
        return (16, 40) if self.quant is None else (64, 128)

    def __str__(self) -> str:
        parts = [self.form, self.activation, super().__str__()]
        return "-".join(parts if self.quantized is None else [*parts, *self.quantized])


M = BlockSetup()
M64 = BlockSetup(base=torch.float64, x=torch.float64, adapter=torch.float64)
MBF16 = BlockSetup(base=torch.bfloat16, x=torch.bfloat16, adapter=torch.bfloat16)
MNF4 = BlockSetup(quant="nf4-double")


class Gated(nn.Module):
    def __init__(self, linear: Callable[[str, int, int], nn.Module], setup: BlockSetup) -> None:
        super().__init__()
        d, f = setup.features
        self.gate_proj = linear("gate_proj", d, f)
        self.up_proj = linear("up_proj", d, f)
        self.down_proj = linear("down_proj", f, d)
        self.act_fn = ACT2FN[setup.activation]

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Packed(nn.Module):
    def __init__(self, linear: Callable[[str, int, int], nn.Module], setup: BlockSetup) -> None:
        super().__init__()
        d, f = setup.features
        self.gate_up_proj = linear("gate_up_proj", d, 2 * f)
        self.down_proj = linear("down_proj", f, d)
        self.activation_fn = ACT2FN[setup.activation]

    def forward(self, hidden_states):
        gate, up_states = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
        return self.down_proj(up_states * self.activation_fn(gate))


class Plain(nn.Module):
    def __init__(self, linear: Callable[[str, int, int], nn.Module], setup: BlockSetup) -> None:
        super().__init__()
        d, f = setup.features
        self.fc1 = linear("fc1", d, f)
        self.fc2 = linear("fc2", f, d)
        self.act = ACT2FN[setup.activation]

    def forward(self, hidden_states):
        hidden_states = self.fc1(hidden_states)
        hidden_states = self.act(hidden_states)
        return self.fc2(hidden_states)


FORMS: dict[str, type[nn.Module]] = {"gated": Gated, "packed": Packed, "plain": Plain}


class OneBlock(nn.Module):
    """A model with one MLP block, `mlp`."""

    def __init__(self, mlp: nn.Module, in_4bit: bool = False) -> None:
        super().__init__()
        self.mlp = mlp
        self.is_loaded_in_4bit = in_4bit  # PEFT looks at this of the model

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)


def make_linear(setup: BlockSetup) -> Callable[[str, int, int], nn.Module]:
    def linear(name: str, in_features: int, out_features: int) -> nn.Module:
        dense = nn.Linear(in_features, out_features, bias=setup.bias).to(setup.base)
        packed = setup.quant is not None and (setup.quantized is None or name in setup.quantized)
        return quantized(dense, setup.quant, setup.compute) if packed else dense

    return linear


def one_block(
    config_class: type[LoraConfig],
    setup: BlockSetup = M,
    seed: int = 0,
    block: type[nn.Module] | None = None,
    **lora: Any,
) -> PeftModel:
    """A block with random adapters on the targets, or all; equal for equal seeds whatever the config class."""
    torch.manual_seed(seed)
    base = OneBlock((block or FORMS[setup.form])(make_linear(setup), setup), in_4bit=setup.quant is not None)
    targets = lora.pop("target_modules", list(MEMBERS[setup.form]))
    return adapted(base, config_class, setup, targets, seed, **lora)


def block_twins(setup: BlockSetup = M, options: Any = None, **lora: Any) -> tuple[PeftModel, PeftModel]:
    """(stock, ours), with equal weights. `options`: the fast options of ours."""
    return one_block(LoraConfig, setup, **lora), one_block(FastLoraConfig, setup, **lora, **(options or {}))


def mlp_of(model: nn.Module) -> Any:
    return model.get_submodule(PREFIX)


def taken_as_block(y: Tensor) -> bool:
    """Whether one node computed the whole block."""
    return type(y.grad_fn).__name__ == MLP_NODE


def block_step(
    model: nn.Module, x: Tensor, setup: BlockSetup = M, seed: int = 0, fused: bool | None = None
) -> dict[str, Tensor]:
    """One forward and backward: y, dX and the gradient of every trainable parameter, by name.

    Args:
        fused: also assert that the block was (not) one node.
    """
    with autocast(setup.autocast):
        y = model(x)
    if fused is not None:
        assert taken_as_block(y) is fused, f"the output comes from {type(y.grad_fn).__name__}"
    y.backward(random_cotangent(y, seed))
    found = {"y": y.detach()} if x.grad is None else {"y": y.detach(), "dX": x.grad}
    return found | gradients(model)


def subsets(members: Sequence[str]) -> list[tuple[str, ...]]:
    """All non-empty subsets."""
    return [subset for n in range(1, len(members) + 1) for subset in combinations(members, n)]


# -- what a block should compute --------------------------------------------------------------------------------------

# Written out, by name in transformers' table: nothing is shared with the package or with transformers.
FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda t: t / (1 + torch.exp(-t)),
    "swish": lambda t: t / (1 + torch.exp(-t)),
    "gelu": lambda t: t * 0.5 * (1 + torch.erf(t / 2**0.5)),
    "gelu_python": lambda t: t * 0.5 * (1 + torch.erf(t / 2**0.5)),
    "gelu_new": lambda t: 0.5 * t * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (t + 0.044715 * t**3))),
    "gelu_pytorch_tanh": lambda t: 0.5 * t * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (t + 0.044715 * t**3))),
    "gelu_fast": lambda t: 0.5 * t * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (t + 0.044715 * t**3))),
    "quick_gelu": lambda t: t / (1 + torch.exp(-1.702 * t)),
    "relu": lambda t: t.clamp(min=0),
    "relu2": lambda t: t.clamp(min=0) ** 2,
    "sigmoid": lambda t: 1 / (1 + torch.exp(-t)),
    "tanh": lambda t: (torch.exp(t) - torch.exp(-t)) / (torch.exp(t) + torch.exp(-t)),
}


def block_reference(model: nn.Module, setup: BlockSetup, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """y, dX and the gradient of each trainable parameter of a block, in float64 by autograd of the formula."""
    mlp = mlp_of(model)
    values = {
        name: p.detach().to(torch.float64, copy=True).requires_grad_(p.requires_grad)
        for name, p in mlp.named_parameters()
        if p.dtype.is_floating_point
    }
    x64 = x.detach().to(torch.float64, copy=True).requires_grad_()
    act = FORMULAS[setup.activation]
    first, *other, down = MEMBERS[setup.form]
    pre = _projected(mlp, first, values, x64)
    if setup.form == "packed":
        gate, up = pre.chunk(2, -1)
        hidden = act(gate) * up
    else:
        hidden = act(pre) * _projected(mlp, other[0], values, x64) if other else act(pre)
    y = _projected(mlp, down, values, hidden)
    y.backward(grad.double())
    found = {"y": y.detach(), "dX": x64.grad} if x.requires_grad else {"y": y.detach()}
    return found | {f"{PREFIX}.{name}": value.grad for name, value in values.items() if value.grad is not None}


def _projected(mlp: Any, name: str, values: dict[str, Tensor], x: Tensor) -> Tensor:
    layer = mlp._modules[name]
    if not hasattr(layer, "lora_A"):
        return plain(x, base_weight(layer), values.get(f"{name}.bias"), [])
    adapters = [
        (
            values[f"{name}.lora_A.{a}.weight"],
            values[f"{name}.lora_B.{a}.weight"],
            values.get(f"{name}.lora_B.{a}.bias"),
            float(layer.scaling[a]),
        )
        for a in layer.active_adapters
        if a in layer.lora_A
    ]
    return plain(x, base_weight(layer.base_layer), values.get(f"{name}.base_layer.bias"), adapters)


def assert_near(actual: dict[str, Tensor], reference: dict[str, Tensor], allowed: float = 1.0) -> None:
    """The same results, each within `allowed` times NEAR of the dtype it is stored in."""
    assert actual.keys() == reference.keys()
    wrong = {}
    for name, expected in reference.items():
        assert actual[name].shape == expected.shape, name
        bound = NEAR[actual[name].dtype] * allowed
        e = error(actual[name], expected)
        if not e <= bound:
            wrong[name] = (e, bound)
    assert not wrong


class TwoX:
    """Behaviour 9 over several seeds: the root mean square of our errors is at most twice stock's.

    Pooled, as a gradient of a rank-4 matrix alone has few roundings and a stock error may be small by luck. Errors
    below FLOOR, a few roundings of float32, count as it.
    """

    FLOOR = 4 * 2**-24

    def __init__(self) -> None:
        self.squares: dict[str, list[float]] = {}

    def add(self, ours: dict[str, Tensor], stock: dict[str, Tensor], reference: dict[str, Tensor]) -> None:
        assert ours.keys() == stock.keys() == reference.keys()
        for name, expected in reference.items():
            assert ours[name].dtype == stock[name].dtype, name
            total = self.squares.setdefault(name, [0.0, 0.0])
            total[0] += error(ours[name], expected) ** 2
            total[1] += max(error(stock[name], expected), self.FLOOR) ** 2

    def check(self) -> None:
        ratios = {name: (ours / stock) ** 0.5 for name, (ours, stock) in self.squares.items()}
        assert max(ratios.values()) <= 2, ratios
