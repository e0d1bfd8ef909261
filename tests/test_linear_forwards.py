"""Subclasses of `nn.Linear` with a forward of their own: fused where it still computes x W^T + b, as Falcon's does."""

from __future__ import annotations

import pytest
import torch
from mlp_models import MLP_NODE
from models import (
    OneProjection,
    Setup,
    adapted,
    fused_members,
    gradients,
    layer_of,
    random_cotangent,
    random_input,
    randomize_adapters,
    train_step,
)
from oracle import NEAR_EXACT, assert_equal, assert_near_exact, error, reference_step
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F

from peft_fastlora import FastLoraConfig, fusion_report
from peft_fastlora.detect import is_linear_forward

BF16 = torch.bfloat16
FLOOR = 4 * 2**-24
OTHER = 2.0


class Falcons(nn.Linear):
    def forward(self, input):
        product = input @ self.weight.T
        if self.bias is None:
            return product
        return product + self.bias


class BiasFirst(nn.Linear):
    def forward(self, x):
        return x @ self.weight.T if self.bias is None else self.bias + x @ self.weight.T


class NeverBias(nn.Linear):
    def forward(self, x):
        return x @ self.weight.T


class OnlyWithBias(nn.Linear):
    def forward(self, x):
        return x if self.bias is None else x @ self.weight.T + self.bias


class AlwaysBias(nn.Linear):
    def forward(self, x):
        return x @ self.weight.T + self.bias


class Transposed(nn.Linear):
    def forward(self, x):
        return x @ self.weight


class BiasTwice(nn.Linear):
    def forward(self, x):
        product = x @ self.weight.T
        return product if self.bias is None else product + self.bias + self.bias


class InputAdded(nn.Linear):
    def forward(self, x):
        product = x @ self.weight.T
        return product if self.bias is None else product + x


class TruthOfBias(nn.Linear):
    def forward(self, x):
        return x @ self.weight.T + self.bias if self.bias else x @ self.weight.T


class Scaled(nn.Linear):
    def forward(self, x):
        product = 2 * (x @ self.weight.T)
        return product if self.bias is None else product + self.bias


class ReadsMode(nn.Linear):
    def forward(self, x):
        product = x @ self.weight.T if self.training else x @ self.weight.T.T
        return product if self.bias is None else product + self.bias


class ReadsGlobal(nn.Linear):
    def forward(self, x):
        product = x @ self.weight.T
        return product if self.bias is None else product + OTHER


class SecondArgument(nn.Linear):
    def forward(self, x, y=None):
        product = x @ self.weight.T
        return product if self.bias is None else product + self.bias


class CallsSuper(nn.Linear):
    def forward(self, x):
        return super().forward(x)


@pytest.mark.parametrize("cls", [Falcons, BiasFirst])
def test_x_w_b_is_recognised(cls):
    assert is_linear_forward(cls.forward)


OTHERS = (
    NeverBias,
    OnlyWithBias,
    AlwaysBias,
    Transposed,
    BiasTwice,
    InputAdded,
    TruthOfBias,
    Scaled,
    ReadsMode,
    ReadsGlobal,
    SecondArgument,
    CallsSuper,
)


@pytest.mark.parametrize("cls", OTHERS)
def test_other_formulas_are_refused(cls):
    assert not is_linear_forward(cls.forward)


def one(config_class, cls, setup, seed=0):
    torch.manual_seed(seed)
    base = OneProjection(cls(*setup.features, bias=setup.bias).to(setup.base))
    return adapted(base, config_class, setup, ["proj"], seed)


@pytest.mark.parametrize("cls", [Scaled, ReadsMode, BiasTwice])
def test_other_formulas_run_stock_with_a_reason(cls):
    stock, ours = (train_step(one(kind, cls, Setup()), random_input()) for kind in (LoraConfig, FastLoraConfig))
    assert_equal(ours, stock)
    (row,) = fusion_report(one(FastLoraConfig, cls, Setup())).rows
    assert (row.path, row.reason) == ("stock", f"the base layer is a {__name__}.{cls.__name__}")


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "nobias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("cls", [Falcons, BiasFirst])
def test_near_exact_and_taken(cls, dtype, bias):
    setup = Setup(base=dtype, x=dtype, adapter=dtype, bias=bias)
    model, x = one(FastLoraConfig, cls, setup), random_input(setup)
    found = train_step(model, x, setup, fused=True)
    assert_near_exact(found, reference_step(model, x, random_cotangent(found["y"])))


