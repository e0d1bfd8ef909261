"""The models that tests run, each as a pair of twins: stock PEFT and ours, with equal weights.

`P` is one adapted Linear, `L` a two-layer Llama, `Trio` three projections of one tensor. lora_B is random, never zero:
at its initial value of zero most checks are vacuous.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from peft_fastlora import FastLoraConfig, fusion_report
from peft_fastlora.call import read_call, read_projection
from peft_fastlora.functions import lora_group

NODE = "LoraGroupFunctionBackward"
QUANTS = {"nf4": ("nf4", False), "nf4-double": ("nf4", True), "fp4": ("fp4", False), "fp4-double": ("fp4", True)}
SHORT = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
L_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Setup:
    """What distinguishes one adapted Linear, and how it is called, from another. The defaults are `P`."""

    base: torch.dtype = torch.float32
    x: torch.dtype = torch.float32
    adapter: torch.dtype = torch.float32
    quant: str | None = None  # a key of QUANTS
    compute: torch.dtype | None = torch.float32  # of a 4-bit base
    bias: bool = True
    lora_bias: bool = False
    autocast: bool = False
    rank: int = 4
    alpha: int = 10

    @property
    def features(self) -> tuple[int, int]:
        """(in, out). bitsandbytes packs blocks of 64."""
        return (24, 16) if self.quant is None else (64, 128)

    def __str__(self) -> str:
        parts = [self.quant or "dense", f"base={SHORT[self.base]}"]
        if self.quant is not None:
            parts.append(f"compute={'none' if self.compute is None else SHORT[self.compute]}")
        parts += [f"x={SHORT[self.x]}", f"adapter={SHORT[self.adapter]}"]
        parts += [] if self.bias else ["nobias"]
        parts += ["autocast"] if self.autocast else []
        return "-".join(parts)


P = Setup()
P64 = Setup(base=torch.float64, x=torch.float64, adapter=torch.float64)
NF4 = Setup(quant="nf4-double")


def dtype_layouts() -> list[Setup]:
    """Behaviour 9: {base dtype or 4-bit} x {dtype of x} x {dtype of the adapters}, without and with autocast."""
    wide, half = torch.float32, (torch.bfloat16, torch.float16)
    inputs = (wide, torch.bfloat16)
    dense = [
        Setup(base=base, x=x, adapter=adapter, autocast=autocast)
        for base in (wide, *half)
        for x in dict.fromkeys((*inputs, base))
        for adapter in dict.fromkeys((*inputs, base))
        for autocast in (False, True)
    ]
    bases = [
        *(("nf4", base, compute) for base in (wide, *half) for compute in inputs),
        ("nf4", torch.bfloat16, None),
        *((quant, torch.bfloat16, compute) for quant in ("nf4-double", "fp4") for compute in inputs),
    ]
    packed = [
        Setup(base=base, quant=quant, compute=compute, x=x, adapter=adapter, autocast=autocast)
        for quant, base, compute in bases
        for x in inputs
        for adapter in inputs
        for autocast in (False, True)
    ]
    return dense + packed


def stock_runs(setup: Setup) -> bool:
    """Whether stock PEFT computes this layout at all: without autocast a dense base takes only its own dtype."""
    return setup.quant is not None or setup.autocast or setup.base is setup.x


class OneProjection(nn.Module):
    """A model with one Linear, `proj`."""

    def __init__(self, proj: nn.Module, in_4bit: bool = False) -> None:
        super().__init__()
        self.proj = proj
        self.is_loaded_in_4bit = in_4bit  # PEFT looks at this of the model

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)


class Trio(nn.Module):
    """Three projections of one tensor, with the shapes of grouped-query attention. Returns (q, k, v)."""

    def __init__(self, q_proj: nn.Module, k_proj: nn.Module, v_proj: nn.Module, in_4bit: bool = False) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = q_proj, k_proj, v_proj
        self.is_loaded_in_4bit = in_4bit

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


def base_linear(setup: Setup, in_features: int, out_features: int) -> nn.Module:
    """An `nn.Linear`, or a bitsandbytes `Linear4bit` with quantised weight (skips the test without bitsandbytes)."""
    dense = nn.Linear(in_features, out_features, bias=setup.bias).to(setup.base)
    return dense if setup.quant is None else quantized(dense, setup.quant, setup.compute)


def quantized(dense: nn.Linear, quant: str, compute: torch.dtype | None, **kwargs: Any) -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes")
    quant_type, double = QUANTS[quant]
    in_features, out_features, bias = dense.in_features, dense.out_features, dense.bias
    options = {"quant_type": quant_type, "compress_statistics": double, **kwargs}
    layer = bnb.nn.Linear4bit(in_features, out_features, bias=bias is not None, compute_dtype=compute, **options)
    layer.weight = bnb.nn.Params4bit(dense.weight.data, requires_grad=False, **options)
    layer.bias = bias
    return layer.to("cpu")


def one_projection(config_class: type[LoraConfig], setup: Setup = P, seed: int = 0, **lora: Any) -> PeftModel:
    """`P` (or what `setup` makes of it) with random adapters; equal for equal seeds whatever the config class."""
    torch.manual_seed(seed)
    base = OneProjection(base_linear(setup, *setup.features), in_4bit=setup.quant is not None)
    return adapted(base, config_class, setup, ["proj"], seed, **lora)


def trio(config_class: type[LoraConfig], setup: Setup = P, seed: int = 0, **lora: Any) -> PeftModel:
    torch.manual_seed(seed)
    in_features, outs = (24, (16, 8, 8)) if setup.quant is None else (64, (128, 64, 64))
    base = Trio(*(base_linear(setup, in_features, out) for out in outs), in_4bit=setup.quant is not None)
    targets = lora.pop("target_modules", ["q_proj", "k_proj", "v_proj"])
    return adapted(base, config_class, setup, targets, seed, **lora)


def llama(config_class: type[LoraConfig], layers: int = 2, seed: int = 0, **lora: Any) -> PeftModel:
    """`L`: a Llama of `layers` layers, hidden 32, 4 heads, 2 kv heads, ffn 48, vocab 64, all seven targets adapted."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,
    )
    targets = lora.pop("target_modules", list(L_TARGETS))
    return adapted(LlamaForCausalLM(config), config_class, P, targets, seed, **lora)


