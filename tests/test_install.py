"""Making a model fast and stock again by changing classes: each known trap is held by a test."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lifecycle_models import (
    NET_NAMES,
    Holder,
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
    module_dicts_without_ours,
    net_input,
    nf4_holder,
    randomize,
    run,
)
from peft import LoraConfig, LoraModel, PeftModel, get_peft_model
from peft.tuners.lora import Linear, LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from peft_fastlora import (
    FastLoraConfig,
    FastLoraLayer,
    FastLoraLinear,
    FastLoraModel,
    FastLoraOptions,
    fuse,
    fusion_report,
    unfuse,
)
from peft_fastlora.install import install, remove

LORA = {"r": 4, "lora_alpha": 10, "target_modules": list(NET_NAMES)}


def proj_of(model: PeftModel) -> Any:
    return model.base_model.model.proj


def holder_twins(make_base: Callable[[], nn.Module] = make_holder, **lora: Any) -> Twins:
    return make_twins(make_base, target_modules=["proj"], **lora)


def tree(model: nn.Module) -> list[tuple[str, type]]:
    return [(name, type(module)) for name, module in model.named_modules()]


# -- the class changes, the tree does not ----------------------------------------------------------------------------


def test_install_changes_the_class_and_nothing_else_of_the_layer() -> None:
    model = get_peft_model(make_holder(), LoraConfig(r=4, target_modules=["proj"]))
    layer = proj_of(model)
    before, keys, hooks = id(layer), set(layer.__dict__), dict(layer._forward_hooks)
    parts = [id(part) for part in (*layer.parameters(), *layer.buffers(), *layer.modules())]
    fuse(model)
    assert proj_of(model) is layer and id(layer) == before
    assert type(layer) is FastLoraLinear
    assert [id(part) for part in (*layer.parameters(), *layer.buffers(), *layer.modules())] == parts
    assert set(layer.__dict__) - keys == {"fast_lora_options"}
    assert layer._forward_hooks == hooks


def test_a_fast_layer_is_still_everything_that_a_stock_layer_is() -> None:
    layer = proj_of(holder_twins().fast)
    assert isinstance(layer, (FastLoraLayer, Linear, LoraLayer, BaseTunerLayer, nn.Module))
    for cls in (FastLoraLayer, Linear, LoraLayer, BaseTunerLayer, nn.Module):
        assert isinstance(layer, cls)
    assert not issubclass(FastLoraLayer, LoraLayer), "__class__ assignment would fail: object layout differs"


@pytest.mark.parametrize("what", ["parameters", "buffers", "modules"])
def test_names_are_stocks(what: str) -> None:
    twins = make_twins(make_llama, target_modules=["q_proj", "down_proj"])
    stock, fast = ([name for name, _ in getattr(model, f"named_{what}")()] for model in twins)
    assert fast == stock


def test_state_dict_keys_are_stocks() -> None:
    twins = make_twins()
    assert list(twins.fast.state_dict()) == list(twins.stock.state_dict())


def test_print_shows_the_fast_classes_in_stocks_tree() -> None:
    twins = make_twins()
    assert "lora.FastLoraLinear(" in str(twins.fast)
    assert re.sub(r"FastLora(?!Model\b)", "", str(twins.fast)) == str(twins.stock)


def test_install_is_idempotent() -> None:
    model = make_twins().fast
    layers = lora_modules(model)
    before = {name: dict(layer.__dict__) for name, layer in layers.items()}
    classes = {name: type(layer) for name, layer in layers.items()}
    install(model, model.peft_config["default"].options())
    assert {name: type(layer) for name, layer in layers.items()} == classes
    for name, layer in layers.items():
        assert layer.__dict__.keys() == before[name].keys()


def test_install_again_gives_the_new_options() -> None:
    model = make_twins().fast
    install(model, FastLoraOptions(strict=True))
    assert all(layer.fast_lora_options.strict for layer in lora_modules(model).values())


def test_remove_is_idempotent() -> None:
    model = make_twins().fast
    for _ in range(2):
        remove(model)
        assert {type(layer) for layer in lora_modules(model).values()} == {Linear}


# -- exact types only ------------------------------------------------------------------------------------------------


class SomebodysLinear(Linear):
    """A subclass that computes something else."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return 2 * super().forward(x, *args, **kwargs)


