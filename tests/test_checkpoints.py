"""Checkpoints are stock's, in both directions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lifecycle_models import (
    LLAMA_TARGETS,
    MODEL_ULPS,
    NET_NAMES,
    Twins,
    assert_close,
    assert_equal,
    llama_input,
    make_llama,
    make_net,
    make_twins,
    net_input,
    nf4_holder,
    randomize,
    run,
)
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from peft_fastlora import FastLoraConfig, fuse

SIDE_FILE = "fast_lora_config.json"
WEIGHTS = "adapter_model.safetensors"

CONFIGS: dict[str, dict[str, Any]] = {
    "two targets": {"target_modules": ["q_proj", "v_proj"]},
    "all targets": {"target_modules": LLAMA_TARGETS},
    "modules_to_save": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "biases": {"target_modules": LLAMA_TARGETS, "bias": "all"},
    "lora_bias": {"target_modules": ["q_proj"], "lora_bias": True},
    "patterns": {"target_modules": LLAMA_TARGETS, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"up_proj": 1}},
    "dora": {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
}


def llama_twins(**lora: Any) -> Twins:
    return make_twins(lambda: make_llama(attention_bias=True), **{"task_type": "CAUSAL_LM", **lora})


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def tensor_names(path: Path) -> list[str]:
    with safe_open(str(path), framework="pt") as file:
        return list(file.keys())


# -- in this process -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_names_are_stocks(name: str) -> None:
    stock, fast = llama_twins(**CONFIGS[name])
    assert list(fast.state_dict()) == list(stock.state_dict())
    assert [key for key, _ in fast.named_modules()] == [key for key, _ in stock.named_modules()]
    assert [key for key, _ in fast.named_parameters()] == [key for key, _ in stock.named_parameters()]
    assert list(get_peft_model_state_dict(fast)) == list(get_peft_model_state_dict(stock))


@pytest.mark.parametrize("name", CONFIGS)
def test_saved_files_are_stocks_and_the_side_file(name: str, tmp_path: Path) -> None:
    twins = llama_twins(**CONFIGS[name])
    twins.stock.save_pretrained(str(tmp_path / "stock"))
    twins.fast.save_pretrained(str(tmp_path / "fast"))
    ours = files(tmp_path / "fast")
    ours.pop(SIDE_FILE)
    assert ours == files(tmp_path / "stock")
    assert len(tensor_names(tmp_path / "fast" / WEIGHTS)) >= 4


def test_files_of_a_fused_model_are_stocks_and_the_side_file(tmp_path: Path) -> None:
    twins = llama_twins(target_modules=LLAMA_TARGETS)
    twins.stock.save_pretrained(str(tmp_path / "stock"))
    fuse(twins.stock)
    twins.stock.save_pretrained(str(tmp_path / "fast"))
    ours = files(tmp_path / "fast")
    ours.pop(SIDE_FILE)
    assert ours == files(tmp_path / "stock")


def test_several_adapters_are_saved_as_stocks(tmp_path: Path) -> None:
    twins = make_twins()
    for model, cls in zip(twins, (LoraConfig, FastLoraConfig), strict=True):
        model.add_adapter("other", cls(r=2, target_modules=["first"]))
        randomize(model)
        model.save_pretrained(str(tmp_path / cls.__name__))
    ours = files(tmp_path / "FastLoraConfig")
    for folder in (".", "other"):
        assert ours.pop(os.path.normpath(os.path.join(folder, SIDE_FILE)))
    assert ours == files(tmp_path / "LoraConfig")


def test_trained_weights_are_the_ones_in_the_file(tmp_path: Path) -> None:
    model = make_twins().fast
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    before = {key: value.clone() for key, value in get_peft_model_state_dict(model).items()}
    assert run(model, net_input()).fused == set(NET_NAMES)
    optimizer.step()
    model.save_pretrained(str(tmp_path))
    stored = load_file(str(tmp_path / WEIGHTS))
    assert stored.keys() == before.keys() and len(stored) == 6
    for key, value in get_peft_model_state_dict(model).items():
        assert_equal(stored[key], value, key)
        assert not torch.equal(stored[key], before[key]), key


def test_ours_saved_and_loaded_again_is_fast_with_equal_output(tmp_path: Path) -> None:
    model, x = make_twins(options={"strict": True}).fast, net_input()
    model.save_pretrained(str(tmp_path))
    config = FastLoraConfig.from_pretrained(str(tmp_path))
    loaded = PeftModel.from_pretrained(make_net(), str(tmp_path), config=config, is_trainable=True)
    assert loaded.peft_config["default"].strict is True
    result = run(loaded, x)
    assert result.fused == set(NET_NAMES)
    assert_equal(result.output, run(model, x).output)


@pytest.mark.parametrize("into_fast", [False, True], ids=["ours into stock", "stock's into ours"])
def test_state_dicts_load_across(into_fast: bool) -> None:
    twins, x = make_twins(), net_input()
    source, target = twins if into_fast else reversed(twins)
    randomize(source, "other")
    missing = set_peft_model_state_dict(target, get_peft_model_state_dict(source))
    assert not missing.unexpected_keys
    target.load_state_dict(source.state_dict())  # strict
    assert_close(run(target, x).output, run(source, x).output)


def test_a_merged_and_unmerged_model_saves_its_tensors(tmp_path: Path) -> None:
    model = make_twins().fast
    model.merge_adapter()
    model.unmerge_adapter()
    model.save_pretrained(str(tmp_path))
    assert len(tensor_names(tmp_path / WEIGHTS)) == 6


def test_a_merged_and_unloaded_model_saves_as_stocks(tmp_path: Path) -> None:
    twins = llama_twins(target_modules=LLAMA_TARGETS)
    for model, name in zip(twins, ("stock", "fast"), strict=True):
        model.merge_and_unload().save_pretrained(str(tmp_path / name))
    assert files(tmp_path / "fast") == files(tmp_path / "stock")


# -- a process without this package ----------------------------------------------------------------------------------

OTHER_PROCESS = """
import sys
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

