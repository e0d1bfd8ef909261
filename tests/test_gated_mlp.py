"""An MLP block as one node: every supported cell is taken and right; all else steps aside.

Fixture `M`: 16 -> 40 -> 16, in the three forms gated, packed and plain.
"""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from counting import Operators, SavedTensors
from mlp_models import (
    FORMULAS,
    GATED,
    M64,
    MBF16,
    MEMBERS,
    MNF4,
    BlockSetup,
    Gated,
    M,
    OneBlock,
    TwoX,
    assert_near,
    block_reference,
    block_step,
    block_twins,
    mlp_of,
    one_block,
    subsets,
    taken_as_block,
)
from models import QUANTS, SHORT, adapted, autocast, gradients, random_cotangent, random_input, randomize_adapters
from oracle import assert_equal, error
from peft import LoraConfig
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from transformers.activations import ACT2FN

from peft_fastlora import FastLoraConfig, fuse, fusion_report, unfuse
from peft_fastlora import mlp as mlp_arithmetic
from peft_fastlora.gated_mlp import BLOCK_GUARDS, FastLoraGatedMLP, read_block, why_not_block

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
RANKS = {"gate_proj": 3, "up_proj": 2, "down_proj": 7, "gate_up_proj": 3, "fc1": 3, "fc2": 7}
ALPHAS = {"up_proj": 3, "fc2": 5, "down_proj": 6}
SEEDS = 3
CELLS = [(dtype, None) for dtype in (FP64, FP32, BF16)] + [(d, "nf4") for d in (FP32, BF16)]
FORMS = [M64, BlockSetup(base=FP64, x=FP64, adapter=FP64, form="packed", activation="gelu_new")]
FORMS += [BlockSetup(base=FP64, x=FP64, adapter=FP64, form="plain", activation="gelu")]
KINDS = pytest.mark.parametrize("setup", [*FORMS, MNF4], ids=str)


def all_of(dtype, quant=None, **more) -> BlockSetup:
    return BlockSetup(base=dtype, x=dtype, adapter=dtype, quant=quant, compute=dtype, **more)


def unequal(targets) -> dict:
    return {
        "rank_pattern": {name: RANKS[name] for name in targets},
        "alpha_pattern": {name: ALPHAS[name] for name in targets if name in ALPHAS},
    }


def assert_follows_stock(setup, shape=(2, 5), options=None, **lora) -> None:
    """Taken, and equal to stock: near-exact in float32 and float64, by the 2x rule in half precision."""
    stock, ours = block_twins(setup, options, **lora)
    half = BF16 in (setup.base, setup.x, setup.adapter) or setup.autocast
    rule = TwoX()
    for seed in range(SEEDS if half else 1):
        results = []
        for model in (stock, ours):
            randomize_adapters(model, seed)
            x = random_input(setup, shape, seed)
            results.append(block_step(model, x, setup, seed, fused=model is ours))
        expected, found = results
        reference = block_reference(stock, setup, x, random_cotangent(expected["y"], seed))
        assert {name: t.dtype for name, t in found.items()} == {name: t.dtype for name, t in expected.items()}
        rule.add(found, expected, reference)
    adapted_names = {name.removesuffix(".weight").removesuffix(".bias") for name in found if "lora_" in name}
    assert len(adapted_names) == 2 * len(lora.get("target_modules", MEMBERS[setup.form]))
    if half:
        rule.check()
    else:
        assert_near(found, reference)
        assert_near(found, expected)


# -- every supported cell (1, 24) -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", ["equal", "unequal"])
@pytest.mark.parametrize("shape", [(10,), (2, 5)], ids=["2-D", "3-D"])
@pytest.mark.parametrize("targets", subsets(GATED), ids="+".join)
@pytest.mark.parametrize("dtype, quant", CELLS, ids=[f"{q or 'dense'}-{SHORT[d]}" for d, q in CELLS])
def test_every_subset_of_adapters_is_taken_and_follows_stock(dtype, quant, targets, shape, ranks):
    patterns = unequal(targets) if ranks == "unequal" else {}
    assert_follows_stock(all_of(dtype, quant), shape, target_modules=list(targets), **patterns)


@pytest.mark.parametrize("ranks", ["equal", "unequal"])
@pytest.mark.parametrize("form, targets", [(f, t) for f in ("packed", "plain") for t in subsets(MEMBERS[f])], ids=str)
@pytest.mark.parametrize("dtype, quant", CELLS, ids=[f"{q or 'dense'}-{SHORT[d]}" for d, q in CELLS])
def test_packed_and_plain_blocks_are_taken_and_follow_stock(dtype, quant, form, targets, ranks):
    patterns = unequal(targets) if ranks == "unequal" else {}
    assert_follows_stock(all_of(dtype, quant, form=form), target_modules=list(targets), **patterns)


@pytest.mark.parametrize("form", MEMBERS)
@pytest.mark.parametrize("activation", FORMULAS)
def test_every_activation_in_every_form(activation, form):
    setup = all_of(FP32, form=form, activation=activation)
    assert_follows_stock(setup)


