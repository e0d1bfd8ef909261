"""When the fused path steps aside: a case per guard, its reason, stock's numbers bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from lifecycle_models import (
    Holder,
    Twins,
    assert_close,
    assert_equal,
    make_holder,
    make_twins,
    nf4_holder,
    randomize,
    run,
)
from peft import LoraConfig, PeftModel
from peft.helpers import disable_input_dtype_casting
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from transformers.pytorch_utils import Conv1D

import peft_fastlora.layer
from peft_fastlora import FastLoraOptions, fuse, fusion_report
from peft_fastlora.guards import GUARDS, INTENDED, Refusal, why_not

Undo = Callable[[], Any]
ROWS = 5


def layer_of(model: PeftModel) -> Any:
    return model.base_model.model.proj


def layer_input(twins: Twins) -> Tensor:
    return torch.randn(ROWS, layer_of(twins.stock).in_features, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> list[Refusal | None]:
    """What was decided at each call of a fast layer."""
    seen: list[Refusal | None] = []

    def recording(call: Any) -> Refusal | None:
        seen.append(why_not(call))
        return seen[-1]

    monkeypatch.setattr(peft_fastlora.layer, "why_not", recording)
    return seen


# -- the cases: for each guard something that makes it speak ---------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One cause for one guard, brought about in both twins alike."""

    guard: str
    reason: str  # the whole clause
    cause: Callable[[PeftModel], Undo | None] = lambda model: None  # gives back what removes the cause again
    base: Callable[[], nn.Module] = make_holder
    lora: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    kwargs: dict[str, Any] = field(default_factory=dict)
    x: Callable[[Tensor], Tensor] = lambda x: x
    raises: bool | None = False  # stock refuses this call itself; None: its result is undefined
    label: str = ""

    @property
    def id(self) -> str:
        return f"{self.guard}-{self.label}" if self.label else self.guard

    def twins(self, **options: Any) -> Twins:
        return make_twins(self.base, target_modules=["proj"], options={**self.options, **options}, **self.lora)


def attribute(name: str, value: Any, of: Callable[[Any], Any] = lambda layer: layer) -> Callable[[PeftModel], Undo]:
    """A cause: an attribute of (a part of) the layer is `value`."""

    def cause(model: PeftModel) -> Undo:
        owner = of(layer_of(model))
        before = getattr(owner, name)
        setattr(owner, name, value)
        return lambda: setattr(owner, name, before)

    return cause


def base_of(layer: Any) -> Any:
    return layer.base_layer


def part(name: str) -> Callable[[Any], Any]:
    return lambda layer: getattr(layer, name)["default"]


def weight(make: Callable[[Tensor], Tensor], of: Callable[[Any], Any] = base_of, name: str = "weight") -> Any:
    """A cause: another parameter in the place of one, made from its values."""

    def cause(model: PeftModel) -> Undo:
        owner = of(layer_of(model))
        before = getattr(owner, name)
        new = make(before.detach())
        setattr(owner, name, nn.Parameter(new, requires_grad=before.requires_grad))
        return lambda: setattr(owner, name, before)

    return cause


def entry(container: str, make: Callable[[Any], Any]) -> Callable[[PeftModel], Undo]:
    """A cause: another entry in a dict of the layer, made from the one there."""

    def cause(model: PeftModel) -> Undo:
        entries = getattr(layer_of(model), container)
        before = entries["default"]
        entries["default"] = make(before)
        return lambda: entries.update({"default": before})

    return cause


def disable(model: PeftModel) -> Undo:
    layer_of(model).enable_adapters(False)
    return lambda: layer_of(model).enable_adapters(True)


def merge(model: PeftModel) -> Undo:
    layer_of(model).merge()
    return layer_of(model).unmerge


def activate_a_missing_one(model: PeftModel) -> Undo:
    layer_of(model).set_adapter("missing")
    return lambda: layer_of(model).set_adapter("default")


def with_other_adapter(model: PeftModel) -> Undo:
    """A second, plain adapter; to remove the cause is to activate it."""
    config = LoraConfig(r=2, lora_alpha=3, target_modules=["proj"])
    model.add_adapter("other", config)
    randomize(model)
    return lambda: layer_of(model).set_adapter("other")


