"""Adapter life, each step against a stock twin, in numbers and in which path ran."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lifecycle_models import (
    LLAMA_TARGETS,
    NET_NAMES,
    Net,
    Twins,
    assert_close,
    assert_equal,
    assert_twins_agree,
    is_fast,
    llama_input,
    lora_modules,
    make_holder,
    make_llama,
    make_net,
    make_twins,
    net_input,
    nf4_holder,
    randomize,
)
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import hotswap
from torch import nn

from peft_fastlora import FastLoraConfig

A = {"r": 4, "lora_alpha": 10}
B = {"r": 3, "lora_alpha": 2, "use_rslora": True}
ALL = list(NET_NAMES)


def two_adapters(
    targets_b: list[str] | None = None, make_base: Callable[[], nn.Module] = make_net, **lora: Any
) -> Twins:
    """Adapters "a" and "b" of different rank and alpha; "b" may miss some modules."""
    targets_a = lora.pop("target_modules", ALL)
    stock = get_peft_model(make_base(), LoraConfig(**{**A, **lora}, target_modules=targets_a), "a")
    fast = get_peft_model(make_base(), FastLoraConfig(**{**A, **lora}, target_modules=targets_a), "a")
    for model in (stock, fast):
        model.add_adapter("b", LoraConfig(**{**B, **lora}, target_modules=targets_b or targets_a))
        randomize(model)
    return Twins(stock, fast)


def activate(names: str | list[str]) -> Callable[[Any], None]:
    return lambda model: model.base_model.set_adapter(names)


def quietly(twins: Twins, action: Callable[[Any], Any]) -> tuple[Any, Any]:
    """For actions of which stock warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return twins.do(action)


# -- disable_adapter -------------------------------------------------------------------------------------------------


def test_disabled_adapters_give_the_base_output_bit_for_bit_and_fuse_again_afterwards() -> None:
    twins, base, x = make_twins(), make_net(), net_input()
    assert_twins_agree(twins, x, ALL)
    with twins.fast.disable_adapter(), twins.stock.disable_adapter():
        _, fast = assert_twins_agree(twins, x, [], exact=True)
        assert_equal(fast.output, base(x).detach())
    assert_twins_agree(twins, x, ALL)


def test_disabling_while_merged_unmerges_first_as_stock() -> None:
    twins, base, x = make_twins(), make_net(), net_input()
    twins.do(lambda model: model.merge_adapter())
    with twins.fast.disable_adapter(), twins.stock.disable_adapter():
        _, fast = assert_twins_agree(twins, x, [], exact=True)
        assert_close(fast.output, base(x).detach())  # unmerging rounds the weight
        assert not any(layer.merged for layer in lora_modules(twins.fast).values())
    assert_twins_agree(twins, x, ALL)


def test_disabled_llama_gives_the_base_logits_bit_for_bit() -> None:
    twins, base, x = make_twins(make_llama, target_modules=LLAMA_TARGETS), make_llama(), llama_input()
    with torch.no_grad(), twins.fast.disable_adapter():
        assert_equal(twins.fast(x).logits, base(x).logits)
    assert_twins_agree(twins, x, LLAMA_TARGETS)


# -- which adapters are active ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("active", "fused"), [("a", ALL), ("b", ALL), (["a", "b"], ALL), (["b", "a"], ALL), ([], [])], ids=str
)
def test_any_set_of_active_adapters_equals_stock(active: str | list[str], fused: list[str]) -> None:
    twins = two_adapters()
    twins.do(activate(active))
    assert_twins_agree(twins, net_input(), fused)


def test_two_active_adapters_are_both_used() -> None:
    """Never truncated to the first: the output differs from that of either alone."""
    twins, outputs = two_adapters(), {}
    for active in ("a", "b", ["a", "b"]):
        twins.do(activate(active))
        outputs[str(active)] = assert_twins_agree(twins, net_input(), ALL)[1].output
    assert (outputs["['a', 'b']"] - outputs["a"]).abs().max() > 0.01
    assert (outputs["['a', 'b']"] - outputs["b"]).abs().max() > 0.01