@pytest.mark.parametrize("base", [FP32, BF16], ids=str)
@pytest.mark.parametrize("quant", QUANTS)
def test_every_4bit_format(quant, base):
    assert_follows_stock(BlockSetup(quant=quant, base=base, x=base, adapter=FP32, compute=base))


@pytest.mark.parametrize("packed", [s for s in subsets(GATED) if len(s) < 3], ids="+".join)
def test_4bit_and_dense_projections_in_one_block(packed):
    assert_follows_stock(BlockSetup(quant="nf4-double", quantized=packed))


@pytest.mark.parametrize("packed", [("up_proj",), ("gate_proj", "up_proj")], ids="+".join)
def test_unadapted_4bit_projections(packed):
    """Their packed weights and statistics are kept and dequantised as those of adapted ones."""
    assert_follows_stock(BlockSetup(quant="nf4-double", quantized=packed), target_modules=["down_proj"])


@pytest.mark.parametrize("quant", [None, "nf4"])
@pytest.mark.parametrize("form", MEMBERS)
@pytest.mark.parametrize(
    "layout",
    [
        {"base": BF16, "x": BF16, "adapter": FP32},
        {"base": BF16, "x": BF16, "adapter": FP32, "autocast": True},
        {"base": FP32, "x": FP32, "adapter": BF16},
        {"base": FP32, "x": FP32, "adapter": FP32, "autocast": True},
    ],
    ids=str,
)
def test_mixed_dtypes_follow_stock(layout, form, quant):
    """Behaviour 9; under autocast (10) the gradients keep the dtype of their parameter."""
    assert_follows_stock(BlockSetup(**layout, form=form, quant=quant, compute=layout["base"]))


@pytest.mark.parametrize("targets", subsets(GATED), ids="+".join)
def test_float32_input_of_a_4bit_block_that_computes_in_half_precision(targets):
    """What `prepare_model_for_kbit_training` leads to."""
    setup = BlockSetup(base=BF16, x=FP32, adapter=FP32, quant="nf4-double", compute=BF16)
    assert_follows_stock(setup, target_modules=list(targets))


@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
def test_backward_inside_autocast_equals_backward_outside(inside):
    """Behaviour 10."""
    setup = BlockSetup(autocast=True)
    expected = block_step(one_block(FastLoraConfig, setup), random_input(setup), setup, fused=True)
    model = one_block(FastLoraConfig, setup)
    x = random_input(setup)
    with autocast(True):
        y = model(x)
    with autocast(inside):
        y.backward(random_cotangent(y))
    assert_equal({"y": y.detach(), "dX": x.grad} | gradients(model), expected)


@pytest.mark.parametrize("with_bias", [(), *subsets(GATED)], ids="+".join)
@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trained"])
def test_base_bias_on_any_subset(with_bias, trainable):
    """Behaviour 22."""
    results = []
    for config_class in (LoraConfig, FastLoraConfig):
        model = one_block(config_class, M64)
        for name in GATED:
            base = getattr(mlp_of(model), name).base_layer
            if name not in with_bias:
                base.bias = None
            else:
                base.bias.requires_grad_(trainable)
        x = random_input(M64)
        results.append(block_step(model, x, M64, fused=config_class is FastLoraConfig))
    stock, ours = results
    assert len([name for name in stock if name.endswith("base_layer.bias")]) == (len(with_bias) if trainable else 0)
    assert_near(ours, stock)
    assert_near(ours, block_reference(model, M64, x, random_cotangent(ours["y"])))


@pytest.mark.parametrize("form", MEMBERS)
def test_bias_of_lora_B_is_added_and_trained(form):
    assert_follows_stock(all_of(FP64, form=form, lora_bias=True))
    assert_follows_stock(all_of(FP64, form=form, lora_bias=True), options={"chunk_size": 3})


def test_several_active_adapters_are_summed():
    """Behaviour 5: of different rank and scaling, and one of them not on every projection."""
    results = []
    for config_class in (LoraConfig, FastLoraConfig):
        model = one_block(config_class, M64)
        model.add_adapter("other", config_class(r=7, lora_alpha=3, target_modules=["gate_proj", "down_proj"]))
        model.double()
        randomize_adapters(model, 5)
        for active in (["default", "other"], ["other"], ["other", "default"]):
            model.base_model.set_adapter(active)
            x = random_input(M64)
            step = block_step(model, x, M64, fused=config_class is FastLoraConfig)
            assert_near(step, block_reference(model, M64, x, random_cotangent(step["y"])))
            results.append(step)
    for stock, ours in zip(results[:3], results[3:], strict=True):
        assert len(stock) > 5
        assert_near(ours, stock)


@pytest.mark.parametrize("zeroed", GATED)
def test_an_adapter_of_rank_unequal_to_the_others_changes_its_own_part_alone(zeroed):
    """Behaviour 8: neighbours in one concatenated matrix do not leak into one another."""
    model = one_block(FastLoraConfig, M64, **unequal(GATED))
    nn.init.zeros_(getattr(mlp_of(model), zeroed).lora_B["default"].weight)
    x = random_input(M64)
    found = block_step(model, x, M64, fused=True)
    assert_near(found, block_reference(model, M64, x, random_cotangent(found["y"])))
    for name in GATED:
        dA = found[f"base_model.model.mlp.{name}.lora_A.default.weight"]
        assert dA.shape[0] == RANKS[name]
        assert bool(dA.any()) is (name != zeroed)
        assert found[f"base_model.model.mlp.{name}.lora_B.default.weight"].any()