def without_casting(model: PeftModel) -> Undo:
    context = disable_input_dtype_casting(model)
    context.__enter__()
    return lambda: context.__exit__(None, None, None)


def train_mode(model: PeftModel) -> Undo:
    model.train()
    return model.eval


def hook(of: Callable[[Any], Any], register: str, function: Callable[..., Any]) -> Callable[[PeftModel], Undo]:
    return lambda model: getattr(of(layer_of(model)), register)(function).remove


def doubled_forward(model: PeftModel) -> Undo:
    base = layer_of(model).base_layer
    base.forward = lambda x: 2 * nn.Linear.forward(base, x)
    return lambda: delattr(base, "forward")


def hook_for_all_modules(model: PeftModel) -> Undo:
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    return handle.remove


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def parametrized(of: Callable[[Any], Any]) -> Callable[[PeftModel], Undo]:
    def cause(model: PeftModel) -> Undo:
        module = of(layer_of(model))
        parametrize.register_parametrization(module, "weight", Doubled())
        return lambda: parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)

    return cause


class TwiceLinear(nn.Linear):
    """Takes a second argument, and computes something else."""

    def forward(self, x: Tensor, factor: float = 2.0) -> Tensor:
        return factor * super().forward(x)


class TaggedTensor(Tensor):
    """A tensor subclass with default behaviour."""


def seeded_holder(make: Callable[[], nn.Module]) -> Callable[[], Holder]:
    def make_base() -> Holder:
        torch.manual_seed(0)
        return Holder(make())

    return make_base


def conv1d(in_features: int, out_features: int) -> Callable[[], Holder]:
    """GPT-2's projection: weight [in, out]. In the square case a transposed use would go unnoticed by shapes."""
    return seeded_holder(lambda: Conv1D(out_features, in_features))


def odd_nested_state(model: PeftModel) -> Undo:
    """Statistics in blocks of 64 instead of 256."""
    functional = pytest.importorskip("bitsandbytes.functional")
    state = layer_of(model).base_layer.weight.quant_state
    absmax, offset = state.absmax, state.absmax.mean()
    packed, inner = functional.quantize_blockwise(absmax - offset, blocksize=64)
    inner.dtype = torch.float32
    vars(state).update(absmax=packed, offset=offset, state2=inner, nested=True)
    return lambda: vars(state).update(absmax=absmax, offset=None, state2=None, nested=False)


MODULE = __name__

