"""`FastLoraConfig`: options, the side file, and the file that stock PEFT reads."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
from lifecycle_models import is_fast, make_net
from peft import AdaLoraConfig, LoraConfig, PeftConfig, PeftType, get_peft_model

from peft_fastlora import FastLoraConfig, FastLoraOptions, fuse
from peft_fastlora.config import NOT_YET_SUPPORTED

SIDE_FILE = "fast_lora_config.json"
OPTIONS = [option.name for option in dataclasses.fields(FastLoraOptions)]
LORA = {"r": 4, "lora_alpha": 10, "target_modules": ["first"], "task_type": "CAUSAL_LM", "rank_pattern": {"first": 2}}


def adapter_dir(path: Path, config_class: type[LoraConfig] = LoraConfig, **fields: Any) -> str:
    config_class(**{**LORA, **fields}).save_pretrained(str(path))
    return str(path)


# -- options ---------------------------------------------------------------------------------------------------------


def test_defaults_are_those_of_the_design() -> None:
    config = FastLoraConfig()
    assert config.options_dict() == {
        "fuse_mlp": True,
        "fuse_qkv": True,
        "fuse_linear": True,
        "lora_compute_dtype": "adapter",
        "recompute": "activation",
        "chunk_size": None,
        "strict": False,
    }
    assert isinstance(config, LoraConfig)
    assert config.peft_type == PeftType.LORA


INVALID = [
    ("fuse_mlp", "yes", "must be True or False"),
    ("fuse_qkv", 1, "must be True or False"),
    ("fuse_linear", None, "must be True or False"),
    ("strict", "True", "must be True or False"),
    ("lora_compute_dtype", "bf16", "must be one of 'adapter', 'base'"),
    ("lora_compute_dtype", None, "must be one of 'adapter', 'base'"),
    ("recompute", "all", "must be one of 'activation', 'projections'"),
    ("recompute", True, "must be one of 'activation', 'projections'"),
    ("chunk_size", 0, "must be None or a positive integer"),
    ("chunk_size", -8, "must be None or a positive integer"),
    ("chunk_size", True, "must be None or a positive integer"),
    ("chunk_size", 2.0, "must be None or a positive integer"),
    ("chunk_size", "64", "must be None or a positive integer"),
]


@pytest.mark.parametrize(("name", "value", "rule"), INVALID)
def test_an_invalid_option_is_refused_with_its_name_rule_and_value(name: str, value: Any, rule: str) -> None:
    with pytest.raises(ValueError) as caught:
        FastLoraConfig(**{name: value})
    assert str(caught.value) == f"`{name}` {rule}, got {value!r}"


@pytest.mark.parametrize(("name", "value", "rule"), INVALID)
def test_the_side_file_is_checked_like_arguments(tmp_path: Path, name: str, value: Any, rule: str) -> None:
    path = adapter_dir(tmp_path)
    (tmp_path / SIDE_FILE).write_text(json.dumps({name: value}))
    with pytest.raises(ValueError, match=f"`{name}` {rule}, got"):
        FastLoraConfig.from_pretrained(path)


@pytest.mark.parametrize("name", ["fuse_linear", "strict"])
@pytest.mark.parametrize("value", [True, False])
def test_switches_take_both_values(name: str, value: bool) -> None:
    config = FastLoraConfig(**{name: value})
    assert config.options_dict()[name] is value
    assert getattr(config.options(), name) is value


OTHER_VALUES = {
    "fuse_mlp": False,
    "fuse_qkv": False,
    "lora_compute_dtype": "base",
    "recompute": "projections",
    "chunk_size": 64,
}


@pytest.mark.parametrize("name", NOT_YET_SUPPORTED)
def test_an_option_of_a_later_version_is_refused_rather_than_ignored(name: str) -> None:
    default, value = getattr(FastLoraOptions(), name), OTHER_VALUES[name]
    with pytest.raises(ValueError) as caught:
        FastLoraConfig(**{name: value})
    assert str(caught.value) == f"`{name}` supports only {default!r} in this version, got {value!r}"


@pytest.mark.parametrize("name", sorted(OTHER_VALUES.keys() - set(NOT_YET_SUPPORTED)))
def test_an_option_of_this_version_is_taken(name: str) -> None:
    assert FastLoraConfig(**{name: OTHER_VALUES[name]}).options_dict()[name] == OTHER_VALUES[name]


def test_stock_rules_still_apply() -> None:
    with pytest.raises(ValueError, match="layers_to_transform"):
        FastLoraConfig(target_modules="q_proj", layers_to_transform=[0])
    with pytest.raises(TypeError):
        FastLoraConfig(no_such_field=1)


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_keyword_only_and_documented_in_its_metadata(name: str) -> None:
    option = {field.name: field for field in dataclasses.fields(FastLoraConfig)}[name]
    assert option.kw_only
    assert len(option.metadata["help"]) > 20
    assert inspect.signature(FastLoraConfig).parameters[name].kind is inspect.Parameter.KEYWORD_ONLY


def test_positional_arguments_and_stock_fields_are_those_of_stock() -> None:
    """PEFT reads the metadata of its fields, so none may be redefined."""
    stock = list(inspect.signature(LoraConfig).parameters.values())
    ours = list(inspect.signature(FastLoraConfig).parameters.values())
    assert [(p.name, p.kind) for p in ours[: len(stock)]] == [(p.name, p.kind) for p in stock]
    assert {p.name for p in ours[len(stock) :]} == set(OPTIONS)
    ours_by_name = {field.name: field for field in dataclasses.fields(FastLoraConfig)}
    for field in dataclasses.fields(LoraConfig):
        assert ours_by_name[field.name].metadata == field.metadata
        assert ours_by_name[field.name].default == field.default
    positional = ("CAUSAL_LM", None, None, None, "some-base")
    assert FastLoraConfig(*positional).to_dict() == LoraConfig(*positional).to_dict()


# -- what is written -------------------------------------------------------------------------------------------------


def test_to_dict_is_stocks() -> None:
    assert FastLoraConfig(**LORA, strict=True).to_dict() == LoraConfig(**LORA).to_dict()


def test_adapter_config_json_is_byte_equal_to_stocks(tmp_path: Path) -> None:
    stock = Path(adapter_dir(tmp_path / "stock")) / "adapter_config.json"
    ours = Path(adapter_dir(tmp_path / "ours", FastLoraConfig, strict=True)) / "adapter_config.json"
    assert ours.read_bytes() == stock.read_bytes()


def test_the_side_file_holds_the_options_and_nothing_else(tmp_path: Path) -> None:
    adapter_dir(tmp_path, FastLoraConfig, strict=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", SIDE_FILE]
    stored = json.loads((tmp_path / SIDE_FILE).read_text())
    assert stored == {**FastLoraOptions().options_dict(), "strict": True}


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c)), dataclasses.replace]
)
def test_copies_keep_the_options(duplicate: Any) -> None:
    copied = duplicate(FastLoraConfig(**LORA, strict=True, fuse_linear=False))
    assert type(copied) is FastLoraConfig
    assert copied.options_dict() == {**FastLoraOptions().options_dict(), "strict": True, "fuse_linear": False}
    assert copied.r == 4


# -- from_pretrained -------------------------------------------------------------------------------------------------


def test_from_pretrained_of_ours_gives_every_field_back(tmp_path: Path) -> None:
    path = adapter_dir(tmp_path, FastLoraConfig, strict=True, fuse_linear=False)
    config = FastLoraConfig.from_pretrained(path)
    assert type(config) is FastLoraConfig
    assert config.options_dict() == {**FastLoraOptions().options_dict(), "strict": True, "fuse_linear": False}
    assert config.to_dict() == LoraConfig.from_pretrained(path).to_dict()


def test_from_pretrained_of_stocks_gives_default_options(tmp_path: Path) -> None:
    path = adapter_dir(tmp_path)
    config = FastLoraConfig.from_pretrained(path)
    assert type(config) is FastLoraConfig
    assert config.options() == FastLoraOptions()
    assert config.to_dict() == LoraConfig.from_pretrained(path).to_dict()


def test_stock_config_reads_ours_and_ignores_the_side_file(tmp_path: Path) -> None:
    path = adapter_dir(tmp_path, FastLoraConfig, strict=True)
    config = LoraConfig.from_pretrained(path)
    assert type(config) is LoraConfig
    assert not set(config.__dict__) & set(OPTIONS)


def test_options_given_by_keyword_win_over_the_side_file(tmp_path: Path) -> None:
    path = adapter_dir(tmp_path, FastLoraConfig, strict=True, fuse_linear=False)
    config = FastLoraConfig.from_pretrained(path, fuse_linear=True)
    assert (config.strict, config.fuse_linear) == (True, True)
    with pytest.raises(ValueError, match="`strict` must be True or False, got 'no'"):
        FastLoraConfig.from_pretrained(path, strict="no")


def test_from_pretrained_reads_a_subfolder(tmp_path: Path) -> None:
    adapter_dir(tmp_path / "inner", FastLoraConfig, strict=True)
    assert FastLoraConfig.from_pretrained(str(tmp_path), subfolder="inner").strict is True


def test_from_pretrained_of_a_folder_without_adapter_is_stocks_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Can't find 'adapter_config\.json'"):
        FastLoraConfig.from_pretrained(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not valid JSON"),
        (b'{"strict": tr', "is not valid JSON"),
        (b"\xff\xfe\x00\x01", "is not valid JSON"),
        (b"[1, 2]", "must hold a JSON object, got list"),
        (b"null", "must hold a JSON object, got NoneType"),
        (b'"strict"', "must hold a JSON object, got str"),
    ],
)
def test_a_damaged_side_file_is_named_in_the_error(tmp_path: Path, content: bytes, message: str) -> None:
    path = adapter_dir(tmp_path)
    (tmp_path / SIDE_FILE).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        FastLoraConfig.from_pretrained(path)
    assert str(tmp_path / SIDE_FILE) in str(caught.value)


def test_unknown_options_of_a_newer_version_are_ignored_with_a_warning(tmp_path: Path) -> None:
    path = adapter_dir(tmp_path)
    (tmp_path / SIDE_FILE).write_text(json.dumps({"strict": True, "fuse_moe": True}))
    with pytest.warns(UserWarning, match=r"options that this version does not know, ignored: \['fuse_moe'\]"):
        config = FastLoraConfig.from_pretrained(path)
    assert config.strict is True
    assert not hasattr(config, "fuse_moe")


def test_keywords_fill_fields_that_the_file_lacks_as_in_stock(tmp_path: Path) -> None:
    path = adapter_dir(tmp_path)
    file = tmp_path / "adapter_config.json"
    stored = json.loads(file.read_text())
    del stored["use_rslora"]
    file.write_text(json.dumps(stored))
    assert LoraConfig.from_pretrained(path, use_rslora=True).use_rslora is True
    assert FastLoraConfig.from_pretrained(path, use_rslora=True).use_rslora is True


# -- from_peft_type --------------------------------------------------------------------------------------------------


def test_from_peft_type_gives_our_class() -> None:
    config = FastLoraConfig.from_peft_type(peft_type="LORA", r=3)
    assert type(config) is FastLoraConfig
    assert config.r == 3


def test_from_peft_type_warns_of_unknown_fields_and_drops_them() -> None:
    """PEFT's own tests check this message of forward compatibility."""
    with pytest.warns(UserWarning, match=r"Unexpected keyword arguments \['bar', 'foo'\] for class FastLoraConfig"):
        config = FastLoraConfig.from_peft_type(peft_type="LORA", r=3, foo=1, bar=2)
    assert config.r == 3
    assert not hasattr(config, "foo")