def test_fixtures_have_a_lora_B_that_matters():
    """Behaviour 2."""
    for form, members in MEMBERS.items():
        parameters = [(n, p) for n, p in one_block(FastLoraConfig, all_of(FP32, form=form)).named_parameters()]
        adapters = [p for n, p in parameters if "lora_" in n]
        assert len(adapters) == 2 * len(members)
        assert all(p.abs().max() > 0.1 for p in adapters)


# -- gradcheck --------------------------------------------------------------------------------------------------------


def gradcheck(model, setup) -> bool:
    """Against differences of forward, for x and every parameter that is trained."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    x = random_input(setup, (3,))
    assert taken_as_block(model(x))
    # fast mode checks random projections of the Jacobian: no wrong term can hide in all of them
    return torch.autograd.gradcheck(lambda x, *_: model(x), (x, *parameters), fast_mode=True)


@pytest.mark.parametrize("form", MEMBERS)
@pytest.mark.parametrize("activation", FORMULAS)
def test_gradcheck_of_every_activation(activation, form):
    setup = all_of(FP64, form=form, activation=activation)
    assert gradcheck(one_block(FastLoraConfig, setup), setup)


@pytest.mark.parametrize("options", [{}, {"recompute": "projections", "chunk_size": 2}], ids=str)
@pytest.mark.parametrize("form, missing", [(f, m) for f in MEMBERS for m in (None, *MEMBERS[f])], ids=str)
def test_gradcheck_with_each_projection_unadapted_in_turn(form, missing, options):
    setup = all_of(FP64, form=form, lora_bias=True)
    targets = [name for name in MEMBERS[form] if name != missing]
    model = one_block(FastLoraConfig, setup, target_modules=targets, **unequal(targets), **options)
    for name in targets:
        getattr(mlp_of(model), name).base_layer.bias.requires_grad_()
    assert gradcheck(model, setup)


# -- options ----------------------------------------------------------------------------------------------------------

CHUNKS = [None, 1, 3, 5, 1000]


@pytest.mark.parametrize("rows", [(2, 5), (0,), (1,)], ids=str)
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("recompute", ["activation", "projections"])
@pytest.mark.parametrize("form", MEMBERS)
def test_recomputation_and_chunks_change_no_result(form, recompute, chunk, rows):
    setup = all_of(FP64, form=form, lora_bias=True)
    expected = block_step(one_block(FastLoraConfig, setup), random_input(setup, rows), setup, fused=True)
    model = one_block(FastLoraConfig, setup, recompute=recompute, chunk_size=chunk)
    found = block_step(model, random_input(setup, rows), setup, fused=True)
    assert found.keys() == expected.keys()
    assert len(found) == 2 + 3 * len(MEMBERS[form])
    assert all(found[name].shape == expected[name].shape for name in found)
    assert max(error(found[name], expected[name]) for name in found) <= 1e-12


@pytest.mark.parametrize("quant", [None, "nf4-double"])
@pytest.mark.parametrize("options", [{"recompute": "projections"}, {"chunk_size": 4}], ids=str)
@pytest.mark.parametrize("targets", subsets(GATED), ids="+".join)
def test_options_follow_stock_in_half_precision(targets, options, quant):
    setup = BlockSetup(base=BF16, x=BF16, quant=quant, compute=BF16)
    assert_follows_stock(setup, options=options, target_modules=list(targets))


def test_many_chunks_lose_no_digits():
    """1000 chunks of one row: the gradients of parameters are added up in float32 at least."""
    whole, chunked = TwoX(), TwoX()
    results = {}
    for options in ({}, {"chunk_size": 1}):
        model = one_block(FastLoraConfig, MBF16, **options)
        x = random_input(MBF16, (1000,))
        found = block_step(model, x, MBF16, fused=True)
        results[str(options)] = found
    reference = block_reference(model, MBF16, x, random_cotangent(found["y"]))
    whole.add(results["{}"], results["{}"], reference)
    chunked.add(found, results["{}"], reference)
    chunked.check()


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("recompute", ["activation", "projections"])
@pytest.mark.parametrize(
    "setup", [MBF16, MNF4, all_of(FP32, form="packed"), BlockSetup(adapter=BF16), BlockSetup(autocast=True)], ids=str
)
def test_hidden_is_recomputed_bit_by_bit(setup, recompute, chunk, monkeypatch):
    seen = []
    forward = mlp_arithmetic.Combine.forward

    def recording(self, outputs):
        result = forward(self, outputs)
        seen.append([t.clone() for t in (*result, *outputs)])
        return result

    monkeypatch.setattr(mlp_arithmetic.Combine, "forward", recording)
    block_step(one_block(FastLoraConfig, setup, recompute=recompute, chunk_size=chunk), random_input(setup), setup)
    calls = 1 if chunk is None else 4
    assert len(seen) == 2 * calls
    for first, again in zip(seen[:calls], seen[calls:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


# -- autograd (13 to 17) ----------------------------------------------------------------------------------------------


@KINDS
def test_second_backward_over_one_graph_equals_the_first(setup):
    """Behaviour 13."""
    model = one_block(FastLoraConfig, setup)
    x = random_input(setup)
    y = model(x)
    assert taken_as_block(y)
    results = []
    for _ in range(2):
        x.grad = None
        y.backward(random_cotangent(y), retain_graph=True)
        results.append({"dX": x.grad} | gradients(model))
    assert_equal(results[1], results[0])
    assert len(results[0]) == 1 + 2 * len(MEMBERS[setup.form])


@KINDS
def test_a_branch_that_also_uses_x_is_unharmed(setup):
    """Behaviour 13."""
    results = []
    for model in block_twins(setup):
        x = random_input(setup)
        y = model(x)
        (y.square().mean() + (x.exp() * x).sum()).backward()
        results.append({"dX": x.grad} | gradients(model))
    assert taken_as_block(y)
    assert_near(results[1], results[0])


@KINDS
def test_double_backward_is_a_clear_error(setup):
    """Behaviour 14."""
    x = random_input(setup)
    (dx,) = torch.autograd.grad(one_block(FastLoraConfig, setup)(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dx.sum().backward()


@KINDS
def test_output_may_be_changed_in_place(setup):
    results = []
    for model in block_twins(setup):
        x = random_input(setup)
        y = model(x)
        y *= 2
        y += 1
        y.backward(random_cotangent(y))
        results.append({"y": y.detach(), "dX": x.grad} | gradients(model))
    assert_near(results[1], results[0])


INPUTS = {
    "1-D": lambda d: torch.randn(d),
    "2-D": lambda d: torch.randn(10, d),
    "3-D": lambda d: torch.randn(2, 5, d),
    "4-D": lambda d: torch.randn(2, 3, 2, d),
    "no rows": lambda d: torch.randn(0, d),
    "no rows in 3-D": lambda d: torch.randn(2, 0, d),
    "one row": lambda d: torch.randn(1, d),
    "one row in 3-D": lambda d: torch.randn(1, 1, d),
    "transposed": lambda d: torch.randn(d, 10).t(),
    "batch and sequence swapped": lambda d: torch.randn(5, 2, d).transpose(0, 1),
    "sliced features": lambda d: torch.randn(2, 5, d + 3)[..., 2:-1],
    "every second row": lambda d: torch.randn(9, d)[::2],
    "expanded batch": lambda d: torch.randn(1, 5, d).expand(3, -1, -1),
}
COTANGENTS = {
    "dense": lambda y: random_cotangent(y),
    "expanded": lambda y: torch.ones((), dtype=y.dtype).expand(y.shape),
    "transposed": lambda y: random_cotangent(y.transpose(0, -1)).transpose(0, -1),
    "sliced": lambda y: random_cotangent(y.new_empty(*y.shape[:-1], y.shape[-1] * 2))[..., ::2],
}


@pytest.mark.parametrize("cotangent", COTANGENTS)
@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("options", [{}, {"recompute": "projections", "chunk_size": 3}], ids=["plain", "chunked"])
def test_any_shape_and_stride_of_x_and_its_cotangent(options, kind, cotangent):
    """Behaviour 15."""
    model = one_block(FastLoraConfig, M64, **options)
    x = INPUTS[kind](M64.features[0]).double().requires_grad_()
    y = model(x)
    assert taken_as_block(y)
    assert y.shape == x.shape
    grad = COTANGENTS[cotangent](y)
    y.backward(grad)
    assert_near({"y": y.detach(), "dX": x.grad} | gradients(model), block_reference(model, M64, x, grad))


def backward_operators(model, x) -> Operators:
    y = model(x)
    assert taken_as_block(y)
    grad = random_cotangent(y)
    with Operators() as operators:
        y.backward(grad)
    return operators


@pytest.mark.parametrize("setup", [M64, MNF4], ids=str)
def test_without_gradient_of_x_no_product_reads_gate_or_up_in_backward(setup):
    """Behaviour 16."""
    d, f = setup.features
    model = one_block(FastLoraConfig, setup)
    operators = backward_operators(model, random_input(setup).requires_grad_(False))
    assert len(operators.with_weight(f, d)) == 1  # down, for d hidden
    assert operators.dequantisations == (0 if setup.quant is None else 1)
    gradients(model)
    x = random_input(setup).requires_grad_(False)
    found = block_step(model, x, setup, fused=True)
    assert_near(found, block_reference(model, setup, x, random_cotangent(found["y"])))


def test_without_gradient_of_x_and_of_gate_and_up_no_base_weight_is_read_in_backward():
    d, f = M64.features
    model = one_block(FastLoraConfig, M64, target_modules=["down_proj"])
    operators = backward_operators(model, random_input(M64).requires_grad_(False))
    assert operators.with_weight(f, d) == []
    assert len(operators.products) == 3  # u, dA, dB


@pytest.mark.parametrize(
    "frozen, count",
    [
        (("gate_proj", "lora_A"), 13),  # dA of both is one product, as before
        (("gate_proj", "lora_B"), 13),  # dB of both is one product where both are asked for
        (("down_proj", "lora_A"), 12),
        (("down_proj", "lora_B"), 12),
    ],
    ids=str,
)
def test_gradient_of_a_frozen_matrix_is_not_computed(frozen, count):
    """Behaviour 16."""
    member, part = frozen
    model = one_block(FastLoraConfig, M64)
    getattr(getattr(mlp_of(model), member), part)["default"].weight.requires_grad_(False)
    assert len(backward_operators(model, random_input(M64)).products) == count
    gradients(model)
    x = random_input(M64)
    found = block_step(model, x, M64, fused=True)
    assert f"base_model.model.mlp.{member}.{part}.default.weight" not in found
    assert len(found) == 7
    assert_near(found, block_reference(model, M64, x, random_cotangent(found["y"])))


@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
@pytest.mark.parametrize("options", [{}, {"recompute": "projections"}, {"chunk_size": 3}], ids=str)
def test_all_of_one_kind_frozen(part, options):
    model = one_block(FastLoraConfig, M64, **options)
    for name in GATED:
        getattr(getattr(mlp_of(model), name), part)["default"].weight.requires_grad_(False)
    x = random_input(M64)
    found = block_step(model, x, M64, fused=True)
    assert len(found) == 5
    assert_near(found, block_reference(model, M64, x, random_cotangent(found["y"])))


def test_fully_frozen_block_passes_the_gradient_of_x_on():
    model = one_block(FastLoraConfig, M64)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    x = random_input(M64)
    with SavedTensors(exclude=model) as saved:
        found = block_step(model, x, M64, fused=True)
    assert not [t for t in saved.tensors if t.shape[-1] == M64.features[0]]  # x itself
    assert_near(found, block_reference(model, M64, x, random_cotangent(found["y"])))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("options", [{}, {"chunk_size": 3}], ids=str)
def test_without_grad_there_is_no_node_nothing_saved_and_the_same_result(options, context):
    model = one_block(FastLoraConfig, M, **options)
    expected = model(random_input(M))
    with context(), SavedTensors() as saved:
        y = model(random_input(M))
    assert taken_as_block(expected)
    assert y.grad_fn is None
    assert saved.tensors == []
    assert torch.equal(y, expected)


@KINDS
@pytest.mark.parametrize("early_stop", [True, False], ids=["early stop", "no early stop"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("options", [{}, {"recompute": "projections", "chunk_size": 3}], ids=["plain", "chunked"])
def test_checkpointed_gradients_equal_plain_ones(setup, options, reentrant, early_stop):
    """Behaviour 17, our Function as the last operation."""
    model = one_block(FastLoraConfig, setup, **options)
    expected = block_step(model, random_input(setup), setup, fused=True)
    nodes = []

    def run(x):
        y = model(x.clone())
        nodes.append(taken_as_block(y))
        return y

    x = random_input(setup)
    with set_checkpoint_early_stop(early_stop):
        y = checkpoint(run, x, use_reentrant=reentrant)
        y.backward(random_cotangent(y))
    assert nodes[-1]
    assert len(nodes) == 2 or early_stop
    assert_equal({"y": y.detach(), "dX": x.grad} | gradients(model), expected)


@KINDS
def test_optimizer_steps_follow_stock(setup):
    models = block_twins(setup)
    for model in models:
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.05)
        for step in range(5):
            y = model(random_input(setup, seed=step))
            y.square().mean().backward()
            nn.utils.clip_grad_norm_(trained, 1.0)  # the loss is of fourth order and more in the parameters
            optimizer.step()
            optimizer.zero_grad()
    assert taken_as_block(y)
    stock, ours = ({n: p.detach() for n, p in m.named_parameters() if "lora_" in n} for m in models)
    start = dict(one_block(LoraConfig, setup).named_parameters())
    assert all(error(ours[name], start[name].detach()) > 1e-4 for name in ours)
    assert_near(ours, stock)


# -- stepping aside (22, 23, 25) --------------------------------------------------------------------------------------


def reason(model) -> str | None:
    refusal = why_not_block(read_block(mlp_of(model)))
    return None if refusal is None else refusal.reason


def assert_steps_aside(stock, ours, setup=M64) -> None:
    """The block is no node, and the result is still stock's. The projections may be fused on their own."""
    expected = block_step(stock, random_input(setup), setup)
    found = block_step(ours, random_input(setup), setup, fused=False)
    assert len(expected) >= 4
    assert_near(found, expected)