CASES = [
    Case("adapters_disabled", "the adapters are disabled", disable),
    Case("adapter_merged", "an adapter is merged into the base weight", merge),
    Case(
        "mixed_adapters",
        "the call names an adapter for each sample (adapter_names)",
        with_other_adapter,
        kwargs={"adapter_names": ["default", "other", "__base__", "default", "other"]},
    ),
    Case("no_active_adapter", "none of the active adapters has weights in this layer", activate_a_missing_one),
    Case("switched_off", "fuse_linear is False", options={"fuse_linear": False}),
    Case(
        "extra_arguments",
        "the call has further arguments (0 positional, factor by name)",
        base=seeded_holder(lambda: TwiceLinear(24, 16)),
        kwargs={"factor": 3.0},
    ),
    Case(
        "lora_variant",
        f"adapter 'default' uses {'DoraLinearVariant' if hasattr(LoraLayer, 'resolve_lora_variant') else 'DoRA'}",
        with_other_adapter,
        lora={"use_dora": True},
    ),
    Case(
        "dropout_active",
        "lora_dropout of adapter 'default' is active (p = 0.3)",
        train_mode,
        lora={"lora_dropout": 0.3},
    ),
    Case(
        "dropout_active",
        "lora_dropout of adapter 'default' is a AlphaDropout",
        entry("lora_dropout", lambda _: nn.AlphaDropout(0.3)),
        label="of another kind",
    ),
    Case("input_casting_off", "the casting of inputs is switched off (cast_input_dtype_enabled)", without_casting),
    Case(
        "transposed_base",
        "the base weight is stored transposed (fan_in_fan_out)",
        base=conv1d(24, 16),
        lora={"fan_in_fan_out": True},
    ),
    Case(
        "transposed_base",
        "the base weight is stored transposed (fan_in_fan_out)",
        base=conv1d(24, 24),
        lora={"fan_in_fan_out": True},
        label="square",
    ),
    Case(
        "unknown_base",
        f"the base layer is a {MODULE}.TwiceLinear",
        base=seeded_holder(lambda: TwiceLinear(24, 16)),
    ),
    Case(
        "unknown_lora_module",
        f"lora_A of adapter 'default' is a {MODULE}.TwiceLinear",
        attribute("__class__", TwiceLinear, part("lora_A")),
    ),
    Case(
        "unknown_lora_module",
        f"lora_B of adapter 'default' is a {MODULE}.TwiceLinear",
        attribute("__class__", TwiceLinear, part("lora_B")),
        label="lora_B",
    ),
    Case(
        "unknown_lora_module",
        "lora_A of adapter 'default' has a bias",
        attribute("bias", nn.Parameter(torch.ones(4)), part("lora_A")),
        label="bias",
    ),
    Case(
        "hooked", "the forward of base_layer was replaced on the instance", doubled_forward, label="replaced forward"
    ),
    *(
        Case("hooked", f"{name} has hooks", hook(of, register, function), label=f"{name}-{register}")
        for name, of in (
            ("base_layer", base_of),
            *((name, part(name)) for name in ("lora_A", "lora_B", "lora_dropout")),
        )
        for register, function in (
            ("register_forward_hook", lambda module, args, output: 2 * output),
            ("register_forward_pre_hook", lambda module, args: (3 * args[0],)),
            ("register_full_backward_hook", lambda module, grads_in, grads_out: tuple(4 * grad for grad in grads_in)),
            ("register_full_backward_pre_hook", lambda module, grads_out: tuple(5 * grad for grad in grads_out)),
        )
    ),
    Case("globally_hooked", "hooks for all modules are registered", hook_for_all_modules),
    Case("parametrized", "base_layer is parametrized", parametrized(base_of)),
    Case("parametrized", "lora_A is parametrized", parametrized(part("lora_A")), label="lora_A"),
    Case(
        "trainable_base", "the base weight is trainable", lambda model: _trainable(layer_of(model).base_layer.weight)
    ),
    Case(
        "trainable_scaling",
        "the scaling of adapter 'default' wants a gradient",
        entry("scaling", lambda scaling: torch.tensor(scaling, requires_grad=True)),
    ),
    Case(
        "tensor_subclass",
        f"the input is a {MODULE}.TaggedTensor",
        x=lambda x: x.as_subclass(TaggedTensor),
        label="input",
    ),
    Case(
        "tensor_subclass",
        f"lora_B is a {MODULE}.TaggedTensor",
        weight(lambda values: values.as_subclass(TaggedTensor), part("lora_B")),
    ),
    Case(
        "unknown_weight_dtype",
        "the base weight has dtype complex64",
        lambda model: _all(weight(Tensor.cfloat)(model), weight(Tensor.cfloat, name="bias")(model)),
        x=Tensor.cfloat,
    ),
    Case("unknown_weight_dtype", "the base weight has dtype int8", weight(Tensor.char), raises=True, label="int8"),
    Case(
        "unknown_weight_dtype",
        "the base weight has dtype float8_e4m3fn",
        weight(lambda values: values.to(torch.float8_e4m3fn)),
        raises=True,
        label="float8",
    ),
    Case(
        "unreadable_4bit",
        "the quantisation statistics have blocks of 64, not 256",
        odd_nested_state,
        base=nf4_holder,
        x=lambda x: x.requires_grad_(),  # else bitsandbytes re-packs the weight on CPUs with AVX512-BF16
        raises=True,
    ),
    Case("wrong_shape", "", weight(lambda values: values[:1], part("lora_B")), label="lora_B broadcasts"),
    Case("wrong_shape", "", weight(lambda values: values[:, :23], part("lora_A")), raises=True, label="lora_A"),
    Case(
        "wrong_shape",
        "the base weight is empty (shape [0])",
        weight(lambda values: values.new_empty(0)),
        raises=True,
        label="empty base",
    ),
    Case(
        "mixed_devices",
        "not all tensors are on one device: the base weight on cpu, the base bias on cpu, the input on meta, "
        "lora_A on cpu, lora_B on cpu",
        x=lambda x: x.to("meta"),
        raises=True,
        label="input",
    ),
    Case(
        "mixed_devices",
        "not all tensors are on one device: the base weight on cpu, the base bias on cpu, the input on cpu, "
        "lora_A on cpu, lora_B on meta",
        weight(lambda values: values.to("meta"), part("lora_B")),
        raises=None,  # torch multiplies by what happens to be in memory
        label="lora_B",
    ),
    Case(
        "mixed_dtypes",
        "the input is float64 and the base weight float32",
        x=Tensor.double,
        raises=True,
        label="input",
    ),
    Case(
        "mixed_dtypes",
        "lora_A is float32 and lora_B float64 in adapter 'default'",
        weight(Tensor.double, part("lora_B")),
        raises=True,
    ),
    Case(
        "mixed_dtypes",
        "the base bias is float64 and the base weight float32",
        weight(Tensor.double, name="bias"),
        raises=True,
        label="bias",
    ),
    Case(
        "unfit_input",
        f"the input has shape [{ROWS}, 23] and dtype float32",
        x=lambda x: x[:, :23],
        raises=True,
    ),
]

