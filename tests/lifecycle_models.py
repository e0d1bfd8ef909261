"""Small models, twins of stock and fast PEFT models, and comparisons that also say which path ran."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn

from peft_fastlora import FastLoraConfig, FastLoraLayer, fusion_report

FUSED_NODES = {"LoraGroupFunctionBackward", "LoraGatedMLPFunctionBackward"}
NET_NAMES = ("first", "second", "third")
LLAMA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Net(nn.Sequential):
    """Three projections, with and without bias, of different shapes, in a chain: none shares its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 16)
        self.first_act = nn.Tanh()
        self.second = nn.Linear(16, 24, bias=False)
        self.second_act = nn.Tanh()
        self.third = nn.Linear(24, 16)


class Holder(nn.Module):
    """One module under the name `proj`, called with whatever it is called with."""

    def __init__(self, proj: nn.Module) -> None:
        super().__init__()
        self.proj = proj
        self.is_loaded_in_4bit = hasattr(proj, "compute_type_is_set")  # PEFT looks at this of the model

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.proj(x, *args, **kwargs)


def make_net() -> Net:
    torch.manual_seed(0)
    return Net()


def make_holder() -> Holder:
    torch.manual_seed(0)
    return Holder(nn.Linear(24, 16))


def make_llama(**overrides: Any) -> nn.Module:
    """Fixture `L` of the behaviours: a 2-layer Llama-shaped model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 64,
    }
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **overrides}))


def net_input() -> Tensor:
    return torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(1))


def llama_input() -> Tensor:
    return torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(1))


def randomize(model: nn.Module, salt: str = "") -> None:
    """Random values for every adapter parameter, by its name alone: twins get the same. B is never zero."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            generator = torch.Generator().manual_seed(zlib.crc32((name + salt).encode()))
            values = 0.3 * torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(values.abs() if "magnitude" in name else values)
            assert parameter.abs().max() > 0.1


class Twins(NamedTuple):
    """The same model with stock and with fast LoRA layers."""

    stock: Any
    fast: Any

    def do(self, action: Callable[[Any], Any]) -> tuple[Any, Any]:
        """The same action on both, in the same state of the random number generator."""
        torch.manual_seed(11)
        stock = action(self.stock)
        torch.manual_seed(11)
        return stock, action(self.fast)


def make_twins(
    make_base: Callable[[], nn.Module] = make_net, options: dict[str, Any] | None = None, **lora: Any
) -> Twins:
    lora = {"r": 4, "lora_alpha": 10, "target_modules": list(NET_NAMES), **lora}
    stock = get_peft_model(make_base(), LoraConfig(**lora))
    fast = get_peft_model(make_base(), FastLoraConfig(**lora, **(options or {})))
    randomize(stock)
    randomize(fast)
    return Twins(stock, fast)


def lora_modules(model: nn.Module) -> dict[str, LoraLayer]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


@contextlib.contextmanager
def recorded_nodes(model: nn.Module) -> Iterator[dict[str, str | None]]:
    """By layer, which autograd node made its output, or that of the block that runs it according to the report.

    Looks on with hooks on the modules themselves, which leave them fused; one on a layer inside would split a block.
    """
    nodes: dict[str, str | None] = {}

    def record(members: tuple[str, ...]) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            nodes.update(dict.fromkeys(members, None if output.grad_fn is None else output.grad_fn.name()))

        return hook

    blocks = {row.name: row.members for row in fusion_report(model).rows if row.kind == "gated_mlp"}
    covered = {member for members in blocks.values() for member in members}
    watched = {**blocks, **{name: (name,) for name in lora_modules(model) if name not in covered}}
    handles = [model.get_submodule(name).register_forward_hook(record(members)) for name, members in watched.items()]
    try:
        yield nodes
    finally:
        for handle in handles:
            handle.remove()


class Run(NamedTuple):
    output: Tensor
    gradients: dict[str, Tensor | None]
    nodes: dict[str, str | None]

    @property
    def fused(self) -> set[str]:
        """Last parts of the names of the layers that were fused."""
        return {name.rpartition(".")[2] for name, node in self.nodes.items() if node in FUSED_NODES}

    @property
    def stock(self) -> set[str]:
        return {name.rpartition(".")[2] for name, node in self.nodes.items() if node not in FUSED_NODES}


