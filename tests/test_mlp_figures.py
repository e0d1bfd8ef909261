"""How much work and memory an MLP block takes, counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from counting import LiveBytes, Operators, SavedTensors, storage_key
from mlp_models import (
    GATED,
    M64,
    MBF16,
    MEMBERS,
    MNF4,
    BlockSetup,
    M,
    mlp_of,
    one_block,
    taken_as_block,
)
from models import QUANTS, autocast, random_cotangent, random_input
from peft import LoraConfig
from torch import Tensor
from torch.utils._pytree import tree_leaves

from peft_fastlora import FastLoraConfig

BF16, FP32 = torch.bfloat16, torch.float32
LAYOUTS = {
    "fp32": M,
    "bf16": MBF16,
    "bf16, adapters fp32": BlockSetup(base=BF16, x=BF16),
    "autocast": BlockSetup(base=BF16, x=BF16, autocast=True),
}


def step(model, setup, shape=(2, 5)) -> tuple[Operators, Operators]:
    x = random_input(setup, shape)
    with Operators() as forward, autocast(setup.autocast):
        y = model(x)
    assert taken_as_block(y) is isinstance(model.peft_config["default"], FastLoraConfig)
    grad = random_cotangent(y)
    with Operators() as backward:
        y.backward(grad)
    return forward, backward


def products(model, setup) -> tuple[int, int]:
    forward, backward = step(model, setup)
    return len(forward.products), len(backward.products)


# -- products (29) ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gated_block_takes_8_and_13_products(layout):
    """Behaviour 29: one product with the lora_A of gate and up, one for both dA, one for both dB, one for dX."""
    setup = LAYOUTS[layout]
    assert products(one_block(FastLoraConfig, setup), setup) == (8, 13)
    assert products(one_block(LoraConfig, setup), setup) == (9, 15)


@pytest.mark.parametrize("ranks", [{"up_proj": 2, "down_proj": 7}, {"gate_proj": 1}], ids=str)
def test_unequal_ranks_take_as_many_products(ranks):
    assert products(one_block(FastLoraConfig, rank_pattern=ranks), M) == (8, 13)


@pytest.mark.parametrize("form", ["packed", "plain"])
def test_two_projections_take_one_skinny_product_more_than_stock(form):
    """The rank-space tensor of the first one, computed again instead of kept."""
    setup = BlockSetup(form=form)
    assert products(one_block(FastLoraConfig, setup), setup) == (6, 11)
    assert products(one_block(LoraConfig, setup), setup) == (6, 10)


def test_recomputed_projections_take_the_products_of_their_forward_again():
    assert products(one_block(FastLoraConfig, recompute="projections"), M) == (8, 18)


def test_each_base_weight_is_read_once_in_forward_and_once_in_backward():
    forward, backward = step(one_block(FastLoraConfig), M)
    d, f = M.features
    for operators in (forward, backward):
        assert len(operators.with_weight(f, d)) == 3


# -- saved bytes, weights included (28) -------------------------------------------------------------------------------


def saved_by_llama_8b(config_class) -> int:
    setup = MetaSetup(base=BF16, x=BF16, adapter=BF16, rank=64, bias=False)
    with torch.device("meta"):
        model = one_block_on_meta(config_class, setup)
        x = torch.empty(1, 2048, 4096, dtype=BF16, requires_grad=True)
    with SavedTensors() as saved:
        y = model(x)
    assert taken_as_block(y) is (config_class is FastLoraConfig)
    return saved.bytes


@dataclass(frozen=True)
class MetaSetup(BlockSetup):
    """The MLP of Llama-3.1-8B."""

    @property
    def features(self) -> tuple[int, int]:
        return 4096, 14336


def one_block_on_meta(config_class, setup):
    from mlp_models import Gated, OneBlock, make_linear
    from peft import get_peft_model

    base = OneBlock(Gated(make_linear(setup), setup))
    return get_peft_model(base, config_class(r=setup.rank, target_modules=list(GATED))).to(setup.adapter)


def test_llama_8b_saves_two_tensors_less_than_stock():
    """Behaviour 28, distinct storages and weights included."""
    assert saved_by_llama_8b(LoraConfig) == 611_844_096
    assert saved_by_llama_8b(FastLoraConfig) <= 494_141_440


# -- saved activation bytes -------------------------------------------------------------------------------------------

TOKENS = 64


@dataclass(frozen=True)
class Wide(BlockSetup):
    """f = 3.5 d. d is large enough that [tokens, r] stays small beside [tokens, f], and no larger."""

    rank: int = 16
    bias: bool = False

    @property
    def features(self) -> tuple[int, int]:
        return 256, 896


# layout -> (setup, what stock keeps at least); in units of one [tokens, f] tensor in bf16
ACTIVATIONS = {
    "bf16": (Wide(base=BF16, x=BF16, adapter=BF16), 4.3),
    "bf16, adapters fp32": (Wide(base=BF16, x=BF16), 6.1),
    "autocast": (Wide(base=BF16, x=BF16, autocast=True), 4.7),
}


def activation_units(config_class, setup, **options) -> float:
    model = one_block(config_class, setup, **options)
    with SavedTensors(exclude=model) as saved, autocast(setup.autocast):
        y = model(random_input(setup, (2, TOKENS // 2)))
    assert taken_as_block(y) is (config_class is FastLoraConfig)
    return saved.bytes / (TOKENS * setup.features[1] * 2)


@pytest.mark.parametrize("layout", ACTIVATIONS)
def test_activations_kept_are_those_of_gate_and_up_and_x(layout):
    setup, stock = ACTIVATIONS[layout]
    assert activation_units(LoraConfig, setup) >= stock
    kept = activation_units(FastLoraConfig, setup)
    assert 2 < kept <= 2.40


@pytest.mark.parametrize("layout", ACTIVATIONS)
def test_with_recomputed_projections_x_alone_is_kept(layout):
    setup, _ = ACTIVATIONS[layout]
    assert activation_units(FastLoraConfig, setup, recompute="projections") <= 0.40
    assert activation_units(FastLoraConfig, setup, recompute="projections", chunk_size=16) <= 0.40


@pytest.mark.parametrize("layout", ACTIVATIONS)
def test_chunks_keep_no_more(layout):
    setup, _ = ACTIVATIONS[layout]
    assert activation_units(FastLoraConfig, setup, chunk_size=24) <= 2.40


def test_plain_block_keeps_one_of_the_activations_input_and_output():
    """Stock keeps both."""
    setup = Wide(base=BF16, x=BF16, adapter=BF16, form="plain", activation="gelu")
    assert activation_units(LoraConfig, setup) > 2.2
    assert activation_units(FastLoraConfig, setup) < 1.4


@pytest.mark.parametrize("layout", ACTIVATIONS)
def test_nothing_in_float32_of_the_size_of_x_is_kept(layout):
    """Behaviour 11: stock keeps up to three float32 copies of x."""
    setup, _ = ACTIVATIONS[layout]
    model = one_block(FastLoraConfig, setup)
    with SavedTensors(exclude=model) as saved, autocast(setup.autocast):
        model(random_input(setup, (TOKENS,)))
    assert saved.tensors
    assert not [t for t in saved.tensors if t.dtype is FP32 and t.shape[-1] != setup.rank]


# -- live bytes -------------------------------------------------------------------------------------------------------


class PeakBytes(LiveBytes):
    """The largest number of bytes alive after any operator, and the largest tensor that was born."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = super().__torch_dispatch__(func, types, args, kwargs)
        born = [t for t in tree_leaves(result) if isinstance(t, Tensor) and storage_key(t) not in given]
        self.largest = max([self.largest, *(t.numel() for t in born)])
        self.peak = max(self.peak, self.bytes)
        return result