def count_hook(module, kind: str, calls: list) -> None:
    def hook(*_):
        calls.append(kind)

    getattr(module, f"register_{kind}_hook")(hook)


HOOKED = [
    "gate_proj",
    "up_proj",
    "down_proj",
    "act_fn",
    "gate_proj.base_layer",
    "down_proj.base_layer",
    "up_proj.lora_A.default",
    "down_proj.lora_B.default",
    "gate_proj.lora_dropout.default",
]


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
@pytest.mark.parametrize("where", HOOKED)
def test_hook_inside_a_block_fires_as_in_stock(where, kind):
    """Behaviour 25."""
    models = block_twins(M64)
    calls: tuple[list, list] = ([], [])
    assert reason(models[1]) is None
    for model, seen in zip(models, calls, strict=True):
        count_hook(mlp_of(model).get_submodule(where), kind, seen)
    assert_steps_aside(*models)
    assert calls[0] == calls[1] == [kind]
    assert where.partition(".")[0] in reason(models[1])


@pytest.mark.parametrize("where", ["gate_proj", "down_proj"])
def test_hook_on_an_unadapted_child_fires_as_in_stock(where):
    targets = [name for name in GATED if name != where]
    models = block_twins(M64, target_modules=targets)
    calls: tuple[list, list] = ([], [])
    for model, seen in zip(models, calls, strict=True):
        count_hook(mlp_of(model).get_submodule(where), "forward", seen)
    assert_steps_aside(*models)
    assert calls[0] == calls[1] == ["forward"]