def run(model: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Run:
    """Forward, and backward of a random cotangent; the gradient of x is among the gradients where x has one."""
    model.zero_grad()
    differentiable = x.dtype.is_floating_point or x.dtype.is_complex
    leaf = x.detach().clone().requires_grad_(differentiable)
    with recorded_nodes(model) as nodes:
        output = model(leaf, *args, **kwargs)
    output = getattr(output, "logits", output)
    if output.requires_grad:
        generator = torch.Generator().manual_seed(2)
        output.backward(torch.randn(output.shape, dtype=output.dtype, generator=generator))
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    if differentiable:
        gradients["the input"] = leaf.grad
    return Run(output.detach(), gradients, dict(nodes))


LAYER_ULPS = 64  # fused and stock add the same at most 64 terms in another order: in practice a few roundings
MODEL_ULPS = 1024  # a whole Llama: two layers, with softmax and norms, amplify what the layers before them rounded


def assert_close(actual: Tensor, expected: Tensor, what: str = "", ulps: float = LAYER_ULPS) -> None:
    """Equal up to `ulps` roundings of the largest element. A forgotten term or scaling is off by 1e-3 and more."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, what
    bound = ulps * torch.finfo(expected.dtype).eps * float(expected.detach().abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(actual, expected, rtol=0, atol=bound, msg=lambda text: f"{what}: {text}")


def assert_equal(actual: Tensor, expected: Tensor, what: str = "") -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, msg=lambda text: f"{what}: {text}")


def assert_runs_agree(fast: Run, stock: Run, ulps: float) -> None:
    assert_close(fast.output, stock.output, "output", ulps)
    assert fast.gradients.keys() == stock.gradients.keys()
    for name, expected in stock.gradients.items():
        actual = fast.gradients[name]
        assert (actual is None) == (expected is None), f"gradient of {name}: {actual} instead of {expected}"
        if expected is not None:
            assert_close(actual, expected, f"gradient of {name}", ulps)


def assert_twins_agree(
    twins: Twins, x: Tensor, fused: Iterable[str], *args: Any, exact: bool = False, **kwargs: Any
) -> tuple[Run, Run]:
    """Outputs and all gradients agree, the fast model fused exactly the layers `fused`, and the stock twin none.

    Token ids as x mean a whole Llama.
    """
    stock, fast = twins.do(lambda model: run(model, x, *args, **kwargs))
    assert stock.fused == set()
    assert fast.fused == set(fused), fast.nodes
    assert fast.fused & fast.stock == set(), fast.nodes
    ulps = 0 if exact else LAYER_ULPS if x.dtype.is_floating_point or x.dtype.is_complex else MODEL_ULPS
    assert_runs_agree(fast, stock, ulps)
    return stock, fast


def module_dicts_without_ours(model: nn.Module) -> None:
    """No module of the model is of a class of ours or holds anything of ours."""
    for name, module in model.named_modules():
        assert not any(cls.__module__.startswith("peft_fastlora") for cls in type(module).__mro__), name
        assert not [key for key in module.__dict__ if "fast" in key], name
        assert not [
            key for key, value in module.__dict__.items() if type(value).__module__.startswith("peft_fastlora")
        ], name


def nf4_holder() -> Holder:
    """An NF4 `Linear4bit` 64 -> 64 under the name `proj`; skips the test where bitsandbytes is absent."""
    bnb = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    dense = nn.Linear(64, 64)
    kind = {"quant_type": "nf4", "compress_statistics": False}
    layer = bnb.nn.Linear4bit(64, 64, compute_dtype=torch.float32, **kind)
    layer.weight = bnb.nn.Params4bit(dense.weight.data, requires_grad=False, **kind)
    layer.bias.data.copy_(dense.bias.data)
    return Holder(layer.to("cpu"))


def is_fast(model: nn.Module) -> bool:
    """Whether all LoRA layers of the model are of a fast class."""
    layers = lora_modules(model).values()
    assert layers, "no LoRA layer"
    return all(isinstance(layer, FastLoraLayer) for layer in layers)


def stock_classes(model: PeftModel) -> set[type]:
    return {type(layer) for layer in lora_modules(model).values()}