# `torch.jit.trace` and the like need a call of their own; see below.
TRACED_IN_OWN_TESTS = {"traced"}


def _trainable(parameter: nn.Parameter) -> Undo:
    parameter.requires_grad_(True)
    return lambda: parameter.requires_grad_(False)


def _all(*undos: Undo) -> Undo:
    def undo() -> None:
        for each in undos:
            each()

    return undo


def test_every_guard_has_a_case() -> None:
    covered = {case.guard for case in CASES} | TRACED_IN_OWN_TESTS
    assert covered == {guard.__name__ for guard in GUARDS}


def test_every_guard_has_a_name_and_a_line_for_the_documentation() -> None:
    names = [guard.__name__ for guard in GUARDS]
    assert len(set(names)) == len(names)
    for guard in GUARDS:
        assert guard.__doc__ and guard.__doc__.strip().endswith("."), guard.__name__


def test_intended_states_come_first() -> None:
    """`strict` must not raise for a state that is meant to run stock because another guard spoke earlier."""
    assert GUARDS[: len(INTENDED)] == INTENDED
    assert {guard.__name__ for guard in INTENDED} == {
        "adapters_disabled",
        "adapter_merged",
        "mixed_adapters",
        "no_active_adapter",
        "switched_off",
    }


@contextlib.contextmanager
def brought_about(case: Case, twins: Twins) -> Iterator[Callable[[], None] | None]:
    """The cause is there; what is given removes it from both twins. It is gone afterwards in any case."""
    undos = [case.cause(model) for model in twins]
    known = [undo for undo in undos if undo is not None]
    remove = _once(_all(*known)) if known else None
    try:
        yield remove
    finally:
        if remove is not None:
            remove()


def _once(function: Undo) -> Undo:
    pending = [function]
    return lambda: pending.pop()() if pending else None


def outcome(case: Case, model: PeftModel, x: Tensor) -> Any:
    """The run, or the error that the call raises."""
    torch.manual_seed(5)
    if case.raises is False:
        return run(layer_of(model), x, **case.kwargs)
    try:
        layer_of(model)(x, **case.kwargs)
    except (RuntimeError, NotImplementedError) as error:
        return type(error), str(error)
    assert case.raises is None, "stock computed something"
    return "undefined"


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_guard(case: Case, refusals: list[Refusal | None]) -> None:
    """Refused by this guard for this reason, stock's result bit for bit, and fused again without the cause."""
    twins = case.twins()
    twins.do(lambda model: model.eval())
    plain = layer_input(twins)
    x = case.x(plain)
    with brought_about(case, twins) as remove:
        stock, fast = (outcome(case, model, x) for model in twins)
        assert [refusal.guard for refusal in refusals if refusal is not None] == [case.guard]
        assert len(refusals) == 1
        assert case.reason in (refusals[0].reason, "")
        assert refusals[0].intended == (case.guard in {guard.__name__ for guard in INTENDED})
        assert str(refusals[0]) == f"the fused path was not used because {refusals[0].reason}"
        if case.raises is False:
            assert_same_run(fast, stock)
        else:
            assert fast == stock
    if remove is not None or x is not plain:
        refusals.clear()
        stock, fast = (run(layer_of(model), plain) for model in twins)
        assert refusals == [None]
        assert fast.nodes == {"": "LoraGroupFunctionBackward"}
        assert_close(fast.output, stock.output)