def test_a_subclass_of_the_stock_layer_is_left_alone() -> None:
    twins = Twins(*(get_peft_model(make_net(), LoraConfig(**LORA)) for _ in range(2)))
    for model in twins:
        randomize(model)
        model.base_model.model.first.__class__ = SomebodysLinear
    report = fuse(twins.fast)
    assert type(twins.fast.base_model.model.first) is SomebodysLinear
    row = {row.name: row for row in report.rows}["base_model.model.first"]
    assert row.path == "stock"
    assert "there is no fast version of" in row.reason and "SomebodysLinear" in row.reason
    assert_twins_agree(twins, net_input(), {"second", "third"})


def test_a_class_put_over_ours_is_left_alone() -> None:
    """FSDP2's `fully_shard` gives a module a subclass of its class; giving ours back would take FSDP's away."""
    twins = holder_twins()
    layer = proj_of(twins.fast)
    on_top = type("FSDPFastLoraLinear", (FastLoraLinear,), {"__module__": "torch.distributed.fsdp"})
    layer.__class__ = on_top
    assert_twins_agree(twins, net_input(), {"proj"})
    for give_back in (remove, unfuse):
        give_back(twins.fast)
        assert type(layer) is on_top
    assert layer.fast_lora_options == FastLoraOptions()  # its forward still needs them
    assert_twins_agree(twins, net_input(), {"proj"})


def test_delete_adapter_leaves_a_class_put_over_ours_alone() -> None:
    layer = proj_of(holder_twins().fast)
    layer.__class__ = on_top = type("FSDPFastLoraLinear", (FastLoraLinear,), {"__module__": "torch.distributed.fsdp"})
    layer.delete_adapter("default")
    assert type(layer) is on_top


# -- nothing stays behind --------------------------------------------------------------------------------------------