def test_hook_that_changes_an_output_changes_the_result_as_in_stock():
    models = block_twins(M64)
    for model in models:
        mlp_of(model).up_proj.register_forward_hook(lambda _module, _args, y: y * 2)
    assert_steps_aside(*models)


def test_hook_on_the_block_itself_leaves_it_fused():
    model = one_block(FastLoraConfig, M64)
    calls: list = []
    count_hook(mlp_of(model), "forward", calls)
    block_step(model, random_input(M64), M64, fused=True)
    assert calls == ["forward"]


def test_removed_hook_gives_the_block_back():
    model = one_block(FastLoraConfig, M64)
    handle = mlp_of(model).gate_proj.register_forward_hook(lambda *_: None)
    block_step(model, random_input(M64), M64, fused=False)
    handle.remove()
    block_step(model, random_input(M64), M64, fused=True)


@pytest.mark.parametrize("member", GATED)
def test_module_to_save_is_used_and_trained(member):
    """Behaviour 22."""
    targets = [name for name in GATED if name != member]
    stock, ours = block_twins(M64, target_modules=targets, modules_to_save=[member])
    for model in (stock, ours):
        copied = getattr(mlp_of(model), member).modules_to_save["default"]
        copied.weight.data.mul_(1.5)  # another weight than the original's
    assert_steps_aside(stock, ours)
    found = block_step(ours, random_input(M64), M64)
    assert f"base_model.model.mlp.{member}.modules_to_save.default.weight" in found
    assert member in reason(ours)