def assert_same_run(fast: Any, stock: Any) -> None:
    assert "LoraGroupFunctionBackward" not in fast.nodes.values()
    assert type(fast.output) is type(stock.output)
    assert_equal(fast.output, stock.output, "output")
    assert fast.gradients.keys() == stock.gradients.keys()
    for name, gradient in stock.gradients.items():
        assert (fast.gradients[name] is None) == (gradient is None), name
        if gradient is not None:
            assert_equal(fast.gradients[name], gradient, f"gradient of {name}")


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_strict(case: Case) -> None:
    """`strict=True` raises the report's sentence where a layer cannot be fused, and never in intended states."""
    twins = case.twins(strict=True)
    twins.do(lambda model: model.eval())
    x = case.x(layer_input(twins))
    with brought_about(case, twins):
        if case.guard in {guard.__name__ for guard in INTENDED}:
            torch.manual_seed(5)
            layer_of(twins.fast)(x, **case.kwargs)
            return
        with pytest.raises(RuntimeError) as caught:
            layer_of(twins.fast)(x, **case.kwargs)
    assert str(caught.value).startswith(f"strict=True: the fused path was not used because {case.reason}")
    layer = layer_of(twins.fast)
    assert str(caught.value).endswith(f"(layer {type(layer).__name__}, {layer.in_features} -> {layer.out_features})")


CALL_ONLY = {"mixed_adapters", "extra_arguments", "unfit_input"}  # what the report cannot know


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.guard not in CALL_ONLY and case.label != "input"],
    ids=lambda case: case.id,
)
def test_report_gives_the_same_reason(case: Case) -> None:
    """`fusion_report` is computed by the same function that decides."""
    twins = case.twins()
    twins.do(lambda model: model.eval())
    with brought_about(case, twins) as remove:
        (row,) = fusion_report(twins.fast).rows
        reason = case.reason.replace("the input on cpu, ", "")  # the report asks without one
        assert (row.path, reason in (row.reason, "")) == ("stock", True)
    if remove is not None:
        (row,) = fusion_report(twins.fast).rows
        assert (row.path, row.reason) == ("fused", None)


# -- hooks fire as in stock ------------------------------------------------------------------------------------------


HOOKS = ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]


@pytest.mark.parametrize("part_name", ["base_layer", "lora_A", "lora_B"])
@pytest.mark.parametrize("register", HOOKS)
def test_hooks_on_parts_fire_as_in_stock(part_name: str, register: str) -> None:
    twins = make_twins(make_holder, target_modules=["proj"])
    x = layer_input(twins)
    seen: list[list[Any]] = [[], []]
    for model, record in zip(twins, seen, strict=True):
        module = base_of(layer_of(model)) if part_name == "base_layer" else part(part_name)(layer_of(model))

        def note(module: nn.Module, *values: Any, record: list[Any] = record) -> None:
            record.append([tensor.detach().clone() for value in values for tensor in _tensors(value)])

        getattr(module, register)(note)
    stock, fast = (run(layer_of(model), x) for model in twins)
    assert_same_run(fast, stock)
    assert len(seen[0]) == len(seen[1]) == 1
    for ours, theirs in zip(seen[1][0], seen[0][0], strict=True):
        assert_equal(ours, theirs)


def _tensors(value: Any) -> list[Tensor]:
    values = value if isinstance(value, tuple) else (value,)
    return [tensor for tensor in values if isinstance(tensor, Tensor)]


@pytest.mark.parametrize("register", HOOKS)
def test_hooks_on_the_layer_itself_fire_and_leave_it_fused(register: str) -> None:
    twins = make_twins(make_holder, target_modules=["proj"])
    x, counts = layer_input(twins), [0, 0]

    for index, model in enumerate(twins):

        def count(*_: Any, index: int = index) -> None:
            counts[index] += 1

        getattr(layer_of(model), register)(count)
    _, fast = (run(model, x) for model in twins)
    if register != "register_full_backward_hook":  # which puts a node of its own behind the output
        assert fast.fused == {"proj"}
    assert counts == [1, 1]


# -- what is quantised otherwise -------------------------------------------------------------------------------------