def test_from_peft_type_without_unknown_fields_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FastLoraConfig.from_peft_type(peft_type="LORA", r=3, strict=True)


def test_from_peft_type_needs_peft_type_where_fields_are_unknown() -> None:
    with pytest.raises(TypeError, match=r"The FastLoraConfig config .* is missing required keys: \{'peft_type'\}"):
        FastLoraConfig.from_peft_type(foo=1)


def test_from_peft_type_refuses_another_peft_type() -> None:
    with pytest.raises(ValueError, match="`peft_type` must be 'LORA' for FastLoraConfig, got 'IA3'"):
        FastLoraConfig.from_peft_type(peft_type="IA3")


def test_from_pretrained_refuses_an_adapter_that_is_no_lora(tmp_path: Path) -> None:
    AdaLoraConfig(total_step=10).save_pretrained(str(tmp_path))
    with pytest.raises(ValueError, match="`peft_type` must be 'LORA' for FastLoraConfig, got 'ADALORA'"):
        FastLoraConfig.from_pretrained(str(tmp_path))


def test_peft_config_reads_ours_as_plain_lora(tmp_path: Path) -> None:
    """Without `register(default=True)`, configurations that PEFT reads itself are stock's."""
    assert type(PeftConfig.from_pretrained(adapter_dir(tmp_path, FastLoraConfig))) is LoraConfig


# -- one configuration, several models -------------------------------------------------------------------------------


def test_fuse_does_not_change_a_config_that_another_model_uses() -> None:
    config = LoraConfig(**{**LORA, "task_type": None})
    fused, bystander = get_peft_model(make_net(), config), get_peft_model(make_net(), config)
    fuse(fused)
    assert is_fast(fused)
    bystander.add_adapter("later", LoraConfig(**{**LORA, "task_type": None}))
    assert not is_fast(bystander)