def test_both_of_two_active_adapters_get_gradients() -> None:
    twins = two_adapters()
    twins.do(activate(["a", "b"]))
    _, fast = assert_twins_agree(twins, net_input(), ALL)
    trained = {name for name, gradient in fast.gradients.items() if gradient is not None and "lora_" in name}
    assert len(trained) == 3 * 2 * 2


@pytest.mark.parametrize(("active", "fused"), [("b", ["first"]), (["a", "b"], ALL), (["b", "a"], ALL)], ids=str)
def test_an_adapter_that_misses_modules(active: str | list[str], fused: list[str]) -> None:
    twins = two_adapters(targets_b=["first"])
    twins.do(activate(active))
    assert_twins_agree(twins, net_input(), fused)


def test_switching_back_and_forth_remembers_nothing() -> None:
    twins, x = two_adapters(), net_input()
    for active in ("a", "b", ["a", "b"], "a", [], "b"):
        twins.do(activate(active))
        assert_twins_agree(twins, x, ALL if active else [])


def test_an_inactive_adapter_gets_no_gradient() -> None:
    twins = two_adapters()
    twins.do(activate("a"))
    _, fast = assert_twins_agree(twins, net_input(), ALL)
    assert all(gradient is None for name, gradient in fast.gradients.items() if name.endswith(".b.weight"))


# -- rank and scaling are read at the call ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lora",
    [
        {"rank_pattern": {"first": 2, "third": 7}},
        {"alpha_pattern": {"second": 1, "third": 40}},
        {"rank_pattern": {"second": 1}, "alpha_pattern": {"second": 5}},
        {"use_rslora": True},
        {"lora_alpha": 3, "r": 16},
    ],
    ids=["rank_pattern", "alpha_pattern", "both patterns", "rslora", "rank of the output"],
)
def test_configured_ranks_and_scalings(lora: dict[str, Any]) -> None:
    twins = make_twins(**lora)
    assert_twins_agree(twins, net_input(), ALL)
    assert {layer.scaling["default"] for layer in lora_modules(twins.stock).values()} == {
        layer.scaling["default"] for layer in lora_modules(twins.fast).values()
    }


def each_layer(action: Callable[[Any], Any]) -> Callable[[Any], None]:
    def act(model: Any) -> None:
        for layer in lora_modules(model).values():
            action(layer)

    return act


@pytest.mark.parametrize(
    "action",
    [
        lambda layer: layer.set_scale("default", 0.3),
        lambda layer: layer.scale_layer(3.0),
        lambda layer: layer.unscale_layer(2.0),
        lambda layer: layer.scaling.update(default=-1.5),
        lambda layer: layer.scaling.update(default=0.0),
        lambda layer: layer.scaling.update(default=torch.tensor(0.7)),
    ],
    ids=["set_scale", "scale_layer", "unscale_layer", "negative", "zero", "tensor"],
)
def test_a_changed_scaling_is_used_at_the_next_call(action: Callable[[Any], Any]) -> None:
    twins, x = make_twins(), net_input()
    before = assert_twins_agree(twins, x, ALL)[1].output
    twins.do(each_layer(action))
    after = assert_twins_agree(twins, x, ALL)[1].output
    assert (after - before).abs().max() > 0.01


def test_unscale_layer_gives_the_first_output_back() -> None:
    twins, x = make_twins(), net_input()
    before = assert_twins_agree(twins, x, ALL)[1].output
    twins.do(each_layer(lambda layer: layer.scale_layer(3.0)))
    twins.do(each_layer(lambda layer: layer.unscale_layer()))
    assert_equal(assert_twins_agree(twins, x, ALL)[1].output, before)


