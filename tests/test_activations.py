"""Each activation computes what the module that it stands for computes, and its derivative."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from mlp_models import FORMULAS
from oracle import error
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import activations as hf
from transformers.activations import ACT2FN

from peft_fastlora import activations
from peft_fastlora.activations import FUNCTIONS, Activation, activation_of

MODULES = {
    **{f"transformers {name}": ACT2FN[name] for name in FORMULAS},
    "nn.SiLU": nn.SiLU(),
    "nn.GELU": nn.GELU(),
    "nn.GELU tanh": nn.GELU(approximate="tanh"),
    "nn.ReLU": nn.ReLU(),
    "nn.ReLU in place": nn.ReLU(inplace=True),
    "nn.SiLU in place": nn.SiLU(inplace=True),
    "nn.Sigmoid": nn.Sigmoid(),
    "nn.Tanh": nn.Tanh(),
}
if "gelu_python_tanh" in ACT2FN:
    MODULES["transformers gelu_python_tanh"] = ACT2FN["gelu_python_tanh"]
# by the name in FORMULAS
REFERENCE = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_new",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu_squared": "relu2",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
}
ALL = [value for value in vars(activations).values() if isinstance(value, Activation)]
# The result and the derivative are sums of at most four terms no larger than |x|, each rounded once or twice.
ULPS = {torch.float64: 16 * 2**-53, torch.float32: 16 * 2**-24, torch.bfloat16: 2**-8}
# transformers writes sqrt(2 / pi) with ten digits in this one
DIGITS = {"transformers gelu_fast": 1e-10}
# Where torch rounds once, a derivative in half precision is the float64 one, rounded: off by half a unit, 2^-9 of its
# value, plus float32's own error, which is a few 2^-24 of the terms that cancel near a zero of the derivative.
ROUNDED_ONCE = 2**-9


def known(module: nn.Module) -> Activation:
    activation = activation_of(module)
    assert activation is not None
    return activation


def stock_derivative(module: nn.Module, pre: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    leaf = pre.detach().clone().requires_grad_()
    out = module(leaf.clone())  # some compute in place
    out.backward(grad)
    return out.detach(), leaf.grad


def derivative(activation: Activation, pre: Tensor, grad: Tensor) -> Tensor:
    out = torch.full_like(pre, float("nan"))
    activation.backward(grad, pre, out)
    return out


def exact_derivative(activation: Activation, pre: Tensor, grad: Tensor) -> Tensor:
    leaf = pre.detach().double().requires_grad_()
    FORMULAS[REFERENCE[activation.name]](leaf).backward(grad.double())
    return leaf.grad


def values(dtype: torch.dtype, n: int = 2000, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    pre, grad = (torch.randn(n, generator=generator, dtype=torch.float64) for _ in range(2))
    return (pre * 2).to(dtype), grad.to(dtype)


def test_every_activation_is_tested():
    assert {activation.name for activation in ALL} == REFERENCE.keys()
    assert {known(module).name for module in MODULES.values()} == REFERENCE.keys()
    assert set(FUNCTIONS.values()) <= set(ALL)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_forward_equals_the_module(name, dtype):
    module = MODULES[name]
    pre, _ = values(dtype)
    found, expected = known(module).forward(pre), module(pre.clone())
    assert found.dtype == expected.dtype == dtype
    # formulas that transformers writes out in half precision round at each step, where ours rounds once
    allowed = max(ULPS[dtype] * (2 if dtype is torch.bfloat16 else 1), DIGITS.get(name, 0))
    assert error(found, expected) <= allowed


@pytest.mark.parametrize("name", MODULES)
def test_derivative_equals_that_of_the_module(name):
    module = MODULES[name]
    pre, grad = values(torch.float64)
    _, expected = stock_derivative(module, pre, grad)
    assert error(derivative(known(module), pre, grad), expected) <= max(ULPS[torch.float64], DIGITS.get(name, 0))


class _Applied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, activation, pre):
        ctx.activation = activation
        ctx.save_for_backward(pre)
        return activation.forward(pre)

    @staticmethod
    def backward(ctx, grad):
        (pre,) = ctx.saved_tensors
        return None, derivative(ctx.activation, pre, grad.contiguous())


@pytest.mark.parametrize("activation", ALL, ids=lambda a: a.name)
def test_derivative_belongs_to_forward(activation):
    pre = torch.linspace(-3.95, 4.05, 60, dtype=torch.float64, requires_grad=True)  # not at 0, where relu has a corner
    assert torch.autograd.gradcheck(partial(_Applied.apply, activation), (pre,))


@pytest.mark.parametrize("activation", ALL, ids=lambda a: a.name)
def test_derivative_is_written_to_strided_memory(activation):
    """The gradients of gate and up lie side by side in one tensor."""
    pre, grad = (t.view(50, 40) for t in values(torch.float32))
    joined = torch.zeros(50, 80)
    activation.backward(grad, pre, joined[:, 40:])
    # not bit by bit: the ends of rows are not computed by the vectorised code
    assert error(joined[:, 40:], derivative(activation, pre, grad)) <= ULPS[torch.float32]
    assert not joined[:, :40].any()


@pytest.mark.parametrize("activation", ALL, ids=lambda a: a.name)
def test_operands_are_left_alone(activation):
    pre, grad = values(torch.float32)
    copies = pre.clone(), grad.clone()
    activation.forward(pre)
    derivative(activation, pre, grad)
    assert torch.equal(pre, copies[0])
    assert torch.equal(grad, copies[1])


# -- where it is hard (12) --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_near_the_zero_of_the_derivative_the_error_is_at_most_twice_stocks(name, dtype):
    """SiLU's derivative is zero near -1.28, GELU's near -0.75: its terms cancel."""
    module = MODULES[name]
    activation = known(module)
    pre = torch.cat([torch.linspace(-1.6, -1.0, 1000), torch.linspace(-0.9, -0.6, 500)]).to(dtype)
    grad = torch.randn(1500, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact = exact_derivative(activation, pre, grad)
    _, stock = stock_derivative(module, pre, grad)
    scale = exact.norm() if exact.any() else torch.ones(())  # relu: zero here, and exactly so
    ours = float((derivative(activation, pre, grad).double() - exact).norm() / scale)
    theirs = float((stock.double() - exact).norm() / scale)
    assert ours <= 2 * max(theirs, ULPS[torch.float32])
    if dtype is torch.bfloat16 and activation.name in ("silu", "gelu", "gelu_tanh"):
        assert ours <= ROUNDED_ONCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_far_out_it_is_nan_and_inf_where_stock_is(name, dtype):
    """|gate| up to 1e4, inf and nan."""
    module = MODULES[name]
    activation = known(module)
    inf = float("inf")
    far = [s * 10.0**e for e in range(5) for s in (1, -1)] + [80.0, -80.0, 0.0, -0.0, inf, -inf, float("nan")]
    pre = torch.tensor(far, dtype=dtype)
    grad = torch.linspace(0.5, 1.5, len(far)).to(dtype)
    expected, stock = stock_derivative(module, pre, grad)
    for found, wanted in ((activation.forward(pre), expected), (derivative(activation, pre, grad), stock)):
        assert torch.equal(found.isnan(), wanted.isnan())
        assert torch.equal(found.isinf(), wanted.isinf())
        finite = wanted.isfinite()
        assert torch.equal(found[wanted.isinf()], wanted[wanted.isinf()])
        # far from zero each of these is 0, 1, x or x^2 times a constant, up to rounding
        bound = {torch.bfloat16: 2**-6, torch.float32: 1e-5, torch.float64: 1e-10}[dtype]
        torch.testing.assert_close(found[finite], wanted[finite], rtol=bound, atol=bound)


# -- which it is ------------------------------------------------------------------------------------------------------


class _OtherSiLU(nn.SiLU):
    def forward(self, x):
        return super().forward(x) * 2


def _gelu_with(act):
    module = hf.GELUActivation()
    module.act = act
    return module


def _pytorch_gelu_tanh_with(act):
    module = hf.PytorchGELUTanh()
    module.act = act
    return module


UNKNOWN = {
    "a subclass": _OtherSiLU(),
    "Mish": nn.Mish(),
    "LeakyReLU": nn.LeakyReLU(),
    "Hardswish": nn.Hardswish(),
    "PReLU, which has a weight": nn.PReLU(),
    "transformers gelu_10, which clamps": ACT2FN["gelu_10"],
    "transformers mish": ACT2FN["mish"],
    "transformers laplace": ACT2FN["laplace"],
    "an identity": nn.Identity(),
    "a Linear": nn.Linear(2, 2),
    "GELU whose act was replaced": _gelu_with(F.relu),
    "GELU whose act is the tanh form": _gelu_with(partial(F.gelu, approximate="tanh")),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_activation_is_never_guessed(name):
    assert activation_of(UNKNOWN[name]) is None


def test_gelu_is_told_apart_by_what_it_does():
    assert known(nn.GELU()).name == "gelu"
    assert known(nn.GELU(approximate="tanh")).name == "gelu_tanh"
    assert known(hf.GELUActivation(use_gelu_python=True)).name == "gelu"
    assert known(hf.PytorchGELUTanh()).name == "gelu_tanh"
    module = nn.GELU()
    module.approximate = "tanh"  # it reads this at each call
    assert known(module).name == "gelu_tanh"


def test_object_is_asked_at_each_call():
    module = hf.GELUActivation()
    assert known(module).name == "gelu"
    module.act = F.relu
    assert activation_of(module) is None


@pytest.mark.skipif(not hasattr(hf.PytorchGELUTanh(), "act"), reason="this transformers keeps no act there")
def test_replaced_act_of_the_tanh_form_is_unknown():
    assert activation_of(_pytorch_gelu_tanh_with(F.relu)) is None
    assert activation_of(_pytorch_gelu_tanh_with(F.gelu)) is None
