"""The pure functions for 1..n projections, and the Function around them, without any PEFT layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from counting import Operators, SavedTensors, tensors_inside
from models import NODE
from oracle import assert_equal, error, plain
from torch import Tensor

from peft_fastlora.core import group_forward
from peft_fastlora.functions import LoraGroupFunction, lora_group
from peft_fastlora.projection import Adapter, Layout, Projection, flatten

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
TOKENS, IN = 5, 7
EXACT = 1e-14  # float64: a few dozen roundings


@dataclass(frozen=True)
class Member:
    """The shape of one projection of a group: its out features and the ranks of its adapters."""

    out: int
    ranks: tuple[int, ...] = (3,)
    dtypes: tuple[torch.dtype, ...] | None = None  # of the adapters; else all float64
    bias: bool = True
    lora_bias: bool = False
    scale: bool = False  # scaling as a 0-dim tensor


GROUPS = {
    "one": [Member(8)],
    "one without bias": [Member(8, bias=False)],
    "q, k, v": [Member(8), Member(4), Member(4)],
    "unequal ranks": [Member(8, (2,)), Member(4, (5,)), Member(4, (1,))],
    "several adapters": [Member(8, (2, 3)), Member(4, (4,)), Member(4, (1, 2, 3))],
    "a member without adapters": [Member(8), Member(4, ()), Member(4)],
    "first without adapters": [Member(8, ()), Member(4)],
    "biases of lora_B": [Member(8, lora_bias=True), Member(4, (2, 3), lora_bias=True)],
    "scaling tensors": [Member(8, scale=True), Member(4, (2, 3), scale=True)],
}


def make(members: list[Member], dtype: torch.dtype = F64, seed: int = 0) -> list[Projection]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=F64).to(dtype)

    def adapter(member: Member, j: int, scaling: float) -> Adapter:
        own = dtype if member.dtypes is None else member.dtypes[j]
        return Adapter(
            lora_A=random(member.ranks[j], IN, dtype=own).requires_grad_(),
            lora_B=random(member.out, member.ranks[j], dtype=own).requires_grad_(),
            bias=random(member.out, dtype=own).requires_grad_() if member.lora_bias else None,
            scale=torch.tensor(scaling, dtype=own) if member.scale else None,
            scaling=1.0 if member.scale else scaling,
            dtype=own,
        )

    return [
        projection(
            random(member.out, IN),
            random(member.out) if member.bias else None,
            [adapter(member, j, 0.5 + i + 0.25 * j) for j in range(len(member.ranks))],
        )
        for i, member in enumerate(members)
    ]


def projection(weight: Tensor, bias: Tensor | None, adapters: Sequence[Adapter]) -> Projection:
    """A dense one whose products run in the weight's dtype."""
    return Projection(
        weight=weight,
        bias=bias,
        statistics=(),
        adapters=tuple(adapters),
        form=None,
        dtype=weight.dtype,
        out_dtype=weight.dtype,
    )


def formula(x: Tensor, projection: Projection) -> Tensor:
    adapters = [(a.lora_A, a.lora_B, a.bias, a.scaling if a.scale is None else a.scale) for a in projection.adapters]
    return plain(x, projection.weight, projection.bias, adapters)


def as_leaves(projections: list[Projection]) -> list[Projection]:
    """The same values as float64 leaves, for the oracle."""
    layout, tensors = flatten(projections)
    leaves = [None if t is None else t.detach().to(F64, copy=True).requires_grad_(t.requires_grad) for t in tensors]
    return list(layout.rebuild(leaves))


def trainable(projections: list[Projection]) -> list[Tensor]:
    return [t for t in flatten(projections)[1] if t is not None and t.requires_grad]


