"""Stock PEFT's dtypes in every layout, with and without autocast, and nothing wider kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from counting import SavedTensors, storage_key
from models import (
    NF4,
    P64,
    OneProjection,
    P,
    Setup,
    adapted,
    autocast,
    base_linear,
    dtype_layouts,
    gradients,
    layer_of,
    one_projection,
    quantized,
    random_cotangent,
    random_input,
    stock_runs,
    taken,
    train_step,
    twins,
)
from oracle import assert_equal, assert_near_exact, error, reference_step
from peft import LoraConfig, prepare_model_for_kbit_training
from torch import nn

from peft_fastlora import FastLoraConfig

RUNNING = [setup for setup in dtype_layouts() if stock_runs(setup)]
REFUSED = [setup for setup in dtype_layouts() if not stock_runs(setup)]
AUTOCAST = [setup for setup in RUNNING if setup.autocast]
NO_WRONG_TERM = 3e-2  # some roundings of bfloat16; accuracy itself is held to stock's in test_two_x_rule


def test_layouts_are_many():
    assert len(RUNNING) > 100
    assert len(REFUSED) >= 10


@pytest.mark.parametrize("setup", RUNNING, ids=str)
def test_every_layout_that_stock_runs_is_taken_with_stock_dtypes(setup):
    """Behaviour 9: dtype of the output, of dX and of every gradient."""
    stock, ours = twins(setup)
    expected = train_step(stock, random_input(setup), setup, fused=False)
    x = random_input(setup)
    found = train_step(ours, x, setup, fused=True)
    assert {name: t.dtype for name, t in found.items()} == {name: t.dtype for name, t in expected.items()}
    assert found["dX"].dtype == setup.x
    reference = reference_step(ours, x, random_cotangent(found["y"]))
    assert found.keys() == reference.keys()
    assert max(error(found[name], reference[name]) for name in reference) < NO_WRONG_TERM


@pytest.mark.parametrize("setup", REFUSED, ids=str)
def test_layouts_that_stock_refuses_are_refused_with_its_error(setup):
    """Behaviour 9 the other way round: no result appears that stock would not give."""
    errors = []
    for model in twins(setup):
        with pytest.raises(RuntimeError) as caught:
            model(random_input(setup))
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("setup", RUNNING, ids=str)
def test_with_lora_B_zero_the_output_is_the_base_layers_bit_for_bit(setup):
    """The base product runs in the base layer's own dtypes, not in x's or the adapters'."""
    model = one_projection(FastLoraConfig, setup)
    layer = layer_of(model)
    nn.init.zeros_(layer.lora_B["default"].weight)
    x = random_input(setup, (10,))
    with autocast(setup.autocast):
        found, expected = model(x), layer.base_layer(x)
    assert taken(found)
    assert_equal({"y": found.detach()}, {"y": expected.detach()})


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "nobias"])
@pytest.mark.parametrize("quant", [None, "nf4", "nf4-double", "fp4", "fp4-double"])
def test_float32_is_near_exact(quant, bias):
    setup = Setup(quant=quant, bias=bias)
    model = one_projection(FastLoraConfig, setup)
    x = random_input(setup)
    found = train_step(model, x, setup, fused=True)
    assert_near_exact(found, reference_step(model, x, random_cotangent(found["y"])))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "nobias"])
def test_float64_is_near_exact(bias):
    setup = Setup(**{**P64.__dict__, "bias": bias})
    model = one_projection(FastLoraConfig, setup)
    x = random_input(setup)
    found = train_step(model, x, setup, fused=True)
    assert_near_exact(found, reference_step(model, x, random_cotangent(found["y"])))


@pytest.mark.parametrize("active", [["default", "wide"], ["wide", "default"]], ids=str)
@pytest.mark.parametrize("quant", [None, "nf4"])
@pytest.mark.parametrize("enabled", [False, True], ids=["plain", "autocast"])
def test_adapters_of_different_dtypes_in_one_layer(active, quant, enabled):
    setup = Setup(base=torch.bfloat16, x=torch.bfloat16, adapter=torch.bfloat16, quant=quant, autocast=enabled)
    results = []
    for model in twins(setup):
        config = type(model.peft_config["default"])(r=7, lora_alpha=3, target_modules=["proj"])
        model.add_adapter("wide", config)
        for name, p in model.named_parameters():
            if "wide" in name:
                p.data = torch.randn(p.shape, generator=torch.Generator().manual_seed(7)).float() * 0.3
        model.base_model.set_adapter(active)
        results.append(train_step(model, random_input(setup), setup, fused=len(results) == 1))
    stock, ours = results
    assert {name: t.dtype for name, t in ours.items()} == {name: t.dtype for name, t in stock.items()}
    assert len(ours) == 6
    assert max(error(ours[name], stock[name]) for name in stock) < NO_WRONG_TERM


def test_4bit_base_settles_its_compute_dtype_as_stock_does():
    """`Linear4bit` without a compute dtype takes that of its first input, for good."""
    setup = Setup(quant="nf4", compute=None, base=torch.bfloat16)
    found = []
    for model in twins(setup):
        model(random_input(Setup(quant="nf4", x=torch.bfloat16)))
        base = layer_of(model).base_layer
        found.append((base.compute_type_is_set, base.compute_dtype))
        model(random_input(setup))
        found.append((base.compute_type_is_set, base.compute_dtype))
    assert found == [(True, torch.bfloat16)] * 4


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32], ids=str)
def test_4bit_weight_may_be_stored_as_floats(storage):
    """`quant_storage`, which FSDP needs: the packed bytes are the same, only their container is a float tensor."""
    results = []
    for options in ({}, {"quant_storage": storage}):
        torch.manual_seed(0)
        base = OneProjection(quantized(nn.Linear(64, 128), "nf4-double", torch.float32, **options), in_4bit=True)
        model = adapted(base, FastLoraConfig, NF4, ["proj"], seed=0)
        results.append(train_step(model, random_input(NF4), NF4, fused=True))
    assert_equal(results[1], results[0])


