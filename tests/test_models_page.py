"""docs/models.md says what detection finds (a sample: the whole page takes minutes to generate)."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from peft_fastlora.activations import activation_of
from peft_fastlora.detect import Block, block_of
from peft_fastlora.guards import is_linear

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
NEWEST = re.search(r"with transformers ([\w.]+);", PAGE.read_text())

# class of transformers -> how to build it
SAMPLE = {
    "llama.LlamaMLP": {},
    "qwen3.Qwen3MLP": {},
    "gemma2.Gemma2MLP": {"hidden_activation": "gelu_pytorch_tanh"},
    "mistral.MistralMLP": {},
    "deepseek_v3.DeepseekV3MLP": {},
    "phi3.Phi3MLP": {"pad_token_id": 0},
    "glm4.Glm4MLP": {},
    "clip.CLIPMLP": "CLIPTextConfig",
    "siglip.SiglipMLP": "SiglipTextConfig",
    "nemotron.NemotronMLP": {},
    "arcee.ArceeMLP": {},
    "phi.PhiMLP": {},
    "falcon.FalconMLP": {},
    "lfm2.Lfm2MLP": {},
    "seed_oss.SeedOssMLP": {},
    "falcon_h1.FalconH1MLP": {},
    "gemma3n.Gemma3nTextMLP": "Gemma3nTextConfig",
    "bitnet.BitNetMLP": {},
}


def page_rows() -> list[tuple[str, ...]]:
    """(model, class, form, activation, path, built)."""
    cells = [line.strip("|\n").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [tuple(cell.strip(" `|").replace("\\<", "<") for cell in row) for row in cells if len(row) == 6]


ROWS = page_rows()[1:]


def make(name: str) -> nn.Module:
    folder, _, cls = name.partition(".")
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    given = SAMPLE[name]
    found = importlib.import_module(f"transformers.models.{folder}.configuration_{folder}")
    prefix = re.sub(r"(Text)?MLP$", "", cls)
    config = getattr(found, given if isinstance(given, str) else f"{prefix}Config")(
        **({} if isinstance(given, str) else given)
    )
    with torch.device("meta"):
        kind = getattr(module, cls)
        return kind(config, layer_idx=0) if cls == "Gemma3nTextMLP" else kind(config)


@pytest.mark.skipif(NEWEST is None or NEWEST[1] != transformers.__version__, reason="the page is for another release")
@pytest.mark.parametrize("name", SAMPLE)
def test_page_says_what_detection_finds(name):
    folder, _, cls = name.partition(".")
    rows = [row for row in ROWS if row[:2] == (folder, cls)]
    module = make(name)
    block = block_of(module)
    if isinstance(block, str):
        assert [row[2:5] for row in rows] == [("", "", block)]
        return
    children = [module._modules[child] for child in block.projections]
    plain = all(is_linear(child) for child in children)
    held = activation_of(module._modules[block.activation]) if isinstance(block.activation, str) else block.activation
    found = {(form, path == "fused") for _, _, form, _, path, _ in rows}
    assert found == {(block.form, plain)}
    # one for each activation seen in a built model; a model that was not built shows none
    assert held.name in {row[3] for row in rows} or {row[3:6:2] for row in rows} == {("", "")}


EXPECTED = {
    "llama.LlamaMLP": ("gated", "silu", "fused"),
    "gemma2.Gemma2MLP": ("gated", "gelu_tanh", "fused"),
    "phi3.Phi3MLP": ("packed", "silu", "fused"),
    "clip.CLIPMLP": ("plain", "quick_gelu", "fused"),
    "arcee.ArceeMLP": ("plain", "relu_squared", "fused"),
    "falcon.FalconMLP": ("plain", "gelu", "fused"),
    "lfm2.Lfm2MLP": ("gated", "silu", "fused"),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_well_known_blocks_are_on_the_page(name):
    assert [".".join(row[:2]) for row in ROWS if row[2:5] == EXPECTED[name]].count(name) == 1


@pytest.mark.parametrize(
    "name, word",
    [("seed_oss.SeedOssMLP", "dropout"), ("falcon_h1.FalconH1MLP", "multiplier"), ("bitnet.BitNetMLP", "")],
)
def test_other_formulas_are_on_the_page_with_their_reason(name, word):
    (row,) = [row for row in ROWS if ".".join(row[:2]) == name]
    assert row[2] == ""
    assert row[4].startswith("its forward ")
    assert word in row[4]


def test_counts_at_the_top_are_those_of_the_rows():
    text = PAGE.read_text()
    for form in ("gated", "packed", "plain"):
        classes = {row[:2] for row in ROWS if row[2] == form and row[4] == "fused"}
        assert f"| {form}, fused | {len(classes)} | {len({model for model, _ in classes})} |" in text
    assert len({row[:2] for row in ROWS if row[2] == "gated" and row[4] == "fused"}) >= 140
    assert "python scripts/list_models.py" in text


@pytest.mark.parametrize("name", ["llama.LlamaMLP", "phi3.Phi3MLP", "clip.CLIPMLP"])
def test_the_oldest_transformers_has_the_same_structures(name):
    """The page is for the newest release; what people use most is the same in all."""
    block = block_of(make(name))
    assert isinstance(block, Block)
    assert block.form == EXPECTED[name][0]