@pytest.mark.parametrize(
    "setup",
    [
        Setup(base=BF16, x=BF16, adapter=BF16),
        Setup(base=BF16, x=BF16),
        Setup(base=BF16, x=BF16, bias=False),
        Setup(bias=False, autocast=True),
        Setup(base=BF16, x=torch.float32, autocast=True),
    ],
    ids=str,
)
def test_error_is_at_most_twice_stocks(setup):
    for seed in range(12):
        steps = []
        for kind in (LoraConfig, FastLoraConfig):
            model, x = one(kind, Falcons, setup, seed), random_input(setup, seed=seed)
            steps.append(train_step(model, x, setup, seed, fused=kind is FastLoraConfig))
        stock, ours = steps
        exact = reference_step(model, x, random_cotangent(ours["y"], seed))
        assert stock.keys() == ours.keys() == exact.keys()
        for name, reference in exact.items():
            assert ours[name].dtype is stock[name].dtype
            assert error(ours[name], reference) <= 2 * max(error(stock[name], reference), FLOOR), (seed, name)


def test_a_wider_bias_under_autocast_runs_stock():
    """The bias is added outside of the product, so the result is as wide as the bias: not what the node gives."""
    setup = Setup(autocast=True)
    stock, ours = (
        train_step(one(kind, Falcons, setup), random_input(), setup, fused=False)
        for kind in (LoraConfig, FastLoraConfig)
    )
    assert stock["y"].dtype is torch.float32
    assert_equal(ours, stock)
    with torch.autocast("cpu", BF16):
        (row,) = fusion_report(one(FastLoraConfig, Falcons, setup)).rows
    assert row.reason == f"the base layer is a {__name__}.Falcons, which adds a float32 bias to its product"


def test_the_forward_is_asked_at_each_call(monkeypatch):
    model = one(FastLoraConfig, Falcons, Setup())
    train_step(model, random_input(), fused=True)
    monkeypatch.setattr(Falcons, "forward", lambda self, x: 3 * F.linear(x, self.weight))
    train_step(model, random_input(), fused=False)
    monkeypatch.undo()
    train_step(model, random_input(), fused=True)
    layer_of(model).base_layer.forward = nn.Linear.forward.__get__(layer_of(model).base_layer)
    train_step(model, random_input(), fused=False)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "nobias"])
def test_falcon_trains_fused_as_stock(bias):
    from transformers import FalconConfig, FalconForCausalLM

    config = FalconConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        bias=bias,
        alibi=False,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    targets = ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]
    ids = torch.randint(64, (2, 10))
    steps = []
    for kind in (LoraConfig, FastLoraConfig):
        torch.manual_seed(0)
        model = get_peft_model(FalconForCausalLM(config).double(), kind(r=4, target_modules=targets))
        model.double()
        randomize_adapters(model, 0)
        seen = []
        for name, module in model.named_modules():
            if name.endswith(".mlp"):
                module.register_forward_hook(lambda _, __, out, seen=seen: seen.append(out.grad_fn.name()))
        loss = model(ids, labels=ids).loss
        loss.backward()
        steps.append({"loss": loss.detach()} | gradients(model))
    stock, ours = steps
    assert seen == [MLP_NODE] * 2
    assert fusion_report(model).counts == {("linear", "fused"): 4, ("gated_mlp", "fused"): 2}
    assert len(fused_members(model)) == 8
    assert stock.keys() == ours.keys()
    # float64, so what the order of sums makes is far below what a wrong term would
    assert max(error(ours[name], stock[name]) for name in stock) < 1e3 * NEAR_EXACT[torch.float64]