def test_weights_changed_in_place_or_replaced_are_used_at_the_next_call() -> None:
    twins, x = make_twins(), net_input()

    def change(model: Any) -> None:
        layer = model.base_model.model.first
        layer.lora_A["default"].weight.data.mul_(2)
        layer.lora_B["default"].weight = nn.Parameter(torch.randn(16, 4))
        layer.base_layer.weight = nn.Parameter(torch.randn(16, 24), requires_grad=False)
        layer.base_layer.bias.data.add_(1)

    assert_twins_agree(twins, x, ALL)
    twins.do(change)
    assert_twins_agree(twins, x, ALL)


def test_one_optimizer_step_on_both_ends_in_the_same_weights() -> None:
    twins, x = make_twins(), net_input()
    optimizers = [torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3) for model in twins]
    for _ in range(3):
        assert_twins_agree(twins, x, ALL)
        for optimizer in optimizers:
            optimizer.step()
    for (name, stock), fast in zip(twins.stock.named_parameters(), twins.fast.parameters(), strict=True):
        assert_close(fast, stock, name)


def saved(path: Path, salt: str, **lora: Any) -> str:
    model = get_peft_model(make_net(), LoraConfig(**{**A, "target_modules": ALL, **lora}))
    randomize(model, salt)
    model.save_pretrained(str(path))
    return str(path)


def test_hotswap_is_seen_at_the_next_call(tmp_path: Path) -> None:
    twins, x, other = make_twins(), net_input(), saved(tmp_path, "other", lora_alpha=3)
    before = assert_twins_agree(twins, x, ALL)[1].output
    twins.do(lambda model: hotswap.hotswap_adapter(model, other, "default", torch_device="cpu"))
    after = assert_twins_agree(twins, x, ALL)[1].output
    assert (after - before).abs().max() > 0.01


def test_compiled_hotswap_pads_ranks_and_makes_scalings_tensors(tmp_path: Path) -> None:
    twins, x, other = make_twins(), net_input(), saved(tmp_path, "other", r=2, lora_alpha=3)
    twins.do(lambda model: hotswap.prepare_model_for_compiled_hotswap(model, target_rank=8))
    before = assert_twins_agree(twins, x, ALL)[1].output
    assert all(isinstance(layer.scaling["default"], torch.Tensor) for layer in lora_modules(twins.fast).values())
    assert {layer.lora_A["default"].weight.shape[0] for layer in lora_modules(twins.fast).values()} == {8}
    twins.do(lambda model: hotswap.hotswap_adapter(model, other, "default", torch_device="cpu"))
    after = assert_twins_agree(twins, x, ALL)[1].output
    assert (after - before).abs().max() > 0.01


# -- merging, unloading, deleting, combining -------------------------------------------------------------------------


@pytest.mark.parametrize("safe", [False, True])
def test_merge_and_unmerge(safe: bool) -> None:
    twins, x = make_twins(), net_input()
    unmerged = assert_twins_agree(twins, x, ALL)[1]
    twins.do(each_layer(lambda layer: layer.merge(safe_merge=safe)))
    merged = assert_twins_agree(twins, x, [], exact=True)[1]
    assert_close(merged.output, unmerged.output)
    twins.do(lambda model: model.unmerge_adapter())
    assert_twins_agree(twins, x, ALL)


def test_merging_one_of_two_adapters_runs_stock_and_fuses_again() -> None:
    twins, x = two_adapters(), net_input()
    twins.do(activate(["a", "b"]))
    twins.do(lambda model: model.merge_adapter(adapter_names=["a"]))
    assert_twins_agree(twins, x, [], exact=True)
    twins.do(lambda model: model.unmerge_adapter())
    assert_twins_agree(twins, x, ALL)


def test_merge_of_a_4bit_layer() -> None:
    twins, x = make_twins(nf4_holder, target_modules=["proj"]), torch.randn(3, 64)
    assert_twins_agree(twins, x, ["proj"])
    quietly(twins, lambda model: model.merge_adapter())
    assert_twins_agree(twins, x, [], exact=True)
    quietly(twins, lambda model: model.unmerge_adapter())
    assert_twins_agree(twins, x, ["proj"])