@pytest.mark.parametrize("adapt_it", [True, False], ids=["adapted", "not adapted"])
@pytest.mark.parametrize("member", GATED)
def test_int8_sibling_runs_stock(member, adapt_it):
    """Behaviour 23."""
    bnb = pytest.importorskip("bitsandbytes")
    targets = [name for name in GATED if adapt_it or name != member]
    setup = BlockSetup(bias=False)

    def linear(name, in_features, out_features):
        dense = nn.Linear(in_features, out_features, bias=False)
        if name != member:
            return dense
        layer = bnb.nn.Linear8bitLt(in_features, out_features, bias=False, has_fp16_weights=False)
        layer.weight = bnb.nn.Int8Params(dense.weight.data, requires_grad=False, has_fp16_weights=False)
        return layer.to("cpu")

    results = []
    for config_class in (LoraConfig, FastLoraConfig):
        torch.manual_seed(0)
        base = OneBlock(Gated(linear, setup))
        base.is_loaded_in_8bit = True
        model = adapted(base, config_class, setup, targets, seed=0)
        x = random_input(setup)
        y = model(x)
        y.backward(random_cotangent(y))
        results.append({"y": y.detach(), "dX": x.grad} | gradients(model))
    assert not taken_as_block(y)
    assert len(results[0]) == 2 + 2 * len(targets)
    assert all(t.isfinite().all() for t in results[1].values())
    # an int8 layer quantises its input: where that differs in the last bit, a step of 1/127 may follow
    assert max(error(results[1][name], results[0][name]) for name in results[0]) < 1e-2
    assert member in reason(model)


def unknown_activation(model):
    mlp_of(model).act_fn = nn.Mish()


def hooked_activation(model):
    mlp_of(model).act_fn.register_forward_hook(lambda *_: None)


def replaced_activation(model):
    act = mlp_of(model).act_fn
    act.forward = lambda t: t * 2


def subclass_of_linear(model):
    class Doubled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    mlp_of(model).up_proj.base_layer.__class__ = Doubled


def trainable_base_weight(model):
    mlp_of(model).gate_proj.base_layer.weight.requires_grad_()


def disabled(model):
    model.base_model.disable_adapter_layers()


def merged(model):
    model.merge_adapter()


def one_merged(model):
    mlp_of(model).up_proj.merge()


def one_module_twice(model):
    mlp_of(model).up_proj = mlp_of(model).gate_proj


