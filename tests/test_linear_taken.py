"""Every supported cell runs on the fused path, on fixtures for which that means something."""

from __future__ import annotations

import pytest
import torch
from models import (
    P64,
    QUANTS,
    SHORT,
    P,
    Setup,
    fused_members,
    layer_of,
    llama,
    one_projection,
    random_cotangent,
    random_input,
    taken,
    tokens,
    train_step,
    trio,
    twins,
)
from oracle import assert_equal, error, reference_step
from peft import LoraConfig
from torch import nn

from peft_fastlora import FastLoraConfig

# Unit roundoff; a gradient passes a handful of roundings and these check for wrong terms, not for the last bit.
LOOSE = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2e-2}

DENSE = [(dtype, None) for dtype in (torch.float32, torch.bfloat16, torch.float64)]
PACKED = [(dtype, quant) for dtype in (torch.float32, torch.bfloat16) for quant in QUANTS]
BASES = [pytest.param(dtype, quant, id=f"{quant or 'dense'}-{SHORT[dtype]}") for dtype, quant in DENSE + PACKED]
MEMBERS = {
    "all": {},
    "q": {"target_modules": ["q_proj"]},
    "k": {"target_modules": ["k_proj"]},
    "v": {"target_modules": ["v_proj"]},
    "q,k": {"target_modules": ["q_proj", "k_proj"]},
    "q,v": {"target_modules": ["q_proj", "v_proj"]},
    "k,v": {"target_modules": ["k_proj", "v_proj"]},
    "unequal ranks": {"rank_pattern": {"k_proj": 2, "v_proj": 7}, "alpha_pattern": {"v_proj": 3}},
}


@pytest.mark.parametrize("shape", [(10,), (2, 5)], ids=["2-D", "3-D"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "nobias"])
@pytest.mark.parametrize("dtype, quant", BASES)
def test_every_supported_layer_is_taken_and_right(dtype, quant, bias, shape):
    """Behaviour 1, one projection."""
    setup = Setup(base=dtype, x=dtype, adapter=dtype, quant=quant, compute=dtype, bias=bias)
    model = one_projection(FastLoraConfig, setup)
    x = random_input(setup, shape)
    found = train_step(model, x, setup, fused=True)
    expected = reference_step(model, x, random_cotangent(found["y"]))
    assert found.keys() == expected.keys()
    assert max(error(found[name], expected[name]) for name in expected) < LOOSE[dtype]


@pytest.mark.parametrize("members", MEMBERS)
@pytest.mark.parametrize("dtype, quant", BASES)
def test_every_subset_of_adapted_layers_is_taken_and_equals_stock(dtype, quant, members):
    """Behaviour 1, partial subsets and unequal ranks."""
    setup = Setup(base=dtype, x=dtype, adapter=dtype, quant=quant, compute=dtype)
    ours = trio(FastLoraConfig, setup, **MEMBERS[members])
    stock = trio(LoraConfig, setup, **MEMBERS[members])
    x = random_input(setup)
    adapted = MEMBERS[members].get("target_modules", ["q_proj", "k_proj", "v_proj"])
    for name, y, expected in zip(("q_proj", "k_proj", "v_proj"), ours(x), stock(x), strict=True):
        assert taken(y) is (name in adapted)
        assert error(y, expected) < LOOSE[dtype]
    assert [name.rpartition(".")[2] for name in fused_members(ours)] == adapted


def test_every_adapted_layer_of_a_llama_is_taken():
    nodes = {}
    model = llama(FastLoraConfig)
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_hook(lambda _m, _a, y, name=name: nodes.__setitem__(name, taken(y)))
    model(tokens())
    assert len(nodes) == 14
    assert all(nodes.values())
    assert len(fused_members(model)) == 14


def test_a_llama_trains_to_stock_gradients():
    losses, gradients = [], []
    for config_class in (LoraConfig, FastLoraConfig):
        model = llama(config_class).double()
        loss = model(tokens(), labels=tokens()).loss
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    stock, ours = gradients
    assert losses[1] == pytest.approx(losses[0], rel=1e-14)
    assert len(stock) == 28
    assert stock.keys() == ours.keys()
    # float64 leaves room for what attention and cross entropy amplify, and none for a wrong term
    assert max(error(ours[name], stock[name]) for name in stock) < 1e-12


def test_taken_tells_the_paths_apart():
    stock, ours = twins()
    x = random_input()
    assert taken(ours(x))
    assert not taken(stock(x))
    with ours.disable_adapter():
        assert not taken(ours(x))


@pytest.mark.parametrize("build", [one_projection, trio, llama])
def test_fixtures_have_a_lora_B_that_matters(build):
    """Behaviour 2: with lora_B at its initial zero most checks would be vacuous."""
    for name, parameter in build(FastLoraConfig).named_parameters():
        if ".lora_B." in name or ".lora_A." in name:
            assert parameter.abs().max() > 0.1, name