def test_8bit_layers_stay_stock_and_say_so(refusals: list[Refusal | None]) -> None:
    bnb = pytest.importorskip("bitsandbytes")

    def make() -> Holder:
        torch.manual_seed(0)
        dense = nn.Linear(64, 64)
        layer = bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False, threshold=0.0)
        layer.load_state_dict(dense.state_dict())
        holder = Holder(layer.to("cpu"))
        holder.is_loaded_in_8bit = True
        return holder

    twins = make_twins(make, target_modules=["proj"])
    (row,) = fusion_report(twins.fast).rows
    assert row.path == "stock"
    assert row.reason == "there is no fast version of peft.tuners.lora.bnb.Linear8bitLt"
    stock, fast = twins.do(lambda model: run(model, layer_input(twins)))
    assert refusals == []
    assert torch.isfinite(fast.output).all()
    assert_same_run(fast, stock)


def test_a_4bit_base_in_a_plain_layer_is_never_treated_as_dense(refusals: list[Refusal | None]) -> None:
    """Without `is_loaded_in_4bit` PEFT gives a `Linear4bit` its layer for dense weights: it is an `nn.Linear`."""

    def make() -> Holder:
        holder = nf4_holder()
        holder.is_loaded_in_4bit = False
        return holder

    twins = make_twins(make, target_modules=["proj"])
    stock, fast = twins.do(lambda model: run(model, layer_input(twins)))
    assert [refusal.guard for refusal in refusals if refusal is not None] == ["unknown_base"]
    assert_same_run(fast, stock)


def test_a_4bit_base_with_a_forward_of_its_own_is_not_fused(refusals: list[Refusal | None]) -> None:
    bnb = pytest.importorskip("bitsandbytes")

    class Doubled4bit(bnb.nn.Linear4bit):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    def make() -> Holder:
        holder = nf4_holder()
        holder.proj.__class__ = Doubled4bit
        return holder

    twins = make_twins(make, target_modules=["proj"])
    stock, fast = twins.do(lambda model: run(model, layer_input(twins)))
    assert [refusal.guard for refusal in refusals if refusal is not None] == ["unknown_base"]
    assert_same_run(fast, stock)


@pytest.mark.parametrize("name", ["LinearNF4", "LinearFP4"])
def test_bitsandbytes_own_subclasses_are_fused(name: str) -> None:
    bnb = pytest.importorskip("bitsandbytes")

    def make() -> Holder:
        torch.manual_seed(0)
        dense = nn.Linear(64, 64)
        layer = getattr(bnb.nn, name)(64, 64, compute_dtype=torch.float32)
        layer.load_state_dict(dense.state_dict())
        return Holder(layer.to("cpu"))

    twins = make_twins(make, target_modules=["proj"])
    stock, fast = twins.do(lambda model: run(model, layer_input(twins)))
    assert fast.fused == {"proj"}
    assert_close(fast.output, stock.output)


def test_a_4bit_weight_without_quantisation_state_is_refused() -> None:
    twins = make_twins(nf4_holder, target_modules=["proj"])
    base = layer_of(twins.fast).base_layer
    base.weight.quant_state = base.quant_state = None
    (row,) = fusion_report(twins.fast).rows
    assert (row.path, row.reason) == ("stock", "the 4-bit weight has no quantisation state yet")


def test_a_repacked_4bit_weight_is_refused() -> None:
    """bitsandbytes 0.50 re-packs in place at the first CPU inference with AVX512-BF16; dequantising it is wrong."""
    twins = make_twins(nf4_holder, target_modules=["proj"])
    layer_of(twins.fast).base_layer.weight.quant_state.packing_format_for_cpu = True
    (row,) = fusion_report(twins.fast).rows
    assert (row.path, row.reason) == ("stock", "bitsandbytes re-packed the 4-bit weight for CPU inference")


# -- dropout and variants in their other state -----------------------------------------------------------------------


def test_dropout_in_eval_mode_is_fused() -> None:
    twins = make_twins(make_holder, target_modules=["proj"], lora_dropout=0.3)
    twins.do(lambda model: model.eval())
    stock, fast = (run(model, layer_input(twins)) for model in twins)
    assert fast.fused == {"proj"}
    assert_close(fast.output, stock.output)