def llama_twins() -> Twins:
    """Layers, and MLP blocks around them."""
    return make_twins(make_llama, target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"])


@pytest.mark.parametrize("method", ["unload", "merge_and_unload"])
@pytest.mark.parametrize("make", [make_twins, llama_twins])
def test_unload_leaves_nothing_of_ours(make: Callable[[], Twins], method: str) -> None:
    twins = make()
    stock, fast = twins.do(lambda model: getattr(model, method)())
    assert tree(fast) == tree(stock)
    module_dicts_without_ours(fast)
    for (name, expected), actual in zip(stock.state_dict().items(), fast.state_dict().values(), strict=True):
        assert_equal(actual, expected, name)


@pytest.mark.parametrize("method", ["unfuse", "delete_adapter"])
def test_layers_and_blocks_are_stock_again(method: str) -> None:
    twins = llama_twins()
    assert "FastLoraLlamaMLP" in {cls.__name__ for _, cls in tree(twins.fast)}
    run(twins.fast, llama_input())
    if method == "unfuse":
        unfuse(twins.fast)
    else:
        twins.do(lambda model: model.delete_adapter("default"))
    assert tree(twins.fast.base_model.model) == tree(twins.stock.base_model.model)
    module_dicts_without_ours(twins.fast.base_model.model)


def test_unload_gives_kept_layers_their_stock_class_back() -> None:
    """Whoever holds a layer of the unloaded model holds a stock layer."""
    model = make_twins().fast
    model.base_model.model.kept = kept = nn.ModuleList()
    layer = model.base_model.model.first
    kept._modules["inner"] = Holder(layer)  # a second place in the tree
    base = model.unload()
    module_dicts_without_ours(base)


def test_unfuse_gives_back_exactly_the_stock_model() -> None:
    twins = make_twins(options={"strict": True})
    before = run(twins.fast, net_input())
    unfuse(twins.fast)
    assert type(twins.fast.base_model) is LoraModel
    assert type(twins.fast.peft_config["default"]) is LoraConfig
    assert twins.fast.peft_config["default"].__dict__.keys() == twins.stock.peft_config["default"].__dict__.keys()
    assert {type(layer) for layer in lora_modules(twins.fast).values()} == {Linear}
    module_dicts_without_ours_in_layers(twins.fast)
    assert before.fused == set(NET_NAMES)
    assert_twins_agree(twins, net_input(), set(), exact=True)


def module_dicts_without_ours_in_layers(model: nn.Module) -> None:
    for layer in lora_modules(model).values():
        module_dicts_without_ours(layer)


def test_unfused_adds_later_adapters_as_stock() -> None:
    model = make_twins().fast
    unfuse(model)
    model.add_adapter("later", LoraConfig(**LORA))
    assert not is_fast(model)


def test_fuse_and_unfuse_in_turn() -> None:
    twins = make_twins()
    for _ in range(2):
        unfuse(twins.fast)
        assert_twins_agree(twins, net_input(), set(), exact=True)
        fuse(twins.fast)
        assert_twins_agree(twins, net_input(), NET_NAMES)


def test_deleting_the_last_adapter_gives_the_stock_classes_back() -> None:
    twins = make_twins()
    twins.do(lambda model: model.delete_adapter("default"))
    assert {type(layer) for layer in lora_modules(twins.fast).values()} == {Linear}
    module_dicts_without_ours_in_layers(twins.fast)
    for stock, fast in zip(lora_modules(twins.stock).values(), lora_modules(twins.fast).values(), strict=True):
        assert fast.__dict__.keys() == stock.__dict__.keys()
        x = torch.randn(3, fast.in_features)
        assert_equal(fast(x), stock(x))


def test_deleting_one_of_two_adapters_keeps_the_layers_fast() -> None:
    twins = make_twins()
    twins.do(lambda model: model.add_adapter("other", LoraConfig(**LORA)))
    twins.do(randomize)
    twins.do(lambda model: model.set_adapter("other"))
    twins.do(lambda model: model.delete_adapter("default"))
    assert is_fast(twins.fast)
    assert_twins_agree(twins, net_input(), NET_NAMES)


def test_a_model_made_fast_and_dropped_is_collected() -> None:
    """No cache of ours keeps a model alive."""
    model = make_twins().fast
    run(model, net_input())
    reference = weakref.ref(model.base_model.model.first)
    del model
    gc.collect()
    assert reference() is None


# -- a forward of somebody else in an instance -----------------------------------------------------------------------


def doubled(self: Linear, x: Tensor) -> Tensor:
    return 2 * Linear.forward(self, x)


def test_a_layer_whose_forward_was_replaced_before_is_left_alone() -> None:
    """Liger and its like put their forward into the instance; ours would never be called, or theirs never again."""
    twins = Twins(*(get_peft_model(make_net(), LoraConfig(**LORA)) for _ in range(2)))
    for model in twins:
        randomize(model)
        layer = model.base_model.model.first
        layer.forward = types.MethodType(doubled, layer)
    report = fuse(twins.fast)
    assert type(twins.fast.base_model.model.first) is Linear
    row = {row.name: row for row in report.rows}["base_model.model.first"]
    assert (row.path, row.reason) == ("stock", "the forward of the layer was replaced on the instance")
    assert_twins_agree(twins, net_input(), {"second", "third"})


def test_a_layer_whose_forward_was_replaced_afterwards_is_reported_stock() -> None:
    """Announced is what happens: the replaced forward never reaches ours."""
    twins = make_twins()
    for model in twins:
        layer = model.base_model.model.first
        layer.forward = types.MethodType(doubled, layer)
    assert_twins_agree(twins, net_input(), {"second", "third"})
    row = {row.name: row for row in fusion_report(twins.fast).rows}["base_model.model.first"]
    assert (row.path, row.reason) == ("stock", "the forward of the layer was replaced on the instance")


# -- accelerate ------------------------------------------------------------------------------------------------------


def add_recording_hook(layer: nn.Module) -> list[str]:
    """An accelerate hook that does nothing but say that it was called."""
    hooks = pytest.importorskip("accelerate.hooks")
    calls: list[str] = []

    class Recorder(hooks.ModelHook):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            calls.append("before")
            return args, kwargs

        def post_forward(self, module: nn.Module, output: Any) -> Any:
            calls.append("after")
            return output

    hooks.add_hook_to_module(layer, Recorder())
    return calls


def test_accelerates_hook_added_before_calls_the_fast_forward() -> None:
    """`add_hook_to_module` keeps the forward that was bound when it was called."""
    twins = Twins(*(get_peft_model(make_holder(), LoraConfig(r=4, target_modules=["proj"])) for _ in range(2)))
    for model in twins:
        randomize(model)
    calls = [add_recording_hook(proj_of(model)) for model in twins]
    report = fuse(twins.fast)
    assert [row.path for row in report.rows] == ["fused"]
    assert_twins_agree(twins, net_input(), {"proj"})
    assert calls == [["before", "after"]] * 2


def test_accelerates_hook_calls_the_stock_forward_after_unfuse() -> None:
    twins = holder_twins()
    calls = [add_recording_hook(proj_of(model)) for model in twins]
    assert_twins_agree(twins, net_input(), {"proj"})
    unfuse(twins.fast)
    layer = proj_of(twins.fast)
    assert layer._old_forward.__func__ is Linear.forward and layer._old_forward.__self__ is layer
    assert_twins_agree(twins, net_input(), set(), exact=True)
    assert calls == [["before", "after"] * 2] * 2


def test_removing_accelerates_hook_after_fuse_leaves_the_fast_forward() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    twins = Twins(*(get_peft_model(make_holder(), LoraConfig(r=4, target_modules=["proj"])) for _ in range(2)))
    for model in twins:
        randomize(model)
        add_recording_hook(proj_of(model))
    fuse(twins.fast)
    for model in twins:
        hooks.remove_hook_from_module(proj_of(model))
    assert_twins_agree(twins, net_input(), {"proj"})


# -- pickle, deepcopy, torch.save ------------------------------------------------------------------------------------


def through_torch_save(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


DUPLICATES = [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), through_torch_save]


@pytest.mark.parametrize("duplicate", DUPLICATES, ids=["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("quantized", [False, True], ids=["dense", "nf4"])
def test_copies_are_fast_and_independent(duplicate: Callable[[nn.Module], nn.Module], quantized: bool) -> None:
    base, x = (nf4_holder, torch.randn(3, 64)) if quantized else (make_holder, net_input())
    twins = holder_twins(base, r=4)
    copied = duplicate(twins.fast)
    assert_twins_agree(Twins(twins.stock, copied), x, {"proj"})
    unfuse(copied)
    assert type(proj_of(copied)) is type(proj_of(twins.stock))
    assert is_fast(twins.fast)


# -- the 4-bit class -------------------------------------------------------------------------------------------------


def test_the_4bit_layer_gets_its_own_fast_class_and_gives_it_back() -> None:
    twins = holder_twins(nf4_holder)
    layer, stock_class = proj_of(twins.fast), type(proj_of(twins.stock))
    assert type(layer).__name__ == "FastLoraLinear4bit" and isinstance(layer, stock_class)
    assert_twins_agree(twins, torch.randn(3, 64), {"proj"})
    unfuse(twins.fast)
    assert type(layer) is stock_class
    module_dicts_without_ours_in_layers(twins.fast)


def test_the_layer_module_has_no_other_lazy_names() -> None:
    from peft_fastlora import layer

    with pytest.raises(AttributeError, match="no attribute 'FastLoraLinear8bit'"):
        _ = layer.FastLoraLinear8bit


# -- scaling as a tensor ---------------------------------------------------------------------------------------------


def test_scaling_may_be_a_tensor_without_dimensions() -> None:
    """`prepare_model_for_compiled_hotswap` keeps it as one, and changes it in place."""
    twins = holder_twins()
    for model in twins:
        proj_of(model).scaling["default"] = torch.tensor(2.5)
    before, _ = assert_twins_agree(twins, net_input(), {"proj"})
    for model in twins:
        proj_of(model).scaling["default"].fill_(-1.0)
    after, _ = assert_twins_agree(twins, net_input(), {"proj"})
    assert not torch.allclose(before.output, after.output)


# -- what fuse takes -------------------------------------------------------------------------------------------------


def stock_model() -> PeftModel:
    model = get_peft_model(make_net(), LoraConfig(**LORA))
    randomize(model)
    return model


def test_fuse_on_a_peft_model() -> None:
    twins = Twins(stock_model(), stock_model())
    report = fuse(twins.fast)
    assert report.counts == {("linear", "fused"): 3}
    assert type(twins.fast.base_model) is FastLoraModel
    assert type(twins.fast.peft_config["default"]) is FastLoraConfig
    assert_twins_agree(twins, net_input(), NET_NAMES)


def test_fuse_on_a_module_that_holds_a_peft_model() -> None:
    twins = Twins(Holder(stock_model()), Holder(stock_model()))
    report = fuse(twins.fast)
    assert [row.name for row in report.rows] == [f"proj.base_model.model.{name}" for name in NET_NAMES]
    assert type(twins.fast.proj.base_model) is FastLoraModel
    assert_twins_agree(twins, net_input(), NET_NAMES)
    unfuse(twins.fast)
    assert type(twins.fast.proj.base_model) is LoraModel
    assert_twins_agree(twins, net_input(), set(), exact=True)


def transformers_adapter_model(config: LoraConfig) -> nn.Module:
    """Transformers' own `add_adapter`, without a `PeftModel`."""
    model = make_llama()
    try:
        model.add_adapter(config)
    except (ImportError, ValueError) as error:
        pytest.skip(f"this version of transformers does not take this version of PEFT: {error}")
    randomize(model)
    return model


def test_fuse_on_a_model_with_transformers_own_adapter() -> None:
    config = {"r": 4, "target_modules": ["q_proj", "down_proj"]}
    twins = Twins(*(transformers_adapter_model(LoraConfig(**config)) for _ in range(2)))
    report = fuse(twins.fast)
    assert {row.path for row in report.rows} == {"fused"} and len(report.rows) == 4
    assert_twins_agree(twins, llama_input(), {"q_proj", "down_proj"})
    unfuse(twins.fast)
    assert_twins_agree(twins, llama_input(), set(), exact=True)


def test_transformers_own_adapter_with_a_fast_config_is_fast() -> None:
    config = {"r": 4, "target_modules": ["q_proj", "down_proj"]}
    twins = Twins(*(transformers_adapter_model(cls(**config)) for cls in (LoraConfig, FastLoraConfig)))
    assert_twins_agree(twins, llama_input(), {"q_proj", "down_proj"})


def test_layers_injected_without_a_peft_model() -> None:
    from peft import inject_adapter_in_model

    bases = [inject_adapter_in_model(cls(**LORA), make_net()) for cls in (LoraConfig, FastLoraConfig, LoraConfig)]
    for base in bases:
        randomize(base)
    assert_twins_agree(Twins(bases[0], bases[1]), net_input(), NET_NAMES)
    fuse(bases[2])
    assert_twins_agree(Twins(bases[0], bases[2]), net_input(), NET_NAMES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strict": "yes"}, "`strict` must be True or False, got 'yes'"),
        ({"chunk_size": 0}, "`chunk_size` must be None or a positive integer, got 0"),
        ({"recompute": "all"}, "`recompute` must be one of 'activation', 'projections', got 'all'"),
        ({"fuse_everything": True}, r"fuse\(\) has no option 'fuse_everything'; known: fuse_mlp, .*strict"),
    ],
)
def test_fuse_is_atomic(options: dict[str, Any], message: str) -> None:
    """Nothing was changed where an option is not valid."""
    model = stock_model()
    classes, config = tree(model), dict(model.peft_config["default"].__dict__)
    with pytest.raises(ValueError, match=message):
        fuse(model, **options)
    assert tree(model) == classes
    assert type(model.peft_config["default"]) is LoraConfig
    assert dict(model.peft_config["default"].__dict__) == config
    module_dicts_without_ours_in_layers(model)


def test_fuse_sets_the_options_of_layers_and_configuration() -> None:
    model = stock_model()
    fuse(model, strict=True)
    assert model.peft_config["default"].options() == FastLoraOptions(strict=True)
    assert all(layer.fast_lora_options == FastLoraOptions(strict=True) for layer in lora_modules(model).values())


def test_fuse_again_sets_the_options_anew() -> None:
    """An adapter that is added later takes the options from the configuration."""
    model = stock_model()
    fuse(model, strict=True)
    fuse(model, fuse_linear=False)
    expected = FastLoraOptions(fuse_linear=False)
    assert all(layer.fast_lora_options == expected for layer in lora_modules(model).values())
    model.add_adapter("later", LoraConfig(**LORA))
    assert all(layer.fast_lora_options == expected for layer in lora_modules(model).values())
    assert model.peft_config["default"].options() == expected


@pytest.mark.parametrize("function", [fuse, unfuse, fusion_report])
def test_a_model_without_lora_layers_is_an_error_that_says_what_to_do(function: Callable[[nn.Module], Any]) -> None:
    with pytest.raises(ValueError) as caught:
        function(make_net())
    message = str(caught.value)
    assert "no LoRA layer found in Net" in message
    assert "get_peft_model(model, FastLoraConfig(...))" in message


# -- several adapters, one model -------------------------------------------------------------------------------------


@pytest.mark.parametrize("plain_first", [False, True], ids=["fast then plain", "plain then fast"])
def test_one_fast_config_makes_all_layers_fast(plain_first: bool) -> None:
    """Also those that a plain `LoraConfig` adds, before or after."""
    configs = [FastLoraConfig(r=4, target_modules=["first"]), LoraConfig(r=2, target_modules=["first", "third"])]
    if plain_first:
        configs.reverse()
    stock = get_peft_model(make_net(), LoraConfig(r=configs[0].r, target_modules=configs[0].target_modules), "a")
    fast = get_peft_model(make_net(), configs[0], "a")
    stock.add_adapter("b", LoraConfig(r=configs[1].r, target_modules=configs[1].target_modules))
    fast.add_adapter("b", configs[1])
    twins = Twins(stock, fast)
    twins.do(randomize)
    assert is_fast(fast)
    twins.do(lambda model: model.base_model.set_adapter(["a", "b"]))
    assert_twins_agree(twins, net_input(), {"first", "third"})


def test_adapters_with_different_options_warn_and_the_first_decides() -> None:
    model = get_peft_model(make_net(), FastLoraConfig(**LORA, strict=True), "a")
    with pytest.warns(UserWarning, match="adapter 'b' has other fast options than adapter 'a', which are used"):
        model.add_adapter("b", FastLoraConfig(**LORA))
    assert all(layer.fast_lora_options.strict for layer in lora_modules(model).values())


def test_adapters_with_equal_options_do_not_warn() -> None:
    model = get_peft_model(make_net(), FastLoraConfig(**LORA, strict=True), "a")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.add_adapter("b", FastLoraConfig(**LORA, strict=True))
        model.add_adapter("c", LoraConfig(**LORA))


def test_an_adapter_added_after_the_last_was_deleted_is_fast_again() -> None:
    twins = make_twins()
    for model, cls in zip(twins, (LoraConfig, FastLoraConfig), strict=True):
        model.delete_adapter("default")
        model.add_adapter("again", cls(**LORA))
        model.set_adapter("again")
        randomize(model)
    assert_twins_agree(twins, net_input(), NET_NAMES)


def test_low_cpu_mem_usage_is_fast_with_the_loaded_values(tmp_path: Any) -> None:
    """Layers are made fast while their weights are on the meta device."""
    stock = stock_model()
    stock.save_pretrained(str(tmp_path))
    config = FastLoraConfig.from_pretrained(str(tmp_path))
    fast = PeftModel.from_pretrained(
        make_net(), str(tmp_path), config=config, low_cpu_mem_usage=True, is_trainable=True
    )
    result = run(fast, net_input())
    assert result.fused == set(NET_NAMES)
    assert_close(result.output, run(stock, net_input()).output)


# -- strict ----------------------------------------------------------------------------------------------------------


class Peft8bit(nn.Sequential):
    """A model with an 8-bit projection, of which there is no fast version."""

    is_loaded_in_8bit = True


def make_8bit() -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes")
    return Peft8bit(bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False).to("cpu"), nn.Linear(64, 64))


STRICT_8BIT = (
    r"^strict=True: the fused path was not used because there is no fast version of "
    r"peft\.tuners\.lora\.bnb\.Linear8bitLt \(layer 0\)$"
)


def test_strict_refuses_a_linear_without_fast_version_and_leaves_the_model_as_it_was() -> None:
    base = make_8bit()
    before = tree(base)
    with pytest.raises(RuntimeError, match=STRICT_8BIT):
        get_peft_model(base, FastLoraConfig(target_modules=["0", "1"], strict=True))
    assert tree(base) == before
    module_dicts_without_ours(base)
    assert is_fast_except(get_peft_model(base, FastLoraConfig(target_modules=["0", "1"])), "0")


def is_fast_except(model: PeftModel, stock_name: str) -> bool:
    return {
        name.rpartition(".")[2]: isinstance(layer, FastLoraLayer) for name, layer in lora_modules(model).items()
    } == {
        "0": stock_name != "0",
        "1": stock_name != "1",
    }


def test_strict_refuses_a_later_adapter_and_keeps_the_earlier_one() -> None:
    model = get_peft_model(make_8bit(), FastLoraConfig(target_modules=["1"], strict=True), "a")
    x = torch.randn(3, 64)
    before = model(x).detach()
    with pytest.raises(RuntimeError, match=STRICT_8BIT):
        model.add_adapter("b", FastLoraConfig(target_modules=["0", "1"], strict=True))
    assert list(model.base_model.peft_config) == ["a"]
    assert_equal(model(x).detach(), before)


def test_strict_does_not_mind_layers_that_are_no_linear() -> None:
    base = nn.ModuleDict({"tokens": nn.Embedding(10, 24), "proj": nn.Linear(24, 16)})
    model = get_peft_model(base, FastLoraConfig(target_modules=["tokens", "proj"], strict=True))
    assert sorted(row.path for row in fusion_report(model).rows) == ["fused", "stock"]


def test_fuse_with_strict_refuses_like_a_config_and_changes_nothing() -> None:
    model = get_peft_model(make_8bit(), LoraConfig(target_modules=["0", "1"]))
    before = tree(model)
    with pytest.raises(RuntimeError, match=r"strict=True: .* there is no fast version of"):
        fuse(model, strict=True)
    assert tree(model) == before
    assert type(model.peft_config["default"]) is LoraConfig