def rows(dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(TOKENS, IN, dtype=F64, generator=torch.Generator().manual_seed(9)).to(dtype)


def cotangents(projections: list[Projection]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [
        torch.randn(TOKENS, p.weight.shape[0], dtype=F64, generator=generator).to(p.out_dtype) for p in projections
    ]


groups = pytest.mark.parametrize("members", GROUPS.values(), ids=GROUPS.keys())


# -- against the formula ----------------------------------------------------------------------------------------------


@groups
def test_forward_equals_the_formula(members):
    projections = make(members)
    with torch.no_grad():
        outputs, ranks = group_forward(rows(), projections)
        expected = [formula(rows(), p) for p in projections]
    assert len(outputs) == len(members)
    assert [tuple(h.shape) for h in ranks] == [(TOKENS, rank) for m in members for rank in m.ranks]
    assert all(error(y, exact) < EXACT for y, exact in zip(outputs, expected, strict=True))


@groups
def test_function_equals_autograd_of_the_formula(members):
    projections, x = make(members), rows().requires_grad_()
    outputs = lora_group(x, projections)
    assert all(type(y.grad_fn).__name__ == NODE for y in outputs)
    torch.autograd.backward(list(outputs), cotangents(projections))

    leaves, x64 = as_leaves(projections), rows().requires_grad_()
    expected = [formula(x64, p) for p in leaves]
    torch.autograd.backward(expected, cotangents(projections))

    assert error(x.grad, x64.grad) < EXACT
    pairs = list(zip(trainable(projections), trainable(leaves), strict=True))
    assert len(pairs) == sum(len(m.ranks) * (3 if m.lora_bias else 2) for m in members)
    assert all(error(ours.grad, exact.grad) < EXACT for ours, exact in pairs)


@groups
def test_gradcheck(members):
    """Numerical derivatives of everything that is trained, and of x, for every output."""
    projections = make(members)
    layout, tensors = flatten(projections)
    inputs = [t for t in tensors if t is not None and t.requires_grad]

    def run(x: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        remaining = iter(given)
        flat = [next(remaining) if t is not None and t.requires_grad else t for t in tensors]
        return LoraGroupFunction.apply(layout, x, *flat)

    assert torch.autograd.gradcheck(run, (rows().requires_grad_(), *inputs))


@pytest.mark.parametrize(
    "dtypes",
    [(F64, F32), (F32, F64), (F32, F64, F32), (F64, F64, F32)],
    ids=lambda dtypes: ",".join(str(d)[-2:] for d in dtypes),
)
def test_adapters_of_different_dtypes_run_in_their_own(dtypes):
    """A float64 adapter among float32 ones keeps its precision; each gradient has the dtype of its parameter."""
    member = Member(8, ranks=tuple(range(2, 2 + len(dtypes))), dtypes=dtypes)
    projections, x = make([member, Member(4, (2,), (F32,))]), rows().requires_grad_()
    outputs = lora_group(x, projections)
    torch.autograd.backward(list(outputs), cotangents(projections))
    leaves, x64 = as_leaves(projections), rows().requires_grad_()
    torch.autograd.backward([formula(x64, p) for p in leaves], cotangents(projections))
    assert error(x.grad, x64.grad) < 1e-6
    for ours, exact in zip(trainable(projections), trainable(leaves), strict=True):
        assert ours.grad.dtype == ours.dtype
        assert error(ours.grad, exact.grad) < (1e-6 if ours.dtype == F32 else 1e-13)


def test_branch_is_added_in_the_wider_dtype_and_the_sum_rounded_once():
    """Base result and branch cancel to a small number that a branch in bfloat16 (8 bits) could not give."""
    one = torch.ones(1, 1)
    adapter = Adapter(one, one * -255.5, None, None, 1.0, F32)
    outputs, _ = group_forward(one.to(BF16), [projection((one * 256).to(BF16), None, [adapter])])
    assert outputs[0].dtype == BF16
    assert outputs[0].item() == 0.5


def test_bias_gradients_add_up_over_thousands_of_rows():
    """A running sum in bfloat16 would stop growing at 256."""
    one = torch.ones(1, 1).to(BF16)
    bias, lora_bias = (torch.zeros(1).to(BF16).requires_grad_() for _ in range(2))
    (y,) = lora_group(one.expand(4096, 1), [projection(one, bias, [Adapter(one, one, lora_bias, None, 2.0, BF16)])])
    y.backward(torch.ones_like(y))
    assert bias.grad.item() == 4096
    assert lora_bias.grad.item() == 2 * 4096


# -- members do not touch each other (8) ------------------------------------------------------------------------------


def test_zeroing_one_lora_B_changes_its_output_alone():
    """Behaviour 8, with unequal ranks."""
    projections = make(GROUPS["unequal ranks"])
    before = lora_group(rows(), projections)
    with torch.no_grad():
        projections[1].adapters[0].lora_B.zero_()
    after = lora_group(rows(), projections)
    assert [torch.equal(y, z) for y, z in zip(before, after, strict=True)] == [True, False, True]


@pytest.mark.parametrize("changed", range(3))
def test_gradients_of_a_member_depend_on_its_own_cotangent_alone(changed):
    """Behaviour 8."""
    projections = make(GROUPS["unequal ranks"])
    outputs = lora_group(rows().requires_grad_(), projections)
    parameters = trainable(projections)
    grads = cotangents(projections)
    before = torch.autograd.grad(outputs, parameters, grads, retain_graph=True)
    grads[changed] = grads[changed] * -2
    after = torch.autograd.grad(outputs, parameters, grads)
    same = [torch.allclose(g, h, rtol=1e-12) for g, h in zip(before, after, strict=True)]
    assert same == [i != changed for i in range(3) for _ in ("A", "B")]


def test_outputs_share_no_storage():
    outputs = lora_group(rows().requires_grad_(), make(GROUPS["q, k, v"]))
    assert len({y.untyped_storage().data_ptr() for y in outputs}) == 3
    outputs[0].mul_(2)  # one of several outputs of a Function may be changed in place only if it is no view
    outputs[0].sum().backward()


# -- outputs that nobody used -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("used", [u for u in product([True, False], repeat=3) if any(u)], ids=str)
@pytest.mark.parametrize("members", [GROUPS["unequal ranks"], GROUPS["several adapters"]], ids=["unequal", "several"])
def test_unused_outputs_get_no_gradient_and_cost_nothing(members, used):
    projections, x = make(members), rows().requires_grad_()
    outputs = [y for y, use in zip(lora_group(x, projections), used, strict=True) if use]
    grads = [grad for grad, use in zip(cotangents(projections), used, strict=True) if use]
    with Operators() as operators:
        torch.autograd.backward(outputs, grads)

    leaves, x64 = as_leaves(projections), rows().requires_grad_()
    expected = [formula(x64, p) for p, use in zip(leaves, used, strict=True) if use]
    torch.autograd.backward(expected, grads)
    assert error(x.grad, x64.grad) < EXACT
    for ours, exact in zip(trainable(projections), trainable(leaves), strict=True):
        assert (ours.grad is None) is (exact.grad is None)
        assert exact.grad is None or error(ours.grad, exact.grad) < EXACT
    adapters = sum(len(m.ranks) for m, use in zip(members, used, strict=True) if use)
    assert len(operators.products) == 2 * sum(used) + 2 + adapters  # u and dY W each, u A, u^T x; a dB an adapter


class Blocked(torch.autograd.Function):
    """Passes values on and no gradient back."""

    @staticmethod
    def forward(ctx, *values):
        return tuple(value.clone() for value in values)

    @staticmethod
    def backward(ctx, *grads):
        return (None,) * len(grads)


def test_backward_without_any_gradient_computes_nothing():
    projections, x = make(GROUPS["q, k, v"]), rows().requires_grad_()
    outputs = Blocked.apply(*lora_group(x, projections))
    with Operators() as operators:
        sum(y.sum() for y in outputs).backward()
    assert operators.products == []
    assert x.grad is None
    assert all(parameter.grad is None for parameter in trainable(projections))


# -- subsets of gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("needs_x", [True, False], ids=["x", "no x"])
@pytest.mark.parametrize("asked", [a for a in product([True, False], repeat=4) if any(a)], ids=str)
def test_any_subset_of_gradients(asked, needs_x):
    """Two members with (A, B) each: what is asked for is right, the rest is None and costs no product."""
    projections, x = make([Member(8, (2,)), Member(4, (5,))]), rows().requires_grad_(needs_x)
    parameters = trainable(projections)
    for parameter, asks in zip(parameters, asked, strict=True):
        parameter.requires_grad_(asks)
    used = [
        (y, g) for y, g in zip(lora_group(x, projections), cotangents(projections), strict=True) if y.requires_grad
    ]
    with Operators() as operators:
        torch.autograd.backward(*zip(*used, strict=True))

    leaves, x64 = as_leaves(projections), rows().requires_grad_(needs_x)
    expected = [y for p in leaves if (y := formula(x64, p)).requires_grad]
    grads = [g for g, p in zip(cotangents(projections), leaves, strict=True) if formula(x64, p).requires_grad]
    assert len(used) == len(expected)
    torch.autograd.backward(expected, grads)
    exact = [t for p in leaves for a in p.adapters for t in (a.lora_A, a.lora_B)]
    for ours, reference in [*zip(parameters, exact, strict=True), (x, x64)]:
        assert (ours.grad is None) is (reference.grad is None) is (not ours.requires_grad)
        assert ours.grad is None or error(ours.grad, reference.grad) < EXACT
    a_asked, b_asked = asked[0::2], asked[1::2]
    us = 2 if needs_x else sum(a_asked)
    assert len(operators.products) == us + (3 if needs_x else 0) + any(a_asked) + sum(b_asked)


# -- nothing given is changed -----------------------------------------------------------------------------------------


@groups
def test_arguments_and_saved_tensors_keep_every_byte(members):
    """House rule 2."""
    projections, x = make(members), rows().requires_grad_()
    grads = cotangents(projections)
    given = [x, *grads, *(t for t in flatten(projections)[1] if t is not None)]
    with SavedTensors() as saved:
        copies = [t.detach().clone() for t in given]
        outputs = lora_group(x, projections)
    given, copies = [*given, *saved.tensors], [*copies, *(t.detach().clone() for t in saved.tensors)]
    for _ in range(2):
        torch.autograd.backward(list(outputs), grads, retain_graph=True)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(given, copies, strict=True))


@groups
def test_second_backward_equals_the_first(members):
    projections, x = make(members), rows().requires_grad_()
    outputs = lora_group(x, projections)
    inputs = [x, *trainable(projections)]
    first, second = (
        torch.autograd.grad(outputs, inputs, cotangents(projections), retain_graph=True) for _ in range(2)
    )
    assert_equal(dict(enumerate(second)), dict(enumerate(first)))


# -- taking projections apart -----------------------------------------------------------------------------------------


@groups
def test_rebuild_gives_back_what_flatten_took_apart(members):
    projections = make(members)
    layout, tensors = flatten(projections)
    again = layout.rebuild(tensors)
    assert len(again) == len(projections)
    assert all(a is b for a, b in zip(flatten(again)[1], tensors, strict=True))
    assert [[a.scaling for a in p.adapters] for p in again] == [[a.scaling for a in p.adapters] for p in projections]
    assert again[0].adapters[:1] == () or again[0].adapters[0].lora_A is projections[0].adapters[0].lora_A


@groups
def test_layout_holds_no_tensor_and_compares_by_structure(members):
    layout, tensors = flatten(make(members))
    assert tensors_inside(make(members)) != []
    assert tensors_inside(layout) == []
    assert layout == flatten(make(members, seed=1))[0]
    assert hash(layout) == hash(flatten(make(members, seed=1))[0])
    assert layout != Layout((*layout.projections, *layout.projections))
    assert len(tensors) == sum(2 + 4 * len(m.ranks) for m in members)


def test_neighbours_of_one_dtype_share_products():
    """Three dtype runs are three products each way to rank space; one run is one."""

    def products(dtypes: tuple[torch.dtype, ...]) -> int:
        projections = make([Member(8, (2, 2, 2), dtypes)])
        with torch.no_grad(), Operators() as operators:
            group_forward(rows(), projections)
        return len(operators.products)

    assert products((F64, F64, F64)) == 1 + 1 + 1
    assert products((F32, F64, F32)) == 1 + 3 + 3