def run_and_watch(config_class, setup, tokens, **options) -> tuple[PeakBytes, int]:
    """What forward and backward together did, and the peak of backward alone."""
    model = one_block(config_class, setup, **options)
    x = random_input(setup, (tokens,))
    with PeakBytes() as watched:
        with autocast(setup.autocast):
            y = model(x)
        grad = random_cotangent(y)
        watched.peak = 0
        y.backward(grad)
    assert taken_as_block(y) is (config_class is FastLoraConfig)
    return watched, watched.peak


WATCHED = {
    **{name: setup for name, (setup, _) in ACTIVATIONS.items()},
    "fp32": Wide(),
    "nf4, compute bf16": Wide(base=BF16, x=BF16, quant="nf4", compute=BF16),
}


@pytest.mark.parametrize("options", [{}, {"recompute": "projections"}, {"chunk_size": 50}], ids=str)
@pytest.mark.parametrize("layout", WATCHED)
def test_peak_of_backward_is_below_stocks(layout, options):
    setup = WATCHED[layout]
    _, stock = run_and_watch(LoraConfig, setup, 256)
    _, ours = run_and_watch(FastLoraConfig, setup, 256, **options)
    assert 0 < ours < stock


@pytest.mark.parametrize("layout", ACTIVATIONS)
def test_with_chunks_and_recomputation_nothing_is_as_large_as_hidden(layout):
    """Long contexts: O(tokens * d) memory per block, in forward and in backward."""
    setup, _ = ACTIVATIONS[layout]
    hidden = 256 * setup.features[1]

    def largest(**options) -> int:
        return run_and_watch(FastLoraConfig, setup, 256, **options)[0].largest

    assert largest(recompute="projections", chunk_size=64) < hidden
    # the instrument: it sees such tensors where there are any
    assert largest(recompute="projections") >= hidden
    assert largest() >= hidden


