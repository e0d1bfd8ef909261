"""Registration in PEFT's tuner mapping."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lifecycle_models import is_fast, llama_input, make_llama, make_net, make_twins, randomize, stock_classes
from peft import AutoPeftModelForCausalLM, LoraConfig, LoraModel, PeftConfig, PeftModel, PeftType, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.lora import Embedding, Linear
from torch import nn

from peft_fastlora import FastLoraConfig, FastLoraModel, register, unregister

TARGETS = ["first", "third"]


@pytest.fixture(autouse=True)
def restored_mappings() -> Iterator[None]:
    tuner, config = PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA], PEFT_TYPE_TO_CONFIG_MAPPING[PeftType.LORA]
    yield
    PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA] = tuner
    PEFT_TYPE_TO_CONFIG_MAPPING[PeftType.LORA] = config


def registered() -> tuple[type, type]:
    return PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA], PEFT_TYPE_TO_CONFIG_MAPPING[PeftType.LORA]


@pytest.fixture
def saved_adapter(tmp_path: Path) -> str:
    """A stock adapter of `Net`."""
    model = get_peft_model(make_net(), LoraConfig(r=4, target_modules=TARGETS))
    randomize(model)
    model.save_pretrained(str(tmp_path))
    return str(tmp_path)


def test_importing_the_package_registers() -> None:
    assert registered() == (FastLoraModel, LoraConfig)


@pytest.mark.parametrize("times", [1, 2])
def test_register_and_unregister_are_idempotent(times: int) -> None:
    for _ in range(times):
        unregister()
    assert registered() == (LoraModel, LoraConfig)
    for _ in range(times):
        register(default=True)
    assert registered() == (FastLoraModel, FastLoraConfig)
    for _ in range(times):
        register()
    assert registered() == (FastLoraModel, LoraConfig)


def test_no_other_entry_of_the_mappings_is_touched() -> None:
    def others() -> list[dict[PeftType, type]]:
        mappings = (PEFT_TYPE_TO_TUNER_MAPPING, PEFT_TYPE_TO_CONFIG_MAPPING)
        return [{key: value for key, value in m.items() if key != PeftType.LORA} for m in mappings]

    before = others()
    register(default=True)
    unregister()
    assert others() == before


def test_a_fast_config_without_registration_builds_a_stock_model_and_a_registered_one_a_fast_model() -> None:
    unregister()
    assert not is_fast(get_peft_model(make_net(), FastLoraConfig(target_modules=TARGETS)))
    register()
    assert is_fast(get_peft_model(make_net(), FastLoraConfig(target_modules=TARGETS)))


def test_models_that_are_fast_stay_fast_after_unregister() -> None:
    model = get_peft_model(make_net(), FastLoraConfig(target_modules=TARGETS))
    unregister()
    assert is_fast(model)


# -- plain configurations stay stock ---------------------------------------------------------------------------------


def test_a_plain_config_builds_exactly_the_stock_layers() -> None:
    model = get_peft_model(make_net(), LoraConfig(target_modules=TARGETS))
    assert stock_classes(model) == {Linear}
    assert type(model.base_model) is FastLoraModel  # which is a LoraModel
    assert isinstance(model.base_model, LoraModel)


def test_a_plain_config_builds_exactly_the_modules_that_an_unregistered_peft_builds() -> None:
    config = {"r": 4, "target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]}
    ours = get_peft_model(make_llama(), LoraConfig(**config))
    unregister()
    stock = get_peft_model(make_llama(), LoraConfig(**config))
    assert stock_classes(ours) == {Linear, Embedding}
    assert type(stock.base_model) is LoraModel
    assert [(name, type(module)) for name, module in ours.named_modules() if name != "base_model"] == [
        (name, type(module)) for name, module in stock.named_modules() if name != "base_model"
    ]


def test_a_plain_adapter_from_disk_is_stock(saved_adapter: str) -> None:
    model = PeftModel.from_pretrained(make_net(), saved_adapter)
    assert stock_classes(model) == {Linear}
    assert type(model.peft_config["default"]) is LoraConfig


# -- register(default=True) ------------------------------------------------------------------------------------------


def test_default_makes_from_pretrained_fast(saved_adapter: str) -> None:
    register(default=True)
    model = PeftModel.from_pretrained(make_net(), saved_adapter)
    assert is_fast(model)
    assert type(model.peft_config["default"]) is FastLoraConfig


def test_default_makes_load_adapter_fast(saved_adapter: str) -> None:
    model = get_peft_model(make_net(), LoraConfig(r=2, target_modules=TARGETS))
    assert not is_fast(model)
    register(default=True)
    model.load_adapter(saved_adapter, "loaded")
    assert is_fast(model)


def test_default_makes_auto_peft_model_fast(tmp_path: Path) -> None:
    make_llama().save_pretrained(str(tmp_path / "base"))
    config = LoraConfig(
        r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", base_model_name_or_path=str(tmp_path / "base")
    )
    trained = get_peft_model(make_llama(), config)
    trained.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    randomize(trained)
    trained.save_pretrained(str(tmp_path / "adapter"))
    stock = AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "adapter"))
    assert not is_fast(stock)
    register(default=True)
    fast = AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "adapter"))
    assert is_fast(fast)
    with torch.no_grad():
        torch.testing.assert_close(fast(llama_input()).logits, stock(llama_input()).logits, rtol=0, atol=1e-5)


def test_default_reads_the_options_of_the_side_file(saved_adapter: str) -> None:
    FastLoraConfig(r=4, target_modules=TARGETS, strict=True).save_pretrained(saved_adapter)
    register(default=True)
    model = PeftModel.from_pretrained(make_net(), saved_adapter)
    assert model.peft_config["default"].strict is True


def test_default_does_not_change_other_kinds_of_adapter(tmp_path: Path) -> None:
    from peft import IA3Config

    IA3Config(target_modules=TARGETS, feedforward_modules=[]).save_pretrained(str(tmp_path))
    register(default=True)
    assert type(PeftConfig.from_pretrained(str(tmp_path))) is IA3Config


# -- the routes of the issue -----------------------------------------------------------------------------------------


def test_from_pretrained_with_a_fast_config_is_fast_with_stocks_output(saved_adapter: str) -> None:
    stock = PeftModel.from_pretrained(make_net(), saved_adapter)
    config = FastLoraConfig.from_pretrained(saved_adapter)
    fast = PeftModel.from_pretrained(make_net(), saved_adapter, config=config)
    assert is_fast(fast)
    x = torch.randn(3, 24)
    torch.testing.assert_close(fast(x), stock(x), rtol=0, atol=1e-6)


def test_load_adapter_of_a_stock_adapter_into_a_fast_model_is_fast(saved_adapter: str) -> None:
    twins = make_twins(target_modules=TARGETS)
    for model in twins:
        model.load_adapter(saved_adapter, "loaded")
        model.set_adapter("loaded")
    assert is_fast(twins.fast)
    x = torch.randn(3, 24)
    torch.testing.assert_close(twins.fast(x), twins.stock(x), rtol=0, atol=1e-6)


def test_the_tuner_of_a_mixed_model_is_not_ours() -> None:
    mixed = get_peft_model(make_net(), LoraConfig(target_modules=TARGETS), mixed=True)
    assert not isinstance(mixed.base_model, FastLoraModel)
    assert isinstance(mixed.base_model, nn.Module)