# -- the route of a QLoRA user (9) ------------------------------------------------------------------------------------


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("adapter", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("quant", ["nf4", "nf4-double"])
def test_prepare_model_for_kbit_training_is_taken(quant, adapter, x_dtype):
    """Behaviour 9: it makes everything but the 4-bit weight float32, so x is float32 and the base computes in bf16."""
    setup = Setup(base=torch.bfloat16, quant=quant, compute=torch.bfloat16, adapter=adapter, x=x_dtype)
    results = []
    for config_class in (LoraConfig, FastLoraConfig):
        torch.manual_seed(0)
        base = OneProjection(base_linear(setup, *setup.features), in_4bit=True)
        base = prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
        assert base.proj.bias.dtype == torch.float32
        model = adapted(base, config_class, setup, ["proj"], seed=0)
        results.append(train_step(model, random_input(setup), setup, fused=config_class is FastLoraConfig))
    stock, ours = results
    assert {name: t.dtype for name, t in ours.items()} == {name: t.dtype for name, t in stock.items()}
    assert max(error(ours[name], stock[name]) for name in stock) < NO_WRONG_TERM


# -- autocast (10) ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
@pytest.mark.parametrize("setup", AUTOCAST, ids=str)
def test_autocast_gives_stock_dtypes_wherever_backward_runs(setup, inside):
    """Behaviour 10."""
    results: list[dict[str, Any]] = []
    for model in twins(setup):
        x = random_input(setup)
        with autocast(True):
            y = model(x)
        with autocast(inside):
            y.backward(random_cotangent(y))
        for name, p in model.named_parameters():
            assert p.grad is None or p.grad.dtype == p.dtype, name
        assert x.grad.dtype == x.dtype
        results.append({"y": y, "dX": x.grad} | gradients(model))
    stock, ours = results
    assert taken(ours["y"])
    assert {name: t.dtype for name, t in ours.items()} == {name: t.dtype for name, t in stock.items()}


@pytest.mark.parametrize("setup", [AUTOCAST[0], AUTOCAST[-1]], ids=str)
def test_backward_inside_autocast_equals_backward_outside(setup):
    """The dtypes are settled in forward; what is switched on at the time of backward changes nothing."""
    results = []
    for inside in (False, True):
        model = one_projection(FastLoraConfig, setup)
        x = random_input(setup)
        with autocast(True):
            y = model(x)
        with autocast(inside):
            y.backward(random_cotangent(y))
        results.append({"dX": x.grad} | gradients(model))
    assert_equal(results[1], results[0])


def test_backward_of_a_plain_forward_inside_autocast_is_not_rounded():
    """The other way round: float32 forward, backward where autocast happens to be on."""
    model = one_projection(FastLoraConfig)
    expected = train_step(model, random_input(), fused=True)
    x = random_input()
    y = model(x)
    with autocast(True):
        y.backward(random_cotangent(y))
    assert_equal({"y": y.detach(), "dX": x.grad} | gradients(model), expected)


def test_autocast_leaves_float64_alone():
    """As ATen's own casts do: float64 is not eligible."""
    setup = Setup(**{**P64.__dict__, "autocast": True})
    model = one_projection(FastLoraConfig, setup)
    x = random_input(setup)
    found = train_step(model, x, setup, fused=True)
    assert_near_exact(found, reference_step(model, x, random_cotangent(found["y"])))


@pytest.mark.parametrize("setup", [P, NF4], ids=str)
def test_without_grad_autocast_gives_the_same_numbers(setup):
    model = one_projection(FastLoraConfig, setup)
    with autocast(True):
        expected = model(random_input(setup))
        with torch.no_grad():
            found = model(random_input(setup))
    assert taken(expected)
    assert_equal({"y": found}, {"y": expected.detach()})


# -- nothing wider is kept (11) ---------------------------------------------------------------------------------------


def _kept_of_x(setup: Setup) -> list[torch.Tensor]:
    """Saved tensors with the number of elements of x, one a storage."""
    model = one_projection(FastLoraConfig, setup)
    x = random_input(setup, (2, 11))
    with SavedTensors() as saved, autocast(setup.autocast):
        y = model(x)
    assert taken(y)
    return list({storage_key(t): t for t in saved.tensors if t.numel() == x.numel()}.values())


@pytest.mark.parametrize("setup", RUNNING, ids=str)
def test_x_is_kept_once_and_never_wider_than_it_came(setup):
    """Behaviour 11: stock keeps up to three copies of x, one of them in float32."""
    kept = _kept_of_x(setup)
    assert len(kept) == 1
    assert kept[0].dtype.itemsize <= setup.x.itemsize


@pytest.mark.parametrize(
    "setup",
    [Setup(autocast=True), Setup(adapter=torch.bfloat16), Setup(adapter=torch.bfloat16, quant="nf4")],
    ids=str,
)
def test_x_is_kept_narrow_where_only_narrow_adapters_read_it(setup):
    (kept,) = _kept_of_x(setup)
    assert kept.dtype == torch.bfloat16


@pytest.mark.parametrize("setup", [P, NF4, Setup(base=torch.bfloat16, x=torch.bfloat16)], ids=str)
def test_x_itself_is_kept_and_no_copy_of_it(setup):
    model = one_projection(FastLoraConfig, setup)
    x = random_input(setup)
    with SavedTensors() as saved:
        model(x)
    assert sum(storage_key(t) == storage_key(x) for t in saved.tensors) == 1