@pytest.mark.parametrize("active", ["a", ["a", "b"]], ids=str)
def test_merge_and_unload_gives_the_plain_model_with_stocks_weights(active: Any) -> None:
    twins, x = two_adapters(), net_input()
    twins.do(activate(active))
    adapted = assert_twins_agree(twins, x, ALL)[1].output
    stock, fast = twins.do(lambda model: model.merge_and_unload())
    assert type(fast) is Net
    for (name, expected), actual in zip(stock.state_dict().items(), fast.state_dict().values(), strict=True):
        assert_equal(actual, expected, name)
    assert_close(fast(x).detach(), adapted)


def test_unload_gives_the_plain_model_with_its_own_weights() -> None:
    twins, base = make_twins(), make_net()
    assert_twins_agree(twins, net_input(), ALL)
    fast = twins.fast.unload()
    assert type(fast) is Net and list(fast.state_dict()) == list(base.state_dict())
    assert_equal(fast(net_input()), base(net_input()))


def test_an_unloaded_model_can_be_made_fast_again() -> None:
    twins = Twins(*(model.unload() for model in make_twins()))
    again = Twins(
        get_peft_model(twins.stock, LoraConfig(**A, target_modules=ALL)),
        get_peft_model(twins.fast, FastLoraConfig(**A, target_modules=ALL)),
    )
    again.do(randomize)
    assert_twins_agree(again, net_input(), ALL)


@pytest.mark.parametrize("deleted", ["a", "b"])
def test_delete_adapter(deleted: str) -> None:
    twins, left = two_adapters(), {"a": "b", "b": "a"}[deleted]
    twins.do(lambda model: model.set_adapter(left))
    twins.do(lambda model: model.delete_adapter(deleted))
    assert list(twins.fast.peft_config) == [left]
    assert_twins_agree(twins, net_input(), ALL)


def test_deleting_the_active_adapter_activates_another_as_stock() -> None:
    twins = two_adapters()
    twins.do(activate("a"))
    quietly(twins, lambda model: model.base_model.delete_adapter("a"))
    assert twins.fast.base_model.active_adapter == twins.stock.base_model.active_adapter == ["b"]
    twins.do(lambda model: model.set_adapter("b"))
    assert_twins_agree(twins, net_input(), ALL)


def test_a_layer_that_lost_its_only_adapter_computes_its_base_layer() -> None:
    twins, base = make_twins(), make_net()
    twins.do(lambda model: model.delete_adapter("default"))
    assert_equal(twins.fast.base_model.model(net_input()), base(net_input()))
    assert_equal(twins.stock.base_model.model(net_input()), base(net_input()))


@pytest.mark.parametrize("kind", ["cat", "linear", "svd", "ties"])
def test_add_weighted_adapter(kind: str) -> None:
    twins = two_adapters()
    if kind in ("linear", "ties"):  # which need equal ranks
        for model in twins:
            model.add_adapter("c", LoraConfig(r=4, lora_alpha=1, target_modules=ALL))
            randomize(model)
    other = "c" if kind in ("linear", "ties") else "b"
    density = {"density": 0.5} if kind == "ties" else {}
    twins.do(
        lambda model: model.add_weighted_adapter(["a", other], [0.7, 0.4], "sum", combination_type=kind, **density)
    )
    twins.do(lambda model: model.set_adapter("sum"))
    assert is_fast(twins.fast)
    assert_twins_agree(twins, net_input(), ALL)


# -- biases and modules_to_save --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", ["none", "all", "lora_only"])
def test_trainable_biases_get_stocks_gradient(bias: str) -> None:
    twins = make_twins(bias=bias)
    _, fast = assert_twins_agree(twins, net_input(), ALL)
    trained = {
        name for name, gradient in fast.gradients.items() if gradient is not None and name.endswith("layer.bias")
    }
    assert len(trained) == (0 if bias == "none" else 2)


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
@pytest.mark.parametrize("targets", [["first", "third"], ALL], ids=["bases with bias", "one base without"])
def test_lora_bias(targets: list[str]) -> None:
    twins = make_twins(lora_bias=True, target_modules=targets)
    _, fast = assert_twins_agree(twins, net_input(), targets)
    trained = [
        name for name, gradient in fast.gradients.items() if gradient is not None and "lora_B.default.bias" in name
    ]
    assert len(trained) == len(targets)


