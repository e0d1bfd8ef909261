"""`torch.compile`: one graph, trained to the numbers of stock in eager mode, and no compilation after the warm-up.

The backend is `aot_eager`: Dynamo and AOTAutograd trace forward and backward as for any other, and what they made runs
without code generation. Groups run as single nodes while compiling.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from models import P, adapted, gradients, llama, tokens
from oracle import error
from owners import announced
from peft import LoraConfig
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from peft_fastlora import FastLoraConfig, fusion_report

# Both are float32 and add up in another order; measured 2e-5 after norms and softmax. A wrong term is off by 1e-2.
BOUND = 1e-4
LENGTHS = (12, 7, 9, 12, 20)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    logging.disable()  # pytest's log capture makes Dynamo format thousands of structured records
    yield
    logging.disable(logging.NOTSET)
    torch._dynamo.reset()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(16, 16), nn.Linear(16, 16)
        self.k_proj, self.v_proj = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.o_proj(F.softmax(q @ k.mT, -1) @ v)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """What a decoder layer has of ours: attention and a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def _layer(config_class: type[LoraConfig]) -> nn.Module:
    torch.manual_seed(0)
    return adapted(Layer(), config_class, P, TARGETS, 0)


def _input(length: int) -> Tensor:
    return torch.randn(2, length, 16, generator=torch.Generator().manual_seed(length)).requires_grad_()


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert {name for name in expected if not error(found[name], expected[name]) < BOUND} == set()


def _compiled_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def _train(model: nn.Module, call: nn.Module, lengths: tuple[int, ...]) -> list[dict[str, Tensor]]:
    """Steps of SGD: by step, output, dX and gradients; and how many graphs had been compiled by then."""
    optimizer = torch.optim.SGD(_trainable(model), lr=1e-3)
    steps = []
    for length in lengths:
        x = _input(length)
        y = call(x)
        (y**2).mean().backward()
        optimizer.step()
        steps.append({"y": y.detach(), "dX": x.grad} | gradients(model))
        steps[-1]["graphs"] = torch.tensor(float(_compiled_graphs()))
    return steps


def test_dynamic_lengths_train_to_stocks_numbers_in_one_graph() -> None:
    stock, ours = _layer(LoraConfig), _layer(FastLoraConfig)
    assert fusion_report(ours).counts == {("linear", "fused"): 4, ("gated_mlp", "fused"): 1}
    expected = _train(stock, stock, LENGTHS)
    found = _train(ours, torch.compile(ours, backend="aot_eager", fullgraph=True, dynamic=True), LENGTHS)
    for ours_step, stock_step in zip(found, expected, strict=True):
        assert stock_step.pop("graphs") == 0
        assert ours_step.pop("graphs") == 1  # compiled in the first step, never again
        assert len(ours_step) == 2 + 14
        _assert_close(ours_step, stock_step)
    assert not counters["graph_break"]


def test_the_nodes_are_in_the_graph() -> None:
    """What is compiled is our arithmetic: 7 products for the projections of attention and MLP fewer, none with x^T."""
    graphs = {}
    for config_class in (LoraConfig, FastLoraConfig):
        model = _layer(config_class)
        recorded: list[list[str]] = []

        def backend(graph: torch.fx.GraphModule, inputs: list[Tensor], recorded=recorded) -> torch.fx.GraphModule:
            recorded.append([str(node.target) for node in graph.graph.nodes])
            return graph

        torch._dynamo.reset()
        torch.compile(model, backend=backend, fullgraph=True)(_input(5))
        graphs[config_class] = recorded
    ours, stock = graphs[FastLoraConfig], graphs[LoraConfig]
    assert len(ours) == len(stock) == 1
    assert sum("autograd_function_apply" in target for target in ours[0]) == 5  # q, k, v, o and the MLP block
    assert not any("autograd_function_apply" in target for target in stock[0])


def test_eager_and_compiled_calls_alternate() -> None:
    """The groups of eager mode are left as they are, and are used again in eager mode."""
    stock, ours = _layer(LoraConfig), _layer(FastLoraConfig)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for call in (compiled, ours, compiled, ours, compiled):
        found, expected = [], []
        for model, run, steps in ((stock, stock, expected), (ours, call, found)):
            x = _input(9)
            y = run(x)
            (y**2).mean().backward()
            steps.append({"y": y.detach(), "dX": x.grad} | gradients(model))
        _assert_close(found[0], expected[0])
    assert _compiled_graphs() == 1
    group = dict.fromkeys(["q_proj", "k_proj", "v_proj"], "shared_input/fused")
    assert announced(ours).items() >= group.items()


def test_scaling_and_active_adapters_are_read_again() -> None:
    """A change is a recompilation or a new value, never the old result."""
    stock, ours = _layer(LoraConfig), _layer(FastLoraConfig)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    x = _input(9)
    _assert_close({"y": compiled(x)}, {"y": stock(x)})
    for model in (stock, ours):
        model.base_model.model.attention.q_proj.set_scale("default", 3)
    _assert_close({"y": compiled(x)}, {"y": stock(x)})
    with stock.disable_adapter(), ours.disable_adapter():
        _assert_close({"y": compiled(x)}, {"y": stock(x)})
    _assert_close({"y": compiled(x)}, {"y": stock(x)})


def test_two_layer_llama_is_one_graph() -> None:
    stock, ours = llama(LoraConfig), llama(FastLoraConfig)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    optimizers = [torch.optim.SGD(_trainable(model), lr=1e-3) for model in (stock, ours)]
    for step in range(3):
        found = []
        for model, call, optimizer in zip((stock, ours), (stock, compiled), optimizers, strict=True):
            loss = call(tokens(seed=step), labels=tokens(seed=step)).loss
            loss.backward()
            optimizer.step()
            found.append({"loss": loss.detach()} | gradients(model))
        assert len(found[1]) == 1 + 28
        _assert_close(found[1], found[0])
        assert _compiled_graphs() == 1
    assert not counters["graph_break"]
