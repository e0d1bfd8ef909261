"""How the node behaves as a citizen of autograd."""

from __future__ import annotations

import pytest
import torch
from counting import Operators, SavedTensors, tensors_inside
from models import (
    NF4,
    P64,
    P,
    Setup,
    gradients,
    layer_of,
    one_projection,
    random_cotangent,
    random_input,
    taken,
    train_step,
    twins,
)
from oracle import assert_equal, assert_near_exact, error, reference_step
from torch import Tensor

from peft_fastlora import FastLoraConfig

KINDS = pytest.mark.parametrize("setup", [P64, P, NF4], ids=str)
A = "base_model.model.proj.lora_A.default.weight"
B = "base_model.model.proj.lora_B.default.weight"


# -- repeated and nested use (13, 14) ---------------------------------------------------------------------------------


@KINDS
def test_second_backward_over_one_graph_equals_the_first(setup):
    """Behaviour 13."""
    model = one_projection(FastLoraConfig, setup)
    x = random_input(setup)
    y = model(x)
    assert taken(y)
    results = []
    for _ in range(2):
        x.grad = None
        y.backward(random_cotangent(y), retain_graph=True)
        results.append({"dX": x.grad} | gradients(model))
    assert_equal(results[1], results[0])
    assert len(results[0]) == 3


def test_gradients_accumulate_over_calls():
    model = one_projection(FastLoraConfig, P64)
    once = train_step(model, random_input(P64), P64, fused=True)
    x = random_input(P64)
    for _ in range(2):
        y = model(x)
        y.backward(random_cotangent(y))
    assert_near_exact({"dX": x.grad} | gradients(model), {n: 2 * g for n, g in once.items() if n != "y"})


@KINDS
def test_inputs_cotangents_and_saved_tensors_keep_every_byte(setup):
    """Behaviour 13: a node that writes into what it was given corrupts its neighbours."""
    model = one_projection(FastLoraConfig, setup)
    x = random_input(setup)
    with SavedTensors() as saved:
        y = model(x)
    grad = random_cotangent(y)
    watched = [x, grad, *saved.tensors, *model.parameters()]
    assert len(saved.tensors) >= 5
    before = [tensor.detach().clone() for tensor in watched]
    for _ in range(2):
        y.backward(grad, retain_graph=True)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(watched, before, strict=True))


@KINDS
def test_a_branch_that_also_uses_x_is_unharmed(setup):
    """Behaviour 13: a residual connection and a product that saves x."""
    results = []
    for model in twins(setup):
        x = random_input(setup)
        y = model(x)
        (y.square().mean() + (x.exp() * x).sum()).backward()
        results.append({"dX": x.grad} | gradients(model))
    assert taken(y)
    assert_near_exact(results[1], results[0])