def tokens(count: int = 40, vocab: int = 64, seed: int = 0) -> Tensor:
    """One sequence of token ids for `llama`."""
    return torch.randint(vocab, (1, count), generator=torch.Generator().manual_seed(seed))


def adapted(
    base: nn.Module, config_class: type[LoraConfig], setup: Setup, targets: list[str], seed: int, **lora: Any
) -> PeftModel:
    options = {"r": setup.rank, "lora_alpha": setup.alpha, "target_modules": list(targets), **lora}
    if setup.lora_bias:
        options["lora_bias"] = True
    model = get_peft_model(base, config_class(**options))
    cast_adapters(model, setup.adapter)
    randomize_adapters(model, seed)
    return model


def cast_adapters(model: nn.Module, dtype: torch.dtype) -> None:
    for _, parameter in adapter_parameters(model):
        parameter.data = parameter.data.to(dtype)


def randomize_adapters(model: nn.Module, seed: int) -> None:
    """Random lora_A, lora_B and bias of lora_B, scaled so that the branch is as large as the base result."""
    generator = torch.Generator().manual_seed(seed + 1)
    for name, parameter in adapter_parameters(model):
        std = parameter.shape[-1] ** -0.5 if ".lora_A." in name else 0.5
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * std)


def adapter_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if ".lora_A." in name or ".lora_B." in name]


def twins(setup: Setup = P, seed: int = 0, **lora: Any) -> tuple[PeftModel, PeftModel]:
    """(stock, ours): one adapted Linear each, with equal weights."""
    return one_projection(LoraConfig, setup, seed, **lora), one_projection(FastLoraConfig, setup, seed, **lora)


def layer_of(model: PeftModel, name: str = "proj") -> Any:
    """The adapted layer of a one-projection model."""
    return model.get_submodule(f"base_model.model.{name}")


def as_group(model: PeftModel, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of a `trio` computed by one node, as a block does it."""
    layers = [layer_of(model, name) for name in ("q_proj", "k_proj", "v_proj")]
    return lora_group(x, [read_projection(read_call(layer, x)) for layer in layers])


def taken(y: Tensor) -> bool:
    """Whether the fused path computed this layer output: its autograd node is ours."""
    return type(y.grad_fn).__name__ == NODE


def fused_members(model: nn.Module) -> list[str]:
    """The names of the adapted layers that are reported fused, alone or as a member of a block."""
    return [name for row in fusion_report(model).rows if row.path == "fused" for name in row.members]


def random_input(setup: Setup = P, shape: tuple[int, ...] = (2, 5), seed: int = 0) -> Tensor:
    """A leaf x [*shape, in] that wants a gradient."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(*shape, setup.features[0], generator=generator).to(setup.x).requires_grad_()


def random_cotangent(y: Tensor, seed: int = 0) -> Tensor:
    """dY in y's shape and dtype, the same values for every dtype up to rounding."""
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(2000 + seed)).to(y.dtype)


def autocast(enabled: bool) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


def train_step(
    model: nn.Module, x: Tensor, setup: Setup = P, seed: int = 0, fused: bool | None = None
) -> dict[str, Tensor]:
    """One forward and backward: y, dX and the gradient of every trainable parameter, by name.

    Args:
        fused: also assert that the fused path was (not) taken.
    """
    with autocast(setup.autocast):
        y = model(x)
    if fused is not None:
        assert taken(y) is fused, f"the output comes from {type(y.grad_fn).__name__}"
    y.backward(random_cotangent(y, seed))
    found = {"y": y.detach()} if x.grad is None else {"y": y.detach(), "dX": x.grad}
    return found | gradients(model)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients that the parameters have, taken off them."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for p in model.parameters():
        p.grad = None
    return found