def test_lora_bias_of_two_active_adapters_with_different_scalings() -> None:
    twins = two_adapters(lora_bias=True, target_modules=["first", "third"])
    twins.do(activate(["a", "b"]))
    assert_twins_agree(twins, net_input(), ["first", "third"])


@pytest.mark.parametrize("attention_bias", [False, True])
def test_llama_with_all_targets_and_biases_on_a_subset(attention_bias: bool) -> None:
    """Qwen2 has biases on q, k and v; Llama's switch puts them on all four attention projections."""
    twins = make_twins(lambda: make_llama(attention_bias=attention_bias), target_modules=LLAMA_TARGETS)
    assert_twins_agree(twins, llama_input(), LLAMA_TARGETS)


def test_modules_to_save_uses_and_trains_the_copy() -> None:
    twins = make_twins(target_modules=["first", "second"], modules_to_save=["third"])
    with torch.no_grad():
        for model in twins:
            model.base_model.model.third.modules_to_save["default"].weight.mul_(2)
    _, fast = assert_twins_agree(twins, net_input(), ["first", "second"])
    trained = [name for name, gradient in fast.gradients.items() if gradient is not None and "modules_to_save" in name]
    assert len(trained) == 2


def test_modules_to_save_of_lm_head() -> None:
    twins = make_twins(make_llama, target_modules=LLAMA_TARGETS, modules_to_save=["lm_head"])
    _, fast = assert_twins_agree(twins, llama_input(), LLAMA_TARGETS)
    assert fast.gradients["base_model.model.lm_head.modules_to_save.default.weight"] is not None


# -- subsets of a model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "targets", [["q_proj"], ["k_proj", "down_proj"], ["gate_proj", "v_proj", "o_proj"]], ids="-".join
)
def test_partial_targets_of_a_llama(targets: list[str]) -> None:
    assert_twins_agree(make_twins(make_llama, target_modules=targets), llama_input(), targets)


def test_layers_to_transform() -> None:
    twins = make_twins(make_llama, target_modules=["q_proj", "up_proj"], layers_to_transform=[1])
    _, fast = assert_twins_agree(twins, llama_input(), ["q_proj", "up_proj"])
    assert len(fast.nodes) == 2 and all(".layers.1." in name for name in fast.nodes)


@pytest.mark.parametrize("method", ["requires_grad_", "frozen A", "frozen B", "inference_mode"])
def test_frozen_adapters(method: str) -> None:
    """What needs no gradient gets none, and where nothing does there is no node."""
    twins, x = make_twins(make_holder, target_modules=["proj"]), net_input()

    def freeze(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if method == "requires_grad_" or method == f"frozen {name[-16:-15]}":
                parameter.requires_grad_(False)

    twins.do(freeze)
    if method == "inference_mode":
        with torch.inference_mode():
            stock, fast = twins.do(lambda model: model(x))
        assert fast.grad_fn is None and not fast.requires_grad
        assert_close(fast, stock)
        return
    _, fast = assert_twins_agree(twins, x, ["proj"])  # x wants a gradient
    frozen = {"requires_grad_": {"A", "B"}, "frozen A": {"A"}, "frozen B": {"B"}}[method]
    for part in ("A", "B"):
        gradient = fast.gradients[f"base_model.model.proj.lora_{part}.default.weight"]
        assert (gradient is None) == (part in frozen)
    output = twins.fast(x)
    assert output.requires_grad == (method != "requires_grad_")


def test_layers_are_tuner_layers_of_peft() -> None:
    """`model.get_layer_status()` and `get_model_status()` look for them."""
    twins = two_adapters(targets_b=["first"])
    stock, fast = twins.do(lambda model: model.get_model_status())
    assert fast == stock
    fast_layers = [module for module in twins.fast.modules() if isinstance(module, BaseTunerLayer)]
    assert len(fast_layers) == 3
