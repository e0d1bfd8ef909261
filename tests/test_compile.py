"""`torch.compile`: one graph, trained to the numbers of stock in eager mode, and no compilation after the warm-up.

The backend is `aot_eager`: Dynamo and AOTAutograd trace forward and backward as for any other, and what they made runs
without code generation. Groups run as single nodes while compiling.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models import P64, adapted, gradients, llama, tokens
from oracle import error
from peft import LoraConfig
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters
from torch.nn import functional as F

from peft_fastlora import FastLoraConfig, fusion_report

# Ours and stock add up in another order, and softmax, norms and steps of training amplify that: 2e-5 measured in
# float32, 1e-12 in float64. A wrong term is off by 1e-2.
BOUND = {torch.float32: 1e-4, torch.float64: 1e-9}
LENGTHS = (12, 7, 9, 9, 12, 20)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(self.q_proj(x) @ self.k_proj(x).mT / 4, -1) @ self.v_proj(x)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """What a decoder layer has of ours: projections of one tensor and a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x + self.attention(x), (16,))
        return F.layer_norm(x + self.mlp(x), (16,))


TARGETS = ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]


def _layer(config_class: type[LoraConfig]) -> nn.Module:
    torch.manual_seed(0)
    return adapted(Layer().double(), config_class, P64, TARGETS, 0)


class RecordingBackend:
    """`aot_eager`, which remembers the operations of every graph that it got."""

    def __init__(self) -> None:
        self.graphs: list[list[str]] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.graphs.append([str(node.target) for node in graph.graph.nodes])
        return lookup_backend("aot_eager")(graph, inputs)


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    errors = {name: error(found[name], expected[name]) for name in expected}
    assert {name: e for name, e in errors.items() if not e < BOUND[found[name].dtype]} == {}


def _train(model: nn.Module, calls: list[Any]) -> list[dict[str, Tensor]]:
    """Steps of SGD, each with a length and a way to call the model: output, dX and gradients by step."""
    optimizer = torch.optim.SGD(_trainable(model), lr=1e-3)
    steps = []
    for length, call in zip(LENGTHS, calls, strict=True):
        x = torch.randn(2, length, 16, generator=torch.Generator().manual_seed(length)).double().requires_grad_()
        y = call(x)
        (y * x.detach()).sum().backward()
        optimizer.step()
        steps.append({"y": y.detach(), "dX": x.grad} | gradients(model))
    return steps


def test_dynamic_lengths_train_to_stocks_numbers_in_one_graph() -> None:
    """Eager steps between compiled ones learn and use the group of q and v, and change nothing for the others."""
    stock, ours = _layer(LoraConfig), _layer(FastLoraConfig)
    backend = RecordingBackend()
    compiled = torch.compile(ours, backend=backend, fullgraph=True, dynamic=True)
    found = _train(ours, [compiled, compiled, ours, compiled, ours, compiled])
    for ours_step, stock_step in zip(found, _train(stock, [stock] * 6), strict=True):
        assert len(ours_step) == 2 + 10
        _assert_close(ours_step, stock_step)
    assert fusion_report(ours).counts == {("shared_input", "fused"): 1, ("gated_mlp", "fused"): 1}
    assert len(backend.graphs) == 1  # compiled in the first step, never again
    assert not counters["graph_break"]
    # the projections one by one, and the MLP block
    assert sum("autograd_function_apply" in target for target in backend.graphs[0]) == 3


def test_a_new_scaling_is_seen() -> None:
    stock, ours = _layer(LoraConfig), _layer(FastLoraConfig)
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    with torch.no_grad():
        before = compiled(x)
        _assert_close({"y": before}, {"y": stock(x)})
        for model in (stock, ours):
            model.base_model.model.attention.v_proj.set_scale("default", 3)
        after = compiled(x)
        _assert_close({"y": after}, {"y": stock(x)})
    assert error(before, after) > 0.01


def test_two_layer_llama_is_one_graph() -> None:
    stock, ours = llama(LoraConfig), llama(FastLoraConfig)
    backend = RecordingBackend()
    compiled = torch.compile(ours, backend=backend, fullgraph=True)
    optimizers = [torch.optim.SGD(_trainable(model), lr=0.01) for model in (stock, ours)]
    for step in range(3):
        found = []
        for model, call, optimizer in zip((stock, ours), (stock, compiled), optimizers, strict=True):
            loss = call(tokens(seed=step), labels=tokens(seed=step)).loss
            loss.backward()
            optimizer.step()
            found.append({"loss": loss.detach()} | gradients(model))
        assert len(found[1]) == 1 + 28
        _assert_close(found[1], found[0])
    assert len(backend.graphs) == 1
    assert not counters["graph_break"]
    assert sum("autograd_function_apply" in target for target in backend.graphs[0]) == 2 * (4 + 1)