ASIDE = {
    unknown_activation: "the activation torch.nn.modules.activation.Mish is not known",
    hooked_activation: "the activation act_fn has hooks or a replaced forward",
    replaced_activation: "the activation act_fn has hooks or a replaced forward",
    subclass_of_linear: "up_proj: the base layer is a ",
    trainable_base_weight: "gate_proj: the base weight is trainable",
    disabled: "gate_proj: the adapters are disabled",
    merged: "gate_proj: an adapter is merged",
    one_merged: "up_proj: an adapter is merged",
    one_module_twice: "two projections are the same module",
}


@pytest.mark.parametrize("change", ASIDE, ids=lambda change: change.__name__)
def test_block_steps_aside_with_a_reason(change):
    stock, ours = block_twins(M64)
    block_step(ours, random_input(M64), M64, fused=True)
    for model in (stock, ours):
        change(model)
    x = [random_input(M64) for _ in range(2)]
    results = []
    for model, leaf in zip((stock, ours), x, strict=True):
        y = model(leaf)
        y.backward(random_cotangent(y))
        results.append({"y": y.detach(), "dX": leaf.grad} | gradients(model))
    assert not taken_as_block(y)
    assert reason(ours).startswith(ASIDE[change])
    assert_near(results[1], results[0])


def test_every_block_guard_has_a_test():
    guards = {guard.__name__ for guard in BLOCK_GUARDS}
    tested = {"switched_off", "nothing_adapted", "other_arguments", "unknown_member"}
    assert guards == tested | {"one_module_twice", "unknown_activation"}


def test_dropout_makes_a_block_step_aside_in_training_alone():
    model = one_block(FastLoraConfig, M64, lora_dropout=0.5)
    model.train()
    assert "lora_dropout" in reason(model)
    torch.manual_seed(3)
    found = block_step(model, random_input(M64), M64, fused=False)
    torch.manual_seed(3)
    stock = one_block(LoraConfig, M64, lora_dropout=0.5).train()
    torch.manual_seed(3)
    assert_near(found, block_step(stock, random_input(M64), M64))
    model.eval()
    assert reason(model) is None
    block_step(model, random_input(M64), M64, fused=True)


def test_disabled_block_gives_the_base_result_bit_for_bit_and_is_fused_again():
    """Behaviour 4."""
    model = one_block(FastLoraConfig, M64)
    x = random_input(M64)
    base = one_block(LoraConfig, M64)
    with base.disable_adapter(), model.disable_adapter():
        assert torch.equal(model(x), base(x))
    assert taken_as_block(model(x))


def test_block_whose_projections_have_no_active_adapter_runs_stock():
    stock, ours = block_twins(M64)
    for model in (stock, ours):
        model.base_model.set_adapter([])
    assert reason(ours) == "no projection of the block has an active adapter"
    assert torch.equal(ours(random_input(M64)), stock(random_input(M64)))


@pytest.mark.parametrize("call", [lambda m, x: m(x=x), lambda m, x: m(x, *())], ids=["by name", "by position"])
def test_call_by_name_runs_stock(call):
    model = one_block(FastLoraConfig, M64)
    x = random_input(M64)
    y = call(mlp_of(model), x)
    assert taken_as_block(y) is (call(lambda *a, **k: bool(a), x))
    assert_near({"y": y.detach()}, {"y": one_block(LoraConfig, M64)(x).detach()})


@pytest.mark.parametrize("swapped", ["gelu", "relu", "gelu_pytorch_tanh"])
def test_activation_swapped_after_installation_is_noticed(swapped):
    """The object is looked at in each call."""
    model = one_block(FastLoraConfig, M64)
    block_step(model, random_input(M64), M64, fused=True)
    mlp_of(model).act_fn = ACT2FN[swapped]
    x = random_input(M64)
    found = block_step(model, x, M64, fused=True)
    setup = all_of(FP64, activation=swapped)
    assert_near(found, block_reference(model, setup, x, random_cotangent(found["y"])))


def test_wrong_dtype_of_x_raises_as_in_stock():
    stock, ours = block_twins(M64)
    x = random_input(M)
    messages = []
    for model in (stock, ours):
        with pytest.raises(RuntimeError) as raised:
            model(x)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


# -- what remains of a block that steps aside -------------------------------------------------------------------------


def input_nodes(model, x) -> tuple[set[str], int]:
    """Names of the nodes that made gate and up, and how many nodes they are."""
    seen = []
    act = mlp_of(model).act_fn
    act.register_forward_hook(lambda _m, args, _y: seen.append(args[0].grad_fn))
    mul = model(x).grad_fn.next_functions  # the node of down, whose input is hidden
    hidden = next(node for node, _ in mul if node is not None and node.name().startswith("MulBackward"))
    up = hidden.next_functions[1][0]
    return {seen[0].name(), up.name()}, len({id(seen[0]), id(up)})