def test_peak_with_chunks_and_recomputation_is_far_below_stocks():
    setup, _ = ACTIVATIONS["bf16"]
    _, stock = run_and_watch(LoraConfig, setup, 512)
    _, ours = run_and_watch(FastLoraConfig, setup, 512, recompute="projections", chunk_size=64)
    assert ours < stock / 2


# -- 4-bit (30) -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", MEMBERS)
@pytest.mark.parametrize("quant", QUANTS)
def test_each_4bit_weight_is_dequantised_once_in_forward_and_once_in_backward(quant, form):
    """Behaviour 30."""
    setup = BlockSetup(quant=quant, form=form)
    forward, backward = step(one_block(FastLoraConfig, setup), setup)
    assert forward.dequantisations == len(MEMBERS[form])
    assert backward.dequantisations == len(MEMBERS[form])


def test_recomputed_projections_are_dequantised_again():
    _, backward = step(one_block(FastLoraConfig, MNF4, recompute="projections"), MNF4)
    assert backward.dequantisations == 5  # gate and up for their outputs, then all three for d hidden and dX


@pytest.mark.parametrize("form", MEMBERS)
@pytest.mark.parametrize("quant", QUANTS)
def test_nothing_of_dense_weight_size_is_saved_for_4bit_weights(quant, form):
    """Behaviour 30: the packed weights and their statistics are kept, and dequantised again."""
    setup = BlockSetup(quant=quant, form=form, base=BF16, x=BF16, compute=BF16, adapter=BF16)
    model = one_block(FastLoraConfig, setup)
    with SavedTensors() as saved:
        y = model(random_input(setup, (4,)))
    assert taken_as_block(y)
    packed = {storage_key(getattr(mlp_of(model), name).base_layer.weight) for name in MEMBERS[form]}
    assert packed <= {storage_key(t) for t in saved.tensors}
    d, f = setup.features
    assert all(t.untyped_storage().nbytes() < d * f * 2 for t in saved.tensors)


@pytest.mark.parametrize("setup", [M, M64, MBF16, MNF4], ids=str)
def test_parameters_are_saved_by_reference(setup):
    """Beyond what the model holds anyway and its statistics, only x, the outputs of gate and up, and h of down."""
    model = one_block(FastLoraConfig, setup)
    with SavedTensors(exclude=model) as saved:
        y = model(random_input(setup, (7,)))
    assert taken_as_block(y)
    d, f = setup.features
    rows = sorted(tuple(t.shape) for t in saved.tensors if t.dim() == 2 and t.shape[0] == 7)
    assert rows == sorted([(7, d), (7, f), (7, f), (7, setup.rank)])
    if setup.quant is None:
        assert len(saved.tensors) == 4
