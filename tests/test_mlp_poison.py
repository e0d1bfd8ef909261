"""The backward of a block reads its saved tensors and nothing else."""

from __future__ import annotations

import pytest
import torch
from counting import SavedTensors, tensors_inside
from mlp_models import M64, MBF16, MEMBERS, MNF4, BlockSetup, M, block_step, mlp_of, one_block, taken_as_block
from models import QUANTS, autocast, gradients, random_cotangent, random_input
from oracle import assert_equal
from poison import cloned_saves, originals, poisoned

from peft_fastlora import FastLoraConfig

BF16 = torch.bfloat16
SETUPS = [
    M,
    M64,
    MBF16,
    BlockSetup(base=BF16, x=BF16),
    BlockSetup(autocast=True),
    BlockSetup(lora_bias=True),
    BlockSetup(form="packed"),
    BlockSetup(form="plain", activation="gelu"),
    *(BlockSetup(quant=quant) for quant in QUANTS),
    BlockSetup(quant="nf4-double", base=BF16, x=BF16, compute=BF16, adapter=BF16),
    BlockSetup(quant="nf4", base=BF16, x=BF16, compute=BF16, autocast=True),
    BlockSetup(quant="nf4-double", form="packed"),
    BlockSetup(quant="nf4-double", form="plain"),
    BlockSetup(quant="nf4-double", quantized=("up_proj",)),
]
OPTIONS = [{}, {"recompute": "projections"}, {"chunk_size": 3}, {"recompute": "projections", "chunk_size": 4}]


def _originals(model, setup):
    return [t for name in MEMBERS[setup.form] for t in originals(getattr(mlp_of(model), name))]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_backward_reads_only_saved_tensors(setup, options):
    model = one_block(FastLoraConfig, setup, **options)
    expected = block_step(model, random_input(setup), setup, fused=True)
    assert len(expected) == 2 + len(MEMBERS[setup.form]) * (3 if setup.lora_bias else 2)
    assert all(gradient.isfinite().all() for gradient in expected.values())

    x = random_input(setup)
    with cloned_saves(), autocast(setup.autocast):
        y = model(x)
    assert taken_as_block(y)
    result = y.detach().clone()
    with poisoned([*_originals(model, setup), x]):
        y.backward(random_cotangent(y))
    assert_equal({"y": result, "dX": x.grad} | gradients(model), expected)


@pytest.mark.parametrize("setup", [M, BlockSetup(quant="nf4"), MNF4], ids=str)
def test_every_poisoned_tensor_matters(setup):
    """The instrument: poisoning any one of the originals changes the output, so a backward that read it would show."""
    model = one_block(FastLoraConfig, setup)
    expected = model(random_input(setup)).detach()
    watched = _originals(model, setup)
    assert len(watched) == 3 * {None: 4, "nf4": 6, "nf4-double": 9}[setup.quant]
    bases = [getattr(mlp_of(model), name).base_layer for name in MEMBERS[setup.form]]
    # the 4-bit kernels know their code book by heart
    codes = [id(base.weight.quant_state.code) for base in bases] if setup.quant else []
    for tensor in watched:
        with poisoned([tensor]):
            assert torch.equal(model(random_input(setup)).detach(), expected) is (id(tensor) in codes)
    assert torch.equal(model(random_input(setup)).detach(), expected)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("setup", [M, MNF4, BlockSetup(lora_bias=True)], ids=str)
def test_node_holds_no_tensor_outside_its_saved_tensors(setup, options):
    model = one_block(FastLoraConfig, setup, **options)
    y = model(random_input(setup))
    assert taken_as_block(y)
    assert vars(y.grad_fn)  # its plan is there, so the search below looks at something
    assert tensors_inside(vars(y.grad_fn)) == []


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("setup", [M64, MNF4], ids=str)
def test_saved_tensors_are_read_once(setup, options):
    model = one_block(FastLoraConfig, setup, **options)
    with SavedTensors() as saved:
        y = model(random_input(setup))
    y.backward(random_cotangent(y))
    assert saved.unpacked == len(saved.tensors) > 0


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("setup", [M64, MBF16, MNF4, BlockSetup(form="packed"), BlockSetup(form="plain")], ids=str)
def test_inputs_cotangents_and_saved_tensors_keep_every_byte(setup, options):
    """Behaviour 13."""
    model = one_block(FastLoraConfig, setup, **options)
    x = random_input(setup)
    with SavedTensors() as saved:
        y = model(x)
    assert taken_as_block(y)
    grad = random_cotangent(y)
    watched = [x, grad, *saved.tensors, *model.parameters()]
    before = [tensor.detach().clone() for tensor in watched]
    for _ in range(2):
        y.backward(grad, retain_graph=True)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(watched, before, strict=True))
