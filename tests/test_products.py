"""How much work and memory a step takes, counted."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from counting import Operators, Product, SavedTensors, storage_key
from models import (
    NF4,
    P64,
    QUANTS,
    P,
    Setup,
    as_group,
    layer_of,
    one_projection,
    random_cotangent,
    random_input,
    taken,
    trio,
    twins,
)
from peft import LoraConfig
from poison import originals
from torch import Tensor, nn

from peft_fastlora import FastLoraConfig

BF16 = Setup(base=torch.bfloat16, x=torch.bfloat16, adapter=torch.bfloat16)
SETUPS = [P, P64, BF16, Setup(bias=False), *(Setup(quant=quant) for quant in QUANTS)]


def _count(call, setup: Setup, shape=(2, 5)) -> tuple[Operators, Operators]:
    """What runs in forward and in backward of `call(x)`, which returns an output or several."""
    x = random_input(setup, shape)
    with Operators() as forward:
        result = call(x)
    outputs = [result] if isinstance(result, Tensor) else list(result)
    grads = [random_cotangent(y, i) for i, y in enumerate(outputs)]
    with Operators() as backward:
        torch.autograd.backward(outputs, grads)
    return forward, backward


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_single_projection_takes_3_and_5_products(setup):
    """Behaviour 29."""
    model = one_projection(FastLoraConfig, setup)
    forward, backward = _count(model, setup)
    assert len(forward.products) == 3
    assert len(backward.products) == 5


@pytest.mark.parametrize("setup", [P, BF16], ids=str)
def test_stock_takes_as_many_for_a_single_projection(setup):
    """The instrument: the counter sees stock's products too."""
    stock, _ = twins(setup)
    forward, backward = _count(stock, setup)
    assert (len(forward.products), len(backward.products)) == (3, 5)


@pytest.mark.parametrize("setup", [P, P64, BF16, NF4, Setup(quant="fp4")], ids=str)
@pytest.mark.parametrize("ranks", [{}, {"rank_pattern": {"k_proj": 2, "v_proj": 7}}], ids=["equal ranks", "unequal"])
def test_three_projections_of_one_tensor_take_7_and_11_products(setup, ranks):
    """Behaviour 29, q/k/v: one product with all lora_A, one for all dA, one for the adapters' share of dX."""
    forward, backward = _count(partial(as_group, trio(FastLoraConfig, setup, **ranks)), setup)
    assert len(forward.products) == 7
    assert len(backward.products) == 11


def test_stock_takes_9_and_15_for_three_projections():
    forward, backward = _count(trio(LoraConfig), P)
    assert (len(forward.products), len(backward.products)) == (9, 15)


def test_two_adapters_of_one_projection_share_products():
    model = one_projection(FastLoraConfig)
    model.add_adapter("other", FastLoraConfig(r=7, target_modules=["proj"]))
    model.base_model.set_adapter(["default", "other"])
    forward, backward = _count(model, P)
    assert len(forward.products) == 3  # x W, x A_cat, h_cat B_cat
    assert len(backward.products) == 6  # dY B_cat, dY W, u_cat A_cat, u_cat x, and one dB each


@pytest.mark.parametrize("setup", [P, BF16, NF4], ids=str)
def test_each_product_with_the_base_weight_happens_once(setup):
    model = one_projection(FastLoraConfig, setup)
    layer = layer_of(model)
    for operators in _count(model, setup):
        assert len(operators.with_weight(layer.out_features, layer.in_features)) == 1


def test_sums_go_into_products():
    """y += h B^T and dX += u A are `addmm_`, without a temporary of full width."""
    forward, backward = _count(one_projection(FastLoraConfig), P)
    assert forward.names["addmm_"] == 1
    assert backward.names["addmm_"] == 1
    assert forward.names["add"] == forward.names["add_"] == backward.names["add"] == backward.names["add_"] == 0