def test_dropout_of_probability_zero_is_fused_in_training() -> None:
    twins = make_twins(make_holder, target_modules=["proj"])
    for model in twins:
        layer_of(model).lora_dropout["default"] = nn.Dropout(0.0)
        model.train()
    stock, fast = (run(model, layer_input(twins)) for model in twins)
    assert fast.fused == {"proj"}
    assert_close(fast.output, stock.output)


def test_one_refused_adapter_of_two_active_ones_refuses_the_call(refusals: list[Refusal | None]) -> None:
    twins = make_twins(make_holder, target_modules=["proj"], use_dora=True)
    for model in twins:
        with_other_adapter(model)
        layer_of(model).set_adapter(["other", "default"])
    stock, fast = (run(layer_of(model), layer_input(twins)) for model in twins)
    assert [refusal.guard for refusal in refusals if refusal is not None] == ["lora_variant"]
    assert_same_run(fast, stock)


def test_switched_off_layers_are_fused_once_the_switch_is_on() -> None:
    twins = make_twins(make_holder, target_modules=["proj"], options={"fuse_linear": False})
    assert [row.path for row in fusion_report(twins.fast).rows] == ["stock"]
    layer_of(twins.fast).fast_lora_options = FastLoraOptions()
    assert run(twins.fast, layer_input(twins)).fused == {"proj"}
    assert [row.path for row in fuse(twins.fast).rows] == ["fused"]


# -- traced: tracers and transforms ----------------------------------------------------------------------------------


def assert_traced(refusals: list[Refusal | None], reason: str, layer: Any, x: Tensor) -> None:
    """Every call was refused for this reason, and the next ordinary one is fused."""
    assert refusals and {refusal and (refusal.guard, refusal.reason) for refusal in refusals} == {("traced", reason)}
    assert layer(x).grad_fn.name() == "LoraGroupFunctionBackward"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_traced_by_jit(refusals: list[Refusal | None]) -> None:
    twins = make_twins(make_holder, target_modules=["proj"])
    x = layer_input(twins)
    stock, fast = (torch.jit.trace(layer_of(model), (x,), check_trace=False) for model in twins)
    for rows in (x, torch.cat([x, -x])):
        assert_equal(fast(rows), stock(rows))
        assert_equal(fast(rows), layer_of(twins.stock)(rows))
    assert_traced(refusals, "torch.jit.trace is running", layer_of(twins.fast), x)


def functional_loss(layer: Any) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(layer, parameters, (x,)).square().sum()

    return loss


TRANSFORMS = {
    "grad": lambda loss, parameters, x: torch.func.grad(loss)(parameters, x),
    "vmap": lambda loss, parameters, x: {"": torch.vmap(loss, (None, 0))(parameters, x)},
    "per-sample grad": lambda loss, parameters, x: torch.vmap(torch.func.grad(loss), (None, 0))(parameters, x),
    "jvp": lambda loss, parameters, x: {
        "": torch.func.jvp(lambda v: loss(parameters, v), (x,), (torch.ones_like(x),))[1]
    },
    "second order": lambda loss, parameters, x: {
        "": torch.func.grad(lambda v: torch.func.grad(lambda w: loss(parameters, w))(v).sum())(x)
    },
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_traced_by_torch_func(transform: str, refusals: list[Refusal | None]) -> None:
    twins = make_twins(make_holder, target_modules=["proj"])
    x = layer_input(twins)
    results = []
    for model in twins:
        layer = layer_of(model)
        parameters = {name: tensor.detach() for name, tensor in layer.named_parameters() if tensor.requires_grad}
        results.append(TRANSFORMS[transform](functional_loss(layer), parameters, x))
    for name, expected in results[0].items():
        assert_equal(results[1][name], expected, name)
    assert_traced(refusals, "a torch.func transform is running", layer_of(twins.fast), x)


def test_traced_by_forward_mode(refusals: list[Refusal | None]) -> None:
    twins = make_twins(make_holder, target_modules=["proj"])
    x = layer_input(twins)
    tangents = []
    for model in twins:
        with forward_ad.dual_level():
            output = layer_of(model)(forward_ad.make_dual(x, torch.ones_like(x)))
            tangents.append(forward_ad.unpack_dual(output).tangent)
    assert_equal(tangents[1], tangents[0])
    assert_traced(refusals, "forward-mode differentiation is running", layer_of(twins.fast), x)
