"""Backward reads its saved tensors and nothing else.

Everything a layer has read in forward is overwritten before backward runs, as happens when weights are streamed
through buffers or offloaded. With originals poisoned and saved tensors cloned, no bit of a gradient may change.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from models import (
    NF4,
    P64,
    QUANTS,
    P,
    Setup,
    adapted,
    autocast,
    gradients,
    layer_of,
    llama,
    one_projection,
    quantized,
    random_cotangent,
    random_input,
    taken,
    tokens,
    train_step,
)
from oracle import assert_equal
from peft import LoraConfig, PeftModel
from poison import cloned_saves, originals, poisoned
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from peft_fastlora import FastLoraConfig

BF16 = torch.bfloat16
SETUPS = [
    P,
    P64,
    Setup(base=BF16, x=BF16),
    Setup(base=BF16, x=BF16, adapter=BF16),
    Setup(autocast=True),
    Setup(lora_bias=True),
    *(Setup(quant=quant) for quant in QUANTS),
    Setup(quant="nf4-double", base=BF16, compute=BF16, adapter=BF16),
    Setup(quant="nf4", base=BF16, compute=BF16, autocast=True),
]


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_backward_reads_only_saved_tensors(setup):
    model = one_projection(FastLoraConfig, setup)
    expected = train_step(model, random_input(setup), setup, fused=True)
    assert all(gradient.isfinite().all() for gradient in expected.values())

    x = random_input(setup)
    with cloned_saves(), autocast(setup.autocast):
        y = model(x)
    assert taken(y)
    result = y.detach().clone()
    with poisoned([*originals(layer_of(model)), x]):
        y.backward(random_cotangent(y))
    assert_equal({"y": result, "dX": x.grad} | gradients(model), expected)


@pytest.mark.parametrize("setup", [P, *(Setup(quant=quant) for quant in QUANTS)], ids=str)
def test_every_poisoned_tensor_matters(setup):
    """The instrument: poisoning any one of the originals changes the output, so a backward that read it would show."""
    model = one_projection(FastLoraConfig, setup)
    expected = model(random_input(setup)).detach()
    watched = originals(layer_of(model))
    assert len(watched) == {None: 4, "nf4": 6, "fp4": 6, "nf4-double": 9, "fp4-double": 9}[setup.quant]
    # the 4-bit kernels know their code book by heart
    code = getattr(getattr(layer_of(model).base_layer.weight, "quant_state", None), "code", None)
    for tensor in watched:
        with poisoned([tensor]):
            assert torch.equal(model(random_input(setup)).detach(), expected) is (tensor is code)
    assert torch.equal(model(random_input(setup)).detach(), expected)  # and all of it was undone


@pytest.mark.parametrize("recompute", [False, True], ids=["offloaded", "recomputed"])
def test_weights_of_4bit_layers_may_share_a_buffer_that_is_refilled(recompute):
    """Two NF4 layers in one buffer. By the time of backward it holds the second, or is refilled for recomputation."""
    torch.manual_seed(0)
    model = adapted(TwoPacked(), FastLoraConfig, NF4, ["first", "second"], seed=0)
    expected = _two_packed_step(model)
    two = model.base_model.model
    two.recompute = recompute
    two.share_one_buffer()
    with nullcontext() if recompute else cloned_saves():
        assert_equal(_two_packed_step(model), expected)
    assert two.fills == ([0, 1, 1, 0] if recompute else [0, 1])


class TwoPacked(nn.Module):
    is_loaded_in_4bit = True

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (quantized(nn.Linear(64, 64), "nf4-double", torch.float32) for _ in range(2))
        self.recompute = False
        self.stored: list[list[Tensor]] = []
        self.fills: list[int] = []

    def share_one_buffer(self) -> None:
        self.stored = [[t.data.clone() for t in self._packed(i)] for i in range(2)]
        for place, buffer in zip(self._packed(1), self._packed(0), strict=True):
            place.data = buffer.data

    def _packed(self, i: int) -> list[Tensor]:
        weight = (self.first, self.second)[i].base_layer.weight
        state = weight.quant_state
        return [weight, state.absmax, state.offset, state.state2.absmax]

    def _call(self, i: int, x: Tensor) -> Tensor:
        if self.stored:
            self.fills.append(i)
            for place, content in zip(self._packed(i), self.stored[i], strict=True):
                place.data.copy_(content)
        y = (self.first, self.second)[i](x)
        assert taken(y)
        return y.tanh()

    def forward(self, x: Tensor) -> Tensor:
        for i in range(2):
            x = checkpoint(self._call, i, x, use_reentrant=False) if self.recompute else self._call(i, x)
        return x


def _two_packed_step(model: PeftModel) -> dict[str, Tensor]:
    x = random_input(NF4)
    y = model(x)
    y.backward(random_cotangent(y))
    return {"y": y.detach(), "dX": x.grad} | gradients(model)


# -- a whole model whose layers are streamed through two buffers ------------------------------------------------------


class Streamed:
    """Decoder layers whose base weights live in two buffers, refilled before each layer's forward and recomputation.

    What it sees of the adapted layers' autograd nodes is in `nodes`.
    """

    def __init__(self, model: PeftModel) -> None:
        self.nodes: dict[str, set[bool]] = {}
        self.fills: list[int] = []
        layers = model.base_model.model.model.layers
        buffers = [[torch.empty_like(p) for p in self._base_weights(layers[i])] for i in range(2)]
        for i, layer in enumerate(layers):
            stored = [p.data.clone() for p in self._base_weights(layer)]
            buffer = buffers[i % 2]
            for p, place in zip(self._base_weights(layer), buffer, strict=True):
                p.data = place
            # the first module that a layer calls: hooks of the layer itself do not run again at recomputation
            layer.input_layernorm.register_forward_pre_hook(
                lambda *_, i=i, buffer=buffer, stored=stored: self._fill(i, buffer, stored)
            )
            for name, module in layer.named_modules():
                if hasattr(module, "base_layer"):
                    module.register_forward_hook(lambda *args, name=f"{i}.{name}": self._see(name, args[-1]))

    @staticmethod
    def _base_weights(layer: nn.Module) -> list[nn.Parameter]:
        return [p for name, p in layer.named_parameters() if "base_layer" in name]

    def _fill(self, i: int, buffer: list[Tensor], stored: list[Tensor]) -> None:
        self.fills.append(i)
        for place, content in zip(buffer, stored, strict=True):
            place.data.copy_(content)

    def _see(self, name: str, y: Tensor) -> None:
        if y.requires_grad:
            self.nodes.setdefault(name, set()).add(taken(y))


def _loss_and_gradients(model: PeftModel) -> dict[str, Tensor]:
    loss = model(tokens(), labels=tokens()).loss
    loss.backward()
    return {"loss": loss.detach()} | gradients(model)


def _four_layers(config_class: type[LoraConfig], checkpointing: bool | None) -> PeftModel:
    model = llama(config_class, layers=4).double().train()
    model.enable_input_require_grads()
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
    return model


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_streamed_layers_with_recomputation_equal_the_resident_stock_model(reentrant):
    """Behaviour 18."""
    resident = _loss_and_gradients(_four_layers(LoraConfig, None))
    model = _four_layers(FastLoraConfig, reentrant)
    streamed = Streamed(model)
    found = _loss_and_gradients(model)
    assert streamed.fills == [0, 1, 2, 3, 3, 2, 1, 0]
    _assert_streamed_run_is_right(streamed, found, resident)


def test_streamed_layers_with_offloaded_saves_equal_the_resident_stock_model():
    """Behaviour 18 without recomputation: by the time of backward both buffers hold other layers."""
    resident = _loss_and_gradients(_four_layers(LoraConfig, None))
    model = _four_layers(FastLoraConfig, None)
    streamed = Streamed(model)
    with cloned_saves():
        found = _loss_and_gradients(model)
    assert streamed.fills == [0, 1, 2, 3]
    _assert_streamed_run_is_right(streamed, found, resident)


def _assert_streamed_run_is_right(streamed: Streamed, found: dict[str, Tensor], resident: dict[str, Tensor]) -> None:
    assert len(streamed.nodes) == 4 * 7
    assert all(seen == {True} for seen in streamed.nodes.values())
    assert len(resident) == 1 + 4 * 7 * 2
    assert found.keys() == resident.keys()
    for name in resident:
        torch.testing.assert_close(found[name], resident[name], rtol=1e-9, atol=1e-12)


def test_streaming_without_recomputation_or_offloading_breaks_gradients():
    """The instrument: the refilled buffers do reach a backward that is not protected from them."""
    resident = _loss_and_gradients(_four_layers(LoraConfig, None))
    model = _four_layers(FastLoraConfig, None)
    Streamed(model)
    found = _loss_and_gradients(model)
    assert torch.allclose(found["loss"], resident["loss"])
    first = next(name for name in resident if "layers.0" in name)
    assert not torch.allclose(found[first], resident[first])