@pytest.mark.parametrize("why", ["hook on down_proj", "fuse_mlp=False", "unknown activation"])
def test_gate_and_up_of_a_block_that_steps_aside_share_a_node(why):
    """A block that steps aside still shares its input, once it has been seen."""
    model = one_block(FastLoraConfig, M64, fuse_mlp=why != "fuse_mlp=False")
    if why == "hook on down_proj":
        mlp_of(model).down_proj.register_forward_hook(lambda *_: None)
    if why == "unknown activation":
        mlp_of(model).act_fn = nn.Mish()
    row = fusion_report(model).rows[0]
    assert (row.kind, row.path) == ("linear", "fused")
    block_step(model, random_input(M64), M64, fused=False)
    found = block_step(model, random_input(M64), M64, fused=False)
    shared = [row for row in fusion_report(model).rows if row.kind == "shared_input"]
    assert [row.path for row in shared] == ["fused"]
    assert [name.rpartition(".")[2] for name in shared[0].members] == ["gate_proj", "up_proj"]
    if why != "unknown activation":
        assert_near(found, block_step(one_block(LoraConfig, M64), random_input(M64), M64))
    names, count = input_nodes(model, random_input(M64))
    assert names == {"LoraGroupFunctionBackward"}
    assert count == 1


# -- report, installation, copies -------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", MEMBERS)
def test_a_fused_block_is_one_row(form):
    setup = all_of(FP64, form=form)
    for targets in subsets(MEMBERS[form]):
        model = one_block(FastLoraConfig, setup, target_modules=list(targets))
        report = fusion_report(model)
        assert report.counts == {("gated_mlp", "fused"): 1}
        (row,) = report.rows
        assert (row.name, row.reason) == ("base_model.model.mlp", None)
        assert {name.rpartition(".")[2] for name in row.members} == set(targets)
        block_step(model, random_input(setup), setup, fused=True)
        assert fusion_report(model).rows == report.rows


def test_rows_of_a_block_that_steps_aside_say_why():
    model = one_block(FastLoraConfig, M64)
    mlp_of(model).act_fn = nn.Mish()
    block_step(model, random_input(M64), M64, fused=False)
    rows = fusion_report(model).rows
    assert sorted(name for row in rows for name in row.members) == sorted(
        f"base_model.model.mlp.{name}" for name in GATED
    )
    down = next(row for row in rows if row.members[0].endswith("down_proj"))
    assert (down.kind, down.path) == ("linear", "fused")
    assert down.reason == "not as one block: the activation torch.nn.modules.activation.Mish is not known"


@pytest.mark.parametrize("form", MEMBERS)
def test_unfuse_gives_the_class_back_and_fuse_takes_it_again(form):
    setup = all_of(FP64, form=form)
    model = one_block(FastLoraConfig, setup)
    mlp = mlp_of(model)
    stock_class = type(mlp_of(one_block(LoraConfig, setup)))
    assert isinstance(mlp, stock_class)
    assert isinstance(mlp, FastLoraGatedMLP)
    expected = block_step(model, random_input(setup), setup, fused=True)
    unfuse(model)
    assert type(mlp) is stock_class
    assert not [name for name in vars(mlp) if "fast" in name]
    assert_near(block_step(model, random_input(setup), setup, fused=False), expected)
    fuse(model)
    assert_equal(block_step(model, random_input(setup), setup, fused=True), expected)


def test_a_block_wins_over_a_shared_input():
    """One owner for a module, and one node for its layers."""
    model = one_block(FastLoraConfig, M64)
    for _ in range(3):
        block_step(model, random_input(M64), M64, fused=True)
    assert fusion_report(model).counts == {("gated_mlp", "fused"): 1}


@pytest.mark.parametrize("form", MEMBERS)
def test_copies_are_fused_and_independent(form):
    setup = all_of(FP64, form=form)
    model = one_block(FastLoraConfig, setup)
    expected = block_step(model, random_input(setup), setup, fused=True)
    twin = copy.deepcopy(model)
    assert type(mlp_of(twin)) is type(mlp_of(model))
    assert_equal(block_step(twin, random_input(setup), setup, fused=True), expected)
    getattr(mlp_of(twin), MEMBERS[form][0]).lora_B["default"].weight.data.zero_()
    assert_equal(block_step(model, random_input(setup), setup, fused=True), expected)


@pytest.mark.parametrize("form", MEMBERS)
@pytest.mark.parametrize("way", ["pickle", "torch.save"])
def test_pickled_blocks_come_back_fused(way, form):
    setup = all_of(FP64, form=form)
    mlp = mlp_of(one_block(FastLoraConfig, setup))
    if way == "pickle":
        back = pickle.loads(pickle.dumps(mlp))
    else:
        buffer = io.BytesIO()
        torch.save(mlp, buffer)
        buffer.seek(0)
        back = torch.load(buffer, weights_only=False)
    assert type(back) is type(mlp)
    y = back(random_input(setup))
    assert taken_as_block(y)
    assert torch.equal(y, mlp(random_input(setup)))


def test_names_and_keys_are_stocks():
    """Behaviour 26."""
    stock, ours = block_twins()
    assert list(ours.state_dict()) == list(stock.state_dict())
    assert [name for name, _ in ours.named_modules()] == [name for name, _ in stock.named_modules()]
