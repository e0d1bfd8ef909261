"""`Owner`: a module with three projections whose forward is a function that the test chooses; twins of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from models import NODE, P, Setup, adapted, autocast, base_linear, gradients, random_cotangent
from oracle import assert_near_exact
from peft import LoraConfig, PeftModel
from torch import Tensor, nn

from peft_fastlora import FastLoraConfig, fusion_report

MEMBERS = ("q_proj", "k_proj", "v_proj")
Outputs = dict[str, Tensor]
Script = Callable[..., Outputs]

TOGETHER = {MEMBERS}  # what `shared` says if all three come from one node
ALONE = {(name,) for name in MEMBERS}  # and if each has its own


def together(owner: Any, x: Tensor) -> Outputs:
    """q, k and v read one tensor, as in self-attention."""
    return {name: getattr(owner, name)(x) for name in MEMBERS}


def cross(owner: Any, x: Tensor, context: Tensor) -> Outputs:
    """k and v read another tensor than q, as in cross-attention."""
    return {"q_proj": owner.q_proj(x), "k_proj": owner.k_proj(context), "v_proj": owner.v_proj(context)}


class Owner(nn.Module):
    """Three projections, called by `script`. `log` says for each forward that came to its end which node made what."""

    def __init__(self, q_proj: nn.Module, k_proj: nn.Module, v_proj: nn.Module, script: Script = together) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = q_proj, k_proj, v_proj
        self.script = script
        self.log: list[set[tuple[str, ...]]] = []
        self.is_loaded_in_4bit = any(hasattr(p, "compute_type_is_set") for p in self.children())  # PEFT looks at this

    def forward(self, *args: Any) -> Outputs:
        outputs = self.script(self, *args)
        self.log.append(shared(outputs))
        return outputs


def shared(outputs: Outputs) -> set[tuple[str, ...]]:
    """The outputs that our nodes made, those of one node in one tuple. Stock's, and what has no node, are left out."""
    nodes: dict[Any, list[str]] = {}
    for name, y in outputs.items():
        if y.grad_fn is not None and y.grad_fn.name() == NODE:
            nodes.setdefault(y.grad_fn, []).append(name)
    return {tuple(names) for names in nodes.values()}


def make_owner(
    config_class: type[LoraConfig], setup: Setup = P, script: Script = together, bases: Any = None, **lora: Any
) -> PeftModel:
    """An `Owner` with random adapters on all three projections; equal for equal arguments whatever the config class.

    Args:
        bases: makes the three base layers, if they are not as `setup` has them.
    """
    torch.manual_seed(0)
    in_features, outs = (24, (16, 8, 8)) if setup.quant is None else (64, (128, 64, 64))
    layers = [base_linear(setup, in_features, out) for out in outs] if bases is None else bases()
    targets = lora.pop("target_modules", list(MEMBERS))
    return adapted(Owner(*layers, script=script), config_class, setup, targets, 0, **lora)


def owner_twins(setup: Setup = P, script: Script = together, bases: Any = None, **lora: Any) -> tuple[Any, Any]:
    """(stock, ours): an owner each, with equal weights."""
    stock = make_owner(LoraConfig, setup, script, bases, **lora)
    return stock, make_owner(FastLoraConfig, setup, script, bases, **lora)


def owner_of(model: PeftModel) -> Any:
    return model.base_model.model


def set_script(script: Script, *models: PeftModel) -> None:
    for model in models:
        owner_of(model).script = script


def owner_input(setup: Setup = P, shape: Sequence[int] = (2, 5), seed: int = 0) -> Tensor:
    """A leaf x [*shape, in] that wants a gradient."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(*shape, setup.features[0], generator=generator).to(setup.x).requires_grad_()


def backward(outputs: Outputs, seed: int = 0, **kwargs: Any) -> None:
    """Backward with a random cotangent for each output that has a graph."""
    used = [(y, random_cotangent(y, seed + i)) for i, y in enumerate(outputs.values()) if y.requires_grad]
    torch.autograd.backward([y for y, _ in used], [grad for _, grad in used], **kwargs)


def owner_step(model: PeftModel, *inputs: Tensor, autocast_on: bool = False, seed: int = 0) -> dict[str, Tensor]:
    """One forward and backward: the outputs, and the gradient of every input and parameter, by name."""
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    with autocast(autocast_on):
        outputs = model(*leaves)
    backward(outputs, seed)
    found = {name: y.detach() for name, y in outputs.items()}
    found |= {f"dX{i}": x.grad for i, x in enumerate(leaves) if x.grad is not None}
    return found | gradients(model)


def assert_agree(stock: PeftModel, ours: PeftModel, *inputs: Tensor, nodes: set[tuple[str, ...]]) -> dict[str, Tensor]:
    """A step of both gives the same up to rounding, and the nodes of ours are these. Returns ours."""
    expected = owner_step(stock, *inputs)
    found = owner_step(ours, *inputs)
    assert owner_of(stock).log[-1] == set()
    assert owner_of(ours).log[-1] == nodes
    assert_near_exact(found, expected)
    return found


def learn(ours: PeftModel, *inputs: Tensor, nodes: set[tuple[str, ...]] = TOGETHER) -> None:
    """One forward without consequences, which shows the owner's pattern, and one that must use it."""
    for _ in range(2):
        ours(*inputs)
    assert owner_of(ours).log[-1] == nodes
    owner_of(ours).log.clear()


def announced(model: nn.Module) -> dict[str, str]:
    """By last part of a layer's name: the kind and path of the report's row that covers it."""
    rows = fusion_report(model).rows
    return {name.rpartition(".")[2]: f"{row.kind}/{row.path}" for row in rows for name in row.members}


def reasons(model: nn.Module) -> dict[str, str | None]:
    rows = fusion_report(model).rows
    return {name.rpartition(".")[2]: row.reason for row in rows for name in row.members}


@contextmanager
def calling(target: Any, name: str, replacement: Any) -> Any:
    """Inside, an attribute of an object is another."""
    original = getattr(target, name)
    setattr(target, name, replacement)
    try:
        yield
    finally:
        setattr(target, name, original)