@KINDS
def test_double_backward_is_a_clear_error(setup):
    """Behaviour 14."""
    model = one_projection(FastLoraConfig, setup)
    x = random_input(setup)
    (dx,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dx.sum().backward()


def test_backward_without_retained_graph_frees_what_was_saved():
    model = one_projection(FastLoraConfig)
    y = model(random_input())
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


@KINDS
def test_output_may_be_changed_in_place(setup):
    """As stock's: `h += residual` is common."""
    results = []
    for model in twins(setup):
        x = random_input(setup)
        y = model(x)
        y *= 2
        y += 1
        y.backward(random_cotangent(y))
        results.append({"y": y.detach(), "dX": x.grad} | gradients(model))
    assert_near_exact(results[1], results[0])


def test_output_shares_no_storage_with_anything():
    model = one_projection(FastLoraConfig)
    x = random_input()
    with SavedTensors() as saved:
        y = model(x)
    storages = {tensor.untyped_storage().data_ptr() for tensor in [x, *saved.tensors, *model.parameters()]}
    assert y.untyped_storage().data_ptr() not in storages
    assert not y._is_view()


# -- shapes and strides (15) ------------------------------------------------------------------------------------------


def _transposed(n: int, d: int) -> tuple[Tensor, Tensor]:
    leaf = torch.randn(d, n)
    return leaf, leaf.t()


INPUTS = {
    "1-D": lambda d: (d,),
    "2-D": lambda d: (10, d),
    "3-D": lambda d: (2, 5, d),
    "4-D": lambda d: (2, 3, 2, d),
    "no rows": lambda d: (0, d),
    "no rows in 3-D": lambda d: (2, 0, d),
    "one row": lambda d: (1, d),
    "one row in 3-D": lambda d: (1, 1, d),
    "transposed": lambda d: (d, 10),
    "batch and sequence swapped": lambda d: (5, 2, d),
    "sliced features": lambda d: (2, 5, d + 3),
    "every second row": lambda d: (9, d),
    "expanded rows": lambda d: (1, d),
    "expanded batch": lambda d: (1, 5, d),
}
VIEWS = {
    "transposed": lambda leaf: leaf.t(),
    "batch and sequence swapped": lambda leaf: leaf.transpose(0, 1),
    "sliced features": lambda leaf: leaf[..., 2:-1],
    "every second row": lambda leaf: leaf[::2],
    "expanded rows": lambda leaf: leaf.expand(6, -1),
    "expanded batch": lambda leaf: leaf.expand(3, -1, -1),
}
COTANGENTS = {
    "dense": lambda y: random_cotangent(y),
    "expanded": lambda y: torch.ones((), dtype=y.dtype).expand(y.shape),
    "transposed": lambda y: random_cotangent(y.transpose(0, -1)).transpose(0, -1),
    "sliced": lambda y: random_cotangent(y.new_empty(*y.shape[:-1], y.shape[-1] * 2))[..., ::2],
}


@pytest.mark.parametrize("cotangent", COTANGENTS)
@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("setup", [P64, NF4], ids=str)
def test_any_shape_and_stride_of_x_and_its_cotangent(setup, kind, cotangent):
    """Behaviour 15."""
    model = one_projection(FastLoraConfig, setup)
    leaf = torch.randn(INPUTS[kind](setup.features[0])).to(setup.x).requires_grad_()
    x = VIEWS.get(kind, lambda leaf: leaf)(leaf)
    x.retain_grad()
    y = model(x)
    assert taken(y)
    assert y.shape == (*x.shape[:-1], setup.features[1])
    grad = COTANGENTS[cotangent](y)
    y.backward(grad)
    found = {"y": y.detach(), "dX": x.grad} | gradients(model)
    assert_near_exact(found, reference_step(model, x, grad))
    assert leaf.grad is not None


@pytest.mark.parametrize("setup", [P64, NF4], ids=str)
def test_sum_of_the_output_has_an_expanded_cotangent(setup):
    """Behaviour 15 through autograd itself."""
    model = one_projection(FastLoraConfig, setup)
    x = random_input(setup)
    y = model(x)
    y.sum().backward()
    assert_near_exact({"y": y.detach(), "dX": x.grad} | gradients(model), reference_step(model, x, torch.ones_like(y)))


# -- only what is asked for (16) --------------------------------------------------------------------------------------


def _backward_operators(model, x, setup) -> Operators:
    y = model(x)
    assert taken(y)
    grad = random_cotangent(y)
    with Operators() as operators:
        y.backward(grad)
    gradients(model)  # taken off, so that a later step starts anew
    return operators


@KINDS
def test_without_gradient_of_x_no_product_reads_the_base_weight_in_backward(setup):
    """Behaviour 16: the first layer of a model, and every layer whose input comes from frozen ones."""
    model = one_projection(FastLoraConfig, setup)
    x = random_input(setup).requires_grad_(False)
    out_features, in_features = layer_of(model).out_features, layer_of(model).in_features
    operators = _backward_operators(model, x, setup)
    assert len(operators.products) == 3  # u, dA, dB
    assert operators.with_weight(out_features, in_features) == []
    assert operators.dequantisations == 0


@KINDS
def test_with_gradient_of_x_one_product_reads_the_base_weight(setup):
    """The counterpart of the test above: its counter does see that product."""
    model = one_projection(FastLoraConfig, setup)
    operators = _backward_operators(model, random_input(setup), setup)
    layer = layer_of(model)
    assert len(operators.with_weight(layer.out_features, layer.in_features)) == 1


@pytest.mark.parametrize(
    "frozen, x_needs_grad, products",
    [
        ("lora_A", True, 4),  # u, dY W, u A, dB
        ("lora_B", True, 4),  # u, dY W, u A, dA
        ("lora_A", False, 1),  # dB
        ("lora_B", False, 2),  # u, dA
    ],
)
def test_gradient_of_a_frozen_adapter_matrix_is_not_computed(frozen, x_needs_grad, products):
    """Behaviour 16."""
    model = one_projection(FastLoraConfig, P64)
    getattr(layer_of(model), frozen)["default"].weight.requires_grad_(False)
    x = random_input(P64).requires_grad_(x_needs_grad)
    assert len(_backward_operators(model, x, P64).products) == products
    found = train_step(model, random_input(P64).requires_grad_(x_needs_grad), P64, fused=True)
    assert not any(frozen in name for name in found)
    assert_near_exact(found, reference_step(model, x, random_cotangent(found["y"])))


def test_fully_frozen_adapter_passes_the_gradient_of_x_on():
    model = one_projection(FastLoraConfig, P64)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    x = random_input(P64)
    with SavedTensors() as saved:
        y = model(x)
    assert taken(y)
    assert not any(tensor.shape[-1:] == (24,) and tensor.shape[0] == 10 for tensor in saved.tensors)  # x itself
    with Operators() as operators:
        y.backward(grad := random_cotangent(y))
    assert len(operators.products) == 3  # u, dY W, u A
    assert_near_exact({"y": y.detach(), "dX": x.grad}, reference_step(model, x, grad))


@pytest.mark.parametrize("frozen, kept", [("lora_A", "x"), ("lora_B", "h")])
def test_what_only_a_frozen_matrix_would_read_is_not_saved(frozen, kept):
    """x is read by dA alone, h by dB alone."""
    model = one_projection(FastLoraConfig)
    shapes = {"x": (2, 5, 24), "h": (10, 4)}

    def is_saved() -> bool:
        with SavedTensors() as saved:
            model(random_input())
        return any(tuple(tensor.shape) == shapes[kept] for tensor in saved.tensors)

    assert is_saved()
    getattr(layer_of(model), frozen)["default"].weight.requires_grad_(False)
    assert not is_saved()


@KINDS
def test_grad_of_one_input_alone(setup):
    model = one_projection(FastLoraConfig, setup)
    weight = layer_of(model).lora_A["default"].weight
    x = random_input(setup)
    y = model(x)
    (alone,) = torch.autograd.grad(y, weight, random_cotangent(y))
    assert torch.equal(alone, train_step(model, random_input(setup), setup)[A])


# -- without grad -----------------------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_grad_there_is_no_node_nothing_saved_and_the_same_result(setup, context):
    model = one_projection(FastLoraConfig, setup)
    expected = model(random_input(setup))
    with context(), SavedTensors() as saved:
        y = model(random_input(setup))
    assert taken(expected)
    assert y.grad_fn is None
    assert saved.tensors == []
    assert torch.equal(y, expected)


def test_without_anything_trainable_there_is_no_node():
    model = one_projection(FastLoraConfig)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert model(random_input().detach()).grad_fn is None


# -- what the node holds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setup", [P, NF4, Setup(quant="fp4"), Setup(lora_bias=True)], ids=str)
def test_node_holds_no_tensor_outside_its_saved_tensors(setup):
    """House rule 1: offloading, checkpointing and layer streaming see all of it."""
    model = one_projection(FastLoraConfig, setup)
    y = model(random_input(setup))
    assert taken(y)
    assert vars(y.grad_fn)  # its layout is there, so the search below looks at something
    assert tensors_inside(vars(y.grad_fn)) == []


def test_search_for_tensors_finds_them():
    """The instrument of the test above."""
    tensor = torch.ones(1)
    assert tensors_inside({"a": [(tensor,)]}) == [tensor]
    assert tensors_inside(torch.nn.Linear(1, 1)) != []


@KINDS
def test_saved_tensors_are_read_once(setup):
    """House rule 1: hooks that fetch them from elsewhere are expensive."""
    model = one_projection(FastLoraConfig, setup)
    with SavedTensors() as saved:
        y = model(random_input(setup))
    y.backward(random_cotangent(y))
    assert saved.unpacked == len(saved.tensors)


def test_no_random_number_is_drawn():
    """House rule 3."""
    model = one_projection(FastLoraConfig)
    state = torch.get_rng_state()
    train_step(model, random_input(), fused=True)
    assert torch.equal(torch.get_rng_state(), state)


@KINDS
def test_optimizer_steps_follow_stock(setup):
    """Ten steps of Adam: the gradients are right in size, not only in direction."""
    models = twins(setup)
    for model in models:
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
        for step in range(10):
            y = model(random_input(setup, seed=step))
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert taken(y)
    stock, ours = (dict(model.named_parameters()) for model in models)
    start = dict(one_projection(FastLoraConfig, setup).named_parameters())
    for name in (A, B):
        moved = error(ours[name].detach(), start[name].detach())
        assert moved > 1e-3
        # Adam divides by the size of the gradient, so rounding is scaled up with it
        assert error(ours[name].detach(), stock[name].detach()) < 1e-5