def test_fixture_twins_start_equal():
    stock, ours = twins()
    assert_equal(dict(ours.state_dict()), dict(stock.state_dict()))


def test_with_lora_B_zero_only_lora_B_gets_a_gradient():
    """Behaviour 2, the initial state of every training run."""
    model = one_projection(FastLoraConfig)
    layer = layer_of(model)
    nn.init.zeros_(layer.lora_B["default"].weight)
    found = train_step(model, random_input(), fused=True)
    assert torch.count_nonzero(found["base_model.model.proj.lora_A.default.weight"]) == 0
    assert torch.count_nonzero(found["base_model.model.proj.lora_B.default.weight"]) > 0
    assert torch.count_nonzero(found["dX"]) > 0


@pytest.mark.parametrize("setup", [P, P64], ids=str)
@pytest.mark.parametrize("active", [["default"], ["other"], ["default", "other"], ["other", "default"]], ids=str)
def test_several_adapters_of_different_rank_and_scaling(setup, active):
    """Behaviour 5 on one projection: summed over all active ones, never cut to the first."""
    model = one_projection(FastLoraConfig, setup)
    model.add_adapter("other", FastLoraConfig(r=7, lora_alpha=3, target_modules=["proj"]))
    for name, p in model.named_parameters():
        if "other" in name:
            p.data = torch.randn_like(p).to(setup.adapter)
    model.base_model.set_adapter(active)
    found = train_step(model, x := random_input(setup), setup, fused=True)
    expected = reference_step(model, x, random_cotangent(found["y"]))
    assert len(expected) == 2 + 2 * len(active)
    assert found.keys() == expected.keys()
    assert max(error(found[name], expected[name]) for name in expected) < LOOSE[setup.base]


def test_scaling_is_read_at_each_call():
    """Behaviour 6: nothing about scaling is remembered."""
    model = one_projection(FastLoraConfig, P64)
    layer = layer_of(model)
    for scaling in (2.5, 0.5, 4.0):
        layer.scaling["default"] = scaling
        found = train_step(model, x := random_input(P64), P64, fused=True)
        expected = reference_step(model, x, random_cotangent(found["y"]))
        assert max(error(found[name], expected[name]) for name in expected) < LOOSE[torch.float64]


def test_scaling_may_be_a_tensor():
    """Compiled hotswap keeps scalings as 0-dim tensors."""
    number, tensor = (one_projection(FastLoraConfig, P64) for _ in range(2))
    layer_of(tensor).scaling["default"] = torch.tensor(layer_of(number).scaling["default"], dtype=torch.float64)
    expected = train_step(number, random_input(P64), P64, fused=True)
    assert_equal(train_step(tensor, random_input(P64), P64, fused=True), expected)


def test_a_changed_scaling_tensor_does_not_reach_the_backward_of_an_earlier_forward():
    """Like any saved tensor: changing it in place between forward and backward is an error, not a wrong gradient."""
    model = one_projection(FastLoraConfig, P64)
    layer_of(model).scaling["default"] = scale = torch.tensor(2.5, dtype=torch.float64)
    y = model(random_input(P64))
    scale.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("trainable", [True, False])
def test_base_bias_gets_its_gradient_when_it_is_trained(trainable):
    model = one_projection(FastLoraConfig, P64)
    layer_of(model).base_layer.bias.requires_grad_(trainable)
    found = train_step(model, x := random_input(P64), P64, fused=True)
    assert ("base_model.model.proj.base_layer.bias" in found) is trainable
    expected = reference_step(model, x, random_cotangent(found["y"]))
    assert found.keys() == expected.keys()
    assert max(error(found[name], expected[name]) for name in expected) < LOOSE[torch.float64]


@pytest.mark.parametrize("setup", [P64, Setup(quant="nf4")], ids=str)
def test_bias_of_lora_B_is_added_and_trained(setup):
    setup = Setup(**{**setup.__dict__, "lora_bias": True})
    model = one_projection(FastLoraConfig, setup)
    found = train_step(model, x := random_input(setup), setup, fused=True)
    expected = reference_step(model, x, random_cotangent(found["y"]))
    assert "base_model.model.proj.lora_B.default.bias" in found
    assert found.keys() == expected.keys()
    assert max(error(found[name], expected[name]) for name in expected) < LOOSE[setup.base]


def test_rslora_scaling_is_used():
    stock, ours = twins(use_rslora=True)
    assert layer_of(ours).scaling["default"] == 5.0
    assert error(ours(random_input()), stock(random_input())) < LOOSE[torch.float32]
