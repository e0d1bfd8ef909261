"""Load the fast arm's adapter with stock PEFT, as on a machine without peft_fastlora, and compare the logits."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any


class WithoutPackage(MetaPathFinder):
    """Makes importing peft_fastlora fail as it does where it is not installed."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> None:
        if name.partition(".")[0] == "peft_fastlora":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, WithoutPackage())

import torch  # noqa: E402
from demo_model import Settings, load_base, load_tokenizer  # noqa: E402
from demo_train import probe_logits  # noqa: E402
from peft import PeftModel  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers.utils import logging  # noqa: E402


def compare(found: torch.Tensor, expected: torch.Tensor) -> dict[str, float]:
    """The largest difference, its share of the largest logit, and how often both name the same next token."""
    difference = (found - expected).abs().max().item()
    return {
        "max_difference": difference,
        "relative_difference": difference / expected.abs().max().item(),
        "same_next_token": (found.argmax(-1) == expected.argmax(-1)).float().mean().item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", help="JSON")
    parser.add_argument("adapter", type=Path)
    parser.add_argument("work", type=Path, help="folder that holds logits.safetensors of the fast arm")
    args = parser.parse_args()
    logging.disable_progress_bar()
    settings = Settings.from_json(args.settings)

    tokenizer = load_tokenizer(settings)
    model = PeftModel.from_pretrained(load_base(settings), args.adapter).eval()
    expected = load_file(args.work / "logits.safetensors")["logits"]
    adapted = compare(probe_logits(model, tokenizer, settings), expected)
    with model.disable_adapter():
        without_adapter = compare(probe_logits(model, tokenizer, settings), expected)
    assert "peft_fastlora" not in sys.modules
    result = {"adapted": adapted, "without_adapter": without_adapter}
    (args.work / "check.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