@pytest.mark.parametrize("operator", ["mm", "addmm_", "bmm", "linear"])
def test_counter_sees(operator):
    """The instrument."""
    a, b = torch.ones(3, 4), torch.ones(4, 5)
    calls = {
        "mm": lambda: a @ b,
        "addmm_": lambda: torch.zeros(3, 5).addmm_(a, b),
        "bmm": lambda: torch.bmm(a[None], b[None]),
        "linear": lambda: nn.functional.linear(a, b.t(), torch.zeros(5)),
    }
    with Operators() as operators:
        calls[operator]()
    assert len(operators.products) == 1
    if operator != "bmm":
        assert operators.with_weight(5, 4) == operators.products
        assert operators.with_weight(5, 3) == ([] if operator != "addmm_" else operators.products)


def test_product_recognises_a_packed_weight():
    assert Product("gemm_4bit", ((10, 64), (64 * 128 // 2, 1))).reads(128, 64)
    assert not Product("mm", ((10, 64), (64, 4))).reads(128, 64)


# -- 4-bit (30) -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [(1,), (2, 5)], ids=["one row", "many rows"])
@pytest.mark.parametrize("quant", QUANTS)
def test_4bit_weight_is_dequantised_once_in_forward_and_once_in_backward(quant, rows):
    """Behaviour 30."""
    setup = Setup(quant=quant)
    forward, backward = _count(one_projection(FastLoraConfig, setup), setup, rows)
    assert forward.dequantisations == 1
    assert backward.dequantisations == 1


def test_4bit_group_dequantises_each_weight_once_in_forward_and_once_in_backward():
    forward, backward = _count(partial(as_group, trio(FastLoraConfig, NF4)), NF4)
    assert forward.dequantisations == 3
    assert backward.dequantisations == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("quant", QUANTS)
def test_nothing_of_dense_weight_size_is_saved_for_a_4bit_weight(quant, dtype):
    """Behaviour 30: the packed weight and its statistics are kept, and dequantised again."""
    setup = Setup(quant=quant, base=dtype, x=dtype, compute=dtype)
    model = one_projection(FastLoraConfig, setup)
    layer = layer_of(model)
    dense = layer.in_features * layer.out_features
    with SavedTensors() as saved:
        y = model(random_input(setup))
    assert taken(y)
    assert any(t.dtype == torch.uint8 and t.numel() == dense // 2 for t in saved.tensors)
    assert all(t.untyped_storage().nbytes() <= dense // 2 for t in saved.tensors)


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_beyond_weights_only_x_and_h_are_kept(setup):
    model = one_projection(FastLoraConfig, setup)
    x = random_input(setup, (2, 11))
    with SavedTensors(exclude=model) as saved:
        y = model(x)
    assert taken(y)
    statistics = 0
    if setup.quant is not None:
        state = layer_of(model).base_layer.weight.quant_state
        nested = (state.offset, state.state2.absmax, state.state2.code) if state.nested else ()
        statistics = sum(t.untyped_storage().nbytes() for t in (state.absmax, state.code, *nested))
    h = 22 * setup.rank * setup.adapter.itemsize
    assert saved.bytes == x.numel() * x.itemsize + h + statistics


@pytest.mark.parametrize("setup", [P, BF16, *(Setup(quant=quant) for quant in QUANTS)], ids=str)
def test_weights_and_statistics_are_saved_by_reference(setup):
    """A copy of anything that the model holds anyway would be memory for nothing."""
    model = one_projection(FastLoraConfig, setup)
    with SavedTensors() as saved:
        model(random_input(setup))
    kept = {storage_key(t) for t in saved.tensors}
    biases = {storage_key(layer_of(model).base_layer.bias)}
    assert {storage_key(t) for t in originals(layer_of(model))} - kept == biases


def test_group_keeps_x_once():
    model = trio(FastLoraConfig)
    x = random_input(P, (2, 11))
    with SavedTensors() as saved:
        outputs = as_group(model, x)
    assert all(taken(y) for y in outputs)
    assert sum(t.numel() == x.numel() for t in saved.tensors) == 1


def test_saved_bytes_counts_a_storage_once_and_a_view_in_full():
    """The instrument."""
    x = torch.ones(100, requires_grad=True)
    with SavedTensors() as saved:
        y = x * 1
        z = y[:10] * y[10:20] * y[20:30]
    assert z is not None
    assert saved.bytes == 400 + 40  # all of y once, and the product of its first two parts
    assert len(saved.tensors) > len({t.untyped_storage().data_ptr() for t in saved.tensors})