folder = sys.argv[1]
x = load_file(folder + "/input.safetensors")["x"]


def base():
    return LlamaForCausalLM.from_pretrained(folder + "/base")


ours = PeftModel.from_pretrained(base(), folder + "/ours")
adapted = [module for module in ours.modules() if hasattr(module, "lora_A")]
assert {type(module).__module__ for module in adapted} == {"peft.tuners.lora.layer"}
torch.manual_seed(5)
targets = ["q_proj", "v_proj", "down_proj"]
theirs = get_peft_model(base(), LoraConfig(r=3, lora_alpha=5, target_modules=targets, init_lora_weights=False))
theirs.save_pretrained(folder + "/theirs")
with torch.no_grad():
    logits = {"ours": ours(x).logits, "theirs": theirs(x).logits}
assert not [name for name in sys.modules if name.startswith("peft_fastlora")], "this process must not know the package"

llama, single = torch.load(folder + "/pickled.pt", weights_only=False)  # imports what the pickle names
names = " ".join(sorted({type(module).__name__ for model in (llama, single) for module in model.modules()}))
logits["llama"] = llama(x).logits.detach()
logits["single"] = single(torch.ones(1, 64)).detach()
with open(folder + "/classes.txt", "w") as file:
    file.write(names)
save_file(logits, folder + "/logits.safetensors")
"""


def run_other_process(folder: Path) -> dict[str, torch.Tensor]:
    root = str(Path(__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", OTHER_PROCESS, str(folder)]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return load_file(str(folder / "logits.safetensors"))


def single_projection() -> nn.Module:
    """A fast model of modules that any process can import: NF4 where bitsandbytes is installed, else dense."""
    try:
        proj = nf4_holder().proj
    except pytest.skip.Exception:
        proj = nn.Linear(64, 64)
    base = nn.Sequential(proj)
    base.is_loaded_in_4bit = type(proj) is not nn.Linear
    model = get_peft_model(base, FastLoraConfig(r=4, target_modules=["0"]))
    randomize(model)
    return model


class OtherProcess(NamedTuple):
    folder: Path
    results: dict[str, torch.Tensor]
    llama: nn.Module
    single: nn.Module


@pytest.fixture(scope="module")
def other_process(tmp_path_factory: pytest.TempPathFactory) -> OtherProcess:
    """What a process that never imports this package made of our adapter and its own, and then of pickled models."""
    folder = tmp_path_factory.mktemp("checkpoints")
    make_llama().save_pretrained(str(folder / "base"))
    save_file({"x": llama_input()}, str(folder / "input.safetensors"))
    llama = get_peft_model(make_llama(), FastLoraConfig(r=4, lora_alpha=10, target_modules=LLAMA_TARGETS))
    randomize(llama)
    llama.save_pretrained(str(folder / "ours"))
    single = single_projection()
    torch.save([llama, single], folder / "pickled.pt")
    return OtherProcess(folder, run_other_process(folder), llama, single)


def test_stock_peft_in_another_process_loads_ours_with_equal_logits(other_process: OtherProcess) -> None:
    here = run(other_process.llama, llama_input())
    assert here.fused == set(LLAMA_TARGETS) and here.stock == set()
    assert_close(other_process.results["ours"], here.output, ulps=MODEL_ULPS)
    with torch.no_grad():
        base = make_llama()(llama_input()).logits
    assert (here.output - base).abs().max() > 0.1  # the adapter was there


@pytest.mark.parametrize("route", ["config", "fuse"])
def test_ours_loads_what_stock_peft_saved_in_another_process(other_process: OtherProcess, route: str) -> None:
    path = str(other_process.folder / "theirs")
    if route == "config":
        config = FastLoraConfig.from_pretrained(path)
        model = PeftModel.from_pretrained(make_llama(), path, config=config, is_trainable=True)
    else:
        model = PeftModel.from_pretrained(make_llama(), path, is_trainable=True)
        fuse(model)
    result = run(model, llama_input())
    assert len(result.nodes) == 6 and result.stock == set()
    assert_close(result.output, other_process.results["theirs"], ulps=MODEL_ULPS)


def test_pickled_models_load_in_another_process(other_process: OtherProcess) -> None:
    classes = set((other_process.folder / "classes.txt").read_text().split())
    for model in (other_process.llama, other_process.single):
        assert {type(module).__name__ for module in model.modules()} <= classes
    assert "FastLoraLinear" in classes
    assert_close(other_process.results["llama"], other_process.llama(llama_input()).logits.detach(), ulps=MODEL_ULPS)
    assert_close(other_process.results["single"], other_process.single(torch.ones(1, 64)).detach())
